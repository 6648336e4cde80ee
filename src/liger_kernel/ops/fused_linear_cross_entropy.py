"""The published functions of ``linear_cross_entropy``, with and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops.linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.utils import MAX_FUSED_SIZE as MAX_FUSED_SIZE


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:
    """Loss, z-loss, token accuracy and predicted classes, None where not asked for, then the gradients of _input, weight and bias for ``_backward``.

    _input (M, H), weight (V, H), target (M,), bias (V,), ce_weight (V,). With ``reduction="none"`` the gradients are those of the sum.
    """
    leaves = [t.detach().requires_grad_() for t in (_input, weight, *([] if bias is None else [bias]))]
    with torch.enable_grad():
        x, w, *b = leaves
        found = LigerFusedLinearCrossEntropyFunction.apply(
            x, w, target, b[0] if b else None, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
            use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        grads = torch.autograd.grad(found[0].sum(), leaves)
    return (*(t if t is None else t.detach() for t in found), *grads, *([None] if bias is None else []))


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of a reduced loss times that of the loss, as new tensors."""
    scaled = lambda g: g if g is None else g * grad_output
    return grad_input * grad_output, scaled(grad_weight), scaled(grad_bias)
