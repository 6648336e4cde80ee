"""Kernels for Hugging Face Transformers. The modules that patch models are imported on first
use, because they need Transformers."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from liger_kernel._legacy import ALIASES
from liger_kernel.nearest import did_you_mean
from liger_kernel.nn import (
    LigerBlockSparseTop2MLP,
    LigerCrossEntropyLoss,
    LigerDyT,
    LigerExperts,
    LigerFalconH1MLP,
    LigerFalconH1SwiGLUMLP,
    LigerFusedAddRMSNorm,
    LigerFusedCETVDLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearKLDivLoss,
    LigerFusedNeighborhoodAttention,
    LigerGEGLUMLP,
    LigerGroupNorm,
    LigerHunyuanV1SwiGLUMLP,
    LigerJSD,
    LigerKLDIVLoss,
    LigerLayerNorm,
    LigerMHC,
    LigerMLP,
    LigerModulatedRMSNorm,
    LigerMultiTokenAttention,
    LigerPhi3SwiGLUMLP,
    LigerPolyNorm,
    LigerQwen3MoeSwiGLUMLP,
    LigerReLUSquared,
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
    LigerSoftmax,
    LigerSparsemax,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
    LigerTVDLoss,
    LigerVocabParallelCrossEntropy,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_vision,
)

# what needs transformers: name -> its module
_AUTO = dict.fromkeys(
    ("AutoLigerKernelForCausalLM", "AutoLigerKernelForImageTextToText", "AutoLigerKernelForSequenceClassification"),
    "auto",
)
_PATCHING = {
    **dict.fromkeys(
        ("MODEL_TYPE_TO_APPLY_LIGER_FN", "_apply_liger_kernel", "_apply_liger_kernel_to_instance"), "patching.apply"
    ),
    **dict.fromkeys(("class_patches", "instance_patches"), "patching.select"),
    "projections_report": "patching.report",
    "restore": "patching.values",
    "quantize_base": "quantize",
    "train_in_fp8": "fp8",
}

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerDyT",
    "LigerExperts",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearKLDivLoss",
    "LigerFusedNeighborhoodAttention",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerMHC",
    "LigerMLP",
    "LigerModulatedRMSNorm",
    "LigerMultiTokenAttention",
    "LigerPhi3SwiGLUMLP",
    "LigerPolyNorm",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSparsemax",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "LigerVocabParallelCrossEntropy",
    "is_transformers_available",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_vision",
]


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def __getattr__(name: str) -> Any:
    if (path := f"{__name__}.{name}") in ALIASES:  # as LinkedIn's package has its modules after it is imported
        return importlib.import_module(path)
    module = (_AUTO | _PATCHING).get(name) or ("patching.apply" if name.startswith("apply_liger_kernel_to_") else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")
    if not is_transformers_available():
        raise ImportError(f"{name} needs transformers: pip install transformers")
    found = importlib.import_module(f"{__name__}.{module}")
    if not hasattr(found, name):  # of a family that there is not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __dir__())}")
    return getattr(found, name)


if is_transformers_available():
    __all__ += [*_AUTO, *_PATCHING]


def __dir__() -> list[str]:
    if not is_transformers_available():
        return __all__
    return [*__all__, *(f.__name__ for f in __getattr__("MODEL_TYPE_TO_APPLY_LIGER_FN").values())]
