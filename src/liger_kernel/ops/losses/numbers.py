"""The numbers that define a loss, apart from its tensors: a frozen dataclass, and the same fields
in the schema of a launcher, which takes no objects."""

from __future__ import annotations

import dataclasses
from typing import Any

_KINDS = {"int": "SymInt", "float | None": "float?"}


def schema_of(numbers: type) -> str:
    """The fields of a dataclass as parameters of a launcher, in their order. Their names differ
    from those of tensors, which may be results of the same launcher."""
    return ", ".join(f"{_KINDS.get(str(f.type), f.type)} with_{f.name}" for f in dataclasses.fields(numbers))


def values(numbers: Any) -> tuple[Any, ...]:
    """The field values of a dataclass. (``dataclasses.astuple`` copies them, which
    ``torch.compile`` can trace only with some releases of Python.)"""
    return tuple(getattr(numbers, name) for name in numbers.__dataclass_fields__)
