"""Cosine similarity of the logits as the soft loss: beta (1 - <s, t> / (|s| |t|)) of each row,
which no temperature changes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_distillation import DistillationLoss, FunctionWithKernel

__all__ = ["LigerFusedLinearCosineSimilarityFunction", "LigerFusedLinearCosineSimilarityLoss"]


class LigerFusedLinearCosineSimilarityFunction(FunctionWithKernel):
    """``apply`` takes student_input, student_weight, teacher_input, teacher_weight, true_labels,
    biases, then the options of the loss, by position."""

    kind = "cosine"

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor | None = None,
        ignore_index: int | None = None,
        beta: float = 1.0,
    ) -> Tensor:
        """Summed over the rows that are not ignored."""
        loss = beta * (1 - F.cosine_similarity(student_logits, teacher_logits, dim=-1))
        return (loss if target is None or ignore_index is None else loss.where(target != ignore_index, 0)).sum()


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Cross entropy of the next token and cosine similarity of the logits.

    Call it with the student's input and weight, the teacher's, labels and biases: (..., H), (V, H),
    (..., H), (V, H), (...,), (V,), (V,). ``compact`` omits ignored tokens from all products, and
    waits once for their number. ``compiled`` and ``chunk_size`` have no effect.
    """

    kind = "cosine"
