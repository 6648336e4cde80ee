"""Modules that store the arguments of their constructor."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class WithOptions(nn.Module):
    """A subclass passes the ``locals()`` of its constructor: each argument becomes an attribute of
    that name, which may be changed until it is used.

    Names in ``buffers_of`` become buffers, which move with the module and are not part of its
    state.
    """

    buffers_of: tuple[str, ...] = ()
    option_names: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if WithOptions in cls.__bases__:  # a subclass of that may have another constructor
            cls.option_names = tuple(inspect.signature(cls.__init__).parameters)[1:]

    def __init__(self, arguments: dict[str, Any]):
        super().__init__()
        for name in self.option_names:
            if name in self.buffers_of:
                self.register_buffer(name, arguments[name], persistent=False)
            else:
                setattr(self, name, arguments[name])

    def options(self) -> dict[str, Any]:
        """The arguments that a loss function takes under the same names, without those that have
        no effect."""
        return {name: getattr(self, name) for name in self.option_names if name not in ("compiled", "chunk_size")}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_names if name not in self.buffers_of)
