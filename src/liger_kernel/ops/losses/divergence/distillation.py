"""The rows of every divergence of logits: from the logits of a student and a teacher's, or its K
likeliest tokens, to losses and the gradient in place.

Formulas and letters are those of ``logit_divergence`` and ``linear_divergence``, which call this.

A teacher is given by its logits (``_rows``), by its probabilities (``_rows`` of kind "kl"), or by
the log-probabilities of its K likeliest tokens (``_topk_rows``). ``row_kernel`` chooses among
these. Where no kernel runs, it computes ``soft_losses`` in torch and lets autograd derive them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc, checks, launch_config
from liger_kernel.ops._core.operator import launch, tracing, use_kernels
from liger_kernel.ops._core.tl import jit, load_row, log, next_power_of_2, store_if, tanh, tl
from liger_kernel.ops.losses.cross_entropy_rows import reference as cross_entropy_reference
from liger_kernel.ops.losses.divergence.by_element import (
    TINY,
    at_least,
    derived,
    elements,
    joined,
    jsd_kind,
    online,
    times,
)

LOGIT_KINDS = ("jsd", "forward_kl", "reverse_kl", "tvd")
KINDS = (*LOGIT_KINDS, "cosine")
LEAST_NORM = 1e-12  # norms below count as this, in "cosine"


class Distillation(NamedTuple):
    """The numbers that define a row's loss, apart from its tensors. ``kind``: one of ``KINDS``,
    or "kl" for a teacher given by probabilities."""

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    ignore_index: int = -100
    reduction: str = "mean"
    weight_hard: float = 0.0
    weight_soft: float = 1.0
    tail: bool = True
    eps: float = 1e-10
    logit_scale: float = 1.0
    softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    entropy: bool = False

    def plain_kind(self) -> str:
        """``kind``, with "jsd" replaced by the KL that it is at ``beta`` 0 or 1."""
        return jsd_kind(self.beta) if self.kind == "jsd" else self.kind

    def exchanged(self) -> Distillation:
        """The same with the roles of student and teacher exchanged."""
        kind = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}.get(self.kind, self.kind)
        own, teacher = (self.logit_scale, self.softcap), (self.teacher_logit_scale, self.teacher_softcap)
        names = "logit_scale", "softcap", "teacher_logit_scale", "teacher_softcap"
        return self._replace(kind=kind, beta=1 - self.beta, **dict(zip(names, (*teacher, *own))))


def capped(z: Tensor, scale: float, cap: float | None) -> Tensor:
    """Logits z after a model's scale and softcap."""
    if scale == 1.0 and cap is None:
        return z
    z = z.to(acc(z.dtype)) * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def entropy_of(z: Tensor, temperature: float) -> Tensor:
    """The entropy of each row of logits z (..., V), without gradient."""
    log_p = (z.detach().to(acc(z.dtype)) / temperature).log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def _topk_forward_kl(z: Tensor, log_p: Tensor, index: Tensor, temperature: float, tail: bool) -> Tensor:
    """The loss (M,) of logits z (M, V) and log-probabilities (M, K)."""
    V, x = z.shape[-1], F.pad(z / temperature, (0, 1), value=float("-inf")).log_softmax(-1)
    # an index outside the vocabulary is column V, whose probability is 0
    known = (index >= 0) & (index < V)
    at, log_p = index.where(known, V).long(), log_p.to(x.dtype).where(known, float("-inf"))
    if not tail:
        log_p = log_p.log_softmax(-1).where((log_p != float("-inf")).any(-1, keepdim=True), float("-inf"))
    p, count = log_p.exp(), known.sum(-1)
    kl = (p * (log_p - x.gather(-1, at)).where(p != 0, 0)).sum(-1)
    rest = (1 - p.sum(-1)).clamp(min=0).where((count > 0) & (count < V) & tail, 0)
    some = rest != 0
    log_rest = x.scatter(-1, at, float("-inf")).where(some[:, None], 0).logsumexp(-1)
    return kl + rest * (rest.where(some, 1).log() - log_rest.where(some, 0))


def soft_losses(z: Tensor, t: Tensor | tuple[Tensor, Tensor], s: Distillation) -> Tensor:
    """The divergence of each row (...,) of logits z (..., V) from a teacher, in torch. ``t`` as in
    ``row_kernel``."""
    # log-probabilities at this temperature already
    if isinstance(t, tuple):
        return _topk_forward_kl(z.to(acc(z.dtype)), *t, s.temperature, s.tail)
    if s.kind == "kl":
        return elements((z.to(acc(z.dtype)) / s.temperature).log_softmax(-1), t, "kl", eps=s.eps).sum(-1)
    # a teacher in fp32 beside a student in bf16 keeps its precision
    dtype = acc(torch.promote_types(z.dtype, t.dtype))
    if s.kind == "cosine":
        a, b = (F.normalize(v.to(dtype), dim=-1, eps=LEAST_NORM) for v in (z, t))
        return 1 - (a * b).sum(-1)
    x, y = ((v.to(dtype) / s.temperature).log_softmax(-1) for v in (z, t))
    a, b = (x.exp(), y.exp()) if s.kind == "tvd" else (x, y)
    return elements(a, b, s.plain_kind(), s.beta).sum(-1)


@jit
def _load(z_ptr, bias_ptr, start, V, origin, factor, cap, LANES: tl.constexpr, VEC: tl.constexpr):
    """A block of one row's logits less ``origin``, (LANES, VEC): what a thread reads at once is
    a row of it. -inf outside."""
    col = start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    return col, _at(z_ptr, bias_ptr, col, col < V, factor, cap) - origin


@jit
def _at(z_ptr, bias_ptr, col, mask, factor, cap):
    """Logits of one row where the ``mask`` is, -inf elsewhere; after the model's ``factor`` and
    softcap, of which each may be None."""
    z = tl.load(z_ptr + col, mask=mask, other=-float("inf")).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if factor is not None:
        z *= tl.cast(factor, tl.float32)
    if cap is not None:
        z = tl.cast(cap, tl.float32) * tanh(z / tl.cast(cap, tl.float32))
    if factor is not None or cap is not None:
        z = tl.where(mask, z, -float("inf"))  # neither keeps it
    return z


@jit
def _with_entropy(a, top, total, z, new, e, rescale):
    """The sums of e^(z - new) (z - new) of each lane, from those ``a`` relative to the maximum
    ``top``; ``new``, e and ``rescale`` are what ``online`` has made of ``top`` and ``total``."""
    return times(a + times(top - new, total), rescale) + tl.sum(times(z - new[:, None], e), axis=1)


@jit
def _entropy(a, top, total):
    """The entropy of what lanes have summed. No term is negative, so neither is the sum."""
    below = top - tl.max(top, axis=0)
    weight = tl.exp(below)
    whole = tl.sum(times(total, weight), axis=0)
    return log(whole) - tl.sum(times(a + times(below, total), weight), axis=0) / whole


@jit
def _origin(z_ptr, bias_ptr, V, factor, cap, LANES: tl.constexpr, VEC: tl.constexpr):
    """The first block's maximum: softmax does not see what is subtracted from all logits, the
    rounding of their differences does."""
    _, z = _load(z_ptr, bias_ptr, 0, V, 0.0, factor, cap, LANES, VEC)
    top = tl.max(tl.max(z, axis=1), axis=0)
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@jit
def _with(lse, x):
    """logsumexp of what has ``lse`` and of x."""
    # the larger of both is subtracted, so that no exponential overflows
    top = tl.maximum(lse, tl.max(x, axis=0))
    return top + tl.log(tl.exp(lse - top) + tl.sum(tl.exp(x - top), axis=0))


@jit
def _ignore(soft_ptr, hard_ptr, dz_ptr, entropy_ptr, row, V, BLOCK: tl.constexpr):
    """Nothing of a row that does not count."""
    tl.store(soft_ptr + row, 0.0)
    store_if(entropy_ptr, row, 0.0)
    store_if(hard_ptr, row, 0.0)
    if dz_ptr is not None:
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(dz_ptr + col, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=col < V)


@jit
def _factor(norm_ptr, g_ptr, row):
    """What multiplies the gradient of a row."""
    factor = 1.0
    if norm_ptr is not None:
        factor *= 1.0 / tl.load(norm_ptr).to(tl.float32)
    if g_ptr is not None:
        factor *= tl.load(g_ptr + row).to(tl.float32)
    return factor


@jit
def _target(target_ptr, row, ignore_index):
    """Of a row, and whether it is ignored."""
    if target_ptr is None:
        return 0, False
    else:
        target = tl.load(target_ptr + row)
        return target, target == ignore_index


@jit
def _rows(
    s_ptr, t_ptr, s_bias_ptr, t_bias_ptr, target_ptr, norm_ptr, g_ptr, g_hard_ptr, soft_ptr, hard_ptr, dz_ptr,
    entropy_ptr, V, s_stride, t_stride, dz_stride, ignore_index, beta, eps, scale, weight_hard, weight_soft,
    s_factor, s_cap, t_factor, t_cap,
    KIND: tl.constexpr, HARD_LSE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. HARD_LSE: the hard loss, of the same sweeps, has a normaliser of its own.

    Sweeps alternate in direction, so that a sweep begins with what the last one left in the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    # int64: V times rows passes 31 bits
    s_ptr += row * s_stride
    t_ptr += row * t_stride
    if dz_ptr is not None:
        dz_ptr += row * dz_stride
    beta, eps, scale = tl.cast(beta, tl.float32), tl.cast(eps, tl.float32), tl.cast(scale, tl.float32)
    LANES: tl.constexpr = BLOCK // VEC
    # whole rows are read by one program, block after block
    blocks = tl.cdiv(V, BLOCK)
    target, ignored = _target(target_ptr, row, ignore_index)
    if ignored:
        _ignore(soft_ptr, hard_ptr, dz_ptr, entropy_ptr, row, V, BLOCK)
    else:
        s_origin, t_origin = _origin(s_ptr, s_bias_ptr, V, s_factor, s_cap, LANES, VEC), 0.0
        if KIND != "kl":
            t_origin = _origin(t_ptr, t_bias_ptr, V, t_factor, t_cap, LANES, VEC)
        # the gap to the origin would change the angle
        if KIND == "cosine":  # sees shifts
            s_origin, t_origin = 0.0, 0.0
        inside = (target >= 0) & (target < V)
        y = tl.where(inside, target, 0).to(tl.int32)
        # read before the gradient may overwrite it
        z_y = _at(s_ptr, s_bias_ptr, y, y >= 0, s_factor, s_cap) - s_origin if hard_ptr is not None else 0.0
        s_top = tl.full((LANES,), -float("inf"), tl.float32)
        t_top = tl.full((LANES,), -float("inf"), tl.float32)
        h_top = tl.full((LANES,), -float("inf"), tl.float32)
        s_sum = tl.zeros((LANES,), tl.float32)
        t_sum = tl.zeros((LANES,), tl.float32)
        h_sum = tl.zeros((LANES,), tl.float32)
        gap = tl.zeros((LANES,), tl.float32)  # what a KL consists of; of cosine the product
        spread = tl.zeros((LANES,), tl.float32)  # what the entropy consists of
        for i in range(0, blocks):
            col, z = _load(s_ptr, s_bias_ptr, i * BLOCK, V, s_origin, s_factor, s_cap, LANES, VEC)
            s = z * scale
            if KIND == "kl":
                p = load_row(t_ptr, col, V)
                s_new, s_total, s_e, s_rescale = online(s, s_top, s_sum)
                if entropy_ptr is not None:
                    spread = _with_entropy(spread, s_top, s_sum, s, s_new, s_e, s_rescale)
                s_top, s_sum = s_new, s_total
                t_sum += tl.sum(p, axis=1)
                gap += tl.sum(tl.where(p == 0.0, 0.0, p * (tl.log(at_least(p, eps)) - s)), axis=1)
            else:
                col, t = _load(t_ptr, t_bias_ptr, i * BLOCK, V, t_origin, t_factor, t_cap, LANES, VEC)
                t *= scale
                if KIND == "cosine":
                    a, b = tl.where(col < V, z, 0.0), tl.where(col < V, t, 0.0)
                    gap += tl.sum(a * b, axis=1)
                    s_sum += tl.sum(a * a, axis=1)
                    t_sum += tl.sum(b * b, axis=1)
                else:
                    # The teacher first: with the student first, the compiler loads the teacher's block
                    # only when the student's is spent (forward_kl, 8192 x 128256, H200: 2201 -> 2328 us)
                    t_top, t_sum, t_e, t_rescale = online(t, t_top, t_sum)
                    if KIND == "forward_kl":
                        gap = times(gap, t_rescale) + tl.sum(times(t - s, t_e), axis=1)
                    s_new, s_total, s_e, s_rescale = online(s, s_top, s_sum)
                    if entropy_ptr is not None:
                        spread = _with_entropy(spread, s_top, s_sum, s, s_new, s_e, s_rescale)
                    s_top, s_sum = s_new, s_total
                    if KIND == "reverse_kl":
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
            if hard_ptr is not None and not HARD_LSE:
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
                # not linear in the difference of logits: the normalisers come first, then a sweep
                # for the loss, and for the sum that the gradient needs
                losses = tl.zeros((LANES,), tl.float32)
                g_sums = tl.zeros((LANES,), tl.float32)
                for i in range(0, blocks):
                    start = (blocks - 1 - i) * BLOCK
                    col, s = _load(s_ptr, s_bias_ptr, start, V, s_origin, s_factor, s_cap, LANES, VEC)
                    col, t = _load(t_ptr, t_bias_ptr, start, V, t_origin, t_factor, t_cap, LANES, VEC)
                    loss_block, g, q = derived(s * scale - s_lse, t * scale - t_lse, beta, KIND)
                    losses += tl.sum(loss_block, axis=1)
                    if dz_ptr is not None:
                        g_sums += tl.sum(g, axis=1)
                loss, g_sum = tl.sum(losses, axis=0), tl.sum(g_sums, axis=0)

        tl.store(soft_ptr + row, loss)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, _entropy(spread, s_top, s_sum))
        # a target that is no class makes the hard loss and the gradient NaN
        poison = tl.where(inside, 1.0, float("nan"))
        store_if(hard_ptr, row, poison * (h_lse - z_y))
        if dz_ptr is not None:
            factor = _factor(norm_ptr, g_ptr, row)
            soft, hard = factor * weight_soft * scale, factor * weight_hard * poison
            if g_hard_ptr is not None:
                hard = tl.load(g_hard_ptr + row).to(tl.float32) * weight_hard * poison
            for i in range(0, blocks):
                start = (i if KIND == "jsd" or KIND == "tvd" else blocks - 1 - i) * BLOCK
                col, z = _load(s_ptr, s_bias_ptr, start, V, s_origin, s_factor, s_cap, LANES, VEC)
                if KIND == "kl":
                    p = load_row(t_ptr, col, V)
                    dz = mean * tl.exp(z * scale - s_lse) - p
                else:
                    col, t = _load(t_ptr, t_bias_ptr, start, V, t_origin, t_factor, t_cap, LANES, VEC)
                    t *= scale
                    if KIND == "cosine":
                        dz = (z / s_norm * mean - t / t_norm) / s_norm
                    else:
                        s = z * scale
                        x, y_log = s - s_lse, t - t_lse
                        if KIND == "forward_kl":
                            dz = tl.exp(x) - tl.exp(y_log)
                        elif KIND == "reverse_kl":
                            # of the logits themselves: rounding of the normalisers would not cancel
                            dz = times(s - t - mean, tl.exp(x))
                        else:
                            _l, g, q = derived(x, y_log, beta, KIND)
                            dz = g - q * g_sum
                dz *= soft
                if hard_ptr is not None:
                    dz += hard * (tl.exp(z - h_lse) - tl.where(col == y, 1.0, 0.0))
                if s_factor is not None:
                    dz *= tl.cast(s_factor, tl.float32)
                if s_cap is not None:
                    bent = (z + s_origin) / tl.cast(s_cap, tl.float32)
                    dz *= 1.0 - bent * bent
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=col < V)


@jit
def _topk_rows(
    s_ptr, log_p_ptr, index_ptr, s_bias_ptr, target_ptr, norm_ptr, g_ptr, soft_ptr, hard_ptr, dz_ptr,
    V, K, s_stride, dz_stride, ignore_index, scale, weight_hard, weight_soft,
    TAIL: tl.constexpr, HARD_LSE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row a program: the K tokens are taken out of z (which becomes -inf there), so that the
    mass of the others is a sum and no difference."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    if dz_ptr is not None:
        dz_ptr += row * dz_stride
    # temperatures are Python floats, which Triton takes for fp32 or fp64
    scale = tl.cast(scale, tl.float32)
    LANES: tl.constexpr = BLOCK // VEC
    blocks = tl.cdiv(V, BLOCK)
    target, ignored = _target(target_ptr, row, ignore_index)
    if ignored:
        _ignore(soft_ptr, hard_ptr, dz_ptr, None, row, V, BLOCK)
    else:
        lane = tl.arange(0, BLOCK_K)
        index = tl.load(index_ptr + row * K + lane, mask=lane < K, other=-1)
        known = (index >= 0) & (index < V)
        index = tl.where(known, index, 0)
        log_p = tl.load(log_p_ptr + row * K + lane, mask=known, other=-float("inf")).to(tl.float32)
        origin = _origin(s_ptr, s_bias_ptr, V, None, None, LANES, VEC)
        z_k = _at(s_ptr, s_bias_ptr, index, known, None, None) - origin
        inside = (target >= 0) & (target < V)
        y = tl.where(inside, target, 0).to(tl.int32)
        z_y = _at(s_ptr, s_bias_ptr, y, y >= 0, None, None) - origin if hard_ptr is not None else 0.0
        # all warps have read what is overwritten now, and see it in the sweeps
        tl.debug_barrier()
        tl.store(s_ptr + index, tl.full((BLOCK_K,), -float("inf"), s_ptr.dtype.element_ty), mask=known)
        tl.debug_barrier()

        top = tl.full((LANES,), -float("inf"), tl.float32)
        h_top = tl.full((LANES,), -float("inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        h_total = tl.zeros((LANES,), tl.float32)
        for i in range(0, blocks):
            col, z = _load(s_ptr, s_bias_ptr, i * BLOCK, V, origin, None, None, LANES, VEC)
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
        if hard_ptr is not None:
            tl.store(hard_ptr + row, poison * (h_lse - z_y))
        if dz_ptr is not None:
            factor = _factor(norm_ptr, g_ptr, row)
            soft, hard = factor * weight_soft * scale, factor * weight_hard * poison
            # what all probabilities sum to, with a tail 1 up to rounding
            mass += rest
            others = tl.where(others == -float("inf"), 0.0, others)
            for i in range(0, blocks):
                col, z = _load(s_ptr, s_bias_ptr, (blocks - 1 - i) * BLOCK, V, origin, None, None, LANES, VEC)
                s = z * scale
                dz = soft * (mass * tl.exp(s - lse) - rest * tl.exp(s - others))
                if hard_ptr is not None:
                    dz += hard * (tl.exp(z - h_lse) - tl.where(col == y, 1.0, 0.0))
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=col < V)
            # the K tokens' own columns, once the others of their blocks are written
            tl.debug_barrier()
            dz_k = soft * (mass * tl.exp(x_k) - p)
            if hard_ptr is not None:
                dz_k += hard * (tl.exp(z_k - h_lse) - tl.where(index == y, 1.0, 0.0))
            tl.store(dz_ptr + index, dz_k.to(dz_ptr.dtype.element_ty), mask=known)


def row_kernel(
    z: Tensor, t, target, s: Distillation, *, soft,
    hard=None, entropy=None, bias=None, teacher_bias=None, dz=None, norm=None, g=None, g_hard=None,
) -> None:  # fmt: skip
    """Per-row losses of logits z (M, V) into ``soft`` and, if there is a hard loss, ``hard``, the
    entropy of the student into ``entropy``, and the gradient into ``dz``, which may be z itself.

    ``t``: the teacher's logits, of kind "kl" its probabilities, or log-probabilities and indices
    (M, K). ``target``, ``g``: contiguous. The biases (V,) are added first; z is spent.
    The gradient is multiplied by ``g`` (M,) and divided by ``norm``; with ``g_hard`` (M,), which
    excludes a ``norm``, the hard loss' own is by that.
    """
    if tracing(z):
        return
    topk = isinstance(t, tuple)
    hard = hard if s.weight_hard else None
    if not (use_kernels(z) and (topk or use_kernels(t))):
        _rows_in_torch(z, t, target, s, soft, hard, entropy, bias, teacher_bias, dz, norm, g, g_hard)
        return
    (M, V), scale = z.shape, 1.0 if s.kind == "cosine" else 1 / s.temperature
    itemsize = max(z.itemsize, 0 if topk else t.itemsize)
    # one row per processor at a time, with as many bytes in flight as in ``cross_entropy``: later
    # sweeps find a part of the row in the cache. Further terms take registers, and jsd with a hard
    # loss would spill: they get fewer columns at once
    transforms = *_transform(s.logit_scale, s.softcap), *_transform(s.teacher_logit_scale, s.teacher_softcap)
    few = topk or s.kind in ("cosine", "kl") or any(t is not None for t in (hard, entropy, bias, teacher_bias))
    few = few or any(t is not None for t in transforms)
    most = 8192 // itemsize if few or s.weight_soft != 1.0 else 8192
    c = launch_config.tile("divergence_rows", V, itemsize, elements=1, max_block_n=most, per_thread=8)
    flags = dict(HARD_LSE=hard is not None and (s.kind == "cosine" or scale != 1.0)) | c.row
    flags |= dict(VEC=min(c.block_n, 16 // z.itemsize))
    # without a gradient nobody reads these
    stride, weights = 0 if dz is None else dz.stride(0), (scale, s.weight_hard, s.weight_soft)
    if topk:
        (log_p, index), K = t, t[1].shape[1]
        given = log_p, index, bias, target, norm, g, soft, hard, dz
        flags |= dict(TAIL=s.tail, BLOCK_K=next_power_of_2(max(K, 1)))
        launch(_topk_rows, (M,), z, *given, V, K, z.stride(0), stride, s.ignore_index, *weights, **flags)
        return
    tensors = t, bias, teacher_bias, target, norm, g, g_hard, soft, hard, dz, entropy
    numbers = V, z.stride(0), t.stride(0), stride, s.ignore_index, s.beta, max(s.eps, TINY), *weights, *transforms
    launch(_rows, (M,), z, *tensors, *numbers, KIND=s.plain_kind(), **flags)


def _transform(scale: float, cap: float | None) -> tuple[float | None, float | None]:
    """As the kernel takes them: None costs nothing."""
    return (None if scale == 1.0 else scale), cap


def _rows_in_torch(z, t, target, s, soft, hard, entropy, bias, teacher_bias, dz, norm, g, g_hard):
    a = z.to(acc(z.dtype)) if bias is None else z.to(acc(z.dtype)) + bias
    a = a.detach().requires_grad_(dz is not None)
    if not isinstance(t, tuple):
        t = t.detach() if teacher_bias is None else t.detach().to(acc(t.dtype)) + teacher_bias
        t = capped(t, s.teacher_logit_scale, s.teacher_softcap)
    valid = None if target is None else target != s.ignore_index
    with torch.set_grad_enabled(dz is not None):
        of_head = capped(a, s.logit_scale, s.softcap)
        rows = soft_losses(of_head, t, s)
        rows = rows if valid is None else rows.where(valid, 0)
        soft.copy_(rows.detach())
        if entropy is not None:
            found = entropy_of(of_head, s.temperature)
            entropy.copy_(found if valid is None else found.where(valid, 0))
        # the soft loss and, without ``g_hard``, the hard loss have one upstream gradient
        one = 1 if g is None else g
        total = s.weight_soft * rows * one
        if hard is not None:
            hard_rows = cross_entropy_reference(of_head, target, ignore_index=s.ignore_index, reduction="none")
            hard.copy_(hard_rows.detach())
            total = total + s.weight_hard * hard_rows * (one if g_hard is None else g_hard)
        if dz is None:
            return
        total = total if norm is None else total / norm
        (d,) = torch.autograd.grad(total.sum(), a)
    # a row that does not count has no gradient, also if it holds NaN
    dz.copy_(d if valid is None else d.where(valid[:, None], 0))


def check_teacher(name: str, M: int, V: int, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for a teacher's tensors that do not fit M rows and V tokens, have a
    wrong dtype, or require a gradient."""
    widths = {key: t.shape[-1] for key, t in tensors.items() if t is not None and t.ndim}
    G, K = widths.get("teacher_x"), widths.get("topk_indices")
    shapes = dict(teacher_x=(M, G), teacher_w=(V, G), teacher_bias=(V,), topk_log_probs=(M, K), topk_indices=(M, K))
    shapes |= dict.fromkeys(("teacher_logits", "teacher_probs"), (M, V))
    for key, t in tensors.items():
        if t is None:
            continue
        checks.shape(name, shapes[key], **{key: t})
        if t.is_floating_point() == (key == "topk_indices"):
            kind = "integers" if key == "topk_indices" else "floating point"
            raise ValueError(f"{name}: {key} must hold {kind}, got {t.dtype}")
        if t.requires_grad and torch.is_grad_enabled() and key not in ("teacher_w", "teacher_bias"):
            why = "there is none for the teacher: detach it"
            raise ValueError(f"{name}: {key} must not require a gradient ({why}), got one that does")
