"""Linear layers of one input, with or without adapters, as one node of the graph: q, k and v
together, or one layer alone.

``adapted`` has the formula and says what is saved for the backward. ``weights`` says how a weight
may be stored.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from liger_kernel import memory
from liger_kernel._private import apply_of
from liger_kernel.ops._core import once_differentiable
from liger_kernel.ops._core.operator import autocast_dtype, refuse_graphs, rows_of, shaped
from liger_kernel.ops.projections.adapted import Group, Projection, Projections
from liger_kernel.ops.projections.weights import Operand, as_dtype


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Turn autocast off: products have the dtypes of their tensors."""
    if device == "meta":  # autocast does not know this device
        yield
        return
    if torch.compiler.is_compiling():  # a graph has this context, and not the calls below
        with torch.autocast(device, enabled=False):
            yield
        return
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


def dtypes_of(x: Tensor, projections: Sequence[Projection]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the products with the weights, and the dtype of the products with the
    adapters."""
    # autocast casts x, weights and adapters alike
    if (dtype := autocast_dtype(x)) is not None:
        return dtype, dtype
    thin = x.dtype
    for p in projections:
        for adapter in p.adapters:
            thin = torch.promote_types(thin, adapter.a.dtype)
    return x.dtype, thin


class LinearsFunction(torch.autograd.Function):
    """``apply(x, group, thin dtype, *its tensors)`` returns a tuple with the y of each
    projection. x has the dtype of the products."""

    @staticmethod
    def forward(ctx, x, group, thin, *tensors):
        ctx.group, ctx.thin = group, thin
        with without_autocast(x.device.type):
            node = Projections(group, x.dtype, thin)
            rows = Operand(rows_of(x), learns=any(ctx.needs_input_grad), stays=group.casts and stays(x))
            node.apply_a(rows.rows)
            ys = node.outputs(rows)
            ctx.rows_again, of_x = node.input_kept(rows, x)
        # where x ends and what the node kept begins
        ctx.shape, ctx.places = x.shape, (len(of_x), len(of_x) + len(tensors))
        ctx.save_for_backward(*of_x, *tensors, *node.kept())
        return tuple([shaped(y, (*x.shape[:-1], y.shape[1])) for y in ys])

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        saved, (begin, end) = ctx.saved_tensors, ctx.places
        x = ctx.rows_again(saved[:begin])
        # hooks may have moved tensors: the saved ones, not those of the forward
        group = ctx.group.of(saved[begin:end])
        node = Projections(group, dys[0].dtype, ctx.thin)
        node.restore(saved[end:])
        need = group.split(ctx.needs_input_grad[3:])
        node.thin_gradients([Operand(rows_of(dy)) for dy in dys], need)
        dx = node.input_gradient().view(ctx.shape) if ctx.needs_input_grad[0] else None
        return dx, None, None, *node.weight_gradients(x, need)


# Views between an attention's output and a linear layer, and the nodes that save their output for
# their own backward
_VIEWS = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "AliasBackward0",
}
_SAVE_OUTPUT = re.compile(r"ScaledDotProduct(Flash|Efficient|Cudnn|Fused)\w*Backward0|\w*FlashAttn\w*FuncBackward")


def stays(x: Tensor) -> bool:
    """Whether x is kept or recomputed for the backward in any case: the output of an attention,
    or of a rematerialised norm or activation."""
    node = None if torch.compiler.is_compiling() else x.grad_fn  # a compiler decides by itself what a graph saves
    if node is None:
        return False
    if memory.recomputed(x):
        return True
    # a view keeps what it shows
    while node.name() in _VIEWS:
        (node, _), *_ = node.next_functions
    return _SAVE_OUTPUT.fullmatch(node.name()) is not None


def linears(x: Tensor, projections: Sequence[Projection] | Group) -> tuple[Tensor, ...]:
    """y (..., N) of each projection of x (..., K), in the dtype of autocast if it is on, else in
    the dtype of x."""
    refuse_graphs("linears", "products in FP8 have gradients of their own")  # others do not come here then
    group = projections if isinstance(projections, Group) else Group(projections)
    dtype, thin = dtypes_of(x, group.projections)
    args = as_dtype(x, dtype), group, thin, *group.tensors
    return apply_of(LinearsFunction, args)(*args)
