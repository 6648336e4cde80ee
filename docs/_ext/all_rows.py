"""``all-rows``: every row of benchmarks/data as tables that can be sorted and filtered, by the
table and the script of ``liger bench report``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def tables() -> str:
    """The tables of operators and of steps, and the script that sorts them, as HTML."""
    from liger_kernel.bench import report
    from liger_kernel.bench.rows import variant_label

    spec = importlib.util.spec_from_file_location("benchmark_pages", ROOT / "benchmarks" / "pages.py")
    assert spec and spec.loader
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    parts = []
    for title, kind in (("Operators", "op"), ("Training steps", "model")):
        labelled = lambda row: (
            row | {"source": row["source"].removesuffix(".csv"), "variant": variant_label(row["variant"])}
        )
        rows = [labelled(row) for result in pages.results(kind) for row in result["rows"]]
        parts += [f'<p class="rubric">{title}</p>', report.sortable_table(rows, f"table-{kind}")]
    return "\n".join([*parts, f"<script>{report.SCRIPT}</script>"])


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class AllRows(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for path in (ROOT / "benchmarks" / "data").glob("*.csv"):
                self.env.note_dependency(str(path))
            return [nodes.raw("", tables(), format="html")]

    app.add_directive("all-rows", AllRows)
    return {"parallel_read_safe": True}
