"""Checks of arguments that many operators have. Each raises ``ValueError`` with the operator, the argument,
what it must be, and what was given. What is None was not given, and passes.

Norms, activations and rotary embeddings, of which a model has many, check inline: it costs the host less.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor


def floating(op: str, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and not t.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, got {t.dtype}")


def shape(op: str, expected: Sequence[int], **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.shape != expected:
            raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, got {tuple(t.shape)}")


def floating_shape(op: str, expected: Sequence[int], **tensors: Tensor | None) -> None:
    """Both of them, in one message."""
    for name, t in tensors.items():
        if t is not None and (t.shape != expected or not t.is_floating_point()):
            what = f"floating point of shape {tuple(expected)}"
            raise ValueError(f"{op}: {name} must be {what}, got {t.dtype} {tuple(t.shape)}")


def dims(op: str, form: str, **tensors: Tensor) -> None:
    """As many dims as a ``form`` such as "(M, V)" has."""
    for name, t in tensors.items():
        if t.ndim != form.count(",") + 1:
            raise ValueError(f"{op}: {name} must have shape {form}, got {tuple(t.shape)}")


def integers(op: str, expected: Sequence[int | str], **tensors: Tensor | None) -> None:
    """Of this shape, in which a name stands for any size."""
    for name, t in tensors.items():
        if t is None:
            continue
        fits = t.ndim == len(expected) and all(isinstance(n, str) or n == m for n, m in zip(expected, t.shape))
        if not fits or t.is_floating_point() or t.dtype == torch.bool:
            shown = ", ".join(map(str, expected))
            raise ValueError(f"{op}: {name} must be integers of shape ({shown}), got {t.dtype} {tuple(t.shape)}")


def one_element(op: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.numel() != 1:
            raise ValueError(f"{op}: {name} must have one element, got shape {tuple(t.shape)}")


def one_of(op: str, known: Container[Any], **values: Any) -> None:
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"{op}: {name} must be one of {known}, got {value!r}")


def positive(op: str, **numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{op}: {name} must be positive, got {value}")
