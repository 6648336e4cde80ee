"""Products of rows, sorted by group, with one matrix per group: the products of a mixture of
experts, forward and backward.

Shapes: a (M, K); group e is its rows offs[e - 1] to offs[e]; offs (E,) int32, never read by the
host. Rows from offs[-1] on belong to no group: they are not read, and their part of the output is
not written.
  grouped_mm     (M, N): rows of group e times b[e], with b (E, K, N)
  grouped_outer  (E, N, Q): a_e^T b_e for the rows of group e of a (M, N) and b (M, Q); zero for an
  empty group
  grouped_sum    (E, N): sum of the rows of group e, each times its ``scale`` (M,)

In bf16 on Hopper, ``grouped_tma`` computes the products of rows. The rest, and on Blackwell all, is
computed in bf16 by PyTorch's grouped products, which are CUTLASS kernels there. In all other cases
PyTorch's implementation would wait for ``offs`` on the host, so persistent Triton kernels run
instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config, typed_launcher
from liger_kernel.ops._core.invariance import is_invariant, over_tokens
from liger_kernel.ops._core.operator import launch, on_gpu, tracing
from liger_kernel.ops._core.tl import cdiv, jit, load_row, next_power_of_2, tl
from liger_kernel.ops.projections import grouped_tma
from liger_kernel.ops.projections.grouped_tma import aligned, place

# tiles of rows that use a tile of columns before the next one, so that simultaneous programs find
# their operands in L2
GROUP_M = 8


@jit
def _span(
    a_tile, b_tile, begin, end, rows, cols, k, K, b_stride_k,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of the columns of a and rows of b from ``begin`` to ``end``."""
    a_tile += begin
    b_tile += tl.cast(b_stride_k, tl.int64) * begin
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(begin, end, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_tile, mask=rows, other=0.0)
            b = tl.load(b_tile, mask=cols, other=0.0)
        else:
            a = tl.load(a_tile, mask=rows & (done + k < K)[None, :], other=0.0)
            b = tl.load(b_tile, mask=(done + k < K)[:, None] & cols, other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)
        a_tile += BLOCK_K
        b_tile += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    return total


@jit
def product_of_tile(
    a_tile, b_tile, rows, cols, k, K, b_stride_k, EVEN_K: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of a b. SPAN: fp32 sums of so many terms are added up, which loses less than one long
    sum; 0: one sum."""
    if SPAN == 0:
        return _span(a_tile, b_tile, 0, K, rows, cols, k, K, b_stride_k, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, K, SPAN):
            end = tl.minimum(begin + SPAN, K)
            total += _span(
                a_tile, b_tile, begin, end, rows, cols, k, K, b_stride_k, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
            )
        return total


@jit
def _mm(
    a_ptr, b_ptr, y_ptr, offs_ptr, E, K, N, b_stride_e, b_stride_k, b_stride_n,
    EVEN_K: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr, LATER: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # only the device knows where groups begin: each program counts the tiles itself
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(offs_ptr + e - 1, mask=((e > 0) | LATER) & (e < E), other=0)
    end = tl.load(offs_ptr + e, mask=e < E, other=0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M * n_tiles, 0)
    last = tl.cumsum(tiles, 0)
    # as many programs as processors, each with tiles of any group
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        group, start, stop, column = place(tile, e, begin, end, tiles, last, n_tiles, GROUP_M, BLOCK_M)
        row, rows = tl.arange(0, BLOCK_M)[:, None], stop - start
        col = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        k = tl.arange(0, BLOCK_K)
        # 64 bits for what a group adds, 32 within a tile
        a_tile = a_ptr + start.to(tl.int64) * K + row * K + k[None, :]
        b_tile = b_ptr + group.to(tl.int64) * b_stride_e + k[:, None].to(tl.int64) * b_stride_k + col * b_stride_n
        total = product_of_tile(
            a_tile, b_tile, row < rows, col < N, k, K, b_stride_k, EVEN_K, SPAN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        y_tile = y_ptr + start.to(tl.int64) * N + row * N + col
        tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=(row < rows) & (col < N))


@jit
def _outer(
    a_ptr, b_ptr, y_ptr, offs_ptr, E, N, Q,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    q_tiles = tl.cdiv(Q, BLOCK_N)
    tiles = tl.cdiv(N, BLOCK_M) * q_tiles
    for tile in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        group = tile // tiles
        # the reduction runs over the rows of the group, however many these are
        start, stop = tl.load(offs_ptr + group - 1, mask=group > 0, other=0), tl.load(offs_ptr + group)
        col = tile % tiles // q_tiles * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        q = tile % tiles % q_tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in tl.range(start, stop, BLOCK_K):
            row = (at + tl.arange(0, BLOCK_K)).to(tl.int64)
            a = tl.load(a_ptr + row[None, :] * N + col, mask=(row < stop)[None, :] & (col < N), other=0.0)
            b = tl.load(b_ptr + row[:, None] * Q + q, mask=(row < stop)[:, None] & (q < Q), other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        y = y_ptr + group.to(tl.int64) * N * Q + col.to(tl.int64) * Q + q
        # empty groups are written by ``_zero_empty``
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(stop > start) & (col < N) & (q < Q))


@jit
def _zero_empty(y_ptr, offs_ptr, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    if tl.load(offs_ptr + group) == tl.load(offs_ptr + group - 1, mask=group > 0, other=0):
        for start in tl.range(tl.program_id(1) * BLOCK, n, tl.num_programs(1) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(y_ptr + group.to(tl.int64) * n + at, tl.zeros((BLOCK,), y_ptr.dtype.element_ty), mask=at < n)


@jit
def _sum(a_ptr, scale_ptr, y_ptr, offs_ptr, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, stop = tl.load(offs_ptr + group - 1, mask=group > 0, other=0), tl.load(offs_ptr + group)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(start, stop, BLOCK_M):
        row = (at + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        a = tl.load(a_ptr + row * N + col[None, :], mask=(row < stop) & (col < N)[None, :], other=0.0).to(tl.float32)
        if scale_ptr is not None:
            a *= load_row(scale_ptr, row, stop)
        total += a
    tl.store(y_ptr + group * N + col, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty), mask=col < N)


def reduced_precision(dtype: torch.dtype) -> str:
    """How products in fp32 are computed: by TF32 where PyTorch may use it; AMD has none of it."""
    exact = dtype != torch.float32 or launch_config.arch() == "cpu" or launch_config.arch().startswith("gfx")
    return "ieee" if exact or torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tile(a: Tensor, b: Tensor) -> dict:
    """The meta parameters of a tile.

    Derived by reasoning, not measured. 128 x 128 results and the pointers to their operands fill
    the registers of one program with 8 warps per processor. The shared memory then holds up to four
    steps of 64. AMD pipelines through registers, and so do unaligned operands elsewhere: they get
    smaller tiles. So does fp32, which uses FMA units unless PyTorch may use TF32.
    """
    if launch_config.arch() == "cpu":
        return dict(PRECISION="ieee", BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=1)
    wide = aligned(a) and aligned(b)
    m, k, warps = (128, 64, 8) if a.itemsize == 2 and wide else (64, 32, 4 if wide else 8)
    stages = min(4, launch_config.shared_memory() // (2 * m * k * a.itemsize))
    stages = 2 if launch_config.arch().startswith("gfx") or not wide else stages
    blocks = dict(BLOCK_M=m, BLOCK_N=m, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return dict(PRECISION=reduced_precision(a.dtype)) | blocks


def _programs(tiles: int) -> tuple[int]:
    return (max(1, min(launch_config.processors(), tiles)),)


def _cutlass(a: Tensor, b: Tensor) -> bool:
    """Whether PyTorch has a CUTLASS kernel for these operands."""
    known = on_gpu(a) and launch_config.arch() in ("sm90", "sm100") and a.dtype == torch.bfloat16
    return known and a.numel() > 0 and aligned(a) and aligned(b)


def span_of(a: Tensor, K: int, tile: dict) -> dict:
    """The constexprs of ``product_of_tile`` for K terms, besides the tile's."""
    return dict(EVEN_K=K % tile["BLOCK_K"] == 0, SPAN=128 if a.dtype == torch.float32 else 0)


@typed_launcher
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    M, N = a.shape[0], b.shape[2]
    if tracing(a):
        return a.new_empty(M, N)
    if grouped_tma.supported(a, b):
        y = a.new_empty(M, N)
        grouped_tma.product(a, b, offs, y)
        return y
    # its rows must be aligned, too
    if _cutlass(a, b) and N % 8 == 0 and not is_invariant():
        return torch._grouped_mm(a, b, offs=offs)
    y = a.new_empty(M, N)
    write_mm(a, b, offs, y)
    return y


def write_mm(
    a: Tensor, b: Tensor, offs: Tensor, y: Tensor, later: bool = False, tile: dict[str, Any] | None = None
) -> None:
    """``grouped_mm`` by the kernel for all GPUs, written to y; ``later`` as in ``grouped_tma.product``;
    ``tile``: another one than is right for many columns."""
    (M, K), (E, _, N), tile = a.shape, b.shape, tile or _tile(a, b)
    grid = _programs((cdiv(M, tile["BLOCK_M"]) + min(E, M)) * cdiv(N, tile["BLOCK_N"]))
    flags = span_of(a, K, tile) | dict(LATER=later, GROUP_M=GROUP_M, BLOCK_E=next_power_of_2(E))
    launch(_mm, grid, a, b, y, offs, E, K, N, *b.stride(), **flags | tile)


@typed_launcher
def grouped_outer(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    (_, N), (_, Q), E = a.shape, b.shape, offs.shape[0]
    if tracing(a):
        return a.new_empty(E, N, Q)
    if _cutlass(a.t(), b) and N % 8 == 0:
        with over_tokens():
            y = torch._grouped_mm(a.t(), b, offs=offs)
    else:
        y, tile = a.new_empty(E, N, Q), _tile(a, b)
        grid = _programs(E * cdiv(N, tile["BLOCK_M"]) * cdiv(Q, tile["BLOCK_N"]))
        launch(_outer, grid, a, b, y, offs, E, N, Q, **tile)
    # PyTorch does not promise to write the product of an empty group
    launch(_zero_empty, (E, min(32, cdiv(N * Q, 2048))), y, offs, N * Q, BLOCK=2048, num_warps=4)
    return y


@typed_launcher
def grouped_sum(a: Tensor, scale: Tensor | None, offs: Tensor) -> Tensor:
    E, N = offs.shape[0], a.shape[1]
    y = a.new_empty(E, N)
    launch(_sum, (E, cdiv(N, 64)), a, scale, y, offs, N, BLOCK_M=64, BLOCK_N=64, num_warps=4)
    return y
