"""Masks of attention that are made only if somebody reads them.

Only an attention layer knows whether its kernel supports its input, and the mask is made before the
layers run. Therefore the mask is a ``LazyMask``, which says what a token sees. A layer that runs a
kernel never makes it. Every other reader gets the mask that Transformers would make.

``B`` rows, ``T`` tokens per row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from liger_kernel import _private
from liger_kernel.ops.attention.sink_attention import visible

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # transformers 4 does not say whether somebody wants the attention weights
    _active_collector = None  # type: ignore[assignment]  # it is not there

# Parts of Transformers' mask functions of which masks are made that ``VisibleKeys`` says all of
_INNER = "sliding_window_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence"
_PARTS = {"causal_mask_function", "and_masks.<locals>.and_mask", *(f"{name}.<locals>.inner_mask" for name in _INNER)}


@dataclass(frozen=True)
class VisibleKeys:
    """What a token sees: itself and the tokens before it, of these the last ``window``, those from
    its ``first`` on, (B, T) int32, where its document begins, and those that are ``valid``, (B, T)
    bool. Nobody writes to these tensors: they are no one else's."""

    window: int | None = None
    first: Tensor | None = None
    valid: Tensor | None = None


def visible_keys(arguments: dict[str, Any]) -> VisibleKeys | None:
    """What a mask of ``T`` by ``T`` tokens says, from the arguments with which Transformers
    makes masks; None if it says more."""
    if arguments.get("use_vmap") is not False or torch.compiler.is_compiling():
        return None
    # under torch.compile, lengths may be symbols; with a cache, queries begin later than keys
    lengths = [arguments.get(name) for name in ("q_length", "kv_length", "q_offset", "kv_offset")]
    if not all(type(n) is int for n in lengths) or lengths[0] != lengths[1] or any(lengths[2:]):
        return None
    window, valid = arguments.get("local_size"), arguments.get("attention_mask")
    parts = list(_parts(arguments["mask_function"]))
    # Transformers hands the numbers of documents on only in the closure of its mask function
    packed = [p for p in parts if p.__qualname__.startswith("packed_sequence_mask_function.")]
    documents = [inspect.getclosurevars(p).nonlocals["packed_sequence_mask"] for p in packed]
    whole = all(t.shape == (arguments["batch_size"], lengths[0]) for t in (valid, *documents) if t is not None)
    if not whole or not all(part.__qualname__ in _PARTS for part in parts):
        return None
    # the last: a token that does not see itself
    if (valid is not None and valid.dtype != torch.bool) or (window is not None and window < 1):
        return None
    return VisibleKeys(window, first_of(documents[0]) if documents else None, None if valid is None else valid.clone())


def first_of(documents: Tensor) -> Tensor:
    """The first token of each token's document, (B, T) int32, from the documents' numbers, (B,
    T), which grow within a row."""
    place = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device)
    # no read by the host: the mask is made while the GPU is still busy with the embeddings
    begins = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return torch.where(begins, place, 0).cummax(1).values


def _parts(function: Callable) -> Iterator[Callable]:
    """A mask function and those that it is made of."""
    yield function
    for value in inspect.getclosurevars(function).nonlocals.values():
        for part in value if isinstance(value, tuple) else (value,):
            if callable(part):
                yield from _parts(part)


def _getters(names: str) -> set[Callable]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


# What a mask answers without being made. ``detach``, ``to`` and their like return another lazy
# mask, or itself
_LAZY = _getters("device dtype grad_fn is_cuda is_leaf is_meta is_nested is_sparse layout ndim requires_grad shape")
_METHODS = "contiguous cpu cuda detach dim element_size get_device is_contiguous numel is_floating_point size stride to"
_LAZY |= {getattr(Tensor, name) for name in (*_METHODS.split(), "__hash__")} | {torch.is_floating_point}
_UNCOUNTED = _getters("data")  # writes to it have another version than the tensor


class LazyMask(Tensor):
    """The (B, 1, T, T) mask of what ``keys`` says, bool, or floating point with 0 for a key that
    a token sees and the least number for one that it does not."""

    keys: VisibleKeys
    made: Tensor | None

    @staticmethod
    def __new__(cls, keys: VisibleKeys, B: int, T: int, dtype: torch.dtype, device: torch.device) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, (B, 1, T, T), dtype=dtype, device=device)
        mask.keys, mask.made = keys, None
        return mask

    def dense(self) -> Tensor:
        """The mask itself. All layers share it, so all of them see what somebody writes to it."""
        if self.made is None:
            with torch.inference_mode(False):  # there, tensors do not count how often they are written
                keys, (B, _, _, T) = self.keys, self.shape
                self.made = visible(B, T, self.device, keys.window, keys.valid, keys.first)
                if self.dtype != torch.bool:
                    zero = torch.zeros((), dtype=self.dtype, device=self.device)
                    self.made = torch.where(self.made, zero, torch.finfo(self.dtype).min)
        return self.made

    def __repr__(self, **_: Any) -> str:
        return f"LazyMask({tuple(self.shape)}, window={self.keys.window})"

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _LAZY:
            with _private.without_torch_function():
                return function(*args, **(kwargs or {}))
        return _densely(Tensor.detach if function in _UNCOUNTED else function, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What C++ does: for ``_LAZY``, and where a mask is saved for the backward."""
        if function is torch.ops.aten.detach.default:  # which autograd calls to save a mask
            return args[0]
        if function is torch.ops.aten._to_copy.default and (moved := _moved(*args, **kwargs or {})) is not None:
            return moved
        return _densely(function, args, kwargs)


def _moved(
    mask: LazyMask, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> LazyMask | None:
    """The mask on another device, for layers that are there; None if that needs the mask itself."""
    keys, device = known(mask), device or mask.device
    if keys is None or dtype not in (None, mask.dtype):
        return None
    first, valid = (None if t is None else t.to(device, non_blocking=non_blocking) for t in (keys.first, keys.valid))
    return LazyMask(VisibleKeys(keys.window, first, valid), mask.shape[0], mask.shape[3], mask.dtype, device)


def _densely(function: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, LazyMask) else x, (args, kwargs or {}))
    return function(*args, **kwargs)


def known(mask: Any) -> VisibleKeys | None:
    """What a token sees by this mask: None unless it is a ``LazyMask``, to which nobody has
    written."""
    if not isinstance(mask, LazyMask):
        return None
    # Dynamo cannot guard on a version
    made, compiling = mask.made, torch.compiler.is_compiling()
    changed = made is not None and (compiling or made._version > 0 or made.requires_grad)
    return None if changed else mask.keys


def lazy(arguments: dict[str, Any], dtype: torch.dtype) -> LazyMask | None:
    """The mask of these arguments, with which Transformers makes masks; None if it must be made."""
    if (keys := visible_keys(arguments)) is None:
        return None
    return LazyMask(keys, arguments["batch_size"], arguments["q_length"], dtype, arguments["device"])


LAZILY_EAGER = "liger_lazily_eager"  # the name of masks for eager attention that are made when they are read


def _eager(**arguments: Any) -> Tensor:
    mask = lazy(arguments, arguments["dtype"])
    return eager_mask(**arguments) if mask is None else mask


AttentionMaskInterface.register(LAZILY_EAGER, _eager)


class _Lazily:
    """A configuration whose masks for eager attention are made when they are read."""

    def __init__(self, config: Any):
        self._config, self._attn_implementation = config, LAZILY_EAGER

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def lazily(make: Callable) -> Callable:
    """Wrap ``create_causal_mask`` or its like: masks for eager attention are made when they are
    read.

    That is decided here for all layers, and so for their recomputation in the backward: if somebody
    wants the attention weights, or has registered another mask for eager attention, it is made.
    """

    @functools.wraps(make)
    def made(config: Any, *args: Any, **kwargs: Any) -> Any:
        eager = not torch.compiler.is_compiling() and getattr(config, "_attn_implementation", None) == "eager"
        own = eager and ALL_MASK_ATTENTION_FUNCTIONS["eager"] is eager_mask
        unwatched = own and _active_collector is not None and "attentions" not in (_active_collector.get() or ())
        return make(_Lazily(config) if unwatched else config, *args, **kwargs)

    return made
