"""The published function of generalised JSD between two linear heads; the operator is ``linear_divergence``."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._linear import Kept
from liger_kernel.ops.linear_divergence import linear_divergence


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
        compact: bool | Kept = False,
    ) -> Tensor:
        """The mean over tokens that are not ignored of beta KL(p || m) + (1 - beta) KL(q || m), as in ``LigerFusedLinearJSD``."""
        return linear_divergence(  # type: ignore[return-value]
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            beta=jsd_beta,
            ignore_index=ignore_index,
            temperature=temperature,
            accum_dtype=accum_dtype,
            compact=compact,
        )
