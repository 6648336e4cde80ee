"""Llama 4's complex rotations, and a function that puts them into a module of Transformers."""

from __future__ import annotations

from types import ModuleType

from liger_kernel.compat.function_classes import LigerLlama4RopeFunction as LigerLlama4RopeFunction
from liger_kernel.compat.functions import (
    liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb,
)


def apply_liger_llama4_rope_full(modeling_module: ModuleType) -> None:
    """Replace the rotations of text and images in ``modeling_module``, Transformers'
    ``modeling_llama4``; ``restore("llama4")`` undoes it."""
    from liger_kernel.transformers.patching.patches import Patch, Patches, ours

    functions = {
        "apply_rotary_emb": liger_llama4_text_rotary_pos_emb,
        "vision_apply_rotary_emb": liger_llama4_vision_rotary_pos_emb,
    }
    Patches(Patch(modeling_module, name, ours(new), ("rope",)) for name, new in functions.items()).apply()
