"""Select the patches for the classes of a model type, or for the modules of one live model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory
from liger_kernel.transformers import fp8, rewrite
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.lazy_mask import lazily
from liger_kernel.transformers.patching import exchange, long_rows, once, wrappers
from liger_kernel.transformers.patching.classes import KEY, OLD_FORWARD, methods_of, ours
from liger_kernel.transformers.patching.values import Patch, Patches, is_method, original
from liger_kernel.transformers.recognise.attentions import makers_of
from liger_kernel.transformers.recognise.families import Rows, family, rows_of
from liger_kernel.transformers.recognise.family import Family, configs_of
from liger_kernel.transformers.recognise.mlps import GLU, MLP, tiled
from liger_kernel.transformers.recognise.slots import PLAIN_MLP, SLOT_OF, TORCHS_OWN, VARIANTS
from liger_kernel.transformers.recognise.variant import LINEARS, named_as

# What patches of a forward are called, by the patterns that they fuse: in layers, and elsewhere.
_IN_LAYERS = {rewrite.NORMS: "add_norm", rewrite.PROJECTIONS: "projections"}
_ELSEWHERE = {rewrite.NORMS: "norm_rope", rewrite.PROJECTIONS: "projections", rewrite.MASKS: "masks"}
CHEAP = {"rms_norm", "layer_norm", "glu", "relu_squared"}  # one pass over memory recomputes the outputs of these slots
Parts = frozenset[str]

# -- replacements, each cached: the patch of a function must be the same when it is selected again --


def _calling(new: Callable, like: Callable | None) -> Callable:
    """``new``, registered to call the same linear layers as ``like``."""
    if like in LINEARS:
        LINEARS[new] = LINEARS[like]
    return new


@functools.cache
def _variant(label: str, stock: Callable, tiles: bool | int = False) -> Callable:
    variant = VARIANTS[label]
    return ours(named_as(variant(stock, tiles) if isinstance(variant, GLU | MLP) else variant(stock), stock))


@functools.cache
def _tiled(forward: Callable, tiles: bool | int) -> Callable:
    return _calling(ours(tiled(forward, tiles)), forward)


@functools.cache
def _around_layers(forward: Callable, offloads: bool, keeps: bool) -> Callable:
    return _calling(ours(long_rows.around(forward, offloads, keeps)), forward)


@functools.cache
def fused_head(forward: Callable, keep_logits: bool, known: bool = True) -> Callable:
    return ours(fused(forward, keep_logits=keep_logits, known=known))


@functools.cache
def _converting(init: Callable, request: fp8.Request) -> Callable:
    return ours(fp8.converting(init, request))


@functools.cache
def _lazily(make: Callable) -> Callable:
    return ours(lazily(make))


@functools.cache
def _with_steps(forward: Callable, parts: Parts, level: str = "off") -> Callable:
    """``forward`` with the patterns of ``parts`` fused, recomputing cheap values as ``level`` says."""

    def change(inner: Any) -> Callable:
        inner = (parts and rewrite.fused(inner, parts)) or inner
        return inner if level == "off" else memory.rematerialised(inner, level)

    inner = rewrite.fused(wrappers.core(forward), parts) if parts else None
    return _calling(ours(wrappers.within(forward, change)), inner)


@functools.cache
def _seeing(
    function: types.FunctionType, swaps: tuple[tuple[str, Callable, Callable], ...], parts: Parts
) -> Callable | None:
    """``function`` that reads each global (name, stock, ours) as ours, with the patterns of
    ``parts`` fused; None if its source is not available."""
    inner = rewrite.seeing(wrappers.core(function), swaps, parts)
    if inner is None:
        return None
    return _calling(ours(wrappers.within(function, lambda f: rewrite.seeing(f, swaps, parts))), inner)


# -- patches of classes and of functions in Python modules -----------------------------------------


def _patches(model_types: Iterable[str], parts: Mapping[str, Any], head: str | None, rows: Rows) -> Iterator[Patch]:
    """All patches of these types and their parts, including patches for PyTorch's own classes.
    Only the first type's head is patched.

    Llama with everything on, without tiles:

        LlamaRMSNorm.forward <- rms_norm(...)          LlamaMLP.forward <- glu(...)
        modeling_llama.apply_rotary_pos_emb <- rope(...)
        LlamaAttention.forward <- projections          LlamaModel.forward <- masks
        LlamaDecoderLayer.forward <- add_norm, rematerialised(cheap)
        LlamaForCausalLM.forward <- fused head
    """
    model_types = list(model_types)
    for i, (module, row) in enumerate(rows_of(model_types, rows)):
        yield from _of_slots(model_types[0], module, row, parts)
        yield from _of_steps(module, row, parts, head)
        for name in row.heads if i == 0 and head and not row.fused else ():
            if hasattr(module, name):
                cls, keep = getattr(module, name), head == "logits"
                yield Patch(cls, "forward", fused_head(original(cls, "forward"), keep), (HEADS[keep],), _head(keep))


HEADS = ("fused head", "logits head")  # the labels of these patches: without logits, and with


@functools.cache
def _head(keep_logits: bool) -> Callable:
    return functools.partial(fused, keep_logits=keep_logits)


@functools.cache
def _rematerialised(level: str) -> Callable | None:
    return None if level == "off" else functools.partial(memory.rematerialised, level=level)


def _of_slots(model_type: str, module: types.ModuleType, row: Family, parts: Mapping[str, Any]) -> Iterator[Patch]:
    """Norms, MLPs, experts, attention with sinks and rope functions that a variant replaces."""
    tiles = parts.get("tiled_mlp", False)
    for name, label in row.swapped.items():
        # The tiles of an MLP are a flag of their own: with its kernel off, its stock forward is tiled
        on, tiling = parts.get(SLOT_OF[label]), bool(tiles) and isinstance(VARIANTS[label], GLU | MLP)
        owner, attribute = _place(module, name)
        if not (on or tiling) or not hasattr(owner, attribute):  # another version may not have the attribute
            continue
        stock = original(owner, attribute)
        if _is_foreign(stock):
            once.warn(model_type, name, "other code has replaced it, so it is not patched")
            continue
        if on and SLOT_OF[label] == "attention":
            # it does not read masks that are made when they are read
            makers = {maker: original(module, maker) for maker in makers_of(module)}
            yield from (Patch(module, n, _lazily(f), (label,)) for n, f in makers.items() if not _is_foreign(f))
        new = _variant(label, stock, tiles) if on else _tiled(stock, tiles)
        yield Patch(owner, attribute, new, (_both(label if on else "", "tiled" if tiling else ""),))


def _place(module: types.ModuleType, name: str) -> tuple[Any, str]:
    """Owner and attribute of the function that the table of families calls ``name``."""
    if name in TORCHS_OWN:
        return getattr(nn, TORCHS_OWN[name][0]), "forward"
    there = getattr(module, name, None)
    return (there, "forward") if isinstance(there, type) else (module, name)


def _both(*labels: str) -> str:
    return ", ".join(filter(None, labels))


def _of_steps(module: types.ModuleType, row: Family, parts: Mapping[str, Any], head: str | None) -> Iterator[Patch]:
    """Forwards, of layers and of other classes, in which neighbouring steps run together, and
    plain MLPs in tiles."""
    tiles = parts.get("tiled_mlp", False)
    slots = {slot for slot in map(SLOT_OF.__getitem__, row.swapped.values()) if parts.get(slot)}
    choices = (
        (rewrite.NORMS, "rms_norm" in slots),
        (rewrite.PROJECTIONS, parts.get("projections")),
        (rewrite.MASKS, head),
    )
    wanted = frozenset(part for part, on in choices if on)
    layers = _classes(module, GradientCheckpointingLayer)
    # these handle their linear layers themselves, or their flag is off
    done = {vars(module).get(name) for name in row.swapped} | set(layers)
    plain = {vars(module).get(n) for n, why in row.left_alone.items() if tiles and why == PLAIN_MLP} - {None}
    ropes = {name for name, label in row.swapped.items() if SLOT_OF[label] == "rope" and "rope" in slots}
    classes = [c for c in _classes(module, nn.Module) if "forward" in c.__dict__ or c in layers]
    for cls in sorted(classes, key=lambda c: c in layers):
        stock = original(cls, "forward")
        core = wrappers.core(stock)
        if cls in layers:
            found = rewrite.parts_in(core, wanted)
            level = memory.level_of(parts.get("rematerialise")) if slots & CHEAP else "off"
        elif cls in done or not isinstance(core, types.FunctionType):
            found, level = frozenset(), "off"
        else:  # norms of heads run together with their rotation, in a forward that rotates
            found = rewrite.parts_in(core, wanted if ropes & set(core.__code__.co_names) else wanted - {rewrite.NORMS})
            level = "off"
        names = _IN_LAYERS if cls in layers else _ELSEWHERE
        label = _both(*(names[part] for part in names if part in found), f"rematerialised({level})" * (level != "off"))
        new = _with_steps(stock, found, level) if found or level != "off" else stock
        if cls in plain and not _is_foreign(stock):
            new, label = _tiled(new, tiles), _both(label, "tiled")
        if new is not stock:
            yield Patch(cls, "forward", new, (label,), _rematerialised(level))


def _classes(module: types.ModuleType, base: type) -> list[type]:
    return [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
    ]


def class_patches(model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family) -> Patches:
    """Patches of the classes of ``model_type`` and of the model types of its parts. Classes of
    PyTorch and of other families are not patched.

    ``parts``: slot -> whether to replace it, "rematerialise": a level of ``memory``, "fp8": a request,
    and the flags for long rows. ``head``: "fused", "logits" (fused loss on real logits) or None.
    """
    modules = [module for module, _ in rows_of([model_type], rows)]
    own = {module.__name__ for module in modules}
    found = [
        p
        for p in _patches([model_type], parts, head, rows)
        if not isinstance(p.owner, type) or p.owner.__module__ in own
    ]
    found = _around_too(found, [cls for module in modules for cls in _callers_of_layers(module)], parts)
    if request := parts.get("fp8"):
        models = [c for module in modules for c in _classes(module, PreTrainedModel)]
        found += [
            Patch(cls, "__init__", _converting(original(cls, "__init__"), request), (str(request),)) for cls in models
        ]
    return Patches(
        dict.fromkeys([*found, *_ropes_of_parts(model_type, parts, rows, {(p.owner, p.attribute) for p in found})])
    )


def _callers_of_layers(module: types.ModuleType) -> list[type]:
    """The classes with lists of modules, which may be layers: only a live module shows whether
    they are."""
    names = lambda function: getattr(getattr(function, "__code__", None), "co_names", ())
    return [
        c
        for c in _classes(module, nn.Module)
        if "forward" in c.__dict__
        and not issubclass(c, GradientCheckpointingLayer)
        and "ModuleList" in names(c.__dict__.get("__init__"))
    ]


def _around_too(found: list[Patch], owners: list[Any], parts: Mapping[str, Any]) -> list[Patch]:
    """``found``, and patches around the forwards of ``owners`` (classes or live modules), which
    call layers. A forward that is patched anyway does both."""
    how = bool(parts.get("activation_offloading")), bool(parts.get("keep_attention"))
    if not any(how):
        return found
    label = ", ".join(itertools.compress(("offloading", "keeping attention"), how))
    around = lambda forward: _around_layers(forward, *how)
    rest, result = {id(owner): owner for owner in owners}, []
    patched = set()
    for p in found:
        if id(p.owner) in rest and p.attribute in ("forward", OLD_FORWARD):
            patched.add(id(p.owner))
            p = dataclasses.replace(p, new=around(p.new), labels=(_both(p.label, label),))
            if isinstance(p.owner, nn.Module) and p.new is _of_class(type(p.owner), p.attribute):
                continue  # the class is patched so
        result.append(p)
    for owner in (owner for i, owner in rest.items() if i not in patched):
        cls = owner if isinstance(owner, type) else type(owner)
        p = Patch(cls, "forward", around(original(cls, "forward")), (label,), around)
        result += [p] if owner is cls else on_instance(owner, p)
    return result


def _ropes_of_parts(model_type: str, parts: Mapping[str, Any], rows: Rows, taken: set[tuple[Any, str]]) -> list[Patch]:
    """Patches of rope functions if only the types of parts in the same module know the form of
    the tables, and all of these agree."""
    found: dict[tuple[Any, str], set[Patch]] = {}
    config = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING and parts.get("rope") else PretrainedConfig
    for t in (getattr(c, "model_type", "") for c in config.sub_configs.values()):
        if t in CONFIG_MAPPING and CONFIG_MAPPING[t].__module__ == config.__module__:
            for p in _patches([t], {"rope": True}, None, rows):
                found.setdefault((p.owner, p.attribute), set()).add(p)
    return [p for at, (p, *others) in found.items() if at not in taken and not others]


# -- patches of live modules -----------------------------------------------------------------------


def instance_patches(
    model: nn.Module, model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family
) -> Patches:
    """``class_patches`` for the modules of one live model. Their classes identify them wherever
    they are (PEFT wrappers, towers); nothing else changes.

    A function, such as a rope, belongs to a Python module, not to a model: methods that call it are
    compiled again, with our function in its place. For example, in a Llama of one layer

        LlamaRMSNorm.forward <- rms_norm(...)       gives three patches, of the norms of this model
        modeling_llama.apply_rotary_pos_emb <- ...  gives one, of the forward of its attention
    """
    own = [c.model_type for c in configs_of(getattr(model, "config", None)) if getattr(c, "model_type", "")]
    of_all = list(dict.fromkeys(_patches(dict.fromkeys([model_type, *own]), parts, head, rows)))
    modules: dict[type, list[nn.Module]] = {}
    for m in model.modules():
        modules.setdefault(type(m), []).append(m)
    choices = (
        (rewrite.NORMS, parts.get("rms_norm")),
        (rewrite.PROJECTIONS, parts.get("projections")),
        (rewrite.MASKS, head),
    )
    fuse = frozenset(part for part, on in choices if on)
    functions = [p for p in of_all if isinstance(p.owner, types.ModuleType) and not p.applied]
    compiled = {(cls, name): patch for cls in modules for name, patch in _methods_seeing(cls, functions, fuse)}
    found: list[Patch] = []
    for p in (p for p in of_all if isinstance(p.owner, type)):
        is_head, keep = p.labels[0] in HEADS, p.labels[0] == HEADS[True]
        for cls in [cls for cls in modules if issubclass(cls, p.owner)]:
            theirs, seeing = original(cls, p.attribute), compiled.get((cls, p.attribute))
            if theirs is original(p.owner, p.attribute):
                if seeing and is_head:
                    # The forward of a model both calls one of our functions and ends in the head: it
                    # is one attribute, so one patch does both.
                    del compiled[cls, p.attribute]
                    both = fused_head(seeing.new, keep)
                    p_here = dataclasses.replace(p, new=both, labels=(*p.labels, *seeing.labels))
                elif seeing and p.around is None:
                    continue  # the steps of this forward are fused in the compiled method, too
                else:
                    p_here = p
            elif is_head and not p.applied and _of_user(theirs):
                # a subclass: its forward calls that of its base, or does everything itself
                p_here = dataclasses.replace(p, new=fused_head(theirs, keep, known=False), around=None)
            else:
                continue
            for m in modules[cls]:
                for q in on_instance(m, p_here):  # around a forward of the module's own, the head alone
                    found.append(q if q.new is p_here.new else dataclasses.replace(q, labels=p.labels))
    found += [q for (cls, _), p in compiled.items() for m in modules[cls] for q in on_instance(m, p)]
    # not a layer that holds layers: its forward checkpoints only while it is its class's own
    callers_of_layers = [
        m for m in model.modules() if long_rows.layers_of(m) and not isinstance(m, GradientCheckpointingLayer)
    ]
    if parts.get("activation_offloading") and not callers_of_layers:
        once.warn(
            type(model).__name__,
            "activation_offloading",
            "it has no layers that can be checkpointed, so nothing is offloaded",
        )
    return Patches(_around_too(found, callers_of_layers, parts))


def _methods_seeing(cls: type, functions: list[Patch], fuse: Parts) -> Iterator[tuple[str, Patch]]:
    """The methods of ``cls`` that look up patched ``functions`` of Python modules, each with a patch
    in which it reads ours."""
    readers: dict[tuple[str, types.FunctionType], list[Patch]] = {}
    names = {p.owner.__name__ for p in functions}
    # bases elsewhere, such as nn.Module, have hundreds of methods, none of which is of these modules
    bases = [base for base in reversed(cls.__mro__) if base.__module__ in names and KEY not in vars(base)]
    attributes = dict.fromkeys(attribute for base in bases for attribute in vars(base))
    for attribute in attributes:
        method = original(cls, attribute)
        core = wrappers.core(method)
        for p in functions if isinstance(core, types.FunctionType) else ():
            if core.__globals__ is p.owner.__dict__ and p.attribute in core.__code__.co_names:
                readers.setdefault((attribute, method), []).append(p)
    for (attribute, method), patches in readers.items():
        swaps = tuple((p.attribute, original(p.owner, p.attribute), p.new) for p in patches)
        if (new := _seeing(method, swaps, fuse)) is not None:
            yield attribute, Patch(cls, attribute, new, tuple(dict.fromkeys(p.label for p in patches)))
        else:
            unpatched = ", ".join(dict.fromkeys(p.attribute for p in patches))
            once.warn(cls.__name__, attribute, f"its source cannot be read, so {unpatched} is not patched there")


def on_instance(m: nn.Module, p: Patch) -> list[Patch]:
    """The patch ``p`` of a class for ``m``, a module of it; none if its class is patched so already.

    If other code has replaced the function on this module, the patch is ``p.around`` that
    function; without ``around`` there is none.
    """
    if p.new is _of_class(type(m), p.attribute):
        return []
    place = OLD_FORWARD if p.attribute == "forward" and OLD_FORWARD in m.__dict__ else p.attribute
    there = m.__dict__.get(KEY, {}).get(place, m.__dict__.get(place))
    if there is None or p.attribute in methods_of(m) or is_method(m, place, p.attribute):
        return [dataclasses.replace(p, owner=m)]
    new = exchange.of_experts(there, m, p.new)
    if new is None and p.around is not None:
        bound = isinstance(there, types.MethodType) and there.__self__ is m
        new = ours(p.around(there.__func__ if bound else lambda self, *args, **kwargs: there(*args, **kwargs)))
    return [] if new is None else [dataclasses.replace(p, owner=m, attribute=place, new=new)]


def _of_class(cls: type, attribute: str) -> Any:
    """What ``cls`` has now, without the methods that one module of it got from us."""
    return next((vars(c)[attribute] for c in cls.__mro__ if attribute in vars(c) and KEY not in vars(c)), None)


def _is_foreign(function: Any) -> bool:
    """Whether other code put the function where it is: it comes from another module, even if
    ``functools.wraps`` gave it the name of the function inside."""
    function = wrappers.core(function)
    return isinstance(function, types.FunctionType) and not function.__globals__.get("__name__", "").startswith(
        ("transformers.", "torch.", "kernels.")
    )


def _of_user(forward: Any) -> bool:
    """Whether a class's ``forward`` is a function that is not from transformers."""
    return isinstance(forward, types.FunctionType) and not (forward.__module__ or "").startswith("transformers.")
