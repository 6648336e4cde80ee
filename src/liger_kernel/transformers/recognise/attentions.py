"""The variant of attention with sinks, and the stand-ins on which it is compared with stock.

PyTorch's attention kernels know no sinks, so models such as gpt-oss run eager attention, which
makes the scores of every pair of tokens. Ours runs if the mask is a ``LazyMask``, which says what a
token sees. Stock runs for every other mask, for dropout, and if a hook may read the attention
weights.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops.attention.sink_attention import MAX_D, sink_attention
from liger_kernel.transformers.lazy_mask import LazyMask, VisibleKeys, known
from liger_kernel.transformers.recognise.variant import StandIns, Variant, are_numbers, plain, stand_in

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")  # of the masks that a layer gets


def has_sinks(name: str, candidate: Any) -> bool:
    """Whether this is the eager attention of a family with sinks whose models make the masks of
    their layers by ``MAKERS``.

    Not if it computes scores in fp32 whatever the dtype, as Flint's does: under autocast it takes
    them from queries and keys in fp32, and ours in 16 bits.
    """
    # what the source reads tells it from the eager attention of all other families
    names = candidate.__code__.co_names if name == "eager_attention_forward" and inspect.isfunction(candidate) else ()
    if "sinks" not in names or "float" in names:
        return False
    # the mask must be ours to make: see ``makers_of``
    classes = [
        c for c in candidate.__globals__.values() if isinstance(c, type) and c.__module__ == candidate.__module__
    ]
    forwards = [inspect.unwrap(c.__dict__["forward"]) for c in classes if "forward" in c.__dict__]
    return any({*MAKERS} <= {*getattr(f, "__code__", has_sinks.__code__).co_names} for f in forwards)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any) -> bool:
    if not all(map(plain, (query, key, value, sinks))) or not query.ndim == key.ndim == 4:
        return False
    # multiplied in one dtype: under autocast, rotated queries and keys are fp32
    dtypes = {query.dtype, key.dtype, value.dtype}
    alike = len(dtypes) == 1 or (torch.float64 not in dtypes and torch.is_autocast_enabled(query.device.type))
    # the kernel knows one sink for each head, and no other shape
    shapes = (query.shape[0], 1, query.shape[2], key.shape[2]) == mask.shape and value.shape == key.shape
    return alike and shapes and sinks.shape == (query.shape[1],) and query.shape[3] <= MAX_D


def _watched(module: nn.Module) -> bool:
    """Whether a hook of somebody's may read the attention weights that ``module`` returns."""
    return any(
        getattr(hook, "__module__", None) != "transformers.utils.output_capturing"
        for hook in module._forward_hooks.values()
    )


@dataclass(frozen=True)
class SinkAttention(Variant):
    """Eager attention with a learned score for each head that adds to the softmax's denominator."""

    kind, results, exact, said = "attention", 1, False, ("sinks",)

    def __call__(self, stock: Callable) -> Callable:
        def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            # what a token sees, if the mask is one of ours
            sinks, keys = getattr(module, "sinks", None), known(attention_mask)
            more = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "head_mask"))
            fits = keys is not None and not (more or dropout) and are_numbers(scaling)
            if fits and _fits(query, key, value, attention_mask, sinks) and not _watched(module):
                how = dict(window=keys.window, valid=keys.valid, first=keys.first, scale=scaling)
                return sink_attention(query, key, value, sinks, **how).transpose(1, 2), None
            if is_invariant():
                got = f"{type(attention_mask).__name__} and dropout {dropout}"
                raise ValueError(f"batch_invariant: attention with sinks must have our mask and no dropout, got {got}")
            # stock adds a mask of every pair of tokens
            if isinstance(attention_mask, LazyMask):
                attention_mask = attention_mask.dense()
            return stock(module, query, key, value, attention_mask, scaling, dropout, **kwargs)

        return eager_attention_forward

    def stand_ins(self) -> StandIns:
        B, H, groups, T, D = 3, 4, 2, 11, 8
        # rows of several lengths, one of them short
        valid = torch.arange(T) < torch.tensor([[T], [T - 3], [T - 7]])
        # all that masks of these families say, and each scale differs from 1 / sqrt(D)
        for keys, scaling in (
            (VisibleKeys(), D**-0.5),
            (VisibleKeys(4), 0.5),
            (VisibleKeys(valid=valid), 0.3),
            (VisibleKeys(3, valid=valid.flip(1)), 0.2),
        ):
            q, k, v = (torch.randn(B, heads, T, D) for heads in (H, H // groups, H // groups))
            attributes = dict(num_key_value_groups=groups, training=True, sinks=nn.Parameter(torch.randn(H)))
            module = lambda dtype, weights, attributes=attributes: stand_in(nn.Module, attributes).to(weights)
            mask = lambda dtype, weights, keys=keys: LazyMask(keys, B, T, dtype, torch.device("cpu"))
            yield dict(scaling=scaling), (module, q, k, v, mask)


def makers_of(module: types.ModuleType) -> list[str]:
    """The names in ``module`` of the functions that make masks."""
    return [name for name in MAKERS if hasattr(module, name)]
