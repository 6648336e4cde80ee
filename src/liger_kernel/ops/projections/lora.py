"""Linear layers with low-rank adapters, as operators: one layer (LoRA, Hu et al., arXiv:2106.09685;
DoRA, Liu et al., arXiv:2402.09353), the layers q, k and v of one input, and a gated MLP.

``y = x W^T + scale (x A^T) B^T``;  with a magnitude m (N,)  ``y = m / |W + scale B A| * (x W^T +
scale (x A^T) B^T)``;  plus bias. The gradient treats the norms of the rows as constants.

Shapes: x (..., K), W (N, K), A (r, K), B (N, r), y (..., N).

Adapters may have another dtype than x and W. Their products then use the wider dtype, and their sum
is rounded once, together with y. ``adapted`` says how the nodes work and what they save for the
backward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, nbytes, op
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.activations.glu import check_act, reference as glu_reference
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.mlp import _scaled, adapted_mlp
from liger_kernel.ops.projections.weights import dense


def reference(x, weight, a, b, *, bias, magnitude, scale):
    # PEFT multiplies in the adapters' dtype; the sum is rounded once, to that of the layer
    thin = torch.promote_types(x.dtype, torch.promote_types(a.dtype, b.dtype))
    y = F.linear(x, weight)
    y = (y + scale * F.linear(F.linear(x.to(thin), a.to(thin)), b.to(thin))).to(y.dtype)
    if magnitude is not None:
        wide = acc(x.dtype)
        # detached: DoRA treats the norms as constants
        norm = torch.linalg.vector_norm(weight.to(wide) + scale * (b.to(wide) @ a.to(wide)), dim=1).detach()
        y = (y * (magnitude / norm)).to(y.dtype)
    return y if bias is None else (y + bias).to(y.dtype)


def _adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return reference(x, weight, a, b, bias=None, magnitude=None, scale=scale)


def reference_qkv(x, q, k, v, q_a, q_b, k_a, k_b, v_a, v_b, *, scale):
    return tuple(_adapted(x, *each, scale) for each in ((q, q_a, q_b), (k, k_a, k_b), (v, v_a, v_b)))


def reference_mlp(x, gate, up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, *, act, scale):
    g, u = (_adapted(x, *each, scale) for each in ((gate, gate_a, gate_b), (up, up_a, up_b)))
    return _adapted(glu_reference(g, u, act=act), down, down_a, down_b, scale)


def _check_input(op: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be floating point, got {x.dtype}")
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least one dim, got shape ()")


def _check(op: str, x: Tensor, shape: tuple[int | None, int], *given: tuple[str, Tensor]) -> int:
    """Check the shapes of a weight, its a and its b, which ``given`` holds as names and values.
    Returns N."""
    weight, a, _ = (t for _, t in given)
    N, K = weight.shape[0] if shape[0] is None and weight.ndim else shape[0], shape[1]
    # a decides the rank; b must have it
    rank = a.shape[0] if a.ndim else 0
    for (name, t), wanted in zip(given, ((N, K), (max(rank, 1), K), (N, rank))):
        shown = f"({'N' if t is weight and shape[0] is None else 'r >= 1' if t is a else wanted[0]}, {wanted[1]})"
        if tuple(t.shape) != wanted:
            raise ValueError(f"{op}: {name} must have shape {shown}, got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device, {x.device}, got {t.device}")
        if not t.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, got {t.dtype}")
    # autocast would cast the weight
    device = x.device.type
    if weight.dtype != x.dtype and (device == "meta" or not torch.is_autocast_enabled(device)):
        raise ValueError(f"{op}: {given[0][0]} must have x's dtype, {x.dtype}, got {weight.dtype}")
    return weight.shape[0]


def _magnitudes(*shape: int, dtype: torch.dtype) -> Tensor:
    return 1 + torch.rand(*shape, dtype=dtype)


def _layer(K: int, N: int, r: int, name: str = "", dtype: torch.dtype | None = None) -> dict[str, T]:
    a, b = (f"{name}_a", f"{name}_b") if name else ("a", "b")
    return {
        name or "weight": T((N, K), _scaled),
        a: T((r, K), _scaled, dtype=dtype),
        b: T((N, r), _scaled, dtype=dtype),
    }


def _qkv_args(lead: tuple[int, ...], K: int, N: int, kv: int, r: int) -> dict:
    found = _layer(K, N, r, "q") | _layer(K, kv, r, "k") | _layer(K, kv, r + 1, "v")
    return dict(x=T((*lead, K)), scale=0.5) | found


def _mlp_args(lead: tuple[int, ...], H: int, I: int, r: int) -> dict:
    found = _layer(H, I, r, "gate") | _layer(H, I, r, "up") | _layer(I, H, r, "down")
    return dict(x=T((*lead, H)), scale=0.5) | found


def _cost_of(M: int, layers: list[tuple[Tensor, Tensor, Tensor]], moved: tuple[int, int]) -> Cost:
    """The cost of layers (weight, a, b) with M rows. ``moved``: bytes of inputs and outputs,
    forward and backward."""
    weights, adapters = nbytes(*(w for w, *_ in layers)), nbytes(*(t for _, *ab in layers for t in ab))
    forward: list[tuple[int, int, int]] = []
    backward: list[tuple[int, int, int]] = []
    for w, a, _ in layers:
        (N, K), r = w.shape, a.shape[0]
        forward += (M, N, K), (M, r, K), (M, N, r)
        backward += (M, K, N), *([(N, K, M)] * w.requires_grad), (M, r, N), (M, K, r), (N, r, M), (r, K, M)
    trained = sum(w.nbytes for w, *_ in layers if w.requires_grad)
    return Cost(moved[0] + weights + adapters, moved[1] + weights + trained + 2 * adapters, gemms=(forward, backward))


def _layers_of(tensors: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(t, tensors[f"{name}_a"], tensors[f"{name}_b"]) for name, t in tensors.items() if f"{name}_a" in tensors]


def _cost(x, weight, a, b, *, magnitude=None, **_) -> Cost:
    y = x.numel() // x.shape[-1] * weight.shape[0] * x.itemsize
    cost = _cost_of(x.numel() // x.shape[-1], [(weight, a, b)], (x.nbytes + y, 2 * x.nbytes + y))
    if magnitude is None:
        return cost
    forward, backward = cost.gemms
    # one more product, for the norms of the rows
    return dataclasses.replace(cost, gemms=([*forward, (*weight.shape, a.shape[0])], backward))


def _cost_qkv(x, **tensors) -> Cost:
    M, layers = x.numel() // x.shape[-1], _layers_of(tensors)
    y = M * sum(weight.shape[0] for weight, *_ in layers) * x.itemsize
    return _cost_of(M, layers, (x.nbytes + y, 2 * x.nbytes + y))


def _cost_mlp(x, **tensors) -> Cost:
    return _cost_of(x.numel() // x.shape[-1], _layers_of(tensors), (nbytes(x, x), nbytes(x, x, x)))


@op(
    reference=reference,
    cases=[
        Case("llama", dict(x=T((2, 9, 32)), scale=2.0) | _layer(32, 48, 4)),
        Case("qwen2", dict(x=T((17, 24)), bias=T((40,)), scale=0.25) | _layer(24, 40, 8)),
        Case(
            "dora", dict(x=T((2, 5, 16)), bias=T((24,)), magnitude=T((24,), _magnitudes), scale=0.5) | _layer(16, 24, 3)
        ),
        Case("fp32-adapter", dict(x=T((11, 24)), scale=0.5) | _layer(24, 20, 4, dtype=torch.float32)),
        Case("odd", dict(x=T((1, 7)), scale=-1.0) | _layer(7, 5, 2)),
    ],
    cost=_cost,
)
def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *,
    bias: Tensor | None = None, magnitude: Tensor | None = None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """A linear layer with a LoRA adapter, or with ``magnitude`` a DoRA adapter. Differentiable in
    every tensor. Returns (..., N).

    x (..., K); weight (N, K) in x's dtype, or any dtype under autocast; a (r, K), b (N, r), bias
    and magnitude (N,) in any floating dtype; any strides. It saves x and x A^T for the backward,
    and with a magnitude also the result before the magnitude.
    """
    _check_input("lora_linear", x)
    N = _check("lora_linear", x, (None, x.shape[-1]), ("weight", weight), ("a", a), ("b", b))
    for name, t in (("bias", bias), ("magnitude", magnitude)):
        if t is not None and tuple(t.shape) != (N,):
            raise ValueError(f"lora_linear: {name} must have shape ({N},), got {tuple(t.shape)}")
        if t is not None and t.device != x.device:
            raise ValueError(f"lora_linear: {name} must be on x's device, {x.device}, got {t.device}")
    # under torch.compile, Inductor makes as few passes
    if not use_kernels(x, fusible=True):
        return reference(x, weight, a, b, bias=bias, magnitude=magnitude, scale=scale)
    return linears(x, [Projection(dense(weight), bias, (Adapter.scaled(a, b, scale),), magnitude)])[0]


@op(
    reference=reference_qkv,
    cases=[Case("llama", _qkv_args((2, 9), 32, 48, 16, 4)), Case("odd", _qkv_args((1,), 7, 5, 3, 2))],
    cost=_cost_qkv,
)
def lora_qkv(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, q_a: Tensor, q_b: Tensor, k_a: Tensor, k_b: Tensor, v_a: Tensor,
    v_b: Tensor, *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values of one input: three ``lora_linear`` as one node, which reads x
    once for all adapters. Their N and ranks may differ."""
    _check_input("lora_qkv", x)
    names = dict(q=(q, q_a, q_b), k=(k, k_a, k_b), v=(v, v_a, v_b))
    for name, (weight, a, b) in names.items():
        _check("lora_qkv", x, (None, x.shape[-1]), (name, weight), (f"{name}_a", a), (f"{name}_b", b))
    if not use_kernels(x, fusible=True):
        return reference_qkv(x, q, k, v, q_a, q_b, k_a, k_b, v_a, v_b, scale=scale)
    y = linears(x, [Projection(dense(weight), None, (Adapter.scaled(a, b, scale),)) for weight, a, b in names.values()])
    return y[0], y[1], y[2]


@op(
    reference=reference_mlp,
    cases=[
        Case("llama", _mlp_args((2, 9), 32, 48, 4)),
        Case("gemma", _mlp_args((17,), 24, 40, 3) | dict(act="gelu_tanh")),
        Case("odd", _mlp_args((1,), 7, 5, 2)),
    ],
    cost=_cost_mlp,
)
def lora_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor,
    down_a: Tensor, down_b: Tensor, *,
    act: str = "silu", scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """A gated MLP of three ``lora_linear`` as one node. It saves x, the outputs of gate and up, and
    thin matrices for the backward.

    x (..., H), gate and up (I, H), down (H, I); adapters as in ``lora_linear``; act as in ``glu``.
    Returns (..., H).
    """
    _check_input("lora_mlp", x)
    H = x.shape[-1]
    I = _check("lora_mlp", x, (None, H), ("gate", gate), ("gate_a", gate_a), ("gate_b", gate_b))
    _check("lora_mlp", x, (I, H), ("up", up), ("up_a", up_a), ("up_b", up_b))
    _check("lora_mlp", x, (H, I), ("down", down), ("down_a", down_a), ("down_b", down_b))
    check_act("lora_mlp", act)
    if not use_kernels(x, fusible=True):
        return reference_mlp(x, gate, up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, act=act, scale=scale)
    each = ((gate, gate_a, gate_b), (up, up_a, up_b), (down, down_a, down_b))
    first, second, last = (Projection(dense(weight), None, (Adapter.scaled(a, b, scale),)) for weight, a, b in each)
    return adapted_mlp(x, [first, second], last, act=act)
