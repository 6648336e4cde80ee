"""Generalised Jensen-Shannon divergence of two distributions given by their log-probabilities
(Agarwal et al., arXiv:2306.13649, eq. 1).

Shapes: log_q (the student) and log_p (the teacher) (..., V), shift_labels (...).  With m = beta p +
(1 - beta) q, a row's divergence is

    beta KL(p || m) + (1 - beta) KL(q || m)

which vanishes at beta = 0 and 1. There, the loss is KL(p || q) (forward) or KL(q || p) (reverse)
instead.
Its gradients are (1 - beta) q (log q - log m) to log_q and beta p (log p - log m) to log_p.
Rows whose label is ``ignore_index`` have loss and gradient 0. "batchmean" divides by the number of
the others (none: 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.operator import Case, Cost, T, op, with_gradients
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence import by_element
from liger_kernel.ops.losses.divergence.by_element import counted, elements, jsd_kind, log_probs

REDUCTIONS = ("none", "sum", "batchmean")


def reference(
    log_q: Tensor,
    log_p: Tensor,
    shift_labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    loss = by_element.masked(elements(log_q, log_p, jsd_kind(beta), beta), shift_labels, ignore_index)
    if reduction == "batchmean":
        return loss.sum() / counted(log_q, shift_labels, ignore_index)
    return loss.sum() if reduction == "sum" else loss.sum(-1)


class LigerJSDFunction(by_element.ByElement):
    """``apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None,
    jsd_mode=None, reduction="batchmean")``, log_q and log_p."""

    @staticmethod
    def forward(
        ctx,
        _input,
        target,
        shift_labels=None,
        beta=0.5,
        ignore_index=-100,
        jsd_impl=None,
        jsd_mode=None,
        reduction="batchmean",
    ):
        only_ours("jsd", jsd_impl, jsd_mode)
        norm = counted(_input, shift_labels, ignore_index) if reduction == "batchmean" else None
        out = "rows" if reduction == "none" else "sum"
        return by_element.forward(ctx, _input, target, shift_labels, norm, out, jsd_kind(beta), beta, 0.0, ignore_index)


def _pair(*shape: int, **options: Any) -> dict[str, Any]:
    return dict(log_q=T(shape, log_probs), log_p=T(shape, log_probs), **options)


@op(
    reference=reference,
    cases=[
        Case("jsd", _pair(9, 130)),
        Case("labels", _pair(7, 61, shift_labels=targets(7, 61), beta=0.1)),
        Case("forward-kl", _pair(6, 99, shift_labels=targets(6, 99), beta=0.0)),
        Case("reverse-kl", _pair(6, 99, beta=1.0)),
        Case("none", _pair(7, 64, shift_labels=targets(7, 64), reduction="none")),
        Case("sum-3d", _pair(2, 3, 65, beta=0.9, reduction="sum")),
        Case("fp32-teacher", dict(log_q=T((5, 70), log_probs), log_p=T((5, 70), log_probs, dtype=torch.float32))),
        Case("all-ignored", _pair(3, 20, shift_labels=targets(3, 20, 1), reduction="sum")),
        Case("three-blocks", _pair(2, 9001, shift_labels=targets(2, 9001, 5))),
        Case("bad-shape", dict(log_q=T((3, 5)), log_p=T((3, 4))), error="log_p must have shape (3, 5), got (3, 4)"),
        Case(
            "bad-labels", _pair(3, 5, shift_labels=targets(4, 5)), error="shift_labels must have shape (3,), got (4,)"
        ),
        Case(
            "float-labels",
            _pair(3, 5, shift_labels=T((3,))),
            error="shift_labels must hold integers, got torch.float32",
        ),
        Case("bad-beta", _pair(3, 5, beta=1.5), error="beta must be between 0 and 1, got 1.5"),
        Case(
            "bad-reduction",
            _pair(3, 5, reduction="mean"),
            error="reduction must be one of ('none', 'sum', 'batchmean'), got 'mean'",
        ),
    ],
    cost=lambda log_q, log_p, shift_labels=None, **_: Cost(
        *by_element.moved(log_q, log_p), flops=(10 * log_q.numel(), 8 * log_q.numel())
    ),
)
def jsd(
    log_q: Tensor,
    log_p: Tensor,
    shift_labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities log_q and log_p (..., V); beta = 0
    is KL(p || q), beta = 1 KL(q || p).

    Returns fp32: the sum over rows, this sum divided by the number of rows with a label other than
    ``ignore_index`` ("batchmean"), or one per row ("none"). Both arguments get gradients.
    """
    shift_labels = by_element.check("jsd", {"log_q": log_q, "log_p": log_p}, shift_labels, reduction, REDUCTIONS)
    if not 0 <= beta <= 1:
        raise ValueError(f"jsd: beta must be between 0 and 1, got {beta}")
    if not by_element.served(log_q, log_p):
        return reference(log_q, log_p, shift_labels, beta=beta, ignore_index=ignore_index, reduction=reduction)
    return LigerJSDFunction.apply(
        *by_element.without_graph(log_q, log_p), shift_labels, beta, ignore_index, None, None, reduction
    )


def jsd_forward(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None,
    beta: float,
    ignore_index: int,
    has_label: bool,
    jsd_impl: str | None = None,
    jsd_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Without autograd: the loss, in the dtype of ``_input``, log q, and its gradient to that.
    ``has_label``: whether ``shift_labels`` count."""
    only_ours("jsd", jsd_impl, jsd_mode)
    labels = shift_labels if has_label else None
    loss, (dx,) = with_gradients(lambda x: jsd(x, target, labels, beta=beta, ignore_index=ignore_index), _input)
    return loss.to(_input.dtype), dx


def jsd_backward(dX: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient of ``jsd_forward`` times the gradient of the loss, as a new tensor."""
    return dX * grad_output
