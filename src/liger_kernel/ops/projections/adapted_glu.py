"""The activation of a gated MLP between projections with adapters, in whose passes over memory the thin products of these are taken, too.

Shapes: gate, up, h (M, N) and their gradients; the thin products x A^T of the gate's and the up's adapter (M, R), their B (N, R); of the down projection's
adapter A (R, N), and dy B of its backward (M, R).

  forward   h = act(g) u  with  g = gate + s_g xa_g B_g^T,  u = up + s_u xa_u B_u^T;  and h A^T
  backward  dh + s_d dya A  in the place of dh's product with the base;  dg, du;  dg^T xa_g, du^T xa_u, dya^T h

So gate and up are kept without what the adapters add, and neither what these add, nor h in the backward, is ever written. Sums over all columns (h A^T) and
over all rows (the gradients) come in parts, one for each program of a row or a column of tiles, which are added in a fixed order. (dg B_g would come in
parts as large as dg.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._core import config
from liger_kernel.ops._core.operator import launch, launcher
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.activations.glu import act_and_slope, act_of

STEPS = 16  # tiles of rows that a program of the backward sums over
MAX_RANK = 64  # beyond it the thin operands fill the registers


@jit
def _thin(ptr, index, stride_index, rank, RANK: tl.constexpr, mask):
    """Rows ``index`` of a thin (.., R) matrix, padded with zeros to RANK columns."""
    r = tl.arange(0, RANK)
    return tl.load(ptr + index[:, None] * stride_index + r[None, :], mask=mask[:, None] & (r < rank)[None, :], other=0.0)


@jit
def _fwd(
    gate_ptr, up_ptr, h_ptr, xg_ptr, bg_ptr, xu_ptr, bu_ptr, ad_ptr, ha_ptr, M, N, xg_stride, xu_stride, rank_g, rank_u, rank_d, scale_g, scale_u,
    ACT: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr, R_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (col < N)[None, :]
    gate = tl.load(gate_ptr + row[:, None] * N + col[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + row[:, None] * N + col[None, :], mask=mask, other=0.0)
    g = gate.to(tl.float32)
    u = up.to(tl.float32)
    if R_G > 0:
        thin = tl.dot(
            _thin(xg_ptr, row, xg_stride, rank_g, R_G, row < M), tl.trans(_thin(bg_ptr, col, rank_g, rank_g, R_G, col < N)), input_precision=PRECISION
        )
        g += thin * scale_g
    if R_U > 0:
        thin = tl.dot(
            _thin(xu_ptr, row, xu_stride, rank_u, R_U, row < M), tl.trans(_thin(bu_ptr, col, rank_u, rank_u, R_U, col < N)), input_precision=PRECISION
        )
        u += thin * scale_u
    PRECISE: tl.constexpr = gate.dtype == tl.float32
    h = (act_of(g, ACT, PRECISE).to(gate.dtype).to(tl.float32) * u).to(gate.dtype)
    tl.store(h_ptr + row[:, None] * N + col[None, :], h, mask=mask)
    if R_D > 0:
        r = tl.arange(0, R_D)
        a = tl.load(ad_ptr + r[None, :] * N + col[:, None], mask=(r < rank_d)[None, :] & (col < N)[:, None], other=0.0)
        ha = tl.dot(tl.where(mask, h, 0.0).to(gate.dtype), a, input_precision=PRECISION)
        at = (tile.to(tl.int64) * M + row)[:, None] * rank_d + r[None, :]
        tl.store(ha_ptr + at, ha, mask=(row < M)[:, None] & (r < rank_d)[None, :])


@jit
def _bwd(
    dh_ptr, gate_ptr, up_ptr, xg_ptr, bg_ptr, xu_ptr, bu_ptr, dya_ptr, ad_ptr, dbg_ptr, dbu_ptr, dad_ptr, M, N,
    xg_stride, xu_stride, dya_stride, rank_g, rank_u, rank_d, scale_g, scale_u, ACT: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr,
    R_D: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dg and du in the place of gate and up."""
    blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % blocks
    part = (tl.program_id(0) // blocks).to(tl.int64)
    col = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if R_G > 0:
        bg = _thin(bg_ptr, col, rank_g, rank_g, R_G, col < N)
        dbg = tl.zeros((BLOCK_N, R_G), tl.float32)
    if R_U > 0:
        bu = _thin(bu_ptr, col, rank_u, rank_u, R_U, col < N)
        dbu = tl.zeros((BLOCK_N, R_U), tl.float32)
    if R_D > 0:
        rd = tl.arange(0, R_D)
        ad = tl.load(ad_ptr + rd[:, None] * N + col[None, :], mask=(rd < rank_d)[:, None] & (col < N)[None, :], other=0.0)
        dad = tl.zeros((BLOCK_N, R_D), tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        row = part * ROWS + start + tl.arange(0, BLOCK_M)
        mask = (row < M)[:, None] & (col < N)[None, :]
        at = row[:, None] * N + col[None, :]
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
        g = gate.to(tl.float32)
        u = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if R_G > 0:
            xg = _thin(xg_ptr, row, xg_stride, rank_g, R_G, row < M)
            g += tl.dot(xg, tl.trans(bg), input_precision=PRECISION) * scale_g
        if R_U > 0:
            xu = _thin(xu_ptr, row, xu_stride, rank_u, R_U, row < M)
            u += tl.dot(xu, tl.trans(bu), input_precision=PRECISION) * scale_u
        if R_D > 0:
            dya = _thin(dya_ptr, row, dya_stride, rank_d, R_D, row < M)
            dh += tl.dot(dya, ad, input_precision=PRECISION)
        PRECISE: tl.constexpr = gate.dtype == tl.float32
        act, slope = act_and_slope(g, ACT, PRECISE)
        dg = tl.where(mask, dh * u * slope, 0.0).to(gate.dtype)
        du = tl.where(mask, dh * act, 0.0).to(gate.dtype)
        tl.store(gate_ptr + at, dg, mask=mask)
        tl.store(up_ptr + at, du, mask=mask)
        if R_G > 0:
            dbg = tl.dot(tl.trans(dg), xg, dbg, input_precision=PRECISION)
        if R_U > 0:
            dbu = tl.dot(tl.trans(du), xu, dbu, input_precision=PRECISION)
        if R_D > 0:
            h = tl.where(mask, act.to(gate.dtype).to(tl.float32) * u, 0.0).to(gate.dtype)
            dad = tl.dot(tl.trans(h), dya, dad, input_precision=PRECISION)
    at = (part * N + col)[:, None]
    if R_G > 0:
        r = tl.arange(0, R_G)[None, :]
        tl.store(dbg_ptr + at * rank_g + r, dbg * scale_g, mask=(col < N)[:, None] & (r < rank_g))
    if R_U > 0:
        r = tl.arange(0, R_U)[None, :]
        tl.store(dbu_ptr + at * rank_u + r, dbu * scale_u, mask=(col < N)[:, None] & (r < rank_u))
    if R_D > 0:
        r = tl.arange(0, R_D)[None, :]
        tl.store(dad_ptr + at * rank_d + r, dad, mask=(col < N)[:, None] & (r < rank_d))


def padded(rank: int) -> int:
    """Columns of a tile that holds a thin matrix: what tensor cores multiply at least."""
    return max(16, next_power_of_2(rank)) if rank else 0


class Thin(NamedTuple):
    """An adapter of gate or up in a node: x A^T (M, R), B (N, R), scale."""

    xa: Tensor
    b: Tensor
    scale: float


def _tiles(gate: Tensor) -> dict[str, int]:
    if config.arch() == "cpu":
        return dict(BLOCK_M=16, BLOCK_N=32, num_warps=4)
    return dict(BLOCK_M=32 if gate.itemsize == 2 else 16, BLOCK_N=128, num_warps=8)


def _precision(gate: Tensor) -> str:
    tf32 = gate.dtype == torch.float32 and not config.arch().startswith("gfx") and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "ieee"


@launcher("(Tensor gate, Tensor up, Tensor xg, Tensor bg, float scale_g, Tensor xu, Tensor bu, float scale_u, Tensor ad, str act) -> (Tensor h, Tensor ha)")
def adapted_glu_fwd(
    gate: Tensor, up: Tensor, xg: Tensor, bg: Tensor, scale_g: float, xu: Tensor, bu: Tensor, scale_u: float, ad: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """h, and h A^T in fp32."""
    (M, N), ranks = gate.shape, (bg.shape[1], bu.shape[1], ad.shape[0])
    tile = _tiles(gate)
    n_tiles = cdiv(N, tile["BLOCK_N"])
    h, ha = torch.empty_like(gate), gate.new_empty(n_tiles, M, ranks[2], dtype=torch.float32)
    launch(_fwd, (n_tiles * cdiv(M, tile["BLOCK_M"]),), gate, up, h, xg, bg, xu, bu, ad, ha, M, N, xg.stride(0), xu.stride(0), *ranks, scale_g, scale_u,
           ACT=act, R_G=padded(ranks[0]), R_U=padded(ranks[1]), R_D=padded(ranks[2]), PRECISION=_precision(gate), **tile)  # fmt: skip
    return h, ha.sum(0)


@launcher(
    "(Tensor dh, Tensor(a!) gate, Tensor(b!) up, Tensor xg, Tensor bg, float scale_g, Tensor xu, Tensor bu, float scale_u, Tensor dya, Tensor ad, str act)"
    " -> (Tensor dbg, Tensor dbu, Tensor dad)"
)
def adapted_glu_bwd_(
    dh: Tensor, gate: Tensor, up: Tensor, xg: Tensor, bg: Tensor, scale_g: float, xu: Tensor, bu: Tensor, scale_u: float, dya: Tensor, ad: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dg and du in the place of gate and up; in fp32 the gradients of both B (N, R), and of A^T (N, R)."""
    (M, N), ranks = gate.shape, (bg.shape[1], bu.shape[1], ad.shape[0])
    tile = _tiles(gate)
    n_tiles, rows = cdiv(N, tile["BLOCK_N"]), tile["BLOCK_M"] * STEPS
    parts = cdiv(M, rows)
    dws = [gate.new_empty(parts, N, r, dtype=torch.float32) for r in ranks]
    launch(_bwd, (n_tiles * parts,), dh, gate, up, xg, bg, xu, bu, dya, ad, *dws, M, N, xg.stride(0), xu.stride(0), dya.stride(0), *ranks,
           scale_g, scale_u, ACT=act, R_G=padded(ranks[0]), R_U=padded(ranks[1]), R_D=padded(ranks[2]), PRECISION=_precision(gate), ROWS=rows,
           **tile)  # fmt: skip
    return tuple(t.sum(0) for t in dws)
