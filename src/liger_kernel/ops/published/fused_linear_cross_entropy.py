"""The published functions of ``linear_cross_entropy``, with and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import with_gradients
from liger_kernel.ops.losses.linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction as LigerFusedLinearCrossEntropyFunction,
)
from liger_kernel.ops.published.utils import MAX_FUSED_SIZE as MAX_FUSED_SIZE


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
    ce_impl: str | None = None,
    ce_mode: str | None = None,
    token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None,
    weight_requires_grad: bool | None = None,
    chunk_mem_const: float = 1,
) -> tuple[Tensor | None, ...]:
    """Loss, z-loss, token accuracy and predicted classes, None if not requested, then the gradients
    of _input, weight and bias for ``_backward``.

    _input (M, H), weight (V, H), target (M,), bias (V,), ce_weight (V,). With ``reduction="none"``
    the gradients are those of the sum,
    or of the sum weighted by ``token_grad_output`` (M,). ``compute_gradients=False`` and
    ``weight_requires_grad=False`` leave them out; ``chunk_mem_const`` is accepted and ignored.
    """

    def loss(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor | None, ...]:
        numbers = (
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
        )
        rest = return_token_accuracy, return_predicted_tokens, ce_impl, ce_mode
        return LigerFusedLinearCrossEntropyFunction.apply(x, w, target, b, ce_weight, *numbers, *rest)

    if compute_gradients is False:
        with torch.no_grad():
            return *loss(_input, weight, bias), None, None, None
    found, (dx, dw, db) = with_gradients(loss, _input, weight, bias)
    if token_grad_output is not None:  # the gradients are of the tokens' losses times these
        dx, dw, db = with_gradients(lambda *leaves: (loss(*leaves)[0] * token_grad_output,), _input, weight, bias)[1]
    return *found, dx, dw if weight_requires_grad is not False else None, db


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of a reduced loss times that of the loss, as new tensors."""
    scaled = lambda g: g if g is None else g * grad_output
    return grad_input * grad_output, scaled(grad_weight), scaled(grad_bias)
