"""A batch as the fixed inputs of a recorded step: rows padded up to one of few lengths, no mask
where causality hides all padding, and a bound for the labels that count.

    input_ids (4, 1000), attention_mask, padding on the right      input_ids (4, 1024)
    labels (4, 1000), 700 of them count                            labels (4, 1024), most=2048

``B`` rows, ``T`` tokens per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
# tensors (B, T), and what padding has there; positions go on counting
_TOKENS = {"input_ids": 0, "labels": IGNORE, "shift_labels": IGNORE, "attention_mask": 0, "position_ids": None}
_LABELS = ("labels", "shift_labels")
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
        for name, t in self.tensors.items():
            into = inputs[name]
            if t.shape == into.shape:
                into.copy_(t, non_blocking=True)
                continue
            T = t.shape[1]
            into[:, :T].copy_(t, non_blocking=True)
            if (value := _TOKENS[name]) is not None:
                into[:, T:] = value
            else:
                more = torch.arange(1, into.shape[1] - T + 1, device=into.device, dtype=into.dtype)
                torch.add(into[:, T - 1 : T], more, out=into[:, T:])


def bucket(T: int, longest: int | None = None) -> int:
    """The next length with a recording: eight for each power of two, multiples of 64. Not beyond
    ``longest``, the positions that a model has."""
    step = max(64, (1 << (T - 1).bit_length()) // 16) if T > 1 else 64
    up = -(-T // step) * step
    return up if longest is None or up <= longest or longest < T else longest


def batch_of(given: Mapping[str, Any], pads: bool, longest: int | None, device: torch.device) -> Batch | str:
    """The batch, or why it has none. ``pads``: tokens may be added on the right. The host waits only
    for a mask on the GPU, once, as Transformers does."""
    if given.get("cu_seq_lens_q") is not None:
        return "its rows are packed, with bounds (cu_seq_lens_q)"
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if name == "num_items_in_batch" and isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32)  # as the loss makes one of a number
        if type(value) is Tensor and not value.requires_grad:
            tensors[name] = value
        elif isinstance(value, bool | int | float | str | None):
            constants[name] = value
        else:
            of = "a tensor that requires a gradient" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            return f"{name} is {of}"
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2 or not ids.numel():
        return "there are no input_ids (B, T)"
    alike = [name for name, t in tensors.items() if t.ndim]
    pads = pads and all(name in _TOKENS and tensors[name].shape == ids.shape for name in alike)
    labels = [tensors[name] for name in _LABELS if name in tensors and tensors[name].shape == ids.shape]
    mask = tensors.get("attention_mask")
    counts: int | None = None
    if mask is not None and mask.shape == ids.shape and pads:
        hidden, counts = _look(mask, labels)
        if hidden:
            del tensors["attention_mask"]
    elif labels and all(t.device.type == "cpu" for t in labels):
        counts = _look(torch.ones_like(labels[0]), labels)[1]
    up = bucket(ids.shape[1], longest) if pads else ids.shape[1]
    shapes = {n: (t.shape[0], up) if pads and t.ndim else tuple(t.shape) for n, t in tensors.items()}
    return Batch(tensors, shapes, constants, ids.shape[0] * up, up - ids.shape[1], counts)


def _look(mask: Tensor, labels: list[Tensor]) -> tuple[bool, int | None]:
    """Whether all padding is on the right and has no labels, and how many labels count. The host
    waits once."""
    real = mask != 0
    holes = (real[:, 1:] & ~real[:, :-1]).sum()
    counting = [(t != IGNORE).to(mask.device) for t in labels]
    wrong = [(t & ~real).sum() for t in counting]
    at_padding, holes, *counts = torch.stack((sum(wrong, holes), holes, *(t.sum() for t in counting))).tolist()
    return not (at_padding or holes), max(counts) if counts else None
