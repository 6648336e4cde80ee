"""What is replaced in the models of each type: from the table ``families.json``, or from
recognition for a type or a release of Transformers that the table does not have.

``liger models --write`` writes the table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterable
from pathlib import Path

import transformers

from liger_kernel.transformers.recognise.family import Family, modeling
from liger_kernel.transformers.recognise.infer import infer, without_flat
from liger_kernel.transformers.recognise.slots import FLAT, SLOT_OF

TABLE = Path(__file__).with_suffix(".json")
_TABLE = json.loads(TABLE.read_text("utf-8"))
VERSION: str = _TABLE["version"]  # of Transformers
FAMILIES = {
    t: Family(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    for t, row in _TABLE["families"].items()
}
# not tried on a tiny model, so recognised only when such a model is patched, or not at all
UNVERIFIED: dict[str, str] = _TABLE["unverified"]

Rows = Callable[[str], Family | None]


def text_of(families: dict[str, Family], unverified: dict[str, str]) -> str:
    """The text of ``families.json`` for the installed Transformers: one line for each type, so
    that a change of the table reads like a change of code."""
    default = vars(Family())
    rows = {t: {k: v for k, v in vars(row).items() if v != default[k]} for t, row in families.items()}
    lines = lambda entries: ",\n".join(f"{json.dumps(t)}: {json.dumps(entry)}" for t, entry in entries.items())
    return (
        f'{{\n"version": {json.dumps(transformers.__version__)},\n'
        f'"families": {{\n{lines(rows)}\n}},\n"unverified": {{\n{lines(unverified)}\n}}\n}}\n'
    )


@functools.cache
def family(model_type: str) -> Family | None:
    """The row of a model type from the table, or what recognition finds now if there is none; None
    if Transformers has no such type.

    With another version of Transformers than the table's, rows are recognised again, because
    releases change where they round.
    """
    frozen = FAMILIES.get(model_type)
    if frozen and transformers.__version__ == VERSION:
        return frozen
    try:
        found = infer(model_type)
    except Exception:  # no such type, no modeling file, or no default configuration: then nothing is known
        return None
    # rotations inside a vision tower are right only if a step with images has shown it
    if frozen is None or not FLAT & set(frozen.swapped.values()):
        found = without_flat(found)
    if frozen:
        # whether the head can be fused, and the flag's name, are not recognised but verified
        return dataclasses.replace(found, fused=frozen.fused, glu=frozen.glu, images=frozen.images)
    return found if found.heads or found.swapped else None


def with_parts(model_types: Iterable[str], rows: Rows = family) -> dict[str, Family]:
    """The rows of these types and of the types of their parts."""
    found: dict[str, Family] = {}
    pending = list(model_types)
    while pending:
        model_type = pending.pop(0)
        if model_type not in found and (row := rows(model_type)):
            found[model_type] = row
            pending += row.parts
    return found


def rows_of(model_types: Iterable[str], rows: Rows) -> list[tuple[types.ModuleType, Family]]:
    """The rows of these types and of their parts, with the modules to which they belong."""
    return [(modeling(model_type), row) for model_type, row in with_parts(model_types, rows).items()]


def swapped_slots(model_type: str) -> set[str]:
    """The slots of which something is replaced in models of a type, its parts included.

    The table answers for every release of Transformers: flags of the ``apply`` functions must not
    need recognition, which takes seconds.
    """
    rows = with_parts([model_type], lambda t: FAMILIES.get(t) or family(t))
    return {SLOT_OF[label] for row in rows.values() for label in row.swapped.values()}
