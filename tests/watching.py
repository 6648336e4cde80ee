"""What tests see of a computation: the operators that run, the memory that they take, and what is kept
for a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """What ran under it, and what it made in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.work = 0  # multiplications of matrix products
        self.largest = 0  # elements of the largest floating-point tensor
        self.peak = 0  # bytes that were there at a time
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.__name__.partition(".")[0])
        if self.names[-1] in ("mm", "addmm", "addmm_"):
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            self.work += a.shape[0] * a.shape[1] * b.shape[1]
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for t in out if isinstance(out, tuple | list) else (out,):
            # views are of what was there
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, t.numel() * t.is_floating_point())
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        """Of what is still there."""
        self.storages = {k: s for k, s in self.storages.items() if not s[0].expired()}
        return sum(n for _, n in self.storages.values())

    @property
    def reads(self) -> int:
        """How often the host reads a value, for which it waits on a GPU."""
        return self.names.count("_local_scalar_dense")

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name in self.names)


@contextlib.contextmanager
def saved() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves meanwhile."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept


@contextlib.contextmanager
def saved_unchanged() -> Iterator[None]:
    """As ``saved``; the test fails if any of them has been written to by the end."""
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, t.clone())) or t, lambda t: t):
        yield
    assert kept and all(torch.equal(t, before) for t, before in kept)


def noted(
    monkeypatch: Any, owner: Any, name: str, note: Callable[..., Any], found: list[Any] | None = None
) -> list[Any]:
    """``note`` of the arguments of every call of ``owner.name``, from now on."""
    notes, function = [] if found is None else found, getattr(owner, name)

    def spy(*args: Any, **options: Any) -> Any:
        notes.append(note(*args, **options))
        return function(*args, **options)

    monkeypatch.setattr(owner, name, spy)
    return notes


def calls_of(monkeypatch: Any, owner: Any, name: str) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments of every call of a function from now on."""
    return noted(monkeypatch, owner, name, lambda *args, **more: (args, more))
