"""For the magnitude of DoRA (Liu et al., arXiv:2402.09353): the norms of the rows of w + scale b a,
a matrix with scaled columns, and the sums by column of the elementwise product of two matrices.
They compute in fp32, and the kernels store neither w + scale b a nor an fp32 copy of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, typed_launcher
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_row, next_power_of_2, tl

_BLOCK, _ROWS = 128, 32
_RANK = 256  # a program holds b's rows
_CHUNK = 1 << 22  # elements of w + scale b a that exist at once without kernels: 16 MB


@jit
def _dot_columns(a_ptr, b_ptr, sums_ptr, M, N, stride_a, stride_b, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, M, programs * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < M) & (col < N)[None, :]
        a = tl.load(a_ptr + row * stride_a + col[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * tl.load(b_ptr + row * stride_b + col[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * N + col, tl.sum(total, 0), mask=col < N)


@jit
def _times_columns(x_ptr, scale_ptr, y_ptr, M, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = load_row(scale_ptr, col, N)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = (row < M) & (col < N)[None, :]
    x = tl.load(x_ptr + row * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + col[None, :], (x * scale[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _row_norms(
    w_ptr, a_ptr, b_ptr, norms_ptr, N, K, rank, scale, w_row, w_col, a_row, a_col, b_row, b_col,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # a program has whole rows, so that a norm needs no second stage
    row, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    mask, known, at = (row < N)[:, None], r < rank, row.to(tl.int64)[:, None]
    b = tl.load(b_ptr + at * b_row + r[None, :] * b_col, mask=mask & known[None, :], other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        inside, at_col = (col < K)[None, :], col.to(tl.int64)[None, :]
        a = tl.load(a_ptr + r[:, None].to(tl.int64) * a_row + at_col * a_col, mask=known[:, None] & inside, other=0.0)
        w = tl.load(w_ptr + at * w_row + at_col * w_col, mask=mask & inside, other=0.0).to(tl.float32)
        # added before squaring: the expanded square would cancel
        w += tl.cast(scale, tl.float32) * tl.dot(b, a, input_precision="ieee")
        total += w * w
    tl.store(norms_ptr + row, tl.sqrt_rn(tl.sum(total, 1)), mask=row < N)


@typed_launcher
def norms_of_rows(w: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``row_norms`` in fp32; a and b in one dtype."""
    (N, K), rank, norms = w.shape, a.shape[0], w.new_empty(w.shape[0], dtype=torch.float32)
    block = max(16, next_power_of_2(rank))
    # by reasoning, not measured: one program for each processor of an H200 at N = 4096, a tile of a
    # of 16 KB, and at most 50 KB of shared memory
    block_n = 32 if N >= 4096 and block <= 128 else 16
    tile = dict(BLOCK_N=block_n, BLOCK_K=max(16, min(128, 16384 // (block * a.itemsize))), BLOCK_R=block, num_warps=4)
    strides = *w.stride(), *a.stride(), *b.stride()
    launch(_row_norms, (cdiv(N, block_n),), w, a, b, norms, N, K, rank, scale, *strides, **tile)
    return norms


def row_norms(w: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """|w + scale b a| of each row (N,), in fp32 or a wider dtype; w (N, K), a (r, K), b (N, r).

    The rows are added before they are squared: the square of the sum, expanded, cancels where b a
    leaves little of a row.
    """
    if use_kernels(w) and use_kernels(a) and a.shape[0] <= _RANK:
        return norms_of_rows(w, a, b, scale)
    wide, rows = torch.promote_types(acc(w.dtype), a.dtype), max(1, _CHUNK // max(1, w.shape[1]))
    a = a.to(wide)
    sums = (torch.addmm(w_s.to(wide), b_s.to(wide), a, alpha=scale) for w_s, b_s in zip(w.split(rows), b.split(rows)))
    return torch.cat([torch.linalg.vector_norm(s, dim=1) for s in sums])


@typed_launcher
def scaled_columns(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` in x's dtype; x (M, N) with contiguous rows, scale (N,)."""
    (M, N), y = x.shape, x.new_empty(x.shape)
    launch(_times_columns, (cdiv(N, 512), cdiv(M, 16)), x, scale, y, M, N, x.stride(0), ROWS=16, BLOCK=512, num_warps=4)
    return y


@typed_launcher
def column_sums(a: Tensor, b: Tensor) -> Tensor:
    """Partial sums (P, N) of ``a * b`` over the rows, in fp32; a and b (M, N) with contiguous
    rows."""
    M, N = a.shape
    # enough programs for all processors, few enough that their sums are small
    programs = min(max(cdiv(M, _ROWS), 1), max(1024 // cdiv(N, _BLOCK), 1))
    sums = a.new_empty(programs, N, dtype=torch.float32)
    grid, strides = (cdiv(N, _BLOCK), programs), (a.stride(0), b.stride(0))
    launch(_dot_columns, grid, a, b, sums, M, N, *strides, programs, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4)
    return sums


def dot_columns(a: Tensor, b: Tensor) -> Tensor:
    """``(a * b).sum(0)``, (N,), of a and b (M, N), in fp32 or a wider dtype."""
    if use_kernels(a) and a.stride(1) == b.stride(1) == 1:
        return column_sums(a, b).sum(0)
    return (a.to(acc(a.dtype)) * b).sum(0)


def times_columns(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale``, computed in the wider dtype of the two and rounded once to x's dtype; x (M,
    N), scale (N,)."""
    return scaled_columns(x, scale) if use_kernels(x) and x.stride(1) == 1 else (x * scale).to(x.dtype)
