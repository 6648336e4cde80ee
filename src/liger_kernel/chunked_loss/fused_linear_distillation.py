"""Distillation of a student's linear head from a teacher's, by the formula of a subclass or by a kernel.

Shapes: student_input (M, Hs), student_weight (V, Hs), teacher_input (M, Ht), teacher_weight (V, Ht), target (M,), biases (V,). Over the n rows whose target
is not ``ignore_index``, with s and t the logits divided by ``temperature``,

    loss = weight_hard_loss * cross_entropy(s * temperature, target) / n + weight_soft_loss * distillation_loss_fn(s, t) / n

where both sums run over rows, and 0 rows give NaN. The soft loss is not multiplied by temperature^2. The teacher is constant.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.ops._core.operator import once_differentiable
from liger_kernel.ops._core.reduce import divided, scaled
from liger_kernel.ops.losses.divergence.distillation import any_gradients
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence

Found = Tensor | tuple[Tensor, Tensor, Tensor]


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """A soft loss of one's own: a subclass has ``distillation_loss_fn``, and a ``forward(cls, ctx, ...)`` that calls the one here."""

    @staticmethod
    def distillation_loss_fn(student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None, ignore_index: int | None = None) -> Tensor:
        """The sum over some rows, none of them ignored, of the soft loss: any PyTorch, differentiated with respect to ``student_logits`` (n, V) fp32.

        Of target, ignore_index and beta it is given those that it has parameters for, and the ``loss_kwargs`` of ``forward``.
        """
        raise NotImplementedError("distillation_loss_fn")

    @staticmethod
    def chunk_forward(
        student_input_chunk: Tensor, student_weight: Tensor, teacher_input_chunk: Tensor, teacher_weight: Tensor, target_chunk: Tensor,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, ignore_index: int = -100, compute_ce_loss: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | float]:  # fmt: skip
        """Logits of both and the summed cross entropy, in plain PyTorch: for a ``forward`` with a loop of its own, which the one here is not."""
        student, teacher = F.linear(student_input_chunk, student_weight, student_bias), F.linear(teacher_input_chunk, teacher_weight, teacher_bias)
        hard = F.cross_entropy(student.float(), target_chunk, reduction="sum", ignore_index=ignore_index) if compute_ce_loss else 0.0
        return student, teacher, hard

    @staticmethod
    def forward(  # type: ignore[override]
        cls: Any, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, target: Tensor,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, chunk_size: int = 1024, ignore_index: int = -100,
        weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, compute_ce_loss: bool = True,
        temperature: float = 1.0, compiled: bool = True, return_soft_hard_loss: bool = False, **loss_kwargs: Any,
    ) -> Found:  # fmt: skip
        """The loss, or with ``return_soft_hard_loss`` that and the soft and the hard one, not weighted; gradients for the student.

        Waits once for the number of rows that count, as the formula sees no others. ``chunk_size`` and ``compiled`` have no effect.
        """
        parameters = inspect.signature(cls.distillation_loss_fn).parameters
        every = any(p.kind == p.VAR_KEYWORD for p in parameters.values())

        def soft(s: Tensor, t: Tensor, y: Tensor) -> Tensor:
            known = dict(target=y, ignore_index=ignore_index, beta=beta)
            return cls.distillation_loss_fn(s, t, **{k: v for k, v in known.items() if every or k in parameters}, **loss_kwargs)

        *losses, norm, dx, dw, db = any_gradients(
            soft, student_input, student_weight, teacher_input, teacher_weight, target, student_bias, teacher_bias, ignore_index=ignore_index,
            temperature=temperature, weight_hard=weight_hard_loss if compute_ce_loss else 0.0, weight_soft=weight_soft_loss,
        )  # fmt: skip
        ctx.save_for_backward(dx, dw, db, norm)
        if not return_soft_hard_loss:
            return losses[0]  # type: ignore[return-value]
        ctx.mark_non_differentiable(*losses[1:])
        return tuple(losses)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of student_input, student_weight and student_bias, the first, second and sixth argument; None for all others."""
        *grads, norm = ctx.saved_tensors
        dx, dw, db = (d if d is not None and d.numel() else None for d in scaled(tuple(grads), divided(g, norm)))
        return dx, dw, None, None, None, db, *(None,) * 32

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch.is_grad_enabled():
            return super().apply(*args)
        return super().apply(*(a.detach() if isinstance(a, Tensor) else a for a in args))


class FunctionWithKernel(LigerFusedLinearDistillationBase):
    """A ``distillation_loss_fn`` for which there is a row kernel, ``kind``; a subclass's own formula is computed as it is written."""

    kind = ""
    stock: Any = None

    @classmethod
    def forward(  # type: ignore[override]
        cls, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True,
        chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> Found:  # fmt: skip
        return LigerFusedLinearDistillationBase.forward(
            cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            ignore_index=ignore_index, weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss, beta=beta,
            temperature=temperature, return_soft_hard_loss=return_soft_hard_loss,
        )  # fmt: skip

    @classmethod
    def apply(cls, *args: Any) -> Any:
        same = getattr(cls.forward, "__func__", None) is FunctionWithKernel.__dict__["forward"].__func__ and cls.distillation_loss_fn is cls.stock
        return of_kernel(cls.kind, *args) if same else super().apply(*args)


def of_kernel(
    kind: str, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5,
    beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
    return_soft_hard_loss: bool = False, compact: bool = True,
) -> Found:  # fmt: skip
    """The loss by ``linear_divergence``: JSD with ``beta``, or ``beta`` times the "cosine"."""
    factor, beta = (beta, 0.5) if kind == "cosine" else (1.0, beta)
    loss, soft, hard = linear_divergence(
        student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, kind=kind, beta=beta,
        temperature=temperature, weight_hard=weight_hard_loss, weight_soft=weight_soft_loss * factor, ignore_index=ignore_index,
        parts=True, compact=compact,
    )  # fmt: skip
    return (loss, soft * factor, hard) if return_soft_hard_loss else loss


class DistillationLoss(nn.Module):
    """Called with the student's input, weight, the teacher's, labels and biases: (..., H), (V, H), (..., H), (V, H), (...,), (V,), (V,).

    ``compact`` leaves ignored tokens out of all products, for one wait for their number. ``compiled`` and ``chunk_size`` have no effect.
    """

    kind = ""

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False, compact: bool = True,
    ):  # fmt: skip
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"{type(self).__name__}: temperature must be positive, got {temperature}")
        self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index = weight_hard_loss, weight_soft_loss, beta, ignore_index
        self.temperature, self.compiled, self.chunk_size, self.return_soft_hard_loss = temperature, compiled, chunk_size, return_soft_hard_loss
        self.compact = compact

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Found:  # fmt: skip
        return of_kernel(
            self.kind,
            student_input.reshape(-1, student_input.shape[-1]),
            student_weight,
            teacher_input.reshape(-1, teacher_input.shape[-1]),
            teacher_weight,
            true_labels.reshape(-1),
            student_bias,
            teacher_bias,
            self.weight_hard_loss,
            self.weight_soft_loss,
            self.beta,
            self.ignore_index,
            self.temperature,
            return_soft_hard_loss=self.return_soft_hard_loss,
            compact=self.compact,
        )
