"""Losses of logits and of a linear head, as modules."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.compat.functions import (
    CrossEntropyOutput,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
)
from liger_kernel.nn.options import WithOptions
from liger_kernel.ops.losses.cross_entropy_rows import REDUCTIONS
from liger_kernel.ops.losses.divergence.fused_ce_tvd import fused_ce_tvd
from liger_kernel.ops.losses.divergence.probabilities import jsd, kl_div, tvd
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import validate_formula_and_mode, vocab_parallel_cross_entropy

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearKLDivLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerTVDLoss",
    "LigerVocabParallelCrossEntropy",
]


class LigerCrossEntropyLoss(WithOptions):
    """Cross entropy of logits (M, V) and class indices (M,); the logits are not overwritten.

    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

    buffers_of = ("weight",)

    weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, **self.options())


class LigerFusedLinearCrossEntropyLoss(WithOptions):
    """Cross entropy of ``_input @ lin_weight.T + bias`` and class indices (M,), without storing the
    logits. _input (M, H), lin_weight (V, H).

    ``accum_dtype``: the dtype in which the weight's gradient is summed. ``use_token_scaling``:
    multiply by the detached probability of the target. ``compact``, ``chunk_rows``,
    ``fp32_logits``, ``fp8``, and ``num_items`` of a call: see ``linear_cross_entropy``.

    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

    buffers_of = ("ce_weight",)

    ce_weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    _: KW_ONLY
    compact: bool = False
    chunk_rows: int | None = None
    fp32_logits: bool = False
    fp8: str | None = None

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None, *,
        num_items: Tensor | float | None = None,
    ) -> Tensor | CrossEntropyOutput:  # fmt: skip
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, num_items=num_items, **self.options())


class LigerJSD(WithOptions):
    """Generalised Jensen-Shannon divergence of log-probabilities (M, V); ``beta=0`` is KL(p ||
    q), ``beta=1`` KL(q || p)."""

    beta: float = 0.5
    ignore_index: int = -100

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(log_q, log_p, shift_labels, **self.options())


class LigerKLDIVLoss(nn.KLDivLoss):
    """``nn.KLDivLoss`` with a lower bound ``eps`` for the probabilities inside the logarithm;
    the other arguments are those of PyTorch."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps!r}"

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)


class LigerTVDLoss(WithOptions):
    """Total variation distance of probabilities (M, V)."""

    reduction: str = "batchmean"
    ignore_index: int = -100

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return tvd(p, q, shift_labels, **self.options())


class LigerVocabParallelCrossEntropy(WithOptions):
    """Cross entropy of this rank's slice of the logits (..., N) and indices among all classes
    (...), over the ranks of ``tp_group``.

    ``label_smoothing_formula``: "pytorch" or "megatron". ``label_smoothing_mode``: over the
    "global" classes or over this rank's "partition".
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "pytorch"
    label_smoothing_mode: str = "global"

    def check(self) -> None:
        validate_formula_and_mode(self.label_smoothing_formula, self.label_smoothing_mode)
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{type(self).__name__}: reduction must be one of {REDUCTIONS}, got {self.reduction!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"{type(self).__name__}: label_smoothing must be in [0, 1), got {self.label_smoothing}")

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        options = {name.removeprefix("label_smoothing_"): value for name, value in self.options().items()}
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group, **options)


class LigerFusedLinearJSD(WithOptions):
    """beta KL(p || m) + (1 - beta) KL(q || m) of student q and teacher p (arXiv:2306.13649), with m
    = beta p + (1 - beta) q, without storing logits.

    Returns the mean over the tokens that are not ignored. The teacher gets no gradient.
    ``accum_dtype``: the dtype in which the weight's gradient is summed.
    """

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def check(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"LigerFusedLinearJSD: temperature must be positive, got {self.temperature}")

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, **self.options()
        )


class LigerFusedLinearKLDivLoss(WithOptions):
    """KL(p || q) of q = softmax(student_input student_weight^T / temperature) from a teacher's
    probabilities p, without storing the student's logits.

    ``forward(student_input, student_weight, target, shift_labels=None)``: (M, H), (V, H), p (M, V)
    in any floating-point dtype, and labels (M,). Rows whose label is ``ignore_index`` are omitted.
    Returns 0-dim fp32: the sum of p (log max(p, eps) - log q), divided by the number of counted
    rows ("batchmean"), by the number of their elements ("mean"), or not divided ("sum"), as in
    ``torch.nn.KLDivLoss``. It is not multiplied by temperature^2, and 0 if no row counts. Raises
    ``ValueError`` if p requires a gradient, because it gets none. ``accum_dtype``: the dtype in
    which the weight's gradient is summed.
    """

    reduction: str = "batchmean"
    ignore_index: int = -100
    temperature: float = 1.0
    eps: float = 1e-10
    accum_dtype: torch.dtype | None = None

    def check(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"LigerFusedLinearKLDivLoss: temperature must be positive, got {self.temperature}")

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, **self.options())


class LigerFusedCETVDLoss(WithOptions):
    """Cross entropy, and total variation distance from a teacher, of each token in one pass over
    the logits.

    ``forward(student_logits, teacher_logits, target)``: (M, V), (M, V), (M,). Returns ``(ce,
    tvd)``, fp32 (M,) each, 0 where the target is ``ignore_index``. Both are differentiable in the
    student's logits; the teacher is constant.
    """

    ignore_index: int = -100

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return fused_ce_tvd(student_logits, teacher_logits, target, **self.options())
