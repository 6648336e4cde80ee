"""Distillation of a linear head from a teacher's head, without ever storing all logits of either.

Shapes: x (M, H), w (V, H), bias (V,) of the student, teacher_x (M, G), teacher_w (V, G),
teacher_bias (V,), target (M,). With z = x w^T + bias and t = teacher_x teacher_w^T + teacher_bias, a
row's loss is

    weight_hard cross_entropy(z, target) + weight_soft D(z / temperature, t / temperature)

where D is, by ``kind``, a divergence of ``logit_divergence`` (formulas there; arXiv:2306.13649) or
"cosine": 1 - <z, t> / (|z| |t|). Neither is multiplied by temperature^2. A teacher may also be given
by its logits t (M, V); by probabilities p (M, V), which need not sum to 1, then the loss is
sum_j p_j (log max(p_j, eps) - log q_j), as in ``kl_div``, for q = softmax(z / temperature); or by
the log-probabilities p of K tokens a row: then it is the forward KL of these and, with ``tail``, of
all other tokens lumped into one, sum_k p_k log(p_k / q_k) + p_rest log(p_rest / q_rest), a lower
bound of the whole KL; without ``tail`` p is normalised to sum to 1 over the K tokens, q remains what
it is over all V.

Each chunk: one GEMM each for z and t into reused buffers, a row kernel that leaves the gradient of
z in its place, one GEMM each for dx and dw. That is 6 M H V + 2 M G V operations, without gradients
2 M (H + G) V. The row kernel reads z and t twice (jsd, tvd: three times) and writes z once; the hard
loss costs it no pass of its own. With ``reduction="none"`` the backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launcher, nbytes, once_differentiable, op
from liger_kernel.ops._core.operator import as_index, on_gpu, only_pytorch, rows_of
from liger_kernel.ops._core.products import add_mm
from liger_kernel.ops._core.reduce import scaled, scaled_rows
from liger_kernel.ops._core.schema import fields_of
from liger_kernel.ops.losses.chunks import HeadLoop, Kept, auto_chunk_rows, only_hidden, regathered
from liger_kernel.ops.losses.cross_entropy import items, targets
from liger_kernel.ops.losses.cross_entropy_rows import REDUCTIONS, check, reference as cross_entropy_reference
from liger_kernel.ops.losses.divergence.by_element import counted, probs
from liger_kernel.ops.losses.divergence.distillation import (
    KINDS,
    Distillation,
    capped,
    check_teacher,
    entropy_of,
    row_kernel,
    soft_losses,
)
from liger_kernel.ops.losses.linear_cross_entropy import Options, check_head, kept_rows, needed, promoted


def reference(
    x, w, teacher_x, teacher_w, target, bias, teacher_bias, *,
    teacher_logits, teacher_probs, topk_log_probs, topk_indices,
    kind, beta, temperature, weight_hard, weight_soft, tail, eps, ignore_index, reduction, parts, num_items,
    logit_scale, softcap, teacher_logit_scale, teacher_softcap, entropy, **how,
):  # fmt: skip
    z = capped(F.linear(x, w, bias), logit_scale, softcap)
    if topk_log_probs is not None:
        t = topk_log_probs, topk_indices
    elif teacher_probs is not None:
        kind, t = "kl", teacher_probs
    else:
        t = F.linear(teacher_x, teacher_w, teacher_bias) if teacher_logits is None else teacher_logits
        t = capped(t, teacher_logit_scale, teacher_softcap)
    # the same formula as the rows of a CPU without kernels
    soft = soft_losses(z, t, Distillation(kind, beta, temperature, tail=tail, eps=eps))
    if target is not None:
        soft = soft.where(target != ignore_index, 0)
    hard = torch.zeros_like(soft)
    if weight_hard:
        hard = cross_entropy_reference(z, target, ignore_index=ignore_index, reduction="none")
    n = counted(x, target, ignore_index) if num_items is None else num_items or 1
    reduce = {"mean": lambda r: r.sum() / n, "sum": torch.sum, "none": lambda r: r}[reduction]
    loss, soft, hard = reduce(weight_hard * hard + weight_soft * soft), reduce(soft), reduce(hard)
    results = (loss, soft.detach(), hard.detach()) if parts else (loss,)
    if entropy:
        h = entropy_of(z, temperature)
        results = *results, h if target is None else h.where(target != ignore_index, 0)
    return results if len(results) > 1 else loss


_N = len(Distillation._fields)
_IN = (
    "Tensor x, Tensor w, Tensor? bias, Tensor? teacher_x, Tensor? teacher_w, Tensor? teacher_bias, "
    "Tensor? teacher_logits, Tensor? log_probs, Tensor? indices, Tensor? target, Tensor? kept, "
    f"{fields_of(Distillation)}, ScalarType? accum_dtype, int? chunk_rows, "
    "bool fp32_logits, bool need_dx, bool need_dw, bool need_db"
)


def _chunks(
    x, w, bias, teacher_x, teacher_w, teacher_bias, teacher_logits, log_probs, indices, target, kept,
    *rest, norm=None, g=None,
):  # fmt: skip
    """Soft and hard losses and the entropy of each row, those that are not ignored, and dx, dw,
    dbias."""
    s, (accum_dtype, chunk_rows, fp32_logits, *need) = Distillation(*rest[:_N]), rest[_N:]
    of = lambda t: t if t is None or kept is None else t.index_select(0, kept)
    y, g, log_probs, indices = (None if t is None else of(t).contiguous() for t in (target, g, log_probs, indices))
    n, V = x.shape[0] if kept is None else kept.shape[0], w.shape[0]
    # the teacher's buffer is as long as a chunk, so the length is chosen here
    chunk_rows = max(1, min(n, chunk_rows or auto_chunk_rows(n, V, w.shape[1], x.itemsize, on_gpu(x))))
    wanted = s.entropy and g is None  # the backward does not need it again
    sizes = n, n if s.weight_hard else 0, n if wanted else 0
    soft, hard, entropy = (x.new_empty(size, dtype=acc(x.dtype)) for size in sizes)
    bias, teacher_bias = (None if t is None else t.contiguous() for t in (bias, teacher_bias))
    # no gradient goes to the teacher: its logits are overwritten chunk by chunk
    buffer = None
    if teacher_w is not None:
        buffer = teacher_w.new_empty(chunk_rows, V, dtype=acc(teacher_w.dtype) if fp32_logits else teacher_w.dtype)

    def teacher(rows: slice) -> Tensor | tuple[Tensor, Tensor]:
        # given logits and hidden states cover all rows, top-k lists only the kept ones
        some = lambda t: t[rows] if kept is None else t.index_select(0, kept[rows])
        if indices is not None:
            return log_probs[rows], indices[rows]
        if teacher_logits is not None:
            return some(teacher_logits)
        t = buffer[: rows.stop - rows.start]
        add_mm(t, some(teacher_x), teacher_w.t(), first=True)
        return t

    how = dict(chunk_rows=chunk_rows, accum_dtype=accum_dtype, kept=kept, fp32_logits=fp32_logits)
    loop = HeadLoop(x, w, tuple(need), **how)
    for z, rows, dz in loop:
        y_c, g_c = (None if t is None else t[rows] for t in (y, g))
        how = dict(bias=bias, teacher_bias=teacher_bias, dz=dz, norm=norm, g=g_c)
        how |= dict(soft=soft[rows], hard=hard[rows], entropy=entropy[rows] if wanted else None)
        row_kernel(z, teacher(rows), y_c, s, **how)
    return soft, hard, entropy, *loop.gradients()[:3]


@launcher(
    f"({_IN}, Tensor? num_items) -> (Tensor loss, Tensor soft, Tensor hard, Tensor entropy, Tensor? norm, "
    "Tensor dx, Tensor dw, Tensor db)"
)
def linear_divergence_fwd(x, w, bias, *rest):
    """Run the forward chunk by chunk, including the gradients."""
    *rest, num_items = rest
    target, kept, numbers, M = rest[6], rest[7], rest[8 : 8 + _N], x.shape[0]
    s, norm = Distillation(*numbers), None
    if s.reduction == "mean":
        norm = counted(x, target, s.ignore_index) if num_items is None else num_items.float().where(num_items != 0, 1)
    # fp16 gradients of a mean over many tokens would underflow before a loss scaler reaches them:
    # the backward divides
    soft, hard, entropy, *grads = _chunks(x, w, bias, *rest, norm=None if x.dtype == torch.float16 else norm)
    # nobody computed it
    if not s.weight_hard:
        hard = torch.zeros_like(soft)
    spread = lambda r: r if kept is None else r.new_zeros(M).index_copy_(0, kept, r)
    entropy = spread(entropy) if s.entropy else entropy
    if s.reduction == "none":
        soft, hard = spread(soft), spread(hard)
    else:
        soft, hard = (r.sum() if norm is None else r.sum() / norm for r in (soft, hard))
    return s.weight_hard * hard + s.weight_soft * soft, soft, hard, entropy, norm, *grads


@launcher(f"(Tensor g, {_IN}) -> (Tensor dx, Tensor dw, Tensor db)")
def linear_divergence_bwd(g, *inputs):
    """Compute the chunks again, for upstream gradients g (M,)."""
    return _chunks(*inputs, g=g)[3:]


class LinearDivergenceFunction(torch.autograd.Function):
    """``apply(x, w, bias, teacher's x, w, bias, logits, log-probs and indices, target, kept,
    num_items, Distillation, Options)`` -> loss, soft, hard, entropy (empty unless requested)."""

    @staticmethod
    def forward(ctx, x, w, bias, teacher_x, teacher_w, teacher_bias, teacher_logits, *rest):
        *others, num_items, s, o = rest
        ctx.need, ctx.rows = o.need, s.reduction == "none" and only_hidden(o.need)
        ctx.recompute = s.reduction == "none" and not ctx.rows
        ctx.numbers = *s, o.accum_dtype, o.chunk_rows, o.fp32_logits
        logits = None if teacher_logits is None else rows_of(teacher_logits)
        inputs = rows_of(x), w, bias, teacher_x, teacher_w, teacher_bias, logits, *others
        # without a reduction the upstream gradients are vectors, which only the backward knows; those
        # of a frozen head are factors of rows
        need = (False,) * 3 if ctx.recompute else o.need
        loss, soft, hard, entropy, norm, *grads = linear_divergence_fwd(*inputs, *ctx.numbers, *need, num_items)
        if ctx.recompute:
            ctx.save_for_backward(*inputs)
        else:
            target, ctx.ignored = others[2], s.ignore_index
            ctx.save_for_backward(*grads, target if ctx.rows else norm if x.dtype == torch.float16 else None)
        ctx.mark_non_differentiable(soft, hard, entropy)
        return loss, soft, hard, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        if ctx.recompute:
            inputs = ctx.saved_tensors
            with regathered(*inputs[1:3], *inputs[4:6]):
                grads = linear_divergence_bwd(g.contiguous(), *inputs, *ctx.numbers, *ctx.need)
        elif ctx.rows:
            dx, *grads, target = ctx.saved_tensors
            # 0 stays 0, whatever the upstream gradient is
            g = g if target is None else g.masked_fill(target == ctx.ignored, 0)
            grads = [scaled_rows(dx, g[:, None]), *grads]
        else:
            *grads, norm = ctx.saved_tensors
            grads = scaled(grads, g, norm)
        return *(grad if need else None for grad, need in zip(grads, ctx.need)), *(None,) * 11


def _head(M: int, H: int, V: int, *, labels: bool = False, **options: Any) -> dict[str, Any]:
    return dict(x=T((M, H)), w=T((V, H))) | (dict(target=targets(M, V)) if labels else {}) | options


def _heads(M: int = 7, H: int = 16, G: int = 24, V: int = 50, draw=torch.randn, **options: Any) -> dict[str, Any]:
    teacher = dict(teacher_x=T((M, G), grad=False), teacher_w=T((V, G), draw, grad=False))
    return _head(M, H, V, w=T((V, H), draw), **teacher | options)


def _sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """Probabilities, some of them 0; they do not sum to 1."""
    p = probs(*shape, dtype=dtype)
    return p * (p > p.mean())


def _topk(M: int, V: int, K: int) -> dict[str, Any]:
    """The first K of a row's V log-probabilities, at tokens drawn without replacement."""
    log_probs = lambda *shape, dtype: torch.randn(M, V, dtype=dtype).log_softmax(-1)[:, :K]
    indices = lambda *shape, dtype: torch.rand(M, V).argsort(-1)[:, :K]
    tensors = T((M, K), log_probs, grad=False), T((M, K), indices, dtype=torch.int64)
    return dict(zip(("topk_log_probs", "topk_indices"), tensors))


def _probs(M: int, V: int, dtype: torch.dtype | None = None, draw: Callable[..., Tensor] = probs) -> dict[str, Any]:
    return dict(teacher_probs=T((M, V), draw, grad=False, dtype=dtype), kind="forward_kl")


_CAPS = dict(logit_scale=0.5, softcap=2.0, teacher_logit_scale=0.7, teacher_softcap=3.0)
_FROZEN = dict(w=T((50, 16), grad=False))
_FORWARD = dict(kind="forward_kl")
_BIASES = dict(labels=True, bias=T((50,)), teacher_bias=T((50,), grad=False))


def _cost(x, w, teacher_x=None, teacher_w=None, target=None, bias=None, teacher_bias=None, **options) -> Cost:
    (M, H), V = x.shape, w.shape[0]
    teacher = [] if teacher_x is None else [(M, V, teacher_x.shape[1])]
    given = (options.get(name) for name in ("teacher_logits", "teacher_probs", "topk_log_probs", "topk_indices"))
    read = nbytes(x, w, teacher_x, teacher_w, target, bias, teacher_bias, *given)
    backward = [(M, H, V), *([(V, H, M)] if w.requires_grad else [])]
    return Cost(read, nbytes(x, w, bias), gemms=([(M, V, H), *teacher], backward))


@op(
    reference=reference,
    cases=[
        Case("jsd", _heads(9, V=65, chunk_rows=4)),
        Case("hard", _heads(9, V=65, labels=True, weight_hard=0.5, weight_soft=0.5, chunk_rows=4)),
        Case(
            "hard-parts", _heads(labels=True, beta=0.2, temperature=2.0, weight_hard=0.3, weight_soft=0.7, parts=True)
        ),
        Case("forward-kl", _heads(labels=True, kind="forward_kl", weight_hard=0.5, temperature=0.7, chunk_rows=3)),
        Case("reverse-kl", _heads(labels=True, kind="reverse_kl", weight_hard=1.0, num_items=17)),
        Case("tvd", _heads(labels=True, kind="tvd", weight_hard=0.5, temperature=2.0, reduction="sum", chunk_rows=5)),
        Case("cosine", _heads(kind="cosine", reduction="sum", chunk_rows=3)),
        Case("cosine-hard", _heads(**_BIASES, kind="cosine", weight_hard=0.5, weight_soft=0.5, chunk_rows=3)),
        Case(
            "entropy", _heads(9, V=65, kind="forward_kl", entropy=True, temperature=0.7, reduction="none", chunk_rows=4)
        ),
        Case("entropy-frozen", _heads(9, entropy=True, reduction="none", chunk_rows=4) | _FROZEN),
        Case("entropy-compact", _heads(**_BIASES, **_CAPS, entropy=True, compact=True, parts=True, chunk_rows=4)),
        Case(
            "softcap", _heads(**_CAPS, kind="reverse_kl", entropy=True, reduction="none", temperature=1.5, chunk_rows=3)
        ),
        Case("scale-hard", _heads(labels=True, weight_hard=0.5, logit_scale=0.3, teacher_softcap=2.0, entropy=True)),
        Case("softcap-tvd", _heads(**_CAPS, kind="tvd", fp32_logits=True, chunk_rows=3)),
        Case("entropy-two-blocks", _heads(2, 8, 4, 9001, entropy=True, softcap=3.0)),
        Case("beta-0", _heads(5, G=8, labels=True, beta=0.0, weight_hard=0.5)),
        Case("none", _heads(labels=True, weight_hard=0.5, reduction="none", chunk_rows=3, parts=True)),
        Case("bias", _heads(**_BIASES, weight_hard=0.5, chunk_rows=3)),
        Case("compact", _heads(9, labels=True, bias=T((50,)), weight_hard=0.5, compact=True, chunk_rows=4)),
        Case("compact-none", _heads(9, labels=True, compact=True, chunk_rows=4, reduction="none")),
        Case("fp32-logits", _heads(9, labels=True, weight_hard=0.5, fp32_logits=True, chunk_rows=4)),
        Case(
            "teacher-logits",
            _head(7, 16, 40, labels=True, teacher_logits=T((7, 40), grad=False), kind="tvd", chunk_rows=3),
        ),
        Case("probs", _head(7, 16, 65, labels=True, **_probs(7, 65), chunk_rows=3)),
        Case(
            "probs-hard",
            _head(9, 16, 40, labels=True, bias=T((40,)), **_probs(9, 40, torch.float32), weight_hard=0.5)
            | dict(weight_soft=0.7, temperature=2.0, compact=True, chunk_rows=4),
        ),
        Case(
            "probs-zero", _head(6, 16, 33, **_probs(6, 33, draw=_sparse), reduction="none", temperature=0.7, eps=0.02)
        ),
        Case("probs-entropy", _head(7, 16, 65, **_probs(7, 65), entropy=True, softcap=2.0, chunk_rows=3)),
        Case("probs-two-blocks", _head(2, 8, 9001, **_probs(2, 9001), reduction="sum")),
        Case(
            "fp32-teacher",
            _heads(24, G=8, V=40)
            | dict(teacher_x=T((24, 8), grad=False, dtype=torch.float32))
            | dict(teacher_w=T((40, 8), grad=False, dtype=torch.float32)),
        ),
        Case("topk", _head(7, 16, 65, **_topk(7, 65, 5), **_FORWARD, chunk_rows=3)),
        Case(
            "topk-hard", _head(7, 16, 65, labels=True, **_topk(7, 65, 6), **_FORWARD, weight_hard=0.5, temperature=1.5)
        ),
        Case(
            "topk-no-tail",
            _head(7, 16, 65, labels=True, bias=T((65,)), **_topk(7, 65, 6), **_FORWARD, tail=False, weight_hard=0.5),
        ),
        Case("topk-all", _head(4, 16, 9, **_topk(4, 9, 9), **_FORWARD, reduction="none")),
        Case("all-ignored", _heads(3, G=8, V=20, target=targets(3, 20, 1), weight_hard=0.5, reduction="sum")),
        Case("two-blocks", _heads(2, 8, 4, 9001, labels=True, weight_hard=0.5, temperature=2.0)),
        Case("topk-two-blocks", _head(2, 8, 9001, labels=True, **_topk(2, 9001, 33), **_FORWARD, weight_hard=0.5)),
    ],
    cost=_cost,
)
def linear_divergence(
    x: Tensor, w: Tensor, teacher_x: Tensor | None = None, teacher_w: Tensor | None = None,
    target: Tensor | None = None, bias: Tensor | None = None, teacher_bias: Tensor | None = None, *,
    teacher_logits: Tensor | None = None, teacher_probs: Tensor | None = None, topk_log_probs: Tensor | None = None,
    topk_indices: Tensor | None = None, kind: str = "jsd", beta: float = 0.5, temperature: float = 1.0,
    weight_hard: float = 0.0, weight_soft: float = 1.0, tail: bool = True, eps: float = 1e-10,
    ignore_index: int = -100, reduction: str = "mean", parts: bool = False, num_items: Tensor | float | None = None,
    compact: bool | Kept = False, accum_dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    fp32_logits: bool = False, logit_scale: float = 1.0, softcap: float | None = None, teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None, entropy: bool = False,
) -> Any:  # fmt: skip
    """``weight_hard`` times the cross entropy of a student's head and ``weight_soft`` times its
    divergence from a teacher's, in chunks of tokens.

    x (M, H), w (V, H), bias (V,), target (M,) int64 (without it, all rows count and there is no
    hard loss). The teacher: teacher_x (M, G), teacher_w (V, G) and teacher_bias (V,); or
    teacher_logits (M, V); or, with kind "forward_kl", teacher_probs (M, V), or topk_log_probs and
    topk_indices (M, K): these are log-probabilities of distinct tokens at this ``temperature``, and
    an index outside [0, V) is no token. The teacher is constant: if its hidden states, logits or
    probabilities require a gradient, the call raises; if its weight does, the weight gets none. The
    student's tensors are promoted to one dtype, and so are the teacher's; under autocast this is
    autocast's dtype.

    Returns the fp32 loss: "mean" over the rows whose target is not ``ignore_index`` (none: 0) or
    divided by ``num_items`` (0: the sum), "sum", or (M,) for "none"; with ``parts`` also the soft
    and the hard loss, not weighted and without gradient; with ``entropy`` also, as the last, the
    entropy (M,) of the student at this ``temperature``, without gradient, 0 for ignored rows.

    logit_scale, softcap and those of the teacher: what the models do to their logits before, softcap
    * tanh((x w^T + bias) * logit_scale / softcap). These and ``entropy`` exist for a teacher with
    logits, the student's for one with probabilities, too; ``entropy`` not for "cosine". The other
    options are those of ``linear_cross_entropy``.
    """
    name = "linear_divergence"
    check_head(name, x, w, bias, chunk_rows)
    M, V = x.shape[0], w.shape[0]
    teacher = dict(teacher_logits=teacher_logits, teacher_probs=teacher_probs)
    teacher |= dict(topk_log_probs=topk_log_probs, topk_indices=topk_indices)
    every = dict(teacher_x=teacher_x, teacher_w=teacher_w) | teacher
    given = " and ".join(n for n, t in every.items() if t is not None)
    forms = "teacher_x and teacher_w", "teacher_logits", "teacher_probs", "topk_log_probs and topk_indices"
    if given not in forms:
        raise ValueError(f"{name}: the teacher must be {', or '.join(forms)}, got {given or None}")
    if teacher_bias is not None and teacher_x is None:
        raise ValueError(f"{name}: teacher_bias must be None without teacher_w, got {tuple(teacher_bias.shape)}")
    check_teacher(name, M, V, **every, teacher_bias=teacher_bias)
    checks.one_of(name, KINDS, kind=kind)
    model = dict(logit_scale=logit_scale, softcap=softcap)
    model |= dict(teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_softcap)
    plain = dict(teacher_logit_scale=1.0, teacher_softcap=None)
    only: dict[str, Any] = dict(entropy=False) if kind == "cosine" else {}
    form = "kind 'cosine'"
    if topk_indices is not None:
        form, only = "a top-k teacher", dict(kind="forward_kl", entropy=False, logit_scale=1.0, softcap=None) | plain
    elif teacher_probs is not None:
        form, only = "a teacher's probabilities", dict(kind="forward_kl") | plain
    for key, value in (dict(kind=kind, entropy=entropy) | model).items():
        if only.get(key, value) != value:
            raise ValueError(f"{name}: {key} must be {only[key]!r} for {form}, got {value!r}")
    if eps < 0:
        raise ValueError(f"{name}: eps must not be negative, got {eps}")
    if not 0 <= beta <= 1:
        raise ValueError(f"{name}: beta must be between 0 and 1, got {beta}")
    checks.positive(name, temperature=temperature, softcap=softcap, teacher_softcap=teacher_softcap)
    if target is None and weight_hard:
        raise ValueError(f"{name}: target must be given for a hard loss, got None")
    checks.one_of(name, REDUCTIONS, reduction=reduction)
    if target is not None:
        target = check(name, (M, V), target, None, reduction, ignore_index)
    if topk_indices is not None:
        teacher["topk_indices"] = as_index(topk_indices)
    x, w, bias = promoted(x, w, bias)
    if teacher_x is not None and teacher_w is not None:
        # the teacher has a dtype of its own
        of_teacher = promoted(teacher_x, teacher_w, teacher_bias)
        constant = lambda t: t if t is None or hasattr(t, "ds_id") else t.detach()  # ``regathered`` needs the parameter
        teacher_x, teacher_w, teacher_bias = map(constant, of_teacher)
    num_items = items(num_items, x)
    own = kind, beta, temperature, ignore_index, reduction, weight_hard, weight_soft, tail, eps
    s = Distillation(*own, logit_scale, softcap, teacher_logit_scale, teacher_softcap, entropy)
    if only_pytorch():
        heads = x, w, teacher_x, teacher_w, target, bias, teacher_bias
        return reference(*heads, **(s._asdict() | teacher), parts=parts, num_items=num_items)
    logits, log_probs, indices = (teacher[n] for n in ("teacher_logits", "topk_log_probs", "topk_indices"))
    if teacher_probs is not None:
        s, logits = s._replace(kind="kl"), teacher_probs  # they use the same argument as logits
    # without labels every row counts
    kept = None if target is None else kept_rows(compact, target, ignore_index)
    tensors = x, w, bias, teacher_x, teacher_w, teacher_bias, logits, log_probs, indices, target, kept
    how = Options(needed(x, w, bias), accum_dtype, chunk_rows, fp32_logits)
    out = LinearDivergenceFunction.apply(*tensors, num_items, s, how)
    results = (*out[: 3 if parts else 1], *((out[3],) if entropy else ()))
    return results if len(results) > 1 else out[0]
