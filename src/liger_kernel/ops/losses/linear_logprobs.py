"""Log-probabilities of given tokens under a linear head, and what else trainers ask of its
distribution, without ever storing all logits.

Shapes: x (..., H), w (V, H), bias (V,), target (...) or (..., K).  With z = softcap * tanh((x w^T +
bias) * logit_scale / softcap) / temperature, without the softcap z = (x w^T + bias) * logit_scale /
temperature, and p = softmax(z):

    logp = z_y - lse    lse = logsumexp(z)    entropy = lse - sum_j p_j z_j
    log_sum_sq = log(sum_j p_j^2)    mean_logit = sum_j z_j / V    top1 = argmax(z)

    d logp / d z_j = [j = y] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)

Tokens whose target is ``ignore_index`` have 0 everywhere (top1 -1).

There are three ways, by what needs a gradient:

frozen head    Chunks of tokens, with all classes. The gradient of a token's log-probability to its
               hidden state depends on the loss by one factor alone: that of a unit upstream
               gradient is computed beside the logits, and the backward multiplies it. Two products
               instead of three. A gradient of the entropy has a factor of its own: it computes the
               logits again.
few tokens     Their logits stay for the backward: three products.
otherwise      Tiles of all tokens by some classes, in the forward and again in the backward: four
               products. Each row of dw is one product over all tokens, rounded once, and dx is
               summed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launcher, once_differentiable, op
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops._core.operator import on_gpu, only_pytorch, rows_of, shaped, tracing, unlike
from liger_kernel.ops._core.products import add_mm
from liger_kernel.ops._core.reduce import scaled_rows
from liger_kernel.ops._core.schema import fields_of
from liger_kernel.ops.losses.chunks import (
    Kept,
    auto_chunk_rows,
    chunks_of,
    dtype_of_dw,
    logits,
    only_hidden,
    regathered,
    rounded_sums,
)
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.cross_entropy_rows import Loss, check
from liger_kernel.ops.losses.divergence.distillation import capped
from liger_kernel.ops.losses.float8_head import check_fp8
from liger_kernel.ops.losses.linear_cross_entropy import (
    Options,
    _of,
    all_logits,
    apply,
    check_head,
    head_cost,
    kept_rows,
    needed,
    products_dtype,
    promoted,
)
from liger_kernel.ops.losses.logprob_tiles import OUTPUTS, Found, Numbers, merged, tile
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import gathered, part_of, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TOKENS = 32768  # in a tile, so that fp32 sums of dx stay small


def tile_classes(M: int, V: int, gpu: bool) -> int:
    """Classes in a tile of M tokens: 256 MiB of 16-bit logits, on a CPU 32 MiB. (H200, 8192 x 4096 x
    151936: 62.9 ms, with half of it 65.9.)"""
    if is_invariant():
        return V  # each way of computing has the same product then, whatever the number of tokens is
    wide = ((1 << 27) if gpu else (1 << 24)) // max(1, min(M, _TOKENS)) // 256 * 256
    return min(V, max(2048 if gpu else 256, wide))


def _tokens() -> int:
    """Tokens of a tile: fewer where it has all classes."""
    return 1024 if is_invariant() else _TOKENS


def _mask(ids: Tensor, offsets: Tensor, M: int, first: int, start: int, N: int) -> Tensor:
    """(M, N) bool: which of the N classes from ``start`` on are among the ``ids`` of M tokens
    from ``first`` on. ids (n,), offsets (tokens + 1,)."""
    row = torch.searchsorted(offsets.contiguous(), torch.arange(len(ids), device=ids.device), right=True) - 1
    row, col = row - first, ids - start
    here = (row >= 0) & (row < M) & (col >= 0) & (col < N)
    mask = ids.new_zeros(M * N + 1, dtype=torch.bool)  # the last is for all that are elsewhere
    mask.index_fill_(0, torch.where(here, row * N + col, M * N), True)
    return mask[:-1].view(M, N)


def reference(
    x, w, target, bias, *, temperature, logit_scale, softcap, ignore_index, outputs, keep_ids, keep_offsets,
    vocab_size, group, sizes, xa, wb, fp8, **how,
):  # fmt: skip
    shape, K = x.shape[:-1], target.shape[x.ndim - 1 :].numel()
    x, xa, target = x.reshape(-1, x.shape[-1]), xa if xa is None else xa.flatten(0, -2), target.reshape(-1, K)
    if group is not None and group.size() > 1:
        raise ValueError("linear_logprobs: group must be None where PyTorch traces or transforms the call")
    w, bias, wb = (t if t is None or vocab_size is None else t[:vocab_size] for t in (w, bias, wb))
    z = capped(all_logits(x, w, bias, xa, wb, fp8), logit_scale, softcap)
    z = z.to(acc(z.dtype)) / (temperature.reshape(-1, 1) if isinstance(temperature, Tensor) else temperature)
    counts, inside = target != ignore_index, (target >= 0) & (target < w.shape[0])
    y, valid, nan = target.where(inside, 0), counts.any(1), float("nan")
    log_p = z.log_softmax(-1)
    lse = kept_lse = z.logsumexp(-1)
    if keep_ids is not None:
        kept = _mask(keep_ids, keep_offsets, len(z), 0, 0, z.shape[1]).scatter(1, y, True)
        kept_lse = z.masked_fill(~kept, -float("inf")).logsumexp(-1)
    # factors, so that gradients are NaN, too
    poison = z.new_ones(()).where(inside | ~counts, nan)
    logp = ((z.gather(1, y) - kept_lse[:, None]) * poison).where(counts, 0)
    some = poison.prod(1)
    found = {
        "entropy": -(log_p.exp() * log_p.clamp(min=torch.finfo(z.dtype).min)).sum(-1) * some,
        "log_sum_sq": ((2 * log_p).logsumexp(-1) * some).detach(),
        "mean_logit": z.mean(-1).detach(),
        "top1": z.argmax(-1),
        "lse": lse.detach(),
    }
    each = (found[name].where(valid, -1 if name == "top1" else 0).view(shape) for name in outputs)
    logp = logp.view(shape if K == 1 and target.ndim else (*shape, K))
    return (logp, *each) if outputs else logp


_IN = (
    "Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? xa, Tensor? wb, Tensor? temperature, Tensor? ids, "
    f"Tensor? offsets, Tensor? kept, {fields_of(Numbers)}, bool fp32_logits"
)
_N = len(Numbers._fields)


def _classes(w: Tensor, n: Numbers) -> int:
    """How many of the rows of this rank's w are classes; the rest is padding."""
    return max(0, min(w.shape[0], n.V - n.first))


def _cut(w: Tensor | None, at: slice, dtype: torch.dtype) -> Tensor | None:
    """A tile of a weight in the products' dtype: of a master copy in fp32, no other copy exists."""
    # views and conversions that change nothing cost the host some microseconds each
    if w is None or (at.stop - at.start == len(w) and w.dtype == dtype):
        return w
    return w[at].to(dtype)


def _among(d: Tensor, kept: Tensor | None, like: Tensor) -> Tensor:
    """A gradient of all tokens, of those that are not ``kept`` 0."""
    return d if kept is None else d.new_zeros(like.shape).index_copy_(0, kept, d)


def _row_chunks(M: int, step: int) -> list[slice]:
    chunks = chunks_of(M, max(1, min(M, step)))
    return unlike(chunks)


def _spans(M: int, classes: int, wide: int | None, gpu: bool) -> list[slice]:
    """The classes of each tile."""
    wide = wide or tile_classes(M, classes, gpu)
    return [slice(i, min(i + wide, classes)) for i in range(0, classes, max(1, wide))]


def _sweep(inputs, n: Numbers, chunks: list[slice], spans: list[slice], z: Tensor, known: bool, gradients: bool):
    """Of each chunk of tokens: its rows, a function that cuts a tensor to these, and the tiles: their
    classes, logits, and arguments of ``tile``, one of them a buffer for the gradient.

    ``z`` of two dims are all logits, ``known`` or yet to be computed; else it has their dtype."""
    x, w, bias, xa, wb, temperature, ids, offsets = inputs
    longest = lambda parts: max((part.stop - part.start for part in parts), default=0)
    whole = longest(chunks) * longest(spans)
    buffer = z if z.ndim == 2 else z.new_empty(whole)
    # a gradient takes the place of logits that nobody reads again and products can read
    shared = z.ndim == 1 and z.dtype == x.dtype
    of_dz = buffer if shared else x.new_empty(whole if gradients else 0)
    part = lambda t, m, c: t if t.ndim == 2 else t[: m * c].view(m, c)

    def tiles(rows: slice, some):
        m, x_c, xa_c, of_rows = rows.stop - rows.start, some(x), some(xa), dict(temperature=some(temperature))
        for at in spans:
            c = at.stop - at.start
            z_c, dz = part(buffer, m, c), part(of_dz, m, c) if gradients else None
            if not known:
                logits(z_c, x_c, _cut(w, at, x.dtype), xa_c, _cut(wb, at, x.dtype))
            nucleus = None if ids is None else _mask(ids, offsets, m, rows.start, n.first + at.start, c)
            yield at, z_c, of_rows | dict(dz=dz, bias=_cut(bias, at, x.dtype), kept=nucleus)

    for rows in chunks:
        # views cost the host some microseconds each: none where the chunk is the whole
        some = lambda t, rows=rows: t if t is None or len(t) == rows.stop - rows.start else t[rows]
        yield rows, some, tiles(rows, some)


@launcher(
    f"({_IN}, str way, bool need_dx, bool need_dxa, int? chunk_rows, int? chunk_classes)"
    " -> (Tensor logp, Tensor entropy, Tensor log_sum_sq, Tensor mean_logit, Tensor top1, Tensor lse, Tensor state,"
    " Tensor z, Tensor dx, Tensor? dxa)"
)
def linear_logprobs_fwd(x, w, target, bias, xa, wb, temperature, ids, offsets, kept, *rest):
    """The results of ``Found`` for the ``kept`` tokens; all logits if ``way`` is "few"; gradients
    for unit upstream gradients if it is "frozen"."""
    x, target, xa, temperature = (_of(t, kept) for t in (x, target, xa, temperature))
    n, (fp32_logits, way, need_dx, need_dxa, chunk_rows, chunk_classes) = Numbers(*rest[:_N]), rest[_N:]
    M, classes, frozen = x.shape[0], _classes(w, n), way == "frozen"
    found = Found.empty(target, n, acc(x.dtype))
    z = x.new_empty((M, classes) if way == "few" else 0, dtype=acc(x.dtype) if fp32_logits else x.dtype)
    dx = x.new_empty(x.shape if frozen and need_dx else 0)
    dxa = xa.new_empty(xa.shape) if xa is not None and frozen and need_dxa else None
    if tracing(x):
        return *found.fields(), z, dx, dxa
    chunks = _row_chunks(M, {"tiles": _tokens(), "few": M, "frozen": chunk_rows}[way])
    spans = _spans(M, classes, chunk_classes if way == "tiles" else classes, on_gpu(x))
    inputs = x, w, bias, xa, wb, temperature, ids, offsets
    for rows, some, tiles in _sweep(inputs, n, chunks, spans, z, False, frozen):
        m, y = rows.stop - rows.start, some(target)
        of_rows = found if m == M else found[rows]
        for at, z_c, of_tile in tiles:
            ends = dict(first=at is spans[0], finish=at is spans[-1] and not n.group)
            tile(z_c, y, n, of_rows, n.first + at.start, **ends, **of_tile)
            for d, weight in ((dx, w), (dxa, wb)):
                if d is not None and d.numel():
                    torch.mm(of_tile["dz"], _cut(weight, at, x.dtype), out=some(d))
        if n.group:
            none = x.new_empty(m, 0)
            if not spans:
                tile(none, y, n, of_rows, 0, first=True)
            _merge(of_rows, n)
            tile(none, y, n, of_rows, 0, finish=True, kept=None if ids is None else none.bool())
    return *found.fields(), z, dx, dxa


def _merge(found: Found, n: Numbers) -> None:
    """Make the statistics of this rank's classes those of all classes; one rank has a target's
    logit."""
    (R, M), K = found.state.shape, found.logp.shape[1]
    parts = gathered(torch.cat([found.state.flatten(), found.logp.flatten()]), n.group)[0]
    found.logp.copy_(parts[:, R * M :].sum(0).view(M, K))
    states = parts[:, : R * M].view(-1, R, M)
    found.state.copy_(merged(states))
    if n.top1:
        # the first rank among equals, whose classes come first
        best = gathered(found.top1.contiguous(), n.group)[0]
        found.top1.copy_(best.gather(0, states[:, -1].argmax(0, keepdim=True))[0])


@launcher(
    f"(Tensor g, Tensor? g_entropy, Tensor state, Tensor z, {_IN}, bool need_dx, bool need_dw, bool need_db,"
    " bool need_dxa, bool need_dwb, ScalarType? accum_dtype, int? chunk_classes)"
    " -> (Tensor dx, Tensor dw, Tensor db, Tensor? dxa, Tensor? dwb)"
)
def linear_logprobs_bwd(g, g_entropy, state, z, x, w, target, bias, xa, wb, temperature, ids, offsets, kept, *rest):
    """All gradients, from the logits ``z`` if they were kept. dx and dxa of a head in parts are in
    the dtype of sums, as other ranks add to them."""
    whole = x, xa
    x, target, xa, temperature = (_of(t, kept) for t in (x, target, xa, temperature))
    n, (fp32_logits, *need, accum_dtype, chunk_classes) = Numbers(*rest[:_N]), rest[_N:]
    need_dx, need_dw, need_db, need_dxa, need_dwb = need
    (M, H), classes, sums = x.shape, _classes(w, n), acc(x.dtype)
    dx = x.new_empty((M, H) if need_dx else 0, dtype=sums if n.group else x.dtype)
    dxa = xa.new_empty(xa.shape, dtype=dx.dtype) if xa is not None and need_dxa else None
    dw = w.new_empty(w.shape if need_dw else 0, dtype=dtype_of_dw(w))
    db = x.new_zeros(w.shape[0] if need_db else 0, dtype=sums)
    dwb = wb.new_empty(wb.shape, dtype=sums) if wb is not None and need_dwb else None
    few, chunks = z.numel() > 0, [] if tracing(x) else _row_chunks(M, _tokens())
    spans = _spans(M, classes, classes if few else chunk_classes, on_gpu(x)) if chunks else []
    # dw is a sum over chunks of 32,768 tokens; one chunk is one product, which rounds once
    if accum_dtype is None:
        accum_dtype = dw.dtype if len(chunks) <= rounded_sums(M, n.V) else acc(w.dtype)
    total = dw if len(chunks) < 2 or accum_dtype == dw.dtype else dw.new_empty(dw.shape, dtype=accum_dtype)
    for t in (total if need_dw else None, dwb):
        if t is not None:
            t[classes if chunks else 0 :] = 0  # rows that are no class
    inputs = x, w, bias, xa, wb, temperature, ids, offsets
    of_z = z if few else x.new_empty(0, dtype=sums if fp32_logits else x.dtype)
    for rows, some, tiles in _sweep(inputs, n, chunks, spans, of_z, few, True):
        first, x_c, y = rows.start == chunks[0].start, some(x), some(target)
        of_rows = state if len(chunks) == 1 else state[:, rows]
        found = Found(of_rows, *(state.new_empty(0),) * 5, of_rows)
        # of several tiles, dx and dxa are sums in fp32, rounded at their end
        outs = [(some(d), of) for d, of, wanted in ((dx, w, need_dx), (dxa, wb, need_dxa)) if wanted and d is not None]
        added = [d if len(spans) == 1 else d.new_zeros(d.shape, dtype=sums) for d, _ in outs]
        for at, z_c, of_tile in tiles:
            tile(z_c, y, n, found, n.first + at.start, g=some(g), g_entropy=some(g_entropy), **of_tile)
            dz = of_tile["dz"]
            for d, (_, of) in zip(added, outs):
                add_mm(d, dz, _cut(of, at, x.dtype), first=len(spans) == 1)
            if need_dw and total.itemsize >= x.itemsize:
                add_mm(total[at], dz.t(), x_c, first=first)
            elif need_dw:
                # a head in 16 bits whose products are in fp32
                total[at] = torch.mm(dz.t(), x_c) + (0 if first else total[at])
            if dwb is not None:
                add_mm(dwb[at], dz.t(), some(xa), first=first)
            if need_db:
                db[at] += dz.sum(0, dtype=db.dtype)
        for (d, _), total_x in zip(outs, added):
            if d is not total_x:
                d.copy_(total_x)
    dx = _among(dx, kept, whole[0]) if need_dx else dx
    dxa = dxa if dxa is None else _among(dxa, kept, whole[1])
    return dx, dw if total is dw else dw.copy_(total), db, dxa, dwb


class LinearLogProbsFunction(torch.autograd.Function):
    """``apply(x, w, target, bias, xa, wb, temperature, ids, offsets, kept, Numbers, Options, whether the
    entropy gets a gradient, classes of a tile, whether logp has no dim of targets)`` -> logp, of x's
    leading dims and perhaps that of targets, and the five ``OUTPUTS``; with ``kept``, of these tokens."""

    @staticmethod
    def forward(ctx, x, w, target, bias, xa, wb, temperature, ids, offsets, kept, n, o, entropy_grad, wide, one):
        ctx.set_materialize_grads(False)  # an entropy that is only reported must not cost a backward
        ctx.shape, ctx.n, ctx.o, ctx.wide, x, need = x.shape, n, o, wide, rows_of(x), o.need
        M, same = x.shape[0] if kept is None else len(kept), w.dtype == x.dtype and not n.group
        lead = ctx.shape[:-1] if kept is None else kept.shape
        rows = o.chunk_rows or auto_chunk_rows(M, *w.shape, x.itemsize, on_gpu(x), frozen=not need[1])
        factor = same and target.shape[1] == 1 and only_hidden(need)
        few = same and any(need) and 0 < M <= rows and not is_invariant()
        ctx.way = "frozen" if factor and not entropy_grad else "few" if few else "tiles"
        inputs = (x, w, target, bias, xa, wb, temperature, ids, offsets, kept)
        how = o.fp32_logits, ctx.way, need[0], need[3], rows, wide
        logp, entropy, *others, state, z, dx, dxa = linear_logprobs_fwd(*inputs, *n, *how)
        if any(need):
            ctx.save_for_backward(state, z, dx, dxa, *inputs)
        entropy = shaped(entropy, lead) if n.entropy else entropy
        ctx.mark_non_differentiable(*others, *(() if n.entropy else (entropy,)))
        return shaped(logp, lead if one else (*lead, target.shape[1])), entropy, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy, *_):
        state, z, dx, dxa, *inputs = ctx.saved_tensors
        (x, w, target, bias, xa), kept, n, o, need = inputs[:5], inputs[9], ctx.n, ctx.o, ctx.o.need
        if g is None and g_entropy is None:
            return (None,) * 15
        y = _of(target, kept)
        g = state.new_zeros(y.shape) if g is None else g.reshape(y.shape)
        if ctx.way == "frozen" and (g_entropy is None or not n.entropy):
            g = g.masked_fill(y == n.ignore_index, 0)  # 0 stays 0, whatever the upstream gradient is
            times = lambda t, of: _among(scaled_rows(t, g), kept, of)
            dx, dxa = times(dx, x).view(ctx.shape) if need[0] else None, times(dxa, xa) if need[3] else None
            return dx, None, None, None, dxa, *(None,) * 10
        with regathered(w, bias):
            # a recorded graph passes zeros for results that have no gradient
            h = None if g_entropy is None or not n.entropy else g_entropy.reshape(-1)
            how = o.fp32_logits, *need, o.accum_dtype, ctx.wide
            dx, dw, db, dxa, dwb = linear_logprobs_bwd(g, h, state, z, *inputs, *n, *how)
        for d in (dx, dxa) if n.group else ():
            if d is not None and d.numel():
                torch.distributed.all_reduce(d, group=process_group(n.group))
        dx, dw, db, dxa, dwb = (d if wanted else None for d, wanted in zip((dx, dw, db, dxa, dwb), need))
        of_x = lambda t: t if t is None else t.to(x.dtype)
        dx = None if dx is None else of_x(dx).view(ctx.shape)
        return dx, dw, None, None if db is None else db.to(bias.dtype), of_x(dxa), of_x(dwb), *(None,) * 9


def _cost(x, w, target, bias=None, *, vocab_size=None, xa=None, wb=None, fp8=None, **_) -> Cost:
    M, V = x.shape[:-1].numel(), vocab_size or w.shape[0]
    return head_cost(M, V, w, (x, w, target, bias, xa, wb), (x, w, bias, xa, wb), xa, fp8)


def _head(*shape: int, V: int, K: tuple[int, ...] = (), frozen: bool = False, **options: Any) -> dict[str, Any]:
    """Arguments of a case: x of this shape, a head of V classes, K targets a token or one."""
    head = T((V, shape[-1]), grad=not frozen)
    return dict(x=T(shape), w=head, target=targets((*shape[:-1], *K), V), **options)


def _nucleus(M: int, V: int, each: int) -> dict[str, T]:
    """Some of V classes for each of M tokens."""
    ids = lambda *shape, dtype: torch.rand(M, V).argsort(1)[:, :each].flatten()
    offsets = lambda *shape, dtype: torch.arange(M + 1) * each
    kept = T((M * each,), ids, dtype=torch.int64), T((M + 1,), offsets, dtype=torch.int64)
    return dict(zip(("keep_ids", "keep_offsets"), kept))


def _temperatures(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, dtype=dtype) + 0.5


_ALL, _ENTROPY = dict(outputs=OUTPUTS, entropy_grad=True), dict(outputs=("entropy",), entropy_grad=True)
_LORA = dict(xa=T((9, 3)), wb=T((65, 3)))


@op(
    reference=reference,
    cases=[
        Case("grpo", _head(9, 32, V=65, temperature=0.9, chunk_rows=1, chunk_classes=16, **_ENTROPY)),
        Case("few", _head(20, 16, V=65, **_ALL)),
        Case("tiles", _head(2, 5, 16, V=70, chunk_rows=1, chunk_classes=32, **_ALL)),
        Case("bias", _head(9, 16, V=40, bias=T((40,)), temperature=1.3, chunk_rows=4, chunk_classes=16)),
        Case("gemma2", _head(7, 16, V=40, softcap=2.0, logit_scale=0.5, temperature=0.7, chunk_rows=3, **_ALL)),
        Case("top-k", _head(6, 16, V=50, K=(5,), chunk_rows=1, chunk_classes=16, softcap=3.0, **_ALL)),
        Case("top-k-few", _head(2, 3, 16, V=50, K=(3,), outputs=("entropy",))),
        Case("frozen", _head(9, 16, V=40, frozen=True, chunk_rows=4, outputs=("entropy", "top1"))),
        Case("frozen-entropy", _head(9, 16, V=40, frozen=True, chunk_rows=4, entropy_grad=True, outputs=("entropy",))),
        Case("temperatures", _head(9, 16, V=40, temperature=T((9,), _temperatures, False), softcap=2.0, **_ALL)),
        Case("nucleus", _head(8, 16, V=40, chunk_rows=1, chunk_classes=16, **_nucleus(8, 40, 6), **_ALL)),
        Case("padded", _head(7, 16, V=40, vocab_size=33, chunk_rows=1, chunk_classes=16)),
        Case("fp32-logits", _head(9, 16, V=40, fp32_logits=True, chunk_rows=4, **_ENTROPY)),
        Case("compact", _head(24, 16, V=40, compact=True, chunk_rows=7, **_ALL)),
        Case("lora", _head(9, 16, V=65, frozen=True, chunk_rows=1, chunk_classes=32, **_ALL, **_LORA)),
        Case("fp8", _head(64, 32, V=80, fp8="rowwise", chunk_rows=40, outputs=("entropy",), temperature=0.9)),
    ],
    cost=_cost,
)
def linear_logprobs(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100, outputs: tuple[str, ...] = (),
    entropy_grad: bool = False, keep_ids: Tensor | None = None, keep_offsets: Tensor | None = None,
    vocab_size: int | None = None, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None,
    compact: bool | Kept = False, accum_dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    chunk_classes: int | None = None, fp32_logits: bool = False, xa: Tensor | None = None, wb: Tensor | None = None,
    fp8: str | None = None,
) -> Any:  # fmt: skip
    """fp32 log-probabilities of ``target``, and a tuple of them and ``outputs`` if there are any.

    x (..., H), w (V, H), bias (V,), target (...) or (..., K) for K classes a token, each with its
    gradient. Differentiable in x, w, bias, xa and wb.

    temperature: a number, or one for each token (...), without a gradient.
    outputs: some of "entropy" (differentiable), "log_sum_sq" (log of the sum of squared
    probabilities), "mean_logit", "top1" (the most likely class), "lse", each (...), in the order
    asked for.
    entropy_grad: the loss differentiates the entropy. This only saves time: with a frozen head it
    makes such a gradient cost one product more and not two.
    keep_ids, keep_offsets (M + 1,): the classes that a sampler kept for each of the M tokens,
    ``keep_ids[keep_offsets[i]:keep_offsets[i + 1]]``: the log-probability is normalised over these
    and the target, the other outputs over all classes.
    vocab_size: the first rows of w that are classes; the rest is padding.
    group: the ranks that have slices of the classes, w (N, H) on each; x and target are the same on
    all, and so are the results. dx is summed over the ranks. sizes: N of every rank, if they differ.
    compact: leave out tokens to ignore, as in ``linear_cross_entropy``, which has accum_dtype,
    fp32_logits, xa, wb and fp8, too. chunk_rows and chunk_classes: tokens of a chunk, and classes
    of a tile. With fp8: one target, no keep_ids, group, vocab_size or temperatures of tokens, and of the
    outputs only "entropy", "mean_logit" and "top1".
    """
    name = "linear_logprobs"
    lead = x.shape[:-1]
    one, K = target.ndim < x.ndim, target.shape[len(lead) :].numel()
    if unknown := next((output for output in outputs if output not in OUTPUTS), None):
        raise ValueError(f"{name}: outputs must be some of {OUTPUTS}, got {unknown!r}")
    hot = isinstance(temperature, Tensor)
    if hot and temperature.shape != lead:
        got = tuple(temperature.shape)
        raise ValueError(f"{name}: temperature must be a number or of shape {tuple(lead)}, got {got}")
    if hot and temperature.requires_grad:
        raise ValueError(f"{name}: temperature must need no gradient, got one that does")
    if not hot:
        checks.positive(name, temperature=temperature)
    scalar, per_token = (1.0, temperature.reshape(-1).contiguous()) if hot else (temperature, None)
    rows, thin = (x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x), xa if xa is None else xa.reshape(-1, xa.shape[-1])
    check_head(name, rows, w, bias, chunk_rows, thin, wb)
    if target.shape[: len(lead)] != lead or target.ndim > x.ndim:
        shape = f"{tuple(lead)} or ({', '.join(map(str, lead))}, K)"
        raise ValueError(f"{name}: target must have shape {shape}, got {tuple(target.shape)}")
    first, V, shared = _part(name, w, group, sizes)
    if vocab_size is not None and not 0 < vocab_size <= V:
        raise ValueError(f"{name}: vocab_size must be in [1, {V}], got {vocab_size}")
    V = vocab_size or V
    offsets = None if keep_ids is None else len(rows) + 1
    if (None if keep_offsets is None else len(keep_offsets)) != offsets:
        lengths = " and ".join("None" if t is None else str(len(t)) for t in (keep_ids, keep_offsets))
        raise ValueError(f"{name}: keep_ids and keep_offsets must have n and {len(rows) + 1} numbers, got {lengths}")
    for argument, t in (("keep_ids", keep_ids), ("keep_offsets", keep_offsets)):
        if t is not None and (t.is_floating_point() or t.ndim != 1):
            raise ValueError(f"{name}: {argument} must be integers of one dim, got {t.dtype} {tuple(t.shape)}")
    if keep_ids is not None and K != 1:
        raise ValueError(f"{name}: target must have one class for each token with keep_ids, got {K}")
    y = check(name, (target.numel(), V), target.reshape(-1), None, "none", ignore_index)
    y = y.reshape(-1, K).contiguous()
    check_fp8(name, fp8, rows, fp32_logits=fp32_logits, xa=xa)
    if fp8 is None and only_pytorch():
        numbers = dict(temperature=temperature, logit_scale=logit_scale, softcap=softcap, ignore_index=ignore_index)
        of_head = dict(vocab_size=vocab_size, group=group, sizes=sizes, xa=xa, wb=wb)
        of_tokens = dict(outputs=outputs, keep_ids=keep_ids, keep_offsets=keep_offsets)
        return reference(x, w, target, bias, **numbers, **of_head, **of_tokens)
    wanted = tuple(output in outputs for output in OUTPUTS)
    # the same logits as those of the cap first and the temperature then
    scale, cap = logit_scale / scalar, None if softcap is None else softcap / scalar
    if fp8 is not None:
        none = (keep_ids, group, vocab_size, per_token)
        if K != 1 or any(t is not None for t in none) or wanted[1] or wanted[4]:
            possible = "only one target and the outputs 'entropy', 'mean_logit' and 'top1' are possible"
            raise ValueError(f"{name}: with fp8, {possible}, got {K} targets and {outputs}")
        numbers = dict(entropy=wanted[0], mean=wanted[2], stats=wanted[3])
        s = Loss(ignore_index, "none", logit_scale=scale, softcap=cap, **numbers)
        how = dict(compact=compact, accum_dtype=accum_dtype, chunk_rows=chunk_rows, fp32_logits=False, fp8=fp8)
        x2, w2, b2 = promoted(rows, w, bias)
        nll, _, best, entropy, mean = apply(x2, w2, y[:, 0], b2, None, s, None, **how)
        found = [-nll, entropy, None, mean, best, None]
    else:
        n = Numbers(V, first, shared, ignore_index, scale, cap, *wanted)
        dtype = products_dtype(rows, w)
        rows = rows.to(dtype)
        bias, thin, wb = (t if t is None else t.to(dtype) for t in (bias, thin, wb))
        bias = bias if bias is None else bias.contiguous()
        o = Options(needed(rows, w, bias, thin, wb), accum_dtype, chunk_rows, fp32_logits)
        kept = kept_rows(compact, y[:, 0], ignore_index) if K == 1 and keep_ids is None else None
        # of all leading dims: x itself, so that its gradient needs no view
        of_x = rows if x.ndim <= 2 or kept is not None else rows.view(x.shape)
        given = of_x, w, y, bias, thin, wb, per_token, keep_ids, keep_offsets, kept
        found = LinearLogProbsFunction.apply(*given, n, o, entropy_grad, chunk_classes, one)
        if kept is not None:
            # the other tokens have what ignored ones have; what was not requested stays empty
            fill = lambda t: t.new_full((len(y),), -1 if t.dtype == torch.int64 else 0)
            found = [t if len(kept) and not len(t) else fill(t).index_copy(0, kept, t.flatten()) for t in found]
    # here, because PyTorch 2.11 compiles no views of results without a gradient in a Function
    dims = lambda t, shape: t if t.ndim == len(shape) else t.view(shape)
    logp, others = dims(found[0], target.shape), [dims(found[1 + OUTPUTS.index(name)], lead) for name in outputs]
    return (logp, *others) if outputs else logp


def _part(name: str, w: Tensor, group: ProcessGroup | None, sizes: Sequence[int] | None) -> tuple[int, int, str]:
    """This rank's first class, the number of all classes, and the group's name."""
    if group is None:
        return 0, w.shape[0], ""
    part = part_of(name, w.shape[0], group, sizes, -100, 0.0, "pytorch", "global")
    return part.first, part.V, part.group
