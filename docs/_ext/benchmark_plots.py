"""Draws the plots of docs/benchmarks from benchmarks/data before the site is built."""

from __future__ import annotations

from typing import Any


def setup(app: Any) -> dict[str, Any]:
    import pages  # of benchmarks/, which conf.py puts on the path

    app.connect("builder-inited", lambda app: pages.draw())
    return {"parallel_read_safe": True}
