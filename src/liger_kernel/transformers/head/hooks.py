"""Output heads with hooks: whose hooks may run around a call that returns a recipe in the place of
logits.

All hooks run when the model calls its head, with the head itself and its real inputs. So hooks
before the call may do anything. Hooks after it would get the recipe: only those do that do not use
the result, or only cast it. With any other hook, the head runs with all its logits, and one warning
says so.
"""

from __future__ import annotations

import dis
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from liger_kernel import parallel
from liger_kernel.transformers.head.recipe import Loss, Recipe
from liger_kernel.transformers.head.state import can_wait, uses_data, without_hooks
from liger_kernel.transformers.recognise.projections import copy_in_use

_CASTS = {"float", "to", "torch", "float32", "bfloat16", "float16"}  # all names in a hook that only casts the result
_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def there_are(head: nn.Module) -> bool:
    """Whether code sees calls of ``head`` or of its parts."""
    return of_all._has_any_global_hook() or any(map(parallel.is_hooked, head.modules()))


def call(head: nn.Module, loss: Loss, deferred: Callable[..., Recipe], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call ``head``, which has hooks; the result is a recipe of ``deferred`` if no hook can see
    or change that."""
    inner: nn.Module = copy_in_use(head)
    outside = _modes()

    def forward(*args: Any, **kwargs: Any) -> Any:  # runs between the hooks
        plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs and _modes() == outside
        hook = next(_in_the_way(head, inner), None)
        if hook is None and plain and can_wait(bare := without_hooks(inner)):
            return deferred(bare, args[0], loss)
        logits = inner.forward(*args, **kwargs)
        _warn(head, hook, logits)
        return logits

    whole = "forward" not in inner.__dict__ and not parallel.is_sharded(head) and not parallel.is_tensor_parallel(head)
    if not whole:
        logits = head(*args, **kwargs)
        _warn(head, next(_of_users(head), None), logits)
        return logits
    with _LOCKS.setdefault(
        inner, threading.RLock()
    ):  # the forward is replaced for one call; a hook may call the head again
        return parallel.call_instead(head, inner, forward, *args, **kwargs)


def _modes() -> tuple[Any, ...]:
    """What a hook may enter around a call that changes it, except for what a recipe restores."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]  # in no stub
    return *stacks, torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()


def _in_the_way(head: nn.Module, inner: nn.Module) -> Iterator[Any]:
    """The hooks that need real logits."""
    yield from (*of_all._global_backward_hooks.values(), *of_all._global_backward_pre_hooks.values())
    for m in dict.fromkeys((head, inner)):
        yield from (*m._backward_hooks.values(), *m._backward_pre_hooks.values())
    for hook_id, hook in of_all._global_forward_hooks.items():
        if not _leaves_result(hook, hook_id in of_all._global_forward_hooks_with_kwargs):
            yield hook
    for m in dict.fromkeys((head, inner)):
        for hook_id, hook in m._forward_hooks.items():
            if not _leaves_result(hook, hook_id in m._forward_hooks_with_kwargs):
                yield hook
    for part in inner.modules():
        if part is not inner:  # its calls would be of chunks of tokens
            yield from parallel.hooks_of_users(part)


def _of_users(head: nn.Module) -> Iterator[Any]:
    yield from (*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values())
    for part in head.modules():
        yield from parallel.hooks_of_users(part)


def _leaves_result(hook: Any, with_kwargs: bool) -> bool:
    """Whether a forward hook does not use the result of the call, or only casts it, and writes no
    weights, as its code shows.

    lambda *_: context.__exit__()        lambda module, args, out: count(args)        lambda module, args, out: out.float()
    """  # noqa: E501
    bound = inspect.ismethod(hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if not isinstance(code, types.CodeType) or uses_data(hook):
        return False
    names = code.co_varnames[: code.co_argcount]
    place = bound + 2 + with_kwargs
    if place < len(names):
        name = names[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return False
    used = any(
        name == i.argval or (isinstance(i.argval, tuple) and name in i.argval) for i in dis.get_instructions(code)
    )
    alone = place == len(names) - 1 and not code.co_freevars  # nothing to which it could pass the result
    return not used or (alone and set(code.co_names) <= _CASTS)


def _warn(head: nn.Module, hook: Any, logits: Any) -> None:
    if hook is None or head in _WARNED or not isinstance(logits, Tensor):
        return
    _WARNED.add(head)
    name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
    warnings.warn(
        f"liger_kernel: the output head stores its logits ({logits.nbytes / 1e9:.2g} GB in this call) because of a "
        f"hook that may use or change them: {name}",
        stacklevel=5,
    )
