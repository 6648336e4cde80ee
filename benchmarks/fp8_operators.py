"""The steps of a linear layer in FP8 as operators to measure, beside torchao's casts. They are no
public operators: ``ops/projections`` has what calls them.

Shapes: x (M, K); gate and up (M, I); a (M, K) and b (N, K) in e4m3. Casts are measured as a layer
makes them: the search for largest values, one cast by rows and a transposed one by columns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.measured import MeasuredOp
from liger_kernel.ops._core.operator import Case, Cost, T, acc, nbytes, use_kernels
from liger_kernel.ops.activations.glu import Form, reference as glu_reference
from liger_kernel.ops.projections import float8_training as f8, mxfp8
from liger_kernel.ops.projections.float8 import E4, lacking, product


def _on_fp8(x: Tensor) -> None:
    if why := lacking(x.device):
        raise NotImplementedError(why)


def _whole(found: f8.Amax) -> tuple[Tensor, ...]:
    return (found.rows.amax(),) if found.columns is None else (found.rows, found.columns)


def float8_amax(x: Tensor, by_rows: bool) -> tuple[Tensor, ...]:
    return _whole(f8.amax_of(x, by_rows))


def amax_reference(x: Tensor, by_rows: bool) -> tuple[Tensor, ...]:
    """The largest finite |x| of x, or of its rows and of its columns."""
    size = x.float().abs()
    size = size.where(size.isfinite(), 0.0)
    return (size.amax(1), size.amax(0)) if by_rows else (size.amax(),)


def _bits(*casts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Values and scales. The rule of accuracy is not for 8 bits, which tests compare: here they
    are integers."""
    small = lambda t: t.view(torch.uint8) if t.itemsize == 1 else t
    return tuple(small(t) for cast in casts if cast is not None for t in cast)


def float8_casts(x: Tensor, recipe: str) -> tuple[Tensor, ...]:
    _on_fp8(x)
    how = f8.RECIPES[recipe]
    if how.blocks:
        return _bits(*mxfp8.mx_casts(x, rows=True, columns=True))
    return _bits(*f8.casts(x, E4, f8.amax_of(x, how.by_rows), how.powers_of_2, rows=True, columns=True))


def casts_reference(x: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """Both casts of an input, e4m3, by a recipe."""
    how = f8.RECIPES[recipe]
    if how.blocks:
        return _bits(*mxfp8.reference(x, True, True))
    found = amax_reference(x, how.by_rows)
    amax = f8.Amax(found[0], found[1]) if how.by_rows else f8.whole_amax(found[0])
    return _bits(*f8.reference(x, amax, E4, how.powers_of_2, True, True))


def glu_and_tops_reference(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) up, and its largest value."""
    h = glu_reference(gate, up)
    return h, amax_reference(h, False)[0]


def glu_and_tops(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not use_kernels(gate):
        return glu_and_tops_reference(gate, up)
    h, maxima = f8.glu_and_maxima(gate, up, "silu", *Form())
    return h, maxima.amax()


def float8_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    _on_fp8(a)
    return product(a, scale_a, b, scale_b, torch.bfloat16)


def product_reference(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """a b^T times the scales, of values in e4m3."""
    wide = acc(torch.float64 if a.dtype == torch.float64 else torch.bfloat16)
    found = (a.to(wide) * scale_a) @ (b.to(wide) * scale_b).t()
    return found if wide == torch.float64 else found.to(torch.bfloat16)


@functools.cache
def _of_torchao(recipe: str, compiled: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The casts of torchao's linear layers."""
    if f8.RECIPES[recipe].blocks:
        mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")

        def casts(x: Tensor) -> tuple[Tensor, ...]:
            both = (
                mx.to_mx(t, E4, mxfp8.BLOCK, mx.ScaleCalculationMode.RCEIL, is_swizzled_scales=True)
                for t in (x, x.t().contiguous())
            )
            return _bits(*((values, scale.flatten()) for scale, values in both))

    else:
        cast = importlib.import_module("torchao.float8.float8_scaling_utils").hp_tensor_to_float8_dynamic
        config = importlib.import_module("torchao.float8.float8_training_tensor").LinearMMConfig()
        axiswise = importlib.import_module("torchao.float8.config").ScalingGranularity.AXISWISE
        granular = dict(scaling_granularity=axiswise, round_scales_to_power_of_2=True)

        def casts(x: Tensor) -> tuple[Tensor, ...]:
            if recipe == "tensorwise":
                one = other = cast(x, E4, config)
            else:
                one, other = (cast(x, E4, config, axiswise_dim=dim, **granular) for dim in (-1, 0))
            return _bits((one._data, 1 / one._scale), (other._data.t().contiguous(), 1 / other._scale.t()))

    return torch.compile(casts, dynamic=False) if compiled else casts


def _ao(package: Any, x: Tensor, recipe: str) -> tuple[Tensor, ...]:
    return _of_torchao(recipe, False)(x)


def _ao_compiled(package: Any, x: Tensor, recipe: str) -> tuple[Tensor, ...]:
    return _of_torchao(recipe, True)(x)


def _input(M: int, N: int) -> T:
    return T((M, N), grad=False)


def _operands(M: int, N: int, K: int, by_rows: bool) -> dict[str, T]:
    values = lambda rows: T((rows, K), dtype=E4, grad=False)
    scale = lambda rows: T(
        (rows, 1) if by_rows else (),
        lambda *shape, dtype: torch.rand(shape, dtype=dtype) + 0.5,
        dtype=torch.float32,
        grad=False,
    )
    return dict(a=values(M), scale_a=scale(M), b=values(N), scale_b=scale(N))


def _casts_cost(x: Tensor, recipe: str) -> Cost:
    """What has other than blocks' scales is read twice, because a cast needs the largest value
    of all."""
    return Cost(nbytes(x) * (1 if f8.RECIPES[recipe].blocks else 2) + 2 * x.numel(), 0)


def _product_cost(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Cost:
    (M, K), N = a.shape, b.shape[0]
    return Cost(nbytes(a, scale_a, b, scale_b) + 2 * M * N, 0, gemms=([(M, N, K)], []), rate=2)


def _operator(
    name: str, fn: Callable, reference: Callable, cases: list[Case], cost: Callable[..., Cost], **rivals: Callable
) -> MeasuredOp:
    return MeasuredOp(
        name,
        fn,
        reference,
        cases,
        cost,
        reference.__doc__ or "",
        {key.replace("_", "+"): rival for key, rival in rivals.items()},
        {},
    )


SCALES = {"tensor": False, "rows": True}
CASTS: dict[str, MeasuredOp] = {
    op.name: op
    for op in (
        _operator(
            "float8_amax",
            float8_amax,
            amax_reference,
            [Case(f"small-{name}", dict(x=_input(64, 96), by_rows=by_rows)) for name, by_rows in SCALES.items()]
            + [
                Case(f"llama3-8b-{name}", dict(x=_input(8192, 14336), by_rows=by_rows), gpu=True)
                for name, by_rows in SCALES.items()
            ],
            lambda x, by_rows: Cost(nbytes(x), 0),
        ),
        _operator(
            "float8_casts",
            float8_casts,
            casts_reference,
            [
                Case(f"small-{name}", dict(x=_input(64, 96), recipe=name))
                for name in ("tensorwise", "rowwise", "mxfp8_rceil")
            ]
            + [
                Case(f"llama3-8b-{name}", dict(x=_input(8192, 14336), recipe=name), gpu=True)
                for name in ("tensorwise", "rowwise", "mxfp8_rceil")
            ],
            _casts_cost,
            ao=_ao,
            ao_compile=_ao_compiled,
        ),
        _operator(
            "glu_and_tops",
            glu_and_tops,
            glu_and_tops_reference,
            [
                Case("small", dict(gate=_input(64, 96), up=_input(64, 96))),
                Case("llama3-8b", dict(gate=_input(8192, 14336), up=_input(8192, 14336)), gpu=True),
            ],
            lambda gate, up: Cost(nbytes(gate, up, gate), 0),
        ),
        _operator(
            "float8_product",
            float8_product,
            product_reference,
            [Case(f"small-{name}", _operands(48, 64, 96, by_rows)) for name, by_rows in SCALES.items()]
            + [
                Case(f"llama3-8b-{name}", _operands(8192, 14336, 4096, by_rows), gpu=True)
                for name, by_rows in SCALES.items()
            ],
            _product_cost,
        ),
    )
}
