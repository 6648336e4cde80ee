"""Calls of other functions than ``forward`` on modules that FSDP has sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class _FSDPForwardRedirection:
    """Calls a function while the parameters of a module, wrapped by FSDP1, are gathered, and lets their gradients be reduced."""

    def __call__(self, wrapper_module: FullyShardedDataParallel, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """``method(*args, **kwargs)``, from within a call of ``wrapper_module``."""
        inner: nn.Module = wrapper_module.module
        kept = inner.__dict__.get("forward")

        def forward(*_: Any, **__: Any) -> Any:
            restore()  # method may call the module
            return method(*args, **kwargs)

        def restore() -> None:
            if kept is None:
                inner.__dict__.pop("forward", None)
            else:
                inner.forward = kept

        inner.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
