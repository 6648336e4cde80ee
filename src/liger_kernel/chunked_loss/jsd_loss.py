"""Generalised Jensen-Shannon divergence as the soft loss (arXiv:2306.13649, equation 1).

With q the student's distribution, p the teacher's and m = beta p + (1 - beta) q, a row's soft loss
is beta KL(p || m) + (1 - beta) KL(q || m);
beta = 0 means KL(p || q), beta = 1 means KL(q || p).
"""

from __future__ import annotations

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_distillation import DistillationLoss, FunctionWithKernel
from liger_kernel.ops.losses.divergence.logit_divergence import logit_divergence

__all__ = ["LigerFusedLinearJSDFunction", "LigerFusedLinearJSDLoss"]


class LigerFusedLinearJSDFunction(FunctionWithKernel):
    """``apply`` takes student_input, student_weight, teacher_input, teacher_weight, true_labels,
    biases, then the options of the loss, by position."""

    kind = "jsd"

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor,
        teacher_logits: Tensor,
        beta: float = 0.5,
        target: Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """The divergence, summed over the rows that are not ignored."""
        return logit_divergence(
            student_logits, teacher_logits, target, beta=beta, ignore_index=ignore_index, reduction="sum"
        )


class LigerFusedLinearJSDLoss(DistillationLoss):
    """Cross entropy and JSD of the next token.

    Call it with the student's input and weight, the teacher's, labels and biases: (..., H), (V, H),
    (..., H), (V, H), (...,), (V,), (V,). ``compact`` omits ignored tokens from all products, and
    waits once for their number. ``compiled`` and ``chunk_size`` have no effect.
    """

    kind = "jsd"
