"""The three products of a linear head and its cross entropy in FP8, in blocks of classes.
``linear_cross_entropy`` with ``fp8`` calls this.

Shapes: x (M, H), w (V, H), target (M,); a block has N of the V classes, z (M, N) are its logits.
Every product has all M tokens.

1. For each block: cast its rows of w to e4m3, multiply z = x8 w8^T, and keep of each row of z its
   largest value and sum of exponentials, and the logit of the target. After the last block, the
   log-sum-exp and the loss of each row are known.
2. For each block: dz in e5m2, in rows and transposed, in one pass. p <= 1 bounds |dz| by numbers of
   rows, so its scale needs no pass over dz.
   dx += dz8 w8 and dw = dz8^T x8, where w8 is cast transposed.

dz of the target, p_y - 1, is as large as all others of its row together, and is alone in dx and dw
what FP8 would round most: it is 0 in dz8, and its terms dz_y w_y and dz_y x are computed in the
dtype of x. This halves the error of both gradients.

Step 2 needs the logits again. The memory of dw is free until step 2 writes it, block by block: step
1 stores there 8 bits for each logit z of a block, the rounded 8 log2(e) (top - z), top the largest
of its row. p = exp(z - lse) is then off by up to 4 %, half of what rounding to e5m2 does, and 255
means 0. dw has room for H itemsize(w) tokens; logits of further ones, of a frozen w, and of a
backward that runs later (``reduction="none"``) are multiplied again.

Why blocks of classes: memory. The loop over tokens of ``chunks`` would hold both casts of w (2 V H
bytes) beside dw and the logits of a chunk, and FP8 products do not add to their output, so that
each chunk would read and write dw once more. 8192 x 4096 x 128256, H200 (bf16 744, FP8 1350
TFLOP/s, 4.2 TB/s), estimated from bytes and operations:

    bf16, chunks of 1024 tokens                                       3 x 11.6 ms + 5 ms      1.4 GB
    both casts of w, z and dx in FP8, dw in bf16                      12.7 + 11.6 + 5         2.5
    both casts of w, dz8^T of all tokens                              19.1 + 4                2.6
    blocks of classes, logits multiplied again                        25.5 + 4                1.4
    blocks of classes, 8 bits a logit in the memory of dw             19.1 + 4                1.4

A cast of w takes a few percent of the products' time, and to keep it from call to call would take V
H bytes from everything else: it is made anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc
from liger_kernel.ops._core.operator import launch, on_gpu, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, load_row, next_power_of_2, tanh, tl
from liger_kernel.ops.losses.chunks import auto_chunk_rows, dtype_of_dw
from liger_kernel.ops.losses.cross_entropy_rows import (
    _LOG2E,
    Loss,
    RowLosses,
    Terms,
    _finite,
    _weight,
    transformed,
    transformed_logits,
)
from liger_kernel.ops.projections.float8 import E4, E5, LEAST, _quantized, _quantized_t, lacking, product
from liger_kernel.ops.projections.float8_training import RECIPES, Cast, Recipe, amax_of, casts
from liger_kernel.ops.token_embedding import embedding_bwd

# The scales of x and w in z: one each (w: one a block), or one for each row. Gradients have one
# scale a tensor.
HEAD_RECIPES = ("tensorwise", "rowwise")
STEPS = 8 * math.log2(math.e)  # of a stored logit, in 1
TOP = 2.0**15  # what the bound of |dz| becomes in e5m2, which holds up to 1.75 times that
ROWS = 4096  # tokens of a product for dx: its result is a tensor of its own before it is added


def check_fp8(name: str, fp8: str | None, x: Tensor, **unsupported: object) -> None:
    """Raise ``ValueError`` for a recipe that a head does not have, and for what it cannot be
    combined with: arguments that are neither None nor False."""
    if fp8 is None:
        return
    if fp8 not in HEAD_RECIPES:
        raise ValueError(f"{name}: fp8 must be None or one of {HEAD_RECIPES}, got {fp8!r}")
    if x.dtype == torch.float64:
        raise ValueError(f"{name}: x and w must have 16 or 32 bits with fp8, got {x.dtype}")
    if why := lacking(x.device):
        raise ValueError(f"{name}: {why}")
    for argument, value in unsupported.items():
        if value is not None and value is not False:
            expected, got = ("False", "True") if value is True else ("None", "a tensor")
            raise ValueError(f"{name}: {argument} must be {expected} with fp8, got {got}")


@jit
def _stats(
    z_ptr, bias_ptr, w_ptr, target_ptr, codes_ptr, top_ptr, total_ptr, weighted_ptr, wz_ptr, sum_ptr, best_ptr, z_y_ptr,
    N, R, first, z_stride, ignore_index, logit_scale, softcap, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of a block a program. Of the first ``R`` rows it also stores the logits, in 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    if target != ignore_index:
        z_ptr += row * z_stride
        col = tl.arange(0, BLOCK)
        mask = col < N
        z, _t = transformed_logits(z_ptr, bias_ptr, col, mask, logit_scale, softcap, "")
        # the only pass over z: a block of classes fits one program
        top = tl.max(tl.where(mask, z, -float("inf")), axis=0)
        shift = _finite(top)
        d = tl.where(mask, z - shift, -float("inf"))
        # relative to the block, whose largest value goes with it: ``Stats.fill`` merges the blocks
        e = tl.exp(d)
        tl.store(top_ptr + row, top)
        tl.store(total_ptr + row, tl.sum(e, axis=0))
        if weighted_ptr is not None:
            tl.store(weighted_ptr + row, tl.sum(e * tl.maximum(d, -3e38), axis=0))
        if wz_ptr is not None:
            tl.store(wz_ptr + row, tl.sum(tl.where(mask, z, 0.0) * _weight(w_ptr, col, mask), axis=0))
        if sum_ptr is not None:
            tl.store(sum_ptr + row, tl.sum(tl.where(mask, z, 0.0), axis=0))
        if best_ptr is not None:
            tl.store(best_ptr + row, first + tl.min(tl.where(mask & (z == top), col, N), axis=0))
        y = target - first
        if (y >= 0) & (y < N):
            z_y, _t_y = transformed_logits(z_ptr, bias_ptr, y, y >= 0, logit_scale, softcap, "")
            tl.store(z_y_ptr + row, z_y)
        if codes_ptr is not None:
            code = tl.minimum(tl.floor(0.5 - d * STEPS), 255.0).to(tl.uint8)
            tl.store(codes_ptr + row * N + col, code, mask=mask & (row < R))


@jit
def _gradient(
    z_ptr, top_ptr, bias_ptr, w_ptr, target_ptr, lse_ptr, spread_ptr, smooth_ptr, ge_ptr, entropy_ptr, factor_ptr,
    d_ptr, dt_ptr, db_ptr, z_y_ptr,
    M, N, first, last, z_stride, d_stride, dt_stride, ignore_index, logit_scale, softcap,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz of a tile, times a factor, in rows and transposed; zeros up to ``d_stride`` classes and
    row ``last``. Column sums of each tile's dz in fp32."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    target = tl.load(target_ptr + row, mask=row < M, other=0).to(tl.int64)
    lse = load_row(lse_ptr, row, M)[:, None]
    # a factor of p in every column of the row
    slope = load_row(spread_ptr, row, M)[:, None]
    if top_ptr is not None:  # from 8 bits of each logit
        code = tl.load(z_ptr + row[:, None] * N + col[None, :], mask=inside, other=255)
        top = tl.load(top_ptr + row, mask=row < M, other=0.0)
        z = tl.where(code == 255, -float("inf"), _finite(top)[:, None] - code.to(tl.float32) * (1.0 / STEPS))
    else:
        z = tl.load(z_ptr + row[:, None] * z_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            z += load_row(bias_ptr, col, N)[None, :]
        z *= tl.cast(logit_scale, tl.float32)
        if softcap is not None:
            z = tanh(z / tl.cast(softcap, tl.float32)) * tl.cast(softcap, tl.float32)
        is_target = inside & (col[None, :] == (target - first)[:, None])
        tl.store(z_y_ptr + row[:, None] + 0 * col[None, :], z, mask=is_target)
    if ge_ptr is not None:
        ge = load_row(ge_ptr, row, M)[:, None]
        slope += ge * ((lse - tl.maximum(z, -3e38)) - load_row(entropy_ptr, row, M)[:, None])
    dz = tl.exp2((z - lse) * _LOG2E) * slope
    if smooth_ptr is not None:
        smooth = load_row(smooth_ptr, row, M)[:, None]
        w = tl.zeros([BLOCK_N], tl.float32) + _weight(w_ptr, col, col < N)
        dz -= smooth * w[None, :]
    if softcap is not None:
        cap = tl.cast(softcap, tl.float32)
        t = tl.maximum(z, -3e38) / cap
        dz *= tl.where(cap == 0.0, 0.0, 1.0 - t * t)
    # the target has its own term, in the dtype of x
    counts = inside & (target != ignore_index)[:, None] & (col[None, :] != (target - first)[:, None])
    dz = tl.where(counts, dz, 0.0)
    # a sum for each tile of rows: their order is fixed, and no atomics
    if db_ptr is not None:
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * N + col, tl.sum(dz, axis=0), mask=col < N)
    factor = tl.load(factor_ptr)
    if d_ptr is not None:
        mask = (row < M)[:, None] & (col < d_stride)[None, :]
        tl.store(d_ptr + row[:, None] * d_stride + col[None, :], _quantized(dz, factor, d_ptr), mask=mask)
    if dt_ptr is not None:
        # the same values again, as the product for dw reads them
        q = _quantized_t(dz, factor, dt_ptr)
        tl.store(dt_ptr + col[:, None] * dt_stride + row[None, :], q, mask=(col < N)[:, None] & (row < last)[None, :])


@dataclass
class Block:
    """``N`` classes from ``first`` on."""

    first: int
    N: int
    bias: Tensor | None
    class_weight: Tensor | None

    @property
    def classes(self) -> slice:
        return slice(self.first, self.first + self.N)


@dataclass
class Stats:
    """What step 1 finds of each block and row, (blocks, M), and the logit of the target (M,).
    Empty where the loss does not need it."""

    top: Tensor
    total: Tensor  # sum of exp(z - top)
    weighted: Tensor  # sum of (z - top) exp(z - top)
    wz: Tensor  # sum of class weight times z
    sum: Tensor
    best: Tensor  # the class of the largest z
    z_y: Tensor

    @classmethod
    def empty(cls, target: Tensor, blocks: int, s: Loss) -> Stats:
        M = target.shape[0]
        new = lambda wanted=True, dtype=torch.float32: target.new_zeros((blocks, M if wanted else 0), dtype=dtype)
        z_y = target.new_full((M,), float("nan"), dtype=torch.float32)
        needed = new(s.entropy), new(s.label_smoothing != 0), new(s.mean), new(s.stats, torch.int64)
        return cls(new(), new(), *needed, z_y)

    def fields(self, i: int) -> tuple[Tensor, ...]:
        """Those of a block, as the kernel has them."""
        return self.top[i], self.total[i], self.weighted[i], self.wz[i], self.sum[i], self.best[i], self.z_y

    def fill(self, out: RowLosses, s: Loss, target: Tensor, V: int, class_weight: Tensor | None) -> None:
        """Merge the blocks, in the same order every time."""
        top = self.top.amax(0)
        # a row of -inf has no largest value to count from
        top = top.where(top != -float("inf"), 0)
        less = self.top - top
        # each block counts from its own largest value
        part = self.total * less.exp()
        total = part.sum(0)
        low = total.log()
        lse = top.double() + low.double()
        terms = Terms.of(s, target, V, class_weight, lse, self.z_y)
        terms.losses(s, out, self.wz.sum(0) if terms.smooth else None)
        out.lse.copy_(lse.where(terms.valid, 0))
        if s.stats:
            best = self.best.gather(0, self.top.argmax(0)[None])[0]
            out.predicted.copy_(best.where(terms.valid, -1))
        if s.mean:
            out.mean.copy_((self.sum.sum(0) / V).where(terms.valid, 0))
        if s.entropy:
            moved = (self.weighted * less.exp() + (part * less).where(part != 0, 0)).sum(0)
            entropy = (low - moved / total).clamp(min=0) * self.z_y.new_ones(()).where(terms.known, float("nan"))
            out.entropy.copy_(entropy.where(terms.valid, 0))


def _stats_of(z: Tensor, block: Block, i: int, found: Stats, target: Tensor, s: Loss, codes: Tensor | None) -> None:
    """Fill row i of ``found`` from the logits z (M, N or more) of a block, and ``codes`` (R, N)
    from those of the first R tokens."""
    R = 0 if codes is None else codes.shape[0]
    if use_kernels(z):
        results = (t if t.numel() else None for t in found.fields(i))
        numbers = block.N, R, block.first, z.stride(0), s.ignore_index
        scale = None if s.logit_scale == 1.0 else s.logit_scale
        size = next_power_of_2(block.N)
        how = dict(STEPS=STEPS, BLOCK=size, num_warps=min(16, max(1, size // 512)))
        tensors = block.bias, block.class_weight, target, codes, *results
        launch(_stats, (z.shape[0],), z, *tensors, *numbers, scale, s.softcap, **how)
        return
    a, y = transformed(z[:, : block.N], block.bias, s)[0], target - block.first
    mine = (y >= 0) & (y < block.N)
    top = a.amax(1)
    less = a - top.where(top != -float("inf"), 0)[:, None]
    e = less.exp()
    found.top[i], found.total[i] = top, e.sum(1)
    found.z_y.copy_(a.gather(1, y.where(mine, 0)[:, None])[:, 0].where(mine, found.z_y))
    if s.entropy:
        found.weighted[i] = (e * less.clamp(min=-3e38)).sum(1)
    if s.label_smoothing:
        found.wz[i] = (a if block.class_weight is None else a * block.class_weight).sum(1)
    if s.mean:
        found.sum[i] = a.sum(1)
    if s.stats:
        found.best[i] = block.first + a.argmax(1)
    if codes is not None:
        codes.copy_((0.5 - less[:R] * STEPS).floor().nan_to_num(255).clamp(max=255))


@dataclass
class Slopes:
    """What the gradients of rows are made of, (M,) in fp32 each."""

    lse: Tensor
    spread: Tensor  # p is multiplied by it
    smooth: Tensor  # a class weight is
    on: Tensor  # the target's one is
    ge: Tensor | None  # upstream gradient of the entropy, and the entropy
    entropy: Tensor | None
    bound: Tensor  # 0-dim: no |dz| of a class that is not the target is larger

    @classmethod
    def of(cls, terms: Terms, s: Loss, V: int, class_weight: Tensor | None, norm, g, g_entropy, entropy) -> Slopes:
        factor, spread, scale = terms.slopes(s, norm, g)
        zero = lambda t: t.where(terms.valid, 0).contiguous()
        smooth, ge = zero(factor * terms.smooth), None if g_entropy is None else zero(scale * g_entropy)
        # p <= 1: nothing of dz but the target can be larger
        bound = spread.abs() + smooth.abs() * (1 if class_weight is None else class_weight.abs().max())
        # the entropy of V classes is at most log V
        if ge is not None:
            bound = bound + ge.abs() * (1 + math.log(V))  # of |p (log p + entropy)|
        bound = zero(bound).nan_to_num(0.0, 0.0, 0.0).max().clamp(min=LEAST)
        return cls(terms.lse.where(terms.valid, 0), zero(spread), smooth, zero(factor * terms.on), ge, entropy, bound)

    def __getitem__(self, rows: slice) -> Slopes:
        some = lambda t: None if t is None else t[rows]
        of_rows = self.lse, self.spread, self.smooth, self.on, self.ge, self.entropy
        found: list[Any] = [*map(some, of_rows), self.bound]
        return Slopes(*found)

    def dz(self, z: Tensor, w: Tensor | float, s: Loss) -> Tensor:
        """The gradient with respect to z (M, N), logits after scale and softcap of classes that
        are not the target, with class weights w."""
        slope, z = self.spread[:, None], z.clamp(min=-3e38)
        if self.ge is not None and self.entropy is not None:
            slope = slope + self.ge[:, None] * ((self.lse[:, None] - z) - self.entropy[:, None])
        dz = (z - self.lse[:, None]).exp() * slope - self.smooth[:, None] * w
        return dz if s.softcap is None else dz * _slope_of_cap(z, s.softcap)

    def dz_y(self, z_y: Tensor, w_y: Tensor | float, s: Loss) -> Tensor:
        """That of the target (M,)."""
        on = self.on if s.softcap is None else self.on * _slope_of_cap(z_y, s.softcap)
        return self.dz(z_y[:, None], w_y, s)[:, 0] - on


def _slope_of_cap(z: Tensor, softcap: float) -> Tensor:
    return 1 - (z / softcap).square() if softcap else torch.zeros_like(z)


def _gradient_of(
    z: Tensor, top: Tensor | None, block: Block, slopes: Slopes, target: Tensor, s: Loss,
    d: Tensor | None, dt: Tensor | None, db: Tensor | None, z_y: Tensor,
) -> None:  # fmt: skip  # what the gradient is made of, where it goes
    """Fill ``d`` (M, N or more) and ``dt`` (N, M or more), and add to ``db`` (N,), from the logits
    z of a block or, with ``top`` (M,), from 8 bits of each.

    From z it also fills the logits of the targets of the block, ``z_y``.
    """
    # on the device: the host does not know the bound
    M, factor = z.shape[0], TOP / slopes.bound
    if use_kernels(slopes.lse):
        width, rows = block.N if d is None else d.shape[1], M if dt is None else dt.shape[1]
        grid = cdiv(rows, 64), cdiv(width, 128)
        sums = None if db is None else slopes.lse.new_empty(grid[0], block.N)
        of_rows = slopes.lse, slopes.spread, slopes.smooth if s.label_smoothing else None, slopes.ge, slopes.entropy
        tensors = top, block.bias, block.class_weight, target, *of_rows, factor, d, dt, sums, z_y
        strides = z.stride(0), width, 0 if dt is None else dt.stride(0)
        numbers = M, block.N, block.first, rows, *strides, s.ignore_index, s.logit_scale, s.softcap
        launch(_gradient, grid, z, *tensors, *numbers, STEPS=STEPS, BLOCK_M=64, BLOCK_N=128, num_warps=8)
        if db is not None and sums is not None:
            db.add_(sums.sum(0))
        return
    y = target - block.first
    mine = (y >= 0) & (y < block.N)
    # targets of other blocks pick any column, which is then left alone
    at = y.where(mine, 0)[:, None]
    if top is None:
        a = transformed(z[:, : block.N], block.bias, s)[0]
        z_y.copy_(a.gather(1, at)[:, 0].where(mine, z_y))
    else:
        a = (top.where(top != -float("inf"), 0)[:, None] - z.float() / STEPS).masked_fill(z == 255, -float("inf"))
    dz = slopes.dz(a, 1.0 if block.class_weight is None else block.class_weight.float(), s).where(
        (target != s.ignore_index)[:, None], 0
    )
    dz.scatter_(1, at, dz.gather(1, at).where(~mine[:, None], 0))
    q = (dz * factor).where(dz.isfinite(), float("nan")).to(E5).view(torch.uint8)
    for t, values in ((d, q), (dt, q.t())):
        if t is not None:
            t.view(torch.uint8).zero_()[: values.shape[0], : values.shape[1]].copy_(values)
    if db is not None:
        db.add_(dz.sum(0))


def _padded(t: Tensor, rows: bool = True) -> Tensor:
    """``t`` with sizes that are multiples of 16, as FP8 products need them; with ``rows=False``
    only the second."""
    more = (0, -t.shape[1] % 16, 0, -t.shape[0] % 16 if rows else 0)
    return F.pad(t, more) if any(more) else t


def _casts(t: Tensor, recipe: Recipe, *, rows: bool, columns: bool) -> tuple[Cast, Cast]:
    """Casts of t (M, N), by rows with the recipe's scales, and by columns, transposed, with one
    scale. One that is not requested is anything."""
    none, powers_of_2 = Cast(t, t), recipe.powers_of_2
    if not recipe.by_rows:
        by_rows, by_columns = casts(t, E4, amax_of(t, False), powers_of_2, rows=rows, columns=columns)
    else:
        by_rows = casts(t, E4, amax_of(t, True), powers_of_2, rows=True, columns=False)[0] if rows else None
        by_columns = casts(t, E4, amax_of(t, False), False, rows=False, columns=True)[1] if columns else None
    return by_rows or none, by_columns or none


def classes_of_a_block(
    M: int, V: int, H: int, itemsize: int, rows: int, stored: int, need_dx: bool, dw: Tensor | None, least: int
) -> int:
    """So many, at least ``least``, that what exists at a time apart from dx and dw takes the
    memory of ``rows`` tokens of logits."""
    # casts of x, and a product for dx
    free = rows * V * itemsize - M * H * (1 + (dw is not None)) - need_dx * min(M, ROWS) * H * itemsize
    of_dw = 0 if dw is None or stored else H * dw.itemsize  # a product that is added
    # in step 1 logits and a cast of w; in step 2 logits that are not stored, dz, casts of w
    step_1 = M * itemsize + H
    step_2 = (M - stored) * itemsize + M * (need_dx + (dw is not None)) + H * (need_dx + (stored < M)) + of_dw
    each = max(step_1, step_2)
    n = min(max(free // each, least), 8192)  # one program has a row of a block
    return n // 128 * 128 if n > 128 else n


def _add_outer(total: Tensor, index: Tensor, scale: Tensor, x: Tensor) -> None:
    """Add ``scale`` (M,) times x (M, H) to the rows ``index`` (M,) of ``total``: those of one
    index are summed in fp32 and rounded once, in a fixed order."""
    M = index.shape[0]
    ordered, at = index.sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    run = new.cumsum(0) - 1
    of_token = torch.empty_like(run).scatter_(0, at, run)
    # only the device knows how many sums there are: what is left over repeats the first one, and
    # writes the same number to the same place
    slot = torch.arange(M, device=index.device)
    slot = slot.where(slot <= run[-1], 0)
    rows = torch.zeros_like(index).scatter_(0, run, ordered)[slot]
    for columns in (slice(first, first + 1024) for first in range(0, x.shape[1], 1024)):
        terms, part = x[:, columns] * scale[:, None], total[:, columns]
        if use_kernels(terms):
            terms = embedding_bwd(terms, of_token, M, None)
        else:
            wide = terms.to(acc(terms.dtype))
            terms = torch.zeros_like(wide).index_add_(0, of_token, wide)
        terms = terms.index_select(0, slot).to(total.dtype)
        part.index_copy_(0, rows, terms.add_(part.index_select(0, rows)))


@dataclass
class _Head:
    """Both steps for some tokens."""

    x: Tensor
    w: Tensor
    target: Tensor
    s: Loss
    recipe: Recipe
    bias: Tensor | None
    class_weight: Tensor | None
    dx: Tensor | None  # written
    dw: Tensor | None  # written, or with ``dw_is_new=False`` added to
    db: Tensor | None  # added to
    dw_is_new: bool
    step: int  # classes of a block
    stored: int  # tokens whose logits step 1 stores in dw

    def __post_init__(self) -> None:
        V, of = self.w.shape[0], lambda t, first: None if t is None else t[first : first + self.step]
        firsts = range(0, V, self.step)
        self.blocks = [
            Block(first, min(self.step, V - first), of(self.bias, first), of(self.class_weight, first))
            for first in firsts
        ]
        # x is cast once for all blocks, w block by block
        self.x8, self.x8_t = _casts(_padded(self.x, rows=False), self.recipe, rows=True, columns=self.dw is not None)

    def codes(self, b: Block) -> Tensor | None:
        """The stored logits of a block, (tokens, classes), in the memory of its rows of dw."""
        if not self.stored or self.dw is None:
            return None
        return self.dw[b.classes].view(torch.uint8).view(-1)[: self.stored * b.N].view(self.stored, b.N)

    def losses(self, out: RowLosses) -> Stats:
        """Step 1."""
        found = Stats.empty(self.target, len(self.blocks), self.s)
        for i, b in enumerate(self.blocks):
            w8, _ = _casts(_padded(self.w[b.classes]), self.recipe, rows=True, columns=False)
            _stats_of(product(*self.x8, *w8, self.x.dtype), b, i, found, self.target, self.s, self.codes(b))
        found.fill(out, self.s, self.target, self.w.shape[0], self.class_weight)
        return found

    def gradients(self, slopes: Slopes, found: Stats | None) -> None:
        """Step 2."""
        M, V, s = self.x.shape[0], self.w.shape[0], self.s
        z_y = self.target.new_full((M,), float("nan"), dtype=torch.float32) if found is None else found.z_y
        # what a block stored of its logits in dw is read before its dw is written there
        for i in range(len(self.blocks)):
            self._block(i, slopes, found, z_y)
        y = self.target.where((self.target >= 0) & (self.target < V), 0)
        w_y = 1.0 if self.class_weight is None else self.class_weight.float()[y, None]
        # the terms of the targets, which dz8 leaves out
        dz_y = slopes.dz_y(z_y, w_y, s).where(self.target != s.ignore_index, 0)
        if self.dx is not None:
            for rows in _parts(M, ROWS):
                self.dx[rows].addcmul_(self.w.index_select(0, y[rows]), dz_y[rows, None].to(self.x.dtype))
        if self.dw is not None:
            _add_outer(self.dw, y, dz_y.to(self.x.dtype), self.x)
        if self.db is not None:
            _add_outer(self.db[:, None], y, dz_y, torch.ones_like(dz_y)[:, None])

    def _block(self, i: int, slopes: Slopes, found: Stats | None, z_y: Tensor) -> None:
        M, b, x, dw = self.x.shape[0], self.blocks[i], self.x, self.dw
        # by rows only for logits that are not stored, by columns only for dx
        w8, w8_t = _casts(_padded(self.w[b.classes]), self.recipe, rows=self.stored < M, columns=self.dx is not None)
        # multiples of 16 columns, which FP8 products need; the kernel fills the rest with zeros
        d = None if self.dx is None else x.new_empty(M, b.N + -b.N % 16, dtype=E5)
        dt = None if dw is None else x.new_empty(b.N, M + -M % 16, dtype=E5)
        db, codes = None if self.db is None else self.db[b.classes], self.codes(b)
        some = lambda rows: (slopes[rows], self.target[rows], self.s, None if d is None else d[rows])
        if codes is not None and found is not None:
            rows = slice(0, self.stored)
            left = dt if dt is None or self.stored == M else dt[:, rows]
            _gradient_of(codes, found.top[i, rows], b, *some(rows), left, db, z_y[rows])
        if self.stored < M:
            rows = slice(self.stored, M)
            x8 = self.x8.values[rows], self.x8.scale[rows] if self.recipe.by_rows else self.x8.scale
            z = product(*x8, *w8, x.dtype)
            _gradient_of(z, None, b, *some(rows), None if dt is None else dt[:, self.stored :], db, z_y[rows])
            del z
        scale = slopes.bound / TOP
        if d is not None and self.dx is not None:
            for rows in _parts(M, ROWS):
                _product(d[rows], scale, w8_t, self.dx[rows], i == 0)
        if dt is not None and dw is not None:
            _product(dt, scale, self.x8_t, dw[b.classes], self.dw_is_new)


def _product(d: Tensor, scale: Tensor, other: Cast, out: Tensor, is_new: bool) -> None:
    """Write a product to ``out``, whose second size need not be a multiple of 16, or add it."""
    # into place, without a copy
    if is_new and out.shape[1] % 16 == 0:
        product(d, scale, *other, out.dtype, fast=False, out=out)
        return
    found = product(d, scale, *other, out.dtype, fast=False)[:, : out.shape[1]]
    out.copy_(found) if is_new else out.add_(found)


def _parts(M: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, M)) for first in range(0, M, step)]


def head_gradients(
    x: Tensor, w: Tensor, target: Tensor, s: Loss, fp8: str, need: tuple[bool, ...], *,
    bias=None, class_weight=None, out: RowLosses | None = None,
    norm=None, lse=None, g=None, g_entropy=None, entropy=None,
    chunk_rows: int | None = None, dw_into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip  # the loss, what it depends on, how it is computed
    """dx, dw and (in fp32) dbias of the losses of rows, divided by the 0-dim ``norm`` or times
    ``g`` (M,); empty if ``need`` says so.

    With ``out``, step 1 fills it. Without, ``lse`` (M,) is that of an earlier call. ``chunk_rows``:
    the memory is that of so many tokens' logits.
    """
    (M, H), V = x.shape, w.shape[0]
    need_dx, need_dw, need_db = need[:3]
    dx = x.new_empty((M, H) if need_dx else 0)
    dw = w.new_empty((V, H) if need_dw and dw_into is None else 0, dtype=dtype_of_dw(w))
    db = x.new_zeros(V if need_db else 0, dtype=torch.float32)
    if tracing(x):
        return dx, dw, db
    if not M:
        return dx, dw.zero_(), db
    bias, class_weight = (None if t is None else t.contiguous() for t in (bias, class_weight))
    as_rows = chunk_rows or auto_chunk_rows(M, V, H, x.itemsize, on_gpu(x), frozen=not need_dw)
    # dw needs all tokens at a time; without it, their casts need not take more than a quarter of
    # the memory
    for rows in _parts(M, M if need_dw else max(ROWS, as_rows * V * x.itemsize // (4 * H))):
        of = lambda t, rows=rows: t if t is None else t[rows].contiguous()
        n = rows.stop - rows.start
        total = (dw if dw_into is None else dw_into) if need_dw else None
        stored = min(n, H * dw.itemsize) if dw.numel() and out is not None else 0
        least = 1024 if chunk_rows is None else 16
        step = classes_of_a_block(n, V, H, x.itemsize, min(n, as_rows), stored, need_dx, total, least)
        # dw and db are those of all tokens; dx of these
        grads = dx[rows] if need_dx else None, total, db if need_db else None, dw_into is None
        head = _Head(x[rows], w, of(target).long(), s, RECIPES[fp8], bias, class_weight, *grads, step, stored)
        found = None if out is None else head.losses(out[rows])
        if not any(need):
            continue
        if found is None or out is None:
            of_rows = of(lse)
            z_y = torch.zeros_like(of_rows.float())
        else:
            of_rows, z_y = out.lse[rows], found.z_y
        terms = Terms.of(s, head.target, V, class_weight, of_rows, z_y)
        head.gradients(Slopes.of(terms, s, V, class_weight, norm, of(g), of(g_entropy), of(entropy)), found)
    return dx, dw, db
