"""Whether a backward may overwrite a tensor that its forward saved: one that it made itself, and
that nobody else can see."""

from __future__ import annotations

from typing import Any

import torch

from liger_kernel import _private

CHECKPOINT = "torch.utils.checkpoint"
# Saved-tensor hooks that hold no reference to the tensor afterwards: they return the saved tensor,
# a copy, or a recomputed tensor
HARMLESS = {"", __name__, "liger_kernel.memory", "liger_kernel.memory.offload", "torch.autograd.graph", CHECKPOINT}


def saving_hooks() -> tuple[tuple[Any, Any] | None, str]:
    """The present saved-tensor hooks and the name of their Python module, or None and an empty
    name."""
    hooks = None if torch.compiler.is_compiling() else _private.saved_tensors_hooks(True)
    return hooks, "" if hooks is None else getattr(hooks[1], "__module__", "?")


def _itself(t: torch.Tensor) -> torch.Tensor:
    return t


def where_they_are() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which other code's hooks for saved tensors see none."""
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def graph_is_kept() -> bool:
    """Whether another backward may follow the running one, or that cannot be known."""
    return torch.compiler.is_compiling() or _private.graph_is_retained()
