"""What documents and examples import, as type checkers see it: `make lint` runs mypy and pyright
over it, and nothing runs it.

An ignored line is a mistake that both must find: an ignore that is not needed is an error, too.
"""

from __future__ import annotations

from torch import Tensor, nn

import liger_kernel
from liger_kernel import graphs, hub, memory
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearPreferenceBase
from liger_kernel.nn import (
    LigerExperts,
    LigerFloat8TrainingLinear,
    LigerFusedLinearCrossEntropyLoss,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    liger_rotary_pos_emb,
)
from liger_kernel.ops import expert_load, glu, linear_cross_entropy, linear_logprobs, load_balancing_loss, rms_norm
from liger_kernel.ops.losses.linear_loss import linear_loss
from liger_kernel.parallel import by_sharding, call_instead, parallelize
from liger_kernel.train import TrainConfig
from liger_kernel.train.loop import train
from liger_kernel.transformers import (
    AutoLigerKernelForCausalLM,
    answer_logprobs,
    apply_liger_kernel_to_llama,
    attention,
    load_in_mxfp4,
    merge_aware,
    projections_report,
    quantize_base,
    record_routes,
    replay_routes,
    restore,
    shared_prompts,
)

SHOWN: tuple[object, ...] = ()
SHOWN += (graphs, hub, memory, attention, by_sharding, call_instead, expert_load, glu, load_balancing_loss)
SHOWN += (parallelize, train, TrainConfig, linear_loss, LigerExperts, LigerFusedLinearGRPOLoss)
SHOWN += (LigerFusedLinearPreferenceBase, AutoLigerKernelForCausalLM, projections_report, quantize_base)
SHOWN += (record_routes, replay_routes, load_in_mxfp4, merge_aware, answer_logprobs, shared_prompts)


def other_door() -> LigerRMSNorm:
    from liger_kernel.transformers import (
        LigerFusedLinearCrossEntropyLoss,
        LigerRMSNorm,
        apply_liger_kernel_to_qwen3_moe,
        train_in_fp8,
    )

    train_in_fp8(nn.Linear(2048, 2048), "rowwise", filter=("lm_head",))
    apply_liger_kernel_to_qwen3_moe(swiglu=False)
    LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return LigerRMSNorm(8)


def attention_with_sinks() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_gpt_oss

    apply_liger_kernel_to_gpt_oss(attention=False)


def right(model: nn.Module, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    apply_liger_kernel_to_llama(rope=True, fused_linear_cross_entropy=False)
    apply_liger_kernel_to_llama(model=model, rematerialise="mlp")
    apply_liger_kernel_to_llama(model=model, fp8="rowwise", fp8_filter=["o_proj"])
    apply_liger_kernel_to_llama(fp8="rowwise", fp8_filter=lambda m, name: "mlp" in name)
    LigerFloat8TrainingLinear.forget()
    restore("llama")
    report: str = liger_kernel.apply(model, rope=False).line
    assert report
    norm: LigerRMSNorm = other_door()
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")(w, x, target) - linear_logprobs(x, w, target).sum()
    return linear_cross_entropy(rms_norm(norm(x), w, eps=1e-5), w, target) + loss


def wrong(x: Tensor, w: Tensor) -> None:
    apply_liger_kernel_to_llama(ropee=True)  # type: ignore[call-arg]
    apply_liger_kernel_to_llama(rope="yes")  # type: ignore[arg-type]
    rms_norm(x, epsilon=1e-5)  # type: ignore[call-arg]
    rms_norm(3)  # type: ignore[arg-type]
    LigerRMSNorm(8, epsilon=1e-5)  # type: ignore[call-arg]
    LigerSwiGLUMLP()  # type: ignore[call-arg]
    LigerFusedLinearDPOLoss(betta=0.1)  # type: ignore[call-arg]
    liger_rotary_pos_emb(x)  # type: ignore[call-arg]
