"""The published functions of KL divergence from given probabilities under a linear head; the
operator is ``linear_divergence``.

Shapes: student_input (M, H), student_weight (V, H), target p (M, V), shift_labels (M,).
With log q = log_softmax(student_input student_weight^T / temperature):

    loss = sum over rows and classes of p (log max(p, eps) - log q),  over n ("batchmean"), n V
    ("mean") or 1 ("sum")

where n counts the rows whose label is not ``ignore_index``. It is not multiplied by temperature^2.
Where no row counts, loss and gradients are 0: unlike those of a mean in torch, NaN of nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.divergence.by_element import counted
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence

REDUCTIONS = ("batchmean", "mean", "sum")


class LigerFusedLinearKLDivFunction:
    """``apply`` is differentiable in student_input (M, H) and student_weight (V, H)."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
        compact: bool | Kept = False,
    ) -> Tensor:
        """KL(target || softmax(student_input student_weight^T / temperature)), 0-dim fp32, in
        chunks of tokens whose logits are never held together.

        Probabilities that ask for a gradient are refused: there is none. ``accum_dtype``,
        ``compact``: as in ``linear_cross_entropy``.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"fused_linear_kl_div: reduction must be one of {REDUCTIONS}, got {reduction!r}")
        n = (
            counted(student_input, shift_labels, ignore_index) * student_weight.shape[0]
            if reduction == "mean"
            else None
        )
        options = dict(
            kind="forward_kl",
            temperature=temperature,
            eps=eps,
            ignore_index=ignore_index,
            accum_dtype=accum_dtype,
            compact=compact,
        )
        how = dict(reduction="sum" if reduction == "sum" else "mean", num_items=n)
        loss = linear_divergence(
            student_input, student_weight, target=shift_labels, teacher_probs=target, **options, **how
        )
        assert isinstance(loss, Tensor)  # no parts were asked for
        return loss


def fused_linear_kl_div_forward(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None,
    reduction: str,
    ignore_index: int,
    has_label: bool,
    temperature: float,
    eps: float,
    accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Without autograd: the loss, and the gradients of student_input and student_weight for
    ``_backward``."""
    x, w = (t.detach().requires_grad_() for t in (student_input, student_weight))
    with torch.enable_grad():
        labels = shift_labels if has_label else None
        loss = LigerFusedLinearKLDivFunction.apply(
            x, w, target, labels, reduction, ignore_index, temperature, eps, accum_dtype
        )
        dx, dw = torch.autograd.grad(loss, (x, w))
    return loss.detach(), dx, dw


def fused_linear_kl_div_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients times that of the loss, as new tensors."""
    return grad_input * grad_output, None if grad_weight is None else grad_weight * grad_output
