"""Patches as values, and the functions users and frameworks call to apply them.

A patch is (owner, attribute, replacement): the owner is one of transformers' classes, one of its modules, or one live module of a model. What was
there before is remembered and given back by ``restore`` exactly. Nothing is ever assigned into ``torch``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel import memory
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.transformers import deferred, fusions, slots
from liger_kernel.transformers.bound import ABSENT, KEY, Bound, declare, is_ours, ours, within
from liger_kernel.transformers.families import FAMILIES, VERSION
from liger_kernel.transformers.reference import references_beside
from liger_kernel.transformers.slots import Family
from liger_kernel.utils import PEFT_AVAILABLE as PEFT_AVAILABLE

# -- patches -------------------------------------------------------------------------------


_STOCK: dict[Any, dict[str, Any]] = {}  # classes and Python modules: owner -> attribute -> what was there


def _stock(owner: Any) -> dict[str, Any]:
    """What was there before us; of live modules kept in their own __dict__, so that copies of a model know it too."""
    return owner.__dict__.get(KEY, {}) if isinstance(owner, nn.Module) else _STOCK.get(owner, {})


REPLICATE = "_replicate_for_data_parallel"


@ours
def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """As its class does, with our methods bound to the replica, as they would be if they were its class's."""
    replica = getattr(type(self), REPLICATE)(self)
    replica.__dict__.update({name: value.to(replica) for name, value in Bound.all(self).items()})
    replica.__dict__[KEY] = dict(_stock(self))
    return replica


@dataclass(frozen=True)
class Patch:
    """``owner.attribute`` becomes ``new``."""

    owner: Any
    attribute: str
    new: Any
    label: str = ""

    @property
    def applied(self) -> bool:
        """Whether it is in place, be it below what somebody else put over it since."""
        value = self.owner.__dict__.get(self.attribute)
        return self.attribute in _stock(self.owner) and (value == self.new or not is_ours(value))

    def apply(self) -> None:
        memory = self.owner.__dict__.setdefault(KEY, {}) if isinstance(self.owner, nn.Module) else _STOCK.setdefault(self.owner, {})
        memory.setdefault(self.attribute, self.owner.__dict__.get(self.attribute, ABSENT))
        setattr(self.owner, self.attribute, self.new)
        if isinstance(self.owner, nn.Module) and REPLICATE not in memory:
            declare(type(self.owner))
            replicate = Bound(_replicate_for_data_parallel, self.owner, REPLICATE, getattr(type(self.owner), REPLICATE))
            Patch(self.owner, REPLICATE, replicate, "replicas").apply()

    def __str__(self) -> str:
        name = self.owner.__name__.rpartition(".")[2] if hasattr(self.owner, "__name__") else f"<{type(self.owner).__name__}>"
        return f"{name}.{self.attribute} <- {self.label}"


class Patches(tuple[Patch, ...]):
    """Print them, apply them, restore them; or ``with patches: ...``."""

    def apply(self) -> Patches:
        """Apply those not in place yet; returns those."""
        new = Patches(p for p in self if not p.applied)
        for p in new:
            p.apply()
        return new

    def restore(self) -> None:
        """Give back what was there before the first patch of each attribute, where our patch still is what is there."""
        for p in reversed(self):
            _give_back(p.owner, [p.attribute] if p.applied else [])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Patches]:
        new = self.apply()
        try:
            yield self
        finally:
            new.restore()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _give_back(owner: Any, attributes: Iterable[str]) -> None:
    memory = _stock(owner)
    for name in attributes:
        stock = memory.pop(name)
        if not is_ours(owner.__dict__.get(name)):
            if name == "forward" and type(owner.__dict__.get("_old_forward")) is Bound:  # accelerate's hooks came over ours: beneath them is stock again
                owner._old_forward = types.MethodType(type(owner).forward, owner)
                continue
            warnings.warn(f"{Patch(owner, name, None)}: replaced by somebody else after us, so it stays as it is", stacklevel=3)
        elif stock is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, stock)
    if memory.keys() == {REPLICATE}:
        _give_back(owner, [REPLICATE])
    elif not memory:
        owner.__dict__.pop(KEY, None) if isinstance(owner, nn.Module) else _STOCK.pop(owner, None)


def restore(model: nn.Module | str | None = None) -> None:
    """Give back the stock classes and modules: of one live model, of one model type, or, without an argument, of all patched classes.

    Every attribute is again the very object that it was.
    """
    if isinstance(model, nn.Module):
        owners: list[Any] = [m for m in model.modules() if KEY in m.__dict__]
    elif isinstance(model, str):
        module = slots.modeling(model)
        owners = [o for o in _STOCK if (o.__name__ if isinstance(o, types.ModuleType) else o.__module__) == module.__name__]
    else:
        owners = list(_STOCK)
    for owner in owners:
        _give_back(owner, list(_stock(owner)))


# -- what to patch -------------------------------------------------------------------------


@functools.cache
def family(model_type: str) -> Family | None:
    """The frozen row of a model type, or what recognition finds now where there is none; None if transformers has no such type.

    What is swapped is also looked at again under another version of transformers than the table's: releases change where they round.
    """
    frozen = Family(**FAMILIES[model_type]) if model_type in FAMILIES else None
    if frozen and transformers.__version__ == VERSION:
        return frozen
    try:
        found = slots.infer(model_type)
    except Exception:  # no such type, no modeling file, or no default configuration: then nothing is known
        return None
    if frozen is None or not set(slots.FLAT.values()) & set(frozen.swapped.values()):
        found = slots.without_flat(found)
    if frozen:
        return dataclasses.replace(frozen, heads=found.heads, swapped=found.swapped, left_alone=found.left_alone, parts=found.parts)
    return found if found.heads or found.swapped else None


Rows = Callable[[str], Family | None]


def _rows_of(model_types: Iterable[str], rows: Rows) -> list[tuple[types.ModuleType, Family]]:
    """The rows of these types and their parts, with the modules that they are about."""
    found: dict[str, tuple[types.ModuleType, Family]] = {}
    pending = list(model_types)
    while pending:
        model_type = pending.pop(0)
        if model_type not in found and (row := rows(model_type)):
            found[model_type] = slots.modeling(model_type), row
            pending += row.parts
    return list(found.values())


@functools.cache
def _variant(label: str, stock: Callable) -> Callable:
    return ours(slots.named_as(slots.VARIANTS[label](stock), stock))


@functools.cache
def _fused(forward: Callable, keep_logits: bool, known: bool = True) -> Callable:
    return ours(deferred.fused(forward, keep_logits=keep_logits, known=known))


def _change(forward: Callable, level: str, fuse: bool) -> Callable:
    forward = (fuse and fusions.fused(forward)) or forward
    return forward if level == "off" else memory.rematerialised(forward, level)


@functools.cache
def _layer(forward: Callable, level: str, fuse: bool, of_class: bool) -> Callable:
    return ours(fusions.within(forward, functools.partial(_change, level=level, fuse=fuse), of_class=of_class))


@functools.cache
def _live_layer(stock: Callable, level: str, fuse: bool) -> Callable:
    """For one layer of a class with this forward; its class, which FSDP2 may change after us, says what checkpoints."""
    usual = _layer(stock, level, fuse, False)

    def forward(self, *args, **kwargs):
        outer = type(self).forward
        return (usual if outer is stock or not within(outer, stock) else _layer(outer, level, fuse, False))(self, *args, **kwargs)

    return ours(forward)


NORM_ROPE = "norm_rope"


@functools.cache
def _norm_rope(forward: types.FunctionType) -> Callable:
    return ours(fusions.within(forward, lambda f: fusions.fused(f) or f))


def _turning(module: types.ModuleType, row: Family) -> list[type]:
    """Classes of attention whose norms of heads go with their rotation."""
    ropes = {name for name, label in row.swapped.items() if slots.SLOT_OF[label] == "rope"}
    found = []
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__ and "forward" in cls.__dict__:
            forward = fusions.core(_of_stock(cls, "forward"))
            names = forward.__code__.co_names if isinstance(forward, types.FunctionType) else ()
            if ropes & set(names) and (new := fusions.fused(forward)) is not None and fusions.NORM_ROPE in new.__code__.co_freevars:
                found.append(cls)
    return found


CHEAP = {"rms_norm", "layer_norm", "glu", "relu_squared"}  # slots whose outputs can be computed again for one pass over memory


def _layers(module: types.ModuleType) -> list[type]:
    """The classes of layers, which checkpointing would recompute as a whole."""
    return [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, GradientCheckpointingLayer) and c.__module__ == module.__name__]


def _of_stock(owner: Any, attribute: str) -> Any:
    """``owner.attribute`` as it was before us; for a class, also where it inherits it."""
    for cls in owner.__mro__ if isinstance(owner, type) else (owner,):
        value = _stock(cls).get(attribute, ABSENT)
        value = cls.__dict__.get(attribute, ABSENT) if value is ABSENT else value
        if value is not ABSENT:
            return value
    raise AttributeError(f"{owner} has no attribute {attribute}")


def _patches(model_types: Iterable[str], parts: Mapping[str, Any], head: str | None, rows: Rows) -> Iterator[Patch]:
    """All patches of these types and their parts, those of PyTorch's own classes included; heads are those of the first type."""
    model_types = list(model_types)
    for i, (module, row) in enumerate(_rows_of(model_types, rows)):
        for name, label in row.swapped.items():
            if not parts.get(slots.SLOT_OF[label]):
                continue
            if name in slots.TORCHS_OWN:
                owner, attribute = getattr(nn, slots.TORCHS_OWN[name][0]), "forward"
            else:
                owner, attribute = (getattr(module, name, None), "forward") if isinstance(getattr(module, name, None), type) else (module, name)
            if not hasattr(owner, attribute):  # another version of transformers may not have it
                continue
            if _is_foreign(_of_stock(owner, attribute)):
                _warn_once(model_types[0], name, "not transformers' own any more: somebody has replaced it, so it stays as it is")
            else:
                yield Patch(owner, attribute, _variant(label, _of_stock(owner, attribute)), label)
        level = memory.level_of(parts.get("rematerialise"))
        served = {slot for slot in map(slots.SLOT_OF.__getitem__, row.swapped.values()) if parts.get(slot)}
        for cls in _turning(module, row) if {"rms_norm", "rope"} <= served else ():
            yield Patch(cls, "forward", _norm_rope(_of_stock(cls, "forward")), NORM_ROPE)
        level = level if served & CHEAP else "off"
        for cls in _layers(module):
            stock = _of_stock(cls, "forward")
            fuse = "rms_norm" in served and fusions.fused(fusions.core(stock)) is not None
            if fuse or level != "off":
                label = ", ".join(["add_norm"] * fuse + [f"rematerialised({level})"] * (level != "off"))
                yield Patch(cls, "forward", _layer(stock, level, fuse, True), label)
        for name in row.heads if i == 0 and head and not row.fused else ():
            if hasattr(module, name):
                cls = getattr(module, name)
                yield Patch(cls, "forward", _fused(_of_stock(cls, "forward"), head == "logits"), f"{head} head")


def class_patches(model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family) -> Patches:
    """Patches of the classes of ``model_type``, and of those types its parts are of by default. Classes of PyTorch and of other families are left alone.

    ``parts``: slot -> whether to swap it, and "rematerialise": a level of ``memory``; ``head``: "fused", "logits" (fused loss on real logits) or None.
    """
    own = {module.__name__ for module, _ in _rows_of([model_type], rows)}
    found = [p for p in _patches([model_type], parts, head, rows) if not isinstance(p.owner, type) or p.owner.__module__ in own]
    return Patches(dict.fromkeys([*found, *_ropes_of_parts(model_type, parts, rows, {(p.owner, p.attribute) for p in found})]))


def _ropes_of_parts(model_type: str, parts: Mapping[str, Any], rows: Rows, taken: set[tuple[Any, str]]) -> list[Patch]:
    """Patches of rope functions whose tables only the types of parts tell, which have the same module: where these agree."""
    found: dict[tuple[Any, str], set[Patch]] = {}
    config = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING and parts.get("rope") else PretrainedConfig
    for t in (getattr(c, "model_type", "") for c in config.sub_configs.values()):
        if t in CONFIG_MAPPING and CONFIG_MAPPING[t].__module__ == config.__module__:
            for p in _patches([t], {"rope": True}, None, rows):
                found.setdefault((p.owner, p.attribute), set()).add(p)
    return [p for at, (p, *others) in found.items() if at not in taken and not others]


def instance_patches(model: nn.Module, model_type: str, parts: Mapping[str, Any], head: str | None, rows: Rows = family) -> Patches:
    """The same for the modules of one live model, found by their classes wherever they are (PEFT wrappers, towers); nothing else is touched.

    A rope function belongs to a Python module: methods that call it are compiled again, with ours in its place.
    """
    own = [c.model_type for c in slots.configs_of(getattr(model, "config", None)) if getattr(c, "model_type", "")]
    of_all = list(dict.fromkeys(_patches(dict.fromkeys([model_type, *own]), parts, head, rows)))
    seen: dict[tuple[nn.Module, str, types.FunctionType], list[Patch]] = {}  # module, method, its function -> what it is to see
    callers = functools.cache(_callers)  # for this time: methods of classes may be replaced meanwhile
    for p in of_all:
        for m in model.modules() if isinstance(p.owner, types.ModuleType) and not p.applied else ():
            for name, f in callers(type(m), p.owner, p.attribute):
                seen.setdefault((m, name, f), []).append(p)
    fuse = bool(parts.get("rms_norm"))
    found = []
    for (m, name, f), ps in seen.items():
        seeing = _seeing(f, tuple((p.attribute, _of_stock(p.owner, p.attribute), p.new) for p in ps), fuse)  # one function for all labels
        if seeing is None:
            _warn_once(type(m).__name__, name, "its source cannot be read, so its rotary embedding stays as it is")
        else:
            found += [_on_instance(m, name, seeing, p.label) for p in ps]
    for p in of_all:
        # norms and rotation of a live module go with its rope function
        for m in model.modules() if p.label != NORM_ROPE and isinstance(p.owner, type) else ():
            if isinstance(m, p.owner) and _of_stock(type(m), p.attribute) is _of_stock(p.owner, p.attribute):
                around: Callable | None = functools.partial(deferred.fused, keep_logits=head == "logits") if p.label.endswith("head") else None
                new, level = p.new, p.label.partition("rematerialised(")[2][:-1]
                if p.new is not getattr(type(m), p.attribute, None) and (level or p.label == "add_norm"):
                    new = _live_layer(_of_stock(type(m), p.attribute), level or "off", p.label.startswith("add_norm"))
                    around = functools.partial(memory.rematerialised, level=level) if level else None
                found.append(_on_instance(m, p.attribute, new, p.label, around))
            elif isinstance(m, p.owner) and p.label.endswith("head") and not p.applied and _of_user(theirs := _of_stock(type(m), "forward")):
                # a subclass, whose forward calls that of its base, or does all by itself
                found.append(_on_instance(m, "forward", _fused(theirs, head == "logits", known=False), p.label))
    return Patches(p for p in found if p)


def _is_foreign(function: Any) -> bool:
    """Whether a function was put where it is by somebody: one from elsewhere, also if it says by ``functools.wraps`` that it is what it wraps."""
    function = fusions.core(function)
    return isinstance(function, types.FunctionType) and not function.__globals__.get("__name__", "").startswith(("transformers.", "torch.", "kernels."))


def _of_user(forward: Any) -> bool:
    """Whether a class's ``forward`` is a function from elsewhere than transformers."""
    return isinstance(forward, types.FunctionType) and not (forward.__module__ or "").startswith("transformers.")


def _on_instance(m: nn.Module, attribute: str, new: Callable, label: str, around: Callable | None = None) -> Patch | None:
    """``new`` bound to ``m``, where a call of ``m`` gets to the function of its class; None if that is ours already.

    Where somebody has replaced that function on this module: ``around`` theirs, or None.
    """
    if new is getattr(type(m), attribute, None):
        return None
    # accelerate's hooks keep what they wrap in _old_forward
    place = "_old_forward" if attribute == "forward" and "_old_forward" in m.__dict__ else attribute
    there = _stock(m).get(place, m.__dict__.get(place, ABSENT))
    if there is not ABSENT:
        bound = isinstance(there, types.MethodType) and there.__self__ is m
        if not (bound and there.__func__ is _of_stock(type(m), attribute)):
            if around is None:
                return None
            new = ours(around(there.__func__ if bound else lambda self, *args, **kwargs: there(*args, **kwargs)))
    return Patch(m, place, Bound(new, m, attribute, _of_stock(type(m), attribute)) if there is ABSENT else Bound(new, m), label)


def _callers(cls: type, module: types.ModuleType, name: str) -> list[tuple[str, types.FunctionType]]:
    """Methods of ``cls`` that look up ``name`` in ``module``."""
    methods = {}
    for base in reversed(cls.__mro__):
        for attribute in base.__dict__:
            methods[attribute] = _of_stock(base, attribute)
    cores = {a: fusions.core(f) for a, f in methods.items()}
    looks = lambda f: isinstance(f, types.FunctionType) and f.__globals__ is module.__dict__ and name in f.__code__.co_names
    return [(a, f) for a, f in methods.items() if looks(cores[a])]


@functools.cache
def _seeing(function: types.FunctionType, swaps: tuple[tuple[str, Callable, Callable], ...], fuse: bool) -> Callable | None:
    """``function`` that reads each global (name, stock, ours) as ours; None where its source is not at hand. ``fuse``: with its patterns fused."""
    if fusions.seeing(fusions.core(function), swaps, fuse) is None:
        return None
    return ours(fusions.within(function, lambda f: fusions.seeing(f, swaps, fuse)))


# -- flags ---------------------------------------------------------------------------------

HEAD_FLAGS = ("cross_entropy", "fused_linear_cross_entropy")
STANDARD: dict[str, bool | None] = dict(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True)

# Published flags and defaults, then model and, behind it, flags that the published functions do not have, where there is something to swap. (granite's
# defaults are not followed: they leave its head out because the published one cannot scale logits.)
_NO_ROPE = ("deepseek_v2", "deepseek_v3", "glm4", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_FLAGS = dict[str, bool | None]
_PUBLISHED: dict[str, _FLAGS] = {
    **{t: STANDARD | dict(swiglu=True) for t in (
        "exaone4", "falcon_h1", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
        "qwen3_moe", "smollm3", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "granite",
        "llama4", "llama4_text",
    )},
    **{t: STANDARD | dict(rope=False, swiglu=True) for t in _NO_ROPE},
    "deepseek_v4": STANDARD | dict(rope=False, swiglu=False),
    **{t: STANDARD | dict(swiglu=False) for t in ("gpt_oss", "qwen3_vl", "qwen3_vl_text")},
    **{t: _FLAGS(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=True, rms_norm=True, swiglu=True)
       for t in ("mllama", "mllama_text_model", "muse_glimmer")},
    **{t: STANDARD | dict(layer_norm=True, swiglu=True) for t in ("qwen2_vl", "qwen2_vl_text")},
    **{t: STANDARD | dict(geglu=True) for t in ("gemma", "gemma2", "gemma3_text")},
    **{t: _FLAGS(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=True, rms_norm=True, geglu=True) for t in ("gemma3", "paligemma")},
    "gemma4_text": STANDARD | dict(rope=False, geglu=True),
    "gemma4": dict(rope=False, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=False, rms_norm=True, geglu=True),
    "pixtral": dict(rope=True, rms_norm=True, swiglu=True),
}  # fmt: skip
# Those that hand further flags on to their parts
_HANDING_ON: dict[str, _FLAGS] = {
    "nemotron": dict(relu_squared=True, cross_entropy=False, fused_linear_cross_entropy=True),
    "llava": dict(cross_entropy=False, fused_linear_cross_entropy=True),
    **{t: dict(cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, layer_norm=True) for t in ("internvl", "smolvlm")},
}


def _served(model_type: str) -> set[str]:
    """Slots of which something is swapped in models of a type, their parts included."""
    found, pending = set(), [model_type]
    seen = set()
    while pending:
        t = pending.pop()
        row = Family(**FAMILIES[t]) if t in FAMILIES else family(t)
        if row and t not in seen:
            found |= {slots.SLOT_OF[label] for label in row.swapped.values()}
            pending += row.parts
        seen.add(t)
    return found


def flags_of(model_type: str) -> dict[str, bool | None]:
    """Flag -> default of ``apply_liger_kernel_to_<model_type>``; the last, of no published signature, is a level of ``memory``."""
    return {f: v for f, v in _parameters_of(model_type).items() if f != "model"} | {"rematerialise": True}


@functools.cache
def _parameters_of(model_type: str) -> _FLAGS:
    """Parameter -> default of ``apply_liger_kernel_to_<model_type>``, in its order: flags and ``model``."""
    row = Family(**FAMILIES[model_type]) if model_type in FAMILIES else family(model_type)
    more: _FLAGS = dict.fromkeys(sorted(_served(model_type) & {"layer_norm", "relu_squared"}), True)
    flags = STANDARD | {row.glu if row else "swiglu": True} | more
    if model_type in _PUBLISHED | _HANDING_ON:
        published = (_PUBLISHED | _HANDING_ON)[model_type]
        more = {f: v for f, v in (more if model_type in _PUBLISHED else flags).items() if f not in published}
        return published | {"model": None} | more
    if row and not row.heads:
        flags = {f: v for f, v in flags.items() if f not in HEAD_FLAGS}
    return flags | {"model": None}


def _parts(flags: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {flag: bool(flags.get(flag)) for flag in ("rope", "rms_norm", "layer_norm", "relu_squared")}
    return parts | {"glu": bool(flags.get("swiglu", flags.get("geglu"))), "rematerialise": memory.level_of(flags.get("rematerialise"))}


def _apply_rest(model: nn.Module, given: Mapping[str, bool | None]) -> nn.Module:
    """``model`` with what class patches leave out, because its class is PyTorch's or of another family."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type and family(model_type):
        instance_patches(model, model_type, _parts(flags_of(model_type) | dict(given)), None).apply()
    return model


def _apply(model_type: str, given: Mapping[str, bool | None], model: nn.Module | None) -> Patches:
    """Apply with the flags that somebody gave, and defaults for the rest. A flag given as None is off."""
    if all(given.get(f) for f in HEAD_FLAGS):
        raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True")
    flags = flags_of(model_type) | {f: False for f, other in zip(HEAD_FLAGS, reversed(HEAD_FLAGS)) if given.get(other)} | dict(given)
    head = "fused" if flags.get("fused_linear_cross_entropy") else "logits" if flags.get("cross_entropy") else None
    parts = _parts(flags)
    if model is None:
        return class_patches(model_type, parts, head).apply()
    found = instance_patches(model, model_type, parts, head)
    if not found and (head or any(parts[slot] for slot in parts if slot != "rematerialise")) and not any(map(_is_patched, model.modules())):
        _warn_once(model_type, type(model).__name__, "nothing of this model was swapped: its parts are of other classes than transformers'")
    return found.apply()


def _is_patched(module: nn.Module) -> bool:
    return KEY in module.__dict__ or is_ours(getattr(type(module), "forward", None))


_WARNED: set[tuple[str, str]] = set()


def _warn_once(subject: str, about: str, text: str) -> None:
    if (subject, about) not in _WARNED:
        _WARNED.add((subject, about))
        warnings.warn(f"{subject}: {about}: {text}" if about else f"{subject}: {text}", stacklevel=4)


def _say_what_is_missing(model_type: str, given: Mapping[str, bool | None], live: bool) -> None:
    """A warning, once, for each flag that somebody asked for and that has no effect."""
    served, row = _served(model_type), family(model_type)
    asked = {"rope": "rope", "rms_norm": "rms_norm", "layer_norm": "layer_norm", "swiglu": "glu", "geglu": "glu", "relu_squared": "relu_squared"}
    silent = [flag for flag, slot in asked.items() if given.get(flag) and slot not in served]
    silent += [flag for flag in HEAD_FLAGS if given.get(flag) and (row is None or row.fused)]
    for flag in silent:
        if (model_type, flag) not in _WARNED:
            _WARNED.add((model_type, flag))
            warnings.warn(f"{model_type}: nothing to swap for {flag}=True (see `liger models {model_type}`)", stacklevel=4)
    if given.get("layer_norm") and not live and (model_type, "LayerNorm") not in _WARNED and "layer_norm" in served:
        labels = {label for _, row in _rows_of([model_type], family) for label in row.swapped.values() if slots.SLOT_OF[label] == "layer_norm"}
        if labels <= {label for _, label in slots.TORCHS_OWN.values()}:
            _WARNED.add((model_type, "LayerNorm"))
            warnings.warn(f"{model_type}: its LayerNorms are torch's own class, so they are swapped only in a live model (model=...)", stacklevel=4)
    wanted = {slot: flag for flag, slot in asked.items() if given.get(flag) and slot in served and (model_type, flag) not in _WARNED}
    if wanted and not live:
        rows = _rows_of([model_type], family)
        own = {module.__name__ for module, _ in rows}
        owners = [(wanted.get(slots.SLOT_OF[label]), vars(module).get(name)) for module, row in rows for name, label in row.swapped.items()]
        foreign = lambda owner: isinstance(owner, type) and owner.__module__ not in own
        borrowed = {flag: owner for flag, owner in owners if flag and foreign(owner)}
        for flag in borrowed.keys() - {flag for flag, owner in owners if owner is not None and not foreign(owner)}:
            _WARNED.add((model_type, flag))
            warnings.warn(f"{model_type}: {flag}=True is of another family's {borrowed[flag].__name__}, swapped only in a live model (model=...)", stacklevel=4)


def _apply_function(model_type: str) -> Callable[..., None]:
    flags = _parameters_of(model_type)
    annotation = lambda f: "nn.Module | None" if f == "model" else "bool | None"
    parameters = [inspect.Parameter(f, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v, annotation=annotation(f)) for f, v in flags.items()]
    signature = inspect.Signature(parameters, return_annotation=None)

    def apply(*args: Any, **kwargs: Any) -> None:
        level = {name: kwargs.pop(name) for name in ("rematerialise",) if name in kwargs}
        try:
            given = signature.bind(*args, **kwargs).arguments | level
        except TypeError as error:
            raise TypeError(f"{apply.__name__}(): {error}; it takes {', '.join(signature.parameters)}, rematerialise") from None
        model = given.pop("model", None)
        _say_what_is_missing(model_type, given, model is not None)
        _apply(model_type, given, model)

    apply.__name__ = apply.__qualname__ = "apply_liger_kernel_to_" + re.sub(r"\W", "_", model_type)
    apply.__signature__ = signature  # type: ignore[attr-defined]
    apply.__doc__ = (
        f"Patch the classes of transformers' ``{model_type}`` models, or only ``model`` if one is given. ``liger models {model_type}`` says how.\n\n"
        '``rematerialise`` (True or "cheap", the default; "mlp"; False or "off") says what is computed again in the backward: see ``liger_kernel.memory``.'
    )
    return apply


MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., None]] = {t: _apply_function(t) for t in FAMILIES}
globals().update({f.__name__: f for f in MODEL_TYPE_TO_APPLY_LIGER_FN.values()})  # apply_liger_kernel_to_llama ...


@functools.cache
def every_flag() -> frozenset[str]:
    """The flags of all families."""
    return frozenset(f for t in FAMILIES for f in flags_of(t))


def _lenient(model_type: str, kwargs: Mapping[str, Any], model: nn.Module | None) -> None:
    known = flags_of(model_type) if model_type and family(model_type) else None
    for name in kwargs.keys() - (known or every_flag()):
        if name not in every_flag():
            near = difflib.get_close_matches(name, every_flag(), n=1)
            _warn_once(name, "", "no flag of liger_kernel, so it has no effect" + (f"; did you mean {near[0]}?" if near else ""))
    if known is None:
        _warn_once(model_type or type(model).__name__, "", "liger_kernel has no kernels for this type of model, so it is the stock one")
    else:
        _apply(model_type, {k: v for k, v in kwargs.items() if k in known}, model)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the classes of a model type. Flags of other families are ignored, as frameworks pass the same ones to every model; unknown ones get a warning."""
    _lenient(model_type, kwargs, None)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch one live model, and the reference beside it in a Trainer, with flags as for ``_apply_liger_kernel``. Applying again changes nothing."""
    for each in (model, *references_beside(model)):
        _lenient(getattr(getattr(each, "config", None), "model_type", ""), kwargs, each)


def stock_with_fused_head(cls: type) -> Callable:
    """The stock ``forward`` of a model class with head and loss fused."""
    return _fused(_of_stock(cls, "forward"), False)


# -- published constants -------------------------------------------------------------------

transformer_version = Version(transformers.__version__)
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("4.57.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5

# -- single modules, for frameworks that walk a model themselves ---------------------------


def _patch_forward(module: nn.Module, new: Callable, label: str) -> None:
    """Bind ``new`` where calls of ``module`` arrive, or of both modules in PEFT's wrapper of one that is trained and saved."""
    wrapped = [module.original_module, *module.modules_to_save.values()] if hasattr(module, "modules_to_save") else [module]
    Patches(p for m in wrapped if (p := _on_instance(m, "forward", new, label))).apply()


@functools.cache
def _rms_norm_forward(offset: float, eps: float, casting: str) -> Callable:
    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.weight, eps=_eps(self, eps), offset=offset, casting=casting)

    return ours(forward)


@functools.cache
def _layer_norm_forward(eps: float) -> Callable:
    def forward(self, hidden_states):
        return layer_norm(hidden_states, self.weight, self.bias, eps=_eps(self, eps))

    return ours(forward)


def _eps(module: nn.Module, default: float) -> float:
    return next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), default)


def _patch_rms_norm_module(
    module: nn.Module, offset: float = 0.0, eps: float = 1e-6, casting_mode: str = "llama", in_place: bool = True, row_mode: bool | None = None
) -> None:
    """Our RMSNorm as the ``forward`` of one norm; ``eps`` counts if the norm has none of its own. ``in_place`` and ``row_mode`` have no effect."""
    _patch_forward(module, _rms_norm_forward(offset, eps, casting_mode), "rms_norm")


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    """Our LayerNorm as the ``forward`` of one norm; ``eps`` counts if the norm has none of its own."""
    _patch_forward(module, _layer_norm_forward(eps), "layer_norm")


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    """The ``forward`` of ``liger_module``, a class, as that of one gated MLP with the same projections."""
    _patch_forward(module, ours(liger_module.forward), "glu")
