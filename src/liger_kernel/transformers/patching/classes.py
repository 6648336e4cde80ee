"""A live module is patched by its class: it gets a subclass with our methods, of the same name.

FSDP2 and PyTorch's parametrisations change the class of a module in the same way. Nothing of the
patch is in the module itself, so ``del``, copies, replicas, ``inspect`` and ``torch.compile`` see a
module like any other. Two things differ from stock: ``type(m) is LlamaRMSNorm`` is false (so
nobody's ``nn.Linear`` or ``nn.Embedding`` is patched, which other packages look for like that), and
a ``forward`` that the stock class gets later is not what the module runs.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_kernel.transformers.patching.wrappers import wrapped

# In a class of ours: attribute -> our function. In the __dict__ of a live module: attribute -> its
# value before the patch, for attributes of the module itself, which hide those of its class
KEY = "_liger_stock"
OLD_FORWARD = "_old_forward"  # where accelerate's hooks store the forward that they wrap


def ours(function: Callable) -> Callable:
    """Mark ``function``: it replaces something of Transformers. The mark is the function itself,
    as ``functools.wraps`` copies attributes to every wrapper."""
    marked: Any = function
    marked._liger = function
    return function


def is_ours(value: Any) -> bool:
    """Whether ``value`` is a function of ours, or a method of one."""
    function = getattr(value, "__func__", value)
    return function is not None and getattr(function, "_liger", None) is function


def wraps_ours(value: Any) -> bool:
    """Whether ``value`` is ours, possibly in wrappers of Transformers."""
    while not (value is None or is_ours(value)):
        value = wrapped(value)
    return value is not None


def is_patched(m: nn.Module) -> bool:
    """Whether ``m`` itself is patched, by its class or in its ``__dict__``."""
    return KEY in m.__dict__ or any(KEY in vars(cls) for cls in type(m).__mro__)


def methods_of(m: nn.Module) -> dict[str, Callable]:
    """Our methods of ``m``, by name, also if FSDP2 put its class over ours."""
    return next((vars(cls)[KEY] for cls in type(m).__mro__ if KEY in vars(cls)), {})


def give_methods(m: nn.Module, methods: dict[str, Callable]) -> None:
    """Let ``m`` run ``methods`` besides those of ours that it has."""
    cls = type(m)
    base, own = (cls.__bases__[0], vars(cls)[KEY]) if KEY in vars(cls) else (cls, {})
    _change_class(m, _subclass(base, frozenset((own | methods).items())))


def take_methods(m: nn.Module, names: frozenset[str] | None = None) -> None:
    """Undo ``give_methods`` for these names, or for all."""
    _change_class(m, _without(type(m), names))


def _change_class(m: nn.Module, cls: type) -> None:
    object.__setattr__(m, "__class__", cls)  # not by a __setattr__ of the module, which may refuse


@functools.cache
def _subclass(stock: type, methods: frozenset[tuple[str, Callable]]) -> type:
    own = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {"__new__": _new, "__reduce_ex__": _reduce}
    # One base: remove_parametrizations gives a module the first base of its class.
    cls: Any = type(stock)(stock.__name__, (stock,), own | {KEY: dict(methods)})
    # Set after the class is made: ``__init_subclass__`` of Transformers' layers wraps the forward
    # that it finds into checkpointing, and ours has that wrapper already.
    for name, function in methods:
        setattr(cls, name, function)
    return cls


@functools.cache
def _without(cls: type, names: frozenset[str] | None) -> type:
    if KEY in vars(cls):
        rest = {n: f for n, f in vars(cls)[KEY].items() if names is not None and n not in names}
        base = _without(cls.__bases__[0], names)
        return _subclass(base, frozenset(rest.items())) if rest else base
    if not any(KEY in vars(base) for base in cls.__mro__):
        return cls
    # FSDP2 made its class over ours: make the same one over stock. What it wrapped of ours (a
    # layer's forward, into checkpointing) is wrapped again by ``__init_subclass__``.
    own = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__") and not wraps_ours(v)}
    return type(cls)(cls.__name__, tuple(_without(base, names) for base in cls.__bases__), own)


@contextlib.contextmanager
def _as_stock(m: nn.Module) -> Iterator[None]:
    cls = type(m)
    _change_class(m, _without(cls, None))
    try:
        yield
    finally:
        _change_class(m, cls)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Modules made by the class of a patched module (``type(model)(config)``) are stock.
    Without arguments, this makes the empty module of a replica."""
    stock = _without(cls, None)
    return stock(*args, **kwargs) if args or kwargs else stock.__new__(cls)


class _Make:
    """Makes the module of a copy, of ``cls``. Pickled, it is the function that makes a stock one."""

    def __init__(self, cls: type):
        self.cls = cls

    def __call__(self, stock: type) -> Any:
        return object.__new__(self.cls)

    def __reduce__(self) -> Any:
        return getattr, (object, "__new__")


def _reduce(m: nn.Module, protocol: Any) -> Any:
    """How ``copy``, ``pickle`` and ``torch.save`` see the module: a copy is patched, and a pickle
    holds the stock module, which loads where this package is not installed.

    Not by ``__deepcopy__``, which ``copy`` would find through the ``__getattr__`` of a wrapper that
    forwards to the module, such as PEFT's.
    """
    with _as_stock(m):
        reduced = m.__reduce_ex__(protocol)
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    # What the module itself has instead of its class's is stock's in a copy, too
    kept = m.__dict__.get(KEY, {})
    if rest and isinstance(rest[0], dict):
        rest[0] = {n: v for n, v in rest[0].items() if n != KEY} | kept
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed lacks it
        names = frozenset("forward" if name == OLD_FORWARD else name for name in kept)
        make = _Make(_without(type(m), names) if names else type(m))
    return make, args, *rest
