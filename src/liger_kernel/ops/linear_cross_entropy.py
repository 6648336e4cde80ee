"""Cross entropy of ``x w^T + bias`` without ever holding the logits: a loop over chunks of tokens.

Shapes: x (M, H), w (V, H), bias (V,), target (M,). The loss is that of ``cross_entropy`` (formula there) on the logits.

Each chunk: logits by one GEMM into a reused buffer, the row kernel, which leaves their gradient in that buffer, and one GEMM each for dx and
dw, all in the forward; the backward only multiplies by the upstream gradient. With ``reduction="none"`` that gradient is a vector, known only
in the backward, which then computes the chunks again. The arithmetic is 6 M H V floating-point operations (8 M H V for "none").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._op import Case, Cost, T, acc, launcher, nbytes, once_differentiable, op, rows_of, tracing
from liger_kernel.ops._reduce import scaled
from liger_kernel.ops.cross_entropy import LOSS_SCHEMA, Loss, Rows, check, normaliser, plain, positive, row_kernel, targets
from liger_kernel.ops.cross_entropy import reference as cross_entropy_reference


def reference(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
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
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    numbers = (ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    return cross_entropy_reference(F.linear(x, w, bias), target, class_weight, **dict(zip(Loss.__dataclass_fields__, numbers)))


def rounded_sums(M: int, V: int) -> int:
    """Chunks whose sum a 16-bit dw may hold: each addition is rounded, and k equal chunks make up to sqrt((k + 1) / 2) times the error of one product.

    That is what a row of dw gets if it changes in every chunk; with many more classes than tokens most do not. 16384 tokens, 32000 classes,
    H200: 2.04 times for 6 chunks. 8192 tokens, 128256 classes: 1.29 times. More chunks than this are summed in fp32.
    """
    return 6 if 4 * M <= V else 5


def auto_chunk_rows(M: int, V: int, H: int, itemsize: int, on_gpu: bool) -> int:
    """Tokens a chunk; the remainder of M makes a smaller chunk, the first one.

    GPU: at least 1024 (H200: GEMMs of 512 rows lose a third of their speed). For a 16-bit w as many as it takes to sum dw in ``rounded_sums``
    chunks, unless fp32 sums and chunks of 1024 take less memory; then, and for an fp32 w, an eighth of the tokens and at most 1 GiB.
    CPU: a buffer of 64 MiB.
    """
    few = M // rounded_sums(M, V)
    if not on_gpu:
        rows, align = max(64, (1 << 26) // (V * 4)), 8
    elif itemsize < 4 and few <= 2 * H + 1024:
        rows, align = max(1024, few), 64
    else:
        rows, align = max(1024, min(M // 8, (1 << 30) // (V * itemsize))), 64
    return max(1, min(M, rows // align * align))


def _add_mm(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (+)= a b, accumulated in the dtype of ``total``."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=total.dtype, out=total) if first else torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total) if first else total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _chunks(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, s: Loss, *,
    out: Rows | None, norm: Tensor | None, g: Tensor | None, lse: Tensor | None,
    need: tuple[bool, bool, bool], accum_dtype: torch.dtype | None, chunk_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loop. Per-row results into ``out``; returns dx, dw and (in fp32) dbias, empty where not ``need``ed.

    Sums over all tokens that are not scaled yet overflow in fp16, so that dw is fp32 there, too.
    """
    (M, H), V = x.shape, w.shape[0]
    need_dx, need_dw, need_db = need
    dw_dtype = acc(w.dtype) if w.dtype == torch.float16 else w.dtype
    dx, dw = x.new_empty((M, H) if need_dx else 0), w.new_empty((V, H) if need_dw else 0, dtype=dw_dtype)
    db = x.new_zeros(V if need_db else 0, dtype=acc(x.dtype))
    if tracing(x):
        return dx, dw, db
    step = max(1, min(M, chunk_rows or auto_chunk_rows(M, V, H, x.itemsize, x.is_cuda)))
    if accum_dtype is None:
        accum_dtype = dw.dtype if M // step <= rounded_sums(M, V) else acc(w.dtype)
    total = dw if accum_dtype == dw.dtype or step >= M else dw.new_empty(dw.shape, dtype=accum_dtype)
    if M == 0:
        total.zero_()
    buffer = x.new_empty(step, V)
    # the remainder first: what is summed last is rounded least
    for start in range(M % step - step if M % step else 0, M, step):
        rows = slice(max(start, 0), start + step)
        z = torch.mm(x[rows], w.t(), out=buffer[: rows.stop - rows.start])
        row_kernel(z, target[rows], s, class_weight=class_weight, bias=bias, out=out and out[rows], dz=z if any(need) else None,
                 norm=norm, g=None if g is None else g[rows], lse=None if lse is None else lse[rows])  # fmt: skip
        if need_dx:
            torch.mm(z, w, out=dx[rows])
        if need_dw:
            _add_mm(total, z.t(), x[rows], first=rows.start == 0)
        if need_db:
            db += z.sum(0, dtype=db.dtype)
    return dx, dw if total is dw else dw.copy_(total), db


_IN = f"Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? class_weight, {LOSS_SCHEMA}, ScalarType? accum_dtype, int? chunk_rows, bool need_dx, bool need_dw, bool need_db"  # noqa: E501
_N = len(Loss.__dataclass_fields__)


@launcher(f"({_IN}) -> (Tensor loss, Tensor z_loss, Tensor predicted, Tensor lse, Tensor? norm, Tensor dx, Tensor dw, Tensor db)")
def linear_cross_entropy_fwd(x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, *numbers):
    s, (accum_dtype, chunk_rows, *need) = Loss(*numbers[:_N]), numbers[_N:]
    out = Rows.empty(target, s.stats, acc(x.dtype))
    norm = normaliser(target, class_weight, s.ignore_index, s.reduction)
    # fp16 gradients of a mean over many tokens would underflow before a loss scaler reaches them: the backward divides
    dx, dw, db = _chunks(x, w, target, bias, class_weight, s, out=out, norm=None if x.dtype == torch.float16 else norm, g=None, lse=None,
                         need=tuple(need), accum_dtype=accum_dtype, chunk_rows=chunk_rows)  # fmt: skip
    return *out.reduced(norm, s.reduction), out.lse, norm, dx, dw, db


@launcher(f"(Tensor g, Tensor lse, {_IN}) -> (Tensor dx, Tensor dw, Tensor db)")
def linear_cross_entropy_bwd(g: Tensor, lse: Tensor, x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, *numbers):
    """The chunks again, for per-token upstream gradients g (M,)."""
    s, (accum_dtype, chunk_rows, *need) = Loss(*numbers[:_N]), numbers[_N:]
    return _chunks(x, w, target, bias, class_weight, s, out=None, norm=None, g=g, lse=lse,
                   need=tuple(need), accum_dtype=accum_dtype, chunk_rows=chunk_rows)  # fmt: skip


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``apply(x, w, target, bias, class_weight, need_dx, need_dw, need_db, accum_dtype, chunk_rows, *fields of Loss)``."""

    @staticmethod
    def forward(ctx, x, w, target, bias, class_weight, need_dx, need_dw, need_db, accum_dtype, chunk_rows, *numbers):
        x, need = rows_of(x), (need_dx, need_dw, need_db)
        ctx.need, ctx.numbers = need, (*numbers, accum_dtype, chunk_rows)
        ctx.dtype, ctx.recompute = x.dtype, Loss(*numbers).reduction == "none"
        now = (False, False, False) if ctx.recompute else need
        loss, z_loss, predicted, lse, norm, dx, dw, db = linear_cross_entropy_fwd(x, w, target, bias, class_weight, *ctx.numbers, *now)
        if ctx.recompute:
            ctx.save_for_backward(lse, x, w, target, bias, class_weight)
        else:
            ctx.save_for_backward(dx, dw, db, norm)
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        if ctx.recompute:
            grads = linear_cross_entropy_bwd(g.contiguous(), *ctx.saved_tensors, *ctx.numbers, *ctx.need)
        else:
            *grads, norm = ctx.saved_tensors
            grads = scaled(tuple(grads), g / norm if ctx.dtype == torch.float16 and norm is not None else g)
        dx, dw, db = (grad if need else None for grad, need in zip(grads, ctx.need))
        dw, db = (None if d is None else d.to(ctx.dtype) for d in (dw, db))
        return dx, dw, None, db, None, *(None,) * (3 + len(ctx.numbers))


def _small(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


def _cost(x, w, target, bias=None, class_weight=None, **_) -> Cost:
    (M, H), V = x.shape, w.shape[0]
    return Cost(nbytes(x, w, target, bias, class_weight), nbytes(x, w, bias), gemms=([(M, V, H)], [(M, H, V), (V, H, M)]))


def _torch(x, w, target, bias=None, class_weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options):
    plain({k: v for k, v in options.items() if k not in ("accum_dtype", "chunk_rows")} | dict(class_weight=class_weight))
    options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
    return F.cross_entropy(F.linear(x, w, bias).float(), target, **options)


def _upstream(
    functional, x, w, target, bias=None, class_weight=None, *, z_loss=0.0, logit_scale=1.0, token_scaling=False, stats=False, chunk_rows=None, **options
):
    plain(dict(logit_scale=logit_scale, stats=stats))
    return functional.liger_fused_linear_cross_entropy(x, w, target, bias, class_weight, lse_square_scale=z_loss, use_token_scaling=token_scaling, **options)


def _cce(cce, x, w, target, bias=None, class_weight=None, *, ignore_index=-100, reduction="mean", softcap=None, accum_dtype=None, chunk_rows=None, **options):
    plain(options | dict(class_weight=class_weight, bias=bias))
    return cce.linear_cross_entropy(x, w, target, ignore_index=ignore_index, softcap=softcap, reduction=reduction)


@op(
    reference=reference,
    cases=[
        Case("mean", dict(x=T((9, 32)), w=T((65, 32)), target=targets(9, 65))),
        Case("sum-chunks", dict(x=T((11, 16)), w=T((37, 16)), target=targets(11, 37), reduction="sum", chunk_rows=4)),
        Case("none", dict(x=T((7, 16)), w=T((40, 16)), target=targets(7, 40), reduction="none", chunk_rows=3, stats=True)),
        Case("bias", dict(x=T((7, 16)), w=T((40, 16)), target=targets(7, 40), bias=T((40,)), chunk_rows=3)),
        Case("gemma2", dict(x=T((6, 16)), w=T((50, 16)), target=targets(6, 50), softcap=2.0, stats=True)),
        Case("granite", dict(x=T((6, 16)), w=T((50, 16)), target=targets(6, 50), logit_scale=0.125)),
        Case("everything", dict(x=T((8, 16)), w=T((50, 16)), target=targets(8, 50), bias=T((50,)), class_weight=T((50,), positive, grad=False),
             label_smoothing=0.1, z_loss=1e-2, logit_scale=0.5, softcap=3.0, chunk_rows=5)),
        Case("dft", dict(x=T((6, 16)), w=T((50, 16)), target=targets(6, 50), token_scaling=True, logit_scale=0.25)),
        Case("fp32-sums", dict(x=T((12, 16)), w=T((50, 16)), target=targets(12, 50), accum_dtype=torch.float32, chunk_rows=3)),
        Case("many-chunks", dict(x=T((20, 16)), w=T((30, 16)), target=targets(20, 30, 7), chunk_rows=2)),
        Case("all-ignored", dict(x=T((3, 16)), w=T((20, 16)), target=targets(3, 20, 1), reduction="sum")),
        Case("llama-3.2-1b", dict(x=T((4096, 2048)), w=T((128256, 2048), lambda *s, dtype: 0.02 * torch.randn(*s, dtype=dtype)),
             target=targets(4096, 128256, 17)), gpu=True),
        *(
            Case(name, dict(x=T((M, H)), w=T((V, H), _small), target=targets(M, V, 17)), gpu=True, timed=True)
            for name, M, H, V in (
                ("llama3-8b-2k", 2048, 4096, 128256),
                ("llama3-8b-8k", 8192, 4096, 128256),
                ("qwen2.5-1.5b", 8192, 2048, 151936),
                ("gemma-7b", 4096, 3072, 256000),
                ("llama2-7b", 16384, 4096, 32000),
            )
        ),
        Case("integers", dict(x=T((4, 8), dtype=torch.int64), w=T((10, 8)), target=targets(4, 10)),
             error="linear_cross_entropy: x and w must be floating point, got torch.int64 and torch.float32"),
        Case("bad-width", dict(x=T((4, 8)), w=T((10, 6)), target=targets(4, 10)), error="linear_cross_entropy: w must have shape (V, 8), got (10, 6)"),
        Case("bad-bias", dict(x=T((4, 8)), w=T((10, 8)), target=targets(4, 10), bias=T((4,))),
             error="linear_cross_entropy: bias must have shape (10,), got (4,)"),
        Case("bad-target", dict(x=T((4, 8)), w=T((10, 8)), target=targets(5, 10)), error="linear_cross_entropy: target must have shape (4,), got (5,)"),
        Case("3d", dict(x=T((2, 4, 8)), w=T((10, 8)), target=targets(8, 10)), error="linear_cross_entropy: x must have shape (M, H), got (2, 4, 8)"),
    ],
    cost=_cost,
    rivals={"torch": _torch, "upstream": _upstream, "cce": _cce},
    sweeps={
        "tokens": ((1024, 2048, 4096, 8192), lambda m: dict(x=T((m, 4096)), w=T((128256, 4096), _small), target=targets(m, 128256, 17))),
        "vocabulary": ((32768, 65536, 131072, 262144), lambda v: dict(x=T((4096, 2048)), w=T((v, 2048), _small), target=targets(4096, v, 17))),
    },
)  # fmt: skip
def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
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
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of ``x @ w.T + bias`` and class indices, in chunks of tokens; runs on any device.

    x (M, H), w (V, H), target (M,) int64, bias (V,), class_weight (V,); x, w and bias are promoted to one dtype, under autocast to its dtype.
    Returns like ``cross_entropy``. ``chunk_rows`` tokens a chunk (default: ``auto_chunk_rows``); dw is summed over chunks in
    ``accum_dtype`` (default: fp32 in fp16 and beyond 5 or 6 chunks, else w's dtype).
    """
    if not (x.is_floating_point() and w.is_floating_point()):
        raise ValueError(f"linear_cross_entropy: x and w must be floating point, got {x.dtype} and {w.dtype}")
    if x.ndim != 2:
        raise ValueError(f"linear_cross_entropy: x must have shape (M, H), got {tuple(x.shape)}")
    if w.ndim != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(f"linear_cross_entropy: w must have shape (V, {x.shape[1]}), got {tuple(w.shape)}")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias must have shape ({w.shape[0]},), got {tuple(bias.shape)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"linear_cross_entropy: chunk_rows must be positive, got {chunk_rows}")
    check("linear_cross_entropy", (x.shape[0], w.shape[0]), target, class_weight, reduction)
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, w.dtype)  # as F.linear has it
    dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(x.dtype, w.dtype)
    x, w, bias = x.to(dtype), w.to(dtype), bias if bias is None else bias.to(dtype)
    need = (t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, w, bias))
    numbers = (ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, token_scaling, stats)
    out = LinearCrossEntropyFunction.apply(x, w, target, bias, class_weight, *need, accum_dtype, chunk_rows, *numbers)
    return out if stats else out[0]
