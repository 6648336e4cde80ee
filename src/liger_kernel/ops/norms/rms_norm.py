"""RMSNorm: ``y = x / sqrt(mean(x^2) + eps) * (w + offset)``, statistics in fp32 (Zhang and
Sennrich, arXiv:1910.07467).

Shapes: x (..., N), w (N,), y like x.  M = product of the leading dims.  ``rms_kernels`` has the
kernels, and describes ``casting``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.shards import is_sharded, on_own_rows
from liger_kernel.ops._core.tl import cdiv
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm_bwd, fused_add_rms_norm_fwd
from liger_kernel.ops.norms.rms_kernels import _bwd, _fwd, check_norm, reference

# columns that one program holds in registers
MAX_N = 32768


@typed_launcher
def rms_norm_fwd(x: Tensor, w: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    # rows that no program can hold
    if N > MAX_N:
        y, _, rstd = fused_add_rms_norm_fwd(x, None, w, eps, offset, casting)
        return y, rstd
    y = x.new_empty(M, N, dtype=x.dtype if w is None or casting == "gemma" else torch.promote_types(x.dtype, w.dtype))
    rstd = x.new_empty(M, dtype=torch.float32)
    c = launch_config.tile("rms_norm_fwd", N, x.itemsize, elements=4096, per_thread=32)
    # without a residual there is no sum to store: its dtype is all that the kernel asks of it
    grid, numbers = (cdiv(M, c.block_m),), (M, N, x.stride(0), 0, 1, eps, offset)
    launch(_fwd, grid, x, None, w, y, x, rstd, None, *numbers, CASTING=casting, SPLITS=0, **c.tile)
    return y, rstd


@typed_launcher
def rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, offset: float, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:
    """dx and dw; gradients that are not needed are empty."""
    M, N = x.shape
    if N > MAX_N:
        return fused_add_rms_norm_bwd(dy, None, x, w, rstd, offset, need_dx, need_dw)
    # H200, bf16, 262144 x 128: 56 us; 176 us with half the tile and one stage
    c = launch_config.tile("rms_norm_bwd", N, x.itemsize, elements=8192, per_thread=32, pipelined=2)
    # as many as run at a time: each writes one row of partial sums for dw
    programs = max(1, min(launch_config.processors() * c.per_sm, cdiv(M, c.block_m)))
    dx = x.new_empty((M, N) if need_dx else 0)
    partials = x.new_empty((programs, N) if need_dw else 0, dtype=torch.float32)
    numbers = M, N, dy.stride(0), 0, x.stride(0), 1, offset
    flags = dict(SPLITS=0, NEED_DX=need_dx, NEED_DW=need_dw, STAGES=c.stages)
    launch(_bwd, (programs,), dy, None, x, w, rstd, None, dx, partials, *numbers, **flags, **c.tile)
    return dx, column_sum(partials, w.dtype) if need_dw else x.new_empty(0)


class LigerRMSNormFunction(torch.autograd.Function):
    """``apply(x, w, eps, offset=0.0, casting_mode="llama", in_place=None, row_mode=None)``; the
    last two are accepted and ignored."""

    @staticmethod
    def forward(ctx, x, w, eps, offset=0.0, casting_mode="llama", in_place=None, row_mode=None):
        x2, w = rows_of(x), w if w is None else w.contiguous()
        y, rstd = rms_norm_fwd(x2, w, eps, offset, casting_mode)
        # x and not x_hat: the residual stream keeps x alive in most models
        ctx.save_for_backward(x2, w, rstd)
        ctx.offset = offset
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dx, dw = rms_norm_bwd(rows_of(dy), x, w, rstd, ctx.offset, need_dx, need_dw)
        return dx.view(dy.shape) if need_dx else None, dw if need_dw else None, None, None, None, None, None


def _tensors(*shape: int) -> dict[str, T]:
    return dict(x=T(shape), w=T(shape[-1:]))


@op(
    reference=reference,
    cases=[
        Case("llama", _tensors(48, 256)),
        Case("gemma", dict(_tensors(2, 17, 224), offset=1.0, casting="gemma")),
        Case("olmo2", dict(_tensors(3, 5, 96), casting="gemma")),
        Case("offset", dict(_tensors(9, 64), offset=1.0, eps=1e-5)),
        Case("no-upcast", dict(_tensors(9, 64), casting="none")),
        Case("qk-norm", _tensors(2, 9, 4, 32)),
        Case("no-weight", dict(x=T((5, 3, 64)), w=None)),
        Case("deepseek-v4-unweighted", dict(x=T((5, 3, 64)), w=None, casting="none")),
        Case("odd", _tensors(5, 123)),
        # with a small eps, only rounding error would remain
        Case("one-column", dict(_tensors(5, 1), eps=0.5)),
        Case("fp32-weight", dict(_tensors(5, 64), w=T((64,), dtype=torch.float32))),
        Case("wide", _tensors(2, MAX_N + 77)),
    ],
    cost=lambda x, w=None, **_: Cost(nbytes(x, x, w), nbytes(x, x, x, w, w), flops=(4 * x.numel(), 10 * x.numel())),
)
def rms_norm(
    x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    """Root-mean-square normalisation over the last dim.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; w (N,) or None. Returns a tensor of x's
    shape.
    """
    check_norm("rms_norm", x, w, casting)
    # a DTensor of whole rows: each rank norms its own
    if is_sharded(x) and (y := on_own_rows(rms_norm, x, w, eps=eps, offset=offset, casting=casting)) is not None:
        return y
    if not use_kernels(x, fusible=True):
        return reference(x, w, eps=eps, offset=offset, casting=casting)
    return LigerRMSNormFunction.apply(x, w, eps, offset, casting)
