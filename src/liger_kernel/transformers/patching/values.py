"""Patches as values.

A patch is (owner, attribute, replacement). The owner is a class or a module of Transformers, or one
live module of a model. ``restore`` puts back the very object that was there before: an attribute of
a class, or the class of a live module. Nothing is ever assigned into ``torch``.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from liger_kernel.transformers.fp8 import give_back
from liger_kernel.transformers.patching.classes import (
    KEY,
    OLD_FORWARD,
    give_methods,
    is_ours,
    is_patched,
    methods_of,
    take_methods,
)
from liger_kernel.transformers.recognise.family import modeling

ABSENT = object()  # the value of an attribute that the owner did not have itself
_STOCK: dict[Any, dict[str, Any]] = {}  # class or Python module -> attribute -> its value before the patch


def remembered(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` itself before our patches, by name."""
    if isinstance(owner, nn.Module):
        return dict.fromkeys(methods_of(owner), ABSENT) | owner.__dict__.get(KEY, {})
    return _STOCK.get(owner, {})


def is_method(m: nn.Module, place: str, attribute: str) -> bool:
    """Whether ``m`` itself has under ``place``, ours aside, the method ``attribute`` of its class."""
    value = m.__dict__.get(KEY, {}).get(place, m.__dict__.get(place))
    return (
        isinstance(value, types.MethodType)
        and value.__self__ is m
        and value.__func__ is original(type(m), attribute, None)
    )


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
        name = (
            self.owner.__name__.rpartition(".")[2]
            if hasattr(self.owner, "__name__")
            else f"<{type(self.owner).__name__}>"
        )
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
            warnings.warn(
                f"{Patch(owner, name, None)}: other code replaced it after the patch, so it is not restored",
                stacklevel=3,
            )
    if live:
        take_methods(owner, frozenset(names))
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
    if isinstance(model, nn.Module):
        give_back(model)
        owners: list[Any] = [m for m in model.modules() if is_patched(m)]
    elif isinstance(model, str):
        module = modeling(model)
        owners = [
            o for o in _STOCK if (o.__name__ if isinstance(o, types.ModuleType) else o.__module__) == module.__name__
        ]
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
