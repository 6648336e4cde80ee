"""MXFP4 (OCP Microscaling Formats, MX, specification v1.0), in the layout in which gpt-oss is
published: the weights of a mixture's experts, made dense for some experts at a time.

W (E, N, K) is q s. Of the blocks (E, N, K / 32, 16) in uint8, each byte holds two values q in e2m1,
the first in its lower half. A block of 32 values has the scale s = 2^(b - 127), with b of scales (E,
N, K / 32) in uint8 (E8M0). A product takes the experts in parts, so that a dense copy of all of them
is never made; ``PART`` limits the size of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, checks, launch_config, launcher, typed_launcher
from liger_kernel.ops._core.operator import launch, on_gpu, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, rows_at, tl
from liger_kernel.ops.projections import grouped_tma
from liger_kernel.ops.projections.float8_blocks import Float8Blocks
from liger_kernel.ops.projections.grouped_mm import grouped_mm, write_mm
from liger_kernel.ops.projections.weights import Weight

BLOCK = 32  # values with one scale
# bytes of the experts that are dense at a time: gpt-oss-20b takes 360 ms and 14.56 GiB with 2^29, and
# 331 ms and 14.96 GiB with 2^30
PART = 2**29
E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0  # of the lower three bits; the highest is the sign


def check(op: str, name: str, blocks: Tensor, scales: Tensor, shape: tuple[int, int, int] | None = None) -> None:
    """Raise ``ValueError`` unless ``blocks`` and ``scales`` are a weight (E, N, K), of this ``shape``
    if it is given. Waits for the device, which looks for scales that are NaN."""
    for what, t in (("blocks", blocks), ("scales", scales)):
        if t.dtype != torch.uint8:
            raise ValueError(f"{op}: {name}_{what} must be uint8, got {t.dtype}")
    if blocks.ndim != 4 or blocks.shape[3] != BLOCK // 2:
        raise ValueError(f"{op}: {name}_blocks must have shape (E, N, K / 32, 16), got {tuple(blocks.shape)}")
    if shape is not None and shape != (found := (*blocks.shape[:2], blocks.shape[2] * BLOCK)):
        raise ValueError(f"{op}: {name}_blocks must hold weights of shape {shape}, got {found}")
    checks.shape(op, blocks.shape[:3], **{f"{name}_scales": scales})
    if not scales.is_meta and bool((scales == 255).any()):
        raise ValueError(f"{op}: {name}_scales must be at most 254, got 255, which is NaN")


def reference(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (E, N, K) of these blocks, in ``dtype``."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=acc(dtype), device=blocks.device)
    q = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
    return torch.ldexp(q, scales[..., None].to(torch.int32) - 127).flatten(-2).to(dtype)


def codes_of_e2m1(w: Tensor) -> Tensor:
    """The bits of the values in E2M1 nearest to w in fp32, in uint8; those above 6 saturate."""
    size = w.abs()
    # from 1 on, one bit of the fraction is left: a half is rounded down. A table would be copied from the host
    normal = ((size.view(torch.int32) + ((1 << 21) - 1)) >> 22) - 2 * 126
    code = torch.where(size >= 1, normal.clamp_(max=7).to(torch.uint8), (size > 0.25).to(torch.uint8) + (size > 0.75))
    return code | (w < 0).to(torch.uint8) << 3


def blocks_of(w: Tensor, exponent: Tensor) -> Tensor:
    """The blocks nearest to w (..., K / 32, 32) with these exponents of their scales."""
    code = codes_of_e2m1(torch.ldexp(w, -exponent[..., None]))
    return code[..., ::2] | code[..., 1::2] << 4


def rounded(w: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks and scales nearest to w (E, N, K), K in 32s. The largest value of a block is
    between 4 and 8 times its scale, as in the specification; above 6 it saturates."""
    wide = w.float().unflatten(-1, (-1, BLOCK))
    # frexp: amax = m 2^e with m from 1/2 to 1
    exponent = (torch.frexp(wide.abs().amax(-1)).exponent - 3).clamp(-127, 127)
    return blocks_of(wide, exponent), (exponent + 127).to(torch.uint8)


@jit
def small_float(bits, SIGN: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, LEAST: tl.constexpr):
    """In fp32, of the bits of a narrower type in int32: its bit of sign, bits of fraction, the bias of its
    exponent and its least number."""
    size = bits & (SIGN - 1)
    # with an exponent, this and the fraction lie as those of fp32 do, if they are moved
    normal = ((size << (23 - FRACTION)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << FRACTION), size.to(tl.float32) * LEAST, normal)
    return tl.where(bits > SIGN - 1, -value, value)


@jit
def e2m1(half):
    return small_float(half, 8, 1, 1, 0.5)


@jit
def _power(bits):
    """2^(bits - 127) in fp32."""
    # 2^-127 has no exponent in fp32, only a fraction
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@jit
def _dense(blocks_ptr, scales_ptr, y_ptr, n_blocks, BLOCKS: tl.constexpr):
    block = rows_at(tl.program_id(0), BLOCKS)
    inside = (block < n_blocks)[:, None]
    scale = _power(tl.load(scales_ptr + block, mask=block < n_blocks, other=0).to(tl.int32))[:, None]
    byte = tl.load(blocks_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside, other=0).to(tl.int32)
    y = tl.interleave(e2m1(byte & 15) * scale, e2m1(byte >> 4) * scale)
    tl.store(y_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@typed_launcher
def dense_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    E, N, G, half = blocks.shape
    y = blocks.new_empty(E, N, 2 * G * half, dtype=dtype)
    launch(_dense, (cdiv(E * N * G, 128),), blocks, scales, y, E * N * G, BLOCKS=128, num_warps=4)
    return y


def dense(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (E, N, K), as a new tensor of ``dtype``."""
    if blocks.numel() and use_kernels(blocks.new_empty(0, dtype=dtype)) and blocks.is_contiguous():
        return dense_mxfp4(blocks, scales.contiguous(), dtype)
    return reference(blocks, scales, dtype)


@jit
def _nearest(w):
    """The code of the value in E2M1 nearest to w, as ``codes_of_e2m1``."""
    size = tl.abs(w)
    normal = ((size.to(tl.int32, bitcast=True) + ((1 << 21) - 1)) >> 22) - 2 * 126
    code = tl.where(size >= 1, tl.minimum(normal, 7), (size > 0.25).to(tl.int32) + (size > 0.75).to(tl.int32))
    return code + (w < 0).to(tl.int32) * 8


@jit
def _rounded_sum(
    blocks_ptr, scales_ptr, b_ptr, a_ptr, y_ptr, N, K, R,
    CODES: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """b (E, N, R); a (E, R, 2, K / 2), the even columns before the odd ones, as they lie in a byte."""
    half = K // 2
    down, across = tl.cdiv(N, BLOCK_N), tl.cdiv(half, BYTES)
    tile, e = tl.program_id(0) % (down * across), (tl.program_id(0) // (down * across)).to(tl.int64)
    row = (tile // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = (tile % across) * BYTES + tl.arange(0, BYTES)
    r, mask = tl.arange(0, BLOCK_R), (row < N)[:, None] & (col < half)[None, :]
    low = tl.zeros((BLOCK_N, BYTES), tl.float32)
    high = tl.zeros((BLOCK_N, BYTES), tl.float32)
    for first in range(0, R, BLOCK_R):
        exists = first + r < R
        b_tile = b_ptr + (e * N + row[:, None]) * R + first + r[None, :]
        b = tl.load(b_tile, mask=(row < N)[:, None] & exists[None, :], other=0.0)
        a_tile = a_ptr + (e * R + first + r[:, None]) * K + col[None, :]
        inside = exists[:, None] & (col < half)[None, :]
        low = tl.dot(b, tl.load(a_tile, mask=inside, other=0.0), low, input_precision="ieee")
        high = tl.dot(b, tl.load(a_tile + half, mask=inside, other=0.0), high, input_precision="ieee")
    at = (e * N + row[:, None]) * half + col[None, :]
    bits = tl.load(scales_ptr + (e * N + row[:, None]) * (K // 32) + (col // 16)[None, :], mask=mask, other=127)
    bits = bits.to(tl.int32)
    scale, inverse = _power(bits), _power(254 - bits)
    byte = tl.load(blocks_ptr + at, mask=mask, other=0).to(tl.int32)
    first, second = (e2m1(byte & 15) * scale + low) * inverse, (e2m1(byte >> 4) * scale + high) * inverse
    first, second = _nearest(first), _nearest(second)
    if CODES:
        tl.store(y_ptr + at, (first | second << 4).to(tl.uint8), mask=mask)
    else:
        y = tl.interleave(e2m1(first) * scale - low, e2m1(second) * scale - high)
        out = 2 * (tile % across) * BYTES + tl.arange(0, 2 * BYTES)
        out_mask = (row < N)[:, None] & (out < K)[None, :]
        tl.store(y_ptr + (e * N + row[:, None]) * K + out[None, :], y.to(y_ptr.dtype.element_ty), mask=out_mask)


# H200, 16 experts of 5760 x 2880, rank 4: 0.92 ms, with 64 outputs and 8 warps 1.09
_SUM = dict(BLOCK_N=32, BYTES=64, BLOCK_R=16, num_warps=4)


@typed_launcher
def rounded_sum_mxfp4(blocks: Tensor, scales: Tensor, b: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the number W' of this storage nearest to W + b a, b (E, N, R) and a (E, R, K): its blocks, in uint8, or
    W' - b a in a floating ``dtype``."""
    (E, N, G, _), R, codes = blocks.shape, b.shape[2], dtype == torch.uint8
    y = torch.empty_like(blocks) if codes else blocks.new_empty(E, N, G * BLOCK, dtype=dtype)
    a = a.unflatten(2, (-1, 2)).movedim(3, 2).contiguous()
    grid = (E * cdiv(N, _SUM["BLOCK_N"]) * cdiv(G * BLOCK // 2, _SUM["BYTES"]),)
    tensors = blocks, scales.contiguous(), b.contiguous(), a, y
    launch(_rounded_sum, grid, *tensors, N, G * BLOCK, R, CODES=codes, **_SUM)
    return y


@dataclass(frozen=True, eq=False)
class MXFP4Experts(Weight):
    """The weights (E, N, K) of experts as the operators multiply by them."""

    blocks: Tensor = field(kw_only=True)
    scales: Tensor = field(kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dense(self.blocks, self.scales, dtype)

    @property
    def values(self) -> Tensor:
        return self.blocks

    def nearest(self, w: Tensor) -> MXFP4Experts:
        blocks = blocks_of(w.unflatten(-1, (-1, BLOCK)), self.scales.int() - 127)
        return replace(self, blocks=blocks)

    def part(self, some: slice, dtype: torch.dtype) -> Tensor:
        """Those of some experts."""
        return dense(self.blocks[some], self.scales[some], dtype)


def mxfp4_experts(blocks: Tensor, scales: Tensor) -> MXFP4Experts:
    E, N, G, _ = blocks.shape
    return MXFP4Experts((E, N, G * BLOCK), None, True, blocks=blocks, scales=scales)


@launcher("(Tensor a, Tensor b, Tensor offs, int first, Tensor(a!) y) -> ()")
def grouped_mm_part_(a, b, offs, first, y) -> None:
    """As ``grouped_mm``, for the groups from ``first`` on that b has: writes their rows of y."""
    if tracing(a):
        return
    # the first of them begins where the one before it ends
    offs, later = offs[first : first + b.shape[0]], first > 0
    if grouped_tma.supported(a, b):
        grouped_tma.product(a, b, offs, y, later=later)
    else:
        write_mm(a, b, offs, y, later)


def in_parts(weight: Tensor | Weight, dtype: torch.dtype) -> bool:
    """Whether a product takes the experts in parts: for FP8, if all of them were larger than one."""
    if isinstance(weight, Float8Blocks):
        return math.prod(weight.shape) * dtype.itemsize > PART
    return isinstance(weight, MXFP4Experts)


def product_in_parts(rows: Tensor, weight: MXFP4Experts | Float8Blocks, offs: Tensor, turned: bool) -> Tensor:
    """Sorted rows times the experts' W^T, or, ``turned``, times W, some experts after others."""
    E, N, K = weight.shape
    dtype = rows.dtype
    count = max(1, min(E, PART // (N * K * dtype.itemsize)))
    # PyTorch's kernels, which are the faster ones there, need all groups
    if on_gpu(rows) and launch_config.arch() == "sm100" and dtype == torch.bfloat16:
        count = E
    if count == E:
        w = weight.dense(dtype)
        return grouped_mm(rows, w if turned else w.mT, offs)
    y = rows.new_empty(rows.shape[0], K if turned else N)
    for first in range(0, E, count):
        w = weight.part(slice(first, first + count), dtype)
        grouped_mm_part_(rows, w if turned else w.mT, offs, first, y)
        del w  # the next part gets its memory
    return y
