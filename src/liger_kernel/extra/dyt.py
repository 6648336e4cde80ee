"""Dynamic tanh, a replacement for a norm: ``y = tanh(alpha * x) * gamma + beta``, in fp32, rounded
once (Zhu et al., arXiv:2503.10622).

Shapes: x (..., N), alpha of one element, gamma (N,), beta (N,), y like x.  M = product of the
leading dims.  With t = tanh(alpha x) and
s = (1 - t^2) gamma dy, dx = alpha s, dalpha = sum x s, dgamma = sum over rows of t dy, dbeta = sum
over rows of dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import (
    add_exactly,
    cdiv,
    jit,
    load_row,
    load_tile,
    own_block,
    rows_in,
    store_tile,
    tanh,
    tanh_slope,
    tl,
)


def reference(x, alpha, gamma, beta):
    dtype = acc(x.dtype)
    y = torch.tanh(alpha.to(dtype) * x.to(dtype)) * gamma.to(dtype)
    return (y if beta is None else y + beta.to(dtype)).to(x.dtype)


@jit
def _fwd(
    x_ptr, alpha_ptr, gamma_ptr, beta_ptr, y_ptr, M, N, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask = own_block(M, N, BLOCK_M, BLOCK_N)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    y = tanh(alpha * x) * load_row(gamma_ptr, col, N)[None, :]
    if beta_ptr is not None:
        y += load_row(beta_ptr, col, N)[None, :]
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _bwd(
    dy_ptr, x_ptr, alpha_ptr, gamma_ptr, dx_ptr, dalpha_ptr, dgamma_ptr, dbeta_ptr, M, N, dy_stride, x_stride,
    NEED_DX: tl.constexpr, NEED_DALPHA: tl.constexpr, NEED_DGAMMA: tl.constexpr, NEED_DBETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes a block of columns, and every so many rows of it."""
    blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    gamma = load_row(gamma_ptr, col, N)
    dalpha = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    lost = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dgamma = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbeta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // blocks, num_stages=STAGES):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        if NEED_DBETA:
            dbeta += dy
        if NEED_DX or NEED_DALPHA or NEED_DGAMMA:
            x = load_tile(x_ptr, row, col, x_stride, mask)
            s = tanh_slope(alpha * x) * dy * gamma[None, :]
            if NEED_DGAMMA:
                dgamma += dy * tanh(alpha * x)
            if NEED_DALPHA:
                dalpha, lost = add_exactly(dalpha, s * x, lost)  # millions of terms of either sign may leave little
            if NEED_DX:
                store_tile(dx_ptr, row, col, N, (alpha * s), mask)
    if NEED_DALPHA:
        tl.store(dalpha_ptr + tl.program_id(0), tl.sum(tl.sum(dalpha.to(tl.float64), axis=0), axis=0))
    if NEED_DGAMMA:
        tl.store(dgamma_ptr + program.to(tl.int64) * N + col, tl.sum(dgamma, axis=0), mask=col < N)
    if NEED_DBETA:
        tl.store(dbeta_ptr + program.to(tl.int64) * N + col, tl.sum(dbeta, axis=0), mask=col < N)


@typed_launcher
def dyt_fwd(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    M, N = x.shape
    y = x.new_empty(M, N)
    c = launch_config.tile("dyt_fwd", N, x.itemsize, elements=2048, max_block_n=2048)
    numbers = M, N, x.stride(0)
    tensors = x, alpha, gamma, beta, y
    launch(_fwd, (cdiv(M, c.block_m) * cdiv(N, c.block_n),), *tensors, *numbers, **c.tile)
    return y


@typed_launcher
def dyt_bwd(
    dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None, need_dx: bool, need_dalpha: bool,
    need_dgamma: bool, need_dbeta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; gradients that are not needed are empty."""
    M, N = x.shape
    c = launch_config.tile("dyt_bwd", N, x.itemsize, elements=1024, per_thread=8, max_block_n=1024, pipelined=2)
    blocks = cdiv(N, c.block_n)
    programs = max(1, min(cdiv(4 * c.per_sm * launch_config.processors(), max(blocks, 1)), cdiv(M, c.block_m)))
    dx = x.new_empty((M, N) if need_dx else 0)
    a = x.new_empty(programs * blocks if need_dalpha else 0, dtype=torch.float64)
    g, b = (x.new_empty((programs, N) if need else 0, dtype=torch.float32) for need in (need_dgamma, need_dbeta))
    needs = dict(NEED_DX=need_dx, NEED_DALPHA=need_dalpha, NEED_DGAMMA=need_dgamma, NEED_DBETA=need_dbeta)
    numbers = M, N, dy.stride(0), x.stride(0)
    launch(_bwd, (programs * blocks,), dy, x, alpha, gamma, dx, a, g, b, *numbers, **needs, STAGES=c.stages, **c.tile)
    dalpha = a.sum().to(alpha.dtype).view(1) if need_dalpha else x.new_empty(0)
    return dx, dalpha, column_sum(g, gamma.dtype), b if beta is None else column_sum(b, beta.dtype)


class LigerDyTFunction(torch.autograd.Function):
    """``apply(x, alpha, gamma, beta or None)``."""

    @staticmethod
    def forward(ctx, x, alpha, gamma, beta):
        x2, gamma, beta = rows_of(x), gamma.contiguous(), beta if beta is None else beta.contiguous()
        ctx.save_for_backward(x2, alpha, gamma, beta)
        return shaped(dyt_fwd(x2, alpha, gamma, beta), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        return input_gradients(ctx, dyt_bwd(rows_of(dy), *saved, *ctx.needs_input_grad), (dy.shape, saved[1].shape))


def _tensors(*shape: int, dtype: torch.dtype | None = None) -> dict[str, T]:
    weight = T(shape[-1:], dtype=dtype)
    return dict(x=T(shape), alpha=T((1,), dtype=dtype), gamma=weight, beta=weight)


@op(
    reference=reference,
    cases=[
        Case("vit", _tensors(2, 9, 96)),
        Case("no-beta", dict(x=T((7, 64)), alpha=T((1,)), gamma=T((64,)))),
        Case("odd", _tensors(5, 123)),
        Case("one-column", _tensors(5, 1)),
        Case("two-blocks", _tensors(19, 2100)),
        Case("fp32-weights", _tensors(6, 40, dtype=torch.float32)),
    ],
    cost=lambda x, alpha, gamma, beta=None: Cost(
        nbytes(x, x, gamma, beta), nbytes(x, x, x, gamma, gamma, beta), flops=(4 * x.numel(), 10 * x.numel())
    ),
)
def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    """``tanh(alpha * x) * gamma + beta`` over the last dim.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; alpha () or (1,); gamma (N,); beta (N,) or
    None. Returns a tensor of x's shape and dtype.
    """
    checks.floating("dyt", x=x)
    checks.one_element("dyt", alpha=alpha)
    checks.shape("dyt", x.shape[-1:], gamma=gamma, beta=beta)
    if not use_kernels(x, fusible=True):
        return reference(x, alpha, gamma, beta)
    return LigerDyTFunction.apply(x, alpha, gamma, beta)
