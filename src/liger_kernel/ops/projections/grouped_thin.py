"""Products of rows, sorted by group, with one thin matrix per group: the products of low-rank
adapters of experts, forward and backward.

Letters and ``offs`` as in ``grouped_mm``; r is the rank of the adapters.
  thin_rows    (M, r): scale rows_e a[e]^T, with a (E, r, K); of rows in fp16 in fp32, because they
               may leave the range of fp16
  add_thin_    y (M, N) += scale t_e b[e], with t (M, r) and b (E, r, N)
  thin_outer   (E, r, N): scale t_e^T rows_e, with t (M, r); zero for an empty group

``rows`` is (M, K) in the order of the groups, or, with ``order`` (M,), the tokens' rows (T, K), of
which ``order // top_k`` are read. Each product reads the wide rows once, and the tokens' rows from
the L2 cache: a copy of them in the order of the groups would cost more than the product.
PyTorch's grouped products cannot add to their output, gather their rows, or use fewer than 128
columns of a tile, so these are Triton kernels everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config, launcher, typed_launcher
from liger_kernel.ops._core.operator import launch, tracing
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.projections.grouped_mm import product_of_tile, reduced_precision, span_of


@jit
def _rows_of(order_ptr, row, here, top_k):
    """The rows of the tokens that stand at ``row`` in the order of the groups."""
    if order_ptr is not None:
        return (tl.load(order_ptr + row, mask=here, other=0) // top_k).to(tl.int64)
    else:
        return row.to(tl.int64)


@jit
def _rows(
    a_ptr, order_ptr, b_ptr, y_ptr, offs_ptr, E, K, N, top_k, scale, a_stride, b_stride_e, b_stride_k, b_stride_n,
    ADD: tl.constexpr, EVEN_K: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scale a_e b[e], added to y if ADD. There are as many programs as the groups can have tiles
    of rows; the last ones may have nothing to do."""
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(offs_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    end = tl.load(offs_ptr + e, mask=e < E, other=0)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    # no loop over tiles: a thin product has few, and programs without one end at once
    tile = tl.program_id(0)
    group = tl.sum((last <= tile).to(tl.int32), 0)
    mine = e == group
    stop = tl.sum(tl.where(mine, end, 0), 0)
    row = tl.sum(tl.where(mine, begin + (tile - last + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    here = (row < stop)[:, None]
    if stop > 0:
        col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        k = tl.arange(0, BLOCK_K)
        a_tile = a_ptr + _rows_of(order_ptr, row, row < stop, top_k)[:, None] * a_stride + k[None, :]
        b_tile = b_ptr + group.to(tl.int64) * b_stride_e + k[:, None].to(tl.int64) * b_stride_k + col * b_stride_n
        total = product_of_tile(
            a_tile, b_tile, here, col < N, k, K, b_stride_k, EVEN_K, SPAN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        # in fp32, before the only rounding
        total *= tl.cast(scale, tl.float32)
        y_tile = y_ptr + row[:, None].to(tl.int64) * N + col
        if ADD:
            total += tl.load(y_tile, mask=here & (col < N), other=0.0).to(tl.float32)
        tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=here & (col < N))


@jit
def _outer(
    a_ptr, b_ptr, order_ptr, y_ptr, offs_ptr, rank, N, top_k, scale, b_stride,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    start, stop = tl.load(offs_ptr + group - 1, mask=group > 0, other=0), tl.load(offs_ptr + group)
    col = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    r = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(start, stop, BLOCK_K):
        row = at + tl.arange(0, BLOCK_K)
        here = row < stop
        a = tl.load(a_ptr + row[None, :].to(tl.int64) * rank + r, mask=here[None, :] & (r < rank), other=0.0)
        b_row = _rows_of(order_ptr, row, here, top_k)[:, None]
        # the wide operand is read once, in the dtype of the thin one
        b = tl.load(b_ptr + b_row * b_stride + col, mask=here[:, None] & (col < N), other=0.0).to(a.dtype)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= tl.cast(scale, tl.float32)
    y = y_ptr + (group.to(tl.int64) * rank + r) * N + col
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(r < rank) & (col < N))


def _tile(a: Tensor, rows: int, cols: int, depth: int) -> dict:
    """The meta parameters of a tile of at most ``rows`` x ``cols`` results, in steps of at most
    ``depth``.

    Derived by reasoning, not measured: memory is the only cost, so a tile is small enough for
    several programs per processor.
    """
    amd, cpu = launch_config.arch().startswith("gfx"), launch_config.arch() == "cpu"
    block = lambda n, most: max(16, min(next_power_of_2(n), 32 if cpu else most))
    m, n, k = block(rows, 64), block(cols, 128), block(depth, 64 if a.itemsize == 2 else 32)
    stages = 1 if cpu else min(2 if amd else 4, max(1, launch_config.shared_memory() // (2 * (m + n) * k * a.itemsize)))
    blocks = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=4, num_stages=stages)
    return dict(PRECISION=reduced_precision(a.dtype)) | blocks


def _launch_rows(
    a: Tensor, order: Tensor | None, top_k: int, b: Tensor, y: Tensor, offs: Tensor, scale: float, add: bool
) -> None:
    """y (M, N) = scale a_e b[e], with b (E, K, N)."""
    if tracing(a):  # tiles are chosen by numbers
        return
    (M, N), (E, K) = y.shape, b.shape[:2]
    tile = _tile(a, M, N, K)
    grid = max(1, cdiv(M, tile["BLOCK_M"]) + min(E, M)), cdiv(N, tile["BLOCK_N"])
    flags = dict(ADD=add, BLOCK_E=next_power_of_2(E)) | span_of(a, K, tile)
    launch(_rows, grid, a, order, b, y, offs, E, K, N, top_k, scale, a.stride(0), *b.stride(), **flags, **tile)


@typed_launcher
def thin_rows(rows: Tensor, order: Tensor | None, top_k: SymInt, a: Tensor, offs: Tensor, scale: float) -> Tensor:
    dtype = torch.float32 if rows.dtype == torch.float16 else rows.dtype
    y = rows.new_empty(rows.shape[0] if order is None else order.shape[0], a.shape[1], dtype=dtype)
    _launch_rows(rows, order, top_k, a.mT, y, offs, scale, False)
    return y


@launcher("(Tensor(a!) y, Tensor t, Tensor b, Tensor offs, float scale) -> ()")
def add_thin_(y, t, b, offs, scale) -> None:
    _launch_rows(t, None, 1, b, y, offs, scale, True)


@typed_launcher
def thin_outer(
    t: Tensor, rows: Tensor, order: Tensor | None, top_k: SymInt, offs: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    (M, r), N, E = t.shape, rows.shape[1], offs.shape[0]
    y = t.new_empty(E, r, N, dtype=dtype)
    if tracing(t):
        return y
    tile = _tile(t, r, N, M)
    grid = cdiv(N, tile["BLOCK_N"]), E, cdiv(r, tile["BLOCK_M"])
    launch(_outer, grid, t, rows, order, y, offs, r, N, top_k, scale, rows.stride(0), **tile)
    return y
