"""The reference has every public name, every command and every operator's formula; its pages are
in docs/reference, what fills them in docs/_ext."""

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "_ext"))

import command_line
import surface

pytest.importorskip("transformers")
PAGES = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.rst")}


def test_every_public_name_is_documented_once():
    documented = [path for page in PAGES.values() for path in surface.documented(page)]
    assert len(documented) == len(set(documented))
    assert set(documented) == {first for first, *_ in surface.paths().values()}


@pytest.mark.parametrize("module", surface.MODULES)
def test_what_a_module_offers_is_seen(module):
    """A function or class that a user can import is public, counted in another way."""
    module = importlib.import_module(module)
    named = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in named}
    kind = lambda value: inspect.isclass(value) or inspect.isfunction(value)
    ours = {name for name, value in values.items() if kind(value) and value.__module__ == module.__name__}
    assert ours <= surface.public(module).keys()


def test_modules_of_the_lists_are_all_that_users_import():
    """What README, pages and examples import is a module of the reference, or in one."""
    files = (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py"))
    text = "\n".join(path.read_text() for path in files)
    lines = re.findall(r"^ *from (liger_kernel[\w.]*) import ([\w, ]+)", text, re.M)
    imported = {(module, name) for module, names in lines for name in names.split(", ")}
    paths = {path for every in surface.paths().values() for path in every}
    named = {f"{module}.{name}" for module, name in imported} - paths
    functions = {path for path in named if not inspect.ismodule(surface.find(path))}
    unknown = {path for path in functions if surface.identity(surface.find(path)) not in surface.paths()}
    assert imported and unknown == set()
    unlisted = [path for path in named - functions if not any(m.startswith(path) for m in surface.MODULES)]
    assert unlisted == []


def test_every_command_is_documented():
    from liger_kernel import cli

    named = re.findall(r"^\.\. command:: (.+)$", PAGES["command-line.rst"], re.M)
    assert {words.split()[0] for words in named} == cli.COMMANDS.keys()
    for words in named:
        text = "\n".join(command_line.lines(words))
        shown = [action for action in command_line.parser_of(words)._actions if action.help != argparse.SUPPRESS]
        flags = {flag for action in shown for flag in action.option_strings} - {"-h", "--help"}
        assert all(flag in text for flag in flags), words


@pytest.mark.parametrize(
    "docstring, rest",
    [
        ("``a * b`` of *x and |w|_", "``a * b`` of \\*x and \\|w\\|\\_"),
        ("A sum:\n\n    a_i + b*\n\nof all.", "A sum:\n\n::\n\n   a_i + b*\n\nof all."),
        ("Modes:\n  one   x\n  two   y", "Modes:\n\n::\n\n   one   x\n   two   y\n"),
        ("a ``literal\nof two lines*`` x*", "a ``literal\nof two lines*`` x\\*"),
    ],
)
def test_docstrings_are_plain_text_but_for_code_and_formulas(docstring, rest):
    assert "\n".join(surface.rest(docstring)) == rest


def test_every_public_name_has_a_docstring_of_its_own():
    values = {first: surface.find(first) for first, *_ in surface.paths().values()}
    own = lambda value: vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    # Function.apply, of PyTorch
    applied = {path for path, value in values.items() if inspect.isclass(getattr(value, "__self__", None))}
    assert [path for path, value in values.items() if path not in applied and not (own(value) or "").strip()] == []


# What has no paper to name, and what is no computation of an operator
NO_SOURCE = {"softmax", "linear_logprobs", "fused_add_rms_norm", "vocab_parallel_linear_cross_entropy", "embedding"}
NO_OPERATOR = {
    "CrossEntropyOutput": "a result",
    "LigerFusedNeighborhoodAttentionConfig": "options",
    "LigerFloat8Linear": "a layer that quantize_base makes, whose docstring says all",
    "LigerFloat8TrainingLinear": "a layer that train_in_fp8 makes, whose docstring says all",
    "LigerMegatronCrossEntropy": "Megatron-core's call, whose docstring says all",
    "token_accuracy": "counts",
    "token_counts": "counts",
}


def test_an_operator_says_shapes_dtypes_errors_and_its_source():
    from liger_kernel.ops import OPS

    lacking = {}
    for op in OPS.values():
        text = "\n".join(surface.entry(f"liger_kernel.ops.{op.name}", op.fn, [])) + op.doc
        shape, dtype = re.search(r"\([\w.]+,[\w .,/+]*\)|\(\.\.\.\)", text), re.search(r"dtype|fp32", text)
        found = {"shapes": shape, "dtypes": dtype, "errors": "ValueError" in text, "source": "arXiv" in text}
        lacking[op.name] = [word for word, there in found.items() if not there]
    assert {name for name, words in lacking.items() if words == ["source"]} == NO_SOURCE
    assert {name: words for name, words in lacking.items() if words not in ([], ["source"])} == {}


def test_modules_and_functions_lead_to_their_operator():
    """So do those of other import paths; what an operator says is said once."""
    within = ("liger_kernel.nn.", "liger_kernel.transformers.Liger", "liger_kernel.transformers.liger_")
    within += ("liger_kernel.functional.", "liger_kernel.megatron.")
    every = [path for path, *_ in surface.paths().values() if path.startswith(within)]
    found = {path: surface.operators_of(surface.find(path)) for path in every}
    assert {path.split(".")[-1] for path, names in found.items() if not names} == set(NO_OPERATOR)
    assert found["liger_kernel.transformers.LigerMHC"] == ["mhc_coeffs", "mhc_pre", "mhc_post_res"]
    assert found["liger_kernel.functional.swiglu"] == ["glu"]
    assert found["liger_kernel.transformers.LigerFusedLinearJSD"] == ["linear_divergence"]


def test_chunked_losses_have_their_formula():
    for name in ("DPO", "CPO", "SimPO", "ORPO", "KTO", "JSD"):
        value = surface.find(f"liger_kernel.chunked_loss.LigerFusedLinear{name}Loss")
        assert "arXiv:" in "\n".join(surface.notes(value, []))
