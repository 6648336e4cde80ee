"""Linear layers, and the MLPs and experts that consist of them."""
