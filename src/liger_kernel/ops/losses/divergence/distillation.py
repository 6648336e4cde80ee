"""The row kernels of distillation: from the logits of a student and a teacher's, or its K likeliest
tokens, to losses and the gradient in place.

Formulas and letters are those of ``linear_divergence``.

A teacher is given by its logits (``_rows``), by its probabilities (``_rows`` of kind "kl"), or by
the log-probabilities of its K likeliest tokens (``_topk_rows``); ``row_kernel`` chooses among
these, and without kernels does the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import config
from liger_kernel.ops._core.operator import acc, launch, tracing, use_kernels
from liger_kernel.ops._core.tl import jit, next_power_of_2, tl
from liger_kernel.ops.losses.cross_entropy_rows import Loss, Rows
from liger_kernel.ops.losses.cross_entropy_rows import row_kernel as cross_entropy_rows
from liger_kernel.ops.losses.divergence import logit_divergence
from liger_kernel.ops.losses.divergence.by_element import TINY as SMALLEST
from liger_kernel.ops.losses.divergence.by_element import at_least, derived, elements, joined, online, times
from liger_kernel.ops.losses.divergence.logit_divergence import row_kernel as divergence_rows

KINDS = (*logit_divergence.KINDS, "cosine")
TINY = 1e-12  # norms below count as this, in "cosine"


def _topk_teacher(log_p: Tensor, index: Tensor, V: int, dtype: torch.dtype, tail: bool) -> tuple[Tensor, ...]:
    """The column of each index (V: no token), log p and p (M, K), and the mass of the others (M,).

    All masses of a row without tokens are 0.
    """
    known = (index >= 0) & (index < V)
    log_p = log_p.to(dtype).where(known, float("-inf"))
    if not tail:
        log_p = log_p.log_softmax(-1).where((log_p != float("-inf")).any(-1, keepdim=True), float("-inf"))
    p, count = log_p.exp(), known.sum(-1)
    rest = (1 - p.sum(-1)).clamp(min=0).where((count > 0) & (count < V) & tail, 0)
    return index.where(known, V).long(), log_p, p, rest


def topk_forward_kl(z: Tensor, log_p: Tensor, index: Tensor, temperature: float, tail: bool) -> Tensor:
    """The loss (M,) of logits z (M, V) and log-probabilities (M, K), in torch."""
    s = F.pad(z.to(acc(z.dtype)) / temperature, (0, 1), value=float("-inf"))
    at, log_p, p, rest = _topk_teacher(log_p, index, z.shape[-1], s.dtype, tail)
    x = s.log_softmax(-1)
    kl = (p * (log_p - x.gather(-1, at)).where(p != 0, 0)).sum(-1)
    some = rest != 0
    log_rest = x.scatter(-1, at, float("-inf")).where(some[:, None], 0).logsumexp(-1)
    return kl + rest * (rest.where(some, 1).log() - log_rest.where(some, 0))


def given_kl(z: Tensor, p: Tensor, temperature: float, eps: float) -> Tensor:
    """The loss (M,) of logits z and probabilities p (M, V), in torch."""
    return elements((z.to(acc(z.dtype)) / temperature).log_softmax(-1), p, "kl", eps=eps).sum(-1)


@dataclass(frozen=True)
class Distillation:
    """The numbers that define a row's loss, apart from its tensors. ``kind``: one of ``KINDS``,
    or "kl" for a teacher given by probabilities."""

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    weight_hard: float = 0.0
    weight_soft: float = 1.0
    tail: bool = True
    ignore_index: int = -100
    reduction: str = "mean"
    eps: float = 1e-10

    def divergence(self) -> logit_divergence.Divergence:
        return logit_divergence.Divergence(self.kind, self.beta, self.temperature, self.ignore_index)


# The same numbers in a launcher's schema, in the order of the fields of ``Distillation``.
NUMBERS = (
    "str kind, float beta, float temperature, float weight_hard, float weight_soft, bool tail, int "
    "ignore_index, str reduction, float eps"
)


@jit
def _load(z_ptr, bias_ptr, start, V, origin, HAS_BIAS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """A block of one row's logits less ``origin``, (LANES, VEC): what a thread reads at once is
    a row of it. -inf outside."""
    col = start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    return col, _at(z_ptr, bias_ptr, col, col < V, HAS_BIAS) - origin


@jit
def _at(z_ptr, bias_ptr, col, mask, HAS_BIAS: tl.constexpr):
    """Logits of one row where the ``mask`` is, -inf elsewhere."""
    z = tl.load(z_ptr + col, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return z


@jit
def _origin(z_ptr, bias_ptr, V, HAS_BIAS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """The first block's maximum: softmax does not see what is subtracted from all logits, the
    rounding of their differences does."""
    _, z = _load(z_ptr, bias_ptr, 0, V, 0.0, HAS_BIAS, LANES, VEC)
    top = tl.max(tl.max(z, axis=1), axis=0)
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@jit
def _with(lse, x):
    """logsumexp of what has ``lse`` and of x."""
    top = tl.maximum(lse, tl.max(x, axis=0))
    return top + tl.log(tl.exp(lse - top) + tl.sum(tl.exp(x - top), axis=0))


@jit
def _ignore(soft_ptr, hard_ptr, dz_ptr, row, V, HARD: tl.constexpr, NEED_DZ: tl.constexpr, BLOCK: tl.constexpr):
    """Nothing of a row that does not count."""
    tl.store(soft_ptr + row, 0.0)
    if HARD:
        tl.store(hard_ptr + row, 0.0)
    if NEED_DZ:
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(dz_ptr + col, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=col < V)


@jit
def _factor(norm_ptr, g_ptr, row, HAS_NORM: tl.constexpr, HAS_G: tl.constexpr):
    """What multiplies the gradient of a row."""
    factor = 1.0
    if HAS_NORM:
        factor *= 1.0 / tl.load(norm_ptr).to(tl.float32)
    if HAS_G:
        factor *= tl.load(g_ptr + row).to(tl.float32)
    return factor


@jit
def _rows(
    s_ptr,
    t_ptr,
    s_bias_ptr,
    t_bias_ptr,
    target_ptr,
    norm_ptr,
    g_ptr,
    g_hard_ptr,
    soft_ptr,
    hard_ptr,
    dz_ptr,
    V,
    s_stride,
    t_stride,
    dz_stride,
    ignore_index,
    beta,
    eps,
    scale,
    weight_hard,
    weight_soft,
    KIND: tl.constexpr,
    S_BIAS: tl.constexpr,
    T_BIAS: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    HARD: tl.constexpr,
    HARD_LSE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_G_HARD: tl.constexpr,
    NEED_DZ: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, as in ``logit_divergence``, the hard loss in the same sweeps. HARD_LSE:
    it has a normaliser of its own."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    t_ptr += row * t_stride
    dz_ptr += row * dz_stride
    beta, eps, scale = tl.cast(beta, tl.float32), tl.cast(eps, tl.float32), tl.cast(scale, tl.float32)
    LANES: tl.constexpr = BLOCK // VEC
    blocks = tl.cdiv(V, BLOCK)
    ignored = False
    target = 0
    if HAS_TARGET:
        target = tl.load(target_ptr + row)
        ignored = target == ignore_index

    if ignored:
        _ignore(soft_ptr, hard_ptr, dz_ptr, row, V, HARD, NEED_DZ, BLOCK)
    else:
        s_origin, t_origin = _origin(s_ptr, s_bias_ptr, V, S_BIAS, LANES, VEC), 0.0
        if KIND != "kl":
            t_origin = _origin(t_ptr, t_bias_ptr, V, T_BIAS, LANES, VEC)
        if KIND == "cosine":  # sees shifts
            s_origin, t_origin = 0.0, 0.0
        inside = (target >= 0) & (target < V)
        y = tl.where(inside, target, 0).to(tl.int32)
        z_y = _at(s_ptr, s_bias_ptr, y, y >= 0, S_BIAS) - s_origin if HARD else 0.0
        s_top = tl.full((LANES,), -float("inf"), tl.float32)
        t_top = tl.full((LANES,), -float("inf"), tl.float32)
        h_top = tl.full((LANES,), -float("inf"), tl.float32)
        s_sum = tl.zeros((LANES,), tl.float32)
        t_sum = tl.zeros((LANES,), tl.float32)
        h_sum = tl.zeros((LANES,), tl.float32)
        gap = tl.zeros((LANES,), tl.float32)  # what a KL consists of; of cosine the product
        for i in range(0, blocks):
            col, z = _load(s_ptr, s_bias_ptr, i * BLOCK, V, s_origin, S_BIAS, LANES, VEC)
            if KIND == "kl":
                p = tl.load(t_ptr + col, mask=col < V, other=0.0).to(tl.float32)
            else:
                col, t = _load(t_ptr, t_bias_ptr, i * BLOCK, V, t_origin, T_BIAS, LANES, VEC)
                t *= scale
            if KIND == "kl":
                s = z * scale
                s_top, s_sum, s_e, s_rescale = online(s, s_top, s_sum)
                t_sum += tl.sum(p, axis=1)
                gap += tl.sum(tl.where(p == 0.0, 0.0, p * (tl.log(at_least(p, eps)) - s)), axis=1)
            elif KIND == "cosine":
                a, b = tl.where(col < V, z, 0.0), tl.where(col < V, t, 0.0)
                gap += tl.sum(a * b, axis=1)
                s_sum += tl.sum(a * a, axis=1)
                t_sum += tl.sum(b * b, axis=1)
            else:
                s = z * scale
                s_top, s_sum, s_e, s_rescale = online(s, s_top, s_sum)
                t_top, t_sum, t_e, t_rescale = online(t, t_top, t_sum)
                if KIND == "forward_kl":
                    gap = times(gap, t_rescale) + tl.sum(times(t - s, t_e), axis=1)
                elif KIND == "reverse_kl":
                    gap = times(gap, s_rescale) + tl.sum(times(s - t, s_e), axis=1)
            if HARD_LSE:
                h_top, h_sum, _e, _r = online(z, h_top, h_sum)

        h_lse = 0.0
        if HARD_LSE:
            h_lse, _w = joined(h_top, h_sum)
        if KIND == "cosine":
            s_norm = tl.maximum(tl.sqrt(tl.sum(s_sum, axis=0)), 1e-12)
            t_norm = tl.maximum(tl.sqrt(tl.sum(t_sum, axis=0)), 1e-12)
            mean = tl.sum(gap, axis=0) / s_norm / t_norm
            loss = 1.0 - mean
        else:
            s_lse, s_weight = joined(s_top, s_sum)
            if KIND == "kl":
                mean, t_lse = tl.sum(t_sum, axis=0), 0.0  # of probabilities that need not sum to 1
            else:
                t_lse, t_weight = joined(t_top, t_sum)
            if HARD and not HARD_LSE:
                h_lse = s_lse
            if KIND == "kl":
                loss = tl.sum(gap, axis=0) + mean * s_lse
            elif KIND == "forward_kl":
                mean = tl.sum(times(gap, t_weight), axis=0)
                loss = mean + (s_lse - t_lse)
            elif KIND == "reverse_kl":
                mean = tl.sum(times(gap, s_weight), axis=0)
                loss = mean + (t_lse - s_lse)
            else:
                losses = tl.zeros((LANES,), tl.float32)
                g_sums = tl.zeros((LANES,), tl.float32)
                for i in range(0, blocks):
                    start = (blocks - 1 - i) * BLOCK
                    col, s = _load(s_ptr, s_bias_ptr, start, V, s_origin, S_BIAS, LANES, VEC)
                    col, t = _load(t_ptr, t_bias_ptr, start, V, t_origin, T_BIAS, LANES, VEC)
                    loss_block, g, q = derived(s * scale - s_lse, t * scale - t_lse, beta, KIND)
                    losses += tl.sum(loss_block, axis=1)
                    if NEED_DZ:
                        g_sums += tl.sum(g, axis=1)
                loss, g_sum = tl.sum(losses, axis=0), tl.sum(g_sums, axis=0)

        tl.store(soft_ptr + row, loss)
        poison = tl.where(inside, 1.0, float("nan"))
        if HARD:
            tl.store(hard_ptr + row, poison * (h_lse - z_y))
        if NEED_DZ:
            factor = _factor(norm_ptr, g_ptr, row, HAS_NORM, HAS_G)
            soft, hard = factor * weight_soft * scale, factor * weight_hard * poison
            if HAS_G_HARD:
                hard = tl.load(g_hard_ptr + row).to(tl.float32) * weight_hard * poison
            for i in range(0, blocks):
                start = (i if KIND == "jsd" or KIND == "tvd" else blocks - 1 - i) * BLOCK
                col, z = _load(s_ptr, s_bias_ptr, start, V, s_origin, S_BIAS, LANES, VEC)
                if KIND == "kl":
                    p = tl.load(t_ptr + col, mask=col < V, other=0.0).to(tl.float32)
                else:
                    col, t = _load(t_ptr, t_bias_ptr, start, V, t_origin, T_BIAS, LANES, VEC)
                    t *= scale
                if KIND == "kl":
                    dz = mean * tl.exp(z * scale - s_lse) - p
                elif KIND == "cosine":
                    dz = (z / s_norm * mean - t / t_norm) / s_norm
                else:
                    s = z * scale
                    x, y_log = s - s_lse, t - t_lse
                    if KIND == "forward_kl":
                        dz = tl.exp(x) - tl.exp(y_log)
                    elif KIND == "reverse_kl":  # of the logits themselves: rounding of the normalisers would not cancel
                        dz = times(s - t - mean, tl.exp(x))
                    else:
                        _l, g, q = derived(x, y_log, beta, KIND)
                        dz = g - q * g_sum
                dz *= soft
                if HARD:
                    dz += hard * (tl.exp(z - h_lse) - tl.where(col == y, 1.0, 0.0))
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=col < V)


@jit
def _topk_rows(
    s_ptr,
    log_p_ptr,
    index_ptr,
    s_bias_ptr,
    target_ptr,
    norm_ptr,
    g_ptr,
    soft_ptr,
    hard_ptr,
    dz_ptr,
    V,
    K,
    s_stride,
    dz_stride,
    ignore_index,
    scale,
    weight_hard,
    weight_soft,
    TAIL: tl.constexpr,
    S_BIAS: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    HARD: tl.constexpr,
    HARD_LSE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_G: tl.constexpr,
    NEED_DZ: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row a program: the K tokens are taken out of z (which becomes -inf there), so that the
    mass of the others is a sum and no difference."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    dz_ptr += row * dz_stride
    scale = tl.cast(scale, tl.float32)
    LANES: tl.constexpr = BLOCK // VEC
    blocks = tl.cdiv(V, BLOCK)
    ignored = False
    target = 0
    if HAS_TARGET:
        target = tl.load(target_ptr + row)
        ignored = target == ignore_index

    if ignored:
        _ignore(soft_ptr, hard_ptr, dz_ptr, row, V, HARD, NEED_DZ, BLOCK)
    else:
        lane = tl.arange(0, BLOCK_K)
        index = tl.load(index_ptr + row * K + lane, mask=lane < K, other=-1)
        known = (index >= 0) & (index < V)
        index = tl.where(known, index, 0)
        log_p = tl.load(log_p_ptr + row * K + lane, mask=known, other=-float("inf")).to(tl.float32)
        origin = _origin(s_ptr, s_bias_ptr, V, S_BIAS, LANES, VEC)
        z_k = _at(s_ptr, s_bias_ptr, index, known, S_BIAS) - origin
        inside = (target >= 0) & (target < V)
        y = tl.where(inside, target, 0).to(tl.int32)
        z_y = _at(s_ptr, s_bias_ptr, y, y >= 0, S_BIAS) - origin if HARD else 0.0
        tl.debug_barrier()
        tl.store(s_ptr + index, tl.full((BLOCK_K,), -float("inf"), s_ptr.dtype.element_ty), mask=known)
        tl.debug_barrier()

        top = tl.full((LANES,), -float("inf"), tl.float32)
        h_top = tl.full((LANES,), -float("inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        h_total = tl.zeros((LANES,), tl.float32)
        for i in range(0, blocks):
            col, z = _load(s_ptr, s_bias_ptr, i * BLOCK, V, origin, S_BIAS, LANES, VEC)
            top, total, _e, _r = online(z * scale, top, total)
            if HARD_LSE:
                h_top, h_total, _e, _r = online(z, h_top, h_total)
        s_k = z_k * scale
        others, _w = joined(top, total)
        lse = _with(others, s_k)
        h_lse = lse
        if HARD_LSE:
            h_others, _w = joined(h_top, h_total)
            h_lse = _with(h_others, z_k)

        rest = 0.0
        if not TAIL:  # a row without tokens keeps p = 0
            largest = tl.max(log_p, axis=0)
            log_p -= tl.where(largest == -float("inf"), 0.0, largest)
            total_p = tl.sum(tl.exp(log_p), axis=0)
            log_p -= tl.where(total_p == 0.0, 0.0, tl.log(total_p))
        p = tl.exp(log_p)
        mass = tl.sum(p, axis=0)
        if TAIL:
            rest = tl.where(tl.sum(known.to(tl.int32), axis=0) < V, tl.maximum(1.0 - mass, 0.0), 0.0)
        x_k = s_k - lse
        loss = tl.sum(tl.where(p == 0.0, 0.0, p * (log_p - x_k)), axis=0)
        if TAIL:
            loss += tl.where(rest == 0.0, 0.0, rest * (tl.log(rest) - (others - lse)))
        tl.store(soft_ptr + row, loss)
        poison = tl.where(inside, 1.0, float("nan"))
        if HARD:
            tl.store(hard_ptr + row, poison * (h_lse - z_y))
        if NEED_DZ:
            factor = _factor(norm_ptr, g_ptr, row, HAS_NORM, HAS_G)
            soft, hard = factor * weight_soft * scale, factor * weight_hard * poison
            mass += rest
            others = tl.where(others == -float("inf"), 0.0, others)
            for i in range(0, blocks):
                col, z = _load(s_ptr, s_bias_ptr, (blocks - 1 - i) * BLOCK, V, origin, S_BIAS, LANES, VEC)
                s = z * scale
                dz = soft * (mass * tl.exp(s - lse) - rest * tl.exp(s - others))
                if HARD:
                    dz += hard * (tl.exp(z - h_lse) - tl.where(col == y, 1.0, 0.0))
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=col < V)
            tl.debug_barrier()
            dz_k = soft * (mass * tl.exp(x_k) - p)
            if HARD:
                dz_k += hard * (tl.exp(z_k - h_lse) - tl.where(index == y, 1.0, 0.0))
            tl.store(dz_ptr + index, dz_k.to(dz_ptr.dtype.element_ty), mask=known)


def row_kernel(
    z: Tensor,
    t,
    target,
    s: Distillation,
    *,
    soft,
    hard,
    bias=None,
    teacher_bias=None,
    dz=None,
    norm=None,
    g=None,
    g_hard=None,
) -> None:
    """Per-row losses of logits z (M, V) into ``soft`` and ``hard`` (empty without a hard loss) and
    the gradient into ``dz``, which may be z itself.

    ``t``: the teacher's logits, of kind "kl" its probabilities, or log-probabilities and indices
    (M, K). The biases (V,) are added first; z is spent.
    The gradient is multiplied by ``g`` (M,) and divided by ``norm``; with ``g_hard`` (M,), which
    excludes a ``norm``, the hard loss' own is by that.
    """
    if tracing(z):
        return
    topk = isinstance(t, tuple)
    if (
        not topk
        and bias is None
        and teacher_bias is None
        and s.kind not in ("cosine", "kl")
        and not s.weight_hard
        and s.weight_soft == 1.0
    ):
        return divergence_rows(z, t, s.divergence(), labels=target, out=soft, dz=dz, norm=norm, g=g)
    if not (use_kernels(z) and (topk or use_kernels(t))):
        return _rows_in_torch(z, t, target, s, soft, hard, bias, teacher_bias, dz, norm, g, g_hard)
    (M, V), scale = z.shape, 1.0 if s.kind == "cosine" else 1 / s.temperature
    # more columns at once spill registers in jsd with a hard loss
    itemsize = max(z.itemsize, 0 if topk else t.itemsize)
    c = config.tile("linear_divergence", V, itemsize, elements=1, max_block_n=8192 // itemsize, per_thread=8)
    given = lambda a: z if a is None else a  # a pointer for arguments that a flag switches off
    has: dict[str, object] = dict(
        S_BIAS=bias is not None,
        HAS_TARGET=target is not None,
        HAS_NORM=norm is not None,
        HAS_G=g is not None,
        NEED_DZ=dz is not None,
    )
    hard_loss = dict(HARD=s.weight_hard != 0, HARD_LSE=s.weight_hard != 0 and (s.kind == "cosine" or scale != 1.0))
    flags = has | hard_loss | dict(VEC=min(c.block_n, 16 // z.itemsize)) | c.row
    upstream, results = (given(target), given(norm), given(g)), (soft, hard, given(dz))
    stride, numbers = 0 if dz is None else dz.stride(0), (scale, s.weight_hard, s.weight_soft)
    if topk:
        (log_p, index), K = t, t[1].shape[1]
        flags |= dict(TAIL=s.tail, BLOCK_K=next_power_of_2(max(K, 1)))
        launch(
            _topk_rows,
            (M,),
            z,
            log_p,
            index,
            given(bias),
            *upstream,
            *results,
            V,
            K,
            z.stride(0),
            stride,
            s.ignore_index,
            *numbers,
            **flags,
        )
    else:
        tensors = t, given(bias), given(teacher_bias), *upstream, given(g_hard), *results
        strides = z.stride(0), t.stride(0), stride
        flags |= dict(KIND=s.divergence().plain().kind, T_BIAS=teacher_bias is not None, HAS_G_HARD=g_hard is not None)
        launch(_rows, (M,), z, *tensors, V, *strides, s.ignore_index, s.beta, max(s.eps, SMALLEST), *numbers, **flags)
    return None


def _rows_in_torch(
    z: Tensor,
    t: Tensor | tuple[Tensor, Tensor],
    target: Tensor | None,
    s: Distillation,
    soft,
    hard,
    bias,
    teacher_bias,
    dz,
    norm,
    g,
    g_hard,
) -> None:
    a = z.to(acc(z.dtype)) if bias is None else z.to(acc(z.dtype)) + bias
    if teacher_bias is not None:
        t = t.to(acc(t.dtype)) + teacher_bias
    d = None if dz is None else torch.empty_like(a)
    if isinstance(t, tuple):
        _topk_in_torch(a, *t, s, soft, d)
    elif s.kind == "cosine":
        b = t.to(a.dtype)
        (a_norm, b_norm), dot = (
            (v.norm(dim=-1, keepdim=True).clamp(min=TINY) for v in (a, b)),
            (a * b).sum(-1, keepdim=True),
        )
        cos = dot / a_norm / b_norm
        soft.copy_(1 - cos[:, 0])
        if d is not None:
            d.copy_((a / a_norm * cos - b / b_norm) / a_norm)
    elif s.kind == "kl":
        soft.copy_(given_kl(a, t, s.temperature, s.eps))
        if d is not None:
            p = t.to(a.dtype)
            d.copy_(((a / s.temperature).softmax(-1) * p.sum(-1, keepdim=True) - p) / s.temperature)
    else:
        divergence_rows(a, t, s.divergence(), out=soft, dz=d)
    valid = None if target is None else target != s.ignore_index
    if valid is not None:
        soft.copy_(soft.where(valid, 0))
    if d is not None:
        d *= s.weight_soft
        if g_hard is not None:
            d, g = d * g[:, None], None
    if s.weight_hard:
        assert target is not None
        hard_rows, d_hard = Rows.empty(target, Loss(), hard.dtype), None if d is None else torch.empty_like(a)
        cross_entropy_rows(a, target, Loss(ignore_index=s.ignore_index, reduction="none"), out=hard_rows, dz=d_hard)
        hard.copy_(hard_rows.loss)
        if d is not None:
            d.add_(d_hard if g_hard is None else d_hard * g_hard[:, None], alpha=s.weight_hard)
    if d is not None:
        d = d if g is None else d * g[:, None]
        d = d if norm is None else d / norm
        dz.copy_(d if valid is None else d.where(valid[:, None], 0))


def _topk_in_torch(z: Tensor, log_p: Tensor, index: Tensor, s: Distillation, soft: Tensor, dz: Tensor | None) -> None:
    soft.copy_(topk_forward_kl(z, log_p, index, s.temperature, s.tail))
    if dz is None:
        return
    V = z.shape[-1]
    at, _, p, rest = _topk_teacher(log_p, index, V, z.dtype, s.tail)
    scaled_z = F.pad(z / s.temperature, (0, 1), value=float("-inf"))
    others = scaled_z.scatter(-1, at, float("-inf")).softmax(-1).nan_to_num(0)
    d = scaled_z.softmax(-1) * (p.sum(-1) + rest)[:, None] - others * rest[:, None]
    dz.copy_(d.scatter_add(-1, at, -p)[:, :V] / s.temperature)


def check_teacher(name: str, M: int, V: int, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for a teacher's tensors that do not fit M rows and V tokens, have a
    wrong dtype, or require a gradient."""
    G, K = (
        None if t is None or not t.ndim else t.shape[-1]
        for t in (tensors.get("teacher_x"), tensors.get("topk_indices"))
    )
    shapes = dict(teacher_x=(M, G), teacher_w=(V, G), teacher_bias=(V,), topk_log_probs=(M, K), topk_indices=(M, K))
    shapes |= dict.fromkeys(("teacher_logits", "teacher_probs"), (M, V))
    for key, t in tensors.items():
        if t is None:
            continue
        if t.shape != shapes[key]:
            raise ValueError(f"{name}: {key} must have shape {shapes[key]}, got {tuple(t.shape)}")
        if t.is_floating_point() == (key == "topk_indices"):
            raise ValueError(
                f"{name}: {key} must hold {'integers' if key == 'topk_indices' else 'floating point'}, got {t.dtype}"
            )
        if t.requires_grad and torch.is_grad_enabled() and key not in ("teacher_w", "teacher_bias"):
            raise ValueError(
                f"{name}: {key} must not require a gradient (there is none for the teacher: detach it), got one that "
                "does"
            )
