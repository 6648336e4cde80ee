"""Frozen weights in FP8 (e4m3: Micikevicius et al., arXiv:2209.05433). Each call casts its input to
FP8, and the tensor cores multiply in FP8.

A cast of x (M, N) is q = fp8(x * (TOP / a)) with the scale s = a / TOP, so that x is about q s. a
is the largest finite |x| of the tensor, or of each row. TOP is the largest value of the format.
With W (N, K) = W8 sw the two products of a projection are

    per tensor ("fp8"):        y = (x8 W8^T) sx sw      dx = (dy8 W8) sdy sw
                               x8 e4m3                  dy8 e5m2
    per row ("fp8_rowwise"):   y = (x8 W8^T) sx sw^T    dx = (d8 W8) sd,  d = dy sw^T
                               x8 e4m3                  d8 e4m3, sx and sd (M, 1), sw (N, 1)

Both multiply by the same W8. (A second cast of W by columns for dx would make dx the gradient of
another function.) An infinity or NaN becomes NaN in q and does not change the scale. A scale is
never 0 or infinite.

Products use the tensor cores' own accumulation (``use_fast_accum``), forward and backward. The
errors of the casts, with exact sums: a value in e4m3 is off by up to 1/16 of itself (2.6 % root
mean square), a value in e5m2 by twice that. Relative to fp64 with the dequantised weight, for
normal x and W, y is off by 2.6 % of its root mean square, and dx by 5.3 % (e5m2) or 2.6 % (per
row). W8 itself adds 2.6 % to both. Small values underflow: below
a / 2^18 in e4m3, below a / 2^32 in e5m2.

cuBLAS multiplies FP8 only if the reduction is contiguous in both operands: y needs W8 row by row,
dx needs the transpose of W8 row by row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, once_differentiable, typed_launcher
from liger_kernel.ops._core.invariance import is_invariant, is_over_tokens
from liger_kernel.ops._core.operator import intercepted, launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_row, mask_of, next_power_of_2, tl
from liger_kernel.ops.projections.weights import Operand, Weight, added

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-30  # an amax below it counts as this, so that TOP / amax and amax / TOP are normal numbers of fp32
_LEAST = tl.constexpr(LEAST)


def reference(x: Tensor, by: Tensor | None, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    """Return q (M, N) and the scale, () or (M, 1) in fp32, of x, or of ``x * by`` with by (N,)."""
    x = x.float() if by is None else x.float() * by
    # an infinity would make the scale useless for all other values
    finite = x.isfinite()
    size = x.abs().where(finite, 0.0)
    amax = (size.amax(1, keepdim=True) if per_row else size.amax()).clamp(min=LEAST)
    # PyTorch computes number / tensor as number * (1 / tensor), which rounds twice
    top = amax.new_full((), torch.finfo(dtype).max)
    return (x * (top / amax)).where(finite, float("nan")).to(dtype), amax / top


@jit
def _size(x):
    """|x| where it is finite, else 0."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@jit
def _amax(x_ptr, maxima_ptr, M, N, stride, programs, BLOCK: tl.constexpr):
    program, tiles = tl.program_id(0), tl.cdiv(N, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(program, M * tiles, programs):
        col = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (tile // tiles).to(tl.int64) * stride + col, mask=col < N, other=0.0).to(tl.float32)
        top = tl.maximum(top, _size(x))
    tl.store(maxima_ptr + program, tl.max(top, 0))


@jit
def _scaled(x, factor):
    # the conversion would make an infinity the largest value of the format
    return tl.where(tl.abs(x) < float("inf"), x * factor, float("nan"))


@jit
def _quantized(x, factor, q_ptr):
    return _scaled(x, factor).to(q_ptr.dtype.element_ty)


@jit
def _quantized_t(x, factor, q_ptr):
    """The transposed ``_quantized``, by conversions of its own.

    One instruction converts two values. If both bytes of its result are used one by one, as a
    transposition does, and also in packs of four, ptxas 12.8 (of Triton 3.6 and 3.7) reads one of
    them from a register that it does not write (MEASURED.md). Here both bytes are of the same
    value, and one is used.
    """
    x = _scaled(x, factor)
    q, _same = tl.split(tl.join(x, x).to(q_ptr.dtype.element_ty))
    return tl.trans(q)


@jit
def _cast(
    x_ptr, maxima_ptr, q_ptr, scale_ptr, M, N, stride, programs,
    TOP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, tiles = tl.program_id(0), tl.cdiv(N, BLOCK)
    every = tl.arange(0, PROGRAMS)
    amax = tl.maximum(tl.max(tl.load(maxima_ptr + every, mask=every < programs, other=0.0), 0), _LEAST)
    top = tl.full((), TOP, tl.float32)
    factor = tl.div_rn(top, amax)
    # all programs find the same scale; one stores it
    if program == 0:
        tl.store(scale_ptr, tl.div_rn(amax, top))
    for tile in tl.range(program, M * tiles, programs):
        row, col = (tile // tiles).to(tl.int64), (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * N + col, _quantized(x, factor, q_ptr), mask=col < N)


@jit
def _values(x_ptr, by_ptr, col, N):
    x = load_row(x_ptr, col, N)
    return x * tl.load(by_ptr + col, mask=col < N, other=0.0) if by_ptr is not None else x


@jit
def _cast_rows(
    x_ptr, by_ptr, q_ptr, scale_ptr, N, stride,
    TOP: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    q_ptr += row * N
    col = tl.arange(0, BLOCK)
    top = tl.full((), TOP, tl.float32)
    x = _values(x_ptr, by_ptr, col, N)
    size = _size(x)
    if not WHOLE:
        for start in tl.range(BLOCK, N, BLOCK):
            size = tl.maximum(size, _size(_values(x_ptr, by_ptr, start + col, N)))
    # a row of zeros has a scale, too
    amax = tl.maximum(tl.max(size, 0), _LEAST)
    factor = tl.div_rn(top, amax)
    tl.store(scale_ptr + row, tl.div_rn(amax, top))
    tl.store(q_ptr + col, _quantized(x, factor, q_ptr), mask=col < N)
    if not WHOLE:
        for start in tl.range(BLOCK, N, BLOCK):
            x = _values(x_ptr, by_ptr, start + col, N)
            tl.store(q_ptr + start + col, _quantized(x, factor, q_ptr), mask=start + col < N)


@jit
def _transpose(x_ptr, y_ptr, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # bytes: whole cache lines are read and written in both directions
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    mask = mask_of(n, N, k, K)
    x = tl.load(x_ptr + n[:, None] * K + k[None, :], mask=mask, other=0)
    tl.store(y_ptr + k[:, None] * N + n[None, :], tl.trans(x), mask=tl.trans(mask))


_PROGRAMS, _BLOCK = 1024, 2048  # programs, and values per step, of a cast per tensor
# the longest row that a program holds whole, and how much of a longer row it holds at a time
_WHOLE, _PART = 16384, 4096


@typed_launcher
def float8_cast(x: Tensor, by: Tensor | None, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    (M, N), top = x.shape, torch.finfo(dtype).max
    q = x.new_empty((M, N), dtype=dtype)
    scale = x.new_empty((M, 1) if per_row else (), dtype=torch.float32)
    if per_row:
        # a row that fits the registers is read once
        block = next_power_of_2(N) if N <= _WHOLE else _PART
        warps = min(max(block // 1024, 1), 4 if x.itemsize == 2 else 16)
        how = dict(TOP=top, WHOLE=block >= N, BLOCK=block)
        launch(_cast_rows, (M,), x, by, q, scale, N, x.stride(0), **how, num_warps=warps)
        return q, scale
    block = min(next_power_of_2(N), _BLOCK)
    # one more launch instead of atomics on one address
    programs = min(M * cdiv(N, block), _PROGRAMS)
    maxima = x.new_empty(programs, dtype=torch.float32)
    launch(_amax, (programs,), x, maxima, M, N, x.stride(0), programs, BLOCK=block, num_warps=4)
    how = dict(TOP=top, PROGRAMS=_PROGRAMS, BLOCK=block, num_warps=4)
    launch(_cast, (programs,), x, maxima, q, scale, M, N, x.stride(0), programs, **how)
    return q, scale


@typed_launcher
def transpose_bytes(x: Tensor) -> Tensor:
    """The contiguous transpose (K, N) of a contiguous x (N, K) with 8-bit values."""
    (N, K), x = x.shape, x.view(torch.int8)
    y = x.new_empty(K, N)
    launch(_transpose, (cdiv(K, 128), cdiv(N, 128)), x, y, N, K, BLOCK_N=128, BLOCK_K=128, num_warps=8)
    return y


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


CAPABILITY = 8, 9  # the compute capability from which tensor cores multiply in FP8 (Ada)


def lacking(device: torch.device, capability: tuple[int, int] = CAPABILITY) -> str | None:
    """The reason why a device cannot multiply in FP8. None if it can, and without a GPU, where
    the reference runs."""
    if device.type == "cpu" or device.type == "meta":
        return None
    found: tuple[int, int] | None = None
    if device.type == "cuda" and not torch.version.hip:
        found = _capability(torch.cuda.current_device() if device.index is None else device.index)
        if found >= capability:
            return None
    kind, (major, minor) = "FP8" if capability == CAPABILITY else "FP8 with scales of blocks", capability
    got = device if found is None else f"{found[0]}.{found[1]}"
    return f"{kind} needs an NVIDIA GPU of compute capability {major}.{minor} or newer, got {got}"


def cast(x: Tensor, dtype: torch.dtype, per_row: bool, by: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cast x (M, N), or x times ``by`` (N,), to ``dtype``; each row is contiguous. The fp32
    scale is (), or (M, 1) per row. ``ValueError`` without FP8."""
    # here and not at the product: a fallback would have other numbers
    if why := lacking(x.device):
        raise ValueError(why)
    if not x.numel():
        return x.to(dtype), x.new_ones((x.shape[0], 1) if per_row else (), dtype=torch.float32)
    return float8_cast(x, by, dtype, per_row) if use_kernels(x) else reference(x, by, dtype, per_row)


def transposed(w: Tensor) -> Tensor:
    y = transpose_bytes(w) if use_kernels(w.new_empty(0, dtype=torch.bfloat16)) else w.view(torch.int8).t().contiguous()
    return y.view(w.dtype)


def product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, *,
    fast: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a b^T (M, N) of a (M, K) and b (N, K) in FP8, times both scales: () and (), or (M, 1) and (N,
    1). ``fast``: the tensor cores' own accumulation.

    ``out`` (M, N), contiguous, of ``dtype``: where the result goes.
    """
    # nothing to multiply, or nothing that has values
    if not a.shape[0] or a.is_meta or intercepted():
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype) if out is None else out
    if a.is_cuda and scale_a.ndim == 0 and not is_invariant():
        # torch._scaled_mm(a, b.t(), scale_a, scale_b, bias, scale_result, dtype, fast): parsing
        # names takes the host as long as the dispatcher
        if out is None:
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, None, None, dtype, fast)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)
    if a.is_cuda and is_invariant() and not is_over_tokens():
        if scale_a.ndim == 0:
            raise ValueError("batch_invariant: products in FP8 must have a scale for each row, got one for the tensor")
        # its kernels depend on the number of rows; numbers in FP8 are numbers in bf16
        found = torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
        found = (found * scale_a * scale_b.t()).bfloat16().to(dtype)
    elif a.is_cuda:  # with scales per row, torch's product returns only bf16
        how = dict(out_dtype=torch.bfloat16, use_fast_accum=fast)
        found = torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), **how).to(dtype)
    else:
        wide = acc(dtype)
        with torch.autocast(a.device.type, enabled=False):
            found = ((a.to(wide) * scale_a) @ (b.to(wide) * scale_b).t()).to(dtype)
    return found if out is None else out.copy_(found)


@dataclass(frozen=True, eq=False)
class Float8(Weight):
    """``w`` (N, K) in e4m3 times ``scale``, () or (N, 1) in fp32. ``w_t``: the contiguous transpose
    (K, N) of ``w``; without it each backward makes one.

    Keeping the transpose costs 1 byte per weight; both together take as much memory as W in bf16.
    Making it reads and writes 1 byte per weight: a few percent of the time of a product with 8192
    rows, as much time as a product with 512 rows.
    """

    accumulates: ClassVar[bool] = False  # torch's scaled product cannot add to its output
    w: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    w_t: Tensor | None = field(default=None, kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        wide = acc(dtype)
        return (self.w.to(wide) * self.scale).to(dtype)

    def forward(self, x: Operand, y: Tensor | None) -> Tensor:
        # the activations have scales of the same kind as the weight
        per_row = self.scale.ndim > 0
        x8, scale = x.made((E4, per_row), lambda rows: cast(rows, E4, per_row))
        found = product(x8, scale, self.w, self.scale, x.rows.dtype)
        return added(found, y)

    def backward(self, dy: Operand, dx: Tensor | None) -> Tensor:
        # contiguous along the reduction, which for dx are the outputs
        w_t = transposed(self.w) if self.w_t is None else self.w_t
        if self.scale.ndim:
            # the scales of the outputs cannot be taken out of this product: they go into its
            # operand
            d8, scale = cast(dy.rows, E4, True, by=self.scale.view(-1))
            found = product(d8, scale, w_t, scale.new_ones(w_t.shape[0], 1), dy.rows.dtype)
        else:
            # e5m2: gradients need range more than precision
            d8, scale = cast(dy.rows, E5, False)
            found = product(d8, scale, w_t, self.scale, dy.rows.dtype)
        return found if dx is None else dx.add_(found)


def float8(w: Tensor, scale: Tensor, w_t: Tensor | None = None) -> Float8:
    N, K = w.shape
    return Float8((N, K), None, w=w, scale=scale, w_t=w_t)


class Float8LinearFunction(torch.autograd.Function):
    """``apply(x, bias or None, w, scale, w_t or None)``: x (..., K) times a frozen ``Float8``,
    without adapters. It saves no activation."""

    @staticmethod
    def forward(ctx, x, bias, w, scale, w_t):
        # not in save_for_backward: hooks may move saved tensors to the CPU, as if they were
        # activations
        ctx.stored, ctx.K = (w, scale, w_t), x.shape[-1]
        y = float8(w, scale).forward(Operand(rows_of(x)), None)
        return shaped(added(y, bias), (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_bias, *_ = ctx.needs_input_grad
        rows = rows_of(dy)
        dx = float8(*ctx.stored).backward(Operand(rows), None).view(*dy.shape[:-1], ctx.K) if need_x else None
        return dx, rows.sum(0) if need_bias else None, None, None, None
