"""A loss as a module that keeps its options."""

from __future__ import annotations

from typing import Any

from torch import nn


class LossModule(nn.Module):
    """A subclass gives the ``locals()`` of its constructor: each argument becomes an attribute of its name, which may be changed until it is used."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__()
        self._names = tuple(name for name in arguments if name not in ("self", "__class__"))
        for name in self._names:
            setattr(self, name, arguments[name])

    def options(self) -> dict[str, Any]:
        """The arguments that a loss function takes by the same names, less those without effect."""
        return {name: getattr(self, name) for name in self._names if name not in ("compiled", "chunk_size")}
