"""The functions with which users and frameworks patch classes, models or single modules."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from liger_kernel import __version__
from liger_kernel.nearest import did_you_mean
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.patch_options import HEADS, SWITCHES, PatchOptions
from liger_kernel.transformers import fp8, invariant_attention, trl_head
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.patching.invariant import check as check_invariant
from liger_kernel.transformers.patching.patches import Patch, Patches, is_ours, is_patched, original, ours, warn_once
from liger_kernel.transformers.patching.report import PatchesReport, patches_report, quantised
from liger_kernel.transformers.patching.select import class_patches, instance_patches, made, on_instance
from liger_kernel.transformers.recognise.families import (
    FAMILIES,
    OURS,
    family,
    flags_of,
    is_family,
    options_of,
    parameters_of,
    rows_of,
    swapped_slots,
    type_of,
)
from liger_kernel.transformers.recognise.slots import SLOT_OF, TORCHS_OWN
from liger_kernel.transformers.recognise.storages import check_stored, keep_packed
from liger_kernel.transformers.recognise.variant import are_numbers
from liger_kernel.utils import PEFT_AVAILABLE as PEFT_AVAILABLE

logger = logging.getLogger(__name__)
_OF_FP8 = [name for name in SWITCHES if name.startswith("fp8")]

# -- patches by flags


def _apply(model_type: str, given: Mapping[str, Any], model: nn.Module | None) -> Patches:
    """Apply the patches for the given flags, and the family's defaults for the other flags, to the
    classes of a type or to ``model``. A flag that is given as None is off."""
    options = options_of(model_type, given)
    in_fp8 = _float8(model_type, given)
    # Classes carry the request to the models that are made later; a live model is converted now.
    if model is None:
        if options.batch_invariant:
            raise ValueError("batch_invariant: it must be requested of a model that is built, got none: pass model=...")
        if options.fused_logprobs:
            trl_head.use(model_type)
        return class_patches(model_type, options.parts | {"fp8": in_fp8}, options.head).apply()
    check_stored(model)
    found = instance_patches(model, model_type, options.parts, options.head)
    runs_ours = lambda m: is_patched(m) or is_ours(getattr(type(m), "forward", None))
    nothing = not found and not any(map(runs_ours, model.modules()))
    if nothing and (options.head or any(options.slots.values())):
        why = "nothing of this model was patched, because its modules are not of Transformers' classes"
        known = is_family(model_type)
        unknown = "liger_kernel has no kernels for this type of model, so it is the stock one"
        name = type(model).__name__
        warn_once(f"{model_type}: {name}: {why}" if known else f"{model_type or name}: {unknown}")
    if options.fused_logprobs and not (nothing and not is_family(model_type)):
        trl_head.use(model)
    # Before the patch: a refused request must leave the model as it was.
    if in_fp8:
        fp8.convert(model, in_fp8)
    if not_kept := keep_packed(model):
        warn_once(not_kept)
    done = found.apply()
    if options.batch_invariant:
        _hold(model, done)
    return done


def _hold(model: nn.Module, done: Patches) -> None:
    """Let a patched model compute in the order of its tokens alone; undo ``done`` if it cannot."""
    try:
        check_invariant(model, quantised)
        invariant_attention.hold(model)
    except ValueError:
        done.restore()
        raise


def apply_rest(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Patch in ``model`` what class patches omit: classes of PyTorch and of other families, and
    what is for this model alone."""
    check_stored(model)
    if why := keep_packed(model):
        warn_once(why)
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type and family(model_type):
        instance_patches(model, model_type, options_of(model_type, given).parts, None).apply()
    if in_fp8 := _float8(model_type, given):
        fp8.convert(model, in_fp8)
    if given.get("batch_invariant"):
        _hold(model, Patches())
    return model


def _float8(model_type: str, given: Mapping[str, Any]) -> fp8.Request | None:
    """What the given flags request in FP8. ``ValueError`` for what cannot be."""
    request = fp8.request_of(given) if any(given.get(name) for name in _OF_FP8) else None
    if request and request.head:
        row = family(model_type) if model_type else None
        if row is None:
            why = "liger_kernel has no kernels for this type of model"
        else:
            why = row.fused or ("" if row.heads else "it has none")
            if not why and options_of(model_type, given).head != "fused":
                why = "fused_linear_cross_entropy is off"
        if why:
            raise ValueError(f"fp8_head: the head of {model_type!r} cannot be in FP8: {why}")
    return request


def _warn_without_effect(model_type: str, given: Mapping[str, Any], live: bool) -> None:
    """Warn once for each given flag that has no effect, or none on classes."""
    slots, row = swapped_slots(model_type), family(model_type)
    only_live = "patched only in a live model: pass model=..."
    for flag in (f for f, value in given.items() if value and f in SWITCHES):
        slot = "glu" if flag in ("swiglu", "geglu") else flag
        if (row is None or row.fused) if flag in HEADS else slot in PatchOptions().slots and slot not in slots:
            why = f"because there is nothing to patch (see `liger models {model_type}`)"
            warn_once(f"{model_type}: {flag}=True has no effect, {why}")
        if live or slot not in slots:
            continue
        # What belongs to PyTorch or to another family is patched only in a live model.
        rows = rows_of([model_type])
        own = {module.__name__ for module, _ in rows}
        of_slot = [(m, name) for m, each in rows for name, label in each.swapped.items() if SLOT_OF[label] == slot]
        # Functions, such as ropes, belong to their module under any name: only classes are
        # borrowed.
        owners = [vars(m)[name] for m, name in of_slot if name in vars(m)]
        borrowed = [o for o in owners if isinstance(o, type) and o.__module__ not in own]
        if of_slot and all(name in TORCHS_OWN for _, name in of_slot):
            warn_once(f"{model_type}: its LayerNorms are of PyTorch's class, so they are {only_live}")
        elif borrowed and len(borrowed) == len(owners):
            warn_once(f"{model_type}: {flag}=True is of another family's {borrowed[-1].__name__}, {only_live}")


def _apply_function(model_type: str) -> Callable[..., None]:
    flags = parameters_of(model_type)
    annotation = lambda name: "nn.Module | None" if name == "model" else "bool | None"
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, either, default=v, annotation=annotation(n)) for n, v in flags.items()]
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
        loads = f"; AutoLigerKernelForCausalLM.from_pretrained({model!r}) loads and patches a model by its name"
        hint = loads if isinstance(model, str) else ""
        raise TypeError(f"{where}: model must be a model that is built (an nn.Module), got {model!r:.80}{hint}")
    for name, value in flags.items():
        if isinstance(value, nn.Module):
            got = f"a model ({type(value).__name__}); pass the model by its name: model=..."
            raise TypeError(f"{where}: {name} must be True or False, got {got}")
        if isinstance(value, str) and SWITCHES[name].type == "bool":
            raise TypeError(f"{where}: {name} must be True or False, got {value!r}")


MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., None]] = {t: _apply_function(t) for t in FAMILIES}
globals().update({f.__name__: f for f in MODEL_TYPE_TO_APPLY_LIGER_FN.values()})  # apply_liger_kernel_to_llama ...


def _apply_known(model_type: str, given: Mapping[str, Any], model: nn.Module | None) -> None:
    """``_apply`` for frameworks, which pass the same flags to every model: those of other families
    are ignored, and what no family has is a warning."""
    # First, because it may raise, and nothing has changed yet.
    _float8(model_type, given)
    for name in given.keys() - SWITCHES.keys():
        warn_once(f"{name}: no flag of liger_kernel, so it has no effect{did_you_mean(name, SWITCHES)}")
    if model is None and not is_family(model_type):
        why = "liger_kernel has no kernels for this type of model, so it is the stock one"
        warn_once(f"{model_type}: {why}{did_you_mean(model_type, FAMILIES)}")
        return
    known = flags_of(model_type)
    _apply(model_type, {k: v for k, v in given.items() if k in known}, model)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the classes of a model type. Flags of other families are ignored, because frameworks
    pass the same flags to every model.

    A flag that no family has gives a warning with the nearest name.
    """
    _apply_known(model_type, kwargs, None)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch one live model, and the reference model beside it in a Trainer. Flags are those of
    ``_apply_liger_kernel``. A second call changes nothing. What was patched is logged, in one line
    for each model, at level INFO.

    Each patched module gets a class of the same name, derived from its own, so a ``forward`` that
    its own class gets afterwards is not what it runs.
    """
    _check_types("_apply_liger_kernel_to_instance()", {}, model)
    trainer = trainer_of(model)
    if fp8.request_of(kwargs) and getattr(getattr(trainer, "args", None), "fp16", False):
        raise ValueError(
            "fp8: fp16 of the Trainer must be False, got True: FP8 is trained without a gradient scaler; pass bf16=True"
        )
    models, reference = [model], getattr(trainer, "ref_model", None)
    # The reference must round as the model does, or the two differ before the first step.
    if isinstance(reference, nn.Module) and reference is not model:
        models.append(trl_head.layers(reference)[-1])  # DeepSpeed's engine and torch.compile are around it
    for each in models:
        _apply_known(type_of(each), kwargs, each)
        _log(each, kwargs)
    compute_references_again(trainer, kwargs)


# models whose report was logged, as a Trainer may patch its model again
_logged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _log(model: nn.Module, given: Mapping[str, Any]) -> None:
    # a report selects patches again, which is not free
    if logger.isEnabledFor(logging.INFO) and model not in _logged:
        _logged.add(model)
        logger.info("%s", patches_report(model, given).line)


def apply(model: nn.Module, **flags: Any) -> PatchesReport:
    """Patch any model, and return what was patched and why the rest was not.

    A model of Transformers gets what ``apply_liger_kernel_to_<its type>`` gives it. In any other
    model, of remote code or your own, norms, gated MLPs and experts are replaced that compute what
    a kernel of ours computes, by comparison on small inputs. ``restore(model)`` undoes it.

    flags: the fields of ``PatchOptions``, such as ``rope=False``; those that the type of model lacks
    have no effect.
    """
    for name in flags.keys() - SWITCHES.keys():
        near = did_you_mean(name, SWITCHES) or f"; it takes {', '.join(SWITCHES)}"
        raise TypeError(f"apply(): got an unexpected keyword argument {name!r}{near}")
    _check_types("apply()", flags, model)
    model_type = type_of(model)
    if is_family(model_type):
        _warn_without_effect(model_type, flags, True)
    _apply_known(model_type, flags, model)
    return patches_report(model, flags)


def stock_with_fused_head(cls: type) -> Callable:
    """Return the stock ``forward`` of a model class with head and loss fused."""
    return made(fused, original(cls, "forward"), False)


transformer_version = Version(transformers.__version__)
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("4.57.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5

# -- the Trainer that is patching a model

# Transformers' Trainer patches one model: the one that it trains. A reference policy beside it
# (``ref_model`` in TRL's trainers for DPO, KTO, GRPO, ...) would keep stock norms, which add in
# another order on a GPU. The two would then differ by rounding before the first step, and DPO
# would not begin at log 2. The Trainer does not pass the reference on, nor its arguments, so it is
# looked up in the caller.
CALLS = 6  # frames between a Trainer's method and this function: transformers' integration, and wrappers of frameworks


def trainer_of(model: nn.Module) -> Any:
    """Return the Trainer that is patching its ``model``; None for every other caller."""
    cls = getattr(sys.modules.get("transformers.trainer"), "Trainer", ())
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(1)), CALLS if cls else 0):
        # reading the locals of another function keeps what it deletes, such as its model, until it returns
        trainer = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(trainer, cls):
            return trainer if isinstance(trainer.model, nn.Module) and model in trainer.model.modules() else None
    return None


def compute_references_again(trainer: Any, flags: Mapping[str, Any]) -> None:
    """Replace reference log-probabilities that TRL computed in the constructor, with stock models
    (``precompute_ref_log_probs``), by those of the patched models, once.

    TRL caches them on disk by a hash of the weights; to this hash we add what patched them.
    Raises ``ValueError`` if the reference is gone.
    """
    args = getattr(trainer, "args", None)
    data = getattr(trainer, "train_dataset", None)
    computed = [c for c in getattr(data, "column_names", None) or () if re.fullmatch("ref_.*logps", c)]
    if not (computed and getattr(args, "precompute_ref_log_probs", False)):
        return
    name, key, by_us = type(trainer).__name__, getattr(trainer, "_precompute_model_hash", None), " by liger_kernel "
    if key and by_us in key:
        return
    adapted = hasattr(trainer.model, "get_base_model")  # the reference is the model without its adapters
    gone = getattr(trainer, "ref_model", None) is None and not adapted and getattr(trainer, "is_fsdp_enabled", False)
    before = "the reference was computed before the Trainer patched the model"
    if gone or key is None or not hasattr(trainer, "_precompute_ref_logps"):
        why = f"{before}, and it is gone, so it cannot be computed again{'; or pass ref_model=...' if gone else ''}"
        raise ValueError(f"{name}: precompute_ref_log_probs must be False with use_liger_kernel=True, got True: {why}")
    warn_once(f"{name}: precompute_ref_log_probs: {before}, so it is computed again, and cached")
    trainer._precompute_model_hash = f"{key}{by_us}{__version__} {sorted(flags.items())}"

    def again(dataset: Any, name: str, batch: int) -> Any:
        stock = dataset.remove_columns(computed)
        return trainer._precompute_ref_logps(stock, name, args.precompute_ref_batch_size or batch)

    trainer.train_dataset, rest = again(data, "train", args.per_device_train_batch_size), trainer.eval_dataset
    size = args.per_device_eval_batch_size
    if isinstance(rest, dict):
        trainer.eval_dataset = {name: again(dataset, name, size) for name, dataset in rest.items()}
    elif rest is not None:
        trainer.eval_dataset = again(rest, "eval", size)


# -- single modules, for frameworks that walk through a model themselves


def _patch_forward(module: nn.Module, new: Callable, what: str) -> None:
    """Bind ``new`` as the forward of ``module``; for PEFT's wrapper of a module that is trained
    and saved, as the forward of both modules in it."""
    modules: list[Any] = [module]
    if hasattr(module, "modules_to_save"):  # PEFT's
        modules = [module.original_module, *module.modules_to_save.values()]  # type: ignore[operator]
    Patches(p for m in modules for p in on_instance(m, Patch(type(m), "forward", new, (what,)))).apply()


# Cached, so that norms of one model share a class, and a second call finds its patch in place.
@functools.cache
def _norm_forward(default_eps: float, kind: str, **options: Any) -> Callable:
    def forward(self, hidden_states):
        names = [name for name in ("variance_epsilon", "eps") if hasattr(self, name)]
        eps = getattr(self, names[0]) if names else default_eps
        # A tensor as eps would make the host wait for the GPU: the stock forward reads it there.
        if not are_numbers(eps):
            return original(type(self), "forward")(self, hidden_states)
        if kind == "layer_norm":
            return layer_norm(hidden_states, self.weight, self.bias, eps=eps)
        return rms_norm(hidden_states, self.weight, eps=eps, **options)

    return ours(forward)


def _patch_rms_norm_module(
    module: nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Make our RMSNorm the ``forward`` of one norm. ``eps`` is used if the norm has none.
    ``in_place`` and ``row_mode`` have no effect."""
    _patch_forward(module, _norm_forward(eps, "rms_norm", offset=offset, casting=casting_mode), "rms_norm")


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    """Make our LayerNorm the ``forward`` of one norm. ``eps`` is used if the norm has none."""
    _patch_forward(module, _norm_forward(eps, "layer_norm"), "layer_norm")


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    """Make the ``forward`` of the class ``liger_module`` the ``forward`` of one gated MLP with
    the same projections."""
    _patch_forward(module, ours(liger_module.forward), "glu")
