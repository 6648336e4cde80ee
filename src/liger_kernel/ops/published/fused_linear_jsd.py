"""The published function of generalised JSD between two linear heads; the operator is
``linear_divergence``."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.operator import with_gradients
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence


class LigerFusedLinearJSDFunction:
    """``apply`` is differentiable in student_input (M, Hs) and student_weight (V, Hs)."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
        compact: bool | Kept = False,
    ) -> Tensor:
        """The mean over tokens that are not ignored of beta KL(p || m) + (1 - beta) KL(q || m),
        as in ``LigerFusedLinearJSD``."""
        only_ours("fused_linear_jsd", jsd_impl, jsd_mode)
        options = dict(
            beta=jsd_beta, ignore_index=ignore_index, temperature=temperature, accum_dtype=accum_dtype, compact=compact
        )
        loss = linear_divergence(student_input, student_weight, teacher_input, teacher_weight, shift_labels, **options)
        assert isinstance(loss, Tensor)  # no parts were asked for
        return loss


def fused_linear_jsd_forward(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None,
    jsd_beta: float,
    ignore_index: int,
    has_label: bool,
    temperature: float,
    jsd_impl: str | None = None,
    jsd_mode: str | None = None,
    accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Without autograd: the loss, and its gradients to student_input and student_weight.
    ``has_label``: whether ``shift_labels`` count."""
    labels = shift_labels if has_label else None
    rest = teacher_input, teacher_weight, labels, jsd_beta, ignore_index, temperature, accum_dtype, jsd_impl, jsd_mode
    loss, (dx, dw) = with_gradients(
        lambda x, w: LigerFusedLinearJSDFunction.apply(x, w, *rest), student_input, student_weight
    )
    return loss, dx, dw


def fused_linear_jsd_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Those gradients times that of the loss, as new tensors."""
    return grad_input * grad_output, None if grad_weight is None else grad_weight * grad_output
