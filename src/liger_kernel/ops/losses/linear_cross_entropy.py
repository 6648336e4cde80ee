"""Cross entropy of ``x w^T + bias`` without ever storing all logits: a loop over chunks of tokens
(arXiv:2410.10989).

Shapes: x (M, H), w (V, H), bias (V,), target (M,). The loss is that of ``cross_entropy`` (which has
the formula) on the logits. A head with adapters has the logits x w^T + xa wb^T + bias: xa (M, R) is
the thin product with the hidden states, which gets a gradient as x does, and wb (V, R) multiplies
it.

For each chunk, one GEMM computes logits into a reused buffer, the row kernel replaces them by their
gradient, and one GEMM each computes dx and
dw. All of this happens in the forward, where w is whole (ZeRO-3 and FSDP gather it for the
forward). The backward only multiplies by the upstream gradient. That is 6 M H V floating-point
operations. With ``reduction="none"``, the upstream gradient is a vector that only the backward
knows. The backward uses the logits of the forward if there was only one chunk; otherwise it
computes them again (8 M H V).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launcher, nbytes, once_differentiable, op
from liger_kernel.ops._core.operator import host_can_read, on_gpu, only_pytorch, rows_of, tracing
from liger_kernel.ops._core.reduce import scaled, scaled_rows
from liger_kernel.ops._core.schema import fields_of
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.losses.chunks import HeadLoop, Kept, auto_chunk_rows, logits, only_hidden
from liger_kernel.ops.losses.cross_entropy import items, positive, targets
from liger_kernel.ops.losses.cross_entropy_rows import (
    Loss,
    RowLosses,
    check,
    normaliser,
    reference as cross_entropy_reference,
    row_kernel,
    statistics,
)
from liger_kernel.ops.losses.float8_head import check_fp8, head_gradients
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.float8_training import RECIPES, float8_trained
from liger_kernel.ops.projections.linear import linears


def all_logits(x, w, bias, xa, wb, fp8: str | None) -> Tensor:
    """Those of a reference. With ``fp8``: of a linear layer that is trained in FP8, and of an
    exact one in fp64, which is the truth for both."""
    if fp8 is not None and x.dtype != torch.float64:
        # FP8 products need multiples of 16; columns and classes of zeros change nothing
        H, V = -x.shape[1] % 16, -w.shape[0] % 16
        padded = float8_trained(F.pad(w, (0, H, 0, V)), RECIPES[fp8])
        z = linears(F.pad(x, (0, H)), [Projection(padded)])[0][:, : len(w)]
        return z if bias is None else z + bias
    z = F.linear(x, w, bias)
    return z if xa is None else z + F.linear(xa, wb)


def reference(
    x, w, target, bias, class_weight, *,
    ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats,
    num_items, compact, xa, wb, fp8, **how,
):  # fmt: skip  # tensors, the loss, how it is computed
    s = Loss(ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    if fp8 is not None and compact:  # the scale of x is that of the rows that are left
        x = x.masked_fill((target == ignore_index)[:, None], 0)
    z = all_logits(x, w, bias, xa, wb, fp8)
    return cross_entropy_reference(z, target, class_weight, num_items=num_items, **s._asdict())


_IN = (
    "Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? kept, Tensor? xa, Tensor? wb, "
    f"{fields_of(Loss)}, bool fp32_logits, str? fp8, ScalarType? accum_dtype, int? chunk_rows, "
    "bool need_dx, bool need_dw, bool need_db, bool need_dxa, bool need_dwb"
)
_GRADS = "Tensor dx, Tensor dw, Tensor db, Tensor? dxa, Tensor? dwb"
_OUT = "Tensor loss, Tensor z_loss, Tensor predicted, Tensor entropy, Tensor mean, Tensor lse, Tensor? norm"
_N = len(Loss._fields)


def _with_into(run: Callable, dw_into: Tensor | None) -> Callable:
    """A launcher; with ``dw_into`` its plain function, because a registered operator cannot both
    return and write tensors."""
    # under torch.compile nobody comes here with ``dw_into``: the operator refuses it
    return run if dw_into is None else functools.partial(getattr(run, "__wrapped__"), dw_into=dw_into)  # noqa: B009


def _divides_later(x: Tensor, dw_into: Tensor | None) -> bool:
    """fp16 gradients of a mean over many tokens would underflow before a loss scaler reaches
    them: the backward divides, if they are not in a buffer then."""
    return x.dtype == torch.float16 and dw_into is None


def _of(t: Tensor | None, kept: Tensor | None) -> Tensor | None:
    return t if t is None or kept is None else t.index_select(0, kept)


def _gradients(
    x, w, y, bias, class_weight, kept, xa, wb, s: Loss, fp32_logits, fp8, accum_dtype, chunk_rows, *need,
    dw_into, out=None, norm=None, known=None, **rows: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The five gradients of ``_GRADS``, and ``out`` if it is given. y and ``rows``, arguments of
    ``row_kernel``, are those of the ``kept`` rows; ``known``: their logits."""
    of_head = dict(bias=bias, class_weight=class_weight, norm=norm)
    if fp8 is not None:
        how = dict(out=out, chunk_rows=chunk_rows, dw_into=dw_into)
        dx, dw, db = head_gradients(_of(x, kept), w, y, s, fp8, need, **of_head, **how, **rows)
        if kept is not None and dx.numel():
            dx = torch.zeros_like(x).index_copy_(0, kept, dx)
        return dx, dw, db, None, None
    how = dict(chunk_rows=chunk_rows, accum_dtype=accum_dtype, kept=kept, fp32_logits=fp32_logits, dw_into=dw_into)
    loop = HeadLoop(x, w, need, xa=xa, wb=wb, single=known is not None, **how)
    if known is not None:
        if not tracing(x):
            dz = known.new_empty(known.shape, dtype=x.dtype)
            row_kernel(known, y, s, dz=dz, **of_head, **rows)
            loop.add(slice(0, len(y)), dz, _of(x, kept), _of(xa, kept), kept)
        return loop.gradients()
    for z, chunk, dz in loop:
        y_c, of_chunk = y, rows | dict(out=out)
        # ``rows`` and ``out`` cover all kept rows, z only those of the chunk
        if len(z) != len(y):
            y_c, of_chunk = y[chunk], {name: t if t is None else t[chunk] for name, t in of_chunk.items()}
        row_kernel(z, y_c, s, dz=dz, **of_head, **of_chunk)
    return loop.gradients()


@launcher(f"({_IN}, Tensor? num_items, bool keep) -> ({_OUT}, {_GRADS}, Tensor? logits)")
def linear_cross_entropy_fwd(x, w, target, bias, class_weight, kept, xa, wb, *rest, dw_into=None):
    """Run the forward chunk by chunk, including the gradients. With ``keep``, the logits are one
    chunk, which is returned."""
    s, (*how, num_items, keep), y = Loss(*rest[:_N]), rest[_N:], _of(target, kept)
    norm, out, z = normaliser(target, class_weight, s, num_items), RowLosses.empty(y, s, acc(x.dtype)), None
    if keep:
        # no loop, and no gradient before the upstream ones are known
        z = x.new_empty(y.shape[0], w.shape[0], dtype=acc(x.dtype) if how[0] else x.dtype)
        if not tracing(x):
            logits(z, _of(x, kept), w, _of(xa, kept), wb)
            row_kernel(z, y, s, bias=bias, class_weight=class_weight, out=out)
        grads = *(x.new_empty(0) for _ in range(3)), None, None
    else:
        into = dict(dw_into=dw_into, out=out, norm=None if _divides_later(x, dw_into) else norm)
        grads = _gradients(x, w, y, bias, class_weight, kept, xa, wb, s, *how, **into)
    # results of all rows only where somebody sees them row by row; lse has only the ``kept`` rows
    every = out if kept is None or not (s.reduction == "none" or s.stats or s.mean) else out.among(kept, x.shape[0])
    found = *every.reduced(norm, s.reduction), every.predicted, every.entropy, every.mean, out.lse, norm
    return *found, *grads, z


@launcher(f"(Tensor g, Tensor g_entropy, Tensor lse, Tensor entropy, Tensor? logits, {_IN}) -> ({_GRADS})")
def linear_cross_entropy_bwd(
    g, g_entropy, lse, entropy, z, x, w, target, bias, class_weight, kept, xa, wb, *rest, dw_into=None
):
    """For per-token upstream gradients: from the ``logits`` that the forward kept, or from chunks
    that are computed again."""
    s, y = Loss(*rest[:_N]), _of(target, kept)
    g_entropy, entropy = (_of(t, kept) if s.entropy else None for t in (g_entropy, entropy))
    rows = dict(g=_of(g, kept), g_entropy=g_entropy, lse=lse, entropy=entropy)
    return _gradients(x, w, y, bias, class_weight, kept, xa, wb, s, *rest[_N:], dw_into=dw_into, known=z, **rows)


@dataclass(frozen=True)
class Options:
    """Options of the loop, apart from the loss. ``need``: which gradients are needed: x, w,
    bias, and also xa and wb if an operator has these."""

    need: tuple[bool, ...]
    accum_dtype: torch.dtype | None = None
    chunk_rows: int | None = None
    fp32_logits: bool = False
    dw_into: Tensor | None = None
    fp8: str | None = None


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``apply(x, w, target, bias, class_weight, num_items, kept, xa, wb, Loss, Options)`` ->
    loss, z-loss, predicted classes, entropy, mean logit."""

    @staticmethod
    def forward(ctx, x, w, target, bias, class_weight, num_items, kept, xa, wb, s, o):
        x, M = rows_of(x), x.shape[0] if kept is None else kept.shape[0]
        rows = functools.partial(auto_chunk_rows, M, *w.shape, x.itemsize, on_gpu(x))
        # a frozen w has no dw to sum, so that small chunks cost nothing but launches
        if any(o.need) and not o.need[1] and not o.chunk_rows and o.fp8 is None:
            o = dataclasses.replace(o, chunk_rows=rows(frozen=True))
        ctx.o = o
        fits = any(o.need) and o.fp8 is None and 0 < M <= (o.chunk_rows or rows())
        # with a reduction, the forward computes the gradients, and with a frozen head those for
        # upstream gradients of 1; else the backward does, from the logits if all of them are one
        # chunk, or from logits that it computes again
        ctx.rows = s.reduction == "none" and only_hidden(o.need) and o.fp8 is None and not s.entropy
        ctx.done = s.reduction != "none" or ctx.rows
        inputs = (x, w, target, bias, class_weight, kept, xa, wb)
        ctx.numbers = *s, o.fp32_logits, o.fp8, o.accum_dtype, o.chunk_rows
        need = o.need if ctx.done else (False,) * 5
        # only a forward that computes dw may add to it
        into = o.dw_into if need[1] else None
        run = _with_into(linear_cross_entropy_fwd, into)
        loss, z_loss, predicted, entropy, mean, lse, norm, *grads, z = run(
            *inputs, *ctx.numbers, *need, num_items, fits and not ctx.done
        )
        if ctx.done:
            ctx.ignored = s.ignore_index
            ctx.save_for_backward(*grads, target if ctx.rows else norm if _divides_later(x, into) else None)
        else:
            ctx.save_for_backward(lse, entropy, z, *inputs)
        differentiable = s.reduction == "none" and s.entropy
        ctx.mark_non_differentiable(z_loss, predicted, mean, *(() if differentiable else (entropy,)))
        return loss, z_loss, predicted, entropy, mean

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _z, _p, g_entropy, _m):
        o = ctx.o
        into = o.dw_into if o.need[1] else None
        if ctx.rows:
            *grads, target = ctx.saved_tensors
            # 0 stays 0, whatever the upstream gradient is
            g = g.masked_fill(target == ctx.ignored, 0)[:, None]
            grads = [scaled_rows(grad, g) if need else None for grad, need in zip(grads, o.need)]
        elif ctx.done:
            *grads, norm = ctx.saved_tensors
            grads = scaled(grads, g, norm)
            # dw has been added already, for an upstream gradient of 1
            if into is not None:
                _only_one_(into, g)
        else:
            upstream = g.contiguous(), g_entropy.contiguous()
            run = _with_into(linear_cross_entropy_bwd, into)
            grads = run(*upstream, *ctx.saved_tensors, *ctx.numbers, *o.need)
        dx, dw, db, dxa, dwb = (grad if need else None for grad, need in zip(grads, o.need))
        # autograd would add it a second time
        dw = None if o.dw_into is not None else dw
        return dx, dw, None, db, None, None, None, dxa, dwb, None, None


def _only_one_(total: Tensor, g: Tensor) -> None:
    """A gradient for an upstream gradient of 1 was added to ``total``. If ``g`` is not 1, set
    ``total`` to NaN, so that the mistake shows."""
    total.view(-1)[0].add_(torch.where(g == 1, 0.0, float("nan")).to(total.dtype))


def _head(M: int, H: int, V: int, ignored: int = 3, **options: Any) -> dict[str, Any]:
    return dict(x=T((M, H)), w=T((V, H)), target=targets(M, V, ignored), **options)


def head_cost(M: int, V: int, w: Tensor, read, written, xa: Tensor | None = None, fp8: str | None = None) -> Cost:
    """Of M tokens under the first V classes of w: three products."""
    width, R = w.shape[1], 0 if xa is None else xa.shape[-1]
    backward = [(M, width + R, V), (V, width * w.requires_grad + R, M)]
    gemms = [(M, V, width + R)], backward
    return Cost(nbytes(*read), nbytes(*written), gemms=gemms, rate=1 if fp8 is None else 2)


def _cost(
    x, w, target, bias=None, class_weight=None, *, ignore_index=-100, compact=False, xa=None, wb=None, fp8=None, **_
) -> Cost:
    # what compact leaves out is no work
    M = int((target != ignore_index).sum()) if compact else x.shape[0]
    return head_cost(M, w.shape[0], w, (x, w, target, bias, class_weight, xa, wb), (x, w, bias, xa, wb), xa, fp8)


_LORA = _head(9, 32, 65, xa=T((9, 3)), wb=T((65, 3)))


@op(
    reference=reference,
    cases=[
        Case("mean", _head(9, 32, 65, chunk_rows=4)),
        Case("one-chunk", _head(9, 32, 65)),
        Case("one-chunk-none", _head(9, 32, 65, bias=T((65,)), reduction="none")),
        Case("sum-chunks", _head(11, 16, 37, reduction="sum", chunk_rows=4)),
        Case("none", _head(7, 16, 40, reduction="none", chunk_rows=3, stats=True)),
        Case("bias", _head(7, 16, 40, bias=T((40,)), chunk_rows=3)),
        Case("gemma2", _head(6, 16, 50, softcap=2.0, stats=True)),
        Case("granite", _head(6, 16, 50, logit_scale=0.125)),
        Case(
            "everything",
            _head(8, 16, 50, bias=T((50,)), class_weight=T((50,), positive, grad=False))
            | dict(label_smoothing=0.1, z_loss=1e-2, logit_scale=0.5, softcap=3.0, chunk_rows=5),
        ),
        Case("dft", _head(6, 16, 50, token_scaling=True, logit_scale=0.25)),
        Case("fp32-sums", _head(12, 16, 50, accum_dtype=torch.float32, chunk_rows=3)),
        Case("many-chunks", _head(20, 16, 30, 7, chunk_rows=2)),
        Case("compact", _head(9, 16, 40, bias=T((40,)), compact=True, chunk_rows=4, stats=True)),
        Case("compact-none", _head(9, 16, 40, compact=True, chunk_rows=4, reduction="none")),
        Case("compact-one-none", _head(9, 16, 40, compact=True, reduction="none", z_loss=1e-2)),
        Case("fp32-logits", _head(9, 16, 40, fp32_logits=True, chunk_rows=4)),
        Case("num-items", _head(9, 16, 40, num_items=21, chunk_rows=4)),
        Case("lora", _LORA | dict(bias=T((65,)), chunk_rows=4)),
        Case("lora-compact", _LORA | dict(compact=True, chunk_rows=4, softcap=3.0)),
        Case("lora-none", _LORA | dict(reduction="none", compact=True, chunk_rows=4)),
        Case("lora-one-none", _LORA | dict(reduction="none", compact=True)),
        Case("lora-frozen", _LORA | dict(w=T((65, 32), grad=False), fp32_logits=True, chunk_rows=4)),
        Case("all-ignored", _head(3, 16, 20, 1, reduction="sum")),
        Case("fp8", _head(48, 32, 80, fp8="tensorwise")),
        Case("fp8-blocks", _head(64, 32, 160, bias=T((160,)), fp8="rowwise", chunk_rows=30, z_loss=1e-2)),
        Case(
            "fp8-none",
            _head(
                48,
                32,
                80,
                fp8="tensorwise",
                reduction="none",
                softcap=4.0,
                label_smoothing=0.1,
                compact=True,
                stats=True,
            ),
        ),
    ],
    cost=_cost,
)
def linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None = None, class_weight: Tensor | None = None, *,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    logit_scale: float = 1.0, softcap: float | None = None, token_scaling: bool = False, stats: bool = False,
    num_items: Tensor | float | None = None, compact: bool | Kept = False, accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None, fp32_logits: bool = False, dw_into: Tensor | None = None, xa: Tensor | None = None,
    wb: Tensor | None = None, fp8: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cross entropy of ``x @ w.T + bias`` and class indices, in chunks of tokens; runs on any
    device.

    x (M, H), w (V, H), target (M,) int64, bias (V,), class_weight (V,); x, w and bias are promoted
    to one dtype, under autocast to its dtype.
    Returns like ``cross_entropy``; ``num_items`` is what "mean" divides by instead of the number of
    tokens that count.

    compact: leave ignored tokens out of all products. True waits once for their number; a
    ``Kept(target, ignore_index)`` made when the labels came
    does not; ``torch.compile`` and CUDA graphs compute all tokens. ``chunk_rows`` tokens a chunk
    (default: ``auto_chunk_rows``). dw is summed over
    chunks in ``accum_dtype`` (default: fp32 in fp16 and beyond 5 or 6 chunks, else w's dtype), or
    straight into ``dw_into`` (V, H), a ``w.grad`` or ``w.main_grad`` of any dtype: then w gets no
    gradient of its own, and the upstream gradient of a reduced loss must be 1 (else ``dw_into``
    becomes NaN), so that no loss scaler saves small fp16 gradients of a mean from underflow.
    fp32_logits: logits are not rounded to x's dtype, for
    6 bytes a logit of a chunk instead of 2.
    xa (M, R), wb (V, R): of ``x @ w.T + xa @ wb.T + bias``, a head with adapters, in the dtype of x
    and w. If w needs no gradient nothing of its size exists. fp8: "tensorwise" or "rowwise", the
    scales of x and w in the logits' product: all three products run in FP8 (``float8_head``), with
    at most the memory of 16 bits. The loss differs by about 1e-3 of itself, gradients by 2 or 3 %.
    The GPU must have FP8; a CPU emulates. Not with fp32_logits, xa, or ``token_scaling`` of a loss
    that is not reduced. ``accum_dtype`` has no effect, as dw is not summed over chunks.
    """
    name = "linear_cross_entropy"
    if dw_into is not None and (torch.compiler.is_compiling() or only_pytorch()):
        where = "under torch.compile and wherever PyTorch traces or transforms the call"
        raise ValueError(f"{name}: dw_into must be None {where}, got a tensor")
    s = Loss(ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    scaling = token_scaling and reduction == "none"
    not_fp8 = dict(fp32_logits=fp32_logits, xa=xa, token_scaling=scaling)
    x, w, target, bias, xa, wb = checked(name, x, w, target, bias, class_weight, s, chunk_rows, xa, wb, fp8, not_fp8)
    if dw_into is not None and (dw_into.shape != w.shape or not dw_into.is_contiguous()):
        expected = f"contiguous, of shape {tuple(w.shape)}"
        raise ValueError(f"{name}: dw_into must be {expected}, got {tuple(dw_into.shape)}")
    how = (compact, accum_dtype, chunk_rows, fp32_logits, dw_into, xa, wb, fp8)
    out = apply(x, w, target, bias, class_weight, s, items(num_items, x), *how)
    return out[:3] if stats else out[0]


def checked(name, x, w, target, bias, class_weight, s: Loss, chunk_rows, xa, wb, fp8, not_fp8) -> tuple[Any, ...]:
    """x, w, target, bias, xa and wb in the dtypes of the products. Raise ``ValueError`` for arguments
    that have no meaning; ``not_fp8`` is what ``fp8`` cannot be combined with."""
    check_head(name, x, w, bias, chunk_rows, xa, wb)
    target = check(name, (x.shape[0], w.shape[0]), target, class_weight, s.reduction, s.ignore_index)
    x, w, bias, xa, wb = promoted(x, w, bias, xa, wb)
    check_fp8(name, fp8, x, **not_fp8)
    return x, w, target, bias, xa, wb


def tempered(
    name: str, temperature: float, logit_scale: float, softcap: float | None, ignore_index: int, **results: bool
) -> Loss:
    """The cross entropy of single tokens whose logits are divided by ``temperature``, which is one
    more scale; ``results``: more fields of ``Loss``."""
    checks.positive(name, temperature=temperature)
    scale = logit_scale / temperature
    return Loss(ignore_index=ignore_index, reduction="none", logit_scale=scale, softcap=softcap, **results)


def check_head(
    name: str, x: Tensor, w: Tensor, bias: Tensor | None, chunk_rows: int | None, xa: Tensor | None = None,
    wb: Tensor | None = None, classes: str = "V",
) -> None:  # fmt: skip
    """Raise ``ValueError`` for arguments that have no meaning for a linear head."""
    checks.floating(name, x=x, w=w)
    checks.dims(name, "(M, H)", x=x)
    if is_sharded(w) and not is_sharded(x):
        raise ValueError(f"{name}: w must be whole, as x is, got a DTensor: gather a sharded head before its loss")
    if w.ndim != 2 or w.shape[1] != x.shape[1] or (not w.shape[0] and classes == "V"):
        hint = "" if w.numel() else ": gather a sharded head before its loss"
        raise ValueError(f"{name}: w must have shape ({classes}, {x.shape[1]}), got {tuple(w.shape)}{hint}")
    checks.shape(name, w.shape[:1], bias=bias)
    checks.positive(name, chunk_rows=chunk_rows)
    if xa is None and wb is None:
        return
    M, V = x.shape[0], w.shape[0]
    if xa is None or wb is None or xa.ndim != 2 or xa.shape[0] != M or wb.shape != (V, xa.shape[1]):
        shapes = (None if t is None else tuple(t.shape) for t in (xa, wb))
        raise ValueError(
            f"{name}: xa and wb must have shapes ({M}, R) and ({V}, R), got {' and '.join(map(str, shapes))}"
        )


def products_dtype(x: Tensor, w: Tensor) -> torch.dtype:
    """The promoted dtype of x and w, or autocast's if it is on, as in ``F.linear``."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, w.dtype)
    return torch.get_autocast_dtype(device) if autocast else torch.promote_types(x.dtype, w.dtype)


def chunk_rows_of(memory: str | int, x: Tensor, w: Tensor) -> int | None:
    """Tokens per chunk whose logits take ``memory``: "auto", the operators' own choice; "low": as few
    as are needed; or so many bytes, but at least 128 tokens. More than there are is all."""
    if memory == "auto":
        return None
    itemsize = products_dtype(x, w).itemsize
    if memory == "low":
        V, H = w.shape
        return auto_chunk_rows(x.shape[0], V, H, itemsize, on_gpu(x), frozen=not w.requires_grad, low=True)
    return max(128, int(memory) // (w.shape[0] * itemsize) // 128 * 128)


def promoted(x: Tensor, w: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of the products."""
    dtype = products_dtype(x, w)
    return x.to(dtype), w.to(dtype), *(t if t is None else t.to(dtype) for t in others)


def kept_rows(compact: bool | Kept, target: Tensor, ignore_index: int) -> Tensor | None:
    """The rows to compute; None means all."""
    known = isinstance(compact, Kept) and compact.most is not None
    if compact is False or not (known or host_can_read(target)):
        return None
    return (Kept(target, ignore_index) if compact is True else compact).rows()


def apply(
    x, w, target, bias, class_weight, s: Loss, num_items,
    compact, accum_dtype, chunk_rows, fp32_logits, dw_into=None, xa=None, wb=None, fp8=None,
):  # fmt: skip
    """Apply ``LinearCrossEntropyFunction`` to checked arguments."""
    if only_pytorch():
        # all logits at once: exports and transforms see operators of PyTorch alone
        z = all_logits(x, w, bias, xa, wb, fp8)
        numbers = s._replace(stats=True)._asdict()
        found = cross_entropy_reference(z, target, class_weight, num_items=num_items, **numbers)
        return *found, *statistics(z, target, s)
    kept = kept_rows(compact, target, s.ignore_index)
    options = Options(needed(x, w, bias, xa, wb), accum_dtype, chunk_rows, fp32_logits, dw_into, fp8)
    return LinearCrossEntropyFunction.apply(x, w, target, bias, class_weight, num_items, kept, xa, wb, s, options)


def needed(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the tensors need a gradient."""
    return tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors)
