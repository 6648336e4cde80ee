"""Attention over rows of several documents without a mask of every pair of tokens: PyTorch's
``varlen_attn`` in Transformers' attention interface.

``liger_varlen`` computes what "sdpa" computes, bit-identically, except for batches that say where
their documents begin, as for Flash Attention: ``cu_seq_lens_q`` (documents + 1,) int32, the bounds
in the flattened batch, and ``max_length_q``, a number. A collator knows both on the host. In such a
batch, each document is a sequence of its own.

The mask of packed rows is a ``LazyMask``: a layer that runs the kernel does not make it.

Transformers looks in the positions of every batch without a mask whether there are several
documents in a row, and the host waits for the answer until the GPU has done all work before.
``rewrite/joined_steps.py`` gives a model's own masks the answer if its call knows it. Nobody else
gets that answer: not another model that a hook or a loss calls, nor the same model with other
positions.

``liger_causal`` is "sdpa" without a mask. Inside ``torch.compile``, Transformers writes out the
mask of every batch, because it may not look at positions there, and attention then takes nearly
three times as long. In eager mode it finds that such a batch needs no mask.

``B`` rows, ``T`` tokens per row, ``H`` heads, ``D`` width of a head.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from liger_kernel.transformers.documents import GIVES
from liger_kernel.transformers.lazy_mask import LazyMask, known, lazy
from liger_kernel.transformers.recognise.attentions import MAKERS
from liger_kernel.utils import varlen_lacks

NAME = "liger_varlen"
CAUSAL = "liger_causal"
_lacks = torch.compiler.assume_constant_result(functools.cache(varlen_lacks))  # every layer calls it
_TAKES = inspect.signature(varlen_attn).parameters


def packed_mask(**arguments: Any) -> Tensor | None:
    """Return the mask of packed rows as a ``LazyMask``, and every other mask as ``sdpa_mask``
    makes it."""
    mask = lazy(arguments, torch.bool)
    return sdpa_mask(**arguments) if mask is None or mask.keys.first is None or mask.keys.valid is not None else mask


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query, key and value (B, H, T, D); returns (B, T, H, D). Runs ``varlen_attn``
    if it supports the input, otherwise Transformers' sdpa."""
    bounds, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if (keys := known(attention_mask)) is not None and bounds is not None and longest is not None:
        more = kwargs | dict(dropout=dropout, scaling=scaling)
        out = by_bounds(query, key, value, attention_mask.shape, keys.window, bounds, longest, more)
        if out is not None:
            return out, None
    # sdpa reads the mask in any case
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.dense()
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def by_bounds(
    q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int], window: int | None, bounds: Tensor, longest: int,
    more: Mapping[str, Any],
) -> Tensor | None:  # fmt: skip
    """``varlen_attn`` of (B, H, T, D) in documents with these bounds, (B, T, H, D); None if it does
    not run. ``shape``: the mask's; ``more``: dropout, scaling, and what other attention needs."""
    scaling = more.get("scaling")
    if is_more_than_softmax(more):
        return None
    q, k, v = (cast(t) for t in (q, k, v))
    window = window if window is not None and window < longest else None
    return _varlen(q, k, v, bounds, longest, scaling, window) if supports(q, k, v, shape) else None


def is_more_than_softmax(more: Mapping[str, Any]) -> bool:
    """Whether attention needs what kernels here do not compute: dropout, caps, sinks, biases."""
    named = any(more.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    return named or bool(more.get("dropout")) or isinstance(more.get("scaling"), Tensor)


def cast(t: Tensor) -> Tensor:
    """What autocast makes of an argument of sdpa: it knows nothing of ``varlen_attn``."""
    return t.to(torch.get_autocast_dtype(t.device.type)) if torch.is_autocast_enabled(t.device.type) else t


def supports(q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``varlen_attn`` computes attention of q, k, v (B, H, T, D) with a mask of this shape."""
    # with a cache there are more keys than the bounds know of
    whole = (q.shape[0], q.shape[2], k.shape[2]) == (shape[0], shape[2], shape[3])
    alike = (
        q.dtype == k.dtype == v.dtype
        and q.shape[3] == k.shape[3] == v.shape[3]
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256  # Flash Attention's limit
    )
    return whole and alike and _lacks(q.device, q.dtype) is None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    B, H, T, D = q.shape
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scaling}
    if "enable_gqa" in _TAKES:
        options["enable_gqa"] = k.shape[1] != H
    else:  # PyTorch 2.11
        k, v = (repeat_kv(t, H // k.shape[1]) for t in (k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **options).view(B, T, H, D)


def use(model: nn.Module, name: str = NAME) -> str | None:
    """Make ``name`` the attention of a model's layers (of the text layers in a model of text and
    images).

    Returns None, or the reason why the model keeps its attention: it has an attention of its own,
    one that sdpa does not serve, such as with sinks, asks whether its attention is sdpa, or uses
    bounds of documents for another purpose.
    """
    if "use_vmap" not in inspect.signature(sdpa_mask).parameters:  # it needs vmap
        return f"transformers {transformers.__version__} is older than 5"
    text = model.config.get_text_config(decoder=True)
    modules = {
        sys.modules[type(m).__module__] for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text
    }
    sources = [inspect.getsource(module) for module in modules]
    # without our functions, recurrent layers refuse bounds
    apart = any(hasattr(type(m).forward, GIVES) for m in model.modules())
    interface = lambda source: _by_interface(source) and (apart or '"cu_seq_lens' not in source)
    if not sources or not all(map(interface, sources)):
        return f"{text.model_type} has attention of its own"
    if not all(m._supports_sdpa for m in model.modules() if isinstance(m, PreTrainedModel)):
        return f"sdpa does not serve {text.model_type}"
    text._attn_implementation = name
    return None


_SPECIAL = {"or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"}


def _by_interface(source: str) -> bool:
    """Whether models of this source compute attention by transformers' interface, and do not ask
    whether it is sdpa."""
    return "ALL_ATTENTION_FUNCTIONS" in source and '"sdpa"' not in source


@torch.compiler.assume_constant_result
def _masks_by_arguments(module: str) -> bool:
    """Whether the models of a Python module use Transformers' attention interface, and mask only
    by causality, a window and their arguments."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # not from a file
        return False
    nodes = list(ast.walk(ast.parse(source)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    makers = {name for name in names if name.startswith("create_") and "mask" in name}
    special = {n.arg for n in nodes if isinstance(n, ast.keyword)} & _SPECIAL
    # the last one returns None unless it is given a mask
    known = {*MAKERS, "create_recurrent_attention_mask"}
    plain = "create_causal_mask" in makers <= known and not special and "attention_mask" not in stored
    return plain and _by_interface(source)


# Types of layers that have no window; the older names of two of them, too
_WHOLE = {"full_attention", "attention", "linear_attention", "mamba", "conv", "hybrid"}
# What a token may see; ``cache`` is the name of ``past_key_values`` since Transformers 5.24
_SAYS = {"attention_mask", "position_ids", "past_key_values", "cache", "cache_position"}


def unmasked(forward: Callable, names: list[str], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``forward(model, ...)`` of a model with a head, traced by a compiler: without the mask that
    eager mode omits. ``names``: of ``args``."""
    config = getattr(model, "config", None)
    if not goes_without_mask(forward, config, dict(zip(names, args)) | kwargs):
        return forward(model, *args, **kwargs)
    # while it is traced: who runs sees "sdpa". The property, as PyTorch 2.11 does not see
    # through it
    config._attn_implementation = CAUSAL
    try:
        return forward(model, *args, **kwargs)
    finally:
        config._attn_implementation = "sdpa"


def needs_no_mask(config: Any, given: Mapping[str, Any]) -> bool:
    """Whether Transformers' sdpa gets no mask for this batch in eager mode: no argument
    restricts what tokens see, and there is no window."""
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) or types - _WHOLE
    sdpa = getattr(config, "_attn_implementation_internal", None) == "sdpa" and not getattr(
        config, "is_encoder_decoder", False
    )
    nested = getattr(config, "sub_configs", None)  # setting the outer one's would set theirs
    return sdpa and not nested and not window and all(given.get(name) is None for name in _SAYS)


def goes_without_mask(forward: Callable, config: Any, given: Mapping[str, Any]) -> bool:
    """Whether ``CAUSAL`` may be the attention of the model with this ``forward`` for such a batch."""
    return _masks_by_arguments(forward.__module__) and needs_no_mask(config, given)


AttentionInterface.register(NAME, attention)
AttentionInterface.register(CAUSAL, sdpa_attention_forward)  # no mask is made for what has no entry below
AttentionMaskInterface.register(NAME, packed_mask)
