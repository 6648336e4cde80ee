"""Results of ``liger bench`` and ``liger bench step``: read, merged, compared, written.

A result is a dict: ``{"meta": {...}, "rows": [{...}, ...]}``. A row that failed or is inaccurate is
never compared with another.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_kernel.train.files import export
from liger_kernel.train.mistakes import UserError, existing
from liger_kernel.train.redact import in_a_line

Row = dict[str, Any]
OURS = "ours"
# relative difference in tokens/s of one variant between processes and cards of one kind
# (MEASURED.md, "Adapters": several runs and cards)
RUNS = 0.03

# -- comparisons


def usable(row: Row | None) -> bool:
    """Whether the row ran with the right results, so that its speed may be compared."""
    return row is not None and not row.get("failed") and row.get("accurate") is not False


def key(row: Row) -> tuple[Any, ...]:
    """The values that two rows must share to be compared."""
    if "model" not in row:
        return tuple(row.get(name) for name in ("op", "case", "dtype", "mode", "sweep", "x", "source"))
    return (*(row.get(name) for name in ("model", "batch", "seq", "gpus", "parallel", "source")), *parts_of(row))


# Settings of a step in words, in the order in which tables name them
PARTS = {
    "layers": "{} layers",
    "parallel": "expert parallelism",
    "autocast": "autocast",
    "checkpointing": "checkpointing",
    "attention": "{}",
    "optimizer": "{}",
    "optimizer_in_backward": "step in the backward",
    "optimizer_on_cpu": "optimizer on the CPU",
    "lora": "{}",
    "quantize": "{} base",
    "fp8": "FP8 {}",
    "tiled_mlp": "tiled MLPs in {}",
}


def parts_of(row: Mapping[str, Any]) -> list[str]:
    """What a step does and what it trains, in words. Results that are older than a flag lack it:
    the flag was off."""
    values: dict[str, Any] = {name: row.get(name) for name in PARTS}
    values["parallel"] = values["parallel"] == "ep"  # tables have a column for the others
    values["optimizer"] = None if values["optimizer"] in ("sgd", "adamw") else values["optimizer"]
    if row.get("lora"):
        values["lora"] = f"{'DoRA' if row.get('dora') else 'LoRA'} {row['lora']}"
        values["lora"] += f" on {row['lora_targets']}" if row.get("lora_targets") else ""
        values["lora"] += f" with dropout {row['lora_dropout']:g}" if row.get("lora_dropout") else ""
    return [words.format(values[name]) for name, words in PARTS.items() if values[name]]


def with_ours(rows: Iterable[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with our row for comparison."""
    rows = list(rows)
    ours = {key(row): row for row in rows if row["variant"] == OURS}
    return [(row, ours.get(key(row))) for row in rows]


def ratio(row: Row, other: Row | None, name: str = "device_ms") -> float | None:
    """``row[name]`` divided by the other row's; None if the comparison would mean nothing."""
    if other is None or row["variant"] == other["variant"] or not usable(row) or not usable(other):
        return None
    mine, theirs = row.get(name), other.get(name)
    return mine / theirs if mine and theirs else None


def noise(row: Row, other: Row, cpu: bool = False) -> float:
    """The relative difference of two steps' speeds that may be chance: the spread of steps, and
    on a GPU also the spread of runs."""
    return max(row.get("spread") or 0.0, other.get("spread") or 0.0, 0.0 if cpu else RUNS)


def beyond(factor: float, noise: float) -> bool:
    """Whether a ratio of speeds is more than noise. If the spread is half of a step's time, no
    ratio is."""
    return noise < 0.5 and not 1 / (1 + noise) <= factor <= 1 + noise


# -- numbers as text


def digits(value: float | None) -> str:
    """The value with three significant digits, never with an exponent."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.2e}")))))
    return f"{value:,.{decimals}f}"


def times(value: float | None) -> str:
    """A ratio as people write it: ``1.45x``, ``14.6x``, ``146x``."""
    return "" if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}x"


def status(row: Row) -> str:
    """``failed: why``, ``inaccurate`` or nothing."""
    if row.get("failed"):
        return f"failed: {' '.join(str(row['failed']).split())}"
    return "inaccurate" if row.get("accurate") is False else ""


# -- files

META = ("hardware", "torch", "triton", "transformers", "liger_kernel", "date")
WORDS = {*META, "op", "case", "dtype", "mode", "variant", "sweep", "model", "parallel", "quantize", "fp8"}
WORDS |= {"lora_targets", "data", "optimizer", "failed"}
TIMES = ("device_ms", "wall_ms", "host_ms", "floor_ms", "step_ms")  # other columns in ms are kinds of work


def read(path: str | Path) -> dict[str, Any]:
    """Read a result from the JSON that a run writes, or from the CSV that is made from it.
    Raises ``UserError`` for other files."""
    file = existing(path)
    kind = "CSV" if file.suffix == ".csv" else "JSON"
    try:
        result = _of_csv(file) if kind == "CSV" else json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise UserError(f"{path} is not valid {kind}: {in_a_line(error)}") from error
    rows = result.get("rows") if isinstance(result, dict) and isinstance(result.get("meta"), dict) else None
    named = lambda row: isinstance(row, dict) and "variant" in row and ("model" in row or "op" in row)
    if not isinstance(rows, list) or not all(map(named, rows)):
        raise UserError(
            f"{path} holds no results: give a file that `liger bench --json` or `liger bench step --json` wrote"
        )
    return result


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge results. A row that was measured again replaces the older row. The hardware and
    versions are those of the first result."""
    rows = {(*key(row), row["variant"]): row for result in results for row in result["rows"]}
    return {"meta": results[0]["meta"], "rows": list(rows.values())}


def write_csv(result: dict[str, Any], path: str | Path) -> None:
    """Write the rows as CSV, with hardware, versions and date in each row."""
    about = {name: result["meta"].get(name) for name in META}
    rows = [
        {name: json.dumps(v) if isinstance(v, dict) else f"{v:.6g}" if isinstance(v, float) else v for name, v in row}
        for row in ((_flat(row, result["meta"]) | about).items() for row in result["rows"])
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    export(path, text.getvalue())


def _flat(row: Row, meta: dict[str, Any]) -> Row:
    """A step's breakdown and losses in columns of their own; a row of an operator as it is."""
    if "model" not in row:
        return row
    flat = {k: v for k, v in row.items() if k not in ("breakdown_ms", "losses")}
    flat |= {k: row.get(k, meta.get(k)) for k in ("data", "lengths", "masked", "optimizer")}
    flat |= {f"{kind}_ms": ms for kind, ms in (row.get("breakdown_ms") or {}).items()}
    return flat | {f"loss_{i}": loss for i, loss in enumerate(row.get("losses") or ())}


def _of_csv(path: Path) -> dict[str, Any]:
    """Read a result from its CSV, which has the versions in each row."""
    with open(path, newline="") as file:
        found = [
            {name: _parsed(name, text or "") for name, text in line.items()}
            for line in csv.DictReader(file, strict=True)
        ]
    if any(None in line for line in found):
        raise ValueError("a line has more values than there are names")
    rows = []
    for line in found:
        row = {name: value for name, value in line.items() if name not in META}
        kinds = [name for name in row if name.endswith("_ms") and name not in TIMES]
        breakdown = {name.removesuffix("_ms"): row.pop(name) for name in kinds}
        known = any(value is not None for value in breakdown.values())
        rows.append(row | ({"breakdown_ms": breakdown} if known else {}))
    return {"meta": {name: found[0].get(name) for name in META} if found else {}, "rows": rows}


def _parsed(name: str, text: str) -> Any:
    if name in WORDS or not text:
        return text or None
    if text in ("True", "False"):
        return text == "True"
    with contextlib.suppress(ValueError):
        return json.loads(text) if text[0] in "{-0123456789" else text
    return text
