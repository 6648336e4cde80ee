"""Output heads with hooks: whose hooks may run around a call that returns a recipe in the place of
logits.

All hooks run when the model calls its head, with the head itself and its real inputs. So hooks
before the call may do anything. Hooks after it would get the recipe: only those do that do not use
the result, or only cast it. With any other hook, the head computes all its logits.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from liger_kernel import _private, parallel
from liger_kernel.parallel.heads import HOOKS
from liger_kernel.transformers.recognise.projections import Left, copy_in_use

_CASTS = {"float", "to", "torch", "float32", "bfloat16", "float16"}  # all names in a hook that only casts the result


def there_are(head: nn.Module) -> bool:
    """Whether code sees calls of ``head`` or of its parts."""
    # not the hooks of parallel modes, which ``linear.held`` knows
    return of_all._has_any_global_hook() or any(True for m in head.modules() for _ in parallel.hooks_of_users(m))


def call(
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
        found = defer(_without_hooks(inner), args[0]) if why is None else Left(why)
        if not isinstance(found, Left):
            return found
        reasons.append(found)
        return inner.forward(*args, **kwargs)

    # other code's forward runs as it is, and hooks that gather weights or spread rows need the whole call
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
    yield from (_name(hook) for hooks in backward for hook in hooks.values())
    after: list[Any] = [(of_all._global_forward_hooks, of_all._global_forward_hooks_with_kwargs)]
    after += [(m._forward_hooks, m._forward_hooks_with_kwargs) for m in whose]
    for hooks, with_kwargs in after:
        yield from (_name(hook) for number, hook in hooks.items() if not _leaves_result(hook, number in with_kwargs))
    # nobody calls the parts of an adapted head any more
    yield from (_name(hook) for m in inner.modules() if m is not inner for hook in parallel.hooks_of_users(m))


def _of_users(head: nn.Module) -> Iterator[str]:
    of_all_modules = (*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values())
    yield from map(_name, of_all_modules)
    yield from (_name(hook) for m in head.modules() for hook in parallel.hooks_of_users(m))


def _name(hook: Any) -> str:
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
