"""Tables and plots of docs/benchmarks, from the files of benchmarks/data: python
benchmarks/pages.py [--check | --estimate]

A page says where a table stands, and what is in it, by a comment; the table between that line and
the next comment is written here:

    <!-- operators rms_norm layer_norm -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from labels import hardware_line, variant_label
from plots import Plot, plots_of

from liger_kernel.bench.results import OURS, Row, digits, merged, parts_of, ratio, read, status, times, with_ours

ROOT = Path(__file__).parents[1]
DATA, PAGES = ROOT / "benchmarks" / "data", ROOT / "docs" / "benchmarks"
ESTIMATES = DATA / "estimates.json"  # of ``liger fit`` for the plot of long rows: half a minute
PICTURE = PAGES / "step.svg"  # of the README
RIVALS = ("upstream", "compile", "torch", "eager")
LENGTHS = "2026-11-25-h200-lengths.csv 2026-11-26-h200-lengths.csv"
# Plots: the files that they are drawn from, the later one replacing rows of the earlier, and those
# that pages show
PLOTS = {
    "2026-11-20-h200-operators.csv": "time-linear_cross_entropy-bf16 memory-linear_cross_entropy-bf16 "
    "tokens-linear_cross_entropy-bf16-full"
    " vocabulary-linear_cross_entropy-bf16-full time-cross_entropy-bf16 time-jsd-bf16 time-grpo-bf16 "
    "time-rms_norm-bf16 time-rope-bf16 time-glu-bf16",
    "2026-11-21-h200-operators.csv": "time-layer_norm-bf16 time-fused_add_rms_norm-bf16 time-qk_norm_rope-bf16 "
    "time-softmax-bf16",
    "2026-11-22-h200-operators.csv": "time-mlp-bf16 time-moe-bf16",
    "2026-11-22-h200-steps-all.csv": "step breakdown",
    "2026-11-24-h200-adapters.csv": "step:step-adapters",
    "2026-11-26-h200-4gpus-steps.csv": "step:step-4gpus",
    LENGTHS: "lengths-llama_3_8b",
    "2026-11-22-h200-2gpus-batches.csv 2026-11-23-h200-2gpus-batches.csv": "batches-llama_3_8b batches-gemma_7b",
}
UNITS = {
    "operators": "Device time in milliseconds of forward and backward together, bf16; in brackets, how many times as "
    "long as ours it takes. Peak memory in MB"
    " beyond the inputs.",
    "steps": "Tokens per second of all GPUs, with the interquartile range of the step time; peak memory in GB of a "
    "GPU; “x” is this row over the"
    " first of its model.",
    "largest": "The most sequences of 2048 tokens, and the longest single sequence in tokens, that fit into the "
    "memory of one GPU; AdamW, no checkpointing.",
}


def commands() -> dict[str, dict[str, str]]:
    with open(DATA / "commands.csv", newline="") as file:
        return {line["file"]: line for line in csv.DictReader(file)}


def source(name: str) -> dict[str, Any]:
    """A file of data, whose rows know where they are from: only rows of one file are compared."""
    result = read(DATA / name)
    return result | {"rows": [row | {"source": name} for row in result["rows"]]}


def results(kind: str) -> list[dict[str, Any]]:
    """The files of one kind, the oldest first."""
    return [source(path.name) for path in sorted(DATA.glob("*.csv")) if kind in _columns(path)]


def _columns(path: Path) -> list[str]:
    """Those of results; other data have none."""
    with open(path, newline="") as file:
        columns = next(csv.reader(file), [])
    return columns if "variant" in columns else []


def caption(kind: str, files: Iterable[str]) -> str:
    """What every table says below itself: units, baseline, hardware, date, command."""
    parts = [UNITS[kind]]
    for name in dict.fromkeys(files):
        about = commands()[name]
        parts += [
            f"{hardware_line(read(DATA / name)['meta'])}: "
            f"`{about['command']}`.{' ' + about['note'] if about['note'] else ''}"
        ]
    return "\n".join(parts[:1] + [f"- {part}" for part in parts[1:]]).replace("\n", "\n\n", 1)


def markdown(heads: list[str], lines: list[list[str]], words: int) -> str:
    """A table whose first ``words`` columns are text, the others numbers."""
    write = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([write(heads), write(["---"] * words + ["---:"] * (len(heads) - words)), *map(write, lines)])


def operators(*names: str) -> str:
    """The latest measurement of each case: a rival's number is from the same file as ours."""
    lines, files, latest = [], [], {}
    for result in results("op"):
        for row, ours in with_ours(row for row in result["rows"] if not row.get("sweep")):
            if row["op"] in names and ours is not None:
                latest.setdefault((row["op"], row["case"]), {}).setdefault(row["source"], {})[row["variant"]] = (
                    row,
                    ours,
                )
    shown = [name for name in RIVALS if any(name in found[max(found)] for found in latest.values())]
    for (op, case), found in sorted(latest.items(), key=lambda item: names.index(item[0][0])):
        file = max(found)
        files.append(file)
        pairs = found[file]
        mine, _ = pairs[OURS]
        cells = [op, case, _time(mine, None)] + [_time(*pairs[name]) if name in pairs else "" for name in shown]
        lines.append(
            [
                *cells,
                *[_megabytes(pairs[name][0]) if name in pairs else "" for name in (OURS, "upstream")],
                _floor(mine),
            ]
        )
    heads = [
        "operator",
        "case",
        "ours, ms",
        *(f"{variant_label(name)}, ms" for name in shown),
        "ours, MB",
        "LinkedIn's, MB",
        "% of floor",
    ]
    return f"{markdown(heads, lines, 2)}\n\n{caption('operators', sorted(files))}"


def _time(row: Row, ours: Row | None) -> str:
    if status(row):
        return "failed" if row.get("failed") else "inaccurate"
    slower = ratio(row, ours) if ours else None
    return digits(row["device_ms"]) + (f" ({times(slower)})" if slower else "")


def _megabytes(row: Row) -> str:
    return "" if row.get("failed") else f"{row['peak_mb']:,.0f}"


def _floor(row: Row) -> str:
    return "" if row.get("percent_of_floor") is None else f"{row['percent_of_floor']:.0f}"


def _place(row: Row) -> str:
    gpus = (
        f", {row['gpus']} GPUs"
        if (row.get("gpus") or 1) > 1
        else f", {row['parallel']} on one GPU"
        if row.get("parallel")
        else ""
    )
    return ", ".join([f"{row['model']}, {row['batch']} x {row['seq']}{gpus}", *parts_of(row)])


def runs(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that were measured beside each other; where a variant is there again, another run
    begins."""
    found: list[tuple[str, list[Row]]] = []
    for row in rows:
        open_ = next((group for place, group in reversed(found) if place == _place(row)), None)
        if open_ is None or any(other["variant"] == row["variant"] for other in open_):
            found.append((_place(row), [row]))
        else:
            open_.append(row)
    return found


def steps(*files: str) -> str:
    """Steps of each model, compared with the first variant of its group."""
    lines = []
    for file in files:
        for place, rows in runs(source(file)["rows"]):
            lines += [
                ["" if number else place, variant_label(row["variant"]), *_step(row, rows[0])]
                for number, row in enumerate(rows)
            ]
    heads = ["model, sequences x tokens a GPU", "implementation", "tokens/s", "x", "peak GB", "x"]
    return f"{markdown(heads, lines, 2)}\n\n{caption('steps', files)}"


def _step(row: Row, first: Row) -> list[str]:
    if row.get("failed"):
        return [str(row["failed"]), "", "", ""]
    spread = f" ± {100 * row['spread']:.1f} %" if row.get("spread") is not None else ""
    base = None if row is first or first.get("failed") else first
    rate = times(row["tokens_per_s"] / base["tokens_per_s"]) if base else ""
    memory = times(row["peak_allocated_gb"] / base["peak_allocated_gb"]) if base else ""
    return [f"{row['tokens_per_s']:,.0f}{spread}", rate, digits(row["peak_allocated_gb"]), memory]


def largest(*files: str) -> str:
    """Ours beside one other variant, which all rows have."""
    lines, other = [], ""
    for file in files:
        for row, ours in with_ours(source(file)["rows"]):
            if row["variant"] != OURS and ours is not None:
                other = variant_label(row["variant"])
                for what, name in (("sequences", "largest_batch"), ("tokens of one", "largest_seq")):
                    place = ", ".join([row["model"], *parts_of(row)])
                    lines.append([place, what, f"{row[name]:,}", f"{ours[name]:,}", times(ours[name] / row[name])])
    return (
        f"{markdown(['model', 'what fits', other, 'ours', f'ours / {other}'], lines, 2)}\n\n{caption('largest', files)}"
    )


def plots() -> dict[str, Callable[[], Plot]]:
    """The plots of the pages, by name."""
    found: dict[str, Callable[[], Plot]] = {}
    for files, names in PLOTS.items():
        for name in names.split():
            drawn, _, shown = name.partition(":")
            found[shown or drawn] = functools.partial(_plot, files, drawn, shown or drawn)
    return found


def _plot(files: str, drawn: str, shown: str) -> Plot:
    result = merged([read(DATA / file) for file in files.split()])
    result["rows"] = [row for row in result["rows"] if "model" in row or f"-{row['op']}-" in f"{drawn}-"]
    if drawn.startswith("lengths-"):
        known = json.loads(ESTIMATES.read_text())
        result["rows"] = [row | {"estimated_gb": known.get(_estimate_of(row))} for row in result["rows"]]
    return dataclasses.replace(next(plot for plot in plots_of(result) if plot.name == drawn), name=shown)


KINDS: dict[str, Callable[..., str]] = {"operators": operators, "steps": steps, "largest": largest}
TABLE = re.compile(r"(<!-- (operators|steps|largest) ([^\n]*?) -->\n).*?(<!-- end -->)", re.S)


def written(text: str) -> str:
    """A page with its tables as the data has them now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{KINDS[found[2]](*found[3].split())}\n\n{found[4]}", text)


def _estimate_of(row: Row) -> str:
    return f"{row['model']} {row['variant']} {row['seq']}"


def estimates(names: str = LENGTHS) -> dict[str, float]:
    """What ``liger fit`` says of the peaks of rows, in GB, as far as it knows their steps."""
    from estimates import NOT_ESTIMATED, measured

    rows = [row for name in names.split() for row in read(DATA / name)["rows"] if not row.get("failed")]
    known = [row for row in rows if not any(outside(row) for outside in NOT_ESTIMATED.values())]
    return {_estimate_of(row): round(measured(row).estimate().total / 1e9, 3) for row in known}


def files() -> Iterator[tuple[Path, str]]:
    """What is written from the data: the pages, and the README's plot."""
    yield PICTURE, plots()["step"]().file()
    for page in sorted(PAGES.glob("*.md")):
        yield page, written(page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a table is not what the data says"
    )
    parser.add_argument("--estimate", action="store_true", help="ask `liger fit` again for the plot of long rows")
    a = parser.parse_args()
    if a.estimate:
        ESTIMATES.write_text(json.dumps(estimates(), indent=1) + "\n")
    stale = {file: text for file, text in files() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        state = "is not what the data says: python benchmarks/pages.py" if a.check else "written"
        print(f"{file.relative_to(ROOT)} {state}")
        if not a.check:
            file.write_text(text)
    return int(a.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
