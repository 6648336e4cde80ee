"""Launches of softmax and sparsemax over rows x (M, N). A program holds several short rows in
registers; a longer row has its own program with a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_kernel.ops._core import config
from liger_kernel.ops._core.operator import launch, tracing
from liger_kernel.ops._core.tl import cdiv

MAX_N = 32768  # columns that one program holds in registers: 32 fp32 values per thread
MAX_N_BWD = 16384  # the same for two tensors


def launch_fwd(short: Any, long: Any, x: Tensor, causal: bool, name: str, *, elements: int) -> Tensor:
    """y of x. ``causal``: in square matrices, only the columns up to the diagonal count, and the
    others are zero."""
    M, N = x.shape
    y = x.new_empty(M, N)
    if tracing(x):
        return y
    if N <= MAX_N:
        c = config.tile(name, N, x.itemsize, elements=elements, per_thread=32)
        launch(short, (cdiv(M, c.block_m),), x, y, M, N, x.stride(0), CAUSAL=causal, **c.tile)
    else:
        c = config.tile(name, N, x.itemsize, elements=1, max_block_n=8192, per_thread=8)
        launch(long, (M,), x, y, N, x.stride(0), CAUSAL=causal, **c.row)
    return y


def launch_bwd(
    short: Any, long: Any, dy: Tensor, y: Tensor, name: str, sweep: Callable[[int, int], tuple[int, int]]
) -> Tensor:
    """dx. ``sweep(N, bytes of a number)``: the largest block of a long row, and its values per
    thread."""
    M, N = y.shape
    dx = y.new_empty(M, N)
    if tracing(y):
        return dx
    strides = dy.stride(0), y.stride(0)
    if N <= MAX_N_BWD:
        c = config.tile(name, N, y.itemsize, elements=4096, per_thread=16)
        launch(short, (cdiv(M, c.block_m),), dy, y, dx, M, N, *strides, **c.tile)
    else:
        max_block_n, per_thread = sweep(N, y.itemsize)
        c = config.tile(name, N, y.itemsize, elements=1, max_block_n=max_block_n, per_thread=per_thread)
        launch(long, (M,), dy, y, dx, N, *strides, **c.row)
    return dx


def check(name: str, x: Tensor, dim: int) -> None:
    """Raise ``ValueError`` unless x has rows of floating-point numbers along ``dim``."""
    if not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point, got {x.dtype}")
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ValueError(f"{name}: dim must be in [{-max(x.ndim, 1)}, {max(x.ndim, 1) - 1}], got {dim}")
