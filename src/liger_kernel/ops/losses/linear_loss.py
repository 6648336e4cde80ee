"""Any loss of a linear head's log-probabilities, written as a few lines of PyTorch over per-token
tensors. It costs three GEMMs.

Shapes: x (M, H), w (V, H), bias (V,), target (M,); the M = B * T rows are B groups (sequences, or
pairs of them) of T consecutive tokens.

``fn(tokens, first, last)`` gets the log-probabilities (and entropies) of groups ``first`` to
``last`` and returns what these add to the loss, a 0-dim tensor. For each chunk: one GEMM computes
logits into a reused buffer; then come their log-probabilities, ``fn`` and its gradient by autograd,
the gradient of the logits in place (``linear_logprobs`` has the formula), and one GEMM each for dx
and dw. The backward only multiplies by the upstream gradient. This is DPO without a reference
model:

    def dpo(tokens, first, last):
        chosen, rejected = tokens.logp.view(last - first, 2, -1).sum(-1).unbind(1)
        return -F.logsigmoid(0.1 * (chosen - rejected)).sum() / pairs

    loss, _ = linear_loss(dpo, x, w, target, group=2 * T)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, once_differentiable
from liger_kernel.ops._core.operator import host_can_read, on_gpu, only_pytorch, rows_of
from liger_kernel.ops._core.reduce import scaled
from liger_kernel.ops.losses.chunks import HeadLoop, Kept, auto_chunk_rows, chunks_of, only_hidden
from liger_kernel.ops.losses.cross_entropy_rows import Loss, RowLosses, row_kernel
from liger_kernel.ops.losses.linear_cross_entropy import (
    Options,
    apply as nll,
    checked,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    needed,
    tempered,
)


@dataclass(frozen=True)
class Tokens:
    """The inputs of a loss, fp32 (groups, T) each, 0 where ignored: log-probabilities, entropies
    (None unless requested) and, without gradient, the mean of the logits and the most likely class."""

    logp: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    predicted: Tensor | None = None


Fn = Callable[[Tokens, int, int], "Tensor | tuple[Tensor, tuple[Tensor, ...]]"]


def linear_loss(
    fn: Fn, x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None = None, *, group: int = 1,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
    entropy: bool = False, mean_logit: bool = False, predicted: bool = False, whole: bool = False,
    compact: bool | Kept | None = False, accum_dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    fp32_logits: bool = False, xa: Tensor | None = None, wb: Tensor | None = None, fp8: str | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The sum of ``fn`` over chunks, differentiable in x, w, bias, xa and wb, and the ``aux`` of
    ``fn``.

    x (M, H), w (V, H), target (M,), bias (V,), M a multiple of ``group``; groups are never divided.
    ``fn`` may return ``(loss, aux)``: tensors of one or more dimensions are concatenated over
    chunks, 0-dim tensors are summed; they get no gradient. ``fn`` is differentiated only with
    respect to log-probabilities and entropies: other tensors that it uses get no gradient.
    ``mean_logit``, ``predicted``: compute these fields, too. ``compact`` (a bool or ``Kept(...,
    group=group)``) and the other options are those of ``linear_cross_entropy``.

    With ``whole`` or ``fp8``, for groups of more than two chunks, and under ``torch.compile``,
    ``fn`` is called once, with all groups, and the logits are computed twice, in chunks of any
    rows. The forward still computes the gradients (except under ``torch.compile``), so w may be
    gathered only for its duration.
    """
    name, unsupported = "linear_loss", dict(fp32_logits=fp32_logits, xa=xa)
    results = dict(stats=predicted, entropy=entropy, mean=mean_logit)
    s = tempered(name, temperature, logit_scale, softcap, ignore_index, **results)
    x, w, target, bias, xa, wb = checked(name, x, w, target, bias, None, s, chunk_rows, xa, wb, fp8, unsupported)
    M, B = x.shape[0], x.shape[0] // max(group, 1)
    if group < 1 or M % group:
        raise ValueError(f"{name}: group must divide the {M} rows of x, got {group}")
    o = Options(needed(x, w, bias, xa, wb), accum_dtype, chunk_rows, fp32_logits, fp8=fp8)
    # a graph cannot hold a call of ``fn`` for each chunk: one call with all groups
    if torch.compiler.is_compiling() or only_pytorch() or B == 0:
        losses, _, best, h, mean = nll(
            x, w, target, bias, None, s, None, False, accum_dtype, chunk_rows, fp32_logits, xa=xa, wb=wb, fp8=fp8
        )
        loss, aux = _called(fn, 0, B, group, s, (-losses, h, mean, best))
        return loss, tuple(a.detach() for a in aux)
    kept = counted(target, ignore_index, group, compact) if compact else None
    # groups that are longer than two chunks would make the logits buffer as long
    rows = o.chunk_rows or auto_chunk_rows(M, w.shape[0], w.shape[1], x.itemsize, on_gpu(x))
    loss, *aux = LinearLossFunction.apply(
        x, w, target, bias, xa, wb, fn, group, whole or fp8 is not None or group > 2 * rows, kept, s, o
    )
    return loss, tuple(aux)


def counted(target: Tensor, ignore_index: int, group: int, compact: bool | Kept = True) -> Kept | None:
    """The ``compact`` for several losses of the same targets: they are counted once, and the
    host waits once; None where the host must not wait."""
    if not target.numel() or not host_can_read(target):
        return None
    return Kept(target, ignore_index, group) if compact is True else compact or None


def _called(fn: Fn, first: int, last: int, group: int, s: Loss, found: Sequence[Tensor | None]) -> Any:
    """Loss and aux of ``fn`` for some groups, with ``found``: log-probabilities, entropies, mean
    logits and most likely classes of their tokens."""
    requested = (True, s.entropy, s.mean, s.stats)
    tokens = (t.view(-1, group) if wanted and t is not None else None for t, wanted in zip(found, requested))
    result = fn(Tokens(*tokens), first, last)
    return result if isinstance(result, tuple) else (result, ())


def _differentiated(
    fn: Fn, first: int, last: int, group: int, s: Loss, need: bool, logp: Tensor, h: Tensor, *stats: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """``_called``, without a graph, and the derivatives of the loss to log-probabilities and, if
    there are any, entropies."""
    # ``fn`` may differentiate with respect to these, and to nothing else
    leaves = [t.requires_grad_(need) for t in (logp, h)[: 1 + s.entropy]]
    with torch.set_grad_enabled(need):
        loss, aux = _called(fn, first, last, group, s, (leaves[0], leaves[-1], *stats))
    # a loss that does not depend on its tokens has no slope
    found: Any = [None] * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    slopes = [torch.zeros_like(t) if g is None else g.detach() for t, g in zip(leaves, found)]
    return loss.detach(), [a.detach() for a in aux], slopes


class LinearLossFunction(torch.autograd.Function):
    """``apply(x, w, target, bias, xa, wb, fn, group, whole, Kept or None, Loss, Options)`` ->
    loss, *aux."""

    @staticmethod
    def forward(ctx, x, w, target, bias, xa, wb, fn, group, whole, kept, s, o):
        x = rows_of(x)
        ctx.need, ctx.dtype = o.need, x.dtype
        grads, up, loss, aux = (_whole if whole else _by_chunks)(x, w, target, bias, xa, wb, fn, group, kept, s, o)
        ctx.save_for_backward(*grads, up)
        ctx.mark_non_differentiable(*aux)
        return loss, *aux

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        *saved, up = ctx.saved_tensors
        grads = scaled(saved, g if up is None else g / up)
        # the saved gradients are those for an upstream gradient of 1 (times ``up``)
        dx, dw, db, dxa, dwb = (grad if need else None for grad, need in zip(grads, ctx.need))
        dw, db, dwb = (None if d is None else d.to(ctx.dtype) for d in (dw, db, dwb))
        return dx, dw, None, db, dxa, dwb, *(None,) * 6


def _up(slopes: list[Tensor], target: Tensor, ignore_index: int) -> Tensor:
    """The power of two that brings the largest slope to between a half and 1, on the device.

    In fp16, gradients of a mean over many tokens would underflow before a loss scaler reaches them,
    those of a steep loss overflow: the backward divides.
    """
    largest = slopes[0].new_zeros(())
    for t in slopes:
        if t.numel():
            largest = torch.maximum(largest, t.where(target != ignore_index, 0).abs().amax())
    return torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent.clamp(-64, 126))


def _whole(x, w, target, bias, xa, wb, fn, group, kept, s, o):
    """Two sweeps: first log-probabilities, then, after ``fn`` has read them all, gradients.
    Returns the gradients times ``_up``, ``_up``, loss and aux."""
    index, need = None if kept is None else kept.rows(), any(o.need)
    inputs = (x, w, target, bias, None, index, xa, wb, *s, o.fp32_logits, o.fp8, o.accum_dtype, o.chunk_rows)
    # of a frozen head, the first sweep also computes gradients for slopes of 1
    ones = only_hidden(o.need) and not s.entropy and o.fp8 is None
    need_now = o.need if ones else (False,) * 5
    losses, _, best, h, mean, lse, _, *grads_of_ones, _ = linear_cross_entropy_fwd(*inputs, *need_now, None, False)
    loss, aux, slopes = _differentiated(fn, 0, x.shape[0] // group, group, s, need, -losses, h, mean, best)
    grads, up = (None,) * 5, None
    if need:
        if x.dtype == torch.float16:
            up = _up(slopes, target, s.ignore_index)
            slopes = [slope * up for slope in slopes]
        if ones:
            slope = -slopes[0].masked_fill(target == s.ignore_index, 0)[:, None]
            grads = tuple(t.mul_(slope) if t is not None and t.numel() else t for t in grads_of_ones)
        else:
            grads = linear_cross_entropy_bwd(-slopes[0], slopes[-1], lse, h.detach(), None, *inputs, *o.need)
    return grads, up, loss, aux


def _spread(t: Tensor, at: Tensor | None, n: int, fill: int = 0) -> Tensor:
    """``t``, or with ``at`` n values, of which those are ``t``'s; what was not requested is empty and
    stays so."""
    return t if at is None or len(t) != len(at) else t.new_full((n,), fill).index_copy_(0, at, t)


def _by_chunks(x, w, target, bias, xa, wb, fn, group, kept, s, o):
    """One sweep over chunks of whole groups; returns the same as ``_whole``. ``up`` is the
    smallest factor of the chunks so far."""
    plan, index = _plan(x.shape[0], w.shape[0], group, x, w, kept, o.chunk_rows)
    y = target if index is None else target.index_select(0, index)
    loss, found, up = x.new_zeros((), dtype=acc(x.dtype)), [], None
    # the loop knows rows; ``fn`` is called with groups
    of_rows = {rows.start: groups for groups, rows in plan}
    options = dict(chunks=[rows for _, rows in plan], accum_dtype=o.accum_dtype, fp32_logits=o.fp32_logits)
    loop = HeadLoop(x, w, o.need, **options, kept=index, xa=xa, wb=wb)
    for z, rows, dz in loop:
        first, last = of_rows[rows.start]
        out = RowLosses.empty(y[rows], s, acc(x.dtype))
        row_kernel(z, y[rows], s, bias=bias, out=out)
        # where the kept rows of this chunk lie in its groups; ignored tokens have log-probability
        # and entropy 0
        at, n = None if index is None else index[rows] - first * group, (last - first) * group
        h, mean, best = (_spread(out.entropy, at, n), _spread(out.mean, at, n), _spread(out.predicted, at, n, -1))
        tokens = -_spread(out.loss, at, n), h, mean, best
        part, aux, slopes = _differentiated(fn, first, last, group, s, dz is not None, *tokens)
        loss = loss + part
        found.append(aux)
        if dz is None:
            continue
        slopes = slopes if at is None else [g.index_select(0, at) for g in slopes]
        if x.dtype == torch.float16:
            # one factor for all chunks so far: a chunk with steeper slopes scales the earlier
            # gradients down
            own = _up(slopes, y[rows], s.ignore_index)
            before, up = up, own if up is None else torch.minimum(up, own)
            slopes = [g * up for g in slopes]
            if before is not None:
                loop.scale(up / before)
        more = dict(g_entropy=slopes[1], entropy=out.entropy.detach()) if s.entropy else {}
        row_kernel(z, y[rows], s, bias=bias, dz=dz, g=-slopes[0], lse=out.lse, **more)
    # tensors follow the groups; numbers are sums over chunks
    aux = [torch.cat(parts) if parts[0].ndim else torch.stack(parts).sum(0) for parts in zip(*found)]
    return loop.gradients(), up, loss, aux


def _plan(M: int, V: int, group: int, x: Tensor, w: Tensor, kept: Kept | None, chunk_rows: int | None):
    """Chunks of whole groups, [((first, last), rows)], and the numbers of the rows that they
    count among (None: all)."""
    index = None if kept is None else kept.rows()
    n = M if index is None else index.shape[0]
    rows = chunk_rows or auto_chunk_rows(n, V, w.shape[1], x.itemsize, on_gpu(x))
    if index is None:  # not more chunks than without groups
        each = group * (-(-(M // group) // max(1, -(-n // rows))) if chunk_rows is None else max(1, rows // group))
        return [((c.start // group, c.stop // group), c) for c in chunks_of(M, each)], None
    plan, first, start, stop = [], 0, 0, 0
    counts = kept.counts()
    for i, count in enumerate(counts):
        # a group that alone has more rows than a chunk is a chunk
        if stop > start and stop - start + count > rows:
            plan.append(((first, i), slice(start, stop)))
            first, start = i, stop
        stop += count
    return [*plan, ((first, len(counts)), slice(start, stop))], index
