"""Figures, bars and lines for all plots."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labels import span, speedup, variant_label

from liger_kernel.bench.results import OURS, Row, digits, ratio, status, times, usable, with_ours
from liger_kernel.train.files import export

Data = dict[str, Any]
# The same colours as in the plot of ``liger demo``.
INK, QUIET, FAINT, WHITE = "#24292f", "#8c959f", "#e4e8ec", "#ffffff"
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "hatch.linewidth": 0.8}
STYLE |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), QUIET)
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False) | {
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
}
COLOURS = {
    "ours": "#0a7d6c",
    "ours+compile": "#4aa395",
    "ours+layers": "#6db8ab",
    "base": "#8cc5bb",
    "ours:offload": "#5f9ed1",
    "ours:attention": "#9a8f2e",
    "ours:tiled": "#8cc5bb",
    "ours:long": "#1f5f99",
    "upstream": "#d39a3a",
    "upstream+compile": "#e6c68f",
    "upstream+layers": "#f0dcb8",
    "unsloth": "#7a5ea8",
    "unsloth:offload": "#b09fcb",
    "compile": "#66768a",
    "layers": "#8793a2",
    "torch": "#8fa9c9",
    "cce": "#a8678f",
    "quack": "#bd6a4c",
    "ao": "#c98a8a",
    "ao+compile": "#a86060",
    "eager": "#b6bec8",
    "stock": "#b6bec8",
}
MAIN_RIVALS = ("upstream", "compile", "eager", "stock")
# a bar that is so many times as long as the next shorter one is cut, or the others would be too
# short to compare
CUT = 4.0
VISIBLE = 0.02  # a spread below this is not wider than a line


@contextlib.contextmanager
def _figure(path: Path, width: float, height: float, title: str, subtitle: str, note: str) -> Iterator[Any]:
    """A figure of ``height`` inches plus its text, saved to ``path`` at the end. The layout is
    automatic; global settings do not change."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib") from None
    lines, smaller = (
        textwrap.wrap(title, int((width - 0.3) / 0.091)),
        textwrap.wrap(subtitle, int((width - 0.3) / 0.072)),
    )
    above, below = 0.16 + 0.2 * len(lines) + 0.17 * len(smaller) + 0.12, 0.3
    total = height + above + below
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, total), dpi=160)
        FigureCanvasAgg(figure)
        figure.set_layout_engine(
            "constrained",
            rect=(0.01, below / total, 0.98, height / total),
            w_pad=0.06,
            h_pad=0.05,
            hspace=0.0,
            wspace=0.03,
        )
        figure.text(
            0.12 / width, 1 - 0.13 / total, "\n".join(lines), fontsize=11, fontweight="bold", va="top", linespacing=1.25
        )
        figure.text(
            0.12 / width,
            1 - (0.18 + 0.2 * len(lines)) / total,
            "\n".join(smaller),
            fontsize=8.5,
            color=QUIET,
            va="top",
            linespacing=1.3,
        )
        figure.text(0.12 / width, 0.1 / total, note, fontsize=7.5, color=QUIET, va="bottom")
        yield figure
        picture = io.BytesIO()
        figure.savefig(picture, format="png", facecolor=WHITE)
        export(path, picture.getvalue())


def _path(out: Path | str, *parts: Any) -> Path:
    return Path(out) / ("-".join(re.sub(r"[^\w.+]+", "_", str(part)) for part in parts if part) + ".png")


def _colour(variant: str) -> str:
    return COLOURS.get(variant, QUIET)


def _order(rows: Iterable[Row]) -> list[str]:
    """The variants of the rows, in the order of the colours."""
    present = dict.fromkeys(row["variant"] for row in rows)
    return [*[name for name in COLOURS if name in present], *[name for name in present if name not in COLOURS]]


def _limit(values: Iterable[float | None], mark: float = 0.0) -> float:
    """Where the longest bar ends: at the largest value, or before it if the others would
    otherwise be too short to compare."""
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
    """Bars of ``row[name]`` for pairs (row, our row), with a line at ``floor``."""

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
    words += ("; whiskers: interquartile range, where above 2 %" if spread else "") + (
        "; bars with a gap are cut" if cut else ""
    )
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
        look = (
            {"color": colour}
            if right
            else {"facecolor": WHITE, "edgecolor": colour, "hatch": "//////", "linewidth": 1.0}
        )
        axes.barh(y, length, height=0.74, **look)
        spread = (row.get("device_spread") or 0.0) if panel.name == "device_ms" and right else 0.0
        if value is not None and value > limit:
            axes.plot(
                [0.955 * limit, 0.97 * limit], [y + 0.5, y - 0.5], color=WHITE, linewidth=2.2, solid_capstyle="butt"
            )
        elif value is not None and spread > VISIBLE:
            end = min(value * (1 + spread / 2), max(limit, value))
            axes.plot(
                [max(0.0, value * (1 - spread / 2)), end], [y, y], color=INK, linewidth=0.9, solid_capstyle="butt"
            )
        if floor and 0.98 * end < floor < 1.15 * end:
            end = floor  # keep the text clear of the line
        ink, weight = _words_of(row["variant"]) if right else (QUIET, "normal")
        axes.text(
            end + 0.02 * limit,
            y,
            bar_label(row, mine, panel.name),
            va="center",
            fontsize=8,
            color=ink,
            fontweight=weight,
        )
    if floor:
        axes.plot([floor, floor], [-0.5, len(panel.pairs) - 0.5], color=INK, linewidth=1.1, linestyle=(0, (3, 2)))
    axes.set(xlim=(0, limit / (1 - 1.65 / inches)), xticks=[])  # 1.65 inches for text
    axes.set_title(panel.heading, color=INK, pad=3)
    _names(axes, [variant_label(row["variant"]) if named else "" for row, _ in panel.pairs])


def _names(axes: Any, labels: Sequence[str]) -> None:
    """Names of horizontal bars; the first is at the top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["bottom"].set_visible(False)


def _words_of(variant: str) -> tuple[str, str]:
    """Colour and font weight of text about a variant: ours stands out."""
    return (_colour(OURS), "bold") if variant == OURS else (INK, "normal")


def bar_label(row: Row, ours: Row | None, name: str) -> str:
    """The text at the end of a bar: the value, and its ratio to ours if both are usable."""
    if not usable(row):
        return "failed" if row.get("failed") else "inaccurate"
    unit = {"device_ms": "ms", "peak_mb": "MB", "tokens_per_s": "tokens/s", "peak_allocated_gb": "GB", "mfu": "%"}[name]
    value = row.get(name)
    if value is None:
        return "not measured"
    shown = f"{value:,.0f}" if name in ("tokens_per_s", "peak_mb") else digits(100 * value if name == "mfu" else value)
    against = speedup(row, ours) if name == "tokens_per_s" else ratio(row, ours, name) if name != "mfu" else None
    floor = row.get("percent_of_floor") if name == "device_ms" and row["variant"] == OURS else None
    return (
        f"{shown} {unit}"
        + (f"   {times(against)}" if against else "")
        + (f"   {floor:.0f} % of floor" if floor else "")
    )


def finding(rows: Iterable[Row], name: str) -> str:
    """The title: how ours compares to each main rival, over the given rows."""
    pairs = with_ours(rows)
    broken = [row for row, _ in pairs if row["variant"] == OURS and not usable(row)]
    if broken:
        return (
            f"ours is {status(broken[0]).split(':')[0]} in {len(broken)} of "
            f"{sum(row['variant'] == OURS for row, _ in pairs)} cases"
        )
    parts = []
    what = "speed" if name == "device_ms" else "memory"
    for rival in [*MAIN_RIVALS, *(other for other in COLOURS if other not in (*MAIN_RIVALS, OURS))]:
        mine = [(row, ours) for row, ours in pairs if row["variant"] == rival and usable(row) and ours]
        found = [value if what == "speed" else 1 / value for row, ours in mine if (value := ratio(row, ours, name))]
        free = what == "memory" and any(row.get(name) == 0 < (ours.get(name) or 0) for row, ours in mine)
        if found or free:
            parts.append(
                f"{variant_label(rival)} needs none" if free else f"{span(found)} the {what} of {variant_label(rival)}"
            )
    first, of, rest = ", ".join(parts[:3]).partition(f" the {what} of ")
    return first + of + (rest.replace(of, " of ") if of else "") if parts else "no variant to compare with"


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
        axes.plot(
            *zip(*wrong) if wrong else ([], []),
            color=_colour(variant),
            linestyle="none",
            marker="o",
            markersize=4.5,
            markerfacecolor=WHITE,
        )
        if good or wrong:
            words = (
                variant_label(variant)
                + (f", failed at {min(failed):,}" if failed else "")
                + (", hollow: inaccurate" if wrong else "")
            )
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
    axes.set_yticks(
        [
            tick
            for power in range(-6, 9)
            for digit in ((1, 2, 5) if high < 300 * low else (1,))
            if low <= (tick := digit * 10.0**power) <= high
        ]
    )
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel(sweep)
    _end_labels(axes, ends)


def _plain(value: float, _: Any = None) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _end_labels(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Label each line at the right margin, and move labels apart that would overlap. ``ends``:
    (x, y, text, variant)."""
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
        look: dict[str, Any] = dict(
            va="center", fontsize=8, color=_dark(_colour(variant)) if variant else INK, fontweight=_words_of(variant)[1]
        )
        axes.annotate(words, (1.0, place), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points", **look)


def _light(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 765


def _dark(colour: str) -> str:
    """The colour, darkened for text on white."""
    share = min(1.0, 0.45 / _light(colour))
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * share):02x}" for i in (1, 3, 5))
