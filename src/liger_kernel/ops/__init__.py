"""Fused operators. Importing an operator's file declares it; this package re-exports every public operator and what it is published with."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings

from liger_kernel.ops._op import OPS

if (_impl := os.environ.get("LIGER_KERNEL_IMPL")) not in (None, "", "triton"):
    warnings.warn(f"LIGER_KERNEL_IMPL={_impl}: there is one implementation here, triton, and it is what runs", stacklevel=2)

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        _names = vars(importlib.import_module(f"{__name__}.{_module.name}"))
        globals().update({name: value for name, value in _names.items() if name in (*OPS, _module.name) or name.startswith(("Liger", "Grpo", "apply_"))})
