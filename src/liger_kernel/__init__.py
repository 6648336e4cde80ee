"""Fused Triton kernels for LLM training.

Importing this package is instant: it loads neither torch nor Triton and needs no GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from liger_kernel import _legacy, _others

if TYPE_CHECKING:
    from liger_kernel.ops.projections.invariant_products import batch_invariant as batch_invariant
    from liger_kernel.transformers.patching.apply import apply as apply

__all__ = ["apply", "batch_invariant"]
__version__ = "0.8.90+independent"  # what it says: docs/development/checks-and-releases.md

_legacy.install()
if _beside := _others.warning(__version__, __path__[0]):
    warnings.warn(_beside, stacklevel=2)

_BACKENDS = ("available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl")
# name -> the module that has it, imported when the name is asked for
_LAZY = dict.fromkeys(_BACKENDS, "liger_kernel.backends") | {
    "apply": "liger_kernel.transformers.patching.apply",
    "batch_invariant": "liger_kernel.ops.projections.invariant_products",
}


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("liger_kernel.functional")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "apply" and importlib.util.find_spec("transformers") is None:
        raise ImportError("apply needs transformers: pip install transformers")
    return getattr(importlib.import_module(_LAZY[name]), name)
