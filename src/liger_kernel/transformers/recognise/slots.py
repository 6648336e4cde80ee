"""What can be replaced in a Hugging Face model, and how to know that the replacement is right.

A slot is a kind of candidate (norm, gated MLP, rope function) with the variants for which we have
kernels. A variant is *borrowed*: it is a function that runs on the model's own module and reads its
attributes, so constructors, checkpoints and existing instances do not change. A candidate is
replaced only
if a variant reproduces it on a stand-in that has exactly the attributes that the variant reads:
bit-identical outputs in bf16, and everything in fp32 up to rounding. A candidate that needs more
stays stock and is listed with the reason.

``infer`` does this for the installed Transformers. ``families.json`` is its result, written by
``liger models --write``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_kernel.transformers.recognise.attentions import SinkAttention, has_sinks
from liger_kernel.transformers.recognise.experts import EXPERTS, LoadBalancing
from liger_kernel.transformers.recognise.mlps import GLUS, MLPS
from liger_kernel.transformers.recognise.norms import GATED_RMS_NORMS, LAYER_NORMS, RMS_NORMS, LayerNorm
from liger_kernel.transformers.recognise.recurrences import (
    COMBINED,
    CONVOLUTIONS,
    FORGET_GATES,
    RULES,
    CausalConv1d,
    CombinedScan,
    GatedDeltaRule,
    KimiDeltaAttention,
    Scan,
)
from liger_kernel.transformers.recognise.ropes import (
    COMPLEX_ROPES,
    FLAT_ROPES,
    ROPES,
    ROPES_ALONE,
    ROPES_OF_SECTIONS,
    SIN_FIRST,
)
from liger_kernel.transformers.recognise.variant import Variant


@dataclass(frozen=True)
class Slot:
    """A kind of candidate, and the variants that may replace it; the first that fits is used."""

    flag: str
    candidate: Callable[[str, Any], bool]
    parameters: tuple[
        tuple[str, ...], ...
    ]  # the candidate's parameters after self; the names matter only for functions
    variants: Sequence[Variant]


def _module(named: str) -> Callable[[str, Any], bool]:
    return lambda name, c: (
        isinstance(c, type)
        and issubclass(c, nn.Module)
        and "forward" in c.__dict__
        and re.search(named, name) is not None
    )


def _function(named: str) -> Callable[[str, Any], bool]:
    return lambda name, c: inspect.isfunction(c) and re.search(named, name) is not None


_NORM = _module("Norm(Gated|1P)?$")
_GATED_MLP = _module("(MLP|Mlp|FeedForward|FFN|DenseGatedActDense)$")
_MLP = _module("(MLP|Mlp|FeedForward|FFN)$")
_ROTARY = _function("^apply_rotary|^apply_rope")
_Q_K = ("q", "k", "cos", "sin")
_RULE = (
    *("query", "key", "value", "g", "beta", "chunk_size"),
    *("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs"),
)
_SCAN = (
    *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"),
    *("dt_limit", "return_final_states", "kwargs"),
)
_COMBINED = (
    *("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size", "initial_states", "dt_limit"),
    *("return_final_states", "activation", "rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias"),
    *("headdim", "ngroups", "norm_before_gate", "kwargs"),
)

SLOTS = [
    Slot("rms_norm", _NORM, (("x",),), RMS_NORMS),
    Slot("layer_norm", _NORM, (("x",),), LAYER_NORMS),
    # with a gate, stock may be called without one
    Slot("rms_norm", _NORM, (("x", "gate"),), GATED_RMS_NORMS),
    Slot("glu", _GATED_MLP, (("x",),), GLUS),
    Slot("relu_squared", _MLP, (("x",),), MLPS),
    Slot("glu", _module("Experts$"), (("x", "index", "weights"),), EXPERTS),
    Slot(
        "glu",
        _function("^load_balancing_loss_func$"),
        (("gate_logits", "num_experts", "top_k", "attention_mask"),),
        [LoadBalancing()],
    ),
    Slot(
        "attention",
        has_sinks,
        (("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"),),
        [SinkAttention()],
    ),
    Slot(
        "recurrent",
        _function(CONVOLUTIONS),
        (("hidden_states", "weight", "bias", "activation", "kwargs"),),
        [CausalConv1d()],
    ),
    Slot("recurrent", _function(RULES), (_RULE, _SCAN), [GatedDeltaRule(), KimiDeltaAttention(), Scan()]),
    Slot("recurrent", _module("ForgetGate$"), (("x",),), FORGET_GATES),
    Slot("recurrent", _function(COMBINED), (_COMBINED,), [CombinedScan()]),
    Slot("rope", _ROTARY, ((*_Q_K, "unsqueeze_dim"), (*_Q_K, "position_ids", "unsqueeze_dim")), ROPES),
    Slot("rope", _ROTARY, (("x", "cos", "sin", "unsqueeze_dim"),), ROPES_ALONE),
    Slot("rope", _ROTARY, (("tensor", "sin", "cos"),), SIN_FIRST),
    Slot(
        "rope", _function("^apply_multimodal_rotary"), ((*_Q_K, "mrope_section", "unsqueeze_dim"),), ROPES_OF_SECTIONS
    ),
    Slot("rope", _function("rotary.*vision"), (_Q_K,), FLAT_ROPES),
    Slot("rope", _function("rotary_emb$"), (("xq", "xk", "freqs_cis"), ("query", "key", "freqs_ci")), COMPLEX_ROPES),
]
# label -> variant, and label -> the flag of its slot. The table of families names variants by their
# labels
VARIANTS = {variant.label: variant for slot in SLOTS for variant in slot.variants}
SLOT_OF = {variant.label: slot.flag for slot in SLOTS for variant in slot.variants}
FLAT = {variant.label for variant in FLAT_ROPES}
PLAIN_MLP = "one activation: PyTorch has a kernel for it"  # why an MLP that a variant reproduces stays stock
TORCHS_OWN = {
    "nn.LayerNorm": ("LayerNorm", LayerNorm("torch", "eps").label)
}  # name in the table -> name in torch.nn, and the variant's label
