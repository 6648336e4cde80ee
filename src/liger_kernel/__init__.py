"""Fused Triton kernels for LLM training.

Importing this package is instant: it loads neither torch nor Triton and needs no GPU.
"""

__version__ = "0.8.90"
