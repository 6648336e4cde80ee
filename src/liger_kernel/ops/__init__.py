"""Every public operator, those of ``extra`` included, and what it is published with. What an operator
does is in its file, in a folder by subject."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from liger_kernel import _legacy
from liger_kernel.extra.attn_res import LigerAttnResFunction as LigerAttnResFunction, attn_res as attn_res
from liger_kernel.extra.dyt import LigerDyTFunction as LigerDyTFunction, dyt as dyt
from liger_kernel.extra.group_norm import LigerGroupNormFunction as LigerGroupNormFunction, group_norm as group_norm
from liger_kernel.extra.mhc import LigerMHCCoeffsFunction as LigerMHCCoeffsFunction, mhc_coeffs as mhc_coeffs
from liger_kernel.extra.mhc_mixing import (
    LigerMHCPostResFunction as LigerMHCPostResFunction,
    LigerMHCPreFunction as LigerMHCPreFunction,
    mhc_post_res as mhc_post_res,
    mhc_pre as mhc_pre,
)
from liger_kernel.extra.modulated_rms_norm import (
    LigerModulatedRMSNormFunction as LigerModulatedRMSNormFunction,
    modulated_rms_norm as modulated_rms_norm,
)
from liger_kernel.extra.multi_token_attention import (
    LigerMultiTokenAttentionFunction as LigerMultiTokenAttentionFunction,
    multi_token_attention as multi_token_attention,
)
from liger_kernel.extra.neighborhood_attention import (
    LigerFusedNeighborhoodAttentionFunction as LigerFusedNeighborhoodAttentionFunction,
    neighborhood_attention as neighborhood_attention,
)
from liger_kernel.extra.poly_norm import LigerPolyNormFunction as LigerPolyNormFunction, poly_norm as poly_norm
from liger_kernel.extra.softmax import LigerSoftmaxFunction as LigerSoftmaxFunction, softmax as softmax
from liger_kernel.extra.sparsemax import LigerSparsemaxFunction as LigerSparsemaxFunction, sparsemax as sparsemax
from liger_kernel.ops._core.impl import LIGER_KERNEL_IMPL_ENV as LIGER_KERNEL_IMPL_ENV, OURS, select_impl as select_impl
from liger_kernel.ops._core.operator import OPS as OPS
from liger_kernel.ops.activations.glu import glu as glu
from liger_kernel.ops.activations.relu_squared import (
    LigerReLUSquaredFunction as LigerReLUSquaredFunction,
    relu_squared as relu_squared,
)
from liger_kernel.ops.attention.sink_attention import sink_attention as sink_attention
from liger_kernel.ops.losses.cross_entropy import cross_entropy as cross_entropy
from liger_kernel.ops.losses.divergence.fused_ce_tvd import (
    LigerFusedCETVDFunction as LigerFusedCETVDFunction,
    fused_ce_tvd as fused_ce_tvd,
)
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence as linear_divergence
from liger_kernel.ops.losses.divergence.logit_divergence import logit_divergence as logit_divergence
from liger_kernel.ops.losses.divergence.probabilities import (
    LigerJSDFunction as LigerJSDFunction,
    LigerKLDivLossFunction as LigerKLDivLossFunction,
    LigerTVDLossFunction as LigerTVDLossFunction,
    jsd as jsd,
    kl_div as kl_div,
    tvd as tvd,
)
from liger_kernel.ops.losses.grpo_loss import GrpoLossFunction as GrpoLossFunction
from liger_kernel.ops.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from liger_kernel.ops.losses.linear_logprobs import linear_logprobs as linear_logprobs
from liger_kernel.ops.losses.linear_loss import linear_loss as linear_loss
from liger_kernel.ops.losses.load_balancing import (
    expert_load as expert_load,
    load_balancing_loss as load_balancing_loss,
)
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import (
    LigerVocabParallelCEFunction as LigerVocabParallelCEFunction,
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from liger_kernel.ops.losses.vocab_parallel.linear_cross_entropy import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
from liger_kernel.ops.norms.fused_add_rms_norm import (
    LigerFusedAddRMSNormFunction as LigerFusedAddRMSNormFunction,
    fused_add_rms_norm as fused_add_rms_norm,
)
from liger_kernel.ops.norms.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_kernel.ops.norms.layer_norm import LigerLayerNormFunction as LigerLayerNormFunction, layer_norm as layer_norm
from liger_kernel.ops.norms.rms_norm import LigerRMSNormFunction as LigerRMSNormFunction, rms_norm as rms_norm
from liger_kernel.ops.projections.lora import lora_linear as lora_linear, lora_mlp as lora_mlp, lora_qkv as lora_qkv
from liger_kernel.ops.projections.lora_moe import lora_moe as lora_moe
from liger_kernel.ops.projections.mlp import LigerMLPFunction as LigerMLPFunction, mlp as mlp
from liger_kernel.ops.projections.moe import LigerFusedMoEFunction as LigerFusedMoEFunction, moe as moe
from liger_kernel.ops.projections.tiled_mlp import (
    LigerTiledMLPFunction as LigerTiledMLPFunction,
    apply_tiled_mlp as apply_tiled_mlp,
)
from liger_kernel.ops.recurrent.causal_conv1d import causal_conv1d as causal_conv1d
from liger_kernel.ops.recurrent.gated_delta_rule import gated_delta_rule as gated_delta_rule
from liger_kernel.ops.recurrent.kda import kda as kda
from liger_kernel.ops.recurrent.log_decay import log_decay as log_decay
from liger_kernel.ops.recurrent.ssd import ssd as ssd
from liger_kernel.ops.rotary.qk_norm_rope import qk_norm_rope as qk_norm_rope
from liger_kernel.ops.rotary.rope import rope as rope
from liger_kernel.ops.token_embedding import LigerEmbeddingFunction as LigerEmbeddingFunction, embedding as embedding
from liger_kernel.utils import infer_device as infer_device

if TYPE_CHECKING:  # what ``add_published`` adds
    from liger_kernel.compat.function_classes import *  # noqa: F403
    from liger_kernel.compat.host import *  # noqa: F403

if (_impl := os.environ.get("LIGER_KERNEL_IMPL")) and _impl not in OURS:
    warnings.warn(
        f"LIGER_KERNEL_IMPL={_impl}: the implementations here are triton, which is what runs, and torch", stacklevel=2
    )

# lists begin with what models use
for _name in [name for name, operator in OPS.items() if operator.fn.__module__.startswith("liger_kernel.extra")]:
    OPS[_name] = OPS.pop(_name)

_legacy.add_published(__name__)
