"""Linear layers of one input, with or without adapters, as one node of the graph: q, k and v, or any single one.

The formula, and what is kept for the backward, stand in ``adapted``; how a weight may be stored, in ``weights``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import once_differentiable, rows_of, shaped
from liger_kernel.ops.projections.adapted import Projection, Projections


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Products in the dtypes of their tensors."""
    if device == "meta":  # which autocast does not know
        yield
        return
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


def dtypes_of(x: Tensor, projections: Sequence[Projection]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the products with the weights, and of those with the adapters."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return dtype, dtype
    thin = x.dtype
    for p in projections:
        for adapter in p.adapters:
            thin = torch.promote_types(thin, adapter.a.dtype)
    return x.dtype, thin


def flat(projections: Sequence[Projection]) -> list[Tensor | None]:
    """All tensors of projections that may have a gradient."""
    return list(chain.from_iterable(p.tensors() for p in projections))


def split(values: Sequence, projections: Sequence[Projection]) -> list[list]:
    """``flat`` values by projection."""
    values, parts = list(values), []
    for p in projections:
        n = 3 + 3 * len(p.adapters)
        parts.append(values[:n])
        values = values[n:]
    return parts


class LinearsFunction(torch.autograd.Function):
    """``apply(x, projections, thin dtype, *their tensors)``: the y's, as a tuple. x has the dtype of the products."""

    @staticmethod
    def forward(ctx, x, projections, thin, *tensors):
        ctx.projections, ctx.thin = projections, thin
        with without_autocast(x.device.type):
            node = Projections(projections, x.dtype, thin)
            node.take(rows_of(x))
            ys = node.outputs(rows_of(x))
        ctx.save_for_backward(x, *tensors, *node.kept())
        return tuple(shaped(y, (*x.shape[:-1], y.shape[1])) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        saved, n = ctx.saved_tensors, 1 + sum(3 + 3 * len(p.adapters) for p in ctx.projections)
        x, *tensors = saved[:n]
        need_x, _, _, *needs = ctx.needs_input_grad
        projections = [p.of(t) for p, t in zip(ctx.projections, split(tensors, ctx.projections))]
        node = Projections(projections, x.dtype, ctx.thin)
        node.restore(saved[n:])
        need = split(needs, projections)
        node.thin_gradients([rows_of(dy) for dy in dys], need)
        dx = node.input_gradient().view(x.shape) if need_x else None
        return dx, None, None, *node.weight_gradients(rows_of(x), need)


def linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """y (..., N) of each projection of x (..., K), in the dtype of autocast, or of x."""
    dtype, thin = dtypes_of(x, projections)
    return LinearsFunction.apply(x.to(dtype), tuple(projections), thin, *flat(projections))
