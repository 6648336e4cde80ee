"""Losses of a linear head for preference optimisation, reinforcement learning and distillation,
without storing the logits of all tokens."""

# ruff: noqa: F403, F405  names are those of ``__all__`` of each module

from __future__ import annotations

from liger_kernel.chunked_loss.cosine_similarity_loss import *
from liger_kernel.chunked_loss.cpo_loss import *
from liger_kernel.chunked_loss.dpo_loss import *
from liger_kernel.chunked_loss.fused_linear_distillation import *
from liger_kernel.chunked_loss.fused_linear_ppo import *
from liger_kernel.chunked_loss.fused_linear_preference import *
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import *
from liger_kernel.chunked_loss.grpo_loss import (
    LigerFusedLinearGRPOFunction as LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss,
)
from liger_kernel.chunked_loss.jsd_loss import *
from liger_kernel.chunked_loss.kto_loss import *
from liger_kernel.chunked_loss.orpo_loss import *
from liger_kernel.chunked_loss.simpo_loss import *

liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
