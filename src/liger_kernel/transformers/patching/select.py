"""Select the patches for the classes of a model type, or for the modules of one live model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory
from liger_kernel.patch_options import level_of
from liger_kernel.transformers import fp8, trl_head
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.lazy_mask import lazily
from liger_kernel.transformers.patching.around_layers import around_layers, layers_of
from liger_kernel.transformers.patching.graphed import graphed
from liger_kernel.transformers.patching.patches import (
    KEY,
    OLD_FORWARD,
    Patch,
    Patches,
    core,
    is_method,
    methods_of,
    original,
    ours,
    stock_class,
    warn_once,
    within,
)
from liger_kernel.transformers.patching.unpad import takes_tokens
from liger_kernel.transformers.recognise.attentions import makers_of
from liger_kernel.transformers.recognise.experts import IN_BLOCKS
from liger_kernel.transformers.recognise.families import Family, configs_of, family, makes, recognised, rows_of
from liger_kernel.transformers.recognise.mlps import GLU, MLP, tiled
from liger_kernel.transformers.recognise.recurrences import carries
from liger_kernel.transformers.recognise.slots import PLAIN_MLP, SLOT_OF, TORCHS_OWN, VARIANTS
from liger_kernel.transformers.recognise.storages import experts_in_blocks
from liger_kernel.transformers.recognise.variant import LINEARS, OF_EXPERTS
from liger_kernel.transformers.rewrite import rules
from liger_kernel.transformers.rewrite.rules import GATES, MASKS, NORMS, PROJECTIONS

# What patches of a forward are called, by the rules that rewrite it: in layers, and in other
# classes
_IN_LAYERS = {NORMS: "add_norm", PROJECTIONS: "projections"}
_IN_OTHERS = {NORMS: "norm_rope", PROJECTIONS: "projections", MASKS: "masks", GATES: "gates"}
HEADS = ("fused head", "logits head")  # the labels of patches of a head: without logits, and with
CHEAP = {"rms_norm", "layer_norm", "glu", "relu_squared"}  # one pass over memory recomputes the outputs of these slots
Parts = frozenset[str]


@functools.cache
def made(make: Callable, function: Callable, *args: Any) -> Callable:
    """``make(function, *args)``, which replaces something of Transformers. Cached, because a patch
    must be the same when it is selected again."""
    return _calling_as(function, ours(make(function, *args)))


def _calling_as(function: Callable, new: Callable) -> Callable:
    """``new``, which calls the linear layers that ``function`` calls."""
    if function in LINEARS:
        LINEARS[new] = LINEARS[function]
    return new


def replacement(stock: Callable, label: str, tiles: bool | int = False) -> Callable:
    """What the variant ``label`` makes of ``stock``, with its parameter names."""
    variant, stock = VARIANTS[label], _as_function(stock)
    return _named_as(variant(stock, tiles) if isinstance(variant, GLU | MLP) else variant(stock), stock)


def _as_function(stock: Callable) -> Callable:
    """``stock``, which is a module if Transformers lets the library ``kernels`` replace it, as a
    function with its signature. What ``kernels`` has put there still runs."""
    if not isinstance(stock, nn.Module):
        return stock
    call = lambda *args, **kwargs: stock(*args, **kwargs)
    vars(call)["__signature__"] = inspect.signature(stock.forward)
    return call


def _named_as(function: Any, stock: Callable) -> Callable:
    """``function`` with the parameter names of ``stock``, because callers may use them. The
    names change in its code object, so calls cost nothing more.

    For stock's ``forward(self, x)``, ``def forward(self, hidden_states)`` becomes
    ``def forward(self, x)``; a local variable ``x`` of it becomes ``_x``.
    """
    code = function.__code__
    theirs = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    ours = code.co_varnames[: code.co_argcount]
    new = {old: name for old, name in zip(ours, theirs) if old != name}
    # a closure's names cannot be renamed, nor can two parameters exchange their names
    if len(theirs) >= code.co_argcount and not set(new.values()) & {*code.co_freevars, *ours}:
        new |= {name: f"_{name}" for name in new.values()}
        names = {part: tuple(new.get(n, n) for n in getattr(code, part)) for part in ("co_varnames", "co_cellvars")}
        function.__code__ = code.replace(**names)
    return function


def _rewritten(forward: Callable, parts: Parts, level: str = "off", swaps: rules.Swaps = ()) -> Callable:
    """``forward``, maybe in wrappers, rewritten by the rules ``parts``: see ``rules.fused``."""
    inner = core(forward)
    new = rules.fused(inner, parts, level, swaps) or memory.rematerialised(inner, level)
    return _calling_as(new, within(forward, lambda _: new))


def _rules(norms: Any, parts: Mapping[str, Any], head: str | None) -> Parts:
    wanted = norms, parts.get("projections"), head, parts.get("recurrent")
    return frozenset(itertools.compress((NORMS, PROJECTIONS, MASKS, GATES), wanted))


# -- patches of classes and of functions in Python modules


def _patches(
    model_types: Iterable[str], parts: Mapping[str, Any], head: str | None, live: bool = False
) -> Iterator[Patch]:
    """All patches of these types and their parts, including patches for PyTorch's own classes.
    Only the first type's head is patched. ``live``: for one model, of which functions that read what
    is replaced are compiled again (``_methods_seeing``), steps included.

    Llama with everything on, without tiles:

        LlamaRMSNorm.forward <- rms_norm(...)          LlamaMLP.forward <- glu(...)
        modeling_llama.apply_rotary_pos_emb <- rope(...)
        LlamaAttention.forward <- projections          LlamaModel.forward <- masks
        LlamaDecoderLayer.forward <- add_norm, rematerialised(cheap)
        LlamaForCausalLM.forward <- fused head
    """
    model_types = list(model_types)
    for i, (module, row) in enumerate(rows_of(model_types)):
        # what stands for one function of stock: a norm's forward, a rope function
        yield from (slots := list(_of_slots(model_types[0], module, row, parts)))
        # forwards that go on calling these, with neighbouring steps joined
        functions = {p.attribute for p in slots if live and isinstance(p.owner, types.ModuleType) and not p.applied}
        yield from _of_steps(module, row, parts, head, functions)
        # a vision tower's own type has no head that a loss follows
        for name in row.heads if i == 0 and head and not row.fused else ():
            if hasattr(module, name):  # another version may not have the class
                cls, how = getattr(module, name), (head == "logits", parts.get("head_memory", "auto"))
                around = functools.partial(fused, keep_logits=how[0], memory=how[1])
                yield Patch(cls, "forward", made(fused, original(cls, "forward"), *how), (HEADS[how[0]],), around)


def _of_slots(model_type: str, module: types.ModuleType, row: Family, parts: Mapping[str, Any]) -> Iterator[Patch]:
    """Norms, MLPs, experts, attention with sinks and rope functions that a variant replaces."""
    tiles = parts.get("tiled_mlp", False)
    for name, label in row.swapped.items():
        # The tiles of an MLP are a flag of their own: with its kernel off, its stock forward is
        # tiled
        on, tiling = parts.get(SLOT_OF[label]), bool(tiles) and isinstance(VARIANTS[label], GLU | MLP)
        owner, attribute = _place(module, name)
        if not (on or tiling) or not hasattr(owner, attribute):  # another version may not have the attribute
            continue
        stock = original(owner, attribute)
        if _is_foreign(stock):
            warn_once(f"{model_type}: {name}: other code has replaced it, so it is not patched")
            continue
        if on and SLOT_OF[label] == "attention":
            # it does not read masks that are made when they are read
            makers = {maker: original(module, maker) for maker in makers_of(module)}
            yield from (Patch(module, n, made(lazily, f), (label,)) for n, f in makers.items() if not _is_foreign(f))
        new = made(replacement, stock, label, tiles) if on else made(tiled, stock, tiles)
        yield Patch(owner, attribute, new, (_both(label if on else "", "tiled" if tiling else ""),))


def _place(module: types.ModuleType, name: str) -> tuple[Any, str]:
    """Owner and attribute of the function that the table of families calls ``name``."""
    if name in TORCHS_OWN:
        return getattr(nn, TORCHS_OWN[name][0]), "forward"
    there = getattr(module, name, None)
    return (there, "forward") if isinstance(there, type) else (module, name)


def _both(*labels: str) -> str:
    return ", ".join(filter(None, labels))


def _of_steps(
    module: types.ModuleType, row: Family, parts: Mapping[str, Any], head: str | None, seen: set[str]
) -> Iterator[Patch]:
    """Forwards, of layers and of other classes, in which neighbouring steps run together, and
    plain MLPs in tiles. Not of other classes that read one of the functions ``seen``."""
    tiles = parts.get("tiled_mlp", False)
    slots = {slot for slot in map(SLOT_OF.__getitem__, row.swapped.values()) if parts.get(slot)}
    wanted = _rules("rms_norm" in slots, parts, head)
    layers = _classes(module, GradientCheckpointingLayer)
    # these handle their linear layers themselves, or their flag is off
    done = {vars(module).get(name) for name in row.swapped} | set(layers)
    plain = {vars(module).get(n) for n, why in row.left_alone.items() if tiles and why == PLAIN_MLP} - {None}
    ropes = {name for name, label in row.swapped.items() if SLOT_OF[label] == "rope" and "rope" in slots}
    classes = [c for c in _classes(module, nn.Module) if "forward" in c.__dict__ or c in layers]
    for cls in sorted(classes, key=lambda c: c in layers):
        stock = original(cls, "forward")
        inner, names, found, level = core(stock), _IN_OTHERS, frozenset[str](), "off"
        if cls in layers:
            level = level_of(parts.get("rematerialise")) if slots & CHEAP else "off"
            names, found = _IN_LAYERS, rules.parts_in(inner, wanted, level)
        elif cls not in done and isinstance(inner, types.FunctionType) and not seen & {*inner.__code__.co_names}:
            # norms of heads run together with their rotation, in a forward that rotates
            found = rules.parts_in(inner, wanted if ropes & set(inner.__code__.co_names) else wanted - {NORMS})
        label = _both(*(names[part] for part in names if part in found), f"rematerialised({level})" * (level != "off"))
        new = made(_rewritten, stock, found, level) if found or level != "off" else stock
        if cls in plain and not _is_foreign(stock):
            new, label = made(tiled, new, tiles), _both(label, "tiled")
        if new is not stock:
            around = None if level == "off" else functools.partial(memory.rematerialised, level=level)
            yield Patch(cls, "forward", new, (label,), around)


def _classes(module: types.ModuleType, base: type) -> list[type]:
    # before issubclass: for Python 3.10, list[int] is a type that is no class
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in own if issubclass(c, base)]


def class_patches(model_type: str, parts: Mapping[str, Any], head: str | None) -> Patches:
    """Patches of the classes of ``model_type`` and of the model types of its parts. Classes of
    PyTorch and of other families are not patched.

    ``parts``: slot -> whether to replace it, "rematerialise": a level of ``memory``, "fp8": a
    request, and the flags for long rows. ``head``: "fused", "logits" (fused loss on real logits) or
    None.
    """
    modules = [module for module, _ in rows_of([model_type])]
    own = {module.__name__ for module in modules}
    every = _patches([model_type], parts, head)
    found = [p for p in every if not isinstance(p.owner, type) or p.owner.__module__ in own]
    if any(around := _around([model_type], parts)):
        found = _around_callers(found, [cls for module in modules for cls in _callers_of_layers(module)], around)
    if (when := parts.get("graphs")) and (row := family(model_type)) is not None:
        heads = [getattr(modules[0], name) for name in row.heads if hasattr(modules[0], name)]
        found = _around_too(found, heads, "graphs", lambda forward: made(graphed, forward, when))
    if request := parts.get("fp8"):
        for cls in (c for module in modules for c in _classes(module, PreTrainedModel)):
            new = made(fp8.converting, original(cls, "__init__"), request)
            found.append(Patch(cls, "__init__", new, (str(request),)))
    found += _ropes_of_parts(model_type, parts, {(p.owner, p.attribute) for p in found})
    return Patches(dict.fromkeys(found))


def _callers_of_layers(module: types.ModuleType) -> list[type]:
    """The classes with lists of modules, which may be layers: only a live module shows whether
    they are."""
    others = (c for c in _classes(module, nn.Module) if not issubclass(c, GradientCheckpointingLayer))
    return [c for c in others if "forward" in vars(c) and makes(c, "ModuleList")]


def _around(model_types: Iterable[str], parts: Mapping[str, Any]) -> tuple[bool, ...]:
    """What runs around the forwards that call layers: the arguments of ``around_layers``."""
    of_all = [row for _, row in rows_of(model_types)] if parts.get("recurrent") else []
    # whether all functions of these types that carry a state know where documents end
    known = any(SLOT_OF[label] == "recurrent" for row in of_all for label in row.swapped.values())
    apart = known and not any(carries(name) for row in of_all for name in row.left_alone)
    return (apart, *(bool(parts.get(name)) for name in ("activation_offloading", "keep_attention", "unpad")))


def _around_callers(found: list[Patch], callers: list[Any], around: tuple[bool, ...]) -> list[Patch]:
    """``found``, and ``around_layers`` of the forwards of ``callers``."""
    names = "packed documents", "offloading", "keeping attention", "no padding"
    label = ", ".join(itertools.compress(names, around))
    return _around_too(found, callers, label, lambda forward: made(around_layers, forward, *around))


def _around_too(found: list[Patch], owners: list[Any], label: str, around: Callable[[Any], Callable]) -> list[Patch]:
    """``found``, and patches around the forwards of ``owners`` (classes or live modules). A forward
    that is patched anyway does both."""
    rest, result = {id(owner): owner for owner in owners}, []
    patched = set()
    for p in found:
        if id(p.owner) in rest and p.attribute in ("forward", OLD_FORWARD):
            patched.add(id(p.owner))
            p = dataclasses.replace(p, new=around(p.new), labels=(*p.labels, label))
            if isinstance(p.owner, nn.Module) and p.new is _of_class(type(p.owner), p.attribute):
                continue  # the class is patched so
        result.append(p)
    for owner in (owner for i, owner in rest.items() if i not in patched):
        cls = owner if isinstance(owner, type) else type(owner)
        p = Patch(cls, "forward", around(original(cls, "forward")), (label,), around)
        result += [p] if owner is cls else on_instance(owner, p)
    return result


def _ropes_of_parts(model_type: str, parts: Mapping[str, Any], patched: set[tuple[Any, str]]) -> list[Patch]:
    """Patches of rope functions if only the types of parts in the same module know the form of
    the tables, and all of these agree."""
    found: dict[tuple[Any, str], set[Patch]] = {}
    config = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING and parts.get("rope") else PretrainedConfig
    for t in (getattr(c, "model_type", "") for c in config.sub_configs.values()):
        if t in CONFIG_MAPPING and CONFIG_MAPPING[t].__module__ == config.__module__:
            for p in _patches([t], {"rope": True}, None):
                found.setdefault((p.owner, p.attribute), set()).add(p)
    return [p for at, (p, *others) in found.items() if at not in patched and not others]


# -- patches of live modules


def instance_patches(model: nn.Module, model_type: str, parts: Mapping[str, Any], head: str | None) -> Patches:
    """``class_patches`` for the modules of one live model. Their classes identify them wherever
    they are (PEFT wrappers, towers); nothing else changes.

    A function, such as a rope, belongs to a Python module, not to a model: methods that call it are
    compiled again, with our function in its place. In a Llama of one layer

        LlamaRMSNorm.forward <- rms_norm(...)       gives three patches, of the norms of this model
        modeling_llama.apply_rotary_pos_emb <- ...  gives one, of the forward of its attention
        LlamaAttention.forward <- projections       gives none: the compiled forward does this, too
    """
    # a model's configuration may have parts of other types than its own type's default has
    own = [c.model_type for c in configs_of(getattr(model, "config", None)) if getattr(c, "model_type", "")]
    of_all = list(dict.fromkeys(_patches(dict.fromkeys([model_type, *own]), parts, head, live=True)))
    modules: dict[type, list[nn.Module]] = {}
    for m in model.modules():
        modules.setdefault(type(m), []).append(m)
    # if a class patch has replaced the function for everybody, its readers need nothing more
    functions = [p for p in of_all if isinstance(p.owner, types.ModuleType) and not p.applied]
    fuse = _rules(parts.get("rms_norm"), parts, head)
    compiled = {(cls, name): patch for cls in modules for name, patch in _methods_seeing(cls, functions, fuse)}
    found: list[Patch] = []
    memory = parts.get("head_memory", "auto")
    for p in (p for p in of_all if isinstance(p.owner, type)):
        is_head, keep = p.labels[0] in HEADS, p.labels[0] == HEADS[True]
        for cls in [cls for cls in modules if issubclass(cls, p.owner)]:
            theirs, seeing = original(cls, p.attribute), compiled.get((cls, p.attribute))
            if theirs is original(p.owner, p.attribute):
                if seeing and is_head:
                    # The forward of a model both calls one of our functions and ends in the head:
                    # it is one attribute, so one patch does both.
                    del compiled[cls, p.attribute]
                    both = made(fused, seeing.new, keep, memory)
                    p_here = dataclasses.replace(p, new=both, labels=(*p.labels, *seeing.labels))
                elif seeing and p.around is None:
                    continue  # the steps of this forward are fused in the compiled method, too
                else:
                    p_here = p
            elif is_head and not p.applied and _of_user(theirs):
                # a subclass: its forward calls that of its base, or does everything itself
                p_here = dataclasses.replace(p, new=made(fused, theirs, keep, memory, False), around=None)
            else:
                continue  # another forward than the one that was recognised
            for m in modules[cls]:
                for q in on_instance(m, p_here):  # around a forward of the module's own, the head alone
                    found.append(q if q.new is p_here.new else dataclasses.replace(q, labels=p.labels))
    found += [q for (cls, _), p in compiled.items() for m in modules[cls] for q in on_instance(m, p)]
    # a subclass may have the forward of its family's class, which is patched by now
    done = {id(p.owner) for p in found}
    others = _of_other_classes(model, modules, parts, not rows_of([model_type]))
    found += [p for p in others if id(p.owner) not in done]
    if any(around := _around([model_type, *own], parts)):
        # not a layer that holds layers: its forward checkpoints only while it is its class's own
        callers = [m for m in model.modules() if layers_of(m) and not isinstance(m, GradientCheckpointingLayer)]
        name = type(model).__name__
        if parts.get("unpad") and not any(takes_tokens(type(m).forward) for m in callers):
            warn_once(f"unpad: {name} computes padding, too: what calls its layers takes no input_ids or position_ids")
        if parts.get("activation_offloading") and not callers:
            why = "it has no layers that can be checkpointed, so nothing is offloaded"
            warn_once(f"{name}: activation_offloading: {why}")
        found = _around_callers(found, callers, around)
    if when := parts.get("graphs"):  # of the model inside of what PEFT has put around it
        found = _around_too(found, trl_head.layers(model)[-1:], "graphs", lambda forward: made(graphed, forward, when))
    return Patches(found)


def other_classes(model: nn.Module, of_no_family: bool) -> dict[type, tuple[str, str]]:
    """The classes in ``model`` that no table describes, and what is ``recognised`` of each.
    ``of_no_family``: those of Transformers and PyTorch's LayerNorm, too, as the model is of none."""
    known = {"torch", "liger_kernel", "peft"} | (set() if of_no_family else {"transformers"})
    is_other = lambda c: c.__module__.partition(".")[0] not in known or (of_no_family and c is nn.LayerNorm)
    classes = filter(is_other, dict.fromkeys(map(stock_class, model.modules())))
    return {cls: recognised(cls, original(cls, "forward", None)) for cls in classes}


def _of_other_classes(
    model: nn.Module, modules: Mapping[type, list[nn.Module]], parts: Mapping[str, Any], of_no_family: bool
) -> Iterator[Patch]:
    """Patches of norms, MLPs and experts whose classes no table describes."""
    labels = {cls: label for cls, (label, _) in other_classes(model, of_no_family).items()}
    for of_class in modules.values():
        cls, new = stock_class(of_class[0]), None
        label = labels.get(cls, "")
        if label and parts.get(SLOT_OF[label]):
            new = made(replacement, original(cls, "forward"), label, parts.get("tiled_mlp", False))
        elif parts.get("glu") and experts_in_blocks(of_class[0]):
            label, new = IN_BLOCKS.label, made(IN_BLOCKS, original(cls, "forward"))
        for m in of_class if new is not None else ():
            yield from on_instance(m, Patch(cls, "forward", new, (label,)))


def _methods_seeing(cls: type, functions: list[Patch], fuse: Parts) -> Iterator[tuple[str, Patch]]:
    """The methods of ``cls`` that look up patched ``functions`` of Python modules, each with a
    patch in which it reads ours."""
    readers: dict[tuple[str, types.FunctionType], list[Patch]] = {}
    names = {p.owner.__name__ for p in functions}
    # bases elsewhere, such as nn.Module, have hundreds of methods, none of which is of these
    # modules
    bases = [base for base in reversed(cls.__mro__) if base.__module__ in names and KEY not in vars(base)]
    for attribute in dict.fromkeys(attribute for base in bases for attribute in vars(base)):
        method = original(cls, attribute)
        inner = core(method)
        for p in functions if isinstance(inner, types.FunctionType) else ():
            if inner.__globals__ is p.owner.__dict__ and p.attribute in inner.__code__.co_names:
                readers.setdefault((attribute, method), []).append(p)
    for (attribute, method), patches in readers.items():
        swaps = tuple((p.attribute, original(p.owner, p.attribute), p.new) for p in patches)
        if rules.fused(core(method), fuse, swaps=swaps) is None:
            names_of = ", ".join(dict.fromkeys(p.attribute for p in patches))
            warn_once(f"{cls.__name__}: {attribute}: its source cannot be read, so {names_of} is not patched there")
            continue
        new = made(_rewritten, method, fuse, "off", swaps)
        yield attribute, Patch(cls, attribute, new, tuple(dict.fromkeys(p.label for p in patches)))


def on_instance(m: nn.Module, p: Patch) -> list[Patch]:
    """The patch ``p`` of a class for ``m``, a module of it; none if its class is patched so
    already.

    If other code has replaced the function on this module, the patch is ``p.around`` that
    function; without ``around`` there is none.
    """
    if p.new is _of_class(type(m), p.attribute):
        return []
    place = OLD_FORWARD if p.attribute == "forward" and OLD_FORWARD in m.__dict__ else p.attribute
    there = m.__dict__.get(KEY, {}).get(place, m.__dict__.get(place))
    if there is None or p.attribute in methods_of(m) or is_method(m, place, p.attribute):
        return [dataclasses.replace(p, owner=m)]
    new = _exchanging(there, m, p.new)
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
    function = core(function)
    ships = ("transformers.", "torch.", "kernels.")
    return isinstance(function, types.FunctionType) and not function.__globals__.get("__name__", "").startswith(ships)


def _of_user(forward: Any) -> bool:
    """Whether a class's ``forward`` is a function that is not from transformers."""
    return isinstance(forward, types.FunctionType) and not (forward.__module__ or "").startswith("transformers.")


# -- experts that Transformers spreads over ranks

# Expert parallelism replaces the ``forward`` of each module of experts by a closure, which makes
# the weights local and calls an ``EPImplementation``. That brings tokens to the ranks of their
# experts, and calls ``experts_forward`` with local ids. It took ``experts_forward`` from the module
# when the closure was made: a patch of a class before that is found there; for a live module, the
# closure is made again around a copy of the implementation. So the exchange of tokens runs as it
# is.
_EXCHANGE, _CELL = "transformers.distributed.expert_parallel", "implementation"
# attribute of such a closure: our forward of experts -> what was made of both, as a patch must be
# the same when it is found again
_MADE = "_liger_exchanges"


def _exchanging(there: Any, m: nn.Module, new: Callable) -> Callable | None:
    """``there``, the forward in ``m`` itself, as a method that exchanges tokens for ``new``;
    None if it is no exchange, or ``new`` no experts."""
    if new not in OF_EXPERTS or not isinstance(there, types.FunctionType) or there.__module__ != _EXCHANGE:
        return None
    cells = dict(zip(there.__code__.co_freevars, there.__closure__ or ()))
    exchanges: dict[Callable, Callable] = there.__dict__.setdefault(_MADE, {})
    if new not in exchanges and _CELL in cells:
        implementation = _with_experts(cells[_CELL].cell_contents, types.MethodType(new, m))
        if implementation is None:
            return None
        closure = tuple((cells | {_CELL: types.CellType(implementation)}).values())
        of = there.__code__, there.__globals__, there.__name__, there.__defaults__, closure
        exchanged = types.FunctionType(*of)
        exchanges[new] = ours(lambda self, *args, **kwargs: exchanged(*args, **kwargs))
    return exchanges.get(new)


def _with_experts(implementation: Any, experts_forward: Any) -> Any | None:
    """A copy of Transformers' ``implementation``, and of those that it chooses among, that calls
    these experts; None if it is not Transformers' own."""
    if type(implementation).__module__ != _EXCHANGE:
        return None
    new = copy.copy(implementation)
    new.experts_forward = experts_forward
    for name, value in vars(new).items():
        if hasattr(value, "experts_forward"):
            if (inner := _with_experts(value, experts_forward)) is None:
                return None
            setattr(new, name, inner)
    return new
