"""Kernels for Hugging Face Transformers. The modules that patch models are imported on first
use, because they need Transformers."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from liger_kernel import nn as _nn
from liger_kernel._legacy import aliases
from liger_kernel.nearest import did_you_mean

# modules of ``liger_kernel.nn`` and rotations, which need no transformers; type checkers read ``__init__.pyi``
_ROTATIONS = """
    liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_multimodal_rotary_pos_emb
    liger_rotary_pos_emb liger_rotary_pos_emb_vision
"""
_MODULES = [*sorted(name for name in vars(_nn) if name.startswith("Liger")), *_ROTATIONS.split()]
# what needs transformers: its module -> names
_LAZY = {
    name: module
    for module, names in {
        "auto": "AutoLigerKernelForCausalLM AutoLigerKernelForImageTextToText AutoLigerKernelForSequenceClassification",
        "patching.apply": "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance",
        "patching.select": "class_patches instance_patches",
        "patching.report": "patches_report projections_report",
        "patching.patches": "restore",
        "quantize": "quantize_base",
        "routes": "record_routes replay_routes",
        "load_mxfp4": "load_in_mxfp4",
        "fp8": "train_in_fp8",
        "merged_training": "merge_aware",
        "prompt_trees": "answer_logprobs shared_prompts",
    }.items()
    for name in names.split()
}

globals().update({name: getattr(_nn, name) for name in _MODULES})
_names = [*_MODULES, "is_transformers_available"]


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if (path := f"{__name__}.{name}") in aliases():  # as LinkedIn's package has its modules after it is imported
        return importlib.import_module(path)
    module = _LAZY.get(name) or ("patching.apply" if name.startswith("apply_liger_kernel_to_") else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, _names)}")
    if not is_transformers_available():
        raise ImportError(f"{name} needs transformers: pip install transformers")
    found = importlib.import_module(f"{__name__}.{module}")
    if not hasattr(found, name):  # of a family that there is not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __dir__())}")
    return getattr(found, name)


if is_transformers_available():
    _names += _LAZY


def __dir__() -> list[str]:
    if not is_transformers_available():
        return _names
    return [*_names, *(f.__name__ for f in __getattr__("MODEL_TYPE_TO_APPLY_LIGER_FN").values())]
