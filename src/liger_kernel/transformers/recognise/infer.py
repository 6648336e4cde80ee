"""Find out what can be replaced in the models of one type: read its module, and compare each
candidate."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from liger_kernel._private import unset_fake_temporarily
from liger_kernel.transformers.recognise.compare import recognise, references
from liger_kernel.transformers.recognise.family import PLACE, Family, configs_of, heads_of, modeling
from liger_kernel.transformers.recognise.slots import FLAT, PLAIN_MLP, SLOTS, TORCHS_OWN


def tables_of(module: ModuleType, config: Any) -> set[str]:
    """The forms in which the rotary embeddings of this module hold their angles, as far as
    ``config`` or its parts can make them."""
    forms = set()
    for name, cls in vars(module).items():
        if not (
            isinstance(cls, type)
            and issubclass(cls, nn.Module)
            and "Rotary" in name
            and cls.__module__ == module.__name__
        ):
            continue
        for each in configs_of(config):
            with contextlib.suppress(
                Exception
            ):  # this configuration may not fit the class: a vision tower's, for example
                # The embedding itself shows the form: names of classes do not
                embed = _embedding(cls, each)
                # take the kind of layer from the class: some kinds in the config have no rotation,
                # or another name here
                more = (
                    {"layer_type": next(iter(embed.rope_type))}
                    if "layer_type" in inspect.signature(cls.forward).parameters
                    else {}
                )
                positions = torch.arange(5)[None]
                try:
                    cos, sin = embed(torch.zeros(1, 5, 8), positions, **more)
                except Exception:  # multimodal positions: time, height and width
                    cos, sin = embed(
                        torch.zeros(1, 5, 8), torch.stack((positions, 3 * positions, 7 * positions)), **more
                    )
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
    """Compute on the CPU with PyTorch's defaults, even if the caller uses fake tensors,
    autocast, inference mode, another device or another default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            unset_fake_temporarily(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            references(),
        ):
            torch.default_generator.manual_seed(
                0
            )  # torch.manual_seed would also change the state of the GPUs, which belongs to the user
            yield
    finally:
        torch.set_default_dtype(dtype)


def without_flat(row: Family) -> Family:
    """Return ``row`` without rope functions whose tables are made inside a tower: only images
    show whether they fit."""
    flat = {name: "its tables are not understood" for name, label in row.swapped.items() if label in FLAT}
    return (
        dataclasses.replace(
            row, swapped={n: v for n, v in row.swapped.items() if n not in flat}, left_alone=row.left_alone | flat
        )
        if flat
        else row
    )


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
        swapped |= {name: label for name, (cls, label) in TORCHS_OWN.items() if any(_makes(c, cls) for c in own)}
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
    owner, stock = (candidate, candidate.__dict__.get("forward")) if of_class else (module, candidate)
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


def _makes(cls: type, name: str) -> bool:
    """Whether the constructor of ``cls`` names ``torch.nn``'s class ``name``."""
    init = cls.__dict__.get("__init__")
    return inspect.isfunction(init) and name in inspect.unwrap(init).__code__.co_names
