"""MXFP8: casts to e4m3 whose scales are powers of two for blocks of 32 values (OCP Microscaling
Formats, MX, specification v1.0).

A block of 32 values x that are reduced together has q = e4m3(x / s) and the scale s = 2^e, the
smallest power of two for which no |q| is above 448, the largest value of e4m3: torchao's ``RCEIL``.
The specification's example rounds e down, so that the largest values of a block saturate. A scale
is stored as 8 bits of exponent, e + 127 (E8M0). An infinity or NaN becomes NaN in q and does not
change the scale. A block below 448 2^-127 becomes zeros.

Experimental: the casts are those of torchao bit by bit, but no GPU with such products (Blackwell)
has run the layer here.

Scales are stored as the tensor cores of Blackwell read them (cuBLAS, "1D block scaling factors
layout"): those of 128 rows and 4 blocks lie together, 512 bytes in which row r and block b are at
16 (r % 32) + 4 (r // 32) + b. Rows and blocks that are missing have the exponent 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, tl
from liger_kernel.ops.projections.float8 import E4, _quantized, _quantized_t, _size

E8 = torch.float8_e8m0fnu
BLOCK = 32  # values with one scale
CAPABILITY = 10, 0  # the compute capability from which tensor cores multiply with such scales (Blackwell)


def swizzled(exponents: Tensor) -> Tensor:
    """Exponents (rows, blocks) in the order in which tensor cores read them, flat."""
    # whole tiles of 128 rows and 4 blocks, the missing ones 0
    rows, blocks = exponents.shape
    tiles = F.pad(exponents, (0, -blocks % 4, 0, -rows % 128)).view(cdiv(rows, 128), 4, 32, cdiv(blocks, 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def exponents_of(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo ``swizzled``."""
    tiles = scale.view(torch.uint8).view(cdiv(rows, 128), cdiv(blocks, 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 4 * cdiv(blocks, 4))[:rows, :blocks]


def reference(x: Tensor, rows: bool, columns: bool) -> list[tuple[Tensor, Tensor] | None]:
    """What ``mx_casts`` returns."""

    def cast(wide: Tensor) -> tuple[Tensor, Tensor]:
        blocks = wide.reshape(wide.shape[0], -1, BLOCK)
        finite = blocks.isfinite()
        # the bits of a float are ordered as its size
        bits = blocks.abs().where(finite, 0.0).amax(2).view(torch.int32)
        # of amax / 448, rounded up: the fraction of 448 is 0x600000
        exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=0)
        factor = ((254 - exponent).where(exponent > 0, 127) << 23).view(torch.float32)
        q = (blocks * factor[:, :, None]).where(finite, blocks - blocks)
        return q.to(E4).view(wide.shape), swizzled(exponent.to(torch.uint8)).view(E8)

    wide = x.float()
    return [
        cast(wide) if rows else None,
        cast(F.pad(wide.t(), (0, -x.shape[0] % BLOCK)).contiguous()) if columns else None,
    ]


@jit
def _exponent_and_factor(amax):
    # as in the reference: integer arithmetic, which rounds up exactly
    exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 0)
    factor = tl.where(exponent > 0, 254 - exponent, 127) << 23
    return exponent, factor.to(tl.float32, bitcast=True)


@jit
def _place(row, block, blocks):
    """Where the scale of a row and a block is, of so many blocks in a row."""
    return ((row // 128) * ((blocks + 3) // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@jit
def _casts(
    x_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, stride, stride_t, BLOCK_N: tl.constexpr
):  # fmt: skip
    """32 rows and BLOCK_N columns. Programs beyond x write the exponents that no value has."""
    row = (tl.program_id(0) * 32 + tl.arange(0, 32)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = mask_of(row, M, col, N)
    x = load_tile(x_ptr, row, col, stride, inside)
    if q_ptr is not None:
        BLOCKS: tl.constexpr = BLOCK_N // 32
        blocks = tl.reshape(x, (32, BLOCKS, 32))
        exponent, factor = _exponent_and_factor(tl.max(_size(blocks), 2))
        # each program has whole blocks in both directions
        block = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
        tl.store(scale_ptr + _place(row[:, None], block[None, :], tl.cdiv(N, 32)), exponent.to(tl.uint8))
        q = tl.reshape(_quantized(blocks, factor[:, :, None], q_ptr), (32, BLOCK_N))
        tl.store(q_ptr + row[:, None] * N + col[None, :], q, mask=inside)
    if qt_ptr is not None:
        exponent, factor = _exponent_and_factor(tl.max(_size(x), 0))
        tl.store(scale_t_ptr + _place(col, tl.program_id(0).to(tl.int64), stride_t // 32), exponent.to(tl.uint8))
        q = _quantized_t(x, factor[None, :], qt_ptr)
        tl.store(qt_ptr + col[:, None] * stride_t + row[None, :], q, mask=mask_of(col, N, row, stride_t))


def _scales(x: Tensor, rows: int, values: int) -> Tensor:
    return x.new_empty(cdiv(rows, 128) * cdiv(values, 128) * 512, dtype=torch.uint8)


def mx_casts(x: Tensor, *, rows: bool, columns: bool) -> list[tuple[Tensor, Tensor] | None]:
    """Cast x (M, N), N a multiple of 32, by rows, (M, N), and by columns, transposed, (N, M rounded
    up to 32 with zeros); None for one that is not requested.

    Each cast is its values and their scales, in ``E8``.
    """
    if not use_kernels(x, fusible=True):
        return reference(x, rows, columns)
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    padded = M + -M % BLOCK
    q, scale = (x.new_empty(M, N, dtype=E4), _scales(x, M, N)) if rows else (None, None)
    q_t, scale_t = (x.new_empty(N, padded, dtype=E4), _scales(x, N, padded)) if columns else (None, None)
    # 128 x 128 values make a tile of scales in both directions, so these programs write all
    # exponents, once
    grid = 4 * cdiv(M, 128), cdiv(N, 128)
    launch(_casts, grid, x, q, scale, q_t, scale_t, M, N, x.stride(0), padded, BLOCK_N=128, num_warps=4)
    both = (q, scale), (q_t, scale_t)
    return [None if values is None or exponents is None else (values, exponents.view(E8)) for values, exponents in both]


def mx_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T (M, N) of the casts a (M, K) and b (N, K). A CPU multiplies what the casts stand
    for."""
    if not a.shape[0] or a.is_meta:
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16).to(dtype)

    def wide(values: Tensor, scale: Tensor) -> Tensor:
        # what the tensor cores would multiply by
        exponents = exponents_of(scale, values.shape[0], values.shape[1] // BLOCK).to(acc(dtype))
        return values.to(acc(dtype)) * torch.exp2(exponents - 127).repeat_interleave(BLOCK, 1)

    with torch.autocast(a.device.type, enabled=False):
        return (wide(a, scale_a) @ wide(b, scale_b).t()).to(dtype)
