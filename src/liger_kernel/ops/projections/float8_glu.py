"""The activation of a gated MLP between products in FP8: ``h = act(gate) * up`` and its gradients are cast where they are computed.

gate, up, dh (M, N) in 16 or 32 bits. h, dgate and dup are rounded to that dtype, as ``glu`` rounds them, and then cast as ``float8_training`` casts. A first pass
computes them for their largest values, and a second pass computes them again and writes only FP8. So the forward moves as many bytes as one pass that writes
h and a cast of h, and the backward moves 0.74 times the bytes: it writes five casts, and none of the three values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import launch, launcher
from liger_kernel.ops._core.tl import cdiv, jit, tl
from liger_kernel.ops.activations.glu import act_and_slope
from liger_kernel.ops.projections.float8 import E4, LEAST, _size
from liger_kernel.ops.projections.float8_training import PARTS, RECIPES, Cast, Recipe, new_cast, write_casts


@jit
def _values(
    dh_ptr, gate_ptr, up_ptr, row, col, mask, dh_stride, gate_stride, up_stride, gate_multiplier, down_multiplier,
    ACT: tl.constexpr, SCALED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """h, dgate and dup of a tile; the forward has only h."""
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + row[:, None] * up_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    PRECISE: tl.constexpr = gate.dtype == tl.float32
    if SCALED:
        g = (g * gate_multiplier).to(gate.dtype).to(tl.float32)
    y, dact = act_and_slope(g, ACT, PRECISE)
    h = y.to(gate.dtype).to(tl.float32) * up
    if SCALED:
        h = h * down_multiplier
    h = h.to(gate.dtype).to(tl.float32)
    dgate = h
    dup = h
    if BACKWARD:
        dh = tl.load(dh_ptr + row[:, None] * dh_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            dh = dh * down_multiplier
        dgate = dh * up * dact
        if SCALED:
            dgate = dgate * gate_multiplier
        dgate = dgate.to(gate.dtype).to(tl.float32)
        dup = (dh * y).to(gate.dtype).to(tl.float32)
    return h, dgate, dup


@jit
def _amax_of(x, rows_ptr, columns_ptr, row, col, M, N, BY_ROWS: tl.constexpr, PARTS: tl.constexpr):
    size = _size(x)
    if BY_ROWS:
        tl.atomic_max(rows_ptr + row, tl.max(size, 1), mask=row < M, sem="relaxed")
        tl.atomic_max(columns_ptr + col, tl.max(size, 0), mask=col < N, sem="relaxed")
    else:
        part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) % PARTS
        tl.atomic_max(rows_ptr + part, tl.max(size), sem="relaxed")


@jit
def _amaxes(
    dh_ptr, gate_ptr, up_ptr, rows_ptr, columns_ptr, M, N, dh_stride, gate_stride, up_stride, gate_multiplier, down_multiplier, width,
    ACT: tl.constexpr, SCALED: tl.constexpr, BACKWARD: tl.constexpr, NEED_H: tl.constexpr, BY_ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest values of h, dgate and dup. ``width``: from those of one value to those of the next."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (row < M)[:, None] & (col < N)[None, :]
    h, dgate, dup = _values(dh_ptr, gate_ptr, up_ptr, row, col, mask, dh_stride, gate_stride, up_stride, gate_multiplier, down_multiplier, ACT, SCALED, BACKWARD)
    if NEED_H:
        _amax_of(h, rows_ptr, columns_ptr, row, col, M, N, BY_ROWS, PARTS)
    if BACKWARD:
        _amax_of(dgate, rows_ptr + width, columns_ptr + N, row, col, M, N, BY_ROWS, PARTS)
        _amax_of(dup, rows_ptr + 2 * width, columns_ptr + 2 * N, row, col, M, N, BY_ROWS, PARTS)


@jit
def _glu_casts(
    dh_ptr, gate_ptr, up_ptr, rows_ptr, columns_ptr, h_ptr, h_scale_ptr, ht_ptr, ht_scale_ptr,
    dgate_ptr, dgate_scale_ptr, dgate_t_ptr, dgate_t_scale_ptr, dup_ptr, dup_scale_ptr, dup_t_ptr, dup_t_scale_ptr,
    M, N, dh_stride, gate_stride, up_stride, gate_multiplier, down_multiplier, width, stride_t,
    ACT: tl.constexpr, SCALED: tl.constexpr, BACKWARD: tl.constexpr, NEED_H: tl.constexpr, COLUMNS: tl.constexpr, TOP_H: tl.constexpr, TOP: tl.constexpr,
    LEAST: tl.constexpr, POWERS_OF_2: tl.constexpr, BY_ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Forward: h by rows. Backward: h by columns if it is needed, and dgate and dup by rows and, if the weights learn, by columns."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (row < M)[:, None] & (col < N)[None, :]
    h, dgate, dup = _values(dh_ptr, gate_ptr, up_ptr, row, col, mask, dh_stride, gate_stride, up_stride, gate_multiplier, down_multiplier, ACT, SCALED, BACKWARD)
    if NEED_H:
        write_casts(
            h, rows_ptr, columns_ptr, h_ptr, h_scale_ptr, ht_ptr, ht_scale_ptr, row, col, M, N, stride_t, PARTS, TOP_H, LEAST, POWERS_OF_2, BY_ROWS,
            not BACKWARD, BACKWARD, PARTS,
        )  # fmt: skip  # the arguments in the order of the signature
    if BACKWARD:
        write_casts(
            dgate, rows_ptr + width, columns_ptr + N, dgate_ptr, dgate_scale_ptr, dgate_t_ptr, dgate_t_scale_ptr, row, col, M, N, stride_t, PARTS, TOP, LEAST,
            POWERS_OF_2, BY_ROWS, True, COLUMNS, PARTS,
        )  # fmt: skip  # the arguments in the order of the signature
        write_casts(
            dup, rows_ptr + 2 * width, columns_ptr + 2 * N, dup_ptr, dup_scale_ptr, dup_t_ptr, dup_t_scale_ptr, row, col, M, N, stride_t, PARTS, TOP, LEAST,
            POWERS_OF_2, BY_ROWS, True, COLUMNS, PARTS,
        )  # fmt: skip  # the arguments in the order of the signature


def _run(
    dh: Tensor, gate: Tensor, up: Tensor, written: tuple[Tensor, ...], form: tuple, recipe: Recipe, *, backward: bool, need_h: bool = True, columns: bool = True
) -> None:
    (M, N), by_rows = gate.shape, recipe.by_rows
    act, gate_multiplier, down_multiplier = form
    width, padded, values = M if by_rows else PARTS, M + -M % 16, 3 if backward else 1
    tops = gate.new_zeros(values * (width + (N if by_rows else 0)), dtype=torch.float32)
    rows, of_columns = tops[: values * width], tops[values * width :]
    strides = dh.stride(0), gate.stride(0), up.stride(0)
    numbers = float(gate_multiplier), float(down_multiplier)
    how: dict[str, Any] = dict(ACT=act, SCALED=numbers != (1, 1), BACKWARD=backward, NEED_H=need_h, BY_ROWS=by_rows, PARTS=PARTS)
    launch(
        _amaxes, (cdiv(M, 16), cdiv(N, 128)), dh, gate, up, rows, of_columns, M, N, *strides, *numbers, width, **how, BLOCK_M=16, BLOCK_N=128, num_warps=4
    )
    to = dict(COLUMNS=columns, TOP_H=torch.finfo(E4).max, TOP=torch.finfo(recipe.gradient).max, LEAST=LEAST, POWERS_OF_2=recipe.powers_of_2)
    tile = dict(BLOCK_M=64, BLOCK_N=64, num_warps=8)
    launch(_glu_casts, (cdiv(padded, 64), cdiv(N, 64)), dh, gate, up, rows, of_columns, *written, M, N, *strides, *numbers, width, padded, **how, **to, **tile)


@launcher("(Tensor gate, Tensor up, str recipe, str act, float gate_multiplier, float down_multiplier) -> (Tensor h, Tensor h_scale)")
def float8_glu(gate: Tensor, up: Tensor, recipe: str, *form: Any) -> tuple[Tensor, Tensor]:
    how = RECIPES[recipe]
    h = new_cast(gate, *gate.shape, E4, how.by_rows)
    _run(gate, gate, up, (*h, *h * 5), form, how, backward=False)
    return h


@launcher(
    "(Tensor dh, Tensor gate, Tensor up, str recipe, bool need_h, bool columns, str act, float gate_multiplier, float down_multiplier)"
    " -> (Tensor h_t, Tensor h_t_scale, Tensor dgate, Tensor dgate_scale, Tensor dgate_t, Tensor dgate_t_scale, Tensor dup, Tensor dup_scale, Tensor dup_t,"
    " Tensor dup_t_scale)"
)
def float8_glu_bwd(dh: Tensor, gate: Tensor, up: Tensor, recipe: str, need_h: bool, columns: bool, *form: Any) -> tuple[Tensor, ...]:
    (M, N), how = gate.shape, RECIPES[recipe]
    padded = M + -M % 16
    h = new_cast(gate, N, padded, E4, how.by_rows, need_h)
    both = lambda: (*new_cast(gate, M, N, how.gradient, how.by_rows), *new_cast(gate, N, padded, how.gradient, how.by_rows, columns))
    dgate, dup = both(), both()
    _run(dh, gate, up, (*h, *h, *dgate, *dup), form, how, backward=True, need_h=need_h, columns=columns)
    return *h, *dgate, *dup


def activated(gate: Tensor, up: Tensor, recipe: Recipe, act: str, gate_multiplier: float, down_multiplier: float) -> Cast:
    """h (M, N), cast by rows."""
    return Cast(*float8_glu(gate, up, recipe.name, act, gate_multiplier, down_multiplier))


def gradients(
    dh: Tensor, gate: Tensor, up: Tensor, recipe: Recipe, act: str, gate_multiplier: float, down_multiplier: float, *, need_h: bool, columns: bool
) -> tuple[Cast, tuple[Cast, Cast], tuple[Cast, Cast]]:  # fmt: skip
    """h cast by columns, and dgate and dup each by rows and by columns; the casts by columns that are not needed are empty."""
    found = float8_glu_bwd(dh, gate, up, recipe.name, need_h, columns, act, gate_multiplier, down_multiplier)
    h, *both = (Cast(*found[i : i + 2]) for i in range(0, 10, 2))
    return h, (both[0], both[1]), (both[2], both[3])
