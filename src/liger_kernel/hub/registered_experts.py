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

from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.moe import adapted_moe, moe
from liger_kernel.ops.projections.weights import Dequantized
from liger_kernel.transformers.patching.patches import original
from liger_kernel.transformers.recognise.activations import activation
from liger_kernel.transformers.recognise.compare import recognise
from liger_kernel.transformers.recognise.experts import DEFAULT_EXPERTS, DOWN, EXPERTS, GATE_UP, OURS
from liger_kernel.transformers.recognise.families import undisturbed
from liger_kernel.transformers.recognise.projections import product_dtype
from liger_kernel.transformers.recognise.slots import SLOTS


def register() -> None:
    """Register both implementations in Transformers; nothing for a release without a registry."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(OURS, functools.partial(_experts, ALL_EXPERTS_FUNCTIONS[DEFAULT_EXPERTS]))
    ALL_FP8_EXPERTS_FUNCTIONS.register(
        OURS, functools.partial(_fp8_experts, ALL_FP8_EXPERTS_FUNCTIONS[DEFAULT_EXPERTS])
    )


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


def _fp8_experts(
    default: Callable, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **more: Any
) -> Tensor:
    """Experts of a checkpoint in FP8, whose weights are made dense for each product. Their inputs
    are not rounded to FP8, so that x has the gradient of what is computed."""
    form = None if torch.compiler.is_compiling() or more else _fp8_form(experts)
    if form is None:
        return default(experts, hidden_states, top_k_index, top_k_weights, **more)
    x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (hidden_states, top_k_index, top_k_weights))
    x = x.to(product_dtype(x))

    def stored(name: str) -> Dequantized:
        w, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        return Dequantized(tuple(w.shape), None, dequantize=functools.partial(_dense, w, scale, experts.block_size))

    gate_up, down = stored(GATE_UP), stored(DOWN)
    if use_kernels(x):
        y = adapted_moe(x, gate_up, down, index, weights, **form)
    else:
        y = moe(x, gate_up.dense(x.dtype), down.dense(x.dtype), index, weights, **form)
    return y.view(hidden_states.shape).to(hidden_states.dtype)


def _fp8_form(experts: Any) -> dict[str, Any] | None:
    """The options of ``moe`` for Transformers' experts in FP8; None for those in FP4, without a
    gate, spread over ranks, or with an activation that is none of ours."""
    if not experts.has_gate or getattr(experts, "gate_softcap", None) is not None:
        return None
    if is_sharded(experts.gate_up_proj) or not experts.gate_up_proj.is_floating_point():
        return None
    alpha = getattr(experts, "swiglu_alpha", None)
    limit = experts.limit  # swiglu_limit of the configuration
    if alpha is not None:  # stock computes a SiLU then, whatever activation the configuration names
        return dict(act="silu", alpha=alpha, limit=limit, offset=1.0)
    act = activation(experts.act_fn)
    return None if act is None else dict(act=act, limit=limit)


def _dense(w: Tensor, scale: Tensor, blocks: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """W (E, N, K) in ``dtype``, of values in FP8 and scales (E, ., .), one for each block."""
    if w.element_size() > 1:
        return w.to(dtype)
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    # without blocks a scale for each expert, or one for its gate and one for its up
    rows, columns = (w.shape[1] // scale.shape[1], w.shape[2]) if blocks is None else blocks
    scales = scale.float().repeat_interleave(rows, 1)[:, : w.shape[1]]
    # by columns of blocks, because a scale for each weight would need twice the memory of the result
    for i, (part, values) in enumerate(zip(out.split(columns, -1), w.split(columns, -1))):
        part.copy_(values.float() * scales[..., i, None])
    return out
