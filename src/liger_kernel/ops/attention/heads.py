"""Tensors of attention, (B, H, T, D)."""

from __future__ import annotations

from torch import Tensor

from liger_kernel.ops._core.operator import swapped


def new_like(q: Tensor, needed: bool = True) -> Tensor:
    """A new tensor like ``q`` with the memory layout (B, T, H, D), which the projections around
    attention read and write; empty if it is not needed."""
    B, H, length, D = q.shape
    return swapped(q.new_empty(B, length, H, D)) if needed else q.new_empty(0, 0, 0, 0)


def unit(t: Tensor) -> Tensor:
    """``t`` with dense rows."""
    return t if t.stride(-1) == 1 else t.contiguous()
