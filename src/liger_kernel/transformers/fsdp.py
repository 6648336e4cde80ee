"""Calls of functions other than ``forward`` on modules that FSDP has sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from liger_kernel.parallel import call_instead


class _FSDPForwardRedirection:
    """Calls a function while the parameters of a module, wrapped by FSDP1, are gathered, and
    lets their gradients be reduced."""

    def __call__(self, wrapper_module: nn.Module, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """``method(*args, **kwargs)``, from within a call of ``wrapper_module``."""
        return call_instead(wrapper_module, wrapper_module.module, method, *args, **kwargs)
