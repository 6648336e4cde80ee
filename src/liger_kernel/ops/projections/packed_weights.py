"""Frozen weights in 4 or 8 bits with a scale for each group of values, as checkpoints are published,
made dense by one kernel for one product.

W (N, K) = (q - z) s. The values q, and the zeros z where a format has them, are packed into words of 32
bits, the first value in the lowest bits; groups count along K. There are two orders of storage:

    rows      compressed-tensors ("pack-quantized"): q along K; s (N, K / group); z along N, or the middle
              of the range. NVFP4 (NVIDIA's blocks of 16): q in E2M1, two in a byte, z = 0, s in E4M3
              divided by one number in fp32
    columns   W^T is stored. GPTQ (arXiv:2210.17323): q along K; s (K / group, N); z along N, in its first
              version less 1; rows of W^T may name their group. AWQ (arXiv:2306.00978): q and z along N,
              eight columns in a word in the order 0, 2, 4, 6, 1, 3, 5, 7; s (K / group, N)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import checks, typed_launcher
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, div, jit, next_power_of_2, rows_at, tl
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.mxfp4 import E2M1, codes_of_e2m1, e2m1, small_float
from liger_kernel.ops.projections.weights import Dequantized

NVFP4 = 16  # values with one scale


def unpacked(words: Tensor, bits: int, count: int, dim: int = -1) -> Tensor:
    """``count`` integers of so many bits along ``dim``, of ``words`` in which the first value of a word
    lies lowest."""
    shifts = torch.arange(0, 8 * words.itemsize, bits, device=words.device)
    values = (words.movedim(dim, -1).unsqueeze(-1).long() >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :count].movedim(-1, dim)


def packed_words(values: Tensor, bits: int, dim: int = -1, dtype: torch.dtype = torch.int32) -> Tensor:
    """Words of ``dtype``, of which ``unpacked`` finds these integers."""
    each = 8 * dtype.itemsize // bits
    values = F.pad(values.int().movedim(dim, -1), (0, -values.shape[dim] % each)).unflatten(-1, (-1, each))
    shifts = torch.arange(0, 8 * dtype.itemsize, bits, device=values.device, dtype=torch.int32)
    return (values << shifts).sum(-1, dtype=torch.int32).to(dtype).movedim(-1, dim).contiguous()


def rows_reference(
    packed: Tensor, scale: Tensor, zero: Tensor | None, divisor: Tensor | None, K: int, bits: int, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """What ``dense_rows`` returns. With a divisor the values are in E2M1."""
    q = unpacked(packed, bits, K)
    s = scale.float() if divisor is None else scale.float() / divisor.float()
    s = s.repeat_interleave(K // s.shape[1], 1)
    if divisor is not None:
        table = torch.tensor(E2M1, device=q.device)
        return (torch.cat((table, -table))[q] * s).to(dtype)
    if zero is None:
        return ((q - 2 ** (bits - 1)) * s).to(dtype)
    z = unpacked(zero, bits, packed.shape[0], 0).repeat_interleave(K // scale.shape[1], 1)
    return ((q - z) * s).to(dtype)


# places in a word of AWQ of the columns 0 to 7
AWQ = 0, 4, 1, 5, 2, 6, 3, 7


def columns_reference(
    words: Tensor, zeros: Tensor, scale: Tensor, index: Tensor | None, bits: int, plus: int, awq: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What ``dense_columns`` returns, W^T (K, N)."""
    N = scale.shape[1]
    q, z = unpacked(words, bits, words.shape[1] * 8 if awq else words.shape[0] * 32 // bits, -1 if awq else 0), zeros
    z = unpacked(z, bits, N)
    if awq:
        q, z = (t.unflatten(1, (-1, 8))[..., list(AWQ)].flatten(1) for t in (q, z))
    K = q.shape[0]
    group = torch.arange(K, device=q.device) // (K // scale.shape[0]) if index is None else index.long()
    return ((q - z[group] - plus) * scale.float()[group]).to(dtype)


def _steps(w: Tensor, scale: Tensor) -> Tensor:
    """w in steps of its scales; 0 where a scale is 0."""
    return w / scale.where(scale != 0, float("inf"))


def rows_nearest(bits: int, scale: Tensor, zero: Tensor | None, divisor: Tensor | None, w: Tensor) -> Tensor:
    """The words whose values, with these scales, are nearest to w (N, K) in fp32; beyond the range of the
    format, its end."""
    s = scale.float() if divisor is None else scale.float() / divisor.float()
    steps = _steps(w.unflatten(1, (s.shape[1], -1)), s[..., None])
    if divisor is not None:
        return packed_words(codes_of_e2m1(steps).flatten(1), bits, dtype=torch.uint8)
    z = 2 ** (bits - 1) if zero is None else unpacked(zero, bits, w.shape[0], 0)[..., None]
    return packed_words((steps.round_() + z).clamp_(0, 2**bits - 1).flatten(1), bits)


def columns_nearest(
    bits: int, plus: int, awq: bool, zeros: Tensor, scale: Tensor, index: Tensor | None, w: Tensor
) -> Tensor:  # fmt: skip
    """As ``rows_nearest``, for the words of ``columns_reference``."""
    N, K = w.shape
    z = unpacked(zeros, bits, N)
    z = z.unflatten(1, (-1, 8))[..., list(AWQ)].flatten(1) if awq else z
    group = torch.arange(K, device=w.device) // (K // scale.shape[0]) if index is None else index.long()
    q = (_steps(w.mT, scale.float()[group]).round_() + z[group] + plus).clamp_(0, 2**bits - 1)
    if awq:  # the columns of a word in the order in which they lie there
        q = q.unflatten(1, (-1, 8))[..., [AWQ.index(place) for place in range(8)]].flatten(1)
    return packed_words(q, bits, 1 if awq else 0)


@jit
def _e4m3(byte):
    """In fp32, of the bits of E4M3 in int32: GPUs before Hopper and Ada have no such type."""
    return small_float(byte, 128, 3, 7, 0.001953125)


@jit
def _rows(
    packed_ptr, scale_ptr, zero_ptr, divisor_ptr, y_ptr, blocks, groups,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A block is a group or a part of one; they lie one after another, as the rows do."""
    block = rows_at(tl.program_id(0), BLOCKS)
    exists = block < blocks
    group = block // PER_GROUP
    scale = tl.load(scale_ptr + group, mask=exists, other=0)
    BYTES: tl.constexpr = BLOCK * BITS // 8
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(packed_ptr + at, mask=exists[:, None], other=0).to(tl.int32)
    q = byte if BITS == 8 else tl.interleave(byte & 15, byte >> 4)
    if divisor_ptr is not None:
        values = e2m1(q) * div(_e4m3(scale.to(tl.int32)), tl.load(divisor_ptr))[:, None]
    elif zero_ptr is not None:
        # a word holds the zeros of so many rows
        row = group // groups
        word = tl.load(zero_ptr + (row // (32 // BITS)) * groups + group % groups, mask=exists, other=0)
        zero = (word >> (row % (32 // BITS) * BITS).to(tl.int32)) & ((1 << BITS) - 1)
        values = (q - zero[:, None]).to(tl.float32) * scale.to(tl.float32)[:, None]
    else:
        values = (q - (1 << (BITS - 1))).to(tl.float32) * scale.to(tl.float32)[:, None]
    out = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + out, values.to(y_ptr.dtype.element_ty), mask=exists[:, None])


@jit
def _place(col, BITS: tl.constexpr, AWQ: tl.constexpr):
    """The lowest bit of a column in its word."""
    place = col % (32 // BITS)
    return ((place % 2) * 4 + place // 2) * BITS if AWQ else place * BITS


@jit
def _columns(
    words_ptr, zeros_ptr, scale_ptr, index_ptr, y_ptr, N, group, plus,
    BITS: tl.constexpr, AWQ: tl.constexpr, ONE_GROUP: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The rows of one word of GPTQ, or as many of AWQ. ``ONE_GROUP``: they have one group."""
    EACH: tl.constexpr = 32 // BITS
    tiles = tl.cdiv(N, COLS)
    first = (tl.program_id(0) // tiles).to(tl.int64) * EACH
    col = (tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS)
    mask, place, packed = col < N, _place(col, BITS, AWQ), tl.cdiv(N, EACH)
    for i in tl.static_range(EACH):
        row = first + i
        # the compiler loads once what is the same in each turn
        at = first // group if ONE_GROUP else row // group
        if index_ptr is not None:
            at = tl.load(index_ptr + row).to(tl.int64)
        scale = tl.load(scale_ptr + at * N + col, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(zeros_ptr + at * packed + col // EACH, mask=mask, other=0) >> place
        if AWQ:
            q = tl.load(words_ptr + row * packed + col // EACH, mask=mask, other=0) >> place
        else:
            q = tl.load(words_ptr + first // EACH * N + col, mask=mask, other=0) >> (i * BITS)
        whole = (q & ((1 << BITS) - 1)) - (zero & ((1 << BITS) - 1)) - plus
        tl.store(y_ptr + row * N + col, (whole.to(tl.float32) * scale).to(y_ptr.dtype.element_ty), mask=mask)


# values of a program and of a block, columns of a program. H200, 14336 x 4096: int4 41 us, NVFP4 59; with
# 4096 values 42 and 74; to copy the result 62
_VALUES, _BLOCK, _COLS = 2048, 128, 512


@typed_launcher
def dense_rows(
    packed: Tensor, scale: Tensor, zero: Tensor | None, divisor: Tensor | None, K: int, bits: int, dtype: torch.dtype
) -> Tensor:
    y, group = packed.new_empty((packed.shape[0], K), dtype=dtype), K // scale.shape[1]
    block = math.gcd(group, _BLOCK)  # a power of 2
    count = _VALUES // block
    blocks = y.numel() // block
    how = dict(BITS=bits, BLOCK=block, PER_GROUP=group // block, BLOCKS=count, num_warps=4)
    tensors = packed.view(torch.uint8), scale if divisor is None else scale.view(torch.uint8), zero, divisor, y
    launch(_rows, (cdiv(blocks, count),), *tensors, blocks, scale.shape[1], **how)
    return y


@typed_launcher
def dense_columns(
    words: Tensor, zeros: Tensor, scale: Tensor, index: Tensor | None, bits: int, plus: int, awq: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (groups, N), each = scale.shape, 32 // bits
    K = words.shape[0] * (1 if awq else each)
    y, group, cols = words.new_empty((K, N), dtype=dtype), K // groups, min(next_power_of_2(N), _COLS)
    one = index is None and group % each == 0
    how = dict(BITS=bits, AWQ=awq, ONE_GROUP=one, COLS=cols, num_warps=4)
    launch(_columns, (K // each * cdiv(N, cols),), words, zeros, scale, index, y, N, group, plus, **how)
    return y


@dataclass(frozen=True, eq=False)
class PackedWeight(Dequantized):
    """A weight that is decoded for each product."""

    form: str = field(kw_only=True)
    tensors: tuple[Tensor, ...] = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    # of the first of the tensors and a dtype, the dense weight; of a weight in fp32, the first of the tensors
    decode: Callable[[Tensor, torch.dtype], Tensor] = field(kw_only=True)
    encode: Callable[[Tensor], Tensor] = field(kw_only=True)

    @property
    def values(self) -> Tensor:
        return self.tensors[0]

    def nearest(self, w: Tensor) -> PackedWeight:
        values = self.encode(w)
        made = functools.partial(self.decode, values)
        return dataclasses.replace(self, tensors=(values, *self.tensors[1:]), dequantize=made)

    def said(self) -> str:
        """Storage, products and bytes, for a report."""
        size = sum(t.nbytes for t in self.tensors)
        return f"{self.form}, {size / 1e6:.1f} MB, decoded for each product"


def _whole(*tensors: Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def _packed_weight(
    shape: tuple[int, int], form: str, tensors: tuple[Tensor | None, ...], scale: Tensor,
    decode: Callable[[Tensor, torch.dtype], Tensor], encode: Callable[[Tensor], Tensor],
) -> PackedWeight:  # fmt: skip
    held = tuple(t for t in tensors if t is not None)
    how = dict(form=form, tensors=held, scale=scale, decode=decode, encode=encode)
    return PackedWeight(shape, None, True, dequantize=functools.partial(decode, held[0]), **how)


def _rows_of(
    K: int, bits: int, scale: Tensor, zero: Tensor | None, divisor: Tensor | None, packed: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    block = math.gcd(K // max(scale.shape[1], 1), _BLOCK)
    fits = packed.shape[1] * packed.itemsize * 8 == K * bits and block * bits >= 8 and packed.numel() > 0
    if fits and use_kernels(packed.new_empty(0, dtype=dtype)) and _whole(packed, scale, zero):
        return dense_rows(packed, scale, zero, divisor, K, bits, dtype)
    return rows_reference(packed, scale, zero, divisor, K, bits, dtype)


def _columns_of(
    bits: int, plus: int, awq: bool, zeros: Tensor, scale: Tensor, index: Tensor | None, words: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    K = words.shape[0] * (1 if awq else 32 // bits)
    fits = K % (32 // bits) == 0 and words.numel() > 0
    if fits and use_kernels(words.new_empty(0, dtype=dtype)) and _whole(words, zeros, scale, index):
        y = dense_columns(words, zeros, scale, index, bits, plus, awq, dtype)
    else:
        y = columns_reference(words, zeros, scale, index, bits, plus, awq, dtype)
    return y.mT


def _check(name: str, dtypes: tuple[torch.dtype | None, ...], **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """``ValueError`` for a tensor that has not its shape, or its dtype: one of ``dtypes``, in order; None
    for a floating one."""
    for dtype, (part, (t, shape)) in zip(dtypes, tensors.items()):
        if t is None:
            continue
        if t.dtype != dtype if dtype else not t.is_floating_point():
            raise ValueError(f"{name}: {part} must be {dtype or 'floating point'}, got {t.dtype}")
        checks.shape(name, shape, **{part: t})


def _is_of_groups(name: str, group: int, K: int, bits: int, known: tuple[int, ...]) -> None:
    checks.one_of(name, known, bits=bits)
    if group < 1 or K % group:
        raise ValueError(f"{name}: group must divide the {K} columns, got {group}")


def integer_rows(
    packed: Tensor, scale: Tensor, zero: Tensor | None, shape: tuple[int, int], group: int, bits: int
) -> PackedWeight:  # fmt: skip
    """The weight of ``shape`` (N, K) that compressed-tensors stores as ``packed`` (N, K bits / 32), with
    scales (N, K / group) and zeros (N bits / 32, K / group) or None."""
    (N, K), name = shape, "integer_rows"
    _is_of_groups(name, group, K, bits, (4, 8))
    words = dict(packed=(packed, (N, cdiv(K * bits, 32))), zero=(zero, (cdiv(N * bits, 32), K // group)))
    _check(name, (torch.int32, torch.int32, None), **words, scale=(scale, (N, K // group)))
    form = f"{bits}-bit integers in {'rows' if group == K else f'groups of {group}'}"
    of = bits, scale, zero, None
    how = functools.partial(_rows_of, K, *of), functools.partial(rows_nearest, *of)
    return _packed_weight(shape, form, (packed, scale, zero), scale, *how)


def nvfp4_rows(packed: Tensor, scale: Tensor, divisor: Tensor) -> PackedWeight:
    """The weight of ``packed`` (N, K / 2), two values in E2M1 in a byte, with scales in E4M3
    (N, K / 16), divided by ``divisor``, one number in fp32. (ModelOpt stores the divisor's inverse.)"""
    N, K = packed.shape[0], 2 * packed.shape[1]
    _is_of_groups("nvfp4_rows", NVFP4, K, 4, (4,))
    parts = dict(packed=(packed, (N, K // 2)), scale=(scale, (N, K // NVFP4)))
    _check("nvfp4_rows", (torch.uint8, E4, torch.float32), **parts, divisor=(divisor.reshape(-1), (1,)))
    of = 4, scale, None, divisor.reshape(1)
    how = functools.partial(_rows_of, K, *of), functools.partial(rows_nearest, *of)
    return _packed_weight((N, K), "NVFP4", (packed, scale, divisor), scale, *how)


def gptq_columns(
    words: Tensor, zeros: Tensor, scale: Tensor, index: Tensor | None, shape: tuple[int, int], group: int, bits: int,
    version: int = 2,
) -> PackedWeight:  # fmt: skip
    """The weight of ``shape`` (N, K) that GPTQ stores as ``words`` (K bits / 32, N), with scales
    (K / group, N) and zeros (K / group, N bits / 32): less 1 in ``version`` 1. ``index`` (K,): the group
    of each column of W."""
    (N, K), name = shape, "gptq_columns"
    _is_of_groups(name, group, K, bits, (2, 4, 8))
    of_words = dict(words=(words, (cdiv(K * bits, 32), N)), zeros=(zeros, (K // group, cdiv(N * bits, 32))))
    _check(name, (torch.int32,) * 3 + (None,), **of_words, index=(index, (K,)), scale=(scale, (K // group, N)))
    of = bits, 2 - version, False, zeros, scale, index
    how = functools.partial(_columns_of, *of), functools.partial(columns_nearest, *of)
    form = f"GPTQ, {bits} bits in groups of {group}{'' if index is None else ' by index'}"
    return _packed_weight(shape, form, (words, zeros, scale, index), scale, *how)


def awq_columns(words: Tensor, zeros: Tensor, scale: Tensor, shape: tuple[int, int], group: int) -> PackedWeight:
    """The weight of ``shape`` (N, K) that AWQ stores as ``words`` (K, N / 8), with scales
    (K / group, N) and zeros (K / group, N / 8)."""
    (N, K), name = shape, "awq_columns"
    _is_of_groups(name, group, K, 4, (4,))
    of_words = dict(words=(words, (K, cdiv(N, 8))), zeros=(zeros, (K // group, cdiv(N, 8))))
    _check(name, (torch.int32, torch.int32, None), **of_words, scale=(scale, (K // group, N)))
    of = 4, 0, True, zeros, scale, None
    how = functools.partial(_columns_of, *of), functools.partial(columns_nearest, *of)
    return _packed_weight(shape, f"AWQ, 4 bits in groups of {group}", (words, zeros, scale), scale, *how)
