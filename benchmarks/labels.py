"""Words for results that plots, pages and the site share: names of variants, ratios, hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_kernel.bench.results import Row, ratio, times

MODES = {"forward": "forward", "backward": "backward", "full": "forward + backward"}
LABELS = {
    "ours": "ours",
    "base": "ours, base commit",
    "upstream": "LinkedIn's package",
    "compile": "torch.compile",
    "torch": "torch built-in",
    "cce": "cut-cross-entropy",
    "quack": "quack",
    "ao": "torchao",
    "ao+compile": "torchao, compiled",
    "eager": "PyTorch eager",
    "stock": "stock",
    "ours+compile": "ours + compile",
    "upstream+compile": "LinkedIn's + compile",
    "layers": "compiled layers",
    "ours:off": "ours, keeping everything",
    "ours:mlp": "ours, keeping least",
    "ours:experts": "ours, of experts, too",
    "ours:offload": "ours, offloading",
    "ours:attention": "ours, attention kept",
    "ours:tiled": "ours, tiled MLP",
    "ours:offload-attention": "ours, offloading, attention kept",
    "ours:offload-tiled": "ours, offloading, tiled MLP",
    "ours:long": "ours, all for long rows",
    "ours:bf16": "ours, in bf16",
    "ours:head": "ours, head in FP8",
    "torchao": "ours + torchao's layers, compiled",
    "ours:gathered": "ours, torchao's layers gathered in FP8",
    "torchao:gathered": "ours + torchao's layers, gathered in FP8, compiled",
    "ours:fp8": "ours, FP8 base",
    "ours:fp8_rowwise": "ours, FP8 base by rows",
    "unsloth": "Unsloth",
    "unsloth:offload": "Unsloth, offloading",
    "ours+layers": "ours + compiled layers",
    "upstream+layers": "LinkedIn's + compiled layers",
}


def variant_label(name: str) -> str:
    return LABELS.get(name, name)


def speedup(row: Row, ours: Row | None) -> float | None:
    """How many times as fast ours is, for rows of either kind."""
    if "model" in row:
        slower = ratio(row, ours, "tokens_per_s")
        return 1 / slower if slower else None
    return ratio(row, ours)


def on_cpu(meta: Mapping[str, Any]) -> bool:
    """Whether results with this ``meta`` were measured without a GPU."""
    return _flat(meta.get("hardware")).startswith("CPU")


def span(values: Sequence[float]) -> str:
    """``1.08-1.29x``: the range of some ratios."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low[:-1]}–{high}"


def hardware_line(meta: dict[str, Any]) -> str:
    """The line under every plot and table: what was measured, on which hardware, and when."""
    versions = [
        f"{name.replace('_', '-')} {meta[name]}"
        for name in ("torch", "triton", "transformers", "liger_kernel")
        if meta.get(name)
    ]
    return ", ".join(str(part) for part in (_flat(meta.get("hardware")), *versions, meta.get("date")) if part)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(inner)}" for name, inner in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
