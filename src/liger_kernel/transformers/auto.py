"""Transformers' auto classes; they patch the classes of the model's family before they make the
model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file, is_peft_available

from liger_kernel.nearest import nearest
from liger_kernel.patch_options import SWITCHES
from liger_kernel.transformers.patching.apply import _apply_liger_kernel, _float8, apply_rest
from liger_kernel.transformers.recognise.families import family, flags_of

_HUB = ["cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"]
_HUB += ["trust_remote_code"]


def _patch_classes(
    name: str, config: PretrainedConfig, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Patch the classes of the configuration's family as the flags among ``kwargs`` say; return the
    other ``kwargs``, and the flags for ``apply_rest``. An unknown family stays stock, with a
    warning.

    Flags of one model are not for the classes, because other models of this process may not want
    them.
    """
    flags = {k: v for k, v in kwargs.items() if k in SWITCHES}
    rest = {k: v for k, v in kwargs.items() if k not in flags}
    for argument in rest:
        near = nearest(argument, SWITCHES, cutoff=0.75)  # transformers' own arguments are at most 0.57 alike
        if near and not hasattr(config, argument):
            raise TypeError(f"{name}: no argument {argument!r}; did you mean {near}?")
    model_type = getattr(config, "model_type", "")
    _float8(model_type, flags)  # raises before the model is loaded
    if model_type and family(model_type):
        flags = {k: v for k, v in flags.items() if k in flags_of(model_type)}
        _apply_liger_kernel(model_type, **{k: v for k, v in flags.items() if not _of_one_model(k)})
    else:
        flags = {k: v for k, v in flags.items() if _of_one_model(k)}
        warnings.warn(f"{name}: no kernels for model type {model_type!r}, so the model is stock", stacklevel=3)
    return rest, flags


def _of_one_model(flag: str) -> bool:
    return flag.startswith("fp8") or flag == "batch_invariant"


def _base_of(name: str, kwargs: dict[str, Any]) -> str:
    """The model that ``name`` is a PEFT adapter of, as transformers finds it; ``name`` itself if
    it is none, or has a model beside the adapter."""
    if not is_peft_available() or (Path(name) / "config.json").exists():
        return name
    hub = {k: kwargs[k] for k in ("revision", "token") if kwargs.get(k) is not None}
    found = find_adapter_config_file(name, **hub | (kwargs.get("adapter_kwargs") or {}))
    return json.loads(Path(found).read_text(encoding="utf-8"))["base_model_name_or_path"] if found else name


class _Auto:
    """Make ordinary Transformers models. The flags of ``apply_liger_kernel_to_*`` are taken from
    the keywords; all other keywords are passed on."""

    _plain: Any  # the class of transformers that makes them: remote code is found under its name

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
        config = kwargs.get("config")
        if not isinstance(config, PretrainedConfig):
            name = config or _base_of(pretrained_model_name_or_path, kwargs)
            config = AutoConfig.from_pretrained(name, **{k: kwargs[k] for k in _HUB if k in kwargs})
        rest, given = _patch_classes(cls.__name__, config, kwargs)
        return apply_rest(cls._plain.from_pretrained(pretrained_model_name_or_path, *model_args, **rest), given)

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
        rest, given = _patch_classes(cls.__name__, config, kwargs)
        return apply_rest(cls._plain.from_config(config, **rest), given)


class AutoLigerKernelForCausalLM(_Auto, AutoModelForCausalLM):
    """``AutoModelForCausalLM`` with patched classes. Flags of ``apply_liger_kernel_to_*`` may be
    among the keywords."""

    _plain = AutoModelForCausalLM


class AutoLigerKernelForImageTextToText(_Auto, AutoModelForImageTextToText):
    """``AutoModelForImageTextToText`` with patched classes. Flags of ``apply_liger_kernel_to_*``
    may be among the keywords."""

    _plain = AutoModelForImageTextToText


class AutoLigerKernelForSequenceClassification(_Auto, AutoModelForSequenceClassification):
    """``AutoModelForSequenceClassification`` with patched classes. Flags of
    ``apply_liger_kernel_to_*`` may be among the keywords."""

    _plain = AutoModelForSequenceClassification
