"""``AutoModelForCausalLM`` with the classes of the model's family patched before it is made."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from liger_kernel.transformers.patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel, family, flags_of

_FLAGS = {f for apply in MODEL_TYPE_TO_APPLY_LIGER_FN.values() for f in inspect.signature(apply).parameters} - {"model"}


def _patched(config: PretrainedConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` without flags, after the family's classes are patched as those say; a family that we do not know stays plain, with a warning."""
    model_type = getattr(config, "model_type", "")
    row = family(model_type) if model_type else None
    if row is None:
        warnings.warn(f"AutoLigerKernelForCausalLM: no kernels for model type {model_type!r}; the model is plain", stacklevel=3)
    else:
        _apply_liger_kernel(model_type, **{k: v for k, v in kwargs.items() if k in flags_of(model_type)})
    return {k: v for k, v in kwargs.items() if k not in _FLAGS}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """Makes ordinary transformers models; the flags of ``apply_liger_kernel_to_*`` are taken out of the keywords, the rest is passed on."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
        config = kwargs.get("config")
        if not isinstance(config, PretrainedConfig):
            hub = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code")
            config = AutoConfig.from_pretrained(config or pretrained_model_name_or_path, **{k: kwargs[k] for k in hub if k in kwargs})
        return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *model_args, **_patched(config, kwargs))

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(config, **_patched(config, kwargs))
