"""Variants of norms, and the stand-ins on which they are compared with stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernel import memory
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.transformers.recognise.activations import activation, named
from liger_kernel.transformers.recognise.stand_ins import random_weight
from liger_kernel.transformers.recognise.variant import NORM_FORMS, Variant


def norm_variant(offset: float, casting: str, eps: str, weight: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states):
            w = None if weight == "none" or (weight == "with_scale" and not self.with_scale) else self.weight
            if w is not None and w.ndim == 0:  # one for all columns
                w = w.expand(hidden_states.shape[-1])
            return memory.cheap(rms_norm, hidden_states, w, eps=getattr(self, eps), offset=offset, casting=casting)

        if weight == "weight":
            NORM_FORMS[forward] = offset, casting, eps
        return forward

    return variant


def gated_norm_variant(first: str, eps: str, groups: str) -> Variant:
    """``first``: the "norm" or the "gate", or "norm_before_gate", an attribute that says; ``groups``: what says into how many parts rows are cut."""

    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states, gate=None):
            act = activation(named(self.activation)) if "activation" in self.__dict__ and not torch.compiler.is_compiling() else "silu"
            if act is None or (torch.compiler.is_compiling() and getattr(self, "activation", "silu") not in ("silu", "swish")):
                return stock(self, hidden_states, gate)
            h, dtype = hidden_states, hidden_states.dtype
            gate = gate if gate is None else gate.float()
            if first == "norm":
                h = rms_norm(h, self.weight, eps=getattr(self, eps))
                return (h if gate is None else glu(gate, h, act=act)).to(dtype)
            norm_first = first == "norm_before_gate" and self.norm_before_gate
            h = h.float()
            if gate is not None and not norm_first:
                h = glu(gate, h, act=act)
            size = h.shape[-1] if not groups else self.group_size if groups == "group_size" else h.shape[-1] // self.n_groups
            h = rms_norm(h.unflatten(-1, (-1, size)), None, eps=getattr(self, eps)).flatten(-2)
            if first == "gate":
                return self.weight * h.to(dtype)
            h = self.weight * h
            return (glu(gate, h, act=act) if gate is not None and norm_first else h).to(dtype)

        return forward

    return variant


def layer_norm_variant(eps: str, form: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states):
            device = hidden_states.device.type
            autocast = form in ("torch", "1P") and torch.is_autocast_enabled(device)
            if len(getattr(self, "normalized_shape", (0,))) != 1 or (autocast and form == "1P"):  # which casts for itself
                return stock(self, hidden_states)
            w, b = (getattr(self, name, None) for name in ("weight", "bias"))
            w = w + 1.0 if form == "1P" else w
            if autocast and device == "cuda" and hidden_states.dtype != torch.float64:  # as PyTorch does there, and not on CPUs
                hidden_states = hidden_states.float()
            return memory.cheap(layer_norm, hidden_states, w, b, eps=OLMO_EPS if eps == "constant" else getattr(self, eps))

        return forward

    return variant


OLMO_EPS = 1e-5
EPS = {"variance_epsilon": 0.03, "eps": 0.11, "rms_norm_eps": 0.4, "norm_eps": 0.23, "epsilon": 0.37}


def norm_stand_ins(eps: str, weight: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for shape in ((3, 32), (2, 3, 4, 32)):
        for with_scale in (True, False) if weight == "with_scale" else (True,):
            attributes: dict[str, Any] = {eps: EPS[eps]}
            if weight == "weight" or (weight == "with_scale" and with_scale):
                attributes["weight"] = random_weight()
            if weight == "with_scale":
                attributes["with_scale"] = with_scale
            yield attributes, (torch.randn(shape),)


def gated_norm_stand_ins(first: str, eps: str, groups: str, named: bool) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for act in ("silu", "gelu_pytorch_tanh", "softplus") if named else ("",):
        for norm_first in (True, False) if first == "norm_before_gate" else (True,):
            attributes = {eps: EPS[eps], "weight": random_weight()} | ({groups: 8 if groups == "group_size" else 4} if groups else {})
            if first == "norm_before_gate":
                attributes["norm_before_gate"] = norm_first
            if named:
                attributes["activation"] = act if act != "softplus" else "mish"  # the last is none of ours
            yield attributes, (torch.randn(2, 3, 32), torch.randn(2, 3, 32))


def layer_norm_stand_ins(eps: str, form: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for bias in (True, False) if form in ("torch", "1P") else (form == "bias",):
        attributes: dict[str, Any] = {} if eps == "constant" else {eps: EPS[eps]}
        if form in ("torch", "1P", "none"):
            attributes["normalized_shape"] = (32,)
        if form != "none":
            attributes["weight"] = random_weight()
        if form in ("torch", "1P") or bias:
            attributes["bias"] = random_weight() if bias else None
        yield attributes, (torch.randn(2, 3, 4, 32) + 0.3,)
