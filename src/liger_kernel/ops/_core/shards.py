"""Operators on rows of DTensors: every rank computes its own rows, and nothing is gathered
(sequence parallelism: arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor, by the name of its class: few programs use DTensors, and
    importing the class takes long."""
    return type(x).__name__ == "DTensor"


def has_split_rows(x: Any) -> bool:
    """Whether the last dim of a DTensor is spread over ranks."""
    return any(p.is_shard() and p.dim % x.ndim == x.ndim - 1 for p in x.placements)


def attempt(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(...)`` of the operator ``name``. Where it fails and was given DTensors,
    ``ValueError`` says what to give instead."""
    if torch.compiler.is_compiling():
        return fn(*args, **kwargs)
    try:
        return fn(*args, **kwargs)
    # what DTensor's dispatch raises; other exceptions may steer a program, as those by which
    # checkpoints stop a forward
    except (RuntimeError, IndexError, TypeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(map(is_sharded, (*args, *kwargs.values()))):
            raise
        raise ValueError(
            f"{name}: tensors must be plain, got a DTensor, which PyTorch cannot split here: "
            "give its to_local(), where this rank has all that its rows need, or its full_tensor()"
        ) from error


def own_part(x: Any, grad_placements: Any) -> Tensor:
    """``x.to_local(grad_placements=...)`` of a DTensor, which keeps these placements under
    ``torch.compile``, too.

    AOTAutograd makes a view that leaves its graph anew from the view's base, and knows nothing of
    placements: the gradients of ranks would not be summed. A copy is no view.
    """
    own = x.to_local(grad_placements=grad_placements)
    return own.clone() if torch.compiler.is_compiling() else own


def on_own_rows(fn: Callable[..., Tensor], x: Any, *weights: Tensor | None, **options: Any) -> Tensor | None:
    """``fn(x, *weights, **options)`` of a DTensor x (..., N) with whole rows; None if rows are
    split. Gradients of weights (N,) are summed over ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = x.device_mesh, x.placements
    if has_split_rows(x) or any(p.is_partial() for p in placements):
        return None
    terms = [Partial() if p.is_shard() else Replicate() for p in placements]

    def local(w: Any) -> Tensor | None:
        if w is None:
            return None
        w = w if isinstance(w, DTensor) else DTensor.from_local(w, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return own_part(w.redistribute(placements=[Replicate()] * mesh.ndim), terms)

    y = fn(x.to_local(), *map(local, weights), **options)
    return DTensor.from_local(
        y, mesh, placements, run_check=False, shape=x.shape, stride=torch.empty(x.shape, device="meta").stride()
    )
