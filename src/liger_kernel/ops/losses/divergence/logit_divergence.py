"""Divergence of two softmax distributions given by their logits, for distillation; one row kernel,
also used by the fused linear losses.

Shapes: student and teacher logits (..., V), shift_labels (...).  With x = log_softmax(student /
temperature), y = log_softmax(teacher / temperature),
q = exp(x) and p = exp(y), a row's loss is, by ``kind``,

  forward_kl  KL(p || q)
  reverse_kl  KL(q || p)
  jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q; beta = 0 and 1 mean the two above (arXiv:2306.13649, eq. 1)
  tvd         sum |q - p| / 2

It is not multiplied by temperature^2. For g = dloss / dx at each element (``by_element``), the
gradient of the student's logits is
``(g - q sum(g)) / temperature``: (q - p) / temperature in forward_kl, and q (d - sum(q d)) /
temperature in reverse_kl, for the difference d of the
scaled logits. As these losses are linear in d, too, they need a sweep for the loss and one for the
gradient; the others need the normalisers first.
The teacher's gradient is the student's with their roles exchanged.

Rows whose label is ``ignore_index`` have loss and gradient 0.
"batchmean" divides by the number of the others (none: 0).
``bench/cases/divergence.py`` has the shapes of real models and the rivals.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_kernel.ops._core import config
from liger_kernel.ops._core.operator import (
    Case,
    Cost,
    T,
    acc,
    computed,
    launch,
    launcher,
    once_differentiable,
    op,
    rows_of,
    shaped,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.reduce import divided, scaled
from liger_kernel.ops._core.tl import jit, tl
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence import by_element
from liger_kernel.ops.losses.divergence.by_element import counted, derived, elements, joined, jsd_kind, online, times

KINDS = ("jsd", "forward_kl", "reverse_kl", "tvd")
REDUCTIONS = ("none", "sum", "batchmean")


@dataclass(frozen=True)
class Divergence:
    """The numbers that define a row's loss, apart from its tensors. The row kernel and the
    linear losses pass them on."""

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    ignore_index: int = -100

    def plain(self) -> Divergence:
        """The same divergence, with "jsd" replaced by the KL that it is at ``beta`` 0 or 1."""
        return replace(self, kind=jsd_kind(self.beta)) if self.kind == "jsd" else self

    def exchanged(self) -> Divergence:
        """The same with the roles of student and teacher exchanged."""
        return replace(
            self,
            kind={"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}.get(self.kind, self.kind),
            beta=1 - self.beta,
        )


# The same numbers in a launcher's schema, in the order of the fields of ``Divergence``.
DIVERGENCE_SCHEMA = "str kind, float beta, float temperature, int ignore_index"


def _elements(student: Tensor, teacher: Tensor, d: Divergence) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the divergence at each element, in torch."""
    dtype = acc(torch.promote_types(student.dtype, teacher.dtype))
    x, y = ((z.to(dtype) / d.temperature).log_softmax(-1) for z in (student, teacher))
    a, b = (x.exp(), y.exp()) if d.kind == "tvd" else (x, y)
    return x, y, elements(a, b, d.kind, d.beta)


def reference(
    student: Tensor,
    teacher: Tensor,
    shift_labels: Tensor | None = None,
    *,
    kind: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    loss = _elements(student, teacher, Divergence(kind, beta, temperature).plain())[2].sum(-1, keepdim=True)
    loss = by_element.masked(loss, shift_labels, ignore_index).squeeze(-1)
    if reduction == "batchmean":
        return loss.sum() / counted(student, shift_labels, ignore_index)
    return loss.sum() if reduction == "sum" else loss


@jit
def _load(z_ptr, start, V, origin, scale, LANES: tl.constexpr, VEC: tl.constexpr):
    """A block of one row's scaled logits, (LANES, VEC): what a thread reads at once is a row of
    it. -inf outside."""
    col = start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    return col, (tl.load(z_ptr + col, mask=col < V, other=-float("inf")).to(tl.float32) - origin) * scale


@jit
def _origin(z_ptr, V, LANES: tl.constexpr, VEC: tl.constexpr):
    """The first block's maximum, to count a row's logits from: softmax does not see a shift, the
    rounding of differences does."""
    _, z = _load(z_ptr, 0, V, 0.0, 1.0, LANES, VEC)
    top = tl.max(tl.max(z, axis=1), axis=0)
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@jit
def _rows(
    s_ptr,
    t_ptr,
    label_ptr,
    norm_ptr,
    g_ptr,
    loss_ptr,
    dz_ptr,
    V,
    s_stride,
    t_stride,
    label_stride,
    g_stride,
    dz_stride,
    ignore_index,
    beta,
    scale,
    KIND: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_G: tl.constexpr,
    NEED_DZ: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. Sweeps alternate in direction, so that a sweep begins with what the
    last one left in the cache."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    t_ptr += row * t_stride
    dz_ptr += row * dz_stride
    beta, scale = tl.cast(beta, tl.float32), tl.cast(scale, tl.float32)
    LANES: tl.constexpr = BLOCK // VEC
    blocks = tl.cdiv(V, BLOCK)
    ignored = False
    if HAS_LABELS:
        ignored = tl.load(label_ptr + row * label_stride) == ignore_index

    if ignored:
        tl.store(loss_ptr + row, 0.0)
        if NEED_DZ:
            for start in range(0, V, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(dz_ptr + col, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=col < V)
    else:
        s_origin, t_origin = _origin(s_ptr, V, LANES, VEC), _origin(t_ptr, V, LANES, VEC)
        s_top = tl.full((LANES,), -float("inf"), tl.float32)
        t_top = tl.full((LANES,), -float("inf"), tl.float32)
        s_sum = tl.zeros((LANES,), tl.float32)
        t_sum = tl.zeros((LANES,), tl.float32)
        gap = tl.zeros((LANES,), tl.float32)  # the weighted difference of logits, of which a KL consists
        for i in range(0, blocks):
            col, s = _load(s_ptr, i * BLOCK, V, s_origin, scale, LANES, VEC)
            col, t = _load(t_ptr, i * BLOCK, V, t_origin, scale, LANES, VEC)
            t_top, t_sum, t_e, t_rescale = online(t, t_top, t_sum)
            if KIND == "forward_kl":
                gap = times(gap, t_rescale) + tl.sum(times(t - s, t_e), axis=1)
            s_top, s_sum, s_e, s_rescale = online(s, s_top, s_sum)
            if KIND == "reverse_kl":
                gap = times(gap, s_rescale) + tl.sum(times(s - t, s_e), axis=1)
        s_lse, s_weight = joined(s_top, s_sum)
        t_lse, t_weight = joined(t_top, t_sum)

        if KIND == "forward_kl":
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
                col, s = _load(s_ptr, start, V, s_origin, scale, LANES, VEC)
                col, t = _load(t_ptr, start, V, t_origin, scale, LANES, VEC)
                loss_block, g, q = derived(s - s_lse, t - t_lse, beta, KIND)
                losses += tl.sum(loss_block, axis=1)
                if NEED_DZ:
                    g_sums += tl.sum(g, axis=1)
            loss, g_sum = tl.sum(losses, axis=0), tl.sum(g_sums, axis=0)

        tl.store(loss_ptr + row, loss)
        if NEED_DZ:
            factor = scale
            if HAS_NORM:
                factor *= 1.0 / tl.load(norm_ptr).to(tl.float32)
            if HAS_G:
                factor *= tl.load(g_ptr + row * g_stride).to(tl.float32)
            for i in range(0, blocks):
                start = (i if KIND == "jsd" or KIND == "tvd" else blocks - 1 - i) * BLOCK
                col, s = _load(s_ptr, start, V, s_origin, scale, LANES, VEC)
                col, t = _load(t_ptr, start, V, t_origin, scale, LANES, VEC)
                x, y = s - s_lse, t - t_lse
                if KIND == "forward_kl":
                    dz = tl.exp(x) - tl.exp(y)
                elif KIND == "reverse_kl":  # of the logits themselves: rounding of the normalisers would not cancel
                    dz = times(s - t - mean, tl.exp(x))
                else:
                    _, g, q = derived(x, y, beta, KIND)
                    dz = g - q * g_sum
                tl.store(dz_ptr + col, (dz * factor).to(dz_ptr.dtype.element_ty), mask=col < V)


def row_kernel(
    student: Tensor, teacher: Tensor, d: Divergence, *, labels=None, out=None, dz=None, norm=None, g=None
) -> None:
    """The row kernel over logits (M, V): per-row losses into ``out`` (M,), the student's gradient
    into ``dz``, which may be ``student`` itself.

    The gradient is multiplied by ``g`` (M,) and divided by the 0-dim ``norm``. Rows whose label is
    ``d.ignore_index`` have 0 in both.
    Called by launchers; without kernels, the same in torch.
    """
    if tracing(student):
        return
    d = d.plain()
    if not (use_kernels(student) and use_kernels(teacher)):
        return _rows_in_torch(student, teacher, d, labels, out, dz, norm, g)
    M, V = student.shape
    # one row per processor at a time, with as many bytes in flight as in ``cross_entropy``: later
    # sweeps find a part of the row in the cache
    c = config.tile(
        "logit_divergence", V, max(student.itemsize, teacher.itemsize), elements=1, per_thread=8, max_block_n=8192
    )
    none = student  # a pointer for arguments that a flag switches off
    out = student.new_empty(M, dtype=torch.float32) if out is None else out
    tensors = (
        teacher,
        none if labels is None else labels,
        none if norm is None else norm,
        none if g is None else g,
        out,
        none if dz is None else dz,
    )
    strides = student.stride(0), teacher.stride(0), *(0 if t is None else t.stride(0) for t in (labels, g, dz))
    flags = dict(
        KIND=d.kind,
        HAS_LABELS=labels is not None,
        HAS_NORM=norm is not None,
        HAS_G=g is not None,
        NEED_DZ=dz is not None,
    )
    vector = min(c.block_n, 16 // student.itemsize)
    launch(
        _rows,
        (M,),
        student,
        *tensors,
        V,
        *strides,
        d.ignore_index,
        d.beta,
        1 / d.temperature,
        **flags,
        VEC=vector,
        **c.row,
    )
    return None


def _rows_in_torch(
    student: Tensor,
    teacher: Tensor,
    d: Divergence,
    labels: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    norm,
    g,
) -> None:
    x, y, loss = _elements(student, teacher, d)
    q, p = x.exp(), y.exp()
    if out is not None:
        out.copy_(by_element.masked(loss, labels, d.ignore_index).sum(-1))
    if dz is not None:
        if d.kind == "forward_kl":
            dx = -p
        elif d.kind == "reverse_kl":
            dx = loss + q
        elif d.kind == "tvd":
            dx = q * (q - p).sign() / 2
        else:
            dx = (
                (1 - d.beta)
                * q
                * (x - (d.beta * p + (1 - d.beta) * q).clamp(min=by_element.TINY).log()).masked_fill(q == 0, 0)
            )
        dx = (dx - q * dx.sum(-1, keepdim=True)) / d.temperature
        if norm is not None:
            dx = dx / norm
        dz.copy_(by_element.masked(dx if g is None else dx * g[:, None], labels, d.ignore_index))


def _gradients(
    student: Tensor, teacher: Tensor, labels, norm, g, d: Divergence, out: Tensor | None, need: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """The student's and the teacher's; those that are not needed are empty; losses into ``out``."""
    ds, dt = (z.new_empty(z.shape if needed else 0) for z, needed in zip((student, teacher), need))
    if out is not None or need[0]:
        row_kernel(student, teacher, d, labels=labels, out=out, dz=ds if need[0] else None, norm=norm, g=g)
    if need[1]:
        row_kernel(teacher, student, d.exchanged(), labels=labels, dz=dt, norm=norm, g=g)
    return ds, dt


_ROWS = f"Tensor student, Tensor teacher, Tensor? labels, bool need_ds, bool need_dt, {DIVERGENCE_SCHEMA}"


@launcher(f"(Tensor? norm, bool reduced, {_ROWS}) -> (Tensor loss, Tensor ds, Tensor dt)")
def logit_divergence_fwd(
    norm: Tensor | None,
    reduced: bool,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    need_ds: bool,
    need_dt: bool,
    *numbers,
):
    """The loss, summed and divided by ``norm`` if ``reduced``, and gradients, which in fp16 are
    not divided yet: they would underflow."""
    out = student.new_empty(student.shape[0], dtype=torch.float32)
    half = torch.float16 in (student.dtype, teacher.dtype)
    ds, dt = _gradients(
        student, teacher, labels, None if half else norm, None, Divergence(*numbers), out, (need_ds, need_dt)
    )
    return out if not reduced else out.sum() if norm is None else out.sum() / norm, ds, dt


@launcher(f"(Tensor g, {_ROWS}) -> (Tensor ds, Tensor dt)")
def logit_divergence_bwd(
    g: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, need_ds: bool, need_dt: bool, *numbers
):
    """Gradients for upstream gradients g (M,); gradients that are not needed are empty."""
    return _gradients(student, teacher, labels, None, g, Divergence(*numbers), None, (need_ds, need_dt))


class LogitDivergenceFunction(torch.autograd.Function):
    """``apply(student, teacher, shift_labels, reduction, *fields of Divergence)``: a reduced
    loss leaves its gradients behind, others the logits."""

    @staticmethod
    def forward(ctx, student, teacher, shift_labels, reduction, *numbers):
        s, t, labels = rows_of(student), rows_of(teacher), None if shift_labels is None else shift_labels.reshape(-1)
        norm = counted(student, labels, numbers[-1]) if reduction == "batchmean" else None
        ctx.need, ctx.numbers, ctx.shape, ctx.reduced = (
            ctx.needs_input_grad[:2],
            numbers,
            student.shape,
            reduction != "none",
        )
        loss, ds, dt = logit_divergence_fwd(
            norm, ctx.reduced, s, t, labels, *(ctx.need if ctx.reduced else (False, False)), *numbers
        )
        if ctx.reduced:
            ctx.save_for_backward(ds, dt, norm if torch.float16 in (s.dtype, t.dtype) else None)
            return loss
        ctx.save_for_backward(s, t, labels)
        return shaped(loss, student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if ctx.reduced:
            *grads, norm = ctx.saved_tensors
            grads = scaled(tuple(d if need else None for d, need in zip(grads, ctx.need)), divided(g, norm))
        else:
            grads = logit_divergence_bwd(g.reshape(-1), *ctx.saved_tensors, *ctx.need, *ctx.numbers)
        return *(d.view(ctx.shape) if need else None for d, need in zip(grads, ctx.need)), *(None,) * (
            2 + len(ctx.numbers)
        )


def _pair(M: int, V: int, grad: bool = True) -> dict[str, T]:
    return dict(student=T((M, V)), teacher=T((M, V), grad=grad))


@op(
    reference=reference,
    cases=[
        Case("jsd", _pair(9, 130)),
        Case("jsd-labels", dict(**_pair(7, 61), shift_labels=targets(7, 61), beta=0.1, temperature=2.0)),
        Case("forward-kl", dict(**_pair(6, 99), shift_labels=targets(6, 99), kind="forward_kl")),
        Case("reverse-kl", dict(**_pair(6, 99), kind="reverse_kl", temperature=0.7)),
        Case("tvd", dict(**_pair(6, 99), kind="tvd", shift_labels=targets(6, 99))),
        Case("beta-0", dict(**_pair(5, 40), beta=0.0, temperature=1.5)),
        Case("beta-1", dict(**_pair(5, 40), beta=1.0)),
        Case("none", dict(**_pair(7, 64), shift_labels=targets(7, 64), reduction="none", temperature=3.0)),
        Case("none-forward-kl", dict(**_pair(7, 64), kind="forward_kl", reduction="none")),
        Case("sum-3d", dict(student=T((2, 3, 65)), teacher=T((2, 3, 65)), kind="reverse_kl", reduction="sum")),
        Case("fp32-teacher", dict(student=T((5, 70)), teacher=T((5, 70), dtype=torch.float32))),
        Case("all-ignored", dict(**_pair(3, 20), shift_labels=targets(3, 20, 1), reduction="sum")),
        Case("one-column", dict(**_pair(5, 1), kind="forward_kl", reduction="sum")),
        Case("two-blocks", dict(**_pair(2, 9001), shift_labels=targets(2, 9001, 5))),
        Case("two-blocks-kl", dict(**_pair(2, 9001), kind="reverse_kl")),
        Case(
            "bad-shape", dict(student=T((3, 5)), teacher=T((3, 4))), error="teacher must have shape (3, 5), got (3, 4)"
        ),
        Case(
            "bad-kind",
            dict(**_pair(3, 5), kind="kl"),
            error="kind must be one of ('jsd', 'forward_kl', 'reverse_kl', 'tvd'), got 'kl'",
        ),
        Case("bad-beta", dict(**_pair(3, 5), beta=-0.5), error="beta must be between 0 and 1, got -0.5"),
        Case("bad-temperature", dict(**_pair(3, 5), temperature=0.0), error="temperature must be positive, got 0.0"),
    ],
    cost=lambda student, teacher, shift_labels=None, **_: Cost(
        *by_element.moved(student, teacher), flops=(12 * student.numel(), 10 * student.numel())
    ),
)
def logit_divergence(
    student: Tensor,
    teacher: Tensor,
    shift_labels: Tensor | None = None,
    *,
    kind: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    """Divergence of the softmax distributions of student and teacher logits (..., V), both divided
    by ``temperature``.

    ``kind``: "jsd", "forward_kl", "reverse_kl" or "tvd". Returns fp32: the sum over rows, this sum
    divided by the number of rows with a label other than ``ignore_index`` ("batchmean"), or one per
    row ("none"). Both arguments get gradients; the teacher's gradient costs the same sweeps again.
    """
    student, teacher = computed(student), computed(teacher)
    shift_labels = by_element.check(
        "logit_divergence", {"student": student, "teacher": teacher}, shift_labels, reduction, REDUCTIONS
    )
    if kind not in KINDS:
        raise ValueError(f"logit_divergence: kind must be one of {KINDS}, got {kind!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"logit_divergence: beta must be between 0 and 1, got {beta}")
    if not temperature > 0:
        raise ValueError(f"logit_divergence: temperature must be positive, got {temperature}")
    if not by_element.served(student, teacher):
        options = dict(kind=kind, beta=beta, temperature=temperature, ignore_index=ignore_index, reduction=reduction)
        return reference(student, teacher, shift_labels, **options)
    student, teacher = by_element.without_graph(student, teacher)
    return LogitDivergenceFunction.apply(
        student, teacher, shift_labels, reduction, kind, beta, temperature, ignore_index
    )
