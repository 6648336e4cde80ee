"""The module that replaces the output head during one ``forward``."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.transformers.head import hooks
from liger_kernel.transformers.head import loss as loss  # so that losses register before there are recipes
from liger_kernel.transformers.head.linear import held
from liger_kernel.transformers.head.recipe import Loss, Recipe, new_recipe
from liger_kernel.transformers.recognise.projections import Left

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class Call:
    """A running ``forward``. ``at_once``: why its head computes all logits when it is called, ""
    if the caller asked for them; None if it need not."""

    model: nn.Module
    loss: Loss
    at_once: str | None = None


class StandIn(nn.Module):
    """Replaces the head during ``forward``. It returns a recipe to calls that accept one, and
    behaves as the head for all other code.

    ``calls`` has the calls of each thread, the innermost last; None is a call that needs logits.
    """

    def __init__(self, head: nn.Module):
        if torch.compiler.is_compiling():
            super().__init__()
            self.head = head
            self.calls: dict[int, list[Call | None]] = {}
        else:
            # nothing of its own: whoever reads or changes parameters or hooks meanwhile gets those of the head
            self.__dict__.update(head=head, calls={}, lock=threading.RLock())

    def call(self) -> Call | None:
        """The innermost call of this thread."""
        calls = self.calls.get(this_thread())
        return calls[-1] if calls else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call()
        if call is None:
            return self.head(*args, **kwargs)
        why = call.at_once
        if why is None and not torch.compiler.is_compiling() and hooks.there_are(self.head):
            # its forward is replaced for this call; a hook may call the head again
            with self.lock:
                logits, why = hooks.call(self.head, lambda head, x: deferred(head, x, call.loss), args, kwargs)
        else:
            if why is None:
                found = deferred(self.head, args[0], call.loss) if len(args) == 1 and not kwargs else Left("keywords")
                if not isinstance(found, Left):
                    return found
                why = found
            logits = self.head(*args, **kwargs)
        if isinstance(logits, Recipe) or not isinstance(logits, Tensor):
            return logits
        if why and not torch.compiler.is_compiling():
            _warn(self.head, why, logits)
        # cross entropy reads real logits by our kernel, too
        return new_recipe(logits, None, call.loss)

    def __getattr__(self, name: str) -> Any:
        if "_modules" in self.__dict__:  # while the compiler traces it
            return super().__getattr__(name)
        return getattr(self.__dict__["head"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # not super().__call__: global module hooks must see only the head

    @property
    def __class__(self) -> type:
        return type(self.__dict__.get("head", self))

    def __setattr__(self, name: str, value: Any) -> None:
        if torch.compiler.is_compiling() or "calls" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.head, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.head, name)


def _of_head(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.head, name)(*args, **kwargs)


# Code that visits the modules of a model, to read or change them, finds the head
for _name in ("state_dict", "named_modules", "apply", "train", "_apply", "requires_grad_", "__repr__"):
    setattr(StandIn, _name, _of_head(_name))


def deferred(head: nn.Module, x: Tensor, loss: Loss) -> Recipe | Left:
    """A recipe for ``head(x)``, or the reason why there is none."""
    found = held(head, x)
    if isinstance(found, Left):
        return found
    weights, rows, thin = found
    recipe = new_recipe(rows, weights, loss, thin=thin)
    if not torch.compiler.is_compiling():
        loss.recipes.append(weakref.ref(recipe))
    return recipe


def _warn(head: nn.Module, why: str, logits: Tensor) -> None:
    """Say once for each head what it costs that it was not deferred."""
    if head not in _WARNED:
        _WARNED.add(head)
        text = f"the output head stores its logits ({logits.nbytes / 1e9:.2g} GB in this call) because of {why}"
        warnings.warn(f"liger_kernel: {text}", stacklevel=4)


standing: list[StandIn] = []  # the stand-ins that are in place now
_LOCK = threading.Lock()


@torch.compiler.assume_constant_result
def this_thread() -> int:
    return threading.get_ident()


def _locked() -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _LOCK


def enter(parent: nn.Module, name: str, call: Call) -> StandIn:
    """Put a stand-in under ``name`` into ``parent``. Simultaneous calls share one."""
    with _locked():
        there = parent._modules[name]
        stand_in = there if isinstance(there, StandIn) else StandIn(there)
        stand_in.calls.setdefault(this_thread(), []).append(call)
        if stand_in is not there:
            parent._modules[name] = stand_in
            standing.append(stand_in)
    return stand_in


def leave(stand_in: StandIn, parent: nn.Module, name: str) -> None:
    """Remove the stand-in when its last call ends."""
    with _locked():
        thread = this_thread()
        stand_in.calls[thread].pop()
        if not stand_in.calls[thread]:
            del stand_in.calls[thread]
        if not stand_in.calls:
            standing[:] = [s for s in standing if s.calls]
            if parent._modules.get(name) is stand_in:
                parent._modules[name] = stand_in.head


def without_labels(forward: Callable, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call ``forward`` so that it returns logits, also if ``model`` is called within its own
    loss."""
    within = [s for s in list(standing) if (call := s.call()) is not None and call.model is model]
    for stand_in in within:
        stand_in.calls[this_thread()].append(None)
    try:
        return forward(model, *args, **kwargs)
    finally:
        for stand_in in within:
            stand_in.calls[this_thread()].pop()


def place_of_head(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module that holds the output head, and the head's name there."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if head is None:  # transformers finds no head in a model without an embedding, such as the last stage of a pipeline
        head = model._modules.get("lm_head")
    if not isinstance(head, nn.Module) or isinstance(head, nn.Embedding):  # an embedding is also called for the inputs
        return None
    for name, child in model._modules.items():  # the head is nearly always a direct child
        if child is head:
            return model, name
    return next(((m, name) for m in model.modules() for name, child in m._modules.items() if child is head), None)
