"""Softmax: ``y_i = exp(x_i) / sum_j exp(x_j)`` along one dim, computed in fp32 and counted from the
largest x.

Shapes: x, y (..., N) once the dim is last.  M = product of the other dims.  The gradient is ``dx =
y * (dy - sum_j dy_j y_j)``, of y as returned.

A short row is held in registers. A longer row is read twice. The second sweep goes backwards from
the end of the first, which is still in the L2 cache.

Inside ``torch.compile``, Inductor computes short rows, because it fuses softmax with neighbouring
operations. Longer rows use the kernel: Inductor would read them from DRAM again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import (
    Case,
    Cost,
    T,
    launcher,
    nbytes,
    once_differentiable,
    op,
    rows_of,
    shaped,
    use_kernels,
)
from liger_kernel.ops._core.tl import div, exp_of, jit, tl
from liger_kernel.ops.attention.rows import MAX_N, check, launch_bwd, launch_fwd


def reference(x: Tensor, *, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


@jit
def _over(e, total, PRECISE: tl.constexpr):
    """e / total. In fp32 each to the last bit: a rounded 1 / total would move a whole row's sum
    away from 1."""
    return div(e, total) if PRECISE else e * (1.0 / total)


@jit
def _fwd(x_ptr, y_ptr, M, N, x_stride, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    seen = mask & (col[None, :] <= (row % N)[:, None]) if CAUSAL else mask
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=seen, other=-float("inf")).to(tl.float32)
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    e = exp_of(x - tl.max(x, axis=1)[:, None], PRECISE)
    y = _over(e, tl.sum(e, axis=1)[:, None], PRECISE)
    tl.store(y_ptr + row[:, None] * N + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _total(x_ptr, N, shift, lane, BLOCK: tl.constexpr):
    """The sum of exp(x - shift) over a row."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + start + lane, mask=start + lane < N, other=-float("inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        total += exp_of(x - shift, x_ptr.dtype.element_ty == tl.float32)
    return tl.sum(total, axis=0)


@jit
def _fwd_long(x_ptr, y_ptr, N, x_stride, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = row % N + 1 if CAUSAL else N
    x_ptr += row * x_stride
    y_ptr += row * N
    lane = tl.arange(0, BLOCK)
    # one exponential a value: numbers are counted from the largest of the first block
    x = tl.load(x_ptr + lane, mask=lane < end, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
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
        x = tl.load(x_ptr + col, mask=col < end, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        y = _over(exp_of(x - shift, x_ptr.dtype.element_ty == tl.float32), total, x_ptr.dtype.element_ty == tl.float32)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < N, eviction_policy="evict_first")


@jit
def _bwd(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row[:, None] * y_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
    tl.store(dx_ptr + row[:, None] * N + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
def _bwd_long(dy_ptr, y_ptr, dx_ptr, N, dy_stride, y_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    dx_ptr += row * N
    lane = tl.arange(0, BLOCK)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        dy = tl.load(dy_ptr + start + lane, mask=start + lane < N, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        dot += dy * tl.load(y_ptr + start + lane, mask=start + lane < N, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
    total = tl.sum(dot, axis=0)
    blocks = tl.cdiv(N, BLOCK)
    for i in range(0, blocks):
        col = (blocks - 1 - i) * BLOCK + lane
        dy = tl.load(dy_ptr + col, mask=col < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(y_ptr + col, mask=col < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(
            dx_ptr + col, (y * (dy - total)).to(dx_ptr.dtype.element_ty), mask=col < N, eviction_policy="evict_first"
        )


@launcher("(Tensor x, bool causal) -> Tensor")
def softmax_fwd(x: Tensor, causal: bool) -> Tensor:
    return launch_fwd(_fwd, _fwd_long, x, causal, "softmax_fwd", elements=4096)


def _sweep(N: int, itemsize: int) -> tuple[int, int]:
    # H200, bf16, 2048 x 128256: 516 us; 585 us with blocks of 8192, which unaligned rows need
    block = 32768 if N >= 65536 and not N % 16 and itemsize == 2 else 8192
    return block, block // 1024


@launcher("(Tensor dy, Tensor y) -> Tensor")
def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    return launch_bwd(_bwd, _bwd_long, dy, y, "softmax_bwd", _sweep)


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


@op(
    reference=reference,
    cases=[
        Case("attention", dict(x=T((2, 3, 9, 64)))),
        Case("odd", dict(x=T((5, 123)))),
        Case("heads", dict(x=T((3, 7, 5)), dim=1)),
        Case("columns", dict(x=T((6, 9)), dim=0)),
        Case("one-column", dict(x=T((5, 1)))),
        Case("long", dict(x=T((3, 33001)))),
        Case("longer", dict(x=T((2, 65552)))),
        Case("bad-dim", dict(x=T((4, 8)), dim=2), error="dim must be in [-2, 1], got 2"),
        Case("integers", dict(x=T((4, 8), dtype=torch.int64)), error="x must be floating point, got torch.int64"),
    ],
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
