"""The trained linear layers of a model in FP8: ``train_in_fp8(model, "tensorwise")``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
from torch import nn

from liger_kernel.nn.float8_training import RECIPES, LigerFloat8TrainingLinear
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.transformers.quantize import HEADS_AND_ROUTERS
from liger_kernel.transformers.recognise.projections import is_dense

SMALL = 2**23  # values of a weight below which the casts of x, W and dy take what its three products gain (MEASURED.md)

Filter = Callable[[nn.Module, str], bool] | Collection[str]


def train_in_fp8(model: nn.Module, recipe: str = "tensorwise", *, filter: Filter | None = None) -> dict[str, str]:
    """Let the linear layers of ``model`` multiply in FP8, forward and backward, and return the names of those left as they are, with the reason.

    ``recipe``: "tensorwise", "rowwise" or "rowwise_with_gw_hp", named as torchao names them; ``ops/projections/float8_training.py`` has what each casts.
    ``filter``: ends of names of layers that are left as they are, or a function of a layer and its name that says whether it is cast, as torchao's
    ``module_filter_fn``. Output heads, routers and layers below 8 million weights are left in any case, but for what such a function takes.
    Parameters, their dtypes and ``state_dict`` do not change. Raises ``ValueError`` for another recipe, and on a GPU without FP8.
    """
    if recipe not in RECIPES:
        raise ValueError(f"train_in_fp8: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    for device in {p.device for p in model.parameters()}:
        if why := lacking(device):
            raise ValueError(f"train_in_fp8: {why}")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    reasons: dict[str, str] = {}
    for name, m in model.named_modules():
        if not isinstance(m, nn.Linear) or isinstance(m, LigerFloat8TrainingLinear):
            continue
        if (why := _left(name, m, m is head, filter)) is None:
            LigerFloat8TrainingLinear.of(m, recipe)
        else:
            reasons[name] = why
    if not any(isinstance(m, LigerFloat8TrainingLinear) for m in model.modules()):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:2]) or "there is none"
        warnings.warn(f"train_in_fp8: no linear layer is in FP8 ({why})", stacklevel=2)
    return reasons


def _left(name: str, m: nn.Linear, is_head: bool, filter: Filter | None) -> str | None:
    """Why a layer is left as it is; None if it is cast."""
    if not is_dense(m):
        return f"a {type(m).__name__} that is not a plain nn.Linear: sharded, hooked, quantised, or with a forward of its own"
    if m.weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"a weight of {m.weight.dtype}"
    names = (*HEADS_AND_ROUTERS, *(() if filter is None or callable(filter) else filter))
    if callable(filter):
        if not filter(m, name):
            return "the filter leaves it"
    elif is_head or any(f".{n}." in f".{name}." for n in names):
        return "a head, a router, or left by its name"
    if m.in_features % 16 or m.out_features % 16:
        return f"{m.out_features} x {m.in_features} are not multiples of 16"
    if callable(filter):
        return None
    return f"{m.out_features} x {m.in_features} are too few to gain by it" if m.weight.numel() < SMALL else None
