"""Scale the columns of a matrix, and sum the elementwise product of two matrices by column, for the magnitude of DoRA (Liu et al., arXiv:2402.09353). Both
compute in fp32 without an fp32 copy of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import acc, launch, launcher, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, tl

_BLOCK, _ROWS = 128, 32


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
    scale = tl.load(scale_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = (row < M) & (col < N)[None, :]
    x = tl.load(x_ptr + row * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + col[None, :], (x * scale[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@launcher("(Tensor x, Tensor scale) -> Tensor")
def scaled_columns(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` in x's dtype; x (M, N) with contiguous rows, scale (N,)."""
    (M, N), y = x.shape, x.new_empty(x.shape)
    launch(_times_columns, (cdiv(N, 512), cdiv(M, 16)), x, scale, y, M, N, x.stride(0), ROWS=16, BLOCK=512, num_warps=4)
    return y


@launcher("(Tensor a, Tensor b) -> Tensor")
def column_sums(a: Tensor, b: Tensor) -> Tensor:
    """Partial sums (P, N) of ``a * b`` over the rows, in fp32; a and b (M, N) with contiguous rows."""
    M, N = a.shape
    programs = min(max(cdiv(M, _ROWS), 1), max(1024 // cdiv(N, _BLOCK), 1))
    sums = a.new_empty(programs, N, dtype=torch.float32)
    launch(_dot_columns, (cdiv(N, _BLOCK), programs), a, b, sums, M, N, a.stride(0), b.stride(0), programs, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4)
    return sums


def dot_columns(a: Tensor, b: Tensor) -> Tensor:
    """``(a * b).sum(0)``, (N,), of a and b (M, N), in fp32 or a wider dtype."""
    if use_kernels(a) and a.stride(1) == b.stride(1) == 1:
        return column_sums(a, b).sum(0)
    return (a.to(acc(a.dtype)) * b).sum(0)


def times_columns(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale``, computed in the wider dtype of the two and rounded once to x's dtype; x (M, N), scale (N,)."""
    return scaled_columns(x, scale) if use_kernels(x) and x.stride(1) == 1 else (x * scale).to(x.dtype)
