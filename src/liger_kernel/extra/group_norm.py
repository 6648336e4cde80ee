"""GroupNorm: ``y = (x - mean) / sqrt(var + eps) * w + b``, mean and variance over a group of
channels, in fp32, rounded once (arXiv:1803.08494).

Shapes: x (B, C, *), w and b (C,), y like x.  G groups of K = C / G channels, D = product of the
dims after C, N = K D numbers a group.

The variance is the mean of (x - mean)^2, never a difference of means, which would cancel. A small
group is held in registers and read once.
For a larger group, each of several programs computes mean and squares of one part, these are
merged, and x is read again. The backward reads dy and
x twice: first for the sums p of dy and q of dy x_hat over each channel of a sample (dw and db are
their sums over the samples); then, with means over a group, ``dx = (w dy - mean(w p) - x_hat mean(w
q)) * rstd``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import launch, once_differentiable, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, rows_at, store_tile, tile_at, tl
from liger_kernel.ops.norms.layer_norm import standardised

MAX_N = 16384  # numbers of a group that one program holds in registers
SPLITS = 256  # most parts of a group, or of a channel in the backward
BLOCK = 4096  # numbers of a part that a program reads at a time: 16 per thread, with a mean and a square for each


def reference(x, num_groups, w, b, *, eps):
    y = torch.group_norm(x.to(acc(x.dtype)), num_groups, eps=eps)
    per_channel = (-1, *[1] * (x.ndim - 2))
    if w is not None:
        y = y * w.to(y.dtype).view(per_channel)
    if b is not None:
        y = y + b.to(y.dtype).view(per_channel)
    return y.to(x.dtype)


@jit
def _fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, G, K, D, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole groups: M = B G rows of N columns."""
    row, col, mask = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    x = load_tile(x_ptr, row, col, N, mask)
    y = standardised(x, mask, row, M, N, eps, mean_ptr, rstd_ptr)
    # col // D without a division of integers: of numbers this small the quotient's error is far
    # below half a step
    within = ((col.to(tl.float32) + 0.5) / D).to(tl.int32)
    channel = (row % G)[:, None] * K + within[None, :]
    if w_ptr is not None:
        y *= tl.load(w_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    store_tile(y_ptr, row, col, N, y, mask)


@jit
def _parts(x_ptr, parts_ptr, N, splits, length, BLOCK: tl.constexpr):
    """The mean of a part of a group, ``length`` numbers or what is left, and the sum of their
    squared distances from it.

    Counted from the group's first number: what is far from all of them would be rounded with each
    that comes in.
    """
    program = tl.program_id(0).to(tl.int64)
    x_ptr += program // splits * N
    origin = tl.load(x_ptr).to(tl.float32)
    first = program % splits * length
    end = tl.minimum(first + length, N)
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    seen = 0.0
    for start in range(first, end, BLOCK):  # each lane by itself (Welford): nothing is exchanged before the end
        mask = start + lane < end
        x = tl.load(x_ptr + start + lane, mask=mask, other=0.0).to(tl.float32) - origin
        seen += 1.0
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / seen)
        square += delta * (x - mean)
    count = (tl.maximum(end - first - lane + (BLOCK - 1), 0) // BLOCK).to(tl.float32)
    total = tl.sum(mean * count, axis=0) / tl.maximum(end - first, 1).to(tl.float32)
    delta = mean - total
    tl.store(parts_ptr + 2 * program, total)
    tl.store(parts_ptr + 2 * program + 1, tl.sum(square + count * delta * delta, axis=0))


@jit
def _merge(x_ptr, parts_ptr, mean_ptr, rstd_ptr, N, splits, length, eps, SPLITS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    count = tl.minimum(tl.maximum(N - part.to(tl.int64) * length, 0), length).to(tl.float32)
    mean = tl.load(parts_ptr + 2 * (group * splits + part), mask=part < splits, other=0.0)
    square = tl.load(parts_ptr + 2 * (group * splits + part) + 1, mask=part < splits, other=0.0)
    total = tl.sum(mean * count, axis=0) / N
    delta = mean - total
    tl.store(mean_ptr + group, tl.load(x_ptr + group * N).to(tl.float32) + total)
    tl.store(rstd_ptr + group, tl.rsqrt(tl.sum(square + count * delta * delta, axis=0) / N + tl.cast(eps, tl.float32)))


@jit
def _place(M, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a program, and which of them there are."""
    blocks = tl.cdiv(D, BLOCK_N)
    row = rows_at(tl.program_id(0) // blocks, BLOCK_M)
    col = rows_at(tl.program_id(0) % blocks, BLOCK_N)
    return row, col, mask_of(row, M, col, D)


@jit
def _apply(
    x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, y_ptr, M, C, K, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Channels: M = B C rows of D columns."""
    row, col, mask = _place(M, D, BLOCK_M, BLOCK_N)
    mean = tl.load(mean_ptr + row // K, mask=row < M, other=0.0)[:, None]
    factor = tl.load(rstd_ptr + row // K, mask=row < M, other=0.0)
    if w_ptr is not None:
        factor *= tl.load(w_ptr + row % C, mask=row < M, other=0.0).to(tl.float32)
    x = load_tile(x_ptr, row, col, D, mask)
    y = (x - mean) * factor[:, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + row % C, mask=row < M, other=0.0).to(tl.float32)[:, None]
    store_tile(y_ptr, row, col, D, y, mask)


@jit
def _bwd_sums(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, M, C, K, D, splits, length,
    NEED_Q: tl.constexpr, NEED_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums q and p over a part of the columns of some rows (channels of samples), ``sums``
    (splits, B, q then p, C)."""
    row = rows_at(tl.program_id(0) // splits, BLOCK_M)
    part = (tl.program_id(0) % splits).to(tl.int64)
    mean = tl.load(mean_ptr + row // K, mask=row < M, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row // K, mask=row < M, other=0.0)
    q = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    p = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(part * length, tl.minimum(part * length + length, D), BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = mask_of(row, M, col, D)
        dy = load_tile(dy_ptr, row, col, D, mask)
        if NEED_P:
            p += dy
        if NEED_Q:
            q += dy * (load_tile(x_ptr, row, col, D, mask) - mean)
    sums_ptr += (part * (M // C) + row // C) * C * (NEED_Q + NEED_P) + row % C
    if NEED_Q:
        tl.store(sums_ptr, tl.sum(q, axis=1) * rstd, mask=row < M)
    if NEED_P:
        tl.store(sums_ptr + C * NEED_Q, tl.sum(p, axis=1), mask=row < M)


@jit
def _bwd_means(sums_ptr, w_ptr, means_ptr, M, C, G, K, N, splits, BLOCK_K: tl.constexpr):
    """The means over a group, of its N numbers, of w q and w p."""
    group = tl.program_id(0).to(tl.int64)
    q = tl.zeros((BLOCK_K,), tl.float32)
    p = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K * splits, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        channel = group % G * K + i % K
        at = (i // K * (M // G) + group // G) * 2 * C + channel
        w = tl.load(w_ptr + channel, mask=i < K * splits, other=0.0).to(tl.float32) if w_ptr is not None else 1.0
        q += w * tl.load(sums_ptr + at, mask=i < K * splits, other=0.0)
        p += w * tl.load(sums_ptr + at + C, mask=i < K * splits, other=0.0)
    tl.store(means_ptr + group, tl.sum(q, axis=0) / N)
    tl.store(means_ptr + M + group, tl.sum(p, axis=0) / N)


@jit
def _bwd_dx(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, means_ptr, dx_ptr, M, C, K, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col, mask = _place(M, D, BLOCK_M, BLOCK_N)
    mean = tl.load(mean_ptr + row // K, mask=row < M, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row // K, mask=row < M, other=0.0)[:, None]
    q_mean = tl.load(means_ptr + row // K, mask=row < M, other=0.0)[:, None]
    p_mean = tl.load(means_ptr + M // K + row // K, mask=row < M, other=0.0)[:, None]
    g = load_tile(dy_ptr, row, col, D, mask)
    if w_ptr is not None:
        g *= tl.load(w_ptr + row % C, mask=row < M, other=0.0).to(tl.float32)[:, None]
    x = load_tile(x_ptr, row, col, D, mask)
    dx = (g - p_mean - (x - mean) * rstd * q_mean) * rstd
    store_tile(dx_ptr, row, col, D, dx, mask)


def _sizes(x: Tensor, num_groups: int) -> tuple[int, int, int, int, int]:
    """B, C, K, D, N."""
    B, C = x.shape[:2]
    D = x.shape[2:].numel()
    return B, C, C // num_groups, D, C // num_groups * D


def _split(rows: int, n: int, block: int) -> tuple[int, int]:
    """The number of parts of ``n`` columns, and their length: with few rows, there are four
    programs per processor."""
    splits = max(1, min(SPLITS, 4 * launch_config.processors() // max(rows, 1), cdiv(n, block)))
    return splits, max(1, cdiv(cdiv(n, splits), block)) * block


@typed_launcher
def group_norm_fwd(
    x: Tensor, num_groups: SymInt, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    B, C, K, D, N = _sizes(x, num_groups)
    M = B * num_groups
    y = torch.empty_like(x)
    mean, rstd = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
    if N <= MAX_N:
        c = launch_config.tile("group_norm_fwd", N, x.itemsize, elements=4096)
        launch(_fwd, (cdiv(M, c.block_m),), x, w, b, y, mean, rstd, M, N, num_groups, K, D, eps, **c.tile)
    else:
        splits, length = _split(M, N, BLOCK)
        found = x.new_empty(M, splits, 2, dtype=torch.float32)
        launch(_parts, (M * splits,), x, found, N, splits, length, BLOCK=BLOCK, num_warps=8)
        launch(_merge, (M,), x, found, mean, rstd, N, splits, length, eps, SPLITS=SPLITS, num_warps=1)
        c = launch_config.tile("group_norm_apply", D, x.itemsize, elements=2048, per_thread=8, max_block_n=2048)
        numbers = B * C, C, K, D
        tensors = x, w, b, mean, rstd, y
        launch(_apply, (cdiv(B * C, c.block_m) * cdiv(D, c.block_n),), *tensors, *numbers, **c.tile)
    return y, mean, rstd


@typed_launcher
def group_norm_bwd(
    dy: Tensor, x: Tensor, num_groups: SymInt, w: Tensor | None, mean: Tensor, rstd: Tensor, need_dx: bool,
    need_dw: bool, need_db: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and dw and db side by side in ``dtype``; gradients that are not needed are empty."""
    B, C, K, D, N = _sizes(x, num_groups)
    M, rows, need_q, need_p = B * num_groups, B * C, need_dx or need_dw, need_dx or need_db
    # 8 numbers per thread: each row of a thread needs a 64-bit offset, so 16 numbers take 226
    # registers on sm90 if channels are short
    c = launch_config.tile("group_norm_bwd", D, x.itemsize, elements=2048, per_thread=8, max_block_n=2048)
    splits, length = _split(cdiv(rows, c.block_m), D, c.block_n)
    sums = x.new_empty(splits * B, C * (need_q + need_p), dtype=torch.float32)
    numbers = rows, C, K, D, splits, length
    tensors = dy, x, mean, rstd, sums
    launch(_bwd_sums, (cdiv(rows, c.block_m) * splits,), *tensors, *numbers, NEED_Q=need_q, NEED_P=need_p, **c.tile)
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    if need_dx:
        means = x.new_empty(2, M, dtype=torch.float32)
        numbers = M, C, num_groups, K, N, splits
        launch(_bwd_means, (M,), sums, w, means, *numbers, BLOCK_K=128, num_warps=1)
        grid = (cdiv(rows, c.block_m) * cdiv(D, c.block_n),)
        launch(_bwd_dx, grid, dy, x, w, mean, rstd, means, dx, rows, C, K, D, **c.tile)
    if not (need_dw or need_db):
        return dx, x.new_empty(0, dtype=dtype)
    dwb = column_sum(sums, dtype)
    return dx, dwb if need_dw and need_db else dwb[:C] if need_dw else dwb[-C:]


class LigerGroupNormFunction(torch.autograd.Function):
    """``apply(x, w, b, num_channels, num_groups, eps)``; w and b may be None, and the channels
    are x's."""

    @staticmethod
    def forward(ctx, x, w, b, num_channels, num_groups, eps):
        x, w, b = x.contiguous(), w if w is None else w.contiguous(), b if b is None else b.contiguous()
        y, mean, rstd = group_norm_fwd(x, num_groups, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.num_groups, ctx.b_dtype = num_groups, None if b is None else b.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        w_dtype = w.dtype if need_dw else ctx.b_dtype
        b_dtype = ctx.b_dtype if need_db else w_dtype
        dtype = torch.promote_types(w_dtype, b_dtype) if w_dtype else x.dtype
        dx, dwb = group_norm_bwd(dy.contiguous(), x, ctx.num_groups, w, mean, rstd, need_dx, need_dw, need_db, dtype)
        C = x.shape[1]
        dw, db = dwb[:C].to(w_dtype) if need_dw else None, dwb[-C:].to(b_dtype) if need_db else None
        return dx if need_dx else None, dw, db, None, None, None


def _shifted(*shape: int, dtype: torch.dtype) -> Tensor:
    return 300 + torch.randn(*shape, dtype=dtype)


def _tensors(num_groups: int, *shape: int) -> dict:
    return dict(x=T(shape), num_groups=num_groups, w=T(shape[1:2]), b=T(shape[1:2]))


@op(
    reference=reference,
    cases=[
        Case("unet", _tensors(4, 2, 16, 5, 7)),
        Case("no-bias", dict(x=T((3, 6, 33)), num_groups=3, w=T((6,)))),
        Case("video", _tensors(2, 2, 6, 3, 4, 5)),
        Case("large-mean", dict(x=T((2, 8, 40), draw=_shifted), num_groups=2, w=T((8,)), b=T((8,)))),
        Case("one-group", _tensors(1, 1, 5, 700)),
        Case("no-space", dict(_tensors(3, 5, 24), eps=1e-3)),
        Case("fp32-weight", dict(x=T((2, 4, 31)), num_groups=2, w=T((4,), dtype=torch.float32), b=T((4,)))),
        Case("long", dict(x=T((1, 6, 6000), draw=_shifted), num_groups=2, w=T((6,)), b=T((6,)))),
    ],
    cost=lambda x, num_groups, w=None, b=None, **_: Cost(
        nbytes(x, x, w, b), nbytes(x, x, x, w, w, b), flops=(6 * x.numel(), 14 * x.numel())
    ),
)
def group_norm(
    x: Tensor, num_groups: int, w: Tensor | None = None, b: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Group normalisation over the second dim, as ``F.group_norm``.

    x (B, C, ...) in fp32, fp16, bf16 or fp64, any strides; w and b (C,) or None, in any floating
    dtype. Returns a tensor of x's shape and dtype,
    which is contiguous if a kernel computes it.
    """
    checks.floating("group_norm", x=x)
    if x.ndim < 2:
        raise ValueError(f"group_norm: x must have shape (B, C, ...), got {tuple(x.shape)}")
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm: num_groups must divide the {x.shape[1]} channels of x, got {num_groups}")
    checks.shape("group_norm", x.shape[1:2], w=w, b=b)
    if not use_kernels(x, fusible=True) or not x.numel():
        return reference(x, num_groups, w, b, eps=eps)
    return LigerGroupNormFunction.apply(x, w, b, x.shape[1], num_groups, eps)
