"""Report which parts of a live model are patched and why the others are not: its modules, and
its layers with adapters, quantised weights or FP8."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear, is_whole
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.float8_training import Float8Trained
from liger_kernel.ops.projections.weights import Elsewhere
from liger_kernel.parallel import unsharded_class
from liger_kernel.patch_options import PatchOptions
from liger_kernel.transformers import fp8
from liger_kernel.transformers.head.linear import FP8, left_out
from liger_kernel.transformers.patching.classes import is_ours, methods_of
from liger_kernel.transformers.patching.flags import flags_of, options_of
from liger_kernel.transformers.patching.select import instance_patches
from liger_kernel.transformers.recognise.adapted_experts import adapted_experts, experts_of, input_of, is_wrapper
from liger_kernel.transformers.recognise.experts import DOWN, GATE_UP, subclassed
from liger_kernel.transformers.recognise.families import family, rows_of
from liger_kernel.transformers.recognise.family import Family
from liger_kernel.transformers.recognise.plain import plain
from liger_kernel.transformers.recognise.projections import Left, gathered_in_fp8, projection
from liger_kernel.transformers.recognise.slots import SLOT_OF
from liger_kernel.transformers.recognise.variant import LINEARS


@dataclass(frozen=True)
class Layer:
    """A linear layer, or the experts of a mixture: its name in the model, whether the engine
    runs it, and a reason or remark."""

    name: str
    runs: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {'runs' if self.runs else 'stock'}{f' ({self.reason})' * bool(self.reason)}"


@dataclass(frozen=True)
class ProjectionsReport:
    """The ``layers`` of a model. Its text has one line for each kind of answer, the most
    frequent first."""

    layers: tuple[Layer, ...]

    @property
    def stock(self) -> tuple[Layer, ...]:
        """The layers that the engine does not run."""
        return tuple(layer for layer in self.layers if not layer.runs)

    def __str__(self) -> str:
        if not self.layers:
            return "no linear layer has an adapter, a quantised weight or FP8"
        kinds = Counter((layer.runs, layer.reason) for layer in self.layers)
        lines = [
            f"the engine runs {len(self.layers) - len(self.stock)} of {len(self.layers)} layers with adapters, "
            "quantised weights or FP8"
        ]
        for (runs, reason), count in kinds.most_common():
            names = [layer.name for layer in self.layers if (layer.runs, layer.reason) == (runs, reason)]
            example = names[0] if count == 1 else f"{names[0]} and {count - 1} more"
            lines.append(f"  {count} {'run' if runs else 'stock'}{f': {reason}' * bool(reason)} ({example})")
        return "\n".join(lines)


@dataclass(frozen=True)
class PatchesReport:
    """``patched``: the parts that run on our kernels; ``stock``: the other parts with the
    reasons. Its text has one line for each part."""

    patched: tuple[str, ...]
    stock: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"patched: {', '.join(self.patched) or 'nothing'}"]
        return "\n".join(lines + [f"stock: {'; '.join(self.stock)}"] * bool(self.stock))


def patches_report(model: nn.Module, given: Mapping[str, Any] | None = None) -> PatchesReport:
    """Report which parts of ``model`` are patched now, and why the others are not. ``given``:
    the flags with which it was patched, except defaults."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    row = family(model_type) if model_type else None
    if row is None:
        return PatchesReport(
            (),
            (f"liger_kernel has no kernels for model type {model_type!r}, so the model is as Hugging Face ships it",),
        )
    given = {name: value for name, value in (given or {}).items() if name in flags_of(model_type)}
    options = options_of(model_type, given)
    # What could be patched: everything, by the values that were given for what is not a slot.
    everything = PatchOptions().parts | {n: v for n, v in options.parts.items() if n not in options.slots}
    found = instance_patches(model, model_type, everything | {"projections": True}, options.head or "fused")
    # (class, label) -> for each module of the model whether it is patched so
    kinds: dict[tuple[str, str], list[bool]] = {}
    # a forward with two patches may have one of them, which is then another function
    in_place = {
        (id(p.owner), label)
        for p in instance_patches(model, model_type, options.parts, options.head)
        if p.applied
        for label in p.labels
    }
    for p in found:
        for label in p.labels:
            kinds.setdefault((type(p.owner).__name__, label), []).append(p.applied or (id(p.owner), label) in in_place)
    said = lambda count, kind: f"{count} x {kind[0]} ({_short(kind[1])})"
    patched = tuple(said(sum(applied), kind) for kind, applied in kinds.items() if any(applied))
    left = {kind: applied.count(False) for kind, applied in kinds.items() if not all(applied)}
    stock = [f"{said(count, kind)}: {_why(kind[1], row, options, given)}" for kind, count in left.items()]
    stock += [
        f"{name}: {reason}" for _, part in rows_of([model_type], family) for name, reason in part.left_alone.items()
    ]
    if row.heads and row.fused:
        stock.append(f"head and loss: {row.fused}")
    return PatchesReport(patched, tuple(stock))


def _short(label: str) -> str:
    """A variant's label without the fields that say which form it is."""
    return label.partition("(")[0] if label in SLOT_OF else label


def _why(label: str, row: Family, options: PatchOptions, given: Mapping[str, Any]) -> str:
    slot = SLOT_OF.get(label)
    flag = row.glu if slot == "glu" else slot or ("fused_linear_cross_entropy" if label.endswith("head") else None)
    if flag is None or getattr(options, flag):
        return "replaced by other code after the patch" if flag else "its parts are off"
    return f"{flag} is off, {'as asked' if flag in given else 'the default of this family'}"


_QUANTISED = (
    "bitsandbytes.",
    "torchao.",
    "hqq.",
    "gptqmodel.",
    "auto_gptq.",
    "awq.",
)  # packages whose linear layers hold quantised weights


def projections_report(model: nn.Module) -> ProjectionsReport:
    """Report for every linear layer, and the experts, of ``model`` with an adapter or a quantised
    weight whether the engine runs them now, or why not.

    If some layers are trained in FP8, the report has all linear layers, and why the others stay in
    16 or 32 bits.
    The report describes the present state of adapters (active, merged, disabled); the engine looks
    at each layer again at each call.
    """
    return ProjectionsReport(tuple(_layers(model)))


def _layers(model: nn.Module) -> Iterator[Layer]:
    tuner = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    modules = dict(model.named_modules())
    below = [f"{name}." for name, m in modules.items() if isinstance(m, tuner)]
    owners = [
        m for m in modules.values() if callable(getattr(m, "get_output_embeddings", None)) and not isinstance(m, tuner)
    ]
    heads = {id(_quietly(m.get_output_embeddings)): m for m in owners}
    recipe = next((m.recipe for m in modules.values() if unsharded_class(m) is LigerFloat8TrainingLinear), None)
    linear = (
        {name: fp8.reason(name, m, is_head, fp8.Request(recipe)) for name, m, is_head in fp8.linear_layers(model)}
        if recipe
        else {}
    )
    for name, m in modules.items():
        if name.startswith(tuple(below)):  # parts of an adapted layer are that layer
            continue
        parent, _, attribute = name.rpartition(".")
        if isinstance(m, tuner) or _quantised(m):
            reason = _reason(m, modules.get(parent), attribute, heads.get(id(m)), isinstance(m, tuner))
        elif unsharded_class(m) is LigerFloat8TrainingLinear:
            reason = _trained(
                m,
                any(
                    isinstance(each, FSDPModule)
                    for above, each in modules.items()
                    if f"{name}.".startswith(f"{above}.") or not above
                ),
            )
        elif name in linear:
            in_the_loss = FP8 in getattr(heads.get(id(m)), "__dict__", ()) and is_ours(_forward_of(heads[id(m)]))
            reason = fp8.HEAD if in_the_loss else Left(linear[name] or "left by the filter of fp8")
        elif why := next(
            (why for p in (GATE_UP, DOWN) if not is_sharded(w := m._parameters.get(p)) and (why := subclassed(w))), None
        ):
            reason = why
        else:
            continue
        yield Layer(name, not isinstance(reason, Left), str(reason))


def _trained(m: Any, by_fsdp: bool) -> str | Left:
    """How a layer that is trained in FP8 runs; ``by_fsdp``: FSDP2 gathers its weight."""
    weight = m._parameters.get("weight")  # FSDP1 has it elsewhere
    if (
        weight is None
        or is_whole(weight)
        or (by_fsdp and is_sharded(weight) and sum(p.is_shard() for p in weight.placements) == 1)
    ):
        return f"in FP8, {m.recipe}"
    return Left("its weight is quantised, or sharded while it is multiplied")


def _quietly(get: Callable) -> Any:
    try:
        return get()
    except (AttributeError, NotImplementedError):  # a model without a head
        return None


def _quantised(m: nn.Module) -> bool:
    weight = m._parameters.get("weight")
    own = type(m).__module__.startswith(_QUANTISED) and hasattr(m, "in_features")
    return own or (
        isinstance(m, nn.Linear)
        and weight is not None
        and not plain(weight)
        and type(weight).__module__.startswith(_QUANTISED)
    )


def _in_fp8_by_torchao(m: nn.Module) -> bool:
    return type(m).__module__.startswith("torchao.float8.")


def _weight_of(base: Any) -> torch.Tensor | None:
    weight = getattr(base, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _dtype_of(base: Any) -> torch.dtype:
    """The dtype in which a base layer multiplies an input in the layer's own dtype."""
    weight = _weight_of(base)
    return getattr(base, "compute_dtype", None) or (
        weight.dtype if weight is not None and weight.is_floating_point() else torch.float32
    )


def _reason(m: Any, parent: Any, attribute: str, model: Any, adapted: bool) -> str | Left:
    """A remark on a layer that the engine runs, or the reason why it does not run it."""
    base = m.base_layer if adapted else m
    if isinstance(base, nn.Embedding):
        return Left("an embedding")
    # A head runs in the loss, so the forward of the whole model decides, not that of its parent.
    if model is not None:
        if not is_ours(_forward_of(model)):
            return Left(f"the head: {type(model).__name__} is not patched")
        weight, dtype = _weight_of(base), _dtype_of(base)
        alone = left_out(
            projection(m, dtype), torch.empty(0, dtype=dtype, device=None if weight is None else weight.device)
        )
        return "the head, as part of the loss" if alone is None else Left(f"the head: {alone}")
    if not adapted and not _in_fp8_by_torchao(m):
        return Left("no adapter: its own module runs")
    function = _forward_of(parent)
    names, why = (LINEARS.get(function) if callable(function) else None) or (frozenset(), lambda parent: None)
    if is_wrapper(m):
        return _reason_of_experts(m, parent, attribute in names)
    if attribute not in names:
        return Left(f"{type(parent).__name__} is not patched, or its forward does not call it as self.{attribute}(x)")
    if reason := why(parent):
        return Left(f"{type(parent).__name__} has {reason}")
    weight, dtype = _weight_of(base), _dtype_of(base)
    if weight is not None and not use_kernels(torch.empty(0, dtype=dtype, device=weight.device), fusible=True):
        return Left(f"there are no kernels for {dtype} on {weight.device.type}")
    if gathered_in_fp8(base):
        return "in FP8, tensorwise, gathered in FP8"
    found = projection(m, dtype)
    if isinstance(found, Left):
        return found
    if not found.gains:
        return Left("adapters are disabled, merged or not active: its base runs")
    if any(weight is not None and a.a.device != weight.device for a in found.adapters):
        return Left("an adapter on another device")
    if isinstance(found.weight, Float8Trained):
        return f"in FP8, {found.weight.recipe.name}"
    return (
        f"beside its base, a {type(base).__name__}, which runs by itself" if isinstance(found.weight, Elsewhere) else ""
    )


def _reason_of_experts(m: Any, parent: Any, called: bool) -> str | Left:
    """As ``_reason``, for PEFT's wrapper around experts. ``called``: whether the forward of the
    parent asks the engine to call it."""
    inside = experts_of(m)
    if not hasattr(type(inside), GATE_UP) and GATE_UP not in inside._parameters:
        return Left(f"an adapter of the parameter {m.parameter_name} of a {type(inside).__name__}")
    if not called:
        return Left(
            f"{type(parent).__name__} is not patched, or its forward does not call them as self.experts(x, index, "
            "weights)"
        )
    x = input_of(inside)
    if not use_kernels(x):
        return Left(f"there are no kernels for {x.dtype} on {x.device.type}")
    found = adapted_experts(m, x)
    return found if isinstance(found, Left) else ""


def _forward_of(m: Any) -> Any:
    """The function that a call of ``m`` runs."""
    there = m.__dict__.get("_old_forward", m.__dict__.get("forward")) if isinstance(m, nn.Module) else None
    if there is not None:
        return getattr(there, "__func__", there)
    # FSDP2's class has a forward of its own if Transformers wrapped that of a layer again
    return (methods_of(m) if isinstance(m, nn.Module) else {}).get("forward", getattr(type(m), "forward", None))
