"""Cross entropy of logits and class indices, with everything language models add to it.

The formula, its reference and the kernel of a row are in ``cross_entropy_rows``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, checks, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import computed, rows_of, use_kernels
from liger_kernel.ops._core.reduce import scaled
from liger_kernel.ops.losses.cross_entropy_rows import Loss, RowLosses, check, normaliser, reference, row_kernel


@typed_launcher
def cross_entropy_fwd(
    z: Tensor, target: Tensor, class_weight: Tensor | None, num_items: Tensor | None, need_dz: bool, *numbers: Loss
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return the results, and with ``need_dz`` the gradient for an upstream gradient of 1 from
    the same launch, which is empty otherwise."""
    s = Loss(*numbers)
    out = RowLosses.empty(target, s)
    norm = normaliser(target, class_weight, s, num_items)
    # an empty tensor and not None: a launcher has one schema
    dz = z.new_empty(z.shape if need_dz else 0)
    row_kernel(z, target, s, class_weight=class_weight, out=out, dz=dz if need_dz else None, norm=norm)
    return *out.reduced(norm, s.reduction), out.predicted, out.lse, norm, dz


@typed_launcher
def cross_entropy_bwd(
    g: Tensor, z: Tensor, target: Tensor, class_weight: Tensor | None, lse: Tensor, norm: Tensor | None, *numbers: Loss
) -> Tensor:
    dz = z.new_empty(z.shape)
    row_kernel(
        z, target, Loss(*numbers), class_weight=class_weight, dz=dz, norm=norm, g=g.expand(target.shape), lse=lse
    )
    return dz


class CrossEntropyFunction(torch.autograd.Function):
    """``apply(logits, target, class_weight, num_items, gradient_in_forward, *fields of Loss)``
    -> loss, z-loss, predicted classes."""

    @staticmethod
    def forward(ctx, logits, target, class_weight, num_items, gradient_in_forward, *numbers):
        z, s = rows_of(logits), Loss(*numbers)
        # fp16 gradients of a mean over many tokens would underflow before a loss scaler sees them
        now = gradient_in_forward and s.reduction != "none" and z.dtype != torch.float16
        loss, z_loss, predicted, lse, norm, dz = cross_entropy_fwd(z, target, class_weight, num_items, now, *numbers)
        ctx.now, ctx.numbers = now, numbers
        # a gradient computed now takes the place of the logits in memory; without it the logits
        # stay, which the model holds anyway
        ctx.save_for_backward(*((dz,) if now else (z, target, class_weight, lse, norm)))
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        # in place if this backward is its last use
        dz = scaled(ctx.saved_tensors, g)[0] if ctx.now else cross_entropy_bwd(g, *ctx.saved_tensors, *ctx.numbers)
        return dz, *(None,) * (4 + len(ctx.numbers))


def items(num_items: Tensor | float | None, like: Tensor) -> Tensor | None:
    """``num_items`` on the device of ``like``. The host does not wait for it."""
    # a tensor stays on its device, and a number becomes a fill: neither waits
    if num_items is None or isinstance(num_items, Tensor):
        return num_items if num_items is None else num_items.detach().to(like.device, non_blocking=True).reshape(())
    return like.new_full((), num_items, dtype=torch.float32)


def targets(shape: int | tuple[int, ...], V: int, ignored: int = 3) -> T:
    """Class indices for a ``Case``, every ``ignored``-th one ignored."""

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        y = torch.randint(0, V, shape)
        y.view(-1)[::ignored] = -100
        return y

    return T((shape,) if isinstance(shape, int) else shape, draw, dtype=torch.int64)


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*shape, dtype=dtype) + 0.5


def _rows(M: int, V: int, ignored: int = 3, **options: Any) -> dict[str, Any]:
    return dict(logits=T((M, V)), target=targets(M, V, ignored), **options)


@op(
    reference=reference,
    cases=[
        Case("mean", _rows(9, 130)),
        Case("num-items", _rows(5, 40, num_items=17)),
        Case("in-forward", _rows(50, 40, gradient_in_forward=True, z_loss=1e-3)),
        Case("sum", _rows(7, 61, reduction="sum")),
        Case("none", _rows(7, 64, reduction="none")),
        Case("gemma2", _rows(24, 99, softcap=2.0, stats=True)),
        Case("cohere", _rows(24, 99, logit_scale=0.3)),
        Case("smoothing", _rows(24, 99, label_smoothing=0.1)),
        Case("z-loss", _rows(24, 99, z_loss=1e-2, stats=True)),
        Case("class-weight", _rows(24, 99, class_weight=T((99,), positive, grad=False))),
        Case(
            "everything",
            _rows(6, 99, 5, class_weight=T((99,), positive, grad=False))
            | dict(label_smoothing=0.2, z_loss=1e-2, logit_scale=1.5, softcap=3.0, reduction="none", stats=True),
        ),
        Case("dft", _rows(24, 99, token_scaling=True)),
        Case("dft-z-loss", _rows(24, 99, token_scaling=True, z_loss=1e-2, stats=True)),
        Case("all-ignored", _rows(3, 20, 1, reduction="sum")),
        Case("two-blocks", _rows(2, 9001, 5)),
    ],
    # a loss that leaves its gradient behind needs one pass to read and one to write
    cost=lambda logits, target, class_weight=None, **_: Cost(
        nbytes(logits, target, class_weight),
        nbytes(logits, logits, target, class_weight),
        whole=nbytes(logits, logits, target, class_weight),
        flops=(4 * logits.numel(), 4 * logits.numel()),
    ),
)
def cross_entropy(
    logits: Tensor, target: Tensor, class_weight: Tensor | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = None, token_scaling: bool = False, stats: bool = False,
    num_items: Tensor | float | None = None, gradient_in_forward: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cross entropy of logits (M, V) and class indices (M,). The logits do not change.

    Returns the fp32 loss, 0-dim or (M,) with ``reduction="none"``; with ``stats`` also the z-loss
    that it contains and the predicted
    classes (M,) int64, -1 where ignored, both without gradient. ``class_weight`` (V,) gets no
    gradient. With ``gradient_in_forward`` (not
    for "none" and fp16), the forward also computes the gradient, in two passes over memory instead
    of three. If the upstream gradient is
    not 1, the gradient is multiplied and rounded once more. A target outside [0, V) gives NaN, or
    raises ``ValueError`` with
    ``LIGER_CHECKS=1`` in the environment.
    """
    logits = computed(logits)
    checks.floating("cross_entropy", logits=logits)
    checks.dims("cross_entropy", "(M, V)", logits=logits)
    target = check("cross_entropy", logits.shape, target, class_weight, reduction, ignore_index)
    s = Loss(ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    num_items = items(num_items, logits)
    if not use_kernels(logits):
        return reference(logits, target, class_weight, num_items=num_items, **s._asdict())
    now = gradient_in_forward and logits.requires_grad and torch.is_grad_enabled()
    out = CrossEntropyFunction.apply(logits, target, class_weight, num_items, now, *s)
    return out if stats else out[0]
