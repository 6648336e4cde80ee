"""Multi-token attention: causal attention weights mixed over neighbouring queries, keys and heads
(Golovneva et al., arXiv:2504.00927).

    y = mask_0(conv2d(softmax(mask_-inf(scores)), weight) + bias)

Shapes: scores (B, C, L, L), weight (C', C / groups, kh, kw), bias (C',), y (B, C', L', L').  Masks
keep what is on or below the diagonal.

Sparsemax may replace softmax. Both read a row only up to the diagonal. Where their outputs are
zero, so are their gradients: no second mask is needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.extra.softmax import softmax_bwd, softmax_fwd
from liger_kernel.extra.sparsemax import reference as sparsemax_reference, sparsemax_bwd, sparsemax_fwd
from liger_kernel.ops._core import Case, Cost, T, checks, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import autocast_dtype, input_gradients, rows_of, use_kernels

Size = int | tuple[int, int]


def reference(scores, weight, bias, *, stride, padding, dilation, groups, sparse):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = scores.masked_fill(hidden, -float("inf"))
    p = sparsemax_reference(masked) if sparse else torch.softmax(masked, -1)
    return F.conv2d(p, weight, bias, stride, padding, dilation, groups).tril()


def _pair(size: Size) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


@typed_launcher
def multi_token_attention_bwd(
    dy: Tensor, p: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    sparse: bool, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of scores, weight and bias; gradients that are not needed are empty."""
    grads = torch.ops.aten.convolution_backward(
        dy.tril(), p, weight, weight.shape[:1], stride, padding, dilation, False, [0, 0], groups, needed
    )
    dp, dweight, dbias = (g if need else p.new_empty(0) for g, need in zip(grads, needed))
    if needed[0]:
        dp = (sparsemax_bwd if sparse else softmax_bwd)(rows_of(dp), rows_of(p)).view(p.shape)
    return dp, dweight, dbias


class LigerMultiTokenAttentionFunction(torch.autograd.Function):
    """``apply(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1,
    sparse=False)``."""

    @staticmethod
    def forward(ctx, scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
        p = (sparsemax_fwd if sparse else softmax_fwd)(rows_of(scores), True).view(scores.shape)
        ctx.save_for_backward(p, weight)
        ctx.conv, ctx.sparse = (_pair(stride), _pair(padding), _pair(dilation), groups), sparse
        y = F.conv2d(p, weight, bias, *ctx.conv)
        # torch.compile of PyTorch 2.11 loses the gradient of tril_
        return y.tril() if torch.compiler.is_compiling() else y.tril_()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needed = list(ctx.needs_input_grad[:3])
        return input_gradients(ctx, multi_token_attention_bwd(dy, *ctx.saved_tensors, *ctx.conv, ctx.sparse, needed))


def _cost(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    stride: Size = 1, padding: Size = 0, dilation: Size = 1, **_,
) -> Cost:  # fmt: skip
    B, L = scores.shape[0], scores.shape[-1]
    out = [
        (L + 2 * p - d * (k - 1) - 1) // s + 1
        for s, p, d, k in zip(_pair(stride), _pair(padding), _pair(dilation), weight.shape[2:])
    ]
    product = (B * out[0] * out[1], weight.shape[0], weight[0].numel())
    flops = (4 * scores.numel(), 4 * scores.numel())
    y = B * weight.shape[0] * out[0] * out[1] * scores.itemsize
    return Cost(
        nbytes(scores, weight, bias) + y,
        nbytes(scores, scores, weight, weight, bias) + y,
        flops=flops,
        gemms=([product], [product, product]),
    )


@op(
    reference=reference,
    cases=[
        Case("mta", dict(scores=T((2, 3, 17, 17)), weight=T((3, 3, 3, 3)), bias=T((3,)), padding=1)),
        Case("sparse", dict(scores=T((1, 2, 12, 12)), weight=T((2, 2, 3, 3)), bias=T((2,)), padding=1, sparse=True)),
        Case(
            "grouped",
            dict(
                scores=T((1, 4, 9, 9)), weight=T((6, 2, 3, 5)), stride=(2, 1), padding=(2, 4), dilation=(1, 2), groups=2
            ),
        ),
        Case("one-token", dict(scores=T((3, 2, 1, 1)), weight=T((2, 2, 1, 1)), bias=T((2,)))),
    ],
    cost=_cost,
)
def multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    stride: Size = 1, padding: Size = 0, dilation: Size = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Causal softmax, or sparsemax, of scores (B, C, L, L), then ``F.conv2d`` with weight (C', C /
    groups, kh, kw), then zero above the diagonal.

    All tensors have one dtype, which is autocast's if it is on.
    """
    if scores.ndim != 4 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"multi_token_attention: scores must have shape (B, C, L, L), got {tuple(scores.shape)}")
    if (dtype := autocast_dtype(scores)) is not None:
        scores, weight, bias = scores.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if weight.ndim != 4 or weight.shape[1] * groups != scores.shape[1]:
        raise ValueError(
            f"multi_token_attention: weight must have shape (C', {scores.shape[1] // groups}, kh, kw), got "
            f"{tuple(weight.shape)}"
        )
    checks.shape("multi_token_attention", weight.shape[:1], bias=bias)
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.dtype != scores.dtype:
            raise ValueError(
                f"multi_token_attention: {name} must have the dtype of scores, {scores.dtype}, got {p.dtype}"
            )
    if not use_kernels(scores, fusible=not sparse) or not scores.numel():
        return reference(
            scores, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups, sparse=sparse
        )
    return LigerMultiTokenAttentionFunction.apply(scores, weight, bias, stride, padding, dilation, groups, sparse)
