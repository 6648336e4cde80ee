"""Links of pages to files of the repository that are no pages: their address is below the
repository's URL, of which the package's metadata has one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\[[^\]\n]*\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?\))")


def outside(text: str, page: Path) -> tuple[str, list[str]]:
    """The text of a page with its links to what lies outside of ``docs/`` as plain words, and
    those of them that lead nowhere."""
    missing = []

    def plain(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            missing.append(found[2])
        words = found[1][1:-2]
        path = f"`{target.relative_to(ROOT) if target.is_relative_to(ROOT) else found[2]}`"
        return words if words.strip("`") in path else f"{words} ({path} of the repository)"

    return LINK.sub(plain, text), missing


def setup(app: Any) -> dict[str, Any]:
    from sphinx.util import logging

    def read(app: Any, name: str, content: list[str]) -> None:
        page = Path(app.env.doc2path(name))
        if page.suffix == ".md":
            content[0], missing = outside(content[0], page)
            for target in missing:
                logging.getLogger(__name__).warning("no such file: %s", target, location=name)

    app.connect("source-read", read)
    return {"parallel_read_safe": True}
