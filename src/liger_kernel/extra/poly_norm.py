"""PolyNorm: ``y = w0 n(x^3) + w1 n(x^2) + w2 n(x) + b`` with ``n(z) = z / sqrt(mean(z^2) + eps)``,
in fp32, rounded once (arXiv:2411.03884).

Shapes: x (..., N), w (3,), b of one element, y like x.  M = product of the leading dims.

x^6 overflows fp32 if |x| exceeds 2 million, so a row with numbers above 2^15 is first divided by
its largest, s.  With u = x / s, n(x^p) is
u^p / sqrt(mean(u^2p) + eps / s^2p) for any s.  With r_p for the inverse of that root, n_p = u^p r_p
and m_p = mean(dy n_p):

  dx = 1/s sum_p w_p p u^(p-1) r_p (dy - n_p m_p),   dw_p = N sum over rows of m_p,   db = sum of dy
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, rows_in, store_tile, tile_at, tl

# Columns that a program holds in registers, with their powers, and in the backward also dy. A wider
# row is read more than once, in blocks of columns
FWD_N, BWD_N = 16384, 8192
LARGE = 2.0**15
_LARGE = tl.constexpr(LARGE)


def reference(x, w, b, *, eps):
    h, w, b = (t.to(acc(x.dtype)) for t in (x, w, b.reshape(())))
    top = h.detach().abs().amax(-1, keepdim=True) if x.shape[-1] else h.new_zeros(())
    inverse = torch.where(top > LARGE, 1 / top, 1.0)
    u = h * inverse
    norm = lambda p: u**p * torch.rsqrt((u**p).square().mean(-1, keepdim=True) + eps * inverse ** (2 * p))
    return (w[0] * norm(3) + w[1] * norm(2) + w[2] * norm(1) + b).to(x.dtype)


@jit
def _weights(w_ptr):
    return tl.load(w_ptr).to(tl.float32), tl.load(w_ptr + 1).to(tl.float32), tl.load(w_ptr + 2).to(tl.float32)


@jit
def _inverse(top):
    """1 / s. Rounded like a division: the approximate one makes 0 of the largest numbers'
    inverse."""
    return tl.where(top > _LARGE, tl.div_rn(tl.zeros_like(top) + 1.0, top), 1.0)


@jit
def _roots(square, fourth, sixth, inverse, N, eps):
    """r_1, r_2 and r_3, of sums of powers of u."""
    eps = tl.cast(eps, tl.float32)
    square_inverse = inverse * inverse
    r1 = tl.rsqrt(square / N + eps * square_inverse)
    r2 = tl.rsqrt(fourth / N + eps * square_inverse * square_inverse)
    r3 = tl.rsqrt(sixth / N + eps * square_inverse * square_inverse * square_inverse)
    return r1, r2, r3


@jit
def _fwd(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, x_stride, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    inverse = _inverse(tl.max(tl.abs(x), axis=1))
    u = x * inverse[:, None]
    u2 = u * u
    u3 = u2 * u
    r1, r2, r3 = _roots(tl.sum(u2, axis=1), tl.sum(u2 * u2, axis=1), tl.sum(u3 * u3, axis=1), inverse, N, eps)
    tl.store(stats_ptr + row, inverse, mask=row < M)
    tl.store(stats_ptr + M + row, r1, mask=row < M)
    tl.store(stats_ptr + 2 * M + row, r2, mask=row < M)
    tl.store(stats_ptr + 3 * M + row, r3, mask=row < M)
    w0, w1, w2 = _weights(w_ptr)
    y = w0 * (u3 * r3[:, None]) + w1 * (u2 * r2[:, None]) + w2 * (u * r1[:, None]) + tl.load(b_ptr).to(tl.float32)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _powers(x_ptr, N, inverse, BLOCK_N: tl.constexpr):
    """Of a row: the largest |x|, and sums of u^2, u^4 and u^6."""
    top = tl.zeros((BLOCK_N,), tl.float32)
    square, fourth, sixth = top, top, top
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        x = load_row(x_ptr, col, N)
        top = tl.maximum(top, tl.abs(x))
        u = x * inverse
        square += u * u
        fourth += (u * u) * (u * u)
        sixth += (u * u * u) * (u * u * u)
    return tl.max(top, axis=0), tl.sum(square, axis=0), tl.sum(fourth, axis=0), tl.sum(sixth, axis=0)


@jit
def _fwd_wide(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, x_stride, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    top, square, fourth, sixth = _powers(x_ptr, N, 1.0, BLOCK_N)
    inverse = _inverse(top)
    if top > _LARGE:  # these sums may be infinite
        top, square, fourth, sixth = _powers(x_ptr, N, inverse, BLOCK_N)
    r1, r2, r3 = _roots(square, fourth, sixth, inverse, N, eps)
    tl.store(stats_ptr + row, inverse)
    tl.store(stats_ptr + M + row, r1)
    tl.store(stats_ptr + 2 * M + row, r2)
    tl.store(stats_ptr + 3 * M + row, r3)
    w0, w1, w2 = _weights(w_ptr)
    b = tl.load(b_ptr).to(tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        u = load_row(x_ptr, col, N) * inverse
        y = w0 * (u * u * u * r3) + w1 * (u * u * r2) + w2 * (u * r1) + b
        tl.store(y_ptr + row * N + col, y.to(y_ptr.dtype.element_ty), mask=col < N)


@jit
def _store_sums(dwb_ptr, dw0, dw1, dw2, db, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr):
    """A program's row of partial sums: dw, then db; one alone if the other is not needed."""
    dwb_ptr += tl.program_id(0) * (3 * NEED_DW + NEED_DB)
    if NEED_DW:
        tl.store(dwb_ptr, dw0)
        tl.store(dwb_ptr + 1, dw1)
        tl.store(dwb_ptr + 2, dw2)
        dwb_ptr += 3
    if NEED_DB:
        tl.store(dwb_ptr, db)


@jit
def _bwd_wide(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, dwb_ptr, M, N, dy_stride, x_stride,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    w0, w1, w2 = _weights(w_ptr)
    dw0 = 0.0
    dw1 = 0.0
    dw2 = 0.0
    db = 0.0
    for i in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row = i.to(tl.int64)
        inverse = tl.load(stats_ptr + row)
        r1 = tl.load(stats_ptr + M + row)
        r2 = tl.load(stats_ptr + 2 * M + row)
        r3 = tl.load(stats_ptr + 3 * M + row)
        s0 = tl.zeros((BLOCK_N,), tl.float32)
        s1, s2, s3 = s0, s0, s0
        for start in range(0, N, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
            u = tl.load(x_ptr + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32) * inverse
            s0 += dy
            s1 += dy * (u * r1)
            s2 += dy * (u * u * r2)
            s3 += dy * (u * u * u * r3)
        n1_sum = tl.sum(s1, axis=0)
        n2_sum = tl.sum(s2, axis=0)
        n3_sum = tl.sum(s3, axis=0)
        dw0 += n3_sum
        dw1 += n2_sum
        dw2 += n1_sum
        db += tl.sum(s0, axis=0)
        if NEED_DX:
            for start in range(0, N, BLOCK_N):
                col = start + tl.arange(0, BLOCK_N)
                dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
                u = tl.load(x_ptr + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32) * inverse
                dx = w0 * (3.0 * u * u * r3) * (dy - u * u * u * r3 * (n3_sum / N))
                dx += w1 * (2.0 * u * r2) * (dy - u * u * r2 * (n2_sum / N))
                dx += w2 * r1 * (dy - u * r1 * (n1_sum / N))
                tl.store(dx_ptr + row * N + col, (dx * inverse).to(dx_ptr.dtype.element_ty), mask=col < N)
    _store_sums(dwb_ptr, dw0, dw1, dw2, db, NEED_DW, NEED_DB)


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, dwb_ptr, M, N, dy_stride, x_stride,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    w0, w1, w2 = _weights(w_ptr)
    dw0 = tl.zeros((BLOCK_M,), tl.float32)
    dw1 = tl.zeros((BLOCK_M,), tl.float32)
    dw2 = tl.zeros((BLOCK_M,), tl.float32)
    db = tl.zeros((BLOCK_M,), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row, mask = rows_in(tile, M, col, N, BLOCK_M)
        dy = load_tile(dy_ptr, row, col, dy_stride, mask)
        x = load_tile(x_ptr, row, col, x_stride, mask)
        inverse = tl.load(stats_ptr + row, mask=row < M, other=0.0)
        r1 = tl.load(stats_ptr + M + row, mask=row < M, other=0.0)[:, None]
        r2 = tl.load(stats_ptr + 2 * M + row, mask=row < M, other=0.0)[:, None]
        r3 = tl.load(stats_ptr + 3 * M + row, mask=row < M, other=0.0)[:, None]
        u = x * inverse[:, None]
        u2 = u * u
        n1 = u * r1
        n2 = u2 * r2
        n3 = u2 * u * r3
        s1 = tl.sum(dy * n1, axis=1)
        s2 = tl.sum(dy * n2, axis=1)
        s3 = tl.sum(dy * n3, axis=1)
        if NEED_DW:
            dw0 += s3
            dw1 += s2
            dw2 += s1
        if NEED_DB:
            db += tl.sum(dy, axis=1)
        if NEED_DX:
            dx = w0 * (3.0 * u2 * r3) * (dy - n3 * (s3 / N)[:, None])
            dx += w1 * (2.0 * u * r2) * (dy - n2 * (s2 / N)[:, None])
            dx += w2 * r1 * (dy - n1 * (s1 / N)[:, None])
            dx *= inverse[:, None]
            store_tile(dx_ptr, row, col, N, dx, mask)
    _store_sums(
        dwb_ptr, tl.sum(dw0, axis=0), tl.sum(dw1, axis=0), tl.sum(dw2, axis=0), tl.sum(db, axis=0), NEED_DW, NEED_DB
    )


@typed_launcher
def poly_norm_fwd(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and for each row 1/s, r_1, r_2 and r_3."""
    M, N = x.shape
    y, stats = x.new_empty(M, N), x.new_empty(4, M, dtype=torch.float32)
    if N > FWD_N:
        launch(_fwd_wide, (M,), x, w, b, y, stats, M, N, x.stride(0), eps, BLOCK_N=4096, num_warps=8)
        return y, stats
    c = launch_config.tile("poly_norm_fwd", N, x.itemsize, elements=4096)
    launch(_fwd, (cdiv(M, c.block_m),), x, w, b, y, stats, M, N, x.stride(0), eps, **c.tile)
    return y, stats


@typed_launcher
def poly_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, stats: Tensor, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor]:
    """dx, and dw and db side by side in fp32; gradients that are not needed are empty."""
    M, N = x.shape
    wide = N > BWD_N
    # half of rms_norm's tile: the powers of a row need twice as many registers as the weight of
    # rms_norm and its sums
    c = launch_config.tile("poly_norm_bwd", min(N, BWD_N), x.itemsize, elements=4096, pipelined=2)
    programs = max(1, min(2 * launch_config.processors() * c.per_sm, M if wide else cdiv(M, c.block_m)))
    dx = x.new_empty((M, N) if need_dx else 0)
    partials = x.new_empty(programs, 3 * need_dw + need_db, dtype=torch.float32)
    needs = dict(NEED_DX=need_dx, NEED_DW=need_dw, NEED_DB=need_db)
    kernel, tile = (_bwd_wide, dict(BLOCK_N=2048, num_warps=8)) if wide else (_bwd, dict(STAGES=c.stages, **c.tile))
    numbers = M, N, dy.stride(0), x.stride(0)
    launch(kernel, (programs,), dy, x, w, stats, dx, partials, *numbers, **needs, **tile)
    return dx, column_sum(partials, torch.float32)


class LigerPolyNormFunction(torch.autograd.Function):
    """``apply(x, w, b, eps=1e-6, in_place=True)``; the last is accepted and ignored."""

    @staticmethod
    def forward(ctx, x, w, b, eps=1e-6, in_place=True):
        x2, w = rows_of(x), w.contiguous()
        y, stats = poly_norm_fwd(x2, w, b, eps)
        ctx.save_for_backward(x2, w, stats)
        ctx.b_shape, ctx.b_dtype = b.shape, b.dtype
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, stats = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx, dwb = poly_norm_bwd(rows_of(dy), x, w, stats, need_dx, need_dw, need_db)
        dw = dwb[:3].to(w.dtype) if need_dw else None
        db = dwb[-1:].view(ctx.b_shape).to(ctx.b_dtype) if need_db else None
        return dx.view(dy.shape) if need_dx else None, dw, db, None, None


def _tensors(*shape: int) -> dict[str, T]:
    return dict(x=T(shape), w=T((3,)), b=T((1,)))


@op(
    reference=reference,
    cases=[
        Case("llama", _tensors(2, 9, 96)),
        Case("odd", _tensors(5, 123)),
        Case("many-rows", _tensors(301, 40)),
        Case("one-column", dict(_tensors(5, 1), eps=0.5)),  # with a small eps, only rounding error would remain
        Case("fp32-weights", dict(x=T((6, 64)), w=T((3,), dtype=torch.float32), b=T((1,), dtype=torch.float32))),
        Case("wide-backward", _tensors(2, BWD_N + 5)),
        Case("wide", _tensors(2, FWD_N + 77)),
    ],
    cost=lambda x, w, b, **_: Cost(nbytes(x, x), nbytes(x, x, x), flops=(14 * x.numel(), 27 * x.numel())),
)
def poly_norm(x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The sum of the normalised third, second and first power of x over the last dim, weighted by
    w[0], w[1] and w[2], plus b.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; w (3,); b () or (1,). Returns a tensor of
    x's shape and dtype.
    """
    checks.floating("poly_norm", x=x)
    if not x.ndim:
        raise ValueError("poly_norm: x must have at least one dim, got shape ()")
    checks.shape("poly_norm", (3,), w=w)
    checks.one_element("poly_norm", b=b)
    if not use_kernels(x, fusible=True):
        return reference(x, w, b, eps=eps)
    return LigerPolyNormFunction.apply(x, w, b, eps)
