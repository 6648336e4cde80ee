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

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core.operator import (
    Case,
    Cost,
    T,
    as_index,
    nbytes,
    once_differentiable,
    op,
    rows_of,
    use_kernels,
)
from liger_kernel.ops._core.saved import HARMLESS, graph_is_kept, saving_hooks
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.grouped_mm import grouped_mm, grouped_sum
from liger_kernel.ops.projections.grouped_thin import add_thin_, thin_outer, thin_rows
from liger_kernel.ops.projections.moe import (
    _GPT_OSS,
    _outer_like,
    _routed,
    _scaled,
    _some_invalid,
    activation,
    check,
    moe_combine,
    moe_gather,
    moe_glu_bwd_,
    moe_glu_fwd,
    moe_route,
    moe_up,
    of_experts,
)
from liger_kernel.ops.projections.moe import _cost as _moe_cost
from liger_kernel.ops.projections.weights import Weight


def reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    scale: float = 1.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    act: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    def product(
        rows: Tensor, e: int, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None
    ) -> Tensor:
        z = F.linear(rows, weight[e])
        if a is not None and b is not None:
            wide = torch.float32 if rows.dtype == torch.float16 else rows.dtype
            a, b = (t[e].to(rows.dtype).to(wide) for t in (a, b))
            z = (z + scale * F.linear(F.linear(rows.to(wide), a), b)).to(z.dtype)
        return z if bias is None else z + bias[e]

    def expert(e: int, rows: Tensor) -> Tensor:
        z = product(rows, e, gate_up, gate_up_bias, gate_up_a, gate_up_b)
        return product(activation(z, act, interleaved, alpha, limit, offset), e, down, down_bias, down_a, down_b)

    return of_experts(expert, gate_up.shape[0], x, topk_index, topk_weight)


def _dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


def _thin(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The matrices of an adapter as the kernels read them, (E, r, K), in this dtype."""
    if t is None or t.dtype == dtype:
        return t if t is None else t.contiguous()
    return t.to(dtype, memory_format=torch.contiguous_format)


def _hidden(x, gate_up, xa, b, scale, index, order, position, offs) -> Tensor:
    """h, the product of sorted rows and gate_up with its adapter, if it has one. ``xa``: the
    thin product of these rows and a."""
    h = grouped_mm(moe_gather(x, index, order, position, offs, None)[0], _dense(gate_up, x.dtype).mT, offs)
    if xa is not None:
        add_thin_(h, xa, b, offs, scale)
    return h


class AdaptedMoEFunction(torch.autograd.Function):
    """``apply(x, topk_index, topk_weight, gate_up, down, gate_up_bias, down_bias, gate_up_a,
    gate_up_b, down_a, down_b, scales, form, keep)``.

    gate_up and down: a tensor, or a ``Weight`` that is made dense for each product. Each b is
    transposed, (E, r, N). ``scales``: of the adapters of gate_up and of down. ``form``: act,
    interleaved, alpha, limit and offset. ``keep``: as in ``LigerFusedMoEFunction``. A pair of
    adapters may be None.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        topk_index,
        topk_weight,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        gate_up_a,
        gate_up_b,
        down_a,
        down_b,
        scales,
        form,
        keep,
    ):
        x, index, w, dtype = rows_of(x), topk_index.contiguous(), topk_weight.contiguous(), x.dtype
        bias, last_bias = (t if t is None else t.contiguous() for t in (gate_up_bias, down_bias))
        adapters = gate_up_a, gate_up_b, down_a, down_b
        ctx.dtypes = [None if t is None else t.dtype for t in adapters]
        a, b, last_a, last_b = (_thin(t, dtype) for t in adapters)
        order, position, offs = moe_route(index, gate_up.shape[0])
        xa = None
        if a is None:
            h, z = moe_up(
                moe_gather(x, index, order, position, offs, None)[0],
                _dense(gate_up, dtype),
                bias,
                index,
                order,
                offs,
                keep,
                *form,
            )
        else:
            xa = thin_rows(x, order, index.shape[1], a, offs, 1.0)
            h = _hidden(x, gate_up, xa, b, scales[0], index, order, position, offs)
            z = moe_glu_fwd(h, bias, index, order, offs, *form)
            h = h if keep else h.new_empty(0, h.shape[1])
        y = grouped_mm(z, _dense(down, dtype).mT, offs)
        if last_a is not None:
            add_thin_(y, thin_rows(z, None, 1, last_a, offs, 1.0), last_b, offs, scales[1])
        ctx.scales, ctx.form, ctx.keep, ctx.unshared = scales, form, keep, saving_hooks()[1] in HARMLESS
        ctx.stored = [None if isinstance(weight, Tensor) else weight for weight in (gate_up, down)]
        weights = (weight if stored is None else None for weight, stored in zip((gate_up, down), ctx.stored))
        ctx.save_for_backward(
            x, *weights, a, b, last_a, last_b, index, w, bias, last_bias, h, xa, order, position, offs
        )
        return moe_combine(y, index, position, offs, w, last_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        h_is_ours = ctx.unshared and not graph_is_kept()
        x, gate_up, down, a, b, last_a, last_b, index, w, bias, last_bias, h, xa, order, position, offs = (
            ctx.saved_tensors
        )
        (
            need_x,
            _,
            need_w,
            need_gate_up,
            need_down,
            need_bias,
            need_last_bias,
            need_a,
            need_b,
            need_last_a,
            need_last_b,
        ) = ctx.needs_input_grad[:11]
        (scale, last_scale), K, dtype = ctx.scales, index.shape[1], x.dtype
        weights = [weight if stored is None else stored for weight, stored in zip((gate_up, down), ctx.stored)]
        if not ctx.keep:
            h, h_is_ours = _hidden(x, weights[0], xa, b, scale, index, order, position, offs), True
        need_dh = need_x or need_gate_up or need_bias or need_a or need_b
        dx = dgate_up = ddown = dbias = dlast_bias = da = db = dlast_a = dlast_b = dya = dxa = None
        dout = rows_of(dout)
        dz, dot = moe_gather(dout, index, order, position, offs, last_bias if need_w else None)
        need_dy, need_wy = need_dh or need_w, need_down or need_last_a or need_last_b
        dy = (
            grouped_mm(dz, _dense(weights[1], dtype), offs)
            if need_dy
            else h.new_empty((h.shape[0], h.shape[1] // 2) if need_wy else 0)
        )
        if last_a is not None and (need_dy or need_last_a):
            dya = thin_rows(dout, order, K, last_b, offs, last_scale)
            if need_dy:
                add_thin_(dy, dya, last_a, offs, 1.0)
        # without the router's weights so far: this pass applies them
        dh, wy = h if h_is_ours or not need_dh else h.clone(), dy
        dw = moe_glu_bwd_(
            dy,
            dh,
            bias,
            index,
            order,
            offs,
            w,
            dot if need_w and last_bias is not None else None,
            need_dh,
            need_wy,
            need_w,
            *ctx.form,
        )
        if need_down:
            ddown = _outer_like(down, dz, wy, offs).to(down.dtype)
        if need_last_bias:
            dlast_bias = grouped_sum(dz, w.flatten()[order], offs)
        if need_last_a:
            dlast_a = thin_outer(dya, wy, None, 1, offs, 1.0, ctx.dtypes[2])
        if need_last_b:
            dlast_b = thin_outer(
                thin_rows(wy, None, 1, last_a, offs, 1.0), dout, order, K, offs, last_scale, ctx.dtypes[3]
            )
        del dz, dy, wy  # free them before the other half allocates as much
        if need_bias:
            dbias = grouped_sum(dh, None, offs)
        if need_gate_up:
            dgate_up = _outer_like(gate_up, dh, moe_gather(x, index, order, position, offs, None)[0], offs).to(
                gate_up.dtype
            )
        if need_b:
            db = thin_outer(xa, dh, None, 1, offs, scale, ctx.dtypes[1])
        if a is not None and (need_x or need_a):
            dxa = thin_rows(dh, None, 1, b, offs, scale)
        if need_a:
            da = thin_outer(dxa, x, order, K, offs, 1.0, ctx.dtypes[0])
        if need_x:
            dxs = grouped_mm(dh, _dense(weights[0], dtype), offs)
            if dxa is not None:
                add_thin_(dxs, dxa, a, offs, 1.0)
            dx = moe_combine(dxs, index, position, offs, None, None)
        return (
            dx,
            None,
            dw if need_w else None,
            dgate_up,
            ddown,
            dbias,
            dlast_bias,
            da,
            db,
            dlast_a,
            dlast_b,
            *[None] * 3,
        )


def _joined(adapters: Sequence[Adapter]) -> tuple[Tensor | None, Tensor | None, float]:
    """Several adapters of one weight as one adapter, whose rank is the sum of theirs: its two
    matrices and its scale."""
    if len(adapters) < 2:
        return (adapters[0].a, adapters[0].b, adapters[0].scale) if adapters else (None, None, 1.0)
    return torch.cat([one.a for one in adapters], 1), torch.cat([one.b * one.scale for one in adapters], 2), 1.0


def adapted_moe(
    x: Tensor,
    gate_up: Tensor | Weight,
    down: Tensor | Weight,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_adapters: Sequence[Adapter],
    down_adapters: Sequence[Adapter],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    act: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """``moe`` by kernels, for weights (E, N, K) with any storage and any number of adapters: a (E,
    r, K), b (E, N, r), without dropout and bias.

    All products are in the dtype of x.
    """
    a, b, scale = _joined(gate_up_adapters)
    last_a, last_b, last_scale = _joined(down_adapters)
    bias, last_bias = (t if t is None else t.to(x.dtype) for t in (gate_up_bias, down_bias))
    form = (act, interleaved, alpha, limit, offset)
    pairs = a, b if b is None else b.mT, last_a, last_b if last_b is None else last_b.mT
    given = (x, topk_weight, gate_up, down, bias, last_bias, *pairs)
    keep = not recompute and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    return AdaptedMoEFunction.apply(
        x, topk_index, topk_weight, gate_up, down, bias, last_bias, *pairs, (scale, last_scale), form, keep
    )


def _cost(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    **more,
) -> Cost:
    given = (more.get("gate_up_bias"), more.get("down_bias"))
    base = _moe_cost(x, gate_up, down, topk_index, topk_weight, *given, adapters=(gate_up_a, gate_up_b))
    first = any(t is not None and t.requires_grad for t in (x, gate_up, given[0], gate_up_a, gate_up_b))
    m, adapters = (
        int(((topk_index >= 0) & (topk_index < gate_up.shape[0])).sum()),
        nbytes(gate_up_a, gate_up_b, down_a, down_b),
    )
    forward, backward = (list(products) for products in base.gemms)
    for a, b, before in ((gate_up_a, gate_up_b, x.requires_grad), (down_a, down_b, first)):
        if a is not None and b is not None:
            (_, r, K), N = a.shape, b.shape[1]
            forward += [(m, r, K), (m, N, r)]
            learnt = [
                ((m, r, N), before or a.requires_grad),
                ((m, K, r), before),
                ((r, K, m), a.requires_grad),
                ((N, r, m), b.requires_grad),
            ]
            backward += [product for product, needed in learnt if needed]
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


def _sixes(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values that put gate and up far below or above a limit of 7, so that rounding never
    decides, nor what adapters add."""
    return torch.randint(-1, 2, shape).to(dtype) * 24


_LAST = _args(4, 2, 8, 8, 3, 2)


@op(
    reference=reference,
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
            | dict(gate_up_bias=T((2, 48), _sixes), down_bias=T((2, 16)), **_GPT_OSS),
        ),
        Case("recomputed", _args(9, 2, 16, 24, 3, 4, grads="x w") | dict(recompute=True)),
        Case("bad-x", _LAST | dict(x=T((1, 4, 8))), error="lora_moe: x must have shape (T, H), got (1, 4, 8)"),
        Case(
            "bad-down", _LAST | dict(down=T((3, 8, 9))), error="lora_moe: down must have shape (3, 8, 8), got (3, 8, 9)"
        ),
        Case("no-b", _LAST | dict(down_b=None), error="lora_moe: down_b must be given with down_a, got None"),
        Case(
            "bad-a",
            _LAST | dict(down_a=T((3, 2, 9))),
            error="lora_moe: down_a must have shape (3, r >= 1, 8), got (3, 2, 9)",
        ),
        Case(
            "rank-0",
            _LAST | dict(down_a=T((3, 0, 8)), down_b=T((3, 8, 0))),
            error="lora_moe: down_a must have shape (3, r >= 1, 8), got (3, 0, 8)",
        ),
        Case(
            "bad-b",
            _LAST | dict(gate_up_b=T((3, 16, 3))),
            error="lora_moe: gate_up_b must have shape (3, 16, 2), got (3, 16, 3)",
        ),
        Case(
            "integers",
            _LAST | dict(gate_up_a=T((3, 2, 8), dtype=torch.int64)),
            error="lora_moe: gate_up_a must be floating point, got torch.int64",
        ),
    ],
    cost=_cost,
)
def lora_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    scale: float = 1.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    act: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """``moe`` with a LoRA adapter for each expert's gate_up, down, or both. Differentiable in
    everything but the index. Returns (T, H) in x's dtype.

    gate_up_a (E, r, H), gate_up_b (E, 2 I, r), down_a (E, r, I), down_b (E, H, r): any floating
    dtype and any strides; leave out a pair for a weight without an adapter. They are multiplied in
    x's dtype. The other arguments are those of ``moe``. It saves x, x A^T and, without
    ``recompute``, the output of gate_up.
    """
    dtype = check("lora_moe", x, gate_up, down, topk_index, topk_weight, gate_up_bias, down_bias, act, alpha, limit)
    adapters: list[list[Adapter]] = []
    for weight, (name, a), (other, b) in (
        (gate_up, ("gate_up_a", gate_up_a), ("gate_up_b", gate_up_b)),
        (down, ("down_a", down_a), ("down_b", down_b)),
    ):
        E, N, K = weight.shape
        if (a is None) != (b is None):
            raise ValueError(
                f"lora_moe: {name if a is None else other} must be given with {other if a is None else name}, got None"
            )
        adapters.append([])
        if a is None or b is None:
            continue
        if a.ndim != 3 or a.shape[0] != E or not a.shape[1] or a.shape[2] != K:
            raise ValueError(f"lora_moe: {name} must have shape ({E}, r >= 1, {K}), got {tuple(a.shape)}")
        if b.shape != (E, N, a.shape[1]):
            raise ValueError(f"lora_moe: {other} must have shape ({E}, {N}, {a.shape[1]}), got {tuple(b.shape)}")
        for given, t in ((name, a), (other, b)):
            if not t.is_floating_point():
                raise ValueError(f"lora_moe: {given} must be floating point, got {t.dtype}")
            if t.device != x.device:
                raise ValueError(f"lora_moe: {given} must be on x's device, {x.device}, got {t.device}")
        adapters[-1].append(Adapter.scaled(a, b, scale))
    topk_index = as_index(topk_index)
    form = dict(
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        act=act,
        interleaved=interleaved,
        alpha=alpha,
        limit=limit,
        offset=offset,
    )
    if not use_kernels(x):
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        form |= {
            name: b if b is None else b.to(dtype)
            for name, b in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
        }
        return reference(
            x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, scale=scale, **form
        )
    return adapted_moe(x.to(dtype), gate_up, down, topk_index, topk_weight, *adapters, recompute=recompute, **form)
