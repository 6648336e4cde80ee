"""Linear layers whose adapters are merged into the stored weight before each product, rounded to the
numbers that its storage has: what is trained is the merged model.

``y = x W'^T + bias``, W' the weight of this storage, with the scales of W, that is nearest to
``W + sum_j s_j B_j A_j`` in fp32. The gradient passes the rounding as if it were not there (straight
through, arXiv:1308.3432): dx = dy W', and those of the adapters are LoRA's. W' is made for one product and
made again in the backward; the node saves x and the adapters.

For experts, ``RoundedExperts`` stands in for W in LoRA's own products: W' - s B A, to which they add
s B A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from liger_kernel.ops._core import once_differentiable
from liger_kernel.ops._core.operator import refuse_graphs, rows_of, shaped, use_kernels
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.linear import dtypes_of, without_autocast
from liger_kernel.ops.projections.mxfp4 import MXFP4Experts, mxfp4_experts, rounded_sum_mxfp4
from liger_kernel.ops.projections.weights import Operand, Weight, as_dtype


def merged(weight: Weight, adapters: Sequence[Adapter]) -> Weight:
    """The weight (N, K), or (E, N, K) of experts, of the same storage and scales that is nearest to the sum of
    ``weight`` and the adapters in fp32."""
    if not adapters:
        return weight
    b, a = _factors(adapters)
    if isinstance(weight, MXFP4Experts) and _by_kernel(weight):
        return replace(weight, blocks=rounded_sum_mxfp4(weight.blocks, weight.scales, b, a, torch.uint8))
    w = weight.dense(torch.float32)
    with without_autocast(w.device.type):
        return weight.nearest(w + b @ a)


def _factors(adapters: Sequence[Adapter]) -> tuple[Tensor, Tensor]:
    """b (..., N, R) and a (..., R, K) in fp32, whose product is what all adapters add."""
    b = torch.cat([adapter.b.float() * adapter.scale for adapter in adapters], -1)
    return b, torch.cat([adapter.a.float() for adapter in adapters], -2)


def _by_kernel(weight: MXFP4Experts) -> bool:
    blocks = weight.blocks
    return blocks.numel() > 0 and use_kernels(blocks.new_empty(0, dtype=torch.float32)) and blocks.is_contiguous()


@dataclass(frozen=True, eq=False)
class RoundedExperts(MXFP4Experts):
    """Weights of experts to which the products of these adapters are added. The sum is the merged weight, but
    for one rounding to the dtype of the products."""

    adapters: Sequence[Adapter] = field(kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.part(slice(None), dtype)

    def part(self, some: slice, dtype: torch.dtype) -> Tensor:
        adapters = [Adapter(adapter.a[some], adapter.b[some], adapter.scale) for adapter in self.adapters]
        weight, (b, a) = mxfp4_experts(self.blocks[some], self.scales[some]), _factors(adapters)
        if _by_kernel(weight):
            return rounded_sum_mxfp4(weight.blocks, weight.scales, b, a, dtype)
        w = merged(weight, adapters).dense(torch.float32)
        with without_autocast(w.device.type):
            return (w - b @ a).to(dtype)


def rounded_experts(weight: MXFP4Experts, adapters: Sequence[Adapter]) -> RoundedExperts:
    held = [Adapter(a.a.detach(), a.b.detach(), a.scale) for a in adapters]
    return RoundedExperts(weight.shape, None, True, blocks=weight.blocks, scales=weight.scales, adapters=held)


class MergedLinearFunction(torch.autograd.Function):
    """``apply(x, weight, scales of the adapters, their dtype, a and b of each)`` returns x W'^T."""

    @staticmethod
    def forward(ctx, x, weight, scales, thin, *tensors):
        ctx.weight, ctx.scales, ctx.thin, ctx.shape = weight, scales, thin, x.shape
        ctx.save_for_backward(x, *tensors)
        with without_autocast(x.device.type):
            y = merged(weight, _adapters(tensors, scales)).forward(Operand(rows_of(x), ctx.needs_input_grad[0]), None)
        return shaped(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *tensors = ctx.saved_tensors
        rows, dy, thin = rows_of(x), rows_of(dy), ctx.thin
        dx, needs = None, ctx.needs_input_grad
        if needs[0]:
            dx = merged(ctx.weight, _adapters(tensors, ctx.scales)).backward(Operand(dy), None).view(ctx.shape)
        grads: list[Tensor | None] = []
        for place, (adapter, scale) in enumerate(zip(_adapters(tensors, ctx.scales), ctx.scales)):
            a, b, wide, seen = (as_dtype(t, thin) for t in (adapter.a, adapter.b, dy, rows))
            need_a, need_b = needs[4 + 2 * place : 6 + 2 * place]
            da = ((wide @ b).mul_(scale).t() @ seen).to(adapter.a.dtype) if need_a else None
            db = (wide.t() @ (seen @ a.t())).mul_(scale).to(adapter.b.dtype) if need_b else None
            grads += da, db
        return dx, None, None, None, *grads


def _adapters(tensors: Sequence[Tensor], scales: Sequence[float]) -> list[Adapter]:
    return [Adapter(a, b, scale) for a, b, scale in zip(tensors[::2], tensors[1::2], scales)]


def merged_linear(x: Tensor, projection: Projection) -> Tensor:
    """y (..., N) of a projection of x (..., K), in the dtype of autocast if it is on, else in that of x.
    Its weight is frozen and has a ``nearest``; its adapters have neither a dropout nor a bias."""
    refuse_graphs("merged_linear", "a rounded sum has the gradients of one that is not rounded")
    dtype, thin = dtypes_of(x, [projection])
    tensors = [t for adapter in projection.adapters for t in (adapter.a, adapter.b)]
    scales = tuple(adapter.scale for adapter in projection.adapters)
    y = MergedLinearFunction.apply(as_dtype(x, dtype), projection.weight, scales, thin, *tensors)
    return y if projection.bias is None else y + as_dtype(projection.bias, dtype)
