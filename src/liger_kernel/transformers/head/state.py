"""Which output heads can be called later than the model calls them, and how the state of that
moment is restored.

The fused loss computes logits when the loss is computed, not when the model calls its head. Nobody
must notice the difference. Therefore a head is deferred only if its call depends on each token
alone, on its weights and its attributes, and if nobody observes it (``can_wait``). What it depends
on is remembered in a ``HeadState`` and restored when it is called; if that is impossible, an error
is raised. Every other head runs when the model calls it.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_kernel import parallel
from liger_kernel.ops._core.operator import intercepted

_LINEAR_FORWARD, _LINEAR = nn.Linear.forward, F.linear
# Modules that compute each token independently and keep no state: PyTorch's, and those of packages
# that shard, adapt or quantise linear layers
_TOKEN_WISE = (
    nn.Linear,
    nn.Dropout,
    nn.Identity,
    nn.Sequential,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterDict,
    nn.ParameterList,
)
_ADAPTING = (
    "torch.distributed.fsdp.",
    "peft.",
    "bitsandbytes.",
    "torchao.",
    "hqq.",
    "gptqmodel.",
    "auto_gptq.",
    "awq.",
    "optimum.",
    "transformers.integrations.",
)


_HOOKS_RAN = "_liger_hooks_ran"  # in the __dict__ of what ``without_hooks`` returns
FP8 = "_liger_fp8"  # in the __dict__ of a model: the recipe by which its loss multiplies the head


def untouched(head: nn.Module | None = None) -> bool:
    """Whether linear layers are PyTorch's own and no hook on all modules is registered that has
    yet to see ``head``."""
    if nn.Linear.forward is not _LINEAR_FORWARD or not (F.linear is _LINEAR or parallel.is_own_linear(F.linear)):
        return False
    return not _has_any_global_hook() or hooks_ran(head)


def without_hooks(head: nn.Module) -> nn.Module:
    """A module that computes what ``head`` computes, with its parameters, for calls after the
    hooks of ``head`` ran."""
    new = type(head).__new__(type(head))
    new.__dict__.update(head.__dict__ | {name: OrderedDict() for name in parallel.HOOKS} | {_HOOKS_RAN: True})
    return new


def hooks_ran(head: nn.Module | None) -> bool:
    return head is not None and _HOOKS_RAN in head.__dict__


def is_plain(head: nn.Module, within: bool = False) -> bool:
    """Whether calling ``head`` computes ``x @ weight.T + bias`` and nothing else: no hook, wrapper,
    adapter or sharding acts on the call.

    ``within``: the caller is inside ``parallel.entered``, where sharded parameters are whole.
    """
    if not parallel.is_linear(head) or "forward" in head.__dict__ or not untouched(head):
        return False
    if parallel.is_hooked(head) or (not within and parallel.needs_entering(head)):
        return False
    return (
        all(p is None or type(p) in (Tensor, nn.Parameter) or intercepted() for p in (head.weight, head.bias))
        and head.weight.numel() > 0
    )


def can_wait(head: nn.Module) -> bool:
    """Whether several later calls of ``head`` on some tokens each equal one call now: a linear
    layer, possibly sharded, adapted or quantised."""
    if is_plain(head):
        return True
    return (
        untouched()
        and isinstance(width(head), int)
        and all(map(_is_token_wise, parallel.bare(head).modules()))
        and not parallel.is_hooked(head)
    )


def _is_token_wise(m: nn.Module) -> bool:
    cls = parallel.unsharded_class(m)
    if cls not in _TOKEN_WISE and not cls.__module__.startswith(_ADAPTING):
        return False
    if parallel.is_hooked(m):
        return False
    # accelerate's hooks, which move weights or activations to where they are needed, replace
    # ``forward``
    return "forward" not in m.__dict__ or type(m.__dict__.get("_hf_hook")).__module__.startswith("accelerate.")


def width(head: nn.Module) -> int | None:
    """The number of classes, if ``head`` has such an attribute."""
    inner: Any = parallel.bare(head)
    if type(inner) is nn.Linear and inner.weight.ndim == 2 and inner.weight.numel():
        return inner.weight.shape[0]  # not out_features: PEFT confuses the two sizes when it copies a tied head
    n = getattr(inner, "out_features", None)
    return n if isinstance(n, int) else None


def out_features(head: nn.Module, x: Tensor, call: Callable | None = None) -> int:
    """The width of ``head(x)``, from an attribute of the head, or by calling it (or ``call``) on
    one token."""
    n = width(head)
    if n is not None:
        return n
    with torch.no_grad():
        return (call or head)(x.reshape(1, -1, x.shape[-1])[:, :1]).shape[-1]


def uses_data(function: Any) -> bool:
    """Whether the code of a function names ``.data``, by which weights change in place and no
    version of theirs tells."""
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        codes += [inner for inner in getattr(code, "co_consts", ()) if isinstance(inner, types.CodeType)]
    return any("data" in getattr(code, "co_names", ()) for code in codes)


class HeadState:
    """The present attributes, hooks and weights of a head and its parts, and the rows with which it
    is called.

    ``.data`` of a tensor may be exchanged without a trace in the tensor, so an alias keeps the
    memory of the call.
    """

    def __init__(self, head: nn.Module, *rows: Tensor):
        self._sharded = parallel.is_sharded(head)  # then its weights exist only during its calls
        self._modules = [
            (m, {k: v.copy() if type(v) in _CONTAINERS else v for k, v in self._kept(m).items()})
            for m in parallel.bare(head).modules()
        ]
        weights = [] if self._sharded else list(head.parameters())
        self._tensors = [(t, _version(t)) for t in (*weights, *rows)]
        self._learning = [(p, p.requires_grad) for p in weights]
        buffers = () if self._sharded else head.buffers()
        self._aliases = [(t, t.detach()) for t in map(parallel.local, (*weights, *buffers, *rows)) if _has_memory(t)]

    def _kept(self, m: nn.Module) -> dict[str, Any]:
        """The attributes of ``m`` that can change its result."""
        return (
            {k: v for k, v in m.__dict__.items() if k != "_parameters" and not isinstance(v, Tensor)}
            if self._sharded
            else m.__dict__
        )

    def exchanged(self) -> bool:
        """Whether a tensor has other memory than when the head was called."""
        return any(True for _ in self._exchanged())

    def _exchanged(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((t, then) for t, then in self._aliases if _has_memory(then) and not _is_at(t, then))

    def _is_now(self, m: nn.Module, then: dict[str, Any]) -> bool:
        now = self._kept(m)
        return len(now) == len(then) and all(k in now and _same(now[k], v) for k, v in then.items())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for the duration of the context. Raises ``RuntimeError`` if a tensor
        was changed in place since, as its values are lost."""
        exchanged = [(t, before, t.data) for t, before in self._exchanged()]
        freed = any(t.numel() and not t.untyped_storage().nbytes() for _, t, _ in exchanged)
        if freed or any(_version(t) != version for t, version in self._tensors):
            raise RuntimeError(
                "the logits of a patched model are computed when they are needed, and the weights or inputs of its "
                "head were changed in place since it was "
                "called: take logits.value() before, or patch the model with fused_linear_cross_entropy=False"
            )
        changed = [(m, then) for m, then in self._modules if not self._is_now(m, then)]
        learning = [(p, p.requires_grad) for p, then in self._learning if p.requires_grad != then]
        now = [(m, dict(m.__dict__)) for m, _ in changed]
        for m, then in changed:
            kept = self._kept(m)
            _replace(m, then | {k: v for k, v in m.__dict__.items() if k not in kept})
        for p, there in learning:
            p.requires_grad_(not there)
        for t, before, _ in exchanged:
            t.data = before
        try:
            yield
        finally:
            for t, _, data in exchanged:
                t.data = data
            for p, there in learning:
                p.requires_grad_(there)
            for m, attributes in now:
                _replace(m, attributes)


def _is_at(t: Tensor, then: Tensor) -> bool:
    return _has_memory(t) and (t.dtype, t.device) == (then.dtype, then.device) and t.is_set_to(then)


def _has_memory(t: Tensor) -> bool:
    """Whether ``t`` is a tensor with memory of its own, whose class does not keep it elsewhere."""
    return not (t.is_meta or isinstance(t, FakeTensor) or is_traceable_wrapper_subclass(t))


_CONTAINERS = (dict, OrderedDict, list, set)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and _same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, (bool, int, float, str, set)) and a == b


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _replace(m: nn.Module, attributes: dict[str, Any]) -> None:
    m.__dict__.clear()
    m.__dict__.update(attributes)
