"""RMSNorm with the constructor that Megatron-core's layer specs call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.norms.rms_norm import rms_norm


class LigerMegatronRMSNorm(nn.Module):
    """``x / rms(x) * weight``, or with ``zero_centered_gamma`` (here or in ``config``) ``* (1 +
    weight)``; rounded once, as in ``torch.nn.RMSNorm``.

    Under ``config.sequence_parallel`` the weight is marked, so that Megatron sums its gradient over
    the tensor-parallel ranks. ``persist_layer_norm``, which chooses among Apex's kernels, has no
    effect. Raises ``ValueError`` for another normalization, here or in ``config``.
    """

    # fmt: skip, as Megatron names these and we only take them
    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ):
        super().__init__()
        for said in (normalization, getattr(config, "normalization", "RMSNorm")):
            if said != "RMSNorm":
                raise ValueError(f"LigerMegatronRMSNorm: normalization must be 'RMSNorm', got {said!r}")
        self.config, self.hidden_size, self.eps = config, hidden_size, eps
        self.zero_centered_gamma = zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered_gamma else torch.ones(hidden_size))
        setattr(self.weight, "sequence_parallel", getattr(config, "sequence_parallel", False))  # noqa: B010  a Parameter declares no such attribute

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight) if self.zero_centered_gamma else nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0 if self.zero_centered_gamma else 0.0, casting="gemma")

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
