"""4-bit weights in the format of bitsandbytes (NF4 and FP4: Dettmers et al., arXiv:2305.14314),
dequantised by one kernel.

A byte holds two values, the first in its upper half. A value is code[half] * absmax, with one
absmax for each block of ``blocksize`` values. With double quantisation, an absmax is itself
code2[byte] * absmax2, with one absmax2 for each block of ``blocksize2``, plus an offset.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import typed_launcher
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, rows_at, tl
from liger_kernel.ops.projections.weights import Dequantized


@jit
def _dense(
    packed_ptr, absmax_ptr, code_ptr, absmax2_ptr, code2_ptr, offset_ptr, y_ptr, n, bytes,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = rows_at(tl.program_id(0), BLOCKS)
    exists = block * BLOCKSIZE < n
    # with double quantisation a byte, which is an index
    scale = tl.load(absmax_ptr + block, mask=exists, other=0)
    if absmax2_ptr is not None:
        absmax2 = tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=exists, other=0.0)
        nested = tl.load(code2_ptr + scale.to(tl.int32)) * absmax2
        scale = nested + tl.load(offset_ptr)
    at = block[:, None] * (BLOCKSIZE // 2) + tl.arange(0, BLOCKSIZE // 2)[None, :]  # of a byte, half of the values
    byte = tl.load(packed_ptr + at, mask=at < bytes, other=0).to(tl.int32)
    # sixteen values of a table: they stay in the cache
    first = tl.load(code_ptr + (byte >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (byte & 15)) * scale[:, None]
    out = block[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    tl.store(y_ptr + out, tl.interleave(first, second).to(y_ptr.dtype.element_ty), mask=out < n)


_VALUES = 4096  # values per program


@typed_launcher
def dense_four_bits(
    packed: Tensor, absmax: Tensor, code: Tensor, absmax2: Tensor | None, code2: Tensor | None, offset: Tensor | None,
    shape: list[int], blocksize: int, blocksize2: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = packed.new_empty(shape, dtype=dtype)
    n, blocks = y.numel(), max(_VALUES // blocksize, 1)
    how = dict(BLOCKSIZE=blocksize, BLOCKSIZE2=blocksize2, BLOCKS=blocks, num_warps=4)
    tensors = absmax, code, absmax2, code2, offset, y
    launch(_dense, (cdiv(n, blocks * blocksize),), packed, *tensors, n, packed.numel(), **how)
    return y


def dequantize(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The dense weight of ``packed`` and its ``QuantState``."""
    # a plain tensor: the parameter class of bitsandbytes intercepts every operation
    packed = packed.as_subclass(Tensor)
    # others are left to bitsandbytes, which knows all its formats
    nested, plain = state.state2, packed.dtype == torch.uint8 and packed.is_contiguous()
    if use_kernels(packed, dtype) and plain and state.dtype in (dtype, torch.float32):
        absmax2, code2, offset, blocksize2 = (
            (None, None, None, 1) if nested is None else (nested.absmax, nested.code, state.offset, nested.blocksize)
        )
        of_absmax, sizes = (absmax2, code2, offset), (list(state.shape), state.blocksize, blocksize2)
        return dense_four_bits(packed, state.absmax, state.code, *of_absmax, *sizes, dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state).to(dtype)


def four_bits(packed: Tensor, state: Any, transposed: bool = False) -> Dequantized:
    """A weight of bitsandbytes, or the weights of experts, from its data and its ``QuantState``.
    ``transposed``: it is stored as (..., K, N)."""
    *lead, N, K = state.shape
    # the parameter and not its memory, which goes when the model moves
    made = functools.partial(dequantize, packed, state)
    if transposed:
        return Dequantized((*lead, K, N), None, True, dequantize=lambda dtype: made(dtype).mT)
    return Dequantized((*lead, N, K), None, True, dequantize=made)
