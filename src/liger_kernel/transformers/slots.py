"""What can be swapped in a Hugging Face model, and how to know that the swap is right.

A slot is a kind of candidate (norm, gated MLP, rope function) with the variants we have kernels for. A variant is *borrowed*: a function that
runs on the model's own module and reads its attributes, so constructors, checkpoints and existing instances are untouched. A candidate is
swapped only where a variant reproduces it, outputs in bf16 bit for bit and everything in fp32 to rounding, on a stand-in that has exactly the
attributes the variant reads. Whatever needs more is left alone and listed with the reason.

``infer`` does this for the installed transformers; ``families.py`` is its result, written by ``liger models --write``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers import activations as transformers_activations
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT_TO_TEXT

from liger_kernel import memory
from liger_kernel.ops._core import operator
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.activations.glu import ACTS, glu
from liger_kernel.ops.activations.relu_squared import relu_squared
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.ops.projections.mlp import mlp
from liger_kernel.ops.projections.moe import moe
from liger_kernel.ops.rotary.rope import CASTING, of_complex, of_sections, once, rope
from liger_kernel.transformers.fusions import NORM_FORMS, ROPE_FORMS, plain, unhooked

# -- variants: label -> what takes the place of the stock function, which it is given ------

Variant = Callable[[Callable], Callable]


def named_as(variant: Any, stock: Callable) -> Callable:
    """``variant``, its parameters named as those of ``stock``: callers may name them. Changed in its code, so that calls cost nothing more."""
    code = variant.__code__
    theirs = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    new = {old: name for old, name in zip(code.co_varnames[: code.co_argcount], theirs) if old != name}
    if len(theirs) >= code.co_argcount and not set(new.values()) & {*code.co_freevars, *code.co_varnames[: code.co_argcount]}:
        taken = {name: f"_{name}" for name in new.values()}  # locals that are called so
        names = {part: tuple((new | taken).get(name, name) for name in getattr(code, part)) for part in ("co_varnames", "co_cellvars")}
        variant.__code__ = code.replace(**names)
    return variant


def _norm(offset: float, casting: str, eps: str, weight: str) -> Variant:
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


_NAMED: dict[str, tuple[Any, Callable]] = {}


def _named(name: str) -> Callable:
    """``ACT2FN[name]``, which makes a new one each time, and each would be looked at; another one when that has become of another kind."""
    kind = ACT2FN.get(name)
    if name not in _NAMED or _NAMED[name][0] is not kind:
        _NAMED[name] = kind, ACT2FN[name]
    return _NAMED[name][1]


def _gated_norm(first: str, eps: str, groups: str) -> Variant:
    """``first``: the "norm" or the "gate", or "norm_before_gate", an attribute that says; ``groups``: what says into how many parts rows are cut."""

    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states, gate=None):
            act = activation(_named(self.activation)) if "activation" in self.__dict__ and not torch.compiler.is_compiling() else "silu"
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


def _layer_norm(eps: str, form: str) -> Variant:
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


@dataclass(frozen=True)
class GLUForm:
    """What a gated MLP does beyond ``down(act(gate(x)) * up(x))``; ``attributes`` of its stand-ins, each set of them."""

    attributes: tuple[Callable[[], dict[str, Any]], ...] = (dict,)
    gate: Callable[[Any, Tensor], Tensor] = lambda self, gate: gate
    options: Callable[[Any], dict[str, Any]] = lambda self: {}  # of the operator
    wide: bool = False  # activation and product in fp32
    between: Callable[[Any, Tensor], Tensor] = lambda self, h: h
    after: Callable[[Any, Tensor], Tensor] = lambda self, y: y
    exact: bool = True

    @property
    def whole(self) -> bool:
        """Whether nothing happens between the projections but activation and product."""
        return not self.wide and self.gate is GLUForm.gate and self.between is GLUForm.between


def _as_weighted(h: Tensor, projection: Any) -> Tensor:
    """``h`` in the dtype of the projection's weight, unless that is in eight bits."""
    dtype = getattr(projection.weight, "dtype", torch.int8)
    return h if dtype in (h.dtype, torch.int8) else h.to(dtype)


class _InFp32(nn.Linear):
    """A projection that stays in fp32 whatever the rest becomes, for a stand-in."""

    def _apply(self, fn: Callable, recurse: bool = True) -> _InFp32:
        return self


class _Halve(nn.Module):
    """Some module, for a stand-in."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


GLU_FORMS = {
    "": GLUForm(),
    "multipliers": GLUForm(
        (lambda: {"gate_multiplier": 0.7, "down_multiplier": 1.3},),
        options=lambda self: {"gate_multiplier": self.gate_multiplier}, after=lambda self, y: y * self.down_multiplier,
    ),
    "global_scale": GLUForm((lambda: {"global_scale": nn.Parameter(torch.full((1,), 0.7))},), after=lambda self, y: y * self.global_scale),
    "residual_dropout": GLUForm(
        (lambda: {"residual_dropout": 0.0}, lambda: {"residual_dropout": 1.0}),
        after=lambda self, y: F.dropout(y, p=self.residual_dropout, training=self.training),
    ),
    "ffn_sub_norm": GLUForm((lambda: {"ffn_sub_norm": _Halve()},), between=lambda self, h: self.ffn_sub_norm(h)),
    "drop": GLUForm((lambda: {"drop": _Halve()},), between=lambda self, h: self.drop(h)),
    "dropout, cast": GLUForm(  # models in 16 bits whose last projection stays in fp32
        (lambda: {"dropout": _Halve(), "wo": _linear(12, 8, _InFp32)}, lambda: {"dropout": _Halve()}),
        between=lambda self, h: _as_weighted(self.dropout(h), self.wo),
    ),
    "dropout": GLUForm((lambda: {"dropout": _Halve()},), between=lambda self, h: self.dropout(h)),
    "sparsity": GLUForm(
        (lambda: {"activation_sparsity": 0.0}, lambda: {"activation_sparsity": 0.6}),
        gate=lambda self, gate: self._gaussian_topk(gate) if self.activation_sparsity > 0.0 else gate,
    ),
    "fp32": GLUForm(wide=True),
    "limit": GLUForm((lambda: {"limit": 0.3},), options=lambda self: {"limit": self.limit}),
    "swiglu_limit": GLUForm((lambda: {"swiglu_limit": 0.3},), options=lambda self: {"limit": self.swiglu_limit}),
    "swiglu_alpha, swiglu_limit": GLUForm(
        (lambda: {"swiglu_alpha": 1.7, "swiglu_limit": 0.3},),
        options=lambda self: {"alpha": self.swiglu_alpha, "limit": self.swiglu_limit, "offset": 1.0}, exact=False,
    ),
}  # fmt: skip


_LINEAR: Any = nn.Linear.forward


def _bare(m: Any) -> bool:
    """Whether calling ``m`` is a product with its weight and nothing else: no bias, adapter, shards, or hooks."""
    return type(m) in (nn.Linear,) and m.bias is None and plain(m.weight) and "forward" not in m.__dict__ and unhooked(m)


def _whole(x: Tensor, *projections: Any) -> bool:
    """Whether a gated MLP of these projections can be one operator, and would gain by it."""
    if not use_kernels(x, fusible=True) or not torch.is_grad_enabled() or nn.Linear.forward is not _LINEAR:
        return False
    if not all(map(_bare, projections)) or not (x.requires_grad or any(m.weight.requires_grad for m in projections)):
        return False
    return all(m.weight.dtype == x.dtype for m in projections) or torch.is_autocast_enabled(x.device.type)


def _glu(gate: str, up: str, down: str, act: str, form: GLUForm) -> Variant:
    def variant(stock: Callable) -> Callable:
        def whole(self, x, name):
            """As one operator; None where it is more than that."""
            projections = [getattr(self, name) for name in dict.fromkeys((gate, up, down))]
            options = form.options(self)
            if not _whole(x, *projections) or options.keys() - {"gate_multiplier"}:
                return None
            memory.needed()
            first, *second, last = (m.weight for m in projections)
            y = mlp(x, first, second[0] if second else None, last, act=name, recompute=memory.level() == "mlp", **options)
            memory.taken()
            return form.after(self, y)

        def run(self, name, x):
            memory.needed()
            if name is None:
                y = stock(self, x)
                memory.taken()
                return y
            g = getattr(self, gate)(x)
            g, u = g.chunk(2, -1) if up == gate else (g, getattr(self, up)(x))
            memory.taken()
            g = form.gate(self, g)
            dtype = g.dtype
            if form.wide:
                g, u = g.float(), u.float()
            h = memory.cheap(glu, g, u, act=name, **form.options(self))
            return form.after(self, getattr(self, down)(form.between(self, h.to(dtype))))

        def forward(self, x):
            if torch.compiler.is_compiling():  # the formula is what we would hand over anyway
                return stock(self, x)
            name = activation(F.silu if act == "F.silu" else getattr(self, act))
            y = whole(self, x, name) if name is not None and form.whole else None
            return memory.projected(functools.partial(run, self, name), x) if y is None else y

        return forward

    return variant


def _mlp(up: str, down: str, act: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, x):
            if torch.compiler.is_compiling() or activation(getattr(self, act)) != "relu2":
                return stock(self, x)
            return getattr(self, down)(memory.cheap(relu_squared, getattr(self, up)(x)))

        return forward

    return variant


DEFAULT_EXPERTS = "grouped_mm"  # what transformers runs unless somebody names another implementation; naming this one leaves no trace


@functools.cache
def _say_chosen(implementation: str) -> None:
    warnings.warn(
        f"liger_kernel: experts run transformers' {implementation!r}, which their configuration names, and not our kernels, which take the place of the"
        f" default, {DEFAULT_EXPERTS!r}",
        stacklevel=2,
    )


def _chosen(experts: Any) -> bool:
    """Whether somebody has named the implementation of these experts himself, now: it can be set at any time."""
    config = getattr(experts, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if implementation is None or implementation == DEFAULT_EXPERTS or isinstance(config, _Eager):
        return False
    if torch.is_grad_enabled():  # transformers itself names one for the time of ``generate``
        _say_chosen(implementation)
    return True


def _experts(transposed: bool, interleaved: bool, biased: bool, act: str, options: Callable[[Any], dict[str, Any]]) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states, top_k_index, top_k_weights):
            name = None if torch.compiler.is_compiling() else activation(F.silu if act == "F.silu" else getattr(self, act))
            w, v = self.gate_up_proj, self.down_proj
            plainly = w.ndim == 3 and w.is_floating_point() and w.itemsize > 1  # FP8 comes with scales
            if name is None or not plainly or getattr(self, "_is_expert_parallel", False) or _chosen(self):
                return stock(self, hidden_states, top_k_index, top_k_weights)
            bias = dict(gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias) if biased else {}
            index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
            y = moe(hidden_states.reshape(-1, hidden_states.shape[-1]), *((w.mT, v.mT) if transposed else (w, v)), index, weights,
                    act=name, interleaved=interleaved, **bias, **options(self))  # fmt: skip
            return y.view(hidden_states.shape).to(hidden_states.dtype)

        return forward

    return variant


# how a rope function's tables hold one angle for each pair of columns
TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "once": lambda t: t,
    "twice": lambda t: t[..., : t.shape[-1] // 2],  # cat(angles, angles)
    "repeated": lambda t: t[..., ::2],  # repeat_interleave(angles, 2)
}
ABSENT = object()


def _learn(*tables: Tensor) -> bool:
    """Whether some of these tables ask for a gradient, all of it: ours see each angle once."""
    return (tables[0].requires_grad or tables[-1].requires_grad) and torch.is_grad_enabled()


def _rope(layout: str, tables: str, casting: str) -> Variant:
    """``layout`` "apart": takes pairs, and returns the first of each and then the second."""
    angles = TABLES[tables]

    def turn(stock: Callable, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
        memory.taken()  # by the projections
        fits = k is not None and q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape[0] in (1, q.shape[0]) and unsqueeze_dim in (1, 2)
        if fits and not _learn(cos, sin):
            turned = rope(q, k, angles(cos), angles(sin), layout="pairs" if layout == "apart" else layout, unsqueeze_dim=unsqueeze_dim, casting=casting)
            return tuple(torch.cat((y[..., ::2], y[..., 1::2]), -1) for y in turned) if layout == "apart" else turned  # type: ignore[return-value]
        more = (unsqueeze_dim,) if position_ids is ABSENT else (position_ids, unsqueeze_dim)
        return stock(q, k, cos, sin, *more)

    def variant(stock: Callable) -> Callable:
        parameters = inspect.signature(stock).parameters
        if parameters["k"].default is None:  # called for queries alone, too

            def apply_rotary_pos_emb(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
                return turn(stock, q, k, cos, sin, ABSENT, unsqueeze_dim)
        elif "position_ids" in parameters:  # it has been without effect for long, and is gone in most

            def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
                return turn(stock, q, k, cos, sin, position_ids, unsqueeze_dim)
        else:

            def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
                return turn(stock, q, k, cos, sin, ABSENT, unsqueeze_dim)

        if layout != "apart" and parameters["unsqueeze_dim"].default == 1:
            ROPE_FORMS[apply_rotary_pos_emb] = layout, angles, casting
        return apply_rotary_pos_emb

    return variant


def _rope_alone(layout: str, tables: str, casting: str, sin_first: bool = False) -> Variant:
    """Of one tensor: beside it goes another one, of no heads. ``layout`` "behind": pairs in the last columns, others pass through."""
    angles = TABLES[tables]

    def turned(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor | None:
        if x.ndim != 4 or cos.ndim != 3 or cos.shape[0] not in (1, x.shape[0]) or unsqueeze_dim not in (1, 2) or _learn(cos, sin):
            return None
        cos, sin = angles(cos), angles(sin)
        first = x.shape[-1] - 2 * cos.shape[-1] if layout == "behind" else 0
        part = x[..., first:] if first else x
        none = part.detach().narrow(unsqueeze_dim, 0, 0)
        y, _ = rope(part, none, cos, sin, layout="pairs" if layout == "behind" else layout, unsqueeze_dim=unsqueeze_dim, casting=casting)
        return torch.cat((x[..., :first], y), -1) if first else y

    def variant(stock: Callable) -> Callable:
        if sin_first:

            def apply_rotary_pos_emb(tensor, sin, cos):
                y = turned(tensor, cos, sin, 2)
                return stock(tensor, sin, cos) if y is None else y
        else:

            def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
                y = turned(x, cos, sin, unsqueeze_dim)
                return stock(x, cos, sin, unsqueeze_dim) if y is None else y

        return apply_rotary_pos_emb

    return variant


def _rope_sections(casting: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
            if q.ndim != 4 or cos.ndim != 4 or unsqueeze_dim not in (1, 2) or _learn(cos, sin):
                return stock(q, k, cos, sin, mrope_section, unsqueeze_dim)
            return rope(q, k, of_sections(cos, mrope_section), of_sections(sin, mrope_section), unsqueeze_dim=unsqueeze_dim, casting=casting)

        return apply_multimodal_rotary_pos_emb

    return variant


def _rope_flat(casting: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def apply_rotary_pos_emb_vision(q, k, cos, sin):
            if q.ndim != 3 or k.ndim != 3 or cos.ndim != 2 or _learn(cos, sin):
                return stock(q, k, cos, sin)
            q, k = rope(q[None], k[None], once(cos)[None], once(sin)[None], unsqueeze_dim=2, casting=casting)
            return q[0], k[0]

        return apply_rotary_pos_emb_vision

    return variant


def _rope_complex(unsqueeze_dim: int) -> Variant:
    def variant(stock: Callable) -> Callable:
        def apply_rotary_emb(xq, xk, freqs_cis):
            if unsqueeze_dim == 2 and freqs_cis.numel() == xq.shape[1] * (xq.shape[-1] // 2):  # one table for all images
                table = freqs_cis.reshape(1, xq.shape[1], xq.shape[-1] // 2)
            else:
                table = freqs_cis
            if not freqs_cis.is_complex() or table.ndim != 3 or _learn(freqs_cis):
                return stock(xq, xk, freqs_cis)
            return rope(xq, xk, *of_complex(table.to(xq.device)), layout="pairs", unsqueeze_dim=unsqueeze_dim)

        return apply_rotary_emb

    return variant


# Modules that are an activation and nothing else, whatever the mode: no parameters, no state. Behind each, what its forward reads of it.
_ACTIVATION_MODULES: dict[type, str] = {nn.SiLU: "inplace", nn.GELU: "approximate", nn.Sigmoid: ""} | {
    getattr(transformers_activations, name): reads
    for name, reads in dict(SiLUActivation="", GELUActivation="act", GELUTanh="act", PytorchGELUTanh="act", ReLUSquaredActivation="").items()
    if hasattr(transformers_activations, name)  # releases differ
}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {F.silu: "silu", F.gelu: "gelu", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid"}
_TORCHS = F.silu, F.gelu, F.relu  # what the forwards call
_ACTIVATIONS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str | None]] = weakref.WeakKeyDictionary()


def activation(fn: Any) -> str | None:
    """Which of our activations calling ``fn`` is now; None if it is none of them, or somebody sees its calls.

    By what it is: a class or function of PyTorch or transformers. Values would also fit a learnt gain that begins at 1, or dropout while evaluating.
    """
    reads = _ACTIVATION_MODULES.get(type(fn))
    if reads is None:
        return _ACTIVATION_FUNCTIONS.get(fn) if isinstance(fn, (types.FunctionType, types.BuiltinFunctionType)) else None
    if "forward" in fn.__dict__ or not unhooked(fn):
        return None
    now = type(fn).forward, fn.__dict__.get(reads), F.silu, F.gelu, F.relu  # all that somebody may have changed since it was looked at
    known = _ACTIVATIONS.get(fn)
    if known is None or known[0] != now:
        known = _ACTIVATIONS[fn] = now, _confirmed(fn, *now)
    return known[1]


def _confirmed(fn: nn.Module, forward: Any, read: Any, *torchs: Callable) -> str | None:
    """The activation that ``fn`` has the values of, if its class's forward, and what it reads, are those that PyTorch or transformers gave it."""
    read = read.func if isinstance(read, functools.partial) else read
    if torchs != _TORCHS or forward.__globals__.get("__name__") != type(fn).__module__ or not (isinstance(read, (bool, str)) or read in (None, *_TORCHS)):
        return None
    with torch.no_grad(), unset_fake_temporarily(), contextlib.suppress(Exception):
        x = torch.linspace(-6, 6, 385, device="cpu")
        same = lambda ours: all(torch.equal(fn(t), ours(t.float()).to(t.dtype)) for t in (x, x.bfloat16()))
        return next((name for name, ours in ACTS.items() if same(ours)), None)
    return None


# -- slots: candidates, stand-ins on which a candidate and a variant are compared ----------

EPS = {"variance_epsilon": 0.03, "eps": 0.11, "rms_norm_eps": 0.4, "norm_eps": 0.23, "epsilon": 0.37}
GLU_NAMES = [
    ("gate_proj", "up_proj", "down_proj", "act_fn"),
    ("gate_proj", "up_proj", "down_proj", "activation_fn"),
    ("gate_up_proj", "gate_up_proj", "down_proj", "activation_fn"),
    ("gate_up_proj", "gate_up_proj", "down_proj", "act_fn"),
    ("gate_up_proj", "gate_up_proj", "down_proj", "F.silu"),
    ("input_linear", "input_linear", "output_linear", "activation"),
    ("weights_in", "weights_in", "weights_out", "F.silu"),
    ("w1", "w3", "w2", "F.silu"),
    ("w1", "w3", "w2", "act_fn"),
    ("w1", "w2", "w3", "act_fn"),
    ("wi_0", "wi_1", "wo", "act"),
    ("Wi", "Wi", "Wo", "act"),
    ("gate_proj", "up_proj", "down_proj", "F.silu"),
]
MLP_NAMES = [
    ("up_proj", "down_proj", "act_fn"),
    ("fc1", "fc2", "activation_fn"),
    ("c_fc", "c_proj", "act"),
    ("dense_h_to_4h", "dense_4h_to_h", "act"),
]
# label -> the activation, options of the operator, attributes of the stand-ins
EXPERT_FORMS: dict[str, tuple[str, Callable[[Any], dict[str, Any]], dict[str, float]]] = {
    "": ("act_fn", lambda self: {}, {}),
    "limit": ("act_fn", lambda self: {"limit": self.limit}, {"limit": 0.3}),
    "swiglu_limit": ("F.silu", lambda self: {"limit": self.swiglu_limit}, {"swiglu_limit": 0.3}),
    "swiglu_alpha, swiglu_limit": (
        "F.silu", lambda self: {"alpha": self.swiglu_alpha, "limit": self.swiglu_limit, "offset": 1.0}, {"swiglu_alpha": 1.7, "swiglu_limit": 0.3},
    ),
    "alpha, limit": ("F.silu", lambda self: {"alpha": self.alpha, "limit": self.limit, "offset": 1.0}, {"alpha": 1.7, "limit": 0.3}),
}  # fmt: skip

StandIns = Callable[[], Iterator[tuple[dict[str, Any], tuple[Any, ...]]]]


def _weight(n: int = 32) -> nn.Parameter:
    return nn.Parameter(torch.randn(n) * 0.3 + 0.5)


def _linear(n: int, out: int, cls: type[nn.Linear] = nn.Linear) -> nn.Module:
    """An ``nn.Linear``, filled whatever constructors and initialisers do at the moment."""
    attributes = dict(in_features=n, out_features=out, weight=nn.Parameter((torch.rand(out, n) - 0.5) / n**0.5 * 2))
    return _stand_in(cls, attributes | dict(bias=nn.Parameter((torch.rand(out) - 0.5) / n**0.5 * 2)))


def _norm_stand_ins(eps: str, weight: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for shape in ((3, 32), (2, 3, 4, 32)):
        for with_scale in (True, False) if weight == "with_scale" else (True,):
            attributes: dict[str, Any] = {eps: EPS[eps]}
            if weight == "weight" or (weight == "with_scale" and with_scale):
                attributes["weight"] = _weight()
            if weight == "with_scale":
                attributes["with_scale"] = with_scale
            yield attributes, (torch.randn(shape),)


def _gated_norm_stand_ins(first: str, eps: str, groups: str, named: bool) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for act in ("silu", "gelu_pytorch_tanh", "softplus") if named else ("",):
        for norm_first in (True, False) if first == "norm_before_gate" else (True,):
            attributes = {eps: EPS[eps], "weight": _weight()} | ({groups: 8 if groups == "group_size" else 4} if groups else {})
            if first == "norm_before_gate":
                attributes["norm_before_gate"] = norm_first
            if named:
                attributes["activation"] = act if act != "softplus" else "mish"  # the last is none of ours
            yield attributes, (torch.randn(2, 3, 32), torch.randn(2, 3, 32))


def _layer_norm_stand_ins(eps: str, form: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for bias in (True, False) if form in ("torch", "1P") else (form == "bias",):
        attributes: dict[str, Any] = {} if eps == "constant" else {eps: EPS[eps]}
        if form in ("torch", "1P", "none"):
            attributes["normalized_shape"] = (32,)
        if form != "none":
            attributes["weight"] = _weight()
        if form in ("torch", "1P") or bias:
            attributes["bias"] = _weight() if bias else None
        yield attributes, (torch.randn(2, 3, 4, 32) + 0.3,)


def _glu_stand_ins(gate: str, up: str, down: str, act: str, form: GLUForm) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):  # the last is none of ours: act_fn must be what counts
        for more in form.attributes:
            attributes: dict[str, Any] = {gate: _linear(8, 24 if up == gate else 12), down: _linear(12, 8)} | more()
            if up != gate:
                attributes[up] = _linear(8, 12)
            if act != "F.silu":
                attributes[act] = fn
            yield attributes, (torch.randn(2, 5, 8),)


def _mlp_stand_ins(up: str, down: str, act: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for fn in (ACT2FN["relu2"], nn.SiLU()):
        yield {up: _linear(8, 12), down: _linear(12, 8), act: fn}, (torch.randn(2, 5, 8),)


def _expert_stand_ins(transposed: bool, biased: bool, act: str, numbers: dict[str, float]) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    E, H, n = 4, 8, 12
    for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):
        weight = lambda *shape: nn.Parameter(torch.randn(shape) / 3)
        attributes: dict[str, Any] = dict(
            num_experts=E, hidden_dim=H, hidden_size=H, intermediate_dim=n, intermediate_size=n, expert_dim=n, config=_Eager(), has_gate=True,
            has_bias=biased, is_transposed=transposed, gate_up_proj=weight(E, H, 2 * n) if transposed else weight(E, 2 * n, H),
            down_proj=weight(E, n, H) if transposed else weight(E, H, n),
        ) | numbers  # fmt: skip
        if biased:
            attributes |= dict(gate_up_proj_bias=weight(E, 2 * n), down_proj_bias=weight(E, H))
        if act != "F.silu":
            attributes[act] = fn
        index = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0]])  # nothing for one of the experts
        yield attributes, (torch.randn(5, H), index, torch.rand(5, 2))


class _Eager:
    """A configuration under which a module of experts computes what its source says."""

    _experts_implementation = "eager"


def _rope_stand_ins(tables: str) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    for width in (16, 24):  # 24: the last eight columns pass through
        for batch, unsqueeze_dim in ((1, 1), (3, 1), (3, 2)):
            q, k = (torch.randn((3, heads, 5, width) if unsqueeze_dim == 1 else (3, 5, heads, width)) for heads in (2, 1))
            angle = torch.randn(batch, 5, 8)
            angle = {"once": angle, "twice": torch.cat((angle, angle), -1), "repeated": angle.repeat_interleave(2, -1)}[tables]
            yield {"unsqueeze_dim": unsqueeze_dim}, (q, k, angle.cos(), angle.sin())


def _rope_alone_stand_ins(tables: str, sin_first: bool = False) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    for attributes, (q, _, cos, sin) in _rope_stand_ins(tables):
        if not sin_first:
            yield attributes, (q, cos, sin)
        elif attributes["unsqueeze_dim"] == 2:
            yield {}, (q, sin, cos)


def _rope_sections_stand_ins() -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    for unsqueeze_dim in (1, 2):
        q, k = (torch.randn((3, heads, 5, 16) if unsqueeze_dim == 1 else (3, 5, heads, 16)) for heads in (2, 1))
        angle = torch.randn(3, 3, 5, 8)
        angle = torch.cat((angle, angle), -1)
        yield {"unsqueeze_dim": unsqueeze_dim, "mrope_section": [2, 3, 3]}, (q, k, angle.cos(), angle.sin())


def _rope_flat_stand_ins() -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    angle = torch.randn(5, 8)
    angle = torch.cat((angle, angle), -1)
    yield {}, (torch.randn(5, 2, 16), torch.randn(5, 1, 16), angle.cos(), angle.sin())


def _rope_complex_stand_ins(unsqueeze_dim: int) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    for batch in (1, 3):
        q, k = (torch.randn((3, heads, 5, 16) if unsqueeze_dim == 1 else (3, 5, heads, 16)) for heads in (2, 1))
        yield {}, (q, k, torch.polar(torch.ones(batch, 5, 8), torch.randn(batch, 5, 8)))


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
            (_norm(offset, casting, eps, weight), functools.partial(_norm_stand_ins, eps, weight), True)
        for offset, weight in ((0.0, "weight"), (1.0, "weight"), (0.0, "with_scale"), (0.0, "none"))
        for casting in (("gemma",) if weight == "none" else ("llama", "gemma", "none")) for eps in EPS
    }),
    Slot("layer_norm", NORMS, (("x",),), {
        f"layer_norm({form}, {eps})": (_layer_norm(eps, form), functools.partial(_layer_norm_stand_ins, eps, form), True)
        for form in ("torch", "1P", "weight", "bias", "none") for eps in (*EPS, "constant")
    }),
    Slot("rms_norm", NORMS, (("x", "gate"),), {
        f"gated_rms_norm({_label(first + ' first', eps, groups, 'activation' if named else '')})":
            (_gated_norm(first, eps, groups), functools.partial(_gated_norm_stand_ins, first, eps, groups, named), True)
        for first, groups in (("norm", ""), ("gate", ""), ("gate", "group_size"), ("gate", "n_groups"), ("norm_before_gate", "n_groups"))
        for named in (False, True) for eps in ("variance_epsilon", "eps")
    }),
    Slot("glu", _module("(MLP|Mlp|FeedForward|FFN|DenseGatedActDense)$"), (("x",),), {
        f"glu({_label(*names, form)})": (_glu(*names, GLU_FORMS[form]), functools.partial(_glu_stand_ins, *names, GLU_FORMS[form]), GLU_FORMS[form].exact)
        for names in GLU_NAMES for form in GLU_FORMS
    }),
    Slot("relu_squared", _module("(MLP|Mlp|FeedForward|FFN)$"), (("x",),), {
        f"relu_squared({_label(*names)})": (_mlp(*names), functools.partial(_mlp_stand_ins, *names), True) for names in MLP_NAMES
    }),
    Slot("glu", _module("Experts$"), (("x", "index", "weights"),), {
        f"moe({_label('transposed' if transposed else '', 'interleaved' if interleaved else '', 'biased' if biased else '', act, form)})": (
            _experts(transposed, interleaved, biased, act, options), functools.partial(_expert_stand_ins, transposed, biased, act, numbers), False,
        )
        for form, (act, options, numbers) in EXPERT_FORMS.items()
        for transposed in (False, True) for interleaved in (False, True) for biased in (False, True)
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"),
        (("q", "k", "cos", "sin", "unsqueeze_dim"), ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim")), {
        f"rope({casting}, {layout}, {tables})": (_rope(layout, tables, casting), functools.partial(_rope_stand_ins, tables), True)
        for casting in CASTING for layout in ("halves", "pairs", "apart") for tables in TABLES
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"), (("x", "cos", "sin", "unsqueeze_dim"),), {
        f"rope(alone, {casting}, {layout}, {tables})": (_rope_alone(layout, tables, casting), functools.partial(_rope_alone_stand_ins, tables), True)
        for casting in CASTING for layout in ("halves", "pairs", "behind") for tables in TABLES
    }),
    Slot("rope", _function("^apply_rotary|^apply_rope"), (("tensor", "sin", "cos"),), {
        f"rope(alone, sin first, {casting}, {layout}, once)": (
            _rope_alone(layout, "once", casting, True), functools.partial(_rope_alone_stand_ins, "once", True), True,
        )
        for casting in CASTING for layout in ("halves", "pairs")
    }),
    Slot("rope", _function("^apply_multimodal_rotary"), (("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"),), {
        f"rope({casting}, sections)": (_rope_sections(casting), _rope_sections_stand_ins, True) for casting in CASTING
    }),
    Slot("rope", _function("rotary.*vision"), (("q", "k", "cos", "sin"),), {
        FLAT[casting]: (_rope_flat(casting), _rope_flat_stand_ins, True) for casting in CASTING
    }),
    Slot("rope", _function("rotary_emb$"), (("xq", "xk", "freqs_cis"), ("query", "key", "freqs_ci")), {
        f"rope(complex, {d})": (_rope_complex(d), functools.partial(_rope_complex_stand_ins, d), False) for d in (2, 1)
    }),
]  # fmt: skip
# whole models stay equal bit for bit; means and deviations of LayerNorms may be summed in another order and then, rarely, be rounded another way
EXACT = {label for slot in SLOTS for label, (_, _, exact) in slot.variants.items() if exact and slot.flag != "layer_norm"}
SLOT_OF = {label: slot.flag for slot in SLOTS for label in slot.variants}
VARIANTS = {label: variant for slot in SLOTS for label, (variant, _, _) in slot.variants.items()}


# -- recognition ---------------------------------------------------------------------------


@contextlib.contextmanager
def references() -> Iterator[None]:
    """References serve, on any device: what a kernel does is compared with them elsewhere, and here every bit counts."""
    devices = set(operator._KERNEL_DEVICES)
    operator._KERNEL_DEVICES.clear()
    try:
        yield
    finally:
        operator._KERNEL_DEVICES.update(devices)


def _stand_in(cls: type, attributes: dict[str, Any]) -> nn.Module:
    """A ``cls`` with these attributes and no others: its constructor, whatever it takes, is not asked, nor how parameters are registered (accelerate)."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            module._parameters[name] = value
        else:
            setattr(module, name, value)
    return module


def _run(fn: Callable, owner: Any, attributes: dict, inputs: tuple, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and in fp32 the gradients of tensor inputs (but angles) and parameters."""
    learns = dtype == torch.float32
    turned = len(inputs) if isinstance(owner, type) else len(inputs) - (1 if inputs[-1].is_complex() else 2)  # behind these are tables: a function's weights
    floats = lambda inputs, dtype, learns: [t.detach().to(dtype).requires_grad_(learns) if t.is_floating_point() else t for t in inputs]
    tensors = [*floats(inputs[:turned], dtype, learns), *floats(inputs[turned:], weight_dtype, False)]
    if isinstance(owner, type):
        module = _stand_in(owner, attributes).to(weight_dtype)
        out = fn(module, *tensors)
        leaves = [*(t for t in tensors if t.requires_grad), *module.parameters()]
    else:
        out = fn(*tensors, **attributes)
        leaves = tensors[:turned]
    outs = list(out) if isinstance(out, tuple) else [out]
    if not learns:
        return [o.detach() for o in outs]
    total = sum((o * o).sum() for o in outs)
    # where dropout leaves nothing there is no gradient
    return [*outs, *(torch.autograd.grad(total, leaves) if isinstance(total, Tensor) and total.requires_grad else ())]


def reproduces(variant: Variant, stand_ins: StandIns, exact: bool, owner: Any, stock: Callable) -> bool:
    """Whether ``variant`` does what ``stock`` does on every stand-in: those that are ``exact`` bit for bit in bf16."""
    new, compared = variant(stock), 0
    full, half = torch.float32, torch.bfloat16
    for attributes, inputs in stand_ins():
        for dtype, weight_dtype in ((full, full), (half, half), (half, full), *(() if isinstance(owner, type) else ((full, half),))):
            try:
                expected = _run(stock, owner, attributes, inputs, dtype, weight_dtype)
            except RuntimeError:
                if isinstance(owner, type) and dtype == weight_dtype:
                    return False
                # projections that do not mix dtypes, a rope function that does not pass columns through: callers do not ask for it
                continue
            found = _run(new, owner, attributes, inputs, dtype, weight_dtype)
            if dtype is torch.bfloat16:  # else stock rounds at every step, and we once
                close = dict(rtol=0, atol=0) if exact else dict(rtol=2**-6, atol=2**-6)
            else:
                close = dict(rtol=1e-5, atol=1e-5)
            if [o.dtype for o in expected] != [o.dtype for o in found] or len(expected) != len(found):
                return False
            if not all(torch.allclose(a, b, **close) for a, b in zip(expected, found)):
                return False
            compared += 1
    return compared > 0


@functools.cache
def _known(label: str) -> frozenset[str]:
    """Attributes that the stand-ins of a variant have."""
    stand_ins = next(slot.variants[label][1] for slot in SLOTS if label in slot.variants)
    return frozenset(name for attributes, _ in stand_ins() for name in attributes)


def recognise(slot: Slot, owner: Any, stock: Callable, tables: set[str] | None = None) -> tuple[str | None, str]:
    """The label of the variant that reproduces ``stock``, or None and why there is none. ``tables``: forms of the tables a rope function gets."""
    names = [p.name for p in inspect.signature(stock).parameters.values()]
    if isinstance(owner, type):
        if len(names) != len(slot.parameters[0]) + 1:
            return None, f"forward takes ({', '.join(names[1:])})"
    elif tuple(names) not in slot.parameters:
        return None, f"takes ({', '.join(names)})"
    by_tables = {label for label in slot.variants if label[:-1].split(", ")[-1] in TABLES}
    missing: set[str] = set()
    for label, (variant, stand_ins, exact) in slot.variants.items():
        form = label[:-1].split(", ")[-1]
        # a function that takes each angle once takes nothing else
        if label in by_tables and tables != {form} and (tables or form != "once"):
            continue
        try:
            if reproduces(variant, stand_ins, exact, owner, stock):
                return label, ""
        except AttributeError as error:
            missing |= set(re.findall(r"no attribute '(\w+)'", str(error)))
        except Exception:  # whatever it is that it does, it is not what the variant does
            continue
    if by_tables and (tables is None or len(tables) != 1):
        return None, "its tables are not understood"
    missing = missing - frozenset().union(*map(_known, slot.variants))
    return None, f"uses {', '.join(sorted(missing))}" if missing else "no variant computes the same"


def modeling(model_type: str) -> ModuleType:
    """The module of transformers with the classes of ``model_type``."""
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def configs_of(config: Any) -> Iterator[Any]:
    """``config`` and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from configs_of(part)


def _tables(module: ModuleType, config: Any) -> set[str]:
    """In which form this module's rotary embeddings, as far as ``config`` or its parts can make them, hold their angles."""
    forms = set()
    for name, cls in vars(module).items():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and "Rotary" in name and cls.__module__ == module.__name__):
            continue
        for each in configs_of(config):
            with contextlib.suppress(Exception):  # a vision tower's, for example
                embed = _embedding(cls, each)
                # not of the config's kinds of layers: some turn nothing, or have other names here
                more = {"layer_type": next(iter(embed.rope_type))} if "layer_type" in inspect.signature(cls.forward).parameters else {}
                positions = torch.arange(5)[None]
                try:
                    cos, sin = embed(torch.zeros(1, 5, 8), positions, **more)
                except Exception:  # time, height and width
                    cos, sin = embed(torch.zeros(1, 5, 8), torch.stack((positions, 3 * positions, 7 * positions)), **more)
                forms.add(_form(torch.stack((cos, sin))))
                break
    return forms


def _embedding(cls: type, config: Any) -> nn.Module:
    try:
        return cls(config)
    except (AttributeError, TypeError):  # of transformers 4, which read from the scaling what its default does not say
        if getattr(config, "rope_scaling", ABSENT) is not None:
            raise
        config = copy.copy(config)
        config.rope_scaling = {"rope_type": "default"}
        return cls(config)


def _form(both: Tensor) -> str:
    half = both.shape[-1] // 2
    if both[..., :half].equal(both[..., half:]):
        return "twice"
    return "repeated" if both[..., ::2].equal(both[..., 1::2]) else "once"


TORCHS_OWN = {"nn.LayerNorm": ("LayerNorm", "layer_norm(torch, eps)")}  # in the table's name -> in torch.nn, and the variant


@dataclass(frozen=True)
class Family:
    """What is swapped in the models of one type: candidates of its module -> variant, or -> why it is left alone."""

    heads: tuple[str, ...] = ()  # classes whose forward ends with a head and a loss
    fused: str = ""  # why the head is not fused; empty if it is
    glu: str = "swiglu"  # the name of the flag
    swapped: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()  # types of its parts that have a module of their own
    images: bool = False  # whether it was tried with images


PLACE = "transformers.models."


def heads_of(model_type: str, module: ModuleType) -> tuple[str, ...]:
    """Model classes of a type that have a head and a loss."""
    names = (mapping.get(model_type) for mapping in (IMAGE_TEXT_TO_TEXT, CAUSAL))
    return tuple(dict.fromkeys(n for n in names if n and hasattr(module, n)))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Computing on the CPU as by default, whatever surrounds the call: fake tensors, autocast, inference mode, another device or default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]), torch.device("cpu"), references(),
        ):  # fmt: skip
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs, too, and their state is the user's
            yield
    finally:
        torch.set_default_dtype(dtype)


def without_flat(row: Family) -> Family:
    """``row`` without rope functions whose tables are made in the middle of a tower: whether they fit is seen only on images."""
    flat = {name: "its tables are not understood" for name, label in row.swapped.items() if label in FLAT.values()}
    return dataclasses.replace(row, swapped={n: v for n, v in row.swapped.items() if n not in flat}, left_alone=row.left_alone | flat) if flat else row


def infer(model_type: str, config: Any = None) -> Family:
    """What can be swapped in the installed transformers' models of ``model_type``."""
    module = modeling(model_type)
    config = CONFIG_MAPPING[model_type]() if config is None else config
    swapped, left_alone = {}, {}
    activations = {str(getattr(c, a, "")) for c in configs_of(config) for a in ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")}
    with _undisturbed():
        tables = _tables(module, config)
        for name, candidate in inspect.getmembers(module):
            if not str(getattr(candidate, "__module__", "")).startswith(PLACE):  # its own, or of another family that it takes it from
                continue
            owner, stock = (candidate, candidate.__dict__.get("forward")) if isinstance(candidate, type) else (module, candidate)
            reasons: list[str] = []
            for slot in SLOTS:
                if not slot.candidate(name, candidate):
                    continue
                label, reason = recognise(slot, owner, stock, tables)
                if label and slot.flag == "relu_squared" and "relu2" not in activations:
                    label, reason = None, "one activation: PyTorch has a kernel for it"
                if label:
                    swapped[name] = label
                    break
                reasons.append(reason)
            else:
                if reasons:
                    left_alone[name] = next((r for r in reasons if r.startswith("one ")), next((r for r in reasons if " take" not in f" {r}"), reasons[0]))
        for name, (cls, label) in TORCHS_OWN.items():
            if any(_makes(c, cls) for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__):
                swapped[name] = label
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    act = str(next((getattr(c, a) for c in (text, *configs_of(config)) for a in ("hidden_activation", "hidden_act") if getattr(c, a, None)), ""))
    own = config.__class__.__module__
    parts = dict.fromkeys(c.model_type for c in configs_of(config) if c.__class__.__module__ != own and c.model_type in CONFIG_MAPPING)
    return Family(heads_of(model_type, module), "", "geglu" if "gelu" in act else "swiglu", swapped, left_alone, tuple(parts))


def _makes(cls: type, name: str) -> bool:
    """Whether the constructor of ``cls`` names ``torch.nn``'s class ``name``."""
    init = cls.__dict__.get("__init__")
    return inspect.isfunction(init) and name in inspect.unwrap(init).__code__.co_names
