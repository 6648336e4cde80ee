"""Patches of single modules, for frameworks that walk through a model themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.transformers.patching.classes import ours
from liger_kernel.transformers.patching.select import on_instance
from liger_kernel.transformers.patching.values import Patch, Patches, original
from liger_kernel.transformers.recognise.variant import are_numbers


def _patch_forward(module: nn.Module, new: Callable, what: str) -> None:
    """Bind ``new`` as the forward of ``module``; for PEFT's wrapper of a module that is trained
    and saved, as the forward of both modules in it."""
    wrapped = (
        [module.original_module, *module.modules_to_save.values()] if hasattr(module, "modules_to_save") else [module]
    )
    Patches(p for m in wrapped for p in on_instance(m, Patch(type(m), "forward", new, (what,)))).apply()


# Cached, so that norms of one model share a class, and a second call finds its patch in place.
@functools.cache
def _rms_norm_forward(offset: float, eps: float, casting: str) -> Callable:
    def forward(self, hidden_states):
        # A tensor as eps would make the host wait for the GPU: the stock forward reads it there.
        if not are_numbers(epsilon := _eps(self, eps)):
            return original(type(self), "forward")(self, hidden_states)
        return rms_norm(hidden_states, self.weight, eps=epsilon, offset=offset, casting=casting)

    return ours(forward)


@functools.cache
def _layer_norm_forward(eps: float) -> Callable:
    def forward(self, hidden_states):
        if not are_numbers(epsilon := _eps(self, eps)):
            return original(type(self), "forward")(self, hidden_states)
        return layer_norm(hidden_states, self.weight, self.bias, eps=epsilon)

    return ours(forward)


def _eps(module: nn.Module, default: float) -> float:
    return next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), default)


def _patch_rms_norm_module(
    module: nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Make our RMSNorm the ``forward`` of one norm. ``eps`` is used if the norm has none.
    ``in_place`` and ``row_mode`` have no effect."""
    _patch_forward(module, _rms_norm_forward(offset, eps, casting_mode), "rms_norm")


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    """Make our LayerNorm the ``forward`` of one norm. ``eps`` is used if the norm has none."""
    _patch_forward(module, _layer_norm_forward(eps), "layer_norm")


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    """Make the ``forward`` of the class ``liger_module`` the ``forward`` of one gated MLP with
    the same projections."""
    _patch_forward(module, ours(liger_module.forward), "glu")
