"""Checkpointed layers whose attention is not computed again.

A checkpointed layer recomputes everything, its attention, too, which is most of the work in long
rows. With ``keeping_attention`` as the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, the
outputs of attention (and their log-sum-exp) are kept, and the second forward has no attention in
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_kernel import _private
from liger_kernel.memory import offload

# namespace of torch.ops -> operators that compute attention as a whole. Eager attention is many
_ATTENTION = {
    "aten": [
        "_flash_attention_forward",  # which ``transformers/prefix_attention.py`` calls
        *(
            f"_scaled_dot_product_{name}"
            for name in (
                "flash_attention",
                "efficient_attention",
                "cudnn_attention",
                "flash_attention_for_cpu",
                "fused_attention_overrideable",
            )
        ),
    ],
    "torch_attn": ["_varlen_attn"],
    "flash_attn": ["_flash_attn_forward", "_flash_attn_varlen_forward"],
    "flash_attn_3": ["fwd"],
    "liger": ["sink_attention_fwd"],
}


def attention_operators() -> set[Any]:
    """The attention operators of PyTorch, of the flash-attn packages and of ours, as far as they
    are there."""
    found = (
        getattr(getattr(torch.ops, namespace), name, None) for namespace, names in _ATTENTION.items() for name in names
    )
    return {packet.default for packet in found if packet is not None}


class _AttentionOutput:
    """An output of attention, as the graph would hold it."""

    __slots__ = ("saved",)

    def __init__(self, saved: Any):
        self.saved = saved


class _Attention(TorchDispatchMode):
    """Sees the operators of a checkpointed forward. ``kept``: the outputs of each call of
    attention."""

    supports_higher_order_operators = True  # such as flex attention that is not compiled, which passes

    def __init__(self, kept: list[Any], save: Callable[[Tensor], Any]):
        super().__init__()
        self.kept, self.save, self.operators = kept, save, attention_operators()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # layers that are compiled call attention, too

    def drawn(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the call draws random numbers: dropout must move the generator in the second
        forward, too."""
        # by name, because packages order their arguments differently
        given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        return any(given.get(name) for name in ("dropout_p", "attn_dropout_p"))


class _Keep(_Attention):
    """The first forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.operators and not self.drawn(func, args, kwargs or {}):
            self.kept.append(tree_map_only(Tensor, lambda t: _AttentionOutput(self.save(_alias(t))), out))
        return out


class _Again(_Attention):
    """The second forward, which gets the outputs. It computes one that was changed in place
    after the first."""

    def __enter__(self) -> Any:
        self.outputs = iter(self.kept)  # from the beginning: a graph that is kept has several backward passes
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in self.operators and not self.drawn(func, args, kwargs or {}):
            out = next(self.outputs, None)
            if out is not None and all(
                offload.intact(t.saved) for t in tree_leaves(out) if isinstance(t, _AttentionOutput)
            ):
                return tree_map_only(_AttentionOutput, lambda t: _alias(offload.unpack(t.saved)), out)
        return func(*args, **(kwargs or {}))


def _alias(t: Tensor) -> Tensor:
    """``t`` without a place in the graph. It shares the version of ``t``."""
    # as for views above autograd
    with _private.exclude_dispatch_key(_private.IN_PLACE_OR_VIEW, False):
        return t.detach()


def keeping_attention() -> tuple[_Keep, _Again]:
    """A ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: the
    outputs of attention are kept. Gradients are bit-identical."""
    kept: list[Any] = []
    save = offload.saved_by() or offload.as_it_is
    return _Keep(kept, save), _Again(kept, save)
