"""``all-rows``: every row of benchmarks/data as tables that can be sorted and filtered
(``_static/rows.js``)."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def tables() -> str:
    """The tables of operators and of steps as HTML."""
    import pages  # of benchmarks/, which conf.py puts on the path
    from labels import variant_label

    parts = []
    for title, kind in (("Operators", "op"), ("Training steps", "model")):
        rows = [
            row | {"source": row["source"].removesuffix(".csv")} for data in pages.results(kind) for row in data["rows"]
        ]
        parts += [f'<p class="rubric">{title}</p>', table(rows, f"table-{kind}", variant_label)]
    return "\n".join(parts)


def table(rows: list[dict[str, Any]], identity: str, variant_label: Any) -> str:
    from liger_kernel.bench.tables import cells

    columns, lines = cells(rows, everything=True)
    who = next(i for i, column in enumerate(columns) if column.name == "variant")
    lines = [[variant_label(text) if i == who else text for i, text in enumerate(line)] for line in lines]
    left = [' class="left"' if column.left else "" for column in columns]
    filters = ""
    for i, column in enumerate(columns):
        texts = dict.fromkeys(line[i] for line in lines)
        if column.left and 1 < len(texts) < 100:
            options = "".join(f"<option>{escape(text)}</option>" for text in texts if text)
            select = f'<select data-column="{i}"><option value="">all</option>{options}</select>'
            filters += f"<label>{escape(column.name)} {select}</label>"
    filters += f'<label>Search <input type="search"></label><output>{len(lines)} rows</output>'
    head = "".join(
        f'<th{c}><button type="button">{escape(column.name)}</button></th>' for c, column in zip(left, columns)
    )
    body = []
    for row, line in zip(rows, lines):
        ours = ' class="ours"' if row["variant"] == "ours" else ""
        body.append(f"<tr{ours}>" + "".join(f"<td{c}>{escape(text)}</td>" for c, text in zip(left, line)) + "</tr>")
    return (
        f'<div class="filters" data-table="{identity}">{filters}</div>\n<div class="scroll"><table id="{identity}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(body)}\n</tbody></table></div>"
    )


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class AllRows(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for path in (ROOT / "benchmarks" / "data").glob("*.csv"):
                self.env.note_dependency(str(path))
            return [nodes.raw("", tables(), format="html")]

    app.add_directive("all-rows", AllRows)
    app.add_js_file("rows.js")
    return {"parallel_read_safe": True}
