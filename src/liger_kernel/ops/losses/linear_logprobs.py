"""Log-probabilities of given tokens under a linear head, and the entropy of its distribution,
without ever storing all logits.

Shapes: x (M, H), w (V, H), bias (V,), target (M,).  With z = f((x w^T + bias) * logit_scale /
temperature), f the softcap of ``cross_entropy`` or nothing, and p = softmax(z):

    logp = z_y - logsumexp(z)        entropy = logsumexp(z) - sum_j p_j z_j

    d logp / d z_j = [j = y] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)

Rows whose target is ``ignore_index`` have both 0. It is the linear cross entropy without reduction:
the forward is one GEMM a chunk, the backward computes the logits again if they did not fit one
chunk. Where the loss is known beforehand, ``linear_loss`` saves that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import Case, T, op
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.cross_entropy_rows import Loss, statistics
from liger_kernel.ops.losses.cross_entropy_rows import reference as cross_entropy_reference
from liger_kernel.ops.losses.linear_cross_entropy import _cost, all_logits, apply, checked, tempered


def reference(
    x, w, target, bias, *, temperature, logit_scale, softcap, ignore_index, return_entropy, xa, wb, fp8, **how
):
    z = all_logits(x, w, bias, xa, wb, fp8)
    numbers = dict(logit_scale=logit_scale / temperature, softcap=softcap, ignore_index=ignore_index)
    logp = -cross_entropy_reference(z, target, **numbers, reduction="none")
    return (logp, statistics(z, target, Loss(**numbers, entropy=True))[0]) if return_entropy else logp


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
    ],
    cost=_cost,
)
def linear_logprobs(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100, return_entropy: bool = False,
    compact: bool | Kept = False, accum_dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    fp32_logits: bool = False, xa: Tensor | None = None, wb: Tensor | None = None, fp8: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """fp32 log-probabilities (M,) of ``target`` (M,), with ``return_entropy`` also the entropies
    (M,); both differentiable in x, w, bias, xa and wb.

    x (M, H), w (V, H), bias (V,). The other options are those of ``linear_cross_entropy``.
    """
    name, unsupported = "linear_logprobs", dict(fp32_logits=fp32_logits, xa=xa)
    s = tempered(name, temperature, logit_scale, softcap, ignore_index, entropy=return_entropy)
    x, w, target, bias, xa, wb = checked(name, x, w, target, bias, None, s, chunk_rows, xa, wb, fp8, unsupported)
    # the cross entropy of the head without reduction, with the opposite sign
    nll, _, _, entropy, _ = apply(
        x, w, target, bias, None, s, None, compact, accum_dtype, chunk_rows, fp32_logits, xa=xa, wb=wb, fp8=fp8
    )
    return (-nll, entropy) if return_entropy else -nll
