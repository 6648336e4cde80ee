"""RMSNorm: ``y = x / sqrt(mean(x^2) + eps) * (w + offset)``, statistics in fp32 (Zhang and Sennrich, arXiv:1910.07467).

Shapes: x (..., N), w (N,), y like x.  M = product of the leading dims.

``casting`` says where the arithmetic is rounded, as models differ in it:
  llama   x_hat is rounded to x's dtype, then multiplied by w; the result has the promoted dtype of x and w
  gemma   everything in fp32, rounded once, to x's dtype
  none    no upcast: 1/rms and each product are rounded to x's dtype, the last one promoted with w

Rows wider than one program holds go to ``fused_add_rms_norm``, without a residual.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops import _config
from liger_kernel.ops._op import Case, Cost, T, acc, launch, launcher, nbytes, once_differentiable, op, rows_of, shaped, use_kernels
from liger_kernel.ops._reduce import column_sum
from liger_kernel.ops._shards import is_sharded, on_own_rows
from liger_kernel.ops._tl import cdiv, jit, tl

CASTING = ("llama", "gemma", "none")
MAX_N = 32768  # columns that one program holds in registers


def reference(x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama") -> Tensor:
    h = x.to(acc(x.dtype))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = x * rstd.to(x.dtype) if casting == "none" else h * rstd
    if w is None:
        return h.to(x.dtype)
    if casting == "gemma":
        return (h * (w.to(h.dtype) + offset)).to(x.dtype)
    return (w + offset if offset else w) * h.to(x.dtype)


@jit
def scaled_rows(h, rstd, w_ptr, col, N, offset, DTYPE: tl.constexpr, HAS_W: tl.constexpr, CASTING: tl.constexpr):
    """Rows h of fp32 values times 1/rms and weight, rounded to their dtype where ``casting`` says so."""
    if CASTING == "none":
        rstd = rstd.to(DTYPE).to(tl.float32)
    h = h * rstd[:, None]
    if HAS_W:
        if CASTING != "gemma":
            h = h.to(DTYPE).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < N, other=0.0)
        w_offset = w.to(tl.float32) + tl.cast(offset, tl.float32)
        if CASTING != "gemma":
            w_offset = w_offset.to(w.dtype).to(tl.float32)
        h = h * w_offset[None, :]
    return h


@jit
def _fwd(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, x_stride, eps, offset,
    HAS_W: tl.constexpr, CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    h = scaled_rows(h, rstd, w_ptr, col, N, offset, x.dtype, HAS_W, CASTING)
    tl.store(y_ptr + row[:, None] * N + col[None, :], h.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, dy_stride, x_stride, offset,
    HAS_W: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (row < M)[:, None] & (col < N)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        x_hat = x * rstd
        if NEED_DW:
            dw += dy * x_hat
        if NEED_DX:
            g = dy * w[None, :] if HAS_W else dy
            dx = (g - x_hat * (tl.sum(g * x_hat, axis=1) / N)[:, None]) * rstd
            tl.store(dx_ptr + row[:, None] * N + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@launcher("(Tensor x, Tensor? w, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)")
def rms_norm_fwd(x: Tensor, w: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    if N > MAX_N:
        y, _, rstd = wide.fused_add_rms_norm_fwd(x, None, w, eps, offset, casting)
        return y, rstd
    y = x.new_empty(M, N, dtype=x.dtype if w is None or casting == "gemma" else torch.promote_types(x.dtype, w.dtype))
    rstd = x.new_empty(M, dtype=torch.float32)
    c = _config.tile("rms_norm_fwd", N, x.itemsize, elements=4096, per_thread=32)
    launch(_fwd, (cdiv(M, c.block_m),), x, w, y, rstd, M, N, x.stride(0), eps, offset,
           HAS_W=w is not None, CASTING=casting, BLOCK_M=c.block_m, BLOCK_N=c.block_n, num_warps=c.num_warps)  # fmt: skip
    return y, rstd


@launcher("(Tensor dy, Tensor x, Tensor? w, Tensor rstd, float offset, bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)")
def rms_norm_bwd(dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, offset: float, need_dx: bool, need_dw: bool) -> tuple[Tensor, Tensor]:
    """dx and dw; what is not needed is empty."""
    M, N = x.shape
    if N > MAX_N:
        return wide.fused_add_rms_norm_bwd(dy, None, x, w, rstd, offset, need_dx, need_dw)
    # H200, bf16, 262144 x 128: 56 us; half the tile and one stage 176
    c = _config.tile("rms_norm_bwd", N, x.itemsize, elements=8192, per_thread=32, pipelined=2)
    programs = max(1, min(_config.processors() * c.per_sm, cdiv(M, c.block_m)))
    dx = x.new_empty((M, N) if need_dx else 0)
    partials = x.new_empty((programs, N) if need_dw else 0, dtype=torch.float32)
    launch(_bwd, (programs,), dy, x, w, rstd, dx, partials, M, N, dy.stride(0), x.stride(0), offset, HAS_W=w is not None,
           NEED_DX=need_dx, NEED_DW=need_dw, BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages, num_warps=c.num_warps)  # fmt: skip
    return dx, column_sum(partials, w.dtype) if need_dw else x.new_empty(0)


class LigerRMSNormFunction(torch.autograd.Function):
    """``apply(x, w, eps, offset=0.0, casting_mode="llama", in_place=None, row_mode=None)``; the last two are accepted and ignored."""

    @staticmethod
    def forward(ctx, x, w, eps, offset=0.0, casting_mode="llama", in_place=None, row_mode=None):
        x2, w = rows_of(x), w if w is None else w.contiguous()
        y, rstd = rms_norm_fwd(x2, w, eps, offset, casting_mode)
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


def rms_norm_forward(X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", row_mode: bool | None = None) -> tuple:
    """Without autograd: y, x as rows and 1/rms for ``rms_norm_backward``, two numbers of no meaning here, and ``casting_mode``."""
    x, W = rows_of(X), W if W is None else W.contiguous()
    y, rstd = rms_norm_fwd(x, W, eps, offset, casting_mode)
    return y.view(X.shape), x, rstd, 0, 0, casting_mode


def rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: str, BLOCK_SIZE: int = 0, num_warps: int = 0,
    in_place: bool = False, row_mode: bool | None = None, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx and dw, unless ``needs_dw`` is False, from what ``rms_norm_forward`` returned; dY is not overwritten."""
    need_dw = W is not None and needs_dw is not False
    dx, dw = rms_norm_bwd(rows_of(dY), rows_of(X), W if W is None else W.contiguous(), RSTD, offset, True, need_dw)
    return dx.view(dY.shape), dw if need_dw else None


@op(
    reference=reference,
    cases=[
        Case("llama", dict(x=T((48, 256)), w=T((256,)))),
        Case("gemma", dict(x=T((2, 17, 224)), w=T((224,)), offset=1.0, casting="gemma")),
        Case("olmo2", dict(x=T((3, 5, 96)), w=T((96,)), casting="gemma")),
        Case("offset", dict(x=T((9, 64)), w=T((64,)), offset=1.0, eps=1e-5)),
        Case("no-upcast", dict(x=T((9, 64)), w=T((64,)), casting="none")),
        Case("qk-norm", dict(x=T((2, 9, 4, 32)), w=T((32,)))),
        Case("no-weight", dict(x=T((5, 3, 64)), w=None)),
        Case("odd", dict(x=T((5, 123)), w=T((123,)))),
        Case("one-column", dict(x=T((5, 1)), w=T((1,)), eps=0.5)),  # a small eps cancels to rounding error
        Case("fp32-weight", dict(x=T((5, 64)), w=T((64,), dtype=torch.float32))),
        Case("wide", dict(x=T((2, MAX_N + 77)), w=T((MAX_N + 77,)))),
        Case("llama3-8b", dict(x=T((8192, 4096)), w=T((4096,))), gpu=True),
        Case("qwen3-qk", dict(x=T((4, 2048, 32, 128)), w=T((128,))), gpu=True),
        Case("phi3", dict(x=T((4096, 3072)), w=T((3072,))), gpu=True),
        Case("row-of-64k", dict(x=T((256, 65536)), w=T((65536,))), gpu=True),
        Case("row-of-256k", dict(x=T((64, 262144)), w=T((262144,))), gpu=True),
        Case("bad-weight", dict(x=T((4, 8)), w=T((4,))), error="rms_norm: w must have shape (8,), got (4,)"),
        Case("bad-casting", dict(x=T((4, 8)), w=T((8,)), casting="bf16"), error="rms_norm: casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        Case("integers", dict(x=T((4, 8), dtype=torch.int64)), error="rms_norm: x must be floating point, got torch.int64"),
    ],
    cost=lambda x, w=None, **_: Cost(nbytes(x, x, w), nbytes(x, x, x, w, w), flops=(4 * x.numel(), 10 * x.numel())),
    rivals={
        "torch": lambda x, w=None, *, eps=1e-6, offset=0.0, casting="llama": F.rms_norm(x, x.shape[-1:], w + offset if offset else w, eps),
        "upstream": lambda functional, x, w=None, *, eps=1e-6, offset=0.0, casting="llama": functional.liger_rms_norm(x, w, eps, offset, casting),
        "quack": lambda quack, x, w=None, *, eps=1e-6, offset=0.0, casting="llama": quack.rmsnorm(x.reshape(-1, x.shape[-1]), w, eps=eps).view(x.shape),
    },
    sweeps={"hidden": ((1024, 2048, 4096, 8192, 16384), lambda n: dict(x=T(((1 << 25) // n, n)), w=T((n,))))},
)
def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama") -> Tensor:
    """Root-mean-square normalisation over the last dim.

    x (..., N) in fp32, fp16, bf16 or fp64, any strides; w (N,) or None. Returns a tensor of x's shape.
    """
    if not x.is_floating_point():
        raise ValueError(f"rms_norm: x must be floating point, got {x.dtype}")
    if not x.ndim:
        raise ValueError("rms_norm: x must have at least one dim, got shape ()")
    if casting not in CASTING:
        raise ValueError(f"rms_norm: casting must be one of {CASTING}, got {casting!r}")
    if w is not None and w.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: w must have shape {tuple(x.shape[-1:])}, got {tuple(w.shape)}")
    if is_sharded(x) and (y := on_own_rows(rms_norm, x, w, eps=eps, offset=offset, casting=casting)) is not None:
        return y
    if not use_kernels(x, fusible=True):
        return reference(x, w, eps=eps, offset=offset, casting=casting)
    return LigerRMSNormFunction.apply(x, w, eps, offset, casting)


import liger_kernel.ops.fused_add_rms_norm as wide  # noqa: E402 - it imports this module
