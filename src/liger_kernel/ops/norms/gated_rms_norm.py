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
The backward reads dy, x and gate once and recomputes the rest. ``bench/cases/norms.py`` has the
shapes of real models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, op
from liger_kernel.ops._core.operator import launch, launcher, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, mask_of, store_tile, tile_at, tl
from liger_kernel.ops.activations.glu import ACTS, act_and_slope, act_of, check_act
from liger_kernel.ops.norms.rms_kernels import check_norm, scaled_rows
from liger_kernel.ops.norms.rms_kernels import reference as rms_norm_reference

# columns of dy, x, gate, the weight and a sum that the backward holds in registers: 8192 of fp32 do
# not fit. The reference computes wider rows
MAX_N = 4096


def reference(x, gate, w, *, eps, act, casting):
    dtype = acc(torch.promote_types(x.dtype, gate.dtype))
    # "gemma" rounds nowhere, so its norm is not rounded before the product with the gate either
    inner = acc(x.dtype) if casting == "gemma" else x.dtype
    n = rms_norm_reference(x.to(inner), w.to(inner) if casting == "gemma" else w, eps=eps, casting=casting)
    return (n.to(dtype) * ACTS[act](gate.to(dtype))).to(x.dtype)


@jit
def _fwd(
    x_ptr, gate_ptr, w_ptr, y_ptr, rstd_ptr, M, N, x_stride, gate_stride, eps,
    ACT: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, 0.0, x.dtype, CASTING)
    # with a weight of another dtype the promoted one is fp32, and stock rounds only at the end
    if CASTING != "gemma" and x.dtype == w_ptr.dtype.element_ty:
        h = h.to(x.dtype).to(tl.float32)
    y = h * act_of(gate.to(tl.float32), ACT, gate.dtype == tl.float32)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _bwd(
    dy_ptr, x_ptr, gate_ptr, w_ptr, rstd_ptr, dx_ptr, dgate_ptr, dw_ptr, M, N, dy_stride, x_stride, gate_stride,
    ACT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    w = load_row(w_ptr, col, N)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = mask_of(row, M, col, N)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        x = load_tile(x_ptr, row, col, x_stride, mask)
        # addresses of all outputs, before the loads: later, they take 14 registers more
        here = row[:, None] * N + col[None, :]
        # in its own dtype, which says how exactly its activation is worth computing
        gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        # act(gate) once more: cheaper than to read it
        a, slope = act_and_slope(gate.to(tl.float32), ACT, gate.dtype == tl.float32)
        x_hat = x * rstd
        if NEED_DGATE:
            dgate = dy * (x_hat * w) * slope
            tl.store(dgate_ptr + here, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        dn = dy * a
        # dn is what reaches the norm: from here on as in rms_norm
        if NEED_DW:
            dw += dn * x_hat
        if NEED_DX:
            g = dn * w
            dx = (g - x_hat * (tl.sum(g * x_hat, axis=1) / N)[:, None]) * rstd
            tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@launcher("(Tensor x, Tensor gate, Tensor w, float eps, str act, str casting) -> (Tensor y, Tensor rstd)")
def gated_rms_norm_fwd(x, gate, w, eps, act, casting) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    y, rstd = x.new_empty(M, N), x.new_empty(M, dtype=torch.float32)
    c = launch_config.tile("gated_rms_norm_fwd", N, x.itemsize, elements=4096)
    numbers = M, N, x.stride(0), gate.stride(0), eps
    launch(_fwd, (cdiv(M, c.block_m),), x, gate, w, y, rstd, *numbers, ACT=act, CASTING=casting, **c.tile)
    return y, rstd


@launcher(
    "(Tensor dy, Tensor x, Tensor gate, Tensor w, Tensor rstd, str act, bool need_dx, bool need_dgate, bool need_dw) "
    "-> (Tensor dx, Tensor dgate, Tensor dw)"
)
def gated_rms_norm_bwd(dy, x, gate, w, rstd, act, need_dx, need_dgate, need_dw) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgate and dw; gradients that are not needed are empty."""
    M, N = x.shape
    # with 16 values per thread, some variants spill 150 bytes on sm80; with a pipeline, 110 on gfx942
    pipelined = 0 if launch_config.arch().startswith("gfx") else 3
    c = launch_config.tile("gated_rms_norm_bwd", N, x.itemsize, elements=2048, per_thread=8, pipelined=pipelined)
    programs = max(1, min(2 * launch_config.processors() * c.per_sm, cdiv(M, c.block_m)))
    dx, dgate = x.new_empty((M, N) if need_dx else 0), gate.new_empty((M, N) if need_dgate else 0)
    partials = x.new_empty((programs, N) if need_dw else 0, dtype=torch.float32)
    numbers = M, N, dy.stride(0), x.stride(0), gate.stride(0)
    flags = dict(ACT=act, NEED_DX=need_dx, NEED_DGATE=need_dgate, NEED_DW=need_dw, STAGES=c.stages)
    launch(_bwd, (programs,), dy, x, gate, w, rstd, dx, dgate, partials, *numbers, **flags, **c.tile)
    return dx, dgate, column_sum(partials, w.dtype) if need_dw else x.new_empty(0)


class GatedRMSNormFunction(torch.autograd.Function):
    """``apply(x, gate, w, eps, act, casting)``."""

    @staticmethod
    def forward(ctx, x, gate, w, eps, act, casting):
        x2, gate, w = rows_of(x), rows_of(gate), w.contiguous()
        y, rstd = gated_rms_norm_fwd(x2, gate, w, eps, act, casting)
        ctx.save_for_backward(x2, gate, w, rstd)
        ctx.act = act
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needs = ctx.needs_input_grad[:3]
        grads = gated_rms_norm_bwd(rows_of(dy), *ctx.saved_tensors, ctx.act, *needs)
        shapes = dy.shape, dy.shape, dy.shape[-1:]
        found = [g.view(shape) if need else None for g, shape, need in zip(grads, shapes, needs)]
        return *found, None, None, None


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
    ],
    cost=lambda x, gate, w, **_: Cost(
        nbytes(x, gate, w, x), nbytes(x, x, gate, w, x, gate, w), flops=(7 * x.numel(), 16 * x.numel())
    ),
)
def gated_rms_norm(
    x: Tensor, gate: Tensor, w: Tensor, *, eps: float = 1e-6, act: str = "silu", casting: str = "llama"
) -> Tensor:
    """``rms_norm(x, w) * act(gate)`` over the last dim, with act silu, gelu (exact), gelu_tanh,
    relu2 or sigmoid.

    x and gate (..., N) in fp32, fp16, bf16 or fp64, any strides; w (N,). Returns a tensor of x's
    shape and dtype.
    """
    check_norm("gated_rms_norm", x, w, casting, gate=gate)
    check_act("gated_rms_norm", act)
    if gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate must have shape {tuple(x.shape)}, got {tuple(gate.shape)}")
    # heads of linear attention, which is what this norm is for, have 128 columns
    if not use_kernels(x, fusible=True) or x.shape[-1] > MAX_N:
        return reference(x, gate, w, eps=eps, act=act, casting=casting)
    return GatedRMSNormFunction.apply(x, gate, w, eps, act, casting)
