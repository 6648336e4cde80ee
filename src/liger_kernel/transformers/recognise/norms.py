"""Variants of norms, and the stand-ins on which they are compared with stock.

A new form of norm needs three places: what its kernel computes (``ops/norms``), a line of
``WEIGHTS`` or of ``RMS_NORMS`` here, and a norm that looks alike in
``test_look_alikes_are_left_alone``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from liger_kernel import memory
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.norms.gated_rms_norm import MAX_N, gated_rms_norm
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.transformers.recognise.activations import activation, named
from liger_kernel.transformers.recognise.variant import (
    NORM_FORMS,
    StandIns,
    Variant,
    are_numbers,
    decoding,
    random_weight,
)

# attribute with the eps -> its value in stand-ins; all differ, so that no other attribute will do
EPS = {"variance_epsilon": 0.03, "eps": 0.11, "rms_norm_eps": 0.4, "norm_eps": 0.23, "epsilon": 0.37}
OLMO_EPS = 1e-5

# How a norm gets its weight: the attributes of its stand-ins, and what it multiplies by
WEIGHTS: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], Callable[[Any], Any]]] = {
    "": (lambda: iter([{"weight": random_weight()}]), lambda self: self.weight),
    "with_scale": (
        lambda: iter([{"with_scale": True, "weight": random_weight()}, {"with_scale": False}]),
        lambda self: self.weight if self.with_scale else None,
    ),
    "unweighted": (lambda: iter([{}]), lambda self: None),
}


@dataclass(frozen=True)
class RMSNorm(Variant):
    """``offset`` is added to the weight; ``casting``: see ``ops.norms.rms_norm``; ``eps``: the
    attribute that holds it; ``weight``: one of ``WEIGHTS``."""

    kind = "rms_norm"
    offset: float
    casting: str
    eps: str
    weight: str = ""

    def __call__(self, stock: Callable) -> Callable:
        offset, casting, eps, weight_of = self.offset, self.casting, self.eps, WEIGHTS[self.weight][1]

        def forward(self, hidden_states):
            if decoding(hidden_states) or not are_numbers(epsilon := getattr(self, eps)):
                return stock(self, hidden_states)
            w = weight_of(self)
            if w is not None and w.ndim == 0:  # one number for all columns
                w = w.expand(hidden_states.shape[-1])
            return memory.cheap(rms_norm, hidden_states, w, eps=epsilon, offset=offset, casting=casting)

        if self.weight == "":  # with this form, a residual addition or a rotation may join the norm
            NORM_FORMS[forward] = offset, casting, eps
        return forward

    def stand_ins(self) -> StandIns:
        for shape in ((3, 32), (2, 3, 4, 32)):
            for attributes in WEIGHTS[self.weight][0]():
                yield {self.eps: EPS[self.eps]} | attributes, (torch.randn(shape),)


@dataclass(frozen=True)
class GatedRMSNorm(Variant):
    """``first``: "norm", "gate", or "norm_before_gate" if that attribute decides. ``groups``: the
    attribute from which the number of parts of a row follows.

    ``named``: whether the module names its activation. ``casting``: that of the norm, if it is
    first.
    """

    kind = "gated_rms_norm"
    first: str
    eps: str
    groups: str
    named: bool
    casting: str = "llama"

    def words(self) -> tuple[str, ...]:
        casting = "" if self.casting == "llama" else self.casting
        return f"{self.first} first", casting, self.eps, self.groups, "activation" if self.named else ""

    def __call__(self, stock: Callable) -> Callable:
        first, eps, groups, casting = self.first, self.eps, self.groups, self.casting

        def act_of(self: Any) -> str | None:
            if not torch.compiler.is_compiling():
                return activation(named(self.activation)) if "activation" in self.__dict__ else "silu"
            # a compiler cannot try what another activation computes
            return "silu" if getattr(self, "activation", "silu") in ("silu", "swish") else None

        def forward(self, hidden_states, gate=None):
            act, epsilon = act_of(self), getattr(self, eps)
            if act is None or decoding(hidden_states) or not are_numbers(epsilon):
                return stock(self, hidden_states, gate)
            if first == "norm":
                if gate is None or gate.shape != hidden_states.shape:
                    return stock(self, hidden_states, gate)
                how = dict(eps=epsilon, act=act, casting=casting)
                return memory.cheap(gated_rms_norm, hidden_states, gate, self.weight, **how)
            size = hidden_states.shape[-1]
            if groups:
                size = self.group_size if groups == "group_size" else size // self.n_groups
            norm_first = first == "norm_before_gate" and self.norm_before_gate
            alike = gate is not None and gate.shape == hidden_states.shape and size <= MAX_N
            # else the result has another dtype than the input
            alike = alike and (first != "gate" or self.weight.dtype == hidden_states.dtype)
            if alike and not norm_first:
                how = dict(eps=epsilon, act=act, casting="llama" if first == "gate" else "gemma", gate_first=True)
                how |= dict(groups=hidden_states.shape[-1] // size)
                return memory.cheap(gated_rms_norm, hidden_states, gate, self.weight, **how)
            # in fp32 until the weight: these norms round once
            h, gate = hidden_states.float(), gate if gate is None else gate.float()
            if gate is not None and not norm_first:
                h = glu(gate, h, act=act)
            h = rms_norm(h.unflatten(-1, (-1, size)), None, eps=epsilon).flatten(-2)
            if first == "gate":
                return self.weight * h.to(hidden_states.dtype)
            h = self.weight * h
            return (glu(gate, h, act=act) if gate is not None and norm_first else h).to(hidden_states.dtype)

        return forward

    def stand_ins(self) -> StandIns:
        acts = ("silu", "sigmoid", "gelu_pytorch_tanh", "mish") if self.named else ("",)  # we have no mish
        for act, norm_first in product(acts, (True, False) if self.first == "norm_before_gate" else (True,)):
            attributes: dict[str, Any] = {self.eps: EPS[self.eps], "weight": random_weight()}
            # groups of 8 columns either way
            if self.groups:
                attributes[self.groups] = 8 if self.groups == "group_size" else 4
            if self.first == "norm_before_gate":
                attributes["norm_before_gate"] = norm_first
            if self.named:
                attributes["activation"] = act
            yield attributes, (torch.randn(2, 3, 32), torch.randn(2, 3, 32))


@dataclass(frozen=True)
class LayerNorm(Variant):
    """``form``: PyTorch's ("torch"), with one added to the weight ("1P"), or with only a
    "weight", only a "bias", or "none" of the two."""

    kind = "layer_norm"
    form: str
    eps: str

    def __call__(self, stock: Callable) -> Callable:
        eps, form = self.eps, self.form

        def forward(self, hidden_states):
            device = hidden_states.device.type
            autocast = form in ("torch", "1P") and torch.is_autocast_enabled(device)
            epsilon = OLMO_EPS if eps == "constant" else getattr(self, eps)
            several = len(getattr(self, "normalized_shape", (0,))) != 1  # dims
            # a "1P" norm casts by itself
            if several or (autocast and form == "1P") or decoding(hidden_states) or not are_numbers(epsilon):
                return stock(self, hidden_states)
            w, b = (getattr(self, name, None) for name in ("weight", "bias"))
            w = w + 1.0 if form == "1P" else w
            # as PyTorch's autocast does on GPUs but not on CPUs
            if autocast and device == "cuda" and hidden_states.dtype != torch.float64:
                hidden_states = hidden_states.float()
            return memory.cheap(layer_norm, hidden_states, w, b, eps=epsilon)

        return forward

    def stand_ins(self) -> StandIns:
        both = self.form in ("torch", "1P")
        for bias in (True, False) if both else (self.form == "bias",):
            attributes: dict[str, Any] = {} if self.eps == "constant" else {self.eps: EPS[self.eps]}
            if both or self.form == "none":
                attributes["normalized_shape"] = (32,)
            if self.form != "none":
                attributes["weight"] = random_weight()
            if both or bias:
                attributes["bias"] = random_weight() if bias else None
            yield attributes, (torch.randn(2, 3, 4, 32) + 0.3,)


RMS_NORMS = [
    RMSNorm(offset, casting, eps, weight)
    for offset, weight in ((0.0, ""), (1.0, ""), (0.0, "with_scale"), (0.0, "unweighted"))
    # without a weight, "llama" rounds as "gemma" does
    for casting in (("gemma", "none") if weight == "unweighted" else ("llama", "gemma", "none"))
    for eps in EPS
]
LAYER_NORMS = [LayerNorm(form, eps) for form in ("torch", "1P", "weight", "bias", "none") for eps in (*EPS, "constant")]
GATED_RMS_NORMS = [
    GatedRMSNorm(first, eps, groups, named, casting)
    for first, groups in (
        ("norm", ""),
        ("gate", ""),
        ("gate", "group_size"),
        ("gate", "n_groups"),
        ("norm_before_gate", "n_groups"),
    )
    for casting in (("llama", "gemma") if first == "norm" else ("llama",))
    for named in (False, True)
    for eps in ("variance_epsilon", "eps")
]
