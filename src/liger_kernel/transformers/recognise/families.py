"""What is replaced in the models of each type: from the table ``families.json``, or from
recognition for a type or a release of Transformers that the table does not have. Recognition reads
the type's module, and compares each candidate. And the flags that the patch of each type has.

``liger models --write`` writes the table.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT_TO_TEXT,
)

from liger_kernel._private import unset_fake_temporarily
from liger_kernel.patch_options import HEADS, SWITCHES, PatchOptions
from liger_kernel.transformers.recognise.compare import recognise, references
from liger_kernel.transformers.recognise.slots import FLAT, PLAIN_MLP, SLOT_OF, SLOTS, TORCHS_OWN


def modeling(model_type: str) -> ModuleType:
    """Return the module of Transformers with the classes of ``model_type``."""
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def configs_of(config: Any) -> Iterator[Any]:
    """Return ``config`` and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from configs_of(part)


@dataclass(frozen=True)
class Family:
    """What is replaced in the models of one type. Maps names in its module to a variant, or to
    the reason why it stays stock."""

    heads: tuple[str, ...] = ()  # classes whose forward ends with a head and a loss
    fused: str = ""  # why the head is not fused; empty if it is
    glu: str = "swiglu"  # the name of its flag for gated MLPs
    swapped: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()  # types of its parts that have a module of their own
    images: bool = False  # whether a step with images was tested


PLACE = "transformers.models."


def heads_of(model_type: str, module: ModuleType) -> tuple[str, ...]:
    """Return the model classes of a type that have a head and a loss."""
    names = (mapping.get(model_type) for mapping in (IMAGE_TEXT_TO_TEXT, CAUSAL))
    return tuple(dict.fromkeys(n for n in names if n and hasattr(module, n)))


def tables_of(module: ModuleType, config: Any) -> set[str]:
    """The forms in which the rotary embeddings of this module hold their angles, as far as
    ``config`` or its parts can make them."""
    forms = set()
    classes = [c for name, c in vars(module).items() if isinstance(c, type) and "Rotary" in name]
    for cls in (c for c in classes if issubclass(c, nn.Module) and c.__module__ == module.__name__):
        for each in configs_of(config):
            # this configuration may not fit the class: a vision tower's, for example
            with contextlib.suppress(Exception):
                # The embedding itself shows the form: names of classes do not
                embed: Any = _embedding(cls, each)
                # take the kind of layer from the class: some kinds in the config have no rotation,
                # or another name here
                takes = inspect.signature(cls.forward).parameters
                more = {"layer_type": next(iter(embed.rope_type))} if "layer_type" in takes else {}
                x, positions = torch.zeros(1, 5, 8), torch.arange(5)[None]
                try:
                    cos, sin = embed(x, positions, **more)
                except Exception:  # multimodal positions: time, height and width
                    cos, sin = embed(x, torch.stack((positions, 3 * positions, 7 * positions)), **more)
                forms.add(_form(torch.stack((cos, sin))))
                break
    return forms


def _embedding(cls: type, config: Any) -> nn.Module:
    try:
        return cls(config)
    except (AttributeError, TypeError):  # transformers 4 reads more from the rope scaling than its default contains
        if getattr(config, "rope_scaling", "no such attribute") is not None:
            raise
        config = copy.copy(config)
        config.rope_scaling = {"rope_type": "default"}
        return cls(config)


def _form(both: Tensor) -> str:
    # equal halves, equal neighbours, or neither: an angle for each column
    half = both.shape[-1] // 2
    if both[..., :half].equal(both[..., half:]):
        return "twice"
    return "repeated" if both[..., ::2].equal(both[..., 1::2]) else "once"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Compute on the CPU with PyTorch's defaults and without warnings, even if the caller uses fake
    tensors, autocast, inference mode, another device or another default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            warnings.catch_warnings(),
            unset_fake_temporarily(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            references(),
        ):
            warnings.simplefilter("ignore")
            # torch.manual_seed would also change the state of the GPUs, which belongs to the user
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)


def without_flat(row: Family) -> Family:
    """Return ``row`` without rope functions whose tables are made inside a tower: only images
    show whether they fit."""
    flat = {name: "its tables are not understood" for name, label in row.swapped.items() if label in FLAT}
    swapped = {name: label for name, label in row.swapped.items() if name not in flat}
    return dataclasses.replace(row, swapped=swapped, left_alone=row.left_alone | flat)


def infer(model_type: str, config: Any = None) -> Family:
    """Recognise what can be replaced in the installed Transformers' models of ``model_type``."""
    module = modeling(model_type)
    config = CONFIG_MAPPING[model_type]() if config is None else config
    configs = list(configs_of(config))
    names = "hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function"
    squared = "relu2" in {str(getattr(c, name, "")) for c in configs for name in names}
    swapped, left_alone = {}, {}
    with undisturbed():
        tables = tables_of(module, config)
        for name, candidate in inspect.getmembers(module):
            # the family's own, or imported from another family
            if str(getattr(candidate, "__module__", "")).startswith(PLACE):
                label, reason = _replacement(name, candidate, module, tables, squared)
                if label:
                    swapped[name] = label
                elif reason:
                    left_alone[name] = reason
        # PyTorch's own LayerNorm has no class in this module; the constructors that make it show it
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        swapped |= {name: label for name, (cls, label) in TORCHS_OWN.items() if any(makes(c, cls) for c in own)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    acts = (getattr(c, name, "") for c in (text, *configs) for name in ("hidden_activation", "hidden_act"))
    flag = "geglu" if "gelu" in str(next(filter(None, acts), "")) else "swiglu"
    # parts whose classes are in a module of their own
    of_others = (c for c in configs if c.__class__.__module__ != config.__class__.__module__)
    parts = dict.fromkeys(c.model_type for c in of_others if c.model_type in CONFIG_MAPPING)
    return Family(heads_of(model_type, module), "", flag, swapped, left_alone, tuple(parts))


def _replacement(name: str, candidate: Any, module: ModuleType, tables: set[str], squared: bool) -> tuple[str, str]:
    """The label of the first variant that reproduces a class or function of a family; otherwise
    why it stays stock. ``squared``: whether a configuration names a squared ReLU."""
    of_class = isinstance(candidate, type)
    # the function itself: its wrapper may run another package's, which needs a GPU
    owner, stock = (candidate, candidate.__dict__.get("forward")) if of_class else (module, inspect.unwrap(candidate))
    reasons = []
    # in the order of ``SLOTS``: a norm with a gate is no norm without one
    for slot in SLOTS:
        if not slot.candidate(name, candidate):
            continue
        variant, reason = recognise(slot, owner, stock, tables)
        if variant and (squared or slot.flag != "relu_squared"):
            return variant.label, ""
        reasons.append(PLAIN_MLP if variant else reason)
    # the most telling one first: it would do, it does something else, it has other parameters
    rank = lambda reason: 0 if reason == PLAIN_MLP else 2 if " take" in f" {reason}" else 1
    return "", min(reasons, key=rank, default="")


def makes(cls: type, name: str) -> bool:
    """Whether the constructor of ``cls`` names ``torch.nn``'s class ``name``."""
    init = cls.__dict__.get("__init__")
    return inspect.isfunction(init) and name in inspect.unwrap(init).__code__.co_names


TABLE = Path(__file__).with_suffix(".json")
_TABLE = json.loads(TABLE.read_text("utf-8"))
VERSION: str = _TABLE["version"]  # of Transformers
FAMILIES = {
    t: Family(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    for t, row in _TABLE["families"].items()
}
# not tried on a tiny model, so recognised only when such a model is patched, or not at all
UNVERIFIED: dict[str, str] = _TABLE["unverified"]


def text_of(families: dict[str, Family], unverified: dict[str, str]) -> str:
    """The text of ``families.json`` for the installed Transformers: one line for each type, so
    that a change of the table reads like a change of code."""
    default = vars(Family())
    rows = {t: {k: v for k, v in vars(row).items() if v != default[k]} for t, row in families.items()}
    lines = lambda entries: ",\n".join(f"{json.dumps(t)}: {json.dumps(entry)}" for t, entry in entries.items())
    return (
        f'{{\n"version": {json.dumps(transformers.__version__)},\n'
        f'"families": {{\n{lines(rows)}\n}},\n"unverified": {{\n{lines(unverified)}\n}}\n}}\n'
    )


@functools.cache
def family(model_type: str) -> Family | None:
    """The row of a model type from the table, or what recognition finds now if there is none; None
    if Transformers has no such type.

    With another version of Transformers than the table's, rows are recognised again, because
    releases change where they round.
    """
    frozen = FAMILIES.get(model_type)
    if frozen and transformers.__version__ == VERSION:
        return frozen
    try:
        found = infer(model_type)
    except Exception:  # no such type, no modeling file, or no default configuration: then nothing is known
        return None
    # rotations inside a vision tower are right only if a step with images has shown it
    if frozen is None or not FLAT & set(frozen.swapped.values()):
        found = without_flat(found)
    if frozen:
        # whether the head can be fused, and the flag's name, are not recognised but verified
        return dataclasses.replace(found, fused=frozen.fused, glu=frozen.glu, images=frozen.images)
    return found if found.heads or found.swapped else None


def is_family(model_type: str) -> bool:
    """Whether models of this type have classes in which something can be replaced."""
    return bool(model_type) and family(model_type) is not None


def type_of(model: nn.Module) -> str:
    """The model type that the configuration of ``model`` names; if that has no family, the type
    whose class the model's class is derived from. Empty without a configuration."""
    named = getattr(getattr(model, "config", None), "model_type", "") or ""
    # the folder of Transformers' models is called as the type is
    bases = (base.__module__.removeprefix(PLACE).partition(".")[0] for base in type(model).__mro__)
    return named if not named or is_family(named) else next(filter(is_family, bases), named)


def with_parts(model_types: Iterable[str], row_of: Callable[[str], Family | None] | None = None) -> dict[str, Family]:
    """The rows of these types and of the types of their parts; ``row_of``: that of a type."""
    found: dict[str, Family] = {}
    pending = list(model_types)
    while pending:
        model_type = pending.pop(0)
        if model_type not in found and (row := (row_of or family)(model_type)):
            found[model_type] = row
            pending += row.parts
    return found


def rows_of(model_types: Iterable[str]) -> list[tuple[ModuleType, Family]]:
    """The rows of these types and of their parts, with the modules to which they belong."""
    return [(modeling(model_type), row) for model_type, row in with_parts(model_types).items()]


def swapped_slots(model_type: str) -> set[str]:
    """The slots of which something is replaced in models of a type, its parts included.

    The table answers for every release of Transformers: flags of the ``apply`` functions must not
    need recognition, which takes seconds.
    """
    rows = with_parts([model_type], lambda t: FAMILIES.get(t) or family(t))
    return {SLOT_OF[label] for row in rows.values() for label in row.swapped.values()}


# -- classes that belong to no family, such as those of remote code: recognised by what their forward
# computes, as those of families are

_OF_CLASSES = [slot for slot in SLOTS if slot.parameters[0][0] == "x" and slot.flag != "rope"]
# What a forward may ask that a stand-in cannot answer: it has only the attributes that the variant
# reads
_MAY_DIFFER = {"getattr", "hasattr", "training", "__dict__"}


@functools.cache
def recognised(cls: type, stock: Any) -> tuple[str, str]:
    """The label of the variant that computes what ``cls`` does by its forward ``stock``; otherwise why it
    stays stock, which is empty if it is neither a norm nor an MLP by its name."""
    if cls is nn.LayerNorm:
        return TORCHS_OWN["nn.LayerNorm"][1], ""
    if not isinstance(stock, FunctionType):
        return "", ""
    slots = [s for s in _OF_CLASSES if len(inspect.signature(stock).parameters) == len(s.parameters[0]) + 1]
    named = [slot for slot in _OF_CLASSES if slot.candidate(cls.__name__, cls)]
    reasons = []
    with undisturbed():
        for slot in slots:
            variant, reason = recognise(slot, cls, stock)
            if variant and slot.flag != "relu_squared":
                more = _MAY_DIFFER & set(_names_in(cls))
                return ("", f"its code uses {', '.join(sorted(more))}") if more else (variant.label, "")
            reasons += [PLAIN_MLP if variant else reason] * (slot in named)
    if not named:
        return "", ""
    # an attribute that another slot's variants lack says less than that the result differs
    least = lambda why: why.startswith("uses ")
    return "", min(reasons, key=least, default="forward takes other arguments")


def _names_in(cls: type) -> Iterator[str]:
    """The names in the code of the methods of ``cls`` that a call may run."""
    own = (base for base in cls.__mro__ if not base.__module__.startswith("torch."))
    for name, method in ((n, m) for base in own for n, m in vars(base).items()):
        if isinstance(method, FunctionType) and name not in ("__init__", "extra_repr", "__repr__"):
            yield from inspect.unwrap(method).__code__.co_names


# -- the flags of each family, and their defaults; ``PatchOptions`` says what they do

_FLAGS = dict[str, bool | None]
OURS = {name: field.default for name, field in SWITCHES.items() if field.metadata["ours"]}
_HEAD: _FLAGS = dict(cross_entropy=False, fused_linear_cross_entropy=True)
STANDARD: _FLAGS = dict(rope=True, **_HEAD, rms_norm=True)
_WITH_LAYER_NORM: _FLAGS = dict(rope=True, **_HEAD, layer_norm=True, rms_norm=True)
# The flags and defaults of LinkedIn's package, then model, then flags that its functions do not
# have, if there is something to swap. (Some defaults differ: LinkedIn's package leaves out
# granite's head, because its loss cannot scale logits, and experts and MLPs of gpt_oss and
# deepseek_v4.)
_NO_ROPE = (
    "deepseek_v2 deepseek_v3 deepseek_v4 glm4 glm4v glm4v_moe qwen3_5 qwen3_5_text qwen3_5_moe "
    "qwen3_5_moe_text qwen3_next"
)
_SWIGLU = (
    "exaone4 falcon_h1 hunyuan_v1_dense hunyuan_v1_moe llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 "
    "qwen3_moe smollm3 "
    "qwen2_5_vl qwen2_5_vl_text qwen3_vl_moe qwen3_vl_moe_text granite llama4 llama4_text"
)
_PUBLISHED: dict[str, _FLAGS] = {
    **{t: STANDARD | dict(swiglu=True) for t in _SWIGLU.split()},
    **{t: STANDARD | dict(rope=False, swiglu=True) for t in _NO_ROPE.split()},
    "gpt_oss": STANDARD | dict(swiglu=True),
    **{t: STANDARD | dict(swiglu=False) for t in ("qwen3_vl", "qwen3_vl_text")},
    **{t: _WITH_LAYER_NORM | dict(swiglu=True) for t in ("mllama", "mllama_text_model", "muse_glimmer")},
    **{t: STANDARD | dict(layer_norm=True, swiglu=True) for t in ("qwen2_vl", "qwen2_vl_text")},
    **{t: STANDARD | dict(geglu=True) for t in ("gemma", "gemma2", "gemma3_text")},
    **{t: _WITH_LAYER_NORM | dict(geglu=True) for t in ("gemma3", "paligemma")},
    "gemma4_text": STANDARD | dict(rope=False, geglu=True),
    "gemma4": dict(rope=False, **_HEAD, layer_norm=False, rms_norm=True, geglu=True),
    "pixtral": dict(rope=True, rms_norm=True, swiglu=True),
}
# Families whose functions pass further flags to their parts
_HANDING_ON: dict[str, _FLAGS] = {
    "nemotron": dict(relu_squared=True, **_HEAD),
    "llava": _HEAD,
    **{t: dict(**_HEAD, rms_norm=True, layer_norm=True) for t in ("internvl", "smolvlm")},
}


def flags_of(model_type: str) -> dict[str, Any]:
    """Flag -> default of ``apply_liger_kernel_to_<model_type>``; flags that LinkedIn's package
    does not have come last. A type without a family has all flags."""
    if model_type not in FAMILIES and not is_family(model_type):
        return {name: field.default for name, field in SWITCHES.items()}
    return {f: v for f, v in parameters_of(model_type).items() if f != "model"} | OURS


def options_of(model_type: str, given: Mapping[str, Any]) -> PatchOptions:
    """The given flags, and the family's defaults for the others. Raises ``ValueError`` for a value
    that cannot be.

    ``options_of("llama", {"cross_entropy": True})`` has ``fused_linear_cross_entropy`` off.
    """
    implied = {name: False for name, other in zip(HEADS, reversed(HEADS)) if given.get(other)}
    # without a family, nothing says which of the two flags is that of the MLPs
    if len(of_glu := {"swiglu", "geglu"} & given.keys()) == 1 and not (model_type in FAMILIES or is_family(model_type)):
        implied |= dict.fromkeys(("swiglu", "geglu"), given[of_glu.pop()])
    options = PatchOptions(**dict.fromkeys(SWITCHES, False) | flags_of(model_type) | implied | dict(given))
    # With everything else off, nothing in a model changes
    of_slots = any(value for name, value in options.slots.items() if name != "recurrent" or name in given)
    alone = not (options.head or options.fp8 or of_slots or "projections" in given)
    off = dict(projections=False, fused_logprobs=False, recurrent=False)
    return dataclasses.replace(options, **off) if alone else options


@functools.cache
def parameters_of(model_type: str) -> _FLAGS:
    """Parameter -> default of ``apply_liger_kernel_to_<model_type>``, in the order of its
    signature: flags and ``model``."""
    # of the table, because signatures do not depend on the version of Transformers
    row = FAMILIES.get(model_type) or family(model_type)
    slots = swapped_slots(model_type)
    more: _FLAGS = dict.fromkeys(sorted(slots & {"layer_norm", "relu_squared"}), True)
    late: _FLAGS = dict.fromkeys(slots & {"attention"}, True)
    flags = STANDARD | {row.glu if row else "swiglu": True} | more
    if published := (_PUBLISHED | _HANDING_ON).get(model_type):
        more = {f: v for f, v in (more if model_type in _PUBLISHED else flags).items() if f not in published}
        return published | {"model": None} | more | late
    if row and not row.heads:
        flags = {f: v for f, v in flags.items() if f not in HEADS}
    return flags | {"model": None} | late
