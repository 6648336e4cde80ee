"""What can be swapped in a Hugging Face model, and how to know that the swap is right.

A slot is a kind of candidate (norm, gated MLP, rope function) with the variants we have kernels for. A variant is *borrowed*: a function that
runs on the model's own module and reads its attributes, so constructors, checkpoints and existing instances are untouched. A candidate is
swapped only where a variant reproduces it, outputs in bf16 bit for bit and everything in fp32 to rounding, on a stand-in that has exactly the
attributes the variant reads. Whatever needs more is left alone and listed with the reason.

``infer`` does this for the installed transformers; ``families.py`` is its result, written by ``liger models --write``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_kernel.ops import _op
from liger_kernel.ops.glu import ACTS, glu
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.rope import rope

# -- variants: label -> what takes the place of the stock function, which it is given ------

Variant = Callable[[Callable], Callable]


def _norm(offset: float, casting: str, eps: str, weight: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, hidden_states):
            w = None if weight == "none" or (weight == "with_scale" and not self.with_scale) else self.weight
            return rms_norm(hidden_states, w, eps=getattr(self, eps), offset=offset, casting=casting)

        return forward

    return variant


def _glu(gate: str, up: str, down: str, act: str) -> Variant:
    def variant(stock: Callable) -> Callable:
        def forward(self, x):
            g = getattr(self, gate)(x)
            u = None if up == gate else getattr(self, up)(x)
            fn = F.silu if act == "F.silu" else getattr(self, act)
            name = None if torch.compiler.is_compiling() else activation(fn)  # compiled, the formula is what we would hand over anyway
            if name is None:
                g, u = g.chunk(2, -1) if u is None else (g, u)
                return getattr(self, down)(fn(g) * u)
            return getattr(self, down)(glu(g, u, act=name))

        return forward

    return variant


# how a rope function's tables hold one angle for each pair of columns
TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "once": lambda t: t,
    "twice": lambda t: t[..., : t.shape[-1] // 2],  # cat(angles, angles)
    "repeated": lambda t: t[..., ::2],  # repeat_interleave(angles, 2)
}


def _rope(layout: str, tables: str) -> Variant:
    angles = TABLES[tables]

    def variant(stock: Callable) -> Callable:
        def turn(q, k, cos, sin, position_ids, unsqueeze_dim):
            if q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape[0] in (1, q.shape[0]) and unsqueeze_dim in (1, 2):
                return rope(q, k, angles(cos), angles(sin), layout=layout, unsqueeze_dim=unsqueeze_dim)
            more = (unsqueeze_dim,) if position_ids is absent else (position_ids, unsqueeze_dim)
            return stock(q, k, cos, sin, *more)

        if "position_ids" in inspect.signature(stock).parameters:  # it has been without effect for long, and is gone in most

            def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
                return turn(q, k, cos, sin, position_ids, unsqueeze_dim)
        else:

            def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
                return turn(q, k, cos, sin, absent, unsqueeze_dim)

        return apply_rotary_pos_emb

    absent = object()
    return variant


_ACTIVATIONS: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def activation(fn: Callable) -> str | None:
    """Which of our activations ``fn`` is; None if it is none of them. By its values, looked at once."""
    try:
        return _ACTIVATIONS[fn]
    except (KeyError, TypeError):
        pass
    with torch.no_grad(), unset_fake_temporarily(), contextlib.suppress(Exception):  # needs parameters, other devices ...: then it is none of ours
        x = torch.linspace(-6, 6, 385, device="cpu")
        same = lambda ours: all(torch.equal(fn(t), ours(t.float()).to(t.dtype)) for t in (x, x.bfloat16()))
        _ACTIVATIONS[fn] = next((name for name, ours in ACTS.items() if same(ours)), None)
        return _ACTIVATIONS[fn]
    return None


# -- slots: candidates, stand-ins on which a candidate and a variant are compared ----------

EPS = {"variance_epsilon": 0.03, "eps": 0.11, "rms_norm_eps": 0.4, "norm_eps": 0.23, "epsilon": 0.37}
GLU_NAMES = [
    ("gate_proj", "up_proj", "down_proj", "act_fn"),
    ("gate_proj", "up_proj", "down_proj", "activation_fn"),
    ("gate_up_proj", "gate_up_proj", "down_proj", "activation_fn"),
    ("gate_up_proj", "gate_up_proj", "down_proj", "act_fn"),
    ("input_linear", "input_linear", "output_linear", "activation"),
    ("w1", "w3", "w2", "F.silu"),
    ("w1", "w3", "w2", "act_fn"),
]


def _norm_stand_ins(eps: str, weight: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for shape in ((3, 32), (2, 3, 4, 32)):
        for with_scale in (True, False) if weight == "with_scale" else (True,):
            attributes: dict[str, Any] = {eps: EPS[eps]}
            if weight != "none":
                attributes["weight"] = nn.Parameter(torch.randn(32) * 0.3 + 0.5)
            if weight == "with_scale":
                attributes["with_scale"] = with_scale
            yield attributes, (torch.randn(shape),)


def _glu_stand_ins(gate: str, up: str, down: str, act: str) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):  # the last is none of ours: act_fn must be what counts
        attributes: dict[str, Any] = {gate: nn.Linear(8, 24 if up == gate else 12), down: nn.Linear(12, 8)}
        if up != gate:
            attributes[up] = nn.Linear(8, 12)
        if act != "F.silu":
            attributes[act] = fn
        yield attributes, (torch.randn(2, 5, 8),)


def _rope_stand_ins(tables: str) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    for width in (16, 24):  # 24: the last eight columns pass through
        for batch, unsqueeze_dim in ((1, 1), (3, 1), (3, 2)):
            q, k = (torch.randn((3, heads, 5, width) if unsqueeze_dim == 1 else (3, 5, heads, width)) for heads in (2, 1))
            angle = torch.randn(batch, 5, 8)
            angle = {"once": angle, "twice": torch.cat((angle, angle), -1), "repeated": angle.repeat_interleave(2, -1)}[tables]
            yield {}, (q, k, angle.cos(), angle.sin(), unsqueeze_dim)


@dataclass(frozen=True)
class Slot:
    """A kind of candidate. ``variants``: label -> the variant and a maker of its stand-ins."""

    flag: str
    candidate: Callable[[str, Any], bool]
    parameters: tuple[tuple[str, ...], ...]  # of the candidate, past self; the names matter for functions only
    variants: dict[str, tuple[Variant, Callable[[], Iterator]]]


def _module(named: str) -> Callable[[str, Any], bool]:
    return lambda name, c: isinstance(c, type) and issubclass(c, nn.Module) and "forward" in c.__dict__ and re.search(named, name) is not None


SLOTS = [
    Slot("rms_norm", _module("Norm(Gated|1P)?$"), (("x",),), {
        f"rms_norm({', '.join([f'{offset:g}', casting, eps] + [weight] * (weight != 'weight'))})":
            (_norm(offset, casting, eps, weight), lambda eps=eps, weight=weight: _norm_stand_ins(eps, weight))
        for offset, weight in ((0.0, "weight"), (1.0, "weight"), (0.0, "with_scale"), (0.0, "none"))
        for casting in (("gemma",) if weight == "none" else ("llama", "gemma", "none")) for eps in EPS
    }),
    Slot("glu", _module("(MLP|Mlp|FeedForward|FFN)$"), (("x",),), {
        f"glu({', '.join(dict.fromkeys(names))})": (_glu(*names), lambda names=names: _glu_stand_ins(*names)) for names in GLU_NAMES
    }),
    Slot("rope", lambda name, c: inspect.isfunction(c) and re.match("apply_rotary|apply_rope", name) is not None,
        (("q", "k", "cos", "sin", "unsqueeze_dim"), ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim")), {
        f"rope({layout}, {tables})": (_rope(layout, tables), lambda tables=tables: _rope_stand_ins(tables))
        for layout in ("halves", "pairs") for tables in TABLES
    }),
]  # fmt: skip
SLOT_OF = {label: slot.flag for slot in SLOTS for label in slot.variants}
VARIANTS = {label: variant for slot in SLOTS for label, (variant, _) in slot.variants.items()}


# -- recognition ---------------------------------------------------------------------------


@contextlib.contextmanager
def references() -> Iterator[None]:
    """References serve, on any device: what a kernel does is compared with them elsewhere, and here every bit counts."""
    devices = set(_op._KERNEL_DEVICES)
    _op._KERNEL_DEVICES.clear()
    try:
        yield
    finally:
        _op._KERNEL_DEVICES.update(devices)


def _stand_in(cls: type, attributes: dict[str, Any]) -> nn.Module:
    """A ``cls`` with these attributes and no others: its constructor, whatever it takes, is not asked."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _run(fn: Callable, owner: Any, attributes: dict, inputs: tuple, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and in fp32 the gradients of tensor inputs (but angles) and parameters."""
    tensors = [t.detach().to(dtype).requires_grad_(dtype == torch.float32) if isinstance(t, Tensor) else t for t in inputs]
    params: list[Tensor] = []
    if isinstance(owner, type):
        module = _stand_in(owner, attributes).to(weight_dtype)
        params = list(module.parameters())
        out = fn(module, *tensors)
        leaves = [*tensors, *params]
    else:
        *angled, unsqueeze_dim = tensors
        out = fn(*angled, unsqueeze_dim=unsqueeze_dim)
        leaves = angled[:2]
    outs = list(out) if isinstance(out, tuple) else [out]
    if dtype != torch.float32:
        return [o.detach() for o in outs]
    return [*outs, *torch.autograd.grad(sum((o * o).sum() for o in outs), leaves)]


def reproduces(variant: Variant, stand_ins: Callable[[], Iterator], owner: Any, stock: Callable) -> bool:
    """Whether ``variant`` does what ``stock`` does on every stand-in; on those of a rope function, where ``stock`` works."""
    new, compared = variant(stock), 0
    for attributes, inputs in stand_ins():
        for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
            if attributes.keys() >= {"down_proj"} and dtype != weight_dtype:
                continue  # projections do not mix dtypes
            try:
                expected = _run(stock, owner, attributes, inputs, dtype, weight_dtype)
            except RuntimeError:
                if isinstance(owner, type):
                    return False
                continue  # a rope function that does not pass columns through, or take other layouts: its callers do not ask for it
            found = _run(new, owner, attributes, inputs, dtype, weight_dtype)
            exact = dict(rtol=0, atol=0) if dtype is torch.bfloat16 and isinstance(owner, type) else dict(rtol=1e-5, atol=1e-5)
            if dtype is torch.bfloat16 and not isinstance(owner, type):
                exact = dict(rtol=2**-6, atol=2**-6)  # rope: stock rounds at every step, we round once
            if [o.dtype for o in expected] != [o.dtype for o in found] or not all(torch.allclose(a, b, **exact) for a, b in zip(expected, found)):
                return False
            compared += 1
    return compared > 0


def recognise(slot: Slot, owner: Any, stock: Callable, tables: set[str] | None = None) -> tuple[str | None, str]:
    """The label of the variant that reproduces ``stock``, or None and why there is none. ``tables``: forms of the tables a rope function gets."""
    names = [p.name for p in inspect.signature(stock).parameters.values()]
    if isinstance(owner, type):
        if len(names) != 2:
            return None, f"forward takes ({', '.join(names[1:])})"
    elif tuple(names) not in slot.parameters:
        return None, f"takes ({', '.join(names)})"
    missing: set[str] = set()
    for label, (variant, stand_ins) in slot.variants.items():
        if slot.flag == "rope" and tables != {label[:-1].split(", ")[1]}:
            continue
        try:
            if reproduces(variant, stand_ins, owner, stock):
                return label, ""
        except AttributeError as error:
            missing |= set(re.findall(r"no attribute '(\w+)'", str(error)))
        except Exception:  # whatever it is that it does, it is not what the variant does
            continue
    if slot.flag == "rope" and (tables is None or len(tables) != 1):
        return None, "its tables are not understood"
    known = {a for names in GLU_NAMES for a in names} | set(EPS) | {"weight", "with_scale"}
    return None, f"uses {', '.join(sorted(missing - known))}" if missing - known else "no variant computes the same"


def modeling(model_type: str) -> ModuleType:
    """The module of transformers with the classes of ``model_type``."""
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def _tables(module: ModuleType, config: Any) -> set[str]:
    """In which form this module's rotary embeddings, as far as ``config`` can make them, hold their angles."""
    forms = set()
    for name, cls in vars(module).items():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and "Rotary" in name and cls.__module__ == module.__name__):
            continue
        with contextlib.suppress(Exception):  # a vision tower's, for example
            embed = cls(config)
            more = {"layer_type": config.layer_types[0]} if "layer_type" in inspect.signature(cls.forward).parameters else {}
            cos, sin = embed(torch.zeros(1, 5, 8), torch.arange(5)[None], **more)
            both = torch.stack((cos, sin))
            half = both.shape[-1] // 2
            if both[..., :half].equal(both[..., half:]):
                forms.add("twice")
            elif both[..., ::2].equal(both[..., 1::2]):
                forms.add("repeated")
            else:
                forms.add("once")
    return forms


@dataclass(frozen=True)
class Family:
    """What is swapped in the models of one type: candidates of its module -> variant, or -> why it is left alone."""

    head: str | None = None
    fused: str = ""  # why the head is not fused; empty if it is
    glu: str = "swiglu"  # the name of the flag
    swapped: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)


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


def infer(model_type: str, config: Any = None) -> Family:
    """What can be swapped in the installed transformers' models of ``model_type``."""
    module = modeling(model_type)
    config = CONFIG_MAPPING[model_type]() if config is None else config
    head = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    swapped, left_alone = {}, {}
    with _undisturbed():
        tables = _tables(module, config)
        for name, candidate in inspect.getmembers(module):
            slot = next((s for s in SLOTS if s.candidate(name, candidate)), None)
            if slot is None or candidate.__module__ != module.__name__:
                continue
            owner, stock = (candidate, candidate.__dict__["forward"]) if isinstance(candidate, type) else (module, candidate)
            label, reason = recognise(slot, owner, stock, tables)
            if label:
                swapped[name] = label
            else:
                left_alone[name] = reason
    act = str(next((getattr(config, a) for a in ("hidden_activation", "hidden_act") if getattr(config, a, None)), ""))
    return Family(head if hasattr(module, head or "") else None, "", "geglu" if "gelu" in act else "swiglu", swapped, left_alone)
