"""The row of a model type: from the table, or from recognition if the table has none."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable

import transformers

from liger_kernel.transformers.recognise.families import FAMILIES, VERSION
from liger_kernel.transformers.recognise.family import Family, modeling
from liger_kernel.transformers.recognise.infer import infer, without_flat
from liger_kernel.transformers.recognise.slots import FLAT, SLOT_OF


@functools.cache
def family(model_type: str) -> Family | None:
    """The row of a model type from the table, or what recognition finds now if there is none; None
    if Transformers has no such type.

    With another version of Transformers than the table's, rows are recognised again, because
    releases change where they round.
    """
    frozen = Family(**FAMILIES[model_type]) if model_type in FAMILIES else None
    if frozen and transformers.__version__ == VERSION:
        return frozen
    try:
        found = infer(model_type)
    except Exception:  # no such type, no modeling file, or no default configuration: then nothing is known
        return None
    if frozen is None or not FLAT & set(frozen.swapped.values()):
        found = without_flat(found)
    if frozen:
        return dataclasses.replace(
            frozen, heads=found.heads, swapped=found.swapped, left_alone=found.left_alone, parts=found.parts
        )
    return found if found.heads or found.swapped else None


Rows = Callable[[str], Family | None]


def rows_of(model_types: Iterable[str], rows: Rows) -> list[tuple[types.ModuleType, Family]]:
    """The rows of these types and of their parts, with the modules to which they belong."""
    found: dict[str, tuple[types.ModuleType, Family]] = {}
    pending = list(model_types)
    while pending:
        model_type = pending.pop(0)
        if model_type not in found and (row := rows(model_type)):
            found[model_type] = modeling(model_type), row
            pending += row.parts
    return list(found.values())


def swapped_slots(model_type: str) -> set[str]:
    """The slots of which something is replaced in models of a type, its parts included."""
    found, pending = set(), [model_type]
    seen = set()
    while pending:
        t = pending.pop()
        row = Family(**FAMILIES[t]) if t in FAMILIES else family(t)
        if row and t not in seen:
            found |= {SLOT_OF[label] for label in row.swapped.values()}
            pending += row.parts
        seen.add(t)
    return found
