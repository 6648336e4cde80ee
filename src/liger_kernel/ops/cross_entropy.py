"""Cross entropy of logits and class indices, with everything language models add to it; one row kernel, also used by the fused linear losses.

Shapes: logits (M, V), target (M,) int64, class_weight (V,).  With z = softcap * tanh(logit_scale * logits / softcap), or
z = logit_scale * logits, lse = logsumexp(z), e = label_smoothing and w = class_weight (else 1), a row's loss is

    w_y (1 - e) (lse - z_y)  +  e / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

(label smoothing: Szegedy et al., arXiv:1512.00567, as in torch; z-loss: PaLM, arXiv:2204.02311), and with ``token_scaling`` that times the
detached probability of y (dynamic fine-tuning, arXiv:2508.05629). Its gradient with respect to z_j, for p = softmax(z), is

    p_j (w_y (1 - e) + e / V * sum_i w_i + 2 z_loss lse)  -  [j = y] w_y (1 - e)  -  e / V * w_j

Rows whose target is ``ignore_index`` have loss and gradient 0; a target outside [0, V) makes its row's loss and gradient NaN.
"mean" divides by the number of targets not ignored, or by the sum of their class weights, as torch does (0 targets: NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops import _config
from liger_kernel.ops._op import Case, Cost, T, acc, launch, launcher, nbytes, once_differentiable, op, rows_of, tracing, use_kernels
from liger_kernel.ops._tl import tanh, tl, triton

REDUCTIONS = ("mean", "sum", "none")


def reference(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    z = logits.to(acc(logits.dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    V = z.shape[-1]
    valid, inside = target != ignore_index, (target >= 0) & (target < V)
    y = target.where(inside, 0)
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    log_p_y = log_p.gather(-1, y[:, None])[:, 0]
    w = z.new_ones(V) if class_weight is None else class_weight.detach().to(z.dtype)
    loss = -(1 - label_smoothing) * w[y] * log_p_y
    if label_smoothing:
        loss = loss - label_smoothing / V * (w * log_p).sum(-1)
    z_term = z_loss * lse.square()
    if token_scaling:
        scale = log_p_y.detach().exp()
        loss, z_term = loss * scale, z_term * scale
    loss, z_term = (t.where(inside, float("nan")).where(valid, 0) for t in (loss + z_term, z_term))
    n = w[y].where(valid, 0).sum() if class_weight is not None else valid.sum()
    reduce = {"mean": lambda t: t.sum() / n, "sum": torch.sum, "none": lambda t: t}[reduction]
    return (reduce(loss), reduce(z_term).detach(), z.argmax(-1).where(valid, -1)) if stats else reduce(loss)


@dataclass(frozen=True)
class Loss:
    """What a row's loss is, but for its tensors; the numbers that the row kernel and the linear losses pass on."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    token_scaling: bool = False
    stats: bool = False


# The same numbers in a launcher's schema, in the order of the fields of ``Loss``.
LOSS_SCHEMA = "int ignore_index, str reduction, float label_smoothing, float z_loss, float logit_scale, float? softcap, bool token_scaling, bool stats"


@triton.jit
def _logits(z_ptr, start, V, logit_scale, softcap, HAS_BIAS: tl.constexpr, bias_ptr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one row's transformed logits, -inf outside the row; and tanh, for the derivative of the softcap."""
    col = start + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + col, mask=col < V, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + col, mask=col < V, other=0.0).to(tl.float32)
    z *= logit_scale
    t = z
    if HAS_CAP:
        t = tanh(z / softcap)
        z = t * softcap
    return col, tl.where(col < V, z, -float("inf")), t


@triton.jit
def _rows(
    z_ptr, target_ptr, w_ptr, w_sum_ptr, norm_ptr, g_ptr, lse_in_ptr, bias_ptr, dz_ptr, loss_ptr, z_loss_ptr, predicted_ptr, lse_ptr,
    V, z_stride, dz_stride, target_stride, g_stride, ignore_index, label_smoothing, z_loss, logit_scale, softcap,
    HAS_W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr, DFT: tl.constexpr,
    PREDICT: tl.constexpr, HAS_NORM: tl.constexpr, HAS_G: tl.constexpr, HAS_LSE: tl.constexpr, NEED_LOSS: tl.constexpr, NEED_DZ: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: a sweep for lse and loss (unless lse is given), and one that writes dz, where z is or elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    target = tl.load(target_ptr + row * target_stride)
    logit_scale, softcap = tl.cast(logit_scale, tl.float32), tl.cast(softcap, tl.float32)
    label_smoothing, z_loss = tl.cast(label_smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    ignored = target == ignore_index
    inside = (target >= 0) & (target < V)

    if ignored:
        if NEED_LOSS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(z_loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            if PREDICT:
                tl.store(predicted_ptr + row, -1)
        if NEED_DZ:
            for start in range(0, V, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(dz_ptr + row * dz_stride + col, tl.zeros((BLOCK,), dz_ptr.dtype.element_ty), mask=col < V)
    else:
        y = tl.where(inside, target, 0)
        z_y = tl.load(z_ptr + y).to(tl.float32)
        if HAS_BIAS:
            z_y += tl.load(bias_ptr + y).to(tl.float32)
        z_y *= logit_scale
        if HAS_CAP:
            z_y = softcap * tanh(z_y / softcap)
        w_y = tl.load(w_ptr + y).to(tl.float32) if HAS_W else 1.0
        w_sum = tl.load(w_sum_ptr).to(tl.float32) if HAS_W else tl.cast(V, tl.float32)

        top = -float("inf")
        best = 0
        wz_sum = 0.0
        if HAS_LSE:
            lse = tl.load(lse_in_ptr + row)
        else:
            total = 0.0
            for start in range(0, V, BLOCK):
                col, z, _ = _logits(z_ptr, start, V, logit_scale, softcap, HAS_BIAS, bias_ptr, HAS_CAP, BLOCK)
                block_top = tl.max(z, axis=0)
                if PREDICT:
                    block_best = tl.min(tl.where(z == block_top, col, V), axis=0)
                    best = tl.where(block_top > top, block_best, best)
                new_top = tl.maximum(top, block_top)
                # a row of -inf only has no maximum to subtract
                shift = tl.where(new_top == -float("inf"), 0.0, new_top)
                total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), axis=0)
                top = new_top
                if SMOOTH:
                    w = tl.load(w_ptr + col, mask=col < V, other=0.0).to(tl.float32) if HAS_W else 1.0
                    wz_sum += tl.sum(tl.where(col < V, w * z, 0.0), axis=0)
            lse = tl.where(top == -float("inf"), top, top + tl.log(total))

        on = w_y * (1.0 - label_smoothing)
        smooth = label_smoothing / V
        factor = tl.where(inside, 1.0, float("nan"))
        if DFT:
            factor *= tl.exp(z_y - lse)
        if NEED_LOSS:
            loss = on * (lse - z_y)
            if SMOOTH:
                loss += smooth * (w_sum * lse - wz_sum)
            z_term = z_loss * lse * lse
            tl.store(loss_ptr + row, factor * (loss + z_term))
            tl.store(z_loss_ptr + row, factor * z_term)
            tl.store(lse_ptr + row, lse)
            if PREDICT:
                tl.store(predicted_ptr + row, best)
        if NEED_DZ:
            if HAS_LSE and DFT:  # with no sweep before, a warp may still be waiting for z_y when another one overwrites it
                tl.debug_barrier()
            if HAS_NORM:
                factor *= 1.0 / tl.load(norm_ptr).to(tl.float32)
            if HAS_G:
                factor *= tl.load(g_ptr + row * g_stride).to(tl.float32)
            factor *= logit_scale
            spread = factor * (on + smooth * w_sum + 2.0 * z_loss * lse) if SMOOTH else factor * (on + 2.0 * z_loss * lse)
            for start in range(0, V, BLOCK):
                col, z, t = _logits(z_ptr, start, V, logit_scale, softcap, HAS_BIAS, bias_ptr, HAS_CAP, BLOCK)
                dz = tl.exp(z - lse) * spread - tl.where(col == y, factor * on, 0.0)
                if SMOOTH:
                    dz -= factor * smooth * (tl.load(w_ptr + col, mask=col < V, other=0.0).to(tl.float32) if HAS_W else 1.0)
                if HAS_CAP:
                    dz *= 1.0 - t * t
                tl.store(dz_ptr + row * dz_stride + col, dz.to(dz_ptr.dtype.element_ty), mask=col < V)


@dataclass
class Rows:
    """Per-row results, each (M,): fp32 loss, z-loss and lse; int64 predicted class (empty unless ``stats``)."""

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    predicted: Tensor

    @classmethod
    def empty(cls, target: Tensor, stats: bool, dtype: torch.dtype = torch.float32) -> Rows:
        M = target.shape[0]
        loss, z_loss, lse = (target.new_empty(M, dtype=dtype) for _ in range(3))
        return cls(loss, z_loss, lse, target.new_empty(M if stats else 0, dtype=torch.int64))

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.loss[rows], self.z_loss[rows], self.lse[rows], self.predicted[rows])

    def reduced(self, norm: Tensor | None, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
        """loss, z-loss and predicted classes; (M,) without reduction."""
        if reduction == "none":
            return self.loss, self.z_loss, self.predicted
        loss, z_loss = self.loss.sum(), self.z_loss.sum()
        return (loss, z_loss, self.predicted) if norm is None else (loss / norm, z_loss / norm, self.predicted)


def normaliser(target: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor | None:
    """What "mean" divides by, on the device; None for other reductions."""
    if reduction != "mean":
        return None
    valid = target != ignore_index
    if class_weight is None:
        return valid.sum().float()
    y = target.clamp(0, class_weight.shape[0] - 1)
    return class_weight[y].to(acc(class_weight.dtype)).where(valid, 0).sum()


def row_kernel(
    z: Tensor,
    target: Tensor,
    loss: Loss,
    *,
    class_weight: Tensor | None = None,
    bias: Tensor | None = None,
    out: Rows | None = None,
    dz: Tensor | None = None,
    norm: Tensor | None = None,
    g: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """The row kernel over logits z (M, V): per-row results into ``out``, the gradient into ``dz``, which may be z itself.

    The gradient is multiplied by ``g`` (M,) and divided by the 0-dim ``norm``. ``lse`` of an earlier call spares the first sweep.
    ``bias`` (V,) is added to z first. Called by launchers; without kernels, the same in torch.
    """
    if tracing(z):
        return
    if not use_kernels(z):
        return _rows_in_torch(z, target, loss, class_weight, bias, out, dz, norm, g, lse)
    M, V = z.shape
    class_weight, bias = (None if t is None else t.contiguous() for t in (class_weight, bias))
    weight_sum = None if class_weight is None else class_weight.float().sum()
    # H200, in place, 1024 x 128256 bf16: 221 us; blocks of 8192 237, of 4096 234 (three passes at copy speed: 187)
    c = _config.tile("cross_entropy", V, z.itemsize, elements=1, max_block_n=16384)  # one row a program
    none = z  # a pointer for what a flag switches off
    o = out or Rows(none, none, none, none)
    launch(
        _rows, (M,), z, target, none if class_weight is None else class_weight, none if weight_sum is None else weight_sum,
        none if norm is None else norm, none if g is None else g, none if lse is None else lse, none if bias is None else bias,
        none if dz is None else dz, o.loss, o.z_loss, o.predicted, o.lse,
        V, z.stride(0), 0 if dz is None else dz.stride(0), target.stride(0), 0 if g is None else g.stride(0),
        loss.ignore_index, loss.label_smoothing, loss.z_loss, loss.logit_scale, 1.0 if loss.softcap is None else loss.softcap,
        HAS_W=class_weight is not None, HAS_BIAS=bias is not None, HAS_CAP=loss.softcap is not None, SMOOTH=loss.label_smoothing != 0.0,
        DFT=loss.token_scaling, PREDICT=loss.stats, HAS_NORM=norm is not None, HAS_G=g is not None, HAS_LSE=lse is not None,
        NEED_LOSS=out is not None, NEED_DZ=dz is not None, BLOCK=c.block_n, num_warps=c.num_warps,
    )  # fmt: skip
    return None


def _rows_in_torch(
    z: Tensor, target: Tensor, s: Loss, class_weight: Tensor | None, bias: Tensor | None, out: Rows | None, dz: Tensor | None, norm, g, lse
) -> None:
    V = z.shape[-1]
    a = z.to(acc(z.dtype)) if bias is None else z.to(acc(z.dtype)) + bias
    a = a * s.logit_scale if s.logit_scale != 1.0 else a
    t = None if s.softcap is None else torch.tanh(a / s.softcap)
    a = a if t is None else t * s.softcap
    valid, inside = target != s.ignore_index, (target >= 0) & (target < V)
    y = target.where(inside, 0)[:, None]
    lse = a.logsumexp(-1) if lse is None else lse
    z_y = a.gather(-1, y)[:, 0]
    w = a.new_ones(1) if class_weight is None else class_weight.to(a.dtype)
    on = (1 - s.label_smoothing) * w.expand(V)[y[:, 0]]
    smooth, w_sum = s.label_smoothing / V, w.expand(V).sum()
    factor = a.new_ones(()).where(inside, float("nan")) * ((z_y - lse).exp() if s.token_scaling else 1.0)
    if out is not None:
        row, z_term = on * (lse - z_y), s.z_loss * lse.square()
        if smooth:
            row += smooth * (w_sum * lse - (w * a).sum(-1))
        out.loss.copy_((factor * (row + z_term)).where(valid, 0))
        out.z_loss.copy_((factor * z_term).where(valid, 0))
        out.lse.copy_(lse)
        if s.stats:
            out.predicted.copy_(a.argmax(-1).where(valid, -1))
    if dz is not None:
        factor = factor * s.logit_scale * (1 if g is None else g) / (1 if norm is None else norm)
        p = (a - lse[:, None]).exp_().mul_((factor * (on + smooth * w_sum + 2 * s.z_loss * lse))[:, None])
        p.scatter_add_(-1, y, -(factor * on)[:, None])
        if smooth:
            p -= (factor * smooth)[:, None] * w
        if t is not None:
            p *= 1 - t.square_()
        dz.copy_(p.masked_fill_(~valid[:, None], 0))


@launcher(f"(Tensor z, Tensor target, Tensor? class_weight, {LOSS_SCHEMA}) -> (Tensor loss, Tensor z_loss, Tensor predicted, Tensor lse, Tensor? norm)")
def cross_entropy_fwd(z: Tensor, target: Tensor, class_weight: Tensor | None, *numbers):
    s = Loss(*numbers)
    out = Rows.empty(target, s.stats)
    norm = normaliser(target, class_weight, s.ignore_index, s.reduction)
    row_kernel(z, target, s, class_weight=class_weight, out=out)
    return *out.reduced(norm, s.reduction), out.lse, norm


@launcher(f"(Tensor g, Tensor z, Tensor target, Tensor? class_weight, Tensor lse, Tensor? norm, {LOSS_SCHEMA}) -> Tensor dz")
def cross_entropy_bwd(g: Tensor, z: Tensor, target: Tensor, class_weight: Tensor | None, lse: Tensor, norm: Tensor | None, *numbers) -> Tensor:
    dz = z.new_empty(z.shape)
    row_kernel(z, target, Loss(*numbers), class_weight=class_weight, dz=dz, norm=norm, g=g.expand(target.shape), lse=lse)
    return dz


class CrossEntropyFunction(torch.autograd.Function):
    """``apply(logits, target, class_weight, *fields of Loss)`` -> loss, z-loss, predicted classes."""

    @staticmethod
    def forward(ctx, logits, target, class_weight, *numbers):
        z = rows_of(logits)
        loss, z_loss, predicted, lse, norm = cross_entropy_fwd(z, target, class_weight, *numbers)
        ctx.save_for_backward(z, target, class_weight, lse, norm)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        return cross_entropy_bwd(g, *ctx.saved_tensors, *ctx.numbers), *(None,) * (2 + len(ctx.numbers))


def check(name: str, logits_shape: tuple[int, int], target: Tensor, class_weight: Tensor | None, reduction: str) -> None:
    """Refuse what the losses over (M, V) logits cannot mean."""
    M, V = logits_shape
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: target must hold class indices, got {target.dtype} (class probabilities are not supported)")
    if target.shape != (M,):
        raise ValueError(f"{name}: target must have shape ({M},), got {tuple(target.shape)}")
    if class_weight is not None and class_weight.shape != (V,):
        raise ValueError(f"{name}: class_weight must have shape ({V},), got {tuple(class_weight.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}")


def targets(M: int, V: int, ignored: int = 3) -> T:
    """Class indices for a ``Case``, every ``ignored``-th one ignored."""

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        y = torch.randint(0, V, shape)
        y[::ignored] = -100
        return y

    return T((M,), draw, dtype=torch.int64)


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*shape, dtype=dtype) + 0.5


def _torch(logits, target, class_weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options):
    plain(options)
    return F.cross_entropy(logits.float(), target, class_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def _upstream(functional, logits, target, class_weight=None, *, z_loss=0.0, logit_scale=1.0, token_scaling=False, stats=False, **options):
    plain(dict(logit_scale=logit_scale, token_scaling=token_scaling, stats=stats))
    return functional.liger_cross_entropy(logits, target, class_weight, lse_square_scale=z_loss, **options)


def _quack(quack, logits, target, class_weight=None, *, ignore_index=-100, reduction="mean", **options):
    plain(options | dict(class_weight=class_weight))
    return quack.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def plain(options: dict) -> None:
    """Raise ``NotImplementedError`` where a rival is asked for an option that it has not."""
    if any(value is not None and value != getattr(Loss, name, None) for name, value in options.items()):
        raise NotImplementedError


@op(
    reference=reference,
    cases=[
        Case("mean", dict(logits=T((9, 130)), target=targets(9, 130))),
        Case("sum", dict(logits=T((7, 61)), target=targets(7, 61), reduction="sum")),
        Case("none", dict(logits=T((7, 64)), target=targets(7, 64), reduction="none")),
        Case("gemma2", dict(logits=T((6, 99)), target=targets(6, 99), softcap=2.0, stats=True)),
        Case("cohere", dict(logits=T((6, 99)), target=targets(6, 99), logit_scale=0.3)),
        Case("smoothing", dict(logits=T((6, 99)), target=targets(6, 99), label_smoothing=0.1)),
        Case("z-loss", dict(logits=T((6, 99)), target=targets(6, 99), z_loss=1e-2, stats=True)),
        Case("class-weight", dict(logits=T((6, 99)), target=targets(6, 99), class_weight=T((99,), positive, grad=False))),
        Case("everything", dict(logits=T((6, 99)), target=targets(6, 99, 5), class_weight=T((99,), positive, grad=False), label_smoothing=0.2,
             z_loss=1e-2, logit_scale=1.5, softcap=3.0, reduction="none", stats=True)),
        Case("dft", dict(logits=T((6, 99)), target=targets(6, 99), token_scaling=True)),
        Case("dft-z-loss", dict(logits=T((6, 99)), target=targets(6, 99), token_scaling=True, z_loss=1e-2, stats=True)),
        Case("all-ignored", dict(logits=T((3, 20)), target=targets(3, 20, 1), reduction="sum")),
        Case("two-blocks", dict(logits=T((2, 9001)), target=targets(2, 9001, 5))),
        Case("llama3-8k", dict(logits=T((8192, 128256)), target=targets(8192, 128256, 17)), gpu=True, timed=True),
        Case("llama3", dict(logits=T((1024, 128256)), target=targets(1024, 128256, 17)), gpu=True),
        Case("gemma", dict(logits=T((512, 256000)), target=targets(512, 256000, 17), softcap=30.0), gpu=True),
        Case(
            "everything-llama3",
            dict(
                logits=T((256, 128256)),
                target=targets(256, 128256, 17),
                class_weight=T((128256,), positive, grad=False),
                label_smoothing=0.1,
                z_loss=1e-4,
                softcap=30.0,
                token_scaling=True,
                stats=True,
            ),
            gpu=True,
        ),
        Case("probabilities", dict(logits=T((3, 5)), target=T((3, 5))),
             error="cross_entropy: target must hold class indices, got torch.float32 (class probabilities are not supported)"),
        Case("bad-target", dict(logits=T((3, 5)), target=targets(4, 5)), error="cross_entropy: target must have shape (3,), got (4,)"),
        Case("bad-weight", dict(logits=T((3, 5)), target=targets(3, 5), class_weight=T((4,))),
             error="cross_entropy: class_weight must have shape (5,), got (4,)"),
        Case("bad-reduction", dict(logits=T((3, 5)), target=targets(3, 5), reduction="avg"),
             error="cross_entropy: reduction must be one of ('mean', 'sum', 'none'), got 'avg'"),
        Case(
            "integers",
            dict(logits=T((3, 5), dtype=torch.int64), target=targets(3, 5)),
            error="cross_entropy: logits must be floating point, got torch.int64",
        ),
        Case("3d", dict(logits=T((3, 5, 2)), target=targets(3, 5)), error="cross_entropy: logits must have shape (M, V), got (3, 5, 2)"),
    ],
    # a loss that leaves its gradient behind needs one pass to read and one to write
    cost=lambda logits, target, class_weight=None, **_: Cost(
        nbytes(logits, target, class_weight), nbytes(logits, logits, target, class_weight), whole=nbytes(logits, logits, target, class_weight),
        flops=(4 * logits.numel(), 4 * logits.numel()),
    ),
    rivals={"torch": _torch, "upstream": _upstream, "quack": _quack},
    sweeps={"vocabulary": ((16384, 32768, 65536, 131072, 262144), lambda v: dict(logits=T((2048, v)), target=targets(2048, v, 17)))},
)  # fmt: skip
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    stats: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of logits (M, V) and class indices (M,); the logits stay as they are.

    Returns the fp32 loss, 0-dim or (M,) with ``reduction="none"``; with ``stats`` also the z-loss that it contains and the predicted
    classes (M,) int64, -1 where ignored, both without gradient. ``class_weight`` (V,) gets no gradient.
    """
    if not logits.is_floating_point():
        raise ValueError(f"cross_entropy: logits must be floating point, got {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"cross_entropy: logits must have shape (M, V), got {tuple(logits.shape)}")
    check("cross_entropy", logits.shape, target, class_weight, reduction)
    numbers = (ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    if not use_kernels(logits):
        return reference(logits, target, class_weight, **dict(zip(Loss.__dataclass_fields__, numbers)))
    out = CrossEntropyFunction.apply(logits, target, class_weight, *numbers)
    return out if stats else out[0]
