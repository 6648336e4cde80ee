"""What PEFT's wrappers around the experts of a mixture compute at the moment of a call
(``target_parameters`` of a ``LoraConfig``).

A ``ParamWrapper`` adapts one parameter of the module that it wraps; wrappers of several parameters
are nested. During a call, PEFT puts W + scale B A of all experts in the place of the parameter W.
The engine leaves W as it is and multiplies by the adapters. So it must see the wrappers, not the
experts: ``rewrite/linear_calls.py`` makes a forward call ``experts(self.experts, x, index,
weights)``.

How PEFT packs E adapters of rank r into two linear layers: lora_A's weight is (E r, K), expert by
expert; in lora_B's weight (N, r E), the expert changes fastest. ``_did_swap_in_out_features`` says
in which order PEFT takes the last two dims of the parameter for K and N. If it is wrong about a
parameter that is stored as (E, in, out), A belongs to the output, so that the order of the products
changes, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel import memory
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.moe import adapted_moe
from liger_kernel.ops.projections.weights import Weight
from liger_kernel.transformers.recognise.experts import DOWN, GATE_UP, Experts, chosen, stored, weights_of
from liger_kernel.transformers.recognise.plain import plain, runs_its_class, unhooked
from liger_kernel.transformers.recognise.projections import (
    Left,
    active_adapters,
    loaded,
    of_package,
    product_dtype,
    scales,
)
from liger_kernel.transformers.recognise.variant import OF_EXPERTS


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
    return torch.empty(0, dtype=found.dtype, device=(found if isinstance(found, Tensor) else found.data).device)


def factors(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """lhs (E, ., r) and rhs (E, r, .) of an adapter, whose ``scaling * lhs @ rhs`` PEFT adds to
    the parameter."""
    # (E r, K) and (N, r E): see above
    a, b, E = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    # expert by expert
    a = a.reshape(E, -1, a.shape[1])
    # the expert changes fastest
    b = b.reshape(b.shape[0], -1, E).permute(2, 0, 1)
    return (b, a) if getattr(wrapper, "_did_swap_in_out_features", False) else (a.mT, b.mT)  # PEFT 0.17 never swaps


def _adapters(wrapper: Any, transposed: bool) -> list[Adapter] | Left:
    """The adapters that a call of ``wrapper`` adds now. ``transposed``: the parameter is stored
    as (E, K, N)."""
    if not (runs_its_class(wrapper) and of_package(type(wrapper), "peft.")):
        return Left("hooks, or a forward of its own")
    # PEFT takes them out of the parameter at the next call
    if wrapper.disable_adapters and wrapper.merged:
        return Left("merged adapters to be taken out")
    found = []
    for name in active_adapters(wrapper):
        if wrapper.num_experts < 2:
            return Left("a single expert, to whose weight PEFT adds another product")
        if not (plain(wrapper.lora_A[name].weight) and plain(wrapper.lora_B[name].weight)):
            return Left(f"parts of adapter {name!r} are sharded or replaced")
        lhs, rhs = factors(wrapper, name)
        # a multiplies the input in either case
        a, b = (lhs.mT, rhs.mT) if transposed else (rhs, lhs)
        if not scales(scale := wrapper.scaling[name], 1):
            return Left(f"adapter {name!r} has a scaling that is sharded, or not of one element")
        found.append(Adapter.scaled(a, b, scale))
    return found


def _caching(m: nn.Module) -> bool:
    """Whether all hooks of ``m`` are those with which bitsandbytes keeps dense weights during a
    call."""
    kinds = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
    modules = {getattr(hook, "__module__", "") for kind in kinds for hook in kind.values()}
    return not _has_any_global_hook() and modules <= {"bitsandbytes.nn.parametrize"}


def adapted_experts(m: Any, x: Tensor) -> AdaptedExperts | Left:
    """What PEFT's wrapper ``m`` computes from an x of this dtype and on this device, if our
    engine can run it; otherwise the reason."""
    wrappers = []
    while is_wrapper(m):
        wrappers.append(m)
        m = m.base_layer
    # the innermost module tells what the experts compute
    variant = OF_EXPERTS.get(getattr(getattr(m, "forward", None), "__func__", None))
    if not isinstance(variant, Experts):
        return Left(f"{type(m).__name__} is not patched")
    computed = m._modules.get("parametrizations")
    if others := [name for name in computed or () if stored(m, name) is None]:
        return Left(f"another module computes {', '.join(others)} of the experts")
    # our node calls no hooks; those of bitsandbytes only save what we read in 4 bits
    if not unhooked(m) and not (computed is not None and _caching(m)):
        return Left("experts with hooks")
    adapters: dict[str, list[Adapter]] = {GATE_UP: [], DOWN: []}
    # ``adapted_moe`` adapts the two weights, and no bias
    for wrapper in wrappers:
        if wrapper.parameter_name not in adapters:
            return Left(f"an adapter of {wrapper.parameter_name}")
        found = _adapters(wrapper, variant.transposed)
        if isinstance(found, Left):
            return found
        adapters[wrapper.parameter_name] += found
    # then the patched forward of the experts does it
    if not any(adapters.values()):
        return Left("adapters are disabled, merged or not active: the experts run without them")
    how = variant.keywords(m)
    if isinstance(how, Left):
        return how
    if implementation := chosen(m):
        return Left(f"Transformers' {implementation!r}, which the model's configuration names")
    return _fitting(m, variant, adapters, how, x)


def _fitting(
    m: Any, variant: Experts, adapters: dict[str, list[Adapter]], how: dict[str, Any], x: Tensor
) -> AdaptedExperts | Left:
    """The weights and adapters of the experts ``m``, if they can be multiplied by x together."""
    found = weights_of(m, variant.transposed, x)
    if isinstance(found, Left):
        return found
    if not all(plain(t) for t in (*found, how.get("gate_up_bias"), how.get("down_bias")) if isinstance(t, Tensor)):
        return Left("weights that are sharded or quantised")
    for weight, name in zip(found, (GATE_UP, DOWN)):
        E, N, K = weight.shape
        for adapter in adapters[name]:
            if adapter.a.shape[::2] != (E, K) or adapter.b.shape[:2] != (E, N):
                return Left("adapters of another shape than the weight")
    tensors = [t for t in found if isinstance(t, Tensor)]
    tensors += [t for some in adapters.values() for one in some for t in (one.a, one.b)]
    if any(t.device != x.device for t in tensors):
        return Left("weights or adapters on another device than their input")
    return AdaptedExperts(*found, adapters[GATE_UP], adapters[DOWN], how)


def experts(module: nn.Module, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """``module(hidden_states, top_k_index, top_k_weights)``, by the engine if ``module`` is
    PEFT's wrapper around experts, and the engine can run it now."""
    given = hidden_states, top_k_index, top_k_weights
    if not is_wrapper(module) or torch.compiler.is_compiling() or not all(map(plain, given)):
        return module(*given)
    x = hidden_states
    if not (x.is_floating_point() and x.ndim and x.numel() and use_kernels(x)):
        return module(*given)
    found = adapted_experts(module, x)
    if isinstance(found, Left) or found.gate_up.shape[2] != x.shape[-1]:
        return module(*given)
    rows, index, weights = (t.reshape(-1, t.shape[-1]) for t in given)
    return found(rows.to(product_dtype(x)), index, weights).view(x.shape).to(x.dtype)
