"""The functions of ``liger_kernel.nn``, where published users import them from."""

from liger_kernel.nn import (
    CrossEntropyOutput,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
    liger_geglu,
    liger_rms_norm,
    liger_rope,
    liger_swiglu,
)

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_rms_norm",
    "liger_rope",
    "liger_swiglu",
]
