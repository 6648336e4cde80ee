"""Benchmark cases of ``ops/losses/divergence``."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from liger_kernel.bench.cases.losses import small
from liger_kernel.bench.measured import Measured, Passing, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence.by_element import jsd_kind, log_probs, probs
from liger_kernel.ops.losses.divergence.linear_divergence import _heads as heads, _topk as topk
from liger_kernel.ops.losses.divergence.logit_divergence import _pair as pair

VOCABULARIES = (16384, 32768, 65536, 131072)
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}  # of the divergence that LinkedIn's package has for all


def _jsd_torch(log_q, log_p, beta, reduction):
    if jsd_kind(beta) != "jsd":
        raise NotImplementedError
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    kl = functools.partial(F.kl_div, log_m, reduction=reduction, log_target=True)
    return beta * kl(log_p) + (1 - beta) * kl(log_q)


def _linear_divergence_upstream(
    functional, x, w, teacher_x, teacher_w, target, kind, beta, ignore_index, temperature, accum_dtype
):
    if kind == "tvd" or teacher_x is None:
        raise NotImplementedError
    how = dict(ignore_index=ignore_index, temperature=temperature, accum_dtype=accum_dtype)
    return functional.liger_fused_linear_jsd(x, w, teacher_x, teacher_w, target, BETAS.get(kind, beta), **how)


def _logit_divergence_torch(student, teacher, kind, temperature, reduction):
    if kind not in BETAS or reduction == "none":
        raise NotImplementedError
    x, y = ((z.float() / temperature).log_softmax(-1) for z in (student, teacher))
    return F.kl_div(*((x, y) if kind == "forward_kl" else (y, x)), reduction=reduction, log_target=True)


def _logit_divergence_upstream(functional, student, teacher, shift_labels, kind, beta, temperature, ignore_index):
    """LinkedIn's divergences take log-probabilities: call log_softmax first, as its own chunked
    losses do."""
    if kind == "tvd":
        raise NotImplementedError
    x, y = ((z.float() / temperature).log_softmax(-1) for z in (student, teacher))
    return functional.liger_jsd(x, y, shift_labels, BETAS.get(kind, beta), ignore_index)


def _logs(M: int, V: int) -> dict[str, T]:
    return dict(log_q=T((M, V), log_probs), log_p=T((M, V), log_probs, grad=False))


DIVERGENCES = {
    "fused_ce_tvd": Measured(
        cases=[timed("llama3", **pair(4096, 128256, grad=False), target=targets(4096, 128256, 17))]
    ),
    "jsd": Measured(
        cases=[
            timed("llama3", **_logs(4096, 128256)),
            timed("llama3-labels", **_logs(4096, 128256), shift_labels=targets(4096, 128256, 3)),
            timed("llama3-forward-kl", **_logs(4096, 128256), beta=0.0),
            timed("llama2", **_logs(8192, 32000)),
            timed("few-rows", **_logs(16, 128256)),
        ],
        rivals={"torch": Passing(_jsd_torch), "upstream": "log_q log_p shift_labels beta ignore_index"},
        sweeps={"vocabulary": (VOCABULARIES, lambda v: _logs(4096, v))},
    ),
    "kl_div": Measured(
        cases=[
            *(
                timed(
                    name,
                    input=T((4096, V), log_probs),
                    target=T((4096, V), draw, grad=False),
                    reduction="batchmean",
                    log_target=draw is log_probs,
                )
                for name, V, draw in (
                    ("llama3", 128256, probs),
                    ("llama3-log", 128256, log_probs),
                    ("llama2", 32000, log_probs),
                )
            ),
            real("few-rows", input=T((16, 128256), log_probs), target=T((16, 128256), probs), reduction="batchmean"),
        ],
        rivals={
            "torch": Passing(F.kl_div, "input target reduction=reduction log_target=log_target", ignored="eps"),
            "upstream": "input target reduction=reduction log_target=log_target eps=eps",
        },
        sweeps={
            "vocabulary": (
                VOCABULARIES,
                lambda v: dict(input=T((4096, v), log_probs), target=T((4096, v), probs, grad=False)),
            )
        },
    ),
    "linear_divergence": Measured(
        cases=[
            real(
                "llama3",
                **heads(1024, 2048, 4096, 128256, small),
                target=targets(1024, 128256, 17),
                weight_hard=0.5,
                weight_soft=0.5,
            ),
            timed("llama3-jsd", **heads(4096, 2048, 4096, 128256, small)),
            timed("llama3-forward-kl", **heads(4096, 2048, 4096, 128256, small), kind="forward_kl"),
            timed(
                "llama3-hard",
                **heads(4096, 2048, 4096, 128256, small),
                target=targets(4096, 128256, 17),
                weight_hard=0.5,
                weight_soft=0.5,
            ),
            timed(
                "llama3-topk",
                x=T((4096, 2048)),
                w=T((128256, 2048), small),
                **topk(4096, 128256, 64),
                kind="forward_kl",
            ),
            timed(
                "llama3-probs",
                x=T((4096, 2048)),
                w=T((128256, 2048), small),
                teacher_probs=T((4096, 128256), probs, grad=False),
                kind="forward_kl",
            ),
        ],
        rivals={"upstream": Passing(_linear_divergence_upstream)},
    ),
    "logit_divergence": Measured(
        cases=[
            *(
                timed(f"llama3-{kind}".replace("_", "-"), **pair(4096, 128256, grad=False), kind=kind, temperature=2.0)
                for kind in ("jsd", "forward_kl", "reverse_kl", "tvd")
            ),
            timed("qwen3-labels", **pair(1024, 151936, grad=False), shift_labels=targets(1024, 151936, 3)),
            real("mutual", **pair(1024, 32000), shift_labels=targets(1024, 32000, 3)),
            real("mutual-kl", **pair(1024, 32000), kind="reverse_kl"),
        ],
        rivals={
            "torch": Passing(_logit_divergence_torch, ignored="beta ignore_index"),
            "upstream": Passing(_logit_divergence_upstream),
        },
        sweeps={"vocabulary": ((*VOCABULARIES, 262144), lambda v: pair(2048, v, grad=False))},
    ),
    "tvd": Measured(
        cases=[
            timed(name, p=T((4096, V), probs), q=T((4096, V), probs, grad=False))
            for name, V in (("llama3", 128256), ("llama2", 32000))
        ],
        rivals={"upstream": "p q shift_labels reduction ignore_index"},
        sweeps={"vocabulary": (VOCABULARIES, lambda v: dict(p=T((4096, v), probs), q=T((4096, v), probs, grad=False)))},
    ),
}
