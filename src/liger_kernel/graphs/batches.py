"""A batch as the fixed inputs of a recorded step: rows padded up to one of few lengths, no mask
where causality hides all padding, and a bound for the labels that count.

    input_ids (4, 1000), attention_mask, padding on the right      input_ids (4, 1024)
    labels (4, 1000), 700 of them count                            labels (4, 1024), most=2048

``B`` rows, ``T`` tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
# tensors (B, T), and what padding has there; positions go on counting
_TOKENS = {"input_ids": 0, "labels": IGNORE, "shift_labels": IGNORE, "attention_mask": 0, "position_ids": None}
LABELS = ("labels", "shift_labels")
# of packed rows: where documents begin in the flattened batch, and how long the longest one is at most
_BOUNDS, _LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # bounds for the labels that count, as parts of B * T


@dataclass
class Batch:
    """``tensors`` are copied to inputs of these ``shapes``; ``constants`` are part of the recording;
    ``added`` tokens a row; ``counts`` labels count, None if only the GPU knows."""

    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, Any]
    tokens: int
    added: int
    counts: int | None
    row: PackedRow | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What batches of all sizes have in common."""
        constants = tuple((name, type(value), value) for name, value in self.constants.items())
        return tuple((name, t.dtype) for name, t in self.tensors.items()), constants

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kind, tuple(self.shapes.values())

    def bounds(self) -> list[int]:
        """The bounds that hold for the labels that count, the least first."""
        least = self.tokens if self.counts is None else self.counts
        return [n for part in _PARTS if (n := int(part * self.tokens)) >= least]

    def copy_to(self, inputs: Mapping[str, Tensor]) -> None:
        packed = is_packed(self.tensors)
        for name, t in self.tensors.items():
            into = inputs[name]
            if name in _BOUNDS:
                into[: len(t)].copy_(t, non_blocking=True)
                into[len(t) :] = self.tokens  # tokens that are added are a document, and those after it empty
            elif t.shape == into.shape:
                into.copy_(t, non_blocking=True)
            else:
                T = t.shape[1]
                into[:, :T].copy_(t, non_blocking=True)
                if (value := _TOKENS[name]) is not None:
                    into[:, T:] = value
                    continue
                more = torch.arange(self.added, device=into.device, dtype=into.dtype)
                into[:, T:] = more if packed else into[:, T - 1 : T] + 1 + more


@dataclass
class PackedRow:
    """A padded batch as one row of its real tokens: inputs ``given`` to ``run(model's call, **inputs)``,
    where ``counts`` labels count at most; ``restore`` gives an output of tokens, maybe without the last
    one, the batch's shape again."""

    given: dict[str, Any]
    counts: int
    run: Callable[..., Any]
    restore: Callable[[Tensor], Tensor]


def is_packed(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in _BOUNDS)


def bucket(T: int, longest: int | None = None) -> int:
    """The next length with a recording: eight for each power of two, multiples of 64. Not beyond
    ``longest``, the positions that a model has."""
    step = max(64, (1 << (T - 1).bit_length()) // 16) if T > 1 else 64
    up = -(-T // step) * step
    return up if longest is None or up <= longest or longest < T else longest


def batch_of(
    given: Mapping[str, Any], pads: bool, longest: int | None, device: torch.device, row: PackedRow | None = None
) -> Batch | str:
    """The batch, or why it has none. ``pads``: tokens may be added on the right; ``row``: ``given``
    is what it gives. The host waits only for a mask or positions on the GPU, once, as Transformers
    does."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if name == "num_items_in_batch" and isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32)  # as the loss makes one of a number
        if type(value) is Tensor and not value.requires_grad:
            tensors[name] = value
        elif isinstance(value, int | float | str | None):
            constants[name] = value
        else:
            of = "a tensor that requires a gradient" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            return f"{name} is {of}"
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2 or not ids.numel():
        return "there are no input_ids (B, T)"
    if (positions := tensors.get("position_ids")) is not None and positions.shape == (1, ids.shape[1]):
        tensors["position_ids"] = positions.expand(ids.shape)
    alike = [name for name, t in tensors.items() if t.ndim and name not in _BOUNDS]
    pads = pads and all(name in _TOKENS and tensors[name].shape == ids.shape for name in alike)
    if packed := is_packed(tensors):
        pads = pads and len(ids) == 1 and "position_ids" in tensors
    labels = [tensors[name] for name in LABELS if name in tensors and tensors[name].shape == ids.shape]
    counts = None if row is None else row.counts
    if pads and not packed and tensors.keys() & {"attention_mask", "position_ids"}:
        unneeded, counts = _look(tensors.get("attention_mask"), tensors.get("position_ids"), labels)
        if unneeded:
            tensors = {n: t for n, t in tensors.items() if n not in ("attention_mask", "position_ids")}
    elif counts is None and labels and all(t.device.type == "cpu" for t in labels):
        counts = _look(None, None, labels)[1]
    up = bucket(ids.shape[1], longest) if pads else ids.shape[1]
    shapes = {n: (t.shape[0], up) if pads and t.ndim else tuple(t.shape) for n, t in tensors.items()}
    tokens, added = len(ids) * up, up - ids.shape[1]
    if packed:
        shapes |= {n: (-(-(len(tensors[n]) + 1) // 16) * 16,) for n in _BOUNDS if n in tensors}
        for name in _LENGTHS:
            if isinstance(longest_document := constants.get(name), int):
                constants[name] = min(tokens, 1 << (max(longest_document, added) - 1).bit_length())
    return Batch(tensors, shapes, constants, tokens, added, counts, row)


def _look(mask: Tensor | None, positions: Tensor | None, labels: list[Tensor]) -> tuple[bool, int | None]:
    """Whether a model needs neither, as all padding is on the right and has no labels, and positions
    are those that a model counts itself; and how many labels count. The host waits once."""
    like = next(t for t in (mask, positions, *labels) if t is not None)
    real = torch.ones_like(like, dtype=torch.bool) if mask is None else mask != 0
    wrong = [(real[:, 1:] & ~real[:, :-1]).sum()]
    if positions is not None:
        wrong.append(((positions != torch.arange(positions.shape[1], device=positions.device)) & real).sum())
    counting = [(t != IGNORE).to(real.device) for t in labels]
    wrong += [(t & ~real).sum() for t in counting]
    found, *counts = torch.stack((torch.stack(wrong).sum(), *(t.sum() for t in counting))).tolist()
    return not found, max(counts) if counts else None
