"""RMSNorm with scale and shift from a condition (AdaLN): ``y = (1 + scale) * (w + offset) * x /
rms(x) + shift``, y in x's dtype (arXiv:2212.09748).

Shapes: x (..., N), w (N,), scale and shift (S, N), y like x.  M = product of the leading dims of x.
Each of the S rows of scale and shift applies to
R = M / S consecutive rows of x: all rows, the rows of a sample, or one row.

``casting`` says which intermediate values are rounded to x's dtype before the result is; everything
else is in fp32:
  llama   x_hat is rounded to x's dtype
  gemma   nowhere
  none    1/rms and x_hat are rounded to x's dtype

With a_s = sum of dy x_hat over the rows of sample s: dscale_s = (w + offset) a_s, dw = sum_s (1 +
scale_s) a_s. A program sums some rows of one
sample in a fixed order; a second kernel adds the sums of a sample's programs. If each row has its
own scale, the first kernel writes dscale and dshift. ``bench/cases/norms.py`` has the shapes of
real models and the rivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, mask_of, rows_at, store_tile, tl
from liger_kernel.ops.norms.rms_kernels import check_norm

# columns of dy, x, two sums and the factors that the backward holds in registers; the reference
# computes wider rows
MAX_N = 8192


def reference(x, scale, shift, w, *, eps, offset, casting):
    dtype, N = acc(x.dtype), x.shape[-1]
    h = x.to(dtype)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = x * rstd.to(x.dtype) if casting == "none" else h * rstd
    h = h.to(dtype) if casting == "gemma" else h.to(x.dtype).to(dtype)
    if w is not None:
        h = h * (w.to(dtype) + offset)
    S = scale.shape[:-1].numel()
    y = h.reshape(S, x.shape[:-1].numel() // max(S, 1), N) * (1 + scale.to(dtype).reshape(S, 1, N))
    if shift is not None:
        y = y + shift.to(dtype).reshape(S, 1, N)
    return y.to(x.dtype).reshape(x.shape)


@jit
def _fwd(
    x_ptr, w_ptr, scale_ptr, shift_ptr, y_ptr, rstd_ptr, M, N, R, x_stride, scale_stride, shift_stride, eps, offset,
    CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_M)
    sample = row // R
    col = tl.arange(0, BLOCK_N)
    mask = mask_of(row, M, col, N)
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    if CASTING == "none":
        rstd = rstd.to(x.dtype).to(tl.float32)
    h = h * rstd[:, None]
    if CASTING != "gemma":
        h = h.to(x.dtype).to(tl.float32)
    if w_ptr is not None:
        h = h * (load_row(w_ptr, col, N) + tl.cast(offset, tl.float32))[None, :]
    y = h * (1.0 + load_tile(scale_ptr, sample, col, scale_stride, mask))
    if shift_ptr is not None:
        y += load_tile(shift_ptr, sample, col, shift_stride, mask)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, scale_ptr, rstd_ptr, dx_ptr, a_ptr, b_ptr, dscale_ptr, dshift_ptr,
    R, N, programs, dy_stride, x_stride, scale_stride, offset,
    PER_ROW: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    NEED_DSCALE: tl.constexpr, NEED_DSHIFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of one sample, by one of its ``programs``: dx, and partial sums a of dy x_hat and b
    of dy.

    ``PER_ROW``: one sample of R rows that have scales of their own; dx, dscale and dshift, and
    partial sums a for dw.
    """
    sample = (tl.program_id(0) // programs).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = (load_row(w_ptr, col, N) + tl.cast(offset, tl.float32))[None, :]
    if not PER_ROW:
        factor = 1.0 + tl.load(scale_ptr + sample * scale_stride + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        if w_ptr is not None:
            factor *= w
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0) % programs, tl.cdiv(R, BLOCK_M), programs, num_stages=STAGES):
        of_sample = rows_at(tile, BLOCK_M)
        row = sample * R + of_sample
        mask = mask_of(of_sample, R, col, N)
        here = row[:, None] * N + col[None, :]
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        x = load_tile(x_ptr, row, col, x_stride, mask)
        rstd = tl.load(rstd_ptr + row, mask=of_sample < R, other=0.0)[:, None]
        x_hat = x * rstd
        if PER_ROW:
            if NEED_DSHIFT:
                tl.store(dshift_ptr + here, dy.to(dshift_ptr.dtype.element_ty), mask=mask)
            if NEED_DSCALE:
                dscale = dy * x_hat * w if w_ptr is not None else dy * x_hat
                tl.store(dscale_ptr + here, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
            g = dy * (1.0 + load_tile(scale_ptr, row, col, scale_stride, mask))
            if NEED_DW:
                a += g * x_hat
            if w_ptr is not None:
                g *= w
        else:
            if NEED_DSHIFT:
                b += dy
            if NEED_DW or NEED_DSCALE:
                a += dy * x_hat
            g = dy * factor
        if NEED_DX:
            dx = (g - x_hat * (tl.sum(g * x_hat, axis=1) / N)[:, None]) * rstd
            tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial = tl.program_id(0).to(tl.int64) * N + col
    if NEED_DW or (NEED_DSCALE and not PER_ROW):
        tl.store(a_ptr + partial, tl.sum(a, axis=0), mask=col < N)
    if NEED_DSHIFT and not PER_ROW:
        tl.store(b_ptr + partial, tl.sum(b, axis=0), mask=col < N)


@jit
def _bwd_sample(
    a_ptr, b_ptr, w_ptr, scale_ptr, dscale_ptr, dshift_ptr, dw_ptr, N, programs, scale_stride, offset,
    NEED_DW: tl.constexpr, NEED_DSCALE: tl.constexpr, NEED_DSHIFT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of a sample's programs: its dscale and dshift, and its share of dw."""
    sample = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    a = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        partial = (sample * programs + program)[:, None] * N + col[None, :]
        mask = mask_of(program, programs, col, N)
        if NEED_DW or NEED_DSCALE:
            a += tl.load(a_ptr + partial, mask=mask, other=0.0)
        if NEED_DSHIFT:
            b += tl.load(b_ptr + partial, mask=mask, other=0.0)
    total = tl.sum(a, axis=0)
    if NEED_DSHIFT:
        tl.store(dshift_ptr + sample * N + col, tl.sum(b, axis=0).to(dshift_ptr.dtype.element_ty), mask=col < N)
    if NEED_DSCALE:
        dscale = total
        if w_ptr is not None:
            dscale *= load_row(w_ptr, col, N) + tl.cast(offset, tl.float32)
        tl.store(dscale_ptr + sample * N + col, dscale.to(dscale_ptr.dtype.element_ty), mask=col < N)
    if NEED_DW:
        scale = tl.load(scale_ptr + sample * scale_stride + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(dw_ptr + sample * N + col, total * (1.0 + scale), mask=col < N)


@typed_launcher
def modulated_rms_norm_fwd(
    x: Tensor, w: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    y, rstd = x.new_empty(M, N), x.new_empty(M, dtype=torch.float32)
    c = launch_config.tile("modulated_rms_norm_fwd", N, x.itemsize, elements=4096)
    strides = x.stride(0), scale.stride(0), 0 if shift is None else shift.stride(0)
    numbers = M, N, M // max(scale.shape[0], 1), *strides, eps, offset
    launch(_fwd, (cdiv(M, c.block_m),), x, w, scale, shift, y, rstd, *numbers, CASTING=casting, **c.tile)
    return y, rstd


@typed_launcher
def modulated_rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor | None, scale: Tensor, rstd: Tensor, offset: float, need_dx: bool, need_dw: bool,
    need_dscale: bool, shift: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, that of shift in the dtype ``shift``; gradients that are not needed are
    empty."""
    (M, N), S, need_dshift = x.shape, scale.shape[0], shift is not None
    per_row = S == M and S > 1
    samples, R = (1, M) if per_row else (S, M // max(S, 1))
    # half of rms_norm's tile: 32 numbers per thread and a scale for each row do not fit in the
    # registers of sm90
    c = launch_config.tile("modulated_rms_norm_bwd", N, x.itemsize, elements=4096, pipelined=2)
    # of a sample
    programs = max(1, min(cdiv(2 * launch_config.processors() * c.per_sm, max(samples, 1)), cdiv(R, c.block_m)))
    dx = x.new_empty((M, N) if need_dx else 0)
    dscale = scale.new_empty((S, N) if need_dscale else 0)
    dshift = x.new_empty((S, N) if need_dshift else 0, dtype=shift)
    sums = lambda need, rows: x.new_empty((rows, N) if need else 0, dtype=torch.float32)
    a = sums(need_dw or (need_dscale and not per_row), samples * programs)
    b = sums(need_dshift and not per_row, samples * programs)
    needs = dict(NEED_DW=need_dw, NEED_DSCALE=need_dscale, NEED_DSHIFT=need_dshift)
    numbers = R, N, programs, dy.stride(0), x.stride(0), scale.stride(0), offset
    flags = dict(PER_ROW=per_row, NEED_DX=need_dx, **needs, STAGES=c.stages)
    launch(_bwd, (samples * programs,), dy, x, w, scale, rstd, dx, a, b, dscale, dshift, *numbers, **flags, **c.tile)
    if not per_row and (need_dw or need_dscale or need_dshift):
        of_samples = sums(need_dw, S)
        tensors, blocks = (b, w, scale, dscale, dshift, of_samples), dict(BLOCK_P=32, BLOCK_N=32, num_warps=4)
        launch(_bwd_sample, (S, cdiv(N, 32)), a, *tensors, N, programs, scale.stride(0), offset, **needs, **blocks)
        a = of_samples
    return dx, column_sum(a, w.dtype) if need_dw else x.new_empty(0), dscale, dshift


class LigerModulatedRMSNormFunction(torch.autograd.Function):
    """``apply(x, w, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True)``; the
    last is accepted and ignored."""

    @staticmethod
    def forward(ctx, x, w, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        x2, w, scale2 = rows_of(x), w if w is None else w.contiguous(), rows_of(scale)
        y, rstd = modulated_rms_norm_fwd(
            x2, w, scale2, shift if shift is None else rows_of(shift), eps, offset, casting_mode
        )
        ctx.save_for_backward(x2, w, scale2, rstd)
        ctx.offset, ctx.scale_shape = offset, scale.shape
        ctx.shift_shape, ctx.shift_dtype = (None, None) if shift is None else (shift.shape, shift.dtype)
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, scale, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        grads = modulated_rms_norm_bwd(
            rows_of(dy), x, w, scale, rstd, ctx.offset, *needs[:3], ctx.shift_dtype if needs[3] else None
        )
        shapes = dy.shape, w if w is None else w.shape, ctx.scale_shape, ctx.shift_shape
        return input_gradients(ctx, grads, shapes)


def check_rows(x: Tensor, scale: Tensor) -> None:
    """Raise ``ValueError`` if a row of scale would not apply to consecutive rows of x, for
    example if PyTorch would broadcast it along another dim."""
    N, lead, rows = x.shape[-1], x.shape[:-1], scale.shape[:-1]
    while rows and rows[-1] == 1:
        rows = rows[:-1]
    flat = len(rows) == 1 and (rows[0] == lead.numel() or (len(lead) == 1 and rows[0] > 0 and lead[0] % rows[0] == 0))
    if scale.shape[-1:] != x.shape[-1:] or not (rows == lead[: len(rows)] or flat):
        raise ValueError(
            f"modulated_rms_norm: scale must have shape ({N},) or (S, {N}) with a row a sample or a token of x "
            f"{tuple(x.shape)}, got {tuple(scale.shape)}"
        )


def _tensors(x: tuple[int, ...], scale: tuple[int, ...], dtype: torch.dtype | None = None) -> dict[str, T]:
    return dict(x=T(x), scale=T(scale, dtype=dtype), shift=T(scale, dtype=dtype), w=T(x[-1:]))


@op(
    reference=reference,
    cases=[
        Case("sample", _tensors((3, 17, 96), (3, 96))),
        Case("shared", _tensors((7, 123), (123,))),
        Case("token", dict(_tensors((2, 9, 40), (2, 9, 40)), offset=1.0)),
        Case("no-shift", dict(x=T((2, 5, 64)), scale=T((2, 1, 64)), w=T((64,)), offset=1.0, casting="gemma")),
        Case("no-weight", dict(x=T((2, 19, 700)), scale=T((2, 700)), shift=T((2, 700)), casting="none")),
        Case("token-plain", dict(x=T((9, 40)), scale=T((9, 40)), shift=T((9, 40)), casting="gemma")),
        Case("fp32-scale", _tensors((6, 64), (2, 64), dtype=torch.float32)),
        # with a small eps, only rounding error would remain
        Case("one-column", dict(_tensors((5, 1), (1, 1)), eps=0.5)),
    ],
    cost=lambda x, scale, shift=None, w=None, **_: Cost(
        nbytes(x, x, scale, shift, w), nbytes(x, x, x, scale, scale, shift, w, w), flops=(6 * x.numel(), 13 * x.numel())
    ),
)
def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, w: Tensor | None = None, *,
    eps: float = 1e-6, offset: float = 0.0, casting: str = "llama",
) -> Tensor:  # fmt: skip
    """``(1 + scale) * rms_norm(x, w) + shift`` over the last dim.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; w (N,) or None. scale is (N,) or (1, N) for
    all rows of x, (B, N) or (B, 1, N) with B the first dim of x, x's shape or (M, N) for one a row;
    or (S, N) for an x (M, N) of S samples of M / S rows. shift like scale, or None. Returns a
    tensor of x's shape and dtype.
    """
    check_norm("modulated_rms_norm", x, w, casting, scale=scale, shift=shift)
    check_rows(x, scale)
    checks.shape("modulated_rms_norm", scale.shape, shift=shift)
    if not use_kernels(x, fusible=True) or x.shape[-1] > MAX_N:
        return reference(x, scale, shift, w, eps=eps, offset=offset, casting=casting)
    return LigerModulatedRMSNormFunction.apply(x, w, scale, shift, eps, offset, casting)
