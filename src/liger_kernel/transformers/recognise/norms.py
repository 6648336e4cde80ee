"""Variants of norms, and the stand-ins on which they are compared with stock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from liger_kernel import memory
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.norms.gated_rms_norm import gated_rms_norm
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.transformers.recognise.activations import activation, named
from liger_kernel.transformers.recognise.stand_ins import random_weight
from liger_kernel.transformers.recognise.variant import NORM_FORMS, StandIns, Variant, are_numbers

EPS = {"variance_epsilon": 0.03, "eps": 0.11, "rms_norm_eps": 0.4, "norm_eps": 0.23, "epsilon": 0.37}
OLMO_EPS = 1e-5


@dataclass(frozen=True)
class RMSNorm(Variant):
    """``weight``: the module has a weight ("weight"), an attribute says whether it has one
    ("with_scale"), or it has none ("none")."""

    kind = "rms_norm"
    offset: float
    casting: str
    eps: str
    weight: str

    def words(self) -> tuple[str, ...]:
        return (
            f"{self.offset:g}",
            self.casting,
            self.eps,
            {"weight": "", "none": "unweighted"}.get(self.weight, self.weight),
        )

    def __call__(self, stock: Callable) -> Callable:
        offset, casting, eps, weight = self.offset, self.casting, self.eps, self.weight

        def forward(self, hidden_states):
            if not are_numbers(epsilon := getattr(self, eps)):
                return stock(self, hidden_states)
            w = None if weight == "none" or (weight == "with_scale" and not self.with_scale) else self.weight
            if w is not None and w.ndim == 0:  # one number for all columns
                w = w.expand(hidden_states.shape[-1])
            return memory.cheap(rms_norm, hidden_states, w, eps=epsilon, offset=offset, casting=casting)

        if weight == "weight":
            NORM_FORMS[forward] = offset, casting, eps
        return forward

    def stand_ins(self) -> StandIns:
        for shape in ((3, 32), (2, 3, 4, 32)):
            for with_scale in (True, False) if self.weight == "with_scale" else (True,):
                attributes: dict[str, Any] = {self.eps: EPS[self.eps]}
                if self.weight == "weight" or (self.weight == "with_scale" and with_scale):
                    attributes["weight"] = random_weight()
                if self.weight == "with_scale":
                    attributes["with_scale"] = with_scale
                yield attributes, (torch.randn(shape),)


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
        return (
            f"{self.first} first",
            "" if self.casting == "llama" else self.casting,
            self.eps,
            self.groups,
            "activation" if self.named else "",
        )

    def __call__(self, stock: Callable) -> Callable:
        first, eps, groups, casting = self.first, self.eps, self.groups, self.casting

        def forward(self, hidden_states, gate=None):
            act = (
                activation(named(self.activation))
                if "activation" in self.__dict__ and not torch.compiler.is_compiling()
                else "silu"
            )
            epsilon = getattr(self, eps)
            if (
                act is None
                or not are_numbers(epsilon)
                or (torch.compiler.is_compiling() and getattr(self, "activation", "silu") not in ("silu", "swish"))
            ):
                return stock(self, hidden_states, gate)
            if first == "norm":
                if gate is None or gate.shape != hidden_states.shape:
                    return stock(self, hidden_states, gate)
                return gated_rms_norm(hidden_states, gate, self.weight, eps=epsilon, act=act, casting=casting)
            h, dtype = hidden_states, hidden_states.dtype
            gate = gate if gate is None else gate.float()
            norm_first = first == "norm_before_gate" and self.norm_before_gate
            h = h.float()
            if gate is not None and not norm_first:
                h = glu(gate, h, act=act)
            size = (
                h.shape[-1]
                if not groups
                else self.group_size
                if groups == "group_size"
                else h.shape[-1] // self.n_groups
            )
            h = rms_norm(h.unflatten(-1, (-1, size)), None, eps=epsilon).flatten(-2)
            if first == "gate":
                return self.weight * h.to(dtype)
            h = self.weight * h
            return (glu(gate, h, act=act) if gate is not None and norm_first else h).to(dtype)

        return forward

    def stand_ins(self) -> StandIns:
        for act in ("silu", "sigmoid", "gelu_pytorch_tanh", "softplus") if self.named else ("",):
            for norm_first in (True, False) if self.first == "norm_before_gate" else (True,):
                attributes: dict[str, Any] = {self.eps: EPS[self.eps], "weight": random_weight()}
                if self.groups:
                    attributes[self.groups] = 8 if self.groups == "group_size" else 4
                if self.first == "norm_before_gate":
                    attributes["norm_before_gate"] = norm_first
                if self.named:
                    attributes["activation"] = act if act != "softplus" else "mish"  # we have no such activation
                yield attributes, (torch.randn(2, 3, 32), torch.randn(2, 3, 32))


@dataclass(frozen=True)
class LayerNorm(Variant):
    """``form``: PyTorch's ("torch"), with one added to the weight ("1P"), or with only a
    "weight", only a "bias", or "none" of the two."""

    kind = "layer_norm"
    form: str
    eps: str

    def words(self) -> tuple[str, ...]:
        return self.form, self.eps

    def __call__(self, stock: Callable) -> Callable:
        eps, form = self.eps, self.form

        def forward(self, hidden_states):
            device = hidden_states.device.type
            autocast = form in ("torch", "1P") and torch.is_autocast_enabled(device)
            epsilon = OLMO_EPS if eps == "constant" else getattr(self, eps)
            # a "1P" norm casts by itself
            if (
                len(getattr(self, "normalized_shape", (0,))) != 1
                or (autocast and form == "1P")
                or not are_numbers(epsilon)
            ):
                return stock(self, hidden_states)
            w, b = (getattr(self, name, None) for name in ("weight", "bias"))
            w = w + 1.0 if form == "1P" else w
            if (
                autocast and device == "cuda" and hidden_states.dtype != torch.float64
            ):  # as PyTorch's autocast does on GPUs but not on CPUs
                hidden_states = hidden_states.float()
            return memory.cheap(layer_norm, hidden_states, w, b, eps=epsilon)

        return forward

    def stand_ins(self) -> StandIns:
        for bias in (True, False) if self.form in ("torch", "1P") else (self.form == "bias",):
            attributes: dict[str, Any] = {} if self.eps == "constant" else {self.eps: EPS[self.eps]}
            if self.form in ("torch", "1P", "none"):
                attributes["normalized_shape"] = (32,)
            if self.form != "none":
                attributes["weight"] = random_weight()
            if self.form in ("torch", "1P") or bias:
                attributes["bias"] = random_weight() if bias else None
            yield attributes, (torch.randn(2, 3, 4, 32) + 0.3,)


RMS_NORMS = [
    RMSNorm(offset, casting, eps, weight)
    for offset, weight in ((0.0, "weight"), (1.0, "weight"), (0.0, "with_scale"), (0.0, "none"))
    for casting in (("gemma", "none") if weight == "none" else ("llama", "gemma", "none"))
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
