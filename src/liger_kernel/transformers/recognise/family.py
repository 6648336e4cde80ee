"""The model types of Transformers: module, configurations and heads of each, and the row that
says what is replaced in it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT_TO_TEXT


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
