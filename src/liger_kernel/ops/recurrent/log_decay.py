"""The gates by which recurrent layers forget (Mamba, arXiv:2312.00752; Kimi-Linear,
arXiv:2510.26692): the logarithm of a decay,

    g = -e^A_log softplus(a + dt_bias),    or with a bound L < 0    g = L sigmoid(e^A_log (a + dt_bias)).

Shapes: a and g (..., N), dt_bias (N,), A_log (H,), where H divides N: one rate for the N / H columns
of a head.  M = product of the leading dims.

With y = a + dt_bias, r = e^A_log and s the sigmoid of y, or of r y with a bound:
da = -r s dg, dA_log = sum g dg over tokens and columns of a head; with a bound u = L s (1 - s) dg,
da = r u, dA_log = sum r y u. Always ddt_bias = sum da over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import (
    cdiv,
    exp,
    jit,
    load_row,
    load_tile,
    mask_of,
    next_power_of_2,
    rows_at,
    rows_in,
    store_sums,
    store_tile,
    tl,
)
from liger_kernel.ops.recurrent.ssd_kernels import _softplus


def reference(a, A_log, dt_bias, *, bound, dtype):
    h = acc(a.dtype)
    y = a.to(h) + dt_bias.to(h)
    rate = A_log.to(h).exp().repeat_interleave(a.shape[-1] // max(A_log.shape[0], 1))
    g = -rate * F.softplus(y) if bound is None else bound * torch.sigmoid(rate * y)
    return g.to(dtype or h)


@jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@jit
def _given(a_ptr, A_ptr, bias_ptr, row, col, N, D, stride, mask):
    """y, and the rates of its columns."""
    y = load_tile(a_ptr, row, col, stride, mask) + load_row(bias_ptr, col, N)[None, :]
    return y, exp(tl.load(A_ptr + col // D, mask=col < N, other=0.0).to(tl.float32))[None, :]


@jit
def _fwd(
    a_ptr, A_ptr, bias_ptr, g_ptr, M, N, D, stride, bound,
    BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = mask_of(row, M, col, N)
    y, rate = _given(a_ptr, A_ptr, bias_ptr, row, col, N, D, stride, mask)
    g = bound * _sigmoid(rate * y) if BOUNDED else -rate * _softplus(y)
    store_tile(g_ptr, row, col, N, g, mask)


@jit
def _bwd(
    dg_ptr, a_ptr, A_ptr, bias_ptr, da_ptr, sums_ptr, M, N, D, dg_stride, stride, bound,
    BOUNDED: tl.constexpr, NEED_A: tl.constexpr, NEED_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dA = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dg = load_tile(dg_ptr, row, col, dg_stride, mask)
        y, rate = _given(a_ptr, A_ptr, bias_ptr, row, col, N, D, stride, mask)
        if BOUNDED:
            u = rate * y
            # 1 - s without a difference
            da = rate * (bound * dg * _sigmoid(u) * _sigmoid(-u))
            dA += da * y
        else:
            da = -rate * dg * _sigmoid(y)
            dA -= rate * dg * _softplus(y)
        dbias += da
        if da_ptr is not None:
            store_tile(da_ptr, row, col, N, da, mask)
    store_sums(sums_ptr, program, col, N, dA, dbias, NEED_A, NEED_BIAS)


def _tile(N: int) -> dict[str, int]:
    columns = min(128, max(16, next_power_of_2(N)))
    return dict(BLOCK_M=2048 // columns, BLOCK_N=columns, num_warps=4)


@typed_launcher
def log_decay_fwd(a: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None, dtype: torch.dtype) -> Tensor:
    (M, N), c = a.shape, _tile(a.shape[1])
    g = a.new_empty(M, N, dtype=dtype)
    numbers = M, N, N // A_log.shape[0], a.stride(0), bound or 0.0
    grid = cdiv(M, c["BLOCK_M"]), cdiv(N, c["BLOCK_N"])
    launch(_fwd, grid, a, A_log, dt_bias, g, *numbers, BOUNDED=bound is not None, **c)
    return g


@typed_launcher
def log_decay_bwd(
    dg: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None, need_a: bool, need_A: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not needed are empty."""
    (M, N), H, c = a.shape, A_log.shape[0], _tile(a.shape[1])
    blocks = cdiv(N, c["BLOCK_N"])
    programs = max(1, min(cdiv(M, c["BLOCK_M"]), 8 * launch_config.processors() // blocks))
    da, count = a.new_empty((M, N) if need_a else 0), need_A + need_bias
    partials = a.new_empty((programs, count * N) if count else 0, dtype=torch.float32)
    numbers = M, N, N // H, dg.stride(0), a.stride(0), bound or 0.0
    flags = dict(BOUNDED=bound is not None, NEED_A=need_A, NEED_BIAS=need_bias)
    launch(_bwd, (programs, blocks), dg, a, A_log, dt_bias, da if need_a else None, partials, *numbers, **flags, **c)
    sums = column_sum(partials, torch.float32) if count else partials
    dA = sums[:N].view(H, -1).sum(1).to(A_log.dtype) if need_A else A_log.new_empty(0)
    return da, dA, sums[-N:].to(dt_bias.dtype, copy=True) if need_bias else dt_bias.new_empty(0)


class LogDecayFunction(torch.autograd.Function):
    """``apply(a, A_log, dt_bias, bound, dtype)``."""

    @staticmethod
    def forward(ctx, a, A_log, dt_bias, bound, dtype):
        given = rows_of(a), A_log.contiguous(), dt_bias.contiguous()
        g = log_decay_fwd(*given, bound, dtype)
        ctx.save_for_backward(*given)
        ctx.bound = bound
        return shaped(g, a.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dg):
        grads = log_decay_bwd(rows_of(dg), *ctx.saved_tensors, ctx.bound, *ctx.needs_input_grad[:3])
        return input_gradients(ctx, grads, [dg.shape])


def _tensors(*shape: int, H: int) -> dict[str, T]:
    return dict(a=T(shape), A_log=T((H,)), dt_bias=T(shape[-1:]))


def _cost(a: Tensor, A_log: Tensor, dt_bias: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Cost:
    g, weights = a.numel() * (dtype or acc(a.dtype)).itemsize, nbytes(A_log, dt_bias)
    flops = 5 * a.numel(), 8 * a.numel()
    return Cost(nbytes(a) + weights + g, 2 * (nbytes(a) + weights) + g, flops=flops)


@op(
    reference=reference,
    cases=[
        Case("qwen3-next", _tensors(2, 33, 5, H=5)),
        Case("kimi-linear", _tensors(2, 21, 150, H=3)),
        Case("bounded", dict(_tensors(19, 48, H=2), bound=-5.0, dtype=torch.bfloat16)),
        Case("fp32-weights", dict(_tensors(9, 24, H=4), A_log=T((4,), dtype=torch.float32))),
    ],
    cost=_cost,
)
def log_decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, *, bound: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The logarithm of a decay, ``-exp(A_log) * softplus(a + dt_bias)``, at most 0, for
    ``gated_delta_rule`` and ``kda``. With ``bound`` < 0, ``bound * sigmoid(exp(A_log) * (a +
    dt_bias))``, which is never below it.

    a (..., N), any strides; dt_bias (N,); A_log (H,), one for the N / H columns of a head. The
    result has ``dtype``, or is in fp32 (for fp64, in fp64).
    """
    if a.ndim < 1 or not a.is_floating_point():
        raise ValueError(f"log_decay: a must be floating point of shape (..., N), got {a.dtype} {tuple(a.shape)}")
    N = a.shape[-1]
    if A_log.ndim != 1 or not A_log.is_floating_point() or N % max(A_log.shape[0], 1) or (N and not A_log.shape[0]):
        shape = tuple(A_log.shape)
        raise ValueError(f"log_decay: A_log must be floating point of shape (H,), {N} = H D, got {A_log.dtype} {shape}")
    checks.floating_shape("log_decay", (N,), dt_bias=dt_bias)
    if bound is not None and not bound < 0:
        raise ValueError(f"log_decay: bound must be below 0 or None, got {bound}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"log_decay: dtype must be floating point or None, got {dtype}")
    if not use_kernels(a, fusible=True) or not a.numel():
        return reference(a, A_log, dt_bias, bound=bound, dtype=dtype)
    return LogDecayFunction.apply(a, A_log, dt_bias, bound, dtype or acc(a.dtype))
