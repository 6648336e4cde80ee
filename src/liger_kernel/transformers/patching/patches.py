"""Patches as values, and how each is put in its place and taken back.

A patch is (owner, attribute, replacement). The owner is a class or a Python module of Transformers,
or one live module of a model. ``restore`` puts back the very object that was there before: an
attribute of a class, or the class of a live module. Nothing is ever assigned into ``torch``.

A live module is patched by its class: it gets a subclass with our methods, of the same name, as
FSDP2 and PyTorch's parametrisations do it. Nothing of the patch is in the module itself, so
``del``, copies, replicas, ``inspect`` and ``torch.compile`` see a module like any other. Two things
differ from stock: ``type(m) is LlamaRMSNorm`` is false (so nobody's ``nn.Linear`` or
``nn.Embedding`` is patched, which other packages look for like that), and a ``forward`` that the
stock class gets later is not what the module runs.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from liger_kernel.graphs import forget
from liger_kernel.parallel.distributed import FSDPModule
from liger_kernel.transformers import invariant_attention, trl_head
from liger_kernel.transformers.fp8 import give_back
from liger_kernel.transformers.recognise.families import modeling
from liger_kernel.transformers.recognise.projections import KEPT
from liger_kernel.transformers.recognise.storages import give_packed_back

WARNED: set[str] = set()


def warn_once(text: str) -> None:
    if text not in WARNED:
        WARNED.add(text)
        warnings.warn(text, stacklevel=5)


# -- Transformers' wrappers around a forward

# Python modules whose wrappers call what they wrap with the same arguments, or renamed ones
WRAPPING = ("transformers.", "torch.utils._contextlib")


def wrapped(forward: Any) -> Any:
    """Return what ``forward`` wraps, if it is torch's ``no_grad`` or a wrapper of Transformers
    (checkpointing, arguments with older names); else None."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is None or not isinstance(forward, types.FunctionType):
        return None
    own = forward.__globals__.get("__name__", "").startswith(WRAPPING)
    # ``functools.wraps`` copies __wrapped__ on: only who holds the function in a cell calls it
    return inner if own and any(cell.cell_contents is inner for cell in forward.__closure__ or ()) else None


def core(forward: Any) -> Any:
    """Return the forward inside Transformers' wrappers."""
    while (inner := wrapped(forward)) is not None:
        forward = inner
    return forward


def within(forward: Callable, change: Callable[[Any], Callable], *, of_class: bool = True) -> Callable:
    """Return ``change(forward)``; if Transformers has wrapped it, return that wrapper around
    ``change`` of what it wraps.

    A wrapper that checkpoints does so only if it is ``type(self).forward``. The new wrapper
    compares itself with it if it becomes the class's forward (``of_class``); otherwise it compares
    the old wrapper.
    """
    inner = wrapped(forward)
    if inner is None:
        return change(forward)
    changed = within(inner, change, of_class=False)
    if changed is inner:
        return forward
    outer: Any = forward
    code = outer.__code__
    cells = {
        name: types.CellType(changed) if cell.cell_contents is inner else cell
        for name, cell in zip(code.co_freevars, outer.__closure__)
    }
    if of_class and code.co_name in cells:
        cells[code.co_name] = types.CellType()
    new: Any = types.FunctionType(code, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells.values()))
    new.__kwdefaults__ = outer.__kwdefaults__
    functools.update_wrapper(new, forward)
    new.__wrapped__ = changed
    if of_class and code.co_name in cells:
        cells[code.co_name].cell_contents = new
    return new


# -- classes of patched modules

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


def stock_class(m: nn.Module) -> type:
    """The class of ``m`` without what we and FSDP2 put over it."""
    return next(c for c in type(m).__mro__ if KEY not in vars(c) and not issubclass(c, FSDPModule))


def methods_of(m: nn.Module) -> dict[str, Callable]:
    """Our methods of ``m``, by name, also if FSDP2 put its class over ours."""
    return next((vars(cls)[KEY] for cls in type(m).__mro__ if KEY in vars(cls)), {})


def give_methods(m: nn.Module, methods: dict[str, Callable]) -> None:
    """Let ``m`` run ``methods`` besides those of ours that it has."""
    cls = type(m)
    base, own = (cls.__bases__[0], vars(cls)[KEY]) if KEY in vars(cls) else (cls, {})
    _change_class(m, _subclass(base, frozenset((own | methods).items())))


def remove_methods(m: nn.Module, names: frozenset[str] | None = None) -> None:
    """Undo ``give_methods`` for these names, or for all."""
    _change_class(m, _without(type(m), names))


def _change_class(m: nn.Module, cls: type) -> None:
    object.__setattr__(m, "__class__", cls)  # not by a __setattr__ of the module, which may refuse


def _by_class(make: Callable[[type, Any], type]) -> Callable[[type, Any], type]:
    """``make``, cached, but for a class that PyTorch's parametrizations made: its properties hold
    its one module, which the cache would keep alive."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def made(cls: type, what: Any) -> type:
        own = (value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, property))
        of_one_module = any(getattr(value.fget, "__module__", "") == parametrize.__name__ for value in own)
        return (make if of_one_module else cached)(cls, what)

    vars(made)["cache_clear"] = cached.cache_clear
    return made


@_by_class
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


@_by_class
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
    """Makes the module of a copy, of ``cls``. Pickled, it is the function that makes a stock
    one."""

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


# -- patches

ABSENT = object()  # the value of an attribute that the owner did not have itself
_STOCK: dict[Any, dict[str, Any]] = {}  # class or Python module -> attribute -> its value before the patch


def remembered(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` itself before our patches, by name."""
    if isinstance(owner, nn.Module):
        return dict.fromkeys(methods_of(owner), ABSENT) | owner.__dict__.get(KEY, {})
    return _STOCK.get(owner, {})


def is_method(m: nn.Module, place: str, attribute: str) -> bool:
    """Whether ``m`` itself has under ``place``, ours aside, the method ``attribute`` of its
    class."""
    value = m.__dict__.get(KEY, {}).get(place, m.__dict__.get(place))
    bound = isinstance(value, types.MethodType) and value.__self__ is m
    return bound and value.__func__ is original(type(m), attribute, None)


def _present(owner: Any, attribute: str) -> Any:
    """The function that ``owner`` has now: of a live module its own, else our method of it."""
    value = owner.__dict__.get(attribute)
    if isinstance(owner, nn.Module):
        value = methods_of(owner).get(attribute) if value is None else getattr(value, "__func__", value)
    return value


@dataclass(frozen=True)
class Patch:
    """``owner.attribute`` becomes ``new``, a function; of a live module, a method. ``labels``
    say what it does."""

    owner: Any
    attribute: str
    new: Any
    labels: tuple[str, ...] = ()
    # what a forward of a live module's own gets around it instead; without it, such a module stays
    around: Callable[[Callable], Callable] | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return ", ".join(self.labels)

    @property
    def applied(self) -> bool:
        """Whether the patch is in place, possibly below a wrapper that other code added later."""
        value = _present(self.owner, self.attribute)
        return self.attribute in remembered(self.owner) and (value is self.new or not is_ours(value))

    def apply(self) -> None:
        owner, name, own = self.owner, self.attribute, self.owner.__dict__
        if not isinstance(owner, nn.Module):
            _STOCK.setdefault(owner, {}).setdefault(name, own.get(name, ABSENT))
            setattr(owner, name, self.new)
            return
        if name not in own.get(KEY, ()) and is_ours(own.get(name)):
            del own[name]  # accelerate, which took its hooks off, made our method an attribute
        # Methods of the class that somebody stored in the module (accelerate's hooks do, as
        # ``_old_forward``) are exchanged with the class. Any other attribute is what runs: the
        # class stays as it is, but for copies and pickles, which must know of the attribute.
        bound = [place for place in (name, OLD_FORWARD) if place in own and is_method(owner, place, name)]
        give_methods(owner, {name: self.new} if bound or name not in own else {})
        for place in bound or ([name] if name in own else []):
            own.setdefault(KEY, {}).setdefault(place, own[place])
            own[place] = types.MethodType(self.new, owner)

    def __str__(self) -> str:
        owner = self.owner
        name = owner.__name__.rpartition(".")[2] if hasattr(owner, "__name__") else f"<{type(owner).__name__}>"
        return f"{name}.{self.attribute} <- {self.label}"


class Patches(tuple[Patch, ...]):
    """Print them, apply them, restore them, or use them as a context: ``with patches: ...``."""

    def apply(self) -> Patches:
        """Apply the patches that are not in place, and return these."""
        new = Patches(p for p in self if not p.applied)
        for p in new:
            p.apply()
        return new

    def restore(self) -> None:
        """Put back what was there before the first patch of each attribute, if our patch is
        still in place."""
        for p in reversed(self):
            if p.applied:
                _give_back(p.owner, [p.attribute])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Patches]:
        new = self.apply()
        try:
            yield self
        finally:
            new.restore()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _give_back(owner: Any, names: list[str]) -> None:
    live, own = isinstance(owner, nn.Module), owner.__dict__
    kept = own.get(KEY, {}) if live else _STOCK[owner]
    for name in names:
        stock, value = kept.pop(name, ABSENT), own.get(name)
        if is_ours(value):
            delattr(owner, name) if stock is ABSENT else setattr(owner, name, stock)
        elif not live or not (value is None or (name == "forward" and is_ours(own.get(OLD_FORWARD)))):
            text = "other code replaced it after the patch, so it is not restored"
            warnings.warn(f"{Patch(owner, name, None)}: {text}", stacklevel=3)
    if live:
        remove_methods(owner, frozenset(names))
        if "forward" in names and is_ours(own.get(OLD_FORWARD)):
            owner._old_forward = kept.pop(OLD_FORWARD, types.MethodType(type(owner).forward, owner))
    if not kept:
        own.pop(KEY, None) if live else _STOCK.pop(owner)


def restore(model: nn.Module | str | None = None) -> None:
    """Restore the stock functions of one live model, of one model type, or, without an argument, of
    all patched classes.

    Every attribute is the same object again that it was before the patch. A live model also leaves
    FP8; models of patched classes stay in it.
    """
    trl_head.stop(model)
    invariant_attention.release(model)
    KEPT.clear()  # it would keep alive what the layers no longer hold
    if isinstance(model, nn.Module):
        give_back(model)
        give_packed_back(model)
        forget(model)
        owners: list[Any] = [m for m in model.modules() if is_patched(m)]
    elif isinstance(model, str):
        home = lambda o: o.__name__ if isinstance(o, types.ModuleType) else o.__module__
        owners = [o for o in _STOCK if home(o) == modeling(model).__name__]
    else:
        owners = list(_STOCK)
    for owner in owners:
        _give_back(owner, list(remembered(owner)))


def original(owner: Any, attribute: str, *default: Any) -> Any:
    """Return ``owner.attribute`` as it was before our patches; for a class, also if it inherits
    the attribute."""
    for cls in owner.__mro__ if isinstance(owner, type) else (owner,):
        value = _STOCK.get(cls, {}).get(attribute, ABSENT)
        value = cls.__dict__.get(attribute, ABSENT) if value is ABSENT else value
        if value is not ABSENT and KEY not in cls.__dict__:  # not a class of a patched module
            return value
    for value in default:
        return value
    raise AttributeError(f"{owner} has no attribute {attribute}")
