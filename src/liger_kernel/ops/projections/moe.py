"""Mixture of experts: ``y[t] = sum_k weight[t, k] * down[e] (act(gate) * up)`` with ``gate, up =
gate_up[e] x[t]`` and ``e = index[t, k]``
(Shazeer et al., arXiv:1701.06538).

Shapes: x, y (T, H), gate_up (E, 2 I, H), down (E, H, I), index, weight (T, K).  M = T K, the
assignments.

The device sorts the assignments by expert and copies the rows of x into that order. This writes M H
elements once, which is little compared with products that read them again for every tile of
columns, and TMA requires adjacent rows. Only x and h = gate_up[e] x, (M, 2 I), are saved, or with
``recompute`` x alone. The backward copies the rows again instead of saving them. It does not need
each expert's output z, because <dy, z> = <down^T dy, act>. Sums over K and over rows are gathered
in fp32 in a fixed order. An index outside [0, E) is sorted after all experts and contributes
nothing. ``bench/cases/projections.py`` has the shapes of real models and the implementations for
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, launcher, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import (
    as_index,
    autocast_dtype,
    host_can_read,
    launch,
    on_gpu,
    once_differentiable,
    rows_of,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.saved import HARMLESS, graph_is_kept, saving_hooks
from liger_kernel.ops._core.schema import fields_of
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, rows_at, store_tile, tl
from liger_kernel.ops.activations.glu import ACTS, act_and_slope, check_act
from liger_kernel.ops.projections import grouped_tma
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.float8_blocks import Float8Blocks
from liger_kernel.ops.projections.grouped_blocks import decoded_inside, grouped_mm_blocks
from liger_kernel.ops.projections.grouped_mm import grouped_mm, grouped_outer, grouped_sum
from liger_kernel.ops.projections.grouped_thin import add_thin_, thin_outer, thin_rows
from liger_kernel.ops.projections.grouped_tma import ExpertForm
from liger_kernel.ops.projections.mlp import _scaled
from liger_kernel.ops.projections.mxfp4 import MXFP4Experts, in_parts, product_in_parts
from liger_kernel.ops.projections.weights import Weight

ROUTED = 512  # assignments that one program sorts


def experts_in_torch(
    x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, *,
    scale, gate_up_bias, down_bias, act, interleaved, alpha, limit, offset, **how,
):  # fmt: skip
    """The reference of ``lora_moe``, whose experts may have adapters."""

    def product(rows: Tensor, e: int, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None):
        if a is None or b is None:
            return F.linear(rows, weight[e], None if bias is None else bias[e])
        # thin results may leave the range of fp16, which those of PEFT, in fp32, do not
        wide = torch.float32 if rows.dtype == torch.float16 else rows.dtype
        a, b = (t[e].to(rows.dtype).to(wide) for t in (a, b))
        z = F.linear(rows, weight[e])
        z = (z + scale * F.linear(F.linear(rows.to(wide), a), b)).to(z.dtype)
        return z if bias is None else z + bias[e]

    def expert(e: int, rows: Tensor) -> Tensor:
        z = product(rows, e, gate_up, gate_up_bias, gate_up_a, gate_up_b)
        return product(activation(z, act, interleaved, alpha, limit, offset), e, down, down_bias, down_a, down_b)

    return of_experts(expert, gate_up.shape[0], x, topk_index, topk_weight)


def reference(
    x, gate_up, down, topk_index, topk_weight, *,
    gate_up_bias, down_bias, act, interleaved, alpha, limit, offset, **how,
):  # fmt: skip
    given = dict(gate_up_bias=gate_up_bias, down_bias=down_bias, act=act, interleaved=interleaved, alpha=alpha)
    none = (None,) * 4
    return experts_in_torch(
        x, gate_up, down, topk_index, topk_weight, *none, scale=1.0, limit=limit, offset=offset, **given
    )


def of_experts(
    expert: Callable[[int, Tensor], Tensor], E: int, x: Tensor, topk_index: Tensor, topk_weight: Tensor
) -> Tensor:
    """The weighted sum over k of what ``expert`` makes of each token: it gets the number of an
    expert and its rows of x."""
    K, wide = topk_index.shape[1], acc(x.dtype)
    # how many rows an expert has cannot be known: each gets all, those of other experts as zeros
    if not host_can_read(topk_index):
        y = torch.zeros(x.shape, dtype=wide, device=x.device)
        for e in range(E):
            chosen = topk_index == e
            weight = (topk_weight.to(wide) * chosen).sum(1, keepdim=True)
            y = y + expert(e, x.where(chosen.any(1, keepdim=True), 0)).to(wide) * weight
        return y.to(x.dtype)
    # stable, as the kernels sort: sums of a token have one order
    number, order = topk_index.flatten().sort(stable=True)
    valid = (number >= 0) & (number < E)
    number, order = number[valid], order[valid]
    rows = x.to(wide)[order // K].to(x.dtype).split(torch.bincount(number, minlength=E).tolist())
    weight = topk_weight.flatten()[order, None].to(wide)
    y = torch.cat([expert(e, mine) for e, mine in enumerate(rows)]).to(wide) * weight
    return torch.zeros(x.shape, dtype=wide, device=x.device).index_add(0, order // K, y).to(x.dtype)


def activation(z: Tensor, act: str, interleaved: bool, alpha: float, limit: float | None, offset: float) -> Tensor:
    """That of an expert, (M, I), from gate and up, (M, 2 I)."""
    # of no columns there are no halves
    gate, up = ((z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, -1)) if z.shape[1] else (z, z)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (ACTS[act](gate.to(acc(z.dtype)) * alpha) / alpha).to(z.dtype) * (up + offset)


@jit
def _experts(index_ptr, M, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The experts of a block of assignments, E for none and E + 1 beyond the last assignment,
    and how many each has."""
    i = rows_at(tl.program_id(0), BLOCK_M)
    # indices outside are sorted after all experts, what does not exist after those
    expert = tl.load(index_ptr + i, mask=i < M, other=0)
    expert = tl.where(i < M, tl.where((expert < 0) | (expert >= E), E, expert), E + 1).to(tl.int32)
    return expert, tl.histogram(expert, BLOCK_E)


@jit
def _count(index_ptr, counts_ptr, M, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    _, counts = _experts(index_ptr, M, E, BLOCK_M, BLOCK_E)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + e * tl.num_programs(0) + tl.program_id(0), counts, mask=e <= E)


@jit
def _place(index_ptr, ends_ptr, order_ptr, position_ptr, offs_ptr, M, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """``ends``: counts added up expert by expert, then block by block."""
    expert, counts = _experts(index_ptr, M, E, BLOCK_M, BLOCK_E)
    e, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_M)
    end = tl.load(ends_ptr + e * tl.num_programs(0) + tl.program_id(0), mask=e <= E, other=0)
    tl.store(offs_ptr + e, end, mask=(e < E) & (tl.program_id(0) == tl.num_programs(0) - 1))
    # all keys differ, so that the sort is stable
    key = tl.sort(expert * BLOCK_M + place)
    expert, i = key // BLOCK_M, tl.program_id(0).to(tl.int64) * BLOCK_M + key % BLOCK_M
    position = tl.gather(end - tl.cumsum(counts, 0), expert, 0) + place
    tl.store(position_ptr + i, position, mask=i < M)
    tl.store(order_ptr + position, i.to(tl.int32), mask=i < M)


@jit
def _spread(
    x_ptr, position_ptr, offs_ptr, y_ptr, n_tokens, H, E, x_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of x in the order of experts: each is read once and written to its K places."""
    token = rows_at(tl.program_id(0), BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.load(offs_ptr + E - 1)
    x = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=mask_of(token, n_tokens, col, H), other=0.0)
    # one read, K writes: a gather would read each row K times
    for k in tl.static_range(K):
        row = tl.load(position_ptr + token * K + k, mask=token < n_tokens, other=2147483647).to(tl.int64)
        tl.store(y_ptr + row[:, None] * H + col[None, :], x, mask=mask_of(row, n, col, H))


@jit
def _gather(
    x_ptr, order_ptr, offs_ptr, index_ptr, bias_ptr, y_ptr, dot_ptr, H, K, E, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of x in the order of experts, and the product of each with its expert's bias."""
    row = rows_at(tl.program_id(0), BLOCK_M)
    here = row < tl.load(offs_ptr + E - 1)
    i = tl.load(order_ptr + row, mask=here, other=0)
    expert = tl.load(index_ptr + i, mask=here, other=0).to(tl.int64)
    dot = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = here[:, None] & (col < H)[None, :]
        x = tl.load(x_ptr + (i // K).to(tl.int64)[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
        tl.store(y_ptr + row[:, None] * H + col[None, :], x, mask=mask)
        # the product with the bias, whose router weight needs it, in the same pass
        dot += x.to(tl.float32) * load_tile(bias_ptr, expert, col, H, mask)
    tl.store(dot_ptr + row, tl.sum(dot, axis=1), mask=here)


@jit
def _combine(
    y_ptr, position_ptr, offs_ptr, w_ptr, index_ptr, bias_ptr, out_ptr, n_tokens, H, E,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum over k of each token's rows of y, biased and weighted."""
    token = rows_at(tl.program_id(0), BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.load(offs_ptr + E - 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.static_range(K):
        i = token * K + k
        row = tl.load(position_ptr + i, mask=token < n_tokens, other=n).to(tl.int64)
        mask = mask_of(row, n, col, H)
        # rows of no expert are masked, and add nothing
        y = load_tile(y_ptr, row, col, H, mask)
        if bias_ptr is not None:
            expert = tl.load(index_ptr + i, mask=row < n, other=0).to(tl.int64)
            y += load_tile(bias_ptr, expert, col, H, mask)
        if w_ptr is not None:
            y *= tl.load(w_ptr + i, mask=row < n, other=0.0).to(tl.float32)[:, None]
        total += y
    store_tile(out_ptr, token, col, H, total, mask_of(token, n_tokens, col, H))


@jit
def _gate_up(h_ptr, bias_ptr, row, col, expert, mask, n, INTERLEAVED: tl.constexpr):
    """gate and up in fp32, and where they lie in rows of h."""
    # two layouts of the packed projection
    gate_col, up_col = (2 * col, 2 * col + 1) if INTERLEAVED else (col, n + col)
    gate = load_tile(h_ptr, row, gate_col, 2 * n, mask)
    up = load_tile(h_ptr, row, up_col, 2 * n, mask)
    if bias_ptr is not None:
        gate += load_tile(bias_ptr, expert, gate_col, 2 * n, mask)
        up += load_tile(bias_ptr, expert, up_col, 2 * n, mask)
    return gate, up, gate_col, up_col


@jit
def _glu(
    h_ptr, bias_ptr, order_ptr, index_ptr, offs_ptr, y_ptr, n, E, alpha, limit, offset,
    INTERLEAVED: tl.constexpr, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row < tl.load(offs_ptr + E - 1)
    mask = here[:, None] & (col < n)[None, :]
    expert = row
    if bias_ptr is not None:
        expert = tl.load(index_ptr + tl.load(order_ptr + row, mask=here, other=0), mask=here, other=0).to(tl.int64)
    gate, up, _, _ = _gate_up(h_ptr, bias_ptr, row, col, expert, mask, n, INTERLEAVED)
    y = grouped_tma.gated(gate, up, alpha, limit, offset, ACT, y_ptr.dtype.element_ty)
    store_tile(y_ptr, row, col, n, y, mask)


@jit
def _glu_bwd(
    h_ptr, bias_ptr, order_ptr, index_ptr, offs_ptr, dy_ptr, w_ptr, dot_ptr, dh_ptr, wy_ptr, dw_ptr,
    M, n, E, alpha, limit, offset,
    INTERLEAVED: tl.constexpr, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For rows of an expert's activation y and its gradient dy, both without their weight w: the
    gradients of h and of w, and w y.

    dh may be h, and w y may take the place of dy.
    """
    row = rows_at(tl.program_id(0), BLOCK_M)
    here = row < tl.load(offs_ptr + E - 1)
    i = tl.load(order_ptr + row, mask=row < M, other=0)
    # what is read from rows of no expert reaches nothing: to wait for ``offs`` before the other
    # loads would take as long as they do
    w = tl.load(w_ptr + i, mask=row < M, other=0.0).to(tl.float32)[:, None]
    expert = row
    if bias_ptr is not None:
        expert = tl.load(index_ptr + i, mask=here, other=0).to(tl.int64)
    if limit is not None:
        limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = here[:, None] & (col < n)[None, :]
        inside = mask_of(row, M, col, n)
        gate, up, gate_col, up_col = _gate_up(h_ptr, bias_ptr, row, col, expert, inside, n, INTERLEAVED)
        if limit is not None:
            gate_out, up_out = gate > limit, tl.abs(up) > limit
            gate = tl.where(gate_out, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        # both from one evaluation
        a, da = act_and_slope(gate * alpha, ACT, h_ptr.dtype.element_ty == tl.float32)
        a /= alpha
        up += tl.cast(offset, tl.float32)
        if dh_ptr is not None or dw_ptr is not None:
            dy = load_tile(dy_ptr, row, col, n, inside)
            dw += dy * a * up
        if wy_ptr is not None:
            store_tile(wy_ptr, row, col, n, w * a * up, mask)
        if dh_ptr is not None:
            # the router's weight is applied here and not in a pass of its own
            dgate, dup = w * dy * up * da, w * dy * a
            if limit is not None:
                dgate, dup = tl.where(gate_out, 0.0, dgate), tl.where(up_out, 0.0, dup)
            store_tile(dh_ptr, row, gate_col, 2 * n, dgate, mask)
            store_tile(dh_ptr, row, up_col, 2 * n, dup, mask)
    if dw_ptr is not None:  # zero for the rows of no expert
        dw = tl.where(here, tl.sum(dw, axis=1), 0.0)
        if dot_ptr is not None:
            dw += tl.load(dot_ptr + row, mask=here, other=0.0)
        tl.store(dw_ptr + i, dw.to(dw_ptr.dtype.element_ty), mask=row < M)


@typed_launcher
def moe_route(index: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """The assignments, stably sorted by expert; the place of each assignment in that order; and
    the end of each expert's rows."""
    M, block_m = index.numel(), ROUTED if on_gpu(index) else 32
    new = lambda n: index.new_empty(n, dtype=torch.int32)
    order, position, offs = new(M), new(M), new(E)
    if tracing(index):
        return order, position, offs
    # blocks count, a prefix sum places them, the same blocks write: no atomics, one order
    blocks, tile = max(1, cdiv(M, block_m)), dict(BLOCK_M=block_m, BLOCK_E=next_power_of_2(E + 2), num_warps=4)
    counts = new((E + 1) * blocks)
    launch(_count, (blocks,), index, counts, M, E, **tile)
    launch(_place, (blocks,), index, counts.cumsum(0, dtype=torch.int32), order, position, offs, M, E, **tile)
    return order, position, offs


@typed_launcher
def moe_gather(
    x: Tensor, index: Tensor, order: Tensor, position: Tensor, offs: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The row of x (T, H) for each assignment, and its product with ``bias`` (E, H) in fp32,
    which is empty without a bias."""
    M, (tokens, H), (K, E) = order.shape[0], x.shape, (index.shape[1], offs.shape[0])
    y, dot = x.new_empty(M, H), x.new_empty(0 if bias is None else M, dtype=torch.float32)
    if tracing(x):
        return y, dot
    # these tiles and those below: 8 to 16 values per thread and rows in whole cache lines, because
    # memory traffic is the only cost; reasoned, not measured
    if bias is None:
        c = launch_config.tile("moe_spread", H, x.itemsize, elements=2048, max_block_n=2048)
        grid = cdiv(tokens, c.block_m), cdiv(H, c.block_n)
        launch(_spread, grid, x, position, offs, y, tokens, H, E, x.stride(0), K=K, **c.tile)
    else:
        c = launch_config.tile("moe_gather", H, x.itemsize, elements=4096, max_block_n=2048)
        launch(_gather, (cdiv(M, c.block_m),), x, order, offs, index, bias, y, dot, H, K, E, x.stride(0), **c.tile)
    return y, dot


@typed_launcher
def moe_combine(
    y: Tensor, index: Tensor, position: Tensor, offs: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    (tokens, K), H = index.shape, y.shape[1]
    out = y.new_empty(tokens, H)
    if not tracing(y):
        c = launch_config.tile("moe_combine", H, y.itemsize, elements=2048, max_block_n=1024)
        grid = cdiv(tokens, c.block_m), cdiv(H, c.block_n)
        launch(_combine, grid, y, position, offs, w, index, bias, out, tokens, H, offs.shape[0], K=K, **c.tile)
    return out


@typed_launcher
def moe_glu_fwd(
    h: Tensor, bias: Tensor | None, index: Tensor, order: Tensor, offs: Tensor, *form: ExpertForm
) -> Tensor:
    M, n = h.shape[0], h.shape[1] // 2
    y = h.new_empty(M, n)
    if not tracing(h):
        act, interleaved, *numbers = form
        c = launch_config.tile("moe_glu_fwd", n, h.itemsize, elements=2048, max_block_n=512)
        grid, how = (cdiv(M, c.block_m), cdiv(n, c.block_n)), dict(INTERLEAVED=interleaved, ACT=act)
        launch(_glu, grid, h, bias, order, index, offs, y, n, offs.shape[0], *numbers, **how, **c.tile)
    return y


@typed_launcher
def moe_up(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, index: Tensor, order: Tensor, offs: Tensor, need_h: bool,
    *form: ExpertForm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h, the product of sorted rows and gate_up, empty if it is not needed, and the activation:
    one kernel on Hopper, else two."""
    (M, _), twice_n, interleaved = x.shape, gate_up.shape[1], ExpertForm(*form).interleaved
    if tracing(x):
        return x.new_empty(M if need_h else 0, twice_n), x.new_empty(M, twice_n // 2)
    # the product and its activation in one kernel
    if grouped_tma.supported(x, gate_up.mT) and (interleaved or gate_up.is_contiguous()):
        h, y = x.new_empty(M if need_h else 0, twice_n), x.new_empty(M, twice_n // 2)
        grouped_tma.product(x, gate_up.mT, offs, y, h if need_h else None, bias, form)
        return h, y
    h = grouped_mm(x, gate_up.mT, offs)
    y = moe_glu_fwd(h, bias, index, order, offs, *form)
    return h if need_h else h.new_empty(0, twice_n), y


@launcher(
    "(Tensor(a!) dy, Tensor(b!) h, Tensor? bias, Tensor index, Tensor order, Tensor offs, Tensor w, Tensor? dot, "
    f"bool need_dh, bool need_wy, bool need_dw, {fields_of(ExpertForm)}) -> Tensor"
)
def moe_glu_bwd_(
    dy, h, bias, index, order, offs, w, dot, need_dh, need_wy, need_dw, act, interleaved, alpha, limit, offset
):
    """The gradient of w, empty if it is not needed. Overwrites h with its gradient and dy with
    the weighted activation, if these are needed."""
    M, n = h.shape[0], h.shape[1] // 2
    dw = w.new_empty(w.shape if need_dw else 0)
    if not tracing(h):
        c = launch_config.tile("moe_glu_bwd", n, h.itemsize, elements=2048, per_thread=8, max_block_n=256)
        results = h if need_dh else None, dy if need_wy else None, dw if need_dw else None
        tensors, form = (bias, order, index, offs, dy, w, dot, *results), dict(INTERLEAVED=interleaved, ACT=act)
        grid = (cdiv(M, c.block_m),)
        launch(_glu_bwd, grid, h, *tensors, M, n, offs.shape[0], alpha, limit, offset, **form, **c.tile)
    return dw


def _outer_like(p: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """a^T b for each expert, in the memory layout of the parameter ``p``, so that ``.grad`` can
    use it without a copy."""
    return grouped_outer(b, a, offs).mT if p.stride(1) == 1 else grouped_outer(a, b, offs)


def _dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


def _product(rows: Tensor, weight: Tensor | Weight, offs: Tensor, turned: bool = False) -> Tensor:
    """Sorted rows times the experts' W^T, or, ``turned``, times W."""
    if isinstance(weight, MXFP4Experts | Float8Blocks) and in_parts(weight, rows.dtype):
        if not turned and isinstance(weight, Float8Blocks) and decoded_inside(weight, rows):
            return grouped_mm_blocks(rows, weight.q, weight.scale, offs)
        return product_in_parts(rows, weight, offs, turned)
    # a stored weight is dense for this product alone
    w = _dense(weight, rows.dtype)
    return grouped_mm(rows, w if turned else w.mT, offs)


def _thin(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The matrices of an adapter as the kernels read them, (E, r, K), in this dtype."""
    if t is None or t.dtype == dtype:
        return t if t is None else t.contiguous()
    return t.to(dtype, memory_format=torch.contiguous_format)


def _hidden(rows: Tensor, gate_up: Tensor | Weight, xa: Tensor | None, b, scale: float, offs: Tensor) -> Tensor:
    """h, the product of sorted rows and gate_up with its adapter, if it has one. ``xa``: the
    thin product of these rows and a."""
    h = _product(rows, gate_up, offs)
    if xa is not None:
        add_thin_(h, xa, b, offs, scale)
    return h


class MoEFunction(torch.autograd.Function):
    """``apply(x, topk_index, topk_weight, gate_up, down, gate_up_bias, down_bias, gate_up_a,
    gate_up_b, down_a, down_b, scales, form, keep)``.

    gate_up and down: a tensor, or a ``Weight`` that is made dense for each product. A pair of
    adapters may be None; each b is transposed, (E, r, N). ``scales``: of the adapters of gate_up and
    of down. ``form``: act, interleaved, alpha, limit and offset. ``keep``: whether h is kept for the
    backward, which computes it again otherwise.
    """

    @staticmethod
    def forward(
        ctx, x, topk_index, topk_weight, gate_up, down, gate_up_bias, down_bias,
        gate_up_a, gate_up_b, down_a, down_b, scales, form, keep,
    ):  # fmt: skip
        x, index, w, dtype = rows_of(x), topk_index.contiguous(), topk_weight.contiguous(), x.dtype
        bias, last_bias = (t if t is None else t.contiguous() for t in (gate_up_bias, down_bias))
        # their gradients come in these dtypes
        adapters = gate_up_a, gate_up_b, down_a, down_b
        ctx.dtypes = [None if t is None else t.dtype for t in adapters]
        a, b, last_a, last_b = (_thin(t, dtype) for t in adapters)
        order, position, offs = moe_route(index, gate_up.shape[0])
        rows = lambda: moe_gather(x, index, order, position, offs, None)[0]  # not kept beyond the call that gets them
        xa = None
        if a is None and not in_parts(gate_up, dtype):
            h, z = moe_up(rows(), _dense(gate_up, dtype), bias, index, order, offs, keep, *form)
        else:
            xa = None if a is None else thin_rows(x, order, index.shape[1], a, offs, 1.0)
            h = _hidden(rows(), gate_up, xa, b, scales[0], offs)
            z = moe_glu_fwd(h, bias, index, order, offs, *form)
            # the backward computes it again
            h = h if keep else h.new_empty(0, h.shape[1])
        y = _product(z, down, offs)
        if last_a is not None:
            add_thin_(y, thin_rows(z, None, 1, last_a, offs, 1.0), last_b, offs, scales[1])
        ctx.scales, ctx.form, ctx.keep, ctx.unshared = scales, form, keep, saving_hooks()[1] in HARMLESS
        ctx.stored = [None if isinstance(weight, Tensor) else weight for weight in (gate_up, down)]
        # a ``Weight`` is no tensor, and has no gradient
        weights = (weight if stored is None else None for weight, stored in zip((gate_up, down), ctx.stored))
        thin = a, b, last_a, last_b, xa
        ctx.save_for_backward(x, *weights, *thin, index, w, bias, last_bias, h, order, position, offs)
        return moe_combine(y, index, position, offs, w, last_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        h_is_ours = ctx.unshared and not graph_is_kept()
        x, gate_up, down, a, b, last_a, last_b, xa, index, w, bias, last_bias, h, *route = ctx.saved_tensors
        order, position, offs = route
        need_x, _, need_w, need_gate_up, need_down, need_bias, need_last_bias, *thin = ctx.needs_input_grad[:11]
        need_a, need_b, need_last_a, need_last_b = thin
        (scale, last_scale), K = ctx.scales, index.shape[1]
        weights = [weight if stored is None else stored for weight, stored in zip((gate_up, down), ctx.stored)]
        if not ctx.keep:
            h, h_is_ours = _hidden(moe_gather(x, index, *route, None)[0], weights[0], xa, b, scale, offs), True
        need_dh = need_x or need_gate_up or need_bias or need_a or need_b
        # dy is the gradient of the activation; wy the activation with the router's weight
        need_dy, need_wy = need_dh or need_w, need_down or need_last_a or need_last_b
        dx = dgate_up = ddown = dbias = dlast_bias = da = db = dlast_a = dlast_b = dya = dxa = None
        dout = rows_of(dout)
        # the gradient of each assignment, without its weight so far
        dz, dot = moe_gather(dout, index, *route, last_bias if need_w else None)
        if need_dy:
            dy = _product(dz, weights[1], offs, turned=True)
        else:
            dy = h.new_empty((h.shape[0], h.shape[1] // 2) if need_wy else 0)
        if last_a is not None and (need_dy or need_last_a):
            dya = thin_rows(dout, order, K, last_b, offs, last_scale)
            if need_dy:
                add_thin_(dy, dya, last_a, offs, 1.0)
        # without the router's weights so far: this pass applies them, and leaves in dy the weighted
        # activation and in dh the gradient of h
        dh, dot = h if h_is_ours or not need_dh else h.clone(), dot if need_w and last_bias is not None else None
        dw = moe_glu_bwd_(dy, dh, bias, index, order, offs, w, dot, need_dh, need_wy, need_w, *ctx.form)
        if need_down:
            ddown = _outer_like(down, dz, dy, offs).to(down.dtype)
        if need_last_bias:
            dlast_bias = grouped_sum(dz, w.flatten()[order], offs)
        if need_last_a:
            dlast_a = thin_outer(dya, dy, None, 1, offs, 1.0, ctx.dtypes[2])
        if need_last_b:
            # the thin product of down again, now of the weighted activation
            ya = thin_rows(dy, None, 1, last_a, offs, 1.0)
            dlast_b = thin_outer(ya, dout, order, K, offs, last_scale, ctx.dtypes[3])
        del dz, dy  # free them before the other half allocates as much
        if need_bias:
            dbias = grouped_sum(dh, None, offs)
        # the sorted rows again, which were not saved
        if need_gate_up:
            dgate_up = _outer_like(gate_up, dh, moe_gather(x, index, *route, None)[0], offs).to(gate_up.dtype)
        if need_b:
            db = thin_outer(xa, dh, None, 1, offs, scale, ctx.dtypes[1])
        if a is not None and (need_x or need_a):
            dxa = thin_rows(dh, None, 1, b, offs, scale)
        if need_a:
            da = thin_outer(dxa, x, order, K, offs, 1.0, ctx.dtypes[0])
        if need_x:
            dxs = _product(dh, weights[0], offs, turned=True)
            if dxa is not None:
                add_thin_(dxs, dxa, a, offs, 1.0)
            dx = moe_combine(dxs, index, position, offs, None, None)
        of_weights = dw if need_w else None, dgate_up, ddown, dbias, dlast_bias, da, db, dlast_a, dlast_b
        return dx, None, *of_weights, None, None, None


def _joined(adapters: Sequence[Adapter]) -> tuple[Tensor | None, Tensor | None, float]:
    """Several adapters of one weight as one adapter, whose rank is the sum of theirs: its two
    matrices and its scale."""
    if len(adapters) < 2:
        return (adapters[0].a, adapters[0].b, adapters[0].scale) if adapters else (None, None, 1.0)
    return torch.cat([one.a for one in adapters], 1), torch.cat([one.b * one.scale for one in adapters], 2), 1.0


def adapted_moe(
    x: Tensor, gate_up: Tensor | Weight, down: Tensor | Weight, topk_index: Tensor, topk_weight: Tensor,
    gate_up_adapters: Sequence[Adapter] = (), down_adapters: Sequence[Adapter] = (), *,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, act: str = "silu", interleaved: bool = False,
    alpha: float = 1.0, limit: float | None = None, offset: float = 0.0, recompute: bool = False,
) -> Tensor:  # fmt: skip
    """``moe`` by kernels, for weights (E, N, K) with any storage and any number of adapters: a (E,
    r, K), b (E, N, r), without dropout and bias.

    All products are in the dtype of x.
    """
    # several adapters are one of larger rank
    a, b, scale = _joined(gate_up_adapters)
    last_a, last_b, last_scale = _joined(down_adapters)
    biases = (t if t is None else t.to(x.dtype) for t in (gate_up_bias, down_bias))
    pairs = a, b if b is None else b.mT, last_a, last_b if last_b is None else last_b.mT
    tensors = gate_up, down, *biases, *pairs
    given = (x, topk_weight, *tensors)
    keep = not recompute and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    form = act, interleaved, alpha, limit, offset
    return MoEFunction.apply(x, topk_index, topk_weight, *tensors, (scale, last_scale), form, keep)


class LigerFusedMoEFunction:
    """``moe`` without its checks."""

    @staticmethod
    def apply(
        x, gate_up_proj, down_proj, top_k_index, top_k_weights,
        gate_up_bias=None, down_bias=None, act="silu", interleaved=False, alpha=1.0, limit=None, offset=0.0, keep=True,
    ):  # fmt: skip
        form = dict(act=act, interleaved=interleaved, alpha=alpha, limit=limit, offset=offset, recompute=not keep)
        biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        return adapted_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights, **biases, **form)


def _cost(x, gate_up, down, topk_index, topk_weight, gate_up_bias=None, down_bias=None, adapters=(), **_) -> Cost:
    m = int(((topk_index >= 0) & (topk_index < gate_up.shape[0])).sum())
    (_, twice_n, H), n = gate_up.shape, down.shape[2]
    given = [t for t in (x, gate_up, down, topk_weight, gate_up_bias, down_bias) if t is not None]
    trained = [t for t in given if t.requires_grad]
    first = any(t is not None and t.requires_grad for t in (x, gate_up, gate_up_bias, *adapters))
    products = [
        ((m, n, H), first),
        ((H, n, m), down.requires_grad),
        ((m, H, twice_n), x.requires_grad),
        ((twice_n, H, m), gate_up.requires_grad),
    ]
    return Cost(
        nbytes(*given, topk_index, x),
        nbytes(*given, topk_index, x, *trained),
        gemms=([(m, twice_n, H), (m, H, n)], [product for product, needed in products if needed]),
    )


def _shares(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).softmax(-1)


def _routed(
    tokens: int, K: int, H: int, I: int, E: int, *,
    used: int | None = None, weight: torch.dtype | None = None, grads: str = "x w1 w2 w",
) -> dict:  # fmt: skip
    """Arguments of ``moe``. Each token chooses K different experts among the first ``used``."""

    def choices(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.rand(shape[0], used or E, dtype=dtype).argsort(-1)[:, :K]

    x, w1, w2, w = (name in grads.split() for name in ("x", "w1", "w2", "w"))
    return dict(
        x=T((tokens, H), grad=x),
        gate_up=T((E, 2 * I, H), _scaled, w1),
        down=T((E, H, I), _scaled, w2),
        topk_index=T((tokens, K), choices, dtype=torch.int64),
        topk_weight=T((tokens, K), _shares, w, weight),
    )


def _some_invalid(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 4, shape).to(dtype)


def _tens(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values that put gate and up clearly below or above a limit of 7, so that rounding never
    decides."""
    return torch.randint(-1, 2, shape).to(dtype) * 12


_GPT_OSS = dict(interleaved=True, alpha=1.702, limit=7.0, offset=1.0)


def check(
    op: str, x: Tensor, gate_up: Tensor, down: Tensor, topk_index: Tensor, topk_weight: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, alpha: float, limit: float | None,
) -> torch.dtype:  # fmt: skip
    """Check the arguments of the operator ``op``. Returns the dtype of the products: autocast's
    if it is on, else x's."""
    checks.floating(op, x=x)
    checks.dims(op, "(T, H)", x=x)
    tokens, H = x.shape
    if gate_up.ndim != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != H:
        raise ValueError(f"{op}: gate_up must have shape (E, 2 I, {H}), got {tuple(gate_up.shape)}")
    E, n = gate_up.shape[0], gate_up.shape[1] // 2
    checks.integers(op, (tokens, "K"), topk_index=topk_index)
    checks.floating_shape(op, topk_index.shape, topk_weight=topk_weight)
    check_act(op, act, limit, alpha)
    # under autocast, weights of any dtype are cast
    autocast = autocast_dtype(x)
    given = {
        "gate_up": (gate_up, (E, 2 * n, H)),
        "down": (down, (E, H, n)),
        "gate_up_bias": (gate_up_bias, (E, 2 * n)),
        "down_bias": (down_bias, (E, H)),
    }
    for name, (p, shape) in given.items():
        checks.shape(op, shape, **{name: p})
        if p is not None and p.dtype != x.dtype and autocast is None:
            raise ValueError(f"{op}: {name} must have x's dtype, {x.dtype}, got {p.dtype}")
    return x.dtype if autocast is None else autocast


@op(
    reference=reference,
    cases=[
        Case("qwen3", _routed(20, 2, 40, 24, 3, weight=torch.float32)),
        Case("odd", _routed(5, 2, 19, 13, 3, grads="x w1")),
        Case("one-token", _routed(1, 1, 8, 8, 2, grads="x w1 w2")),
        Case("one-expert", _routed(36, 1, 16, 16, 3, used=1, grads="w1 w2")),
        # index -1 or E: an expert of another expert-parallel rank
        Case(
            "no-expert",
            _routed(17, 2, 16, 16, 3, grads="x w") | dict(topk_index=T((17, 2), _some_invalid, dtype=torch.int64)),
        ),
        Case("recomputed", _routed(12, 2, 24, 16, 3) | dict(recompute=True)),
        Case(
            "gpt-oss",
            _routed(9, 2, 16, 24, 2, grads="w")
            | dict(gate_up_bias=T((2, 48), _tens), down_bias=T((2, 16)), **_GPT_OSS),
        ),
    ],
    cost=_cost,
)
def moe(
    x: Tensor, gate_up: Tensor, down: Tensor, topk_index: Tensor, topk_weight: Tensor, *,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, act: str = "silu", interleaved: bool = False,
    alpha: float = 1.0, limit: float | None = None, offset: float = 0.0, recompute: bool = False,
) -> Tensor:  # fmt: skip
    """The weighted sum of the K experts of each token. Differentiable in everything but the index.
    Returns (T, H) in x's dtype.

    x (T, H), gate_up (E, 2 I, H), down (E, H, I), gate_up_bias (E, 2 I), down_bias (E, H): one
    dtype, which is autocast's if it is on; any strides, so pass weights stored as (E, H, 2 I) as
    ``gate_up.mT``. topk_index (T, K): experts; an index outside 0 to E - 1 contributes nothing.
    topk_weight
    (T, K): any floating dtype. The activation is ``act(alpha * gate) / alpha``, act as in ``glu``.
    gate and up lie side by side, or ``interleaved``. ``limit`` clamps gate from above and up on
    both sides; ``offset`` is then added to up. With ``recompute``, nothing but x is saved for the
    backward, which repeats the product of x and gate_up.
    """
    dtype = check("moe", x, gate_up, down, topk_index, topk_weight, gate_up_bias, down_bias, act, alpha, limit)
    x, gate_up, down, topk_index = x.to(dtype), gate_up.to(dtype), down.to(dtype), as_index(topk_index)
    gate_up_bias, down_bias = (b if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    form = dict(act=act, interleaved=interleaved, alpha=alpha, limit=limit, offset=offset)
    given = dict(gate_up_bias=gate_up_bias, down_bias=down_bias, **form)
    if not use_kernels(x):
        return reference(x, gate_up, down, topk_index, topk_weight, **given)
    return adapted_moe(x, gate_up, down, topk_index, topk_weight, recompute=recompute, **given)


def compute_routing_metadata(topk_indices: Tensor, E: int, block_m_token: int = 128) -> tuple[Tensor, ...]:
    """For choices (M, K) among E experts, returns int32: tokens per expert (E,); the start of each
    expert in the sorted order (E + 1,); for each place in it the token and the choice, and the
    place of each choice (M K,); first row and expert of each tile of ``block_m_token`` rows. Waits
    for the tile count."""
    flat, K = topk_indices.flatten().long(), topk_indices.shape[1]
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=E)
    start = F.pad(counts.cumsum(0), (1, 0))
    tiles = -(counts // -block_m_token)
    expert = torch.arange(E, device=flat.device).repeat_interleave(tiles)
    first = torch.arange(len(expert), device=flat.device) - (tiles.cumsum(0) - tiles)[expert]
    return tuple(
        t.int()
        for t in (counts, start, order // K, order, order.argsort(), start[expert] + first * block_m_token, expert)
    )
