"""Trained weights in FP8 (Micikevicius et al., arXiv:2209.05433): each step casts x, dy and W, and all three products of a linear layer run in FP8.

With x (M, K), W (N, K), dy (M, N) the products are  y = x W^T,  dx = dy W,  dw = dy^T x. The recipes are torchao's, and give the same results:

    recipe                scales of x and W in y      of dy and W in dx                  of dy and x in dw
    tensorwise            one each, e4m3              one each, dy e5m2                  one each, dy e5m2
    rowwise               a row of x, a row of W      a row of dy, a column of W         a column of dy, a column of x; all e4m3
    rowwise_with_gw_hp    a row of x, a row of W      a row of dy, one of W; all e4m3    not cast: a product in x's dtype

Values that are reduced together share one scale s: q = fp8(x / s), s = amax / TOP. TOP is the largest value of the format. The last two recipes round s up to
a power of two. An infinity or NaN becomes NaN in q and does not change the scale. A scale is never 0 or infinite.

A tensor core multiplies FP8 only if the reduction is contiguous in both operands. So one kernel reads its input once and writes a cast by rows and a transposed
cast by columns. After the forward only the transposed cast of x stays, 1 byte per value; or x itself, if somebody else keeps or recomputes it anyway.
The largest values of W are searched once for each step of an optimizer. Its casts are made for each product (3 bytes per weight are read and written) and not
kept: both together would take as much memory as W in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from liger_kernel.ops._core.operator import launch, launcher, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.activations.glu import FORM, TOPS, glu_into
from liger_kernel.ops.projections.float8 import E4, E5, LEAST, _quantized, _size, lacking, product
from liger_kernel.ops.projections.weights import Rows, Weight


@dataclass(frozen=True)
class Recipe:
    """How a linear layer is trained in FP8."""

    name: str
    by_rows: bool  # whether each row or column has its own scale
    gradient: torch.dtype  # the format of dy
    powers_of_2: bool
    weight_gradient: bool = True  # whether dw is computed in FP8


RECIPES = {
    r.name: r
    for r in (
        Recipe("tensorwise", False, E5, False),
        Recipe("rowwise", True, E4, True),
        Recipe("rowwise_with_gw_hp", True, E4, True, weight_gradient=False),
    )
}


class Amax(NamedTuple):
    """The largest finite sizes, fp32: of each row (M,) and of each column (N,), or in ``TOPS`` parts of the tensor, without columns."""

    rows: Tensor
    columns: Tensor


class Cast(NamedTuple):
    """FP8 values that a product reduces along their rows, and the scale: () or (rows, 1), fp32."""

    values: Tensor
    scale: Tensor


def _factor_and_scale(amax: Tensor, dtype: torch.dtype, powers_of_2: bool) -> tuple[Tensor, Tensor]:
    top = amax.new_full((), torch.finfo(dtype).max)
    amax = amax.clamp(min=LEAST)
    if not powers_of_2:
        return top / amax, amax / top
    factor = ((top / amax).view(torch.int32) & 0x7F800000).view(torch.float32)  # keep only the power of two
    return factor, 1 / factor


def reference(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, by_rows: bool, powers_of_2: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (M, N) and its scale, the transposed q (N, M rounded up to 16) and its scale, as ``float8_casts`` returns them; empty if not requested."""
    x, found = x.float(), []
    for dim, asked in ((1, rows), (0, columns)):
        if not asked:
            found += [x.new_empty(0, dtype=dtype), x.new_empty(0)]
            continue
        amax = (of_columns, of_rows[:, None])[dim] if by_rows else of_rows.amax()
        factor, scale = _factor_and_scale(amax, dtype, powers_of_2)
        q = (x * factor).where(x.isfinite(), float("nan"))
        if dim == 0:
            q, scale = torch.nn.functional.pad(q.t(), (0, -x.shape[0] % 16)), scale[:, None] if by_rows else scale
        found += [q.to(dtype).contiguous(), scale.contiguous()]
    return tuple(found)  # type: ignore[return-value]  # always four


@jit
def _factor(amax, TOP: tl.constexpr, LEAST: tl.constexpr, POWERS_OF_2: tl.constexpr):
    factor = tl.div_rn(tl.zeros_like(amax) + TOP, tl.maximum(amax, LEAST))
    if POWERS_OF_2:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor


@jit
def _scale(amax, factor, TOP: tl.constexpr, LEAST: tl.constexpr, POWERS_OF_2: tl.constexpr):
    one = tl.zeros_like(amax)
    return tl.div_rn(one + 1.0, factor) if POWERS_OF_2 else tl.div_rn(tl.maximum(amax, LEAST), one + TOP)


@jit
def _amax(
    x_ptr, rows_ptr, columns_ptr, M, N, stride, BY_ROWS: tl.constexpr, TOPS: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of STEPS tiles below each other. ``rows``, ``columns``: zeros at first."""
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    of_columns = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS):
        row = ((tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=(row < M)[:, None] & (col < N)[None, :], other=0.0).to(tl.float32)
        size = _size(x)
        if BY_ROWS:
            tl.atomic_max(rows_ptr + row, tl.max(size, 1), mask=row < M, sem="relaxed")
        of_columns = tl.maximum(of_columns, tl.max(size, 0))
    if BY_ROWS:
        tl.atomic_max(columns_ptr + col, of_columns, mask=col < N, sem="relaxed")
    else:
        part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) % TOPS
        tl.atomic_max(rows_ptr + part, tl.max(of_columns, 0), sem="relaxed")


@jit
def write_casts(
    x, of_rows_ptr, of_columns_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row, col, M, N, stride_t, TOP: tl.constexpr, LEAST: tl.constexpr,
    POWERS_OF_2: tl.constexpr, BY_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOPS: tl.constexpr,
):  # fmt: skip
    """Cast the tile x, fp32, whose largest values are known. ``row``, ``col``: int64, from the first of the tile."""
    if BY_ROWS:
        if ROWS:
            of_rows = tl.load(of_rows_ptr + row, mask=row < M, other=0.0)
        if COLUMNS:
            of_columns = tl.load(of_columns_ptr + col, mask=col < N, other=0.0)
    else:
        amax = tl.max(tl.load(of_rows_ptr + tl.arange(0, TOPS)), 0)
        of_rows, of_columns = tl.zeros_like(row).to(tl.float32) + amax, tl.zeros_like(col).to(tl.float32) + amax
    if ROWS:
        factor = _factor(of_rows, TOP, LEAST, POWERS_OF_2)
        if tl.program_id(1) == 0:
            scale = _scale(of_rows, factor, TOP, LEAST, POWERS_OF_2)
            tl.store(scale_ptr + (row if BY_ROWS else row * 0), scale, mask=(row < M) if BY_ROWS else (row == 0))
        tl.store(q_ptr + row[:, None] * N + col[None, :], _quantized(x, factor[:, None], q_ptr), mask=(row < M)[:, None] & (col < N)[None, :])
    if COLUMNS:
        factor = _factor(of_columns, TOP, LEAST, POWERS_OF_2)
        if tl.program_id(0) == 0:
            scale = _scale(of_columns, factor, TOP, LEAST, POWERS_OF_2)
            tl.store(scale_t_ptr + (col if BY_ROWS else col * 0), scale, mask=(col < N) if BY_ROWS else (col == 0))
        q = tl.trans(_quantized(x, factor[None, :], qt_ptr))
        tl.store(qt_ptr + col[:, None] * stride_t + row[None, :], q, mask=(col < N)[:, None] & (row < stride_t)[None, :])


@jit
def _casts(
    x_ptr, rows_ptr, columns_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, stride, stride_t,
    TOP: tl.constexpr, LEAST: tl.constexpr, POWERS_OF_2: tl.constexpr, BY_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=(row < M)[:, None] & (col < N)[None, :], other=0.0).to(tl.float32)
    write_casts(
        x, rows_ptr, columns_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row, col, M, N, stride_t, TOP, LEAST, POWERS_OF_2, BY_ROWS, ROWS, COLUMNS, TOPS
    )  # fmt: skip  # the arguments in the order of the signature


@launcher("(Tensor x, bool by_rows) -> (Tensor rows, Tensor columns)")
def float8_amax(x: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    rows = x.new_zeros(M if by_rows else TOPS, dtype=torch.float32)
    columns = x.new_zeros(N if by_rows else 0, dtype=torch.float32)
    # H200, 8192 x 14336 bf16, one scale / rows and columns: 69 / 119 us; 16 x 256 275 / 302, 32 x 128 150 / 179: fewer threads in a row, more exchange
    block = min(next_power_of_2(N), 1024)
    tile = dict(BLOCK_M=4096 // block, BLOCK_N=block, STEPS=8)
    launch(_amax, (cdiv(M, tile["BLOCK_M"] * 8), cdiv(N, block)), x, rows, columns, M, N, x.stride(0), BY_ROWS=by_rows, TOPS=TOPS, **tile, num_warps=4)
    return rows, columns


@launcher(
    "(Tensor x, Tensor of_rows, Tensor of_columns, ScalarType dtype, bool by_rows, bool powers_of_2, bool rows, bool columns)"
    " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t)"
)
def float8_casts(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, by_rows: bool, powers_of_2: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, N = x.shape
    written = *new_cast(x, M, N, dtype, by_rows, rows), *new_cast(x, N, M + -M % 16, dtype, by_rows, columns)
    _write(written, x, of_rows, of_columns, dtype, by_rows, powers_of_2, rows, columns)
    return written


def _write(
    written: tuple[Tensor, ...], x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, by_rows: bool, powers_of_2: bool, rows: bool, columns: bool
) -> None:
    (M, N), padded = x.shape, x.shape[0] + -x.shape[0] % 16
    how = dict(TOP=torch.finfo(dtype).max, LEAST=LEAST, POWERS_OF_2=powers_of_2, BY_ROWS=by_rows, ROWS=rows, COLUMNS=columns, TOPS=TOPS)
    # H200, 8192 x 14336 bf16, both casts, one scale / of rows and columns: 2 warps 141 / 148 us, 4 warps 169 / 134, 64 x 128 with 8 warps 196 / 148
    how |= dict(BLOCK_M=32, BLOCK_N=128, num_warps=4 if by_rows else 2)
    launch(_casts, (cdiv(padded, 32), cdiv(N, 128)), x, of_rows, of_columns, *written, M, N, x.stride(0), padded, **how)


def _in_memory_of(spare: Tensor, M: int, N: int, dtype: torch.dtype, by_rows: bool) -> tuple[Tensor, ...] | None:
    """Both casts of a tensor (M, N) in the memory of a tensor in 16 bits of the same size, if they fit."""
    if spare.itemsize != 2 or spare.shape != (M, N) or not spare.is_contiguous() or M % 16:
        return None
    q, q_t = spare.view(-1).view(dtype).split(M * N)
    scale = lambda n: spare.new_empty((n, 1) if by_rows else (), dtype=torch.float32)
    return q.view(M, N), scale(M), q_t.view(N, M), scale(N)


def new_cast(like: Tensor, M: int, N: int, dtype: torch.dtype, by_rows: bool, asked: bool = True) -> Cast:
    """Memory for a cast (M, N); empty if it is not requested."""
    shape, of_scale = ((M, N), (M, 1) if by_rows else ()) if asked else ((0,), (0,))
    return Cast(like.new_empty(shape, dtype=dtype), like.new_empty(of_scale, dtype=torch.float32))


def amax_of(x: Tensor, by_rows: bool) -> Amax:
    """The largest values of x (M, N) from which ``casts`` computes its scales."""
    if use_kernels(x):
        return Amax(*float8_amax(x if x.stride(1) == 1 else x.contiguous(), by_rows))
    size = x.float().abs()
    size = size.where(size.isfinite(), 0.0)
    return Amax(size.amax(1), size.amax(0)) if by_rows else whole_amax(size.amax())


@launcher(f"(Tensor gate, Tensor up, str act, {FORM}) -> (Tensor h, Tensor tops)")
def glu_and_tops(gate: Tensor, up: Tensor, act: str, *form: Any) -> tuple[Tensor, Tensor]:
    """``glu``, and the largest finite sizes in ``TOPS`` parts of it."""
    tops = gate.new_zeros(TOPS, dtype=torch.float32)
    return glu_into(tops, gate, up, act, *form), tops


def known_amax(tops: Tensor) -> dict[Hashable, Amax]:
    """For ``Rows``: the largest values in ``TOPS`` parts, which the kernel found that made the rows."""
    return {("amax", False): Amax(tops, tops.new_empty(0))}


def whole_amax(amax: Tensor) -> Amax:
    """The largest values of a tensor of which only the largest of all is known, or is to count."""
    return Amax(amax.expand(TOPS).contiguous(), amax.new_empty(0))


def casts(
    x: Tensor, dtype: torch.dtype, recipe: Recipe, amax: Amax | None = None, *,
    rows: bool, columns: bool, by_rows: bool | None = None, spare: Tensor | None = None,
) -> tuple[Cast, Cast]:  # fmt: skip
    """Cast x (M, N) by rows, (M, N), and by columns, transposed, (N, M rounded up to 16 with zeros). A cast that is not requested is empty.

    ``amax``: ``amax_of(x)`` if it is known. ``by_rows``: other scales than the recipe's. ``spare``: memory for both casts, where they fit.
    """
    if why := lacking(x.device):
        raise ValueError(why)
    by_rows = recipe.by_rows if by_rows is None else by_rows
    x = x if x.stride(1) == 1 else x.contiguous()
    how = *(amax or amax_of(x, by_rows)), dtype, by_rows, recipe.powers_of_2, rows, columns
    written = _in_memory_of(spare, x.shape[0], x.shape[1], dtype, by_rows) if spare is not None and rows and columns and use_kernels(x) else None
    if written is not None:
        _write(written, x, *how)
    else:
        written = (float8_casts if use_kernels(x) else reference)(x, *how)
    q, scale, q_t, scale_t = written
    return Cast(q, scale), Cast(q_t, scale_t)


@dataclass(eq=False)
class Kept:
    """What was computed from a parameter. It is valid until the parameter is changed in place or ``forget`` is called, which every optimizer step does."""

    made: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def of(self, key: Hashable, w: Tensor, make: Callable[[], Any]) -> Any:
        _see_optimizers()
        seen = w.data_ptr(), w._version, _steps[0]
        if key not in self.made or self.made[key][0] != seen:
            self.made[key] = seen, make()
        return self.made[key][1]


_steps = [0]  # steps of all optimizers: some of them change parameters without changing their version counter


def forget(*_: Any) -> None:
    """Look at every weight again at its next use. Call it after values were written outside an optimizer step and unseen by autograd (``p.data.copy_``)."""
    _steps[0] += 1


@functools.cache
def _see_optimizers() -> None:
    """From the first weight that is looked at: whoever trains without FP8 has no hook of ours."""
    register_optimizer_step_post_hook(forget)


@dataclass(frozen=True, eq=False)
class Float8Trained(Weight):
    """A weight in 16 or 32 bits with its three products in FP8. ``kept``: its largest values; with None, every product searches them again."""

    accumulates: ClassVar[bool] = False
    gains: ClassVar[bool] = True
    recipe: Recipe = field(kw_only=True)
    learns: bool = field(kw_only=True)  # a field, because the tensors in a backward do not show it
    kept: Kept | None = field(default=None, kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.learnable is not None
        return self.learnable.to(dtype)

    def _cast(self, dtype: torch.dtype, columns: bool) -> Cast:
        """W cast for y, or transposed for dx."""
        w, recipe = self.dense(dtype).detach(), self.recipe
        known = lambda: amax_of(w, recipe.by_rows)
        amax: Amax = known() if self.kept is None or self.learnable is None else self.kept.of((recipe.by_rows, dtype), self.learnable, known)
        if not columns:
            return casts(w, E4, recipe, amax, rows=True, columns=False)[0]
        if recipe.weight_gradient:
            return casts(w, E4, recipe, amax, rows=False, columns=True)[1]
        one = casts(w, E4, recipe, whole_amax(amax.rows.amax()), rows=False, columns=True, by_rows=False)[1]
        return Cast(one.values, one.scale.expand(w.shape[1], 1).contiguous())

    def _amax(self, x: Rows) -> Amax:
        return x.made(("amax", self.recipe.by_rows), lambda rows: amax_of(rows, self.recipe.by_rows))

    def _of_x(self, x: Rows) -> tuple[Cast, Cast]:
        """The casts of x: by rows for y, and by columns for dw if a backward follows that has only them."""
        columns = x.learns and self.learns and self.recipe.weight_gradient and not x.stays
        return x.made(("x", self.recipe), lambda rows: casts(rows, E4, self.recipe, self._amax(x), rows=True, columns=columns))

    def _of_dy(self, dy: Rows) -> tuple[Cast, Cast]:
        """The casts of dy: by rows for dx, and by columns for dw if W learns."""
        columns = self.learns and self.recipe.weight_gradient
        how = dict(rows=True, columns=columns, spare=dy.spare)
        return dy.made(("dy", self.recipe), lambda rows: casts(rows, self.recipe.gradient, self.recipe, self._amax(dy), **how))

    def forward(self, x: Rows, y: Tensor | None) -> Tensor:
        found = product(*self._of_x(x)[0], *self._cast(x.dtype, columns=False), x.dtype, fast=True)
        return found if y is None else y.add_(found)

    def backward(self, dy: Rows, dx: Tensor | None) -> Tensor:
        found = product(*self._of_dy(dy)[0], *self._cast(dy.dtype, columns=True), dy.dtype, fast=False)
        return found if dx is None else dx.add_(found)

    def of_input(self, x: Rows) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        if not (self.recipe.weight_gradient and x.learns):
            return None
        return (("amax", self.recipe.by_rows), self._amax(x)) if x.stays else (("x", self.recipe), self._of_x(x)[1])

    def made_again(self, key: Hashable, tensors: Sequence[Tensor]) -> Any:
        return Amax(*tensors) if key == ("amax", self.recipe.by_rows) else (None, Cast(*tensors))

    def gradient(self, dy: Rows, x: Rows) -> Tensor:
        if not self.recipe.weight_gradient:
            return super().gradient(dy, x)
        columns = x.made(("x", self.recipe), lambda rows: casts(rows, E4, self.recipe, self._amax(x), rows=False, columns=True))[1]
        (d, scale), (q, scale_x) = self._of_dy(dy)[1], columns
        return product(d, scale, q, scale_x, dy.dtype, fast=False)


def float8_trained(w: Tensor, recipe: Recipe, kept: Kept | None = None) -> Float8Trained:
    N, K = w.shape
    return Float8Trained((N, K), w, recipe=recipe, learns=w.requires_grad, kept=kept)
