"""Vocabulary-parallel cross entropy of ``x w^T + bias`` without ever storing all of this rank's
logits: a loop over chunks of tokens.

Shapes: x (M, H), the same on all ranks; w (N, H), bias (N,) of this rank's classes; target (M,).
The loss is that of ``vocab_parallel_cross_entropy``.

For each chunk, one GEMM computes the logits, all ranks gather their row statistics, the gradient
replaces the logits, and one GEMM each computes dx and dw. A chunk's statistics are sent while the
chunk before it computes its gradients, so there are two buffers of logits. dx is a sum over ranks,
computed in fp32 chunk by chunk while the next chunk runs. dw and dbias need no other rank. With
``reduction="none"``, the backward computes the chunks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launcher, nbytes, once_differentiable, op
from liger_kernel.ops._core.operator import on_gpu, rows_of, tracing, use_kernels
from liger_kernel.ops._core.products import add_mm
from liger_kernel.ops._core.reduce import scaled
from liger_kernel.ops._core.schema import fields_of
from liger_kernel.ops._core.tl import cdiv
from liger_kernel.ops.losses.chunks import HeadLoop, auto_chunk_rows, dtype_of_dw, rounded_sums
from liger_kernel.ops.losses.cross_entropy_rows import check
from liger_kernel.ops.losses.linear_cross_entropy import _head, check_head, needed, promoted
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import (
    Part,
    gathered,
    merge,
    of_slice,
    part_of,
    process_group,
    row_grad,
    row_stats,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _SumGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        # terms of ranks are added before they are rounded
        total = dx.to(acc(dx.dtype)).contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.to(dx.dtype), None


def reference(
    x, w, target, group, bias, *,
    ignore_index, reduction, label_smoothing, formula, mode, z_loss, logit_scale, softcap, sizes, sum_dx, entropy,
    **how,
):  # fmt: skip
    if sum_dx and group is not None and group.size() > 1:
        x = _SumGradients.apply(x, group)
    numbers = ignore_index, label_smoothing, formula, mode, z_loss, logit_scale, softcap, entropy
    part = part_of("reference", w.shape[0], group, sizes, *numbers)
    loss, entropies = of_slice(F.linear(x, w, bias), target, part, reduction)
    return loss if entropies is None else (loss, entropies)


def _chunks(
    x, w, target, bias, s, need, sum_dx, accum_dtype, chunk_rows,
    *, loss, top, total, entropy, norm=None, g=None, g_entropy=None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loop. Fills ``loss``, top, total and entropy (M,); without ``loss``, it reads the other
    three.

    Returns dx, dw and (in fp32) dbias, empty where not ``need``ed.
    """
    (M, H), N = x.shape, w.shape[0]
    group = process_group(s.group) if s.group and not tracing(x) else None
    # every rank must make the same chunks, though slices may differ
    # the widest slice decides, which every rank can compute
    widest = cdiv(s.V, group.size()) if group else N
    step = max(1, min(M, chunk_rows or auto_chunk_rows(M, widest, H, x.itemsize, on_gpu(x))))
    if accum_dtype is None:
        accum_dtype = dtype_of_dw(w) if M // step <= rounded_sums(M, widest) else acc(w.dtype)
    grads = HeadLoop(x, w, need, chunk_rows=step, accum_dtype=accum_dtype)
    if tracing(x):
        return grads.gradients()[:3]
    # a second buffer only where a chunk waits for others
    buffers = [x.new_empty(step, N) for _ in range(2 if group and loss is not None and step < M else 1)]
    waiting: list[tuple] = []  # chunks with statistics that are being sent
    sums: list[tuple[Any, Tensor, slice]] = []  # chunks of dx that are being summed
    of_ranks = need[0] and group is not None and sum_dx

    def begin(rows: slice, buffer: Tensor) -> None:
        z = torch.mm(x[rows], w.t(), out=buffer[: rows.stop - rows.start])
        own = parts = sent = None
        if loss is not None:
            own = row_stats(z, target[rows], s, bias)
            parts, sent = gathered(own, s.group, async_op=True)
        waiting.append((rows, z, own, parts, sent))

    def finish(rows: slice, z: Tensor, own: Tensor, parts: Tensor, sent: Any) -> None:
        some = lambda t: None if t is None else t[rows]
        if sent is not None:
            sent.wait()
        if loss is not None:
            merge(parts, own, target[rows], s, N, loss[rows], top[rows], total[rows], some(entropy))
        if any(need):
            upstream = dict(g=some(g), norm=norm, g_entropy=some(g_entropy), entropy=some(entropy))
            row_grad(z, target[rows], s, top[rows], total[rows], z, bias=bias, **upstream)
        if of_ranks:
            # fp32: ranks add their terms before they are rounded
            partial = x.new_empty(z.shape[0], H, dtype=torch.float32)
            add_mm(partial, z, w, first=True)
            sums.append((dist.all_reduce(partial, group=group, async_op=True), partial, rows))
        grads.add(rows, z, x[rows], dx=not of_ranks)
        # one sum is on its way while the next chunk runs
        settle(1)

    def settle(leave: int) -> None:
        while len(sums) > leave:
            sent, partial, rows = sums.pop(0)
            sent.wait()
            grads.dx[rows].copy_(partial)

    for i, rows in enumerate(grads.chunks):
        begin(rows, buffers[i % len(buffers)])
        # with two buffers, a chunk is finished after the next one was begun
        if len(waiting) == len(buffers):
            finish(*waiting.pop(0))
    for chunk in waiting:
        finish(*chunk)
    settle(0)
    return grads.gradients()[:3]


_IN = (
    f"Tensor x, Tensor w, Tensor target, Tensor? bias, {fields_of(Part)}, bool sum_dx, ScalarType? accum_dtype, int? "
    "chunk_rows, bool need_dx, bool need_dw, bool need_db"
)
_N = len(Part._fields)


@launcher(
    f"({_IN}, str reduction) -> (Tensor loss, Tensor entropy, Tensor top, Tensor total, Tensor? norm, Tensor dx, "
    "Tensor dw, Tensor db)"
)
def vocab_parallel_linear_cross_entropy_fwd(x, w, target, bias, *numbers):
    s, (sum_dx, accum_dtype, chunk_rows, *need, reduction) = Part(*numbers[:_N]), numbers[_N:]
    loss, top, total = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(3))
    entropy = x.new_empty(x.shape[0] if s.entropy else 0, dtype=torch.float32)
    norm = (target != s.ignore_index).sum().float() if reduction == "mean" else None
    how = tuple(need), sum_dx, accum_dtype, chunk_rows
    rows = dict(loss=loss, top=top, total=total, entropy=entropy if s.entropy else None)
    # fp16 gradients of a mean over many tokens would underflow before a loss scaler reaches them:
    # the backward divides
    grads = _chunks(x, w, target, bias, s, *how, **rows, norm=None if x.dtype == torch.float16 else norm)
    if reduction != "none":
        loss = loss.sum() if norm is None else loss.sum() / norm
    return loss, entropy, top, total, norm, *grads


@launcher(
    f"(Tensor g, Tensor? g_entropy, Tensor? entropy_of_rows, Tensor top, Tensor total, {_IN}) -> (Tensor dx, Tensor "
    "dw, Tensor db)"
)
def vocab_parallel_linear_cross_entropy_bwd(g, g_entropy, entropy, top, total, x, w, target, bias, *numbers):
    """Compute the chunks again, for per-token upstream gradients g and g_entropy (M,)."""
    s, (sum_dx, accum_dtype, chunk_rows, *need) = Part(*numbers[:_N]), numbers[_N:]
    rows = dict(loss=None, top=top, total=total, entropy=entropy, g=g, g_entropy=g_entropy)
    return _chunks(x, w, target, bias, s, tuple(need), sum_dx, accum_dtype, chunk_rows, **rows)


class VocabParallelLinearCrossEntropyFunction(torch.autograd.Function):
    """``apply(x, w, target, bias, need, reduction, *fields of Part, sum_dx, accum_dtype,
    chunk_rows)`` -> loss, and entropy if requested."""

    @staticmethod
    def forward(ctx, x, w, target, bias, need, reduction, *numbers):
        x, target, bias = rows_of(x), target.contiguous(), bias if bias is None else bias.contiguous()
        ctx.need, ctx.numbers, ctx.dtype, ctx.recompute = need, numbers, x.dtype, reduction == "none"
        now = (False, False, False) if ctx.recompute else need
        loss, entropy, top, total, norm, dx, dw, db = vocab_parallel_linear_cross_entropy_fwd(
            x, w, target, bias, *numbers, *now, reduction
        )
        if ctx.recompute:
            ctx.save_for_backward(entropy if entropy.numel() else None, top, total, x, w, target, bias)
        else:
            ctx.save_for_backward(dx, dw, db, norm if x.dtype == torch.float16 else None)
        return (loss, entropy) if Part(*numbers[:_N]).entropy else loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy=None):
        if ctx.recompute:
            g_entropy = None if g_entropy is None else g_entropy.contiguous()
            grads = vocab_parallel_linear_cross_entropy_bwd(
                g.contiguous(), g_entropy, *ctx.saved_tensors, *ctx.numbers, *ctx.need
            )
        else:
            *grads, norm = ctx.saved_tensors
            grads = scaled(grads, g, norm)
        dx, dw, db = (grad if need else None for grad, need in zip(grads, ctx.need))
        dw, db = (None if d is None else d.to(ctx.dtype) for d in (dw, db))
        return dx, dw, None, db, *(None,) * (2 + len(ctx.numbers))


def _cost(x, w, target, group=None, bias=None, **_) -> Cost:
    (M, H), N = x.shape, w.shape[0]
    return Cost(nbytes(x, w, target, bias), nbytes(x, w, bias), gemms=([(M, N, H)], [(M, H, N), (N, H, M)]))


@op(
    reference=reference,
    cases=[
        Case("mean", _head(9, 32, 65)),
        Case("chunks", _head(11, 16, 37, reduction="sum", chunk_rows=4)),
        Case("none", _head(7, 16, 40, reduction="none", chunk_rows=3, label_smoothing=0.1, formula="megatron")),
        Case("bias", _head(7, 16, 40, bias=T((40,)), chunk_rows=3)),
        Case(
            "everything",
            _head(
                8, 16, 50, bias=T((50,)), label_smoothing=0.1, z_loss=1e-2, logit_scale=0.5, softcap=3.0, chunk_rows=5
            ),
        ),
        Case("many-chunks", _head(20, 16, 30, chunk_rows=2)),
        Case("entropy", _head(9, 16, 37, bias=T((37,)), reduction="none", entropy=True, logit_scale=0.7, chunk_rows=4)),
        Case("entropy-smooth", _head(5, 16, 37, reduction="none", entropy=True, label_smoothing=0.1, softcap=3.0)),
    ],
    cost=_cost,
)
def vocab_parallel_linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, group: ProcessGroup | None = None, bias: Tensor | None = None, *,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, formula: str = "pytorch",
    mode: str = "global", z_loss: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None,
    sizes: Sequence[int] | None = None, sum_dx: bool = True, entropy: bool = False,
    accum_dtype: torch.dtype | None = None, chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Cross entropy of ``x @ w.T + bias`` in chunks of tokens, where w (N, H) and bias (N,) are
    this rank's slice of the classes.

    x (M, H) and target (M,) are the same on all ranks of ``group``; dtypes, ``accum_dtype`` and
    ``chunk_rows`` are as in ``linear_cross_entropy``, the rest and the result as in
    ``vocab_parallel_cross_entropy``. dx is the sum over all ranks, or with ``sum_dx=False`` this
    rank's term of it, for layers that add these up themselves. With ``entropy``, and without
    reduction, returns ``(loss, entropy)``, fp32 (M,) each, both differentiable.
    """
    name = "vocab_parallel_linear_cross_entropy"
    check_head(name, x, w, bias, chunk_rows, classes="N")
    if entropy and reduction != "none":
        raise ValueError(f"{name}: reduction must be 'none' with entropy, got {reduction!r}")
    numbers = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, formula=formula, mode=mode)
    numbers |= dict(z_loss=z_loss, logit_scale=logit_scale, softcap=softcap, entropy=entropy)
    part = part_of(name, w.shape[0], group, sizes, *numbers.values())
    target = check(name, (x.shape[0], part.V), target, None, reduction, ignore_index)
    x, w, bias = promoted(x, w, bias)
    if not use_kernels(x):
        return reference(x, w, target, group, bias, reduction=reduction, sizes=sizes, sum_dx=sum_dx, **numbers)
    how = *part, sum_dx, accum_dtype, chunk_rows
    return VocabParallelLinearCrossEntropyFunction.apply(x, w, target, bias, needed(x, w, bias), reduction, *how)
