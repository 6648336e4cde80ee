"""What can be swapped in a Hugging Face model, and how to know that the swap is right.

A slot is a kind of candidate (norm, gated MLP, rope function) with the variants we have kernels for. A variant is *borrowed*: a function that
runs on the model's own module and reads its attributes, so constructors, checkpoints and existing instances are untouched. A candidate is
swapped only where a variant reproduces it, outputs in bf16 bit for bit and everything in fp32 to rounding, on a stand-in that has exactly the
attributes the variant reads. Whatever needs more is left alone and listed with the reason.

``infer`` does this for the installed transformers; ``families.py`` is its result, written by ``liger models --write``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_kernel.ops.rotary.rope import CASTING
from liger_kernel.transformers.recognise.experts import EXPERT_FORMS, expert_stand_ins, experts_variant
from liger_kernel.transformers.recognise.mlps import GLU_FORMS, GLU_NAMES, MLP_NAMES, glu_stand_ins, glu_variant, mlp_stand_ins, mlp_variant
from liger_kernel.transformers.recognise.norms import (
    EPS,
    gated_norm_stand_ins,
    gated_norm_variant,
    layer_norm_stand_ins,
    layer_norm_variant,
    norm_stand_ins,
    norm_variant,
)
from liger_kernel.transformers.recognise.ropes import (
    TABLES,
    rope_alone_stand_ins,
    rope_alone_variant,
    rope_complex_stand_ins,
    rope_complex_variant,
    rope_flat_stand_ins,
    rope_flat_variant,
    rope_sections_stand_ins,
    rope_sections_variant,
    rope_stand_ins,
    rope_variant,
)
from liger_kernel.transformers.recognise.variant import StandIns, Variant


@dataclass(frozen=True)
class Slot:
    """A kind of candidate. ``variants``: label -> the variant, a maker of its stand-ins, and whether its bf16 must be equal bit for bit."""

    flag: str
    candidate: Callable[[str, Any], bool]
    parameters: tuple[tuple[str, ...], ...]  # of the candidate, past self; the names matter for functions only
    variants: dict[str, tuple[Variant, StandIns, bool]]


def _module(named: str) -> Callable[[str, Any], bool]:
    return lambda name, c: isinstance(c, type) and issubclass(c, nn.Module) and "forward" in c.__dict__ and re.search(named, name) is not None


def _function(named: str) -> Callable[[str, Any], bool]:
    return lambda name, c: inspect.isfunction(c) and re.search(named, name) is not None


def _label(*parts: str) -> str:
    return ", ".join(filter(None, dict.fromkeys(parts)))


FLAT = {casting: f"rope({casting}, flat)" for casting in CASTING}
NORMS = _module("Norm(Gated|1P)?$")
SLOTS = [
    Slot("rms_norm", NORMS, (("x",),), {
        f"rms_norm({_label(f'{offset:g}', casting, eps, '' if weight == 'weight' else weight)})":
            (norm_variant(offset, casting, eps, weight), functools.partial(norm_stand_ins, eps, weight), True)
        for offset, weight in ((0.0, "weight"), (1.0, "weight"), (0.0, "with_scale"), (0.0, "none"))
        for casting in (("gemma",) if weight == "none" else ("llama", "gemma", "none")) for eps in EPS
    }),
    Slot("layer_norm", NORMS, (("x",),), {
        f"layer_norm({form}, {eps})": (layer_norm_variant(eps, form), functools.partial(layer_norm_stand_ins, eps, form), True)
        for form in ("torch", "1P", "weight", "bias", "none") for eps in (*EPS, "constant")
    }),
    Slot("rms_norm", NORMS, (("x", "gate"),), {
        f"gated_rms_norm({_label(first + ' first', eps, groups, 'activation' if named else '')})":
            (gated_norm_variant(first, eps, groups), functools.partial(gated_norm_stand_ins, first, eps, groups, named), True)
        for first, groups in (("norm", ""), ("gate", ""), ("gate", "group_size"), ("gate", "n_groups"), ("norm_before_gate", "n_groups"))
        for named in (False, True) for eps in ("variance_epsilon", "eps")
    }),
    Slot("glu", _module("(MLP|Mlp|FeedForward|FFN|DenseGatedActDense)$"), (("x",),), {
        f"glu({_label(*names, form)})": (glu_variant(*names, GLU_FORMS[form]), functools.partial(glu_stand_ins, *names, GLU_FORMS[form]), GLU_FORMS[form].exact)
        for names in GLU_NAMES for form in GLU_FORMS
    }),
    Slot("relu_squared", _module("(MLP|Mlp|FeedForward|FFN)$"), (("x",),), {
        f"relu_squared({_label(*names)})": (mlp_variant(*names), functools.partial(mlp_stand_ins, *names), True) for names in MLP_NAMES
    }),
    Slot("glu", _module("Experts$"), (("x", "index", "weights"),), {
        f"moe({_label('transposed' if transposed else '', 'interleaved' if interleaved else '', 'biased' if biased else '', act, form)})": (
            experts_variant(transposed, interleaved, biased, act, options), functools.partial(expert_stand_ins, transposed, biased, act, numbers), False,
        )
        for form, (act, options, numbers) in EXPERT_FORMS.items()
        for transposed in (False, True) for interleaved in (False, True) for biased in (False, True)
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"),
        (("q", "k", "cos", "sin", "unsqueeze_dim"), ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim")), {
        f"rope({casting}, {layout}, {tables})": (rope_variant(layout, tables, casting), functools.partial(rope_stand_ins, tables), True)
        for casting in CASTING for layout in ("halves", "pairs", "apart") for tables in TABLES
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"), (("x", "cos", "sin", "unsqueeze_dim"),), {
        f"rope(alone, {casting}, {layout}, {tables})": (rope_alone_variant(layout, tables, casting), functools.partial(rope_alone_stand_ins, tables), True)
        for casting in CASTING for layout in ("halves", "pairs", "behind") for tables in TABLES
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"), (("tensor", "sin", "cos"),), {
        f"rope(alone, sin first, {casting}, {layout}, once)": (
            rope_alone_variant(layout, "once", casting, True), functools.partial(rope_alone_stand_ins, "once", True), True,
        )
        for casting in CASTING for layout in ("halves", "pairs")
    }),
    Slot("rope", _function("^apply_multimodal_rotary"), (("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"),), {
        f"rope({casting}, sections)": (rope_sections_variant(casting), rope_sections_stand_ins, True) for casting in CASTING
    }),
    Slot("rope", _function("rotary.*vision"), (("q", "k", "cos", "sin"),), {
        FLAT[casting]: (rope_flat_variant(casting), rope_flat_stand_ins, True) for casting in CASTING
    }),
    Slot("rope", _function("rotary_emb$"), (("xq", "xk", "freqs_cis"), ("query", "key", "freqs_ci")), {
        f"rope(complex, {d})": (rope_complex_variant(d), functools.partial(rope_complex_stand_ins, d), False) for d in (2, 1)
    }),
]  # fmt: skip
# whole models stay equal bit for bit; means and deviations of LayerNorms may be summed in another order and then, rarely, be rounded another way
EXACT = {label for slot in SLOTS for label, (_, _, exact) in slot.variants.items() if exact and slot.flag != "layer_norm"}
SLOT_OF = {label: slot.flag for slot in SLOTS for label in slot.variants}
VARIANTS = {label: variant for slot in SLOTS for label, (variant, _, _) in slot.variants.items()}
TORCHS_OWN = {"nn.LayerNorm": ("LayerNorm", "layer_norm(torch, eps)")}  # in the table's name -> in torch.nn, and the variant
