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
from liger_kernel.ops.projections.moe import adapted_moe, moe
from liger_kernel.ops.projections.weights import Weight
from liger_kernel.transformers.recognise.activations import CLAMPED, activation
from liger_kernel.transformers.recognise.plain import of_a_subclass, plain, runs_its_class
from liger_kernel.transformers.recognise.projections import Left, loaded, product_dtype
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
    if not (runs_its_class(how) and plain(data)):
        return None
    if type(how) is LigerFloat8Experts:
        return Stored(data, how.dtype, functools.partial(how.stored, data)) if plain(how.float8_scale) else None
    kind = loaded("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
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
        # a parametrization would gather the whole weight at each read
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
    "": ("act_fn", lambda self: {}, {})
} | {name: ("act_fn" if name == "limit" else "F.silu", *form) for name, form in CLAMPED.items()}


@dataclass(frozen=True)
class Experts(Variant):
    """The experts of a mixture. ``transposed``: weights (E, in, out). ``interleaved``: gate and
    up alternate. ``form``: one of ``EXPERT_FORMS``."""

    kind, exact = "moe", False
    transposed: bool
    interleaved: bool
    biased: bool
    form: str

    def words(self) -> tuple[str, ...]:
        switches = [name for name in ("transposed", "interleaved", "biased") if getattr(self, name)]
        return *switches, EXPERT_FORMS[self.form][0], self.form

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
            # more: such as the group of ranks, for kernels that exchange tokens
            if torch.compiler.is_compiling() or only_pytorch() or more:
                return stock(self, hidden_states, top_k_index, top_k_weights, **more)
            how = variant.keywords(self)
            found = how if isinstance(how, Left) else weights_of(self, transposed, hidden_states)
            if isinstance(found, Left):
                return stock(self, hidden_states, top_k_index, top_k_weights)
            if implementation := chosen(self):
                if torch.is_grad_enabled():  # during ``generate``, transformers itself chooses one
                    _say_chosen(implementation)
                return stock(self, hidden_states, top_k_index, top_k_weights)
            x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (hidden_states, top_k_index, top_k_weights))
            how |= dict(recompute=memory.level() == "mlp")
            if all(isinstance(w, Tensor) for w in found):
                y = moe(x, *found, index, weights, **how)
            else:  # weights in 8 or 4 bits
                y = adapted_moe(x.to(product_dtype(x)), *found, index, weights, (), (), **how)
            return y.view(hidden_states.shape).to(hidden_states.dtype)

        # Transformers decides by the parameters what it passes
        vars(forward)["__signature__"] = inspect.signature(stock)
        # PEFT's wrappers, and the report, ask for the form of a live module
        OF_EXPERTS[forward] = self
        return forward

    def stand_ins(self) -> StandIns:
        act, _, numbers = EXPERT_FORMS[self.form]
        E, H, n = 4, 8, 12
        # we have no Softplus: experts must use the activation that they are given
        for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):
            weight = lambda *shape: nn.Parameter(torch.randn(shape) / 3)
            sizes = dict(num_experts=E, hidden_dim=H, hidden_size=H)
            sizes |= dict.fromkeys(("intermediate_dim", "intermediate_size", "expert_dim"), n)
            switches = dict(has_gate=True, has_bias=self.biased, is_transposed=self.transposed, config=_Eager())
            attributes: dict[str, Any] = sizes | switches | numbers
            attributes["gate_up_proj"] = weight(E, H, 2 * n) if self.transposed else weight(E, 2 * n, H)
            attributes["down_proj"] = weight(E, n, H) if self.transposed else weight(E, H, n)
            if self.biased:
                attributes |= dict(gate_up_proj_bias=weight(E, 2 * n), down_proj_bias=weight(E, H))
            if act != "F.silu":
                attributes[act] = fn
            # expert 1 gets no token, and expert 0 and 2 the most
            index = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0]])  # one expert gets no token
            yield attributes, (torch.randn(5, H), index, torch.rand(5, 2))


EXPERTS = [
    Experts(transposed, interleaved, biased, form)
    for form in EXPERT_FORMS
    for transposed in (False, True)
    for interleaved in (False, True)
    for biased in (False, True)
]
