"""RMSNorm of a sum: ``s = x + residual``, ``y = rms_norm(s, w)``, returned as (y, s); ``casting``
and ``offset`` as in ``rms_norm``.

Without a residual, s is x. If a model uses both x and its norm, the norm's backward adds both
gradients.

Shapes: x, residual, y, s (..., N), w (N,).  M = product of the leading dims.

s has the promoted dtype of x and residual. y is the norm of the rounded s, so the next layer adds
to exactly the value that was normalised.
x and residual have the same gradient: ``ds`` of the sum plus the gradient through the norm. It is
computed and written once.

Rows too wide for the registers of one program are read twice, in blocks of columns. ``rms_norm`` of
such rows calls this operator without a residual. ``bench/cases/norms.py`` has the shapes of real
models and the rivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import config
from liger_kernel.ops._core.operator import (
    Case,
    Cost,
    T,
    launch,
    launcher,
    nbytes,
    once_differentiable,
    op,
    rows_of,
    shaped,
    use_kernels,
)
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, tl
from liger_kernel.ops.norms.rows import CASTING, scaled_rows
from liger_kernel.ops.norms.rows import reference as rms_norm_reference

FWD_N = 16384  # columns that one program holds in registers
BWD_N = 8192  # columns of dy, ds, s, the weight and its gradient that one program holds


def reference(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    return rms_norm_reference(s, w, eps=eps, offset=offset, casting=casting), s


@jit
def _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE: tl.constexpr, HAS_R: tl.constexpr):
    s = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    if HAS_R:
        r = tl.load(r_ptr + row[:, None] * r_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        s = (s.to(tl.float32) + r).to(DTYPE)
    return s


@jit
def _fwd(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, x_stride, r_stride, eps, offset,
    HAS_W: tl.constexpr, HAS_R: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, s_ptr.dtype.element_ty, HAS_R)
    if HAS_R:
        tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
    h = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, offset, s.dtype, HAS_W, CASTING)
    tl.store(y_ptr + row[:, None] * N + col[None, :], h.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _fwd_wide(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, x_stride, r_stride, eps, offset,
    HAS_W: tl.constexpr, HAS_R: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    DTYPE: tl.constexpr = s_ptr.dtype.element_ty
    square = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = (row < M)[:, None] & (col < N)[None, :]
        s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE, HAS_R)
        if HAS_R:
            tl.store(s_ptr + row[:, None] * N + col[None, :], s, mask=mask)
        h = s.to(tl.float32)
        square += tl.sum(h * h, axis=1)
    rstd = tl.rsqrt(square / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    blocks = tl.cdiv(N, BLOCK_N)
    for i in range(0, blocks):  # going back from where the first sweep ended, where the L2 cache has the row
        col = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (row < M)[:, None] & (col < N)[None, :]
        s = _sum(x_ptr, r_ptr, row, col, x_stride, r_stride, mask, DTYPE, HAS_R)
        h = scaled_rows(s.to(tl.float32), rstd, w_ptr, col, N, offset, s.dtype, HAS_W, CASTING)
        tl.store(y_ptr + row[:, None] * N + col[None, :], h.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _bwd_mean(
    dy_ptr, s_ptr, w_ptr, rstd_ptr, mean_ptr, M, N, dy_stride, s_stride, offset,
    HAS_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The mean of g s_hat, g = dy (w + offset), over a row wider than a block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = (row < M)[:, None] & (col < N)[None, :]
        g = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row[:, None] * s_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_W:
            g = (
                g
                * (tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32))[None, :]
            )
        total += tl.sum(g * (s * rstd), axis=1)
    tl.store(mean_ptr + row, total / N, mask=row < M)


@jit
def _bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, rstd_ptr, mean_ptr, dx_ptr, dw_ptr, M, N, dy_stride, ds_stride, s_stride, offset,
    HAS_W: tl.constexpr, HAS_DS: tl.constexpr, WIDE: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (row < M)[:, None] & (col < N)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row[:, None] * s_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        s_hat = s * rstd
        if NEED_DW:
            dw += dy * s_hat
        if NEED_DX:
            g = dy * w[None, :] if HAS_W else dy
            if WIDE:
                mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
            else:
                mean = tl.sum(g * s_hat, axis=1) / N
            dx = (g - s_hat * mean[:, None]) * rstd
            if HAS_DS:
                dx += tl.load(ds_ptr + row[:, None] * ds_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row[:, None] * N + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@launcher(
    "(Tensor x, Tensor? residual, Tensor? w, float eps, float offset, str casting) -> (Tensor y, Tensor s, Tensor rstd)"
)
def fused_add_rms_norm_fwd(
    x: Tensor, residual: Tensor | None, w: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, s (empty without a residual), and 1/rms of s."""
    M, N = x.shape
    s = x.new_empty(0) if residual is None else x.new_empty(M, N, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = s.new_empty(M, N, dtype=s.dtype if w is None or casting == "gemma" else torch.promote_types(s.dtype, w.dtype))
    rstd = x.new_empty(M, dtype=torch.float32)
    wide = N > FWD_N
    c = config.tile(
        "fused_add_rms_norm_fwd", N, s.itemsize, elements=4096, per_thread=32, max_block_n=8192 if wide else FWD_N
    )
    numbers = M, N, x.stride(0), 0 if residual is None else residual.stride(0), eps, offset
    flags = dict(HAS_W=w is not None, HAS_R=residual is not None, CASTING=casting)
    launch(_fwd_wide if wide else _fwd, (cdiv(M, c.block_m),), x, residual, w, y, s, rstd, *numbers, **flags, **c.tile)
    return y, s, rstd


@launcher(
    "(Tensor dy, Tensor? ds, Tensor s, Tensor? w, Tensor rstd, float offset, bool need_dx, bool need_dw) -> (Tensor "
    "dx, Tensor dw)"
)
def fused_add_rms_norm_bwd(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    w: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """dx, which is dresidual, and dw; gradients that are not needed are empty."""
    M, N = s.shape
    wide = N > BWD_N
    c = config.tile(
        "fused_add_rms_norm_bwd",
        N,
        s.itemsize,
        elements=4096 if wide else 8192,
        per_thread=32,
        pipelined=3,
        max_block_n=2048 if wide else BWD_N,
    )
    blocks = cdiv(N, c.block_n) if wide else 1
    programs = max(1, min(config.processors() * c.per_sm // blocks, cdiv(M, c.block_m)))
    dx = s.new_empty((M, N) if need_dx else 0)
    partials = s.new_empty((programs, N) if need_dw else 0, dtype=torch.float32)
    mean = s.new_empty(M if wide and need_dx else 0, dtype=torch.float32)
    if wide and need_dx:
        launch(
            _bwd_mean,
            (cdiv(M, c.block_m),),
            dy,
            s,
            w,
            rstd,
            mean,
            M,
            N,
            dy.stride(0),
            s.stride(0),
            offset,
            HAS_W=w is not None,
            **c.tile,
        )
    numbers = M, N, dy.stride(0), 0 if ds is None else ds.stride(0), s.stride(0), offset
    flags = dict(
        HAS_W=w is not None, HAS_DS=ds is not None, WIDE=wide, NEED_DX=need_dx, NEED_DW=need_dw, STAGES=c.stages
    )
    launch(_bwd, (programs, blocks), dy, ds, s, w, rstd, mean, dx, partials, *numbers, **flags, **c.tile)
    return dx, column_sum(partials, w.dtype) if need_dw else s.new_empty(0)


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    """``apply(x, residual or None, w, eps, offset=0.0, casting_mode="llama", in_place=False)``;
    the last is accepted and ignored."""

    @staticmethod
    def forward(ctx, x, residual, w, eps, offset=0.0, casting_mode="llama", in_place=False):
        ctx.set_materialize_grads(False)
        w = w if w is None else w.contiguous()
        y, s, rstd = fused_add_rms_norm_fwd(
            rows_of(x), None if residual is None else rows_of(residual), w, eps, offset, casting_mode
        )
        ctx.save_for_backward(x if residual is None else s, w, rstd)
        ctx.offset, ctx.dtypes = offset, (x.dtype, x.dtype if residual is None else residual.dtype)
        return shaped(y, x.shape), x.view_as(x) if residual is None else shaped(s, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        need_x, need_residual, need_dw = ctx.needs_input_grad[:3]
        need_dx, dx, dw = need_x or need_residual, ds, None
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
        Case("wide-gemma", dict(_tensors(3, FWD_N + 77), residual=None, offset=1.0, casting="gemma")),
        Case("bad-weight", dict(_tensors(4, 8), w=T((4,))), error="w must have shape (8,), got (4,)"),
        Case(
            "bad-residual",
            dict(_tensors(4, 8), residual=T((1, 8))),
            error="residual must have shape (4, 8), got (1, 8)",
        ),
        Case(
            "bad-casting",
            dict(_tensors(4, 8), casting="bf16"),
            error="casting must be one of ('llama', 'gemma', 'none'), got 'bf16'",
        ),
        Case(
            "integers",
            dict(_tensors(4, 8), residual=T((4, 8), dtype=torch.int64)),
            error="residual must be floating point, got torch.int64",
        ),
    ],
    cost=lambda x, residual, w=None, **_: Cost(
        nbytes(x, x, w) + (0 if residual is None else nbytes(residual, x)),
        nbytes(x, x, x, x, w, w),
        flops=(5 * x.numel(), 11 * x.numel()),
    ),
)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s), s)`` with ``s = x + residual``, over the last dim. Without a residual, s is x
    itself.

    x and residual (..., N), of one shape, in fp32, fp16, bf16 or fp64, any strides; w (N,) or None.
    s has their promoted dtype.
    """
    for name, t in (("x", x), ("residual", residual)):
        if t is not None and not t.is_floating_point():
            raise ValueError(f"fused_add_rms_norm: {name} must be floating point, got {t.dtype}")
    if not x.ndim:
        raise ValueError("fused_add_rms_norm: x must have at least one dim, got shape ()")
    if casting not in CASTING:
        raise ValueError(f"fused_add_rms_norm: casting must be one of {CASTING}, got {casting!r}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"fused_add_rms_norm: residual must have shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if w is not None and w.shape != x.shape[-1:]:
        raise ValueError(f"fused_add_rms_norm: w must have shape {tuple(x.shape[-1:])}, got {tuple(w.shape)}")
    if not (use_kernels(x, fusible=True) and (residual is None or use_kernels(residual))):
        return reference(x, residual, w, eps=eps, offset=offset, casting=casting)
    return LigerFusedAddRMSNormFunction.apply(x, residual, w, eps, offset, casting)


def rms_norm_of_sum(s: Tensor, w: Tensor | None, *, eps: float, offset: float, casting: str) -> Tensor:
    """Recompute the operator's y from its s, bit-identical and without gradient."""
    y, _, _ = fused_add_rms_norm_fwd(rows_of(s), None, None if w is None else w.contiguous(), eps, offset, casting)
    return shaped(y, s.shape)
