"""Training of PEFT's adapters as they will be merged: ``merge_aware(model)``.

Each adapted layer gets a forward of its own, which multiplies by the base's weight and the adapters,
merged and rounded to the numbers of the base's storage (``ops/projections/merge_aware.py``). ``liger
merge --to base`` writes just these numbers.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.merge_aware import merged_linear
from liger_kernel.ops.projections.weights import ByItsModule
from liger_kernel.transformers.recognise.experts import MERGE_AWARE, adapted_experts, experts_of, input_of, is_wrapper
from liger_kernel.transformers.recognise.projections import adapted_layer, is_adapted, product_dtype, with_base
from liger_kernel.transformers.recognise.storages import Fallback, in_blocks, packed_tensor

ROUNDED = ", its adapters merged and rounded"  # of a layer, in a report


def merge_aware(model: nn.Module, on: bool = True) -> nn.Module:
    """Let the adapters of ``model``, a ``PeftModel``, train as they will be merged into its base, in the
    base's own storage: FP8 blocks, packed integers, NVFP4, 16 bits, and MXFP4 of gpt-oss's experts.

    Patch the model and give it its adapters before. ``on=False`` gives PEFT's forwards back. Raises
    ``ValueError`` with the name of a layer whose sum cannot be rounded: other bases, dropout, DoRA, biases
    of adapters. Returns ``model``.
    """
    tuner = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, tuner)]
    if not layers:
        raise ValueError("merge_aware: model must have adapters of PEFT, got none")
    for name, m in layers if on else ():
        if is_wrapper(m):
            found: Any = adapted_experts(m, input_of(experts_of(m)), rounded=True)
        elif not is_adapted(m):
            found = Fallback(f"a {type(m).__name__}, which is no linear layer with LoRA")
        else:
            found = _projection(m, _dtype_of(m.base_layer))
        if isinstance(found, Fallback):
            raise ValueError(f"merge_aware: {name} cannot be rounded to its base's numbers: {found}")
    for _, m in layers:
        own: dict[str, Any] = m.__dict__
        if is_wrapper(m):
            own[MERGE_AWARE] = on
        elif on:
            own[MERGE_AWARE], own["forward"] = own.get("forward"), types.MethodType(_forward, m)
        elif is_merge_aware(m):
            stock = own.pop(MERGE_AWARE)
            own.pop("forward") if stock is None else own.update(forward=stock)
    return model


def is_merge_aware(m: Any) -> bool:
    """Whether ``merge_aware`` has given this adapted layer its forward."""
    return getattr(m.__dict__.get("forward"), "__func__", None) is _forward


def said(m: Any) -> str:
    """Of a layer with such a forward: what it does, for a report."""
    weight = _projection(m, _dtype_of(m.base_layer))
    storage = getattr(getattr(weight, "weight", None), "said", lambda: f"in {m.base_layer.weight.dtype}")()
    return str(weight) if isinstance(weight, Fallback) else storage + ROUNDED


def _dtype_of(base: Any) -> torch.dtype:
    """Of the input of a layer."""
    return torch.bfloat16 if in_blocks(base) or packed_tensor(base) is not None else base.weight.dtype


def _projection(m: Any, dtype: torch.dtype) -> Projection | Fallback:
    """What a layer multiplies by before it is merged, or why it cannot be."""
    found = adapted_layer(m, dtype)
    if isinstance(found, Fallback):
        return found
    if isinstance(found.weight, ByItsModule):
        return Fallback(found.weight.why)
    if found.weight.values is None:
        return Fallback(f"a base of class {type(m.base_layer).__name__}, whose numbers are not known here")
    if found.weight.learnable is not None and found.weight.learnable.requires_grad:
        return Fallback("a base that is trained")
    if found.magnitude is not None or any(a.dropout or a.bias is not None for a in found.adapters):
        return Fallback("an adapter with dropout, a magnitude (DoRA) or a bias")
    return found


@torch.compiler.disable
def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if self.merged:  # by PEFT: its base has the sum
        return self.base_layer(x)
    if args or any(value is not None for value in kwargs.values()):
        raise ValueError(f"merge_aware: a layer must be called with x alone, got {', '.join(kwargs) or 'more'}")
    found = _projection(self, product_dtype(x))
    if isinstance(found, Fallback):
        raise ValueError(f"merge_aware: a layer cannot be rounded to its base's numbers: {found}")
    return with_base(merged_linear(x, found), found, self, x)
