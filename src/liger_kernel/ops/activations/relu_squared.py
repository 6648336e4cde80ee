"""Squared ReLU: ``y = max(x, 0)^2``, in fp32, rounded once (So et al., arXiv:2109.08668). x of
any shape, y like x."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_row, rows_at, tl

# values per program, 16 per thread: as in glu, memory bandwidth is the only limit
BLOCK = 2048


def reference(x):
    return F.relu(x.to(acc(x.dtype))).square().to(x.dtype)


@jit
def _fwd(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = rows_at(tl.program_id(0), BLOCK)
    x = load_row(x_ptr, i, N)
    # not max(x, 0): a NaN stays one
    tl.store(y_ptr + i, tl.where(x <= 0, 0.0, x * x).to(y_ptr.dtype.element_ty), mask=i < N)


@jit
def _bwd(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    i = rows_at(tl.program_id(0), BLOCK)
    dy = load_row(dy_ptr, i, N)
    x = load_row(x_ptr, i, N)
    tl.store(dx_ptr + i, tl.where(x <= 0, 0.0, 2.0 * x * dy).to(dx_ptr.dtype.element_ty), mask=i < N)


@typed_launcher
def relu_squared_fwd(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(_fwd, (cdiv(x.numel(), BLOCK),), x, y, x.numel(), BLOCK=BLOCK, num_warps=4)
    return y


@typed_launcher
def relu_squared_bwd(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    launch(_bwd, (cdiv(x.numel(), BLOCK),), dy, x, dx, x.numel(), BLOCK=BLOCK, num_warps=4)
    return dx


class LigerReLUSquaredFunction(torch.autograd.Function):
    """``apply(x)``."""

    @staticmethod
    def forward(ctx, x):
        # elementwise, so any order of the values does, as long as dy comes in the same
        x = x.contiguous()
        ctx.save_for_backward(x)
        return relu_squared_fwd(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return (relu_squared_bwd(dy.contiguous(), *ctx.saved_tensors),)


@op(
    reference=reference,
    cases=[Case("nemotron", dict(x=T((2, 5, 72)))), Case("odd", dict(x=T((3, 1, 701)))), Case("one", dict(x=T((1,))))],
    cost=lambda x: Cost(nbytes(x, x), nbytes(x, x, x), flops=(2 * x.numel(), 3 * x.numel())),
)
def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``. x in fp32, fp16, bf16 or fp64, of any shape and strides."""
    if not x.is_floating_point():
        raise ValueError(f"relu_squared: x must be floating point, got {x.dtype}")
    if not use_kernels(x, fusible=True):
        return reference(x)
    return LigerReLUSquaredFunction.apply(x)
