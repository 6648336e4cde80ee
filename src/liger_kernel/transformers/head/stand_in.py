"""The module that replaces an output head during one ``forward``, and heads with hooks.

All hooks run when the model calls its head, with the head itself and its real inputs. So hooks
before the call may do anything. Hooks after it would get the recipe: only those do that do not use
the result, or only cast it. With any other hook, the head computes all its logits.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from liger_kernel import _private, parallel
from liger_kernel.parallel.sharded_head import HOOKS
from liger_kernel.transformers.head import loss as loss  # so that losses register before there are recipes
from liger_kernel.transformers.head.head_weights import held
from liger_kernel.transformers.head.recipe import LogitsRecipe, LossRequest, new_recipe
from liger_kernel.transformers.recognise.projections import copy_in_use
from liger_kernel.transformers.recognise.storages import Fallback

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class Call:
    """A running ``forward``. ``at_once``: why its head computes all logits when it is called, ""
    if the caller asked for them; None if it need not."""

    model: nn.Module
    loss: LossRequest
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
            # nothing of its own: whoever reads or changes parameters or hooks meanwhile gets those
            # of the head
            self.__dict__.update(head=head, calls={}, lock=threading.RLock())

    def call(self) -> Call | None:
        """The innermost call of this thread."""
        calls = self.calls.get(this_thread())
        return calls[-1] if calls else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call()
        # a graph returns tensors, no recipe
        if call is None or (call.loss.outlives and torch.compiler.is_compiling()):
            return self.head(*args, **kwargs)
        why = call.at_once
        if why is None and not torch.compiler.is_compiling() and has_hooks(self.head):
            # its forward is replaced for this call; a hook may call the head again
            with self.lock:
                logits, why = call_with_hooks(self.head, lambda head, x: deferred(head, x, call.loss), args, kwargs)
        else:
            if why is None:
                found = (
                    deferred(self.head, args[0], call.loss) if len(args) == 1 and not kwargs else Fallback("keywords")
                )
                if not isinstance(found, Fallback):
                    return found
                why = found
            logits = self.head(*args, **kwargs)
        if isinstance(logits, LogitsRecipe) or not isinstance(logits, Tensor):
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


def deferred(head: nn.Module, x: Tensor, loss: LossRequest) -> LogitsRecipe | Fallback:
    """A recipe for ``head(x)``, or the reason why there is none."""
    found = held(head, x)
    if isinstance(found, Fallback):
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


@contextlib.contextmanager
def outliving(model: nn.Module, fits: Callable[[nn.Module], bool] = lambda head: True) -> Iterator[None]:
    """Meanwhile the callers of ``model`` get recipes of its logits, if its head ``fits``."""
    place = place_of_head(model)
    head: Any = None if place is None else place[0]._modules[place[1]]
    if place is None or isinstance(head, StandIn) or not fits(head):
        yield
        return
    # the head as the caller: a patched model without labels turns off only stand-ins for its own calls
    stand_in = enter(*place, Call(head, LossRequest(outlives=True)))
    try:
        yield
    finally:
        leave(stand_in, *place)


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


# -- heads with hooks

_CASTS = {"float", "to", "torch", "float32", "bfloat16", "float16"}  # all names in a hook that only casts the result


def has_hooks(head: nn.Module) -> bool:
    """Whether code sees calls of ``head`` or of its parts."""
    # not the hooks of parallel modes, which ``head_weights.held`` knows
    return of_all._has_any_global_hook() or any(True for m in head.modules() for _ in parallel.hooks_of_users(m))


def call_with_hooks(
    head: nn.Module, defer: Callable[[nn.Module, Tensor], Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    """Call ``head``, which has hooks. Returns its result, and why it is no recipe (None if it is).

    A recipe is ``defer(a copy of the head without hooks, x)``, made while the hooks run around it.
    """
    inner: Any = copy_in_use(head)
    outside, reasons = _modes(), []

    def between_hooks(*args: Any, **kwargs: Any) -> Any:
        why = next(_in_the_way(head, inner), None)
        if why is None and (kwargs or len(args) != 1 or _modes() != outside):
            why = "a hook that changes modes, or the form of its arguments"
        found = defer(_without_hooks(inner), args[0]) if why is None else Fallback(why)
        if not isinstance(found, Fallback):
            return found
        reasons.append(found)
        return inner.forward(*args, **kwargs)

    # other code's forward runs as it is, and hooks that gather weights or spread rows need the
    # whole call
    if "forward" in inner.__dict__ or parallel.is_sharded(head) or parallel.is_tensor_parallel(head):
        return head(*args, **kwargs), next(_of_users(head), "a forward of its own")
    logits = parallel.call_instead(head, inner, between_hooks, *args, **kwargs)
    return logits, reasons[0] if reasons else None


def _without_hooks(head: nn.Module) -> nn.Module:
    """A module that computes what ``head`` computes, with its parameters."""
    new = type(head).__new__(type(head))
    new.__dict__.update(head.__dict__ | {name: OrderedDict() for name in HOOKS})
    return new


def _modes() -> tuple[Any, ...]:
    """What a hook may enter around a call that changes it, except for what a recipe restores."""
    stacks = _private.function_modes(), _private.dispatch_modes()
    return *stacks, torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()


def _in_the_way(head: nn.Module, inner: nn.Module) -> Iterator[str]:
    """The names of hooks that need real logits."""
    whose = dict.fromkeys((head, inner))
    backward: list[Any] = [of_all._global_backward_hooks, of_all._global_backward_pre_hooks]
    backward += [hooks for m in whose for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    yield from (_name_of(hook) for hooks in backward for hook in hooks.values())
    after: list[Any] = [(of_all._global_forward_hooks, of_all._global_forward_hooks_with_kwargs)]
    after += [(m._forward_hooks, m._forward_hooks_with_kwargs) for m in whose]
    for hooks, with_kwargs in after:
        yield from (_name_of(hook) for number, hook in hooks.items() if not _leaves_result(hook, number in with_kwargs))
    # nobody calls the parts of an adapted head any more
    yield from (_name_of(hook) for m in inner.modules() if m is not inner for hook in parallel.hooks_of_users(m))


def _of_users(head: nn.Module) -> Iterator[str]:
    of_all_modules = (*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values())
    yield from map(_name_of, of_all_modules)
    yield from (_name_of(hook) for m in head.modules() for hook in parallel.hooks_of_users(m))


def _name_of(hook: Any) -> str:
    where = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"a hook that may use or change them: {'.'.join(where)}"


def _leaves_result(hook: Any, with_kwargs: bool) -> bool:
    """Whether a forward hook does not use the result of the call, or only casts it, and writes no
    weights, as its code shows.

        lambda *_: context.__exit__()
        lambda module, args, out: count(args)
        lambda module, args, out: out.float()
    """
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if not isinstance(code, types.CodeType) or uses_data(hook):
        return False
    names = code.co_varnames[: code.co_argcount]
    place = inspect.ismethod(hook) + 2 + with_kwargs
    if place < len(names):
        name = names[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return False
    # newer Pythons load two names by one instruction
    loads = [i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code)]
    if not any(name in load for load in loads):
        return True
    # a cast, with nothing at hand to which it could pass the result
    return place == len(names) - 1 and not code.co_freevars and set(code.co_names) <= _CASTS


def uses_data(function: Any) -> bool:
    """Whether the code of a function names ``.data``, by which weights change in place and no
    version of theirs tells."""
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        codes += [inner for inner in getattr(code, "co_consts", ()) if isinstance(inner, types.CodeType)]
    return any("data" in getattr(code, "co_names", ()) for code in codes)
