"""Products of rows, sorted by group, with matrices in FP8 blocks of 128 x 128, which are decoded within the
product: shapes and ``offs`` as in ``grouped_mm``.

A block of a matrix is the operand that tensor cores read from registers: there its numbers become bf16, which
holds them exactly, and the sum over the block is multiplied by the scale. So a tile is computed transposed,
and nothing but the sum is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config, typed_launcher
from liger_kernel.ops._core.operator import launch, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.projections.float8_blocks import BLOCK, Float8Blocks
from liger_kernel.ops.projections.grouped_mm import GROUP_M
from liger_kernel.ops.projections.grouped_tma import place
from liger_kernel.ops.projections.weights import Weight

# H200, 32768 rows, 128 x 1536 x 2048 and 128 x 2048 x 768: 0.693 and 0.399 ms; decoded before 0.728 and
# 0.432. Other tiles 0.49 to 2.2 ms. Times W, as in the backward, 0.932 and 0.442: decoded before 0.734 and 0.423
TILE = dict(BLOCK_M=128, num_warps=8, num_stages=3)
# on the average of the groups: each tile of rows decodes its matrix again
MOST_ROWS = 256


@jit
def _mm_blocks(
    a_ptr, q_ptr, scale_ptr, y_ptr, offs_ptr, E, K, N,
    GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(offs_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    end = tl.load(offs_ptr + e, mask=e < E, other=0)
    n_tiles = N // BLOCK
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M * n_tiles, 0)
    last = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        group, start, stop, column = place(tile, e, begin, end, tiles, last, n_tiles, GROUP_M, BLOCK_M)
        row, k = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK)
        col = (column * BLOCK + tl.arange(0, BLOCK))[:, None]
        rows = row < stop - start
        a_tile = a_ptr + start.to(tl.int64) * K + row * K + k[:, None]
        q_tile = q_ptr + group.to(tl.int64) * N * K + col * K + k[None, :]
        scale = scale_ptr + (group * n_tiles + column) * (K // BLOCK)
        total = tl.zeros((BLOCK, BLOCK_M), tl.float32)
        for at in range(0, K, BLOCK):
            a = tl.load(a_tile + at, mask=rows, other=0.0)
            # by way of fp32: the interpreter has no other way
            q = tl.load(q_tile + at).to(tl.float32).to(a.dtype)
            total += tl.dot(q, a) * tl.load(scale + at // BLOCK)
        y_tile = y_ptr + start.to(tl.int64) * N + row * N + col
        tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=rows)


@typed_launcher
def grouped_mm_blocks(a: Tensor, q: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """a (M, K), sorted by group, times W^T of q (E, N, K) with scales (E, N / 128, K / 128)."""
    (M, K), (E, N, _) = a.shape, q.shape
    y = a.new_empty(M, N)
    if tracing(a):
        return y
    tile = dict(BLOCK_M=32, num_warps=4, num_stages=1) if launch_config.arch() == "cpu" else TILE
    grid = (max(1, min(launch_config.processors(), (cdiv(M, tile["BLOCK_M"]) + min(E, M)) * (N // BLOCK))),)
    how = dict(GROUP_M=GROUP_M, BLOCK_E=next_power_of_2(E), BLOCK=BLOCK) | tile
    launch(_mm_blocks, grid, a, q, scale, y, offs, E, K, N, **how)
    return y


def decoded_inside(weight: Weight, rows: Tensor) -> bool:
    """Whether ``grouped_mm_blocks`` multiplies these rows by these experts: where it was faster than to decode
    them before."""
    if not isinstance(weight, Float8Blocks) or weight.blocks != (BLOCK, BLOCK) or rows.dtype != torch.bfloat16:
        return False
    whole = not any(n % BLOCK for n in weight.shape[1:]) and weight.q.is_contiguous() and weight.scale.is_contiguous()
    few = 0 < rows.shape[0] <= MOST_ROWS * weight.shape[0] and rows.is_contiguous()
    return whole and few and launch_config.arch() in ("sm90", "cpu") and use_kernels(rows)
