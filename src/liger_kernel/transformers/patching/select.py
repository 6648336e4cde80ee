"""Select the patches for the classes of a model type, or for the modules of one live model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory
from liger_kernel.transformers import fp8, rewrite
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.lazy_mask import lazily
from liger_kernel.transformers.patching import exchange, long_rows, once, wrappers
from liger_kernel.transformers.patching.bound import ABSENT, Bound, ours, within
from liger_kernel.transformers.patching.values import Patch, Patches, original, remembered
from liger_kernel.transformers.recognise.attentions import makers_of
from liger_kernel.transformers.recognise.families import Rows, family, rows_of
from liger_kernel.transformers.recognise.family import Family, configs_of
from liger_kernel.transformers.recognise.mlps import GLU, MLP, tiled
from liger_kernel.transformers.recognise.slots import PLAIN_MLP, SLOT_OF, TORCHS_OWN, VARIANTS
from liger_kernel.transformers.recognise.variant import LINEARS, named_as


@dataclass(frozen=True)
class Head:
    """A patch of a model's ``forward``: the loss is computed from the head's input, or
    (``keep_logits``) from its logits, which are then returned."""

    keep_logits: bool

    def __str__(self) -> str:
        return "logits head" if self.keep_logits else "fused head"


@dataclass(frozen=True)
class HeadAndFunctions:
    """A patch of a model's ``forward`` that also calls our functions with these ``labels``: the
    forward is one attribute, so one patch does both."""

    head: Head
    labels: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join((str(self.head), *self.labels))


@dataclass(frozen=True)
class Layer:
    """A patch of a layer's ``forward``: residual additions run together with the norms after them,
    linear layers together with their adapters, and cheap activations are recomputed as the level
    says.
    """

    parts: frozenset[str]
    level: str

    def __str__(self) -> str:
        labels = [
            label
            for part, label in ((rewrite.NORMS, "add_norm"), (rewrite.PROJECTIONS, "projections"))
            if part in self.parts
        ]
        return ", ".join(labels + [f"rematerialised({self.level})"] * (self.level != "off"))


@dataclass(frozen=True)
class Fused:
    """A patch of another ``forward``: norms of heads run together with their rotation, linear
    layers together with their adapters, and masks of a model that numbers its tokens are made
    without looking at positions.
    """

    parts: frozenset[str]

    def __str__(self) -> str:
        labels = ((rewrite.NORMS, "norm_rope"), (rewrite.PROJECTIONS, "projections"), (rewrite.MASKS, "masks"))
        return ", ".join(label for part, label in labels if part in self.parts)


@dataclass(frozen=True)
class Also:
    """A patch that changes what ``other`` says, if anything, and what ``label`` says."""

    other: object
    label: str

    def __str__(self) -> str:
        return ", ".join(filter(None, (str(self.other), self.label)))


@functools.cache
def _variant(label: str, stock: Callable, tiles: bool | int = False) -> Callable:
    variant = VARIANTS[label]
    return ours(named_as(variant(stock, tiles) if isinstance(variant, GLU | MLP) else variant(stock), stock))


@functools.cache
def _tiled(forward: Callable, tiles: bool | int) -> Callable:
    return _with_linears_of(forward, ours(tiled(forward, tiles)))


def _with_linears_of(forward: Callable, new: Callable) -> Callable:
    """Register that ``new`` calls the same linear layers as ``forward``, and return ``new``."""
    if forward in LINEARS:
        LINEARS[new] = LINEARS[forward]
    return new


@functools.cache
def _around_layers(forward: Callable, offloads: bool, keeps: bool) -> Callable:
    return _with_linears_of(forward, ours(long_rows.around(forward, offloads, keeps)))


@functools.cache
def fused_head(forward: Callable, keep_logits: bool, known: bool = True) -> Callable:
    return ours(fused(forward, keep_logits=keep_logits, known=known))


@functools.cache
def _converting(init: Callable, wish: fp8.Wish) -> Callable:
    return ours(fp8.converting(init, wish))


def _change(forward: Callable, level: str, parts: frozenset[str]) -> Callable:
    forward = (parts and rewrite.fused(forward, parts)) or forward
    return forward if level == "off" else memory.rematerialised(forward, level)


def _as_within(new: Callable, forward: Callable, parts: frozenset[str]) -> Callable:
    """Register that ``new`` calls the same linear layers as ``forward`` with its patterns fused,
    and return ``new``."""
    if parts and (inner := rewrite.fused(wrappers.core(forward), parts)) in LINEARS:
        LINEARS[new] = LINEARS[inner]
    return new


@functools.cache
def _layer(forward: Callable, level: str, parts: frozenset[str], of_class: bool) -> Callable:
    new = ours(wrappers.within(forward, functools.partial(_change, level=level, parts=parts), of_class=of_class))
    return _as_within(new, forward, parts)


@functools.cache
def _live_layer(stock: Callable, level: str, parts: frozenset[str]) -> Callable:
    """The new forward for one layer of a class with the forward ``stock``. The class, which
    FSDP2 may change later, decides about checkpointing."""
    usual = _layer(stock, level, parts, False)

    def forward(self, *args, **kwargs):
        outer = type(self).forward
        return (usual if outer is stock or not within(outer, stock) else _layer(outer, level, parts, False))(
            self, *args, **kwargs
        )

    return _as_within(ours(forward), stock, parts)


@functools.cache
def _fused(forward: types.FunctionType, parts: frozenset[str]) -> Callable:
    return _as_within(ours(wrappers.within(forward, lambda f: rewrite.fused(f, parts) or f)), forward, parts)


def _fusible(
    module: types.ModuleType, row: Family, parts: frozenset[str], swapped: set[type]
) -> Iterator[tuple[type, Fused]]:
    """The classes with patterns of these parts in their forward, each with a patch: attention
    and other classes with linear layers, except the ``swapped``."""
    ropes = {name for name, label in row.swapped.items() if SLOT_OF[label] == "rope"}
    for cls in vars(module).values():
        if not (
            isinstance(cls, type)
            and issubclass(cls, nn.Module)
            and cls.__module__ == module.__name__
            and "forward" in cls.__dict__
        ):
            continue
        forward = wrappers.core(original(cls, "forward"))
        if cls in swapped or not isinstance(forward, types.FunctionType):
            continue
        turns = bool(ropes & set(forward.__code__.co_names))
        if found := rewrite.parts_in(forward, parts if turns else parts - {rewrite.NORMS}):
            yield cls, Fused(found)


_lazily = functools.cache(lambda make: ours(lazily(make)))


def _lazy_masks(module: types.ModuleType, label: str) -> Iterator[Patch]:
    """Patches of the functions that make masks: the attention of this variant does not read
    masks that are made when they are read."""
    for name in makers_of(module):
        stock = original(module, name)
        if not _is_foreign(stock):
            yield Patch(module, name, _lazily(stock), label)


CHEAP = {"rms_norm", "layer_norm", "glu", "relu_squared"}  # one pass over memory recomputes the outputs of these slots


def _layers(module: types.ModuleType) -> list[type]:
    """The classes of layers: checkpointing would recompute each layer as a whole."""
    return _classes(module, GradientCheckpointingLayer)


def _classes(module: types.ModuleType, base: type) -> list[type]:
    return [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
    ]


def _patches(model_types: Iterable[str], parts: Mapping[str, Any], head: str | None, rows: Rows) -> Iterator[Patch]:
    """All patches of these types and their parts, including patches for PyTorch's own classes.
    Only the first type's head is patched."""
    model_types = list(model_types)
    for i, (module, row) in enumerate(rows_of(model_types, rows)):
        tiles = parts.get("tiled_mlp", False)
        for name, label in row.swapped.items():
            on, tiling = parts.get(SLOT_OF[label]), bool(tiles) and isinstance(VARIANTS[label], GLU | MLP)
            if not (on or tiling):
                continue
            if name in TORCHS_OWN:
                owner, attribute = getattr(nn, TORCHS_OWN[name][0]), "forward"
            else:
                owner, attribute = (
                    (getattr(module, name, None), "forward")
                    if isinstance(getattr(module, name, None), type)
                    else (module, name)
                )
            if not hasattr(owner, attribute):  # other versions of transformers may not have this attribute
                continue
            if _is_foreign(original(owner, attribute)):
                once.warn(model_types[0], name, "other code has replaced it, so it is not patched")
            else:
                stock = original(owner, attribute)
                if on and SLOT_OF[label] == "attention":
                    yield from _lazy_masks(module, label)
                new = _variant(label, stock, tiles) if on else _tiled(stock, tiles)
                yield Patch(owner, attribute, new, Also(label if on else "", "tiled") if tiling else label)
        level = memory.level_of(parts.get("rematerialise"))
        served = {slot for slot in map(SLOT_OF.__getitem__, row.swapped.values()) if parts.get(slot)}
        wanted = {rewrite.NORMS} if "rms_norm" in served else set()
        wanted |= {part for part, on in ((rewrite.PROJECTIONS, parts.get("projections")), (rewrite.MASKS, head)) if on}
        swapped = {
            vars(module).get(name) for name in row.swapped
        }  # these handle their linear layers themselves, or their flag is off
        plain = dict.fromkeys(
            vars(module)[name]
            for name, why in row.left_alone.items()
            if tiles and why == PLAIN_MLP and hasattr(module, name)
        )
        for cls, what in _fusible(
            module,
            row,
            frozenset(wanted if "rope" in served else wanted - {rewrite.NORMS}),
            swapped | set(_layers(module)),
        ):
            new = _fused(original(cls, "forward"), what.parts)
            yield (
                Patch(cls, "forward", _tiled(new, tiles), Also(what, "tiled"))
                if cls in plain
                else Patch(cls, "forward", new, what)
            )
            plain.pop(cls, None)
        for cls in plain:
            if not _is_foreign(original(cls, "forward")):
                yield Patch(cls, "forward", _tiled(original(cls, "forward"), tiles), Also("", "tiled"))
        level = level if served & CHEAP else "off"
        for cls in _layers(module):
            stock = original(cls, "forward")
            found = rewrite.parts_in(wrappers.core(stock), frozenset(wanted))
            if found or level != "off":
                yield Patch(cls, "forward", _layer(stock, level, found, True), Layer(found, level))
        for name in row.heads if i == 0 and head and not row.fused else ():
            if hasattr(module, name):
                cls = getattr(module, name)
                yield Patch(
                    cls, "forward", fused_head(original(cls, "forward"), head == "logits"), Head(head == "logits")
                )


def class_patches(model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family) -> Patches:
    """Patches of the classes of ``model_type`` and of the model types of its parts. Classes of
    PyTorch and of other families are not patched.

    ``parts``: slot -> whether to replace it, "rematerialise": a level of ``memory``, "fp8": a wish,
    and the flags for long rows. ``head``: "fused", "logits" (fused loss on real logits) or None.
    """
    own = {module.__name__ for module, _ in rows_of([model_type], rows)}
    found = [
        p
        for p in _patches([model_type], parts, head, rows)
        if not isinstance(p.owner, type) or p.owner.__module__ in own
    ]
    found = [
        *_around_too(
            found, (cls for module, _ in rows_of([model_type], rows) for cls in _callers_of_layers(module)), parts
        )
    ]
    if wish := parts.get("fp8"):
        models = [c for module, _ in rows_of([model_type], rows) for c in _classes(module, PreTrainedModel)]
        found += [Patch(cls, "__init__", _converting(original(cls, "__init__"), wish), wish) for cls in models]
    return Patches(
        dict.fromkeys([*found, *_ropes_of_parts(model_type, parts, rows, {(p.owner, p.attribute) for p in found})])
    )


def _callers_of_layers(module: types.ModuleType) -> list[type]:
    """The classes with lists of modules, which may be layers: only a live module shows whether
    they are."""
    classes = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, nn.Module) and c.__module__ == module.__name__
    ]
    makes = lambda c: (
        "ModuleList" in getattr(c.__dict__.get("__init__"), "__code__", _callers_of_layers.__code__).co_names
    )
    return [
        c for c in classes if "forward" in c.__dict__ and not issubclass(c, GradientCheckpointingLayer) and makes(c)
    ]


def _around_too(found: Iterable[Patch], owners: Iterable[Any], parts: Mapping[str, Any]) -> Iterator[Patch]:
    """``found``, and patches around the forwards of ``owners`` (classes or live modules), which
    call layers. A forward that is patched anyway does both."""
    how = bool(parts.get("activation_offloading")), bool(parts.get("keep_attention"))
    label = ", ".join(itertools.compress(("offloading", "keeping attention"), how))
    rest = {id(owner): owner for owner in (owners if any(how) else ())}
    patched = set()
    for p in found:
        if id(p.owner) in rest and p.attribute in ("forward", "_old_forward"):
            patched.add(id(p.owner))
            bound = isinstance(p.new, Bound)
            new = _around_layers(p.new.function if bound else p.new, *how)
            if bound and new is getattr(type(p.owner), p.attribute, None):
                continue  # the class is patched so
            p = Patch(
                p.owner,
                p.attribute,
                Bound(new, p.owner, p.new.name, p.new.stock) if bound else new,
                Also(p.what, label),
            )
        yield p
    around = lambda forward: _around_layers(forward, *how)
    for owner in (owner for i, owner in rest.items() if i not in patched):
        if isinstance(owner, type):
            yield Patch(owner, "forward", around(original(owner, "forward")), Also("", label))
        elif (
            bound_to := on_instance(owner, "forward", around(original(type(owner), "forward")), Also("", label), around)
        ) is not None:
            yield bound_to


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


def instance_patches(
    model: nn.Module, model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family
) -> Patches:
    """``class_patches`` for the modules of one live model. Their classes identify them wherever
    they are (PEFT wrappers, towers); nothing else changes.

    A function, such as a rope, belongs to a Python module, not to a model: methods that call it are
    compiled again, with our function in its place.
    """
    own = [c.model_type for c in configs_of(getattr(model, "config", None)) if getattr(c, "model_type", "")]
    of_all = list(dict.fromkeys(_patches(dict.fromkeys([model_type, *own]), parts, head, rows)))
    seen: dict[
        tuple[nn.Module, str, types.FunctionType], list[Patch]
    ] = {}  # module, method, its function -> the patches that it must see
    callers = functools.cache(_callers)  # cached only here, because methods of classes may be replaced later
    for p in of_all:
        for m in model.modules() if isinstance(p.owner, types.ModuleType) and not p.applied else ():
            for name, f in callers(type(m), p.owner, p.attribute):
                seen.setdefault((m, name, f), []).append(p)
    choices = (
        (rewrite.NORMS, parts.get("rms_norm")),
        (rewrite.PROJECTIONS, parts.get("projections")),
        (rewrite.MASKS, head),
    )
    fuse = frozenset(part for part, on in choices if on)
    found: list[Patch | None] = []
    compiled: dict[tuple[nn.Module, str], tuple[Callable, list[Patch]]] = {}  # module, method -> what sees the patches
    for (m, name, f), ps in seen.items():
        seeing = _seeing(
            f, tuple((p.attribute, original(p.owner, p.attribute), p.new) for p in ps), fuse
        )  # one function for all labels
        if seeing is None:
            once.warn(
                type(m).__name__,
                name,
                f"its source cannot be read, so {', '.join(dict.fromkeys(p.attribute for p in ps))} is not patched "
                "there",
            )
        else:
            compiled[m, name] = seeing, ps
    turning = {(m, name) for m, name, _ in seen}
    for p in of_all:
        for m in model.modules() if isinstance(p.owner, type) else ():
            if isinstance(p.what, Fused) and (m, "forward") in turning:
                continue  # in a live module, the patch of its rope function includes these
            if isinstance(m, p.owner) and original(type(m), p.attribute) is original(p.owner, p.attribute):
                new, around, what = p.new, None, p.what
                if isinstance(p.what, Head):
                    around = functools.partial(fused, keep_logits=p.what.keep_logits)
                    if (m, "forward") in compiled:
                        seeing, ps = compiled.pop((m, "forward"))
                        new, what = (
                            fused_head(seeing, p.what.keep_logits),
                            HeadAndFunctions(p.what, tuple(dict.fromkeys(q.label for q in ps))),
                        )
                elif isinstance(p.what, Layer) and p.new is not getattr(type(m), p.attribute, None):
                    new = _live_layer(original(type(m), p.attribute), p.what.level, p.what.parts)
                    around = (
                        functools.partial(memory.rematerialised, level=p.what.level) if p.what.level != "off" else None
                    )
                patch = on_instance(m, p.attribute, new, what, around)
                if (
                    patch is not None and what is not p.what and patch.new.function is not new
                ):  # around the forward of other code: the head alone
                    patch = dataclasses.replace(patch, what=p.what)
                found.append(patch)
            elif (
                isinstance(m, p.owner)
                and isinstance(p.what, Head)
                and not p.applied
                and _of_user(theirs := original(type(m), "forward"))
            ):
                # a subclass: its forward calls that of its base, or does everything itself
                found.append(on_instance(m, "forward", fused_head(theirs, p.what.keep_logits, known=False), p.what))
    found += [on_instance(m, name, seeing, p.what) for (m, name), (seeing, ps) in compiled.items() for p in ps]
    found = [p for p in found if p]
    callers_of_layers = [m for m in model.modules() if long_rows.layers_of(m)]
    if parts.get("activation_offloading") and not callers_of_layers:
        once.warn(
            type(model).__name__,
            "activation_offloading",
            "it has no layers that can be checkpointed, so nothing is offloaded",
        )
    found = [*_around_too(found, callers_of_layers, parts)]
    return Patches(found)


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


def on_instance(
    m: nn.Module, attribute: str, new: Callable, what: object, around: Callable | None = None
) -> Patch | None:
    """A patch that binds ``new`` to ``m``, if a call of ``m`` runs the function of its class; None
    if that function is ours already.

    If other code has replaced the function on this module, the patch binds ``around(that
    function)``; without ``around`` the result is None.
    """
    if new is getattr(type(m), attribute, None):
        return None
    # accelerate's hooks store the forward that they wrap as _old_forward
    place = "_old_forward" if attribute == "forward" and "_old_forward" in m.__dict__ else attribute
    there = remembered(m).get(place, m.__dict__.get(place, ABSENT))
    if there is not ABSENT:
        bound = isinstance(there, types.MethodType) and there.__self__ is m
        if (exchanging := exchange.of_experts(there, m, new)) is not None:
            new = exchanging
        elif not (bound and there.__func__ is original(type(m), attribute)):
            if around is None:
                return None
            new = ours(around(there.__func__ if bound else lambda self, *args, **kwargs: there(*args, **kwargs)))
    return Patch(
        m, place, Bound(new, m, attribute, original(type(m), attribute)) if there is ABSENT else Bound(new, m), what
    )


def _callers(cls: type, module: types.ModuleType, name: str) -> list[tuple[str, types.FunctionType]]:
    """Methods of ``cls`` that look up ``name`` in ``module``."""
    methods = {}
    for base in reversed(cls.__mro__):
        for attribute in base.__dict__:
            methods[attribute] = original(base, attribute)
    cores = {a: wrappers.core(f) for a, f in methods.items()}
    looks = lambda f: (
        isinstance(f, types.FunctionType) and f.__globals__ is module.__dict__ and name in f.__code__.co_names
    )
    return [(a, f) for a, f in methods.items() if looks(cores[a])]


@functools.cache
def _seeing(
    function: types.FunctionType, swaps: tuple[tuple[str, Callable, Callable], ...], fuse: frozenset[str]
) -> Callable | None:
    """``function`` that reads each global (name, stock, ours) as ours; None if its source is not
    available. ``fuse``: the patterns to fuse."""
    if rewrite.seeing(wrappers.core(function), swaps, fuse) is None:
        return None
    new, inner = (
        ours(wrappers.within(function, lambda f: rewrite.seeing(f, swaps, fuse))),
        rewrite.seeing(wrappers.core(function), swaps, fuse),
    )
    if inner in LINEARS:
        LINEARS[new] = LINEARS[inner]
    return new
