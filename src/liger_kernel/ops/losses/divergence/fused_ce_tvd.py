"""Cross entropy and total variation distance of each token, from the same logits in the same
sweeps, for losses that mix and weigh them on their own.

Shapes: student and teacher logits (M, V), target (M,).  With q = softmax(student) and p =
softmax(teacher) (TVD: arXiv:2307.15190):

    ce = -log q_y        tvd = sum_j |q_j - p_j| / 2

    d ce / d z_j = q_j - [j = y]        d tvd / d z_j = q_j (s_j - sum_i q_i s_i) / 2,   s_j = sign(q_j - p_j)

Rows whose target is ``ignore_index`` have both 0, and no gradient; a target outside [0, V) makes
``ce`` and the gradient NaN. It is the row kernel of ``linear_divergence``, with an upstream
gradient for each of its two losses; the backward computes the normalisers again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, checks, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import computed, rows_of
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.cross_entropy_rows import check, reference as cross_entropy_reference
from liger_kernel.ops.losses.divergence.by_element import have_kernels
from liger_kernel.ops.losses.divergence.distillation import Distillation, row_kernel, soft_losses


def reference(student, teacher, target, *, ignore_index):
    ce = cross_entropy_reference(student, target, ignore_index=ignore_index, reduction="none")
    tvd = soft_losses(student, teacher.detach(), Distillation("tvd"))
    return ce, tvd.where(target != ignore_index, 0)


def _both(student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int, **gradient) -> tuple[Tensor, Tensor]:
    """Both losses (M,), fp32, by the row kernel."""
    ce, tvd = (student.new_empty(student.shape[0], dtype=torch.float32) for _ in range(2))
    # both weights are 1: each loss has its own upstream gradient instead
    s = Distillation("tvd", weight_hard=1.0, ignore_index=ignore_index, reduction="none")
    row_kernel(student, teacher, target, s, soft=tvd, hard=ce, **gradient)
    return ce, tvd


@typed_launcher
def fused_ce_tvd_fwd(student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return _both(student, teacher, target, ignore_index)


@typed_launcher
def fused_ce_tvd_bwd(
    g_ce: Tensor, g_tvd: Tensor, student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int
) -> Tensor:
    """The student's gradient for upstream gradients (M,) of both losses."""
    dz = student.new_empty(student.shape)
    # the losses again, too: they cost no traffic, the normalisers are needed
    _both(student, teacher, target, ignore_index, dz=dz, g=g_tvd, g_hard=g_ce)
    return dz


class LigerFusedCETVDFunction(torch.autograd.Function):
    """``apply(student_logits, teacher_logits, target, ignore_index=-100)`` -> ce, tvd. The
    teacher is constant, whether it requires a gradient or not."""

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, target, ignore_index=-100):
        inputs = rows_of(student_logits), rows_of(teacher_logits), target.contiguous()
        ctx.ignore_index = ignore_index
        # no gradient can be made before both upstream gradients are known
        ctx.save_for_backward(*inputs)
        return fused_ce_tvd_fwd(*inputs, ignore_index)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_ce, g_tvd):
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        g = g_ce.contiguous(), g_tvd.contiguous()
        return fused_ce_tvd_bwd(*g, *ctx.saved_tensors, ctx.ignore_index), None, None, None


def _rows(M: int, V: int, ignored: int = 3) -> dict[str, T]:
    return dict(student=T((M, V)), teacher=T((M, V), grad=False), target=targets(M, V, ignored))


@op(
    reference=reference,
    cases=[
        Case("labels", _rows(9, 130)),
        Case(
            "fp32-teacher",
            dict(student=T((7, 61)), teacher=T((7, 61), grad=False, dtype=torch.float32), target=targets(7, 61)),
        ),
        Case("all-ignored", _rows(3, 20, 1)),
        Case("two-blocks", _rows(2, 9001, 5)),
    ],
    cost=lambda student, teacher, target, **_: Cost(
        nbytes(student, teacher, target),
        nbytes(student, teacher, target, student),
        flops=(6 * student.numel(), 8 * student.numel()),
    ),
)
def fused_ce_tvd(
    student: Tensor, teacher: Tensor, target: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation distance of each token, fp32 (M,) each, both differentiable
    in the student's logits.

    student and teacher (M, V), of any two floating-point dtypes, target (M,) of class indices. The
    teacher gets no gradient, also if it requires one. ``ValueError`` for other shapes and dtypes.
    """
    student, teacher = computed(student), computed(teacher)
    checks.floating("fused_ce_tvd", student=student, teacher=teacher)
    checks.dims("fused_ce_tvd", "(M, V)", student=student)
    checks.shape("fused_ce_tvd", student.shape, teacher=teacher)
    target = check("fused_ce_tvd", (student.shape[0], student.shape[1]), target, None, "none", ignore_index)
    if not have_kernels(student, teacher):
        return reference(student, teacher, target, ignore_index=ignore_index)
    return LigerFusedCETVDFunction.apply(student, teacher, target, ignore_index)
