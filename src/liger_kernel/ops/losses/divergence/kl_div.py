"""Kullback-Leibler divergence from log-probabilities, as in ``torch.nn.functional.kl_div``
(Kullback and Leibler, 1951).

Shapes: input and target (..., V), of any number of dims; input is log q.  At each element, for p =
target, or p = exp(target) with ``log_target``,

    p (log p - input)

where log p is log(max(p, eps)), or target with ``log_target``. Where p is 0 the element is 0, also
where input is -inf. Gradients: -p to input; log p - input + [p >= eps] to target, or p (target -
input + 1) with ``log_target``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import Case, Cost, T, op
from liger_kernel.ops.losses.divergence import by_element
from liger_kernel.ops.losses.divergence.by_element import elements, log_probs, probs


def _count(input: Tensor, reduction: str) -> int:
    """The divisor of the sum; that of nothing stays 0."""
    return max({"mean": input.numel(), "batchmean": input.shape[0]}.get(reduction, 1), 1)


def reference(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    loss = elements(input, target, "forward_kl" if log_target else "kl", eps=eps)
    if reduction == "none":
        return loss.to(torch.promote_types(input.dtype, target.dtype))
    return loss.sum() / _count(input, reduction)


class LigerKLDivLossFunction(by_element.ByElement):
    """``apply(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10)``."""

    @staticmethod
    def forward(ctx, y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        norm = (
            y_pred.new_full((), _count(y_pred, reduction), dtype=torch.float32)
            if reduction in ("mean", "batchmean")
            else None
        )
        out, kind = "elements" if reduction == "none" else "sum", "forward_kl" if log_target else "kl"
        return by_element.forward(ctx, y_pred, y_true, None, norm, out, kind, 0.5, eps, -100)


def _pair(*shape: int, **options: Any) -> dict[str, Any]:
    return dict(input=T(shape, log_probs), target=T(shape, probs), **options)


@op(
    reference=reference,
    cases=[
        Case("batchmean", _pair(9, 130, reduction="batchmean")),
        Case("mean", _pair(7, 61)),
        Case(
            "log-target",
            dict(input=T((6, 99), log_probs), target=T((6, 99), log_probs), log_target=True, reduction="batchmean"),
        ),
        Case("none", _pair(7, 64, reduction="none")),
        Case(
            "none-log-target",
            dict(input=T((5, 33), log_probs), target=T((5, 33), log_probs), log_target=True, reduction="none"),
        ),
        Case("sum-3d", _pair(2, 3, 65, reduction="sum")),
        Case("batchmean-3d", _pair(4, 3, 20, reduction="batchmean")),
        Case(
            "fp32-target",
            dict(input=T((5, 70), log_probs), target=T((5, 70), probs, dtype=torch.float32), reduction="batchmean"),
        ),
        Case("eps", _pair(6, 99, reduction="sum", eps=5e-3)),
        Case("three-blocks", _pair(2, 9001, reduction="batchmean")),
        Case("bad-shape", dict(input=T((3, 5)), target=T((5,))), error="target must have shape (3, 5), got (5,)"),
        Case(
            "integers",
            dict(input=T((3, 5)), target=T((3, 5), dtype=torch.int64)),
            error="input and target must be floating point, got torch.float32 and torch.int64",
        ),
        Case(
            "bad-reduction",
            _pair(3, 5, reduction="avg"),
            error="reduction must be one of ('none', 'sum', 'mean', 'batchmean'), got 'avg'",
        ),
        Case("bad-eps", _pair(3, 5, eps=-1.0), error="eps must not be negative, got -1.0"),
    ],
    cost=lambda input, target, *, reduction="mean", **_: Cost(
        *by_element.moved(input, target, reduction == "none"), flops=(4 * input.numel(), 4 * input.numel())
    ),
)
def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """KL(target || exp(input)) of log-probabilities ``input`` and probabilities ``target``, or
    their logs with ``log_target``; both (..., V).

    Returns 0-dim fp32: the sum, or the sum divided by the number of elements ("mean") or by the
    first dim ("batchmean"); "none": a tensor of input's shape. Both arguments get gradients.
    """
    by_element.check("kl_div", {"input": input, "target": target}, None, reduction)
    if eps < 0:
        raise ValueError(f"kl_div: eps must not be negative, got {eps}")
    if not by_element.served(input, target):
        return reference(input, target, reduction=reduction, log_target=log_target, eps=eps)
    return LigerKLDivLossFunction.apply(*by_element.without_graph(input, target), reduction, log_target, eps)
