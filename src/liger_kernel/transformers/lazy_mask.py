"""Masks of attention that are made only if somebody reads them.

Only an attention layer knows whether its kernel supports its input, and the mask is made before the layers run. Therefore the mask is a ``LazyMask``, which
says what a token sees. A layer that runs a kernel never makes it. Every other reader, in whatever way it reads, gets the mask that Transformers would make.

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
from transformers.masking_utils import eager_mask

# Parts of Transformers' mask functions of which masks are made that ``Seen`` says all of
_SAID = {"causal_mask_function"} | {
    f"{name}.<locals>.{inner}"
    for name, inner in (
        ("and_masks", "and_mask"),
        ("sliding_window_overlay", "inner_mask"),
        ("packed_sequence_mask_function", "inner_mask"),
        ("remap_positions_for_packed_sequence", "inner_mask"),
    )
}


@dataclass(frozen=True)
class Seen:
    """What a token sees: itself and the tokens before it, of these the last ``window``, those of its document (equal numbers in ``documents``, (B, T), which
    grow within a row), and those that are ``valid`` (B, T)."""

    window: int | None
    documents: Tensor | None
    valid: Tensor | None

    @functools.cached_property
    def first(self) -> Tensor | None:
        """The first token of each token's document, (B, T) int32."""
        if self.documents is None:
            return None
        place = torch.arange(self.documents.shape[1], dtype=torch.int32, device=self.documents.device)
        begins = torch.nn.functional.pad(self.documents.diff(dim=1) != 0, (1, 0), value=True)
        return torch.where(begins, place, 0).cummax(1).values


def seen(arguments: dict[str, Any]) -> Seen | None:
    """What a mask of ``T`` by ``T`` tokens says, from the arguments with which Transformers makes masks; None if it says more."""
    if arguments.get("use_vmap") is not False or torch.compiler.is_compiling():
        return None
    lengths = [arguments.get(name) for name in ("q_length", "kv_length", "q_offset", "kv_offset")]
    if not all(type(n) is int for n in lengths) or lengths[0] != lengths[1] or any(lengths[2:]):
        return None
    valid, parts = arguments.get("attention_mask"), list(_parts(arguments["mask_function"]))
    documents = [inspect.getclosurevars(p).nonlocals["packed_sequence_mask"] for p in parts if p.__qualname__.startswith("packed_sequence_mask_function.")]
    whole = all(t.shape == (arguments["batch_size"], lengths[0]) for t in (valid, *documents) if t is not None)
    if not (whole and all(part.__qualname__ in _SAID for part in parts)) or (valid is not None and valid.dtype != torch.bool):
        return None
    return Seen(arguments.get("local_size"), documents[0] if documents else None, valid)


def _parts(function: Callable) -> Iterator[Callable]:
    """A mask function and those that it is made of."""
    yield function
    for value in inspect.getclosurevars(function).nonlocals.values():
        for part in value if isinstance(value, tuple) else (value,):
            if callable(part):
                yield from _parts(part)


class LazyMask(Tensor):
    """The (B, 1, T, T) mask that ``maker(**arguments)`` makes when somebody reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as PyTorch says to
    seen: Seen
    maker: Callable[..., Tensor]
    arguments: dict[str, Any]
    made: Tensor | None

    @staticmethod
    def __new__(cls, seen: Seen, maker: Callable[..., Tensor], arguments: dict[str, Any], dtype: torch.dtype = torch.bool) -> LazyMask:
        shape = arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"]
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=arguments["device"])
        mask.seen, mask.maker, mask.arguments, mask.made = seen, maker, arguments, None
        return mask

    def dense(self) -> Tensor:
        """The mask itself; all layers share it."""
        if self.made is None:
            self.made = self.maker(**self.arguments)
        return self.made

    def __repr__(self, **_: Any) -> str:
        return f"LazyMask({tuple(self.shape)}, window={self.seen.window})"

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function is torch.ops.aten.detach.default:  # reentrant checkpointing
            return args[0]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


LAZILY_EAGER = "liger_lazily_eager"  # the name of masks for eager attention that are made when they are read


def _eager(**arguments: Any) -> Tensor:
    said = seen(arguments)
    return eager_mask(**arguments) if said is None else LazyMask(said, eager_mask, arguments, arguments["dtype"])


AttentionMaskInterface.register(LAZILY_EAGER, _eager)


class _Lazily:
    """A configuration whose masks for eager attention are made when they are read."""

    def __init__(self, config: Any):
        self._config, self._attn_implementation = config, LAZILY_EAGER

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def lazily(make: Callable) -> Callable:
    """Wrap ``create_causal_mask`` or its like: masks for eager attention are made when they are read."""

    @functools.wraps(make)
    def made(config: Any, *args: Any, **kwargs: Any) -> Any:
        eager = getattr(config, "_attn_implementation", None) == "eager" and not torch.compiler.is_compiling()
        return make(_Lazily(config) if eager else config, *args, **kwargs)

    return made
