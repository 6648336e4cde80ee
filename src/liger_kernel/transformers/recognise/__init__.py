"""What can be swapped in a model of transformers, and how to know that the swap is right."""
