"""``experts_implementation="liger"``: our experts by Transformers' own registry, without a patch.

The module of experts stays Transformers', and its dispatcher calls these functions with it. PEFT's
adapters on experts are in their weights by then, added by PEFT at each call; a patched model
multiplies by them without adding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.transformers.patching.patches import original
from liger_kernel.transformers.recognise.compare import recognise
from liger_kernel.transformers.recognise.experts import DEFAULT_EXPERTS, EXPERTS, IN_BLOCKS, OURS
from liger_kernel.transformers.recognise.families import undisturbed
from liger_kernel.transformers.recognise.slots import SLOTS


def register() -> None:
    """Register both implementations in Transformers; nothing for a release without a registry."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(OURS, functools.partial(_experts, ALL_EXPERTS_FUNCTIONS[DEFAULT_EXPERTS]))
    ALL_FP8_EXPERTS_FUNCTIONS.register(OURS, IN_BLOCKS(ALL_FP8_EXPERTS_FUNCTIONS[DEFAULT_EXPERTS]))


@functools.cache
def _forward_of(cls: Any, default: Callable) -> Callable:
    """Our forward of experts of this class; Transformers' default if we have none."""
    slot = next(s for s in SLOTS if s.variants is EXPERTS)
    with undisturbed():
        variant, _ = recognise(slot, cls, original(cls, "forward"))
    return default if variant is None else variant(default)


def _experts(
    default: Callable, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **more: Any
) -> Tensor:
    if torch.compiler.is_compiling():  # which would trace the recognition
        return default(experts, hidden_states, top_k_index, top_k_weights, **more)
    # PyTorch's parametrisations and FSDP2 put classes of their own over the one with the source
    owner = next(cls for cls in type(experts).__mro__ if "forward" in vars(cls))
    return _forward_of(owner, default)(experts, hidden_states, top_k_index, top_k_weights, **more)
