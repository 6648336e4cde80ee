"""Attention over rows of several documents without a mask of every pair of tokens: PyTorch's
``varlen_attn`` in Transformers' attention interface.

``liger_varlen`` computes what "sdpa" computes, bit-identically, except for batches that say where
their documents begin, as for Flash Attention: ``cu_seq_lens_q`` (documents + 1,) int32, the bounds
in the flattened batch, and ``max_length_q``, a number. A collator knows both on the host. In such a
batch, each document is a sequence of its own.

The mask of packed rows is a ``LazyMask``: a layer that runs the kernel does not make it.

Transformers looks in the positions of every batch without a mask whether there are several
documents in a row, and the host waits for the answer until the GPU has done all work before.
``rewrite`` gives a model's own masks the answer if its call knows it. Nobody else gets that answer:
not another model that a hook or a loss calls, nor the same model with other positions.

``liger_causal`` is "sdpa" without a mask. Inside ``torch.compile``, Transformers writes out the
mask of every batch, because it may not look at positions there, and attention then takes nearly
three times as long. In eager mode it finds that such a batch needs no mask.

``B`` rows, ``T`` tokens per row, ``H`` heads, ``D`` width of a head.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from liger_kernel.transformers.lazy_mask import LazyMask, known, lazy
from liger_kernel.utils import varlen_lacks

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before PyTorch 2.10

    def varlen_attn(*args: Any, **kwargs: Any) -> Any: ...


NAME = "liger_varlen"
CAUSAL = "liger_causal"
_lacks = torch.compiler.assume_constant_result(functools.cache(varlen_lacks))  # asked in every layer
_TAKES = inspect.signature(varlen_attn).parameters


def packed_mask(**arguments: Any) -> Tensor | None:
    """Return the mask of packed rows as a ``LazyMask``, and every other mask as ``sdpa_mask``
    makes it."""
    mask = lazy(arguments, torch.bool)
    return sdpa_mask(**arguments) if mask is None or mask.seen.first is None or mask.seen.valid is not None else mask


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
    if (said := known(attention_mask)) is not None:
        bounds, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        beyond = (
            dropout
            or isinstance(scaling, Tensor)
            or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
        )
        if bounds is not None and longest is not None and not beyond:
            q, k, v = (_cast(t) for t in (query, key, value))
            window = said.window if said.window is not None and said.window < longest else None
            if _serves(q, k, v, attention_mask, window):
                return _varlen(q, k, v, bounds, longest, scaling, window), None
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.dense()
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _cast(t: Tensor) -> Tensor:
    """What autocast makes of an argument of sdpa: it knows nothing of ``varlen_attn``."""
    return t.to(torch.get_autocast_dtype(t.device.type)) if torch.is_autocast_enabled(t.device.type) else t


def _serves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int | None) -> bool:
    whole = (q.shape[0], q.shape[2], k.shape[2]) == (mask.shape[0], mask.shape[2], mask.shape[3])
    alike = (
        q.dtype == k.dtype == v.dtype
        and q.shape[3] == k.shape[3] == v.shape[3]
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
    )
    return whole and alike and (window is None or "window_size" in _TAKES) and _lacks(q.device, q.dtype) is None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    B, H, T, D = q.shape
    options: dict[str, Any] = (
        {"window_size": (-1 if window is None else window - 1, 0)} if "window_size" in _TAKES else {"is_causal": True}
    )
    if "enable_gqa" in _TAKES:
        options["enable_gqa"] = k.shape[1] != H
    else:
        k, v = (repeat_kv(t, H // k.shape[1]) for t in (k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, **options).view(B, T, H, D)


def _by_interface(source: str) -> bool:
    """Whether models of this source compute attention by transformers' interface, and do not ask
    whether it is sdpa."""
    return "ALL_ATTENTION_FUNCTIONS" in source and '"sdpa"' not in source


def use(model: nn.Module) -> str | None:
    """Make ``liger_varlen`` the attention of a model's layers (of the text layers in a model of
    text and images).

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
    if not sources or not all(_by_interface(source) and '"cu_seq_lens' not in source for source in sources):
        return f"{text.model_type} has attention of its own"
    if not all(m._supports_sdpa for m in model.modules() if isinstance(m, PreTrainedModel)):
        return f"sdpa does not serve {text.model_type}"
    text._attn_implementation = NAME
    return None


_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}
_SPECIAL = {"or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"}
# What a token may see; ``cache`` is the name of ``past_key_values`` since Transformers 5.24
_SAYS = {"attention_mask", "position_ids", "past_key_values", "cache", "cache_position"}


@functools.cache
def masks_as_told(module: types.ModuleType) -> bool:
    """Whether the models of a Python module use Transformers' attention interface, and mask only
    by causality, a window and their arguments."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # not from a file
        return False
    nodes = list(ast.walk(ast.parse(source)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    makers = {name for name in names if name.startswith("create_") and "mask" in name}
    special = {n.arg for n in nodes if isinstance(n, ast.keyword)} & _SPECIAL
    made = any(isinstance(n, ast.Name) and n.id == "attention_mask" and isinstance(n.ctx, ast.Store) for n in nodes)
    return "create_causal_mask" in makers <= _MASKS and not special and not made and _by_interface(source)


# How models number the tokens of a batch: from 0 on, or after those in a cache; for rotations of
# several axes once for each
_NUMBERED = re.compile(
    r"torch\.arange\((past_seen_tokens, past_seen_tokens \+ )?inputs_embeds\.shape\[1\], "
    r"device=inputs_embeds\.device\)( \+ past_seen_tokens)?"
    r"|(position_ids|cache_position)\.unsqueeze\(0\)"
    r"|position_ids\.view\(1, 1, -1\)\.expand\(\d, inputs_embeds\.shape\[0\], -1\)"
    r"|position_ids\[None, \.\.\.\]\.expand\(\d, position_ids\.shape\[0\], "
    r"-1\)|position_ids\[0\]|position_ids\[1:\]|None"
)
_POSITIONS = {"position_ids", "text_position_ids", "cache_position"}


def _numbers_tokens(tree: ast.FunctionDef) -> bool:
    """Whether a forward that is given no positions numbers the tokens of each row one by one."""
    nodes = list(ast.walk(tree))
    assigned = [
        n for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value and set(_targets(n)) & _POSITIONS
    ]
    stored = [n for n in nodes if isinstance(n, ast.Name) and n.id in _POSITIONS and not isinstance(n.ctx, ast.Load)]
    passed = [n.value for n in nodes if isinstance(n, ast.keyword) and n.arg in _POSITIONS]
    for n in nodes:
        if isinstance(n, ast.Dict):
            passed += [v for k, v in zip(n.keys, n.values) if isinstance(k, ast.Constant) and k.value in _POSITIONS]
    written = (n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr.endswith("_"))
    items = (n.value for n in nodes if isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load))
    if any(isinstance(n, ast.Name) and n.id in _POSITIONS for n in (*written, *items)):
        return False
    if len(stored) != len(assigned) or not all(isinstance(n, ast.Name) and n.id in _POSITIONS for n in passed):
        return False
    values = [ast.unparse(n.value) for n in assigned if n.value]
    return all(map(_NUMBERED.fullmatch, values)) and any(value.startswith("torch.arange(") for value in values)


def _targets(n: ast.Assign | ast.AnnAssign) -> list[str]:
    return [t.id for t in (n.targets if isinstance(n, ast.Assign) else [n.target]) if isinstance(t, ast.Name)]


def rewrite(tree: ast.FunctionDef) -> bool:
    """Rewrite the forward of a model that numbers its tokens, so that its masks are made with what
    this call knows.

    ``create_causal_mask`` becomes ``informed(create_causal_mask, given, kwargs)``. ``given``:
    whether the caller gave positions, which the first statement finds out, before the forward
    replaces None.
    """
    if not any(isinstance(n, ast.Name) and n.id in _MASKS for n in ast.walk(tree)) or not _numbers_tokens(tree):
        return False
    of = tree.args
    names = sorted({a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)} & _POSITIONS)
    _Informed(of.kwarg.arg if of.kwarg else "{}").visit(tree)
    tree.body[:0] = ast.parse(f"_liger_given = {' or '.join(f'{name} is not None' for name in names) or False}").body
    return True


class _Informed(ast.NodeTransformer):
    """``create_causal_mask`` and its like become ``informed(create_causal_mask, given, more)``."""

    def __init__(self, more: str):
        self.more = more

    def visit_Name(self, node: ast.Name) -> ast.expr:
        told = f"{INFORMED}({node.id}, _liger_given, {self.more})"
        return ast.parse(told, mode="eval").body if node.id in _MASKS else node


# Inside one call of a function that makes masks: whether no row has several documents, and the
# positions of the batch
_documents: contextvars.ContextVar[tuple[bool, Tensor] | None] = contextvars.ContextVar("liger_documents", default=None)


def informed(make: Callable, given: bool, more: Mapping[str, Any]) -> Callable:
    """``make``, a function that makes masks, for one call in a model's forward; on a GPU, the host
    does not wait.

    Each row has one document, if the model numbers the tokens itself. Some row has several, if
    ``cu_seq_lens_q`` has more documents than the batch has rows.
    """
    if torch.compiler.is_compiling():  # a compiler sees no context
        return make

    def made(*args: Any, **arguments: Any) -> Any:
        positions, bounds = arguments.get("position_ids"), more.get("cu_seq_lens_q")
        several = given and isinstance(bounds, Tensor) and positions is not None and len(bounds) - 1 > len(positions)
        if positions is None or (given and not several):
            return make(*args, **arguments)
        _answer()
        token = _documents.set((not several, positions))
        try:
            return make(*args, **arguments)
        finally:
            _documents.reset(token)

    return made


INFORMED = "_liger_informed"
HELPERS = {INFORMED: informed}


@functools.cache
def _answer() -> None:
    """Let Transformers take its answer from ``_documents``, while that knows these positions."""
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:
        return

    @functools.wraps(look)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        known = None if torch.compiler.is_compiling() else _documents.get()
        # an alias, as Transformers expands them
        if known is None or not torch._C._is_alias_of(position_ids, known[1]):  # type: ignore[attr-defined]  # in no stub
            return look(position_ids)
        if known[0]:
            return None
        return (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def unmasked(forward: Callable) -> Callable:
    """Wrap the ``forward`` of a model with a head, so that it omits masks inside
    ``torch.compile`` as in eager mode."""
    module, names = sys.modules.get(forward.__module__), list(inspect.signature(forward).parameters)
    if module is None or not masks_as_told(module):
        return forward

    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        if not (torch.compiler.is_compiling() and needs_no_mask(config, dict(zip(names[1:], args)) | kwargs)):
            return forward(self, *args, **kwargs)
        config._attn_implementation = (
            CAUSAL  # while it is traced: who runs sees "sdpa". The property, as PyTorch 2.11 does not see through it
        )
        try:
            return forward(self, *args, **kwargs)
        finally:
            config._attn_implementation = "sdpa"

    return called


def needs_no_mask(config: Any, given: Mapping[str, Any]) -> bool:
    """Whether Transformers' sdpa gets no mask for this batch in eager mode: no argument
    restricts what tokens see, and there is no window."""
    window = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {
        "full_attention"
    }
    sdpa = getattr(config, "_attn_implementation_internal", None) == "sdpa" and not getattr(
        config, "is_encoder_decoder", False
    )
    nested = getattr(config, "sub_configs", None)  # setting the outer one's would set theirs
    return sdpa and not nested and not window and all(given.get(name) is None for name in _SAYS)


AttentionInterface.register(NAME, attention)
AttentionInterface.register(CAUSAL, sdpa_attention_forward)  # no mask is made for what has no entry below
AttentionMaskInterface.register(NAME, packed_mask)
