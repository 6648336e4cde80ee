"""A variant is a value: it makes the replacement of a stock function, and the stand-ins that
show whether the replacement is right."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

# Attributes of a module (or options of a function), and inputs: tensors, or functions of (dtype,
# dtype of weights) that make an input
StandIns = Iterator[tuple[dict[str, Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Variant:
    """Our replacement for candidates of one form; the fields say which form. ``variant(stock)``
    replaces the stock function."""

    kind: ClassVar[str]  # how its label begins
    results: ClassVar[int | None] = None  # how many of its results are compared with stock's; None: all
    tables: ClassVar[int] = 0  # how many of its last inputs are tables of angles, which are cast like weights
    by_tables: ClassVar[bool] = False  # whether the variants of its slot differ in the form of their tables

    def __call__(self, stock: Callable) -> Callable:
        raise NotImplementedError

    def stand_ins(self) -> StandIns:
        """The attributes and inputs with which it is compared with stock functions. They differ
        in everything that may matter."""
        raise NotImplementedError

    def words(self) -> tuple[str, ...]:
        """The words of its label. Empty words and repeated words are allowed, and left out of
        the label."""
        return tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in dataclasses.astuple(self))

    @property
    def exact(self) -> bool:
        """Whether its bf16 result must be bit-identical."""
        return True

    def fits(self, forms: set[str] | None) -> bool:
        """Whether a function that receives tables of these forms is compared with it."""
        return True

    @property
    def label(self) -> str:
        """Its name in the table of families."""
        return f"{self.kind}({', '.join(filter(None, dict.fromkeys(self.words())))})"


def are_numbers(*values: Any) -> bool:
    """Whether no value that a forward reads from its module is a tensor. A kernel takes a number,
    which has no gradient, and to read one from a tensor on a GPU makes the host wait."""
    return not any(isinstance(value, Tensor) for value in values)


def named_as(function: Any, stock: Callable) -> Callable:
    """``function`` with the parameter names of ``stock``, because callers may use them. The
    names change in its code object, so calls cost nothing more.

    For stock's ``forward(self, x)``, ``def forward(self, hidden_states)`` becomes
    ``def forward(self, x)``; a local variable ``x`` of it becomes ``_x``.
    """
    code = function.__code__
    theirs = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    ours = code.co_varnames[: code.co_argcount]
    new = {old: name for old, name in zip(ours, theirs) if old != name}
    # a closure's names cannot be renamed, nor can two parameters exchange their names
    if len(theirs) >= code.co_argcount and not set(new.values()) & {*code.co_freevars, *ours}:
        new |= {name: f"_{name}" for name in new.values()}
        names = {part: tuple(new.get(n, n) for n in getattr(code, part)) for part in ("co_varnames", "co_cellvars")}
        function.__code__ = code.replace(**names)
    return function


# Replacements register here, not by attributes: functools.wraps would copy an attribute to every
# function that wraps them

# offset, casting, attribute with the eps
NORM_FORMS: weakref.WeakKeyDictionary[Callable, tuple[float, str, str]] = weakref.WeakKeyDictionary()
# layout, angles of a table, casting
ROPE_FORMS: weakref.WeakKeyDictionary[Callable, tuple[str, Callable, str]] = weakref.WeakKeyDictionary()
# The attributes that a forward calls as linear layers of the projection engine, and why a module
# runs its stock forward all the same, or None
LINEARS: weakref.WeakKeyDictionary[Callable, tuple[frozenset[str], Callable[[nn.Module], str | None]]] = (
    weakref.WeakKeyDictionary()
)
# the variant whose forward runs experts
OF_EXPERTS: weakref.WeakKeyDictionary[Callable, Variant] = weakref.WeakKeyDictionary()
