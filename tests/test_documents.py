"""README and the pages of docs/: links that lead somewhere, pages that are listed, and the words
that we write with."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as patching
from liger_kernel.transformers.patching import patches

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
OF_BENCHMARKS = ROOT / "docs" / "benchmarks"
# the others are generated
WRITTEN = [page for page in PAGES if page.name != "models.md" and not page.is_relative_to(OF_BENCHMARKS)]
name_of = lambda page: str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    titles = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", "\n".join(re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles.split("\n")}


def test_readme_is_short_and_says_at_once_what_this_is():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert "independent implementation" in text.splitlines()[2]
    # a page for who has never seen this code: what is rarely needed is in docs/development
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 1500


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "MEASURED.md"], ids=name_of)
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
    blocks = re.findall(r"^```\{toctree\}(.*?)^```", index.read_text(), re.DOTALL | re.MULTILINE)
    listed = {line for block in blocks for line in block.split("\n")}
    written = [page.relative_to(index.parent) for page in WRITTEN if page.is_relative_to(index.parent)]
    pages = {str(page.with_suffix("")) for page in written if page.name != index.name or len(page.parts) > 1}
    # what is in folders of other makers is listed by these
    assert {page for page in pages if page.split("/")[0] not in ("reference", "benchmarks", "notebooks")} <= listed


# In documents for users each of these was unclear to readers, or is another name for something that
# has one.
UNCLEAR = ["published package", "its kin", "their kin", "next to nothing", "was tried", "were tried"]
UNCLEAR += ["to the last bit", "has it computed", "bit for bit", "learnt", "steps aside"]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_words(page):
    text = prose(page).replace("\n", " ").lower()
    assert [words for words in UNCLEAR if words in text] == []


SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2)


def provoked() -> list[str]:
    """What liger-kernel says of models that it does not patch, or not whole."""
    config = transformers.LlamaConfig(**SIZES)
    own = type("MyConfig", (transformers.LlamaConfig,), {"model_type": "my_llama"})(**SIZES)
    other, stranger = (type("MyModel", (nn.Module,), {})() for _ in range(2))
    other.config, stranger.config = config, own
    norm = modeling_llama.LlamaRMSNorm
    with warnings.catch_warnings(record=True) as said, mock.patch.object(patches, "WARNED", set()):
        warnings.simplefilter("always")
        patching._apply_liger_kernel_to_instance(stranger)
        patching.apply_liger_kernel_to_llama(model=other)
        with mock.patch.object(norm, "forward", lambda self, x: x):
            patching.apply_liger_kernel_to_llama(model=transformers.LlamaForCausalLM(config))
        patching.apply_liger_kernel_to_bloom(rope=True)
        patching.apply_liger_kernel_to_bloom(layer_norm=True)
        patching._apply_liger_kernel_to_instance(transformers.LlamaForCausalLM(config), rmsnorm=True)
    patching.restore()
    return [str(w.message) for w in said if w.category is UserWarning]


def test_warnings_that_troubleshooting_explains_are_those_that_come():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## The model is not patched")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `([^`]*: [^`]*)` \|", section, re.MULTILINE)
    messages = provoked()
    assert len(explained) == len(messages) == 6
    for text in explained:
        assert any(text.removeprefix("...") in message for message in messages), text


def test_what_security_promises_has_the_tests_that_it_names():
    read = lambda file: (ROOT / file).read_text(encoding="utf-8")
    promises = re.findall(r"`(tests/\S+\.py)`: ((?:`\w+`(?:, )?)+)", read("SECURITY.md"))
    named = [(file, name) for file, names in promises for name in re.findall(r"\w+", names)]
    assert len(named) > 20
    assert [(file, name) for file, name in named if f"def test_{name}" not in read(file)] == []
