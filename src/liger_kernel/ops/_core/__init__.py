"""What an operator is, how it is launched and configured, and the pieces of kernels that all share."""
