"""Cross entropy of logits and class indices, with everything language models add to it; one row
kernel, also used by the fused linear losses.

Shapes: logits (M, V), target (M,) int64, class_weight (V,).  With z = softcap * tanh(logit_scale *
logits / softcap), or z = logit_scale * logits, lse = logsumexp(z), e = label_smoothing and w =
class_weight (else 1), a row's loss is

    w_y (1 - e) (lse - z_y)  +  e / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

(label smoothing: Szegedy et al., arXiv:1512.00567, as in torch; z-loss: PaLM, arXiv:2204.02311),
and with ``token_scaling`` that times the detached probability of y (dynamic fine-tuning,
arXiv:2508.05629). Its gradient with respect to z_j, for p = softmax(z), is

    p_j (w_y (1 - e) + e / V * sum_i w_i + 2 z_loss lse)  -  [j = y] w_y (1 - e)  -  e / V * w_j

Rows whose target is ``ignore_index`` have loss and gradient 0; a target outside [0, V) makes its
row's loss and gradient NaN.
"mean" divides by the number of targets not ignored, or by the sum of their class weights, as torch
does (0 targets: NaN), or by ``num_items``,
the number of tokens in all micro-batches of a step.

``cross_entropy`` is the operator on given logits; ``linear_cross_entropy``, ``linear_logprobs``,
``linear_loss`` and distillation make the logits chunk by chunk, and hand each chunk to
``row_kernel``. Shapes of real models and rivals: ``bench/cases/losses.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc, checks, launch_config
from liger_kernel.ops._core.operator import as_index, host_can_read, launch, tracing, use_kernels
from liger_kernel.ops._core.shards import has_split_rows, is_sharded
from liger_kernel.ops._core.tl import cdiv, exp_of, jit, log, store_if, tanh, tl

REDUCTIONS = ("mean", "sum", "none")


def reference(
    logits, target, class_weight, *, ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap,
    token_scaling, stats, num_items, **how,
):  # fmt: skip
    """The loss in plain PyTorch; with ``stats`` also the z-loss in it and the most likely
    classes. NaN for a target outside [0, V)."""
    z = logits.to(acc(logits.dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    V = z.shape[-1]
    # F.cross_entropy has no z-loss, scaling or statistics; those gather the logits
    if is_sharded(z) and has_split_rows(z) and num_items is None and not (z_loss or token_scaling or stats):
        # whose operators know classes that are spread over ranks, in loss_parallel without
        # gathering them
        return F.cross_entropy(z, target.long(), class_weight, None, ignore_index, None, reduction, label_smoothing)
    valid, inside = target != ignore_index, (target >= 0) & (target < V)
    # any class will do: what it gives is replaced by 0 or NaN below
    y = target.where(inside, 0)
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    log_p_y = log_p.gather(-1, y[:, None])[:, 0]
    w = z.new_ones(V) if class_weight is None else class_weight.detach().to(z.dtype)
    loss = -(1 - label_smoothing) * w[y] * log_p_y
    if label_smoothing:
        loss = loss - label_smoothing / V * (w * log_p).sum(-1)
    z_term = z_loss * lse * lse  # in this order: without a z-loss 0, also where lse^2 overflows
    if token_scaling:
        scale = log_p_y.detach().exp()
        loss, z_term = loss * scale, z_term * scale
    poison = z.new_ones(()).where(inside | ~valid, float("nan"))  # a factor, so that the gradient is NaN, too
    loss, z_term = ((t * poison).where(valid, 0) for t in (loss + z_term, z_term))
    n = num_items if num_items is not None else w[y].where(valid, 0).sum() if class_weight is not None else valid.sum()
    reduce = {"mean": lambda t: t.sum() / n, "sum": torch.sum, "none": lambda t: t}[reduction]
    return (reduce(loss), reduce(z_term).detach(), z.argmax(-1).where(valid, -1)) if stats else reduce(loss)


class Loss(NamedTuple):
    """The numbers that define a row's loss, apart from its tensors. The row kernel and the
    linear losses pass them on."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    token_scaling: bool = False
    stats: bool = False
    entropy: bool = False
    mean: bool = False


def normaliser(target: Tensor, class_weight: Tensor | None, s: Loss, num_items: Tensor | None = None) -> Tensor | None:
    """The divisor of "mean", on the device; None for other reductions."""
    if s.reduction != "mean":
        return None
    if num_items is not None:
        return num_items.to(torch.float32, copy=True)
    valid = target != s.ignore_index
    if class_weight is None:
        return valid.sum().float()
    y = target.clamp(0, class_weight.shape[0] - 1)
    return class_weight[y].to(acc(class_weight.dtype)).where(valid, 0).sum()


_LOG2E = tl.constexpr(1.4426950408889634)


@jit
def transformed_logits(z_ptr, bias_ptr, at, mask, scale, cap, EVICT: tl.constexpr):
    """Logits after bias, scale and softcap, of which each may be None; and tanh, for the
    derivative of the softcap."""
    # EVICT has no default: Triton 3.6 does not take a text as one
    z = tl.load(z_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if scale is not None:
        z *= tl.cast(scale, tl.float32)
    t = z
    if cap is not None:
        t = tanh(z * tl.div_rn(tl.cast(1.0, tl.float32), tl.cast(cap, tl.float32)))
        z = t * tl.cast(cap, tl.float32)
    return z, t


@jit
def _finite(x):
    """A row of -inf alone has no largest number to count from."""
    return tl.where(x == -float("inf"), 0.0, x)


@jit
def _weight(w_ptr, col, mask):
    """Class weights, which are 1 if there are none."""
    return tl.load(w_ptr + col, mask=mask, other=0.0).to(tl.float32) if w_ptr is not None else 1.0


@jit
def higher(z, col, mask, top, at):
    """The largest z of each lane so far, and its class."""
    more = mask & (z > top)
    return tl.where(more, z, top), tl.where(more, col, at)


@jit
def _sums(
    z_ptr, bias_ptr, w_ptr, V, shift, scale, cap, lane,
    SMOOTH: tl.constexpr, STATS: tl.constexpr, MEAN: tl.constexpr, ENTROPY: tl.constexpr, EVICT: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's sums over classes of e = exp(z - shift), e (z - shift), w z and z, and the class
    of the largest z; what no flag asks for is 0."""
    PRECISE: tl.constexpr = z_ptr.dtype.element_ty == tl.float32
    zero = tl.zeros((BLOCK,), tl.float32)
    # lanes of their own: a reduction for each block would cost a barrier of all warps
    total, weighted, wz, zs, top = zero, zero, zero, zero, zero - float("inf")
    at = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        col = start + lane
        mask = col < V
        z, _ = transformed_logits(z_ptr, bias_ptr, col, mask, scale, cap, EVICT)
        if SMOOTH:
            wz += tl.where(mask, z, 0.0) * _weight(w_ptr, col, mask)
        if MEAN:
            zs += tl.where(mask, z, 0.0)
        if STATS:
            top, at = higher(z, col, mask, top, at)
        z = tl.where(mask, z, -float("inf"))
        # exp2 of two products is one instruction less
        e = exp_of(z - shift, True) if PRECISE else tl.exp2(z * _LOG2E - shift * _LOG2E)
        total += e
        if ENTROPY:
            weighted += e * tl.maximum(z - shift, -3e38)
    none = tl.cast(0.0, tl.float32)
    # as torch.argmax has it: the first class among equals
    best = tl.min(tl.where(top == tl.max(top), at, V), axis=0) if STATS else tl.cast(0, tl.int32)
    return (
        tl.sum(total, axis=0),
        tl.sum(weighted, axis=0) if ENTROPY else none,
        tl.sum(wz, axis=0) if SMOOTH else none,
        tl.sum(zs, axis=0) if MEAN else none,
        best,
    )


@jit
def _rows(
    z_ptr, target_ptr, dz_ptr, w_ptr, w_sum_ptr, bias_ptr, norm_ptr, g_ptr, g_entropy_ptr, lse_in_ptr, entropy_in_ptr,
    loss_ptr, z_loss_ptr, lse_ptr, predicted_ptr, entropy_ptr, mean_ptr,
    V, z_stride, dz_stride, target_stride, g_stride, g_entropy_stride, ignore_index, splits,
    label_smoothing, z_loss, logit_scale, softcap, DFT: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: a sweep for lse and loss (unless lse is given), and one that writes dz,
    where z is or elsewhere. With lse, ``splits`` programs share a row's blocks.

    The first sweep keeps sums for each lane, reduced once a row. The second goes back from where
    the first ended and finds most of the row in the L2 cache. With logits of 32 bits lse has two
    parts, high and low: rounded to one number of the size of the largest logit it would be the
    largest error of all.
    """
    row = (tl.program_id(0) // splits).to(tl.int64)
    part = tl.program_id(0) % splits
    z_ptr += row * z_stride
    if dz_ptr is not None:
        dz_ptr += row * dz_stride
    target = tl.load(target_ptr + row * target_stride)
    z_loss = tl.cast(z_loss, tl.float32)
    SMOOTH: tl.constexpr = label_smoothing is not None
    PRECISE: tl.constexpr = z_ptr.dtype.element_ty == tl.float32
    ignored = target == ignore_index
    inside = (target >= 0) & (target < V)
    lane = tl.arange(0, BLOCK)
    blocks = tl.cdiv(V, BLOCK)

    if ignored:
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
            tl.store(z_loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            store_if(predicted_ptr, row, -1)
            store_if(mean_ptr, row, 0.0)
            store_if(entropy_ptr, row, 0.0)
        if dz_ptr is not None:
            for i in range(part, blocks, splits):
                col = i * BLOCK + lane
                tl.store(dz_ptr + col, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=col < V)
    else:
        # an address that may be read; ``factor`` makes the result NaN
        y = tl.where(inside, target, 0)
        z_y, t_y = transformed_logits(z_ptr, bias_ptr, y, y >= 0, logit_scale, softcap, "")
        w_y = tl.load(w_ptr + y).to(tl.float32) if w_ptr is not None else 1.0
        # of all classes: what label smoothing spreads over them
        w_sum = tl.load(w_sum_ptr).to(tl.float32) if w_sum_ptr is not None else tl.cast(V, tl.float32)

        wz_sum, z_sum = 0.0, 0.0
        best = 0
        entropy = 0.0
        if lse_in_ptr is not None:
            both = tl.load(lse_in_ptr + row)
            lse = both.to(tl.float32)
            low = (both - lse.to(tl.float64)).to(tl.float32)
            if g_entropy_ptr is not None:
                entropy = tl.load(entropy_in_ptr + row)
            # with no sweep before, a warp may still be waiting for z_y when another one overwrites
            # it
            tl.debug_barrier()
        else:
            # numbers are counted from the largest of the first block, or from 0 if that has none;
            # should that not suit the rest, from the largest of all
            # the L2 cache keeps the row only for a second sweep
            EVICT: tl.constexpr = "evict_first" if dz_ptr is None else "evict_last"
            z, _ = transformed_logits(z_ptr, bias_ptr, lane, lane < V, logit_scale, softcap, "evict_last")
            lse = _finite(tl.max(tl.where(lane < V, z, -float("inf")), axis=0))
            STATS: tl.constexpr = predicted_ptr is not None
            MEAN: tl.constexpr = mean_ptr is not None
            ENTROPY: tl.constexpr = entropy_ptr is not None
            row_total, weighted, wz_sum, z_sum, best = _sums(
                z_ptr, bias_ptr, w_ptr, V, lse, logit_scale, softcap, lane, SMOOTH, STATS, MEAN, ENTROPY, EVICT,
                STAGES, BLOCK,
            )  # fmt: skip
            far = (row_total == float("inf")) | (row_total < 1e-30)
            # a difference of sums loses what they have in common: of e^87 and 87 e^87, everything
            if entropy_ptr is not None:
                far = far | (row_total > 1e9) | (row_total < 1e-9)
            if far:
                top = tl.full((BLOCK,), -float("inf"), tl.float32)
                for start in range(0, V, BLOCK):
                    col = start + lane
                    z, _ = transformed_logits(z_ptr, bias_ptr, col, col < V, logit_scale, softcap, "")
                    top = tl.maximum(top, tl.where(col < V, z, -float("inf")))
                lse = _finite(tl.max(top, axis=0))
                row_total, weighted, wz_sum, z_sum, best = _sums(
                    z_ptr, bias_ptr, w_ptr, V, lse, logit_scale, softcap, lane, SMOOTH, STATS, MEAN, ENTROPY, EVICT,
                    STAGES, BLOCK,
                )  # fmt: skip
            low = log(row_total)
            if entropy_ptr is not None:
                entropy = low - weighted / row_total
                entropy = tl.where(entropy < 0.0, 0.0, entropy)  # rounding, as below
            # for the backward: fp64 holds both parts of the logarithm
            both = lse.to(tl.float64) + low.to(tl.float64)
            if not PRECISE:
                lse = both.to(tl.float32)

        if not PRECISE:
            low = 0.0
        on = w_y
        if SMOOTH:
            on = w_y * (1.0 - tl.cast(label_smoothing, tl.float32))
            smooth = tl.cast(label_smoothing, tl.float32) / V
        factor = tl.where(inside, 1.0, float("nan"))
        if DFT:
            factor *= exp_of((z_y - lse) - low, PRECISE)
        if loss_ptr is not None:
            nll = (lse - z_y) + low
            loss = on * tl.where(nll < 0.0, 0.0, nll)  # a probability above 1 is rounding
            if SMOOTH:
                loss += smooth * (w_sum * (lse + low) - wz_sum)
            z_term = z_loss * (lse + low) * (lse + low)
            tl.store(loss_ptr + row, factor * (loss + z_term))
            tl.store(z_loss_ptr + row, factor * z_term)
            tl.store(lse_ptr + row, both)
            store_if(predicted_ptr, row, best)
            store_if(mean_ptr, row, z_sum / V)
            if entropy_ptr is not None:
                tl.store(entropy_ptr + row, tl.where(inside, entropy, float("nan")))
        if dz_ptr is not None:
            scale = 1.0
            if logit_scale is not None:
                scale = tl.cast(logit_scale, tl.float32)
            if norm_ptr is not None:
                scale *= 1.0 / tl.load(norm_ptr).to(tl.float32)
            ge = 0.0
            if g_entropy_ptr is not None:
                ge = scale * tl.load(g_entropy_ptr + row * g_entropy_stride).to(tl.float32)
            factor *= scale
            if g_ptr is not None:
                factor *= tl.load(g_ptr + row * g_stride).to(tl.float32)
            spread = factor * (on + 2.0 * z_loss * (lse + low))
            if SMOOTH:
                spread += factor * smooth * w_sum
            for i in tl.range(part, blocks, splits, num_stages=STAGES):
                col = (blocks - 1 - i) * BLOCK + lane
                mask = col < V
                z, t = transformed_logits(z_ptr, bias_ptr, col, mask, logit_scale, softcap, "evict_first")
                slope = spread
                if g_entropy_ptr is not None:
                    slope += ge * ((lse - tl.maximum(z, -3e38)) - (entropy - low))
                # exp2 of two products is one instruction less
                p = exp_of((z - lse) - low, True) if PRECISE else tl.exp2(z * _LOG2E - lse * _LOG2E)
                dz = p * slope
                if SMOOTH:
                    dz -= factor * smooth * _weight(w_ptr, col, mask)
                if softcap is not None:
                    dz *= 1.0 - t * t
                tl.store(dz_ptr + col, dz.to(dz_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
            # the target's own column, once the others of its block are written
            slope = spread
            if g_entropy_ptr is not None:
                slope += ge * ((lse - tl.maximum(z_y, -3e38)) - (entropy - low))
            dz_y = exp_of((z_y - lse) - low, PRECISE) * slope - factor * on
            if SMOOTH:
                dz_y -= factor * smooth * w_y
            if softcap is not None:
                dz_y *= 1.0 - t_y * t_y
            tl.debug_barrier()
            own = (blocks - 1 - y // BLOCK) % splits == part
            tl.store(dz_ptr + y, dz_y.to(dz_ptr.dtype.element_ty), mask=own)


@dataclass
class RowLosses:
    """Per-row results, each (M,): fp32 loss, z-loss, entropy (if requested) and mean logit;
    int64 predicted class (both only with ``stats``)."""

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    predicted: Tensor
    entropy: Tensor
    mean: Tensor

    @classmethod
    def empty(cls, target: Tensor, s: Loss, dtype: torch.dtype = torch.float32, rows: int | None = None) -> RowLosses:
        M = target.shape[0] if rows is None else rows
        new = lambda n, dtype=dtype: target.new_empty(n, dtype=dtype)
        return cls(
            new(M),
            new(M),
            new(M, torch.float64),
            new(M if s.stats else 0, torch.int64),
            new(M if s.entropy else 0),
            new(M if s.mean else 0),
        )

    def fields(self) -> tuple[Tensor, ...]:
        return (self.loss, self.z_loss, self.lse, self.predicted, self.entropy, self.mean)

    def __getitem__(self, rows: slice) -> RowLosses:
        return RowLosses(*(t[rows] for t in self.fields()))

    def among(self, kept: Tensor, M: int) -> RowLosses:
        """The results of all M rows: these for the ``kept`` rows; the other rows are ignored
        ones."""
        spread = lambda t, fill=0: t.new_full((M,), fill).index_copy_(0, kept, t) if len(t) == len(kept) else t
        found = [spread(t) for t in self.fields()]
        found[3] = spread(self.predicted, -1)
        return RowLosses(*found)

    def reduced(self, norm: Tensor | None, reduction: str) -> tuple[Tensor, Tensor]:
        """loss and z-loss; (M,) without reduction."""
        if reduction == "none":
            return self.loss, self.z_loss
        loss, z_loss = self.loss.sum(), self.z_loss.sum()
        return (loss, z_loss) if norm is None else (loss / norm, z_loss / norm)


def row_kernel(
    z: Tensor, target: Tensor, loss: Loss, *, class_weight=None, bias=None, out=None, dz=None, norm=None, g=None,
    g_entropy=None, lse=None, entropy=None,
) -> None:  # fmt: skip
    """The row kernel over logits z (M, V): per-row results into ``out`` (``RowLosses``), the gradient
    into ``dz``, which may be z itself.

    The gradient is that of sum(g * loss + g_entropy * entropy) / norm, for ``g`` and ``g_entropy``
    (M,) and a 0-dim ``norm``. ``lse`` of an
    earlier call (and ``entropy``, if its gradient is requested) saves the first sweep. ``bias``
    (V,) is added to z first. Launchers call this;
    without kernels, it computes the same in torch.
    """
    if tracing(z) or not z.shape[0]:
        return
    if not use_kernels(z):
        return _rows_in_torch(z, target, loss, class_weight, bias, out, dz, norm, g, g_entropy, lse, entropy)
    M, V = z.shape
    # the kernel has no strides for vectors of V
    class_weight, bias = (None if t is None else t.contiguous() for t in (class_weight, bias))
    weight_sum = None if class_weight is None else class_weight.float().sum()
    more = loss.softcap is not None or loss.label_smoothing or loss.stats or loss.entropy or loss.mean
    fit = 2048 if more or z.itemsize == 4 else 4096  # more terms take registers
    # H200, 8192 x 128256 bf16. Losses alone: 479 us with 4 warps and loads ahead of their use, 562
    # without, 810 with 32 warps. Gradient from lse: 1027 by blocks, 1059 by rows. Both sweeps: 1362
    # (two passes at copy speed: 987)
    name, sizes = "cross_entropy_gradients", dict(max_block_n=4096, per_thread=32)
    if dz is None:
        name, sizes = "cross_entropy_losses", dict(max_block_n=fit, per_thread=32, pipelined=3)
    elif lse is None:
        name, sizes = "cross_entropy", dict(max_block_n=2 * fit, per_thread=8)
    c = launch_config.tile(name, V, z.itemsize, elements=1, **sizes)
    # with token scaling every program needs the target's logit, which the gradient may replace
    splits = 1 if lse is None or loss.token_scaling else cdiv(V, c.block_n)
    stride = lambda t: 0 if t is None else t.stride(0)
    tensors = target, dz, class_weight, weight_sum, bias, norm, g, g_entropy, lse, entropy
    # None for what was not requested: a kernel is compiled without it
    results: list[Tensor | None] = [None] * 6
    if out is not None:
        of_all = out.loss, out.z_loss, out.lse
        results = [*of_all, *(t if t.numel() else None for t in (out.predicted, out.entropy, out.mean))]
    strides = z.stride(0), stride(dz), target.stride(0), stride(g), stride(g_entropy)
    scale = None if loss.logit_scale == 1.0 else loss.logit_scale
    how = dict(DFT=loss.token_scaling, STAGES=c.stages) | c.row
    numbers = loss.ignore_index, splits, loss.label_smoothing or None, loss.z_loss, scale, loss.softcap
    launch(_rows, (M * splits,), z, *tensors, *results, V, *strides, *numbers, **how)
    return None


@dataclass
class Terms:
    """The terms of the formula, each (M,) or 0-dim, from the log-sum-exp of rows in fp64 and the
    logit of their target."""

    valid: Tensor
    known: Tensor  # whether the target is in [0, V)
    lse: Tensor
    low: Tensor  # what rounding takes from lse
    z_y: Tensor
    on: Tensor  # w_y (1 - e)
    smooth: float  # e / V
    w_sum: Tensor
    factor: Tensor  # NaN where the target is out of range, with token_scaling the probability of the target

    @classmethod
    def of(cls, s: Loss, target: Tensor, V: int, class_weight: Tensor | None, both: Tensor, z_y: Tensor) -> Terms:
        known = (target >= 0) & (target < V)
        lse = both.to(z_y.dtype)
        # where lse is infinite, so that the difference is no number, nothing was rounded
        low = (both - lse).nan_to_num(0.0, 0.0, 0.0).to(z_y.dtype)
        w = z_y.new_ones(1) if class_weight is None else class_weight.to(z_y.dtype)
        on = (1 - s.label_smoothing) * w.expand(V)[target.where(known, 0)]
        # a factor and no mask, so that the gradient is NaN, too
        factor = z_y.new_ones(()).where(known, float("nan")) * (((z_y - lse) - low).exp() if s.token_scaling else 1.0)
        return cls(target != s.ignore_index, known, lse, low, z_y, on, s.label_smoothing / V, w.expand(V).sum(), factor)

    def losses(self, s: Loss, out: RowLosses, wz: Tensor | None) -> None:
        """Fill loss and z-loss of ``out``. wz: the sum over classes of weight times logit, for
        label smoothing."""
        row, z_term = self.on * ((self.lse - self.z_y) + self.low).clamp(min=0), s.z_loss * self.lse * self.lse
        if wz is not None:
            row += self.smooth * (self.w_sum * self.lse - wz)
        out.loss.copy_((self.factor * (row + z_term)).where(self.valid, 0))
        out.z_loss.copy_((self.factor * z_term).where(self.valid, 0))

    def slopes(self, s: Loss, norm: Tensor | None, g: Tensor | None) -> tuple[Tensor, Tensor, Tensor | float]:
        """What multiplies the gradient of a row, what p is multiplied by in it, and the scale
        that both include apart from the row's own factors."""
        scale = s.logit_scale / (1 if norm is None else norm.to(self.lse.dtype))
        factor = self.factor * scale * (1 if g is None else g)
        return factor, factor * (self.on + self.smooth * self.w_sum + 2 * s.z_loss * self.lse), scale


def _rows_in_torch(
    z: Tensor, target: Tensor, s: Loss, class_weight: Tensor | None, bias: Tensor | None, out: RowLosses | None,
    dz: Tensor | None, norm, g, g_entropy, lse, entropy,
) -> None:  # fmt: skip
    V = z.shape[-1]
    a, t = transformed(z, bias, s)
    y = target.where((target >= 0) & (target < V), 0)[:, None]
    if lse is None:
        top = a.amax(-1).clamp_(min=torch.finfo(a.dtype).min)
        lse = top.double() + (a - top[:, None]).exp_().sum(-1).log_().double()
    terms = Terms.of(s, target, V, class_weight, lse, a.gather(-1, y)[:, 0])
    valid = terms.valid
    log_p = lambda: (a - terms.lse[:, None]).sub_(terms.low[:, None])
    w = a.new_ones(1) if class_weight is None else class_weight.to(a.dtype)
    if out is not None:
        terms.losses(s, out, (w * a).sum(-1) if terms.smooth else None)
        out.lse.copy_(lse.where(valid, 0))
        if s.stats:
            out.predicted.copy_(a.argmax(-1).where(valid, -1))
        if s.mean:
            out.mean.copy_(a.mean(-1).where(valid, 0))
        if s.entropy:
            each = log_p()
            poison = a.new_ones(()).where(terms.known, float("nan"))
            out.entropy.copy_((poison * -each.exp().mul_(each.clamp_(min=-3e38)).sum(-1).clamp_(max=0)).where(valid, 0))
    if dz is not None:
        factor, spread, scale = terms.slopes(s, norm, g)
        slope = spread[:, None]
        if g_entropy is not None:
            slope = slope + (scale * g_entropy)[:, None] * (
                terms.lse[:, None] - a.clamp(min=-3e38) - (entropy - terms.low)[:, None]
            )
        p = log_p().exp_().mul_(slope)
        p.scatter_add_(-1, y, -(factor * terms.on)[:, None])
        if terms.smooth:
            p -= (factor * terms.smooth)[:, None] * w
        if t is not None:
            p *= 1 - t.square_()
        dz.copy_(p.masked_fill_(~valid[:, None], 0))


def transformed(z: Tensor, bias: Tensor | None, s: Any) -> tuple[Tensor, Tensor | None]:
    """Logits z plus bias, by ``s`` scaled and capped, and the tanh of a softcap."""
    a = z.to(acc(z.dtype)) if bias is None else z.to(acc(z.dtype)) + bias
    a = a * s.logit_scale if s.logit_scale != 1.0 else a
    t = None if s.softcap is None else torch.tanh(a / s.softcap)
    return (a if t is None else t * s.softcap), t


def statistics(z: Tensor, target: Tensor, s: Loss) -> tuple[Tensor, Tensor]:
    """Entropy, which is differentiable, and mean of the logits z (M, V) of each row, by
    PyTorch's operators; empty unless ``s`` asks for them."""
    a, valid = transformed(z, None, s)[0], target != s.ignore_index
    log_p = a.log_softmax(-1).clamp(min=-3e38)
    poison = a.new_ones(()).where(~valid | ((target >= 0) & (target < z.shape[-1])), float("nan"))
    entropy = (poison * -(log_p.exp() * log_p).sum(-1)).where(valid, 0) if s.entropy else a.new_empty(0)
    return entropy, a.mean(-1).where(valid, 0).detach() if s.mean else a.new_empty(0)


def check(
    name: str,
    logits_shape: tuple[int, int],
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int = -100,
) -> Tensor:
    """Return ``target`` in a dtype that kernels read. Raise ``ValueError`` for arguments that
    have no meaning for losses of (M, V) logits."""
    M, V = logits_shape
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"{name}: target must hold class indices, got {target.dtype} (class probabilities are not supported)"
        )
    checks.shape(name, (M,), target=target)
    checks.shape(name, (V,), class_weight=class_weight)
    checks.one_of(name, REDUCTIONS, reduction=reduction)
    target = as_index(target)
    if os.environ.get("LIGER_CHECKS") == "1" and host_can_read(target):
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= V))]
        if len(wrong):
            raise ValueError(f"{name}: target must be in [0, {V}) or {ignore_index}, got {wrong[0].item()}")
    return target
