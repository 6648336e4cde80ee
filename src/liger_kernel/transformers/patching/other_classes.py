"""Norms, MLPs and experts of classes that belong to no family of Transformers, such as those of
remote code: recognised by what their ``forward`` computes, as those of families are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from liger_kernel.parallel import unsharded_class
from liger_kernel.transformers.patching.patches import KEY, original
from liger_kernel.transformers.recognise.compare import recognise
from liger_kernel.transformers.recognise.families import undisturbed
from liger_kernel.transformers.recognise.slots import PLAIN_MLP, SLOTS, TORCHS_OWN

_OF_CLASSES = [slot for slot in SLOTS if slot.parameters[0][0] == "x" and slot.flag != "rope"]
# What a forward may ask that a stand-in cannot answer: it has only the attributes that the variant
# reads
_MAY_DIFFER = {"getattr", "hasattr", "training", "__dict__"}


def stock_class(m: nn.Module) -> type:
    """The class of ``m`` without what we and FSDP2 put over it."""
    cls = unsharded_class(m)
    return next(c for c in cls.__mro__ if KEY not in vars(c))


def classes_of(model: nn.Module, with_transformers: bool) -> Iterator[type]:
    """The classes in ``model`` that no table describes. ``with_transformers``: those of
    Transformers and PyTorch's LayerNorm, too, as the model is of no family."""
    packages = {"torch", "liger_kernel", "peft"} | (set() if with_transformers else {"transformers"})
    for cls in dict.fromkeys(map(stock_class, model.modules())):
        if cls.__module__.partition(".")[0] not in packages or (with_transformers and cls is nn.LayerNorm):
            yield cls


@functools.cache
def recognised(cls: type) -> tuple[str, str]:
    """The label of the variant that computes what ``cls`` does; otherwise why it stays stock, which
    is empty if it is neither a norm nor an MLP by its name."""
    if cls is nn.LayerNorm:
        return TORCHS_OWN["nn.LayerNorm"][1], ""
    stock: Any = original(cls, "forward", None)
    if not isinstance(stock, FunctionType):
        return "", ""
    slots = [s for s in _OF_CLASSES if len(inspect.signature(stock).parameters) == len(s.parameters[0]) + 1]
    named = [slot for slot in _OF_CLASSES if slot.candidate(cls.__name__, cls)]
    reasons = []
    with undisturbed():
        for slot in slots:
            variant, reason = recognise(slot, cls, stock)
            if variant and slot.flag != "relu_squared":
                more = _MAY_DIFFER & set(_names_in(cls))
                return ("", f"its code uses {', '.join(sorted(more))}") if more else (variant.label, "")
            reasons += [PLAIN_MLP if variant else reason] * (slot in named)
    if not named:
        return "", ""
    # an attribute that another slot's variants lack says less than that the result differs
    least = lambda why: why.startswith("uses ")
    return "", min(reasons, key=least, default="forward takes other arguments")


def _names_in(cls: type) -> Iterator[str]:
    """The names in the code of the methods of ``cls`` that a call may run."""
    own = (base for base in cls.__mro__ if not base.__module__.startswith("torch."))
    for name, method in ((n, m) for base in own for n, m in vars(base).items()):
        if isinstance(method, FunctionType) and name not in ("__init__", "extra_repr", "__repr__"):
            yield from inspect.unwrap(method).__code__.co_names
