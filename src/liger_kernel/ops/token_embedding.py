"""Embedding: ``y_m = w[index_m]``; its gradient is the same bits every time, each row of it summed
in fp32 and rounded once.

Shapes: index (...), w (V, N), y (..., N).  M tokens.  An index outside [0, V) gives a row of NaN
and no gradient; the row ``padding_idx`` gets none either.

The backward sorts the tokens by index (stable, so in a fixed order) and sums the runs of equal
ones. A run is cut where it crosses a multiple of ``CUT`` tokens, so that no program has more to add
up than that, however common a token is. A run in one piece goes to dw. The pieces of one that is
cut are kept in fp32, in two slots a cut, as one may end and another begin between two cuts; a
second kernel adds these up. Only the device knows how many pieces there are: there is a program for
each token, and those that find no piece to begin there are done.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import as_index, host_can_read, launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, own_block, tl

# tokens a piece has at most: 64 steps of a program; the slots, two rows of fp32 a cut, are a
# sixty-fourth of dy in bf16
CUT = 256


def reference(index, w, *, padding_idx):
    # an index outside is looked up as 0, and only then replaced: no device asserts
    known = (index >= 0) & (index < w.shape[0])
    y = F.embedding(torch.where(known, index, 0), w, padding_idx)
    return torch.where(known.unsqueeze(-1), y, float("nan"))


@jit
def _fwd(index_ptr, w_ptr, y_ptr, M, V, N, w_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = own_block(M, N, BLOCK_M, BLOCK_N)
    # in 64 bits: a large table has more than 2^31 values
    index = tl.load(index_ptr + row, mask=row < M, other=-1).to(tl.int64)
    known = ((index >= 0) & (index < V))[:, None]
    w = tl.load(w_ptr + index[:, None] * w_stride + col[None, :], mask=mask & known, other=0.0)
    tl.store(y_ptr + row[:, None] * N + col[None, :], tl.where(known, w, float("nan")).to(w.dtype), mask=mask)


@jit
def _bwd(
    dy_ptr, key_ptr, token_ptr, dw_ptr, slot_ptr, M, V, N, dy_stride,
    CUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of the piece that begins at a sorted token, if one does. Keys are indices, V for
    tokens without a gradient, which come last."""
    blocks = tl.cdiv(N, BLOCK_N)
    at = (tl.program_id(0) // blocks).to(tl.int64)
    key = tl.load(key_ptr + at)
    head = tl.load(key_ptr + at - 1, mask=at > 0, other=-1) != key
    # most programs find no piece that begins at their token, and are done
    if (key < V) & (head | (at % CUT == 0)):
        # how long the piece is: the keys that follow, up to the next cut
        i = at + tl.arange(0, CUT)
        end = tl.minimum(at // CUT * CUT + CUT, M)
        count = tl.sum((tl.load(key_ptr + i, mask=i < end, other=-1) == key).to(tl.int32), axis=0)
        cut = tl.load(key_ptr + at + count, mask=at + count < M, other=-1) == key
        col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, count, BLOCK_M):
            of_piece = start + tl.arange(0, BLOCK_M)
            token = tl.load(token_ptr + at + of_piece, mask=of_piece < count, other=0)
            mask = mask_of(of_piece, count, col, N)
            total += load_tile(dy_ptr, token, col, dy_stride, mask)
        row = tl.sum(total, axis=0)
        # a whole run is a row of dw, rounded once; a piece of a cut one waits for the others in fp32
        if head & (cut == 0):
            tl.store(dw_ptr + key.to(tl.int64) * N + col, row.to(dw_ptr.dtype.element_ty), mask=col < N)
        else:
            tl.store(slot_ptr + (at // CUT * 2 + head.to(tl.int64)) * N + col, row, mask=col < N)


@jit
def _bwd_join(key_ptr, dw_ptr, slot_ptr, M, V, N, CUT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum of the run that begins before a cut and goes on after it, if one does: of its
    first piece, and of those at this cut and the next ones."""
    blocks = tl.cdiv(N, BLOCK_N)
    before = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    cut = before + 1
    key = tl.load(key_ptr + cut * CUT - 1)
    begins = (before == 0) | (tl.load(key_ptr + before * CUT - 1, mask=before > 0, other=-1) != key)
    if (key < V) & begins & (tl.load(key_ptr + cut * CUT) == key):
        total = tl.load(slot_ptr + (before * 2 + 1) * N + col, mask=col < N, other=0.0)
        # the pieces in order: another one would round otherwise
        more = key
        while more == key:
            total += tl.load(slot_ptr + cut * 2 * N + col, mask=col < N, other=0.0)
            cut += 1
            more = tl.load(key_ptr + cut * CUT, mask=cut * CUT < M, other=-1)
        tl.store(dw_ptr + key.to(tl.int64) * N + col, total.to(dw_ptr.dtype.element_ty), mask=col < N)


def _tile(N: int) -> tuple[int, dict[str, int]]:
    """Blocks of columns, and a tile of 4096 numbers: four rows in flight of a wide table, as
    most runs are short."""
    block_n = min(next_power_of_2(N), 1024)
    return cdiv(N, block_n), dict(BLOCK_M=min(64, 4096 // block_n), BLOCK_N=block_n, num_warps=4)


@typed_launcher
def embedding_fwd(index: Tensor, w: Tensor) -> Tensor:
    (V, N), M = w.shape, index.shape[0]
    y = w.new_empty(M, N)
    blocks, tile = _tile(N)
    launch(_fwd, (cdiv(M, tile["BLOCK_M"]) * blocks,), index, w, y, M, V, N, w.stride(0), **tile)
    return y


@typed_launcher
def embedding_bwd(dy: Tensor, index: Tensor, V: SymInt, padding_idx: int | None) -> Tensor:
    M, N = dy.shape
    dw = dy.new_zeros(V, N)
    # tokens without a gradient get the key V, which sorts after all others
    learns = (index >= 0) & (index < V)
    if padding_idx is not None:
        learns &= index != padding_idx
    # keys of 32 bits: half the passes of a radix sort, where indices are that small
    key, token = torch.where(learns, index, V).to(torch.int32 if V < 2**31 - 1 else torch.int64).sort(stable=True)
    # sizes that the host knows: asking how many pieces there are would make it wait for the device
    cuts = max(0, M - 1) // CUT
    slots = dy.new_empty(2 * (cuts + 1), N, dtype=torch.float32)
    # two launches whatever the tokens are, so that a graph of the step can be replayed
    blocks, tile = _tile(N)
    launch(_bwd, (M * blocks,), dy, key, token, dw, slots, M, V, N, dy.stride(0), CUT=CUT, **tile)
    launch(_bwd_join, (cuts * blocks,), key, dw, slots, M, V, N, CUT=CUT, BLOCK_N=tile["BLOCK_N"], num_warps=4)
    return dw


class LigerEmbeddingFunction(torch.autograd.Function):
    """``apply(w, index, padding_idx=None)``."""

    @staticmethod
    def forward(ctx, w, index, padding_idx=None):
        # the indices are all that the backward needs, not the table
        flat = index.reshape(-1).contiguous()
        ctx.save_for_backward(flat)
        ctx.V, ctx.padding_idx = w.shape[0], padding_idx
        return shaped(embedding_fwd(flat, rows_of(w)), (*index.shape, w.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return embedding_bwd(rows_of(dy), *ctx.saved_tensors, ctx.V, ctx.padding_idx), None, None


def tokens(V: int, *shape: int) -> T:
    """Indices for a ``Case``, small ones more often, as words are."""
    return T(shape, lambda *shape, dtype: (torch.rand(*shape).square() * V).long(), dtype=torch.int64)


def _with_strays(*shape: int, dtype: torch.dtype) -> Tensor:
    index = torch.randint(0, 9, shape)
    index[::5], index[1::5] = 9, -1
    return index


@op(
    reference=reference,
    cases=[
        Case("llama", dict(index=tokens(12, 2, 25), w=T((12, 72)))),
        Case("padding", dict(index=tokens(5, 40), w=T((5, 33)), padding_idx=-5)),
        Case("long-runs", dict(index=tokens(2, CUT + 50), w=T((2, 8)))),
        Case("two-blocks", dict(index=tokens(4, 9), w=T((4, 1100)))),
        Case("strays", dict(index=T((16,), _with_strays, dtype=torch.int64), w=T((9, 16)))),
        Case("one-column", dict(index=tokens(3, 2, 2, 4), w=T((3, 1)))),
    ],
    cost=lambda index, w, **_: Cost(
        nbytes(index) + (index.numel() + min(index.numel(), w.shape[0])) * w.shape[1] * w.itemsize,
        nbytes(index, w) + index.numel() * w.shape[1] * w.itemsize,
        flops=(0, index.numel() * w.shape[1]),
    ),
)
def embedding(index: Tensor, w: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """The rows of w that index names, as ``F.embedding``; the gradient of w is the same every time,
    and its row ``padding_idx`` zero.

    index of any shape, integers; w (V, N) in fp32, fp16, bf16 or fp64; any strides. Returns
    index.shape + (N,) in w's dtype. An index outside [0, V)
    gives NaN, or a ``ValueError`` with ``LIGER_CHECKS=1`` in the environment.
    """
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"embedding: index must be integers, got {index.dtype}")
    if not w.is_floating_point():
        raise ValueError(f"embedding: w must be floating point, got {w.dtype}")
    if w.ndim != 2:
        raise ValueError(f"embedding: w must have shape (V, N), got {tuple(w.shape)}")
    V, index = w.shape[0], as_index(index)
    if padding_idx is not None:
        if not -V <= padding_idx < V:
            raise ValueError(f"embedding: padding_idx must be in [{-V}, {V}), got {padding_idx}")
        padding_idx %= V
    if os.environ.get("LIGER_CHECKS") == "1" and host_can_read(index):
        strays = index[(index < 0) | (index >= V)]
        if len(strays):
            raise ValueError(f"embedding: index must be in [0, {V}), got {strays[0].item()}")
    if not use_kernels(w):
        return reference(index, w, padding_idx=padding_idx)
    return LigerEmbeddingFunction.apply(w, index, padding_idx)
