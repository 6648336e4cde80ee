"""Mixture of experts with low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) as one node of the
graph: ``moe`` with ``gate_up[e] x + scale * gate_up_b[e] gate_up_a[e] x`` in place of ``gate_up[e]
x``, and likewise for ``down``.

Shapes: as in ``moe``; gate_up_a (E, r, H), gate_up_b (E, 2 I, r), down_a (E, r, I), down_b (E, H,
r). The ranks r may differ.

The products with the adapters are thin and grouped by expert. Neither W + scale B A nor the
gradient of a frozen weight is ever made. Adapters are multiplied in the dtype of x, as in PEFT. The
thin results, which PEFT does not have, may leave the range of fp16, so in fp16 they are in fp32.
The node saves for the backward: x, the output of gate_up with its adapters (M, 2 I), the thin x A^T
(M, r), and the adapters as the kernels read them, if they have another dtype or order. The pass
over the activation in the backward applies the router's weights, so the thin product of ``down`` is
computed again there, from the weighted activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, checks, nbytes, op
from liger_kernel.ops._core.operator import as_index, use_kernels
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.moe import (
    _GPT_OSS,
    _cost as _moe_cost,
    _routed,
    _scaled,
    _some_invalid,
    _tens,
    adapted_moe,
    check,
    experts_in_torch,
)


def _cost(
    x, gate_up, down, topk_index, topk_weight, gate_up_a=None, gate_up_b=None, down_a=None, down_b=None, **more
) -> Cost:
    given = (more.get("gate_up_bias"), more.get("down_bias"))
    base = _moe_cost(x, gate_up, down, topk_index, topk_weight, *given, adapters=(gate_up_a, gate_up_b))
    # whether a gradient goes through the activation at all
    first = any(t is not None and t.requires_grad for t in (x, gate_up, given[0], gate_up_a, gate_up_b))
    m = int(((topk_index >= 0) & (topk_index < gate_up.shape[0])).sum())
    adapters = nbytes(gate_up_a, gate_up_b, down_a, down_b)
    forward, backward = (list(products) for products in base.gemms)
    for a, b, before in ((gate_up_a, gate_up_b, x.requires_grad), (down_a, down_b, first)):
        if a is None or b is None:
            continue
        (_, r, K), N = a.shape, b.shape[1]
        forward += [(m, r, K), (m, N, r)]
        # dy B, (dy B) A, and the two gradients of the adapter
        of_adapter = ((r, K, m), a.requires_grad), ((N, r, m), b.requires_grad)
        products = ((m, r, N), before or a.requires_grad), ((m, K, r), before), *of_adapter
        backward += [product for product, needed in products if needed]
    return Cost(base.forward + adapters, base.backward + 2 * adapters, gemms=(forward, backward))


def _args(
    tokens: int, K: int, H: int, I: int, E: int, r: int, *, dtype: torch.dtype | None = None, grads: str = "x", **more
) -> dict:
    """Arguments of ``lora_moe``, with frozen weights; ``more`` as in ``_routed``."""
    shapes = dict(gate_up_a=(E, r, H), gate_up_b=(E, 2 * I, r), down_a=(E, r, I), down_b=(E, H, r))
    return (
        _routed(tokens, K, H, I, E, grads=grads, **more)
        | {name: T(shape, _scaled, dtype=dtype) for name, shape in shapes.items()}
        | dict(scale=0.5)
    )


@op(
    reference=experts_in_torch,
    cases=[
        Case("qwen3", _args(20, 2, 40, 24, 3, 4, weight=torch.float32, grads="x w")),
        Case("fp32-adapters", _args(9, 2, 16, 16, 3, 8, dtype=torch.float32)),
        Case("odd", _args(5, 2, 19, 13, 3, 3, grads="x w1")),
        Case("one-expert", _args(36, 1, 16, 16, 3, 17, used=1, grads="x w1 w2")),
        Case(
            "no-expert",
            _args(17, 2, 16, 16, 3, 4, grads="x w") | dict(topk_index=T((17, 2), _some_invalid, dtype=torch.int64)),
        ),
        Case("down-alone", _args(9, 2, 16, 24, 3, 4) | dict(gate_up_a=None, gate_up_b=None)),
        Case("gate-up-alone", _args(9, 2, 16, 24, 3, 4, grads="w") | dict(down_a=None, down_b=None)),
        Case(
            "gpt-oss",
            _args(9, 2, 16, 24, 2, 4, grads="x w")
            # so far from the limits that what adapters add never decides
            | dict(gate_up_bias=T((2, 48), lambda *shape, dtype: 2 * _tens(*shape, dtype=dtype)))
            | dict(down_bias=T((2, 16)), **_GPT_OSS),
        ),
        Case("recomputed", _args(9, 2, 16, 24, 3, 4, grads="x w") | dict(recompute=True)),
    ],
    cost=_cost,
)
def lora_moe(
    x: Tensor, gate_up: Tensor, down: Tensor, topk_index: Tensor, topk_weight: Tensor, gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None, down_a: Tensor | None = None, down_b: Tensor | None = None, *,
    scale: float = 1.0, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, act: str = "silu",
    interleaved: bool = False, alpha: float = 1.0, limit: float | None = None, offset: float = 0.0,
    recompute: bool = False,
) -> Tensor:  # fmt: skip
    """``moe`` with a LoRA adapter for each expert's gate_up, down, or both. Differentiable in
    everything but the index. Returns (T, H) in x's dtype.

    gate_up_a (E, r, H), gate_up_b (E, 2 I, r), down_a (E, r, I), down_b (E, H, r): any floating
    dtype and any strides; leave out a pair for a weight without an adapter. They are multiplied in
    x's dtype. The other arguments are those of ``moe``. It saves x, x A^T and, without
    ``recompute``, the output of gate_up.
    """
    dtype = check("lora_moe", x, gate_up, down, topk_index, topk_weight, gate_up_bias, down_bias, act, alpha, limit)
    # of gate_up and of down, none or one
    adapters: list[list[Adapter]] = []
    named = dict(gate_up_a=gate_up_a, gate_up_b=gate_up_b, down_a=down_a, down_b=down_b)
    for weight, one, other in ((gate_up, "gate_up_a", "gate_up_b"), (down, "down_a", "down_b")):
        (E, N, K), a, b = weight.shape, named[one], named[other]
        if (a is None) != (b is None):
            missing, given = (one, other) if a is None else (other, one)
            raise ValueError(f"lora_moe: {missing} must be given with {given}, got None")
        adapters.append([])
        if a is None or b is None:
            continue
        if a.ndim != 3 or a.shape[0] != E or not a.shape[1] or a.shape[2] != K:
            raise ValueError(f"lora_moe: {one} must have shape ({E}, r >= 1, {K}), got {tuple(a.shape)}")
        checks.shape("lora_moe", (E, N, a.shape[1]), **{other: b})
        checks.floating("lora_moe", **{one: a, other: b})
        for name, t in ((one, a), (other, b)):
            if t.device != x.device:
                raise ValueError(f"lora_moe: {name} must be on x's device, {x.device}, got {t.device}")
        adapters[-1].append(Adapter.scaled(a, b, scale))
    topk_index = as_index(topk_index)
    form = dict(act=act, interleaved=interleaved, alpha=alpha, limit=limit, offset=offset)
    biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    if use_kernels(x):
        form["recompute"] = recompute
        return adapted_moe(
            x.to(dtype), gate_up, down, topk_index, topk_weight, adapters[0], adapters[1], **biases, **form
        )
    # what autocast would do: the reference has plain products
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    biases = {name: b if b is None else b.to(dtype) for name, b in biases.items()}
    return experts_in_torch(x, gate_up, down, topk_index, topk_weight, **named, scale=scale, **biases, **form)
