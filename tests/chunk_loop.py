"""The chunk loop of a head's losses, for tests: how long chunks are, and what runs inside, which
dispatch modes around launchers do not see."""

import importlib

import torch

from liger_kernel.ops.losses.chunks import HeadLoop


def _module(name: str):
    return importlib.import_module(f"liger_kernel.ops.losses.{name}")


def set_chunk_rows(monkeypatch, rows) -> None:
    """Let chunks have so many tokens where nobody says otherwise; ``rows`` may be a function."""
    chosen = rows if callable(rows) else lambda *_, **__: rows
    for name in ("chunks", "linear_cross_entropy", "linear_loss"):
        monkeypatch.setattr(_module(name), "auto_chunk_rows", chosen)


def watch_loop(monkeypatch, mode) -> None:
    """Let the ``mode`` be on wherever the loop of ``linear_cross_entropy`` runs."""

    class Watched(HeadLoop):
        def __init__(self, *args, **kwargs):
            with mode:
                super().__init__(*args, **kwargs)

        def __iter__(self):
            with mode:
                yield from super().__iter__()

    monkeypatch.setattr(_module("linear_cross_entropy"), "HeadLoop", Watched)


def watch_products(monkeypatch) -> list[tuple[int, int, int]]:
    """The sizes (M, K, N) of all products from now on."""
    seen = []

    def counted(product):
        def call(*args, **kwargs):
            a, b = args[-2:]
            seen.append((*a.shape, b.shape[1]))
            return product(*args, **kwargs)

        return call

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    return seen


def multiplications(products: list[tuple[int, int, int]]) -> int:
    return sum(m * k * n for m, k, n in products)
