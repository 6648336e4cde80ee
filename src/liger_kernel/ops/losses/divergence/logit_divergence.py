"""Divergence of two softmax distributions given by their logits, for distillation.

Shapes: student and teacher logits (..., V), shift_labels (...).  With x = log_softmax(student /
temperature), y = log_softmax(teacher / temperature),
q = exp(x) and p = exp(y), a row's loss is, by ``kind``,

  forward_kl  KL(p || q)
  reverse_kl  KL(q || p)
  jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q; beta = 0 and 1
              mean the two above (arXiv:2306.13649, eq. 1)
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
``distillation`` has the kernel, ``bench/cases/divergence.py`` the shapes of real models and the
rivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, checks, op, typed_launcher
from liger_kernel.ops._core.operator import computed
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence.by_element import (
    PairFunction,
    check,
    counted,
    have_kernels,
    masked,
    moved,
    without_graph,
)
from liger_kernel.ops.losses.divergence.distillation import LOGIT_KINDS, Distillation, row_kernel, soft_losses


def reference(student, teacher, shift_labels, *, kind, beta, temperature, ignore_index, reduction):
    loss = soft_losses(student, teacher, Distillation(kind, beta, temperature))
    loss = masked(loss[..., None], shift_labels, ignore_index).squeeze(-1)
    if reduction == "batchmean":
        return loss.sum() / counted(student, shift_labels, ignore_index)
    return loss.sum() if reduction == "sum" else loss


def _rows(student, teacher, labels, norm, g, need, numbers):
    """Losses of rows (M,), and the gradients of student and teacher, empty if they are not
    needed."""
    s, out = Distillation(*numbers), student.new_empty(student.shape[0], dtype=torch.float32)
    ds, dt = (z.new_empty(z.shape if needed else 0) for z, needed in zip((student, teacher), need))
    how = dict(norm=norm, g=g if g is None else g.contiguous())
    # the row kernel has no strides for what has one number a row
    labels = labels if labels is None else labels.contiguous()
    # a backward that needs only the teacher's gradient skips the student's
    if g is None or need[0]:
        row_kernel(student, teacher, labels, s, soft=out, dz=ds if need[0] else None, **how)
    if need[1]:
        # the teacher's gradient is the student's of the exchanged loss
        row_kernel(teacher, student, labels, s.exchanged(), soft=torch.empty_like(out), dz=dt, **how)
    return out, ds, dt


@typed_launcher
def logit_divergence_fwd(
    student: Tensor, teacher: Tensor, labels: Tensor | None, norm: Tensor | None, out: str, need_ds: bool,
    need_dt: bool, *numbers: Distillation,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The losses of rows, or with ``out`` "sum" their sum divided by ``norm``, and gradients, as
    ``PairFunction`` has them."""
    half = torch.float16 in (student.dtype, teacher.dtype)
    loss, *grads = _rows(student, teacher, labels, None if half else norm, None, (need_ds, need_dt), numbers)
    return loss if out == "rows" else loss.sum() if norm is None else loss.sum() / norm, *grads


@typed_launcher
def logit_divergence_bwd(
    g: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, need_ds: bool, need_dt: bool,
    *numbers: Distillation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients for upstream gradients g (M,)."""
    return _rows(student, teacher, labels, None, g, (need_ds, need_dt), numbers)[1:]


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
    ],
    cost=lambda student, teacher, shift_labels=None, **_: Cost(
        *moved(student, teacher), flops=(12 * student.numel(), 10 * student.numel())
    ),
)
def logit_divergence(
    student: Tensor, teacher: Tensor, shift_labels: Tensor | None = None, *, kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, ignore_index: int = -100, reduction: str = "batchmean",
) -> Tensor:  # fmt: skip
    """Divergence of the softmax distributions of student and teacher logits (..., V), both divided
    by ``temperature``.

    ``kind``: "jsd", "forward_kl", "reverse_kl" or "tvd". Returns fp32: the sum over rows, this sum
    divided by the number of rows with a label other than ``ignore_index`` ("batchmean"), or one per
    row ("none"). Both arguments get gradients; the teacher's gradient costs the same sweeps again.
    """
    student, teacher = computed(student), computed(teacher)
    pair = {"student": student, "teacher": teacher}
    shift_labels = check("logit_divergence", pair, shift_labels, reduction, ("none", "sum", "batchmean"))
    checks.one_of("logit_divergence", LOGIT_KINDS, kind=kind)
    if not 0 <= beta <= 1:
        raise ValueError(f"logit_divergence: beta must be between 0 and 1, got {beta}")
    checks.positive("logit_divergence", temperature=temperature)
    if not have_kernels(student, teacher):
        options = dict(kind=kind, beta=beta, temperature=temperature, ignore_index=ignore_index, reduction=reduction)
        return reference(student, teacher, shift_labels, **options)
    norm = counted(student, shift_labels, ignore_index) if reduction == "batchmean" else None
    numbers = Distillation(kind, beta, temperature, ignore_index)
    launchers, out = (logit_divergence_fwd, logit_divergence_bwd), "rows" if reduction == "none" else "sum"
    return PairFunction.apply(launchers, *without_graph(student, teacher), shift_labels, norm, out, *numbers)
