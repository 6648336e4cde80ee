"""The grouped products of Hopper: operands come by TMA, and the product of gate_up ends with its
activation. Shapes as in ``grouped_mm``.

One program per processor takes tile after tile in one loop over all steps of all tiles, so that the
operands of the next tile arrive while the last one is stored. A tile of columns for the activation
holds columns of gate and the same columns of up: a thread has both halves of what it multiplies.

A tile may hold rows of the next group, or rows of no group, which may be NaN. Rows do not mix in a
product, and these are not stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.operator import descriptor, intercepted, launch, on_gpu
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.activations.glu import act_of


class ExpertForm(NamedTuple):
    """The activation of experts, as in ``moe``."""

    act: str
    interleaved: bool
    alpha: float
    limit: float | None
    offset: float


@jit
def place(tile, e, begin, end, tiles, last, n_tiles, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where a tile is: its group, its first row, the end of the group's rows, and its number
    from the left. ``last``: the sums of ``tiles`` of the groups e."""
    group = tl.sum((last <= tile).to(tl.int32), 0)
    mine = e == group
    start, stop = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    at = tile - tl.sum(tl.where(mine, last - tiles, 0), 0)
    # down a strip of GROUP_M tiles of rows, then to the next tile of columns
    first = at // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(tl.cdiv(stop - start, BLOCK_M) - first, GROUP_M)
    at %= GROUP_M * n_tiles
    start += (first + at % height) * BLOCK_M
    return group, start, stop, at // height


@jit
def gated(gate, up, alpha, limit, offset, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of an expert, in fp32, of gate and up in fp32."""
    if limit is not None:
        limit = tl.cast(limit, tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    alpha = tl.cast(alpha, tl.float32)
    PRECISE: tl.constexpr = tl.float32 == DTYPE
    y = act_of(gate * alpha, ACT, PRECISE)
    return (y / alpha).to(DTYPE).to(tl.float32) * (up + tl.cast(offset, tl.float32))


@jit
def _mm_tma(
    offs_ptr, a_desc, b_desc, bias_ptr, y_ptr, h_ptr, E, N, alpha, limit, offset,
    K: tl.constexpr, B_BY_K: tl.constexpr, HALVES: tl.constexpr, ACT: tl.constexpr, LATER: tl.constexpr,
    FLATTEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = a b[e], or, with ``ACT``, h = a b[e] and its activation y, (M, N / 2). ``HALVES``:
    gate and up lie side by side, else they are interleaved. ``LATER``: ``offs`` begins after
    other groups."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(offs_ptr + e - 1, mask=((e > 0) | LATER) & (e < E), other=0)
    end = tl.load(offs_ptr + e, mask=e < E, other=0)
    n = N // 2
    n_tiles = tl.cdiv(n, HALF) if ACT is not None else tl.cdiv(N, BLOCK_N)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M * n_tiles, 0)
    last = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=FLATTEN):
        group, start, stop, column = place(tile, e, begin, end, tiles, last, n_tiles, GROUP_M, BLOCK_M)
        # with halves, a tile holds columns of gate and the same ones of up
        left = column * (HALF if HALVES else BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            # rows beyond the group are those of the next one, and are not stored
            a = a_desc.load([start, k])
            if HALVES:
                b = b_desc.load([group, 0, left, k]).reshape(BLOCK_N, BLOCK_K).T
            elif B_BY_K:
                b = b_desc.load([group, left, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([group, k, left]).reshape(BLOCK_K, BLOCK_N)
            total = tl.dot(a, b, total)
        # rounded here, as the separate product would be
        h = total.to(DTYPE)
        row = tl.arange(0, BLOCK_M)[:, None]
        rows = row < stop - start
        at_h = start.to(tl.int64) * N + row * N
        if ACT is None:
            # by halves, which need less shared memory on the way from the layout of products to
            # that of stores
            one, other = h.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
            col = left + tl.arange(0, HALF)[None, :]
            tl.store(y_ptr + at_h + col, one, mask=rows & (col < N))
            tl.store(y_ptr + at_h + HALF + col, other, mask=rows & (col + HALF < N))
        else:
            if HALVES:
                gate, up = h.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
                col = left + tl.arange(0, HALF)[None, :]
                gate_col, up_col = col, n + col
                if h_ptr is not None:
                    tl.store(h_ptr + at_h + gate_col, gate, mask=rows & (col < n))
                    tl.store(h_ptr + at_h + up_col, up, mask=rows & (col < n))
            else:
                gate, up = h.reshape(BLOCK_M, HALF, 2).split()
                col = left // 2 + tl.arange(0, HALF)[None, :]
                gate_col, up_col = 2 * col, 2 * col + 1
                if h_ptr is not None:
                    both = left + tl.arange(0, BLOCK_N)[None, :]
                    tl.store(h_ptr + at_h + both, h, mask=rows & (both < N))
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            if bias_ptr is not None:
                bias = bias_ptr + group.to(tl.int64) * N
                gate += tl.load(bias + gate_col, mask=col < n, other=0.0).to(tl.float32)
                up += tl.load(bias + up_col, mask=col < n, other=0.0).to(tl.float32)
            y = gated(gate, up, alpha, limit, offset, ACT, DTYPE)
            tl.store(y_ptr + start.to(tl.int64) * n + row * n + col, y.to(DTYPE), mask=rows & (col < n))


def _tile() -> dict[str, Any]:
    if launch_config.arch() == "cpu":
        return dict(FLATTEN=True, BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=1)
    return dict(FLATTEN=True, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4)


def aligned(t: Tensor) -> bool:
    """Whether ``t`` is a row- or column-major matrix of 16-bit values, aligned to 16 bytes, as
    TMA and asynchronous copies require."""
    # meta tensors have no address
    at = t.storage_offset() * t.itemsize if intercepted() else t.data_ptr()
    t = t.mT if t.stride(-2) == 1 else t
    return (
        at % 16 == 0 and t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1] and all(s % 8 == 0 for s in t.stride()[:-1])
    )


def supported(a: Tensor, b: Tensor) -> bool:
    """Whether a (M, K) and b (E, K, N) are operands of ``product``."""
    hopper = on_gpu(a) and launch_config.arch() == "sm90" and a.dtype == torch.bfloat16
    dense = a.is_contiguous() and (b.is_contiguous() or b.mT.is_contiguous())
    return hopper and dense and a.numel() > 0 and b.numel() > 0 and aligned(a) and aligned(b)


def product(
    a: Tensor, b: Tensor, offs: Tensor, y: Tensor, h: Tensor | None = None, bias: Tensor | None = None,
    form: ExpertForm | None = None, later: bool = False,
) -> None:  # fmt: skip
    """Write a b[e] to y (M, N), all contiguous or b transposed; or, with a ``form``, its activation
    to y (M, N / 2), and a b[e] to h, if h is given.

    ``later``: ``offs`` is the rest of a tensor, whose value before it is where the first group
    begins. gate and up side by side need a b whose columns are dense, as in
    ``gate_up.mT``.
    """
    (M, K), (E, _, N) = a.shape, b.shape
    act, interleaved, alpha, limit, offset = form or (None, True, 1.0, None, 0.0)
    c = _tile()
    block_n, block_k = c["BLOCK_N"], c["BLOCK_K"]
    by_k = b.stride(1) == 1
    if not interleaved:
        b_desc = descriptor(b.mT.view(E, 2, N // 2, K), (1, 2, block_n // 2, block_k))
    else:
        b_desc = descriptor(b.mT, (1, block_n, block_k)) if by_k else descriptor(b, (1, block_k, block_n))
    # at most one tile of each group is not full
    tiles = (cdiv(M, c["BLOCK_M"]) + min(E, M)) * cdiv(N, block_n)
    flags = dict(K=K, B_BY_K=by_k, HALVES=not interleaved, ACT=act, LATER=later) | c
    flags |= dict(GROUP_M=8, BLOCK_E=next_power_of_2(E))
    grid, a_desc = (max(1, min(launch_config.processors(), tiles)),), descriptor(a, (c["BLOCK_M"], block_k))
    launch(_mm_tma, grid, offs, a_desc, b_desc, bias, y, h, E, N, alpha, limit, offset, **flags)
