"""Benchmark cases of ``ops/losses/vocab_parallel``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import Measured, real
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.cross_entropy import targets


def _cross_entropy_torch(
    logits, target, group=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options
):
    if any(options.values()):
        raise NotImplementedError
    logits, target = logits.float().flatten(0, -2), target.flatten()
    return F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def _linear_cross_entropy_small(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


MEASURED = {
    "vocab_parallel_cross_entropy": Measured(
        cases=[
            real("llama3-tp8", logits=T((8192, 16032)), target=targets(8192, 16032)),
            real("llama3-tp2", logits=T((4096, 64128)), target=targets(4096, 64128), label_smoothing=0.1),
        ],
        rivals={"torch": _cross_entropy_torch},
    ),
    "vocab_parallel_linear_cross_entropy": Measured(
        cases=[
            real(
                "llama3-8b-tp8",
                x=T((4096, 4096)),
                w=T((16032, 4096), _linear_cross_entropy_small),
                target=targets(4096, 16032),
            )
        ]
    ),
}
