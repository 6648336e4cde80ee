"""The cross entropy of Megatron-core's tensor-parallel output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_kernel.nn import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """``LigerVocabParallelCrossEntropy`` with Megatron's label smoothing over each rank's own
    classes. Returns a loss per token (S, B) of logits (S, B, N).

    Raises ``ValueError`` for a ``reduction`` other than "none", and for logits with other
    dimensions: in Megatron the sequence is the first one.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "megatron",
        label_smoothing_mode: str = "partition",
    ):
        if reduction != "none":
            raise ValueError(f"{type(self).__name__}: reduction must be 'none', got {reduction!r}")
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        if vocab_parallel_logits.ndim != 3:
            raise ValueError(
                f"{type(self).__name__}: logits must be 3-D, (sequence, batch, classes), got "
                f"{tuple(vocab_parallel_logits.shape)}"
            )
        return super().forward(vocab_parallel_logits, target, tp_group)
