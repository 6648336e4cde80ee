"""A variant is a value that says what replaces a stock function, and how to know that it may."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

StandIns = Iterator[tuple[dict[str, Any], tuple[Any, ...]]]  # attributes of a module, or options of a function, and inputs


@dataclass(frozen=True)
class Variant:
    """Our replacement for candidates of one form; the fields say which form. ``variant(stock)`` replaces the stock function."""

    kind: ClassVar[str]  # how its label begins
    by_tables: ClassVar[bool] = False  # whether it and others of its slot differ in the tables that they take

    def __call__(self, stock: Callable) -> Callable:
        raise NotImplementedError

    def stand_ins(self) -> StandIns:
        """On which it is compared with stock functions: attributes and inputs that differ in everything that may matter."""
        raise NotImplementedError

    def words(self) -> tuple[str, ...]:
        """The words of its label, without empty words, and with equal words once."""
        raise NotImplementedError

    @property
    def exact(self) -> bool:
        """Whether its bf16 result must be bit-identical."""
        return True

    def fits(self, tables: set[str] | None) -> bool:
        """Whether functions that get tables of these forms are compared with it."""
        return True

    @property
    def label(self) -> str:
        """Its name in the table of families."""
        return f"{self.kind}({', '.join(filter(None, dict.fromkeys(self.words())))})"


def named_as(function: Any, stock: Callable) -> Callable:
    """``function``, its parameters named as those of ``stock``: callers may name them. Changed in its code, so that calls cost nothing more."""
    code = function.__code__
    theirs = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    new = {old: name for old, name in zip(code.co_varnames[: code.co_argcount], theirs) if old != name}
    if len(theirs) >= code.co_argcount and not set(new.values()) & {*code.co_freevars, *code.co_varnames[: code.co_argcount]}:
        taken = {name: f"_{name}" for name in new.values()}  # locals that are called so
        names = {part: tuple((new | taken).get(name, name) for name in getattr(code, part)) for part in ("co_varnames", "co_cellvars")}
        function.__code__ = code.replace(**names)
    return function


# Variants say here what they are: an attribute of theirs would pass to whatever wraps them with functools
NORM_FORMS: weakref.WeakKeyDictionary[Callable, tuple[float, str, str]] = weakref.WeakKeyDictionary()  # offset, casting, attribute with the eps
ROPE_FORMS: weakref.WeakKeyDictionary[Callable, tuple[str, Callable, str]] = weakref.WeakKeyDictionary()  # layout, angles of a table, casting
# Attributes that a forward calls as linear layers of the projection engine, and the attribute with the activation on which that depends, or ""
LINEARS: weakref.WeakKeyDictionary[Callable, tuple[frozenset[str], str]] = weakref.WeakKeyDictionary()
