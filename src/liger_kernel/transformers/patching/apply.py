"""The functions with which users and frameworks patch classes or models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from liger_kernel.nearest import did_you_mean
from liger_kernel.patch_options import HEADS, SWITCHES, PatchOptions
from liger_kernel.transformers import fp8
from liger_kernel.transformers.patching import once
from liger_kernel.transformers.patching.classes import is_ours, is_patched
from liger_kernel.transformers.patching.flags import OURS, flags_of, options_of, parameters_of
from liger_kernel.transformers.patching.reference import compute_references_again, references_beside, trainer_of
from liger_kernel.transformers.patching.select import class_patches, fused_head, instance_patches
from liger_kernel.transformers.patching.single import _patch_layer_norm_module as _patch_layer_norm_module
from liger_kernel.transformers.patching.single import _patch_rms_norm_module as _patch_rms_norm_module
from liger_kernel.transformers.patching.single import _patch_swiglu_module as _patch_swiglu_module
from liger_kernel.transformers.patching.values import Patches, original
from liger_kernel.transformers.recognise.families import FAMILIES, family, rows_of, swapped_slots
from liger_kernel.transformers.recognise.slots import SLOT_OF, TORCHS_OWN
from liger_kernel.utils import PEFT_AVAILABLE as PEFT_AVAILABLE


def _apply(model_type: str, given: Mapping[str, Any], model: nn.Module | None) -> Patches:
    """Apply the patches for the given flags, and the family's defaults for the other flags, to the
    classes of a type or to ``model``. A flag that is given as None is off."""
    options = options_of(model_type, given)
    in_fp8 = _float8(model_type, given)
    # Classes carry the request to the models that are made later; a live model is converted now.
    if model is None:
        return class_patches(model_type, options.parts | {"fp8": in_fp8}, options.head).apply()
    found = instance_patches(model, model_type, options.parts, options.head)
    if not found and (options.head or any(options.slots.values())) and not any(map(_runs_ours, model.modules())):
        once.warn(
            model_type,
            type(model).__name__,
            "nothing of this model was patched, because its modules are not of Transformers' classes",
        )
    # Before the patch: a refused request must leave the model as it was.
    if in_fp8:
        fp8.convert(model, in_fp8)
    return found.apply()


def _runs_ours(m: nn.Module) -> bool:
    return is_patched(m) or is_ours(getattr(type(m), "forward", None))


def apply_rest(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Patch in ``model`` what class patches omit: classes of PyTorch and of other families, and
    FP8, which is for this model alone."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type and family(model_type):
        instance_patches(model, model_type, options_of(model_type, given).parts, None).apply()
    if in_fp8 := _float8(model_type, given):
        fp8.convert(model, in_fp8)
    return model


def _float8(model_type: str, given: Mapping[str, Any]) -> fp8.Request | None:
    """What the given flags request in FP8. ``ValueError`` for what cannot be."""
    request = fp8.request_of(given)
    if request and request.head:
        row = family(model_type) if model_type else None
        why = (
            row.fused or ("" if row.heads else "it has none")
            if row
            else "liger_kernel has no kernels for this type of model"
        )
        if why or row is None or options_of(model_type, given).head != "fused":
            raise ValueError(
                f"fp8_head: the head of {model_type!r} cannot be in FP8: {why or 'fused_linear_cross_entropy is off'}"
            )
    return request


def _warn_without_effect(model_type: str, given: Mapping[str, Any], live: bool) -> None:
    """Warn once for each given flag that has no effect, or none on classes."""
    slots, row = swapped_slots(model_type), family(model_type)
    say = lambda about, text: once.warn_once((model_type, about), f"{model_type}: {text}")
    for flag in (f for f, value in given.items() if value and f in SWITCHES):
        slot = "glu" if flag in ("swiglu", "geglu") else flag
        if (row is None or row.fused) if flag in HEADS else slot in PatchOptions().slots and slot not in slots:
            say(flag, f"{flag}=True has no effect, because there is nothing to patch (see `liger models {model_type}`)")
        if live or slot not in slots:
            continue
        # What belongs to PyTorch or to another family is patched only in a live model.
        rows = rows_of([model_type], family)
        own = {module.__name__ for module, _ in rows}
        of_slot = [(m, name) for m, each in rows for name, label in each.swapped.items() if SLOT_OF[label] == slot]
        # Functions, such as ropes, belong to their module under any name: only classes are borrowed.
        owners = [vars(m)[name] for m, name in of_slot if name in vars(m)]
        borrowed = [o for o in owners if isinstance(o, type) and o.__module__ not in own]
        if of_slot and all(name in TORCHS_OWN for _, name in of_slot):
            say(
                "LayerNorm",
                "its LayerNorms are of PyTorch's class, so they are patched only in a live model: pass model=...",
            )
        elif borrowed and len(borrowed) == len(owners):
            name = borrowed[-1].__name__
            say(flag, f"{flag}=True is of another family's {name}, patched only in a live model: pass model=...")


def _apply_function(model_type: str) -> Callable[..., None]:
    flags = parameters_of(model_type)
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation="nn.Module | None" if name == "model" else "bool | None",
        )
        for name, default in flags.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=None)

    def apply(*args: Any, **kwargs: Any) -> None:
        # Flags that LinkedIn's functions lack are given by name only, and are not in the signature.
        ours = {name: kwargs.pop(name) for name in OURS if name in kwargs}
        try:
            given = signature.bind(*args, **kwargs).arguments | ours
        except TypeError as error:
            known = [*signature.parameters, *OURS]
            near = next((did_you_mean(name, known) for name in kwargs if name not in known), "")
            raise TypeError(f"{apply.__name__}(): {error}{near or '; it takes ' + ', '.join(known)}") from None
        model = given.pop("model", None)
        _check_types(f"{apply.__name__}()", given, model)
        _warn_without_effect(model_type, given, model is not None)
        _apply(model_type, given, model)

    apply.__name__ = apply.__qualname__ = "apply_liger_kernel_to_" + re.sub(r"\W", "_", model_type)
    vars(apply)["__signature__"] = signature
    # ``help(apply_liger_kernel_to_llama)`` shows what only the fields of PatchOptions say.
    switches = [name for name in (*flags, *OURS) if name != "model"]
    apply.__doc__ = (
        f"Patch the classes of Transformers' ``{model_type}`` models, or only ``model`` if one is given.\n\n"
        f"``liger models {model_type}`` lists what is replaced, and ``restore`` undoes the patch. Each flag switches "
        f"one part on or off;\n``{'``, ``'.join(OURS)}`` are given by name.\n\n"
        + "\n".join(f"- ``{name}``: {SWITCHES[name].metadata['help']}" for name in switches)
    )
    return apply


def _check_types(where: str, flags: Mapping[str, Any], model: Any) -> None:
    """Raise ``TypeError`` if the model is not a module or a flag is not a bool: a model passed
    by position, or the name of a model."""
    if model is not None and not isinstance(model, nn.Module):
        hint = (
            f"; AutoLigerKernelForCausalLM.from_pretrained({model!r}) loads and patches a model by its name"
            if isinstance(model, str)
            else ""
        )
        raise TypeError(f"{where}: model must be a model that is built (an nn.Module), got {model!r:.80}{hint}")
    for name, value in flags.items():
        if isinstance(value, nn.Module):
            raise TypeError(
                f"{where}: {name} must be True or False, got a model ({type(value).__name__}); pass the model by its "
                "name: model=..."
            )
        if isinstance(value, str) and SWITCHES[name].type == "bool":
            raise TypeError(f"{where}: {name} must be True or False, got {value!r}")


MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., None]] = {t: _apply_function(t) for t in FAMILIES}
globals().update({f.__name__: f for f in MODEL_TYPE_TO_APPLY_LIGER_FN.values()})  # apply_liger_kernel_to_llama ...


def _apply_known(model_type: str, given: Mapping[str, Any], model: nn.Module | None) -> None:
    """``_apply`` for frameworks, which pass the same flags to every model: those of other families
    are ignored, and what no family has is a warning."""
    # First, because it may raise, and nothing has changed yet.
    in_fp8 = _float8(model_type, given)
    for name in given.keys() - SWITCHES.keys():
        once.warn(name, "", f"no flag of liger_kernel, so it has no effect{did_you_mean(name, SWITCHES)}")
    if model_type and family(model_type):
        known = flags_of(model_type)
        _apply(model_type, {k: v for k, v in given.items() if k in known}, model)
        return
    near = did_you_mean(model_type, FAMILIES) if model is None else ""
    once.warn(
        model_type or type(model).__name__,
        "",
        f"liger_kernel has no kernels for this type of model, so it is the stock one{near}",
    )
    if in_fp8 and model is not None:
        fp8.convert(model, in_fp8)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the classes of a model type. Flags of other families are ignored, because frameworks
    pass the same flags to every model.

    A flag that no family has gives a warning with the nearest name.
    """
    _apply_known(model_type, kwargs, None)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch one live model, and the reference model beside it in a Trainer. Flags are those of
    ``_apply_liger_kernel``. A second call changes nothing.

    Each patched module gets a class of the same name, derived from its own, so a ``forward`` that
    its own class gets afterwards is not what it runs.
    """
    _check_types("_apply_liger_kernel_to_instance()", {}, model)
    trainer = trainer_of(model)
    if fp8.request_of(kwargs) and getattr(getattr(trainer, "args", None), "fp16", False):
        raise ValueError(
            "fp8: fp16 of the Trainer must be False, got True: FP8 is trained without a gradient scaler; pass bf16=True"
        )
    # The reference must round as the model does, or the two differ before anything is learnt.
    for each in (model, *references_beside(model, trainer)):
        _apply_known(getattr(getattr(each, "config", None), "model_type", ""), kwargs, each)
    compute_references_again(trainer, kwargs)


def stock_with_fused_head(cls: type) -> Callable:
    """Return the stock ``forward`` of a model class with head and loss fused."""
    return fused_head(original(cls, "forward"), False)


transformer_version = Version(transformers.__version__)
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("4.57.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5
