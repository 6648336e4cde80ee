"""Total variation distance of two distributions given by their probabilities: ``sum |p - q| / 2``
(as in f-distillation, arXiv:2307.15190).

Shapes: p and q (..., V), shift_labels (...).  Its gradient to p is 1/2 where p > q, -1/2 where p <
q and 0 where they are equal; to q the opposite.
Rows whose label is ``ignore_index`` have loss and gradient 0; "mean" and "batchmean" count the
others (none: 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import Case, Cost, T, op
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence import by_element
from liger_kernel.ops.losses.divergence.by_element import counted, elements, probs


def _count(p: Tensor, shift_labels: Tensor | None, ignore_index: int, reduction: str) -> Tensor | None:
    """The divisor of the sum."""
    rows = counted(p, shift_labels, ignore_index)
    return {"mean": rows * p.shape[-1], "batchmean": rows}.get(reduction)


def reference(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, *, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    loss = by_element.masked(elements(p, q, "tvd"), shift_labels, ignore_index)
    if reduction == "none":
        return loss.to(torch.promote_types(p.dtype, q.dtype))
    return loss.sum() if reduction == "sum" else loss.sum() / _count(p, shift_labels, ignore_index, reduction)


class LigerTVDLossFunction(by_element.ByElement):
    """``apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100)``."""

    @staticmethod
    def forward(ctx, p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        norm = _count(p, shift_labels, ignore_index, reduction)
        return by_element.forward(
            ctx, p, q, shift_labels, norm, "elements" if reduction == "none" else "sum", "tvd", 0.5, 0.0, ignore_index
        )


def _pair(*shape: int, **options: Any) -> dict[str, Any]:
    return dict(p=T(shape, probs), q=T(shape, probs), **options)


@op(
    reference=reference,
    cases=[
        Case("batchmean", _pair(9, 130)),
        Case("labels", _pair(7, 61, shift_labels=targets(7, 61))),
        Case("mean", _pair(6, 99, shift_labels=targets(6, 99), reduction="mean")),
        Case("none", _pair(7, 64, shift_labels=targets(7, 64), reduction="none")),
        Case("sum-3d", _pair(2, 3, 65, reduction="sum")),
        Case("fp32-teacher", dict(p=T((5, 70), probs), q=T((5, 70), probs, dtype=torch.float32))),
        Case("all-ignored", _pair(3, 20, shift_labels=targets(3, 20, 1), reduction="sum")),
        Case("three-blocks", _pair(2, 9001, shift_labels=targets(2, 9001, 5))),
        Case("bad-shape", dict(p=T((3, 5)), q=T((3, 4))), error="q must have shape (3, 5), got (3, 4)"),
        Case(
            "bad-labels", _pair(3, 5, shift_labels=targets(4, 5)), error="shift_labels must have shape (3,), got (4,)"
        ),
        Case(
            "bad-reduction",
            _pair(3, 5, reduction="avg"),
            error="reduction must be one of ('none', 'sum', 'mean', 'batchmean'), got 'avg'",
        ),
    ],
    cost=lambda p, q, shift_labels=None, *, reduction="batchmean", **_: Cost(
        *by_element.moved(p, q, reduction == "none"), flops=(3 * p.numel(), 3 * p.numel())
    ),
)
def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, *, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance of probabilities p and q (..., V).

    Returns 0-dim fp32: the sum, or the sum divided by the number of rows with a label other than
    ``ignore_index`` ("batchmean"), or by the number of
    their elements ("mean"); "none": a tensor of p's shape. Both arguments get gradients.
    """
    shift_labels = by_element.check("tvd", {"p": p, "q": q}, shift_labels, reduction)
    if not by_element.served(p, q):
        return reference(p, q, shift_labels, reduction=reduction, ignore_index=ignore_index)
    return LigerTVDLossFunction.apply(*by_element.without_graph(p, q), shift_labels, reduction, ignore_index)
