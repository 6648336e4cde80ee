"""``kl_div``, ``jsd`` and ``tvd``: divergences of two distributions given by their probabilities, or
the logs of these, by one kernel.

Shapes: x and y (..., V), shift_labels (...). ``by_element`` has what a row sums at each element, by
kind, and the derivatives.

  kl_div  kind "kl", or "forward_kl" with ``log_target`` (Kullback and Leibler, 1951), as in
          ``torch.nn.functional.kl_div``
  jsd     generalised Jensen-Shannon (Agarwal et al., arXiv:2306.13649, eq. 1). It vanishes at
          beta = 0 and 1, where the loss is KL(p || q) (forward) or KL(q || p) (reverse) instead
  tvd     total variation distance (as in f-distillation, arXiv:2307.15190), with gradient 0 where
          x and y are equal

Rows whose label is ``ignore_index`` have loss and gradient 0, and means do not count them (none: 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, op, typed_launcher
from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops._core.operator import launch, tracing
from liger_kernel.ops._core.tl import cdiv, jit, tl
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence.by_element import (
    TINY,
    PairFunction,
    check,
    counted,
    element,
    elements,
    have_kernels,
    jsd_kind,
    log_probs,
    masked,
    moved,
    probs,
    without_graph,
)


@jit
def _dense(
    x_ptr, y_ptr, label_ptr, norm_ptr, g_ptr, loss_ptr, dx_ptr, dy_ptr,
    V, span, splits, x_stride, y_stride, label_stride, g_stride, g_col_stride, ignore_index, beta, eps,
    KIND: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``span`` columns of one row a program: their sum (SUM) or each of them, and the gradients,
    in one sweep."""
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    # int64 above: rows times V passes 31 bits
    begin = (program % splits) * span
    n = tl.minimum(V - begin, span).to(tl.int32)
    x_ptr += row * x_stride + begin
    y_ptr += row * y_stride + begin
    at = row * V + begin  # of results, which are contiguous
    beta, eps = tl.cast(beta, tl.float32), tl.cast(eps, tl.float32)
    # the gradient of a mean in the same sweep
    factor = 1.0 / tl.load(norm_ptr) if norm_ptr is not None else 1.0
    ignored = False
    if label_ptr is not None:
        ignored = tl.load(label_ptr + row * label_stride) == ignore_index
    total = tl.zeros((BLOCK,), tl.float32)  # a sum a lane; one reduction at the end

    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < n
        if label_ptr is not None:
            mask = mask & (ignored == 0)  # nothing is read of an ignored row, and nothing of it is in the results
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + col, mask=mask, other=0.0).to(tl.float32)
        loss, dx, dy = element(x, y, beta, eps, KIND)
        if SUM:
            total += loss  # 0 where nothing was read
        elif loss_ptr is not None:
            tl.store(loss_ptr + at + col, loss.to(loss_ptr.dtype.element_ty), mask=col < n)
        f = factor
        if g_ptr is not None:
            g_at = g_ptr + row * g_stride + (begin + col.to(tl.int64)) * g_col_stride
            f *= tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + at + col, tl.where(mask, dx * f, 0.0).to(dx_ptr.dtype.element_ty), mask=col < n)
        if dy_ptr is not None:
            tl.store(dy_ptr + at + col, tl.where(mask, dy * f, 0.0).to(dy_ptr.dtype.element_ty), mask=col < n)
    if SUM:
        tl.store(loss_ptr + program, tl.sum(total, axis=0))


def _launch(losses, x, y, labels, norm, g, need_dx, need_dy, kind, beta, eps, ignore_index):
    """losses ("elements": (M, V); "sums": of parts of rows, (M, splits); "": none), dx and dy,
    empty if they are not needed."""
    M, V = x.shape
    dx, dy = (t.new_empty((M, V) if need else 0) for t, need in ((x, need_dx), (y, need_dy)))
    dtype = torch.promote_types(x.dtype, y.dtype) if losses == "elements" else torch.float32
    shape = {"elements": (M, V), "sums": (M, 1), "": 0}
    if tracing(x):
        return x.new_empty(shape[losses], dtype=dtype), dx, dy
    c = launch_config.tile("divergence", V, max(x.itemsize, y.itemsize), elements=1, per_thread=8, max_block_n=4096)
    # with many rows, parts of eight blocks leave no processor idle at the end; with few rows,
    # shorter parts occupy all processors
    blocks = 8 if is_invariant() else M * cdiv(V, c.block_n) // (8 * launch_config.processors())
    span = c.block_n * max(1, min(8, blocks))
    splits = cdiv(V, span)
    # parts of rows are added by a second kernel, in a fixed order
    loss = x.new_empty((M, splits) if losses == "sums" else shape[losses], dtype=dtype)
    tensors = y, labels, norm, g, loss if losses else None, dx if need_dx else None, dy if need_dy else None
    strides = 0 if labels is None else labels.stride(0), *((0, 0) if g is None else g.stride())
    numbers = V, span, splits, x.stride(0), y.stride(0), *strides, ignore_index, beta, max(eps, TINY)
    launch(_dense, (M * splits,), x, *tensors, *numbers, KIND=kind, SUM=losses == "sums", **c.row)
    return loss, dx, dy


@typed_launcher
def divergence_fwd(
    x: Tensor, y: Tensor, labels: Tensor | None, norm: Tensor | None, out: str, need_dx: bool, need_dy: bool,
    kind: str, beta: float, eps: float, ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss and gradients of rows x and y (M, V), as ``PairFunction`` has them."""
    half = torch.float16 in (x.dtype, y.dtype)
    losses = "elements" if out == "elements" else "sums"
    numbers = need_dx, need_dy, kind, beta, eps, ignore_index
    loss, dx, dy = _launch(losses, x, y, labels, None if half else norm, None, *numbers)
    # the parts of each row
    if out == "rows":
        loss = loss.sum(1)
    elif out == "sum":
        loss = loss.sum() if norm is None else loss.sum() / norm
    return loss, dx, dy


@typed_launcher
def divergence_bwd(
    g: Tensor, x: Tensor, y: Tensor, labels: Tensor | None, need_dx: bool, need_dy: bool, kind: str, beta: float,
    eps: float, ignore_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and dy for upstream gradients g, (M, V) of any strides or (M,)."""
    g = g if g.ndim == 2 else g[:, None].expand(x.shape)
    return _launch("", x, y, labels, None, g, need_dx, need_dy, kind, beta, eps, ignore_index)[1:]


def _divergence(x: Tensor, y: Tensor, *how) -> Tensor:
    return PairFunction.apply((divergence_fwd, divergence_bwd), *without_graph(x, y), *how)


def _in_torch(x: Tensor, y: Tensor, labels, norm, out, kind, beta, eps, ignore_index) -> Tensor:
    """``_divergence`` by ``elements``."""
    loss = masked(elements(x, y, kind, beta, eps), labels, ignore_index)
    if out == "elements":
        return loss.to(torch.promote_types(x.dtype, y.dtype))
    return loss.sum(-1) if out == "rows" else loss.sum() if norm is None else loss.sum() / norm


# What follows the tensors in ``_divergence`` and ``_in_torch``, of each of the three operators:
# labels, norm, out, kind, beta, eps, ignore_index.


def _jsd(x: Tensor, labels: Tensor | None, beta: float, ignore_index: int, reduction: str) -> tuple:
    norm = counted(x, labels, ignore_index) if reduction == "batchmean" else None
    return labels, norm, "rows" if reduction == "none" else "sum", jsd_kind(beta), beta, 0.0, ignore_index


def _kl_div(x: Tensor, reduction: str, log_target: bool, eps: float) -> tuple:
    count = {"mean": x.numel(), "batchmean": x.shape[0]}.get(reduction)
    # on the device, as the kernel reads it; nothing divided by 1 stays 0
    norm = None if count is None else x.new_full((), max(count, 1), dtype=acc(x.dtype))
    kind = "forward_kl" if log_target else "kl"
    return None, norm, "elements" if reduction == "none" else "sum", kind, 0.5, eps, -100


def _tvd(x: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> tuple:
    rows = counted(x, labels, ignore_index)
    norm = {"mean": rows * x.shape[-1], "batchmean": rows}.get(reduction)
    return labels, norm, "elements" if reduction == "none" else "sum", "tvd", 0.5, 0.0, ignore_index


def reference_jsd(log_q, log_p, shift_labels, *, beta, ignore_index, reduction):
    return _in_torch(log_q, log_p, *_jsd(log_q, shift_labels, beta, ignore_index, reduction))


def reference_kl_div(input, target, *, reduction, log_target, eps):
    return _in_torch(input, target, *_kl_div(input, reduction, log_target, eps))


def reference_tvd(p, q, shift_labels, *, reduction, ignore_index):
    return _in_torch(p, q, *_tvd(p, shift_labels, ignore_index, reduction))


def _cost(x: Tensor, y: Tensor, elementwise: bool, *operations: int) -> Cost:
    return Cost(*moved(x, y, elementwise), flops=(operations[0] * x.numel(), operations[1] * x.numel()))


def _logs(*shape: int, **options: Any) -> dict[str, Any]:
    return dict(log_q=T(shape, log_probs), log_p=T(shape, log_probs), **options)


@op(
    reference=reference_jsd,
    cases=[
        Case("jsd", _logs(9, 130)),
        Case("labels", _logs(7, 61, shift_labels=targets(7, 61), beta=0.1)),
        Case("forward-kl", _logs(6, 99, shift_labels=targets(6, 99), beta=0.0)),
        Case("reverse-kl", _logs(6, 99, beta=1.0)),
        Case("none", _logs(7, 64, shift_labels=targets(7, 64), reduction="none")),
        Case("sum-3d", _logs(2, 3, 65, beta=0.9, reduction="sum")),
        Case("fp32-teacher", _logs(5, 70) | dict(log_p=T((5, 70), log_probs, dtype=torch.float32))),
        Case("all-ignored", _logs(3, 20, shift_labels=targets(3, 20, 1), reduction="sum")),
        Case("three-blocks", _logs(2, 9001, shift_labels=targets(2, 9001, 5))),
    ],
    cost=lambda log_q, log_p, shift_labels=None, **_: _cost(log_q, log_p, False, 10, 8),
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
    pair = {"log_q": log_q, "log_p": log_p}
    shift_labels = check("jsd", pair, shift_labels, reduction, ("none", "sum", "batchmean"))
    if not 0 <= beta <= 1:
        raise ValueError(f"jsd: beta must be between 0 and 1, got {beta}")
    if not have_kernels(log_q, log_p):
        return reference_jsd(log_q, log_p, shift_labels, beta=beta, ignore_index=ignore_index, reduction=reduction)
    return _divergence(log_q, log_p, *_jsd(log_q, shift_labels, beta, ignore_index, reduction))


def _pair(*shape: int, draw=probs, **options: Any) -> dict[str, Any]:
    return dict(input=T(shape, log_probs), target=T(shape, draw), **options)


@op(
    reference=reference_kl_div,
    cases=[
        Case("batchmean", _pair(9, 130, reduction="batchmean")),
        Case("mean", _pair(7, 61)),
        Case("log-target", _pair(6, 99, draw=log_probs, log_target=True, reduction="batchmean")),
        Case("none", _pair(7, 64, reduction="none")),
        Case("none-log-target", _pair(5, 33, draw=log_probs, log_target=True, reduction="none")),
        Case("sum-3d", _pair(2, 3, 65, reduction="sum")),
        Case("batchmean-3d", _pair(4, 3, 20, reduction="batchmean")),
        Case("fp32-target", _pair(5, 70, reduction="batchmean") | dict(target=T((5, 70), probs, dtype=torch.float32))),
        Case("eps", _pair(6, 99, reduction="sum", eps=5e-3)),
        Case("three-blocks", _pair(2, 9001, reduction="batchmean")),
    ],
    cost=lambda input, target, *, reduction="mean", **_: _cost(input, target, reduction == "none", 4, 4),
)
def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """KL(target || exp(input)) of log-probabilities ``input`` and probabilities ``target``, or
    their logs with ``log_target``; both (..., V).

    At each element: p (log p - input), where log p is log(max(p, eps)), or target with
    ``log_target``. Returns 0-dim fp32: the sum, or the sum divided by the number of elements
    ("mean") or by the first dim ("batchmean"); "none": a tensor of input's shape. Both arguments
    get gradients.
    """
    check("kl_div", {"input": input, "target": target}, None, reduction)
    if eps < 0:
        raise ValueError(f"kl_div: eps must not be negative, got {eps}")
    if not have_kernels(input, target):
        return reference_kl_div(input, target, reduction=reduction, log_target=log_target, eps=eps)
    return _divergence(input, target, *_kl_div(input, reduction, log_target, eps))


def _probs(*shape: int, **options: Any) -> dict[str, Any]:
    return dict(p=T(shape, probs), q=T(shape, probs), **options)


@op(
    reference=reference_tvd,
    cases=[
        Case("batchmean", _probs(9, 130)),
        Case("labels", _probs(7, 61, shift_labels=targets(7, 61))),
        Case("mean", _probs(6, 99, shift_labels=targets(6, 99), reduction="mean")),
        Case("none", _probs(7, 64, shift_labels=targets(7, 64), reduction="none")),
        Case("sum-3d", _probs(2, 3, 65, reduction="sum")),
        Case("fp32-teacher", _probs(5, 70) | dict(q=T((5, 70), probs, dtype=torch.float32))),
        Case("all-ignored", _probs(3, 20, shift_labels=targets(3, 20, 1), reduction="sum")),
        Case("three-blocks", _probs(2, 9001, shift_labels=targets(2, 9001, 5))),
    ],
    cost=lambda p, q, shift_labels=None, *, reduction="batchmean", **_: _cost(p, q, reduction == "none", 3, 3),
)
def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, *, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance ``sum |p - q| / 2`` of probabilities p and q (..., V).

    Returns 0-dim fp32: the sum, or the sum divided by the number of rows with a label other than
    ``ignore_index`` ("batchmean"), or by the number of their elements ("mean"); "none": a tensor of
    p's shape. Both arguments get gradients.
    """
    shift_labels = check("tvd", {"p": p, "q": q}, shift_labels, reduction)
    if not have_kernels(p, q):
        return reference_tvd(p, q, shift_labels, reduction=reduction, ignore_index=ignore_index)
    return _divergence(p, q, *_tvd(p, shift_labels, ignore_index, reduction))


class LigerJSDFunction:
    """``apply``: log_q and log_p."""

    @staticmethod
    def apply(
        _input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None,
        reduction="batchmean",
    ):  # fmt: skip
        only_ours("jsd", jsd_impl, jsd_mode)
        return jsd(_input, target, shift_labels, beta=beta, ignore_index=ignore_index, reduction=reduction)


class LigerKLDivLossFunction:
    """``apply``: log-probabilities, and probabilities or their logs."""

    @staticmethod
    def apply(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        return kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


class LigerTVDLossFunction:
    """``apply``: probabilities p and q."""

    @staticmethod
    def apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return tvd(p, q, shift_labels, reduction=reduction, ignore_index=ignore_index)
