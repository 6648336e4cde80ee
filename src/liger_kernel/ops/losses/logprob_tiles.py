"""The kernel of log-probabilities: it folds a tile of logits, some tokens by some classes, into
statistics of each token, or replaces the tile by its gradient, or both.

Shapes: z (M, N), the tile whose first class is ``start``; target (M, K).  A token's statistics need
no second pass over earlier tiles (online softmax, arXiv:1805.02867), counted from a logit m near
the largest:

    s = sum exp(z - m)    a = sum exp(z - m) (z - m)    q = sum exp(z - m)^2

    lse = m + log s      entropy = log s - a / s      log sum_j p_j^2 = log q - 2 log s

With ``kept``, log-probabilities are normalised over those classes alone: m and s exist twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import launch, tracing, use_kernels
from liger_kernel.ops._core.tl import exp_of, jit, log, next_power_of_2, store_if, tl
from liger_kernel.ops.losses.cross_entropy_rows import higher, transformed, transformed_logits

OUTPUTS = ("entropy", "log_sum_sq", "mean_logit", "top1", "lse")
# rows of ``Found.state``; after the last tile, s and kept_s are logarithms and a is the entropy
_ROWS = ("m", "s", "a", "q", "sum", "kept_m", "kept_s", "top")
_LEAST = -1e30  # below every logit that counts; times a number of classes it is still finite
_LOG2E = tl.constexpr(1.4426950408889634)


class Numbers(NamedTuple):
    """What defines log-probabilities, apart from tensors. A temperature that is one number is
    part of ``logit_scale`` and ``softcap``. V: classes of the whole head; ``first``: the first one
    of this rank's part of it, whose ranks are ``group``, a name or empty."""

    V: int
    first: int
    group: str
    ignore_index: int
    logit_scale: float
    softcap: float | None
    entropy: bool
    log_sum_sq: bool
    mean_logit: bool
    top1: bool
    lse: bool


@dataclass
class Found:
    """Results (M,) of each token, empty unless requested, logp (M, K), and the ``state`` that
    further tiles and the gradient need."""

    logp: Tensor
    entropy: Tensor
    log_sum_sq: Tensor
    mean_logit: Tensor
    top1: Tensor
    lse: Tensor
    state: Tensor

    @classmethod
    def empty(cls, target: Tensor, n: Numbers, dtype: torch.dtype) -> Found:
        M = target.shape[0]
        new = lambda wanted, dtype=dtype: target.new_empty(M if wanted else 0, dtype=dtype)
        state = target.new_empty((len(_ROWS), M), dtype=dtype)
        each = (new(n.entropy), new(n.log_sum_sq), new(n.mean_logit), new(n.top1, torch.int64), new(n.lse))
        return cls(target.new_empty(target.shape, dtype=dtype), *each, state)

    def __getitem__(self, rows: slice) -> Found:
        logp, entropy, log_sum_sq, mean_logit, top1, lse = (t[rows] for t in self.fields()[:-1])
        return Found(logp, entropy, log_sum_sq, mean_logit, top1, lse, self.state[:, rows])

    def fields(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


@jit
def _logits(z_ptr, bias_ptr, col, mask, scale, cap, per_t, HOT: tl.constexpr, EVICT: tl.constexpr):
    """Logits as the distribution has them, and tanh, for the derivative of the softcap."""
    z, t = transformed_logits(z_ptr, bias_ptr, col, mask, scale, cap, EVICT)
    if HOT:
        z *= per_t
    return z, t


@jit
def _sums(
    z_ptr, bias_ptr, kept_ptr, first_y, N, m, kept_m, scale, cap, per_t, lane, HOT: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, MEAN: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's sums of exp(z - m), of that times z - m, of its square, of z and of exp(z - kept_m)
    of kept classes; its largest z and where that is. What no flag asks for is 0."""
    PRECISE: tl.constexpr = z_ptr.dtype.element_ty == tl.float32
    # lanes of their own: a reduction for each block would cost a barrier of all warps
    ss = tl.zeros((BLOCK,), tl.float32)
    aa = tl.zeros((BLOCK,), tl.float32)
    qs = tl.zeros((BLOCK,), tl.float32)
    zs = tl.zeros((BLOCK,), tl.float32)
    ks = tl.zeros((BLOCK,), tl.float32)
    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, N, BLOCK):
        col = first + lane
        mask = col < N
        z, _ = _logits(z_ptr, bias_ptr, col, mask, scale, cap, per_t, HOT, "evict_last")
        if MEAN:
            zs += tl.where(mask, z, 0.0)
        if TOP:
            maxima, at = higher(z, col, mask, maxima, at)
        d = tl.where(mask, z - m, -1e30)
        e = exp_of(d, PRECISE)
        ss += e
        if ENTROPY:
            aa += e * tl.maximum(d, -1e30)
        if SQUARES:
            qs += e * e
        if kept_ptr is not None:
            kept = (tl.load(kept_ptr + col, mask=mask, other=0) != 0) | (col == first_y)
            ks += tl.where(kept & mask, exp_of(z - kept_m, PRECISE), 0.0)
    none = tl.cast(0.0, tl.float32)
    top = tl.max(maxima, axis=0) if TOP else none
    return (
        tl.sum(ss, axis=0),
        tl.sum(aa, axis=0) if ENTROPY else none,
        tl.sum(qs, axis=0) if SQUARES else none,
        tl.sum(zs, axis=0) if MEAN else none,
        tl.sum(ks, axis=0) if kept_ptr is not None else none,
        top,
        # as torch.argmax has it: the first class among equals
        tl.min(tl.where(maxima == top, at, N), axis=0) if TOP else tl.cast(0, tl.int32),
    )


@jit
def _largest(z_ptr, bias_ptr, kept_ptr, first_y, N, scale, cap, per_t, lane, HOT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of the first N classes; with ``kept_ptr``, of those kept."""
    maxima = tl.full((BLOCK,), -1e30, tl.float32)
    for first in range(0, N, BLOCK):
        col = first + lane
        mask = col < N
        z, _ = _logits(z_ptr, bias_ptr, col, mask, scale, cap, per_t, HOT, "evict_last")
        if kept_ptr is not None:
            mask = mask & ((tl.load(kept_ptr + col, mask=mask, other=0) != 0) | (col == first_y))
        maxima = tl.where(mask, tl.maximum(z, maxima), maxima)
    return tl.max(maxima, axis=0)


@jit
def _tile(
    z_ptr, dz_ptr, target_ptr, bias_ptr, temperature_ptr, kept_ptr, state_ptr, logp_ptr,
    entropy_ptr, sq_ptr, mean_ptr, top_ptr, lse_ptr, g_ptr, g_entropy_ptr,
    M, start, N, V, K, z_stride, dz_stride, target_stride, kept_stride, state_stride, logp_stride,
    g_stride, g_class_stride, g_entropy_stride, ignore_index, logit_scale, softcap,
    FIRST: tl.constexpr, FOLD: tl.constexpr, FINISH: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program. FOLD: add the tile to the statistics, which are empty before the FIRST;
    FINISH: it was the last, store the results. With ``dz``, store the gradient, for upstream
    gradients of 1 if there are none."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    state_ptr += row
    lane = tl.arange(0, BLOCK)
    each = tl.arange(0, K_BLOCK)
    target = tl.load(target_ptr + row * target_stride + each, mask=each < K, other=ignore_index)
    counts = target != ignore_index
    inside = (target >= 0) & (target < V)
    y = target - start
    here = counts & (y >= 0) & (y < N) & inside
    wrong = tl.max((counts & (inside == 0)).to(tl.int32), axis=0) > 0
    PRECISE: tl.constexpr = z_ptr.dtype.element_ty == tl.float32
    per_t = 1.0
    if temperature_ptr is not None:
        per_t = 1.0 / tl.load(temperature_ptr + row).to(tl.float32)

    if tl.max(counts.to(tl.int32), axis=0) == 0:
        if FINISH:
            tl.store(logp_ptr + row * logp_stride + each, 0.0, mask=each < K)
            store_if(entropy_ptr, row, 0.0)
            store_if(sq_ptr, row, 0.0)
            store_if(mean_ptr, row, 0.0)
            store_if(top_ptr, row, -1)
            store_if(lse_ptr, row, 0.0)
        if dz_ptr is not None:
            dz_ptr += row * dz_stride
            for first in range(0, N, BLOCK):
                tl.store(dz_ptr + first + lane, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=first + lane < N)
    else:
        # the logits of the targets, before a gradient takes their place
        HOT: tl.constexpr = temperature_ptr is not None
        z_y, t_y = _logits(z_ptr, bias_ptr, y, here, logit_scale, softcap, per_t, HOT, "")
        first_y = tl.max(tl.where(here, y, -1), axis=0)
        if FIRST:
            m, s, a = tl.cast(-1e30, tl.float32), tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
        else:
            m = tl.load(state_ptr)
            s = tl.load(state_ptr + state_stride)
            a = tl.load(state_ptr + 2 * state_stride)
        kept_m, kept_s = m, s
        if kept_ptr is not None:
            kept_ptr += row * kept_stride
            if not FIRST:
                kept_m = tl.load(state_ptr + 5 * state_stride)
                kept_s = tl.load(state_ptr + 6 * state_stride)
        if FOLD:
            ENTROPY: tl.constexpr = entropy_ptr is not None
            SQUARES: tl.constexpr = sq_ptr is not None
            MEAN: tl.constexpr = mean_ptr is not None
            TOP: tl.constexpr = top_ptr is not None
            # counted from the largest logit of the first block, or of earlier tiles; should that not
            # suit the rest, from the largest of all
            new = tl.maximum(
                m,
                _largest(
                    z_ptr, bias_ptr, None, first_y, tl.minimum(N, BLOCK), logit_scale, softcap, per_t, lane, HOT, BLOCK
                ),
            )
            kept_new = kept_m
            if kept_ptr is not None:
                kept_new = tl.maximum(
                    kept_m,
                    _largest(z_ptr, bias_ptr, kept_ptr, first_y, N, logit_scale, softcap, per_t, lane, HOT, BLOCK),
                )
            tile_s, tile_a, tile_q, tile_sum, tile_kept, tile_top, tile_at = _sums(
                z_ptr, bias_ptr, kept_ptr, first_y, N, new, kept_new, logit_scale, softcap, per_t, lane,
                HOT, ENTROPY, SQUARES, MEAN, TOP, BLOCK,
            )  # fmt: skip
            # a difference of sums loses what they have in common: of e^20 and 20 e^20, too much
            if (tile_s < 1e9) == 0:
                new = tl.maximum(
                    m, _largest(z_ptr, bias_ptr, None, first_y, N, logit_scale, softcap, per_t, lane, HOT, BLOCK)
                )
                tile_s, tile_a, tile_q, tile_sum, tile_kept, tile_top, tile_at = _sums(
                    z_ptr, bias_ptr, kept_ptr, first_y, N, new, kept_new, logit_scale, softcap, per_t, lane,
                    HOT, ENTROPY, SQUARES, MEAN, TOP, BLOCK,
                )  # fmt: skip
            d = m - new
            old = exp_of(d, PRECISE)
            if ENTROPY:
                a = tile_a + (a + s * d) * old
            if SQUARES:
                q = tile_q
                if not FIRST:
                    q += tl.load(state_ptr + 3 * state_stride) * old * old
            if MEAN:
                total = tile_sum
                if not FIRST:
                    total += tl.load(state_ptr + 4 * state_stride)
            if TOP:
                best = tile_at + start
                if not FIRST:
                    top = tl.load(state_ptr + 7 * state_stride)
                    best = tl.where(tile_top > top, best, tl.load(top_ptr + row).to(tl.int32))
                    tile_top = tl.maximum(top, tile_top)
                tl.store(state_ptr + 7 * state_stride, tile_top)
            s = tile_s + s * old
            m = new
            if kept_ptr is not None:
                kept_s = tile_kept + kept_s * exp_of(kept_m - kept_new, PRECISE)
                kept_m = kept_new
            else:
                kept_m, kept_s = m, s
            if FINISH:
                if not FIRST:
                    z_y = tl.where(here, z_y, tl.load(logp_ptr + row * logp_stride + each, mask=each < K, other=0.0))
                log_s = log(s)
                kept_s = log(kept_s) if kept_ptr is not None else log_s
                logp = (z_y - kept_m) - kept_s
                logp = tl.where(logp > 0.0, 0.0, logp)  # a probability above 1 is rounding
                logp = tl.where(counts, tl.where(inside, logp, float("nan")), 0.0)
                tl.store(logp_ptr + row * logp_stride + each, logp, mask=each < K)
                poison = tl.where(wrong, float("nan"), 0.0)
                if ENTROPY:
                    a = log_s - a / s
                    a = tl.where(a < 0.0, 0.0, a)
                    tl.store(entropy_ptr + row, a + poison)
                if sq_ptr is not None:
                    tl.store(sq_ptr + row, log(q) - 2.0 * log_s + poison)
                if mean_ptr is not None:
                    tl.store(mean_ptr + row, total / V)
                if top_ptr is not None:
                    tl.store(top_ptr + row, best)
                if lse_ptr is not None:
                    tl.store(lse_ptr + row, m + log_s)
                s = log_s
            else:
                # one tile, of one rank, has a target's logit: the others have 0
                tl.store(
                    logp_ptr + row * logp_stride + each, tl.where(here, z_y, 0.0), mask=here | (FIRST & (each < K))
                )
                if sq_ptr is not None:
                    tl.store(state_ptr + 3 * state_stride, q)
                if mean_ptr is not None:
                    tl.store(state_ptr + 4 * state_stride, total)
                if top_ptr is not None:
                    tl.store(top_ptr + row, best)
            tl.store(state_ptr, m)
            tl.store(state_ptr + state_stride, s)
            tl.store(state_ptr + 2 * state_stride, a)
            tl.store(state_ptr + 5 * state_stride, kept_m)
            tl.store(state_ptr + 6 * state_stride, kept_s)
        if dz_ptr is not None:
            dz_ptr += row * dz_stride
            slope = per_t
            if logit_scale is not None:
                slope = per_t * tl.cast(logit_scale, tl.float32)
            g = tl.where(counts, 1.0, 0.0)
            if g_ptr is not None:
                g *= tl.load(g_ptr + row * g_stride + each * g_class_stride, mask=each < K, other=0.0).to(tl.float32)
            g = tl.where(counts & (inside == 0), float("nan"), g * slope)
            spread = tl.sum(g, axis=0)
            ge = 0.0
            if g_entropy_ptr is not None:
                ge = slope * tl.load(g_entropy_ptr + row * g_entropy_stride).to(tl.float32)
            # no warp may still be reading a target's logit when another one overwrites it
            tl.debug_barrier()
            blocks = tl.cdiv(N, BLOCK)
            # one number, if its rounding costs less than that of the logits
            lse = m + s
            for i in range(0, blocks):
                # back from where a sweep before has ended, whose part of the row is in the cache
                col = (blocks - 1 - i) * BLOCK + lane
                mask = col < N
                z, t = _logits(z_ptr, bias_ptr, col, mask, logit_scale, softcap, per_t, HOT, "evict_first")
                # exp2 of two products is one instruction less
                p = exp_of((z - m) - s, True) if PRECISE else tl.exp2(z * _LOG2E - lse * _LOG2E)
                dz = -spread * p
                if kept_ptr is not None:
                    kept = (tl.load(kept_ptr + col, mask=mask, other=0) != 0) | (col == first_y)
                    dz = -spread * tl.where(kept, exp_of((z - kept_m) - kept_s, PRECISE), 0.0)
                if g_entropy_ptr is not None:
                    dz -= ge * p * ((tl.maximum(z, -1e30) - m) - s + a)
                if softcap is not None:
                    dz *= 1.0 - t * t
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
            # the targets' own columns, once the others are written; equal targets store the same sum
            p_y = exp_of((z_y - m) - s, PRECISE)
            dz_y = -spread * exp_of((z_y - kept_m) - kept_s, PRECISE)
            if g_entropy_ptr is not None:
                dz_y -= ge * p_y * ((tl.maximum(z_y, -1e30) - m) - s + a)
            same = (y[:, None] == y[None, :]) & here[None, :]
            dz_y += tl.sum(tl.where(same, g[None, :], 0.0), axis=1)
            if softcap is not None:
                dz_y *= 1.0 - t_y * t_y
            tl.debug_barrier()
            tl.store(dz_ptr + y, dz_y.to(dz_ptr.dtype.element_ty), mask=here)


def tile(
    z: Tensor, target: Tensor, n: Numbers, found: Found, start: int, *, first: bool = False, finish: bool = False,
    dz: Tensor | None = None, bias: Tensor | None = None, temperature: Tensor | None = None,
    kept: Tensor | None = None, g: Tensor | None = None, g_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Fold the logits z (M, N) of the classes from ``start`` on into ``found``, which holds nothing
    before the ``first`` tile, and (or) write their gradient to ``dz``, z itself or another buffer:
    both if the first tile is the only one.

    target (M, K), bias (N,), temperature (M,), kept (M, N) bool, g (M, K), g_entropy (M,).
    """
    if tracing(z):
        return
    fold = first or dz is None
    (M, N), K = z.shape, target.shape[1]
    if not use_kernels(z):
        _tile_in_torch(z, target, n, found, start, first, fold, finish, dz, bias, temperature, kept, g, g_entropy)
        return
    some = lambda t: t if t.numel() else None
    scale = None if n.logit_scale == 1.0 else n.logit_scale
    wide = min(next_power_of_2(max(N, 16)), 4096)
    # fmt: skip: tensors, then sizes and strides, then numbers
    launch(
        _tile, (M,), z, dz, target, bias, temperature, kept, found.state, found.logp,
        some(found.entropy), some(found.log_sum_sq), some(found.mean_logit), some(found.top1), some(found.lse),
        g, g_entropy, M, start, N, n.V, K, z.stride(0), 0 if dz is None else dz.stride(0), target.stride(0),
        0 if kept is None else kept.stride(0), found.state.stride(0), found.logp.stride(0),
        *((0, 0) if g is None else g.stride()), 0 if g_entropy is None else g_entropy.stride(0), n.ignore_index,
        scale, n.softcap, FIRST=first, FOLD=fold, FINISH=finish, K_BLOCK=next_power_of_2(K), BLOCK=wide,
        num_warps=max(1, min(8, wide // 256)),
    )  # fmt: skip


def merged(states: Tensor) -> Tensor:
    """One ``Found.state`` of several (P, rows, M), each of other classes."""
    m, s, a, q, total, kept_m, kept_s, maxima = states.unbind(1)
    top, kept_top = m.amax(0), kept_m.amax(0)
    d = m - top
    e = d.exp()
    sums = (s * e).sum(0), ((a + s * d) * e).sum(0), (q * e * e).sum(0), total.sum(0)
    return torch.stack([top, *sums, kept_top, (kept_s * (kept_m - kept_top).exp()).sum(0), maxima.amax(0)])


def _tile_in_torch(
    z, target, n: Numbers, found: Found, start, first, fold, finish, dz, bias, temperature, kept, g, g_entropy
) -> None:
    N = z.shape[1]
    a, t = transformed(z, bias, n)
    per_t = 1.0 if temperature is None else 1 / temperature.to(a.dtype)[:, None]
    a = (a * per_t).clamp(min=_LEAST)
    counts, inside = target != n.ignore_index, (target >= 0) & (target < n.V)
    y = target - start
    here = counts & inside & (y >= 0) & (y < N)
    y = y.where(here, 0)
    valid = counts.any(1)
    poison = a.new_zeros(len(a)).masked_fill((counts & ~inside).any(1), float("nan"))
    m, s, ent, q, total, kept_m, kept_s, maxima = found.state
    if kept is not None:
        # K is 1: the target is one of the kept classes
        kept = kept.scatter(1, y, kept.gather(1, y) | here)
    if first:
        found.state.zero_()
        for row in (m, kept_m, maxima):
            row.fill_(_LEAST)
        found.logp.zero_()
    if fold and N:
        found.logp.copy_(torch.where(here, a.gather(1, y), found.logp))
        top, best = a.max(1)
        if n.top1:
            found.top1.copy_(torch.where(top > m, best + start, found.top1))
        d = a - top[:, None]
        e, b = d.exp(), a if kept is None else a.masked_fill(~kept, _LEAST)
        kept_top = b.amax(1)
        kept_e = (b - kept_top[:, None]).exp()
        kept_e = kept_e if kept is None else kept_e * kept
        own = top, e.sum(1), (e * d).sum(1), e.square().sum(1), a.sum(1), kept_top, kept_e.sum(1), top
        found.state.copy_(merged(torch.stack([found.state, torch.stack(own)])))
    if finish:
        log_s = s.log()
        ent.copy_((log_s - ent / s).clamp(min=0))
        for out, value in (
            (found.entropy, ent + poison),
            (found.log_sum_sq, q.log() - 2 * log_s + poison),
            (found.mean_logit, total / n.V),
            (found.lse, m + log_s),
        ):
            if out.numel():
                out.copy_(value.where(valid, 0))
        if n.top1:
            found.top1.masked_fill_(~valid, -1)
        s.copy_(log_s)
        kept_s.log_()
        logp = ((found.logp - kept_m[:, None]) - kept_s[:, None]).clamp(max=0)
        found.logp.copy_(logp.masked_fill(~inside, float("nan")).where(counts, 0))
    if dz is not None:
        slope = n.logit_scale * per_t
        g = counts.to(a.dtype) if g is None else g.to(a.dtype).where(counts, 0)
        g = g.masked_fill(counts & ~inside, float("nan")) * slope
        spread, log_p = g.sum(1, keepdim=True), (a - m[:, None]) - s[:, None]
        p = log_p.exp()
        d = torch.zeros_like(p)
        if g_entropy is not None:
            d = -(g_entropy.to(a.dtype)[:, None] * slope) * p * (log_p + ent[:, None])
        if kept is not None:
            p = ((a - kept_m[:, None]) - kept_s[:, None]).exp() * kept
        d = (d - spread * p).scatter_add_(1, y, g.where(here, 0))
        if t is not None:
            d = d * (1 - t.square())
        dz.copy_(d.masked_fill(~valid[:, None], 0))
