"""Log-probabilities of given tokens under a linear head, and the entropy of its distribution,
without ever storing all logits.

Shapes: x (M, H), w (V, H), bias (V,), target (M,).  With z = f((x w^T + bias) * logit_scale /
temperature), f the softcap of ``cross_entropy`` or
nothing, and p = softmax(z):

    logp = z_y - logsumexp(z)        entropy = logsumexp(z) - sum_j p_j z_j

    d logp / d z_j = [j = y] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)

Rows whose target is ``ignore_index`` have both 0. It is the linear cross entropy without reduction:
the forward is one GEMM a chunk, the backward
computes the logits again if they did not fit one chunk. Where the loss is known beforehand,
``linear_loss`` spares that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import Case, T, acc, op
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.cross_entropy_rows import Loss, check
from liger_kernel.ops.losses.float8_head import check_fp8
from liger_kernel.ops.losses.linear_cross_entropy import _cost, all_logits, apply, check_head, promoted


def reference(
    x, w, target, bias, *, temperature, logit_scale, softcap, ignore_index, return_entropy, xa, wb, fp8, **how
):
    z = all_logits(x, w, bias, xa, wb, fp8)
    z = z.to(acc(z.dtype)) * (logit_scale / temperature)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    valid, inside = target != ignore_index, (target >= 0) & (target < w.shape[0])
    log_p = z.log_softmax(-1)
    poison = z.new_ones(()).where(inside | ~valid, float("nan"))  # a factor, so that the gradient is NaN, too
    picked = lambda t: (t * poison).where(valid, 0)
    logp = picked(log_p.gather(-1, target.where(inside, 0)[:, None])[:, 0])
    return (logp, picked(-(log_p.exp() * log_p).sum(-1))) if return_entropy else logp


@op(
    reference=reference,
    cases=[
        Case(
            "grpo",
            dict(
                x=T((9, 32)), w=T((65, 32)), target=targets(9, 65), temperature=0.9, chunk_rows=4, return_entropy=True
            ),
        ),
        Case("one-chunk", dict(x=T((20, 16)), w=T((65, 16)), target=targets(20, 65), return_entropy=True)),
        Case("no-entropy", dict(x=T((9, 16)), w=T((40, 16)), target=targets(9, 40), bias=T((40,)), temperature=1.3)),
        Case(
            "gemma2",
            dict(
                x=T((7, 16)),
                w=T((40, 16)),
                target=targets(7, 40),
                softcap=2.0,
                logit_scale=0.5,
                return_entropy=True,
                chunk_rows=3,
            ),
        ),
        Case(
            "compact",
            dict(x=T((24, 16)), w=T((40, 16)), target=targets(24, 40), return_entropy=True, compact=True, chunk_rows=7),
        ),
        Case(
            "lora",
            dict(
                x=T((9, 16)),
                w=T((40, 16), grad=False),
                target=targets(9, 40),
                xa=T((9, 3)),
                wb=T((40, 3)),
                return_entropy=True,
                chunk_rows=4,
            ),
        ),
        Case(
            "fp8",
            dict(
                x=T((64, 32)),
                w=T((80, 32)),
                target=targets(64, 80),
                fp8="rowwise",
                chunk_rows=40,
                return_entropy=True,
                temperature=0.9,
            ),
        ),
        Case(
            "bad-width",
            dict(x=T((4, 8)), w=T((10, 6)), target=targets(4, 10)),
            error="w must have shape (V, 8), got (10, 6)",
        ),
        Case(
            "cold",
            dict(x=T((4, 8)), w=T((10, 8)), target=targets(4, 10), temperature=0.0),
            error="temperature must be positive, got 0.0",
        ),
    ],
    cost=lambda x, w, target, bias=None, **options: _cost(x, w, target, bias, **options),
)
def linear_logprobs(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    compact: bool | Kept = False,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    fp32_logits: bool = False,
    xa: Tensor | None = None,
    wb: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """fp32 log-probabilities (M,) of ``target`` (M,), with ``return_entropy`` also the entropies
    (M,); both differentiable in x, w, bias, xa and wb.

    x (M, H), w (V, H), bias (V,). The other options are those of ``linear_cross_entropy``.
    """
    if not temperature > 0:
        raise ValueError(f"linear_logprobs: temperature must be positive, got {temperature}")
    check_head("linear_logprobs", x, w, bias, chunk_rows, xa, wb)
    target = check("linear_logprobs", (x.shape[0], w.shape[0]), target, None, "none", ignore_index)
    x, w, bias, xa, wb = promoted(x, w, bias, xa, wb)
    check_fp8("linear_logprobs", fp8, x, fp32_logits=fp32_logits, xa=xa)
    # the temperature is one more scale of the logits
    s = Loss(
        ignore_index=ignore_index,
        reduction="none",
        logit_scale=logit_scale / temperature,
        softcap=softcap,
        entropy=return_entropy,
    )
    # the cross entropy of the head without reduction, with the opposite sign
    nll, _, _, entropy, _ = apply(
        x, w, target, bias, None, s, None, compact, accum_dtype, chunk_rows, fp32_logits, xa=xa, wb=wb, fp8=fp8
    )
    return (-nll, entropy) if return_entropy else -nll
