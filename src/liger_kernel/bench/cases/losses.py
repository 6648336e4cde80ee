"""Benchmark cases of ``ops/losses``, apart from divergences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import Measured, Passing, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.cross_entropy import positive, targets
from liger_kernel.ops.losses.load_balancing import _tensors as router

PYTORCHS = "ignore_index=ignore_index reduction=reduction label_smoothing=label_smoothing"
PUBLISHED = f"{PYTORCHS} lse_square_scale=z_loss softcap=softcap"
# how our loss is computed, not which
HOW = "compact chunk_rows fp32_logits dw_into"


def small(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


def head(M: int, H: int, V: int, every: int = 17) -> dict[str, T]:
    """Hidden states, an output head, and labels of which one in ``every`` is ignored."""
    return dict(x=T((M, H)), w=T((V, H), small), target=targets(M, V, every))


def _logits(M: int, V: int) -> dict[str, T]:
    return dict(logits=T((M, V)), target=targets(M, V, 17))


def _cross_entropy_torch(logits, target, *class_weight, **options):
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), *class_weight, **options)


def _linear_cross_entropy_torch(x, w, target, bias, **options):
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
    return F.cross_entropy(F.linear(x, w, bias).float(), target, **options)


def _expert_load_torch(logits, index, weight):
    """As transformers computes it, which has the softmax from choosing the experts."""
    K, E = index.shape[1], logits.shape[1]
    probs = F.softmax(logits, -1)
    if weight is None:
        return probs.float().sum(0), torch.histc(index.flatten().int(), E, 0, E)
    counts = torch.zeros(E, device=logits.device).scatter_add_(0, index.flatten(), weight.repeat_interleave(K))
    return (probs.float() * weight[:, None]).sum(0), counts


LOSSES = {
    "cross_entropy": Measured(
        cases=[
            timed("llama3-8k", **_logits(8192, 128256)),
            timed("llama3-8k-forward", **_logits(8192, 128256), gradient_in_forward=True),
            real("llama3", **_logits(1024, 128256)),
            real("gemma", **_logits(512, 256000), softcap=30.0),
            real(
                "everything-llama3",
                **_logits(256, 128256),
                class_weight=T((128256,), positive, grad=False),
                label_smoothing=0.1,
                z_loss=1e-4,
                softcap=30.0,
                token_scaling=True,
                stats=True,
            ),
        ],
        rivals={
            "torch": Passing(_cross_entropy_torch, f"logits target class_weight {PYTORCHS}", "gradient_in_forward"),
            "upstream": Passing(
                "liger_cross_entropy", f"logits target class_weight {PUBLISHED}", "gradient_in_forward"
            ),
        },
        sweeps={"vocabulary": ((16384, 32768, 65536, 131072, 262144), lambda v: _logits(2048, v))},
    ),
    "expert_load": Measured(
        cases=[
            real("qwen3-30b-a3b", **router(8192, 128, 8)),
            real("qwen3-30b-a3b-padded", **router(8192, 128, 8, padded=True)),
            real("mixtral-8x7b", **router(8192, 8, 2)),
            real("qwen3-next-80b", **router(8192, 512, 10)),
        ],
        rivals={"torch": Passing(_expert_load_torch)},
        sweeps={"tokens": ((1024, 4096, 16384, 65536), lambda n: router(n, 128, 8))},
    ),
    "linear_cross_entropy": Measured(
        cases=[
            real("llama-3.2-1b", **head(4096, 2048, 128256)),
            timed("llama3-8b-2k", **head(2048, 4096, 128256)),
            timed("llama3-8b-8k", **head(8192, 4096, 128256)),
            timed("qwen2.5-1.5b", **head(8192, 2048, 151936)),
            timed("gemma-7b", **head(4096, 3072, 256000)),
            timed("llama2-7b", **head(16384, 4096, 32000)),
            timed("gemma3-4b", **head(4096, 2560, 262208)),
            timed("llama3-8b-2048", **head(8192, 4096, 128256), chunk_rows=2048),
            # beside "eager", a linear layer that is trained in FP8, and the case of the same name in 16 bits
            timed("llama3-8b-2k-fp8", **head(2048, 4096, 128256), fp8="tensorwise"),
            timed("llama3-8b-8k-fp8", **head(8192, 4096, 128256), fp8="tensorwise"),
            timed("qwen2.5-1.5b-fp8", **head(8192, 2048, 151936), fp8="tensorwise"),
            timed("llama3-8b-8k-masked", **head(8192, 4096, 128256, every=2), compact=True),
        ],
        rivals={
            "torch": Passing(_linear_cross_entropy_torch, f"x w target bias=bias {PYTORCHS}", f"{HOW} accum_dtype"),
            "upstream": Passing(
                "liger_fused_linear_cross_entropy",
                f"x w target bias class_weight {PUBLISHED} accum_dtype=accum_dtype use_token_scaling=token_scaling",
                HOW,
            ),
        },
        sweeps={
            "tokens": ((1024, 2048, 4096, 8192), lambda m: head(m, 4096, 128256)),
            "vocabulary": ((32768, 65536, 131072, 262144), lambda v: head(4096, 2048, v)),
        },
    ),
    "linear_logprobs": Measured(cases=[timed("llama-3.2-1b", **head(8192, 2048, 128256), outputs=("entropy",))]),
    "vocab_parallel_cross_entropy": Measured(
        cases=[
            real("llama3-tp8", logits=T((8192, 16032)), target=targets(8192, 16032)),
            real("llama3-tp2", logits=T((4096, 64128)), target=targets(4096, 64128), label_smoothing=0.1),
        ],
        rivals={"torch": Passing(_cross_entropy_torch, f"logits target {PYTORCHS}", "group")},
    ),
    "vocab_parallel_linear_cross_entropy": Measured(
        cases=[real("llama3-8b-tp8", x=T((4096, 4096)), w=T((16032, 4096), small), target=targets(4096, 16032))]
    ),
}
