"""CUDA graphs of training steps: the host records forward and backward once, and replays them.

A short step is bound by the host, which starts hundreds of kernels. ``apply(model, graphs=True)``
does this for models of Transformers; ``wrap(model)`` for a model of one's own whose ``forward`` takes
a batch and returns the loss.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from liger_kernel.graphs.micro_steps import KEY, MARK, lenders, recorded

__all__ = ["forget", "lend_gradients", "report", "wrap"]


def wrap(model: nn.Module) -> nn.Module:
    """Let training steps of ``model``, whose ``forward`` returns the loss, be replayed. Recorded are
    sizes that come twice. Returns ``model``."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"graphs.wrap: model must be an nn.Module, got {type(model).__name__}")
    forward: Any = model.forward
    if not hasattr(forward, MARK):
        own = getattr(forward, "__self__", None) is model
        function = forward.__func__ if own else lambda self, *args, **kwargs: forward(*args, **kwargs)
        model.forward = types.MethodType(recorded(function), model)
    return model


def lend_gradients(model: nn.Module) -> None:
    """Do not copy the gradients of replayed steps: all that reads them, as clipping and optimizers do, does
    so before the next forward of ``model``, except through ``.grad`` (accumulation). Raises ``ValueError``
    for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"graphs.lend_gradients: model must be an nn.Module, got {type(model).__name__}")
    # adapters are around the one that is recorded, and a trainer may patch it later
    lenders.update(model.modules())


def report(model: nn.Module) -> str:
    """How many steps of ``model``, or of a model inside of it, are recorded and were replayed, and why
    others were not."""
    found = [str(vars(m)[KEY]) for m in model.modules() if KEY in vars(m)]
    return "\n".join(found) or "graphs: no training step has run"


def forget(model: nn.Module) -> None:
    """Free what is recorded of ``model``. Steps that follow are recorded again."""
    for m in model.modules():
        vars(m).pop(KEY, None)
