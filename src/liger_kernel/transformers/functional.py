"""The functions of ``liger_kernel.nn``, where published users import them from."""

from liger_kernel.nn import (
    CrossEntropyOutput,
    liger_cross_entropy,
    liger_dyt,
    liger_fused_add_rms_norm,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_geglu,
    liger_jsd,
    liger_kl_div,
    liger_layer_norm,
    liger_rms_norm,
    liger_rope,
    liger_softmax,
    liger_sparsemax,
    liger_swiglu,
    liger_tvd,
)

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_geglu",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]
