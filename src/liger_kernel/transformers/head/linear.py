"""An output head with adapters at the moment of a call, as a weight, a bias and a term of low rank.

    lm_head with LoRA, two of them active       x W^T + [s_1 drop_1(x) A_1^T, s_2 drop_2(x) A_2^T] [B_1, B_2]^T + bias
    the same with adapters disabled or merged   x W^T + bias
    tied, with rows i trained as D              x W^T + x (D - W_i)^T E_i^T, E_i (V, n) of zeros and ones

PyTorch computes the thin products with the A's for all tokens at once, so dropout draws the same
mask as stock (except if a model slices its logits before its loss), and A and x get their gradients
by autograd. The loss engine computes the rest in chunks (``ops/losses/chunks``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import parallel
from liger_kernel.ops.projections.adapted import Projection, may_overflow
from liger_kernel.ops.projections.linear import dtypes_of
from liger_kernel.ops.projections.weights import Dense
from liger_kernel.transformers.head.state import untouched
from liger_kernel.transformers.recognise.projections import (
    Left,
    base_of,
    copy_in_use,
    product_dtype,
    projection,
    trained_rows,
)


def may_be_linear(head: nn.Module) -> nn.Module | None:
    """Return the linear layer in ``head`` that holds its weight, if a loss can treat the head as
    that weight plus terms of low rank."""
    inner = parallel.bare(head)
    base = inner if parallel.is_linear(inner) else base_of(copy_in_use(inner))
    return base if parallel.is_linear(base) else None


def with_adapters(head: nn.Module, x: Tensor) -> Projection | Left:
    """Return what ``head(x)`` computes now from a whole weight, or the reason why the head
    itself is called on one chunk of tokens at a time."""
    if torch.compiler.is_compiling():
        return Left("torch.compile")
    if not untouched():
        return Left("hooks of all modules, or a linear layer of PyTorch that is replaced")
    found = trained_rows(inner := copy_in_use(head), product_dtype(x)) or projection(inner, product_dtype(x))
    if why := left_out(found, x):
        return why
    assert isinstance(found, Projection)
    if found.weight.shape[1] != x.shape[-1]:
        return Left(f"a weight of {found.weight.shape[1]} columns beside {x.shape[-1]} of its input")
    return found


def left_out(found: Projection | Left, x: Tensor) -> Left | None:
    """Why a loss cannot treat a head as a weight plus terms of low rank. ``x``: of the dtype and
    on the device of its input."""
    if isinstance(found, Left):
        return found
    if not isinstance(found.weight, Dense):
        return Left(getattr(found.weight, "why", "a quantised weight"))
    if found.magnitude is not None:
        return Left("DoRA, which scales rows of the sum of weight and adapter")
    return (
        Left("adapters that are not in fp16 beside a weight in fp16, whose range their thin results may leave")
        if may_overflow(*dtypes_of(x, (found,)))
        else None
    )


def terms(found: Projection, x: Tensor) -> dict[str, Any]:
    """Return x (M, H), w, bias, xa and wb of ``linear_cross_entropy`` for a head and the rows
    with which it is called."""
    dtype, bias = product_dtype(x), found.bias
    rows, xa, wb = x.to(dtype), [], []
    for adapter in found.adapters:
        # stock draws the mask in the adapter's dtype
        seen = F.dropout(x.to(adapter.a.dtype), adapter.dropout).to(dtype) if adapter.dropout else rows
        xa.append(adapter.scale * F.linear(seen, adapter.a.to(dtype)))
        wb.append(adapter.b.to(dtype))
        if adapter.bias is not None:
            bias = adapter.scale * adapter.bias if bias is None else bias + adapter.scale * adapter.bias
    thin = dict(xa=torch.cat(xa, 1), wb=torch.cat(wb, 1)) if xa else {}
    return dict(x=rows, w=found.weight.learnable, bias=bias) | thin
