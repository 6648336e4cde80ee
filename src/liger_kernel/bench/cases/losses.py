"""Benchmark cases of ``ops/losses``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import Measured, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.cross_entropy import positive, targets
from liger_kernel.ops.losses.cross_entropy_rows import Loss
from liger_kernel.ops.losses.load_balancing import _tensors as _expert_load_tensors


def _cross_entropy_torch(
    logits,
    target,
    class_weight=None,
    *,
    gradient_in_forward=False,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    **options,
):
    plain(options)
    return F.cross_entropy(
        logits.float(),
        target,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _cross_entropy_upstream(
    functional,
    logits,
    target,
    class_weight=None,
    *,
    z_loss=0.0,
    logit_scale=1.0,
    token_scaling=False,
    stats=False,
    num_items=None,
    gradient_in_forward=False,
    **options,
):
    plain(dict(num_items=num_items, logit_scale=logit_scale, token_scaling=token_scaling, stats=stats))
    return functional.liger_cross_entropy(logits, target, class_weight, lse_square_scale=z_loss, **options)


def plain(options: dict) -> None:
    """Raise ``NotImplementedError`` if a case has an option that the rival lacks."""
    if any(value is not None and value != getattr(Loss, name, None) for name, value in options.items()):
        raise NotImplementedError


def _small(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


def _linear_cross_entropy_torch(
    x, w, target, bias=None, class_weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options
):
    plain({k: v for k, v in options.items() if k not in OURS} | dict(class_weight=class_weight))
    options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
    return F.cross_entropy(F.linear(x, w, bias).float(), target, **options)


def _linear_cross_entropy_upstream(
    functional,
    x,
    w,
    target,
    bias=None,
    class_weight=None,
    *,
    z_loss=0.0,
    logit_scale=1.0,
    token_scaling=False,
    stats=False,
    num_items=None,
    **options,
):
    plain(dict(logit_scale=logit_scale, stats=stats, num_items=num_items))
    options = {k: v for k, v in options.items() if k == "accum_dtype" or k not in OURS}
    return functional.liger_fused_linear_cross_entropy(
        x, w, target, bias, class_weight, lse_square_scale=z_loss, use_token_scaling=token_scaling, **options
    )


def _expert_load_torch(logits, index, weight=None):
    """As transformers computes it, which has the softmax from choosing the experts."""
    K, E = index.shape[1], logits.shape[1]
    probs = F.softmax(logits, -1)
    if weight is None:
        return probs.float().sum(0), torch.histc(index.flatten().int(), E, 0, E)
    counts = torch.zeros(E, device=logits.device).scatter_add_(0, index.flatten(), weight.repeat_interleave(K))
    return (probs.float() * weight[:, None]).sum(0), counts


OURS = ("compact", "accum_dtype", "chunk_rows", "fp32_logits", "dw_into")


MEASURED = {
    "cross_entropy": Measured(
        cases=[
            timed("llama3-8k", logits=T((8192, 128256)), target=targets(8192, 128256, 17)),
            timed(
                "llama3-8k-forward",
                logits=T((8192, 128256)),
                target=targets(8192, 128256, 17),
                gradient_in_forward=True,
            ),
            real("llama3", logits=T((1024, 128256)), target=targets(1024, 128256, 17)),
            real("gemma", logits=T((512, 256000)), target=targets(512, 256000, 17), softcap=30.0),
            real(
                "everything-llama3",
                logits=T((256, 128256)),
                target=targets(256, 128256, 17),
                class_weight=T((128256,), positive, grad=False),
                label_smoothing=0.1,
                z_loss=1e-4,
                softcap=30.0,
                token_scaling=True,
                stats=True,
            ),
        ],
        rivals={"torch": _cross_entropy_torch, "upstream": _cross_entropy_upstream},
        sweeps={
            "vocabulary": (
                (16384, 32768, 65536, 131072, 262144),
                lambda v: dict(logits=T((2048, v)), target=targets(2048, v, 17)),
            )
        },
    ),
    "expert_load": Measured(
        cases=[
            real("qwen3-30b-a3b", **_expert_load_tensors(8192, 128, 8)),
            real("qwen3-30b-a3b-padded", **_expert_load_tensors(8192, 128, 8, padded=True)),
            real("mixtral-8x7b", **_expert_load_tensors(8192, 8, 2)),
            real("qwen3-next-80b", **_expert_load_tensors(8192, 512, 10)),
        ],
        rivals={"torch": _expert_load_torch},
        sweeps={"tokens": ((1024, 4096, 16384, 65536), lambda n: _expert_load_tensors(n, 128, 8))},
    ),
    "linear_cross_entropy": Measured(
        cases=[
            real(
                "llama-3.2-1b",
                x=T((4096, 2048)),
                w=T((128256, 2048), lambda *s, dtype: 0.02 * torch.randn(*s, dtype=dtype)),
                target=targets(4096, 128256, 17),
            ),
            *(
                timed(name, x=T((M, H)), w=T((V, H), _small), target=targets(M, V, 17))
                for name, M, H, V in (
                    ("llama3-8b-2k", 2048, 4096, 128256),
                    ("llama3-8b-8k", 8192, 4096, 128256),
                    ("qwen2.5-1.5b", 8192, 2048, 151936),
                    ("gemma-7b", 4096, 3072, 256000),
                    ("llama2-7b", 16384, 4096, 32000),
                    ("gemma3-4b", 4096, 2560, 262208),
                )
            ),
            timed(
                "llama3-8b-2048",
                x=T((8192, 4096)),
                w=T((128256, 4096), _small),
                target=targets(8192, 128256, 17),
                chunk_rows=2048,
            ),
            *(  # beside "eager", a linear layer that is trained in FP8, and the case of the same name in 16 bits
                timed(f"{name}-fp8", x=T((M, H)), w=T((V, H), _small), target=targets(M, V, 17), fp8="tensorwise")
                for name, M, H, V in (
                    ("llama3-8b-2k", 2048, 4096, 128256),
                    ("llama3-8b-8k", 8192, 4096, 128256),
                    ("qwen2.5-1.5b", 8192, 2048, 151936),
                )
            ),
            timed(
                "llama3-8b-8k-masked",
                x=T((8192, 4096)),
                w=T((128256, 4096), _small),
                target=targets(8192, 128256, 2),
                compact=True,
            ),
        ],
        rivals={"torch": _linear_cross_entropy_torch, "upstream": _linear_cross_entropy_upstream},
        sweeps={
            "tokens": (
                (1024, 2048, 4096, 8192),
                lambda m: dict(x=T((m, 4096)), w=T((128256, 4096), _small), target=targets(m, 128256, 17)),
            ),
            "vocabulary": (
                (32768, 65536, 131072, 262144),
                lambda v: dict(x=T((4096, 2048)), w=T((v, 2048), _small), target=targets(4096, v, 17)),
            ),
        },
    ),
    "linear_logprobs": Measured(
        cases=[
            timed(
                "llama-3.2-1b",
                x=T((8192, 2048)),
                w=T((128256, 2048), _small),
                target=targets(8192, 128256, 17),
                return_entropy=True,
            )
        ]
    ),
}
