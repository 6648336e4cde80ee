"""The functions of ``liger_kernel.nn``, under the import path of LinkedIn's package."""

from __future__ import annotations

from typing import Any

from liger_kernel import ops
from liger_kernel.nn import (
    CrossEntropyOutput,
    liger_attn_res,
    liger_cross_entropy,
    liger_dyt,
    liger_fused_add_rms_norm,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_fused_linear_scaled_cross_entropy_tp,
    liger_fused_neighborhood_attention,
    liger_geglu,
    liger_group_norm,
    liger_jsd,
    liger_kl_div,
    liger_layer_norm,
    liger_mhc_apply,
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
    liger_modulated_rms_norm,
    liger_multi_token_attention,
    liger_poly_norm,
    liger_qk_norm_rope,
    liger_qwen2vl_mrope,
    liger_relu_squared,
    liger_rms_norm,
    liger_rope,
    liger_softmax,
    liger_sparsemax,
    liger_swiglu,
    liger_tvd,
)

__all__ = [
    "CrossEntropyOutput",
    "liger_attn_res",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_fused_neighborhood_attention",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_poly_norm",
    "liger_qk_norm_rope",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]


def __getattr__(name: str) -> Any:  # published users import the operators' Functions from here too
    if name.startswith("Liger") and name.endswith("Function"):
        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
