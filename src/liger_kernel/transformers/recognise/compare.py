"""Whether a variant computes what a stock function computes, on the variant's stand-ins."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel.ops._core import operator
from liger_kernel.transformers.recognise.slots import Slot
from liger_kernel.transformers.recognise.variant import Variant, stand_in


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Run references instead of kernels, on every device: here every bit matters, and other
    tests compare kernels with references."""
    # where kernels run now, which tests may have changed
    devices = set(operator._KERNEL_DEVICES)
    operator._KERNEL_DEVICES.clear()
    try:
        yield
    finally:
        operator._KERNEL_DEVICES.update(devices)


def _run(
    fn: Callable,
    variant: Variant,
    owner: Any,
    attributes: dict,
    inputs: tuple,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> list[Tensor]:
    """The outputs that count, and in fp32 also the gradients of parameters and of all tensor inputs
    except tables."""
    learns = dtype == torch.float32

    def given(at: int, each: Any) -> Any:
        if inspect.isfunction(each):
            return each(dtype, weight_dtype)
        table = at >= len(inputs) - variant.tables
        of, with_grad = (weight_dtype, False) if table else (dtype, learns)
        cast = lambda t: t.detach().to(of).requires_grad_(with_grad) if t.is_floating_point() else t
        return tree_map(cast, each)

    arguments = [given(at, each) for at, each in enumerate(inputs)]
    if isinstance(owner, type):
        arguments.insert(0, stand_in(owner, attributes).to(weight_dtype))
        out = fn(*arguments)
    else:
        out = fn(*arguments, **attributes)
    # attention also returns weights, which no kernel has
    outs = list(out)[: variant.results] if isinstance(out, tuple) else [] if out is None else [out]
    if not learns:
        return [o.detach() for o in outs]
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for m in arguments if isinstance(m, nn.Module) for p in m.parameters()]
    total = sum((o * o).sum() for o in outs)
    # if dropout sets everything to 0, there is no gradient
    return [*outs, *(torch.autograd.grad(total, leaves) if isinstance(total, Tensor) and total.requires_grad else ())]


def _close(variant: Variant, dtype: torch.dtype, of: torch.dtype) -> dict[str, float]:
    """How close a result in the dtype ``of`` must be for inputs in ``dtype``."""
    if variant.exact:
        return dict(rtol=0, atol=0) if dtype is torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    # stock rounds after every step, and we round once; the gradients of weights in bf16, too
    return dict(rtol=2**-6, atol=2**-6) if torch.bfloat16 in (dtype, of) else dict(rtol=1e-5, atol=1e-5)


def reproduces(variant: Variant, owner: Any, stock: Callable) -> bool:
    """Whether ``variant`` gives the result of ``stock`` on every stand-in: bit-identical in
    bf16, if the variant is exact."""
    new, compared = variant(stock), 0
    full, half = torch.float32, torch.bfloat16
    # of inputs and of weights or tables; a module in bf16 gets no inputs in fp32
    dtypes = [(full, full), (half, half), (half, full)] + [(full, half)] * (not isinstance(owner, type))
    for attributes, inputs in variant.stand_ins():
        for dtype, weight_dtype in dtypes:
            try:
                expected = _run(stock, variant, owner, attributes, inputs, dtype, weight_dtype)
            except RuntimeError:
                if isinstance(owner, type) and dtype == weight_dtype:
                    return False
                # stock cannot run this stand-in: its projections do not mix dtypes, or it passes no
                # columns through. So its callers never do this
                continue
            found = _run(new, variant, owner, attributes, inputs, dtype, weight_dtype)
            if variant.rounds:
                expected = [e.to(f.dtype) for e, f in zip(expected, found)]
            if [o.dtype for o in expected] != [o.dtype for o in found] or len(expected) != len(found):
                return False
            if not all(torch.allclose(a, b, **_close(variant, dtype, a.dtype)) for a, b in zip(expected, found)):
                return False
            compared += 1
    return compared > 0


@functools.cache
def _known(variant: Variant) -> frozenset[str]:
    """Attributes that the stand-ins of a variant have."""
    return frozenset(name for attributes, _ in variant.stand_ins() for name in attributes)


def recognise(slot: Slot, owner: Any, stock: Callable, tables: set[str] | None = None) -> tuple[Variant | None, str]:
    """Return the variant that reproduces ``stock``, or None and the reason. ``tables``: the
    forms of the tables that a rope function receives."""
    names = [p.name for p in inspect.signature(stock).parameters.values()]
    if isinstance(owner, type):
        if len(names) != len(slot.parameters[0]) + 1:
            return None, f"forward takes ({', '.join(names[1:])})"
    elif tuple(names) not in slot.parameters:
        return None, f"takes ({', '.join(names)})"
    missing: set[str] = set()
    for variant in slot.variants:
        if not variant.fits(tables):
            continue
        try:
            if reproduces(variant, owner, stock):
                return variant, ""
        except AttributeError as error:
            missing |= set(re.findall(r"no attribute '(\w+)'", str(error)))
        except Exception:  # stock does something else than the variant
            continue
    if (tables is None or len(tables) != 1) and any(variant.by_tables for variant in slot.variants):
        return None, "its tables are not understood"
    missing = missing - frozenset().union(*map(_known, slot.variants))
    return None, f"uses {', '.join(sorted(missing))}" if missing else "no variant computes the same"
