"""Rows of results: comparisons, and tables as text.

The input is a dict that ``liger bench`` or ``liger bench step`` writes as JSON: ``{"meta": {...},
"rows": [{...}, ...]}``. A row has no ratio anywhere if it failed or is inaccurate, or if our row
failed or is inaccurate.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_kernel.train.files import export
from liger_kernel.train.mistakes import UserError, existing
from liger_kernel.train.redact import in_a_line

Row = dict[str, Any]
OURS = "ours"
LABELS = {
    "ours": "ours",
    "base": "ours, base commit",
    "upstream": "LinkedIn's package",
    "compile": "torch.compile",
    "torch": "torch built-in",
    "cce": "cut-cross-entropy",
    "quack": "quack",
    "ao": "torchao",
    "ao+compile": "torchao, compiled",
    "eager": "PyTorch eager",
    "stock": "stock",
    "ours+compile": "ours + compile",
    "upstream+compile": "LinkedIn's + compile",
    "layers": "compiled layers",
    "ours:off": "ours, keeping everything",
    "ours:mlp": "ours, keeping least",
    "ours:experts": "ours, of experts, too",
    "ours:offload": "ours, offloading",
    "ours:attention": "ours, attention kept",
    "ours:tiled": "ours, tiled MLP",
    "ours:offload-attention": "ours, offloading, attention kept",
    "ours:offload-tiled": "ours, offloading, tiled MLP",
    "ours:long": "ours, all for long rows",
    "ours:bf16": "ours, in bf16",
    "ours:head": "ours, head in FP8",
    "torchao": "ours + torchao's layers, compiled",
    "ours:gathered": "ours, torchao's layers gathered in FP8",
    "torchao:gathered": "ours + torchao's layers, gathered in FP8, compiled",
    "ours:fp8": "ours, FP8 base",
    "ours:fp8_rowwise": "ours, FP8 base by rows",
    "unsloth": "Unsloth",
    "unsloth:offload": "Unsloth, offloading",
    "ours+layers": "ours + compiled layers",
    "upstream+layers": "LinkedIn's + compiled layers",
}
MEANING = {
    "ours": "the operator of this package",
    "base": "the same operator at another commit (--base)",
    "upstream": "LinkedIn's liger-kernel package, in a process of its own",
    "compile": "the eager code under torch.compile",
    "torch": "the fused function that PyTorch itself ships",
    "cce": "the cut-cross-entropy package",
    "quack": "the quack-kernels package",
    "ao": "the torchao package",
    "ao+compile": "the torchao package, under torch.compile",
    "eager": "plain PyTorch, one kernel after another",
    "stock": "the Hugging Face model as it is",
    "ours:off": "the model with our kernels, every intermediate result kept for the backward",
    "ours:mlp": "the model with our kernels, projections of gated MLPs computed again in the backward",
    "ours:offload": "the model with our kernels, activations kept in the CPU's memory (activation_offloading=True)",
    "ours:attention": "the model with our kernels, checkpointed layers keep the outputs of attention "
    "(keep_attention=True)",
    "ours:tiled": "the model with our kernels, MLPs in tiles of the tokens (tiled_mlp=True)",
    "ours:offload-attention": "ours:offload and ours:attention together",
    "ours:offload-tiled": "ours:offload and ours:tiled together",
    "ours:long": "ours:offload, ours:attention and ours:tiled together",
    "ours:experts": "the model with our kernels, those of experts too in a family that leaves them alone by default "
    "(swiglu=True)",
    "ours:bf16": "the model with our kernels, without the FP8 of the other variants (--fp8)",
    "ours:head": "the model with our kernels, the output head in FP8, too (fp8_head=True)",
    "torchao": "the model with our kernels, its linear layers converted by torchao, each decoder layer under "
    "torch.compile",
    "ours:gathered": "the model with our kernels, its linear layers converted by torchao so that FSDP2 gathers "
    "weights in FP8",
    "torchao:gathered": "the same, each decoder layer under torch.compile, which compiles torchao's own products",
    "ours:fp8": "the model with our kernels, its frozen weights in FP8",
    "ours:fp8_rowwise": "the same with a scale for each row",
    "unsloth": "the model by Unsloth's FastLanguageModel",
    "unsloth:offload": "the same, a checkpointed layer's input kept in the CPU's memory",
    "ours+compile": "the model with our kernels, under torch.compile",
    "upstream+compile": "the model with LinkedIn's kernels, under torch.compile",
    "layers": "the Hugging Face model, each decoder layer under torch.compile",
    "ours+layers": "the model with our kernels, each decoder layer under torch.compile",
    "upstream+layers": "the model with LinkedIn's kernels, each decoder layer under torch.compile",
}
COUNTS = ("kernels", "peak MB")  # columns that are zero in every row if they could not be measured
LONGEST = 60  # most characters of a cell in a text table
MODES = {"forward": "forward", "backward": "backward", "full": "forward + backward"}


def usable(row: Row | None) -> bool:
    """Whether the row ran with the right results, so that its speed may be compared."""
    return row is not None and not row.get("failed") and row.get("accurate") is not False


def key(row: Row) -> tuple[Any, ...]:
    """The values that two rows must share to be compared."""
    if "model" not in row:
        return tuple(row.get(name) for name in ("op", "case", "dtype", "mode", "sweep", "x", "source"))
    return (*(row.get(name) for name in ("model", "batch", "seq", "gpus", "parallel", "source")), *parts_of(row))


def parts_of(row: Mapping[str, Any]) -> list[str]:
    """What a step does and what it trains, in words. In results that are older than a flag, the
    flag was off."""
    adapters = f"{'DoRA' if row.get('dora') else 'LoRA'} {row['lora']}" if row.get("lora") else ""
    adapters += f" on {row['lora_targets']}" if row.get("lora_targets") else ""
    adapters += f" with dropout {row['lora_dropout']:g}" if row.get("lora_dropout") else ""
    layers, base, tiles = (
        row.get("layers"),
        row.get("quantize"),
        f"tiled MLPs in {row['tiled_mlp']}" if row.get("tiled_mlp") else "",
    )
    parts = [f"{layers} layers" if layers else "", "expert parallelism" if row.get("parallel") == "ep" else ""]
    parts += [name for name in ("autocast", "checkpointing") if row.get(name)]
    parts += [row["attention"]] if row.get("attention") else []
    parts += [
        row["optimizer"] if row.get("optimizer") not in (None, "sgd", "adamw") else ""
    ]  # what a page's text does not say
    parts += [
        "step in the backward" if row.get("optimizer_in_backward") else "",
        "optimizer on the CPU" if row.get("optimizer_on_cpu") else "",
    ]
    return [
        part
        for part in (
            *parts,
            adapters,
            f"{base} base" if base else "",
            f"FP8 {row['fp8']}" if row.get("fp8") else "",
            tiles,
        )
        if part
    ]


def with_ours(rows: Iterable[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with our row for comparison."""
    rows = list(rows)
    ours = {key(row): row for row in rows if row["variant"] == OURS}
    return [(row, ours.get(key(row))) for row in rows]


def ratio(row: Row, ours: Row | None, name: str = "device_ms") -> float | None:
    """``row[name]`` divided by ours; for times, how many times as fast ours is. None if the
    comparison would mean nothing."""
    if row["variant"] == OURS or not usable(row) or not usable(ours):
        return None
    assert ours is not None
    theirs, mine = row.get(name), ours.get(name)
    return theirs / mine if theirs and mine else None


def speedup(row: Row, ours: Row | None) -> float | None:
    """How many times as fast ours is, for rows of either kind."""
    if "model" in row:
        slower = ratio(row, ours, "tokens_per_s")
        return 1 / slower if slower else None
    return ratio(row, ours)


# relative difference in tokens/s of one variant between processes and cards of one kind
# (MEASURED.md, "Adapters": several runs and cards)
RUNS = 0.03


def on_cpu(meta: Mapping[str, Any]) -> bool:
    """Whether results with this ``meta`` were measured without a GPU."""
    return _flat(meta.get("hardware")).startswith("CPU")


def noise(row: Row, other: Row, cpu: bool = False) -> float:
    """The relative difference of two steps' speeds that may be chance: the spread of steps, and
    on a GPU also the spread of runs."""
    return max(row.get("spread") or 0.0, other.get("spread") or 0.0, 0.0 if cpu else RUNS)


def beyond(factor: float, noise: float) -> bool:
    """Whether a ratio of speeds is more than noise. If the spread is half of a step's time, no
    ratio is."""
    return noise < 0.5 and not 1 / (1 + noise) <= factor <= 1 + noise


def headline(row: Row, other: Row, cpu: bool = False) -> str:
    """How much faster the first of two usable steps is, how much less memory it needs, and what
    is noise. Empty if a speed is missing."""
    if not row.get("tokens_per_s") or not other.get("tokens_per_s"):
        return ""
    faster, margin = row["tokens_per_s"] / other["tokens_per_s"], noise(row, other, cpu)
    mine, theirs = variant_label(row["variant"]), variant_label(other["variant"])
    spread = max(row.get("spread") or 0.0, other.get("spread") or 0.0)
    runs = "how much runs differ was not measured" if cpu else f"runs on other days and cards by {RUNS:.0%}"
    speed = (
        f"{times(faster)} the tokens/s of {theirs}"
        if beyond(faster, margin)
        else f"no difference in tokens/s from {theirs} beyond the noise"
    )
    memory = ""
    if row.get("peak_allocated_gb") and other.get("peak_allocated_gb"):
        memory = f"; {times(row['peak_allocated_gb'] / other['peak_allocated_gb'])} its peak memory"
    return f"{mine}: {speed}{memory} (noise of tokens/s {margin:.1%}: steps spread by {spread:.1%}; {runs})"


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
    return (
        ""
        if value is None
        else f"{value:.0f}x"
        if value >= 100
        else f"{value:.1f}x"
        if value >= 10
        else f"{value:.2f}x"
    )


def span(values: Sequence[float]) -> str:
    """``1.08-1.29x``: the range of some ratios."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low[:-1]}–{high}"


def variant_label(name: str) -> str:
    return LABELS.get(name, name)


def status(row: Row) -> str:
    """``failed: why``, ``inaccurate`` or nothing."""
    if row.get("failed"):
        return f"failed: {' '.join(str(row['failed']).split())}"
    return "inaccurate" if row.get("accurate") is False else ""


def hardware_line(meta: dict[str, Any]) -> str:
    """The line under every plot: what was measured, on which hardware, and when."""
    versions = [
        f"{name.replace('_', '-')} {meta[name]}"
        for name in ("torch", "triton", "transformers", "liger_kernel")
        if meta.get(name)
    ]
    return ", ".join(str(part) for part in (_flat(meta.get("hardware")), *versions, meta.get("date")) if part)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(inner)}" for name, inner in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """A column. ``value`` is for sorting, ``text`` is shown; both take a row and our row."""

    name: str
    meaning: str
    value: Callable[[Row, Row | None], Any]
    text: Callable[[Row, Row | None], str]
    filtered: bool = False
    left: bool = False


def _words(name: str, field: str, meaning: str, show: Callable[[Any], str] = str, filtered: bool = True) -> Column:
    text = lambda row, ours: "" if row.get(field) is None else show(row[field])
    return Column(name, meaning, text, text, filtered, left=True)


def _listed(name: str, meaning: str, parts: Callable[[Row], list[str]]) -> Column:
    text = lambda row, ours: ", ".join(parts(row))
    return Column(name, meaning, text, text, filtered=True, left=True)


def _number(name: str, field: str, meaning: str, show: Callable[[Any], str] = digits) -> Column:
    number = lambda row, ours: None if row.get("failed") else row.get(field)
    return Column(name, meaning, number, lambda row, ours: "" if number(row, ours) is None else show(number(row, ours)))


def _device(row: Row, ours: Row | None) -> str:
    if row.get("failed"):
        return status(row)
    spread = row.get("device_spread")
    return digits(row.get("device_ms")) + ("" if spread is None else f" ± {100 * spread:.1f} %")


def _error(row: Row, ours: Row | None = None) -> float | None:
    error, pytorch = row.get("error"), row.get("error_pytorch")
    if row.get("failed") or error is None or pytorch is None:
        return None
    return error / pytorch if pytorch else math.inf if error else 1.0


def _error_text(row: Row, ours: Row | None) -> str:
    error = _error(row)
    shown = "" if error is None else digits(error)
    return f"{shown} inaccurate".strip() if status(row) == "inaccurate" else shown


def _parity(row: Row) -> str:
    parity = row.get("loss_parity")
    shown = "" if parity is None or row.get("failed") else f"{parity:.1e}" if parity else "0"
    return f"{shown} inaccurate".strip() if status(row) == "inaccurate" else shown


OPERATOR = (
    _words("op", "op", "The operator."),
    _words("case", "case", "Shapes of a real model, or a point of a sweep.", filtered=False),
    _words("dtype", "dtype", "Type of the inputs."),
    _words("mode", "mode", "Forward, backward, or full: forward and backward."),
    _words("variant", "variant", "Who computes: see the list of variants."),
    Column(
        "device ms",
        "Milliseconds the device computes: the durations of all kernels of one call, summed, with a cold L2 cache. "
        "Neither Python nor gaps between "
        "kernels are in it. Median of the repeats; ± is the interquartile range, in percent of the median. Without a "
        "GPU it is the wall time.",
        lambda row, ours: None if row.get("failed") else row.get("device_ms"),
        _device,
    ),
    Column(
        "x",
        "How many times as fast ours is, by device time: above 1 ours is faster. Empty where either of the two "
        "failed or is inaccurate.",
        ratio,
        lambda row, ours: times(ratio(row, ours)),
    ),
    _number(
        "wall",
        "wall_ms",
        "Milliseconds from the start of the call to its result being there, as a caller sees it: host, gaps and "
        "device.",
    ),
    _number(
        "host",
        "host_ms",
        "Milliseconds that Python and the driver need to enqueue the call. Where host exceeds device, the device "
        "waits for the host.",
    ),
    _number("kernels", "kernels", "Kernels launched by one call.", lambda n: f"{n:g}"),
    _number(
        "peak MB",
        "peak_mb",
        "Peak memory beyond the inputs, results and gradients included.",
        lambda x: f"{x:,.0f}" if x >= 100 else digits(x),
    ),
    _number(
        "% floor",
        "percent_of_floor",
        "100 x floor / device. The floor is the least time that this machine could need: the bytes that the operator "
        "has to move at the copy bandwidth, or its "
        "FLOPs at the rate of a matrix product of that shape, both measured in the same run, whichever takes longer. "
        "100 is perfect.",
        lambda x: f"{x:.0f}",
    ),
    Column(
        "error/PyTorch",
        "Largest RMS error of the results and gradients against fp64, divided by the error that PyTorch makes in the "
        "same type. 1 is as exact as PyTorch; "
        "'inaccurate' did not pass the accuracy check, and its speed counts for nothing.",
        _error,
        _error_text,
    ),
)
STEP = (
    _words("model", "model", "Hugging Face architecture, in random weights."),
    _words("variant", "variant", "Who trains: see the list of variants. Each in a process of its own."),
    _words("batch", "batch", "Rows per device.", filtered=False),
    _words("seq", "seq", "Tokens per row.", filtered=False),
    _words("gpus", "gpus", "Devices."),
    _words("parallel", "parallel", "How the model is spread over them."),
    _listed("step", "What else steps must share to be compared.", parts_of),
    Column(
        "tokens/s",
        "Tokens trained per second; ± is the interquartile range of the step time, in percent.",
        lambda row, ours: None if row.get("failed") else row.get("tokens_per_s"),
        lambda row, ours: (
            status(row)
            if row.get("failed")
            else (f"{row['tokens_per_s']:,.0f}" if row.get("tokens_per_s") else "")
            + (f" ± {100 * row['spread']:.1f} %" if row.get("spread") is not None else "")
        ),
    ),
    Column("x", "How many times as fast ours trains.", speedup, lambda row, ours: times(speedup(row, ours))),
    _number("step ms", "step_ms", "Median wall time of one optimizer step."),
    _number(
        "MFU %",
        "mfu",
        "FLOPs of the model per second, in percent of what the device could do.",
        lambda x: f"{100 * x:.1f}",
    ),
    _number("peak GB", "peak_allocated_gb", "Peak memory that tensors occupied."),
    _number(
        "reserved GB", "peak_reserved_gb", "Peak memory that PyTorch took from the device, its fragmentation included."
    ),
    _number("largest batch", "largest_batch", "Most rows that fit.", lambda n: f"{n:g}"),
    _number("longest rows", "largest_seq", "Most tokens a row of which the batch fits.", lambda n: f"{n:,}"),
    Column(
        "loss parity",
        "Largest relative difference of a loss to stock's, over the first steps; 'inaccurate': more than rounding "
        "explains, so its speed counts for nothing.",
        lambda row, ours: None if row.get("failed") else row.get("loss_parity"),
        lambda row, ours: _parity(row),
    ),
)


def text_table(rows: Iterable[Row]) -> str:
    """Rows of operators or of steps as a table for a terminal. The caller adds a line of
    explanation."""
    columns, lines = _cells(rows, all_columns=False)
    lines = [[column.name for column in columns], *lines]
    widths = [
        max(len(line[i]) for line in lines if not line[i].startswith("failed:")) for i in range(len(columns))
    ]  # a failure has no cells after it
    align = lambda text, i: text.ljust(widths[i]) if columns[i].left else text.rjust(widths[i])
    return "\n".join("  ".join(align(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def markdown_table(rows: Iterable[Row]) -> str:
    """The rows as a table in Markdown."""
    columns, lines = _cells(rows, all_columns=False)
    write = lambda cells: "| " + " | ".join(cells) + " |"
    head = [
        write([column.name for column in columns]),
        "|" + "|".join("---" if column.left else "---:" for column in columns) + "|",
    ]
    return "\n".join(head + [write([text.replace("|", "\\|") for text in line]) for line in lines])


def _cells(rows: Iterable[Row], all_columns: bool) -> tuple[list[Column], list[list[str]]]:
    """The columns and the texts. Columns without content are omitted; without ``all_columns``,
    so is a dtype or setting that all rows share."""
    pairs = with_ours(rows)
    columns = list(_columns(row for row, _ in pairs))
    shorten = lambda text: text if all_columns or len(text) <= LONGEST else text[: LONGEST - 2] + " …"
    texts = [[shorten(column.text(row, ours)) for column in columns] for row, ours in pairs]
    shared = () if all_columns else ("dtype", "gpus", "parallel")
    keep = [
        i
        for i, column in enumerate(columns)
        if (distinct := {line[i] for line in texts} - ({"", "0"} if column.name in COUNTS else {""}))
        and not (column.name in shared and len(distinct) < 2)
    ]
    return [columns[i] for i in keep], [[line[i] for i in keep] for line in texts]


SOURCE = _words(
    "measured",
    "source",
    "The file of benchmarks/data that has the row; only rows of one file were measured beside each other.",
)


def _columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    rows = list(rows)
    columns = STEP if any("model" in row for row in rows) else OPERATOR
    return (*columns, SOURCE) if any("source" in row for row in rows) else columns


def read(path: str | Path) -> dict[str, Any]:
    """Read a result from the JSON that a run writes, or from the CSV that is made from it.
    Raises ``UserError`` for other files."""
    file = existing(path)
    try:
        result = _of_csv(file) if file.suffix == ".csv" else json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise UserError(
            f"{path} is not valid {'CSV' if file.suffix == '.csv' else 'JSON'}: {in_a_line(error)}"
        ) from error
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
    rows: dict[tuple[Any, ...], Row] = {}
    for result in results:
        for row in result["rows"]:
            identity = (*key(row), row["variant"])
            rows[identity] = row
    return {"meta": results[0]["meta"], "rows": list(rows.values())}


META = ("hardware", "torch", "triton", "transformers", "liger_kernel", "date")


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
    for row in found:
        kinds = {
            name.removesuffix("_ms"): row.pop(name)
            for name in [name for name in row if name.endswith("_ms") and name not in TIMES]
        }
        breakdown = {"breakdown_ms": kinds} if any(value is not None for value in kinds.values()) else {}
        rows.append({name: value for name, value in row.items() if name not in META} | breakdown)
    return {"meta": {name: found[0].get(name) for name in META} if found else {}, "rows": rows}


WORDS = {
    *META,
    *[
        "op",
        "case",
        "dtype",
        "mode",
        "variant",
        "sweep",
        "model",
        "parallel",
        "quantize",
        "fp8",
        "lora_targets",
        "data",
        "optimizer",
        "failed",
        "peak_phase",
    ],
}
TIMES = ("device_ms", "wall_ms", "host_ms", "floor_ms", "step_ms")


def _parsed(name: str, text: str) -> Any:
    if name in WORDS or not text:
        return text or None
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text) if text[0] in "{-0123456789" else text
    except ValueError:
        return text


def write_csv(result: dict[str, Any], path: str) -> None:
    """Write the rows as CSV, with hardware, versions and date in each row."""
    about = {k: result["meta"].get(k) for k in META}
    rows = [
        {
            k: json.dumps(v) if isinstance(v, dict) else f"{v:.6g}" if isinstance(v, float) else v
            for k, v in (row | about).items()
        }
        for row in result["rows"]
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(k for row in rows for k in row)))
    writer.writeheader()
    writer.writerows(rows)
    export(path, text.getvalue())


def peak_of(timeline: list[tuple[float, float, str]]) -> tuple[float, float, str]:
    """The milliseconds, GB and phase of the memory peak."""
    return max(timeline, key=lambda point: point[1])


def write_step_csv(result: dict[str, Any], path: str) -> None:
    """Write a CSV with one line per row: the breakdown in columns, and only the peak of the
    memory timeline."""
    rows = []
    for row in result["rows"]:
        flat = {k: v for k, v in row.items() if k not in ("breakdown_ms", "memory_timeline", "losses")}
        flat |= {k: row.get(k, result["meta"].get(k)) for k in ("data", "lengths", "masked", "optimizer")}
        flat |= {f"{kind}_ms": ms for kind, ms in (row.get("breakdown_ms") or {}).items()}
        flat |= {f"loss_{i}": loss for i, loss in enumerate(row.get("losses") or ())}
        flat["peak_phase"] = peak_of(row["memory_timeline"])[2] if row.get("memory_timeline") else None
        rows.append(flat)
    write_csv({"meta": result["meta"], "rows": rows}, path)
