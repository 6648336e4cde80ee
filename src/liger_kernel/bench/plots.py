"""Pictures of benchmark results: PNG files out of the dicts that ``liger bench`` and ``liger bench step`` write.

Every function takes such a dict and a directory and returns the paths it wrote, none if there is nothing to draw. Titles state the finding.
Variants that failed or are inaccurate are hatched and named so; they never have a ratio.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_kernel.bench.rows import MODES, OURS, Row, digits, hardware_line, key, ratio, span, speedup, status, times, usable, variant_label, with_ours

Data = dict[str, Any]

# As in the plot of ``liger demo``.
INK, QUIET, FAINT, WHITE = "#24292f", "#8c959f", "#e4e8ec", "#ffffff"
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.edgecolor": QUIET, "axes.labelcolor": QUIET,
         "xtick.color": QUIET, "ytick.color": QUIET, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.8,
         "legend.frameon": False, "axes.titlelocation": "left", "axes.titlesize": 9}  # fmt: skip
COLOURS = {
    "ours": "#0a7d6c",
    "ours+compile": "#4aa395",
    "ours+layers": "#6db8ab",
    "base": "#8cc5bb",
    "upstream": "#d39a3a",
    "upstream+compile": "#e6c68f",
    "upstream+layers": "#f0dcb8",
    "compile": "#66768a",
    "layers": "#8793a2",
    "torch": "#8fa9c9",
    "cce": "#a8678f",
    "quack": "#bd6a4c",
    "eager": "#b6bec8",
    "stock": "#b6bec8",
}
# Kinds of device time: in teal what our kernels replace, in greys what they leave alone.
KINDS = {"gemm": "#66768a", "attention": "#8793a2", "optimizer": "#a7b0bb", "communication": "#c3cad2", "other": "#dbe0e5",
         "loss": "#0a7d6c", "norm": "#45a191", "activation": "#7dbfb2", "rope": "#b3dad2", "idle": "#ffffff"}  # fmt: skip
MAIN_RIVALS = ("upstream", "compile", "eager", "stock")
CUT = 4.0  # a bar so many times as long as the next shorter one is cut, or the others would be too short to compare
VISIBLE = 0.02  # a spread below this is no wider than a line


def operators(data: Data, out: Path | str) -> list[Path]:
    """All pictures of operator results."""
    paths = roofline(data, out)
    for op in dict.fromkeys(row["op"] for row in data["rows"]):
        one = {**data, "rows": [row for row in data["rows"] if row["op"] == op]}
        paths += [*time_bars(one, out), *memory_bars(one, out), *sweeps(one, out)]
    return paths


def steps(data: Data, out: Path | str) -> list[Path]:
    """All pictures of training steps."""
    swept = {id(row) for rows in _swept(data).values() for row in rows}
    single = {**data, "rows": [row for row in data["rows"] if id(row) not in swept]}
    return [*step_bars(single, out), *breakdown(single, out), *timelines(single, out), *batch_curves(data, out)]


# -- drawing


@contextlib.contextmanager
def _figure(path: Path, width: float, height: float, title: str, subtitle: str, note: str) -> Iterator[Any]:
    """A figure of ``height`` inches plus its words, saved to ``path`` at the end; layout is automatic and global settings are left alone."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib (or 'liger-kernel[train]')") from None
    lines, smaller = textwrap.wrap(title, int((width - 0.3) / 0.091)), textwrap.wrap(subtitle, int((width - 0.3) / 0.072))
    above, below = 0.16 + 0.2 * len(lines) + 0.17 * len(smaller) + 0.12, 0.3
    total = height + above + below
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, total), dpi=160)
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", rect=(0.01, below / total, 0.98, height / total), w_pad=0.06, h_pad=0.05, hspace=0.0, wspace=0.03)
        figure.text(0.12 / width, 1 - 0.13 / total, "\n".join(lines), fontsize=11, fontweight="bold", va="top", linespacing=1.25)
        figure.text(0.12 / width, 1 - (0.18 + 0.2 * len(lines)) / total, "\n".join(smaller), fontsize=8.5, color=QUIET, va="top", linespacing=1.3)
        figure.text(0.12 / width, 0.1 / total, note, fontsize=7.5, color=QUIET, va="bottom")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor=WHITE)


def _path(out: Path | str, *parts: Any) -> Path:
    return Path(out) / ("-".join(re.sub(r"[^\w.+]+", "_", str(part)) for part in parts if part) + ".png")


def _colour(variant: str) -> str:
    return COLOURS.get(variant, QUIET)


def _order(rows: Iterable[Row]) -> list[str]:
    """The variants of some rows, in the order of the colours."""
    present = dict.fromkeys(row["variant"] for row in rows)
    return [*[name for name in COLOURS if name in present], *[name for name in present if name not in COLOURS]]


def _limit(values: Iterable[float | None], mark: float = 0.0) -> float:
    """Where the longest bar ends: at the largest value, or before it if that would leave the others too short to compare."""
    known = sorted(value for value in values if value)
    limit = max([*known[-1:], mark]) or 1.0
    for shorter, longer in itertools.pairwise(known[(len(known) - 1) // 2 :]):
        if longer > CUT * shorter:
            return max(1.3 * shorter, mark)
    return limit


def _value(row: Row, name: str) -> float | None:
    return None if row.get("failed") else row.get(name)


@dataclass
class _Panel:
    """Bars of ``row[name]`` for some (row, row of ours), with a line at ``floor``."""

    heading: str
    pairs: list[tuple[Row, Row | None]]
    name: str
    floor: float | None = None

    @property
    def limit(self) -> float:
        return _limit([_value(row, self.name) for row, _ in self.pairs], self.floor or 0.0)


def _bars(path: Path, lines: list[list[_Panel]], title: str, words: str, note: str) -> Path:
    """Write a table of panels, one line of it for each case or model."""
    every = [(panel, row) for line in lines for panel in line for row, _ in panel.pairs]
    spread = any(panel.name == "device_ms" and (row.get("device_spread") or 0.0) > VISIBLE for panel, row in every)
    cut = any((_value(row, panel.name) or 0.0) > panel.limit for panel, row in every)
    words += ("; whiskers: interquartile range, where above 2 %" if spread else "") + ("; bars with a gap are cut" if cut else "")
    heights, columns = [len(line[0].pairs) for line in lines], len(lines[0])
    width = {1: 7.0, 2: 9.5}.get(columns, 12.0)
    with _figure(path, width, 0.2 * sum(heights) + 0.34 * len(heights), title, words, note) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=[n + 0.2 for n in heights])
        for line, panels in zip(grid, lines):
            for axes, panel in zip(line, panels):
                _panel(axes, (width - 1.2) / columns, panel, named=axes is line[0])
    return path


def _panel(axes: Any, inches: float, panel: _Panel, named: bool) -> None:
    limit, floor = panel.limit, panel.floor
    for y, (row, mine) in enumerate(panel.pairs):
        value, colour, right = _value(row, panel.name), _colour(row["variant"]), usable(row)
        end = length = min(value, limit) if value is not None else 0.025 * limit
        look = {"color": colour} if right else {"facecolor": WHITE, "edgecolor": colour, "hatch": "//////", "linewidth": 1.0}
        axes.barh(y, length, height=0.74, **look)
        spread = (row.get("device_spread") or 0.0) if panel.name == "device_ms" and right else 0.0
        if value is not None and value > limit:
            axes.plot([0.955 * limit, 0.97 * limit], [y + 0.5, y - 0.5], color=WHITE, linewidth=2.2, solid_capstyle="butt")
        elif value is not None and spread > VISIBLE:
            end = min(value * (1 + spread / 2), max(limit, value))
            axes.plot([max(0.0, value * (1 - spread / 2)), end], [y, y], color=INK, linewidth=0.9, solid_capstyle="butt")
        if floor and 0.98 * end < floor < 1.15 * end:
            end = floor  # words are clear of the line
        ink, weight = _words_of(row["variant"]) if right else (QUIET, "normal")
        axes.text(end + 0.02 * limit, y, bar_label(row, mine, panel.name), va="center", fontsize=8, color=ink, fontweight=weight)
    if floor:
        axes.plot([floor, floor], [-0.5, len(panel.pairs) - 0.5], color=INK, linewidth=1.1, linestyle=(0, (3, 2)))
    axes.set(xlim=(0, limit / (1 - 1.65 / inches)), xticks=[])  # 1.65 inches of words
    axes.set_title(panel.heading, color=INK, pad=3)
    _names(axes, [variant_label(row["variant"]) if named else "" for row, _ in panel.pairs])


def _names(axes: Any, labels: Sequence[str]) -> None:
    """Names of horizontal bars; the first is at the top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["bottom"].set_visible(False)


def _words_of(variant: str) -> tuple[str, str]:
    """Colour and weight of words about a variant: ours stands out."""
    return (_colour(OURS), "bold") if variant == OURS else (INK, "normal")


# -- operators: bars


def time_bars(data: Data, out: Path | str) -> list[Path]:
    """Device time per case, one file per operator and dtype: ``time-OP-DTYPE.png``."""
    return _operator_bars(data, out, "time", "device_ms")


def memory_bars(data: Data, out: Path | str) -> list[Path]:
    """Peak memory beyond the inputs, likewise: ``memory-OP-DTYPE.png``; none where nothing could be measured."""
    return _operator_bars(data, out, "memory", "peak_mb")


def bar_label(row: Row, ours: Row | None, name: str) -> str:
    """The words at the end of a bar: the value, and its ratio to ours if both are usable."""
    if not usable(row):
        return "failed" if row.get("failed") else "inaccurate"
    unit = {"device_ms": "ms", "peak_mb": "MB", "tokens_per_s": "tokens/s", "peak_allocated_gb": "GB", "mfu": "%"}[name]
    value = row.get(name)
    if value is None:
        return "not measured"
    shown = f"{value:,.0f}" if name in ("tokens_per_s", "peak_mb") else digits(100 * value if name == "mfu" else value)
    against = speedup(row, ours) if name == "tokens_per_s" else ratio(row, ours, name) if name != "mfu" else None
    floor = row.get("percent_of_floor") if name == "device_ms" and row["variant"] == OURS else None
    return f"{shown} {unit}" + (f"   {times(against)}" if against else "") + (f"   {floor:.0f} % of floor" if floor else "")


def finding(rows: Iterable[Row], name: str) -> str:
    """The title: how ours compares to each main rival, over the given rows."""
    pairs = with_ours(rows)
    broken = [row for row, _ in pairs if row["variant"] == OURS and not usable(row)]
    if broken:
        return f"ours is {status(broken[0]).split(':')[0]} in {len(broken)} of {sum(row['variant'] == OURS for row, _ in pairs)} cases"
    parts = []
    what = "speed" if name == "device_ms" else "memory"
    for rival in [*MAIN_RIVALS, *(other for other in COLOURS if other not in (*MAIN_RIVALS, OURS))]:
        mine = [(row, ours) for row, ours in pairs if row["variant"] == rival and usable(row) and ours]
        found = [value if what == "speed" else 1 / value for row, ours in mine if (value := ratio(row, ours, name))]
        free = what == "memory" and any(row.get(name) == 0 < (ours.get(name) or 0) for row, ours in mine)
        if found or free:
            parts.append(f"{variant_label(rival)} needs none" if free else f"{span(found)} the {what} of {variant_label(rival)}")
    first, of, rest = ", ".join(parts[:3]).partition(f" the {what} of ")
    return first + of + (rest.replace(of, " of ") if of else "") if parts else "no variant to compare with"


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
        words = f"{what}, {dtype}{f', {MODES[modes[0]]}' if len(modes) == 1 else ''}; x: multiples of ours" + ("; dashed: the floor" if floors else "")
        title = f"{op}: {finding(judged, name)}" + (f" ({MODES[modes[-1]]})" if len(modes) > 1 else "")
        lines: list[list[_Panel]] = []
        for case in cases:
            lines.append([])
            for mode in modes:
                pairs = {row["variant"]: (row, ours) for row, ours in with_ours(rows) if (row["case"], row["mode"]) == (case, mode)}
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


# -- operators: sweeps


def sweeps(data: Data, out: Path | str) -> list[Path]:
    """Time and memory against tokens or vocabulary, of rows whose ``sweep`` says so: ``tokens-OP-DTYPE-MODE.png``."""
    paths = []
    swept = [row for row in data["rows"] if row.get("sweep")]
    for identity in dict.fromkeys((row["sweep"], row["op"], row["dtype"], row["mode"]) for row in swept):
        sweep, op, dtype, mode = identity
        rows = _with_x([row for row in swept if (row["sweep"], row["op"], row["dtype"], row["mode"]) == identity])
        measures = [name for name in ("device_ms", "peak_mb") if any(row.get(name) for row in rows)]
        if len({row["x"] for row in rows}) < 2 or not measures:
            continue
        largest = max(row["x"] for row in rows if row["variant"] == OURS) if any(row["variant"] == OURS for row in rows) else max(row["x"] for row in rows)
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
    """Rows with ``x``, which is otherwise the one dimension of their shapes that differs."""
    if all(row.get("x") is not None for row in rows):
        return rows
    dims = [[dim for shape in (row.get("shape") or {}).values() for dim in shape or ()] for row in rows]
    differing = [i for i in range(min(map(len, dims))) if len({line[i] for line in dims}) > 1]
    return [{**row, "x": line[differing[0]]} for row, line in zip(rows, dims)] if differing else []


def _lines(axes: Any, rows: list[Row], name: str, sweep: str) -> None:
    axes.set_title("device time, ms" if name == "device_ms" else "peak memory beyond the inputs, MB", color=INK, pad=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for variant in reversed(_order(rows)):
        mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["x"])
        good = [(row["x"], row[name]) for row in mine if usable(row) and row.get(name)]
        wrong = [(row["x"], row[name]) for row in mine if not row.get("failed") and not usable(row) and row.get(name)]
        failed = [row["x"] for row in mine if row.get("failed")]
        front = variant == OURS
        axes.plot(
            *zip(*good) if good else ([], []),
            color=_colour(variant),
            linewidth=2.4 if front else 1.6,
            marker="o",
            markersize=5 if front else 3.5,
            zorder=3 if front else 2,
        )
        axes.plot(*zip(*wrong) if wrong else ([], []), color=_colour(variant), linestyle="none", marker="o", markersize=4.5, markerfacecolor=WHITE)
        if good or wrong:
            words = variant_label(variant) + (f", failed at {min(failed):,}" if failed else "") + (", hollow: inaccurate" if wrong else "")
            ends.append((*(good or wrong)[-1], words, variant))
    floor = sorted({(row["x"], row["floor_ms"]) for row in rows if row.get("floor_ms")}) if name == "device_ms" else []
    if floor:
        axes.plot(*zip(*floor), color=INK, linewidth=1.0, linestyle=(0, (3, 2)))
        ends.append((*floor[-1], "floor", ""))
    xs = sorted({row["x"] for row in rows})
    labels, last = [], 0.0
    for x in xs:
        label = f"{x // 1024}k" if x >= 1024 and x & (x - 1) == 0 else f"{x / 1000:.0f}k" if x >= 10000 else f"{x:,}"
        labels.append(label if not last or math.log(x / last) > 0.1 * math.log(xs[-1] / xs[0]) else "")
        last = x if labels[-1] else last
    axes.set_xticks(xs, labels)
    axes.minorticks_off()
    axes.set_xlim(xs[0] / 1.1, xs[-1] * 1.1)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for power in range(-6, 9) for digit in ((1, 2, 5) if high < 300 * low else (1,)) if low <= (tick := digit * 10.0**power) <= high])
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel(sweep)
    _end_labels(axes, ends)


def _plain(value: float, _: Any = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _end_labels(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Name each line at the right margin, moved apart where the names would overlap; ``ends`` are (x, y, words, variant)."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[1])
    scale = math.log if axes.get_yscale() == "log" else float
    places = [(scale(y) - scale(low)) / (scale(high) - scale(low)) for _, y, _, _ in ends]
    for _ in range(200):
        for i in range(len(places) - 1):
            short = (0.058 - (places[i + 1] - places[i])) / 2
            if short > 0:
                places[i], places[i + 1] = places[i] - short, places[i + 1] + short
    for place, (_, _, words, variant) in zip(places, ends):
        axes.annotate(words, (1.0, place), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                      color=_dark(_colour(variant)) if variant else INK, fontweight=_words_of(variant)[1])  # fmt: skip


def _light(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 765


def _dark(colour: str) -> str:
    """The colour, dark enough for words on white."""
    share = min(1.0, 0.45 / _light(colour))
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * share):02x}" for i in (1, 3, 5))


# -- operators: roofline


def roofline(data: Data, out: Path | str) -> list[Path]:
    """FLOPs per byte against TFLOP/s, the largest case of every operator, below the measured roof: ``roofline.png``."""
    meta = data.get("meta", {})
    drawn = [row for row in data["rows"] if usable(row) and row.get("tflop_s") and row.get("flops") and row.get("bytes")]
    groups: dict[tuple[str, str], list[Row]] = {}
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in drawn):
        rows = [row for row in drawn if (row["op"], row["dtype"]) == (op, dtype) and not row.get("sweep")]
        if rows:
            mode = max((row["mode"] for row in rows), key=lambda mode: list(MODES).index(mode))
            largest = key(max((row for row in rows if row["mode"] == mode), key=lambda row: (row["bytes"], row["flops"])))
            groups[op, dtype] = [row for row in rows if key(row) == largest]
    if not groups or not meta.get("copy_tb_s"):
        return []
    peak = meta.get("gemm_tflops") or max(row["tflop_s"] for row in drawn)
    bandwidth, several = meta["copy_tb_s"], len({dtype for _, dtype in groups}) > 1
    roof = lambda x: min(peak, x * bandwidth)
    reached = lambda row: 100 * row["tflop_s"] / roof(_intensity(row))
    named = {op + (f" {dtype}" if several else ""): rows for (op, dtype), rows in sorted(groups.items(), key=lambda group: _intensity(group[1][0]))}
    ours = [reached(row) for rows in named.values() for row in rows if row["variant"] == OURS]
    title = "Roofline" + (f": ours reaches {min(ours):.0f}–{max(ours):.0f} % of what the machine can do" if len(ours) > 1 else "")
    words = "largest case of each operator; the roof: copy bandwidth and rate of a large GEMM, both measured; right: the same dots in percent of the roof"
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
    high, names = 4 * max(max(map(_intensity, rows)), ridge), 0.2 + 0.075 * max(map(len, named))  # inches left of the first dot, for the names
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
    figure.set_layout_engine("none")  # what follows depends on where things are now
    start, end = axes.transData.transform([(low, low * bandwidth), (ridge, peak)])
    along = (end - start) / math.hypot(*(end - start))
    anchor = axes.transData.inverted().transform(start + 0.75 * (end - start) + 6 * along[::-1] * (-1, 1))
    angle = math.degrees(math.atan2(along[1], along[0]))
    axes.text(*anchor, f"copy {digits(bandwidth)} TB/s", rotation=angle, rotation_mode="anchor", ha="center", va="bottom", fontsize=8, color=QUIET)
    axes.text(1.1 * ridge, 1.1 * peak, f"GEMM {digits(peak)} TFLOP/s", fontsize=8, color=QUIET)
    dots = [(_intensity(group[0]), max(row["tflop_s"] for row in group), name) for name, group in named.items()]
    _label_dots(figure, axes, dots, lambda x: min(peak, x * bandwidth))


def _dot(axes: Any, x: float, y: float, variant: str) -> None:
    front = variant == OURS
    axes.scatter(x, y, s=64 if front else 30, color=_colour(variant), edgecolor=WHITE, linewidth=0.8, zorder=5 if front else 4, clip_on=False)


def _percent_of_roof(axes: Any, named: dict[str, list[Row]], reached: Callable[[Row], float]) -> None:
    for y, rows in enumerate(named.values()):
        axes.axhline(y, color=FAINT, linewidth=0.8, zorder=1)
        for row in rows:
            _dot(axes, reached(row), y, row["variant"])
    axes.axvline(100, color=INK, linewidth=1.2, zorder=1)
    axes.set(xlim=(0, max(104, 1.03 * max(reached(row) for rows in named.values() for row in rows))), xlabel="% of the roof")
    _names(axes, list(named))
    axes.spines["bottom"].set_visible(True)


def _label_dots(figure: Any, axes: Any, dots: Sequence[tuple[float, float, str]], roof: Callable[[float], float]) -> None:
    """Stairs of names above the roof, to the left of vertical lines from the dots: nothing crosses anything. No name where there is no room."""
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
            if not any(box.padded(2).overlaps(other) for other in taken) and not any(box.padded(-1).overlaps(line) for line in lines if line.x0 != foot[0]):
                break
        if box.y1 > bounds.y1:
            label.remove()
            continue
        label.set_position(axes.transData.inverted().transform((box.x1, (box.y0 + box.y1) / 2)))
        axes.plot([x, x], [y, axes.transData.inverted().transform((foot[0], (box.y0 + box.y1) / 2))[1]], color=QUIET, linewidth=0.6, zorder=2)
        taken.append(box)
        lines.append(Bbox([[foot[0], foot[1]], [foot[0] + 1, box.y0]]))


# -- training steps


def step_bars(data: Data, out: Path | str) -> list[Path]:
    """Tokens per second and peak memory per model and variant: ``step.png``."""
    groups = _step_groups(data)
    if not groups:
        return []
    title = f"Training steps: {_step_finding(data['rows'])}"
    words = "left tokens per second, x: ours is so many times as fast; right peak allocated memory, x: multiples of ours"
    lines = []
    for heading, rows in groups.items():
        ours = next((row for row in rows if row["variant"] == OURS), None)
        pairs = [(row, ours) for row in rows]
        lines.append([_Panel(heading, pairs, "tokens_per_s"), _Panel("peak memory", pairs, "peak_allocated_gb")])
    return [_bars(_path(out, "step"), lines, title, words, hardware_line(data.get("meta", {})))]


def _place(row: Row) -> str:
    """Model, rows and what else steps must share to be compared, but for the batch."""
    parts = [f"{row['gpus']} GPUs {row.get('parallel') or ''}".rstrip() if (row.get("gpus") or 1) > 1 else ""]
    parts += ["checkpointing" if row.get("checkpointing") else "", f"LoRA {row['lora']}" if row.get("lora") else ""]
    return "".join(f", {part}" for part in parts if part)


def _swept(data: Data) -> dict[str, list[Row]]:
    """Heading -> rows that differ in their batch."""
    groups: dict[str, list[Row]] = {}
    for row in data["rows"]:
        if "model" in row:
            groups.setdefault(f"{row['model']}, rows of {row['seq']}{_place(row)}", []).append(row)
    return {heading: rows for heading, rows in groups.items() if len({row["batch"] for row in rows}) > 1}


def batch_curves(data: Data, out: Path | str) -> list[Path]:
    """Tokens per second and peak memory against the batch, until memory is out: ``batches-MODEL.png``."""
    swept, paths = _swept(data), []
    for model in dict.fromkeys(rows[0]["model"] for rows in swept.values()):
        groups = {heading: rows for heading, rows in swept.items() if rows[0]["model"] == model}
        measured = sorted((row for rows in groups.values() for row in rows if _value(row, "tokens_per_s")), key=lambda row: row["batch"])
        most = {row["variant"]: row["batch"] for row in measured}
        title = f"{model}: rows a GPU that fit, of those tried: " + ", ".join(
            f"{variant_label(name)} {most[name]}" for name in _order(data["rows"]) if name in most
        )
        path = _path(out, "batches", model)
        with _figure(
            path, 10.8, 3.4 * len(groups), title, "against rows a GPU; a line ends where memory is out", hardware_line(data.get("meta", {}))
        ) as figure:
            for line, (heading, rows) in zip(figure.subplots(len(groups), 2, squeeze=False), groups.items()):
                for axes, name, words in zip(line, ("tokens_per_s", "peak_allocated_gb"), ("tokens per second", "peak memory a GPU, GB")):
                    _curves(axes, rows, name)
                    axes.set_title(f"{heading[len(model) + 2 :]}: {words}", color=INK, pad=6)
        paths.append(path)
    return paths


def _curves(axes: Any, rows: list[Row], name: str) -> None:
    ends = []
    for variant in reversed(_order(rows)):
        mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["batch"])
        good = [(row["batch"], row[name]) for row in mine if _value(row, name) and row.get("accurate") is not False]
        failed = [row["batch"] for row in mine if row.get("failed")]
        if good:
            axes.plot(
                *zip(*good), color=_colour(variant), linewidth=2.4 if variant == OURS else 1.6, marker="o", markersize=4, zorder=3 if variant == OURS else 2
            )
            ends.append((*good[-1], variant_label(variant) + (f", not {min(failed):,}" if failed else ""), variant))
    axes.set_xlim(0, 1.04 * max(row["batch"] for row in rows))
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel("rows a GPU")
    _end_labels(axes, ends)


def _step_groups(data: Data) -> dict[str, list[Row]]:
    """Heading -> its rows, in the order of the variants."""
    groups: dict[str, list[Row]] = {}
    for row in data["rows"]:
        groups.setdefault(f"{row['model']}, {row['batch']} x {row['seq']}{_place(row)}", []).append(row)
    return {heading: sorted(rows, key=lambda row: _order(rows).index(row["variant"])) for heading, rows in groups.items()}


def _step_finding(rows: Iterable[Row]) -> str:
    pairs = with_ours(rows)
    parts = []
    for rival in MAIN_RIVALS:
        mine = [(row, ours) for row, ours in pairs if row["variant"] == rival]
        fast = [value for row, ours in mine if (value := speedup(row, ours))]
        lean = [1 / value for row, ours in mine if (value := ratio(row, ours, "peak_allocated_gb"))]
        if fast:
            memory = f" with {span(lean)} the memory" if lean else ""
            parts.append((rival, f"{span(fast)} as fast as {variant_label(rival)}{memory}"))
    chosen = [text for rival, text in parts if rival in ("stock", "eager")] + [text for rival, text in parts if rival not in ("stock", "eager")]
    return ", ".join(chosen[:2]) or "no variant to compare with"


def breakdown(data: Data, out: Path | str) -> list[Path]:
    """Where the device time of a step goes, in stacked bars: ``breakdown.png``."""
    timed = [row for row in data["rows"] if row.get("breakdown_ms") and not row.get("failed")]
    groups = _step_groups({"rows": timed})
    if not groups:
        return []
    shares = {name: [_replaced(row["breakdown_ms"]) for row in timed if row["variant"] == name] for name in ("stock", "eager", OURS)}
    base = "stock" if shares["stock"] else "eager"
    percent = lambda values: "–".join(dict.fromkeys(f"{100 * value:.0f}" for value in (min(values), max(values))))
    title = "Where the time of a training step goes"
    if shares[base] and shares[OURS]:
        title = f"Norms, activations, rope and loss take {percent(shares[base])} % of {variant_label(base)}'s step and {percent(shares[OURS])} % of ours"
    kinds = [
        kind
        for kind in dict.fromkeys([*KINDS, *(kind for row in timed for kind in row["breakdown_ms"])])
        if any(row["breakdown_ms"].get(kind) for row in timed)
    ]
    path, words, note = _path(out, "breakdown"), "ms of device time per step; teal: what our kernels replace", hardware_line(data.get("meta", {}))
    with _figure(path, 9.5, 0.27 * len(timed) + 0.36 * len(groups) + 0.3, title, words, note) as figure:
        from matplotlib.patches import Patch

        top, *grid = figure.subplots(len(groups) + 1, 1, height_ratios=[0.6, *(len(rows) + 0.2 for rows in groups.values())])
        patches = [Patch(facecolor=KINDS.get(kind, FAINT), edgecolor=QUIET if kind == "idle" else "none", label=kind) for kind in kinds]
        top.legend(handles=patches, loc="upper left", ncols=len(kinds), fontsize=8, labelcolor=INK, handlelength=0.9, handleheight=0.9,
                   columnspacing=1.3, handletextpad=0.5, borderpad=0, borderaxespad=0)  # fmt: skip
        top.set_axis_off()
        for axes, (heading, rows) in zip(grid, groups.items()):
            longest = max(sum(filter(None, row["breakdown_ms"].values())) for row in rows)
            for y, row in enumerate(rows):
                _stack(axes, y, row, kinds, longest)
            axes.set(xlim=(0, 1.1 * longest), xticks=[])
            axes.set_title(heading, color=INK, pad=3)
            _names(axes, [variant_label(row["variant"]) for row in rows])
    return [path]


def _stack(axes: Any, y: int, row: Row, kinds: Sequence[str], longest: float) -> None:
    left = 0.0
    for kind in kinds:
        value, colour = row["breakdown_ms"].get(kind) or 0.0, KINDS.get(kind, FAINT)
        axes.barh(y, value, left=left, height=0.76, color=colour, edgecolor=QUIET if kind == "idle" else WHITE, linewidth=0.6)
        if value > 0.045 * longest:
            axes.text(left + value / 2, y, digits(value), ha="center", va="center", fontsize=7.5, color=WHITE if _light(colour) < 0.56 else INK)
        left += value
    ink, weight = _words_of(row["variant"])
    axes.text(left + 0.008 * longest, y, f"{digits(left)} ms", va="center", fontsize=8, color=ink, fontweight=weight)


def _replaced(parts: dict[str, float | None]) -> float:
    """The share of a step that is of the kinds that our kernels replace."""
    return sum(parts.get(kind) or 0 for kind in ("loss", "norm", "activation", "rope")) / (sum(filter(None, parts.values())) or 1)


def timelines(data: Data, out: Path | str) -> list[Path]:
    """Memory over one training step, one file per model: ``memory_over_step-MODEL....png``."""
    paths = []
    drawn = [row for row in data["rows"] if not row.get("failed") and len(row.get("memory_timeline") or ()) > 1]
    for heading, rows in _step_groups({"rows": drawn}).items():
        peaks = {row["variant"]: max(row["memory_timeline"], key=lambda point: point[1]) for row in rows}
        base = next((name for name in ("stock", "eager", "upstream") if name in peaks), "")
        title = heading
        if base and OURS in peaks:
            (_, before, where), (_, after, there) = peaks[base], peaks[OURS]
            verb, unlike = "falls" if after < before else "rises", where != there
            title += f": the peak{'' if unlike else f', in {_phase(where)},'} {verb} from {digits(before)} GB"
            title += f" in {_phase(where)} to {digits(after)} GB in {_phase(there)}" if unlike else f" to {digits(after)} GB"
        path, words = _path(out, "memory over step", heading), "allocated memory over one training step, GB; below: what runs when"
        with _figure(path, 9.0, 3.3 + 0.2 * len(rows), title, words, hardware_line(data.get("meta", {}))) as figure:
            memory, phases = figure.subplots(2, 1, sharex=True, height_ratios=(3.0, 0.22 * len(rows)))
            longest = max(row["memory_timeline"][-1][0] for row in rows)
            handles = []
            for row in reversed(rows):  # ours is drawn last, over the others
                variant, points, front = row["variant"], row["memory_timeline"], row["variant"] == OURS
                label = f"{variant_label(variant)}: {digits(peaks[variant][1])} GB in {_phase(peaks[variant][2])}"
                handles += memory.plot([point[0] for point in points], [point[1] for point in points], color=_colour(variant), linewidth=2.2 if front else 1.6,
                                       label=label)  # fmt: skip
                _dot(memory, peaks[variant][0], peaks[variant][1], variant)
            memory.set(xlim=(0, 1.02 * longest), ylim=(0, 1.1 * max(size for _, size, _ in peaks.values())))
            memory.tick_params(axis="x", length=0)
            legend = memory.legend(
                handles=sorted(handles, key=lambda line: -max(line.get_ydata())), fontsize=8.5, title="peaks", title_fontsize=8.5, alignment="left"
            )
            legend.get_title().set_color(QUIET)
            for text, line in zip(legend.get_texts(), legend.legend_handles):
                text.set(color=_dark(line.get_color()), fontweight="bold" if line.get_color() == _colour(OURS) else "normal")
            for y, row in enumerate(rows):
                _phases(phases, y, row, longest)
            phases.set_xlabel("ms")
            _names(phases, [variant_label(row["variant"]) for row in rows])
            phases.spines["left"].set_visible(False)
            phases.spines["bottom"].set_visible(True)
        paths.append(path)
    return paths


def _phase(name: str) -> str:
    """``forward: loss`` in a sentence."""
    place, _, what = name.partition(": ")
    return f"{what} ({place})" if what else name


def _phases(axes: Any, y: int, row: Row, longest: float) -> None:
    """One line of segments: the phases of a step, named where there is room; the layers of a pass are one."""
    points = row["memory_timeline"]  # each has the phase that it ends or lies in
    begin = points[0][0]
    for number, (phase, group) in enumerate(itertools.groupby(points[1:], lambda point: re.sub(r"layer \d+$", "layers", point[2]))):
        end = list(group)[-1][0]
        axes.barh(y, end - begin, left=begin, height=0.8, color=FAINT if number % 2 else "#f1f3f5", edgecolor=WHITE, linewidth=0.5)
        room = (end - begin) / (0.0092 * longest)  # in characters
        text = next((text for text in (phase, phase.split(": ")[-1]) if len(text) <= room), "")
        axes.text((begin + end) / 2, y, text, ha="center", va="center", fontsize=7, color=_words_of(row["variant"])[0])
        begin = end
