"""Softmax: ``y_i = exp(x_i) / sum_j exp(x_j)`` along one dim, computed in fp32 and counted from the
largest x.

Shapes: x, y (..., N) once the dim is last.  M = product of the other dims.  The gradient is ``dx =
y * (dy - sum_j dy_j y_j)``, of y as returned.

A short row is held in registers. A longer row is read twice. The second sweep goes backwards from
the end of the first, which is still in the L2 cache. ``launch_fwd`` and ``launch_bwd`` launch such
pairs of kernels, also those of ``sparsemax``.

Inside ``torch.compile``, Inductor computes short rows, because it fuses softmax with neighbouring
operations. Longer rows use the kernel: Inductor would read them from DRAM again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, rows_of, shaped, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, div, exp_of, jit, load_tile, store_tile, tile_at, tl

# Columns of a row that one program holds in registers: 32 fp32 values per thread; in the backward of
# two tensors
MAX_N, MAX_N_BWD = 32768, 16384


def reference(x, *, dim):
    return torch.softmax(x, dim)


@jit
def _over(e, total, PRECISE: tl.constexpr):
    """e / total. In fp32 each to the last bit: a rounded 1 / total would move a whole row's sum
    away from 1."""
    return div(e, total) if PRECISE else e * (1.0 / total)


@jit
def _fwd(x_ptr, y_ptr, M, N, x_stride, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    seen = mask & (col[None, :] <= (row % N)[:, None]) if CAUSAL else mask
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=seen, other=-float("inf")).to(tl.float32)
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    e = exp_of(x - tl.max(x, axis=1)[:, None], PRECISE)
    y = _over(e, tl.sum(e, axis=1)[:, None], PRECISE)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def own_row(ptr, stride):
    """Where a program's row begins."""
    return ptr + tl.program_id(0).to(tl.int64) * stride


@jit
def load_part(ptr, at, N, other, POLICY: tl.constexpr):
    """A part of a long row. ``POLICY``: whether the L2 cache keeps it for the next sweep."""
    return tl.load(ptr + at, mask=at < N, other=other, eviction_policy=POLICY).to(tl.float32)


@jit
def _total(x_ptr, N, shift, lane, BLOCK: tl.constexpr):
    """The sum of exp(x - shift) over a row."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = load_part(x_ptr, start + lane, N, -float("inf"), "evict_last")
        total += exp_of(x - shift, x_ptr.dtype.element_ty == tl.float32)
    return tl.sum(total, axis=0)


@jit
def _fwd_long(x_ptr, y_ptr, N, x_stride, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr, y_ptr, lane = own_row(x_ptr, x_stride), own_row(y_ptr, N), tl.arange(0, BLOCK)
    end = tl.program_id(0).to(tl.int64) % N + 1 if CAUSAL else N
    # one exponential a value: numbers are counted from the largest of the first block
    x = load_part(x_ptr, lane, end, -float("inf"), "evict_last")
    shift = tl.max(x, axis=0)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    total = _total(x_ptr, end, shift, lane, BLOCK)
    if (total > 1e30) | (total < 1e-30):  # that was too far from the others: from the largest of all
        top = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, end, BLOCK):
            top = tl.maximum(
                top, tl.load(x_ptr + start + lane, mask=start + lane < end, other=-float("inf")).to(tl.float32)
            )
        shift = tl.max(top, axis=0)
        total = _total(x_ptr, end, shift, lane, BLOCK)
    blocks = tl.cdiv(N, BLOCK)
    for i in range(0, blocks):
        col = (blocks - 1 - i) * BLOCK + lane
        x = load_part(x_ptr, col, end, -float("inf"), "evict_first")
        y = _over(exp_of(x - shift, x_ptr.dtype.element_ty == tl.float32), total, x_ptr.dtype.element_ty == tl.float32)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < N, eviction_policy="evict_first")


@jit
def _bwd(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    dy = load_tile(dy_ptr, row, col, dy_stride, mask)
    y = load_tile(y_ptr, row, col, y_stride, mask)
    dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
    store_tile(dx_ptr, row, col, N, dx, mask)


@jit
def _bwd_long(dy_ptr, y_ptr, dx_ptr, N, dy_stride, y_stride, BLOCK: tl.constexpr):
    dy_ptr, y_ptr, dx_ptr = own_row(dy_ptr, dy_stride), own_row(y_ptr, y_stride), own_row(dx_ptr, N)
    lane = tl.arange(0, BLOCK)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        dy = load_part(dy_ptr, start + lane, N, 0.0, "evict_last")
        dot += dy * load_part(y_ptr, start + lane, N, 0.0, "evict_last")
    total = tl.sum(dot, axis=0)
    blocks = tl.cdiv(N, BLOCK)
    for i in range(0, blocks):
        col = (blocks - 1 - i) * BLOCK + lane
        dy = load_part(dy_ptr, col, N, 0.0, "evict_first")
        y = load_part(y_ptr, col, N, 0.0, "evict_first")
        tl.store(
            dx_ptr + col, (y * (dy - total)).to(dx_ptr.dtype.element_ty), mask=col < N, eviction_policy="evict_first"
        )


def launch_fwd(short: Any, long: Any, x: Tensor, causal: bool, name: str, *, elements: int) -> Tensor:
    """y of x. ``causal``: in square matrices, only the columns up to the diagonal count, and the
    others are zero."""
    M, N = x.shape
    y = x.new_empty(M, N)
    if tracing(x):
        return y
    if N <= MAX_N:
        c = launch_config.tile(name, N, x.itemsize, elements=elements, per_thread=32)
        launch(short, (cdiv(M, c.block_m),), x, y, M, N, x.stride(0), CAUSAL=causal, **c.tile)
    else:
        c = launch_config.tile(name, N, x.itemsize, elements=1, max_block_n=8192, per_thread=8)
        launch(long, (M,), x, y, N, x.stride(0), CAUSAL=causal, **c.row)
    return y


def launch_bwd(
    short: Any, long: Any, dy: Tensor, y: Tensor, name: str, sweep: Callable[[int, int], tuple[int, int]]
) -> Tensor:
    """dx. ``sweep(N, bytes of a number)``: the largest block of a long row, and its values per
    thread."""
    M, N = y.shape
    dx = y.new_empty(M, N)
    if tracing(y):
        return dx
    strides = dy.stride(0), y.stride(0)
    if N <= MAX_N_BWD:
        c = launch_config.tile(name, N, y.itemsize, elements=4096, per_thread=16)
        launch(short, (cdiv(M, c.block_m),), dy, y, dx, M, N, *strides, **c.tile)
    else:
        max_block_n, per_thread = sweep(N, y.itemsize)
        c = launch_config.tile(name, N, y.itemsize, elements=1, max_block_n=max_block_n, per_thread=per_thread)
        launch(long, (M,), dy, y, dx, N, *strides, **c.row)
    return dx


@typed_launcher
def softmax_fwd(x: Tensor, causal: bool) -> Tensor:
    return launch_fwd(_fwd, _fwd_long, x, causal, "softmax_fwd", elements=4096)


def _sweep(N: int, itemsize: int) -> tuple[int, int]:
    # H200, bf16, 2048 x 128256: 516 us; 585 us with blocks of 8192, which unaligned rows need
    block = 32768 if N >= 65536 and not N % 16 and itemsize == 2 else 8192
    return block, block // 1024


@typed_launcher
def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    return launch_bwd(_bwd, _bwd_long, dy, y, "softmax_bwd", _sweep)


def check(name: str, x: Tensor, dim: int) -> None:
    """Raise ``ValueError`` unless x has rows of floating-point numbers along ``dim``."""
    if not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point, got {x.dtype}")
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ValueError(f"{name}: dim must be in [{-max(x.ndim, 1)}, {max(x.ndim, 1) - 1}], got {dim}")


class LigerSoftmaxFunction(torch.autograd.Function):
    """``apply(x)``, over the last dim."""

    @staticmethod
    def forward(ctx, x):
        y = shaped(softmax_fwd(rows_of(x), False), x.shape)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return (softmax_bwd(rows_of(dy), rows_of(y)).view(y.shape),)


CASES = [
    Case("attention", dict(x=T((2, 3, 9, 64)))),
    Case("odd", dict(x=T((5, 123)))),
    Case("heads", dict(x=T((3, 7, 5)), dim=1)),
    Case("columns", dict(x=T((6, 9)), dim=0)),
    Case("one-column", dict(x=T((5, 1)))),
    Case("long", dict(x=T((3, 33001)))),
]


@op(
    reference=reference,
    cases=[*CASES, Case("longer", dict(x=T((2, 65552))))],
    cost=lambda x, **_: Cost(nbytes(x, x), nbytes(x, x, x), flops=(4 * x.numel(), 4 * x.numel())),
)
def softmax(x: Tensor, *, dim: int = -1) -> Tensor:
    """Softmax along ``dim``, as in torch: a row with only -inf gives NaN.

    x in fp32, fp16, bf16 or fp64, any shape and strides, rows of any length. Returns a new tensor
    of x's shape and dtype.
    """
    check("softmax", x, dim)
    if not x.ndim or not use_kernels(x, fusible=x.shape[dim] <= MAX_N):
        return reference(x, dim=dim)
    return LigerSoftmaxFunction.apply(x.movedim(dim, -1)).movedim(-1, dim)
