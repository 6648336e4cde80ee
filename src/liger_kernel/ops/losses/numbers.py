"""The numbers that define a loss, apart from its tensors, are a ``NamedTuple``. A launcher takes no
objects: its schema has the fields."""

from __future__ import annotations

from typing import get_type_hints

_KINDS = {int: "SymInt", float: "float", float | None: "float?", bool: "bool", str: "str"}


def schema_of(numbers: type) -> str:
    """The fields as parameters of a launcher, in their order. Their names differ from those of
    tensors, which may be results of the same launcher."""
    return ", ".join(f"{_KINDS[kind]} with_{name}" for name, kind in get_type_hints(numbers).items())
