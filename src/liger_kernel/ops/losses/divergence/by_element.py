"""Divergences of two distributions given by element, as formulas in Triton and in torch; and the
autograd Function of losses of a pair of tensors.

A kind is a function of x and y at one element, summed over a row. With q = exp(x), p = exp(y) and m
= beta p + (1 - beta) q:

  kl          y (log(max(y, eps)) - x)     KL(y || exp(x)); y is a probability, x the log of one
  forward_kl  p (y - x)                    KL(p || q)
  reverse_kl  q (x - y)                    KL(q || p)
  jsd         beta p (y - log m) + (1 - beta) q (x - log m)
                                           beta KL(p || m) + (1 - beta) KL(q || m)
  tvd         |x - y| / 2                  x and y are probabilities

Where a probability is 0, what it multiplies counts as 0, also where that is infinite. A mean of no
rows is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from liger_kernel.ops._core import acc, checks, nbytes, once_differentiable
from liger_kernel.ops._core.operator import as_index, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import scaled
from liger_kernel.ops._core.tl import jit, log, tl

TINY = 1.1754944e-38  # the smallest normal fp32
REDUCTIONS = ("none", "sum", "mean", "batchmean")


def elements(x: Tensor, y: Tensor, kind: str, beta: float = 0.5, eps: float = TINY) -> Tensor:
    """The divergence at each element, in ``acc`` of the dtypes, with the derivatives that
    autograd finds."""
    dtype = acc(torch.promote_types(x.dtype, y.dtype))
    x, y = x.to(dtype), y.to(dtype)
    if kind == "tvd":
        return (x - y).abs() / 2
    if kind == "kl":
        # y = 0 against log q = -inf is 0 * inf: it counts as 0
        t = y.clamp(min=max(eps, TINY)).log() - x
        return y * t.masked_fill((y == 0) & (t == float("inf")), 0)
    if kind == "reverse_kl":
        x, y = y, x
    p, q = y.exp(), x.exp()
    if kind != "jsd":
        return p * (y - x).masked_fill(p == 0, 0)
    # the mixture of two numbers that are not 0 may underflow
    log_m = (beta * p + (1 - beta) * q).clamp(min=TINY).log()
    return beta * p * (y - log_m).masked_fill(p == 0, 0) + (1 - beta) * q * (x - log_m).masked_fill(q == 0, 0)


def jsd_kind(beta: float) -> str:
    """The kind to use for "jsd" with this ``beta``: at 0 and 1 the divergence vanishes, and a KL
    replaces it."""
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")


def counted(x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """The rows of x (..., V) that are not ignored, at least 1: a mean of none is 0. 0-dim fp32."""
    if labels is None:
        return x.new_full((), max(math.prod(x.shape[:-1]), 1), dtype=torch.float32)
    return (labels != ignore_index).sum(dtype=torch.float32).clamp_(min=1)


def masked(losses: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """``losses`` (..., V) with 0 in ignored rows."""
    return losses if labels is None else losses.where((labels != ignore_index)[..., None], 0)


@jit
def at_least(x, least):
    """The larger of x and a number; NaN stays NaN, which it does not in tl.maximum."""
    return tl.where(x < least, least, x)


@jit
def element(x, y, beta, eps, KIND: tl.constexpr):
    """The divergence at each element of fp32 x and y, and its derivatives with respect to x and
    to y."""
    if KIND == "tvd":
        d = x - y
        loss = 0.5 * tl.abs(d)
        # 0.0 * d: NaN stays NaN
        dx = tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0 * d))
        dy = -dx
    elif KIND == "kl":
        t = tl.log(at_least(y, eps)) - x
        t = tl.where((y == 0.0) & (t == float("inf")), 0.0, t)
        loss = y * t
        dx = -y
        dy = t + tl.where(y >= eps, 1.0, 0.0)
    elif KIND == "forward_kl":
        p = tl.exp(y)
        loss = p * tl.where(p == 0.0, 0.0, y - x)
        dx = -p
        dy = loss + p
    elif KIND == "reverse_kl":
        q = tl.exp(x)
        loss = q * tl.where(q == 0.0, 0.0, x - y)
        dx = loss + q
        dy = -q
    else:  # the logarithms' own derivatives cancel: the two terms of the loss are its derivatives
        p = tl.exp(y)
        q = tl.exp(x)
        # of probabilities that are not 0, m may underflow
        log_m = tl.log(at_least(beta * p + (1.0 - beta) * q, 1.1754944e-38))
        dx = (1.0 - beta) * q * tl.where(q == 0.0, 0.0, x - log_m)
        dy = beta * p * tl.where(p == 0.0, 0.0, y - log_m)
        loss = dx + dy
    return loss, dx, dy


@jit
def times(a, weight):
    """``a`` weighted; nothing where the weight is, also of what is infinite."""
    return tl.where(weight == 0.0, 0.0, a * weight)


@jit
def online(z, top, total):
    """The running maximum of each lane, its sum of exponentials relative to it, those of ``z``,
    and what older sums are to be multiplied by."""
    new = tl.maximum(top, tl.max(z, axis=1))
    shift = tl.where(new == -float("inf"), 0.0, new)  # a lane of -inf only has no maximum to subtract
    rescale = tl.exp(top - shift)
    e = tl.exp(z - shift[:, None])
    return new, total * rescale + tl.sum(e, axis=1), e, rescale


@jit
def joined(top, total):
    """The logsumexp over lanes, and the weight of each in softmax."""
    best = tl.max(top, axis=0)
    weight = tl.exp(top - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(total * weight, axis=0)
    return best + log(total), weight / total


@jit
def derived(x, y, beta, KIND: tl.constexpr):
    """Loss and dloss / dx at each element, and q; of the kinds that are not linear in the
    log-probabilities."""
    q = tl.exp(x)
    if KIND == "tvd":
        loss, dq, _ = element(q, tl.exp(y), beta, 0.0, KIND)
        g = q * dq
    else:
        loss, g, _ = element(x, y, beta, 0.0, KIND)
    return loss, g, q


class PairFunction(torch.autograd.Function):
    """``apply(launchers, x, y, labels, norm, out, *numbers)``: a loss of x and y (..., V).

    ``launchers``: ``fwd(x, y, labels, norm, out, need_dx, need_dy, *numbers)`` -> loss, dx, dy and
    ``bwd(g, x, y, labels, need_dx, need_dy, *numbers)`` -> dx, dy. ``out``: "elements" (M, V),
    "rows" (M,) or "sum", divided by ``norm``. A sum leaves its gradients behind, others the inputs.
    """

    @staticmethod
    def forward(ctx, launchers: tuple[Callable, Callable], x, y, labels, norm, out, *numbers):
        fwd, ctx.bwd = launchers
        ctx.need, ctx.numbers, ctx.shape, ctx.reduced = ctx.needs_input_grad[1:3], numbers, x.shape, out == "sum"
        # kernels read rows; views where the strides allow it
        x2, y2, rows = rows_of(x), rows_of(y), None if labels is None else labels.reshape(-1)
        loss, dx, dy = fwd(x2, y2, rows, norm, out, *(ctx.need if ctx.reduced else (False, False)), *numbers)
        if ctx.reduced:
            # fp16 gradients of a mean would underflow before a loss scaler reaches them: ``fwd``
            # has not divided them yet
            ctx.save_for_backward(dx, dy, norm if torch.float16 in (x.dtype, y.dtype) else None)
            return loss
        ctx.save_for_backward(x2, y2, rows)
        return shaped(loss, x.shape if out == "elements" else x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if ctx.reduced:
            dx, dy, norm = ctx.saved_tensors
            grads = scaled([d if need else None for d, need in zip((dx, dy), ctx.need)], g, norm)
        else:
            x, y, labels = ctx.saved_tensors
            g = g.reshape(x.shape if g.shape == ctx.shape else -1)
            grads = ctx.bwd(g, x, y, labels, *ctx.need, *ctx.numbers)
        dx, dy = (d.view(ctx.shape) if need else None for d, need in zip(grads, ctx.need))
        return None, dx, dy, *(None,) * (3 + len(ctx.numbers))


def check(
    name: str,
    pair: dict[str, Tensor],
    shift_labels: Tensor | None,
    reduction: str,
    reductions: tuple[str, ...] = REDUCTIONS,
) -> Tensor | None:
    """Return ``shift_labels`` in a dtype that kernels read. Raise ``ValueError`` for arguments
    that have no meaning for a ``pair`` of tensors."""
    (a, x), (b, y) = pair.items()
    if not (x.is_floating_point() and y.is_floating_point()):
        raise ValueError(f"{name}: {a} and {b} must be floating point, got {x.dtype} and {y.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name}: {a} must have at least one dim, got shape ()")
    checks.shape(name, x.shape, **{b: y})
    if shift_labels is not None and shift_labels.is_floating_point():
        raise ValueError(f"{name}: shift_labels must hold integers, got {shift_labels.dtype}")
    checks.shape(name, x.shape[:-1], shift_labels=shift_labels)
    checks.one_of(name, reductions, reduction=reduction)
    # a narrow dtype would wrap -100 to a class
    return None if shift_labels is None else as_index(shift_labels)


def have_kernels(x: Tensor, y: Tensor) -> bool:
    return use_kernels(x) and use_kernels(y)


def without_graph(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, detached if gradients are off: a Function that computes gradients in its
    forward sees only whether its inputs require them."""
    return tensors if torch.is_grad_enabled() else tuple(t.detach() for t in tensors)


def moved(x: Tensor, y: Tensor, elementwise: bool = False) -> tuple[int, int, int]:
    """The least bytes of forward, of backward, and of both: one pass if the loss is one number,
    two if it is ``elementwise``."""
    grads, each = nbytes(*(t for t in (x, y) if t.requires_grad)), nbytes(x) if elementwise else 0
    forward, backward = nbytes(x, y) + each, nbytes(x, y) + each + grads
    return forward, backward, forward + backward if elementwise else backward


def log_probs(*shape: int, dtype: torch.dtype) -> Tensor:
    """Draw rows of log-probabilities for a ``Case``."""
    return torch.randn(*shape, dtype=dtype).log_softmax(-1)


def probs(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).softmax(-1)
