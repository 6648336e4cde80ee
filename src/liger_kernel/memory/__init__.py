"""Rematerialisation: values that are cheap to compute are not stored for the backward pass, but
computed again in it.

A linear layer saves its input for the gradient of its weight. If that input is a norm's output or
``act(gate) * up``, it can be computed from tensors that are saved anyway, the norm's input or gate
and up, in one pass over memory. ``cheap(op, ...)`` computes such a value and notes how. While a
``rematerialised`` forward runs, the value, or a cast or a view of it, is not saved; the note is
saved instead, and the backward pass computes the value once for all readers.

Saving is observed by ``torch.autograd.graph.saved_tensors_hooks``, as in non-reentrant
checkpointing: what works there works here. ``cheap`` pushes the hooks. They are popped when all
readers of the value have run (``readers_done``), at the latest when the forward ends, because every save
costs host time meanwhile. The hooks are not used where others have hooks or forbid them
(checkpointing, ``torch.func``), under ``torch.compile``, without gradients, and while a backward
pass recomputes a forward. Those of ``offload`` get from these what is not recomputed, and what
it is recomputed from.

This file needs nothing but PyTorch: ``rematerialised`` works for any module whose norms and
activations call ``cheap``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel import _private
from liger_kernel.memory import offload
from liger_kernel.memory.keep_attention import (
    attention_operators as attention_operators,
    keeping_attention as keeping_attention,
)
from liger_kernel.memory.offload import PLAIN, VIEWS, hooks_allowed, top_hooks
from liger_kernel.patch_options import LEVELS as LEVELS, level_of as level_of

__all__ = [
    "LEVELS",
    "SMALL",
    "attention_operators",
    "cheap",
    "declare",
    "is_last",
    "keeping_attention",
    "last",
    "level",
    "level_of",
    "projected",
    "readers_done",
    "readers_follow",
    "recomputed",
    "recomputing",
    "rematerialised",
]
# bytes up to which level "cheap" keeps a value: where layers are that quick, the GPU waits for the
# host, and hooks cost its time
SMALL = 16 * 2**20


class _Local(threading.local):
    region: _Region | None = None
    last: Any = None  # the module after which the layer that runs keeps nothing for the backward


_local = _Local()


class _Recipe:
    """How to compute a value again, and, while a backward needs it, the value by dtype: its own,
    or that of casts which were saved."""

    __slots__ = ("device", "dtype", "left", "op", "options", "stream", "tensors", "users", "values")

    def __init__(self, y: Tensor, op: Callable[..., Tensor], tensors: list[Any], options: dict[str, Any]):
        self.dtype, self.device, self.op, self.options = y.dtype, y.device, op, options
        self.tensors = tensors  # as the graph would hold them
        self.users = self.left = 0
        self.values: dict[torch.dtype, Tensor] = {}
        self.stream: Any = None

    def available(self) -> bool:
        """Whether the tensors after the first (the weights) hold data: sharded weights may be
        freed as soon as their module has run."""
        return all(
            t is None or t.untyped_storage().size() > 0 or not t.numel() for t in map(offload.held, self.tensors[1:])
        )

    def _compute(self, dtype: torch.dtype) -> Tensor:
        if self.dtype in self.values:
            return self.values[self.dtype].to(dtype)
        if not self.available():
            raise RuntimeError(
                f"{self.op.__name__}: a tensor that recomputation needs was freed before the backward pass; patch "
                "with rematerialise=False"
            )
        with torch.no_grad():
            return self.op(*(t if t is None else offload.unpack(t) for t in self.tensors), **self.options).to(dtype)

    def value(self, dtype: torch.dtype) -> Tensor:
        """The value for one of its readers; it is freed after the last reader."""
        # the backward of q, k and v reads one value: it is computed once, not three times
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if not self.values:
            self.left, self.stream = self.users, stream
        elif stream != self.stream:  # what another stream computes may not be there yet
            kept, self.values = self.values, {}
            value, self.values = self._compute(dtype), kept
            return value
        if dtype not in self.values:
            self.values[dtype] = self._compute(dtype)
        value = self.values[dtype]
        self.left -= 1
        if self.left <= 0:
            self.values = {}  # another backward through the same graph begins anew
        return value


class _Region:
    """One call of a rematerialised forward: values and their recipes, found by storage and, for
    casts, by the node that made them."""

    def __init__(self, level: str, save: Callable[[Tensor], Any]):
        self.level, self.save = level, save  # ``save``: what the graph holds of a tensor that is not recomputed
        # the values are held, so that no other tensor gets their storage
        self.by_storage: dict[int, tuple[Tensor, int, _Recipe]] = {}
        self.by_node: dict[Any, tuple[Tensor, int, _Recipe]] = {}
        self.hooks: saved_tensors_hooks | None = None

    def open(self) -> None:
        if self.hooks is None and self.by_storage and hooks_allowed() and offload.saved_by() is not None:
            self.hooks = saved_tensors_hooks(self.pack, _unpack)
            self.hooks.__enter__()

    def close(self) -> None:
        if self.hooks is not None and (top := top_hooks()) is not None and top[1] is _unpack:
            self.hooks.__exit__()
            self.hooks = None

    def __enter__(self) -> None:
        _local.region = self

    def __exit__(self, *_: Any) -> None:
        _local.region = None
        self.close()
        self.by_storage, self.by_node = {}, {}  # saved tensors hold the hooks, and these the region

    def pack(self, t: Tensor) -> Any:
        if (entry := self.entry(t)) is not None:
            y, version, recipe = entry
            # a change in place, of the value or of its cast, is not part of the recipe
            if y._version == version and (t.dtype == y.dtype or t._version == 0) and recipe.available():
                recipe.users += 1
                return _Value(recipe, t.dtype, t.size(), t.stride(), t.storage_offset())
        return self.save(t)

    def entry(self, t: Tensor) -> tuple[Tensor, int, _Recipe] | None:
        """The value that ``t`` is a view of, or of a cast of, as autocast makes one for each Linear."""
        # leaves are weights and inputs, which nothing computes again
        node: Any = t.grad_fn
        if node is None or type(t) not in PLAIN or t.layout is not torch.strided:
            return None
        if (found := self.by_storage.get(t.untyped_storage()._cdata)) is not None:
            return found
        while (name := type(node).__name__) in VIEWS:
            node = node.next_functions[0][0]
        if name != "ToCopyBackward0":
            return None
        source, number = node.next_functions[0]
        entry = self.by_node.get(source)
        whole = (
            entry is not None
            and entry[0].output_nr == number
            and t.untyped_storage().nbytes() == entry[0].numel() * t.itemsize
        )
        return entry if whole else None


class _Value(NamedTuple):
    """What the graph holds of a value that is recomputed."""

    recipe: _Recipe
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _unpack(saved: Any) -> Tensor:
    if type(saved) is not _Value:
        return offload.unpack(saved)
    return saved.recipe.value(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


def cheap(op: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> Tensor:
    """Return ``op(*tensors, **options)``. In a rematerialised forward the result is not saved but
    recomputed in the backward pass.

    ``op`` must give identical bits in every call.
    """
    y = op(*tensors, **options)
    declare(y, op, *tensors, **options)
    return y


def declare(y: Tensor, op: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> None:
    """The same as ``cheap`` for a ``y`` that was computed in another way."""
    if torch.compiler.is_compiling() or (region := _local.region) is None:
        return
    # level "mlp" asks for memory first
    if y.nbytes <= SMALL and region.level == "cheap":
        return
    # ZeRO-3 (ds_id) takes the data out of a parameter when its module has run
    if y.grad_fn is not None and all(
        t is None or (type(t) in PLAIN and not hasattr(t, "ds_id")) for t in (y, *tensors)
    ):
        recipe = _Recipe(y, op, [t if t is None else region.save(t) for t in tensors], options)
        region.by_storage[y.untyped_storage()._cdata] = region.by_node[y.grad_fn] = y, y._version, recipe
        region.open()


def recomputed(t: Tensor) -> bool:
    """Whether saving ``t`` now saves only how to compute it again."""
    region = None if torch.compiler.is_compiling() else _local.region
    if region is None or region.hooks is None or (entry := region.entry(t)) is None:
        return False
    return entry[2].available()


def last(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``module(x)`` as the last call of its layer that saves anything: if the layer is
    checkpointed, its recomputation may end in ``module``.

    If one checkpoint contains several layers, only the last one gains; the others are right, but
    compute their projections twice.
    """
    if torch.compiler.is_compiling():
        return module(x)
    before, _local.last = _local.last, module
    try:
        return module(x)
    finally:
        _local.last = before


def is_last(module: Any) -> bool:
    """Whether ``module`` runs as the last call that saves anything, as ``last`` declares."""
    return _local.last is module


def level() -> str:
    """The level of the rematerialised forward that is running; "off" outside of one."""
    region = None if torch.compiler.is_compiling() else _local.region
    return "off" if region is None else region.level


def readers_follow() -> None:
    """Say that the declared value will be saved next, by projections that follow after something
    else."""
    if not torch.compiler.is_compiling() and _local.region is not None:
        _local.region.open()


def readers_done() -> None:
    """Say that all readers of the declared value have run: until the next declaration, saving
    costs nothing extra."""
    if not torch.compiler.is_compiling() and _local.region is not None and torch.is_grad_enabled():
        _local.region.close()


def projected(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)``, a gated MLP. At level "mlp" nothing in it is saved; the backward
    pass recomputes all but its last product from x."""
    if (
        torch.compiler.is_compiling()
        or (region := _local.region) is None
        or region.level != "mlp"
        or not torch.is_grad_enabled()
    ):
        return function(x)
    region.open()  # x is saved by the checkpoint
    if offload.saved_by() is None and top_hooks()[1] is not _unpack:
        return function(x)
    return checkpoint(function, x, use_reentrant=False)


def recomputing(level: str = "cheap") -> AbstractContextManager[None]:
    """For the body of a layer's forward: values of ``cheap`` are recomputed in the backward pass
    instead of saved. Gradients are bit-identical."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _local.region is not None:
        return nullcontext()
    save = offload.saved_by()
    if save is None or not hooks_allowed() or _private.backward_node() is not None:
        return nullcontext()
    return _Region(level, save)


def rematerialised(forward: Callable, level: str = "cheap") -> Callable:
    """``forward`` of a layer ``recomputing``; itself at level "off"."""
    if level == "off":
        return forward

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recomputing(level):
            return forward(self, *args, **kwargs)

    return wrapper
