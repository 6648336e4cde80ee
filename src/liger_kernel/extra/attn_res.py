"""Attention residuals: the input of a layer is an average of the outputs of all earlier blocks,
weighted by attention (arXiv:2603.15031).

    s_n = sum_d w_query_d w_norm_d x_nd,   x_n = v_n / sqrt(mean(v_n^2) + eps),   a = softmax(s),   h = sum_n a_n v_n

Shapes: v (..., N, D), w_query, w_norm (D,), h (..., D); N blocks, M = product of the leading dims.
Everything in fp32, rounded once.

The forward reads v once, with exponentials relative to the largest score so far. The backward sums
them again, relative to the largest of all, because scores in the hundreds have large rounding
errors. With g_n = sum_d dh_d v_nd and ds_n = a_n (g_n - sum_k a_k g_k),

    dv_n = a_n dh + ds_n / rms_n (w_query w_norm - x_n s_n / D),
    d(w_query w_norm) = sum over tokens and n of ds_n x_n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import (
    input_gradients,
    launch,
    once_differentiable,
    rows_of,
    shaped,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, div, exp, jit, load_row, load_tile, rows_in, rsqrt, store_tile, tile_at, tl

MAX_D = 8192  # columns of which one program holds five tensors in registers; the reference computes wider rows


def reference(v, w_query, w_norm, *, eps):
    f = v.to(acc(v.dtype))
    x = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    scores = (x * (w_query.to(f.dtype) * w_norm.to(f.dtype))).sum(-1, keepdim=True)
    return (torch.softmax(scores, -2) * f).sum(-2).to(v.dtype)


@jit
def _fwd(
    v_ptr, wq_ptr, wn_ptr, h_ptr, rstd_ptr, score_ptr, M, N, D, v_stride, n_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, col, mask = tile_at(tl.program_id(0), M, D, BLOCK_M, BLOCK_D)
    w = load_row(wq_ptr, col, D) * load_row(wn_ptr, col, D)
    v_ptrs = v_ptr + row[:, None] * v_stride + col[None, :]
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    h = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(N):
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        # scores are large, so are the errors that the hardware's rsqrt would give them
        rstd = rsqrt(tl.sum(v * v, axis=1) / D + tl.cast(eps, tl.float32))
        score = tl.sum(v * w[None, :], axis=1) * rstd
        tl.store(rstd_ptr + row * N + n, rstd, mask=row < M)
        tl.store(score_ptr + row * N + n, score, mask=row < M)
        new = tl.maximum(top, score)
        e = exp(score - new)
        shrink = exp(top - new)
        total = total * shrink + e
        h = h * shrink[:, None] + v * e[:, None]
        top = new
        v_ptrs += n_stride
    store_tile(h_ptr, row, col, D, (h / total[:, None]), mask)


@jit
def _bwd(
    dh_ptr, v_ptr, wq_ptr, wn_ptr, rstd_ptr, score_ptr, g_ptr, dv_ptr, dw_ptr,
    M, N, D, dh_stride, v_stride, n_stride, dv_stride, dn_stride,
    NEED_DV: tl.constexpr, NEED_DW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_D)
    w = load_row(wq_ptr, col, D) * load_row(wn_ptr, col, D)
    dw = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for tile in range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row, mask = rows_in(tile, M, col, D, BLOCK_M)
        dh = load_tile(dh_ptr, row, col, dh_stride, mask)
        top = tl.load(score_ptr + row * N, mask=row < M, other=0.0)
        for n in range(1, N):
            top = tl.maximum(top, tl.load(score_ptr + row * N + n, mask=row < M, other=0.0))
        v_ptrs = v_ptr + row[:, None] * v_stride + col[None, :]
        mean = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for n in range(N):
            a = tl.exp(tl.load(score_ptr + row * N + n, mask=row < M, other=0.0) - top)
            g = tl.sum(dh * tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32), axis=1)
            tl.store(g_ptr + row * N + n, g, mask=row < M)
            mean += a * g
            total += a
            v_ptrs += n_stride
        mean = div(mean, total)
        tl.debug_barrier()
        dv_ptrs = dv_ptr + row[:, None] * dv_stride + col[None, :]
        v_ptrs = v_ptr + row[:, None] * v_stride + col[None, :]
        for n in range(N):
            v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
            score = tl.load(score_ptr + row * N + n, mask=row < M, other=0.0)
            rstd = tl.load(rstd_ptr + row * N + n, mask=row < M, other=0.0)
            a = div(tl.exp(score - top), total)
            ds = a * (tl.load(g_ptr + row * N + n, mask=row < M, other=0.0) - mean)
            x = v * rstd[:, None]
            if NEED_DV:
                dv = a[:, None] * dh + (ds * rstd)[:, None] * (w[None, :] - x * (score / D)[:, None])
                tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=mask)
                dv_ptrs += dn_stride
            if NEED_DW:
                dw += tl.where(row < M, ds, 0.0)[:, None] * x
            v_ptrs += n_stride
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * D + col, tl.sum(dw, axis=0), mask=col < D)


@typed_launcher
def attn_res_fwd(v: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    M, N, D = v.shape
    h = v.new_empty(M, D)
    rstd, score = stats = tuple(v.new_empty(M, N, dtype=torch.float32) for _ in range(2))
    if not tracing(v):
        # as many values in flight as in other norms; tiles not measured
        c = launch_config.tile("attn_res_fwd", D, v.itemsize, elements=4096, per_thread=16)
        tile = dict(BLOCK_M=c.block_m, BLOCK_D=c.block_n, num_warps=c.num_warps)
        numbers = M, N, D, v.stride(0), v.stride(1), eps
        launch(_fwd, (cdiv(M, c.block_m),), v, w_query, w_norm, h, *stats, *numbers, **tile)
    return h, rstd, score


@typed_launcher
def attn_res_bwd(
    dh: Tensor, v: Tensor, w_query: Tensor, w_norm: Tensor, stats: list[Tensor], needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dv, dw_query and dw_norm; gradients that are not needed are empty."""
    M, N, D = v.shape
    need_dv, need_dq, need_dn = needed
    dv = torch.empty_like(v) if need_dv else v.new_empty(0, 0, 0)
    dq, dn = w_query.new_empty(D if need_dq else 0), w_norm.new_empty(D if need_dn else 0)
    if tracing(v):
        return dv, dq, dn
    # a tile reads v twice, the second time from the cache
    c = launch_config.tile("attn_res_bwd", D, v.itemsize, elements=2048, per_thread=8)
    programs = min(2 * launch_config.processors(), cdiv(M, c.block_m))
    partials = v.new_empty((programs, D) if need_dq or need_dn else 0, dtype=torch.float32)
    g = torch.empty_like(stats[0])
    # stored, so that both sweeps use the same bits: if one block has all the weight, its g and the
    # mean of all must cancel
    strides = dh.stride(0), v.stride(0), v.stride(1), dv.stride(0), dv.stride(1)
    tile = dict(BLOCK_M=c.block_m, BLOCK_D=c.block_n, num_warps=c.num_warps)
    flags = dict(NEED_DV=need_dv, NEED_DW=need_dq or need_dn, **tile)
    launch(_bwd, (programs,), dh, v, w_query, w_norm, *stats, g, dv, partials, M, N, D, *strides, **flags)
    if need_dq or need_dn:
        dw = column_sum(partials, torch.float32)
        dq = torch.mul(dw, w_norm).to(dq.dtype) if need_dq else dq
        dn = torch.mul(dw, w_query).to(dn.dtype) if need_dn else dn
    return dv, dq, dn


class LigerAttnResFunction(torch.autograd.Function):
    """``apply(V, w_query, w_norm, eps)`` with V (N, ..., D)."""

    @staticmethod
    def forward(ctx, V, w_query, w_norm, eps):
        ctx.shape = V.shape
        v = V.reshape(V.shape[0], V.shape[1:-1].numel(), V.shape[-1]).transpose(0, 1)
        v = v if v.stride(-1) == 1 else v.contiguous()
        w_query, w_norm = w_query.contiguous(), w_norm.contiguous()
        h, *stats = attn_res_fwd(v, w_query, w_norm, eps)
        ctx.save_for_backward(v, w_query, w_norm, *stats)
        return shaped(h, V.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        needed = list(ctx.needs_input_grad[:3])
        v, w_query, w_norm, *stats = ctx.saved_tensors
        dv, dq, dn = attn_res_bwd(rows_of(dh), v, w_query, w_norm, stats, needed)
        return input_gradients(ctx, (dv.transpose(0, 1).reshape(ctx.shape) if needed[0] else None, dq, dn))


def _tensors(*shape: int, dtype: torch.dtype | None = None) -> dict[str, T]:
    weight = T(shape[-1:], dtype=dtype)
    return dict(v=T(shape), w_query=weight, w_norm=weight)


@op(
    reference=reference,
    cases=[
        Case("blocks", _tensors(2, 9, 4, 64)),
        Case("many-blocks", dict(_tensors(3, 41, 48), eps=1e-5)),
        Case("one-block", _tensors(5, 1, 33)),
        Case("fp32-weights", _tensors(7, 3, 40, dtype=torch.float32)),
    ],
    cost=lambda v, w_query, w_norm, **_: Cost(
        nbytes(v) + nbytes(v) // v.shape[-2],
        2 * nbytes(v) + nbytes(v) // v.shape[-2],
        flops=(6 * v.numel(), 12 * v.numel()),
    ),
)
def attn_res(v: Tensor, w_query: Tensor, w_norm: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Average of v (..., N, D) over its N blocks, weighted by the softmax of ``w_query .
    (rms_norm(v_n) * w_norm)``; any N, any strides."""
    if v.ndim < 2 or not v.is_floating_point():
        raise ValueError(f"attn_res: v must have shape (..., N, D), got {tuple(v.shape)}")
    checks.shape("attn_res", v.shape[-1:], w_query=w_query, w_norm=w_norm)
    if not use_kernels(v) or v.shape[-1] > MAX_D or not v.numel():
        return reference(v, w_query, w_norm, eps=eps)
    return LigerAttnResFunction.apply(v.movedim(-2, 0), w_query, w_norm, eps)
