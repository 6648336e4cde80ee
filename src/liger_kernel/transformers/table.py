"""The table of families: made from the installed transformers, printed, compared with the frozen one. ``liger models`` is its command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_kernel.transformers import deferred, families, slots
from liger_kernel.transformers.patch import instance_patches
from liger_kernel.transformers.slots import Family
from liger_kernel.transformers.tiny import VOCAB, tiny_config, tiny_model

MAX_PARAMETERS = 3_000_000  # of a model that counts as tiny


class Unverified(Exception):
    """The swaps of a family were not, or not successfully, tried on a model."""


def step(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
    """Loss, gradients, and whether the logits were left out, of one training step on fixed tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB - 3, (2, 12))
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, out.logits is None


def verified(model_type: str) -> Family:
    """``infer(model_type)``, tried on a tiny model: one step with all swaps must give the stock loss and gradients, without the logits."""
    try:
        row = slots.infer(model_type)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(tiny_config(model_type)).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"its tiny model has {size:,} parameters")
        torch.manual_seed(0)
        model = tiny_model(model_type)
        loss, grads, _ = step(model)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unverified(reason if len(reason) < 100 else f"{reason[:97]}...") from error
    grads = {n: g.clone() for n, g in grads.items()}
    computed = []
    value = deferred.DeferredLogits.value
    with mock.patch.object(deferred.DeferredLogits, "value", lambda self: (computed.append(1), value(self))[1]), slots.references():
        patches = instance_patches(model, model_type, dict.fromkeys(("rope", "rms_norm", "glu"), True), "fused" if row.head else None, row)
        with patches():
            ours, our_grads, left_out = step(model)
    size = max(g.abs().max().item() for g in grads.values())
    if grads.keys() != our_grads.keys() or not torch.allclose(ours, loss, rtol=1e-5, atol=1e-5):
        raise Unverified(f"loss {ours.item():.4f} instead of {loss.item():.4f}")
    if wrong := [n for n, g in grads.items() if not torch.allclose(our_grads[n], g, rtol=0, atol=1e-5 * size)]:
        raise Unverified(f"another gradient for {', '.join(wrong[:3])}")
    if row.head is None or not left_out or computed:
        reason = "needs its logits for more than one cross entropy" if row.head else "no causal language model of its own"
        row = Family(None, reason, row.glu, row.swapped, row.left_alone)
    return row


def make(model_types: Iterable[str] | None = None) -> tuple[dict[str, Family], dict[str, str]]:
    """Verified rows, and the reasons for families without one."""
    rows, unverified = {}, {}
    for model_type in sorted(model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            rows[model_type] = verified(model_type)
        except Unverified as error:
            unverified[model_type] = str(error)
    return rows, unverified


def source(rows: dict[str, Family], unverified: dict[str, str]) -> str:
    """The text of ``families.py``."""
    fields = lambda row: ", ".join(f"{k}={v!r}" for k, v in vars(row).items() if v != getattr(Family(), k))
    lines = [
        '"""What is swapped in each family. Written by ``liger models --write`` from transformers VERSION; do not edit."""',
        "",
        f'VERSION = "{transformers.__version__}"',
        "",
        "# fmt: off",
        "# ruff: noqa: E501",
        "FAMILIES: dict[str, dict] = {",
        *(f"    {t!r}: dict({fields(row)})," for t, row in rows.items()),
        "}",
        "",
        "# not tried on a tiny model, so recognised only when asked for, or not at all",
        "UNVERIFIED: dict[str, str] = {",
        *(f"    {t!r}: {reason!r}," for t, reason in unverified.items()),
        "}",
        "# fmt: on",
        "",
        "",
        "def main(argv: list[str] | None = None) -> int:",
        "    from liger_kernel.transformers import table",
        "",
        "    return table.main(argv)",
    ]
    return "\n".join(lines) + "\n"


def table(model_types: Iterable[str] = ()) -> str:
    """The frozen table, for reading."""
    lines = []
    for t in model_types or families.FAMILIES:
        if t not in families.FAMILIES:
            lines.append(f"{t}\n  not in the table: {families.UNVERIFIED.get(t, 'unknown model type')}")
            continue
        row = Family(**families.FAMILIES[t])
        lines.append(f"{t}\n  head          {f'{row.head}: fused' if row.head else f'not fused: {row.fused}'}")
        lines += [f"  {'swapped' if i == 0 else '':<13} {name} <- {label}" for i, (name, label) in enumerate(row.swapped.items())]
        lines += [f"  {'left alone' if i == 0 else '':<13} {name}: {reason}" for i, (name, reason) in enumerate(row.left_alone.items())]
    known = [Family(**row) for row in families.FAMILIES.values()]
    if not model_types:
        heads, parts = sum(bool(row.head) for row in known), sum(bool(row.swapped) for row in known)
        lines.append(f"\n{len(known)} families: {heads} with a fused head, {parts} with kernels for norms, gated MLPs or rotary embeddings")
    return "\n".join(lines)


def check() -> str:
    """How the table of the installed transformers differs from the frozen one; empty if it does not."""
    frozen, fresh = Path(families.__file__).read_text(), source(*make())
    names = f"transformers {families.VERSION}", f"transformers {transformers.__version__}"
    return "\n".join(difflib.unified_diff(frozen.splitlines(), fresh.splitlines(), *names, lineterm="", n=0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="liger models", description="The model families: what is swapped, what is left alone and why.")
    parser.add_argument("model_type", nargs="*", help="only these model types")
    parser.add_argument("--check", action="store_true", help="derive the table from the installed transformers and show the difference")
    parser.add_argument("--write", action="store_true", help="derive the table and write it to families.py")
    args = parser.parse_args(argv)
    if args.write:
        Path(families.__file__).write_text(source(*make()))
        return 0
    text = check() if args.check else table(args.model_type)
    print(text or f"the frozen table is that of transformers {transformers.__version__}")
    return int(args.check and bool(text))
