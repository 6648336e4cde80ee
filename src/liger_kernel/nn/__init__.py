"""Modules and functions over the operators, for models of your own, with the names and arguments of
LinkedIn's package.

``in_place`` and ``row_mode`` are accepted and ignored: nothing here writes to a tensor that it does
not own.
"""

from __future__ import annotations

from liger_kernel.nn.attention import LigerFusedNeighborhoodAttention as LigerFusedNeighborhoodAttention
from liger_kernel.nn.attention import LigerFusedNeighborhoodAttentionConfig as LigerFusedNeighborhoodAttentionConfig
from liger_kernel.nn.attention import LigerFusedNeighborhoodAttentionLayer as LigerFusedNeighborhoodAttentionLayer
from liger_kernel.nn.attention import LigerMultiTokenAttention as LigerMultiTokenAttention
from liger_kernel.nn.attention import LigerSoftmax as LigerSoftmax
from liger_kernel.nn.attention import LigerSparsemax as LigerSparsemax
from liger_kernel.nn.attention import liger_fused_neighborhood_attention as liger_fused_neighborhood_attention
from liger_kernel.nn.attention import liger_multi_token_attention as liger_multi_token_attention
from liger_kernel.nn.attention import liger_softmax as liger_softmax
from liger_kernel.nn.attention import liger_sparsemax as liger_sparsemax
from liger_kernel.nn.float8 import LigerFloat8Linear as LigerFloat8Linear
from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear as LigerFloat8TrainingLinear
from liger_kernel.nn.losses import CrossEntropyOutput as CrossEntropyOutput
from liger_kernel.nn.losses import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_kernel.nn.losses import LigerFusedCETVDLoss as LigerFusedCETVDLoss
from liger_kernel.nn.losses import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from liger_kernel.nn.losses import LigerFusedLinearJSD as LigerFusedLinearJSD
from liger_kernel.nn.losses import LigerFusedLinearKLDivLoss as LigerFusedLinearKLDivLoss
from liger_kernel.nn.losses import LigerJSD as LigerJSD
from liger_kernel.nn.losses import LigerJSDFunction as LigerJSDFunction
from liger_kernel.nn.losses import LigerKLDIVLoss as LigerKLDIVLoss
from liger_kernel.nn.losses import LigerTVDLoss as LigerTVDLoss
from liger_kernel.nn.losses import LigerVocabParallelCrossEntropy as LigerVocabParallelCrossEntropy
from liger_kernel.nn.losses import liger_cross_entropy as liger_cross_entropy
from liger_kernel.nn.losses import liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy
from liger_kernel.nn.losses import liger_fused_linear_jsd as liger_fused_linear_jsd
from liger_kernel.nn.losses import liger_fused_linear_kl_div as liger_fused_linear_kl_div
from liger_kernel.nn.losses import (
    liger_fused_linear_scaled_cross_entropy_tp as liger_fused_linear_scaled_cross_entropy_tp,
)
from liger_kernel.nn.losses import liger_jsd as liger_jsd
from liger_kernel.nn.losses import liger_kl_div as liger_kl_div
from liger_kernel.nn.losses import liger_tvd as liger_tvd
from liger_kernel.nn.losses import token_accuracy as token_accuracy
from liger_kernel.nn.losses import token_counts as token_counts
from liger_kernel.nn.mlps import GELU as GELU
from liger_kernel.nn.mlps import SILU as SILU
from liger_kernel.nn.mlps import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
from liger_kernel.nn.mlps import LigerExperts as LigerExperts
from liger_kernel.nn.mlps import LigerFalconH1MLP as LigerFalconH1MLP
from liger_kernel.nn.mlps import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
from liger_kernel.nn.mlps import LigerGEGLUMLP as LigerGEGLUMLP
from liger_kernel.nn.mlps import LigerGEGLUMLPForGemma4 as LigerGEGLUMLPForGemma4
from liger_kernel.nn.mlps import LigerHunyuanV1SwiGLUMLP as LigerHunyuanV1SwiGLUMLP
from liger_kernel.nn.mlps import LigerMLP as LigerMLP
from liger_kernel.nn.mlps import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from liger_kernel.nn.mlps import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
from liger_kernel.nn.mlps import LigerReLUSquared as LigerReLUSquared
from liger_kernel.nn.mlps import LigerSwiGLUMLP as LigerSwiGLUMLP
from liger_kernel.nn.mlps import LigerSwiGLUMLPForMuseGlimmer as LigerSwiGLUMLPForMuseGlimmer
from liger_kernel.nn.mlps import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
from liger_kernel.nn.mlps import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
from liger_kernel.nn.mlps import liger_geglu as liger_geglu
from liger_kernel.nn.mlps import liger_relu_squared as liger_relu_squared
from liger_kernel.nn.mlps import liger_swiglu as liger_swiglu
from liger_kernel.nn.norms import INIT as INIT
from liger_kernel.nn.norms import LigerDyT as LigerDyT
from liger_kernel.nn.norms import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_kernel.nn.norms import LigerGroupNorm as LigerGroupNorm
from liger_kernel.nn.norms import LigerLayerNorm as LigerLayerNorm
from liger_kernel.nn.norms import LigerModulatedRMSNorm as LigerModulatedRMSNorm
from liger_kernel.nn.norms import LigerPolyNorm as LigerPolyNorm
from liger_kernel.nn.norms import LigerRMSNorm as LigerRMSNorm
from liger_kernel.nn.norms import LigerRMSNormForGemma as LigerRMSNormForGemma
from liger_kernel.nn.norms import LigerRMSNormForGemma2 as LigerRMSNormForGemma2
from liger_kernel.nn.norms import LigerRMSNormForGemma3 as LigerRMSNormForGemma3
from liger_kernel.nn.norms import LigerRMSNormForGemma4 as LigerRMSNormForGemma4
from liger_kernel.nn.norms import LigerRMSNormForGlm4 as LigerRMSNormForGlm4
from liger_kernel.nn.norms import LigerRMSNormForMuseGlimmer as LigerRMSNormForMuseGlimmer
from liger_kernel.nn.norms import LigerRMSNormForMuseGlimmerTextCentered as LigerRMSNormForMuseGlimmerTextCentered
from liger_kernel.nn.norms import LigerRMSNormForOlmo2 as LigerRMSNormForOlmo2
from liger_kernel.nn.norms import LigerRMSNormForQwen3Next as LigerRMSNormForQwen3Next
from liger_kernel.nn.norms import LigerRMSNormFunction as LigerRMSNormFunction
from liger_kernel.nn.norms import liger_dyt as liger_dyt
from liger_kernel.nn.norms import liger_fused_add_rms_norm as liger_fused_add_rms_norm
from liger_kernel.nn.norms import liger_group_norm as liger_group_norm
from liger_kernel.nn.norms import liger_layer_norm as liger_layer_norm
from liger_kernel.nn.norms import liger_modulated_rms_norm as liger_modulated_rms_norm
from liger_kernel.nn.norms import liger_poly_norm as liger_poly_norm
from liger_kernel.nn.norms import liger_rms_norm as liger_rms_norm
from liger_kernel.nn.residual import LigerMHC as LigerMHC
from liger_kernel.nn.residual import liger_attn_res as liger_attn_res
from liger_kernel.nn.residual import liger_mhc_apply as liger_mhc_apply
from liger_kernel.nn.residual import liger_mhc_coeffs as liger_mhc_coeffs
from liger_kernel.nn.residual import liger_mhc_forward as liger_mhc_forward
from liger_kernel.nn.residual import liger_mhc_post_res as liger_mhc_post_res
from liger_kernel.nn.residual import liger_mhc_pre as liger_mhc_pre
from liger_kernel.nn.rotary import liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb
from liger_kernel.nn.rotary import liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb
from liger_kernel.nn.rotary import liger_multimodal_rotary_pos_emb as liger_multimodal_rotary_pos_emb
from liger_kernel.nn.rotary import liger_qk_norm_rope as liger_qk_norm_rope
from liger_kernel.nn.rotary import liger_qwen2vl_mrope as liger_qwen2vl_mrope
from liger_kernel.nn.rotary import liger_rope as liger_rope
from liger_kernel.nn.rotary import liger_rotary_pos_emb as liger_rotary_pos_emb
from liger_kernel.nn.rotary import liger_rotary_pos_emb_gpt_oss as liger_rotary_pos_emb_gpt_oss
from liger_kernel.nn.rotary import liger_rotary_pos_emb_vision as liger_rotary_pos_emb_vision
from liger_kernel.nn.token_embedding import LigerEmbedding as LigerEmbedding
