"""Second stages shared by operators: a deterministic column sum, and scaling by a number that is
on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.operator import acc, launch, launcher, use_kernels
from liger_kernel.ops._core.saved import graph_is_kept
from liger_kernel.ops._core.tl import cdiv, jit, tl


@jit
def _column_sum(x_ptr, y_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        total += tl.load(
            x_ptr + row[:, None].to(tl.int64) * N + col[None, :],
            mask=(row[:, None] < P) & (col[None, :] < N),
            other=0.0,
        )
    tl.store(y_ptr + col, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty), mask=col < N)


def column_sum(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of (P, N) fp32 ``partials`` over P in a fixed order, as (N,) of ``dtype``: one launch.
    Called by launchers. (N,) are sums already, and (0,) one that is not needed."""
    if partials.ndim == 1:
        return partials
    P, N = partials.shape
    y = partials.new_empty(N, dtype=dtype)
    # H200: 528 x 256 2.9 us, 264 x 2048 3.4; tiles of 32 x 32 9.6 and 6.1. 132 x 16384: 5.4 and 5.9
    tile = dict(BLOCK_P=256, BLOCK_N=8, num_warps=8) if N <= 4096 else dict(BLOCK_P=64, BLOCK_N=16, num_warps=4)
    launch(_column_sum, (cdiv(N, tile["BLOCK_N"]),), partials, y, P, N, **tile)
    return y


@jit
def _scale(x_ptr, s_ptr, n, BLOCK: tl.constexpr):
    s = tl.load(s_ptr).to(tl.float32)
    # the common case, ``loss.backward()``, costs a launch and no traffic; so does a number that was
    # divided and multiplied by
    # written so that a NaN is not skipped
    if (tl.abs(s - 1.0) <= 2e-7) == 0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offset, mask=offset < n, other=0.0)
            tl.store(x_ptr + offset, tl.where(x == 0, 0.0, x.to(tl.float32) * s).to(x.dtype), mask=offset < n)


@launcher("(Tensor(a!) x, Tensor s) -> ()")
def scale_(x, s) -> None:
    """x *= s, but 0 stays 0 even if ``s`` is not finite: without contributing tokens there is no
    gradient, even if a sum was divided by 0 tokens."""
    if use_kernels(x):
        programs = min(cdiv(x.numel(), 8192), 8 * launch_config.processors())
        launch(_scale, (programs,), x, s, x.numel(), BLOCK=8192, num_warps=8)
    else:
        nothing = x == 0
        x.mul_(s).masked_fill_(nothing, 0)


def scaled_rows(t: Tensor, g: Tensor) -> Tensor:
    """``t`` (M, N) times ``g`` (M, 1), rounded once, in place if this backward is its last use."""
    return torch.mul(t, g, out=torch.empty_like(t) if graph_is_kept() else t)


def scaled(grads: Sequence[Tensor | None], g: Tensor, norm: Tensor | None = None) -> Sequence[Tensor | None]:
    """``grads`` times the 0-dim upstream gradient ``g``, in place if this backward is their last use.

    Our forward computed and saved them. With a retained graph, they stay unscaled for the next
    backward. ``norm``: 0-dim, by which the forward has not yet divided those of a mean. Without rows
    they are 0 and stay 0.
    """
    s = g if norm is None else g / norm.where(norm != 0, 1)
    if graph_is_kept():
        return [
            None if d is None else (d.to(acc(d.dtype)) * s.to(acc(d.dtype))).to(d.dtype).where(d != 0, 0) for d in grads
        ]
    for d in grads:
        if d is not None:
            scale_(d, s)
    return grads
