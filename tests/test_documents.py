"""README and the pages of docs/: links that lead somewhere, pages that are listed, and the words that we write with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = (ROOT / "docs" / "models.md",)
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"} - set(GENERATED))
name_of = lambda page: str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)).strip().lower().replace(" ", "-") for title in titles}


def test_readme_is_short_and_says_at_once_what_this_is():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    assert "independent implementation" in text.splitlines()[3], "the sentence after the first one"


@pytest.mark.parametrize("page", [*PAGES, *GENERATED, ROOT / "CONTRIBUTING.md", ROOT / "MEASURED.md"], ids=name_of)
def test_links_lead_somewhere(page):
    text = prose(page)
    definitions = re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in [*re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)), *definitions]:
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such title"


def test_every_page_is_listed():
    index = ROOT / "docs" / "index.md"
    listed = {line for block in re.findall(r"^```\{toctree\}(.*?)^```", index.read_text(), re.DOTALL | re.MULTILINE) for line in block.split("\n")}
    pages = {str(page.relative_to(index.parent).with_suffix("")) for page in PAGES if page.is_relative_to(index.parent) and page != index}
    # what is in folders of other makers is listed by these
    assert {page for page in pages if page.split("/")[0] not in ("reference", "benchmarks", "notebooks")} <= listed


# In documents for users each of these was unclear to readers, or is another name for something that has one.
UNCLEAR = ("published package", "its kin", "their kin", "next to nothing", "was tried", "were tried", "to the last bit", "has it computed", "bit for bit")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words(page):
    text = prose(page).replace("\n", " ").lower()
    assert [words for words in UNCLEAR if words in text] == []
