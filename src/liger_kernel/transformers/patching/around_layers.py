"""What runs around the forward that calls a model's layers: bounds of packed documents, offloading, outputs of
attention that are kept, and padding that is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory, offloading
from liger_kernel.transformers.patching.bounds import bounded
from liger_kernel.transformers.patching.patches import warn_once
from liger_kernel.transformers.patching.unpad import unpadded


def layers_of(m: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers in the lists of ``m`` itself, possibly inside wrappers: those that
    checkpointing would recompute."""
    layers = (layer for child in m.children() if isinstance(child, nn.ModuleList) for layer in child)
    of_each = ((part for part in layer.modules() if isinstance(part, GradientCheckpointingLayer)) for layer in layers)
    return [layer for parts in of_each if (layer := next(parts, None)) is not None]


def around_layers(forward: Callable, apart: bool, offloads: bool, keeps: bool, unpads: bool) -> Callable:
    """Wrap the ``forward`` of a module: give its layers the bounds of packed documents, offload what
    they save, keep the outputs of attention if they are checkpointed, and leave padding out. It
    does nothing more for a module that calls no layers."""
    forward = bounded(forward) if apart else forward
    inner = _keeping_attention(forward) if keeps else forward
    outer = offloading.offloaded(inner) if offloads else inner
    outer = unpadded(outer) if unpads else outer

    @functools.wraps(outer)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Classes are patched before their modules exist, so only the call knows whether it has
        # layers.
        # A compiler follows neither of the other two.
        own = not offloads and torch.compiler.is_compiling()
        return (outer if not own and layers_of(self) else forward)(self, *args, **kwargs)

    return call


def _keeping_attention(forward: Callable) -> Callable:
    """Wrap ``forward``: meanwhile the layers' function for checkpointing keeps the outputs of
    attention. Only their forward asks for it, not the one that the backward runs."""

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Without gradients nothing is kept, and a compiled graph cannot exchange attributes of
        # layers.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        layers: list[Any] = [layer for layer in layers_of(self) if layer.gradient_checkpointing and layer.training]
        functions = [(layer, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers]
        functions = [(layer, function) for layer, function in functions if _can_keep(function)]
        if functions and _runs_eager_attention(self):
            _say("eager attention, which is no operator of its own")
        try:
            # Transformers reads the function at each call, so exchanging the attribute is enough.
            for layer, function in functions:
                layer._gradient_checkpointing_func = functools.partial(function, context_fn=memory.keeping_attention)
            return forward(self, *args, **kwargs)
        # Given back after every forward: the backward's own forward must not ask for it.
        finally:
            for layer, function in functions:
                layer._gradient_checkpointing_func = function

    return call


def _runs_eager_attention(m: Any) -> bool:
    """Whether attention is plain PyTorch operations, and none with sinks, which a kernel may
    run."""
    eager = getattr(getattr(m, "config", None), "_attn_implementation", None) == "eager"
    return eager and not any(hasattr(part, "sinks") for part in m.modules())


def _can_keep(function: Any) -> bool:
    """Whether ``function`` is PyTorch's checkpoint of the kind that takes a ``context_fn``, and
    has none."""
    options = function.keywords if isinstance(function, functools.partial) and function.func is checkpoint else {}
    if options.get("use_reentrant") is False and "context_fn" not in options:
        return True
    if options.get("context_fn") is not memory.keeping_attention:
        another = "kind of checkpointing than PyTorch's with use_reentrant=False"
        _say(f"another {'context_fn' if 'context_fn' in options else another}")
    return False


def _say(what: str) -> None:
    text = f"keep_attention: it steps aside for {what}, so attention is computed again in the backward"
    warn_once(f"liger_kernel: {text}")
