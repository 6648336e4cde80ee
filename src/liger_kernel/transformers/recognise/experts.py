"""Experts of a mixture: the variants of modules that hold them, what PEFT's wrappers around them
compute at the moment of a call (``target_parameters`` of a ``LoraConfig``), and the variant of the
auxiliary loss that balances their load; each with the stand-ins on which it is compared.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel import memory
from liger_kernel.nn.float8 import LigerFloat8Experts, parametrization
from liger_kernel.nn.mxfp4_experts import LigerMXFP4Experts
from liger_kernel.ops._core.operator import only_pytorch, use_kernels
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.losses.load_balancing import load_balancing_loss
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.four_bits import four_bits
from liger_kernel.ops.projections.merge_aware import rounded_experts
from liger_kernel.ops.projections.moe import adapted_moe, moe
from liger_kernel.ops.projections.mxfp4 import MXFP4Experts
from liger_kernel.ops.projections.weights import Weight
from liger_kernel.transformers.recognise.activations import CLAMPED, activation
from liger_kernel.transformers.recognise.projections import active_adapters, product_dtype, scales
from liger_kernel.transformers.recognise.storages import Fallback, blocks_of, experts_in_blocks, loaded, of_package
from liger_kernel.transformers.recognise.variant import (
    OF_EXPERTS,
    StandIns,
    Variant,
    are_numbers,
    of_a_subclass,
    plain,
    runs_its_class,
    unhooked,
)

GATE_UP, DOWN = "gate_up_proj", "down_proj"
SPREAD = "weights that are spread over ranks"
# the implementation that transformers runs by default; a user who names this one cannot be told
# from the default
DEFAULT_EXPERTS = "grouped_mm"
MERGE_AWARE = "_liger_merge_aware"  # where a layer of PEFT stores that ``merge_aware`` has switched it on
# the name of ours in Transformers' registry: hub/registered_experts.py
OURS = "liger"


@functools.cache
def _say_chosen(implementation: str) -> None:
    warnings.warn(
        f"liger_kernel: experts run Transformers' {implementation!r}, which the model's configuration names; our "
        "kernels replace only the default, "
        f"{DEFAULT_EXPERTS!r}",
        stacklevel=2,
    )


# A configuration with which a module of experts runs its own source, not another implementation
_EAGER = types.SimpleNamespace(_experts_implementation="eager")


def chosen(experts: Any) -> str | None:
    """The implementation that the user has chosen for these experts, if it is neither the default
    nor ours. Look at each call, because it can be set at any time."""
    config = getattr(experts, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    return None if implementation in (DEFAULT_EXPERTS, OURS) or config is _EAGER else implementation


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter that is made dense when it is read: its data, the dtype that a reader gets (None
    for that of its input), and ``weight(transposed)``, with which the operators multiply."""

    data: Tensor
    dtype: torch.dtype | None
    weight: Callable[[bool], Weight]


def stored(experts: Any, name: str) -> Stored | None:
    """What a parameter of experts is that is held in FP8 by ``quantize_base`` or by a checkpoint, in
    MXFP4, or in 4 bits by bitsandbytes; None for any other parameter."""
    if experts_in_blocks(experts):
        w = experts._parameters.get(name)
        if w is None or not (plain(w) and w.is_floating_point() and w.itemsize == 1):
            return None
        return Stored(w.data, None, lambda transposed: blocks_of(experts, name))
    made = parametrization(experts, name)
    if made is None or len(made) != 1:
        return None
    (how,), data = made, getattr(made, "original", None)
    if not (runs_its_class(how) and plain(data)):
        return None
    if type(how) is LigerFloat8Experts:
        return Stored(data, how.dtype, functools.partial(how.stored, data)) if plain(how.float8_scale) else None
    if type(how) is LigerMXFP4Experts:  # (E, N, K) however the parameter lies
        weight = lambda transposed: how.stored(data)
        return Stored(data, how.dtype, weight) if plain(how.mxfp4_scale) else None
    kind = loaded("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
    if type(how) is not kind or kind.forward.__module__ != kind.__module__:
        return None
    state = how.quant_state
    unreadable = getattr(state, "packing_format_for_cpu", False)
    return None if unreadable else Stored(data, state.dtype, functools.partial(four_bits, data, state))


def storage(experts: Any) -> str:
    """How experts in MXFP4 are stored, with their size; empty for others."""
    made = [some for name in (GATE_UP, DOWN) if (some := parametrization(experts, name)) is not None]
    if not any(isinstance(how, LigerMXFP4Experts) for some in made for how in some):
        return ""
    return f"in MXFP4, {sum(t.nbytes for some in made for t in some.parameters()) / 1e6:.1f} MB"


def subclassed(t: Any) -> Fallback | None:
    """Why a weight or bias of experts stays with Transformers' code: its class replaces
    products, for example by torchao's FP8."""
    return (
        Fallback(f"weights of the class {type(t).__name__}, which has products of its own")
        if of_a_subclass(t)
        else None
    )


def weights_of(experts: Any, transposed: bool, x: Tensor) -> tuple[Tensor | Weight, Tensor | Weight] | Fallback:
    """gate_up and down of experts as (E, N, K), dense, in 8 or in 4 bits, if they can be
    multiplied by x; otherwise the reason."""
    found: list[Tensor | Weight] = []
    for name in (GATE_UP, DOWN):
        packed = stored(experts, name) if use_kernels(x) else None
        # a parametrization would gather the whole weight at each read
        made = parametrization(experts, name) if packed is None else None
        if made is not None and any(map(is_sharded, made.parameters())):
            return Fallback(SPREAD)
        dense = getattr(experts, name) if packed is None else None
        if is_sharded(dense):  # while Transformers' expert parallelism runs them, they are this rank's own
            return Fallback(SPREAD)
        if why := subclassed(dense):
            return why
        if dense is not None and not (dense.ndim == 3 and dense.is_floating_point() and dense.itemsize > 1):
            return Fallback("weights whose numbers are not their values")  # as in FP8, which has separate scales
        dtype = packed.dtype or x.dtype if packed is not None else getattr(dense, "dtype", None)
        if dtype != x.dtype and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
            return Fallback(f"weights of {dtype} beside an input of {x.dtype}")  # some code of Transformers casts x
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

    def keywords(self, experts: Any) -> dict[str, Any] | Fallback:
        """The options of ``moe`` with which it computes what these experts compute now, or the
        reason why it cannot."""
        act, options, _ = EXPERT_FORMS[self.form]
        name, numbers = activation(F.silu if act == "F.silu" else getattr(experts, act)), options(experts)
        if name is None:
            return Fallback("an activation that is none of ours")
        if not are_numbers(*numbers.values()):
            return Fallback("a factor or limit that is a tensor")
        bias = dict(gate_up_bias=experts.gate_up_proj_bias, down_bias=experts.down_proj_bias) if self.biased else {}
        if any(map(is_sharded, bias.values())):
            return Fallback(SPREAD)
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
            found = how if isinstance(how, Fallback) else weights_of(self, transposed, hidden_states)
            if isinstance(found, Fallback):
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
            switches = dict(has_gate=True, has_bias=self.biased, is_transposed=self.transposed, config=_EAGER)
            attributes: dict[str, Any] = sizes | switches | numbers
            attributes["gate_up_proj"] = weight(E, H, 2 * n) if self.transposed else weight(E, 2 * n, H)
            attributes["down_proj"] = weight(E, n, H) if self.transposed else weight(E, H, n)
            if self.biased:
                attributes |= dict(gate_up_proj_bias=weight(E, 2 * n), down_proj_bias=weight(E, H))
            if act != "F.silu":
                attributes[act] = fn
            # expert 1 gets no token, and experts 0 and 2 the most
            index = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0]])
            yield attributes, (torch.randn(5, H), index, torch.rand(5, 2))


_EITHER = False, True
EXPERTS = [
    Experts(transposed, interleaved, biased, form)
    for form, transposed, interleaved, biased in itertools.product(EXPERT_FORMS, _EITHER, _EITHER, _EITHER)
]


@dataclass(frozen=True)
class ExpertsInBlocks(Experts):
    """Experts of a checkpoint in FP8: Transformers has one class of them for all families. Their
    weights are made dense for each product, and their inputs are not rounded to FP8, so that x has
    the gradient of what is computed."""

    def words(self) -> tuple[str, ...]:
        return ("FP8 blocks",)

    def keywords(self, experts: Any) -> dict[str, Any] | Fallback:
        if not experts.has_gate or getattr(experts, "gate_softcap", None) is not None:
            return Fallback("experts without a gate, or with a softcap of it")
        alpha, limit = getattr(experts, "swiglu_alpha", None), experts.limit  # of the configuration
        if alpha is not None:  # stock computes a SiLU then, whatever activation the configuration names
            return dict(act="silu", alpha=alpha, limit=limit, offset=1.0)
        act = activation(experts.act_fn)
        return Fallback("an activation that is none of ours") if act is None else dict(act=act, limit=limit)


IN_BLOCKS = ExpertsInBlocks(False, False, False, "")


# -- adapters of experts

# A ``ParamWrapper`` of PEFT adapts one parameter of the module that it wraps; wrappers of several
# parameters are nested. During a call, PEFT puts W + scale B A of all experts in the place of the
# parameter W. The engine leaves W as it is and multiplies by the adapters. So it must see the
# wrappers, not the experts: ``rewrite/rules.py`` makes a forward call ``experts(self.experts, x,
# index, weights)``.


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """Weights (E, N, K), the adapters of each, and the options of ``moe``."""

    gate_up: Tensor | Weight
    down: Tensor | Weight
    gate_up_adapters: list[Adapter]
    down_adapters: list[Adapter]
    how: dict[str, Any]

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        adapters = self.gate_up_adapters, self.down_adapters
        return adapted_moe(
            x, self.gate_up, self.down, index, weights, *adapters, recompute=memory.level() == "mlp", **self.how
        )


def is_wrapper(m: Any) -> bool:
    """Whether ``m`` is PEFT's wrapper around a module with an adapted parameter."""
    return type(m) is loaded("peft.tuners.lora.layer", "ParamWrapper")


def experts_of(m: Any) -> Any:
    """The module inside PEFT's wrappers."""
    # wrappers of several parameters are nested
    while is_wrapper(m):
        m = m.base_layer
    return m


def input_of(m: Any) -> Tensor:
    """An empty input of experts, of the dtype and on the device for which their weights are
    made."""
    found = stored(m, GATE_UP) or getattr(m, GATE_UP)
    return torch.empty(
        0, dtype=found.dtype or torch.bfloat16, device=(found if isinstance(found, Tensor) else found.data).device
    )


def factors(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """lhs (E, ., r) and rhs (E, r, .) of an adapter, whose ``scaling * lhs @ rhs`` PEFT adds to
    the parameter.

    PEFT packs E adapters of rank r into two linear layers: lora_A's weight is (E r, K), expert by
    expert; in lora_B's weight (N, r E), the expert changes fastest.
    """
    a, b, E = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a = a.reshape(E, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, E).permute(2, 0, 1)
    # It says in which order PEFT takes the last two dims of the parameter for K and N. If PEFT is
    # wrong about a parameter that is stored as (E, in, out), A belongs to the output. PEFT 0.17
    # never swaps
    return (b, a) if getattr(wrapper, "_did_swap_in_out_features", False) else (a.mT, b.mT)


def adapters_of(wrapper: Any, transposed: bool) -> list[Adapter] | Fallback:
    """The adapters that a call of ``wrapper`` adds now. ``transposed``: the parameter is stored
    as (E, K, N)."""
    if not (runs_its_class(wrapper) and of_package(type(wrapper), "peft.")):
        return Fallback("hooks, or a forward of its own")
    # PEFT takes them out of the parameter at the next call
    if wrapper.disable_adapters and wrapper.merged:
        return Fallback("merged adapters to be taken out")
    found = []
    for name in active_adapters(wrapper):
        if wrapper.num_experts < 2:
            return Fallback("a single expert, to whose weight PEFT adds another product")
        if not (plain(wrapper.lora_A[name].weight) and plain(wrapper.lora_B[name].weight)):
            return Fallback(f"parts of adapter {name!r} are sharded or replaced")
        lhs, rhs = factors(wrapper, name)
        # a multiplies the input in either case
        a, b = (lhs.mT, rhs.mT) if transposed else (rhs, lhs)
        if not scales(scale := wrapper.scaling[name], 1):
            return Fallback(f"adapter {name!r} has a scaling that is sharded, or not of one element")
        found.append(Adapter.scaled(a, b, scale))
    return found


def _caching(m: nn.Module) -> bool:
    """Whether all hooks of ``m`` are those with which bitsandbytes keeps dense weights during a
    call."""
    kinds = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
    modules = {getattr(hook, "__module__", "") for kind in kinds for hook in kind.values()}
    return not _has_any_global_hook() and modules <= {"bitsandbytes.nn.parametrize"}


def adapted_experts(m: Any, x: Tensor, rounded: bool = False) -> AdaptedExperts | Fallback:
    """What PEFT's wrapper ``m`` computes from an x of this dtype and on this device, if our
    engine can run it; otherwise the reason. ``rounded``: the sums with adapters are rounded to the
    numbers of the weights' storage."""
    wrappers = []
    while is_wrapper(m):
        wrappers.append(m)
        m = m.base_layer
    # the innermost module tells what the experts compute
    variant = OF_EXPERTS.get(getattr(getattr(m, "forward", None), "__func__", None))
    if not isinstance(variant, Experts):
        return Fallback(f"{type(m).__name__} is not patched")
    computed = m._modules.get("parametrizations")
    if others := [name for name in computed or () if stored(m, name) is None]:
        return Fallback(f"another module computes {', '.join(others)} of the experts")
    # our node calls no hooks; those of bitsandbytes only save what we read in 4 bits
    if not unhooked(m) and not (computed is not None and _caching(m)):
        return Fallback("experts with hooks")
    adapters: dict[str, list[Adapter]] = {GATE_UP: [], DOWN: []}
    # ``adapted_moe`` adapts the two weights, and no bias
    for wrapper in wrappers:
        if wrapper.parameter_name not in adapters:
            return Fallback(f"an adapter of {wrapper.parameter_name}")
        found = adapters_of(wrapper, variant.transposed)
        if isinstance(found, Fallback):
            return found
        adapters[wrapper.parameter_name] += found
    # then the patched forward of the experts does it
    if not any(adapters.values()):
        return Fallback("adapters are disabled, merged or not active: the experts run without them")
    how = variant.keywords(m)
    if isinstance(how, Fallback):
        return how
    if implementation := chosen(m):
        return Fallback(f"Transformers' {implementation!r}, which the model's configuration names")
    fitting = _fitting(m, variant, adapters, how, x)
    return _rounded(fitting) if rounded and isinstance(fitting, AdaptedExperts) else fitting


def _rounded(found: AdaptedExperts) -> AdaptedExperts | Fallback:
    both = (found.gate_up, found.gate_up_adapters), (found.down, found.down_adapters)
    if not all(isinstance(weight, MXFP4Experts) for weight, adapters in both if adapters):
        return Fallback("experts that are not in MXFP4")
    rounded = [rounded_experts(w, some) if isinstance(w, MXFP4Experts) and some else w for w, some in both]
    return replace(found, gate_up=rounded[0], down=rounded[1])


def _fitting(
    m: Any, variant: Experts, adapters: dict[str, list[Adapter]], how: dict[str, Any], x: Tensor
) -> AdaptedExperts | Fallback:
    """The weights and adapters of the experts ``m``, if they can be multiplied by x together."""
    found = weights_of(m, variant.transposed, x)
    if isinstance(found, Fallback):
        return found
    if not all(plain(t) for t in (*found, how.get("gate_up_bias"), how.get("down_bias")) if isinstance(t, Tensor)):
        return Fallback("weights that are sharded or quantised")
    for weight, name in zip(found, (GATE_UP, DOWN)):
        E, N, K = weight.shape
        for adapter in adapters[name]:
            if adapter.a.shape[::2] != (E, K) or adapter.b.shape[:2] != (E, N):
                return Fallback("adapters of another shape than the weight")
    tensors = [t for t in found if isinstance(t, Tensor)]
    tensors += [t for some in adapters.values() for one in some for t in (one.a, one.b)]
    if any(t.device != x.device for t in tensors):
        return Fallback("weights or adapters on another device than their input")
    return AdaptedExperts(*found, adapters[GATE_UP], adapters[DOWN], how)


def experts(module: nn.Module, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """``module(hidden_states, top_k_index, top_k_weights)``, by the engine if ``module`` is
    PEFT's wrapper around experts, and the engine can run it now."""
    given = hidden_states, top_k_index, top_k_weights
    if not is_wrapper(module) or torch.compiler.is_compiling() or not all(map(plain, given)):
        return module(*given)
    x = hidden_states
    rounded = module.__dict__.get(MERGE_AWARE, False)
    if not (x.is_floating_point() and x.ndim and x.numel() and use_kernels(x)):
        return module(*given)
    found = adapted_experts(module, x, rounded)
    if rounded and isinstance(found, Fallback) and not (module.disable_adapters or module.merged):
        raise ValueError(f"merge_aware: experts cannot be rounded to their base's numbers: {found}")
    if isinstance(found, Fallback) or found.gate_up.shape[2] != x.shape[-1]:
        return module(*given)
    rows, index, weights = (t.reshape(-1, t.shape[-1]) for t in given)
    return found(rows.to(product_dtype(x)), index, weights).view(x.shape).to(x.dtype)


# -- the load of experts


@dataclass(frozen=True)
class LoadBalancing(Variant):
    """The loss of all layers' router logits together: experts chosen by softmax, in the dtype of
    the logits."""

    kind, exact, said = "load_balancing", False, ("softmax", "top_k")

    def __call__(self, stock: Callable) -> Callable:
        def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
            # one tensor for each layer; a family without experts passes None
            fits = isinstance(gate_logits, tuple) and gate_logits and not torch.compiler.is_compiling()
            fits = fits and all(_counted_once(t, num_experts, top_k, attention_mask) for t in gate_logits)
            if not fits:
                return stock(gate_logits, num_experts, top_k, attention_mask)
            return load_balancing_loss(gate_logits, top_k, attention_mask)

        return load_balancing_loss_func

    def stand_ins(self) -> StandIns:
        B, L, E = 3, 40, 6
        # rows of several lengths
        mask = (torch.arange(L) < torch.tensor([[L], [L - 7], [11]])).to(torch.int64)
        random = lambda: 2 * torch.randn(B * L, E)
        # half of the rows prefer an expert by one step of bf16, and in bf16 its probability is that
        # of the next one; the other half prefer one by far
        close = torch.tensor([0.5, 0.50390625, *[-0.349609375] * (E - 2)]).repeat(B * L, 1)
        close[::2, 0] += 4.0
        for logits, top_k, attention_mask in (
            ((random(), random()), 2, None),
            ((random(), random() - 1, random()), 3, mask),
            ((random(),), 1, mask.bool()),
            ((random(), random()), E, torch.ones(B, L)),
            ((close, random()), 1, None),
            ((close.flip(1), random()), 1, mask),
            ((torch.zeros(B * L, E),), 2, mask),
        ):
            yield dict(num_experts=E, top_k=top_k, attention_mask=attention_mask), (logits,)


def _counted_once(logits: Any, num_experts: Any, top_k: Any, mask: Any) -> bool:
    """Whether stock would count the rows of this layer with this mask, each once."""
    if not (plain(logits) and logits.ndim == 2 and logits.is_floating_point() and logits.shape[1] == num_experts):
        return False
    # the rows of the mask are those of the logits, in the same order
    whole = mask is None or (plain(mask) and mask.ndim == 2 and mask.numel() == len(logits))
    return isinstance(top_k, int) and 0 < top_k <= logits.shape[1] and whole
