"""Which of our activations a module or function of PyTorch or Transformers is."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import activations as transformers_activations
from transformers.activations import ACT2FN

from liger_kernel._private import unset_fake_temporarily
from liger_kernel.ops.activations.glu import ACTS
from liger_kernel.transformers.recognise.variant import unhooked


def _clamped(limit: str, slope: str = "") -> tuple[Callable[[Any], dict[str, Any]], dict[str, float]]:
    def options(module: Any) -> dict[str, Any]:
        more = {"alpha": getattr(module, slope), "offset": 1.0} if slope else {}
        return {"limit": getattr(module, limit)} | more

    return options, ({slope: 1.7} if slope else {}) | {limit: 0.3}


# Limits and slopes of a gated activation, by the attributes that hold them: options of our
# operators, and values for stand-ins
CLAMPED: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, float]]] = {
    "limit": _clamped("limit"),
    "swiglu_limit": _clamped("swiglu_limit"),
    "swiglu_alpha, swiglu_limit": _clamped("swiglu_limit", "swiglu_alpha"),
    "alpha, limit": _clamped("limit", "alpha"),
}

_NAMED: dict[str, tuple[Any, Callable]] = {}


def named(name: str) -> Callable:
    """Return ``ACT2FN[name]``, cached, because it would make a new module at each call, to be
    examined again. If its kind has changed, make it again."""
    kind = ACT2FN.get(name)
    if name not in _NAMED or _NAMED[name][0] is not kind:
        _NAMED[name] = kind, ACT2FN[name]
    return _NAMED[name][1]


# Modules that are only an activation in every mode, without parameters or state, and the attribute
# that the forward of each reads.
_ACTIVATION_MODULES: dict[type, str] = {nn.SiLU: "inplace", nn.GELU: "approximate", nn.Sigmoid: ""} | {
    getattr(transformers_activations, name): reads
    for name, reads in dict(
        SiLUActivation="", GELUActivation="act", GELUTanh="act", PytorchGELUTanh="act", ReLUSquaredActivation=""
    ).items()
    if hasattr(transformers_activations, name)  # releases differ
}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {F.silu: "silu", F.gelu: "gelu", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid"}
_TORCHS = F.silu, F.gelu, F.relu  # the functions that these forwards call
_ACTIVATIONS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str | None]] = weakref.WeakKeyDictionary()


def activation(fn: Any) -> str | None:
    """Return which of our activations a call of ``fn`` computes now; None if it computes another
    one, or if hooks observe its calls.

    The class or function of PyTorch or Transformers decides. Equal values would also match a
    learned gain that begins at 1, or dropout in evaluation.
    """
    reads = _ACTIVATION_MODULES.get(type(fn))
    if reads is None:
        function = isinstance(fn, (types.FunctionType, types.BuiltinFunctionType))
        return _ACTIVATION_FUNCTIONS.get(fn) if function else None
    if "forward" in fn.__dict__ or not unhooked(fn):
        return None
    # everything that may have been changed since the last check
    now = type(fn).forward, fn.__dict__.get(reads), F.silu, F.gelu, F.relu
    known = _ACTIVATIONS.get(fn)
    if known is None or known[0] != now:
        known = _ACTIVATIONS[fn] = now, _confirmed(fn, *now)
    return known[1]


def _confirmed(fn: nn.Module, forward: Any, read: Any, *torchs: Callable) -> str | None:
    """The activation with the values of ``fn``, if the forward of its class, and everything that
    it reads, are PyTorch's or Transformers' own."""
    read = read.func if isinstance(read, functools.partial) else read
    if (
        torchs != _TORCHS
        or forward.__globals__.get("__name__") != type(fn).__module__
        or not (isinstance(read, (bool, str)) or read in (None, *_TORCHS))
    ):
        return None
    with torch.no_grad(), unset_fake_temporarily(), contextlib.suppress(Exception):
        x = torch.linspace(-6, 6, 385, device="cpu")
        same = lambda ours: all(torch.equal(fn(t), ours(t.float()).to(t.dtype)) for t in (x, x.bfloat16()))
        return next((name for name, ours in ACTS.items() if same(ours)), None)
    return None
