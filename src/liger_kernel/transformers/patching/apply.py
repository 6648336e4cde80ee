"""The functions with which users and frameworks patch classes or models."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from liger_kernel.nearest import did_you_mean
from liger_kernel.transformers import fp8
from liger_kernel.transformers.patching import once
from liger_kernel.transformers.patching.bound import KEY, is_ours
from liger_kernel.transformers.patching.flags import (
    HEAD_FLAGS,
    UNPUBLISHED,
    every_flag,
    flags_of,
    parameters_of,
    parts_of,
)
from liger_kernel.transformers.patching.reference import compute_references_again, references_beside, trainer_of
from liger_kernel.transformers.patching.select import class_patches, fused_head, instance_patches
from liger_kernel.transformers.patching.single import _patch_layer_norm_module as _patch_layer_norm_module
from liger_kernel.transformers.patching.single import _patch_rms_norm_module as _patch_rms_norm_module
from liger_kernel.transformers.patching.single import _patch_swiglu_module as _patch_swiglu_module
from liger_kernel.transformers.patching.values import Patches, original
from liger_kernel.transformers.recognise.families import FAMILIES, family, rows_of, swapped_slots
from liger_kernel.transformers.recognise.slots import SLOT_OF, TORCHS_OWN
from liger_kernel.utils import PEFT_AVAILABLE as PEFT_AVAILABLE


def _apply_rest(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Patch in ``model`` what class patches omit: classes of PyTorch and of other families, and
    FP8, which is for this model alone."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type and family(model_type):
        instance_patches(model, model_type, _parts(flags_of(model_type) | dict(given), given), None).apply()
    if wish := _wish(model_type, given):
        fp8.convert(model, wish)
    return model


def _all_flags(model_type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags, and the defaults for the other flags."""
    return (
        flags_of(model_type)
        | {f: False for f, other in zip(HEAD_FLAGS, reversed(HEAD_FLAGS)) if given.get(other)}
        | dict(given)
    )


def _wish(model_type: str, given: Mapping[str, Any]) -> fp8.Wish | None:
    """What the given flags ask for in FP8. ``ValueError`` for what cannot be."""
    wish = fp8.asked(given)
    if wish and wish.head:
        row = family(model_type) if model_type else None
        why = (
            "liger_kernel has no kernels for this type of model"
            if row is None
            else row.fused or ("" if row.heads else "it has none")
        )
        if why or not _all_flags(model_type, given).get("fused_linear_cross_entropy"):
            raise ValueError(
                f"fp8_head: the head of {model_type!r} cannot be in FP8: {why or 'fused_linear_cross_entropy is off'}"
            )
    return wish


def _parts(flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``parts_of`` the flags, some of which were given. If all published flags are off, nothing
    in a model changes, unless it is trained in FP8."""
    parts = parts_of(flags)
    others = any(flags.get(f) for f in (*HEAD_FLAGS, "fp8")) or any(
        parts[slot] for slot in parts if slot not in UNPUBLISHED
    )
    return parts | {"projections": parts["projections"] and (others or "projections" in given)}


def _apply(model_type: str, given: Mapping[str, Any], model: nn.Module | None) -> Patches:
    """Apply the patches for the given flags, and the defaults for the other flags. A flag that
    is given as None is off."""
    if all(given.get(f) for f in HEAD_FLAGS):
        raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True")
    flags = _all_flags(model_type, given)
    head = "fused" if flags.get("fused_linear_cross_entropy") else "logits" if flags.get("cross_entropy") else None
    parts, wish = _parts(flags, given), _wish(model_type, given)
    wanted = bool(head) or any(parts[slot] for slot in parts if slot not in UNPUBLISHED)
    if model is None:
        return class_patches(model_type, parts | {"fp8": wish}, head).apply()
    found = instance_patches(model, model_type, parts, head)
    if not found and wanted and not any(map(_is_patched, model.modules())):
        once.warn(
            model_type,
            type(model).__name__,
            "nothing of this model was patched, because its modules are not of Transformers' classes",
        )
    if wish:
        fp8.convert(model, wish)
    return found.apply()


def _is_patched(module: nn.Module) -> bool:
    return KEY in module.__dict__ or is_ours(getattr(type(module), "forward", None))


def _say_what_is_missing(model_type: str, given: Mapping[str, bool | None], live: bool) -> None:
    """Warn once for each given flag that has no effect."""
    served, row = swapped_slots(model_type), family(model_type)
    asked = {"rope": "rope", "rms_norm": "rms_norm", "layer_norm": "layer_norm", "swiglu": "glu", "geglu": "glu"}
    asked |= {"relu_squared": "relu_squared", "attention": "attention"}
    silent = [flag for flag, slot in asked.items() if given.get(flag) and slot not in served]
    silent += [flag for flag in HEAD_FLAGS if given.get(flag) and (row is None or row.fused)]
    for flag in silent:
        if (model_type, flag) not in once.WARNED:
            once.WARNED.add((model_type, flag))
            warnings.warn(
                f"{model_type}: {flag}=True has no effect, because there is nothing to patch (see `liger models "
                f"{model_type}`)",
                stacklevel=4,
            )
    if given.get("layer_norm") and not live and (model_type, "LayerNorm") not in once.WARNED and "layer_norm" in served:
        labels = {
            label
            for _, row in rows_of([model_type], family)
            for label in row.swapped.values()
            if SLOT_OF[label] == "layer_norm"
        }
        if labels <= {label for _, label in TORCHS_OWN.values()}:
            once.WARNED.add((model_type, "LayerNorm"))
            warnings.warn(
                f"{model_type}: its LayerNorms are of PyTorch's class, so they are patched only in a live model: "
                "pass model=...",
                stacklevel=4,
            )
    wanted = {
        slot: flag
        for flag, slot in asked.items()
        if given.get(flag) and slot in served and (model_type, flag) not in once.WARNED
    }
    if wanted and not live:
        rows = rows_of([model_type], family)
        own = {module.__name__ for module, _ in rows}
        owners = [
            (wanted.get(SLOT_OF[label]), vars(module).get(name))
            for module, row in rows
            for name, label in row.swapped.items()
        ]
        foreign = lambda owner: isinstance(owner, type) and owner.__module__ not in own
        borrowed = {flag: owner for flag, owner in owners if flag and foreign(owner)}
        for flag in borrowed.keys() - {flag for flag, owner in owners if owner is not None and not foreign(owner)}:
            once.WARNED.add((model_type, flag))
            warnings.warn(
                f"{model_type}: {flag}=True is of another family's {borrowed[flag].__name__}, patched only in a live "
                "model: pass model=...",
                stacklevel=4,
            )


def _apply_function(model_type: str) -> Callable[..., None]:
    flags = parameters_of(model_type)
    annotation = lambda f: "nn.Module | None" if f == "model" else "bool | None"
    parameters = [
        inspect.Parameter(f, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v, annotation=annotation(f))
        for f, v in flags.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=None)

    def apply(*args: Any, **kwargs: Any) -> None:
        level = {name: kwargs.pop(name) for name in UNPUBLISHED if name in kwargs}
        try:
            given = signature.bind(*args, **kwargs).arguments | level
        except TypeError as error:
            takes = [*signature.parameters, *UNPUBLISHED]
            all_of_them = f"; it takes {', '.join(takes)}"
            near = next((did_you_mean(name, takes) for name in kwargs if name not in takes), "")
            raise TypeError(f"{apply.__name__}(): {error}{near or all_of_them}") from None
        model = given.pop("model", None)
        _check_values(f"{apply.__name__}()", given, model)
        _say_what_is_missing(model_type, given, model is not None)
        _apply(model_type, given, model)

    apply.__name__ = apply.__qualname__ = "apply_liger_kernel_to_" + re.sub(r"\W", "_", model_type)
    vars(apply)["__signature__"] = signature
    apply.__doc__ = (
        f"Patch the classes of Transformers' ``{model_type}`` models, or only ``model`` if one is given.\n\n"
        f"``liger models {model_type}`` lists what is replaced. "
        f"{'``attention`` is attention with sinks. ' if 'attention' in flags else ''}"
        'Each flag switches one part on or off. ``rematerialise`` (True or "cheap", the default; "mlp"; False or '
        '"off") chooses what is recomputed in the\n'
        "backward pass: see ``liger_kernel.memory``. ``projections`` (True, the default) runs linear layers with "
        "PEFT's adapters as one node; gated MLPs\n"
        "follow their own flag: see ``liger_kernel.ops.projections``. ``fp8`` (False, the default, or the name of a "
        "recipe) trains linear layers in FP8, but\n"
        "those that ``fp8_filter`` leaves, and with ``fp8_head`` also the head and its loss: see ``train_in_fp8``. "
        "For long rows: ``activation_offloading``\n"
        "(False, the default, or True) keeps large activations in the CPU's memory until the backward pass; see "
        "``liger_kernel.offloading``. With\n"
        "``keep_attention`` (False, the default) checkpointed layers keep the outputs of attention instead of "
        "computing them twice. ``tiled_mlp`` (False, the\n"
        "default; True; or a number) runs MLPs in so many tiles of the tokens; see "
        "``liger_kernel.ops.projections.tiled_mlp``. ``restore`` undoes the patch."
    )
    return apply


def _check_values(where: str, flags: Mapping[str, Any], model: Any) -> None:
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
        if isinstance(value, str) and name not in ("rematerialise", "fp8", "fp8_filter", "tiled_mlp"):
            raise TypeError(f"{where}: {name} must be True or False, got {value!r}")


MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., None]] = {t: _apply_function(t) for t in FAMILIES}
globals().update({f.__name__: f for f in MODEL_TYPE_TO_APPLY_LIGER_FN.values()})  # apply_liger_kernel_to_llama ...


def _lenient(model_type: str, kwargs: Mapping[str, Any], model: nn.Module | None) -> None:
    wish = _wish(model_type, kwargs)
    known = flags_of(model_type) if model_type and family(model_type) else None
    for name in kwargs.keys() - (known or every_flag()):
        if name not in every_flag():
            once.warn(name, "", f"no flag of liger_kernel, so it has no effect{did_you_mean(name, every_flag())}")
    if known is None:
        near = did_you_mean(model_type, FAMILIES) if model is None else ""
        once.warn(
            model_type or type(model).__name__,
            "",
            f"liger_kernel has no kernels for this type of model, so it is the stock one{near}",
        )
        if wish and model is not None:
            fp8.convert(model, wish)
    else:
        _apply(model_type, {k: v for k, v in kwargs.items() if k in known}, model)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the classes of a model type. Flags of other families are ignored, because frameworks
    pass the same flags to every model.

    A flag that no family has gives a warning with the nearest name.
    """
    _lenient(model_type, kwargs, None)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch one live model, and the reference model beside it in a Trainer. Flags are those of
    ``_apply_liger_kernel``. A second call changes nothing."""
    _check_values("_apply_liger_kernel_to_instance()", {}, model)
    trainer = trainer_of(model)
    if fp8.asked(kwargs) and getattr(getattr(trainer, "args", None), "fp16", False):
        raise ValueError(
            "fp8: fp16 of the Trainer must be False, got True: FP8 is trained without a gradient scaler; pass bf16=True"
        )
    for each in (model, *references_beside(model, trainer)):
        _lenient(getattr(getattr(each, "config", None), "model_type", ""), kwargs, each)
    compute_references_again(trainer, kwargs)


def stock_with_fused_head(cls: type) -> Callable:
    """Return the stock ``forward`` of a model class with head and loss fused."""
    return fused_head(original(cls, "forward"), False)


transformer_version = Version(transformers.__version__)
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("4.57.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5
