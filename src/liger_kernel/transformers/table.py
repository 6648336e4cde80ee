"""The table of families: made from the installed transformers, printed, compared with the frozen
one. ``liger models`` is its command."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from liger_kernel import transformers as published
from liger_kernel.patch_options import SWITCHES, PatchOptions
from liger_kernel.transformers.head.recipe import DeferredLogits
from liger_kernel.transformers.patching import apply
from liger_kernel.transformers.patching.select import class_patches, instance_patches
from liger_kernel.transformers.recognise import families
from liger_kernel.transformers.recognise.compare import references
from liger_kernel.transformers.recognise.families import (
    CAUSAL,
    FAMILIES,
    IMAGE_TEXT_TO_TEXT,
    OURS,
    TABLE,
    UNVERIFIED,
    VERSION,
    Family,
    configs_of,
    infer,
    modeling,
    text_of,
    without_flat,
)
from liger_kernel.transformers.recognise.slots import SLOT_OF, SLOTS
from liger_kernel.transformers.recognise.tiny import model_of, tiny_config, with_images, words

MAX_PARAMETERS = 40_000_000  # of a model that counts as tiny
STUB = Path(published.__file__).with_suffix(".pyi")
EVERYTHING = {slot.flag: True for slot in SLOTS}


class Unverified(Exception):
    """The swaps of a family were not, or not successfully, tried on a model."""


def step(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Loss, gradients, and whether the logits were left out, of one training step."""
    torch.manual_seed(1)
    model.zero_grad()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return (
        out.loss.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        getattr(out, "logits", None) is None,
    )


def _short(error: Exception) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return reason if len(reason) < 100 else f"{reason[:97]}..."


def verified(model_type: str, rows: Callable[[str], Family | None]) -> Family:
    """``infer(model_type)``, tried on a tiny model: one step with all swaps must give the stock
    loss and gradients, without the logits.

    Models of text and images are given images, if their form is understood.
    """
    try:
        row = rows(model_type)
        # a type that is only a part of others is tried within them
        if row is None or not row.heads:
            raise ValueError("transformers has no model of it with a language model's head and a loss")
        config = tiny_config(model_type)
        try:
            model, batch, images, (loss, grads, _) = _stock(config, row.heads[0])
        except Exception:
            if len(row.heads) == 1:
                raise
            # transformers 5.24 cannot run the model with images of llama4, only that of text
            model, batch, images, (loss, grads, _) = _stock(config.get_text_config(), row.heads[1])
    except Exception as error:
        raise Unverified(_short(error)) from error
    computed: list[int] = []
    # a head that must compute its logits after all is not fused
    value = DeferredLogits.value
    counted = mock.patch.object(DeferredLogits, "value", lambda self: (computed.append(1), value(self))[1])
    try:
        with mock.patch.object(families, "family", rows):
            patches = instance_patches(model, model_type, EVERYTHING, "fused")
        with counted, references(), patches():
            ours, our_grads, left_out = step(model, batch)
    except Exception as error:
        raise Unverified(f"patched, {_short(error)}") from error
    # small gradients are compared with the largest: they are differences of large numbers
    largest = max(g.abs().max().item() for g in grads.values())
    if grads.keys() != our_grads.keys() or not torch.allclose(ours, loss, rtol=1e-5, atol=1e-5):
        raise Unverified(f"loss {ours.item():.4f} instead of {loss.item():.4f}")
    if wrong := [n for n, g in grads.items() if not torch.allclose(our_grads[n], g, rtol=0, atol=2e-5 * largest)]:
        raise Unverified(f"another gradient for {', '.join(wrong[:3])}")
    fused = "" if left_out and not computed else "it does more with its logits than one cross entropy"
    return dataclasses.replace(row, fused=fused, images=images)


def _stock(config: Any, head: str) -> tuple[Any, dict[str, Tensor], bool, tuple[Tensor, dict[str, Tensor], bool]]:
    """A tiny model with this head, its batch, whether that has images, and what a training step
    of stock gives."""
    # its size without its memory: some types ignore the tiny sizes
    with torch.device("meta"):
        size = sum(p.numel() for p in model_of(config, head=head).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"its tiny model has {size:,} parameters")
    torch.manual_seed(0)
    model = model_of(config, head=head)
    batch = words(model)
    seen = with_images(model, batch)
    with torch.no_grad():
        model(**(seen or batch), use_cache=False)  # some settle at the first call how they attend
    return model, seen or batch, seen is not None, step(model, seen or batch)


def make(model_types: Iterable[str] | None = None) -> tuple[dict[str, Family], dict[str, str]]:
    """Verified rows, those of the types of their parts, and the reasons for families without
    one."""
    unverified: dict[str, str] = {}

    @functools.cache
    def rows(model_type: str) -> Family | None:
        try:
            return infer(model_type)
        except Exception:
            return None

    # rows by type, and the types of their parts
    found, parts = {}, set()
    for model_type in sorted(model_types or {**CAUSAL, **IMAGE_TEXT_TO_TEXT}):
        try:
            found[model_type] = verified(model_type, rows)
            parts |= {c.model_type for c in configs_of(CONFIG_MAPPING[model_type]())}
        except Unverified as error:
            unverified[model_type] = str(error)
    for model_type in parts - found.keys() - unverified.keys():
        # seen at work in what it is a part of
        if model_type in CONFIG_MAPPING and (row := rows(model_type)) and row.swapped:
            found[model_type] = dataclasses.replace(row, heads=(), fused="")
    # Rotations inside a vision tower are right only if a step with images has shown it
    seen = {modeling(t).__name__ for t, row in found.items() if row.images}
    found = {t: row if modeling(t).__name__ in seen else without_flat(row) for t, row in sorted(found.items())}
    return found, unverified


def stub() -> str:
    """The text of ``transformers/__init__.pyi``: what ``__init__`` imports, and what it makes
    when it is asked for, as type checkers have to know it."""
    # names that ``__getattr__`` finds; type checkers do not run it
    modules, lazy = vars(published)["_MODULES"], vars(published)["_LAZY"]
    lines = [
        "# Written by `liger models --write`; do not edit.",
        "# fmt: off",
        "# ruff: noqa",
        "from typing import Protocol",
        "",
        "from torch import nn",
        "",
        *(f"from liger_kernel.nn import {name} as {name}" for name in modules),
        *(f"from liger_kernel.transformers.{module} import {name} as {name}" for name, module in lazy.items()),
        "from liger_kernel.patch_options import Filter",
        "",
        "def is_transformers_available() -> bool: ...",
    ]
    # Most families share their flags, so each set of flags is one class, which a family's name is
    # an instance of: a type checker then sees its parameters like those of a function.
    ours = ", ".join(f"{name}: {SWITCHES[name].type} = {default!r}" for name, default in OURS.items())
    by_flags: dict[str, list[str]] = {}
    for function in apply.MODEL_TYPE_TO_APPLY_LIGER_FN.values():
        parameters = inspect.signature(function).parameters.values()
        flags = ", ".join(f"{p.name}: {p.annotation} = {p.default}" for p in parameters)
        by_flags.setdefault(flags, []).append(function.__name__)
    for i, (flags, members) in enumerate(by_flags.items(), 1):
        lines += ["", f"class _Apply{i}(Protocol):", f"    def __call__(self, {flags}, *, {ours}) -> None: ..."]
        lines += ["", *(f"{name}: _Apply{i}" for name in members)]
    return "\n".join(lines) + "\n"


def _steps(model_type: str) -> list[tuple[str, str]]:
    """Classes whose own forward is changed, in the installed transformers, and how."""
    # what the flags would patch, without patching it
    found = class_patches(model_type, PatchOptions().parts, None)
    return [(p.owner.__name__, p.label) for p in found if p.label not in SLOT_OF]


def table(model_types: Iterable[str] = ()) -> str:
    """The frozen table, for reading."""
    lines = []
    for t in model_types or FAMILIES:
        if t not in FAMILIES:
            why = UNVERIFIED.get(t, "it is recognised when a model of it is patched")
            lines.append(f"{t}\n  not in the table: {why}")
            continue
        row = FAMILIES[t]
        head = f"not fused: {row.fused}" if row.fused else "fused" if row.heads else "a part of others"
        blocks = {
            "head": [f"{','.join(row.heads)}: {head}" if row.heads else head],
            "parts": [", ".join(row.parts)] if row.parts else [],
            "swapped": [f"{name} <- {label}" for name, label in row.swapped.items()],
            "steps": [f"{name} <- {label}" for name, label in _steps(t)] if model_types else [],
            "left alone": [f"{name}: {reason}" for name, reason in row.left_alone.items()],
        }
        lines.append(t)
        for title, texts in blocks.items():
            lines += [f"  {'' if i else title:<13} {text}" for i, text in enumerate(texts)]
    if not model_types:
        lines.append(f"\n{summary()}")
    return "\n".join(lines)


def summary() -> str:
    heads = {t: row for t, row in FAMILIES.items() if row.heads}
    fused = sum(not row.fused for row in heads.values())
    parts = sum(
        bool(row.swapped or any(FAMILIES[p].swapped for p in row.parts if p in FAMILIES)) for row in heads.values()
    )
    text = sum(t in CAUSAL and not row.images for t, row in heads.items())
    return (
        f"{len(heads)} families ({text} of text, {len(heads) - text} of text and images) and "
        f"{len(FAMILIES) - len(heads)} types of their parts: "
        f"{fused} with a fused head, {parts} with kernels for norms, MLPs, experts or rotary embeddings"
    )


def check(model_types: Iterable[str] | None = None) -> str:
    """How the table of the installed transformers differs from the frozen one, in full or for
    some types; empty if it does not."""
    # tiny models again: minutes for all types
    rows, unverified = make(model_types)
    wanted = set(model_types or {*rows, *FAMILIES, *unverified, *UNVERIFIED})
    only = lambda entries: {t: entry for t, entry in entries.items() if t in wanted}
    frozen, fresh = text_of(only(FAMILIES), only(UNVERIFIED)), text_of(only(rows), unverified)
    names = f"transformers {VERSION}", f"transformers {transformers.__version__}"
    return "\n".join(difflib.unified_diff(frozen.splitlines(), fresh.splitlines(), *names, lineterm="", n=0))


def known() -> list[str]:
    """The model types of the frozen table and of the installed transformers."""
    return list(dict.fromkeys((*FAMILIES, *UNVERIFIED, *CONFIG_MAPPING)))


def write() -> int:
    """Derive the table, and write all files that follow from it."""
    _exchange(TABLE, text_of(*make()))
    # only a new process reads the new table
    subprocess.run([sys.executable, "-c", f"from {__name__} import write_what_follows as f; f()"], check=True)
    return 0


def write_what_follows() -> None:
    """Write the stub, and in a checkout the page of the families."""
    _exchange(STUB, stub())
    docs = TABLE.parents[4] / "docs"
    if (maker := docs / "_ext" / "model_families.py").is_file():
        _exchange(docs / "models.md", runpy.run_path(str(maker))["document"]())


def _exchange(path: Path, text: str) -> None:
    """Write a file as a whole: an interrupted ``liger models --write`` leaves the old one, without
    which nothing could be patched."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, "utf-8")
    os.replace(new, path)


def show(model_types: list[str], compare: bool = False) -> int:
    """Print the frozen table, or how the installed transformers differs from it (then 1)."""
    text = check(model_types or None) if compare else table(model_types)
    print(text or f"the frozen table is that of transformers {transformers.__version__}")
    return int(compare and bool(text))
