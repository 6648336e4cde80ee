"""Distillation of a student's linear head from a teacher's, by the formula of a subclass or by a
kernel.

Shapes: student_input (M, Hs), student_weight (V, Hs), teacher_input (M, Ht), teacher_weight (V,
Ht), target (M,), biases (V,). Over the n rows whose target is not ``ignore_index``, with s and t
the logits divided by ``temperature``,

    loss = weight_hard_loss * cross_entropy(s * temperature, target) / n + weight_soft_loss *
    distillation_loss_fn(s, t) / n

where both sums run over rows, and n is at least 1. The soft loss is not multiplied by
temperature^2. The teacher is constant.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.nn.options import WithOptions
from liger_kernel.ops._core import acc, checks, once_differentiable
from liger_kernel.ops._core.operator import is_fake, only_pytorch
from liger_kernel.ops._core.reduce import scaled
from liger_kernel.ops.losses.chunks import HeadLoop, Kept
from liger_kernel.ops.losses.cross_entropy_rows import Loss, RowLosses, check, row_kernel as cross_entropy_rows
from liger_kernel.ops.losses.divergence.by_element import counted
from liger_kernel.ops.losses.divergence.distillation import check_teacher
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence
from liger_kernel.ops.losses.linear_cross_entropy import check_head, promoted

__all__ = ["LigerFusedLinearDistillationBase"]

Found = Tensor | tuple[Tensor, Tensor, Tensor]


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """The base of your own soft loss: a subclass has ``distillation_loss_fn``, and a
    ``forward(cls, ctx, ...)`` that calls this one."""

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None, ignore_index: int | None = None
    ) -> Tensor:
        """The sum of the soft loss over some rows, none of which is ignored, in plain PyTorch,
        differentiated in ``student_logits`` (n, V) fp32.

        It receives target, ignore_index and beta if it has parameters of these names, and the
        ``loss_kwargs`` of ``forward``.
        """
        raise NotImplementedError("distillation_loss_fn")

    @staticmethod
    def chunk_forward(
        student_input_chunk, student_weight, teacher_input_chunk, teacher_weight, target_chunk, student_bias=None,
        teacher_bias=None, ignore_index=-100, compute_ce_loss=True,
    ):  # fmt: skip
        """Logits of both heads and the summed cross entropy, in plain PyTorch, for a ``forward``
        of yours with its own loop."""
        student = F.linear(student_input_chunk, student_weight, student_bias)
        teacher = F.linear(teacher_input_chunk, teacher_weight, teacher_bias)
        if not compute_ce_loss:
            return student, teacher, 0.0
        hard = F.cross_entropy(student.float(), target_chunk, reduction="sum", ignore_index=ignore_index)
        return student, teacher, hard

    @staticmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None,
        teacher_bias=None, chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
        compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs,
    ):  # fmt: skip
        """The loss; with ``return_soft_hard_loss`` also the soft and the hard loss, without
        weights. Gradients are those of the student.

        It waits once for the number of counted rows, because the formula sees no others.
        ``chunk_size`` and ``compiled`` have no effect.
        """
        parameters = inspect.signature(cls.distillation_loss_fn).parameters
        every = any(p.kind == p.VAR_KEYWORD for p in parameters.values())

        def soft(s: Tensor, t: Tensor, y: Tensor) -> Tensor:
            known = dict(target=y, ignore_index=ignore_index, beta=beta).items()
            named = {name: value for name, value in known if every or name in parameters}
            return cls.distillation_loss_fn(s, t, **named, **loss_kwargs)

        tensors = student_input, student_weight, teacher_input, teacher_weight, target, student_bias, teacher_bias
        numbers = ignore_index, temperature, weight_hard_loss if compute_ce_loss else 0.0, weight_soft_loss
        if only_pytorch():
            found = _in_pytorch(soft, *tensors, *numbers)
            return found if return_soft_hard_loss else found[0]
        loss, soft_loss, hard_loss, norm, dx, dw, db = _any_gradients(soft, *tensors, *numbers)
        ctx.save_for_backward(dx, dw, db, norm)
        if not return_soft_hard_loss:
            return loss
        ctx.mark_non_differentiable(soft_loss, hard_loss)
        return loss, soft_loss, hard_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of student_input, student_weight and student_bias, the first, second and
        sixth argument; None for all others."""
        *grads, norm = ctx.saved_tensors
        dx, dw, db = (d if d is not None and d.numel() else None for d in scaled(grads, g, norm))
        return dx, dw, None, None, None, db, *(None,) * 32

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if only_pytorch():
            return cls.forward(None, *args)  # type: ignore[attr-defined]  # a class method
        if torch.is_grad_enabled():
            return super().apply(*args)
        return super().apply(*(a.detach() if isinstance(a, Tensor) else a for a in args))


def _any_gradients(
    fn, x, w, teacher_x, teacher_w, target, bias, teacher_bias, ignore_index, temperature, weight_hard, weight_soft
):
    """Loss, soft and hard loss, what the gradients are still to be divided by, dx, dw and dbias
    where ``fn`` is the soft loss, chunk by chunk.

    ``fn(s, t, target)`` of logits over ``temperature`` (n, V), in ``acc`` of their dtype, returns
    the sum over these rows, and autograd differentiates it.
    """
    check_head("distillation", x, w, bias, None)
    target = check("distillation", (x.shape[0], w.shape[0]), target, None, "mean", ignore_index)
    teacher = dict(teacher_x=teacher_x, teacher_w=teacher_w, teacher_bias=teacher_bias)
    with torch.enable_grad():  # gradients are off in a Function's forward; what its inputs ask for is not
        check_teacher("distillation", x.shape[0], w.shape[0], **teacher)
    need: Any = tuple(t is not None and t.requires_grad for t in (x, w, bias))
    x, w, bias = promoted(x, w, bias)
    teacher_x, teacher_w, teacher_bias = promoted(*teacher.values())
    kept = None if is_fake(target) else Kept(target, ignore_index).rows(least_gain=1e-9)
    y = target if kept is None else target.index_select(0, kept)
    norm = counted(x, target, ignore_index)
    divisor = 1.0 if x.dtype == torch.float16 else norm  # as in ``linear_divergence``
    soft, hard = norm.new_zeros(()), norm.new_zeros(())

    loop = HeadLoop(x, w, need, kept=kept)
    for z, rows, dz in loop:
        at = rows if kept is None else kept[rows]
        t = F.linear(teacher_x[at], teacher_w, teacher_bias)
        a = z.to(acc(z.dtype)) if bias is None else z.to(acc(z.dtype)) + bias
        d = None if dz is None else torch.zeros_like(a)
        if weight_hard:
            found = RowLosses.empty(y[rows], Loss(), a.dtype)
            cross_entropy_rows(a, y[rows], Loss(ignore_index=ignore_index, reduction="none"), out=found, dz=d)
            hard = hard + found.loss.sum()
        with torch.set_grad_enabled(dz is not None):
            s = (a / temperature).requires_grad_(dz is not None)
            part = fn(s, t.to(acc(t.dtype)) / temperature, y[rows])
            ds = torch.autograd.grad(part, s)[0] if part.requires_grad else None
        soft = soft + part.detach()
        if dz is not None and d is not None:
            d *= weight_hard
            if ds is not None:
                d.add_(ds, alpha=weight_soft / temperature)
            dz.copy_(d.div_(divisor))

    dx, dw, db = loop.gradients()[:3]
    soft, hard = soft / norm, hard / norm
    return weight_hard * hard + weight_soft * soft, soft, hard, None if divisor is norm else norm, dx, dw, db


def _in_pytorch(
    fn, x, w, teacher_x, teacher_w, target, bias, teacher_bias, ignore_index, temperature, weight_hard, weight_soft
):  # fmt: skip
    """Loss, soft and hard loss by PyTorch's own operators."""
    valid = target != ignore_index
    heads = promoted(x, w, bias), promoted(teacher_x, teacher_w, teacher_bias)
    z, t = (F.linear(*head)[valid] for head in heads)
    z, t, y, n = z.to(acc(z.dtype)), t.to(acc(t.dtype)).detach(), target[valid], valid.sum()
    soft = fn(z / temperature, t / temperature, y) / n
    hard = F.cross_entropy(z, y, reduction="sum") / n if weight_hard else soft.new_zeros(())
    return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()


class FunctionWithKernel(LigerFusedLinearDistillationBase):
    """A ``distillation_loss_fn`` for which a row kernel, ``kind``, exists. The formula of a
    subclass is computed as it is written."""

    kind = ""
    stock: Any = None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            cls.stock = cls.distillation_loss_fn

    @classmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None,
        teacher_bias=None, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0,
        compiled=True, chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        heads = student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias
        weights = weight_hard_loss, weight_soft_loss, beta, True
        how = chunk_size, ignore_index, *weights, temperature, compiled, return_soft_hard_loss
        return LigerFusedLinearDistillationBase.forward(cls, ctx, *heads, *how)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        own = FunctionWithKernel.forward.__func__  # type: ignore[attr-defined]  # which a class method has
        if getattr(cls.forward, "__func__", None) is own and cls.distillation_loss_fn is cls.stock:
            return of_kernel(cls.kind, args[:7], *args[7:])
        return super().apply(*args)


def of_kernel(
    kind: str, heads: tuple[Tensor | None, ...], weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5,
    beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True,
    chunk_size: int = 1024, return_soft_hard_loss: bool = False, compact: bool = True,
) -> Found:  # fmt: skip
    """The loss by ``linear_divergence``: JSD with ``beta``, or ``beta`` times the "cosine"."""
    factor, beta = (beta, 0.5) if kind == "cosine" else (1.0, beta)
    options: dict[str, Any] = dict(weight_hard=weight_hard_loss, weight_soft=weight_soft_loss * factor)
    options |= dict(kind=kind, beta=beta, temperature=temperature, ignore_index=ignore_index, compact=compact)
    loss, soft, hard = linear_divergence(*heads, **options, parts=True)  # type: ignore[arg-type]  # heads are given
    return (loss, soft * factor, hard) if return_soft_hard_loss else loss


class DistillationLoss(WithOptions):
    """A module over the loss of a ``kind`` of row kernel."""

    kind = ""

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False
    compact: bool = True

    def check(self) -> None:
        checks.positive(type(self).__name__, temperature=self.temperature)

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Found:  # fmt: skip
        rows = lambda x: x.reshape(-1, x.shape[-1])
        heads = rows(student_input), student_weight, rows(teacher_input), teacher_weight
        tensors = *heads, true_labels.reshape(-1), student_bias, teacher_bias
        return of_kernel(self.kind, tensors, **self.options())
