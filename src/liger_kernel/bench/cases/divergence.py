"""Benchmark cases of ``ops/losses/divergence``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import Measured, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.divergence.by_element import jsd_kind, log_probs, probs
from liger_kernel.ops.losses.divergence.linear_divergence import _heads as _linear_divergence_heads
from liger_kernel.ops.losses.divergence.linear_divergence import _topk as _linear_divergence_topk
from liger_kernel.ops.losses.divergence.linear_divergence import reference
from liger_kernel.ops.losses.divergence.logit_divergence import _pair as _logit_divergence_pair


def _jsd_torch(log_q, log_p, shift_labels=None, *, beta=0.5, ignore_index=-100, reduction="batchmean"):
    if shift_labels is not None or jsd_kind(beta) != "jsd":
        raise NotImplementedError
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return sum(
        weight * F.kl_div(log_m, x, reduction=reduction, log_target=True)
        for weight, x in ((beta, log_p), (1 - beta, log_q))
    )


def _jsd_upstream(functional, log_q, log_p, shift_labels=None, *, reduction="batchmean", **options):
    if reduction != "batchmean":
        raise NotImplementedError
    return functional.liger_jsd(log_q, log_p, shift_labels, **options)


def _linear_divergence_small(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


def _linear_divergence_torch(
    x, w, teacher_x=None, teacher_w=None, target=None, bias=None, teacher_bias=None, **options
):
    if teacher_x is None:
        raise NotImplementedError
    return reference(x, w, teacher_x, teacher_w, target, bias, teacher_bias, **options)


def _linear_divergence_upstream(
    functional,
    x,
    w,
    teacher_x=None,
    teacher_w=None,
    target=None,
    bias=None,
    teacher_bias=None,
    *,
    kind="jsd",
    beta=0.5,
    **options,
):
    theirs = ("temperature", "ignore_index", "accum_dtype")
    if (
        kind not in ("jsd", "forward_kl", "reverse_kl")
        or teacher_x is None
        or bias is not None
        or teacher_bias is not None
        or options.keys() - {*theirs}
    ):
        raise NotImplementedError
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(kind, beta)
    return functional.liger_fused_linear_jsd(x, w, teacher_x, teacher_w, target, beta, **options)


def _logit_divergence_torch(
    student,
    teacher,
    shift_labels=None,
    *,
    kind="jsd",
    beta=0.5,
    temperature=1.0,
    ignore_index=-100,
    reduction="batchmean",
):
    if shift_labels is not None or kind not in ("forward_kl", "reverse_kl") or reduction == "none":
        raise NotImplementedError
    x, y = ((z.float() / temperature).log_softmax(-1) for z in (student, teacher))
    x, y = (x, y) if kind == "forward_kl" else (y, x)
    return F.kl_div(x, y, reduction=reduction, log_target=True)


def _logit_divergence_upstream(
    functional,
    student,
    teacher,
    shift_labels=None,
    *,
    kind="jsd",
    beta=0.5,
    temperature=1.0,
    ignore_index=-100,
    reduction="batchmean",
):
    """LinkedIn's divergences take log-probabilities: call log_softmax first, as its own chunked
    losses do."""
    if kind == "tvd" or reduction != "batchmean":
        raise NotImplementedError
    x, y = ((z.float() / temperature).log_softmax(-1) for z in (student, teacher))
    return functional.liger_jsd(
        x, y, shift_labels, {"forward_kl": 0.0, "reverse_kl": 1.0}.get(kind, beta), ignore_index
    )


MEASURED = {
    "fused_ce_tvd": Measured(
        cases=[
            timed(
                "llama3",
                student=T((4096, 128256)),
                teacher=T((4096, 128256), grad=False),
                target=targets(4096, 128256, 17),
            )
        ]
    ),
    "jsd": Measured(
        cases=[
            *(
                timed(
                    name,
                    log_q=T((M, V), log_probs),
                    log_p=T((M, V), log_probs, grad=False),
                    shift_labels=labels,
                    beta=beta,
                )
                for name, M, V, beta, labels in (
                    ("llama3", 4096, 128256, 0.5, None),
                    ("llama3-labels", 4096, 128256, 0.5, targets(4096, 128256, 3)),
                    ("llama3-forward-kl", 4096, 128256, 0.0, None),
                    ("llama2", 8192, 32000, 0.5, None),
                    ("few-rows", 16, 128256, 0.5, None),
                )
            )
        ],
        rivals={"torch": _jsd_torch, "upstream": _jsd_upstream},
        sweeps={
            "vocabulary": (
                (16384, 32768, 65536, 131072),
                lambda v: dict(log_q=T((4096, v), log_probs), log_p=T((4096, v), log_probs, grad=False)),
            )
        },
    ),
    "kl_div": Measured(
        cases=[
            *(
                timed(
                    name,
                    input=T((4096, V), log_probs),
                    target=T((4096, V), p, grad=False),
                    reduction="batchmean",
                    log_target=p is log_probs,
                )
                for name, V, p in (
                    ("llama3", 128256, probs),
                    ("llama3-log", 128256, log_probs),
                    ("llama2", 32000, log_probs),
                )
            ),
            real("few-rows", input=T((16, 128256), log_probs), target=T((16, 128256), probs), reduction="batchmean"),
        ],
        rivals={
            "torch": lambda input, target, *, reduction="mean", log_target=False, eps=1e-10: F.kl_div(
                input, target, reduction=reduction, log_target=log_target
            ),
            "upstream": lambda functional, input, target, *, reduction="mean", log_target=False, eps=1e-10: (
                functional.liger_kl_div(input, target, reduction=reduction, log_target=log_target, eps=eps)
            ),
        },
        sweeps={
            "vocabulary": (
                (16384, 32768, 65536, 131072),
                lambda v: dict(input=T((4096, v), log_probs), target=T((4096, v), probs, grad=False)),
            )
        },
    ),
    "linear_divergence": Measured(
        cases=[
            real(
                "llama3",
                **_linear_divergence_heads(1024, 2048, 4096, 128256, _linear_divergence_small),
                target=targets(1024, 128256, 17),
                weight_hard=0.5,
                weight_soft=0.5,
            ),
            *(
                timed(name, **_linear_divergence_heads(4096, 2048, 4096, 128256, _linear_divergence_small), **options)
                for name, options in (
                    ("llama3-jsd", {}),
                    ("llama3-forward-kl", dict(kind="forward_kl")),
                    ("llama3-hard", dict(target=targets(4096, 128256, 17), weight_hard=0.5, weight_soft=0.5)),
                )
            ),
            timed(
                "llama3-topk",
                x=T((4096, 2048)),
                w=T((128256, 2048), _linear_divergence_small),
                **_linear_divergence_topk(4096, 128256, 64),
                kind="forward_kl",
            ),
            timed(
                "llama3-probs",
                x=T((4096, 2048)),
                w=T((128256, 2048), _linear_divergence_small),
                teacher_probs=T((4096, 128256), probs, grad=False),
                kind="forward_kl",
            ),
        ],
        rivals={"torch": _linear_divergence_torch, "upstream": _linear_divergence_upstream},
    ),
    "logit_divergence": Measured(
        cases=[
            *(
                timed(
                    f"llama3-{kind}".replace("_", "-"),
                    **_logit_divergence_pair(4096, 128256, grad=False),
                    kind=kind,
                    temperature=2.0,
                )
                for kind in ("jsd", "forward_kl", "reverse_kl", "tvd")
            ),
            timed(
                "qwen3-labels",
                **_logit_divergence_pair(1024, 151936, grad=False),
                shift_labels=targets(1024, 151936, 3),
            ),
            real("mutual", **_logit_divergence_pair(1024, 32000), shift_labels=targets(1024, 32000, 3)),
            real("mutual-kl", **_logit_divergence_pair(1024, 32000), kind="reverse_kl"),
        ],
        rivals={"torch": _logit_divergence_torch, "upstream": _logit_divergence_upstream},
        sweeps={
            "vocabulary": ((16384, 32768, 65536, 131072, 262144), lambda v: _logit_divergence_pair(2048, v, grad=False))
        },
    ),
    "tvd": Measured(
        cases=[
            *(
                timed(name, p=T((4096, V), probs), q=T((4096, V), probs, grad=False))
                for name, V in (("llama3", 128256), ("llama2", 32000))
            )
        ],
        rivals={
            "upstream": lambda functional, p, q, shift_labels=None, *, reduction="batchmean", ignore_index=-100: (
                functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)
            )
        },
        sweeps={
            "vocabulary": (
                (16384, 32768, 65536, 131072),
                lambda v: dict(p=T((4096, v), probs), q=T((4096, v), probs, grad=False)),
            )
        },
    ),
}
