"""Frozen weights in FP8 with one scale for each block of values, as checkpoints are published
(DeepSeek-V3, arXiv:2412.19437; Transformers' ``FP8Linear`` and ``FP8Experts``).

W (..., N, K) = W8 s: W8 in e4m3, and a scale s in fp32 for each block of BN x BK values, 128 x 128 in
most checkpoints; the last blocks may be smaller. There are two forms of the products:

    decoded    y = x W^T                              dx = dy W, with W made dense by one kernel
    in FP8     y = sum_k sx_k (x8_k W8_k^T) s_k       dx = sum_n sd_n (dy8_n W8_n) s_n

k counts blocks of 128 columns of x, n those of dy. x8 and dy8 in e4m3 have a scale (M, 1) for each of
these blocks: its largest finite value / 448. A product of such a cast is off by 2.6 % of its root mean
square; a decoded weight is rounded once, to the dtype of x.

Transformers multiplies in FP8 in the forward, and computes dx from the dense weight. With dx in FP8,
too, as many tensors again are cast, with the same relative error and independent of the others: all
gradients together are then off by at most sqrt(2) times what the forward alone makes them. Measured
beside fp64 (Llama, 4 layers, all layers adapted): 28.7 % instead of 28.0 %; decoded in bf16: 4.5 %.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc, checks, launch_config, typed_launcher
from liger_kernel.ops._core.operator import intercepted, launch, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, rows_at, tl
from liger_kernel.ops.projections.float8 import _LEAST, E4, LEAST, _quantized, _size, lacking, transposed
from liger_kernel.ops.projections.weights import Dequantized, Operand, added

BLOCK = 128  # columns with one scale, and rows of such a block of a weight, in products in FP8


def reference(q: Tensor, scale: Tensor, blocks: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """q (..., N, K) times the scale of each block, in ``dtype``."""
    wide, (N, K) = acc(dtype), q.shape[-2:]
    each = scale.to(wide).repeat_interleave(blocks[0], -2)[..., :N, :].repeat_interleave(blocks[1], -1)[..., :K]
    return (q.to(wide) * each).to(dtype)


def divided(w: Tensor, scale: Tensor, blocks: tuple[int, int]) -> Tensor:
    """w (..., N, K) in fp32, divided by the scale of each block."""
    N, K = w.shape[-2:]
    return w / scale.repeat_interleave(blocks[0], -2)[..., :N, :].repeat_interleave(blocks[1], -1)[..., :K]


def cast_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What ``float8_cast_blocks`` returns."""
    wide = F.pad(x.float(), (0, 0, 0, -x.shape[0] % 4)).unflatten(1, (-1, BLOCK))
    finite = wide.isfinite()
    amax = wide.abs().where(finite, 0.0).amax(2).clamp(min=LEAST)
    top = amax.new_full((), torch.finfo(E4).max)
    q = (wide * (top / amax)[..., None]).where(finite, float("nan")).to(E4)
    return q.flatten(1), (amax / top).t().contiguous()


@jit
def _dense(
    q_ptr, scale_ptr, y_ptr, rows, cols, N, scale_rows, scale_cols,
    BN: tl.constexpr, BK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``rows``: those of all experts, one after another, N of each."""
    program, tiles = tl.program_id(0), tl.cdiv(cols, BLOCK_COLS)
    row = (program // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = mask_of(row, rows, col, cols)
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # the blocks of an expert begin with its first row
    block = (row // N) * scale_rows + (row % N) // BN
    scale = tl.load(scale_ptr + block.to(tl.int64)[:, None] * scale_cols + (col // BK)[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + at, (q * scale).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _cast(x_ptr, q_ptr, scale_ptr, M, M0, N, stride, BLOCK_M: tl.constexpr, COLS: tl.constexpr):
    """M0 rows, of which x has M; the others are zeros."""
    tiles = tl.cdiv(N, COLS)
    block = tl.program_id(0) % tiles
    row = rows_at(tl.program_id(0) // tiles, BLOCK_M)
    col = block * COLS + tl.arange(0, COLS)
    x = load_tile(x_ptr, row, col, stride, mask_of(row, M, col, N))
    amax, top = tl.maximum(tl.max(_size(x), 1), _LEAST), tl.full((), 448.0, tl.float32)
    # the scales of a block of columns lie together, as tensor cores read them
    tl.store(scale_ptr + block.to(tl.int64) * M0 + row, tl.div_rn(amax, top), mask=row < M0)
    q = _quantized(x, tl.div_rn(top, amax)[:, None], q_ptr)
    tl.store(q_ptr + row[:, None] * N + col[None, :], q, mask=mask_of(row, M0, col, N))


_VALUES, _COLS = 4096, 1024  # values of a program that makes a weight dense, and the most columns of it
_ROWS = 32  # rows of a program that casts


@typed_launcher
def dense_blocks(q: Tensor, scale: Tensor, block_n: int, block_k: int, dtype: torch.dtype) -> Tensor:
    (N, K), y = q.shape[-2:], q.new_empty(q.shape, dtype=dtype)
    cols, count = min(next_power_of_2(K), _COLS), y.numel() // K
    rows = _VALUES // cols
    how = dict(BN=block_n, BK=block_k, BLOCK_ROWS=rows, BLOCK_COLS=cols, num_warps=4)
    launch(_dense, (cdiv(count, rows) * cdiv(K, cols),), q, scale, y, count, K, N, *scale.shape[-2:], **how)
    return y


@typed_launcher
def float8_cast_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K), K a multiple of 128, in e4m3, with zeros below until the rows are a multiple of 4,
    as cuBLAS wants them; and the scales (K / 128, those rows)."""
    M, K = x.shape
    rows = M + -M % 4
    q, scale = x.new_empty(rows, K, dtype=E4), x.new_empty(K // BLOCK, rows, dtype=torch.float32)
    grid = (cdiv(rows, _ROWS) * (K // BLOCK),)
    launch(_cast, grid, x, q, scale, M, rows, K, x.stride(0), BLOCK_M=_ROWS, COLS=BLOCK, num_warps=4)
    return q, scale


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    return float8_cast_blocks(x if x.stride(1) == 1 else x.contiguous()) if use_kernels(x) else cast_reference(x)


def dense(q: Tensor, scale: Tensor, blocks: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """q (..., N, K) times the scale of each block, as a new tensor of ``dtype``."""
    # Triton has E4M3 for Ada, Hopper and newer; PyTorch converts it everywhere
    arch = launch_config.arch()
    known = arch == "cpu" or (arch.startswith("sm") and int(arch[2:]) >= 89)
    if known and q.numel() and use_kernels(q.new_empty(0, dtype=dtype)) and q.is_contiguous():
        return dense_blocks(q, scale.contiguous(), *blocks, dtype)
    return reference(q, scale, blocks, dtype)


def padded(scale: Tensor) -> Tensor:
    """The scales of the blocks of a weight as cuBLAS reads them: rows of a multiple of 4."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


def product(x8: Tensor, sx: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x W^T (M, N) in bf16 of a cast x8 (M, K) with scales sx (K / 128, M) and of w (N, K) with
    ``padded`` scales (N / 128, K / 128)."""
    if x8.is_meta or intercepted():
        return x8.new_empty((x8.shape[0], w.shape[0]), dtype=torch.bfloat16)
    if not x8.is_cuda:
        with torch.autocast(x8.device.type, enabled=False):
            x, scale = reference(x8, sx.t(), (1, BLOCK), torch.float32), scale[:, : sx.shape[0]]
            return (x @ reference(w, scale, (BLOCK, BLOCK), torch.float32).t()).bfloat16()
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(x8, w.t(), sx.t(), kinds[0], scale.t(), kinds[1], output_dtype=torch.bfloat16)


@functools.cache
def _multiplies(index: int) -> bool:
    # PyTorch has these products for Hopper alone, and not in each release and build: one is tried
    device = torch.device("cuda", index)
    if lacking(device) or torch.cuda.get_device_capability(index) != (9, 0) or not hasattr(F, "scaled_mm"):
        return False
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 5 * BLOCK, generator=generator).to(device) for n in (6, 2 * BLOCK))
    scale = torch.rand(2, 5, generator=generator).to(device) + 0.5
    x8, sx = cast(x.bfloat16())
    try:
        found = product(x8, sx, w.to(E4), padded(scale)).float()[:6]
    except (RuntimeError, ValueError):
        return False
    exact = reference(w.to(E4), scale, (BLOCK, BLOCK), torch.float32)
    with torch.autocast("cuda", enabled=False):
        truth = reference(x8, sx.t(), (1, BLOCK), torch.float32)[:6] @ exact.t()
    return bool((found - truth).norm() <= 0.01 * truth.norm())


def multiplies(device: torch.device) -> bool:
    """Whether this GPU, with this PyTorch, multiplies in FP8 with scales of blocks."""
    if device.type != "cuda" or torch.version.hip or intercepted():
        return False
    return _multiplies(torch.cuda.current_device() if device.index is None else device.index)


@dataclass(frozen=True, eq=False)
class Float8Blocks(Dequantized):
    """A weight that is decoded for each product. A node of ours runs even without adapters: so
    whether they are active changes nothing else."""

    gains: ClassVar[bool] = True
    q: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    blocks: tuple[int, int] = field(kw_only=True)

    @property
    def products(self) -> str:
        return "decoded for each product"

    @property
    def values(self) -> Tensor:
        return self.q

    def nearest(self, w: Tensor) -> Float8Blocks:
        scale = self.scale.where(self.scale != 0, float("inf"))
        most = torch.finfo(E4).max
        q = divided(w, scale, self.blocks).clamp_(-most, most).to(E4)
        return dataclasses.replace(self, q=q, dequantize=functools.partial(dense, q, self.scale, self.blocks))

    def part(self, some: slice, dtype: torch.dtype) -> Tensor:
        """The dense weights of some experts."""
        return dense(self.q[some], self.scale[some], self.blocks, dtype)

    def said(self, *more: Float8Blocks) -> str:
        """Storage, products and bytes of this and ``more`` weights, for a report."""
        size = sum(weight.q.nbytes + weight.scale.nbytes for weight in (self, *more))
        return f"FP8 in blocks of {self.blocks[0]} x {self.blocks[1]}, {size / 1e6:.1f} MB, {self.products}"


@dataclass(frozen=True, eq=False)
class MultipliedFloat8Blocks(Float8Blocks):
    """A weight in blocks of 128 x 128 that multiplies bf16 in FP8: in the forward by ``forth``, the
    ``padded`` scales, and in the backward by ``back``, those of the transpose; without them it is
    decoded there."""

    accumulates: ClassVar[bool] = False  # torch's scaled product cannot add to its output
    forth: Tensor = field(kw_only=True)
    back: Tensor | None = field(kw_only=True)
    turn: Callable[[Tensor], Tensor] = field(default=transposed, kw_only=True)

    @property
    def products(self) -> str:
        return "multiplied in FP8" if self.back is not None else "multiplied in FP8, in the backward decoded"

    def opened(self, dtype: torch.dtype) -> MultipliedFloat8Blocks:
        # made once for the backward of all parts, and not for a forward
        cache = functools.cache
        return dataclasses.replace(self, dequantize=cache(self.dequantize), turn=cache(self.turn))

    def forward(self, x: Operand, y: Tensor | None) -> Tensor:
        return _product(x.made((E4, BLOCK), cast), self.q, self.forth, x.rows.shape[0], y)

    def backward(self, dy: Operand, dx: Tensor | None) -> Tensor:
        if self.back is None:
            return super().backward(dy, dx)
        # contiguous along the reduction, which for dx are the outputs
        return _product(cast(dy.rows), self.turn(self.q), self.back, dy.rows.shape[0], dx)


def _product(x: tuple[Tensor, Tensor], w: Tensor, scale: Tensor, rows: int, y: Tensor | None) -> Tensor:
    """Of a cast x, which may have more rows."""
    found = product(*x, w, scale)
    return added(found[:rows] if rows % 4 else found, y)


def float8_blocks(q: Tensor, scale: Tensor, blocks: tuple[int, int] | None) -> Float8Blocks:
    """The weight q (..., N, K) in e4m3 with its scales, one for each of the ``blocks``: (BN, BK), or
    None for one scale, or one for each part of equal height.

    ``ValueError`` for another dtype, or for scales that are not those of the blocks.
    """
    if q.dtype != E4:
        raise ValueError(f"float8_blocks: q must be in {E4}, got {q.dtype}")
    checks.floating("float8_blocks", scale=scale)
    *lead, N, K = q.shape
    scale = scale.float()  # of fp32, or of 8 bits of exponent
    if blocks is None:
        scale = scale.reshape(*lead, -1, 1)
        blocks = max(N // max(scale.shape[-2], 1), 1), max(K, 1)
    expected = (*lead, cdiv(N, blocks[0]), cdiv(K, blocks[1]))
    if scale.shape != expected:
        raise ValueError(
            f"float8_blocks: scale must have shape {expected} for q {tuple(q.shape)} in blocks of {blocks[0]} x "
            f"{blocks[1]}, got {tuple(scale.shape)}"
        )
    made = functools.partial(dense, q, scale, blocks)
    return Float8Blocks(tuple(q.shape), None, True, q=q, scale=scale, blocks=blocks, dequantize=made)


def in_float8(weight: Float8Blocks, kept: Scales | None = None, backward: bool = True) -> Float8Blocks:
    """The same weight, multiplied in FP8 if its blocks allow it; in the ``backward``, too, or
    there decoded. ``kept``: what ``scales_of(weight)`` returned."""
    if weight.blocks != (BLOCK, BLOCK) or len(weight.shape) != 2 or any(n % BLOCK for n in weight.shape):
        return weight
    forth, back = kept or scales_of(weight)
    given = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    return MultipliedFloat8Blocks(**given, forth=forth, back=back if backward else None)


Scales = tuple[Tensor, Tensor]


def scales_of(weight: Float8Blocks) -> Scales:
    """The scales with which products in FP8 multiply, forward and backward."""
    return padded(weight.scale), padded(weight.scale.t())
