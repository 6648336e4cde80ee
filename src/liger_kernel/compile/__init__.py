"""Compile kernels in advance, also for a GPU that this machine lacks, and the cache that stores
them."""
