"""``plot`` with the name of one of ``benchmarks/pages.py``: drawn from benchmarks/data in the colours
of the page."""

from __future__ import annotations

from typing import Any


def setup(app: Any) -> dict[str, Any]:
    import pages  # of benchmarks/, which conf.py puts on the path
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Plot(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            return [nodes.raw("", pages.plots()[self.arguments[0]]().html(), format="html")]

    app.add_directive("plot", Plot)
    return {"parallel_read_safe": True}
