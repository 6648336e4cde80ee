"""A function as a method of one live module. It behaves as if the module's class had it.

A bound method in a module's own ``__dict__`` differs from a method of its class in ways that users
notice. It holds its module, so ``del model`` frees nothing before the garbage collector runs.
``copy.copy(model)`` runs the original. A ``forward`` that the class gets later, or another
``__class__``, has no effect. ``Bound`` holds its module weakly, looks at the class at each call,
and is made again for copies. Pickles contain the stock model without ``Bound``.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_kernel.transformers.patching.wrappers import wrapped

KEY = "_liger_stock"  # in the __dict__ of a patched module: attribute -> its value before the patch


class ABSENT:
    """Marks an attribute that did not exist before the patch. (This is a class, because a copy
    of a class is the class itself.)"""


def ours(function: Callable) -> Callable:
    """Mark ``function``: it replaces something of Transformers. The mark is the function itself,
    as ``functools.wraps`` copies attributes to every wrapper."""
    marked: Any = function
    marked._liger = function
    return function


def is_ours(value: Any) -> bool:
    function = (
        value.function if type(value) is Bound else getattr(value, "__func__", value)
    )  # accelerate turns the function that it unwraps into a method
    return function is not None and getattr(function, "_liger", None) is function


@functools.lru_cache(1024)
def _found_within(there: Any, stock: Callable) -> bool:
    while not (there is None or there is stock or is_ours(there)):
        there = wrapped(there)
    return there is not None


@torch.compiler.assume_constant_result
def within(there: Callable, stock: Callable) -> bool:
    """Whether ``there`` is ``stock`` or our replacement, possibly in a wrapper of Transformers:
    each new layer class gets one, even the classes of FSDP2."""
    return _found_within(there, stock)


class Bound:
    """``function`` as a method of ``owner`` while its class has ``stock``, or our replacement,
    under ``name``; otherwise a call runs the class's method.

    ``name`` is "" if it replaces an attribute of the module itself, which hides the attribute of
    the class.
    """

    __slots__ = ("_owner", "called", "function", "name", "stock")

    def __init__(self, function: Callable, owner: nn.Module, name: str = "", stock: Any = None):
        self.function, self.name, self.stock = function, name, stock
        self._owner = weakref.ref(owner)
        self.called = (
            False  # whether a later method of the class is running: if it calls us, it holds us as the previous method
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is not None and getattr(type(owner), self.name, None) is self.stock:
            return self.function(owner, *args, **kwargs)
        owner, function = self.__self__, self.__func__
        if function is self.function:
            return function(owner, *args, **kwargs)
        self.called = True
        try:
            return function(owner, *args, **kwargs)
        finally:
            self.called = False

    @property
    def __self__(self) -> nn.Module:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(
                f"{self.function.__qualname__} of a patched module was called after the module was freed: keep the "
                "module itself"
            )
        return owner

    @property
    def __func__(self) -> Callable:
        """The function that a call runs. This is not the later method of the class if that
        method calls us, or if a forward in the module itself hides it."""
        owner = self._owner()
        there = getattr(type(owner), self.name, None)
        if (
            owner is None
            or there is None
            or self.called
            or owner.__dict__.get(self.name) is not self
            or within(there, self.stock)
        ):
            return self.function
        return there

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __getattr__(self, name: str) -> Any:
        if name == "__dict__":  # functools.wraps would copy our marks
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __eq__(self, other: Any) -> bool:
        return type(other) is Bound and self.function is other.function and self._owner() is other._owner()

    def __hash__(self) -> int:
        return hash((self.function, self.name))

    def __repr__(self) -> str:
        return (
            f"<bound method {getattr(self.function, '__qualname__', self.name)} of "
            f"{type(self._owner()).__name__}, by liger_kernel>"
        )

    def to(self, owner: nn.Module) -> Bound:
        """The same function for another module of the class."""
        return Bound(self.function, owner, self.name, self.stock)

    @classmethod
    def all(cls, module: nn.Module) -> dict[str, Bound]:
        """All our functions in a module's own ``__dict__``, by name."""
        there = {
            name: value
            for name, value in module.__dict__.items()
            if name in module.__dict__.get(KEY, ()) and is_ours(value)
        }
        return {
            n: v if type(v) is cls else cls(v.__func__, module, n, getattr(type(module), n)) for n, v in there.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        owner = self.__self__
        return self.to(memo[id(owner)]) if id(owner) in memo else self.to(owner)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.name or "forward")


class _New:
    """Creates an empty module for the state of a copy. It is pickled as the stock function that
    creates one."""

    def __init__(self, make: Callable, bound: dict[str, Bound]):
        self.make, self.bound = make, bound

    def __call__(self, *args: Any) -> Any:
        new = self.make(*args)
        new.__dict__.update({name: value.to(new) for name, value in self.bound.items()})
        new.__dict__[KEY] = dict.fromkeys(self.bound, ABSENT)
        return new

    def __reduce__(self) -> Any:
        _say_once()
        return functools.partial, (self.make,)


@functools.cache
def _say_once() -> None:
    warnings.warn("liger_kernel: a pickle holds the stock model; patch it again after loading", stacklevel=4)


def _reduced(module: Any) -> Any:
    """How ``copy`` and ``pickle`` reduce the modules of a class that has a patched module: to
    the state that they would have without the patch."""
    reduced = module.__reduce_ex__(2)
    stock = module.__dict__.get(KEY)
    if not stock or not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    make, args, state, *rest = reduced
    state = {name: value for name, value in state.items() if name != KEY}
    bound = {name: value for name, value in Bound.all(module).items() if state.pop(name, None) is not None}
    state |= {name: stock[name] for name in bound if stock[name] is not ABSENT}
    return _New(make, {name: value for name, value in bound.items() if stock[name] is ABSENT}), args, state, *rest


def declare(cls: type) -> None:
    """Register ``_reduced`` for copies and pickles of modules of ``cls``; unpatched ones behave
    as before. ``copy`` looks only at the class and this table."""
    if cls not in copyreg.dispatch_table:
        copyreg.pickle(cls, _reduced)  # type: ignore[arg-type]  # __reduce_ex__ may also return a string
