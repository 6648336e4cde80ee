"""Trained weights in FP8 (Micikevicius et al., arXiv:2209.05433): each step casts x, dy and W, and all three products of a linear layer run in FP8.

With x (M, K), W (N, K), dy (M, N) the products are  y = x W^T,  dx = dy W,  dw = dy^T x. The recipes are torchao's, and give the same results:

    recipe                scales of x and W in y      of dy and W in dx                  of dy and x in dw
    tensorwise            one each, e4m3              one each, dy e5m2                  one each, dy e5m2
    rowwise               a row of x, a row of W      a row of dy, a column of W         a column of dy, a column of x; all e4m3
    rowwise_with_gw_hp    a row of x, a row of W      a row of dy, one of W; all e4m3    not cast: a product in x's dtype

Values that are reduced together share one scale s: q = fp8(x / s), s = amax / TOP. TOP is the largest value of the format. The last two recipes round s up to
a power of two. An infinity or NaN becomes NaN in q and does not change the scale. A scale is never 0 or infinite.

A tensor core multiplies FP8 only if the reduction is contiguous in both operands. So one kernel reads its input once and writes a cast by rows and a transposed
cast by columns. After the forward only the transposed cast of x stays, 1 byte per value. The casts of W stay until an optimizer changes W.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from liger_kernel.ops._core.operator import launch, launcher, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, next_power_of_2, tl
from liger_kernel.ops.projections.float8 import _BLOCK, _PROGRAMS, E4, E5, LEAST, _amax, _quantized, _size, lacking, product
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


def reference(x: Tensor, dtype: torch.dtype, by_rows: bool, powers_of_2: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (M, N) and its scale, the transposed q (N, M rounded up to 16) and its scale, as ``float8_casts`` returns them; empty if not requested."""
    x, found = x.float(), []
    finite = x.isfinite()
    size = x.abs().where(finite, 0.0)
    for dim, asked in ((1, rows), (0, columns)):
        if not asked:
            found += [x.new_empty(0, dtype=dtype), x.new_empty(0)]
            continue
        amax = size.amax(dim, keepdim=True) if by_rows else size.amax()
        factor, scale = _factor_and_scale(amax, dtype, powers_of_2)
        q = (x * factor).where(finite, float("nan"))
        if dim == 0:
            q, scale = torch.nn.functional.pad(q.t(), (0, -x.shape[0] % 16)), scale.t()
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
def _amax_both(x_ptr, rows_ptr, columns_ptr, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    of_rows = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=(row < M)[:, None] & (col < N)[None, :], other=0.0).to(tl.float32)
        size = _size(x)
        of_rows = tl.maximum(of_rows, tl.max(size, 1))
        tl.store(columns_ptr + tl.program_id(0).to(tl.int64) * N + col, tl.max(size, 0), mask=col < N)
    tl.store(rows_ptr + row, of_rows, mask=row < M)


@jit
def _casts(
    x_ptr, rows_ptr, columns_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, stride, stride_t, programs,
    TOP: tl.constexpr, LEAST: tl.constexpr, POWERS_OF_2: tl.constexpr, BY_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if BY_ROWS:
        of_rows, of_columns = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_N], tl.float32)
        if ROWS:
            of_rows = tl.load(rows_ptr + row, mask=row < M, other=0.0)
        if COLUMNS:
            of_columns = tl.load(columns_ptr + col, mask=col < N, other=0.0)
    else:
        every = tl.arange(0, PROGRAMS)
        amax = tl.max(tl.load(rows_ptr + every, mask=every < programs, other=0.0), 0)
        of_rows, of_columns = tl.zeros([BLOCK_M], tl.float32) + amax, tl.zeros([BLOCK_N], tl.float32) + amax
    by_row = _factor(of_rows, TOP, LEAST, POWERS_OF_2)
    by_column = _factor(of_columns, TOP, LEAST, POWERS_OF_2)
    if ROWS:
        if tl.program_id(1) == 0:
            scale = _scale(of_rows, by_row, TOP, LEAST, POWERS_OF_2)
            tl.store(scale_ptr + (row if BY_ROWS else row * 0), scale, mask=(row < M) if BY_ROWS else (row == 0))
        tl.store(q_ptr + row[:, None] * N + col[None, :], _quantized(x, by_row[:, None], q_ptr), mask=inside)
    if COLUMNS:
        if tl.program_id(0) == 0:
            scale = _scale(of_columns, by_column, TOP, LEAST, POWERS_OF_2)
            tl.store(scale_t_ptr + (col if BY_ROWS else col * 0), scale, mask=(col < N) if BY_ROWS else (col == 0))
        q = tl.trans(_quantized(x, by_column[None, :], qt_ptr))
        tl.store(qt_ptr + col[:, None] * stride_t + row[None, :], q, mask=(col < N)[:, None] & (row < stride_t)[None, :])


@launcher("(Tensor x, ScalarType dtype, bool by_rows, bool powers_of_2, bool rows, bool columns) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t)")
def float8_casts(x: Tensor, dtype: torch.dtype, by_rows: bool, powers_of_2: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, N), top = x.shape, torch.finfo(dtype).max
    padded = M + -M % 16
    empty = lambda *shape, dtype=torch.float32: x.new_empty(shape, dtype=dtype)
    q, scale = (empty(M, N, dtype=dtype), empty(*((M, 1) if by_rows else ()))) if rows else (empty(0, dtype=dtype), empty(0))
    q_t, scale_t = (empty(N, padded, dtype=dtype), empty(*((N, 1) if by_rows else ()))) if columns else (empty(0, dtype=dtype), empty(0))
    programs = 0
    if by_rows:
        of_rows, parts = empty(M), empty(cdiv(M, 32), N)
        launch(_amax_both, (cdiv(M, 32),), x, of_rows, parts, M, N, x.stride(0), BLOCK_M=32, BLOCK_N=128, num_warps=4)
        of_columns = parts.amax(0) if columns else parts
    else:
        block = min(next_power_of_2(N), _BLOCK)
        programs = min(M * cdiv(N, block), _PROGRAMS)
        of_rows = of_columns = empty(programs)
        launch(_amax, (programs,), x, of_rows, M, N, x.stride(0), programs, BLOCK=block, num_warps=4)
    how = dict(TOP=top, LEAST=LEAST, POWERS_OF_2=powers_of_2, BY_ROWS=by_rows, ROWS=rows, COLUMNS=columns, PROGRAMS=_PROGRAMS, BLOCK_M=64, BLOCK_N=128)
    written = q, scale, q_t, scale_t
    launch(_casts, (cdiv(padded, 64), cdiv(N, 128)), x, of_rows, of_columns, *written, M, N, x.stride(0), padded, programs, **how, num_warps=8)
    return written


def casts(x: Tensor, dtype: torch.dtype, recipe: Recipe, *, rows: bool, columns: bool, by_rows: bool | None = None) -> tuple[Cast, Cast]:
    """Cast x (M, N) by rows, (M, N), and by columns, transposed, (N, M rounded up to 16 with zeros). A cast that is not requested is empty."""
    if why := lacking(x.device):
        raise ValueError(why)
    how = dtype, recipe.by_rows if by_rows is None else by_rows, recipe.powers_of_2, rows, columns
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale, q_t, scale_t = float8_casts(x, *how) if use_kernels(x) else reference(x, *how)
    return Cast(q, scale), Cast(q_t, scale_t)


@dataclass(eq=False)
class Kept:
    """The casts of a parameter. They are valid until the parameter is changed in place or ``forget`` is called, which every optimizer step does."""

    made: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def of(self, key: Any, w: Tensor, make: Callable[[], Any]) -> Any:
        _see_optimizers()
        seen = w.data_ptr(), w._version, _steps[0]
        if key not in self.made or self.made[key][0] != seen:
            self.made.pop(key, None)  # free the old cast before the new one is allocated
            self.made[key] = seen, make()
        return self.made[key][1]


_steps = [0]  # steps of all optimizers: some of them change parameters without changing their version counter


def forget(*_: Any) -> None:
    """Cast every weight again at its next use. Call it after values were written outside an optimizer step and unseen by autograd (``p.data.copy_``)."""
    _steps[0] += 1


@functools.cache
def _see_optimizers() -> None:
    """From the first cast that is kept: whoever trains without FP8 has no hook of ours."""
    register_optimizer_step_post_hook(forget)


@dataclass(frozen=True, eq=False)
class Float8Trained(Weight):
    """A weight in 16 or 32 bits with its three products in FP8. ``kept``: its casts; with None, every product casts it again."""

    accumulates: ClassVar[bool] = False
    gains: ClassVar[bool] = True
    recipe: Recipe = field(kw_only=True)
    learns: bool = field(kw_only=True)  # a field, because the tensors in a backward do not show it
    kept: Kept | None = field(default=None, kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.learnable is not None
        return self.learnable.to(dtype)

    def _casts(self, dtype: torch.dtype) -> tuple[Cast, Cast]:
        """The casts of W for y and for dx."""
        w = self.dense(dtype).detach()

        def make() -> tuple[Cast, Cast]:
            if self.recipe.weight_gradient:
                return casts(w, E4, self.recipe, rows=True, columns=True)
            one = casts(w, E4, self.recipe, rows=False, columns=True, by_rows=False)[1]
            return casts(w, E4, self.recipe, rows=True, columns=False)[0], Cast(one.values, one.scale.expand(w.shape[1], 1).contiguous())

        return make() if self.kept is None or self.learnable is None else self.kept.of((self.recipe, dtype), self.learnable, make)

    def _of_x(self, x: Rows) -> tuple[Cast, Cast]:
        """The casts of x: by rows for y, and by columns for dw if a backward follows."""
        columns = x.learns and self.learns and self.recipe.weight_gradient
        return x.made(("x", self.recipe), lambda rows: casts(rows, E4, self.recipe, rows=True, columns=columns))

    def _of_dy(self, dy: Rows) -> tuple[Cast, Cast]:
        """The casts of dy: by rows for dx, and by columns for dw if W learns."""
        columns = self.learns and self.recipe.weight_gradient
        return dy.made(("dy", self.recipe), lambda rows: casts(rows, self.recipe.gradient, self.recipe, rows=True, columns=columns))

    def forward(self, x: Rows, y: Tensor | None) -> Tensor:
        found = product(*self._of_x(x)[0], *self._casts(x.rows.dtype)[0], x.rows.dtype, fast=True)
        return found if y is None else y.add_(found)

    def backward(self, dy: Rows, dx: Tensor | None) -> Tensor:
        found = product(*self._of_dy(dy)[0], *self._casts(dy.rows.dtype)[1], dy.rows.dtype, fast=False)
        return found if dx is None else dx.add_(found)

    def of_input(self, x: Rows) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        return (("x", self.recipe), self._of_x(x)[1]) if self.recipe.weight_gradient and x.learns else None

    def gradient(self, dy: Rows, x: Rows) -> Tensor:
        if not self.recipe.weight_gradient:
            return super().gradient(dy, x)
        columns = x.made(("x", self.recipe), lambda rows: casts(rows, E4, self.recipe, rows=False, columns=True))[1]
        (d, scale), (q, scale_x) = self._of_dy(dy)[1], columns
        return product(d, scale, q, scale_x, dy.rows.dtype, fast=False)


def float8_trained(w: Tensor, recipe: Recipe, kept: Kept | None = None) -> Float8Trained:
    N, K = w.shape
    return Float8Trained((N, K), w, recipe=recipe, learns=w.requires_grad, kept=kept)
