"""Panels of bars, stacked bars and curves, and the plots that are made of them.

A panel is ``WIDTH`` units wide, about the width of a phone: pages put as many side by side as the
screen has space for. Names and values are above their bars, so that no text is ever measured.
Colours of text and paper are those of the page's theme, or in a file those of the reader's system.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

from labels import span, speedup, variant_label

from liger_kernel.bench.results import OURS, Row, digits, ratio, status, times, usable, with_ours

Data = dict[str, Any]
WIDTH, GAP, LETTERS = 340, 28, 46  # of a panel, between panels, in a line of its text
INK, QUIET, PAPER = (
    f"var(--color-{name})" for name in ("foreground-primary", "foreground-muted", "background-primary")
)
STYLE = (
    ".plot text{font:11.5px system-ui,sans-serif;fill:" + INK + "}.plot .head{font-weight:600}"
    ".plot .ours{fill:var(--color-brand-content);font-weight:600}.plot .quiet{fill:" + QUIET + ";font-size:10.5px}"
    ".plot path{fill:none}"
)
# what a page's theme says, in a file
THEME = "svg{{--color-foreground-primary:{};--color-foreground-muted:{};--color-background-primary:{};"
THEME += "--color-brand-content:{}}}"
LIGHT = THEME.format("#24292f", "#68717b", "#ffffff", "#0a6b5d")
DARK = THEME.format("#e0e3e7", "#9aa4af", "#131416", "#4cc3ae")
COLOURS = {
    "ours": "#0f9480",
    "ours+compile": "#4aa395",
    "ours+layers": "#6db8ab",
    "base": "#8cc5bb",
    "ours:offload": "#5f9ed1",
    "ours:attention": "#9a8f2e",
    "ours:tiled": "#8cc5bb",
    "ours:long": "#3b7fc0",
    "upstream": "#d39a3a",
    "upstream+compile": "#e6c68f",
    "upstream+layers": "#f0dcb8",
    "unsloth": "#8a6fb8",
    "unsloth:offload": "#b09fcb",
    "compile": "#74859a",
    "layers": "#8793a2",
    "torch": "#8fa9c9",
    "cce": "#b0769a",
    "quack": "#bd6a4c",
    "ao": "#c98a8a",
    "ao+compile": "#b06a6a",
    "eager": "#a9b2bd",
    "stock": "#a9b2bd",
}
OTHER = "#8c959f"
MAIN_RIVALS = ("upstream", "compile", "eager", "stock")
# a bar that is so many times as long as the next shorter one is cut, or the others would be too
# short to compare
CUT = 4.0
VISIBLE = 0.02  # a spread below this is not wider than a line


class Panel(Protocol):
    """A part of a plot with axes of its own."""

    def svg(self) -> tuple[str, int]:
        """Its elements, and its height."""
        ...


@dataclass
class Plot:
    """Lines of panels below what they show."""

    name: str
    title: str
    words: str
    note: str
    lines: Sequence[Sequence[Panel]]

    def html(self) -> str:
        """For a page: its panels side by side, or one below the other on a phone."""
        panels = "".join(
            f'<svg viewBox="0 0 {WIDTH} {height}">{elements}</svg>'
            for line in self.lines
            for elements, height in (panel.svg() for panel in line)
        )
        words, note = escape(f"{self.words[:1].upper()}{self.words[1:]}."), escape(self.note)
        title = f"<figcaption><strong>{escape(self.title)}.</strong> {words}</figcaption>"
        return f'<figure class="plot"><style>{STYLE}</style>{title}<div>{panels}</div><small>{note}</small></figure>\n'

    def file(self) -> str:
        """For an SVG file: its panels as they are in lines."""
        columns = max(map(len, self.lines))
        width = columns * (WIDTH + GAP) - GAP
        parts, y = [], 0
        for text, size, kind in ((self.title, 7.4, "head"), (self.words, 5.7, "quiet")):
            for line in textwrap.wrap(text, int(width / size)):
                parts.append(words(0, y := y + 16, line, kind))
        y += 12
        for panels in self.lines:
            drawn = [panel.svg() for panel in panels]
            parts += [f'<g transform="translate({i * (WIDTH + GAP)} {y})">{e}</g>' for i, (e, _) in enumerate(drawn)]
            y += max(height for _, height in drawn)
        parts.append(words(0, y := y + 14, self.note, "quiet"))
        style = f"{LIGHT}{STYLE}.plot .head{{font-size:12.5px}}@media(prefers-color-scheme:dark){{{DARK}}}"
        box = f"-16 -8 {width + 32} {y + 24}"
        paper = f'<rect x="-16" y="-8" width="100%" height="100%" fill="{PAPER}"/>'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="{box}" width="{width + 32}">'
        return f"{top}<title>{escape(self.title)}</title><style>{style}</style>{paper}{''.join(parts)}</svg>\n"


def name_of(*parts: Any) -> str:
    return "-".join(re.sub(r"[^\w.+]+", "_", str(part)) for part in parts if part)


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}"{look}>{escape(text, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" {look}/>'


def stroke(points: Iterable[tuple[float, float]], colour: str, width: float, more: str = "") -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" stroke="{colour}" stroke-width="{width:g}"{more}/>'


def heading(text: str) -> tuple[list[str], int]:
    lines = textwrap.wrap(text, LETTERS)
    return [words(0, 13 + 14 * i, line, "head") for i, line in enumerate(lines)], 14 * len(lines) + 7


def colour_of(variant: str) -> str:
    return COLOURS.get(variant, OTHER)


def order(rows: Iterable[Row]) -> list[str]:
    """The variants of the rows, in the order of the colours."""
    present = dict.fromkeys(row["variant"] for row in rows)
    return [*[name for name in COLOURS if name in present], *[name for name in present if name not in COLOURS]]


def value_of(row: Row, name: str) -> float | None:
    return None if row.get("failed") else row.get(name)


def _limit(values: Iterable[float | None], mark: float = 0.0) -> float:
    """Where the longest bar ends: at the largest value, or before it if the others would
    otherwise be too short to compare."""
    known = sorted(value for value in values if value)
    limit = max([*known[-1:], mark]) or 1.0
    for shorter, longer in itertools.pairwise(known[(len(known) - 1) // 2 :]):
        if longer > CUT * shorter:
            return max(1.3 * shorter, mark)
    return limit


@dataclass
class Bars:
    """Bars of ``row[name]`` for pairs (row, our row), with a line at ``floor``."""

    heading: str
    pairs: list[tuple[Row, Row | None]]
    name: str
    floor: float | None = None

    @property
    def limit(self) -> float:
        return _limit([value_of(row, self.name) for row, _ in self.pairs], self.floor or 0.0)

    def spread(self, row: Row) -> float:
        wide = (row.get("device_spread") or 0.0) if self.name == "device_ms" and usable(row) else 0.0
        return wide if wide > VISIBLE else 0.0

    def svg(self) -> tuple[str, int]:
        parts, top = heading(self.heading)
        scale, limit = WIDTH / self.limit, self.limit
        for i, (row, ours) in enumerate(self.pairs):
            y, value, colour = top + 27 * i, value_of(row, self.name), colour_of(row["variant"])
            kind = "ours" if row["variant"] == OURS and usable(row) else ""
            parts.append(words(0, y + 12, variant_label(row["variant"]), kind))
            parts.append(words(WIDTH, y + 12, bar_label(row, ours, self.name), kind, "end"))
            look = f'fill="{colour}"' if usable(row) else f'fill="none" stroke="{colour}" stroke-dasharray="3 2"'
            if value is not None:
                parts.append(box(0, y + 17, min(value, limit) * scale, 7, look))
            if value is not None and value > limit:
                parts.append(stroke([(WIDTH - 14, y + 27), (WIDTH - 8, y + 14)], PAPER, 4))
            elif value is not None and (spread := self.spread(row)):
                ends = [(min(limit, value * (1 + part * spread / 2)) * scale, y + 20.5) for part in (-1, 1)]
                parts.append(stroke(ends, INK, 1))
        height = top + 27 * len(self.pairs)
        floors = range(top, height, 27) if self.floor else ()
        parts += [box((self.floor or 0) * scale - 0.7, y + 16, 1.4, 9, f'fill="{INK}"') for y in floors]
        return "".join(parts), height + 12


def bars(name: str, lines: list[list[Bars]], title: str, said: str, note: str) -> Plot:
    """A table of panels, one line of it for each case or model."""
    every = [(panel, row) for line in lines for panel in line for row, _ in panel.pairs]
    said += "; thin lines: interquartile range, where above 2 %" if any(p.spread(row) for p, row in every) else ""
    cut = any((value_of(row, panel.name) or 0.0) > panel.limit for panel, row in every)
    return Plot(name, title, said + ("; bars with a gap are cut" if cut else ""), note, lines)


@dataclass
class Stacks:
    """One bar for each (name, parts, is it ours); the colours of its parts are ``colours``."""

    heading: str
    bars: list[tuple[str, dict[str, float], bool]]
    colours: dict[str, str]
    longest: float

    def svg(self) -> tuple[str, int]:
        parts, top = heading(self.heading)
        for i, (name, values, ours) in enumerate(self.bars):
            y, x, kind = top + 36 * i, 0.0, "ours" if ours else ""
            parts.append(words(0, y + 12, name, kind))
            parts.append(words(WIDTH, y + 12, f"{digits(sum(values.values()))} ms", kind, "end"))
            for part, value in values.items():
                width = value / self.longest * WIDTH
                what = f"<title>{part}: {digits(value)} ms</title>"
                look = f'fill="{self.colours[part]}" stroke="{PAPER}" stroke-width=".8"'
                parts.append(box(x, y + 17, width, 15, look).replace("/>", f">{what}</rect>"))
                if width > 5.5 * len(digits(value)) + 4:
                    ink = "#fff" if _light(self.colours[part]) < 0.56 else "#24292f"
                    style = f' style="fill:{ink};font-size:9.5px"'
                    parts.append(
                        words(x + width / 2, y + 28, digits(value), "", "middle").replace(" x=", f"{style} x=")
                    )
                x += width
        return "".join(parts), top + 36 * len(self.bars) + 10


@dataclass
class Legend:
    """The names of colours."""

    colours: dict[str, str]

    def svg(self) -> tuple[str, int]:
        parts = []
        for i, (name, colour) in enumerate(self.colours.items()):
            x, y = WIDTH / 3 * (i % 3), 17 * (i // 3) + 4
            parts += [
                box(x, y, 11, 11, f'fill="{colour}" stroke="{QUIET}" stroke-width=".5"'),
                words(x + 16, y + 10, name),
            ]
        return "".join(parts), 17 * math.ceil(len(self.colours) / 3) + 14


def _light(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 765


@dataclass
class Line:
    """The points of a variant; ``hollow`` are inaccurate. The variant "" is the dashed floor."""

    variant: str
    said: str
    points: list[tuple[float, float]]
    hollow: list[tuple[float, float]] = field(default_factory=list)


LEFT, RIGHT, TALL = 44.0, WIDTH - 6.0, 170.0  # of the field of curves


@dataclass
class Curves:
    """Lines over ``label``, with crosses at ``marks``, which are (x, y, variant)."""

    heading: str
    lines: list[Line]
    label: str
    xs: list[float]
    log: bool = False
    marks: list[tuple[float, float, str]] = field(default_factory=list)

    def svg(self) -> tuple[str, int]:
        parts, top = heading(self.heading)
        top += 6
        values = [y for line in self.lines for _, y in (*line.points, *line.hollow)] + [y for _, y, _ in self.marks]
        low, high = (min(values) / 1.15, max(values) * 1.15) if self.log else (0.0, 1.05 * max(values))
        left, right = (min(self.xs) / 1.1, max(self.xs) * 1.1) if self.log else (0.0, 1.04 * max(self.xs))
        scale = math.log if self.log else float
        share = lambda value, a, b: (scale(value) - scale(a)) / (scale(b) - scale(a))
        across = lambda x: LEFT + share(x, left, right) * (RIGHT - LEFT)
        down = lambda y: top + (1 - share(y, low, high)) * TALL
        for tick in _powers(low, high) if self.log else _even(high):
            parts.append(stroke([(LEFT, down(tick)), (RIGHT, down(tick))], QUIET, 1, ' opacity=".25"'))
            parts.append(words(LEFT - 5, down(tick) + 4, _plain(tick), "quiet", "end"))
        for tick, text in _of_sizes(self.xs) if self.log else [(x, _plain(x)) for x in _even(right)]:
            parts.append(words(across(tick), top + TALL + 15, text, "quiet", "middle"))
        parts.append(words((LEFT + RIGHT) / 2, top + TALL + 31, self.label, "quiet", "middle"))
        place = lambda points: [(across(x), down(y)) for x, y in points]
        y = top + TALL + 50
        for line in self.lines:
            ours, colour = line.variant == OURS, colour_of(line.variant) if line.variant else INK
            dashed = "" if line.variant else ' stroke-dasharray="3 2"'
            if line.points:
                parts.append(stroke(place(line.points), colour, 2.4 if ours else 1.6 if line.variant else 1, dashed))
            dot = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="{}" stroke="{}"/>'
            if line.variant:
                parts += [dot.format(*at, 3 if ours else 2.4, colour, colour) for at in place(line.points)]
                parts += [dot.format(*at, 2.4, PAPER, colour) for at in place(line.hollow)]
            parts += [stroke([(LEFT, y - 4), (LEFT + 14, y - 4)], colour, 3, dashed)]
            parts.append(words(LEFT + 20, y, line.said, "ours" if ours else ""))
            y += 16
        for x, value, variant in self.marks:
            a, b = across(x), down(value)
            for s in (-4, 4):
                parts.append(stroke([(a - 4, b - s), (a + 4, b + s)], colour_of(variant), 1.6))
        return "".join(parts), int(y)


def _powers(low: float, high: float) -> Iterator[float]:
    """Ticks of a logarithmic axis."""
    for power in range(-6, 9):
        for digit in (1, 2, 5) if high < 300 * low else (1,):
            if low <= (tick := digit * 10.0**power) <= high:
                yield tick


def _even(high: float) -> list[float]:
    """Five ticks, or fewer, from 0."""
    step = next(s for power in range(-3, 9) for digit in (1, 2, 5) if high / (s := digit * 10.0**power) <= 5)
    return [step * i for i in range(int(high / step) + 1)]


def _of_sizes(xs: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks at sizes: 4096 is 4k, and those that are too close to the one before have none."""
    ticks: list[tuple[float, str]] = []
    for x in map(int, xs):
        text = f"{x // 1024}k" if x >= 1024 and x & (x - 1) == 0 else f"{x / 1000:.0f}k" if x >= 10000 else f"{x:,}"
        if not ticks or math.log(x / ticks[-1][0]) > 0.1 * math.log(xs[-1] / xs[0]):
            ticks.append((x, text))
    return ticks


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def bar_label(row: Row, ours: Row | None, name: str) -> str:
    """The text above a bar: the value, and its ratio to ours if both are usable."""
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
        + (f" · {times(against)}" if against else "")
        + (f" · {floor:.0f} % of floor" if floor else "")
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
