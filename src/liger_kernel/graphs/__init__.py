"""CUDA graphs of training steps: the host records forward and backward once, and replays them.

A short step is bound by the host, which starts hundreds of kernels. ``apply(model, graphs=True)``
does this for models of Transformers; ``wrap(model)`` for a model of one's own whose ``forward`` takes
a batch and returns the loss; ``wrap(optimizer)`` for steps of AdamW.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any, TypeVar

from torch import nn, optim

from liger_kernel.graphs.micro_steps import KEY, MARK, lenders, recorded
from liger_kernel.graphs.updates import Updates, counts_on_gpu

__all__ = ["forget", "lend_gradients", "report", "wrap"]


Wrapped = TypeVar("Wrapped", nn.Module, optim.Optimizer)


def wrap(model: Wrapped) -> Wrapped:
    """Let training steps of ``model``, whose ``forward`` returns the loss, be replayed. Recorded are
    sizes that come twice. Returns ``model``.

    It may be an optimizer instead, PyTorch's Adam or AdamW, fused or capturable: its steps are replayed
    where gradients lie as they did before, in the memory of replayed training steps above all
    (``lend_gradients``). Learning rates may change at any time; they are rounded to fp32. Raises
    ``ValueError`` for others.
    """
    if isinstance(model, optim.Optimizer):
        _wrap_optimizer(model)
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"graphs.wrap: model must be an nn.Module or an optimizer, got {type(model).__name__}")
    forward: Any = model.forward
    if not hasattr(forward, MARK):
        own = getattr(forward, "__self__", None) is model
        function = forward.__func__ if own else lambda self, *args, **kwargs: forward(*args, **kwargs)
        model.forward = types.MethodType(recorded(function), model)
    return model


def _wrap_optimizer(optimizer: optim.Optimizer) -> None:
    if type(optimizer) not in (optim.Adam, optim.AdamW) or not counts_on_gpu(optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"graphs.wrap: optimizer must be PyTorch's Adam or AdamW with fused=True or capturable=True, got {kind}"
        )
    if KEY not in vars(optimizer):
        vars(optimizer)[KEY] = Updates(optimizer)
        # a method with the marks of the old one: schedulers of the learning rate wrap it, and look for them
        marked: Any = functools.wraps(getattr(optimizer.step, "__func__", optimizer.step))
        step = marked(lambda self, closure=None: vars(self)[KEY](closure))
        vars(optimizer)["step"] = types.MethodType(step, weakref.proxy(optimizer))


def lend_gradients(model: nn.Module) -> None:
    """Do not copy the gradients of replayed steps: all that reads them, as clipping and optimizers do, does
    so before the next forward of ``model``, except through ``.grad`` (accumulation). Raises ``ValueError``
    for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"graphs.lend_gradients: model must be an nn.Module, got {type(model).__name__}")
    # adapters are around the one that is recorded, and a trainer may patch it later
    lenders.update(model.modules())


def report(model: nn.Module | optim.Optimizer) -> str:
    """How many steps of ``model``, or of a model inside of it, are recorded and were replayed, and why
    others were not. The same of an optimizer."""
    found = [str(vars(m)[KEY]) for m in _parts(model) if KEY in vars(m)]
    return "\n".join(found) or "graphs: no training step has run"


def forget(model: nn.Module | optim.Optimizer) -> None:
    """Free what is recorded of ``model``, or of an optimizer. Steps that follow are recorded again."""
    for m in _parts(model):
        if isinstance(m, nn.Module):
            vars(m).pop(KEY, None)
        elif KEY in vars(m):
            vars(m)[KEY].forget()


def _parts(model: nn.Module | optim.Optimizer) -> list[Any]:
    return list(model.modules()) if isinstance(model, nn.Module) else [model]
