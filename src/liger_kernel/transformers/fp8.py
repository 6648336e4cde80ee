"""The trained linear layers of a model in FP8: ``train_in_fp8(model, "tensorwise")``, or the flag
``fp8`` of every patch.

    request_of   what the flags of a patch say, as a ``Request``
    convert      a live model
    converting   models that are made later: the ``__init__`` of their classes
    reason       why a linear layer stays as it is

A layer gets the class ``LigerFloat8TrainingLinear``. Its parameters stay, so that they may be
loaded, moved, sharded or wrapped before and after.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernel.nearest import did_you_mean
from liger_kernel.nn.float8_training import DTYPES, RECIPES, LigerFloat8TrainingLinear
from liger_kernel.ops.losses.float8_head import HEAD_RECIPES
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.patch_options import Filter
from liger_kernel.transformers.head.head_weights import FP8
from liger_kernel.transformers.quantize import (
    HEADS_AND_ROUTERS,
    linear_layers,
    none_is_in_fp8,
    not_plain,
    owners_of_heads,
    unfit_shape,
)
from liger_kernel.transformers.recognise.storages import is_dense

# values of a weight below which its three products gain less than the casts, and the host, take
# (MEASURED.md)
SMALL = 2**24


def train_in_fp8(model: nn.Module, recipe: str = "tensorwise", *, filter: Filter | None = None) -> dict[str, str]:
    """Let the linear layers of ``model`` multiply in FP8, forward and backward, and return the
    names of those left as they are, with the reason.

    ``recipe``: "tensorwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8_rceil", as torchao names
    them: see ``ops/projections/float8_training.py``. ``filter``: names of layers, or of modules
    around layers, that are left as they are; or a function of a layer and its name that says
    whether it is cast, as torchao's ``module_filter_fn``. Output heads, routers and layers below 8
    million weights are left in any case, but for what such a function takes. Parameters, their
    dtypes and ``state_dict`` do not change. Another call decides about all layers again, and
    ``restore(model)`` undoes it.
    Raises ``ValueError`` for another recipe, for a name that no layer has, for a model with weights
    in float16, and on a GPU without FP8.
    """
    request = request_of({"fp8": recipe, "fp8_filter": filter})
    if request is None:
        raise ValueError(f"fp8: must be {_RECIPES}, got {recipe!r}")
    return convert(model, request)


@dataclass(frozen=True)
class Request:
    """What the flags of a patch request. Its text is the label of the patch."""

    recipe: str
    filter: Callable[[nn.Module, str], bool] | tuple[str, ...] = ()
    head: bool = False

    def __str__(self) -> str:
        return f"fp8({self.recipe}{', head' * self.head})"


_RECIPES = f"one of {', '.join(RECIPES)}"


def request_of(flags: Mapping[str, Any]) -> Request | None:
    """The request in the flags of a patch; None without one. ``ValueError`` for a value that cannot
    be."""
    recipe, filter = flags.get("fp8") or None, flags.get("fp8_filter") or ()
    if isinstance(filter, str) or not (
        callable(filter) or (isinstance(filter, Collection) and all(isinstance(name, str) for name in filter))
    ):
        raise ValueError(f"fp8_filter: must be names of layers, or a function of a layer and its name, got {filter!r}")
    if recipe is None:
        if filter or flags.get("fp8_head"):
            raise ValueError(f"{'fp8_filter' if filter else 'fp8_head'}: needs fp8, a recipe")
        return None
    # Known to torchao's users, so it gets its own reason.
    if recipe == "blockwise":
        why = "no kernel of ours or of PyTorch computes it faster than 16 bits"
        raise ValueError(f"fp8: blockwise is refused, because {why}; it must be {_RECIPES}")
    if recipe not in RECIPES:
        near = did_you_mean(recipe, RECIPES) if isinstance(recipe, str) else ""
        raise ValueError(f"fp8: must be {_RECIPES}, or False, got {recipe!r}{near}")
    if flags.get("fp8_head") and recipe not in HEAD_RECIPES:
        raise ValueError(f"fp8_head: needs fp8 to be {' or '.join(HEAD_RECIPES)}, got {recipe!r}")
    return Request(recipe, filter if callable(filter) else tuple(filter), bool(flags.get("fp8_head")))


def convert(model: nn.Module, request: Request) -> dict[str, str]:
    """``train_in_fp8`` of a request."""
    # A name in the filter that matches nothing is most likely misspelt, and would train in FP8
    # what was meant to stay.
    names = [name for name, _, _ in linear_layers(model)]
    for left in request.filter if isinstance(request.filter, tuple) else ():
        if not any(f".{left}." in f".{name}." for name in names):
            there = sorted({part for name in names for part in name.split(".")})
            near = did_you_mean(left, there)
            raise ValueError(f"fp8_filter: {type(model).__name__} has no linear layer {left!r}{near}")
    if request.head and not owners_of_heads(model):
        raise ValueError(f"fp8_head: {type(model).__name__} has no output head")
    reasons = _convert(model, request)
    if not any(isinstance(m, LigerFloat8TrainingLinear) for m in model.modules()):
        warnings.warn(f"fp8: {none_is_in_fp8(reasons)}", stacklevel=3)
    return reasons


def _convert(model: nn.Module, request: Request) -> dict[str, str]:
    """``convert`` without its warning."""
    for p in model.parameters():
        if p.dtype == torch.float16:
            raise ValueError("fp8: the model must have weights in bfloat16 or float32, got float16")
    for device in {p.device for p in model.parameters()}:
        if why := lacking(device, RECIPES[request.recipe].capability):
            raise ValueError(f"fp8: {why}")
    # Another call decides about all layers again, so none of the last may stay.
    give_back(model)
    for m in owners_of_heads(model) if request.head else ():
        m.__dict__[FP8] = request.recipe
    reasons = {}
    for name, m, is_head in linear_layers(model):
        if (why := HEAD if is_head and request.head else reason(name, m, is_head, request)) is None:
            LigerFloat8TrainingLinear.of(m, request.recipe)
        else:
            reasons[name] = why
    return reasons


def give_back(model: nn.Module) -> None:
    """Undo ``convert``."""
    for m in model.modules():
        m.__dict__.pop(FP8, None)
        if type(m) is LigerFloat8TrainingLinear:
            m.given_back()


HEAD = "the head, in FP8 as part of the loss"


def reason(name: str, m: nn.Linear, is_head: bool, request: Request) -> str | None:
    """Why a layer is left as it is; None if it is cast."""
    filter = request.filter
    # Types first: a filter by others' code must not be asked about layers that cannot be cast.
    if not is_dense(m):
        return not_plain(m)
    if m.weight.dtype not in DTYPES:
        return f"a weight of {m.weight.dtype}"
    if callable(filter):
        if not filter(m, name):
            return "the filter leaves it"
    elif is_head or any(f".{n}." in f".{name}." for n in (*HEADS_AND_ROUTERS, *filter)):
        return "a head, a router, or left by its name"
    return unfit_shape(m, RECIPES[request.recipe].multiple, 0 if callable(filter) else SMALL) or None


_being_made: contextvars.ContextVar[bool] = contextvars.ContextVar("being_made", default=False)


def converting(init: Callable, request: Request) -> Callable:
    """``init`` of a model class, after which the model is trained in FP8. Models within models are
    converted with the outermost, which knows all names.

    A model that is loaded quantised stays as it is: quantisers of Transformers look for layers
    whose class is ``nn.Linear`` after ``__init__``.
    """

    @functools.wraps(init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _being_made.get():
            return init(self, *args, **kwargs)
        token = _being_made.set(True)
        try:
            init(self, *args, **kwargs)
        finally:
            _being_made.reset(token)
        if getattr(getattr(self, "config", None), "quantization_config", None) is None:
            _convert(self, request)
        else:
            name, why = type(self).__name__, "because the model is quantised"
            warnings.warn(f"{name}: fp8={request.recipe!r} has no effect, {why}", stacklevel=2)

    return __init__
