"""The cross entropy of Megatron-core's tensor-parallel output layer."""

from __future__ import annotations

from liger_kernel.nn import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """``LigerVocabParallelCrossEntropy`` with Megatron's label smoothing, over each rank's own classes, and a loss per token."""

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "megatron",
        label_smoothing_mode: str = "partition",
    ):
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)
