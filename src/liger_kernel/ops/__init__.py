"""Fused operators. Importing an operator's file declares it; this package re-exports every public operator and what it is published with."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings

from liger_kernel.ops._impl import LIGER_KERNEL_IMPL_ENV as LIGER_KERNEL_IMPL_ENV
from liger_kernel.ops._impl import OURS
from liger_kernel.ops._impl import select_impl as select_impl
from liger_kernel.ops._op import OPS

if (_impl := os.environ.get("LIGER_KERNEL_IMPL")) and _impl not in OURS:
    warnings.warn(f"LIGER_KERNEL_IMPL={_impl}: the implementations here are triton, which is what runs, and torch", stacklevel=2)

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        _names = vars(importlib.import_module(f"{__name__}.{_module.name}"))
        _public = lambda name: name.startswith(("Liger", "Grpo", "apply_")) or (name.endswith(("_forward", "_backward")) and not name.startswith("_"))
        globals().update({name: value for name, value in _names.items() if name in (*OPS, _module.name) or _public(name)})
