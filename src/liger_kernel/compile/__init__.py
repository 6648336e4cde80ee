"""Kernels compiled before they are needed, for a GPU that need not be there, and the cache that holds them."""
