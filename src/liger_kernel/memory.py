"""Rematerialisation: what is cheap to compute is not kept for the backward, but computed again in it.

A Linear keeps its input for the gradient of its weight. Where that input is a norm's output or ``act(gate) * up``, it follows from tensors that are kept
anyway, the norm's input or gate and up, for one pass over memory. ``cheap(op, ...)`` computes such a value and notes how; while a ``rematerialised``
forward runs, whatever saves the value, or a cast or a view of it, saves the note instead, and the backward computes it once for all of them.

Saving is seen by ``torch.autograd.graph.saved_tensors_hooks``, as under non-reentrant checkpointing: what works there works here. The hooks are pushed by
``cheap`` and popped where those who need the value have had it (``taken``), at the latest when the forward ends, as every save costs host time meanwhile.
They stand back where hooks of others are in place or forbidden (checkpointing, offloading, ``torch.func``), under ``torch.compile``, where nothing is
differentiated, and while a backward computes a forward again.

Nothing but PyTorch is needed here: ``rematerialised`` serves any module whose norms and activations call ``cheap``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

LEVELS = ("off", "cheap", "mlp")  # "mlp": besides, the projections before a gated activation are multiplied again
SMALL = 16 * 2**20  # bytes up to which level "cheap" keeps a value: where layers are that quick, the GPU waits for the host, and hooks cost its time

# Nodes of views, which lie between a cast and who saves it
_VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze", "Slice", "Alias")}
_PLAIN = (Tensor, torch.nn.Parameter)


class _Local(threading.local):
    region: _Region | None = None
    last: Any = None  # the module after which the layer that runs keeps nothing for the backward


_local = _Local()


def level_of(value: bool | str | None) -> str:
    """The level that a flag names: True is "cheap", False and None are "off"; ``ValueError`` for what is none."""
    level = "cheap" if value is True else "off" if value is False or value is None else value
    if level not in LEVELS:
        raise ValueError(f"rematerialise: must be True, False or one of {LEVELS}, got {value!r}")
    return level


def _stream(t: Tensor) -> Any:
    return torch.cuda.current_stream(t.device) if t.is_cuda else None


class _Recipe:
    """How to compute a value again, and, while a backward needs it, the value by dtype: its own, or that of casts which were saved."""

    __slots__ = ("dtype", "left", "op", "options", "stream", "tensors", "users", "values", "versions")

    def __init__(self, y: Tensor, op: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], options: dict[str, Any]):
        self.dtype, self.op, self.tensors, self.options = y.dtype, op, tensors, options
        self.versions = [-1 if t is None else t._version for t in tensors]
        self.users = self.left = 0
        self.values: dict[torch.dtype, Tensor] = {}
        self.stream: Any = None

    def available(self) -> bool:
        """Whether its weights, behind the first tensor, hold data: where they are sharded they may be gone as soon as their module has run."""
        return all(t is None or t.untyped_storage().size() > 0 or not t.numel() for t in self.tensors[1:])

    def _compute(self, dtype: torch.dtype) -> Tensor:
        if self.dtype in self.values:
            return self.values[self.dtype].to(dtype)
        for t, version in zip(self.tensors, self.versions):
            if t is not None and t._version != version:
                raise _modified(t, version)
        if not self.available():
            raise RuntimeError(f"{self.op.__name__}: a tensor that its output is computed again from was freed before the backward; pass rematerialise=False")
        with torch.no_grad():
            return self.op(*self.tensors, **self.options).to(dtype)

    def value(self, dtype: torch.dtype) -> Tensor:
        """The value for one of those who saved it; kept until the last of them had it."""
        stream = _stream(self.tensors[0])  # type: ignore[arg-type]  # the first is always there
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
    """One call of a rematerialised forward: values and their recipes, found by storage and, for casts, by the node that made them."""

    def __init__(self, level: str):
        self.level = level
        self.by_storage: dict[int, tuple[Tensor, int, _Recipe]] = {}  # the values are held, so that no other tensor gets their storage
        self.by_node: dict[Any, tuple[Tensor, int, _Recipe]] = {}
        self.hooks: saved_tensors_hooks | None = None

    def open(self) -> None:
        if self.hooks is None and self.by_storage and _allowed() and _top() is None:
            self.hooks = saved_tensors_hooks(self.pack, _unpack)
            self.hooks.__enter__()

    def close(self) -> None:
        if self.hooks is not None and (top := _top()) is not None and top[1] is _unpack:
            self.hooks.__exit__()
            self.hooks = None

    def end(self) -> None:
        self.close()
        self.by_storage, self.by_node = {}, {}  # saved tensors hold the hooks, and these the region

    def declare(self, y: Tensor, op: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
        entry = y, y._version, _Recipe(y, op, tensors, options)
        self.by_storage[y.untyped_storage()._cdata] = self.by_node[y.grad_fn] = entry
        self.open()

    def pack(self, t: Tensor) -> Any:
        node = t.grad_fn
        if node is None:  # a leaf, itself: its owner may change its data meanwhile (ZeRO)
            return t, t._version
        if type(t) in _PLAIN and t.layout is torch.strided:
            entry = self.by_storage.get(t.untyped_storage()._cdata)
            if entry is None and (entry := self._cast(t, node)) is None:
                return t.detach(), t._version  # detached: it may be the output of the node that saves it
            y, version, recipe = entry
            if y._version == version and (t.dtype == y.dtype or t._version == 0) and recipe.available():
                recipe.users += 1
                return recipe, t.dtype, t.size(), t.stride(), t.storage_offset()
        return t.detach(), t._version

    def _cast(self, t: Tensor, node: Any) -> tuple[Tensor, int, _Recipe] | None:
        """What ``t`` is a cast, or a view of a cast, of, as autocast makes one for each Linear."""
        while (name := type(node).__name__) in _VIEWS:
            node = node.next_functions[0][0]
        if name != "ToCopyBackward0":
            return None
        source, number = node.next_functions[0]
        entry = self.by_node.get(source)
        whole = entry is not None and entry[0].output_nr == number and t.untyped_storage().nbytes() == entry[0].numel() * t.itemsize
        return entry if whole else None


def _unpack(saved: Any) -> Tensor:
    if len(saved) == 2:
        t, version = saved
        if t._version != version:
            raise _modified(t, version)
        return t
    recipe, dtype, *layout = saved
    return recipe.value(dtype).as_strided(*layout)


def _modified(t: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{t.type()} {list(t.shape)} is at version {t._version}; expected version {version} instead"
    )


def _top() -> Any:
    """The hooks for saved tensors that are in place now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _allowed() -> bool:
    """Whether hooks may be pushed: not within ``torch.func``."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]  # in no stub
    return enabled and torch._C._functorch.peek_interpreter_stack() is None


def cheap(op: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> Tensor:
    """``op(*tensors, **options)``, not saved but computed again where a rematerialised forward runs. ``op``: the same bits in every call."""
    y = op(*tensors, **options)
    declare(y, op, *tensors, **options)
    return y


def declare(y: Tensor, op: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> None:
    """As for ``cheap``, of a ``y`` that came about in another way."""
    if torch.compiler.is_compiling() or (region := _local.region) is None:
        return
    if y.nbytes <= SMALL and region.level == "cheap":
        return
    # ZeRO-3 (ds_id) takes the data out of a parameter when its module has run
    if y.grad_fn is not None and all(t is None or (type(t) in _PLAIN and not hasattr(t, "ds_id")) for t in (y, *tensors)):
        region.declare(y, op, tensors, options)


def last(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``module(x)``, after which the layer that calls it keeps nothing for the backward: where it is checkpointed, its recomputation may end in ``module``.

    Where one checkpoint spans several layers, only that of the last one does; the others are right, but project twice.
    """
    if torch.compiler.is_compiling():
        return module(x)
    before, _local.last = _local.last, module
    try:
        return module(x)
    finally:
        _local.last = before


def is_last(module: Any) -> bool:
    """Whether ``module`` runs as the last that keeps anything, as ``last`` says."""
    return _local.last is module


def level() -> str:
    """The level of the rematerialised forward that runs; "off" where none does."""
    region = None if torch.compiler.is_compiling() else _local.region
    return "off" if region is None else region.level


def needed() -> None:
    """What was declared will be saved next: by projections that follow on something else."""
    if not torch.compiler.is_compiling() and _local.region is not None:
        _local.region.open()


def taken() -> None:
    """Those who need what was declared have had it: until something else is, saving costs nothing more."""
    if not torch.compiler.is_compiling() and _local.region is not None:
        _local.region.close()


def projected(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, a gated MLP; at level "mlp" nothing in it is saved, and all but its last product is computed again from x in the backward."""
    if torch.compiler.is_compiling() or (region := _local.region) is None or region.level != "mlp" or not torch.is_grad_enabled():
        return function(x)
    region.open()  # x is saved by the checkpoint
    if (top := _top()) is not None and top[1] is not _unpack:
        return function(x)
    return checkpoint(function, x, use_reentrant=False)


def rematerialised(forward: Callable, level: str = "cheap") -> Callable:
    """``forward`` of a layer, in which what ``cheap`` computes is not saved for the backward but computed again. Gradients are equal bit for bit."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _local.region is not None:
            return forward(self, *args, **kwargs)
        if _top() is not None or not _allowed() or torch._C._current_autograd_node() is not None:
            return forward(self, *args, **kwargs)
        _local.region = region = _Region(level)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _local.region = None
            region.end()

    return wrapper
