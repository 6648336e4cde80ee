"""What a patch does around the forward that calls a model's layers: offload what they save, and
keep the outputs of attention if they are checkpointed."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory, offloading


def layers_of(m: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers in the lists of ``m`` itself, possibly inside wrappers: those that
    checkpointing would recompute."""
    children = (layer for child in m.children() if isinstance(child, nn.ModuleList) for layer in child)
    found = (
        next((part for part in layer.modules() if isinstance(part, GradientCheckpointingLayer)), None)
        for layer in children
    )
    return [layer for layer in found if layer is not None]


def around(forward: Callable, offloads: bool, keeps: bool) -> Callable:
    """Wrap the ``forward`` of a module. It does nothing more for a module that calls no layers
    itself."""
    inner = _keeping_attention(forward) if keeps else forward
    outer = offloading.offloaded(inner) if offloads else inner

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Classes are patched before their modules exist, so only the call knows whether it has layers.
        return (outer if layers_of(self) else forward)(self, *args, **kwargs)

    return call


def _keeping_attention(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Without gradients nothing is kept, and a compiled graph cannot exchange attributes of layers.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        with _checkpointed_with_attention(self):
            return forward(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def _checkpointed_with_attention(m: nn.Module) -> Iterator[None]:
    """Meanwhile the layers' function for checkpointing keeps the outputs of attention. Only
    their forward asks for it, not the one that the backward runs."""
    before: list[tuple[Any, Any]] = []
    layers: list[Any] = layers_of(m)
    try:
        for layer in layers:
            function = getattr(layer, "_gradient_checkpointing_func", None)
            # Transformers reads the function at each call, so exchanging the attribute is enough.
            if layer.gradient_checkpointing and layer.training and _can_keep(function):
                before.append((layer, function))
                layer._gradient_checkpointing_func = functools.partial(function, context_fn=memory.keeping_attention)
        if before and _runs_eager_attention(m):
            _say("eager attention, which is no operator of its own")
        yield
    # Given back after every forward: the backward's own forward must not ask for it.
    finally:
        for layer, function in before:
            layer._gradient_checkpointing_func = function


def _runs_eager_attention(m: Any) -> bool:
    """Whether attention is plain PyTorch operations, and none with sinks, which a kernel may
    run."""
    return getattr(getattr(m, "config", None), "_attn_implementation", None) == "eager" and not any(
        hasattr(part, "sinks") for part in m.modules()
    )


def _can_keep(function: Any) -> bool:
    """Whether ``function`` is PyTorch's checkpoint of the kind that takes a ``context_fn``, and
    has none."""
    options = function.keywords if isinstance(function, functools.partial) and function.func is checkpoint else {}
    if options.get("use_reentrant") is False and "context_fn" not in options:
        return True
    if options.get("context_fn") is not memory.keeping_attention:
        _say(
            "another context_fn"
            if "context_fn" in options
            else "another kind of checkpointing than PyTorch's with use_reentrant=False"
        )
    return False


@functools.cache
def _say(what: str) -> None:
    warnings.warn(
        f"liger_kernel: keep_attention: it steps aside for {what}, so attention is computed again in the backward",
        stacklevel=3,
    )
