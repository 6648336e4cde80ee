"""Products of int8 activations and ternary weights packed four to a byte, as BitNet has them (Ma et
al., arXiv:2402.17764). Integers, hence exact.

Shapes: a (M, K) int8, weights (K, N) in {-1, 0, 1}, packed (K / 4, N) uint8: bits 2 i and 2 i + 1
of row r hold row i K / 4 + r, plus one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, mask_of, own_block, tl, triton

_A_BYTE = 4
# for a few rows, which are bound by reading b, and for many; not measured
_TILE = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)


def pack_weights(intweights: Tensor, bits: int = 2) -> Tensor:
    """(K, ...) integers in {-1, 0, 1} as (ceil(K / 4), ...) uint8; rows that a K of no multiple
    of 4 lacks read back as -1."""
    if bits != 2:
        raise ValueError(f"pack_weights: bits must be 2, got {bits}")
    rows = cdiv(intweights.shape[0], _A_BYTE)
    packed = torch.zeros(rows, *intweights.shape[1:], dtype=torch.uint8, device=intweights.device)
    for i, part in enumerate(intweights.split(rows) if rows else ()):
        packed[: len(part)] |= (part + 1).to(torch.uint8) << 2 * i
    return packed


def unpack_weights(packed: Tensor, bits: int = 2) -> Tensor:
    """What ``pack_weights`` packed, as int32 (4 rows, ...)."""
    if bits != 2:
        raise ValueError(f"unpack_weights: bits must be 2, got {bits}")
    return torch.cat([(packed >> 2 * i) & 3 for i in range(_A_BYTE)]).to(torch.int32) - 1


@jit
def _matmul(
    a_ptr, packed_ptr, c_ptr, M, N, Q, a_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row, col, _ = own_block(M, N, BLOCK_M, BLOCK_N)
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, Q, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(packed_ptr + k[:, None].to(tl.int64) * N + col[None, :], mask=mask_of(k, Q, col, N), other=0)
        for i in tl.static_range(4):  # a byte is read once
            a = tl.load(a_ptr + row[:, None] * a_stride + i * Q + k[None, :], mask=mask_of(row, M, k, Q), other=0)
            c = tl.dot(a, ((w >> (2 * i)) & 3).to(tl.int8) - 1, c, out_dtype=tl.int32)
    tl.store(c_ptr + row[:, None] * N + col[None, :], c, mask=mask_of(row, M, col, N))


@torch._disable_dynamo  # the public name imports the compiler at once: two seconds of every process
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ unpack_weights(b)`` of int8 a (M, K) and packed b (K / 4, N), as int32 (M, N)."""
    if a.ndim != 2 or a.dtype != torch.int8:
        raise ValueError(f"matmul: a must be int8 of shape (M, K), got {a.dtype} {tuple(a.shape)}")
    if b.ndim != 2 or b.dtype != torch.uint8 or b.shape[0] * _A_BYTE != a.shape[1]:
        raise ValueError(
            f"matmul: b must be uint8 of shape ({a.shape[1] / _A_BYTE:g}, N), got {b.dtype} {tuple(b.shape)}"
        )
    c = a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32)
    if not use_kernels(torch.empty(0, device=a.device)):
        return (a.double() @ unpack_weights(b).double()).to(torch.int32)  # fp64 holds every such sum
    if c.numel():
        a, b = a if a.stride(1) == 1 else a.contiguous(), b.contiguous()
        grid = (cdiv(a.shape[0], _TILE["BLOCK_M"]) * cdiv(b.shape[1], _TILE["BLOCK_N"]),)
        launch(_matmul, grid, a, b, c, *c.shape, b.shape[0], a.stride(0), **_TILE, num_warps=4)
    return c


def get_autotune_config() -> list:
    """The one ``triton.Config`` of the kernel."""
    return [triton.Config(_TILE, num_warps=4)]
