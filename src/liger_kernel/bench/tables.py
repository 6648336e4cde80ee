"""Tables of results, as text and in Markdown, and ``liger bench report``, which makes them of the
files that runs wrote with ``--json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from liger_kernel.bench.arguments import outputs
from liger_kernel.bench.results import (
    Row,
    beyond,
    digits,
    key,
    merged,
    noise,
    parts_of,
    ratio,
    read,
    status,
    times,
    with_ours,
    write_csv,
)
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import Parser, UserError, aligned

LONGEST = 60  # most characters of a cell


class Column(NamedTuple):
    """A column: its name, and the text of a row beside the row with which it is compared."""

    name: str
    text: Callable[[Row, Row | None], str]
    left: bool = False


def _words(name: str, field: str) -> Column:
    return Column(name, lambda row, base: "" if row.get(field) is None else str(row[field]), left=True)


def _number(name: str, field: str, show: Callable[[Any], str] = digits) -> Column:
    return Column(name, lambda row, base: "" if row.get("failed") or row.get(field) is None else show(row[field]))


def _spread(field: str, spread: str, show: Callable[[Any], str]) -> Callable[[Row, Row | None], str]:
    """A measured value and its interquartile range; or why there is none."""

    def text(row: Row, base: Row | None) -> str:
        if row.get("failed"):
            return status(row)
        about = "" if row.get(spread) is None else f" ± {100 * row[spread]:.1f} %"
        return (show(row[field]) if row.get(field) else "") + about

    return text


def _error(row: Row, base: Row | None) -> str:
    """The error divided by PyTorch's."""
    error, pytorch = row.get("error"), row.get("error_pytorch")
    if row.get("failed") or error is None or pytorch is None:
        return ""
    return _judged(row, digits(error / pytorch if pytorch else math.inf if error else 1.0))


def _judged(row: Row, shown: str) -> str:
    return f"{shown} inaccurate" if status(row) == "inaccurate" else shown


def _parity(row: Row, base: Row | None) -> str:
    parity = row.get("loss_parity")
    return "" if parity is None or row.get("failed") else _judged(row, f"{parity:.1e}" if parity else "0")


def _faster(row: Row, base: Row | None) -> str:
    """A step's speed over its baseline's, unless the difference may be chance."""
    factor = ratio(row, base, "tokens_per_s")
    if factor is None or base is None:
        return ""
    return times(factor) if beyond(factor, noise(row, base)) else "in noise"


OPERATOR = (
    *(_words(name, name) for name in ("op", "case", "dtype", "mode", "variant")),
    Column("device ms", _spread("device_ms", "device_spread", digits)),
    Column("x", lambda row, ours: times(ratio(row, ours))),  # how many times as fast ours is
    _number("wall", "wall_ms"),
    _number("host", "host_ms"),
    _number("kernels", "kernels", "{:g}".format),
    _number("peak MB", "peak_mb", lambda x: f"{x:,.0f}" if x >= 100 else digits(x)),
    _number("% floor", "percent_of_floor", "{:.0f}".format),
    Column("error/PyTorch", _error),
)
STEP = (
    *(_words(name, name) for name in ("model", "variant", "batch", "seq", "gpus", "parallel")),
    Column("step", lambda row, base: ", ".join(parts_of(row)), left=True),
    Column("tokens/s", _spread("tokens_per_s", "spread", "{:,.0f}".format)),
    Column("x", _faster),  # this row over the first of its group, which is stock where it was measured
    _number("step ms", "step_ms"),
    _number("MFU %", "mfu", lambda x: f"{100 * x:.1f}"),
    _number("peak GB", "peak_allocated_gb"),
    Column("x", lambda row, base: times(ratio(row, base, "peak_allocated_gb"))),
    _number("reserved GB", "peak_reserved_gb"),
    _number("largest batch", "largest_batch", "{:g}".format),
    _number("longest rows", "largest_seq", "{:,}".format),
    Column("loss parity", _parity),
    _number("gradient parity", "gradient_parity", "{:.1e}".format),
)
SOURCE = _words("measured", "source")  # the file of benchmarks/data; only rows of one file are compared
SHARED = ("dtype", "gpus", "parallel", "seq", "step")  # columns that a table leaves out if all rows have the same
ZERO = ("kernels", "peak MB")  # columns that are zero in every row if they could not be measured


def compared(rows: Iterable[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with the row with which it is compared: that of ours for an operator, for a step the
    first of its group."""
    rows = list(rows)
    if not any("model" in row for row in rows):
        return with_ours(rows)
    first: dict[Any, Row] = {}
    return [(row, first.setdefault(key(row), row)) for row in rows]


def cells(rows: Iterable[Row], everything: bool = False) -> tuple[list[Column], list[list[str]]]:
    """The columns with content, and the texts of the rows. ``everything``: also columns whose text
    all rows share, and texts in full."""
    pairs = compared(rows)
    columns = STEP if any("model" in row for row, _ in pairs) else OPERATOR
    columns = (*columns, SOURCE) if any("source" in row for row, _ in pairs) else columns
    shorten = lambda text: text if everything or len(text) <= LONGEST else text[: LONGEST - 2] + " …"
    texts = [[shorten(column.text(row, base)) for column in columns] for row, base in pairs]
    keep = []
    for i, column in enumerate(columns):
        distinct = {line[i] for line in texts}
        empty = not distinct - {"", *(["0"] if column.name in ZERO else [])}
        if not empty and (everything or column.name not in SHARED or len(distinct) > 1):
            keep.append(i)
    return [columns[i] for i in keep], [[line[i] for i in keep] for line in texts]


def text_table(rows: Iterable[Row]) -> str:
    """Rows of operators or of steps as a table for a terminal."""
    columns, lines = cells(rows)
    words = {i for i, column in enumerate(columns) if column.left}
    return aligned([[column.name for column in columns], *lines], words)


def markdown_table(rows: Iterable[Row]) -> str:
    """The rows as a table in Markdown."""
    columns, lines = cells(rows)
    lines = [[text.replace("|", "\\|") for text in line] for line in lines]
    lines = [[column.name for column in columns], ["---" if column.left else "---:" for column in columns], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str]) -> int:
    """``liger bench report``: a table of runs that were written with ``--json``."""
    parser = Parser(
        prog="liger bench report", description="A table of runs written with --json, of operators or of steps."
    )
    more = "files, or the CSV made of them; a row measured again in a later one takes the place of the earlier"
    parser.add_argument("json", nargs="+", help=more)
    parser.add_argument("--csv", metavar="FILE", help="write the rows as a table")
    parser.add_argument("--markdown", metavar="FILE", help="write the table in Markdown")
    a = parser.parse_args(argv)
    result = merged([read(path) for path in a.json])
    kinds = {"model" in row for row in result["rows"]}
    if not kinds:
        raise UserError(f"{', '.join(a.json)}: no rows, so there is no table")
    if len(kinds) > 1:
        raise UserError("the files hold rows of operators and of steps: make a report of each kind")
    outputs(csv=a.csv, markdown=a.markdown)
    print(text_table(result["rows"]))
    if a.csv:
        write_csv(result, a.csv)
    if a.markdown:
        export(a.markdown, markdown_table(result["rows"]) + "\n")
    return 0
