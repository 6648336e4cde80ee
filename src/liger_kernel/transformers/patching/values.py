"""Patches as values.

A patch is (owner, attribute, replacement). The owner is a class or a module of Transformers, or one
live module of a model. The previous attribute is stored, and ``restore`` puts back that very
object. Nothing is ever assigned into ``torch``.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_kernel.transformers.fp8 import give_back
from liger_kernel.transformers.patching.bound import ABSENT, KEY, Bound, declare, is_ours, ours
from liger_kernel.transformers.recognise.family import modeling

_STOCK: dict[
    Any, dict[str, Any]
] = {}  # for classes and Python modules: owner -> attribute -> its value before the patch


def remembered(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` before our patches. Live modules store them in their own
    ``__dict__``, so that copies of a model have them, too."""
    return owner.__dict__.get(KEY, {}) if isinstance(owner, nn.Module) else _STOCK.get(owner, {})


REPLICATE = "_replicate_for_data_parallel"


@ours
def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """Make a replica as the class does, and bind our methods to the replica, as methods of the
    class would be."""
    replica = getattr(type(self), REPLICATE)(self)
    replica.__dict__.update({name: value.to(replica) for name, value in Bound.all(self).items()})
    replica.__dict__[KEY] = dict(remembered(self))
    return replica


@dataclass(frozen=True)
class Patch:
    """``owner.attribute`` becomes ``new``. ``what`` describes the patch; its text is the label."""

    owner: Any
    attribute: str
    new: Any
    what: object = ""

    @property
    def label(self) -> str:
        return str(self.what)

    @property
    def applied(self) -> bool:
        """Whether the patch is in place, possibly below a wrapper that other code added later."""
        value = self.owner.__dict__.get(self.attribute)
        return self.attribute in remembered(self.owner) and (value == self.new or not is_ours(value))

    def apply(self) -> None:
        stock = (
            self.owner.__dict__.setdefault(KEY, {})
            if isinstance(self.owner, nn.Module)
            else _STOCK.setdefault(self.owner, {})
        )
        stock.setdefault(self.attribute, self.owner.__dict__.get(self.attribute, ABSENT))
        setattr(self.owner, self.attribute, self.new)
        if isinstance(self.owner, nn.Module) and REPLICATE not in stock:
            declare(type(self.owner))
            replicate = Bound(_replicate_for_data_parallel, self.owner, REPLICATE, getattr(type(self.owner), REPLICATE))
            Patch(self.owner, REPLICATE, replicate, "replicas").apply()

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
            _give_back(p.owner, [p.attribute] if p.applied else [])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Patches]:
        new = self.apply()
        try:
            yield self
        finally:
            new.restore()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _give_back(owner: Any, attributes: Iterable[str]) -> None:
    there_was = remembered(owner)
    for name in attributes:
        stock = there_was.pop(name)
        if not is_ours(owner.__dict__.get(name)):
            if (
                name == "forward" and type(owner.__dict__.get("_old_forward")) is Bound
            ):  # accelerate's hooks were added over ours: put stock back beneath them
                owner._old_forward = types.MethodType(type(owner).forward, owner)
                continue
            warnings.warn(
                f"{Patch(owner, name, None)}: other code replaced it after the patch, so it is not restored",
                stacklevel=3,
            )
        elif stock is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, stock)
    if there_was.keys() == {REPLICATE}:
        _give_back(owner, [REPLICATE])
    elif not there_was:
        owner.__dict__.pop(KEY, None) if isinstance(owner, nn.Module) else _STOCK.pop(owner, None)


def restore(model: nn.Module | str | None = None) -> None:
    """Restore the stock functions of one live model, of one model type, or, without an argument, of
    all patched classes.

    Every attribute is the same object again that it was before the patch. A live model also leaves
    FP8; models of patched classes stay in it.
    """
    if isinstance(model, nn.Module):
        give_back(model)
        owners: list[Any] = [m for m in model.modules() if KEY in m.__dict__]
    elif isinstance(model, str):
        module = modeling(model)
        owners = [
            o for o in _STOCK if (o.__name__ if isinstance(o, types.ModuleType) else o.__module__) == module.__name__
        ]
    else:
        owners = list(_STOCK)
    for owner in owners:
        _give_back(owner, list(remembered(owner)))


def original(owner: Any, attribute: str) -> Any:
    """Return ``owner.attribute`` as it was before our patch; for a class, also if it inherits
    the attribute."""
    for cls in owner.__mro__ if isinstance(owner, type) else (owner,):
        value = remembered(cls).get(attribute, ABSENT)
        value = cls.__dict__.get(attribute, ABSENT) if value is ABSENT else value
        if value is not ABSENT:
            return value
    raise AttributeError(f"{owner} has no attribute {attribute}")
