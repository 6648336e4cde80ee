"""The losses as functions: ``liger_fused_linear_dpo`` is ``LigerFusedLinearDPOFunction.apply``, and so for the others; these Functions, too."""

from __future__ import annotations

from typing import Any

import liger_kernel.chunked_loss as losses

__all__ = [name for name in losses.__all__ if name.startswith("liger_") or name.endswith("Function")]


def __getattr__(name: str) -> Any:
    if name not in __all__ and not name.endswith("Function"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(losses, name)


def __dir__() -> list[str]:
    return __all__
