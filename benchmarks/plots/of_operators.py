"""Plots of operators: bars and sweeps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from labels import MODES, hardware_line, variant_label

from liger_kernel.bench.results import OURS, Row, usable, with_ours
from plots.drawing import Bars, Curves, Data, Line, Plot, bars, finding, name_of, order


def operators(data: Data) -> Iterator[Plot]:
    """Plots of operator results: ``time-OP-DTYPE``, ``memory-OP-DTYPE`` if memory could be measured,
    ``tokens-OP-DTYPE-MODE`` and the like of a sweep."""
    for op in dict.fromkeys(row["op"] for row in data["rows"]):
        one = {**data, "rows": [row for row in data["rows"] if row["op"] == op]}
        yield from _operator_bars(one, "time", "device_ms")
        yield from _operator_bars(one, "memory", "peak_mb")
        yield from _sweeps(one)


def _operator_bars(data: Data, kind: str, name: str) -> Iterator[Plot]:
    plain = [row for row in data["rows"] if not row.get("sweep")]
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in plain):
        rows = [row for row in plain if (row["op"], row["dtype"]) == (op, dtype)]
        if not any(row.get(name) for row in rows):
            continue
        modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
        cases = list(dict.fromkeys(row["case"] for row in rows))
        present = {case: order(row for row in rows if row["case"] == case) for case in cases}
        judged = [row for row in rows if row["mode"] == modes[-1]]
        what = "device time" if name == "device_ms" else "peak memory beyond the inputs, results and gradients included"
        floors = any(row.get("floor_ms") for row in rows) and name == "device_ms"
        words = f"{what}, {dtype}{f', {MODES[modes[0]]}' if len(modes) == 1 else ''}; x: multiples of ours" + (
            "; upright lines: the floor" if floors else ""
        )
        title = f"{op}: {finding(judged, name)}" + (f" ({MODES[modes[-1]]})" if len(modes) > 1 else "")
        lines: list[list[Bars]] = []
        for case in cases:
            lines.append([])
            for mode in modes:
                pairs = {
                    row["variant"]: (row, ours)
                    for row, ours in with_ours(rows)
                    if (row["case"], row["mode"]) == (case, mode)
                }
                shown = [pairs.get(variant, ({"variant": variant}, None)) for variant in present[case]]
                floor = next((row["floor_ms"] for row, _ in shown if row.get("floor_ms")), None) if floors else None
                heading = f"{case}, {MODES[mode]}" if len(modes) > 1 else f"{case}   {_shapes(shown)}"
                lines[-1].append(Bars(heading, shown, name, floor))
        yield bars(name_of(kind, op, dtype), lines, title, words, hardware_line(data.get("meta", {})))


def _shapes(shown: Iterable[tuple[Row, Row | None]]) -> str:
    shape: dict[str, Any] = next((row["shape"] for row, _ in shown if row.get("shape")), {})
    text = ", ".join(f"{name} {'x'.join(map(str, dims))}" for name, dims in shape.items() if dims)
    return textwrap.shorten(text, 64, placeholder=" …")


def _sweeps(data: Data) -> Iterator[Plot]:
    """Time and memory against tokens or vocabulary, for the rows of a ``sweep``."""
    swept = [row for row in data["rows"] if row.get("sweep")]
    for identity in dict.fromkeys((row["sweep"], row["op"], row["dtype"], row["mode"]) for row in swept):
        sweep, op, dtype, mode = identity
        rows = _with_x([row for row in swept if (row["sweep"], row["op"], row["dtype"], row["mode"]) == identity])
        measures = [name for name in ("device_ms", "peak_mb") if any(row.get(name) for row in rows)]
        if len({row["x"] for row in rows}) < 2 or not measures:
            continue
        largest = max([row["x"] for row in rows if row["variant"] == OURS] or [row["x"] for row in rows])
        parts = [finding([row for row in rows if row["x"] == largest], name) for name in measures]
        where = f"{largest:,} tokens" if sweep == "tokens" else f"{sweep} {largest:,}"
        title = f"{op} at {where}: {'; '.join(dict.fromkeys(parts))}"
        words = f"against {sweep}, {dtype}, {MODES.get(mode, mode)}; both axes logarithmic"
        panels = [_curves(rows, name, sweep) for name in measures]
        yield Plot(name_of(sweep, op, dtype, mode), title, words, hardware_line(data.get("meta", {})), [panels])


def _curves(rows: list[Row], name: str, sweep: str) -> Curves:
    lines = []
    for variant in order(rows):
        mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["x"])
        points = [(row["x"], row[name], usable(row)) for row in mine if not row.get("failed") and row.get(name)]
        good, hollow = ([(x, y) for x, y, right in points if right is kept] for kept in (True, False))
        failed = [row["x"] for row in mine if row.get("failed")]
        said = variant_label(variant) + (f", failed at {min(failed):,}" if failed else "")
        if points:
            lines.append(Line(variant, said + (", hollow: inaccurate" if hollow else ""), good, hollow))
    floor = sorted({(row["x"], row["floor_ms"]) for row in rows if row.get("floor_ms")}) if name == "device_ms" else []
    if floor:
        lines.append(Line("", "floor", floor))
    words = "device time, ms" if name == "device_ms" else "peak memory beyond the inputs, MB"
    return Curves(words, lines, sweep, sorted({row["x"] for row in rows}), log=True)


def _with_x(rows: list[Row]) -> list[Row]:
    """The rows with ``x``. If they have none, it is the one dimension in which their shapes
    differ."""
    if all(row.get("x") is not None for row in rows):
        return rows
    dims = [[dim for shape in (row.get("shape") or {}).values() for dim in shape or ()] for row in rows]
    differing = [i for i in range(min(map(len, dims))) if len({line[i] for line in dims}) > 1]
    return [{**row, "x": line[differing[0]]} for row, line in zip(rows, dims)] if differing else []
