"""The schema of a launcher, from the types in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

from liger_kernel.ops._core.operator import launcher

R = TypeVar("R")
SymInt = int  # of a parameter that depends on a size


def _kind(said: str) -> str:
    """A type as schemas have it."""
    if said.endswith(" | None"):
        return _kind(said.removesuffix(" | None")) + "?"
    if said.startswith("list["):
        return _kind(said[len("list[") : -1]) + "[]"
    return "ScalarType" if said == "torch.dtype" else said


def fields_of(numbers: type) -> str:
    """The fields of a ``NamedTuple`` as parameters of a launcher, which takes no objects. Integers may
    depend on sizes. Names differ from those of tensors, which may be results of the same launcher."""
    kinds = {name: t.__name__ if isinstance(t, type) else str(t) for name, t in get_type_hints(numbers).items()}
    return ", ".join(f"{'SymInt' if kind == 'int' else _kind(kind)} with_{name}" for name, kind in kinds.items())


def typed_launcher(fn: Callable[..., R]) -> Callable[..., R]:
    """``launcher`` of a function that writes to nothing that it is given. ``*numbers: Loss`` stands for
    the fields of a ``Loss``."""
    given = [
        fields_of(fn.__globals__[p.annotation]) if p.kind is p.VAR_POSITIONAL else f"{_kind(p.annotation)} {p.name}"
        for p in inspect.signature(fn).parameters.values()
    ]
    results = fn.__annotations__["return"].removeprefix("tuple[").removesuffix("]").split(", ")
    return launcher(f"({', '.join(given)}) -> ({', '.join(map(_kind, results))})")(fn)
