"""RMSNorm of a sum: ``s = x + residual``, ``y = rms_norm(s, w)``, returned as (y, s); ``casting``
and ``offset`` as in ``rms_norm``.

Without a residual, s is x. If a model uses both x and its norm, the norm's backward adds both
gradients.

Shapes: x, residual, y, s (..., N), w (N,).  M = product of the leading dims.

s has the promoted dtype of x and residual. y is the norm of the rounded s, so the next layer adds
to exactly the value that was normalised. x and residual have the same gradient: ``ds`` of the sum
plus the gradient through the norm. It is computed and written once.

``rms_kernels`` has the kernels, ``bench/cases/norms.py`` the shapes of real models and the rivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel._private import apply_of
from liger_kernel.ops._core import Case, Cost, T, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv
from liger_kernel.ops.norms.rms_kernels import (
    BWD_N,
    FWD_N,
    ROW_BYTES,
    _bwd,
    _bwd_parts,
    _fwd,
    _fwd_parts,
    _fwd_rows,
    backward_grid,
    check_norm,
    padded,
    reference as rms_norm_reference,
)


def reference(x, residual, w, *, eps, offset, casting):
    s = x if residual is None else x + residual
    return rms_norm_reference(s, w, eps=eps, offset=offset, casting=casting), s


@typed_launcher
def fused_add_rms_norm_fwd(
    x: Tensor, residual: Tensor | None, w: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, s (empty without a residual), and 1/rms of s."""
    M, N = x.shape
    # without a residual, s is x, which no operator may return: empty
    s = x.new_empty(0) if residual is None else x.new_empty(M, N, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = s.new_empty(M, N, dtype=s.dtype if w is None or casting == "gemma" else torch.promote_types(s.dtype, w.dtype))
    rstd = x.new_empty(M, dtype=torch.float32)
    # strides for a tensor that is None: the kernel does not read it
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    if N > FWD_N and N * s.itemsize <= ROW_BYTES:
        c = launch_config.tile("fused_add_rms_norm_rows", N, s.itemsize, elements=1, max_block_n=8192, per_thread=8)
        how = dict(CASTING=casting, HELD=min(8 // s.itemsize, N // c.block_n)) | c.row
        tensors = x, residual, w, y, s, rstd
        launch(_fwd_rows, (min(M, launch_config.processors()),), *tensors, M, N, *strides, eps, offset, **how)
        return y, s, rstd
    sizes = dict(elements=4096, per_thread=32, max_block_n=8192 if N > FWD_N else FWD_N)
    c = launch_config.tile("fused_add_rms_norm_fwd", N, s.itemsize, **sizes)
    splits = cdiv(N, c.block_n)
    grid, parts = (cdiv(M, c.block_m) * splits,), None
    if splits > 1:
        parts = x.new_empty((M, splits), dtype=torch.float32)
        launch(_fwd_parts, grid, x, residual, s, parts, M, N, *strides, splits, **c.tile)
        x, residual, strides = (x, None, strides) if residual is None else (s, None, (N, 0))
    numbers = M, N, *strides, splits, eps, offset
    how = dict(CASTING=casting, SPLITS=padded(splits)) | c.tile
    launch(_fwd, grid, x, residual, w, y, s, rstd, parts, *numbers, **how)
    return y, s, rstd


@typed_launcher
def fused_add_rms_norm_bwd(
    dy: Tensor, ds: Tensor | None, s: Tensor, w: Tensor | None, rstd: Tensor, offset: float, need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, which is dresidual, and dw; gradients that are not needed are empty."""
    M, N = s.shape
    dtype = w.dtype if need_dw else s.dtype
    c, grid, dw, p, splits = backward_grid("fused_add_rms_norm_bwd", s, N * need_dw, dtype, pipelined=3)
    dx = s.new_empty((M, N) if need_dx else 0)
    parts = None
    if splits > 1 and need_dx:
        parts = s.new_empty((M, splits), dtype=torch.float32)
        sums = M, N, dy.stride(0), s.stride(0), splits, offset
        launch(_bwd_parts, (cdiv(M, p.block_m) * splits,), dy, s, w, rstd, parts, *sums, **p.tile)
    numbers = M, N, dy.stride(0), 0 if ds is None else ds.stride(0), s.stride(0), splits, offset
    flags = dict(SPLITS=padded(splits), NEED_DX=need_dx, NEED_DW=need_dw)
    tensors = dy, ds, s, w, rstd, parts, dx, dw
    launch(_bwd, grid, *tensors, *numbers, **flags, STAGES=c.stages, **c.tile)
    return dx, column_sum(dw, dtype) if need_dw else s.new_empty(0)


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    """``apply(x, residual or None, w, eps, offset=0.0, casting_mode="llama", in_place=False)``;
    the last is accepted and ignored."""

    @staticmethod
    def forward(ctx, x, residual, w, eps, offset=0.0, casting_mode="llama", in_place=False):
        # a model that goes on with y alone has no gradient of s, and needs no zeros for it
        ctx.set_materialize_grads(False)
        w = w if w is None else w.contiguous()
        y, s, rstd = fused_add_rms_norm_fwd(
            rows_of(x), None if residual is None else rows_of(residual), w, eps, offset, casting_mode
        )
        ctx.save_for_backward(x if residual is None else s, w, rstd)
        ctx.offset, ctx.dtypes = offset, (x.dtype, x.dtype if residual is None else residual.dtype)
        # autograd allows no input as an output, and a view of it costs nothing
        return shaped(y, x.shape), x.view_as(x) if residual is None else shaped(s, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        need_x, need_residual, need_dw = ctx.needs_input_grad[:3]
        need_dx, dx, dw = need_x or need_residual, ds, None
        # a model may use the sum alone
        if dy is not None:
            s, w, rstd = ctx.saved_tensors
            ds = rows_of(ds) if ds is not None and need_dx else None
            dx, dw = fused_add_rms_norm_bwd(rows_of(dy), ds, rows_of(s), w, rstd, ctx.offset, need_dx, need_dw)
            dx = dx.view(dy.shape) if need_dx else None
        # One tensor for both, as for a plain sum, never two views of one: autograd adds in place to
        # a tensor without another owner, and keeps it
        each = [
            None if dx is None or not need else dx.to(dtype) for need, dtype in zip((need_x, need_residual), ctx.dtypes)
        ]
        return *each, dw if need_dw else None, None, None, None, None


def _tensors(*shape: int) -> dict[str, T]:
    return dict(x=T(shape), residual=T(shape), w=T(shape[-1:]))


@op(
    reference=reference,
    cases=[
        Case("llama", _tensors(48, 256)),
        Case("gemma", dict(_tensors(2, 17, 224), offset=1.0, casting="gemma")),
        Case("offset", dict(_tensors(9, 64), offset=1.0, eps=1e-5)),
        Case("no-upcast", dict(_tensors(9, 64), casting="none")),
        Case("no-weight", dict(_tensors(5, 3, 64), w=None)),
        Case("no-residual", dict(_tensors(3, 7, 192), residual=None)),
        Case("odd", _tensors(5, 123)),
        Case("many-rows", _tensors(301, 40)),
        Case("fp32-weight", dict(_tensors(5, 64), w=T((64,), dtype=torch.float32))),
        Case("fp32-residual", dict(_tensors(5, 64), residual=T((5, 64), dtype=torch.float32))),
        Case("wide-backward", _tensors(3, BWD_N + 5)),
        Case("wide", _tensors(2, FWD_N + 77)),
        Case("wide-gemma", dict(_tensors(3, ROW_BYTES // 2 + 77), residual=None, offset=1.0, casting="gemma")),
    ],
    cost=lambda x, residual, w=None, **_: Cost(
        nbytes(x, x, w) + (0 if residual is None else nbytes(residual, x)),
        nbytes(x, x, x, x, w, w),
        flops=(5 * x.numel(), 11 * x.numel()),
    ),
)
def fused_add_rms_norm(
    x: Tensor, residual: Tensor | None, w: Tensor | None = None, *,
    eps: float = 1e-6, offset: float = 0.0, casting: str = "llama",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(rms_norm(s), s)`` with ``s = x + residual``, over the last dim. Without a residual, s is x
    itself.

    x and residual (..., N), of one shape, in fp32, fp16, bf16 or fp64, any strides; w (N,) or None.
    s has their promoted dtype.
    """
    check_norm("fused_add_rms_norm", x, w, casting, residual=residual)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"fused_add_rms_norm: residual must have shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if not (use_kernels(x, fusible=True) and (residual is None or use_kernels(residual))):
        return reference(x, residual, w, eps=eps, offset=offset, casting=casting)
    args = x, residual, w, eps, offset, casting
    return apply_of(LigerFusedAddRMSNormFunction, args)(*args)


def rms_norm_of_sum(s: Tensor, w: Tensor | None, *, eps: float, offset: float, casting: str) -> Tensor:
    """Recompute the operator's y from its s, bit-identical and without gradient."""
    # s is stored, so its norm is one without a residual
    y, _, _ = fused_add_rms_norm_fwd(rows_of(s), None, None if w is None else w.contiguous(), eps, offset, casting)
    return shaped(y, s.shape)
