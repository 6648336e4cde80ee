"""Plots of training steps: bars, curves over sizes, breakdowns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from labels import hardware_line, on_cpu, span, speedup, variant_label

from liger_kernel.bench.results import OURS, Row, beyond, digits, noise, parts_of, ratio, with_ours
from plots.drawing import (
    FAINT,
    INK,
    MAIN_RIVALS,
    QUIET,
    WHITE,
    Data,
    _bars,
    _colour,
    _end_labels,
    _figure,
    _light,
    _names,
    _order,
    _Panel,
    _path,
    _plain,
    _value,
    _words_of,
)

# Kinds of device time: teal for the kinds that our kernels replace, grey for the others.
KINDS = {
    "gemm": "#66768a",
    "attention": "#8793a2",
    "optimizer": "#a7b0bb",
    "communication": "#c3cad2",
    "other": "#dbe0e5",
}
KINDS |= {"loss": "#0a7d6c", "norm": "#45a191", "activation": "#7dbfb2", "rope": "#b3dad2", "idle": "#ffffff"}


def steps(data: Data, out: Path | str) -> list[Path]:
    """All plots of training steps."""
    swept = {id(row) for over in SWEEPS for rows in _swept(data, over).values() for row in rows}
    single = {**data, "rows": [row for row in data["rows"] if id(row) not in swept]}
    return [*step_bars(single, out), *breakdown(single, out), *batch_curves(data, out), *length_curves(data, out)]


def step_bars(data: Data, out: Path | str) -> list[Path]:
    """Tokens per second and peak memory per model and variant: ``step.png``."""
    groups = _step_groups(data)
    if not groups:
        return []
    title = f"Training steps: {_step_finding(data['rows'], on_cpu(data.get('meta', {})))}"
    words = (
        "left tokens per second, x: ours is so many times as fast; right peak allocated memory, x: multiples of ours"
    )
    lines: list[list[_Panel]] = []
    for heading, rows in groups.items():
        ours = next((row for row in rows if row["variant"] == OURS), None)
        pairs = [(row, ours) for row in rows]
        lines.append(
            [_Panel(heading, pairs, "tokens_per_s"), _Panel("" if lines else "peak memory", pairs, "peak_allocated_gb")]
        )
    return [_bars(_path(out, "step"), lines, title, words, hardware_line(data.get("meta", {})))]


def _place(row: Row) -> str:
    """Model, row length and everything else that steps must share to be compared, except the
    batch size."""
    parts = [f"{row['gpus']} GPUs {row.get('parallel') or ''}".rstrip() if (row.get("gpus") or 1) > 1 else ""]
    parts += parts_of(row)
    return "".join(f", {part}" for part in parts if part)


# what is swept -> what is the same in all rows, the words for it, and how many sizes make a sweep
SWEEPS = {"batch": ("seq", "rows of {}", 2), "seq": ("batch", "batch {}", 3)}


def _swept(data: Data, over: str) -> dict[str, list[Row]]:
    """Heading -> rows that differ only in variant and in ``over``, the batch size or the length
    of rows."""
    groups: dict[str, list[Row]] = {}
    same, words, least = SWEEPS[over]
    for row in data["rows"]:
        if "model" in row:
            groups.setdefault(f"{row['model']}, {words.format(row[same])}{_place(row)}", []).append(row)
    return {heading: rows for heading, rows in groups.items() if len({row[over] for row in rows}) >= least}


def batch_curves(data: Data, out: Path | str) -> list[Path]:
    """Tokens per second and peak memory against the batch size, until memory is exhausted:
    ``batches-MODEL.png``."""
    unit = "process" if on_cpu(data.get("meta", {})) else "GPU"
    most = lambda rows: {row["variant"]: f"{row['batch']:,}" for row in sorted(rows, key=lambda row: row["batch"])}
    return _sweeps(data, out, "batch", "batches", f"rows a {unit}", f"the most rows a {unit} of those measured", most)


def length_curves(data: Data, out: Path | str) -> list[Path]:
    """Tokens per second and peak memory against the length of rows, and ``estimated_gb``, what
    ``liger fit`` says of the peak: ``lengths-MODEL.png``."""
    peaks = lambda rows: {
        row["variant"]: f"{digits(row['peak_allocated_gb'])} GB" for row in sorted(rows, key=lambda row: row["seq"])
    }
    return _sweeps(
        data,
        out,
        "seq",
        "lengths",
        "tokens of a row",
        "peak memory of the longest rows of those measured",
        peaks,
        _estimates,
    )


def _sweeps(
    data: Data,
    out: Path | str,
    over: str,
    name: str,
    label: str,
    about: str,
    values: Callable[[list[Row]], dict[str, str]],
    more: Callable[[Any, list[Row]], str] = lambda axes, rows: "",
) -> list[Path]:
    """``about`` and ``values``: what the title says of each variant."""
    swept, paths = _swept(data, over), []
    for model in dict.fromkeys(rows[0]["model"] for rows in swept.values()):
        groups = {heading: rows for heading, rows in swept.items() if rows[0]["model"] == model}
        of = values([row for rows in groups.values() for row in rows if _value(row, "tokens_per_s")])
        unit = "process" if on_cpu(data.get("meta", {})) else "GPU"
        said = (
            f"{model}: {about}: "
            f"{', '.join(f'{variant_label(name)} {of[name]}' for name in _order(data['rows']) if name in of)}"
        )
        path = _path(out, name, model)
        with _figure(
            path,
            10.8,
            3.4 * len(groups),
            said,
            f"against {label}; a line ends where memory is out",
            hardware_line(data.get("meta", {})),
        ) as figure:
            for line, (heading, rows) in zip(figure.subplots(len(groups), 2, squeeze=False), groups.items()):
                place = f"{heading[len(model) + 2 :]}: "
                for axes, value, words in zip(
                    line,
                    ("tokens_per_s", "peak_allocated_gb"),
                    (f"{place}tokens per second", f"peak memory a {unit}, GB"),
                ):
                    _curves(axes, rows, value, over)
                    added = more(axes, rows) if value == "peak_allocated_gb" else ""
                    axes.set_xlabel(label)
                    axes.set_title(f"{words}{added}", color=INK, pad=6)
        paths.append(path)
    return paths


def _estimates(axes: Any, rows: list[Row]) -> str:
    """Draw ``estimated_gb`` of the rows that have it; returns the words for it."""
    known = [row for row in rows if row.get("estimated_gb")]
    for row in known:
        axes.plot(
            row["seq"],
            row["estimated_gb"],
            marker="x",
            markersize=8,
            color=_colour(row["variant"]),
            linestyle="none",
            zorder=4,
        )
    return " (x: liger fit)" if known else ""


def _curves(axes: Any, rows: list[Row], name: str, over: str) -> None:
    ends = []
    for variant in reversed(_order(rows)):
        mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row[over])
        good = [(row[over], row[name]) for row in mine if _value(row, name) and row.get("accurate") is not False]
        failed = [row[over] for row in mine if row.get("failed")]
        if good:
            axes.plot(
                *zip(*good),
                color=_colour(variant),
                linewidth=2.4 if variant == OURS else 1.6,
                marker="o",
                markersize=4,
                zorder=3 if variant == OURS else 2,
            )
            ends.append((*good[-1], variant_label(variant) + (f", not {min(failed):,}" if failed else ""), variant))
    axes.set_xlim(0, 1.04 * max(row[over] for row in rows))
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    _end_labels(axes, ends)


def _step_groups(data: Data) -> dict[str, list[Row]]:
    """Heading -> its rows, in the order of the variants."""
    groups: dict[str, list[Row]] = {}
    for row in data["rows"]:
        groups.setdefault(f"{row['model']}, {row['batch']} x {row['seq']}{_place(row)}", []).append(row)
    return {
        heading: sorted(rows, key=lambda row: _order(rows).index(row["variant"])) for heading, rows in groups.items()
    }


def _step_finding(rows: Iterable[Row], cpu: bool = False) -> str:
    """How ours compares with each rival. If a difference in speed is within the noise, the text
    says so."""
    pairs = with_ours(rows)
    parts, margins = [], []
    for rival in MAIN_RIVALS:
        mine = [(row, ours) for row, ours in pairs if row["variant"] == rival]
        fast = [value for row, ours in mine if (value := speedup(row, ours))]
        lean = [1 / value for row, ours in mine if (value := ratio(row, ours, "peak_allocated_gb"))]
        margin = max((noise(row, ours, cpu) for row, ours in mine if ours and speedup(row, ours)), default=0.0)
        if fast:
            margins.append(margin)
            memory = f" with {span(lean)} the memory" if lean else ""
            speed = span(fast) if any(beyond(value, margin) for value in fast) else "within noise"
            parts.append((rival, f"{speed} as fast as {variant_label(rival)}{memory}"))
    chosen = [text for rival, text in parts if rival in ("stock", "eager")] + [
        text for rival, text in parts if rival not in ("stock", "eager")
    ]
    return (
        f"{', '.join(chosen[:2])} (noise of the speed {max(margins):.1%})" if chosen else "no variant to compare with"
    )


def breakdown(data: Data, out: Path | str) -> list[Path]:
    """The device time of a step by kind, in stacked bars: ``breakdown.png``."""
    timed = [row for row in data["rows"] if row.get("breakdown_ms") and not row.get("failed")]
    groups = _step_groups({"rows": timed})
    if not groups:
        return []
    shares = {
        name: [_replaced(row["breakdown_ms"]) for row in timed if row["variant"] == name]
        for name in ("stock", "eager", OURS)
    }
    base = "stock" if shares["stock"] else "eager"
    percent = lambda values: "–".join(dict.fromkeys(f"{100 * value:.0f}" for value in (min(values), max(values))))
    title = "Where the time of a training step goes"
    if shares[base] and shares[OURS]:
        title = (
            f"Norms, activations, rope and loss take {percent(shares[base])} % of {variant_label(base)}'s step "
            f"and {percent(shares[OURS])} % of ours"
        )
    kinds = [
        kind
        for kind in dict.fromkeys([*KINDS, *(kind for row in timed for kind in row["breakdown_ms"])])
        if any(row["breakdown_ms"].get(kind) for row in timed)
    ]
    cpu = on_cpu(data.get("meta", {}))
    words = (
        "ms of time per step; teal: what a patch replaces"
        if cpu
        else "ms of device time per step; teal: what our kernels replace"
    )
    path, note = _path(out, "breakdown"), hardware_line(data.get("meta", {}))
    with _figure(path, 9.5, 0.27 * len(timed) + 0.36 * len(groups) + 0.3, title, words, note) as figure:
        from matplotlib.patches import Patch

        top, *grid = figure.subplots(
            len(groups) + 1, 1, height_ratios=[0.6, *(len(rows) + 0.2 for rows in groups.values())]
        )
        patches = [
            Patch(facecolor=KINDS.get(kind, FAINT), edgecolor=QUIET if kind == "idle" else "none", label=kind)
            for kind in kinds
        ]
        spaces: dict[str, Any] = dict(
            handlelength=0.9, handleheight=0.9, columnspacing=1.3, handletextpad=0.5, borderpad=0, borderaxespad=0
        )
        top.legend(handles=patches, loc="upper left", ncols=len(kinds), fontsize=8, labelcolor=INK, **spaces)
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
        axes.barh(
            y, value, left=left, height=0.76, color=colour, edgecolor=QUIET if kind == "idle" else WHITE, linewidth=0.6
        )
        if value > 0.045 * longest:
            axes.text(
                left + value / 2,
                y,
                digits(value),
                ha="center",
                va="center",
                fontsize=7.5,
                color=WHITE if _light(colour) < 0.56 else INK,
            )
        left += value
    ink, weight = _words_of(row["variant"])
    axes.text(left + 0.008 * longest, y, f"{digits(left)} ms", va="center", fontsize=8, color=ink, fontweight=weight)


def _replaced(parts: dict[str, float | None]) -> float:
    """The share of a step's time in the kinds that our kernels replace."""
    return sum(parts.get(kind) or 0 for kind in ("loss", "norm", "activation", "rope")) / (
        sum(filter(None, parts.values())) or 1
    )
