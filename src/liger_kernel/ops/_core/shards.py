"""Operators on rows of DTensors: every rank computes its own rows, and nothing is gathered (sequence parallelism: arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor, by the name of its class: few programs use DTensors, and importing the class takes long."""
    return type(x).__name__ == "DTensor"


def on_own_rows(fn: Callable[..., Tensor], x: Any, *weights: Tensor | None, **options: Any) -> Tensor | None:
    """``fn(x, *weights, **options)`` of a DTensor x (..., N) with whole rows; None if rows are split. Gradients of weights (N,) are summed over ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = x.device_mesh, x.placements
    if any(p.is_partial() or (p.is_shard() and p.dim % x.ndim == x.ndim - 1) for p in placements):
        return None
    terms = [Partial() if p.is_shard() else Replicate() for p in placements]

    def local(w: Any) -> Tensor | None:
        if w is None:
            return None
        w = w if isinstance(w, DTensor) else DTensor.from_local(w, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return w.redistribute(placements=[Replicate()] * mesh.ndim).to_local(grad_placements=terms)

    y = fn(x.to_local(), *map(local, weights), **options)
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=torch.empty(x.shape, device="meta").stride())
