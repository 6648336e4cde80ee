"""LayerNorm: ``y = (x - mean(x)) / sqrt(var(x) + eps) * w + b``, computed in fp32 and rounded once,
to x's dtype (Ba et al., arXiv:1607.06450).

Shapes: x (..., N), w and b (N,), y like x.  M = product of the leading dims.

The variance is the mean of (x - mean)^2, never a difference of means, which would cancel. Rows too wide
for the registers of one program are read twice, in blocks of columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.shards import is_sharded, on_own_rows
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, rows_in, store_sums, store_tile, tl
from liger_kernel.ops.norms.rms_kernels import (
    BWD_N,
    FWD_N,
    backward_grid,
    check_norm,
    from_the_end,
    load_parts,
    padded,
    part_at,
    sum_of,
)


def reference(x, w, b, *, eps):
    h = acc(x.dtype)
    w, b = (p if p is None else p.to(h) for p in (w, b))
    return F.layer_norm(x.to(h), x.shape[-1:], w, b, eps).to(x.dtype)


@jit
def _affine(h, w_ptr, b_ptr, col, N):
    """``h * w + b`` for the columns ``col``."""
    # both in fp32, whatever their dtypes are
    if w_ptr is not None:
        h = h * load_row(w_ptr, col, N)[None, :]
    if b_ptr is not None:
        h = h + load_row(b_ptr, col, N)[None, :]
    return h


@jit
def standardised(x, mask, row, M, N, eps, mean_ptr, rstd_ptr):
    """Whole rows, with mean 0 and variance 1; stores their means and 1 / standard deviations."""
    mean = tl.sum(x, axis=1) / N
    # what the mask leaves out was read as 0, and would be as far from the mean as the mean is from 0
    h = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(mean_ptr + row, mean, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    return h * rstd[:, None]


@jit
def _fwd_parts(x_ptr, parts_ptr, M, N, x_stride, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Means, and sums of squared deviations from them, of the blocks of rows wider than a block."""
    row, col, mask, part = part_at(from_the_end(), M, N, splits, BLOCK_M, BLOCK_N)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    mean = tl.sum(x, axis=1) / tl.minimum(N - part * BLOCK_N, BLOCK_N)
    h = tl.where(mask, x - mean[:, None], 0.0)
    at = 2 * row * splits + part
    tl.store(parts_ptr + at, mean, mask=row < M)
    tl.store(parts_ptr + splits + at, tl.sum(h * h, axis=1), mask=row < M)


@jit
def _fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, parts_ptr, M, N, x_stride, splits, eps,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask, part = part_at(tl.program_id(0), M, N, splits, BLOCK_M, BLOCK_N)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    if SPLITS:
        # blocks are merged by their means, so that nothing cancels (Chan et al.)
        n = tl.maximum(tl.minimum(N - tl.arange(0, SPLITS) * BLOCK_N, BLOCK_N), 0).to(tl.float32)[None, :]
        means = load_parts(parts_ptr, 2 * row, 2 * M, splits, SPLITS)
        squares = load_parts(parts_ptr, 2 * row + 1, 2 * M, splits, SPLITS)
        mean = sum_of(means * n) / N
        delta = means - mean[:, None]
        rstd = tl.rsqrt(sum_of(squares + delta * delta * n) / N + tl.cast(eps, tl.float32))
        tl.store(mean_ptr + row, mean, mask=(row < M) & (part == 0))
        tl.store(rstd_ptr + row, rstd, mask=(row < M) & (part == 0))
        h = (x - mean[:, None]) * rstd[:, None]
    else:
        h = standardised(x, mask, row, M, N, eps, mean_ptr, rstd_ptr)
    y = _affine(h, w_ptr, b_ptr, col, N)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _bwd_parts(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, parts_ptr, M, N, dy_stride, x_stride, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of g = dy w and of g x_hat of rows wider than a block, of which dx needs the means."""
    row, col, mask, part = part_at(from_the_end(), M, N, splits, BLOCK_M, BLOCK_N)
    mean = load_row(mean_ptr, row, M)[:, None]
    rstd = load_row(rstd_ptr, row, M)[:, None]
    g = load_tile(dy_ptr, row, col, dy_stride, mask)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    g = _affine(g, w_ptr, None, col, N)
    at = 2 * row * splits + part
    tl.store(parts_ptr + at, tl.sum(g, axis=1), mask=row < M)
    tl.store(parts_ptr + splits + at, tl.sum(g * ((x - mean) * rstd), axis=1), mask=row < M)


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, parts_ptr, dx_ptr, dwb_ptr, M, N, dy_stride, x_stride, splits,
    SPLITS: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = load_row(w_ptr, col, N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Programs are persistent: each sums dw and db over all its rows in registers, and writes them once
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        if NEED_DB:
            db += dy
        # a bias alone needs neither x nor its statistics
        if NEED_DX or NEED_DW:
            x = load_tile(x_ptr, row, col, x_stride, mask)
            mean = load_row(mean_ptr, row, M)[:, None]
            rstd = load_row(rstd_ptr, row, M)[:, None]
            x_hat = (x - mean) * rstd
            if NEED_DW:
                dw += dy * x_hat
            if NEED_DX:
                g = dy * w[None, :] if w_ptr is not None else dy
                if SPLITS:
                    g_sum = load_parts(parts_ptr, 2 * row, 2 * M, splits, SPLITS)
                    gx_sum = load_parts(parts_ptr, 2 * row + 1, 2 * M, splits, SPLITS)
                else:
                    g_sum, gx_sum = g, g * x_hat
                g_mean, gx_mean = sum_of(g_sum) / N, sum_of(gx_sum) / N
                dx = (g - g_mean[:, None] - x_hat * gx_mean[:, None]) * rstd
                store_tile(dx_ptr, row, col, N, dx, mask)
    store_sums(dwb_ptr, program, col, N, dw, db, NEED_DW, NEED_DB)


@typed_launcher
def layer_norm_fwd(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    M, N = x.shape
    y = x.new_empty(M, N)
    # saved in fp32: the backward divides by the same numbers
    mean, rstd = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
    most = 4096 if N > FWD_N else FWD_N
    c = launch_config.tile("layer_norm_fwd", N, x.itemsize, elements=4096, per_thread=32, max_block_n=most)
    splits = cdiv(N, c.block_n)
    grid, numbers, parts = (cdiv(M, c.block_m) * splits,), (M, N, x.stride(0), splits), None
    if splits > 1:
        parts = x.new_empty((M, 2, splits), dtype=torch.float32)
        launch(_fwd_parts, grid, x, parts, *numbers, **c.tile)
    launch(_fwd, grid, x, w, b, y, mean, rstd, parts, *numbers, eps, SPLITS=padded(splits), **c.tile)
    return y, mean, rstd


@typed_launcher
def layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor | None, mean: Tensor, rstd: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and dw and db side by side in ``dtype``; gradients that are not needed are empty."""
    M, N = x.shape
    columns = N * (need_dw + need_db)
    c, grid, dwb, p, splits = backward_grid("layer_norm_bwd", x, columns, dtype, pipelined=2)
    dx = x.new_empty((M, N) if need_dx else 0)
    tensors, numbers, parts = (dy, x, w, mean, rstd), (M, N, dy.stride(0), x.stride(0), splits), None
    if splits > 1 and need_dx:
        parts = x.new_empty((M, 2, splits), dtype=torch.float32)
        launch(_bwd_parts, (cdiv(M, p.block_m) * splits,), *tensors, parts, *numbers, **p.tile)
    flags = dict(SPLITS=padded(splits), NEED_DX=need_dx, NEED_DW=need_dw, NEED_DB=need_db, STAGES=c.stages)
    launch(_bwd, grid, *tensors, parts, dx, dwb, *numbers, **flags, **c.tile)
    return dx, column_sum(dwb, dtype) if columns else x.new_empty(0, dtype=dtype)


class LigerLayerNormFunction(torch.autograd.Function):
    """``apply(x, w, b, eps)``; w and b may be None."""

    @staticmethod
    def forward(ctx, x, w, b, eps):
        x2, w, b = rows_of(x), w if w is None else w.contiguous(), b if b is None else b.contiguous()
        y, mean, rstd = layer_norm_fwd(x2, w, b, eps)
        # of b nothing but its dtype is needed again
        ctx.save_for_backward(x2, w, mean, rstd)
        ctx.b_dtype = None if b is None else b.dtype
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        # dw and db are columns of one sum, in the dtype that holds both
        w_dtype = w.dtype if need_dw else ctx.b_dtype
        b_dtype = ctx.b_dtype if need_db else w_dtype
        dtype = torch.promote_types(w_dtype, b_dtype) if w_dtype else x.dtype
        dx, dwb = layer_norm_bwd(rows_of(dy), x, w, mean, rstd, need_dx, need_dw, need_db, dtype)
        N = x.shape[1]
        dw = dwb[:N].to(w_dtype) if need_dw else None
        return dx.view(dy.shape) if need_dx else None, dw, dwb[-N:].to(b_dtype) if need_db else None, None


def _shifted(*shape: int, dtype: torch.dtype) -> Tensor:
    return 300 + torch.randn(*shape, dtype=dtype)


def _tensors(*shape: int) -> dict[str, T]:
    return dict(x=T(shape), w=T(shape[-1:]), b=T(shape[-1:]))


@op(
    reference=reference,
    cases=[
        Case("vit", dict(_tensors(2, 17, 192), eps=1e-6)),
        Case("no-bias", dict(x=T((3, 9, 64)), w=T((64,)))),
        Case("odd", _tensors(7, 123)),
        Case("many-rows", _tensors(301, 72)),
        Case("large-mean", dict(_tensors(6, 160), x=T((6, 160), draw=_shifted))),
        # with a small eps, only rounding error would remain
        Case("two-columns", dict(_tensors(5, 2), eps=0.5)),
        Case("fp32-weight", dict(x=T((5, 64)), w=T((64,), dtype=torch.float32), b=T((64,), dtype=torch.float32))),
        Case("fp32-bias", dict(_tensors(5, 64), b=T((64,), dtype=torch.float32))),
        Case("wide-backward", _tensors(3, BWD_N + 5)),
        Case("wide", _tensors(2, FWD_N + 77)),
    ],
    cost=lambda x, w=None, b=None, **_: Cost(
        nbytes(x, x, w, b), nbytes(x, x, x, w, w, b), flops=(6 * x.numel(), 14 * x.numel())
    ),
)
def layer_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last dim, as ``F.layer_norm``.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; w and b (N,) or None, of any floating
    dtype. Returns a tensor of x's shape and dtype.
    """
    check_norm("layer_norm", x, w)
    if b is not None and b.shape != x.shape[-1:]:
        raise ValueError(f"layer_norm: b must have shape {tuple(x.shape[-1:])}, got {tuple(b.shape)}")
    if is_sharded(x) and (y := on_own_rows(layer_norm, x, w, b, eps=eps)) is not None:
        return y
    if not use_kernels(x, fusible=True):
        return reference(x, w, b, eps=eps)
    return LigerLayerNormFunction.apply(x, w, b, eps)
