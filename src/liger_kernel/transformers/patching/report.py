"""Report which parts of a live model are patched and why the others are not: its modules, and
its layers with adapters, quantised weights or FP8."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear, is_whole
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.float8_blocks import Float8Blocks
from liger_kernel.ops.projections.float8_training import Float8Trained
from liger_kernel.ops.projections.packed_weights import PackedWeight
from liger_kernel.ops.projections.weights import ByItsModule
from liger_kernel.parallel import unsharded_class
from liger_kernel.patch_options import PatchOptions
from liger_kernel.transformers import fp8, trl_head
from liger_kernel.transformers.head.head_weights import FP8, left_out
from liger_kernel.transformers.merged_training import ROUNDED, is_merge_aware, said as merge_aware_said
from liger_kernel.transformers.patching.patches import is_ours, methods_of
from liger_kernel.transformers.patching.select import HEADS, class_patches, instance_patches, other_classes
from liger_kernel.transformers.quantize import owners_of_heads
from liger_kernel.transformers.recognise.experts import (
    DOWN,
    GATE_UP,
    IN_BLOCKS,
    MERGE_AWARE,
    adapted_experts,
    chosen,
    experts_of,
    input_of,
    is_wrapper,
    storage,
    subclassed,
    weights_of,
)
from liger_kernel.transformers.recognise.families import (
    Family,
    family,
    flags_of,
    is_family,
    options_of,
    rows_of,
    type_of,
)
from liger_kernel.transformers.recognise.projections import projection
from liger_kernel.transformers.recognise.slots import SLOT_OF
from liger_kernel.transformers.recognise.storages import (
    Fallback,
    check_stored,
    experts_in_blocks,
    gathered_in_fp8,
    in_blocks,
    is_compressed,
    packed_tensor,
)
from liger_kernel.transformers.recognise.variant import LINEARS, OF_EXPERTS, plain


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
    reasons; ``line``: what is patched, in one line. Its text has one line for each part."""

    patched: tuple[str, ...]
    stock: tuple[str, ...]
    line: str = ""

    def __str__(self) -> str:
        lines = [f"patched: {', '.join(self.patched) or 'nothing'}"]
        return "\n".join(lines + [f"stock: {'; '.join(self.stock)}"] * bool(self.stock))


def patches_report(model: nn.Module, given: Mapping[str, Any] | None = None) -> PatchesReport:
    """Report which parts of ``model`` are patched now, and why the others are not. ``given``:
    the flags with which it was patched, except defaults."""
    model_type = type_of(model)
    row = family(model_type) if model_type else None
    given = {name: value for name, value in (given or {}).items() if name in flags_of(model_type)}
    options = options_of(model_type, given)
    # What could be patched: everything, by the values that were given for what is not a slot.
    slots = dict.fromkeys(options.slots, True)
    everything = PatchOptions().parts | {n: v for n, v in options.parts.items() if n not in slots} | slots
    found = instance_patches(model, model_type, everything | {"projections": True}, options.head or "fused")
    # a forward with two patches may have one of them, which is then another function
    now = [p for p in instance_patches(model, model_type, options.parts, options.head) if p.applied]
    in_place = {(id(p.owner), label) for p in now for label in p.labels}
    # (class, label) -> for each module of the model whether it is patched so
    kinds: dict[tuple[str, str], list[bool]] = {}
    for p in found:
        for label in p.labels:
            kinds.setdefault((type(p.owner).__name__, label), []).append(p.applied or (id(p.owner), label) in in_place)
    for kind, count in _by_classes(model, model_type, options):
        kinds.setdefault(kind, []).extend([True] * count)
    # a variant's label without the fields that say which form it is
    text = lambda count, cls, label: f"{count} x {cls} ({label.partition('(')[0] if label in SLOT_OF else label})"
    patched = tuple(text(sum(applied), *kind) for kind, applied in kinds.items() if any(applied))
    rest = {kind: applied.count(False) for kind, applied in kinds.items() if not all(applied)}
    stock = [f"{text(count, *kind)}: {_why(kind[1], row, options, given)}" for kind, count in rest.items()]
    others = {cls.__name__: reason for cls, (_, reason) in other_classes(model, row is None).items()}
    stock += [f"{name}: {reason}" for name, reason in others.items() if reason]
    for _, part in rows_of([model_type]):
        stock += [f"{name}: {reason}" for name, reason in part.left_alone.items()]
    if row is None:
        if not stock and not patched:
            stock.append("no norm, gated MLP or experts were found among its modules")
        stock.append(f"{_NO_FAMILY} {model_type or type(model).__name__!r}")
    elif row.heads and row.fused:
        stock.append(f"head and loss: {row.fused}")
    return PatchesReport(patched, tuple(stock), _line(kinds, trl_head.uses(model)))


def _by_classes(model: nn.Module, model_type: str, options: PatchOptions) -> Iterator[tuple[tuple[str, str], int]]:
    """(class, label) of patches of classes and functions that this model shares, and how many
    modules of it have them."""
    counts = Counter(base for m in model.modules() for base in type(m).__mro__)
    for p in class_patches(model_type, options.parts, options.head) if is_family(model_type) else ():
        of_class = isinstance(p.owner, type)
        if p.applied and (count := counts[p.owner] if of_class else 1):
            yield from (((p.owner.__name__ if of_class else p.attribute, label), count) for label in p.labels)


_NO_FAMILY = "rope, head and loss: replaced only in models of types that Transformers has, and this is of type"
# what a part is called in one line, by the kind of its label
_CALLED = {
    "rms_norm": "RMSNorm",
    "gated_rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "glu": "MLP",
    "relu_squared": "MLP",
    "moe": "experts",
    "rope": "rope",
    "attention": "attention",
    "gated_delta_rule": "delta rule",
    "ssd": "scan",
    "by_parts": "scan",
    "causal_conv1d": "convolution",
    **dict.fromkeys(HEADS, "head and loss"),
}


def _line(kinds: Mapping[tuple[str, str], list[bool]], through_trl: bool) -> str:
    """``liger_kernel: 9 RMSNorm, 4 MLP, rope, head through TRL``; ``kinds`` as in
    ``patches_report``."""
    counts = Counter[str]()
    for (_, label), applied in kinds.items():
        counts[_CALLED.get(label.partition("(")[0], "")] += sum(applied)
    names = [name for name in dict.fromkeys(_CALLED.values()) if counts[name]]
    uncounted = "rope", "attention", _CALLED[HEADS[0]]
    parts = [name if name in uncounted else f"{counts[name]} {name}" for name in names]
    parts += ["head through TRL"] * through_trl
    return f"liger_kernel: {', '.join(parts) or 'nothing of this model is patched'}"


def _why(label: str, row: Family | None, options: PatchOptions, given: Mapping[str, Any]) -> str:
    slot = SLOT_OF.get(label)
    glu = row.glu if row else "swiglu"
    flag = glu if slot == "glu" else slot or ("fused_linear_cross_entropy" if label.endswith("head") else None)
    if flag is None or getattr(options, flag):
        return "replaced by other code after the patch" if flag else "its parts are off"
    return f"{flag} is off, {'as asked' if flag in given else 'the default of this family'}"


# packages whose linear layers hold quantised weights
_QUANTISED = ("bitsandbytes.", "torchao.", "hqq.", "gptqmodel.", "auto_gptq.", "awq.")


def projections_report(model: nn.Module) -> ProjectionsReport:
    """Report for every linear layer, and the experts, of ``model`` with an adapter or a quantised
    weight whether the engine runs them now, or why not.

    If some layers are trained in FP8, the report has all linear layers, and why the others stay in
    16 or 32 bits.
    The report describes the present state of adapters (active, merged, disabled); the engine looks
    at each layer again at each call.
    """
    check_stored(model)
    return ProjectionsReport(tuple(_layers(model)))


def _layers(model: nn.Module) -> Iterator[Layer]:
    tuner = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    modules = dict(model.named_modules())
    below = tuple(f"{name}." for name, m in modules.items() if isinstance(m, tuner))
    by_fsdp = tuple(f"{name}." if name else "" for name, m in modules.items() if isinstance(m, FSDPModule))
    heads = {id(head): owner for owner, head in owners_of_heads(model).items()}
    recipe = next((m.recipe for m in modules.values() if unsharded_class(m) is LigerFloat8TrainingLinear), None)
    linear = fp8.linear_layers(model) if recipe else ()
    in_16_bits = {name: fp8.reason(name, m, is_head, fp8.Request(recipe)) for name, m, is_head in linear}
    for name, m in modules.items():
        if name.startswith(below):  # parts of an adapted layer are that layer
            continue
        parent, _, attribute = name.rpartition(".")
        if isinstance(m, tuner) or quantised(m):
            reason = _reason(m, modules.get(parent), attribute, heads.get(id(m)), isinstance(m, tuner))
        elif experts_in_blocks(m):
            reason = _in_blocks(m)
        elif unsharded_class(m) is LigerFloat8TrainingLinear:
            reason = _trained(m, f"{name}.".startswith(by_fsdp))
        elif name in in_16_bits:
            owner: Any = heads.get(id(m))
            in_the_loss = owner is not None and FP8 in vars(owner) and is_ours(_forward_of(owner))
            reason = fp8.HEAD if in_the_loss else Fallback(in_16_bits[name] or "left by the filter of fp8")
        elif storage(m) or type(m).__name__ == "Mxfp4GptOssExperts":
            reason = _reason_alone(m)
        else:
            weights = [w for w in map(m._parameters.get, (GATE_UP, DOWN)) if not is_sharded(w)]
            if (why := next(filter(None, map(subclassed, weights)), None)) is None:
                continue
            reason = why
        yield Layer(name, not isinstance(reason, Fallback), str(reason))


def _trained(m: Any, by_fsdp: bool) -> str | Fallback:
    """How a layer that is trained in FP8 runs; ``by_fsdp``: FSDP2 gathers its weight."""
    weight = m._parameters.get("weight")  # FSDP1 has it elsewhere
    gathered = by_fsdp and is_sharded(weight) and sum(p.is_shard() for p in weight.placements) == 1
    if weight is None or is_whole(weight) or gathered:
        return f"in FP8, {m.recipe}"
    return Fallback("its weight is quantised, or sharded while it is multiplied")


def quantised(m: nn.Module) -> bool:
    weight = m._parameters.get("weight")
    if in_blocks(m) or is_compressed(m):
        return True
    if type(m).__module__.startswith(_QUANTISED) and hasattr(m, "in_features"):
        return True
    of_package = type(weight).__module__.startswith(_QUANTISED)
    return isinstance(m, nn.Linear) and weight is not None and not plain(weight) and of_package


def _reason(m: Any, parent: Any, attribute: str, model: Any, adapted: bool) -> str | Fallback:
    """A remark on a layer that the engine runs, or the reason why it does not run it."""
    base = m.base_layer if adapted else m
    if isinstance(base, nn.Embedding):
        return Fallback("an embedding")
    if adapted and is_merge_aware(m):
        return merge_aware_said(m)
    packed = packed_tensor(base)
    weight: Any = getattr(base, "weight", None) if packed is None else packed
    weight = weight if isinstance(weight, torch.Tensor) else None
    # the dtype in which a base layer multiplies an input in the layer's own dtype
    own = torch.float32 if weight is None or not weight.is_floating_point() else weight.dtype
    own = torch.bfloat16 if in_blocks(base) or packed is not None else own
    dtype = getattr(base, "compute_dtype", None) or own
    x = torch.empty(0, dtype=dtype, device=None if weight is None else weight.device)
    # A head runs in the loss, so the forward of the whole model decides, not that of its parent.
    if model is not None:
        if not is_ours(_forward_of(model)):
            return Fallback(f"the head: {type(model).__name__} is not patched")
        alone = left_out(projection(m, dtype), x)
        return "the head, as part of the loss" if alone is None else Fallback(f"the head: {alone}")
    if not adapted and not type(m).__module__.startswith("torchao.float8.") and not (in_blocks(m) or is_compressed(m)):
        return Fallback("no adapter: its own module runs")
    function, of = _forward_of(parent), type(parent).__name__
    names, why_stock = (LINEARS.get(function) if callable(function) else None) or (frozenset(), lambda parent: None)
    if is_wrapper(m):
        return _reason_of_experts(m, of, attribute in names)
    if attribute not in names:
        return Fallback(f"{of} is not patched, or its forward does not call it as self.{attribute}(x)")
    if why := why_stock(parent):
        return Fallback(f"{of} has {why}")
    if weight is not None and (why := _no_kernels(x, fusible=True)):
        return Fallback(why)
    if gathered_in_fp8(base):
        return "in FP8, tensorwise, gathered in FP8"
    found = projection(m, dtype)
    if isinstance(found, Fallback):
        return found
    if not found.gains:
        return Fallback("adapters are disabled, merged or not active: its base runs")
    if any(weight is not None and a.a.device != weight.device for a in found.adapters):
        return Fallback("an adapter on another device")
    if isinstance(found.weight, Float8Trained):
        return f"in FP8, {found.weight.recipe.name}"
    if isinstance(found.weight, (Float8Blocks, PackedWeight)):
        return found.weight.said()
    beside = isinstance(found.weight, ByItsModule)
    return f"beside its base, a {type(base).__name__}, which runs by itself" if beside else ""


def _reason_of_experts(m: Any, of: str, called: bool) -> str | Fallback:
    """As ``_reason``, for PEFT's wrapper around experts. ``called``: whether the forward of the
    parent, an ``of``, asks the engine to call it."""
    inside = experts_of(m)
    if not hasattr(type(inside), GATE_UP) and GATE_UP not in inside._parameters:
        return Fallback(f"an adapter of the parameter {m.parameter_name} of a {type(inside).__name__}")
    if not called:
        return Fallback(f"{of} is not patched, or its forward does not call them as self.experts(x, index, weights)")
    x = input_of(inside)
    if why := _no_kernels(x):
        return Fallback(why)
    found = adapted_experts(m, x, rounded := m.__dict__.get(MERGE_AWARE, False))
    return found if isinstance(found, Fallback) else _decoded(storage(inside)) + ROUNDED * rounded


def _no_kernels(x: torch.Tensor, fusible: bool = False) -> str:
    return "" if use_kernels(x, fusible=fusible) else f"there are no kernels for {x.dtype} on {x.device.type}"


def _decoded(how: str) -> str:
    return f"{how}, decoded in parts for each product" * bool(how)


def _reason_alone(m: Any) -> str | Fallback:
    """As ``_reason``, for experts in MXFP4 without an adapter."""
    if not (how := storage(m)):
        return Fallback("in MXFP4 for Transformers' kernels, which cannot train: load it by load_in_mxfp4")
    patched = _forward_of(m) in OF_EXPERTS
    why = _no_kernels(input_of(m)) if patched else f"{type(m).__name__} is not patched"
    return Fallback(f"{how}: {why}") if why else _decoded(how)


def _in_blocks(m: Any) -> str | Fallback:
    """As ``_reason``, for experts of a checkpoint in FP8 without adapters."""
    if OF_EXPERTS.get(_forward_of(m)) is not IN_BLOCKS:
        return Fallback("experts that are not patched")
    x, how = input_of(m), IN_BLOCKS.keywords(m)
    if isinstance(how, Fallback):
        return how
    if implementation := chosen(m):
        return Fallback(f"Transformers' {implementation!r}, which the model's configuration names")
    found = weights_of(m, False, x)
    if isinstance(found, Fallback):
        return found
    first, second = found
    return first.said(second) if isinstance(first, Float8Blocks) and isinstance(second, Float8Blocks) else ""


def _forward_of(m: Any) -> Any:
    """The function that a call of ``m`` runs."""
    live = isinstance(m, nn.Module)
    there = m.__dict__.get("_old_forward", m.__dict__.get("forward")) if live else None
    if there is not None:
        return getattr(there, "__func__", there)
    # FSDP2's class has a forward of its own if Transformers wrapped that of a layer again
    return (methods_of(m) if live else {}).get("forward", getattr(type(m), "forward", None))
