"""Variants of modules that hold the experts of a mixture, and the stand-ins on which they are
compared with stock."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.nn.float8 import LigerFloat8Experts
from liger_kernel.ops._core.operator import only_pytorch, use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.four_bits import four_bits
from liger_kernel.ops.projections.lora_moe import adapted_moe
from liger_kernel.ops.projections.moe import moe
from liger_kernel.ops.projections.weights import Weight
from liger_kernel.transformers.recognise.activations import activation
from liger_kernel.transformers.recognise.plain import of_a_subclass, plain
from liger_kernel.transformers.recognise.projections import Left, _class, _own, product_dtype
from liger_kernel.transformers.recognise.variant import OF_EXPERTS, StandIns, Variant, are_numbers

GATE_UP, DOWN = "gate_up_proj", "down_proj"
SPREAD = "weights that are spread over ranks"
# the implementation that transformers runs by default; a user who names this one cannot be told
# from the default
DEFAULT_EXPERTS = "grouped_mm"


@functools.cache
def _say_chosen(implementation: str) -> None:
    warnings.warn(
        f"liger_kernel: experts run Transformers' {implementation!r}, which the model's configuration names; our "
        "kernels replace only the default, "
        f"{DEFAULT_EXPERTS!r}",
        stacklevel=2,
    )


class _Eager:
    """A configuration with which a module of experts runs its own source, not another
    implementation."""

    _experts_implementation = "eager"


def chosen(experts: Any) -> str | None:
    """The implementation that the user has chosen for these experts. Look at each call, because
    it can be set at any time."""
    config = getattr(experts, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    return None if implementation == DEFAULT_EXPERTS or isinstance(config, _Eager) else implementation


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter that is made dense when it is read: its data, the dtype that a reader gets,
    and ``weight(transposed)``, with which the operators multiply."""

    data: Tensor
    dtype: torch.dtype
    weight: Callable[[bool], Weight]


def stored(experts: Any, name: str) -> Stored | None:
    """What a parameter of experts is that is held in FP8 by ``quantize_base``, or in 4 bits by
    bitsandbytes; None for any other parameter."""
    computed = experts._modules.get("parametrizations")
    if computed is None or name not in computed or len(computed[name]) != 1:
        return None
    (how,), data = computed[name], getattr(computed[name], "original", None)
    if not (_own(how) and plain(data)):
        return None
    if type(how) is LigerFloat8Experts:
        return Stored(data, how.dtype, functools.partial(how.stored, data)) if plain(how.float8_scale) else None
    kind = _class("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
    if (
        type(how) is not kind
        or kind.forward.__module__ != kind.__module__
        or getattr(how.quant_state, "packing_format_for_cpu", False)
    ):
        return None
    return Stored(data, how.quant_state.dtype, functools.partial(four_bits, data, how.quant_state))


def _bits(experts: Any, name: str) -> list[Tensor]:
    """Of what a parameter is made when it is read."""
    computed = experts._modules.get("parametrizations")
    return [] if computed is None or name not in computed else list(computed[name].parameters())


def subclassed(t: Any) -> Left | None:
    """Why a weight or bias of experts stays with Transformers' code: its class replaces
    products, for example by torchao's FP8."""
    return Left(f"weights of the class {type(t).__name__}, which has products of its own") if of_a_subclass(t) else None


def weights_of(experts: Any, transposed: bool, x: Tensor) -> tuple[Tensor | Weight, Tensor | Weight] | Left:
    """gate_up and down of experts as (E, N, K), dense, in FP8 or in 4 bits, if they can be
    multiplied by x; otherwise the reason."""
    found: list[Tensor | Weight] = []
    for name in (GATE_UP, DOWN):
        packed = stored(experts, name) if use_kernels(x) else None
        if packed is None and any(is_sharded(t) for t in _bits(experts, name)):
            return Left(SPREAD)
        dense = getattr(experts, name) if packed is None else None
        if is_sharded(dense):  # while Transformers' expert parallelism runs them, they are this rank's own
            return Left(SPREAD)
        if why := subclassed(dense):
            return why
        if dense is not None and not (dense.ndim == 3 and dense.is_floating_point() and dense.itemsize > 1):
            return Left("weights whose numbers are not their values")  # as in FP8, which has separate scales
        dtype = packed.dtype if packed is not None else getattr(dense, "dtype", None)
        if dtype != x.dtype and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
            return Left(f"weights of {dtype} beside an input of {x.dtype}")  # some code of Transformers casts x
        if packed is not None:
            found.append(packed.weight(transposed))
        elif dense is not None:
            found.append(dense.mT if transposed else dense)
    return found[0], found[1]


# label -> the activation, options of the operator, attributes of the stand-ins
EXPERT_FORMS: dict[str, tuple[str, Callable[[Any], dict[str, Any]], dict[str, float]]] = {
    "": ("act_fn", lambda self: {}, {}),
    "limit": ("act_fn", lambda self: {"limit": self.limit}, {"limit": 0.3}),
    "swiglu_limit": ("F.silu", lambda self: {"limit": self.swiglu_limit}, {"swiglu_limit": 0.3}),
    "swiglu_alpha, swiglu_limit": (
        "F.silu",
        lambda self: {"alpha": self.swiglu_alpha, "limit": self.swiglu_limit, "offset": 1.0},
        {"swiglu_alpha": 1.7, "swiglu_limit": 0.3},
    ),
    "alpha, limit": (
        "F.silu",
        lambda self: {"alpha": self.alpha, "limit": self.limit, "offset": 1.0},
        {"alpha": 1.7, "limit": 0.3},
    ),
}


@dataclass(frozen=True)
class Experts(Variant):
    """The experts of a mixture. ``transposed``: weights (E, in, out). ``interleaved``: gate and
    up alternate. ``form``: one of ``EXPERT_FORMS``."""

    kind = "moe"
    transposed: bool
    interleaved: bool
    biased: bool
    form: str

    def words(self) -> tuple[str, ...]:
        said = (
            word if is_so else ""
            for word, is_so in (
                ("transposed", self.transposed),
                ("interleaved", self.interleaved),
                ("biased", self.biased),
            )
        )
        return *said, EXPERT_FORMS[self.form][0], self.form

    @property
    def exact(self) -> bool:
        return False

    def keywords(self, experts: Any) -> dict[str, Any] | Left:
        """The options of ``moe`` with which it computes what these experts compute now, or the
        reason why it cannot."""
        act, options, _ = EXPERT_FORMS[self.form]
        name, numbers = activation(F.silu if act == "F.silu" else getattr(experts, act)), options(experts)
        if name is None:
            return Left("an activation that is none of ours")
        if not are_numbers(*numbers.values()):
            return Left("a factor or limit that is a tensor")
        bias = dict(gate_up_bias=experts.gate_up_proj_bias, down_bias=experts.down_proj_bias) if self.biased else {}
        if any(map(is_sharded, bias.values())):
            return Left(SPREAD)
        if why := next(filter(None, map(subclassed, bias.values())), None):
            return why
        return dict(act=name, interleaved=self.interleaved, **bias, **numbers)

    def __call__(self, stock: Callable) -> Callable:
        variant, transposed = self, self.transposed

        def forward(self, hidden_states, top_k_index, top_k_weights, **more):
            if (
                torch.compiler.is_compiling() or only_pytorch() or more
            ):  # such as the group of ranks, for kernels that exchange tokens
                return stock(self, hidden_states, top_k_index, top_k_weights, **more)
            how = variant.keywords(self)
            found = how if isinstance(how, Left) else weights_of(self, transposed, hidden_states)
            if isinstance(found, Left):
                return stock(self, hidden_states, top_k_index, top_k_weights)
            if implementation := chosen(self):
                if torch.is_grad_enabled():  # during ``generate``, transformers itself chooses one
                    _say_chosen(implementation)
                return stock(self, hidden_states, top_k_index, top_k_weights)
            index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            if all(isinstance(w, Tensor) for w in found):
                y = moe(x, *found, index, weights, recompute=memory.level() == "mlp", **how)
            else:
                y = adapted_moe(
                    x.to(product_dtype(x)), *found, index, weights, (), (), recompute=memory.level() == "mlp", **how
                )
            return y.view(hidden_states.shape).to(hidden_states.dtype)

        vars(forward)["__signature__"] = inspect.signature(stock)
        OF_EXPERTS[forward] = self
        return forward

    def stand_ins(self) -> StandIns:
        act, _, numbers = EXPERT_FORMS[self.form]
        E, H, n = 4, 8, 12
        for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):
            weight = lambda *shape: nn.Parameter(torch.randn(shape) / 3)
            attributes: dict[str, Any] = (
                dict(
                    num_experts=E,
                    hidden_dim=H,
                    hidden_size=H,
                    intermediate_dim=n,
                    intermediate_size=n,
                    expert_dim=n,
                    config=_Eager(),
                    has_gate=True,
                    has_bias=self.biased,
                    is_transposed=self.transposed,
                    gate_up_proj=weight(E, H, 2 * n) if self.transposed else weight(E, 2 * n, H),
                    down_proj=weight(E, n, H) if self.transposed else weight(E, H, n),
                )
                | numbers
            )
            if self.biased:
                attributes |= dict(gate_up_proj_bias=weight(E, 2 * n), down_proj_bias=weight(E, H))
            if act != "F.silu":
                attributes[act] = fn
            index = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0]])  # one expert gets no token
            yield attributes, (torch.randn(5, H), index, torch.rand(5, 2))


EXPERTS = [
    Experts(transposed, interleaved, biased, form)
    for form in EXPERT_FORMS
    for transposed in (False, True)
    for interleaved in (False, True)
    for biased in (False, True)
]
