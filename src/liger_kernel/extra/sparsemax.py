"""Sparsemax: the point of the simplex nearest to x, ``y = max(x - tau, 0)`` with tau such that y
sums to 1 (Martins and Astudillo, arXiv:1602.02068).

Shapes: x, y (..., N) once the dim is last.  M = product of the other dims.

tau needs no sort: from the left, Newton's steps on the convex ``sum_i max(x_i - tau, 0) - 1`` are

    tau  <-  (sum of the x_i > tau,  -  1) / (number of these)

and never pass the root. The set of x_i > tau only shrinks, and when it stays the same, tau is
exact. They start at max(x) - 1. All values are relative to max(x), so errors are small compared
with the largest y. Quotients are correctly rounded, because an x equal to tau must not count. The
gradient
is ``dx = dy - mean(dy over y > 0)`` where y > 0, else 0.

A short row is held in registers. A longer row is read once for the largest x, once for each step,
and once to write y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.extra.softmax import CASES, check, launch_bwd, launch_fwd, load_part, own_row
from liger_kernel.ops._core import Case, Cost, T, acc, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import rows_of, shaped, use_kernels
from liger_kernel.ops._core.tl import div, jit, load_tile, store_tile, tile_at, tl


def reference(x, *, dim):
    """Sparsemax by sorting: the support is the k largest x, for the largest k with ``k x_k > sum
    of these - 1``."""
    if not x.numel():
        return x.clone()
    z = x.to(acc(x.dtype)).movedim(dim, -1) if x.ndim else x.to(acc(x.dtype))[None]
    z = z - z.detach().amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    support = (rank * ordered > excess).sum(-1, keepdim=True).clamp(min=1)  # with NaN, any support is right
    y = F.relu(z - excess.gather(-1, support - 1) / support).to(x.dtype)
    return y.movedim(-1, dim) if x.ndim else y[0]


@jit
def _fwd(x_ptr, y_ptr, M, N, x_stride, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    seen = mask & (col[None, :] <= (row % N)[:, None]) if CAUSAL else mask
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=seen, other=-float("inf")).to(tl.float32)
    z = x - tl.max(x, axis=1)[:, None]
    tau = tl.full((BLOCK_M,), -1.0, tl.float32)
    before = tl.full((BLOCK_M,), BLOCK_N + 1, tl.int32)
    shrinks = 1
    while shrinks > 0:
        out = z <= tau[:, None]  # this way round a NaN makes all of its row NaN
        count = tl.sum(tl.where(out, 0, 1), axis=1)
        step = div(tl.sum(tl.where(out, 0.0, z), axis=1) - 1.0, count.to(tl.float32))
        tau = tl.where(step < tau, tau, step)
        shrinks = tl.max((count < before).to(tl.int32), axis=0)
        before = count
    y = tl.where(z <= tau[:, None], 0.0, z - tau[:, None])
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _fwd_long(x_ptr, y_ptr, N, x_stride, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: a sweep for the largest, one for each step, and one that writes y."""
    x_ptr, y_ptr, lane = own_row(x_ptr, x_stride), own_row(y_ptr, N), tl.arange(0, BLOCK)
    end = tl.program_id(0).to(tl.int64) % N + 1 if CAUSAL else N
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, end, BLOCK):
        x = load_part(x_ptr, start + lane, end, -float("inf"), "evict_last")
        top = tl.maximum(top, x)
    largest = tl.max(top, axis=0)
    tau = -1.0
    before = N + 1
    shrinks = 1
    while shrinks > 0:
        counts = tl.zeros((BLOCK,), tl.int32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, end, BLOCK):
            x = load_part(x_ptr, start + lane, end, -float("inf"), "evict_last")
            z = x - largest
            out = (z <= tau) | (start + lane >= end)
            counts += tl.where(out, 0, 1)
            sums += tl.where(out, 0.0, z)
        count = tl.sum(counts, axis=0)
        step = tl.div_rn(tl.sum(sums, axis=0) - 1.0, count.to(tl.float32))
        tau = tl.where(step < tau, tau, step)
        shrinks = (count < before).to(tl.int32)
        before = count
    for start in range(0, N, BLOCK):
        x = load_part(x_ptr, start + lane, end, -float("inf"), "evict_first")
        z = x - largest
        y = tl.where(z <= tau, 0.0, z - tau)
        tl.store(
            y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=start + lane < N, eviction_policy="evict_first"
        )


@jit
def _bwd(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    inside = load_tile(y_ptr, row, col, y_stride, mask) != 0.0
    dy = load_tile(dy_ptr, row, col, dy_stride, mask)
    mean = div(tl.sum(tl.where(inside, dy, 0.0), axis=1), tl.sum(tl.where(inside, 1.0, 0.0), axis=1))
    store_tile(dx_ptr, row, col, N, tl.where(inside, dy - mean[:, None], 0.0), mask)


@jit
def _bwd_long(dy_ptr, y_ptr, dx_ptr, N, dy_stride, y_stride, BLOCK: tl.constexpr):
    dy_ptr, y_ptr, dx_ptr = own_row(dy_ptr, dy_stride), own_row(y_ptr, y_stride), own_row(dx_ptr, N)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        y = load_part(y_ptr, start + lane, N, 0.0, "evict_last")
        dy = load_part(dy_ptr, start + lane, N, 0.0, "evict_last")
        counts += tl.where(y != 0.0, 1, 0)
        sums += tl.where(y != 0.0, dy, 0.0)
    mean = tl.div_rn(tl.sum(sums, axis=0), tl.sum(counts, axis=0).to(tl.float32))
    blocks = tl.cdiv(N, BLOCK)
    for i in range(0, blocks):  # back from where the first sweep ended
        col = (blocks - 1 - i) * BLOCK + lane
        y = load_part(y_ptr, col, N, 0.0, "evict_first")
        dy = load_part(dy_ptr, col, N, 0.0, "evict_first")
        tl.store(
            dx_ptr + col,
            tl.where(y != 0.0, dy - mean, 0.0).to(dx_ptr.dtype.element_ty),
            mask=col < N,
            eviction_policy="evict_first",
        )


@typed_launcher
def sparsemax_fwd(x: Tensor, causal: bool) -> Tensor:
    return launch_fwd(_fwd, _fwd_long, x, causal, "sparsemax_fwd", elements=2048)


@typed_launcher
def sparsemax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    return launch_bwd(_bwd, _bwd_long, dy, y, "sparsemax_bwd", lambda *_: (4096, 8))


class LigerSparsemaxFunction(torch.autograd.Function):
    """``apply(x, dim)``."""

    @staticmethod
    def forward(ctx, x, dim):
        x = x.movedim(dim, -1)
        y = shaped(sparsemax_fwd(rows_of(x), False), x.shape)
        y = y if dim in (-1, x.ndim - 1) else y.movedim(-1, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y = ctx.saved_tensors[0].movedim(ctx.dim, -1)
        return sparsemax_bwd(rows_of(dy.movedim(ctx.dim, -1)), rows_of(y)).view(y.shape).movedim(-1, ctx.dim), None


@op(
    reference=reference,
    cases=[*CASES, Case("dense", dict(x=T((5, 70), lambda *shape, dtype: torch.randn(*shape, dtype=dtype) / 128)))],
    cost=lambda x, **_: Cost(nbytes(x, x), nbytes(x, x, x), flops=(4 * x.numel(), 3 * x.numel())),
)
def sparsemax(x: Tensor, *, dim: int = -1) -> Tensor:
    """Euclidean projection of x onto the simplex along ``dim``.

    x in fp32, fp16, bf16 or fp64, any shape and strides, rows of any length; -inf gives 0, a row
    with only -inf gives NaN. Returns a new tensor like x.
    """
    check("sparsemax", x, dim)
    if not x.ndim or not use_kernels(x):
        return reference(x, dim=dim)
    return LigerSparsemaxFunction.apply(x.movedim(dim, -1), -1).movedim(-1, dim)
