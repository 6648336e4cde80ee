"""Fused Triton kernels for LLM training.

Importing this package is instant: it loads neither torch nor Triton and needs no GPU.
"""

from liger_kernel import _legacy

__version__ = "0.8.90"

_legacy.install()
