"""Store the frozen linear layers and experts of a model in FP8: ``quantize_base(model, "fp8")``,
before or after PEFT wraps them.

model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)
quantize_base(model, "fp8")
model = get_peft_model(model, LoraConfig(...))
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.nn.float8 import RECIPES, LigerFloat8Experts, LigerFloat8Linear, parametrization, store_experts
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.transformers.recognise.experts import DOWN, GATE_UP
from liger_kernel.transformers.recognise.storages import is_dense
from liger_kernel.transformers.recognise.variant import plain, unhooked

SMALL = 1024 * 1024  # values of a weight below which casting x costs what the product in FP8 saves
DTYPES = torch.bfloat16, torch.float16, torch.float32
HEADS_AND_ROUTERS = ("lm_head", "embed_out", "score", "classifier", "gate", "router")


def quantize_base(
    model: nn.Module, recipe: str = "fp8", *, skip: tuple[str, ...] = HEADS_AND_ROUTERS, keep_transposed: bool = True
) -> dict[str, str]:
    """Store the frozen linear layers and packed experts of ``model`` in FP8; return the names of
    layers and parameters that stay, each with the reason.

    Linear layers are replaced by layers with FP8 weights. The parameters gate_up_proj and down_proj
    of experts, (E, N, K) or (E, K, N), stay in their modules: they hold FP8, and are made dense
    when they are read. Our kernels make them dense for one product at a time. ``recipe``: "fp8",
    one scale for each weight of a layer or an expert, or "fp8_rowwise", one scale for each output;
    ``ops/projections/float8.py`` has the error of each.
    ``skip``: names of modules, or ends of names. The output head, small layers, trained layers and
    adapters are skipped, too. If every parameter of the model requires a gradient, as in a model
    that was just loaded, all of them count as frozen.
    ``keep_transposed``: also store each weight of a linear layer transposed, for the backward pass.
    This takes as much memory as bf16 and saves a transposition in each backward pass. With FSDP,
    pass False, because transposed weights are not sharded. (FSDP2 of PyTorch 2.11 refuses these
    layers; that of 2.13 accepts them.)
    PEFT adapts experts (``target_parameters``) that are stored already only by the whole names of
    their parameters, so wrap the model first.
    Raises ``ValueError`` for any other recipe, and on a GPU without FP8. The CPU computes the same
    result, slowly.
    """
    if recipe not in RECIPES:
        raise ValueError(f"quantize_base: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    for device in {p.device for p in model.parameters()}:
        if why := lacking(device):
            raise ValueError(f"quantize_base: {why}")
    # before the first one is replaced
    all_trained = all(p.requires_grad for p in model.parameters() if p.is_floating_point())
    names, reasons = _sorted(model, skip, all_trained)
    experts, others = _sorted_experts(model, skip, all_trained)
    made: dict[int, LigerFloat8Linear] = {}  # a layer that is there twice stays one
    for name in names:
        linear = model.get_submodule(name)
        if id(linear) not in made:
            made[id(linear)] = LigerFloat8Linear.of(linear, recipe, keep_transposed)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(linear)])
    for m, parameter, transposed in experts:
        store_experts(m, parameter, recipe, transposed)
    reasons |= others
    if not any(isinstance(m, LigerFloat8Linear | LigerFloat8Experts) for m in model.modules()):
        warnings.warn(f"quantize_base: {none_is_in_fp8(reasons)}", stacklevel=2)
    return reasons


def none_is_in_fp8(reasons: dict[str, str]) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:2]) or "there is none"
    return f"no linear layer is in FP8 ({why})"


def _sorted(model: nn.Module, skip: tuple[str, ...], all_trained: bool) -> tuple[list[str], dict[str, str]]:
    """Names of the linear layers to be replaced, and of those to be left with the reason. Parts
    of adapters are neither."""
    # A weight that two modules share (tied embeddings) would be stored for one of them only.
    holders = _holders(model)
    names, reasons = [], {}
    for name, m, is_head in linear_layers(model, remove_duplicate=False):
        if isinstance(m, LigerFloat8Linear):
            continue
        if is_head or _skipped(name, skip):
            reasons[name] = "a head, a router, or skipped by name"
        elif not is_dense(m):
            reasons[name] = not_plain(m)
        elif why := _unfit(m.weight, all_trained, holders) or unfit_shape(m, 16, SMALL):
            reasons[name] = why
        else:
            names.append(name)
    return names, reasons


def not_plain(m: nn.Module) -> str:
    what = "sharded, hooked, quantised, or with a forward of its own"
    return f"a {type(m).__name__} that is not a plain nn.Linear: {what}"


def unfit_shape(m: nn.Linear, multiple: int, least: int) -> str:
    """Why a layer of this shape is not in FP8; empty if nothing is against it."""
    shape = f"{m.out_features} x {m.in_features}"
    if m.in_features % multiple or m.out_features % multiple:
        return f"{shape} are not multiples of {multiple}"
    return f"{shape} are too few to gain by it" if m.weight.numel() < least else ""


def _unfit(p: Tensor, all_trained: bool, holders: Counter[int]) -> str:
    """Why a weight of any layer stays; empty if nothing is against it."""
    if p.requires_grad and not all_trained:
        return "it is trained"
    if holders[id(p)] > 1:
        return "another module shares it"
    return f"a weight of {p.dtype} on {p.device}" if p.is_meta or p.dtype not in DTYPES else ""


def _skipped(name: str, skip: tuple[str, ...]) -> bool:
    return any(f".{s}." in f".{name}." for s in skip)


def _holders(model: nn.Module) -> Counter[int]:
    """By ``id`` of a parameter, how many modules have it."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def _sorted_experts(
    model: nn.Module, skip: tuple[str, ...], all_trained: bool
) -> tuple[list[tuple[nn.Module, str, bool]], dict[str, str]]:
    """Parameters of experts to be stored, each with its module and whether it is (E, K, N), and
    names of those to be left with the reason."""
    holders = _holders(model)
    found, reasons = [], {}
    for module, m in model.named_modules():
        packed = packed_experts(m)
        for parameter, p in packed.items():
            name, made = f"{module}.{parameter}".lstrip("."), parametrization(m, parameter)
            if made and isinstance(made[0], LigerFloat8Experts):
                continue
            if _skipped(name, skip):
                reasons[name] = "skipped by name"
            elif made:
                why = "makes it when it is read: it is quantised already, or adapted"
                reasons[name] = f"a {type(made[0]).__name__} {why}"
            elif not plain(p):
                reasons[name] = f"a {type(p).__name__} that is not a plain parameter: sharded or quantised"
            elif not unhooked(m):
                reasons[name] = "its module has hooks"
            elif why := _unfit(p, all_trained, holders):
                reasons[name] = why
            elif (transposed := _transposed(packed)) is None:
                shapes = ", ".join(f"{each} {tuple(t.shape)}" for each, t in packed.items())
                reasons[name] = f"experts of unknown layout: {shapes}"
            else:
                found.append((m, parameter, transposed))
        for parameter, p in m._parameters.items():
            if p is not None and parameter not in packed and _seems_packed(m, p):
                why = f"packed weights of another name than {GATE_UP} and {DOWN}, whose layout is unknown"
                reasons[f"{module}.{parameter}".lstrip(".")] = why
    return found, reasons


def _seems_packed(m: nn.Module, p: Tensor) -> bool:
    return p.ndim == 3 and min(p.shape) > 1 and p.numel() >= SMALL and not isinstance(m, nn.modules.conv._ConvNd)


def packed_experts(m: nn.Module) -> dict[str, Tensor]:
    """The weights of all experts in one parameter, by its name; of one that is made when it is
    read, what it is made of. Empty for other modules."""
    found = {}
    for name in (GATE_UP, DOWN):
        if (made := parametrization(m, name)) is not None:
            found[name] = made.original
        elif (p := m._parameters.get(name)) is not None and p.ndim == 3:
            found[name] = p
    return found


def _transposed(packed: dict[str, Tensor]) -> bool | None:
    """Whether weights are (E, in, out) instead of (E, out, in), from their shapes: gate_up has 2
    I outputs, and down I inputs. None if neither fits."""
    if len(packed) < 2 or any(p.ndim != 3 for p in packed.values()):
        return None
    (E, a, b), (F, c, d) = (tuple(packed[name].shape) for name in (GATE_UP, DOWN))
    if E != F:  # not the experts of one layer
        return None
    return False if (a, b) == (2 * d, c) else True if (a, b) == (d, 2 * c) else None


def owners_of_heads(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The modules that have an output head, each with its head: the model itself, and models
    within it."""
    owners = [m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))]
    return {m: head for m in owners if isinstance(head := _head_of(m), nn.Module)}


def _head_of(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # a model without a head
        return None


def linear_layers(model: nn.Module, **how: bool) -> Iterator[tuple[str, nn.Linear, bool]]:
    """The linear layers of a model with their names, and whether they belong to an output head;
    not those that PEFT has put beside the layers that it wraps. ``how``: of ``named_modules``."""
    heads = {id(part) for head in owners_of_heads(model).values() for part in head.modules()}
    wrappers = [m for m in model.modules() if hasattr(m, "base_layer")]
    beside = [of for m in wrappers for child, of in m.named_children() if child != "base_layer"]
    adapters = {id(part) for of in beside for part in of.modules()}
    for name, m in model.named_modules(**how):
        if isinstance(m, nn.Linear) and id(m) not in adapters:
            yield name, m, id(m) in heads
