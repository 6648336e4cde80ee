"""Causal attention in which each head has a sink, a learned score of a key without a value (Xiao et
al., arXiv:2309.17453; gpt-oss, arXiv:2508.10925).

    o_t = sum_j p_tj v_j,   p_tj = exp(s_tj) / (exp(sink) + sum_i exp(s_ti)),   s_tj = scale q_t . k_j,

over the keys j that token t sees.

Shapes: q, o (B, H, T, D), k, v (B, H / G, T, D), sinks (H,), valid, first (B, T).  G: the heads
that share keys and values.

A token sees the keys j <= t that are ``valid``, less than ``window`` tokens before it, and not
before its ``first`` key, where its document begins. So masks of every pair of tokens never exist:
each kernel derives them from positions, and leaves out blocks of keys that nobody in a block of
queries sees. The running sum of the softmax begins with the sink instead of zero (Dao et al.,
arXiv:2205.14135), so a token without keys gets zero.

The forward saves o and lse, the logarithm of the denominator. With delta_t = <do_t, o_t>, as the
sink's value is zero:

    ds_tj = p_tj (<do_t, v_j> - delta_t),   dsink = -sum_t exp(sink - lse_t) delta_t

If delta came from an o that is rounded to 16 bits, the ds_tj of a token would all be wrong in one
direction, and dq and dk would have up to 2.3 times the error of eager attention, which sums p_tj
<do_t, v_j> itself. So the forward saves a byte more of each o: what rounding took away, ``lost``.

The backward computes p again in two kernels, one for blocks of keys and one for blocks of queries,
so no sum is added to in memory, and equal inputs give equal bits. ``bench/cases/attention.py`` has
the shapes of real models and the rivals.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops._core.operator import (
    autocast_dtype,
    input_gradients,
    launch,
    once_differentiable,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.tl import cdiv, exp, jit, mask_of, next_power_of_2, rows_at, tl
from liger_kernel.ops.attention.heads import new_like, unit

# columns of a head whose blocks fit into shared memory; the reference computes wider heads
MAX_D = 256


def reference(q, k, v, sinks, *, window, valid, first, scale):
    (B, H, length, D), dtype = q.shape, acc(q.dtype)
    # heads of a group share keys and values: eager attention repeats them
    k, v = (t.repeat_interleave(H // max(t.shape[1], 1), 1) for t in (k, v))
    s = q.to(dtype) @ k.to(dtype).mT * (max(D, 1) ** -0.5 if scale is None else scale)
    s = s.masked_fill(~visible(B, length, q.device, window, valid, first), -float("inf"))
    p = torch.cat((s, sinks.to(dtype).view(-1, 1, 1).expand(B, H, length, 1)), -1).softmax(-1)[..., :-1]
    return p.to(q.dtype) @ v


def by_token(q, k, v, sinks, *, window, valid, first, scale):
    """The same, slowly: of each token by itself, so that what it adds up does not depend on its batch."""
    (B, H, length, D), wide = q.shape, acc(q.dtype)
    k, v = (t.to(wide).repeat_interleave(H // max(t.shape[1], 1), 1) for t in (k, v))
    mask, scale, rows = visible(B, length, q.device, window, valid, first)[:, 0], scale or D**-0.5, []
    for b in range(B):
        for t in range(length):
            seen = mask[b, t].nonzero()[:, 0]
            s = (q[b, :, t, None].to(wide) * k[b, :, seen]).sum(-1) * scale
            p = torch.cat((s, sinks.to(wide)[:, None]), -1).softmax(-1)[:, :-1]
            rows.append((p[..., None] * v[b, :, seen]).sum(1).to(q.dtype))
    return torch.stack(rows).view(B, length, H, D).transpose(1, 2)


def visible(B: int, length: int, device: Any, window: int | None, valid: Tensor | None, first: Tensor | None) -> Tensor:
    """The (B, 1, T, T) mask of the keys that each token sees."""
    t = torch.arange(length, device=device)
    apart = t[:, None] - t
    mask = (apart >= 0).expand(B, 1, length, length)
    if window is not None:
        mask = mask & (apart < window)
    if valid is not None:
        mask = mask & valid.bool()[:, None, None, :]
    if first is not None:
        mask = mask & (t >= first[:, None, :, None])
    return mask


# In kernels, R is the number of pairs of a row and a head, or a head of keys.
# Scores of 16-bit data are in units of log 2, because exp2 is what GPUs compute. In fp32, lse would
# be rounded relative to its own size, an error of p, so there ``lse`` is the largest score, and
# ``share`` the inverse of the sum
LOG2E = math.log2(math.e)
PER_E = tl.constexpr(LOG2E)


@jit
def _exp(x, PRECISE: tl.constexpr):
    return exp(x) if PRECISE else tl.exp2(x)


@jit
def _p(s, lse, share, PRECISE: tl.constexpr):
    return exp(s - lse) * share if PRECISE else tl.exp2(s - lse)


@jit
def _rows(ptr, row, stride, col, T, D, EVEN_D: tl.constexpr):
    """Rows of a matrix, zero where there is no such row or column."""
    if EVEN_D:
        return tl.load(ptr + row[:, None] * stride + col[None, :], mask=(row < T)[:, None], other=0.0)
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=mask_of(row, T, col, D), other=0.0)


@jit
def _columns(ptr, row, stride, col, T, D, EVEN_D: tl.constexpr):
    """The same, transposed."""
    if EVEN_D:
        return tl.load(ptr + row[None, :] * stride + col[:, None], mask=(row < T)[None, :], other=0.0)
    return tl.load(ptr + row[None, :] * stride + col[:, None], mask=(row < T)[None, :] & (col < D)[:, None], other=0.0)


@jit
def _seen(t, j, T, window, first_ptr, first, valid_ptr, MASKED: tl.constexpr):
    """Which keys j the tokens t see. ``MASKED``: some keys may lie behind a token, or behind all
    of them."""
    # arguments that are None are known when the kernel is compiled: a mask costs what it needs
    seen = t >= 0
    if MASKED:
        seen &= (j <= t) & (t < T)
    if window is not None:
        seen &= t - j < window
    if first_ptr is not None:
        seen &= j >= first
    if valid_ptr is not None:
        seen &= tl.load(valid_ptr + j, mask=j < T, other=0) != 0
    return seen


@jit
def _place(T, R, H, BLOCK_M: tl.constexpr):
    """The first of a program's tokens, all of them, its batch and its head."""
    # The last tokens begin, which see the most keys: begun last, they would run alone at the end.
    # Programs that share keys run side by side, and find them in the cache
    start_t = (tl.cdiv(T, BLOCK_M) - 1 - tl.program_id(0) // R) * BLOCK_M
    b, h = (tl.program_id(0) % R // H).to(tl.int64), (tl.program_id(0) % R % H).to(tl.int64)
    return start_t, start_t + tl.arange(0, BLOCK_M), b, h


@jit
def _keys(first_ptr, start_t, t, T, window, BLOCK_N: tl.constexpr):
    """For a block of tokens: the first block of keys that they see, the first whose keys are not
    before all of them, and the first key of each token."""
    begin = tl.minimum(start_t, 0)
    if window is not None:
        begin = tl.maximum(begin, start_t - window + 1)
    first = t
    # the largest int32 for tokens that do not exist: they ask for no key
    if first_ptr is not None:
        first = tl.load(first_ptr + t, mask=t < T, other=2147483647)
        begin = tl.maximum(begin, tl.min(first, 0))
    # both loops of a kernel go by whole blocks, and meet between two of them
    begin = begin // BLOCK_N * BLOCK_N
    return begin, tl.maximum(start_t // BLOCK_N * BLOCK_N, begin), first[:, None]


@jit
def _document(cur, first, start_t, end, window, BLOCK_N: tl.constexpr):
    """Of a block of tokens, which are of the document that begins at key ``cur``; their first block
    of keys, the first with keys that are not before all tokens, and where the next document begins.
    Blocks are counted from ``cur``, so that nothing depends on where the document lies in its
    row."""
    stop = tl.minimum(tl.min(tl.where(first > cur, first, 2147483647), 0), end)
    begin = cur
    if window is not None:
        begin += tl.maximum(start_t - window + 1 - cur, 0) // BLOCK_N * BLOCK_N
    whole = begin + tl.maximum(start_t + 1 - begin, 0) // BLOCK_N * BLOCK_N
    return first == cur, begin, whole, stop


@jit
def _sink(sink_ptr, h, PRECISE: tl.constexpr):
    """In the unit of scores, and finite, so that a difference of scores is a number."""
    sink = tl.load(sink_ptr + h).to(tl.float32)
    if not PRECISE:
        sink *= PER_E
    return tl.where(sink < -1e30, -1e30, sink)


@jit
def _fwd_step(
    q, top, total, o, start, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit, window,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of keys: the largest score so far, the sum of exponentials, and the sum of
    values."""
    j = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    k = _columns(k_ptr, j.to(tl.int64), kt, col, T, D, EVEN_D)
    s = tl.dot(q, k, input_precision=PRECISION) * unit
    if MASKED or window is not None or first_ptr is not None or valid_ptr is not None:
        seen = _seen(t[:, None], j[None, :], T, window, first_ptr, first, valid_ptr, MASKED)
        s = tl.where(seen, s, -float("inf"))
    # relative to the largest score so far, so that no exponential overflows
    new = tl.maximum(top, tl.max(s, 1))
    p = _exp(s - new[:, None], q.dtype == tl.float32)
    shrink = _exp(top - new, q.dtype == tl.float32)
    total = total * shrink + tl.sum(p, 1)
    v = _rows(v_ptr, j.to(tl.int64), vt, col, T, D, EVEN_D)
    o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
    return new, total, o


@jit
def _fwd_blocks(
    q, top, total, o, begin, whole, end, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit, window,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # keys before all of these tokens need no mask for the diagonal; the rest is a few blocks
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else begin, end if MASKED else whole, BLOCK_N):
            top, total, o = _fwd_step(
                q, top, total, o, start, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit,
                window, MASKED, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return top, total, o


@jit
def _lost(exact, o):
    """The 8 bits of ``exact`` that follow those of o, to which it was rounded."""
    bits = exact.to(tl.int32, bitcast=True) - o.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(bits >> (8 if o.dtype == tl.bfloat16 else 5), 127).to(tl.int8)


@jit
def _found(o, lost):
    """o before it was rounded, as exact as ``lost`` is."""
    # bits of fp32 that are not saved, whose middle stands for all
    low: tl.constexpr = 8 if o.dtype == tl.bfloat16 else 5
    bits = o.to(tl.float32).to(tl.int32, bitcast=True) + (lost.to(tl.int32) << low) + (1 << (low - 1))
    return bits.to(tl.float32, bitcast=True)


@jit
def _fwd(
    q_ptr, k_ptr, v_ptr, sink_ptr, first_ptr, valid_ptr, at_ptr, o_ptr, lse_ptr, share_ptr, lost_ptr,
    T, L, R, H, G, D, qb, qh, qt, kb, kh, kt, vb, vh, vt, unit, window,
    EVEN_D: tl.constexpr, BY_DOCUMENT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of the L tokens from ``at`` on, which are all T without it."""
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    start_t, row, b, h = _place(L, R, H, BLOCK_M)
    t = row
    end = tl.minimum(start_t + BLOCK_M, L)
    if at_ptr is not None:
        at = tl.load(at_ptr).to(tl.int32)
        start_t += at
        t += at
        end += at
    col = tl.arange(0, BLOCK_D)
    unit = tl.cast(unit, tl.float32)
    k_ptr += b * kb + h // G * kh
    v_ptr += b * vb + h // G * vh
    q = _rows(q_ptr + b * qb + h * qh, row.to(tl.int64), qt, col, L, D, EVEN_D)
    if first_ptr is not None:
        first_ptr += b * T
    begin, whole, first = _keys(first_ptr, start_t, t, T, window, BLOCK_N)
    if valid_ptr is not None:
        valid_ptr += b * T
    # the softmax begins with the sink as its only score: a sum of one
    top = tl.zeros((BLOCK_M,), tl.float32) + _sink(sink_ptr, h, PRECISE)
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if BY_DOCUMENT:
        firsts = tl.load(first_ptr + t, mask=t < T, other=2147483647)
        cur = tl.min(firsts, 0)
        while cur < end:
            own, begin, whole, stop = _document(cur, firsts, start_t, end, window, BLOCK_N)
            # to tokens of other documents, no score adds anything: cheaper than a mask of pairs
            found, total, o = _fwd_blocks(
                q, tl.where(own, top, 1e30), total, o, begin, whole, stop, t, None, first, k_ptr, v_ptr, valid_ptr, T,
                D, kt, vt, unit, window, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            top = tl.where(own, found, top)
            cur = stop
    else:
        top, total, o = _fwd_blocks(
            q, top, total, o, begin, whole, end, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit,
            window, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    # o is (B, T, H, D) in memory, which is what the projection after it reads
    place = ((b * L + row) * H + h)[:, None] * D + col[None, :]
    o = o / total[:, None]
    rounded, mask = o.to(o_ptr.dtype.element_ty), mask_of(row, L, col, D)
    tl.store(o_ptr + place, rounded, mask=mask)
    if PRECISE:
        tl.store(lse_ptr + (b * H + h) * L + row, top, mask=row < L)
        tl.store(share_ptr + (b * H + h) * L + row, 1.0 / total, mask=row < L)
    else:
        tl.store(lse_ptr + (b * H + h) * L + row, top + tl.log2(total), mask=row < L)
        tl.store(lost_ptr + place, _lost(o, rounded), mask=mask)


@jit
def _delta(
    do_ptr, o_ptr, sink_ptr, lse_ptr, share_ptr, lost_ptr, delta_ptr, dsink_ptr, T, R, H, D, gb, gh, gt,
    NEED_SINK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """<do, o> of each token and head, and the part of a block of tokens in the gradient of the
    sinks."""
    PRECISE: tl.constexpr = o_ptr.dtype.element_ty == tl.float32
    block = tl.program_id(0) // R
    b, h = (tl.program_id(0) % R // H).to(tl.int64), (tl.program_id(0) % R % H).to(tl.int64)
    t = rows_at(block, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    mask = mask_of(t, T, col, D)
    do = tl.load(do_ptr + b * gb + h * gh + t[:, None] * gt + col[None, :], mask=mask, other=0.0).to(tl.float32)
    at = ((b * T + t) * H + h)[:, None] * D + col[None, :]
    o = tl.load(o_ptr + at, mask=mask, other=0.0)
    if not PRECISE:
        o = _found(o, tl.load(lost_ptr + at, mask=mask, other=0))
    delta = tl.sum(do * o, 1)
    tl.store(delta_ptr + (b * H + h) * T + t, delta, mask=t < T)
    if NEED_SINK:
        lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=t < T, other=float("inf"))
        share = lse
        if PRECISE:
            share = tl.load(share_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
        dsink = -tl.sum(_p(_sink(sink_ptr, h, PRECISE), lse, share, PRECISE) * delta, 0)
        tl.store(dsink_ptr + block * R + b * H + h, dsink)


@jit
def _dq_step(
    q, do, lse, share, delta, dq, start, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit, window,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    k = _columns(k_ptr, j.to(tl.int64), kt, col, T, D, EVEN_D)
    p = _p(tl.dot(q, k, input_precision=PRECISION) * unit, lse[:, None], share[:, None], q.dtype == tl.float32)
    if MASKED or window is not None or first_ptr is not None or valid_ptr is not None:
        seen = _seen(t[:, None], j[None, :], T, window, first_ptr, first, valid_ptr, MASKED)
        p = tl.where(seen, p, 0.0)
    v = _columns(v_ptr, j.to(tl.int64), vt, col, T, D, EVEN_D)
    ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(q.dtype), tl.trans(k), dq, input_precision=PRECISION)


@jit
def _dq_blocks(
    q, do, lse, share, delta, dq, begin, whole, end, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt, unit,
    window, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else begin, end if MASKED else whole, BLOCK_N):
            dq = _dq_step(
                q, do, lse, share, delta, dq, start, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D, kt, vt,
                unit, window, MASKED, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return dq


@jit
def _bwd_dq(
    do_ptr, q_ptr, k_ptr, v_ptr, first_ptr, valid_ptr, lse_ptr, share_ptr, delta_ptr, dq_ptr,
    T, R, H, G, D, gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, unit, scale, window,
    EVEN_D: tl.constexpr, BY_DOCUMENT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Over the same keys as the forward."""
    start_t, t, b, h = _place(T, R, H, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    k_ptr += b * kb + h // G * kh
    v_ptr += b * vb + h // G * vh
    q = _rows(q_ptr + b * qb + h * qh, t.to(tl.int64), qt, col, T, D, EVEN_D)
    do = _rows(do_ptr + b * gb + h * gh, t.to(tl.int64), gt, col, T, D, EVEN_D)
    lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=t < T, other=float("inf"))
    share = lse
    if q_ptr.dtype.element_ty == tl.float32:
        share = tl.load(share_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
    delta = tl.load(delta_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
    if first_ptr is not None:
        first_ptr += b * T
    begin, whole, first = _keys(first_ptr, start_t, t, T, window, BLOCK_N)
    if valid_ptr is not None:
        valid_ptr += b * T
    unit = tl.cast(unit, tl.float32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum(start_t + BLOCK_M, T)
    if BY_DOCUMENT:
        firsts = tl.load(first_ptr + t, mask=t < T, other=2147483647)
        cur = tl.min(firsts, 0)
        while cur < end:
            own, begin, whole, stop = _document(cur, firsts, start_t, end, window, BLOCK_N)
            dq = _dq_blocks(
                q, do, tl.where(own, lse, float("inf")), share, delta, dq, begin, whole, stop, t, None, first, k_ptr,
                v_ptr, valid_ptr, T, D, kt, vt, unit, window, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            cur = stop
    else:
        dq = _dq_blocks(
            q, do, lse, share, delta, dq, begin, whole, end, t, first_ptr, first, k_ptr, v_ptr, valid_ptr, T, D,
            kt, vt, unit, window, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    at = ((b * T + t) * H + h)[:, None] * D + col[None, :]
    dq *= tl.cast(scale, tl.float32)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=mask_of(t, T, col, D))


@jit
def _add_dot(total, a, b, lost, PRECISION: tl.constexpr):
    """total + a b. In fp32, a sum over the tokens of all heads of a group would lose four times
    as much as one over those of a head, so nothing is lost: not even where the summand is larger
    than the sum (Knuth), so that blocks of zeros change nothing."""
    if a.dtype == tl.float32:
        x = tl.dot(a, b, input_precision=PRECISION) - lost
        new = total + x
        back = new - total
        return new, (back - x) + ((new - back) - total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION), lost


@jit
def _dkv_step(
    k, v, dk, dv, lost_k, lost_v, start, j, valid_ptr, seen_j, q_ptr, do_ptr, first_ptr, lse_ptr, share_ptr, delta_ptr,
    T, D, qt, gt, unit, window,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of queries. All matrices of pairs are (keys, queries), so that products take
    them from registers."""
    t = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    q = _columns(q_ptr, t.to(tl.int64), qt, col, T, D, EVEN_D)
    lse = tl.load(lse_ptr + t, mask=t < T, other=float("inf"))
    share = lse
    if q.dtype == tl.float32:
        share = tl.load(share_ptr + t, mask=t < T, other=0.0)
    p = _p(tl.dot(k, q, input_precision=PRECISION) * unit, lse[None, :], share[None, :], q.dtype == tl.float32)
    if MASKED or window is not None or first_ptr is not None or valid_ptr is not None:
        first = t
        if first_ptr is not None:
            first = tl.load(first_ptr + t, mask=t < T, other=2147483647)
        seen = _seen(t[None, :], j[:, None], T, window, first_ptr, first[None, :], None, MASKED)
        if valid_ptr is not None:
            seen &= seen_j[:, None]
        p = tl.where(seen, p, 0.0)
    do = _rows(do_ptr, t.to(tl.int64), gt, col, T, D, EVEN_D)
    if NEED_DV:
        dv, lost_v = _add_dot(dv, p.to(do.dtype), do, lost_v, PRECISION)
    if NEED_DK:
        delta = tl.load(delta_ptr + t, mask=t < T, other=0.0)
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        dk, lost_k = _add_dot(dk, ds.to(q.dtype), tl.trans(q), lost_k, PRECISION)
    return dk, dv, lost_k, lost_v


@jit
def _bwd_dkv(
    do_ptr, q_ptr, k_ptr, v_ptr, first_ptr, valid_ptr, stop_ptr, lse_ptr, share_ptr, delta_ptr, dk_ptr, dv_ptr,
    T, R, H, G, D, gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, unit, scale, window,
    EVEN_D: tl.constexpr, BY_DOCUMENT: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For a block of keys, which the heads of a group share: one loop over the blocks of queries of
    all of these heads.

    ``stop``: the end of the tokens that see a block of keys, as far as ``first`` says; with
    ``BY_DOCUMENT`` the end of each token's document.
    """
    start_j = tl.program_id(0) // R * BLOCK_N
    b, h = (tl.program_id(0) % R // (H // G)).to(tl.int64), (tl.program_id(0) % R % (H // G)).to(tl.int64)
    j = start_j + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    unit = tl.cast(unit, tl.float32)
    k = _rows(k_ptr + b * kb + h * kh, j.to(tl.int64), kt, col, T, D, EVEN_D)
    v = _rows(v_ptr + b * vb + h * vh, j.to(tl.int64), vt, col, T, D, EVEN_D)
    seen_j = j < T
    if valid_ptr is not None:
        seen_j = tl.load(valid_ptr + b * T + j, mask=j < T, other=0) != 0
    if first_ptr is not None:
        first_ptr += b * T
    q_ptr += b * qb
    do_ptr += b * gb
    lse_ptr += b * H * T
    share_ptr += b * H * T
    delta_ptr += b * H * T
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # what rounding lost of the sums so far, which only sums of fp32 count: nothing
    lost_k = tl.zeros((1, 1), tl.float32)
    if q_ptr.dtype.element_ty == tl.float32:
        lost_k = dk
    lost_v = lost_k
    if BY_DOCUMENT:
        # blocks of queries are counted from the beginning of a document, and one head follows the
        # other, so that the order of a key's sums depends on its place in the document alone
        cur = start_j
        last = tl.minimum(start_j + BLOCK_N, T)
        while cur < last:
            begin = tl.load(first_ptr + cur)
            stop = tl.load(stop_ptr + b * T + cur)
            until = stop
            if window is not None:
                until = tl.minimum(stop, last - 1 + window)
            # padding after the last document: nobody sees it
            until = tl.where(stop > cur, until, 0)
            begin += tl.maximum(cur - begin, 0) // BLOCK_M * BLOCK_M
            # if all keys are of this document, later queries see them all
            whole = begin + tl.cdiv(tl.maximum(start_j + BLOCK_N - begin, 0), BLOCK_M) * BLOCK_M
            whole = tl.where((cur == start_j) & (stop >= start_j + BLOCK_N), tl.minimum(whole, until), until)
            for g in range(0, G):
                head = h * G + g
                # first blocks of which some keys are not seen, then those of which all are
                for ALL in tl.static_range(2):
                    for start in range(whole if ALL else begin, until if ALL else whole, BLOCK_M):
                        dk, dv, lost_k, lost_v = _dkv_step(
                            k, v, dk, dv, lost_k, lost_v, start, j, valid_ptr, seen_j, q_ptr + head * qh,
                            do_ptr + head * gh, None if ALL else first_ptr, lse_ptr + head * T, share_ptr + head * T,
                            delta_ptr + head * T, stop, D, qt, gt, unit, window, not ALL, EVEN_D, NEED_DK, NEED_DV,
                            PRECISION, BLOCK_M, BLOCK_D,
                        )  # fmt: skip
            cur = tl.where(stop > cur, stop, last)
    else:
        end = T
        if window is not None:
            end = tl.minimum(end, start_j + BLOCK_N - 1 + window)
        if first_ptr is not None:
            end = tl.minimum(end, tl.load(stop_ptr + b * tl.cdiv(T, BLOCK_N) + tl.program_id(0) // R))
        begin = start_j // BLOCK_M * BLOCK_M
        # from here on, all of these keys are before all queries: blocks without a mask
        whole = tl.cdiv(start_j + BLOCK_N, BLOCK_M) * BLOCK_M
        for ALL in tl.static_range(2):
            start = whole if ALL else begin
            steps = tl.cdiv(tl.maximum(end - whole, 0) if ALL else tl.minimum(whole, end) - begin, BLOCK_M)
            for i in range(0, G * steps):
                head = h * G + i // steps
                dk, dv, lost_k, lost_v = _dkv_step(
                    k, v, dk, dv, lost_k, lost_v, start + i % steps * BLOCK_M, j, valid_ptr, seen_j, q_ptr + head * qh,
                    do_ptr + head * gh, first_ptr, lse_ptr + head * T, share_ptr + head * T, delta_ptr + head * T,
                    T, D, qt, gt, unit, window, not ALL, EVEN_D, NEED_DK, NEED_DV, PRECISION, BLOCK_M, BLOCK_D,
                )  # fmt: skip
    at = ((b * T + j) * (H // G) + h)[:, None] * D + col[None, :]
    mask = mask_of(j, T, col, D)
    if NEED_DK:
        tl.store(dk_ptr + at, (dk * tl.cast(scale, tl.float32)).to(dk_ptr.dtype.element_ty), mask=mask)
    if NEED_DV:
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


# kernel -> width of heads -> queries and keys of a block, warps and stages. H200, 4 x 2048 of
# gpt-oss-20b, forward and both backward kernels: 0.413, 0.473 and 0.963 ms; with its window of 128
# tokens 0.157, 0.192 and 0.271 by NARROW, 0.201, 0.192 and 0.318 without it
TILES = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (64, 64, 4, 2)},
    "dq": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 1)},
    "dkv": {64: (32, 128, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 1)},
}
# in the order of documents, whose kernels need more registers. H200, 4 x 2048 of Llama-3-8B, forward, dq and
# dkv: 0.405, 0.426 and 0.946 ms; by TILES 0.434, 0.426 and 1.58 (cuDNN 0.259 and 0.872). Llama-3.2-1B:
# 0.297, 0.221 and 0.572 (cuDNN 0.187 and 0.578)
BY_DOCUMENT = {("fwd", 128): (128, 64, 8, 3), ("dkv", 64): (64, 64, 4, 2), ("dkv", 128): (32, 128, 8, 3)}
# for windows of up to so many tokens, in heads of up to 128 columns
NARROW_WINDOW = 512
NARROW = {"fwd": (64, 64, 4, 3), "dq": (64, 64, 4, 3), "dkv": (64, 64, 4, 2)}


def _tile(kernel: str, q: Tensor, window: int | None, by_document: bool = False) -> dict[str, Any]:
    """The meta parameters of a kernel: the table's, or the largest below them whose blocks fit
    into shared memory."""
    block_d, amd = max(16, next_power_of_2(q.shape[3])), launch_config.arch().startswith("gfx")
    # the interpreter: blocks so small that its tests have several
    if launch_config.arch() == "cpu":
        return dict(PRECISION="ieee", BLOCK_M=32, BLOCK_N=16, BLOCK_D=block_d, num_warps=4, num_stages=1)
    narrow = window is not None and window <= NARROW_WINDOW and block_d <= 128
    m, n, warps, stages = NARROW[kernel] if narrow else TILES[kernel][max(64, block_d)]
    if by_document and not narrow:
        m, n, warps, stages = BY_DOCUMENT.get((kernel, block_d), (m, n, warps, stages))
    elif by_document and kernel == "dkv" and block_d > 64:
        warps = 8  # four would spill
    if q.itemsize == 4:
        m, n, warps, stages = 32, 32, 4, 1
    # AMD's compiler pipelines through registers; by reasoning, not measured
    if amd:
        m, n, warps, stages = (min(m, 32), min(n, 64), 4, 1) if kernel == "dkv" else (min(m, 64), min(n, 32), 4, 1)
    # a stage less costs less than half a block
    while _held(kernel, m, n, stages) * block_d * q.itemsize > launch_config.shared_memory() and min(m, n) > 16:
        stages, m, n = (stages - 1, m, n) if stages > 1 else (1, m // 2, n) if m > n else (1, m, n // 2)
    tf32 = q.itemsize == 4 and not amd and torch.get_float32_matmul_precision() != "highest"
    blocks = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_D=block_d, num_warps=warps, num_stages=stages)
    return dict(PRECISION="tf32" if tf32 else "ieee", **blocks)


def _held(kernel: str, m: int, n: int, stages: int) -> int:
    """Rows in shared memory: those of a program's own block, and of the blocks that it walks
    over."""
    own, walked = {"fwd": (m, 2 * n), "dq": (2 * m, 2 * n), "dkv": (2 * n, 2 * m)}[kernel]
    return own + stages * walked


# tokens of which a program sums <do, o>
ROWS = 128


def _even(q: Tensor) -> bool:
    """Whether loads of whole blocks of columns need no mask."""
    return q.shape[3] == max(16, next_power_of_2(q.shape[3]))


def _unit(q: Tensor, scale: float) -> float:
    """``scale`` in the unit of scores."""
    return scale if q.dtype == torch.float32 else scale * LOG2E


def _stops(first: Tensor, block: int) -> Tensor:
    """For each block of keys, the end of the tokens whose first key is not behind it."""
    B, length = first.shape
    t = torch.arange(length, dtype=torch.int32, device=first.device).expand(B, -1)
    ends = torch.zeros(B, cdiv(length, block), dtype=torch.int32, device=first.device)
    return ends.scatter_reduce_(1, (first.clamp(0, length - 1) // block).long(), t + 1, "amax").cummax(1).values


def _order(by_document: bool) -> dict[str, bool]:
    """Whether sums are in the order of documents. Then no kernel may multiply and add in one step,
    which the compiler does where no mask is between the two: a block may have a mask or none."""
    return dict(BY_DOCUMENT=True, enable_fp_fusion=False) if by_document else dict(BY_DOCUMENT=False)


def _document_ends(first: Tensor, valid: Tensor | None) -> Tensor:
    """The end of each token's document, padding on the right excluded."""
    length = first.shape[1]
    place = torch.arange(1, length, dtype=torch.int32, device=first.device)
    following = torch.nn.functional.pad(place.where(first.diff(dim=1) != 0, length), (0, 1), value=length)
    if valid is not None:
        following = torch.minimum(following, length - valid.flip(1).int().argmax(1, keepdim=True).int())
    return following.flip(1).cummin(1).values.flip(1)


def documents(B: int, length: int, device: Any, first: Tensor | None, valid: Tensor | None) -> Tensor:
    """The beginning and the end of each token's document, (2, B, T) int32: padding on the left is no
    part of one. All batches have them, because a kernel without them is another one."""
    if first is None and valid is None:
        ends = torch.zeros(2, B, length, dtype=torch.int32, device=device)
        ends[1].fill_(length)
        return ends
    first = torch.zeros(B, length, dtype=torch.int32, device=device) if first is None else first.int()
    first = first if valid is None else torch.maximum(first, valid.int().argmax(1, keepdim=True).int())
    return torch.stack((first, _document_ends(first, valid)))


@typed_launcher
def sink_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, first: Tensor | None, valid: Tensor | None,
    at: Tensor | None, scale: float, by_document: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, and what the backward needs: ``lse`` (B, H, T); in fp32 ``share`` (B, H, T), in 16 bits
    ``lost`` of o's shape, and of these the other one is empty. ``at``: the place of the first token
    of q among those of k."""
    B, H, length, D = q.shape
    o, lse = new_like(q), q.new_empty(B, H, length, dtype=torch.float32)
    precise = q.dtype == torch.float32
    share = lse.new_empty(lse.shape if precise else 0)
    lost = q.new_empty((B, length, H, D) if not precise else 0, dtype=torch.int8)
    if not tracing(q):
        tile = _tile("fwd", q, window, by_document)
        strides = [s for t in (q, k, v) for s in t.stride()[:3]]
        grid, sizes = (cdiv(length, tile["BLOCK_M"]) * B * H,), (k.shape[2], length, B * H, H, H // k.shape[1], D)
        how = _unit(q, scale), window
        launch(
            _fwd,
            grid,
            q,
            k,
            v,
            sinks,
            first,
            valid,
            at,
            o,
            lse,
            share,
            lost,
            *sizes,
            *strides,
            *how,
            EVEN_D=_even(q),
            **_order(by_document),
            **tile,
        )
    return o, lse, share, lost


@typed_launcher
def sink_attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, o: Tensor, lse: Tensor, share: Tensor, lost: Tensor,
    window: int | None, first: Tensor | None, valid: Tensor | None, scale: float, needed: list[bool], by_document: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not ``needed`` are empty."""
    (B, H, length, D), G = q.shape, q.shape[1] // k.shape[1]
    (dq, dk, dv), blocks = (new_like(t, need) for t, need in zip((q, k, v), needed)), cdiv(length, ROWS)
    parts = q.new_empty(blocks, B, H if needed[3] else 0, dtype=torch.float32)
    if not tracing(q):
        delta, wide = torch.empty_like(lse), max(16, next_power_of_2(D))
        tile = dict(NEED_SINK=needed[3], BLOCK_M=ROWS, BLOCK_D=wide, num_warps=4)
        numbers = length, B * H, H, D, *do.stride()[:3]
        launch(_delta, (blocks * B * H,), do, o, sinks, lse, share, lost, delta, parts, *numbers, **tile)
        strides, saved = [s for t in (do, q, k, v) for s in t.stride()[:3]], (lse, share, delta)
        how, flags = (_unit(q, scale), scale, window), dict(EVEN_D=_even(q), **_order(by_document))
        if needed[0]:
            tile = _tile("dq", q, window, by_document)
            grid, sizes = (cdiv(length, tile["BLOCK_M"]) * B * H,), (length, B * H, H, G, D)
            launch(_bwd_dq, grid, do, q, k, v, first, valid, *saved, dq, *sizes, *strides, *how, **flags, **tile)
        if needed[1] or needed[2]:
            tile = _tile("dkv", q, window, by_document) | dict(NEED_DK=needed[1], NEED_DV=needed[2])
            grid, sizes = (cdiv(length, tile["BLOCK_N"]) * B * H // G,), (length, B * H // G, H, G, D)
            stops = None
            if first is not None:
                stops = first[1] if by_document else _stops(first, tile["BLOCK_N"])
            numbers = *sizes, *strides, *how
            launch(_bwd_dkv, grid, do, q, k, v, first, valid, stops, *saved, dk, dv, *numbers, **flags, **tile)
    return dq, dk, dv, parts.sum((0, 1)).to(sinks.dtype)


class LigerSinkAttentionFunction(torch.autograd.Function):
    """``apply(q, k, v, sinks, window, first, valid, scale)``; ``first`` may be ``documents``."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, window, first, valid, scale):
        q, k, v, made = unit(q), unit(k), unit(v), first is not None and first.ndim == 3
        ctx.by_document = made or is_invariant()
        if ctx.by_document and not made:
            first = documents(q.shape[0], q.shape[2], q.device, first, valid)
        o, *sums = sink_attention_fwd(q, k, v, sinks, window, first, valid, None, scale, ctx.by_document)
        ctx.save_for_backward(q, k, v, sinks, o, *sums, first, valid)
        ctx.window, ctx.scale = window, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        *saved, first, valid = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:4])
        how = ctx.window, first, valid, ctx.scale, needed, ctx.by_document
        return input_gradients(ctx, sink_attention_bwd(unit(do), *saved, *how))


def later_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, made: Tensor, valid: Tensor | None, at: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of the tokens from ``at`` on, an integer on the device, in the order of ``documents``
    of all tokens, of which k and v are. Without gradients."""
    return sink_attention_fwd(unit(q), unit(k), unit(v), sinks, window, made, valid, at, scale, True)[0]


def _cost(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *,
    window: int | None = None, valid: Tensor | None = None, first: Tensor | None = None, **_: Any,
) -> Cost:  # fmt: skip
    (B, H, length, D), seen = q.shape, min(q.shape[2], window or q.shape[2])
    # products are over the pairs that see each other
    pairs = B * H * (seen * (seen + 1) // 2 + (length - seen) * seen)
    given = nbytes(q, k, v, sinks, valid, first)
    return Cost(given + nbytes(q), given + nbytes(q, q, k, v, sinks), gemms=([(pairs, 1, D)] * 2, [(pairs, 1, D)] * 4))


def _heads(B: int, H: int, K: int, length: int, D: int) -> dict[str, T]:
    return dict(q=T((B, H, length, D)), k=T((B, K, length, D)), v=T((B, K, length, D)), sinks=T((H,)))


def _ends(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows padded on the right, but the last: on the left, and all of it but a few."""
    length = shape[1]
    valid = torch.arange(length) < length - 5 * torch.arange(shape[0])[:, None]
    valid[-1] = torch.arange(length) >= length - 3
    return valid


def _beginnings(*shape: int, dtype: torch.dtype) -> Tensor:
    """Documents that begin at every seventh token, the one after the first in the middle of a
    block."""
    return torch.arange(shape[1]).div(7, rounding_mode="floor").mul(7).expand(*shape).contiguous()


@op(
    reference=reference,
    cases=[
        Case("gpt-oss", dict(**_heads(2, 4, 2, 40, 64))),
        Case("blocks", dict(**_heads(1, 2, 1, 70, 64))),
        Case("gpt-oss-window", dict(**_heads(1, 2, 1, 90, 64), window=17)),
        Case("padded", dict(**_heads(3, 2, 2, 37, 16), valid=T((3, 37), _ends, dtype=torch.bool))),
        Case("packed", dict(**_heads(2, 4, 2, 50, 24), first=T((2, 50), _beginnings, dtype=torch.int64), scale=0.5)),
        Case(
            "odd",
            _heads(1, 3, 1, 33, 20)
            | dict(
                valid=T((1, 33), _ends, dtype=torch.bool), first=T((1, 33), _beginnings, dtype=torch.int32), window=5
            ),
        ),
        Case("one-token", dict(**_heads(3, 2, 2, 1, 8))),
    ],
    cost=_cost,
)
def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *,
    window: int | None = None, valid: Tensor | None = None, first: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention with a learned score for each head that only adds to the softmax's
    denominator. Returns (B, H, T, D) like q, (B, T, H, D) in memory.

    q (B, H, T, D), k and v (B, H / G, T, D): one dtype, which is autocast's if it is on; any
    strides. sinks (H,): any floating dtype. A token sees itself and the tokens before it: with
    ``window`` the last ``window`` of these, with ``first`` (B, T), integers, those from its first
    key on, with ``valid`` (B, T), bool, those that are valid. A token that sees none gives zero.
    ``scale`` defaults to ``D ** -0.5``. Differentiable in q, k, v and sinks. Memory grows with T
    where kernels run (D up to 256), and with T squared where PyTorch operations do.
    """
    name = "sink_attention"
    if q.ndim != 4 or not q.is_floating_point():
        raise ValueError(f"{name}: q must have shape (B, H, T, D), got {q.dtype} {tuple(q.shape)}")
    B, H, length, D = q.shape
    if (dtype := autocast_dtype(q)) is not None:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (B, length, D) or k.dtype != q.dtype:
        raise ValueError(
            f"{name}: k must have shape ({B}, H / G, {length}, {D}) and dtype {q.dtype}, got {k.dtype} {tuple(k.shape)}"
        )
    if H and (not k.shape[1] or H % k.shape[1]):
        raise ValueError(f"{name}: k must have a number of heads that divides q's, {H}, got {k.shape[1]}")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(
            f"{name}: v must have k's shape and dtype, {tuple(k.shape)} {k.dtype}, got {tuple(v.shape)} {v.dtype}"
        )
    checks.floating_shape(name, (H,), sinks=sinks)
    checks.positive(name, window=window)
    checks.integers(name, (B, length), first=first)
    if valid is not None and (valid.shape != (B, length) or valid.dtype != torch.bool):
        raise ValueError(f"{name}: valid must be bool of shape ({B}, {length}), got {valid.dtype} {tuple(valid.shape)}")
    scale = max(D, 1) ** -0.5 if scale is None else scale
    if is_invariant() and q.numel() and not q.is_cuda and not use_kernels(q):
        return by_token(q, k, v, sinks, window=window, valid=valid, first=first, scale=scale)
    if not use_kernels(q) or not 0 < D <= MAX_D or not q.numel():
        return reference(q, k, v, sinks, window=window, valid=valid, first=first, scale=scale)
    # kernels take positions as int32; a sequence is shorter than that
    first = None if first is None else first.to(torch.int32).contiguous()
    valid = None if valid is None else valid.contiguous()
    return LigerSinkAttentionFunction.apply(q, k, v, sinks.contiguous(), window, first, valid, scale)
