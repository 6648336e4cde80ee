"""``y = x / sqrt(sum(x^2) + eps)`` over the last dim.

Shapes: x (..., N), y like x.  M = product of the leading dims.
"""

import torch
from torch import Tensor

from liger_kernel.library import (
    Case,
    Cost,
    T,
    acc,
    cdiv,
    jit,
    launch,
    launch_config,
    launcher,
    load_tile,
    nbytes,
    once_differentiable,
    op,
    rows_of,
    shaped,
    store_tile,
    tile_at,
    tl,
    tracing,
    use_kernels,
)

WIDEST = 16384  # columns that a program holds in registers; wider rows run the reference


def reference(x, *, eps):
    h = x.to(acc(x.dtype))
    return (h * torch.rsqrt(h.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@jit
def _fwd(x_ptr, y_ptr, scale_ptr, M, N, x_stride, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    x = load_tile(x_ptr, row, col, x_stride, mask)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) + tl.cast(eps, tl.float32))
    tl.store(scale_ptr + row, scale, mask=row < M)
    store_tile(y_ptr, row, col, N, x * scale[:, None], mask)


@jit
def _bwd(dy_ptr, x_ptr, scale_ptr, dx_ptr, M, N, dy_stride, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    dy, x = load_tile(dy_ptr, row, col, dy_stride, mask), load_tile(x_ptr, row, col, x_stride, mask)
    scale = tl.load(scale_ptr + row, mask=row < M, other=0.0)[:, None]
    y = x * scale
    store_tile(dx_ptr, row, col, N, (dy - y * tl.sum(dy * y, axis=1)[:, None]) * scale, mask)


# Names of launchers are those of torch.ops.liger: begin them with the name of your operator
@launcher("(Tensor x, float eps) -> (Tensor y, Tensor scale)")
def l2_normalise_fwd(x, eps) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    y, scale = x.new_empty(M, N), x.new_empty(M, dtype=torch.float32)
    if not tracing(x):  # sizes are symbols then
        c = launch_config.tile("l2_normalise_fwd", N, x.itemsize, elements=4096)
        launch(_fwd, (cdiv(M, c.block_m),), x, y, scale, M, N, x.stride(0), eps, **c.tile)
    return y, scale


@launcher("(Tensor dy, Tensor x, Tensor scale) -> Tensor")
def l2_normalise_bwd(dy, x, scale) -> Tensor:
    M, N = x.shape
    dx = x.new_empty(M, N)
    if not tracing(x):
        c = launch_config.tile("l2_normalise_bwd", N, x.itemsize, elements=4096)
        launch(_bwd, (cdiv(M, c.block_m),), dy, x, scale, dx, M, N, dy.stride(0), x.stride(0), **c.tile)
    return dx


class L2NormaliseFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        rows = rows_of(x)
        y, scale = l2_normalise_fwd(rows, eps)
        ctx.save_for_backward(rows, scale)
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return l2_normalise_bwd(rows_of(dy), *ctx.saved_tensors).view(dy.shape), None


@op(
    reference=reference,
    cases=[
        Case("odd", dict(x=T((7, 123)))),
        Case("3-D", dict(x=T((2, 5, 64)), eps=0.5)),
        Case("keys-of-a-model", dict(x=T((4, 2048, 32, 128))), gpu=True),
    ],
    cost=lambda x, **_: Cost(forward=nbytes(x, x), backward=nbytes(x, x, x), flops=(4 * x.numel(), 7 * x.numel())),
)
def l2_normalise(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rows of length 1. x (..., N) in any floating dtype; returns a tensor of x's shape and dtype."""
    if not x.is_floating_point() or not x.ndim:
        raise ValueError(f"l2_normalise: x must be (..., N) in floating point, got {tuple(x.shape)} in {x.dtype}")
    if not use_kernels(x) or x.shape[-1] > WIDEST:
        return reference(x, eps=eps)
    return L2NormaliseFunction.apply(x, eps)
