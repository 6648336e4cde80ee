"""Plots of operators: bars, sweeps, rooflines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from liger_kernel.bench.plots.drawing import (
    FAINT,
    INK,
    QUIET,
    WHITE,
    Data,
    _bars,
    _colour,
    _figure,
    _lines,
    _names,
    _order,
    _Panel,
    _path,
    _plain,
    finding,
)
from liger_kernel.bench.rows import MODES, OURS, Row, digits, hardware_line, key, usable, variant_label, with_ours


def operators(data: Data, out: Path | str) -> list[Path]:
    """All plots of operator results."""
    paths = roofline(data, out)
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


def roofline(data: Data, out: Path | str) -> list[Path]:
    """TFLOP/s against FLOPs per byte for the largest case of every operator, below the measured
    roof: ``roofline.png``."""
    meta = data.get("meta", {})
    drawn = [
        row for row in data["rows"] if usable(row) and row.get("tflop_s") and row.get("flops") and row.get("bytes")
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in drawn):
        rows = [row for row in drawn if (row["op"], row["dtype"]) == (op, dtype) and not row.get("sweep")]
        if rows:
            mode = max((row["mode"] for row in rows), key=lambda mode: list(MODES).index(mode))
            largest = key(
                max((row for row in rows if row["mode"] == mode), key=lambda row: (row["bytes"], row["flops"]))
            )
            groups[op, dtype] = [row for row in rows if key(row) == largest]
    if not groups or not meta.get("copy_tb_s"):
        return []
    peak = meta.get("gemm_tflops") or max(row["tflop_s"] for row in drawn)
    bandwidth, several = meta["copy_tb_s"], len({dtype for _, dtype in groups}) > 1
    roof = lambda x: min(peak, x * bandwidth)
    reached = lambda row: 100 * row["tflop_s"] / roof(_intensity(row))
    named = {
        op + (f" {dtype}" if several else ""): rows
        for (op, dtype), rows in sorted(groups.items(), key=lambda group: _intensity(group[1][0]))
    }
    ours = [reached(row) for rows in named.values() for row in rows if row["variant"] == OURS]
    title = "Roofline" + (
        f": ours reaches {min(ours):.0f}–{max(ours):.0f} % of what the machine can do" if len(ours) > 1 else ""
    )
    words = (
        "largest case of each operator; the roof: copy bandwidth and rate of a large GEMM, both measured; right: "
        "the same dots in percent of the roof"
    )
    path = _path(out, "roofline")
    with _figure(path, 12.0, max(4.6, 0.24 * len(named) + 0.8), title, words, hardware_line(meta)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.9, 1.0))
        _percent_of_roof(right, named, reached)
        _roof(figure, left, named, peak, bandwidth)
    return [path]


def _intensity(row: Row) -> float:
    return row["flops"] / row["bytes"]


def _roof(figure: Any, axes: Any, named: dict[str, list[Row]], peak: float, bandwidth: float) -> None:
    rows, ridge = [row for group in named.values() for row in group], peak / bandwidth
    high, names = (
        4 * max(max(map(_intensity, rows)), ridge),
        0.2 + 0.075 * max(map(len, named)),
    )  # inches for names to the left of the first dot
    share = min(0.5, names / 6.2)
    low = min(math.exp((math.log(min(map(_intensity, rows))) - share * math.log(high)) / (1 - share)), ridge / 20)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(row["tflop_s"] for row in rows) / 2, 5 * peak))
    axes.set(xlabel="arithmetic intensity, FLOPs per byte", ylabel="TFLOP/s")
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color=INK, linewidth=1.2, zorder=1)
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    axes.minorticks_off()
    for group in named.values():
        heights = [row["tflop_s"] for row in group]
        axes.plot([_intensity(group[0])] * 2, [min(heights), max(heights)], color=FAINT, linewidth=1.5, zorder=1)
        for row in group:
            _dot(axes, _intensity(row), row["tflop_s"], row["variant"])
    handles = [axes.scatter([], [], s=40, color=_colour(name), label=variant_label(name)) for name in _order(rows)]
    axes.legend(handles=handles, loc="lower right", labelcolor=INK, fontsize=8.5)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # fix the layout: the labels below depend on positions
    start, end = axes.transData.transform([(low, low * bandwidth), (ridge, peak)])
    along = (end - start) / math.hypot(*(end - start))
    anchor = axes.transData.inverted().transform(start + 0.75 * (end - start) + 6 * along[::-1] * (-1, 1))
    angle = math.degrees(math.atan2(along[1], along[0]))
    axes.text(
        *anchor,
        f"copy {digits(bandwidth)} TB/s",
        rotation=angle,
        rotation_mode="anchor",
        ha="center",
        va="bottom",
        fontsize=8,
        color=QUIET,
    )
    axes.text(1.1 * ridge, 1.1 * peak, f"GEMM {digits(peak)} TFLOP/s", fontsize=8, color=QUIET)
    dots = [(_intensity(group[0]), max(row["tflop_s"] for row in group), name) for name, group in named.items()]
    _label_dots(figure, axes, dots, lambda x: min(peak, x * bandwidth))


def _dot(axes: Any, x: float, y: float, variant: str) -> None:
    front = variant == OURS
    axes.scatter(
        x,
        y,
        s=64 if front else 30,
        color=_colour(variant),
        edgecolor=WHITE,
        linewidth=0.8,
        zorder=5 if front else 4,
        clip_on=False,
    )


def _percent_of_roof(axes: Any, named: dict[str, list[Row]], reached: Callable[[Row], float]) -> None:
    for y, rows in enumerate(named.values()):
        axes.axhline(y, color=FAINT, linewidth=0.8, zorder=1)
        for row in rows:
            _dot(axes, reached(row), y, row["variant"])
    axes.axvline(100, color=INK, linewidth=1.2, zorder=1)
    axes.set(
        xlim=(0, max(104, 1.03 * max(reached(row) for rows in named.values() for row in rows))), xlabel="% of the roof"
    )
    _names(axes, list(named))
    axes.spines["bottom"].set_visible(True)


def _label_dots(
    figure: Any, axes: Any, dots: Sequence[tuple[float, float, str]], roof: Callable[[float], float]
) -> None:
    """Put names like stairs above the roof, to the left of vertical lines from the dots, so that
    nothing crosses. Names without space are omitted."""
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    bounds, taken = axes.get_window_extent(renderer), [text.get_window_extent(renderer) for text in axes.texts]
    lines: list[Any] = []
    for x, y, name in sorted(dots):
        foot, above = axes.transData.transform((x, y)), axes.transData.transform((x, roof(x)))[1]
        label = axes.text(x, y, name, fontsize=8.5, color=INK, va="center", ha="right")
        size = label.get_window_extent(renderer)
        for up in range(20, 600, 3):
            side = max(-3.0, bounds.x0 + 3 - size.x0)
            box = size.translated(side, above + up - foot[1])
            if not any(box.padded(2).overlaps(other) for other in taken) and not any(
                box.padded(-1).overlaps(line) for line in lines if line.x0 != foot[0]
            ):
                break
        if box.y1 > bounds.y1:
            label.remove()
            continue
        label.set_position(axes.transData.inverted().transform((box.x1, (box.y0 + box.y1) / 2)))
        axes.plot(
            [x, x],
            [y, axes.transData.inverted().transform((foot[0], (box.y0 + box.y1) / 2))[1]],
            color=QUIET,
            linewidth=0.6,
            zorder=2,
        )
        taken.append(box)
        lines.append(Bbox([[foot[0], foot[1]], [foot[0] + 1, box.y0]]))
