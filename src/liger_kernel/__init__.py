"""Fused Triton kernels for LLM training.

Importing this package is instant: it loads neither torch nor Triton and needs no GPU.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from liger_kernel import _legacy, _others

__version__ = "0.8.90+independent"  # what it says: docs/development/checks-and-releases.md

_legacy.install()
if _beside := _others.warning(__version__, __path__[0]):
    warnings.warn(_beside, stacklevel=2)

_BACKENDS = ("available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl")


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("liger_kernel.functional")
    if name in _BACKENDS:
        return getattr(importlib.import_module("liger_kernel.backends"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
