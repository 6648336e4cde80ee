"""Run output head and loss together, without replacing the ``forward`` of a model.

During one training ``forward``, a stand-in replaces the output head. It returns ``DeferredLogits``:
a recipe for the logits. What the model does to the logits on the way to its loss (scaling,
soft-capping, casts, slices, reshapes) is recorded. ``F.cross_entropy``, wherever it is called,
receives the recipe and computes the loss from hidden states and head in chunks. Every other reader
receives the logits, which is slower and gives the same result. So the model's own ``forward`` and
its own loss function run.

Deferred are ``nn.Linear``, also sharded, and LoRA on it. Every other head computes its logits when
the model calls it (``head_weights.held`` says why), and their cross entropy is still our kernel's.

Outputs get two more fields, and hold no recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from liger_kernel.ops._core.operator import host_can_read, only_pytorch
from liger_kernel.ops.losses.chunks import Kept, is_bounded
from liger_kernel.transformers import attention, documents
from liger_kernel.transformers.head.head_weights import FP8, may_be_linear
from liger_kernel.transformers.head.loss import LOSS_OPTIONS, STATISTICS
from liger_kernel.transformers.head.recipe import (
    IGNORE,
    LogitsRecipe,
    LossOptions,
    LossRequest,
    materialised,
    of_tensors,
)
from liger_kernel.transformers.head.stand_in import (
    Call,
    StandIn,
    enter,
    leave,
    place_of_head,
    standing,
    uses_data,
    without_labels,
)


def fused(forward: Callable, keep_logits: bool = False, memory: str | int = "auto", known: bool = True) -> Callable:
    """Wrap ``forward``, a function of a model class, so that head and loss run together. The
    wrapper adds the keywords of patched models.

        forward                                     fused(forward)
        logits = self.lm_head(hidden)               a recipe: hidden, lm_head.weight
        logits.float(), (B, T, V)                   a recipe with a tail
        F.cross_entropy(logits.view(-1, V), y)      linear_cross_entropy(hidden, weight, y)
        Output(loss, logits)                        Output(loss, None)

    While the model trains with labels, logits are omitted, unless ``skip_logits`` says otherwise.
    With ``keep_logits``, logits are always computed and only the loss on them is fused. ``memory``:
    how much the logits of a chunk take (``chunk_rows_of``). ``known``
    says that ``forward`` is Transformers' own; otherwise its loss may use other labels than it is
    given, and its output may be anything.
    """
    signature = inspect.signature(forward)
    variadic = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    own_options = [n for n in LOSS_OPTIONS if n not in signature.parameters]
    positional, more = _positional(forward)
    declare_outputs(sys.modules.get(forward.__module__))

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        run = functools.partial(attention.unmasked, forward, positional) if torch.compiler.is_compiling() else forward
        # what the caller wants of the loss, which Transformers' forward knows nothing of
        options = {LOSS_OPTIONS[n]: v for n in own_options if (v := kwargs.pop(n, None)) is not None and v is not False}
        accuracy, predictions = (kwargs.pop(n, None) for n in STATISTICS)
        # The arguments by name, to look at them; those that came by position are passed on by
        # position
        takes = positional
        if more and args:  # a wrapper of other code takes *args: use the parameter names of the class
            of_class = _positional(type(self).forward)[0]
            takes = of_class if of_class[: len(positional)] == positional else positional
        at = takes[: len(args)]
        given = dict(zip(at, args)) | kwargs
        documents.warn_if_joined(self, given)
        # Without labels no loss follows, and whoever calls wants logits. That holds also with
        # skip_logits=True: trainers that keep the labels for their own loss pass it in evaluation
        learns = given.get("labels") is not None or given.get("shift_labels") is not None
        if only_pytorch() and not (options or accuracy or predictions):
            learns = False
        if not learns:
            return without_labels(run, self, args, kwargs) if standing else run(self, *args, **kwargs)
        if variadic and (shifted := given.get("shift_labels")) is not None:
            # contiguous, because loss functions call view on them
            given["shift_labels"] = shifted.contiguous()
            given["labels"] = shifted if given.get("labels") is None else given["labels"]
        passed = [given[n] for n in at] + list(args[len(at) :])
        named = {k: v for k, v in given.items() if k not in at}
        skip = not keep_logits and (self.training if skip_logits is None else skip_logits)
        place = place_of_head(self) if skip or keep_logits or options or accuracy or predictions else None
        if place is None:
            return run(self, *passed, **named)
        # What the loss will need to know, wherever the model computes it
        loss = LossRequest(LossOptions(**options, fp8=getattr(self, FP8, None)), bool(accuracy or predictions), memory)
        parent, name = place
        head = parent._modules[name]
        head = head.head if isinstance(head, StandIn) else head
        # encoder-decoders may take labels that are already shifted
        shifts = not getattr(getattr(self, "config", None), "is_encoder_decoder", False)
        # With Transformers' own loss function, the labels say now which tokens will count. The GPU
        # counts them while the model computes, so that the loss does not wait for it
        if known and not keep_logits and shifts and getattr(self, "loss_function", None) is ForCausalLMLoss:
            loss.causal, loss.num_items = True, given.get("num_items_in_batch")
            if not torch.compiler.is_compiling() and (linear := may_be_linear(head)) is not None:
                loss.kept = _kept_early(given, linear)
        # A recipe reads the weights later: none where they may change unseen until then
        at_once = None if skip else ""
        if skip and (uses_data(forward) or uses_data(getattr(self, "loss_function", None))):
            at_once = "code of the forward or loss function that names .data, by which weights change unseen"
        stand_in = enter(parent, name, Call(self, loss, at_once))
        try:
            out = run(self, *passed, **named)
        finally:
            leave(stand_in, parent, name)
        if not loss.computed:
            _warn_of_no_effect(self, loss, [*own_options, *STATISTICS] if options or loss.statistics else [])
        statistics = (loss.token_accuracy if accuracy else None, loss.predicted_tokens if predictions else None)
        out = (settled if known else settled_in_place)(out, skip, *statistics)
        for recipe in loss.recipes:  # other code holds these, and may read them after the weights have changed
            if (kept := recipe()) is not None:
                kept.value()
        return out

    skip = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    of_wrapper = vars(wrapper)
    del of_wrapper["__wrapped__"]  # accelerate follows it when it takes its own wrappers off
    of_wrapper["__signature__"] = signature.replace(
        parameters=[*(p for p in signature.parameters.values() if p not in variadic), skip, *variadic]
    )
    return wrapper


def _positional(forward: Callable) -> tuple[list[str], bool]:
    """Names of the positional parameters of ``forward`` after ``self``, and whether it takes
    more."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return names, any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _warn_of_no_effect(model: nn.Module, loss: LossRequest, keywords: list[str]) -> None:
    """Say that the model has computed no loss of a recipe, so that what was wanted of it is left
    out."""
    why = "its loss is not one cross entropy of its logits"
    if keywords:
        warnings.warn(f"{type(model).__name__}: {why}, so these have no effect: {keywords}", stacklevel=3)
    if loss.options.fp8 is not None:
        warnings.warn(f"fp8_head: the head stays in 16 bits, because {why.replace('its', 'the', 1)}", stacklevel=3)


def _kept_early(given: dict[str, Any], head: nn.Module) -> Kept | None:
    """The tokens that the causal loss will count; on a GPU they are counted while the model
    computes."""
    labels = given.get("shift_labels")
    if labels is None:
        labels = F.pad(given["labels"], (0, 1), value=IGNORE)[..., 1:]
    if labels.device != head.weight.device or not (is_bounded() or host_can_read(labels)):
        return None
    return Kept(labels, IGNORE)


# -- outputs

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
        fields = [(n, "Tensor | None", None) for n in EXTRA]
        _OUTPUTS[cls] = dataclasses.make_dataclass(name, fields, bases=(cls,), namespace=namespace)
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
    if any(getattr(self, name) is not None for name in EXTRA):
        return _Output(own, (_output, stock)), args, state, *rest
    # without our package, whoever loads the pickle gets the class of Transformers
    of_stock = {k: v for k, v in (state or {}).items() if k not in EXTRA}
    return _Output(own, (stock,)), args[: -len(EXTRA)], of_stock, *rest


def declare_outputs(module: types.ModuleType | None) -> None:
    """Make the output classes for the models of ``module`` in advance, because ``torch.compile``
    cannot trace the making of a class."""
    classes = [c for m in (modeling_outputs, module) if m for c in list(vars(m).values()) if isinstance(c, type)]
    for cls in classes:
        if issubclass(cls, ModelOutput) and {"loss", "logits"} <= set(getattr(cls, "__dataclass_fields__", ())):
            output_class(cls)


def settled(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """Return ``out`` without recipes: skipped logits are omitted, all others are computed. A
    ``ModelOutput`` is rebuilt, because it is also a dict."""
    if isinstance(out, tuple):
        drop = (
            skip and isinstance(out[0], Tensor) and not isinstance(out[0], LogitsRecipe)
        )  # the first value is the loss
        kept = [materialised(x) for x in out if not (drop and isinstance(x, LogitsRecipe))]
        return tuple(kept + [x for x in (token_accuracy, predicted_tokens) if x is not None])
    if not isinstance(out, ModelOutput):
        return materialised(out)
    drop = skip and getattr(out, "loss", None) is not None
    fields = {k: materialised(v) for k, v in out.items() if not (drop and isinstance(v, LogitsRecipe))}
    # the outer output is new, the inner ones stay the objects that other code may hold
    _settle_parts(out, drop)
    return output_class(type(out))(**fields, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)


def settled_in_place(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """``settled`` for the output of a user's ``forward``. A ``ModelOutput`` stays the same
    object, because it may have more fields than its class declares."""
    if not isinstance(out, ModelOutput):
        return of_tensors(out)
    _settle(out, skip and getattr(out, "loss", None) is not None)
    for name, value in zip(EXTRA, (token_accuracy, predicted_tokens)):
        if value is not None:
            out[name] = value
    return out


def _settle(out: ModelOutput, drop: bool) -> None:
    recipes = {k: v for k, v in out.items() if isinstance(v, LogitsRecipe)}
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
