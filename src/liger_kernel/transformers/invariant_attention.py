"""Attention of models whose tokens must have the same bits in any batch, in Transformers' attention
interface; and which models hold the switch of batch invariance.

``liger_invariant`` is causal attention by ``sink_attention``, which in this mode sums over blocks
that begin where the token's document begins. A token's document is what its mask says: a row
without its padding, or a part of a packed row. What those kernels do not compute raises
``ValueError``.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.attention.sink_attention import (
    MAX_D,
    LigerSinkAttentionFunction,
    documents,
    later_attention,
    sink_attention,
)
from liger_kernel.ops.projections.invariant_products import turn
from liger_kernel.transformers import attention
from liger_kernel.transformers.lazy_mask import LazyMask, VisibleKeys, known, lazy, visible_keys

NAME = "liger_invariant"
_LAYERS = {"full_attention", "sliding_attention"}  # kinds that configurations name
_NO_SINK = -1e30  # a score that adds nothing to any sum
_DOCUMENTS = "documents"


def _refuse(module: Any, what: str, got: Any) -> ValueError:
    layer = f"layer {module.layer_idx}'s " if hasattr(module, "layer_idx") else ""
    return ValueError(f"batch_invariant: {layer}{type(module).__name__} must have {what}, got {got}")


@dataclasses.dataclass(frozen=True)
class CachedKeys(VisibleKeys):
    """What the tokens of a cache see. Queries are of those from ``start`` on, which the host never
    reads."""

    start: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))


def _cached(arguments: dict[str, Any]) -> LazyMask | None:
    """The mask of all tokens of a cache; also of those that a static one does not have yet, which
    nobody sees."""
    length, valid = arguments["kv_length"], arguments.get("attention_mask")
    if valid is not None and valid.shape[1] < length:
        valid = torch.nn.functional.pad(valid, (0, length - valid.shape[1]))
    keys = visible_keys({**arguments, "q_length": length, "q_offset": 0, "attention_mask": valid})
    if keys is None:
        return None
    # a static cache counts its tokens in place, before attention runs
    start = torch.as_tensor(arguments["q_offset"], device=arguments["device"]).clone()
    keys = CachedKeys(keys.window, keys.first, keys.valid, start)
    return LazyMask(keys, arguments["batch_size"], length, torch.bool, arguments["device"])


@torch.compiler.disable  # an exception that it traces is one more reason to run the rest as it is
def _refuse_compiled() -> None:
    raise ValueError("batch_invariant: the model must run uncompiled, got torch.compile")


def _mask(**arguments: Any) -> Tensor:
    if torch.compiler.is_compiling():
        _refuse_compiled()
    mask = lazy(arguments, torch.bool)
    mask = _cached(arguments) if mask is None else mask
    if mask is None:
        raise ValueError(
            "batch_invariant: masks must be causal, with windows, documents and padding alone, got "
            f"{arguments['mask_function'].__qualname__}"
        )
    return mask


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if torch.compiler.is_compiling():
        _refuse_compiled()
    keys, shape = known(attention_mask), (query.shape[0], query.shape[2])
    if attention_mask is None:
        keys = VisibleKeys(more.get("sliding_window"), _first(more.get("cu_seq_lens_q"), shape, query.device))
    if keys is None:
        raise _refuse(module, "a mask that nobody has made", type(attention_mask).__name__)
    if more.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise _refuse(module, "causal attention", "both directions")
    start = keys.start if isinstance(keys, CachedKeys) else None
    if (key.shape[2] != query.shape[2] and start is None) or value.shape != key.shape or not query.shape[3] <= MAX_D:
        got = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise _refuse(module, f"as many keys as queries, and heads of one width up to {MAX_D}", got)
    sinks = more.pop("s_aux", None)
    if attention.is_more_than_softmax({**more, "dropout": dropout, "scaling": scaling}):
        raise _refuse(module, "no dropout, softcap or bias", "some")
    query, key, value = (attention.cast(t) for t in (query, key, value))
    sinks = _no_sinks(query.shape[1], query.device) if sinks is None else sinks
    valid = None if keys.valid is None else keys.valid.contiguous()
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    kernels = use_kernels(query) and bool(query.numel()) and query.dtype == key.dtype == value.dtype
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if start is not None and kernels and not trained:
        made = _documents(keys, key)
        out = later_attention(query, key, value, sinks, keys.window, made, valid, start, factor)
        return out.transpose(1, 2), None
    at = None
    if start is not None:
        # in blocks with the same tokens as without a cache: queries of earlier ones are computed in
        # vain
        at = start + torch.arange(shape[1], device=query.device)
        query = query.new_zeros(*query.shape[:2], key.shape[2], query.shape[3]).index_copy_(2, at, query)
    if kernels:
        how = keys.window, _documents(keys, key), valid, factor
        out = LigerSinkAttentionFunction.apply(query, key, value, sinks, *how)
    else:
        out = sink_attention(query, key, value, sinks, window=keys.window, valid=valid, first=keys.first, scale=scaling)
    out = out if at is None else out.index_select(2, at)
    return out.transpose(1, 2), None


@functools.cache
@torch.inference_mode(False)  # the backward needs them
def _no_sinks(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), _NO_SINK, device=device)


def _documents(keys: VisibleKeys, q: Tensor) -> Tensor:
    """Those of a mask, which all layers share."""
    made = vars(keys)  # a frozen dataclass
    found: Tensor | None = made.get(_DOCUMENTS)
    if found is None or found.device != q.device:
        with torch.inference_mode(False):
            found = made[_DOCUMENTS] = documents(q.shape[0], q.shape[2], q.device, keys.first, keys.valid)
    return found


def _first(bounds: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """The first token of each token's document, (B, T), from the bounds of all in the flattened
    batch."""
    if bounds is None:
        return None
    place = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=device).view(shape)
    bounds = bounds.to(device)
    first = bounds[torch.bucketize(place, bounds, right=True) - 1].int() - place[:, :1]
    return first.clamp(min=0)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)

# -- models that hold the switch

# model -> what lets it go: the garbage collector may, too
_held: weakref.WeakKeyDictionary[nn.Module, weakref.finalize] = weakref.WeakKeyDictionary()
_BEFORE = "_liger_attention"  # attribute of a configuration: its attention before
_COMPILES = "_valid_auto_compile_criteria"  # method of Transformers' models


def hold(model: nn.Module) -> None:
    """Turn batch invariance on until ``release(model)``, or until there is no such model any more, and
    make ``liger_invariant`` its attention. ``ValueError`` for a model whose attention is another."""
    if model in _held:
        return
    text = _text(model)
    before = text._attn_implementation
    if "ulysses" in str(before):
        raise ValueError("batch_invariant: ranks must have whole rows, got mode ulysses")
    if others := {*(getattr(text, "layer_types", None) or ())} - _LAYERS:
        raise ValueError(f"batch_invariant: layers of {text.model_type} must be attention, got {min(others)}")
    if not _has_sinks(model) and (why := attention.use(model, NAME)):
        raise ValueError(f"batch_invariant: {why}")
    turn(1)
    _held[model] = weakref.finalize(model, turn, -1)
    vars(text)[_BEFORE] = before
    for m in model.modules():
        if hasattr(m, _COMPILES):
            vars(m)[_COMPILES] = _compiles


def _compiles(_: Any, plan: Any) -> bool:
    """Whether ``generate`` compiles the steps behind a prompt, as it does by itself with a static
    cache: never, as they would be another arithmetic than the prompt's."""
    if plan.compile_config is not None and not plan.disable_compile:
        raise ValueError("batch_invariant: generate must run uncompiled, got a compile_config")
    return False


def _text(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _has_sinks(model: nn.Module) -> bool:
    """Whether its attention is eager attention with sinks, which a patch replaces by our kernel."""
    return any(isinstance(getattr(m, "sinks", None), nn.Parameter) for m in model.modules())


def release(model: nn.Module | Any) -> None:
    """Undo ``hold`` for one model, or for all."""
    for each in [model] if isinstance(model, nn.Module) else list(_held) if model is None else []:
        if (let_go := _held.pop(each, None)) is not None:
            text = _text(each)
            text._attn_implementation = vars(text).pop(_BEFORE)
            for m in each.modules():
                vars(m).pop(_COMPILES, None)
            let_go()
