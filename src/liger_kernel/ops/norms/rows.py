"""Rows divided by their root mean square: the formula and the kernels of ``rms_norm``, and
functions that other norms of rows share.

``y = x / sqrt(mean(x^2) + eps) * (w + offset)``, statistics in fp32 (Zhang and Sennrich,
arXiv:1910.07467).

Shapes: x (..., N), w (N,), y like x.  M = product of the leading dims.

``casting`` says where the arithmetic is rounded, as models differ in it:
  llama   x_hat is rounded to x's dtype, then multiplied by w; the result has the promoted dtype of x and w
  gemma   everything in fp32, rounded once, to x's dtype
  none    no upcast: 1/rms and each product are rounded to x's dtype, the last one promoted with w

A program of these kernels holds whole rows in registers. The kernels of ``fused_add_rms_norm``
without a residual compute wider rows,
in blocks of columns.
The launchers are in ``rms_norm``, which chooses between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import acc
from liger_kernel.ops._core.tl import jit, tl

CASTING = ("llama", "gemma", "none")
MAX_N = 32768  # columns that one program holds in registers


def reference(
    x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    h = x.to(acc(x.dtype))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = x * rstd.to(x.dtype) if casting == "none" else h * rstd
    if w is None:
        return h.to(x.dtype)
    if casting == "gemma":
        return (h * (w.to(h.dtype) + offset)).to(x.dtype)
    return (w + offset if offset else w) * h.to(x.dtype)


@jit
def scaled_rows(h, rstd, w_ptr, col, N, offset, DTYPE: tl.constexpr, HAS_W: tl.constexpr, CASTING: tl.constexpr):
    """Rows h of fp32 values times 1/rms and weight, rounded to their dtype where ``casting``
    says so."""
    if CASTING == "none":
        rstd = rstd.to(DTYPE).to(tl.float32)
    h = h * rstd[:, None]
    if HAS_W:
        if CASTING != "gemma":
            h = h.to(DTYPE).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < N, other=0.0)
        w_offset = w.to(tl.float32) + tl.cast(offset, tl.float32)
        if CASTING != "gemma":
            w_offset = w_offset.to(w.dtype).to(tl.float32)
        h = h * w_offset[None, :]
    return h


@jit
def _fwd(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, x_stride, eps, offset,
    HAS_W: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, offset, x.dtype, HAS_W, CASTING)
    tl.store(y_ptr + row[:, None] * N + col[None, :], h.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _bwd(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    M,
    N,
    dy_stride,
    x_stride,
    offset,
    HAS_W: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (row < M)[:, None] & (col < N)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        x_hat = x * rstd
        if NEED_DW:
            dw += dy * x_hat
        if NEED_DX:
            g = dy * w[None, :] if HAS_W else dy
            dx = (g - x_hat * (tl.sum(g * x_hat, axis=1) / N)[:, None]) * rstd
            tl.store(dx_ptr + row[:, None] * N + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)
