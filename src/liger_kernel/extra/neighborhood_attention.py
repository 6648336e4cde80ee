"""Neighbourhood attention in one dimension: a query sees the keys at most ``kernel_size // 2``
steps of ``dilation`` away (arXiv:2504.16922).

    o_t = sum_w p_tw v_(t + w dilation),   p_t = softmax over w of scale q_t . k_(t + w dilation),

for |w| <= kernel_size // 2.

Shapes: q, k, v, o (B, H, T, D).  There are no keys before the first and after the last, so queries
at the borders see fewer keys.

A program holds a block of queries and loops over w. It reads the rows of k and v once for each w,
from the cache. In the backward, dq gathers from the keys of a query, and dk and dv from the queries
of a key, so no sum is accumulated in memory.

p is exp(s - top) * share: the largest score and the inverse of the sum are stored separately. Their
lse would be rounded relative to its own size, an error of p. All kernels multiply q k by the scale
last, so the scores in the backward are bit-identical to the forward's. ``bench/cases/attention.py``
has the shapes of real models and the rivals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, once_differentiable, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, exp_of, jit, load_tile, mask_of, store_tile, tl
from liger_kernel.ops.attention.heads import new_like, unit

MAX_D = 1024  # channels of which a program holds five tensors in registers; the reference computes larger heads


def reference(q, k, v, *, kernel_size, dilation, scale):
    dtype, length, reach = acc(q.dtype), q.shape[2], kernel_size // 2 * dilation
    at = torch.arange(length, device=q.device)[:, None] + torch.arange(-reach, reach + 1, dilation, device=q.device)
    inside = (at >= 0) & (at < length)
    at = at.clamp(0, length - 1)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = (q.to(dtype)[..., None, :] * k.to(dtype)[:, :, at]).sum(-1) * scale
    p = torch.softmax(scores.masked_fill(~inside, -float("inf")), -1)
    return (p[..., None] * v.to(dtype)[:, :, at]).sum(-2).to(q.dtype)


@jit
def _place(T, H, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Batch, head, tokens and columns of a program."""
    blocks = tl.cdiv(T, BLOCK_T)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_T
    return bh // H, bh % H, first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)


@jit
def _rows(ptr, row, stride, col, D, T):
    """Rows of fp32 values, zero where there is no such token."""
    mask = ((row >= 0) & (row < T))[:, None] & (col < D)[None, :]
    return load_tile(ptr, row, col, stride, mask)


@jit
def _score(q, k, scale, inside):
    """The same bits in every kernel: what is chosen here cannot share a rounding with what is
    subtracted after it."""
    return tl.where(inside, tl.sum(q * k, axis=1) * scale, -float("inf"))


@jit
def _fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, top_ptr, share_ptr,
    T, H, D, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, scale, kernel_size, dilation,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    b, h, t, col = _place(T, H, BLOCK_T, BLOCK_D)
    q = _rows(q_ptr + b * qb + h * qh, t, qt, col, D, T)
    scale = tl.cast(scale, tl.float32)
    top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    o = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for n in range(kernel_size):
        j = t + (n - kernel_size // 2) * dilation
        s = _score(q, _rows(k_ptr + b * kb + h * kh, j, kt, col, D, T), scale, (j >= 0) & (j < T))
        new = tl.maximum(top, s)
        base = tl.where(new == -float("inf"), 0.0, new)
        e = exp_of(s - base, PRECISE)
        shrink = exp_of(top - base, PRECISE)
        total = total * shrink + e
        o = o * shrink[:, None] + e[:, None] * _rows(v_ptr + b * vb + h * vh, j, vt, col, D, T)
        top = new
    total = tl.where(t < T, total, 1.0)
    mask = mask_of(t, T, col, D)
    store_tile(o_ptr + b * ob + h * oh, t, col, ot, o / total[:, None], mask)
    tl.store(top_ptr + (b * H + h) * T + t, top, mask=t < T)
    tl.store(share_ptr + (b * H + h) * T + t, 1.0 / total, mask=t < T)


@jit
def _bwd_dq(
    do_ptr, q_ptr, k_ptr, v_ptr, top_ptr, share_ptr, dq_ptr, mean_ptr,
    T, H, D, gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, scale, kernel_size, dilation,
    NEED_DQ: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The mean of do . v under p, which dk needs, too; then dq."""
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    b, h, t, col = _place(T, H, BLOCK_T, BLOCK_D)
    q = _rows(q_ptr + b * qb + h * qh, t, qt, col, D, T)
    scale = tl.cast(scale, tl.float32)
    do = _rows(do_ptr + b * gb + h * gh, t, gt, col, D, T)
    top = tl.load(top_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
    share = tl.load(share_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
    mean = tl.zeros((BLOCK_T,), tl.float32)
    for n in range(kernel_size):
        j = t + (n - kernel_size // 2) * dilation
        s = _score(q, _rows(k_ptr + b * kb + h * kh, j, kt, col, D, T), scale, (j >= 0) & (j < T) & (t < T))
        p = exp_of(s - top, PRECISE) * share
        mean += p * tl.sum(do * _rows(v_ptr + b * vb + h * vh, j, vt, col, D, T), axis=1)
    tl.store(mean_ptr + (b * H + h) * T + t, mean, mask=t < T)
    if NEED_DQ:
        dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for n in range(kernel_size):
            j = t + (n - kernel_size // 2) * dilation
            k = _rows(k_ptr + b * kb + h * kh, j, kt, col, D, T)
            p = exp_of(_score(q, k, scale, (j >= 0) & (j < T) & (t < T)) - top, PRECISE) * share
            ds = p * (tl.sum(do * _rows(v_ptr + b * vb + h * vh, j, vt, col, D, T), axis=1) - mean)
            dq += ds[:, None] * k
        dq *= scale
        mask = mask_of(t, T, col, D)
        store_tile(dq_ptr + b * ob + h * oh, t, col, ot, dq, mask)


@jit
def _bwd_dkv(
    do_ptr, q_ptr, k_ptr, v_ptr, top_ptr, share_ptr, mean_ptr, dk_ptr, dv_ptr,
    T, H, D, gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, scale, kernel_size, dilation,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    b, h, j, col = _place(T, H, BLOCK_T, BLOCK_D)
    k = _rows(k_ptr + b * kb + h * kh, j, kt, col, D, T)
    v = _rows(v_ptr + b * vb + h * vh, j, vt, col, D, T)
    scale = tl.cast(scale, tl.float32)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for n in range(kernel_size):
        t = j - (n - kernel_size // 2) * dilation
        inside = (t >= 0) & (t < T)
        q = _rows(q_ptr + b * qb + h * qh, t, qt, col, D, T)
        do = _rows(do_ptr + b * gb + h * gh, t, gt, col, D, T)
        top = tl.load(top_ptr + (b * H + h) * T + t, mask=inside, other=0.0)
        share = tl.load(share_ptr + (b * H + h) * T + t, mask=inside, other=0.0)
        p = exp_of(_score(q, k, scale, inside & (j < T)) - top, PRECISE) * share
        if NEED_DV:
            dv += p[:, None] * do
        if NEED_DK:
            mean = tl.load(mean_ptr + (b * H + h) * T + t, mask=inside, other=0.0)
            dk += (p * (tl.sum(do * v, axis=1) - mean))[:, None] * q
    mask = mask_of(j, T, col, D)
    if NEED_DK:
        store_tile(dk_ptr + b * ob + h * oh, j, col, ot, dk * scale, mask)
    if NEED_DV:
        store_tile(dv_ptr + b * ob + h * oh, j, col, ot, dv, mask)


def _grid(kernel: str, q: Tensor) -> tuple[tuple[int], dict[str, int]]:
    # 16 values of each tensor per thread, for up to five tensors; not measured
    c = launch_config.tile(kernel, q.shape[3], q.itemsize, elements=2048, per_thread=16)
    tile = dict(BLOCK_T=c.block_m, BLOCK_D=c.block_n, num_warps=c.num_warps)
    return (cdiv(q.shape[2], c.block_m) * q.shape[0] * q.shape[1],), tile


@typed_launcher
def neighborhood_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    o, (top, share) = new_like(q), (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    if not tracing(q):
        grid, tile = _grid("neighborhood_attention_fwd", q)
        strides = [s for t in (q, k, v, o) for s in t.stride()[:3]]
        numbers = q.shape[2], q.shape[1], q.shape[3], *strides, scale, kernel_size, dilation
        launch(_fwd, grid, q, k, v, o, top, share, *numbers, **tile)
    return o, top, share


@typed_launcher
def neighborhood_attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, top: Tensor, share: Tensor, kernel_size: int, dilation: int,
    scale: float, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv; gradients that are not needed are empty."""
    dq, dk, dv = (new_like(q, need) for need in needed)
    if not tracing(q):
        like = next(d for d, need in zip((dq, dk, dv), needed) if need)
        strides = [s for t in (do, q, k, v, like) for s in t.stride()[:3]]
        common = q.shape[2], q.shape[1], q.shape[3], *strides, scale, kernel_size, dilation
        grid, tile = _grid("neighborhood_attention_bwd", q)
        mean = torch.empty_like(top)
        if needed[0] or needed[1]:
            launch(_bwd_dq, grid, do, q, k, v, top, share, dq, mean, *common, NEED_DQ=needed[0], **tile)
        if needed[1] or needed[2]:
            tensors = do, q, k, v, top, share, mean, dk, dv
            launch(_bwd_dkv, grid, *tensors, *common, NEED_DK=needed[1], NEED_DV=needed[2], **tile)
    return dq, dk, dv


class LigerFusedNeighborhoodAttentionFunction(torch.autograd.Function):
    """``apply(query, key, value, kernel_size=7, dilation=1, scale=None)``."""

    @staticmethod
    def forward(ctx, query, key, value, kernel_size=7, dilation=1, scale=None):
        q, k, v = unit(query), unit(key), unit(value)
        ctx.options = kernel_size, dilation, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        o, *sums = neighborhood_attention_fwd(q, k, v, *ctx.options)
        ctx.save_for_backward(q, k, v, *sums)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        needed = list(ctx.needs_input_grad[:3])
        return input_gradients(ctx, neighborhood_attention_bwd(unit(do), *ctx.saved_tensors, *ctx.options, needed))


def _qkv(*shape: int) -> dict[str, T]:
    return dict(q=T(shape), k=T(shape), v=T(shape))


@op(
    reference=reference,
    cases=[
        Case("natten", dict(**_qkv(2, 3, 21, 32))),
        Case("dilated", dict(**_qkv(1, 2, 37, 20), kernel_size=5, dilation=3, scale=0.3)),
        Case("wider-than-the-sequence", dict(**_qkv(3, 1, 4, 8), kernel_size=13)),
        Case("itself-only", dict(**_qkv(2, 1, 3, 16), kernel_size=1)),
    ],
    cost=lambda q, k, v, *, kernel_size=7, **_: Cost(
        nbytes(q, k, v, q),
        nbytes(q, q, k, k, v, v, q),
        flops=(4 * kernel_size * q.numel(), 10 * kernel_size * q.numel()),
    ),
)
def neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attention of q to the ``kernel_size`` keys around it, ``dilation`` apart, fewer at the
    borders; all (B, H, T, D), any strides.

    q, k and v have one dtype: fp32, fp16, bf16 or fp64; returns a tensor like q. ``scale`` defaults
    to ``D ** -0.5``. Memory grows with T, not T squared.
    """
    if q.ndim != 4 or not q.is_floating_point():
        raise ValueError(f"neighborhood_attention: q must have shape (B, H, T, D), got {tuple(q.shape)}")
    for name, t in (("k", k), ("v", v)):
        if t.shape != q.shape or t.dtype != q.dtype:
            wanted, got = f"{tuple(q.shape)} {q.dtype}", f"{tuple(t.shape)} {t.dtype}"
            raise ValueError(f"neighborhood_attention: {name} must have the shape and dtype of q, {wanted}, got {got}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"neighborhood_attention: kernel_size must be odd and positive, got {kernel_size}")
    checks.positive("neighborhood_attention", dilation=dilation)
    if not use_kernels(q) or q.shape[-1] > MAX_D or not q.numel():
        return reference(q, k, v, kernel_size=kernel_size, dilation=dilation, scale=scale)
    return LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, kernel_size, dilation, scale)
