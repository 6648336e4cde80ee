"""Flags of ``apply_liger_kernel_to_*`` and their defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from liger_kernel import memory
from liger_kernel.ops.projections.tiled_mlp import tiles_of
from liger_kernel.transformers.recognise.families import FAMILIES, family, swapped_slots

# rematerialise: a level of ``memory``. projections: whether linear layers with adapters run as one
# node. fp8, fp8_filter, fp8_head: see ``transformers/fp8.py`` activation_offloading: whether
# activations wait in the CPU's memory. keep_attention: whether checkpointed layers keep what
# attention gave. tiled_mlp: in how many tiles of tokens MLPs run
UNPUBLISHED: dict[str, Any] = dict(rematerialise=True, projections=True, fp8=False, fp8_filter=None, fp8_head=False)
UNPUBLISHED |= dict(activation_offloading=False, keep_attention=False, tiled_mlp=False)
HEAD_FLAGS = ("cross_entropy", "fused_linear_cross_entropy")
STANDARD: dict[str, bool | None] = dict(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True)
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
_FLAGS = dict[str, bool | None]
_WITH_LAYER_NORM = _FLAGS(
    rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=True, rms_norm=True
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
    "gemma4": dict(
        rope=False, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=False, rms_norm=True, geglu=True
    ),
    "pixtral": dict(rope=True, rms_norm=True, swiglu=True),
}
# Families whose functions pass further flags to their parts
_HANDING_ON: dict[str, _FLAGS] = {
    "nemotron": dict(relu_squared=True, cross_entropy=False, fused_linear_cross_entropy=True),
    "llava": dict(cross_entropy=False, fused_linear_cross_entropy=True),
    **{
        t: dict(cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, layer_norm=True)
        for t in ("internvl", "smolvlm")
    },
}


def flags_of(model_type: str) -> dict[str, Any]:
    """Flag -> default of ``apply_liger_kernel_to_<model_type>``; flags that LinkedIn's package
    does not have come last."""
    return {f: v for f, v in parameters_of(model_type).items() if f != "model"} | UNPUBLISHED


@functools.cache
def parameters_of(model_type: str) -> _FLAGS:
    """Parameter -> default of ``apply_liger_kernel_to_<model_type>``, in the order of its
    signature: flags and ``model``."""
    row = FAMILIES.get(model_type) or family(model_type)
    more: _FLAGS = dict.fromkeys(sorted(swapped_slots(model_type) & {"layer_norm", "relu_squared"}), True)
    late: _FLAGS = dict.fromkeys(swapped_slots(model_type) & {"attention"}, True)
    flags = STANDARD | {row.glu if row else "swiglu": True} | more
    if model_type in _PUBLISHED | _HANDING_ON:
        published = (_PUBLISHED | _HANDING_ON)[model_type]
        more = {f: v for f, v in (more if model_type in _PUBLISHED else flags).items() if f not in published}
        return published | {"model": None} | more | late
    if row and not row.heads:
        flags = {f: v for f, v in flags.items() if f not in HEAD_FLAGS}
    return flags | {"model": None} | late


def parts_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {
        flag: bool(flags.get(flag))
        for flag in ("rope", "rms_norm", "layer_norm", "relu_squared", "attention", "projections")
    }
    parts |= {name: _switch(name, flags.get(name)) for name in ("activation_offloading", "keep_attention")}
    parts["tiled_mlp"] = tiles_of(flags.get("tiled_mlp"))
    return parts | {
        "glu": bool(flags.get("swiglu", flags.get("geglu"))),
        "rematerialise": memory.level_of(flags.get("rematerialise")),
    }


def _switch(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")
    return bool(value)


@functools.cache
def every_flag() -> frozenset[str]:
    """The flags of all families."""
    return frozenset(f for t in FAMILIES for f in flags_of(t))
