"""RMSNorm times an activated gate: ``y = w * x / rms(x) * act(gate)``, y in x's dtype, as after a
linear attention (Gated DeltaNet, arXiv:2412.06464).

Shapes: x, gate and y (..., N), w (N,).  M = product of the leading dims.

``casting`` says where the norm is rounded before the product with act(gate), which is in fp32 and
rounded once:
  llama   x_hat to x's dtype, w x_hat to the promoted dtype of x and w (Qwen3-Next)
  gemma   nowhere (Kimi-Linear)
  none    1/rms, x_hat and w x_hat

With n = w x_hat and a = act(gate): dgate = dy n act'(gate), dw = sum dy a x_hat, and dx is that of
a norm with the gradient dy a.

With ``gate_first`` (Mamba-2, arXiv:2405.21060), ``y = w * u / rms(u), u = x * act(gate)``, where rms
may be that of each of ``groups`` equal parts of a row. u is in fp32, and casting llama or gemma.
With du the gradient of that norm, dx = du a and dgate = du x act'(gate).
The backward reads dy, x and gate once and recomputes the rest. ``bench/cases/norms.py`` has the
shapes of real models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, rows_in, store_tile, tile_at, tl
from liger_kernel.ops.activations.glu import ACTS, act_and_slope, act_of, check_act
from liger_kernel.ops.norms.rms_kernels import check_norm, reference as rms_norm_reference, scaled_rows

# columns of dy, x, gate, the weight and a sum that the backward holds in registers: 8192 of fp32 do
# not fit. The reference computes wider rows
MAX_N = 4096


def reference(x, gate, w, *, eps, act, casting, gate_first, groups):
    dtype = acc(torch.promote_types(x.dtype, gate.dtype))
    if gate_first:
        u = (x.to(dtype) * ACTS[act](gate.to(dtype))).unflatten(-1, (groups, -1))
        n = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).flatten(-2)
        return (n * w.to(dtype) if casting == "gemma" else w * n.to(x.dtype)).to(x.dtype)
    # "gemma" rounds nowhere, so its norm is not rounded before the product with the gate either
    inner = acc(x.dtype) if casting == "gemma" else x.dtype
    n = rms_norm_reference(x.to(inner), w.to(inner) if casting == "gemma" else w, eps=eps, casting=casting)
    return (n.to(dtype) * ACTS[act](gate.to(dtype))).to(x.dtype)


@jit
def _fwd(
    x_ptr, gate_ptr, w_ptr, y_ptr, rstd_ptr, M, N, x_stride, gate_stride, eps,
    ACT: tl.constexpr, GATE_FIRST: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    # a program has one group of N columns
    group, groups = tl.program_id(1), tl.num_programs(1)
    x_ptr += group * N
    gate_ptr += group * N
    w_ptr += group * N
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)
    if GATE_FIRST:
        h *= act_of(gate.to(tl.float32), ACT, gate.dtype == tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, 0.0, x.dtype, CASTING)
    # with a weight of another dtype the promoted one is fp32, and stock rounds only at the end
    if CASTING != "gemma" and x.dtype == w_ptr.dtype.element_ty:
        h = h.to(x.dtype).to(tl.float32)
    if not GATE_FIRST:
        h *= act_of(gate.to(tl.float32), ACT, gate.dtype == tl.float32)
    store_tile(y_ptr + group * N, row, col, N * groups, h, mask)


@jit
def _bwd(
    dy_ptr, x_ptr, gate_ptr, w_ptr, rstd_ptr, dx_ptr, dgate_ptr, dw_ptr, M, N, dy_stride, x_stride, gate_stride,
    ACT: tl.constexpr, GATE_FIRST: tl.constexpr, NEED_DX: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    dy_ptr += group * N
    x_ptr += group * N
    gate_ptr += group * N
    w_ptr += group * N
    dx_ptr += group * N
    dgate_ptr += group * N
    col = tl.arange(0, BLOCK_N)
    w = load_row(w_ptr, col, N)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        x = load_tile(x_ptr, row, col, x_stride, mask)
        # addresses of all outputs, before the loads: later, they take 14 registers more
        here = row[:, None] * (N * groups) + col[None, :]
        # in its own dtype, which says how exactly its activation is worth computing
        gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row * groups + group, mask=row < M, other=0.0)[:, None]
        # act(gate) once more: cheaper than to read it
        a, slope = act_and_slope(gate.to(tl.float32), ACT, gate.dtype == tl.float32)
        if GATE_FIRST:
            x_hat = x * a * rstd
            dn = dy
        else:
            x_hat = x * rstd
            if NEED_DGATE:
                dgate = dy * (x_hat * w) * slope
                tl.store(dgate_ptr + here, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
            dn = dy * a
        # dn is what reaches the norm: from here on as in rms_norm
        if NEED_DW:
            dw += dn * x_hat
        if NEED_DX or (GATE_FIRST and NEED_DGATE):
            g = dn * w
            dx = (g - x_hat * (tl.sum(g * x_hat, axis=1) / N)[:, None]) * rstd
            if GATE_FIRST:
                if NEED_DGATE:
                    dgate = dx * x * slope
                    tl.store(dgate_ptr + here, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
                dx = dx * a
            if NEED_DX:
                tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        dw_ptr += (program.to(tl.int64) * groups + group) * N
        tl.store(dw_ptr + col, tl.sum(dw, axis=0), mask=col < N)


@typed_launcher
def gated_rms_norm_fwd(
    x: Tensor, gate: Tensor, w: Tensor, eps: float, act: str, casting: str, gate_first: bool, groups: int
) -> tuple[Tensor, Tensor]:
    (M, width), N = x.shape, x.shape[1] // groups
    y, rstd = x.new_empty(M, width), x.new_empty(M * groups, dtype=torch.float32)
    c = launch_config.tile("gated_rms_norm_fwd", N, x.itemsize, elements=4096)
    numbers, how = (M, N, x.stride(0), gate.stride(0), eps), dict(ACT=act, GATE_FIRST=gate_first, CASTING=casting)
    launch(_fwd, (cdiv(M, c.block_m), groups), x, gate, w, y, rstd, *numbers, **how, **c.tile)
    return y, rstd


@typed_launcher
def gated_rms_norm_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, w: Tensor, rstd: Tensor, act: str, gate_first: bool, groups: int,
    need_dx: bool, need_dgate: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dgate and dw; gradients that are not needed are empty."""
    (M, width), N = x.shape, x.shape[1] // groups
    # with 16 values per thread, some variants spill 150 bytes on sm80; with a pipeline, 110 on gfx942
    pipelined = 0 if launch_config.arch().startswith("gfx") else 3
    c = launch_config.tile("gated_rms_norm_bwd", N, x.itemsize, elements=2048, per_thread=8, pipelined=pipelined)
    programs = max(1, min(2 * launch_config.processors() * c.per_sm // groups, cdiv(M, c.block_m)))
    dx, dgate = x.new_empty((M, width) if need_dx else 0), gate.new_empty((M, width) if need_dgate else 0)
    partials = x.new_empty((programs, width) if need_dw else 0, dtype=torch.float32)
    numbers = M, N, dy.stride(0), x.stride(0), gate.stride(0)
    flags = dict(NEED_DX=need_dx, NEED_DGATE=need_dgate, NEED_DW=need_dw, STAGES=c.stages)
    how = dict(ACT=act, GATE_FIRST=gate_first) | c.tile
    launch(_bwd, (programs, groups), dy, x, gate, w, rstd, dx, dgate, partials, *numbers, **flags, **how)
    return dx, dgate, column_sum(partials, w.dtype)


class GatedRMSNormFunction(torch.autograd.Function):
    """``apply(x, gate, w, eps, act, casting, gate_first, groups)``."""

    @staticmethod
    def forward(ctx, x, gate, w, eps, act, casting, gate_first, groups):
        x2, gate, w = rows_of(x), rows_of(gate), w.contiguous()
        y, rstd = gated_rms_norm_fwd(x2, gate, w, eps, act, casting, gate_first, groups)
        ctx.save_for_backward(x2, gate, w, rstd)
        ctx.how = act, gate_first, groups
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        grads = gated_rms_norm_bwd(rows_of(dy), *ctx.saved_tensors, *ctx.how, *ctx.needs_input_grad[:3])
        return input_gradients(ctx, grads, (dy.shape, dy.shape, dy.shape[-1:]))


def _tensors(*shape: int) -> dict[str, T]:
    return dict(x=T(shape), gate=T(shape), w=T(shape[-1:]))


@op(
    reference=reference,
    cases=[
        Case("qwen3-next", _tensors(2, 9, 4, 32)),
        Case("kimi-linear", dict(_tensors(2, 9, 4, 32), act="sigmoid", casting="gemma")),
        Case("no-upcast", dict(_tensors(9, 64), act="gelu_tanh", casting="none")),
        Case("odd", dict(_tensors(5, 123), act="gelu")),
        Case("fp32-weight", dict(_tensors(5, 64), w=T((64,), dtype=torch.float32))),
        Case("fp32-gate", dict(_tensors(5, 64), gate=T((5, 64), dtype=torch.float32), casting="gemma")),
        # with a small eps, only rounding error would remain
        Case("one-column", dict(_tensors(5, 1), eps=0.5)),
        Case("wide", dict(_tensors(2, MAX_N + 77), act="sigmoid")),
        Case("nemotron-h", dict(_tensors(2, 9, 48), gate_first=True, groups=3)),
        Case("falcon-h1", dict(_tensors(5, 1500), gate_first=True, casting="gemma")),
    ],
    cost=lambda x, gate, w, **_: Cost(
        nbytes(x, gate, w, x), nbytes(x, x, gate, w, x, gate, w), flops=(7 * x.numel(), 16 * x.numel())
    ),
)
def gated_rms_norm(
    x: Tensor, gate: Tensor, w: Tensor, *, eps: float = 1e-6, act: str = "silu", casting: str = "llama",
    gate_first: bool = False, groups: int = 1,
) -> Tensor:  # fmt: skip
    """``rms_norm(x, w) * act(gate)`` over the last dim, with act silu, gelu (exact), gelu_tanh,
    relu2 or sigmoid.

    x and gate (..., N) in fp32, fp16, bf16 or fp64, any strides; w (N,). Returns a tensor of x's
    shape and dtype. ``gate_first``: ``rms_norm(x * act(gate), w)``, and then ``groups`` divides N:
    equal parts of a row, each with an rms of its own.
    """
    check_norm("gated_rms_norm", x, w, casting, gate=gate)
    check_act("gated_rms_norm", act)
    if gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate must have shape {tuple(x.shape)}, got {tuple(gate.shape)}")
    if groups < 1 or x.shape[-1] % groups or (groups > 1 and not gate_first):
        raise ValueError(f"gated_rms_norm: groups must divide {x.shape[-1]}, or be 1 without gate_first, got {groups}")
    if gate_first and casting == "none":
        raise ValueError("gated_rms_norm: casting must be 'llama' or 'gemma' with gate_first, got 'none'")
    # heads of linear attention have 128 columns, groups of Mamba-2 1024 and more
    how = dict(eps=eps, act=act, casting=casting, gate_first=gate_first, groups=groups)
    if not use_kernels(x, fusible=True) or x.shape[-1] // groups > MAX_N or not x.numel():
        return reference(x, gate, w, **how)
    return GatedRMSNormFunction.apply(x, gate, w, *how.values())
