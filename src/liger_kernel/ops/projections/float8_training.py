"""Trained weights in FP8 (Micikevicius et al., arXiv:2209.05433): each step casts x, dy and W, and
all three products of a linear layer run in FP8.

With x (M, K), W (N, K), dy (M, N) the products are  y = x W^T,  dx = dy W,  dw = dy^T x. The
recipes are torchao's, and give the same results:

    recipe               scales of x and W in y    of dy and W in dx       of dy and x in dw
    tensorwise           one each, e4m3            one each, dy e5m2       one each, dy e5m2
    rowwise              rows of x, rows of W      rows of dy, columns     columns of dy, columns
                                                   of W                    of x; all e4m3
    rowwise_with_gw_hp   rows of x, rows of W      rows of dy, one of W;   not cast: a product in
                                                   all e4m3                x's dtype
    mxfp8_rceil          32 values that are reduced together, see ``mxfp8``; all e4m3. Experimental:
                         no GPU with such products has run it

Values that are reduced together share one scale s: q = fp8(x / s), s = amax / TOP. TOP is the
largest value of the format. All but the first recipe round s up to a power of two. An infinity or
NaN becomes NaN in q and does not change the scale. A scale is never 0 or infinite.

A tensor core multiplies FP8 only if the reduction is contiguous in both operands. So one kernel
reads its input once and writes a cast by rows and a transposed cast by columns. After the forward
only the transposed cast of x stays, 1 byte per value; or x itself, if somebody else keeps or
recomputes it anyway.
The largest values of W are searched once for each step of an optimizer. Its casts are made for each
product (3 bytes per weight are read and written) and not kept: both together would take as much
memory as W in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from liger_kernel.ops._core import acc, typed_launcher
from liger_kernel.ops._core.invariance import over_tokens
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, tl
from liger_kernel.ops.activations.glu import _MAXIMA, MAXIMA, Form, glu_into
from liger_kernel.ops.projections.float8 import (
    _LEAST,
    CAPABILITY,
    E4,
    E5,
    LEAST,
    _quantized,
    _quantized_t,
    _size,
    product,
    transposed,
)
from liger_kernel.ops.projections.mxfp8 import BLOCK, CAPABILITY as MX_CAPABILITY, mx_casts, mx_product
from liger_kernel.ops.projections.weights import Operand, Weight, added, as_dtype


@dataclass(frozen=True)
class Recipe:
    """How a linear layer is trained in FP8."""

    name: str
    by_rows: bool  # whether each row or column has its own scale
    gradient: torch.dtype  # the format of dy
    powers_of_2: bool
    weight_gradient: bool = True  # whether dw is computed in FP8
    blocks: bool = False  # whether scales are those of ``mxfp8``, which the casts find by themselves

    @property
    def multiple(self) -> int:
        """What divides both sizes of a weight."""
        return BLOCK if self.blocks else 16

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of GPUs from which they multiply so."""
        return MX_CAPABILITY if self.blocks else CAPABILITY


TOP = {dtype: torch.finfo(dtype).max for dtype in (E4, E5)}

RECIPES = {
    r.name: r
    for r in (
        Recipe("tensorwise", False, E5, False),
        Recipe("rowwise", True, E4, True),
        Recipe("rowwise_with_gw_hp", True, E4, True, weight_gradient=False),
        Recipe("mxfp8_rceil", True, E4, True, blocks=True),
    )
}


class Amax(NamedTuple):
    """The largest finite sizes, fp32: of each row (M,) and each column (N,), or of ``MAXIMA``
    parts of the tensor, without columns."""

    rows: Tensor
    columns: Tensor | None


class Cast(NamedTuple):
    """FP8 values that a product reduces along their rows, and the scale: () or (rows, 1), fp32."""

    values: Tensor
    scale: Tensor


def _factor_and_scale(amax: Tensor, dtype: torch.dtype, powers_of_2: bool) -> tuple[Tensor, Tensor]:
    top = amax.new_full((), torch.finfo(dtype).max)
    amax = amax.clamp(min=LEAST)
    if not powers_of_2:
        return top / amax, amax / top
    # truncated, so that the largest value never exceeds the format
    factor = ((top / amax).view(torch.int32) & 0x7F800000).view(torch.float32)  # keep only the power of two
    return factor, 1 / factor


def reference(
    x: Tensor, amax: Amax, dtype: torch.dtype, powers_of_2: bool, rows: bool, columns: bool
) -> tuple[Cast | None, Cast | None]:
    """What ``casts`` returns."""
    wide, by_rows = x.float(), amax.columns is not None
    # NaN where x is not finite. With a literal, which differs from itself, torch.compile would
    # compute the casts anew for each weight
    nan = wide - wide

    def cast(of: Tensor, transposed: bool) -> Cast:
        factor, scale = _factor_and_scale(of, dtype, powers_of_2)
        q = (wide * factor).where(wide.isfinite(), nan)
        if transposed:
            q, scale = torch.nn.functional.pad(q.t(), (0, -x.shape[0] % 16)), scale[:, None] if by_rows else scale
        return Cast(q.to(dtype).contiguous(), scale.contiguous())

    of_rows = amax.rows[:, None] if by_rows else amax.rows.amax()
    of_columns = amax.columns if amax.columns is not None else of_rows
    return cast(of_rows, False) if rows else None, cast(of_columns, True) if columns else None


@jit
def _factor(amax, TOP: tl.constexpr, POWERS_OF_2: tl.constexpr):
    factor = tl.div_rn(tl.zeros_like(amax) + TOP, tl.maximum(amax, _LEAST))
    if POWERS_OF_2:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor


@jit
def _scale(amax, factor, TOP: tl.constexpr, POWERS_OF_2: tl.constexpr):
    one = tl.zeros_like(amax)
    return tl.div_rn(one + 1.0, factor) if POWERS_OF_2 else tl.div_rn(tl.maximum(amax, _LEAST), one + TOP)


@jit
def _amax(
    x_ptr, rows_ptr, columns_ptr, M, N, stride, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of each row and column of STEPS tiles below each other. ``rows``, ``columns``: zeros at
    first."""
    # several tiles below each other: one atomic for a column of all of them
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    of_columns = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS):
        row = ((tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        x = load_tile(x_ptr, row, col, stride, mask_of(row, M, col, N))
        size = _size(x)
        # a maximum has no order, so that atomics do not change bits
        tl.atomic_max(rows_ptr + row, tl.max(size, 1), mask=row < M, sem="relaxed")
        of_columns = tl.maximum(of_columns, tl.max(size, 0))
    tl.atomic_max(columns_ptr + col, of_columns, mask=col < N, sem="relaxed")


@jit
def _maximum(
    x_ptr, maxima_ptr, M, N, stride, part,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest value of part number ``part`` of x, if x has so many: of STEPS tiles below
    each other."""
    high = tl.cdiv(M, BLOCK_M * STEPS)
    col = ((part // high) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    top = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS):
        row = (((part % high) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        x = load_tile(x_ptr, row, col, stride, mask_of(row, M, col, N))
        top = tl.maximum(top, tl.max(_size(x), 0))
    # parts of their own for most programs, or all would wait for one address
    tl.atomic_max(maxima_ptr + part % _MAXIMA, tl.max(top, 0), sem="relaxed")


@jit
def _maxima(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, maxima_ptr, M0, M1, M2, M3, N0, N1, N2, N3, stride0, stride1, stride2, stride3,
    COUNT: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of COUNT tensors, each in code of its own, which loads by what is known of its strides.
    ``maxima``: (COUNT), zeros at first."""
    part = tl.program_id(0)
    end0 = tl.cdiv(M0, BLOCK_M * STEPS) * tl.cdiv(N0, BLOCK_N)
    if part < end0:
        _maximum(x0_ptr, maxima_ptr, M0, N0, stride0, part, STEPS, BLOCK_M, BLOCK_N)
    elif COUNT > 1:
        end1 = end0 + tl.cdiv(M1, BLOCK_M * STEPS) * tl.cdiv(N1, BLOCK_N)
        if part < end1:
            _maximum(x1_ptr, maxima_ptr + _MAXIMA, M1, N1, stride1, part - end0, STEPS, BLOCK_M, BLOCK_N)
        elif COUNT > 2:
            end2 = end1 + tl.cdiv(M2, BLOCK_M * STEPS) * tl.cdiv(N2, BLOCK_N)
            if part < end2:
                _maximum(x2_ptr, maxima_ptr + 2 * _MAXIMA, M2, N2, stride2, part - end1, STEPS, BLOCK_M, BLOCK_N)
            elif COUNT > 3:
                _maximum(x3_ptr, maxima_ptr + 3 * _MAXIMA, M3, N3, stride3, part - end2, STEPS, BLOCK_M, BLOCK_N)


@jit
def _factors(
    maxima_ptr, amax, scale_ptr, at, n, place, TOP: tl.constexpr, POWERS_OF_2: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """By which rows or columns are multiplied: EACH by its largest value, or all by ``amax``. Every
    tile of a row finds its scale; the one at ``place`` 0 stores it."""
    largest = tl.load(maxima_ptr + at, mask=at < n, other=0.0) if EACH else tl.zeros(at.shape, tl.float32) + amax
    factor = _factor(largest, TOP, POWERS_OF_2)
    if place == 0:
        scale = _scale(largest, factor, TOP, POWERS_OF_2)
        tl.store(scale_ptr + (at if EACH else at * 0), scale, mask=(at < n) if EACH else (at == 0))
    return factor


@jit
def _cast_tile(
    x_ptr, rows_ptr, columns_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, stride, part,
    TOP: tl.constexpr, POWERS_OF_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of the tile number ``part``, counted down the columns of tiles. Without ``columns_ptr``, x has
    one scale, and ``rows_ptr`` its largest values in MAXIMA parts."""
    # known when the kernel is compiled: rows and columns have scales, or the tensor has one
    BY_ROWS: tl.constexpr = columns_ptr is not None
    stride_t = tl.cdiv(M, 16) * 16
    high, wide = part % tl.cdiv(stride_t, BLOCK_M), part // tl.cdiv(stride_t, BLOCK_M)
    row = (high * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (wide * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = mask_of(row, M, col, N)
    x = load_tile(x_ptr, row, col, stride, inside)
    amax = None if BY_ROWS else tl.max(tl.load(rows_ptr + tl.arange(0, _MAXIMA)), 0)
    if q_ptr is not None:
        factor = _factors(rows_ptr, amax, scale_ptr, row, M, wide, TOP, POWERS_OF_2, BY_ROWS)
        tl.store(q_ptr + row[:, None] * N + col[None, :], _quantized(x, factor[:, None], q_ptr), mask=inside)
    if qt_ptr is not None:
        factor = _factors(columns_ptr, amax, scale_t_ptr, col, N, high, TOP, POWERS_OF_2, BY_ROWS)
        q, at = _quantized_t(x, factor[None, :], qt_ptr), col[:, None] * stride_t + row[None, :]
        tl.store(qt_ptr + at, q, mask=mask_of(col, N, row, stride_t))


@jit
def _casts(
    x0_ptr, rows0_ptr, columns0_ptr, q0_ptr, scale0_ptr, qt0_ptr, scale_t0_ptr,
    x1_ptr, rows1_ptr, columns1_ptr, q1_ptr, scale1_ptr, qt1_ptr, scale_t1_ptr,
    M0, N0, stride0, M1, N1, stride1,
    TOP0: tl.constexpr, TOP1: tl.constexpr, POWERS_OF_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of a tensor, or of two one after another."""
    part = tl.program_id(0)
    end = tl.cdiv(tl.cdiv(M0, 16) * 16, BLOCK_M) * tl.cdiv(N0, BLOCK_N)
    if part < end:
        _cast_tile(
            x0_ptr, rows0_ptr, columns0_ptr, q0_ptr, scale0_ptr, qt0_ptr, scale_t0_ptr, M0, N0, stride0, part,
            TOP0, POWERS_OF_2, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif x1_ptr is not None:
        _cast_tile(
            x1_ptr, rows1_ptr, columns1_ptr, q1_ptr, scale1_ptr, qt1_ptr, scale_t1_ptr, M1, N1, stride1, part - end,
            TOP1, POWERS_OF_2, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def amax_of(x: Tensor, by_rows: bool) -> Amax:
    """The largest values of x (M, N) from which ``casts`` computes its scales."""
    if not by_rows:
        return maxima_of([x])[0]
    if not use_kernels(x, fusible=True):
        size = _finite_size(x)
        return Amax(size.amax(1), size.amax(0))
    # loads of whole cache lines
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    rows, columns = x.new_zeros(M, dtype=torch.float32), x.new_zeros(N, dtype=torch.float32)
    # H200, 8192 x 14336 bf16: 8 steps 121 us, 16 96; 16 x 256 302, 32 x 128 179: fewer threads a
    # row
    block = min(next_power_of_2(N), 1024)
    grid = cdiv(M, 4096 // block * 16), cdiv(N, block)
    launch(
        _amax, grid, x, rows, columns, M, N, x.stride(0), STEPS=16, BLOCK_M=4096 // block, BLOCK_N=block, num_warps=4
    )
    return Amax(rows, columns)


def _finite_size(x: Tensor) -> Tensor:
    size = x.float().abs()
    return size.where(size.isfinite(), 0.0)


MOST = 4  # tensors that one launch searches


def maxima_of(xs: Sequence[Tensor]) -> list[Amax]:
    """The largest values of up to ``MOST`` tensors (M, N) of one dtype and device, each with one
    scale: a launch takes the host as long as that of one."""
    first, count = xs[0], len(xs)
    if not use_kernels(first, fusible=True):
        return [whole_amax(_finite_size(x).amax()) for x in xs]
    xs = [x if x.stride(1) == 1 else x.contiguous() for x in xs]
    # H200, 8192 x 14336 bf16: 8 steps 68 us, 16 67; 16 x 256 275, 32 x 128 150: fewer threads a row
    block = min(next_power_of_2(max(x.shape[1] for x in xs)), 1024)
    high = 4096 // block * 8
    maxima = first.new_zeros(count, MAXIMA, dtype=torch.float32)
    # the kernel is compiled for as many tensors as there are
    missing = (None,) * (MOST - count)
    sizes = [x.shape for x in xs]
    parts = sum(cdiv(M, high) * cdiv(N, block) for M, N in sizes)
    numbers = *(M for M, _ in sizes), *missing, *(N for _, N in sizes), *missing, *(x.stride(0) for x in xs), *missing
    how = dict(COUNT=count, STEPS=8, BLOCK_M=4096 // block, BLOCK_N=block, num_warps=4)
    launch(_maxima, (parts,), *xs, *missing, maxima, *numbers, **how)
    return [Amax(t, None) for t in maxima.unbind()]


@typed_launcher
def glu_and_maxima(gate: Tensor, up: Tensor, act: str, *form: Form) -> tuple[Tensor, Tensor]:
    """``glu``, and the largest finite sizes in ``MAXIMA`` parts of it."""
    maxima = gate.new_zeros(MAXIMA, dtype=torch.float32)
    return glu_into(maxima, gate, up, act, *form), maxima


def known_amax(maxima: Tensor) -> dict[Hashable, Amax]:
    """For ``Operand``: the largest values in ``MAXIMA`` parts, which the kernel found that made the
    rows."""
    return {_WHOLE: Amax(maxima, None)}


def whole_amax(amax: Tensor) -> Amax:
    """The largest values of a tensor of which only the largest of all is known, or is to count."""
    return Amax(amax.expand(MAXIMA).contiguous(), None)


class CastRequest(NamedTuple):
    """What ``casts_together`` casts: x (M, N) to this format, by its largest values, by ``rows``,
    (M, N), and by ``columns``, transposed, (N, M rounded up to 16 with zeros)."""

    x: Tensor
    dtype: torch.dtype
    amax: Amax
    rows: bool
    columns: bool


def casts_together(
    requests: Sequence[CastRequest], powers_of_2: bool, memory: Tensor | None = None
) -> list[tuple[Cast | None, Cast | None]]:
    """The casts by rows and by columns of one tensor, or of two with one scale each on one device,
    such as both operands of a product: a launch takes the host as long as that of one. None for a
    cast that is not requested.

    ``memory``: a tensor whose memory the casts of a single tensor use if it has enough.
    """
    first = requests[0]
    if not use_kernels(first.x, fusible=True):
        return [reference(x, amax, dtype, powers_of_2, *which) for x, dtype, amax, *which in requests]
    # two tensors have one scale each; a single one may have any
    by_rows = first.amax.columns is not None
    tensors: list[Tensor | None] = []
    sizes: list[int | None] = []
    found: list[tuple[Cast | None, Cast | None]] = []
    parts = 0
    for x, dtype, amax, rows, columns in requests:
        x = x if x.stride(1) == 1 else x.contiguous()
        M, N = x.shape
        padded = M + -M % 16
        of_rows, needed = M * N * rows, M * N * rows + N * padded * columns
        if memory is not None and memory.is_contiguous() and memory.nbytes >= needed and of_rows % 16 == 0:
            free = memory.view(-1).view(torch.uint8).view(dtype)
            q = free[: M * N].view(M, N) if rows else None
            q_t = free[of_rows:needed].view(N, padded) if columns else None
        else:
            q = x.new_empty((M, N), dtype=dtype) if rows else None
            q_t = x.new_empty((N, padded), dtype=dtype) if columns else None
        scale = x.new_empty((M, 1) if by_rows else (), dtype=torch.float32)
        # one scale serves both casts
        scale_t = x.new_empty((N, 1), dtype=torch.float32) if by_rows else scale
        one, other = None if q is None else Cast(q, scale), None if q_t is None else Cast(q_t, scale_t)
        tensors += x, *amax, *(one or (None, None)), *(other or (None, None))
        sizes += M, N, x.stride(0)
        parts += cdiv(padded, 32) * cdiv(N, 128)
        found.append((one, other))
    missing = 2 - len(requests)
    # H200, 8192 x 14336 bf16, both casts, one scale / of rows and columns: 2 warps 142 / 150 us, 4
    # warps 170 / 134, 64 x 128 with 8 warps 196 / 148
    how = dict(TOP0=TOP[first.dtype], TOP1=TOP[requests[-1].dtype], POWERS_OF_2=powers_of_2)
    how |= dict(BLOCK_M=32, BLOCK_N=128, num_warps=4 if by_rows else 2)
    tensors += [None] * 7 * missing
    sizes += [None] * 3 * missing
    # the first of the tensors is x
    launch(_casts, (parts,), *tensors, *sizes, **how)  # type: ignore[arg-type]
    return found


def casts(
    x: Tensor, dtype: torch.dtype, amax: Amax, powers_of_2: bool, *,
    rows: bool, columns: bool, memory: Tensor | None = None,
) -> tuple[Cast | None, Cast | None]:  # fmt: skip
    """``casts_together`` of one tensor."""
    return casts_together([CastRequest(x, dtype, amax, rows, columns)], powers_of_2, memory)[0]


@typed_launcher
def float8_transposed(
    w: Tensor, dtype: torch.dtype, amax_rows: Tensor | None, amax_columns: Tensor | None, powers_of_2: bool,
    after: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The transposed ``Cast`` of a weight, which has been rounded to ``dtype``; without its largest
    values, that of ``mxfp8``. It does not read ``after``.

    It is an operator of its own for torch.compile, which would otherwise compute it in the forward
    pass and save it: 1 byte per weight of the model.
    """
    # scales of blocks are found by the cast itself
    if amax_rows is None:
        return _the(mx_casts(w.to(dtype), rows=False, columns=True)[1])
    return _the(casts(w.to(dtype), E4, Amax(amax_rows, amax_columns), powers_of_2, rows=False, columns=True)[1])


@dataclass(eq=False)
class WeightCache:
    """What was computed from a parameter. It is valid until the parameter is changed in place or
    ``forget`` is called, which every optimizer step does."""

    made: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def find(self, key: Hashable, w: Tensor) -> Any:
        """What was kept under this key, or None."""
        # another tensor in its place, a change in place, or a step of any optimizer
        seen, found = self.made.get(key, (None, None))
        return found if seen == (w.data_ptr(), w._version, _steps[0]) else None

    def keep(self, key: Hashable, w: Tensor, found: Any) -> Any:
        _count_steps()
        self.made[key] = (w.data_ptr(), w._version, _steps[0]), found
        return found


_steps = [0]  # steps of all optimizers: some of them change parameters without changing their version counter


def forget(*_: Any) -> None:
    """Look at every weight again at its next use. Call it after values were written outside an
    optimizer step and unseen by autograd (``p.data.copy_``)."""
    _steps[0] += 1


@functools.cache
def _count_steps() -> None:
    """From the first weight that is looked at: whoever trains without FP8 has no hook of ours."""
    register_optimizer_step_post_hook(forget)


@dataclass(frozen=True, eq=False)
class Float8Trained(Weight):
    """A weight in 16 or 32 bits with its three products in FP8. ``kept``: its largest values;
    with None, every product searches them again."""

    accumulates: ClassVar[bool] = False
    gains: ClassVar[bool] = True
    recipe: Recipe = field(kw_only=True)
    # whether a backward follows that needs dw; a field, because the tensors in a backward do not
    # show it
    learns: bool = field(kw_only=True)
    kept: WeightCache | None = field(default=None, kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.learnable is not None
        return as_dtype(self.learnable, dtype)

    def _largest(self, w: Tensor) -> Amax:
        """The largest values of ``w``, which is W in the dtype of the products."""
        if self.kept is None or self.learnable is None:
            return amax_of(w, self.recipe.by_rows)
        # a weight may be multiplied in several dtypes, under autocast and without
        key = self.recipe.by_rows, w.dtype
        found = self.kept.find(key, self.learnable)
        return self.kept.keep(key, self.learnable, amax_of(w, self.recipe.by_rows)) if found is None else found

    def _cast(self, dtype: torch.dtype) -> Cast:
        """W cast for y."""
        # detached: the node makes the gradient itself
        w = self.dense(dtype).detach()
        return _the(self._cast_by(None if self.recipe.blocks else self._largest(w), w, E4, True, False)[0])

    def _cast_by(self, amax: Amax | None, x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, memory=None):
        """Cast x by the recipe. ``amax``: its largest values; None for scales of blocks."""
        if amax is not None:
            return casts(x, dtype, amax, self.recipe.powers_of_2, rows=rows, columns=columns, memory=memory)
        return tuple(None if found is None else Cast(*found) for found in mx_casts(x, rows=rows, columns=columns))

    def _transposed_cast(self, dtype: torch.dtype, after: Tensor, memory: Tensor | None = None) -> Cast:
        """W cast for dx, ``after`` something that only the backward has. ``memory``: a tensor
        whose memory it may use."""
        w, recipe, compiling = self.dense(dtype).detach(), self.recipe, torch.compiler.is_compiling()
        rows: Tensor | None = None
        columns: Tensor | None = None
        if not recipe.blocks:
            # without a weight gradient in FP8, W has one scale in dx
            rows, columns = self._largest(w) if recipe.weight_gradient else whole_amax(self._largest(w).rows.amax())
        if compiling and self.learnable is not None:
            w = self.learnable.detach()  # in its own dtype, or a graph would save it in ``dtype`` as well
        if memory is not None and rows is not None and not compiling:
            how = dict(rows=False, columns=True, memory=memory)
            one = _the(casts(w.to(dtype), E4, Amax(rows, columns), recipe.powers_of_2, **how)[1])
        else:
            one = Cast(*float8_transposed(w, dtype, rows, columns, recipe.powers_of_2, after))
        return one if recipe.weight_gradient else Cast(one.values, one.scale.expand(w.shape[1], 1).contiguous())

    def _casts(self, name: str, x: Operand, dtype: torch.dtype, rows: bool, columns: bool):
        """The casts of x or dy, once for all weights with this recipe."""
        # searched only if nobody has cast these rows yet
        amax = lambda: None if self.recipe.blocks else self._amax(x)
        return x.made((name, self.recipe.name), lambda x_: self._cast_by(amax(), x_, dtype, rows, columns, x.memory))

    def _amax(self, x: Operand) -> Amax:
        return x.made(("amax", self.recipe.by_rows), lambda rows: amax_of(rows, self.recipe.by_rows))

    def _product(self, a: Cast, b: Cast, dtype: torch.dtype, fast: bool) -> Tensor:
        return mx_product(*a, *b, dtype) if self.recipe.blocks else product(*a, *b, dtype, fast=fast)

    def _of_x(self, x: Operand) -> tuple[Cast | None, Cast | None]:
        """The casts of x: by rows for y, and by columns for dw if a backward follows that has
        only them."""
        return self._casts("x", x, E4, True, x.learns and self.learns and self.recipe.weight_gradient and not x.stays)

    def _of_dy(self, dy: Operand) -> tuple[Cast | None, Cast | None]:
        """The casts of dy: by rows for dx, and by columns for dw if W learns."""
        return self._casts("dy", dy, self.recipe.gradient, True, self.learns and self.recipe.weight_gradient)

    def _cast_together(
        self, name: str, rows: Operand, of_rows: tuple[torch.dtype, bool, bool], of_w: tuple[bool, bool]
    ) -> tuple[Cast | None, Cast | None] | None:
        """Cast W together with the rows that it multiplies, which then find their casts; None
        where either is to be cast alone. ``of_w``: rows, columns."""
        key = name, self.recipe.name
        # cast alone: with scales by rows, if the rows are cast already, or into given memory
        if self.recipe.by_rows or rows.has(key) or rows.memory is not None or torch.compiler.is_compiling():
            return None
        w = self.dense(rows.dtype).detach()
        both = (rows.rows, of_rows[0], self._amax(rows), *of_rows[1:]), (w, E4, self._largest(w), *of_w)
        found, of_weight = casts_together([CastRequest(*each) for each in both], self.recipe.powers_of_2)
        rows.remade(key, found)
        return of_weight

    def forward(self, x: Operand, y: Tensor | None) -> Tensor:
        columns = x.learns and self.learns and self.recipe.weight_gradient and not x.stays
        of_w = self._cast_together("x", x, (E4, True, columns), (True, False))
        w8 = self._cast(x.dtype) if of_w is None else _the(of_w[0])
        return added(self._product(_the(self._of_x(x)[0]), w8, x.dtype, fast=True), y)

    def backward(self, dy: Operand, dx: Tensor | None) -> Tensor:
        together = None
        if not dy.ours:
            together = self._cast_together("dy", dy, (self.recipe.gradient, True, self.learns), (False, True))
        one, other = self._of_dy(dy)
        # each y has one weight, which uses the cast by rows here alone
        dy.remade(("dy", self.recipe.name), (None, other))
        of_dy, dead = _the(one), dy.rows if dy.ours and other is not None else None
        of_w = self._transposed_cast(dy.dtype, of_dy.scale, dead) if together is None else _the(together[1])
        found = self._product(of_dy, of_w, dy.dtype, fast=False)
        return found if dx is None else dx.add_(found)

    def of_input(self, x: Operand) -> tuple[Hashable, Sequence[Tensor | None]] | None:
        # then ``gradient`` multiplies x itself
        if not (self.recipe.weight_gradient and x.learns and self.learns) or (x.stays and self.recipe.blocks):
            return None
        # x is there in the backward anyway: only its largest values are saved
        if x.stays:
            return ("amax", self.recipe.by_rows), self._amax(x)
        return ("x", self.recipe.name), _the(self._of_x(x)[1])

    def made_again(self, key: Hashable, tensors: Sequence[Tensor | None]) -> Any:
        one, other = tensors
        assert one is not None
        if key == ("amax", self.recipe.by_rows):
            return Amax(one, other)
        assert other is not None
        return None, Cast(one, other)

    def gradient(self, dy: Operand, x: Operand) -> Tensor:
        if not self.recipe.weight_gradient:
            return super().gradient(dy, x)
        of_x = self.input_cast(x)
        if x.ours:
            # its cast is all that is needed: the memory is free for the product
            x.rows = x.rows.new_empty(0)
        with over_tokens():
            return self._product(_the(self._of_dy(dy)[1]), of_x, dy.dtype, fast=False)

    def input_cast(self, x: Operand) -> Cast:
        """What ``gradient`` multiplies instead of x."""
        return _the(self._casts("x", x, E4, False, True)[1])


@dataclass(frozen=True, eq=False)
class Float8Gathered(Float8Trained):
    """A weight that FSDP2 gathers in FP8, with one scale. ``cast_of`` reads its cast from
    ``learnable``, in which a backward finds what was gathered for it."""

    cast_of: Callable[[Tensor], Cast] = field(kw_only=True)

    def _gathered(self) -> Cast:
        assert self.learnable is not None
        return self.cast_of(self.learnable)

    def dense(self, dtype: torch.dtype) -> Tensor:
        values, scale = self._gathered()
        return (values.to(acc(dtype)) * scale).to(dtype)

    def _cast(self, dtype: torch.dtype) -> Cast:
        return self._gathered()

    def _transposed_cast(self, dtype: torch.dtype, after: Tensor, memory: Tensor | None = None) -> Cast:
        values, scale = self._gathered()
        return Cast(transposed(values.contiguous()), scale)

    def _cast_together(
        self, name: str, rows: Operand, of_rows: tuple[torch.dtype, bool, bool], of_w: tuple[bool, bool]
    ) -> None:
        return None


def search(products: Iterable[tuple[Weight, Operand | None]]) -> None:
    """Find the largest values of weights, and of the rows that they multiply, that casts with
    one scale will ask for: in one launch, not in one for each."""
    if torch.compiler.is_compiling():
        return
    of_rows: list[Operand] = []
    of_weights: list[tuple[WeightCache, Tensor]] = []
    dtype = None
    for weight, rows in products:
        if not isinstance(weight, Float8Trained) or weight.recipe.by_rows:
            continue
        if rows is not None:
            dtype = rows.dtype
            # several weights multiply the same rows
            if rows not in of_rows and not rows.has(_WHOLE):
                of_rows.append(rows)
        w, kept = weight.learnable, weight.kept
        # of weights in another dtype, only one at a time is cast to that of the products
        if kept is not None and w is not None and w.dtype == dtype and kept.find((False, dtype), w) is None:
            of_weights.append((kept, w))
    xs = [*(rows.rows for rows in of_rows), *(w.detach() for _, w in of_weights)]
    # a single tensor is searched where it is cast
    if len(xs) < 2:
        return
    found = [amax for i in range(0, len(xs), MOST) for amax in maxima_of(xs[i : i + MOST])]
    for rows, amax in zip(of_rows, found):
        rows.remade(_WHOLE, amax)
    for (kept, w), amax in zip(of_weights, found[len(of_rows) :]):
        kept.keep((False, w.dtype), w, amax)


_WHOLE = ("amax", False)  # the key of the largest values of rows that are cast with one scale


def _the(cast: Cast | None) -> Cast:
    assert cast is not None
    return cast


def float8_trained(w: Tensor, recipe: Recipe, kept: WeightCache | None = None) -> Float8Trained:
    N, K = w.shape
    return Float8Trained((N, K), w, recipe=recipe, learns=_learns(w), kept=kept)


def float8_gathered(w: Tensor, cast_of: Callable[[Tensor], Cast]) -> Float8Gathered:
    N, K = w.shape
    return Float8Gathered((N, K), w, recipe=RECIPES["tensorwise"], learns=_learns(w), cast_of=cast_of)


def _learns(w: Tensor) -> bool:
    return w.requires_grad and torch.is_grad_enabled()
