"""What a variant is: a function that makes, of a stock function, what takes its place; and what some variants say of themselves."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

Variant = Callable[[Callable], Callable]


def named_as(variant: Any, stock: Callable) -> Callable:
    """``variant``, its parameters named as those of ``stock``: callers may name them. Changed in its code, so that calls cost nothing more."""
    code = variant.__code__
    theirs = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    new = {old: name for old, name in zip(code.co_varnames[: code.co_argcount], theirs) if old != name}
    if len(theirs) >= code.co_argcount and not set(new.values()) & {*code.co_freevars, *code.co_varnames[: code.co_argcount]}:
        taken = {name: f"_{name}" for name in new.values()}  # locals that are called so
        names = {part: tuple((new | taken).get(name, name) for name in getattr(code, part)) for part in ("co_varnames", "co_cellvars")}
        variant.__code__ = code.replace(**names)
    return variant


StandIns = Callable[[], Iterator[tuple[dict[str, Any], tuple[Any, ...]]]]

# Variants say here what they are: an attribute of theirs would pass to whatever wraps them with functools
NORM_FORMS: weakref.WeakKeyDictionary[Callable, tuple[float, str, str]] = weakref.WeakKeyDictionary()  # offset, casting, attribute with the eps
ROPE_FORMS: weakref.WeakKeyDictionary[Callable, tuple[str, Callable, str]] = weakref.WeakKeyDictionary()  # layout, angles of a table, casting
