"""The flags of each family of models, and their defaults; ``PatchOptions`` says what they do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from liger_kernel.patch_options import HEADS, SWITCHES, PatchOptions
from liger_kernel.transformers.recognise.families import FAMILIES, family, is_family, swapped_slots

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
