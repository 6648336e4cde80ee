"""Settings of native kernels that the published package takes from another wheel. Ours need
none: everything here is accepted and has no effect."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FusedLinearCrossEntropyConfig", "MoEConfig", "configure"]


@dataclass(frozen=True)
class _Capacity:
    max_tokens: int
    hidden_size: int


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig(_Capacity):
    """How large a head's scaled cross entropy may be, and the group of ranks that share its
    vocabulary."""

    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig(_Capacity):
    """How large a mixture of experts may be, and the ranks it is spread over."""

    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(
    *,
    process_groups: Mapping[str, Any] | None = None,
    bootstrap_group: Any = None,
    device: Any = None,
    flsce: FusedLinearCrossEntropyConfig | None = None,
    moe: MoEConfig | None = None,
) -> bool:
    """False, and a warning: there are no native kernels (NVSHMEM, CuTe) to prepare. Ours
    allocate what they need when they are called."""
    warnings.warn(
        "liger_kernel.ops.configure: there are no native kernels here to configure; the Triton kernels need no setup",
        stacklevel=2,
    )
    return False
