"""What a patched ``forward`` returns: outputs with two more fields, and without recipes."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from liger_kernel.transformers.head.recipe import Recipe, materialised, of_tensors

# made once for each class, so that the outputs of two models of it are of one class
_OUTPUTS: dict[type, type] = {}
EXTRA = "token_accuracy", "predicted_tokens"


def output_class(cls: type) -> type:
    """Return ``cls``, a ``ModelOutput``, with the fields ``token_accuracy`` and
    ``predicted_tokens``. Without values there, it is pickled as a ``cls``."""
    if cls not in _OUTPUTS:
        # LinkedIn's names, by which users import some of these
        name = cls.__name__ if cls.__name__.startswith("Liger") else f"Liger{cls.__name__}"
        namespace = {"__module__": __name__, "__doc__": cls.__doc__, "__reduce__": _reduced_output}
        _OUTPUTS[cls] = dataclasses.make_dataclass(
            name, [(n, "Tensor | None", None) for n in EXTRA], bases=(cls,), namespace=namespace
        )
    return _OUTPUTS[cls]


class _Output:
    """Creates an output for ``copy``. It is pickled as the function that creates an output of a
    given class."""

    def __init__(self, cls: type, make: Any):
        self.cls, self.make = cls, make

    def __call__(self, *args: Any) -> Any:
        return self.cls(*args)

    def __reduce__(self) -> Any:
        return functools.partial, self.make


def _output(cls: type, *args: Any) -> Any:
    return output_class(cls)(*args)


def _reduced_output(self: Any) -> Any:
    own, stock = type(self), type(self).__bases__[0]
    _, args, state, *rest = super(own, self).__reduce__()
    # without our package, whoever loads the pickle gets the class of Transformers
    if any(getattr(self, name) is not None for name in EXTRA):
        return _Output(own, (_output, stock)), args, state, *rest
    return (
        _Output(own, (stock,)),
        args[: -len(EXTRA)],
        {k: v for k, v in (state or {}).items() if k not in EXTRA},
        *rest,
    )


def declare_outputs(module: types.ModuleType | None) -> None:
    """Make the output classes for the models of ``module`` in advance, because ``torch.compile``
    cannot trace the making of a class."""
    for each in (modeling_outputs, module):
        for cls in _outputs_in(each) if each else ():
            output_class(cls)


def _outputs_in(module: types.ModuleType) -> Iterator[type]:
    for cls in vars(module).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, ModelOutput)
            and {"loss", "logits"} <= set(getattr(cls, "__dataclass_fields__", ()))
        ):
            yield cls


def settled(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """Return ``out`` without recipes: skipped logits are omitted, all others are computed. A
    ``ModelOutput`` is rebuilt, because it is also a dict."""
    if isinstance(out, tuple):
        drop = skip and isinstance(out[0], Tensor) and not isinstance(out[0], Recipe)  # the first value is the loss
        kept = [materialised(x) for x in out if not (drop and isinstance(x, Recipe))]
        return tuple(kept + [x for x in (token_accuracy, predicted_tokens) if x is not None])
    if not isinstance(out, ModelOutput):
        return materialised(out)
    drop = skip and getattr(out, "loss", None) is not None
    fields = {k: materialised(v) for k, v in out.items() if not (drop and isinstance(v, Recipe))}
    # the outer output is new, the inner ones stay the objects that other code may hold
    _settle_parts(out, drop)
    return output_class(type(out))(**fields, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)


def settled_in_place(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """``settled`` for the output of a user's ``forward``. A ``ModelOutput`` stays the same
    object, because it may have more fields than its class declares."""
    if not isinstance(out, ModelOutput):
        return of_tensors(out)
    _settle(out, skip and getattr(out, "loss", None) is not None)
    for name, value in (("token_accuracy", token_accuracy), ("predicted_tokens", predicted_tokens)):
        if value is not None:
            out[name] = value
    return out


def _settle(out: ModelOutput, drop: bool) -> None:
    recipes = {k: v for k, v in out.items() if isinstance(v, Recipe)}
    for name, recipe in recipes.items():
        if drop and name == "logits":
            # a ModelOutput refuses del; None keeps the attribute and takes the key away
            OrderedDict.__delitem__(out, name)
            out.logits = None
        else:
            out[name] = recipe.value()
    _settle_parts(out, drop)


def _settle_parts(out: ModelOutput, drop: bool) -> None:
    """Settle outputs inside an output: BLIP-2's contains the output of its language model, with
    the same logits."""
    for part in out.values():
        if isinstance(part, ModelOutput):
            _settle(part, drop)
