"""The formula, the reference and the kernels of ``rms_norm`` and ``fused_add_rms_norm``.

``y = s / sqrt(mean(s^2) + eps) * (w + offset)`` with ``s = x + residual``, or s = x without a
residual; statistics in fp32 (Zhang and Sennrich, arXiv:1910.07467).

Shapes: x, residual, s, y (..., N), w (N,).  M = product of the leading dims.

``casting`` says where the arithmetic is rounded, as models differ in it:
  llama   x_hat is rounded to x's dtype, then multiplied by w; the result has the promoted dtype
          of x and w
  gemma   everything in fp32, rounded once, to x's dtype
  none    no upcast: 1/rms and each product are rounded to x's dtype, the last one promoted with w

``_fwd`` and ``_bwd`` hold whole rows in registers. Of rows up to ``ROW_BYTES``, ``_fwd_rows`` holds
a part and reads the rest again. Of wider rows, and in the backward, each program has a block of
columns, and another kernel has been there before, which wrote the blocks' sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, launch_config
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, mask_of, next_power_of_2, rows_in, store_tile, tl

CASTING = ("llama", "gemma", "none")
# Columns that a program of ``fused_add_rms_norm`` and ``layer_norm`` holds in registers: forward one
# or two rows, backward dy, x (and ds), the weight and what is summed of its gradient
# H200, bf16, 256 x 65536 by blocks: forward 32 us, backward 53 (to copy as many bytes: 22, 32)
FWD_N, BWD_N = 16384, 8192
# Bytes of a row that a program of ``fused_add_rms_norm`` reads twice. H200, bf16, 4096 / 256 / 4 x
# 65536: 320 / 28.5 / 11.5 us; by blocks 386 / 31.5 / 9.2 (to copy as many bytes: 259, 22, 5.7)
ROW_BYTES = 131072


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


def padded(splits: int) -> int:
    """The constexpr ``SPLITS`` of kernels: 0 for a row in registers, else blocks of a row, as a
    power of 2."""
    return next_power_of_2(splits) if splits > 1 else 0


def backward_grid(op: str, x: Tensor, columns: int, dtype: torch.dtype, pipelined: int):
    """Of a backward in persistent programs: its tile; the numbers of programs and of blocks of
    columns; what programs sum over their rows, or the sums in ``dtype`` where each has all rows;
    the tile and the blocks of the sums that rows wider than a block need, or 1."""
    M, N = x.shape
    sizes = dict(elements=4096, max_block_n=2048) if N > BWD_N else dict(elements=8192, max_block_n=BWD_N)
    c = launch_config.tile(op, N, x.itemsize, **sizes, per_thread=32, pipelined=pipelined)
    # as many programs as run at a time, shared by the blocks of columns
    blocks = cdiv(N, c.block_n)
    most = launch_config.processors() * c.per_sm // blocks
    programs = max(1, min(most, cdiv(M, c.block_m)))
    # not where the batch alone is small: that would be another kernel
    sums = x.new_empty(columns, dtype=dtype) if most < 2 else x.new_empty((programs, columns), dtype=torch.float32)
    p = launch_config.tile(f"{op}_parts", N, x.itemsize, elements=8192, max_block_n=BWD_N, per_thread=32)
    return c, (programs, blocks), sums, p, cdiv(N, p.block_n) if blocks > 1 else 1


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
def part_at(i, M, N, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of the ``i``th tile, and which of its rows' ``splits`` blocks it is."""
    part = i % splits
    row = (i // splits).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = part * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, col, mask_of(row, M, col, N), part


@jit
def from_the_end():
    """The tile of a kernel that sums blocks: the kernel that uses the sums starts where it ends,
    with what is still in the L2 cache."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def load_parts(ptr, row, M, splits, SPLITS: tl.constexpr):
    """The parts of a sum over rows, 0 beyond the last."""
    k = tl.arange(0, SPLITS)
    return load_tile(ptr, row, k, splits, mask_of(row, M, k, splits))


@jit
def sum_of(x):
    """Over the columns of a tile, which may be one of parts."""
    total = tl.sum(x, axis=1)
    # Triton would spread the sum of parts over the whole tile of the row before it converts its
    # layout: 256 KB through shared memory. Of a scalar it does not
    return tl.zeros((1,), tl.float32) + tl.sum(total) if x.shape[0] == 1 else total


@jit
def _store(s, rstd, r_ptr, w_ptr, y_ptr, s_ptr, row, col, N, offset, mask, CASTING: tl.constexpr):
    # the next layer adds to s as it is stored: the norm, too, is of the rounded sum
    if r_ptr is not None:
        tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
    h = scaled_rows(s.to(tl.float32), rstd, w_ptr, col, N, offset, s.dtype, CASTING)
    store_tile(y_ptr, row, col, N, h, mask)


@jit
def _fwd_rows(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, x_stride, r_stride, eps, offset,
    CASTING: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows whose first HELD blocks stay in registers until their sum is known."""
    DTYPE: tl.constexpr = s_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row = i.to(tl.int64) + tl.arange(0, 1)
        held = tl.tuple(())
        for k in tl.static_range(HELD):
            mask = mask_of(row, M, k * BLOCK + lane, N)
            # not in fp32, which would take twice the registers
            held += (_sum(x_ptr, r_ptr, row, k * BLOCK + lane, x_stride, r_stride, mask, DTYPE),)
        square = tl.zeros((1, BLOCK), tl.float32)
        for start in range(HELD * BLOCK, N, BLOCK):
            mask = mask_of(row, M, start + lane, N)
            h = _sum(x_ptr, r_ptr, row, start + lane, x_stride, r_stride, mask, DTYPE).to(tl.float32)
            square += h * h
        for k in tl.static_range(HELD):
            square += held[k].to(tl.float32) * held[k].to(tl.float32)
        rstd = tl.rsqrt(sum_of(square) / N + tl.cast(eps, tl.float32))
        tl.store(rstd_ptr + row, rstd)
        for k in tl.static_range(HELD):
            mask = mask_of(row, M, k * BLOCK + lane, N)
            _store(held[k], rstd, r_ptr, w_ptr, y_ptr, s_ptr, row, k * BLOCK + lane, N, offset, mask, CASTING)
        # back from where the sum ended
        for k in range(tl.cdiv(N, BLOCK) - 1, HELD - 1, -1):
            mask = mask_of(row, M, k * BLOCK + lane, N)
            s = _sum(x_ptr, r_ptr, row, k * BLOCK + lane, x_stride, r_stride, mask, DTYPE)
            _store(s, rstd, r_ptr, w_ptr, y_ptr, s_ptr, row, k * BLOCK + lane, N, offset, mask, CASTING)


@jit
def _fwd_parts(
    x_ptr, r_ptr, s_ptr, parts_ptr, M, N, x_stride, r_stride, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """s, if it is a sum, and its sums of squares, of rows wider than a block."""
    row, col, mask, part = part_at(from_the_end(), M, N, splits, BLOCK_M, BLOCK_N)
    s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, s_ptr.dtype.element_ty)
    if r_ptr is not None:
        tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
    h = s.to(tl.float32)
    tl.store(parts_ptr + row * splits + part, tl.sum(h * h, axis=1), mask=row < M)


@jit
def _fwd(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, parts_ptr, M, N, x_stride, r_stride, splits, eps, offset,
    CASTING: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask, part = part_at(tl.program_id(0), M, N, splits, BLOCK_M, BLOCK_N)
    s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, s_ptr.dtype.element_ty)
    h = s.to(tl.float32)
    square = sum_of(load_parts(parts_ptr, row, M, splits, SPLITS) if SPLITS else h * h)
    rstd = tl.rsqrt(square / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=(row < M) & (part == 0))
    _store(s, rstd, r_ptr, w_ptr, y_ptr, s_ptr, row, col, N, offset, mask, CASTING)


@jit
def _bwd_parts(
    dy_ptr, s_ptr, w_ptr, rstd_ptr, parts_ptr, M, N, dy_stride, s_stride, splits, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of g s_hat, g = dy (w + offset), of rows wider than a block."""
    row, col, mask, part = part_at(from_the_end(), M, N, splits, BLOCK_M, BLOCK_N)
    rstd = load_row(rstd_ptr, row, M)[:, None]
    g = load_tile(dy_ptr, row, col, dy_stride, mask)
    s = load_tile(s_ptr, row, col, s_stride, mask)
    if w_ptr is not None:
        g = g * (load_row(w_ptr, col, N) + tl.cast(offset, tl.float32))[None, :]
    tl.store(parts_ptr + row * splits + part, tl.sum(g * (s * rstd), axis=1), mask=row < M)


@jit
def _bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, rstd_ptr, parts_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, s_stride, splits,
    offset, SPLITS: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # only wide rows have a second axis of programs
    col = (tl.program_id(1) * BLOCK_N if SPLITS else 0) + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = load_row(w_ptr, col, N) + tl.cast(offset, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Programs are persistent: each sums dw over all its rows in registers and writes it once, so
    # that the second stage adds a few hundred rows, in an order that never changes
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        s = load_tile(s_ptr, row, col, s_stride, mask)
        rstd = load_row(rstd_ptr, row, M)[:, None]
        s_hat = s * rstd
        # of rows of a partial tile rstd is 0, so they add nothing
        if NEED_DW:
            dw += dy * s_hat
        if NEED_DX:
            g = dy * w[None, :] if w_ptr is not None else dy
            mean = sum_of(load_parts(parts_ptr, row, M, splits, SPLITS) if SPLITS else g * s_hat) / N
            dx = (g - s_hat * mean[:, None]) * rstd
            # the gradient that reaches s by the residual: added here, it needs no pass of its own
            if ds_ptr is not None:
                dx += load_tile(ds_ptr, row, col, ds_stride, mask)
            store_tile(dx_ptr, row, col, N, dx, mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)
