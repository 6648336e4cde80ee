"""Fused operators. Importing an operator's file declares it; this package re-exports every public operator and what it is published with."""

from __future__ import annotations

import importlib
import pkgutil

from liger_kernel.ops._op import OPS

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        _names = vars(importlib.import_module(f"{__name__}.{_module.name}"))
        globals().update({name: value for name, value in _names.items() if name in (*OPS, _module.name) or name.startswith(("Liger", "Grpo", "apply_"))})
