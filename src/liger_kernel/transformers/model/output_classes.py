"""Outputs of patched models: those of Transformers, with the fields ``token_accuracy`` and
``predicted_tokens``."""

from __future__ import annotations

import importlib

from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from liger_kernel.transformers.head.forward import output_class

LigerCausalLMOutputWithPast = output_class(CausalLMOutputWithPast)
LigerMoeCausalLMOutputWithPast = output_class(MoeCausalLMOutputWithPast)

# model type -> how names of its classes begin
_NAMES = """
    gemma3=Gemma3 gemma4=Gemma4 glm4v_moe=Glm4vMoe llava=Llava internvl=InternVL muse_glimmer=MuseGlimmer
    paligemma=PaliGemma qwen2_5_vl=Qwen2_5_VL qwen2_vl=Qwen2VL qwen3_vl=Qwen3VL qwen3_vl_moe=Qwen3VLMoe qwen3_5=Qwen3_5
    qwen3_5_moe=Qwen3_5Moe
"""
_OF = dict(pair.split("=") for pair in _NAMES.split())


def __getattr__(
    name: str,
) -> type | None:  # None: this transformers has no such class, its models return one that others do too
    for model_type, start in _OF.items():
        if name == f"Liger{start}CausalLMOutputWithPast":
            module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
            stock = getattr(module, name.removeprefix("Liger"), None)
            return stock and output_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
