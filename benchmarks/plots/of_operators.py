"""Plots of operators: bars and sweeps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labels import MODES, hardware_line

from liger_kernel.bench.results import OURS, Row, with_ours
from plots.drawing import Data, _bars, _figure, _lines, _order, _Panel, _path, finding


def operators(data: Data, out: Path | str) -> list[Path]:
    """All plots of operator results."""
    paths: list[Path] = []
    for op in dict.fromkeys(row["op"] for row in data["rows"]):
        one = {**data, "rows": [row for row in data["rows"] if row["op"] == op]}
        paths += [*time_bars(one, out), *memory_bars(one, out), *sweeps(one, out)]
    return paths


def time_bars(data: Data, out: Path | str) -> list[Path]:
    """Device time per case, one file per operator and dtype: ``time-OP-DTYPE.png``."""
    return _operator_bars(data, out, "time", "device_ms")


def memory_bars(data: Data, out: Path | str) -> list[Path]:
    """Peak memory in addition to the inputs per case: ``memory-OP-DTYPE.png``; no file if memory
    could not be measured."""
    return _operator_bars(data, out, "memory", "peak_mb")


def _operator_bars(data: Data, out: Path | str, kind: str, name: str) -> list[Path]:
    paths = []
    plain = [row for row in data["rows"] if not row.get("sweep")]
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in plain):
        rows = [row for row in plain if (row["op"], row["dtype"]) == (op, dtype)]
        if not any(row.get(name) for row in rows):
            continue
        modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
        cases = list(dict.fromkeys(row["case"] for row in rows))
        present = {case: _order(row for row in rows if row["case"] == case) for case in cases}
        judged = [row for row in rows if row["mode"] == modes[-1]]
        what = "device time" if name == "device_ms" else "peak memory beyond the inputs, results and gradients included"
        floors = any(row.get("floor_ms") for row in rows) and name == "device_ms"
        words = f"{what}, {dtype}{f', {MODES[modes[0]]}' if len(modes) == 1 else ''}; x: multiples of ours" + (
            "; dashed: the floor" if floors else ""
        )
        title = f"{op}: {finding(judged, name)}" + (f" ({MODES[modes[-1]]})" if len(modes) > 1 else "")
        lines: list[list[_Panel]] = []
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
                lines[-1].append(_Panel(heading, shown, name, floor))
        paths.append(_bars(_path(out, kind, op, dtype), lines, title, words, hardware_line(data.get("meta", {}))))
    return paths


def _shapes(shown: Iterable[tuple[Row, Row | None]]) -> str:
    shape: dict[str, Any] = next((row["shape"] for row, _ in shown if row.get("shape")), {})
    text = ", ".join(f"{name} {'x'.join(map(str, dims))}" for name, dims in shape.items() if dims)
    return textwrap.shorten(text, 64, placeholder=" …")


def sweeps(data: Data, out: Path | str) -> list[Path]:
    """Time and memory against tokens or vocabulary, for the rows of a ``sweep``:
    ``tokens-OP-DTYPE-MODE.png``."""
    paths = []
    swept = [row for row in data["rows"] if row.get("sweep")]
    for identity in dict.fromkeys((row["sweep"], row["op"], row["dtype"], row["mode"]) for row in swept):
        sweep, op, dtype, mode = identity
        rows = _with_x([row for row in swept if (row["sweep"], row["op"], row["dtype"], row["mode"]) == identity])
        measures = [name for name in ("device_ms", "peak_mb") if any(row.get(name) for row in rows)]
        if len({row["x"] for row in rows}) < 2 or not measures:
            continue
        largest = (
            max(row["x"] for row in rows if row["variant"] == OURS)
            if any(row["variant"] == OURS for row in rows)
            else max(row["x"] for row in rows)
        )
        judged = [row for row in rows if row["x"] == largest]
        parts = [finding(judged, name) for name in measures]
        where = f"{largest:,} tokens" if sweep == "tokens" else f"{sweep} {largest:,}"
        title = f"{op} at {where}: {'; '.join(dict.fromkeys(parts))}"
        words = f"against {sweep}, {dtype}, {MODES.get(mode, mode)}; both axes logarithmic"
        path = _path(out, sweep, op, dtype, mode)
        with _figure(path, 5.4 * len(measures), 3.5, title, words, hardware_line(data.get("meta", {}))) as figure:
            for axes, name in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures):
                _lines(axes, rows, name, sweep)
        paths.append(path)
    return paths


def _with_x(rows: list[Row]) -> list[Row]:
    """The rows with ``x``. If they have none, it is the one dimension in which their shapes
    differ."""
    if all(row.get("x") is not None for row in rows):
        return rows
    dims = [[dim for shape in (row.get("shape") or {}).values() for dim in shape or ()] for row in rows]
    differing = [i for i in range(min(map(len, dims))) if len({line[i] for line in dims}) > 1]
    return [{**row, "x": line[differing[0]]} for row, line in zip(rows, dims)] if differing else []
