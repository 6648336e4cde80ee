"""What a live linear layer computes at the moment of a call: its stored weight, and the adapters
that PEFT would add now.

``projection(module, dtype)`` returns the ``Projection`` that a call of ``module`` computes, or a
short reason why the module itself must run. It reads at each call what PEFT's own forward reads,
because adapters may be activated, disabled or merged at any time.

The base layer inside a PEFT layer may be anything. If its storage is unknown, if it has hooks, or
if it has its own forward, it is called for its product, and the node computes only what the
adapters add.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook, register_module_parameter_registration_hook

from liger_kernel import memory
from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.adapted import Adapter, Group, Projection
from liger_kernel.ops.projections.float8_blocks import Float8Blocks
from liger_kernel.ops.projections.linear import dtypes_of, linears
from liger_kernel.ops.projections.packed_weights import PackedWeight
from liger_kernel.ops.projections.weights import ByItsModule, Dense, Dequantized
from liger_kernel.transformers.recognise.storages import (
    Fallback,
    dense_weight,
    in_blocks,
    is_dense,
    loaded,
    of_package,
    weight_of,
)
from liger_kernel.transformers.recognise.variant import are_numbers, decoding, plain, runs_its_class

# classes of layers without another inside, of which nobody need ask for it
_ALONE = nn.Linear, LigerFloat8TrainingLinear


def active_adapters(m: Any) -> list[str]:
    """Names of the adapters that a call of a PEFT layer adds now."""
    if m.disable_adapters or m.merged:
        return []
    return [name for name in m.active_adapters if name in m.lora_A]


def _adapter(m: Any, name: str) -> Adapter | Fallback:
    # a module asks each other place before this one for an attribute, and these layers are read at each call
    parts = m._modules
    a, b, dropout = (parts[kind]._modules[name] for kind in ("lora_A", "lora_B", "lora_dropout"))
    if not (is_dense(a) and is_dense(b)) or a.bias is not None:
        return Fallback(f"parts of adapter {name!r} are sharded, hooked or replaced")
    p = 0.0
    # our node draws the mask of PyTorch's own dropout, and no other
    if type(dropout) not in (nn.Dropout, nn.Identity) or not runs_its_class(dropout):
        return Fallback(f"the dropout of adapter {name!r} is hooked, or a {type(dropout).__name__}")
    if type(dropout) is nn.Dropout and dropout.training:
        if not are_numbers(dropout.p):
            return Fallback(f"the dropout of adapter {name!r} has a probability that is a tensor")
        p = float(dropout.p)
    if p >= 1:
        return Fallback(f"the dropout of adapter {name!r} drops everything")
    wa, wb = a.weight, b.weight
    if wa.dtype != wb.dtype:
        return Fallback(f"the two matrices of adapter {name!r} have different dtypes")
    # DoRA multiplies its norm by the scale, which must be one number there
    if not scales(scale := m.scaling[name], wb.shape[0] if name not in m.lora_variant else 1):
        return Fallback(
            f"adapter {name!r} has a scaling that is sharded, or of neither one element nor one for each output"
        )
    return Adapter.scaled(wa, wb, scale, p, b.bias)


def scales(scale: Any, outputs: int) -> bool:
    """Whether the scaling of an adapter is a number, or a tensor that multiplies all outputs or
    each of them."""
    return not isinstance(scale, Tensor) or (
        plain(scale) and not scale.is_complex() and scale.ndim < 2 and scale.numel() in (1, outputs)
    )


def _sharded(m: nn.Module) -> bool:
    """Whether weights of ``m`` are spread over ranks."""
    return any(is_sharded(t) or hasattr(t, "ds_id") for t in m.parameters() if t is not None)


def adapted_layer(m: Any, dtype: torch.dtype) -> Projection | Fallback:
    """As ``projection``, for a layer of PEFT, whoever calls it."""
    # PEFT takes merged adapters out of the weight at the next call: its forward must run
    if m.disable_adapters and m.merged:
        return Fallback("merged adapters to be taken out")
    if getattr(m, "fan_in_fan_out", False):
        return Fallback("a base whose weight lies the other way (Conv1D)")
    base, names = m.base_layer, active_adapters(m)
    weight = weight_of(base, dtype)
    adapters, magnitude = [], None
    # in the order in which PEFT adds them, for the same rounding
    for name in names:
        adapter = _adapter(m, name)
        if isinstance(adapter, Fallback):
            return adapter
        if name in m.lora_variant:
            if isinstance(weight, (Float8Blocks, PackedWeight)):  # of whose scales PEFT's norms know nothing
                return Fallback("a magnitude over a base in FP8 blocks, or packed")
            magnitude = _magnitude(m, name, adapter, len(names))
            if isinstance(magnitude, Fallback):
                return magnitude
        if not getattr(m, "cast_input_dtype_enabled", True) and adapter.a.dtype != dtype:
            return Fallback("casts of the input that are turned off")
        adapters.append(adapter)
    if not isinstance(weight, Fallback):
        return Projection(weight, base.bias, tuple(adapters), magnitude)
    # The base may run by itself, and the node adds the adapters; but DoRA needs the norm of the
    # weight, and ranks that gather a base must do it at the same time
    if not adapters or magnitude is not None or _sharded(base):
        return weight
    return Projection(
        ByItsModule((adapters[0].b.shape[0], adapters[0].a.shape[1]), None, why=weight), None, tuple(adapters)
    )


def _magnitude(m: Any, name: str, adapter: Adapter, active: int) -> Tensor | Fallback:
    """The magnitude of a DoRA adapter."""
    variant = m.lora_variant[name]
    if type(variant) is not loaded("peft.tuners.lora.variants", "DoraLinearVariant") or not of_package(
        loaded("peft.tuners.lora.dora", "DoraLinearLayer"), "peft."
    ):
        return Fallback(f"adapter {name!r} is a {type(variant).__name__}")
    if active > 1:
        return Fallback(f"adapter {name!r} has a magnitude, and is one of several")
    holder = m.lora_magnitude_vector[name]
    if not (runs_its_class(holder) and plain(holder.weight)):
        return Fallback(f"the magnitude of adapter {name!r} is sharded or hooked")
    if adapter.dropout:
        return Fallback(f"adapter {name!r} has a magnitude and dropout")
    return Fallback(f"adapter {name!r} has a magnitude and a bias") if adapter.bias is not None else holder.weight


def projection(m: Any, dtype: torch.dtype) -> Projection | Fallback:
    """What ``m`` computes from an input of this dtype, if our engine can run it; otherwise the
    reason."""
    cls = type(m)
    if is_adapted(m):
        return adapted_layer(m, dtype) if runs_its_class(m) else Fallback("hooks, or a forward of its own")
    # an adapter of another method, such as LoHa or IA3
    if cls not in _ALONE and hasattr(m, "base_layer"):
        return Fallback(f"a layer of class {cls.__module__}.{cls.__name__}")
    weight = weight_of(m, dtype)
    return weight if isinstance(weight, Fallback) else Projection(weight, m.bias)


# of the first of some layers of PEFT, by what made it: all that they were last read from, and what was made of that
KEPT: weakref.WeakKeyDictionary[nn.Module, dict[Callable, tuple[list, Any]]] = weakref.WeakKeyDictionary()


def _let_go(m: nn.Module, name: str, new: nn.Parameter) -> None:
    """What is kept holds weights: where others replace them, a whole model would be there twice until its next call."""
    if m._parameters.get(name) is not new:
        KEPT.clear()


register_module_parameter_registration_hook(_let_go)


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def _own_way(of: dict[str, Any]) -> bool:
    """Whether a module, by its attributes, has hooks or a forward of its own."""
    return "forward" in of or any([of[name] for name in _HOOKS])


def _state(m: Any) -> tuple | None:
    """All that ``projection`` reads of a layer with one adapter whose base is dense or in 4 bits, or of a dense one
    beside it: while it is the same, so is the projection. To look at it takes a third of the time of reading. It
    holds no tensor, whose comparison would make the host wait, but ids, of tensors that the projection holds. None
    for other layers."""
    if type(m) is nn.Linear:
        w, has_bias = m._parameters.get("weight"), "bias" in m._parameters
        if _own_way(m.__dict__) or not has_bias or type(w) is not nn.Parameter:
            return None
        return nn.Linear.forward, id(w), id(m.bias), w.device, w.dtype, w.shape, hasattr(w, "ds_id")
    if not is_adapted(m):
        return None
    own = m.__dict__
    parts, active = own["_modules"], own.get("_active_adapter")
    if type(active) is list and len(active) == 1:
        active = active[0]
    if type(active) is not str:
        return None
    if own["_disable_adapters"] or own["merged_adapters"] or active in own["lora_variant"]:
        return None
    if active not in parts["lora_A"]._modules:
        return None
    base = parts["base_layer"]
    a, b, drop = [parts[kind]._modules[active] for kind in ("lora_A", "lora_B", "lora_dropout")]
    inside = [each.__dict__ for each in (base, a, b, drop)]
    if any([_own_way(of) for of in (own, *inside)]):
        return None
    held = [of.get("_parameters", {}) for of in inside[:3]]
    # a traced layer has none, and a bias may be any other attribute
    if not all(["bias" in each for each in held]):
        return None
    w, _, wa, _, wb, _ = tensors = [each.get(name) for each in held for name in ("weight", "bias")]
    stored, scale, p = getattr(w, "quant_state", None), own["scaling"][active], inside[3].get("p", 0.0)
    # a tensor that only represents one has another class
    if not type(wa) is type(wb) is nn.Parameter or not (type(w) is nn.Parameter or stored is not None):
        return None
    if not type(scale) is type(p) is float:
        return None
    return (
        (type(m).forward, type(base).forward, nn.Linear.forward, *map(type, (m, base, a, b, drop))),
        (scale, p, drop.training, inside[0].get("compute_dtype")),
        (own.get("fan_in_fan_out"), own.get("cast_input_dtype_enabled")),
        (id(stored), getattr(stored, "packing_format_for_cpu", False), *map(id, tensors)),
        [(t.device, t.dtype, t.shape, hasattr(t, "ds_id")) for t in (w, wa, wb)],
    )


def kept(make: Callable[..., Any], x: Tensor, modules: Sequence[nn.Module], *how: Any) -> Any:
    """``make(projections of x by the modules, x, *how)``, which is kept until anything has changed that it was made
    of: the layers, width and device of x, and numbers ``how``."""
    dtype = product_dtype(x)
    states = [] if _has_any_global_hook() else [_state(m) for m in modules]
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    seen, mine = [how, x.shape[-1], x.device, dtype, autocast, *states], KEPT.setdefault(modules[0], {})
    if (known := mine.get(make)) is not None and known[0] == seen:
        return known[1]
    found = [projection(m, dtype) for m in modules]
    made = make(found, x, *how)
    # no others: of scales in blocks a state knows nothing
    if states and all(states) and all(type(getattr(p, "weight", None)) in (Dense, Dequantized) for p in found):
        mine[make] = seen, made
    else:  # what it was is nobody's any more
        mine.pop(make, None)
    return made


# PEFT's layers with a forward that adds the output of each active adapter to the base's product.
# The first two may add in another dtype under autocast
_PEFT = {
    "layer": "Linear",
    "bnb": "Linear4bit Linear8bitLt",
    "gptq": "GPTQLoraLinear",
    "awq": "AwqLoraLinear",
    "hqq": "HqqLoraLinear",
    "aqlm": "AqlmLoraLinear",
    "eetq": "EetqLoraLinear",
    "torchao": "TorchaoLoraLinear",
}


@functools.lru_cache(1024)
def _of_peft(cls: type) -> bool:
    """Whether ``cls`` is in ``_PEFT``. The answer cannot change, because its module is imported."""
    return cls in _peft_classes()


def is_adapted(m: Any) -> bool:
    """Whether ``m`` is a linear layer with LoRA of PEFT."""
    return _of_peft(type(m)) and of_package(type(m), "peft.")


def _peft_classes() -> tuple[Any, ...]:
    found = (loaded(f"peft.tuners.lora.{module}", name) for module, names in _PEFT.items() for name in names.split())
    return tuple(c for c in found if c is not None)


@functools.lru_cache(16)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as a tensor, cached, because each copy to a GPU makes the host wait."""
    return torch.tensor(numbers, device=device)


def trained_rows(m: Any, dtype: torch.dtype) -> Projection | Fallback | None:
    """PEFT's layer that trains some rows of a frozen weight W (``trainable_token_indices`` with a
    tied head); None if ``m`` is another module.

    With rows D in place of the rows i of W, x W'^T = x W^T + x (D - W_i)^T E_i^T, where E_i (N, n)
    has a 1 for each row. This product of low rank needs no gradient of all rows. The layer's own
    forward copies W in each call and computes the gradient of the copy.
    """
    if type(m) is not loaded("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer") or not of_package(
        type(m), "peft."
    ):
        return None
    if not runs_its_class(m) or (m.disable_adapters and m.merged):
        return Fallback("trained tokens with hooks or a forward of their own, or to be taken out")
    # the whole weight as a matrix: rows are exchanged by a product of low rank
    w = dense_weight(m.base_layer, dtype)
    if not isinstance(w, Dense) or w.learnable is None or w.learnable.requires_grad:
        return w if isinstance(w, Fallback) else Fallback("trained tokens of a weight that is no plain frozen one")
    names = list(m.active_adapters)
    if m.disable_adapters or m.merged or not names:
        return Projection(w, m.base_layer.bias)
    # as PEFT does: two adapters of one token raise
    m._check_overlapping_tokens(names)
    at = [i for name in names for i in m.token_indices[name]]
    if len(at) > w.shape[1] // 4:
        return Fallback(f"{len(at)} trained tokens")  # with so many, the product costs more than a copy of W
    index = _on_device(tuple(at), w.learnable.device)
    rows = torch.cat([m.trainable_tokens_delta[name].to(w.learnable) for name in names])
    # E_i of the docstring
    chosen = torch.zeros(w.shape[0], len(at), dtype=dtype, device=index.device)
    chosen[index, torch.arange(len(at), device=index.device)] = 1
    return Projection(w, None, (Adapter(rows - w.learnable[index], chosen),))


def base_of(m: Any) -> nn.Module:
    """The layer inside a PEFT layer, or ``m`` itself."""
    layers = (*_peft_classes(), loaded("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer"))
    return m.base_layer if type(m) in layers else m


def copy_in_use(m: Any) -> nn.Module:
    """The module that a call of ``m`` runs: for PEFT's ``modules_to_save`` the active copy, or the
    original if none is active; for a wrapper with trained tokens the layer that holds them; else
    ``m``."""
    cls = type(m)
    if (
        cls is nn.Linear
        or torch.compiler.is_compiling()
        or not of_package(cls, "peft.utils.other")
        or not runs_its_class(m)
    ):
        return m
    if cls is loaded("peft.utils.other", "TrainableTokensWrapper"):
        return m.token_adapter
    if cls is not loaded("peft.utils.other", "ModulesToSaveWrapper"):
        return m
    active = m.active_adapters
    # as PEFT decides: any adapter without a copy turns all of them off
    off = m.disable_adapters or not active or any(name not in m._adapters for name in active)
    return m.original_module if off else m.modules_to_save[active[0]]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies x."""
    return dtypes_of(x, ())[0]


def as_they_are(x: Any, modules: Iterable[Any]) -> bool:
    """Whether these linear layers run by themselves on x, a step of generation. Not with dropout: a reentrant
    checkpoint calls them again with gradients, and the masks must be drawn in the same order and dtype."""
    return decoding(x) and not any(_drops(m) or _has_no_kernel(m) for m in modules)


def engine_runs(x: Any, modules: Iterable[Any]) -> bool:
    """Whether the engine can run these linear layers on x at all."""
    if as_they_are(x, modules):
        return False
    return not (
        torch.compiler.is_compiling()
        or not plain(x)
        or not x.is_floating_point()
        or not x.ndim
        or not x.numel()
        or not use_kernels(x, fusible=True)
    )


def _has_no_kernel(m: nn.Module) -> bool:
    """Whether a layer of a checkpoint in FP8 could not run by itself: its kernels are of a package
    that is not installed."""
    if not in_blocks(m._modules.get("base_layer", m)):
        return False
    available = loaded("transformers.utils.import_utils", "is_kernels_available")
    return available is not None and not available()


def _drops(m: nn.Module) -> bool:
    """Whether the dropout of one of a layer's adapters is active."""
    dropouts = m._modules.get("lora_dropout")
    return dropouts is not None and any(d.training and type(d) is not nn.Identity for d in dropouts._modules.values())


def fitting(found: Projection, width: int, device: torch.device) -> bool:
    """Whether a layer accepts inputs of this width, and its adapters are on this device."""
    return found.weight.shape[1] == width and all([a.a.device == device == a.b.device for a in found.adapters])


def linear(module: Any, x: Any) -> Any:
    """``module(x)``, by the engine if it can run the layer now."""
    return module(x) if type(module) is nn.Linear else shared(x, module)[0]


def shared(x: Any, *modules: Any) -> tuple[Any, ...]:
    """``tuple(m(x) for m in modules)``, as one node where the engine can."""
    # Most calls end here: layers without adapters, of models that are not quantised
    if all(type(m) is nn.Linear for m in modules) or not engine_runs(x, modules):
        return tuple(m(x) for m in modules)
    ours, group = kept(_as_nodes, x, modules)
    # a node that saves nothing would only cost its own time
    if group is None:
        return tuple(m(x) for m in modules)
    if len(modules) > 1 and None in ours and any(a.dropout for p in ours if p is not None for a in p.adapters):
        return tuple(shared(x, m)[0] for m in modules)  # so that masks are drawn in the order of the modules
    memory.readers_follow()
    # in the order of the modules: those that stay stock run between the others
    ys = iter(linears(x, group))
    outputs = tuple([m(x) if p is None else with_base(next(ys), p, m, x) for p, m in zip(ours, modules)])
    memory.readers_done()
    return outputs


def _as_nodes(found: list[Projection | Fallback], x: Tensor) -> tuple[list[Projection | None], Group | None]:
    """Those of these projections of x that the engine runs, and as one node, if that helps."""
    ours = [p if isinstance(p, Projection) and fitting(p, x.shape[-1], x.device) else None for p in found]
    helps = any(p is not None and p.gains for p in ours)
    return ours, Group([p for p in ours if p is not None]) if helps else None


def with_base(y: Tensor, p: Projection, m: Any, x: Tensor) -> Tensor:
    """``m(x)`` in its dtype, from y, the part that the node computed."""
    if isinstance(p.weight, ByItsModule):
        base = m.base_layer(x)
        return (base + y).to(base.dtype)
    return y.to(x.dtype) if p.weight.follows_input else y
