"""Losses of a linear head for preference optimisation, reinforcement learning and distillation: no logits of all tokens, gradients by chunks.

Names are imported from their files when they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_LOSSES = {"orpo": "ORPO", "dpo": "DPO", "cpo": "CPO", "simpo": "SimPO", "kto": "KTO", "grpo": "GRPO", "jsd": "JSD", "cosine_similarity": "CosineSimilarity"}
_BASES = {"preference": "Preference", "unpaired_preference": "UnpairedPreference", "ppo": "PPO", "distillation": "Distillation"}

_PREFIX = "LigerFusedLinear"

# public name -> file, attribute
_NAMES = {f"{_PREFIX}{name}{kind}": (f"{file}_loss", f"{_PREFIX}{name}{kind}") for file, name in _LOSSES.items() for kind in ("Loss", "Function")}
_NAMES |= {f"{_PREFIX}{name}Base": (f"fused_linear_{file}", f"{_PREFIX}{name}Base") for file, name in _BASES.items()}
_NAMES |= {f"liger_fused_linear_{file.removesuffix('_similarity')}": (f"{file}_loss", f"{_PREFIX}{name}Function.apply") for file, name in _LOSSES.items()}

__all__ = sorted(name for name, (file, _) in _NAMES.items() if importlib.util.find_spec(f"{__name__}.{file}"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file, attribute = _NAMES[name]
    found: Any = importlib.import_module(f"{__name__}.{file}")
    for part in attribute.split("."):
        found = getattr(found, part)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
