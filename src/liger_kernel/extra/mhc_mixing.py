"""Mix residual streams with given coefficients, for the input of a layer and for writing back its
output (DeepSeek, arXiv:2512.24880).

A mixture is ``y_o = sum_i a_oi x_i + p_o f`` of O outputs; one output and no f for x_in.
Shapes and letters are those of ``mhc``, which computes the coefficients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.extra.mhc import _check
from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, rows_of, shaped, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, own_block, rows_at, store_tile, tl


def pre_reference(x, h_pre):
    dtype = acc(x.dtype)
    return (h_pre.to(dtype)[..., None] * x.to(dtype)).sum(-2).to(x.dtype)


def post_res_reference(x, f_out, h_post, h_res):
    dtype = acc(x.dtype)
    y = h_post.to(dtype)[..., None] * f_out.to(dtype)[..., None, :]
    for i in range(x.shape[-2]):
        y = y + h_res.to(dtype)[..., i, None] * x.to(dtype)[..., i, None, :]
    return y.to(x.dtype)


@jit
def _load_streams(x_ptr, row, i, col, x_stride, i_stride, mask):
    """Columns of all streams of some tokens, in fp32."""
    # in 64 bits: the strides of a slice of a large tensor pass 2^31
    x_ptrs = x_ptr + (row * x_stride)[:, None, None] + (i.to(tl.int64) * i_stride)[None, :, None] + col[None, None, :]
    return tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)


@jit
def _mix_fwd(
    x_ptr, f_ptr, a_ptr, p_ptr, y_ptr, T, C, H, O, x_stride, i_stride, f_stride,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, col, flat = own_block(T, C, BLOCK_T, BLOCK_C)
    i = tl.arange(0, BLOCK_H)
    streams = mask_of(row, T, i, H)
    x = _load_streams(x_ptr, row, i, col, x_stride, i_stride, streams[:, :, None] & (col < C)[None, None, :])
    if f_ptr is not None:
        f = load_tile(f_ptr, row, col, f_stride, flat)
    for o in range(O):
        a = tl.load(a_ptr + ((row * O + o) * H)[:, None] + i[None, :], mask=streams, other=0.0).to(tl.float32)
        y = tl.sum(x * a[:, :, None], axis=1)
        if f_ptr is not None:
            y += tl.load(p_ptr + row * O + o, mask=row < T, other=0.0).to(tl.float32)[:, None] * f
        tl.store(y_ptr + ((row * O + o) * C)[:, None] + col[None, :], y.to(y_ptr.dtype.element_ty), mask=flat)


@jit
def _mix_bwd(
    dy_ptr, x_ptr, f_ptr, a_ptr, p_ptr, dx_ptr, df_ptr, da_ptr, dp_ptr,
    T, C, H, O, dy_stride, o_stride, x_stride, i_stride, f_stride,
    NEED_DX: tl.constexpr, NEED_DF: tl.constexpr, NEED_DA: tl.constexpr, NEED_DP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_T)
    i = tl.arange(0, BLOCK_H)
    outputs = tl.arange(0, BLOCK_O)
    streams = mask_of(row, T, i, H)
    da = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_H), tl.float32)
    dp = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, C, BLOCK_C):
        col = start + tl.arange(0, BLOCK_C)
        flat = mask_of(row, T, col, C)
        full = streams[:, :, None] & (col < C)[None, None, :]
        if NEED_DA:
            x = _load_streams(x_ptr, row, i, col, x_stride, i_stride, full)
        if NEED_DP:
            f = load_tile(f_ptr, row, col, f_stride, flat)
        dx = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_C), tl.float32)
        df = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for o in range(O):
            dy = load_tile(dy_ptr + tl.cast(o, tl.int64) * o_stride, row, col, dy_stride, flat)
            if NEED_DX:
                a = tl.load(a_ptr + ((row * O + o) * H)[:, None] + i[None, :], mask=streams, other=0.0).to(tl.float32)
                dx += a[:, :, None] * dy[:, None, :]
            if NEED_DF:
                df += tl.load(p_ptr + row * O + o, mask=row < T, other=0.0).to(tl.float32)[:, None] * dy
            if NEED_DA:
                da += tl.where((outputs == o)[None, :, None], tl.sum(x * dy[:, None, :], axis=2)[:, None, :], 0.0)
            if NEED_DP:
                dp += tl.where((outputs == o)[None, :], tl.sum(f * dy, axis=1)[:, None], 0.0)
        if NEED_DX:
            at = ((row * H)[:, None] + i[None, :])[:, :, None] * C + col[None, None, :]
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=full)
        if NEED_DF:
            store_tile(df_ptr, row, col, C, df, flat)
    known = mask_of(row, T, outputs, O)
    if NEED_DA:
        at = ((row * O)[:, None] + outputs[None, :])[:, :, None] * H + i[None, None, :]
        tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=known[:, :, None] & (i < H)[None, None, :])
    if NEED_DP:
        tl.store(dp_ptr + (row * O)[:, None] + outputs[None, :], dp.to(dp_ptr.dtype.element_ty), mask=known)


def _mix_tile(kernel: str, x: Tensor, per_thread: int) -> dict[str, int]:
    """``per_thread`` values of x, all streams of each column, for each of 128 threads. Not
    measured."""
    block_h = next_power_of_2(x.shape[1])
    columns, each = max(16, 128 * per_thread // block_h), max(1, per_thread // block_h)
    c = launch_config.tile(kernel, x.shape[2], x.itemsize, elements=columns, max_block_n=columns, per_thread=each)
    return dict(BLOCK_T=c.block_m, BLOCK_H=block_h, BLOCK_C=c.block_n, num_warps=c.num_warps)


@typed_launcher
def mhc_mix_fwd(x: Tensor, a: Tensor, f: Tensor | None, p: Tensor | None) -> Tensor:
    (M, H, C), outputs = x.shape, a.shape[1]
    y = x.new_empty(M, outputs, C)
    if not tracing(x):
        tile = _mix_tile("mhc_mix_fwd", x, 32)
        grid = (cdiv(M, tile["BLOCK_T"]) * cdiv(C, tile["BLOCK_C"]),)
        numbers = M, C, H, outputs, x.stride(0), x.stride(1), 0 if f is None else f.stride(0)
        launch(_mix_fwd, grid, x, f, a, p, y, *numbers, **tile)
    return y


@typed_launcher
def mhc_mix_bwd(
    dy: Tensor, x: Tensor, a: Tensor, f: Tensor | None, p: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, da, df and dp; gradients that are not needed are empty."""
    (M, H, C), outputs = x.shape, a.shape[1]
    dx, da, df, dp = (
        x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip((x, a, f, p), needed)
    )
    if not tracing(x):
        tile = _mix_tile("mhc_mix_bwd", x, 16)
        strides = dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), 0 if f is None else f.stride(0)
        flags = dict(zip(("NEED_DX", "NEED_DA", "NEED_DF", "NEED_DP"), needed), BLOCK_O=next_power_of_2(outputs))
        numbers = M, C, H, outputs, *strides
        launch(_mix_bwd, (cdiv(M, tile["BLOCK_T"]),), dy, x, f, a, p, dx, df, da, dp, *numbers, **flags, **tile)
    return dx, da, df, dp


def _streams(x: Tensor) -> Tensor:
    """``x`` as (T, H, C) with unit column stride."""
    x = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


class LigerMHCPreFunction(torch.autograd.Function):
    """``apply(x, h_pre)``."""

    @staticmethod
    def forward(ctx, x, h_pre):
        ctx.shape = x.shape
        x, a = _streams(x), h_pre.reshape(-1, 1, x.shape[-2]).contiguous()
        ctx.save_for_backward(x, a)
        return shaped(mhc_mix_fwd(x, a, None, None), (*ctx.shape[:-2], ctx.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needed = [*ctx.needs_input_grad, False, False]
        dx, da, _, _ = mhc_mix_bwd(rows_of(dy)[:, None], *ctx.saved_tensors, None, None, needed)
        return input_gradients(ctx, (dx, da), (ctx.shape, ctx.shape[:-1]))


class LigerMHCPostResFunction(torch.autograd.Function):
    """``apply(x, f_out, h_post, h_res)``."""

    @staticmethod
    def forward(ctx, x, f_out, h_post, h_res):
        ctx.shape, H = x.shape, x.shape[-2]
        x, f = _streams(x), rows_of(f_out)
        p, a = h_post.reshape(-1, H).contiguous(), h_res.reshape(-1, H, H).contiguous()
        ctx.save_for_backward(x, a, f, p)
        return shaped(mhc_mix_fwd(x, a, f, p), ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_dx, need_df, need_dp, need_da = ctx.needs_input_grad
        dx, da, df, dp = mhc_mix_bwd(_streams(dy), *ctx.saved_tensors, [need_dx, need_da, need_df, need_dp])
        outer, (H, C) = ctx.shape[:-2], ctx.shape[-2:]
        shapes = (*outer, H, C), (*outer, C), (*outer, H), (*outer, H, H)
        return input_gradients(ctx, (dx, df, dp, da), shapes)


@op(
    reference=pre_reference,
    cases=[
        Case("streams-4", dict(x=T((2, 9, 4, 24)), h_pre=T((2, 9, 4), dtype=torch.float32))),
        Case("odd", dict(x=T((5, 3, 33)), h_pre=T((5, 3)))),
    ],
    cost=lambda x, h_pre: Cost(
        nbytes(x, h_pre, x[..., 0, :]), nbytes(x, x, h_pre, h_pre, x[..., 0, :]), flops=(2 * x.numel(), 3 * x.numel())
    ),
)
def mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre_i x_i`` of streams x (..., H, C) and h_pre (..., H), as (..., C).

    x in fp32, fp16, bf16 or fp64, h_pre of any floating dtype; computed in fp32 (fp64 if x is) and
    rounded once, to x's dtype.
    """
    _check("mhc_pre", x, h_pre=(h_pre, x.shape[:-1]))
    if not use_kernels(x, fusible=True) or not x.numel():
        return pre_reference(x, h_pre)
    return LigerMHCPreFunction.apply(x, h_pre)


@op(
    reference=post_res_reference,
    cases=[
        Case(
            "streams-4",
            dict(
                x=T((2, 9, 4, 24)),
                f_out=T((2, 9, 24)),
                h_post=T((2, 9, 4), dtype=torch.float32),
                h_res=T((2, 9, 4, 4), dtype=torch.float32),
            ),
        ),
        Case("odd", dict(x=T((5, 3, 33)), f_out=T((5, 33)), h_post=T((5, 3)), h_res=T((5, 3, 3)))),
    ],
    cost=lambda x, f_out, h_post, h_res: Cost(
        nbytes(x, x, f_out, h_post, h_res),
        nbytes(x, x, x, f_out, f_out, h_post, h_post, h_res, h_res),
        flops=(2 * x.numel() * (x.shape[-2] + 1), 4 * x.numel() * (x.shape[-2] + 1)),
    ),
)
def mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """``y_o = sum_i h_res_oi x_i + h_post_o f_out`` of streams x (..., H, C), f_out (..., C),
    h_post (..., H) and h_res (..., H, H), like x.

    x and f_out in fp32, fp16, bf16 or fp64, the coefficients of any floating dtype; computed in
    fp32 (fp64 if x is) and rounded once, to x's dtype.
    """
    outer, H, C = x.shape[:-2], x.shape[-2:-1], x.shape[-1:]
    _check("mhc_post_res", x, f_out=(f_out, outer + C), h_post=(h_post, outer + H), h_res=(h_res, outer + H + H))
    if not use_kernels(x, fusible=True) or not x.numel():
        return post_res_reference(x, f_out, h_post, h_res)
    return LigerMHCPostResFunction.apply(x, f_out, h_post, h_res)
