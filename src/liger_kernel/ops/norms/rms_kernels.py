"""The formula, the reference and the kernels of ``rms_norm`` and ``fused_add_rms_norm``.

``y = s / sqrt(mean(s^2) + eps) * (w + offset)`` with ``s = x + residual``, or s = x without a
residual; statistics in fp32 (Zhang and Sennrich, arXiv:1910.07467).

Shapes: x, residual, s, y (..., N), w (N,).  M = product of the leading dims.

``casting`` says where the arithmetic is rounded, as models differ in it:
  llama   x_hat is rounded to x's dtype, then multiplied by w; the result has the promoted dtype
          of x and w
  gemma   everything in fp32, rounded once, to x's dtype
  none    no upcast: 1/rms and each product are rounded to x's dtype, the last one promoted with w

``_fwd`` and ``_bwd`` hold whole rows in registers; wider rows are read twice, in blocks of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.operator import acc
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, mask_of, store_tile, tile_at, tl

CASTING = ("llama", "gemma", "none")
# Columns that a program of ``fused_add_rms_norm`` and ``layer_norm`` holds in registers: forward one
# or two rows, backward dy, x (and ds), the weight and what is summed of its gradient
FWD_N, BWD_N = 16384, 8192


def check_norm(op: str, x: Tensor, w: Tensor | None, casting: str = "llama", **others: Tensor | None) -> None:
    """Raise ``ValueError`` for what no norm of rows takes."""
    for name, t in (("x", x), *others.items()):
        if t is not None and not t.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, got {t.dtype}")
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least one dim, got shape ()")
    if casting not in CASTING:
        raise ValueError(f"{op}: casting must be one of {CASTING}, got {casting!r}")
    if w is not None and w.shape != x.shape[-1:]:
        raise ValueError(f"{op}: w must have shape {tuple(x.shape[-1:])}, got {tuple(w.shape)}")


def backward_grid(op: str, M: int, N: int, itemsize: int, pipelined: int):
    """Of a backward in persistent programs: whether rows are wider than a block, its tile, and the
    numbers of programs and of blocks of columns."""
    wide = N > BWD_N
    sizes = dict(elements=4096, max_block_n=2048) if wide else dict(elements=8192, max_block_n=BWD_N)
    c = launch_config.tile(op, N, itemsize, **sizes, per_thread=32, pipelined=pipelined)
    # as many programs as run at a time, shared by the blocks of columns
    blocks = cdiv(N, c.block_n) if wide else 1
    programs = max(1, min(launch_config.processors() * c.per_sm // blocks, cdiv(M, c.block_m)))
    return wide, c, programs, blocks


def reference(x, w, *, eps, offset, casting):
    # the statistics in fp32 in every casting; what differs is where x_hat is rounded
    h = x.to(acc(x.dtype))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = x * rstd.to(x.dtype) if casting == "none" else h * rstd
    if w is None:
        return h.to(x.dtype)
    if casting == "gemma":
        return (h * (w.to(h.dtype) + offset)).to(x.dtype)
    return (w + offset if offset else w) * h.to(x.dtype)


@jit
def scaled_rows(h, rstd, w_ptr, col, N, offset, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """Rows h of fp32 values times 1/rms and weight, rounded where ``casting`` says so."""
    # rounding to DTYPE and back is not for show: the stock modules round there, and the result
    # must have their bits
    if CASTING == "none":
        rstd = rstd.to(DTYPE).to(tl.float32)
    h = h * rstd[:, None]
    if w_ptr is not None:
        if CASTING != "gemma":
            h = h.to(DTYPE).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < N, other=0.0)
        w_offset = w.to(tl.float32) + tl.cast(offset, tl.float32)
        if CASTING != "gemma":
            w_offset = w_offset.to(w.dtype).to(tl.float32)
        h = h * w_offset[None, :]
    return h


@jit
def _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE: tl.constexpr):
    s = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    if r_ptr is not None:
        r = load_tile(r_ptr, row, col, r_stride, mask)
        s = (s.to(tl.float32) + r).to(DTYPE)
    return s


@jit
def _fwd(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, x_stride, r_stride, eps, offset,
    CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    # the next layer adds to s as it is stored: the norm, too, is of the rounded sum
    s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, s_ptr.dtype.element_ty)
    if r_ptr is not None:
        tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
    h = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, offset, s.dtype, CASTING)
    store_tile(y_ptr, row, col, N, h, mask)


@jit
def _fwd_wide(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, x_stride, r_stride, eps, offset,
    CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    DTYPE: tl.constexpr = s_ptr.dtype.element_ty
    square = tl.zeros((BLOCK_M,), tl.float32)
    # s is stored in this sweep and computed again in the next, from x and residual in the cache
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = mask_of(row, M, col, N)
        s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE)
        if r_ptr is not None:
            tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
        h = s.to(tl.float32)
        square += tl.sum(h * h, axis=1)
    rstd = tl.rsqrt(square / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    blocks = tl.cdiv(N, BLOCK_N)
    # back from where the first sweep ended: that end of the row is still in the L2 cache
    for i in range(0, blocks):
        col = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = mask_of(row, M, col, N)
        s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE)
        h = scaled_rows(s.to(tl.float32), rstd, w_ptr, col, N, offset, s.dtype, CASTING)
        store_tile(y_ptr, row, col, N, h, mask)


@jit
def _bwd_mean(
    dy_ptr, s_ptr, w_ptr, rstd_ptr, mean_ptr, M, N, dy_stride, s_stride, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The mean of g s_hat, g = dy (w + offset), over a row wider than a block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = mask_of(row, M, col, N)
        g = load_tile(dy_ptr, row, col, dy_stride, mask)
        s = load_tile(s_ptr, row, col, s_stride, mask)
        if w_ptr is not None:
            g = g * (load_row(w_ptr, col, N) + tl.cast(offset, tl.float32))[None, :]
        total += tl.sum(g * (s * rstd), axis=1)
    tl.store(mean_ptr + row, total / N, mask=row < M)


@jit
def _bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, rstd_ptr, mean_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, s_stride, offset,
    WIDE: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # only wide rows have a second axis of programs
    col = (tl.program_id(1) * BLOCK_N if WIDE else 0) + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = load_row(w_ptr, col, N) + tl.cast(offset, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Programs are persistent: each sums dw over all its rows in registers and writes it once, so
    # that the second stage adds a few hundred rows, in an order that never changes
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = mask_of(row, M, col, N)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        s = load_tile(s_ptr, row, col, s_stride, mask)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        s_hat = s * rstd
        # of rows of a partial tile rstd is 0, so they add nothing
        if NEED_DW:
            dw += dy * s_hat
        if NEED_DX:
            g = dy * w[None, :] if w_ptr is not None else dy
            # a program that sees a part of a row cannot know its mean: `_bwd_mean` has been there
            if WIDE:
                mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
            else:
                mean = tl.sum(g * s_hat, axis=1) / N
            dx = (g - s_hat * mean[:, None]) * rstd
            # the gradient that reaches s by the residual: added here, it needs no pass of its own
            if ds_ptr is not None:
                dx += load_tile(ds_ptr, row, col, ds_stride, mask)
            store_tile(dx_ptr, row, col, N, dx, mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)
