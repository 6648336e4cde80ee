"""Plots of training steps: bars, curves over sizes, breakdowns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from labels import hardware_line, on_cpu, span, speedup, variant_label

from liger_kernel.bench.results import OURS, Row, beyond, digits, noise, parts_of, ratio, with_ours
from plots.drawing import (
    MAIN_RIVALS,
    Bars,
    Curves,
    Data,
    Legend,
    Line,
    Panel,
    Plot,
    Stacks,
    bars,
    name_of,
    order,
    value_of,
)

Values = Callable[[list[Row]], dict[str, str]]
# Kinds of device time: teal for the kinds that our kernels replace, grey for the others.
KINDS = {
    "gemm": "#66768a",
    "attention": "#8793a2",
    "optimizer": "#a7b0bb",
    "communication": "#c3cad2",
    "other": "#dbe0e5",
}
KINDS |= {"loss": "#0a7d6c", "norm": "#45a191", "activation": "#7dbfb2", "rope": "#b3dad2", "idle": "#ffffff"}


def steps(data: Data) -> Iterator[Plot]:
    """Plots of training steps: ``step``, ``breakdown``, ``batches-MODEL`` and ``lengths-MODEL``."""
    swept = {id(row) for over in SWEEPS for rows in _swept(data, over).values() for row in rows}
    single = {**data, "rows": [row for row in data["rows"] if id(row) not in swept]}
    yield from _step_bars(single)
    yield from _breakdown(single)
    yield from _batch_curves(data)
    yield from length_curves(data)


def _step_bars(data: Data) -> Iterator[Plot]:
    """Tokens per second and peak memory per model and variant."""
    groups = _step_groups(data)
    title = f"Training steps: {_step_finding(data['rows'], on_cpu(data.get('meta', {})))}"
    words = "tokens per second, x: ours is so many times as fast; peak allocated memory, x: multiples of ours"
    lines = []
    for heading, rows in groups.items():
        ours = next((row for row in rows if row["variant"] == OURS), None)
        pairs = [(row, ours) for row in rows]
        panels = (f"{heading}: tokens/s", "tokens_per_s"), (f"{heading}: peak memory", "peak_allocated_gb")
        lines.append([Bars(where, pairs, name) for where, name in panels])
    if groups:
        yield bars("step", lines, title, words, hardware_line(data.get("meta", {})))


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


def _batch_curves(data: Data) -> Iterator[Plot]:
    """Tokens per second and peak memory against the batch size, until memory is exhausted."""
    unit = "process" if on_cpu(data.get("meta", {})) else "GPU"
    most = lambda rows: {row["variant"]: f"{row['batch']:,}" for row in sorted(rows, key=lambda row: row["batch"])}
    label, about = f"rows a {unit}", f"the most rows a {unit} of those measured"
    return _sweeps(data, "batch", "batches", label, about, most)


def length_curves(data: Data) -> Iterator[Plot]:
    """Tokens per second and peak memory against the length of rows, and ``estimated_gb``, what
    ``liger fit`` says of the peak."""
    gigabytes = lambda row: f"{digits(row['peak_allocated_gb'])} GB"
    peaks = lambda rows: {row["variant"]: gigabytes(row) for row in sorted(rows, key=lambda row: row["seq"])}
    about = "peak memory of the longest rows of those measured"
    return _sweeps(data, "seq", "lengths", "tokens of a row", about, peaks)


def _sweeps(data: Data, over: str, name: str, label: str, about: str, values: Values) -> Iterator[Plot]:
    """``about`` and ``values``: what the title says of each variant."""
    swept = _swept(data, over)
    unit = "process" if on_cpu(data.get("meta", {})) else "GPU"
    for model in dict.fromkeys(rows[0]["model"] for rows in swept.values()):
        groups = {heading: rows for heading, rows in swept.items() if rows[0]["model"] == model}
        of = values([row for rows in groups.values() for row in rows if value_of(row, "tokens_per_s")])
        found = ", ".join(f"{variant_label(name)} {of[name]}" for name in order(data["rows"]) if name in of)
        lines = []
        for heading, rows in groups.items():
            place = heading[len(model) + 2 :]
            marks = [(row["seq"], row["estimated_gb"], row["variant"]) for row in rows if row.get("estimated_gb")]
            speed = _curves(f"{place}: tokens per second", rows, "tokens_per_s", over, label)
            memory = _curves(f"{place}: peak memory a {unit}, GB", rows, "peak_allocated_gb", over, label)
            if marks and over == "seq":
                memory.marks, memory.heading = marks, f"{memory.heading} (x: liger fit)"
            lines.append([speed, memory])
        said = f"against {label}; a line ends where memory is out"
        yield Plot(name_of(name, model), f"{model}: {about}: {found}", said, hardware_line(data.get("meta", {})), lines)


def _curves(heading: str, rows: list[Row], name: str, over: str, label: str) -> Curves:
    lines = []
    for variant in order(rows):
        mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row[over])
        good = [(row[over], row[name]) for row in mine if value_of(row, name) and row.get("accurate") is not False]
        failed = [row[over] for row in mine if row.get("failed")]
        if good:
            lines.append(Line(variant, variant_label(variant) + (f", not {min(failed):,}" if failed else ""), good))
    return Curves(heading, lines, label, [row[over] for row in rows])


def _step_groups(data: Data) -> dict[str, list[Row]]:
    """Heading -> its rows, in the order of the variants."""
    groups: dict[str, list[Row]] = {}
    for row in data["rows"]:
        groups.setdefault(f"{row['model']}, {row['batch']} x {row['seq']}{_place(row)}", []).append(row)
    return {
        heading: sorted(rows, key=lambda row: order(rows).index(row["variant"])) for heading, rows in groups.items()
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


def _breakdown(data: Data) -> Iterator[Plot]:
    """The device time of a step by kind, in stacked bars."""
    timed = [row for row in data["rows"] if row.get("breakdown_ms") and not row.get("failed")]
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
    kinds = [kind for kind in KINDS if any(row["breakdown_ms"].get(kind) for row in timed)]
    words = "ms of device time per step; teal: what our kernels replace"
    if on_cpu(data.get("meta", {})):
        words = "ms of time per step; teal: what a patch replaces"
    lines: list[list[Panel]] = []
    for heading, rows in _step_groups({"rows": timed}).items():
        values = [{kind: row["breakdown_ms"][kind] for kind in kinds if row["breakdown_ms"].get(kind)} for row in rows]
        named = [(variant_label(row["variant"]), part, row["variant"] == OURS) for row, part in zip(rows, values)]
        lines.append([Stacks(heading, named, KINDS, max(sum(part.values()) for part in values))])
    if lines:
        legend = Legend({kind: KINDS[kind] for kind in kinds})
        yield Plot("breakdown", title, words, hardware_line(data.get("meta", {})), [[legend], *lines])


def _replaced(parts: dict[str, float | None]) -> float:
    """The share of a step's time in the kinds that our kernels replace."""
    return sum(parts.get(kind) or 0 for kind in ("loss", "norm", "activation", "rope")) / (
        sum(filter(None, parts.values())) or 1
    )
