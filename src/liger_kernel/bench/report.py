"""Results as one self-contained HTML file, and ``liger bench report``: tables, plots and data of
runs that were written with ``--json``."""

from __future__ import annotations

import base64
import html as escape_html
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_kernel.bench.flags import TITLE, outputs
from liger_kernel.bench.rows import (
    LABELS,
    MEANING,
    OPERATOR,
    OURS,
    STEP,
    Row,
    _cells,
    _flat,
    digits,
    hardware_line,
    markdown_table,
    merged,
    read,
    span,
    speedup,
    status,
    text_table,
    times,
    usable,
    variant_label,
    with_ours,
    write_csv,
    write_step_csv,
)
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import Parser, UserError


@dataclass(frozen=True)
class Loss:
    """One measure in which a rival is better. ``ratio``: ours divided by theirs, in the
    direction in which more is worse."""

    row: Row
    measure: str
    ours: float
    theirs: float
    ratio: float
    noise: bool


def losses(rows: Iterable[Row]) -> list[Loss]:
    """Every measure in which a usable rival is better than ours: time before memory, the worst
    first. ``noise``: the spreads of the two explain it."""
    found = []
    for row, ours in with_ours(rows):
        if row["variant"] == OURS or not usable(row) or not usable(ours):
            continue
        assert ours is not None
        spreads = [r.get(name) or 0.0 for r in (row, ours) for name in ("device_spread", "spread")]
        measures = (
            (("tokens/s", "tokens_per_s", -1, max(spreads)), ("peak GB", "peak_allocated_gb", 1, 0.0))
            if "model" in row
            else (
                ("device ms", "device_ms", 1, max(spreads)),
                ("wall ms", "wall_ms", 1, max(spreads)),
                ("peak MB", "peak_mb", 1, 0.0),
            )
        )
        for label, name, sign, spread in measures:
            mine, theirs = ours.get(name), row.get(name)
            if mine is None or theirs is None or sign * (mine - theirs) <= 0:
                continue
            worse = (mine / theirs) ** sign if mine and theirs else math.inf
            found.append(Loss(row, label, mine, theirs, worse, worse <= 1 + spread))
    return sorted(found, key=lambda loss: (loss.noise, loss.measure.startswith("peak"), -loss.ratio))


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#24292f;--quiet:#656d76;--line:#d8dee4;--soft:#f6f8fa;--ours:#0a7d6c;--bad:#b3402e}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e4e8ec;--quiet:#98a2ad;--line:#31373e;--soft:#1c2025;--ours:#4cc3ae;--bad:#f0907f}
figure img{filter:invert(.92) hue-rotate(180deg);mix-blend-mode:lighten}}
body{margin:0 auto;max-width:80rem;padding:2rem 1.25rem 4rem;background:var(--paper);color:var(--ink);font:15px/1.55 "DejaVu Sans",Verdana,system-ui,sans-serif}
h1{font-size:1.55rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.6rem 0 .6rem}h3{font-size:.95rem;margin:1.4rem 0 .4rem}p{max-width:52rem}
.quiet,caption,dt,th,nav{color:var(--quiet)}nav a{margin-right:1.1rem}a{color:var(--ours)}
.scroll{overflow:auto;max-height:34rem}thead{position:sticky;top:0;background:var(--paper)}table{border-collapse:collapse;font-size:.76rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .4rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
.left{text-align:left}th{border-bottom:1.5px solid var(--quiet);font-weight:normal;vertical-align:bottom}
th button{all:unset;cursor:pointer;font-weight:bold}th button:focus-visible{outline:2px solid var(--ours)}
th button::after{content:"\\2002"}th[aria-sort=ascending] button::after{content:" \\25B4"}th[aria-sort=descending] button::after{content:" \\25BE"}
tr.ours td{background:var(--soft)}tr.ours td.who{color:var(--ours);font-weight:bold}td.bad,li.bad{color:var(--bad)}
.cut{max-width:9.5rem;overflow:hidden;text-overflow:ellipsis}
.filters{display:flex;flex-wrap:wrap;gap:.5rem 1.2rem;margin:.8rem 0;font-size:.85rem;color:var(--quiet)}
select,input{font:inherit;color:var(--ink);background:var(--soft);border:1px solid var(--line);border-radius:4px;padding:.1rem .3rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem;font-size:.88rem}dd{margin:0;max-width:48rem;overflow-wrap:anywhere}
figure{margin:0}.plots{display:flex;flex-wrap:wrap;gap:1.6rem .6rem;align-items:flex-start}figure img{max-width:100%;height:auto}
code{font:.92em "DejaVu Sans Mono",ui-monospace,monospace}
"""  # noqa: E501
SCRIPT = """
const sortValue = cell => cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : cell.dataset.v === "" ? null : Number(cell.dataset.v);

function sortBy(header) {
  const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
  const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const rows = Array.from(body.rows, row => [sortValue(row.cells[column]), row]);
  const empty = value => value === null || value === "";
  rows.sort(([a], [b]) => {
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, {numeric: true}));
  });
  body.append(...rows.map(([, row]) => row));
}

function filterRows(table) {
  const chosen = Array.from(document.querySelectorAll(`select[data-table="${table.id}"]`)).filter(select => select.value);
  const word = document.querySelector(`input[data-table="${table.id}"]`)?.value.trim().toLowerCase() || "";
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(word) || chosen.some(select => row.cells[Number(select.dataset.column)].textContent !== select.value);
    shown += !row.hidden;
  }
  document.getElementById(table.id + "-count").textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sortBy(button.parentElement));
for (const field of document.querySelectorAll("select[data-table], input[data-table]"))
  field.addEventListener("input", () => filterRows(document.getElementById(field.dataset.table)));
"""  # noqa: E501


def html(
    path: Path | str,
    operator_json: dict[str, Any] | None = None,
    step_json: dict[str, Any] | None = None,
    images: Sequence[Path | str] = (),
) -> Path:
    """Write one file with the tables, the plots (PNG) and their explanations. It loads nothing
    from elsewhere. Returns its path."""
    parts = [
        (name, identity, data)
        for name, identity, data in (("Operators", "operators", operator_json), ("Training steps", "steps", step_json))
        if data
    ]
    rows = [row for _, _, data in parts for row in data["rows"]]
    titles = [
        ("at-a-glance", "At a glance"),
        ("loses", "Slower than"),
        *[("plots", "Plots")] * bool(images),
        *((identity, name) for name, identity, _ in parts),
    ]
    titles += [("legend", "What the columns mean"), ("measured", "Measured with")]
    links = "".join(f'<a href="#{identity}">{title}</a>' for identity, title in titles)
    subtitle = "; ".join(dict.fromkeys(hardware_line(data.get("meta", {})) for _, _, data in parts))
    page = [f'<h1>{TITLE}</h1>\n<p class="quiet">{_escape(subtitle)}</p>\n<nav>{links}</nav>']
    if any(_flat(data.get("meta", {}).get("hardware")).startswith("CPU") for _, _, data in parts):
        page += ["<p><b>Measured without a GPU: the references of the operators ran, not their kernels.</b></p>"]
    page += [_heading("at-a-glance", "At a glance"), _glance(rows), _heading("loses", "Slower than"), _loses(rows)]
    if images:
        page += [_heading("plots", "Plots"), '<div class="plots">', *map(_image, images), "</div>"]
    for name, identity, data in parts:
        page += [_heading(identity, name), sortable_table(data["rows"], f"table-{identity}")]
    page += [_heading("legend", "What the columns mean"), _legend(rows), _heading("measured", "Measured with")]
    page += [_meta(name, data.get("meta", {})) for name, _, data in parts]
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{TITLE}</title>\n<style>{STYLE}</style>'
    )
    body = "\n".join(page)
    path = Path(path)
    export(
        path,
        "<!DOCTYPE html>\n<html "
        f'lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n',
    )
    return path


def _escape(text: Any) -> str:
    return escape_html.escape(str(text))


def _heading(identity: str, title: str) -> str:
    return f'<h2 id="{identity}">{title}</h2>'


def _cell(text: str, value: Any, classes: str) -> str:
    """A cell. ``data-v`` holds the number by which it is sorted, or nothing."""
    number = value is None or isinstance(value, (int, float))
    sort = f' data-v="{"" if value is None else "Infinity" if value == math.inf else value}"' if number else ""
    cut = (
        f'<div class="cut" title="{_escape(text)}">{_escape(text)}</div>'
        if text.startswith("failed:")
        else _escape(text)
    )
    return f"<td{sort}{f' class={chr(34)}{classes}{chr(34)}' if classes else ''}>{cut}</td>"


def _sortable(
    identity: str,
    heads: Sequence[tuple[str, str, bool]],
    lines: Sequence[str],
    filters: Mapping[int, Iterable[str]] | None = None,
) -> str:
    """A table. ``heads``: (name, meaning, left-aligned) of each column. ``filters``: column ->
    the texts that occur in it."""
    head = "".join(
        f'<th{" class=left" if left else ""} title="{_escape(meaning)}"><button '
        f'type="button">{_escape(name)}</button></th>'
        for name, meaning, left in heads
    )
    selects = ""
    for i, texts in (filters or {}).items():
        if len(choices := list(dict.fromkeys(texts))) > 1:
            options = "".join(f"<option>{_escape(choice)}</option>" for choice in choices)
            selects += (
                f'<label>{_escape(heads[i][0])} <select data-table="{identity}" data-column="{i}"><option '
                f'value="">all</option>{options}</select></label>'
            )
    search = f'<label>Search <input type="search" data-table="{identity}"></label>'
    above = (
        f'<div class="filters">{selects}{search}<span id="{identity}-count">{len(lines)} rows</span></div>\n'
        if selects
        else ""
    )
    rows = "\n".join(lines)
    return (
        f'{above}<div class="scroll"><table '
        f'id="{identity}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def sortable_table(rows: Sequence[Row], identity: str) -> str:
    """Rows of operators or of steps as an HTML table that ``SCRIPT`` sorts and filters."""
    columns, texts = _cells(rows, all_columns=True)
    lines = []
    for (row, ours), cells in zip(with_ours(rows), texts):
        bad = status(row)
        written = []
        for column, text in zip(columns, cells):
            classes = " ".join(
                ["left"] * column.left
                + ["who"] * (column.name == "variant")
                + ["bad"] * bool(bad and text and bad.split(":")[0] in text)
            )
            written.append(_cell(text, column.value(row, ours), classes))
        lines.append(f"<tr{' class=ours' if row['variant'] == OURS else ''}>{''.join(written)}</tr>")
    filters = {i: [line[i] for line in texts] for i, column in enumerate(columns) if column.filtered}
    return _sortable(identity, [(column.name, column.meaning, column.left) for column in columns], lines, filters)


def summary(rows: Iterable[Row]) -> dict[str, dict[str, list[float]]]:
    """Operator or model -> variant -> how many times as fast ours is, one number per case:
    forward + backward if it was measured, without sweeps."""
    rows = list(rows)
    pairs = with_ours([row for row in rows if not row.get("sweep")] or rows)
    full = {row.get("op") for row, _ in pairs if row.get("mode") == "full"}
    found: dict[str, dict[str, list[float]]] = {}
    for row, ours in pairs:
        faster = speedup(row, ours)
        if faster is not None and not (row.get("op") in full and row.get("mode") != "full"):
            found.setdefault(row.get("op") or row["model"], {}).setdefault(row["variant"], []).append(faster)
    return found


def _glance(rows: Sequence[Row]) -> str:
    found = summary(rows)
    variants = [
        name
        for name in [*LABELS, *dict.fromkeys(row["variant"] for row in rows)]
        if any(name in columns for columns in found.values())
    ]
    variants = list(dict.fromkeys(variants))
    if not found:
        return "<p>Nothing to compare: no variant besides ours ran and was accurate.</p>"
    lines = []
    for op, columns in found.items():
        cells = [_cell(op, op, "left")]
        for name in variants:
            values = columns.get(name)
            mean = math.exp(sum(map(math.log, values)) / len(values)) if values else None
            text = "" if not values else times(mean) + (f" ({span(values)})" if len(values) > 1 else "")
            cells.append(_cell(text, mean, "bad" if mean is not None and round(mean, 2) < 1 else ""))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = [
        ("", "Operator or model", True),
        *((f"against {variant_label(name)}", MEANING.get(name, ""), False) for name in variants),
    ]
    text = (
        "How many times as fast ours is: the geometric mean over the cases and, in brackets, the range. Forward "
        "and backward together where both were measured."
    )
    return f"<p>{text}</p>" + _sortable("table-glance", heads, lines)


def _loses(rows: Sequence[Row]) -> str:
    broken = [row for row in rows if row["variant"] == OURS and not usable(row)]
    found = losses(rows)
    out = []
    if broken:
        items = "".join(f'<li class="bad">{_escape(_name(row))}: {_escape(status(row))}</li>' for row in broken)
        out.append(f"<p>Ours did not work, or was not accurate, here:</p><ul>{items}</ul>")
    if not found:
        return "".join(out) + "<p>No accurate variant was faster than ours or needed less memory, in any row.</p>"
    out.append(
        "<p>Every row in which an accurate variant took less device time, wall time or memory than ours. The ratio "
        "says how many times as "
        "much ours takes. “Within noise” means that the spread of the two measurements explains the difference.</p>"
    )
    lines = []
    for loss in found:
        cells = [
            _cell(_name(loss.row), _name(loss.row), "left"),
            _cell(variant_label(loss.row["variant"]), loss.row["variant"], "left"),
            _cell(loss.measure, loss.measure, "left"),
            _cell(digits(loss.ours), loss.ours, ""),
            _cell(digits(loss.theirs), loss.theirs, ""),
            _cell("" if loss.ratio == math.inf else times(loss.ratio), loss.ratio, ""),
            _cell("within noise" if loss.noise else "", "within noise" if loss.noise else "", "left"),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = [
        ("where", "", True),
        ("slower than", "", True),
        ("in", "", True),
        ("ours", "", False),
        ("theirs", "", False),
        ("ratio", "", False),
        ("", "", True),
    ]
    filters = {1: [variant_label(loss.row["variant"]) for loss in found], 2: [loss.measure for loss in found]}
    return "".join(out) + _sortable("table-loses", heads, lines, filters)


def _name(row: Row) -> str:
    if "model" in row:
        place = f", {row['gpus']} x {row.get('parallel')}" if (row.get("gpus") or 1) > 1 else ""
        return f"{row['model']} {row.get('batch')} x {row.get('seq')}{place}"
    return f"{row['op']} {row['case']}, {row['dtype']}, {row['mode']}"


def _image(path: Path | str) -> str:
    """An embedded PNG at half its size in pixels, so that it is sharp and its text has the same
    size as in other images."""
    path = Path(path)
    content = path.read_bytes()
    width = int.from_bytes(content[16:20], "big") // 2  # from the PNG header
    return (
        f'<figure><img width="{width}" alt="{_escape(path.stem.replace("-", " "))}" '
        f'src="data:image/png;base64,{base64.b64encode(content).decode()}"></figure>'
    )


def _legend(rows: Sequence[Row]) -> str:
    out = ""
    for name, columns, some in (
        ("Operators", OPERATOR, [row for row in rows if "model" not in row]),
        ("Training steps", STEP, [row for row in rows if "model" in row]),
    ):
        items = "".join(f"<dt>{_escape(column.name)}</dt><dd>{_escape(column.meaning)}</dd>" for column in columns)
        out += f"<h3>{name}</h3><dl>{items}</dl>" if some else ""
    who = "".join(
        f"<dt>{_escape(name)}</dt><dd>{_escape(MEANING.get(name, ''))}</dd>"
        for name in dict.fromkeys(row["variant"] for row in rows)
    )
    return f"{out}<h3>Variants</h3><dl>{who}</dl>"


def _meta(name: str, meta: dict[str, Any]) -> str:
    items = "".join(
        f"<dt>{_escape(label.replace('_', ' '))}</dt><dd>{_shown(label, value)}</dd>" for label, value in meta.items()
    )
    return f"<h3>{name}</h3><dl>{items}</dl>"


def _shown(label: str, value: Any) -> str:
    if label == "command":
        return f"<code>{_escape(value)}</code>"
    return _escape(digits(value) if isinstance(value, float) else _flat(value))


def main(argv: list[str]) -> int:
    """``liger bench report``: tables, plots and data of runs that were written with ``--json``."""
    parser = Parser(
        prog="liger bench report",
        description="Tables, plots and data of runs written with --json, of operators or of steps.",
    )
    parser.add_argument(
        "json",
        nargs="+",
        help="files, or the CSV made of them; a row measured again in a later one takes the place of the earlier",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the rows as a table")
    parser.add_argument("--markdown", metavar="FILE", help="write the table in Markdown")
    parser.add_argument("--plot", metavar="DIR", help="write PNG charts and report.html")
    a = parser.parse_args(argv)
    if a.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    result = merged([read(path) for path in a.json])
    kinds = {"model" in row for row in result["rows"]}
    if len(kinds) != 1:
        raise UserError(
            "the files hold rows of operators and of steps: make a report of each kind"
            if kinds
            else f"{', '.join(a.json)}: no rows, so there is no table"
        )
    outputs(None, a.csv, a.plot, a.markdown)
    (steps,) = kinds
    print(text_table(result["rows"]))
    if a.csv:
        (write_step_csv if steps else write_csv)(result, a.csv)
    if a.markdown:
        export(a.markdown, markdown_table(result["rows"]) + "\n")
    if a.plot:
        from liger_kernel.bench import plots

        folder = Path(a.plot)
        images = (plots.steps if steps else plots.operators)(result, folder)
        print(html(folder / "report.html", None if steps else result, result if steps else None, images))
    return 0
