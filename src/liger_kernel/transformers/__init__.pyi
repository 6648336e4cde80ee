# Written by `liger models --write`; do not edit.
# fmt: off
# ruff: noqa
from typing import Protocol

from torch import nn

from liger_kernel.nn import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
from liger_kernel.nn import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_kernel.nn import LigerDyT as LigerDyT
from liger_kernel.nn import LigerEmbedding as LigerEmbedding
from liger_kernel.nn import LigerExpertParallelFusedMoe as LigerExpertParallelFusedMoe
from liger_kernel.nn import LigerExperts as LigerExperts
from liger_kernel.nn import LigerFalconH1MLP as LigerFalconH1MLP
from liger_kernel.nn import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
from liger_kernel.nn import LigerFloat8Linear as LigerFloat8Linear
from liger_kernel.nn import LigerFloat8TrainingLinear as LigerFloat8TrainingLinear
from liger_kernel.nn import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_kernel.nn import LigerFusedCETVDLoss as LigerFusedCETVDLoss
from liger_kernel.nn import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from liger_kernel.nn import LigerFusedLinearJSD as LigerFusedLinearJSD
from liger_kernel.nn import LigerFusedLinearKLDivLoss as LigerFusedLinearKLDivLoss
from liger_kernel.nn import LigerFusedNeighborhoodAttention as LigerFusedNeighborhoodAttention
from liger_kernel.nn import LigerFusedNeighborhoodAttentionConfig as LigerFusedNeighborhoodAttentionConfig
from liger_kernel.nn import LigerFusedNeighborhoodAttentionLayer as LigerFusedNeighborhoodAttentionLayer
from liger_kernel.nn import LigerGEGLUMLP as LigerGEGLUMLP
from liger_kernel.nn import LigerGEGLUMLPForGemma4 as LigerGEGLUMLPForGemma4
from liger_kernel.nn import LigerGroupNorm as LigerGroupNorm
from liger_kernel.nn import LigerHunyuanV1SwiGLUMLP as LigerHunyuanV1SwiGLUMLP
from liger_kernel.nn import LigerJSD as LigerJSD
from liger_kernel.nn import LigerKLDIVLoss as LigerKLDIVLoss
from liger_kernel.nn import LigerLayerNorm as LigerLayerNorm
from liger_kernel.nn import LigerMHC as LigerMHC
from liger_kernel.nn import LigerMLP as LigerMLP
from liger_kernel.nn import LigerModulatedRMSNorm as LigerModulatedRMSNorm
from liger_kernel.nn import LigerMultiTokenAttention as LigerMultiTokenAttention
from liger_kernel.nn import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from liger_kernel.nn import LigerPolyNorm as LigerPolyNorm
from liger_kernel.nn import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
from liger_kernel.nn import LigerRMSNorm as LigerRMSNorm
from liger_kernel.nn import LigerRMSNormForGemma as LigerRMSNormForGemma
from liger_kernel.nn import LigerRMSNormForGemma2 as LigerRMSNormForGemma2
from liger_kernel.nn import LigerRMSNormForGemma3 as LigerRMSNormForGemma3
from liger_kernel.nn import LigerRMSNormForGemma4 as LigerRMSNormForGemma4
from liger_kernel.nn import LigerRMSNormForGlm4 as LigerRMSNormForGlm4
from liger_kernel.nn import LigerRMSNormForMuseGlimmer as LigerRMSNormForMuseGlimmer
from liger_kernel.nn import LigerRMSNormForMuseGlimmerTextCentered as LigerRMSNormForMuseGlimmerTextCentered
from liger_kernel.nn import LigerRMSNormForOlmo2 as LigerRMSNormForOlmo2
from liger_kernel.nn import LigerRMSNormForQwen3Next as LigerRMSNormForQwen3Next
from liger_kernel.nn import LigerReLUSquared as LigerReLUSquared
from liger_kernel.nn import LigerSoftmax as LigerSoftmax
from liger_kernel.nn import LigerSparsemax as LigerSparsemax
from liger_kernel.nn import LigerSwiGLUMLP as LigerSwiGLUMLP
from liger_kernel.nn import LigerSwiGLUMLPForMuseGlimmer as LigerSwiGLUMLPForMuseGlimmer
from liger_kernel.nn import LigerTVDLoss as LigerTVDLoss
from liger_kernel.nn import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
from liger_kernel.nn import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
from liger_kernel.nn import LigerVocabParallelCrossEntropy as LigerVocabParallelCrossEntropy
from liger_kernel.nn import liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb
from liger_kernel.nn import liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb
from liger_kernel.nn import liger_multimodal_rotary_pos_emb as liger_multimodal_rotary_pos_emb
from liger_kernel.nn import liger_rotary_pos_emb as liger_rotary_pos_emb
from liger_kernel.nn import liger_rotary_pos_emb_vision as liger_rotary_pos_emb_vision
from liger_kernel.transformers.auto import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_kernel.transformers.auto import AutoLigerKernelForImageTextToText as AutoLigerKernelForImageTextToText
from liger_kernel.transformers.auto import AutoLigerKernelForSequenceClassification as AutoLigerKernelForSequenceClassification
from liger_kernel.transformers.patching.apply import MODEL_TYPE_TO_APPLY_LIGER_FN as MODEL_TYPE_TO_APPLY_LIGER_FN
from liger_kernel.transformers.patching.apply import _apply_liger_kernel as _apply_liger_kernel
from liger_kernel.transformers.patching.apply import _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching.select import class_patches as class_patches
from liger_kernel.transformers.patching.select import instance_patches as instance_patches
from liger_kernel.transformers.patching.report import patches_report as patches_report
from liger_kernel.transformers.patching.report import projections_report as projections_report
from liger_kernel.transformers.patching.patches import restore as restore
from liger_kernel.transformers.quantize import quantize_base as quantize_base
from liger_kernel.transformers.routes import record_routes as record_routes
from liger_kernel.transformers.routes import replay_routes as replay_routes
from liger_kernel.transformers.load_mxfp4 import load_in_mxfp4 as load_in_mxfp4
from liger_kernel.transformers.fp8 import train_in_fp8 as train_in_fp8
from liger_kernel.transformers.merged_training import merge_aware as merge_aware
from liger_kernel.transformers.prompt_trees import answer_logprobs as answer_logprobs
from liger_kernel.transformers.prompt_trees import shared_prompts as shared_prompts
from liger_kernel.patch_options import Filter

def is_transformers_available() -> bool: ...

class _Apply1(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_afmoe: _Apply1
apply_liger_kernel_to_apertus: _Apply1
apply_liger_kernel_to_apertus1p5_text: _Apply1
apply_liger_kernel_to_axk1: _Apply1
apply_liger_kernel_to_bailing_hybrid: _Apply1
apply_liger_kernel_to_bamba: _Apply1
apply_liger_kernel_to_beam: _Apply1
apply_liger_kernel_to_bitnet: _Apply1
apply_liger_kernel_to_blt: _Apply1
apply_liger_kernel_to_chameleon: _Apply1
apply_liger_kernel_to_cwm: _Apply1
apply_liger_kernel_to_diffllama: _Apply1
apply_liger_kernel_to_doge: _Apply1
apply_liger_kernel_to_dory: _Apply1
apply_liger_kernel_to_dots1: _Apply1
apply_liger_kernel_to_emu3: _Apply1
apply_liger_kernel_to_ernie4_5: _Apply1
apply_liger_kernel_to_ernie4_5_moe: _Apply1
apply_liger_kernel_to_exaone4: _Apply1
apply_liger_kernel_to_exaone4_5: _Apply1
apply_liger_kernel_to_exaone_moe: _Apply1
apply_liger_kernel_to_falcon_h1: _Apply1
apply_liger_kernel_to_falcon_mamba: _Apply1
apply_liger_kernel_to_flex_olmo: _Apply1
apply_liger_kernel_to_flint: _Apply1
apply_liger_kernel_to_glm: _Apply1
apply_liger_kernel_to_glm4_moe: _Apply1
apply_liger_kernel_to_glm4_moe_lite: _Apply1
apply_liger_kernel_to_granite: _Apply1
apply_liger_kernel_to_granitemoe: _Apply1
apply_liger_kernel_to_granitemoehybrid: _Apply1
apply_liger_kernel_to_granitemoeshared: _Apply1
apply_liger_kernel_to_helium: _Apply1
apply_liger_kernel_to_hrm_text: _Apply1
apply_liger_kernel_to_hunyuan_v1_dense: _Apply1
apply_liger_kernel_to_hunyuan_v1_moe: _Apply1
apply_liger_kernel_to_hy_v3: _Apply1
apply_liger_kernel_to_hyperclovax: _Apply1
apply_liger_kernel_to_hyperclovax_vision_v2: _Apply1
apply_liger_kernel_to_inkling2_loop_text: _Apply1
apply_liger_kernel_to_inkling_text: _Apply1
apply_liger_kernel_to_jamba: _Apply1
apply_liger_kernel_to_jetmoe: _Apply1
apply_liger_kernel_to_kimi_linear: _Apply1
apply_liger_kernel_to_kolibri1: _Apply1
apply_liger_kernel_to_laguna: _Apply1
apply_liger_kernel_to_lara_mini: _Apply1
apply_liger_kernel_to_lfm2: _Apply1
apply_liger_kernel_to_lfm2_moe: _Apply1
apply_liger_kernel_to_lfm3: _Apply1
apply_liger_kernel_to_lighton_ocr: _Apply1
apply_liger_kernel_to_llama: _Apply1
apply_liger_kernel_to_longcat_flash: _Apply1
apply_liger_kernel_to_mamba: _Apply1
apply_liger_kernel_to_mamba2: _Apply1
apply_liger_kernel_to_mellum: _Apply1
apply_liger_kernel_to_mimo_v2_flash: _Apply1
apply_liger_kernel_to_minicpm3: _Apply1
apply_liger_kernel_to_minimax: _Apply1
apply_liger_kernel_to_minimax_m2: _Apply1
apply_liger_kernel_to_ministral: _Apply1
apply_liger_kernel_to_ministral3: _Apply1
apply_liger_kernel_to_mistral: _Apply1
apply_liger_kernel_to_mistral3: _Apply1
apply_liger_kernel_to_mistral4: _Apply1
apply_liger_kernel_to_mixtral: _Apply1
apply_liger_kernel_to_olmo2: _Apply1
apply_liger_kernel_to_olmo3: _Apply1
apply_liger_kernel_to_olmo_hybrid: _Apply1
apply_liger_kernel_to_olmoe: _Apply1
apply_liger_kernel_to_phi3: _Apply1
apply_liger_kernel_to_qwen2: _Apply1
apply_liger_kernel_to_qwen2_5_vl: _Apply1
apply_liger_kernel_to_qwen2_5_vl_text: _Apply1
apply_liger_kernel_to_qwen2_moe: _Apply1
apply_liger_kernel_to_qwen3: _Apply1
apply_liger_kernel_to_qwen3_moe: _Apply1
apply_liger_kernel_to_seed_oss: _Apply1
apply_liger_kernel_to_smollm3: _Apply1
apply_liger_kernel_to_solar_open: _Apply1
apply_liger_kernel_to_xlstm: _Apply1
apply_liger_kernel_to_youtu: _Apply1
apply_liger_kernel_to_zaya: _Apply1

class _Apply2(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, relu_squared: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_arcee: _Apply2
apply_liger_kernel_to_nanochat: _Apply2
apply_liger_kernel_to_nemotron_h: _Apply2

class _Apply3(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_aria: _Apply3
apply_liger_kernel_to_aria_text: _Apply3
apply_liger_kernel_to_axk2: _Apply3
apply_liger_kernel_to_aya_vision: _Apply3
apply_liger_kernel_to_bart: _Apply3
apply_liger_kernel_to_bigbird_pegasus: _Apply3
apply_liger_kernel_to_blenderbot: _Apply3
apply_liger_kernel_to_blenderbot_small: _Apply3
apply_liger_kernel_to_bloom: _Apply3
apply_liger_kernel_to_codegen: _Apply3
apply_liger_kernel_to_cohere: _Apply3
apply_liger_kernel_to_cohere2: _Apply3
apply_liger_kernel_to_cohere2_moe: _Apply3
apply_liger_kernel_to_cohere2_vision: _Apply3
apply_liger_kernel_to_cohere_compass: _Apply3
apply_liger_kernel_to_cohere_compass_text: _Apply3
apply_liger_kernel_to_cosmos3_omni: _Apply3
apply_liger_kernel_to_cpmant: _Apply3
apply_liger_kernel_to_ctrl: _Apply3
apply_liger_kernel_to_dbrx: _Apply3
apply_liger_kernel_to_deepseek_ocr2: _Apply3
apply_liger_kernel_to_deepseek_v32: _Apply3
apply_liger_kernel_to_deepseek_vl: _Apply3
apply_liger_kernel_to_deepseek_vl_hybrid: _Apply3
apply_liger_kernel_to_dots3_note_text: _Apply3
apply_liger_kernel_to_ernie4_5_vl_moe: _Apply3
apply_liger_kernel_to_evolla: _Apply3
apply_liger_kernel_to_falcon: _Apply3
apply_liger_kernel_to_florence2: _Apply3
apply_liger_kernel_to_glm46v: _Apply3
apply_liger_kernel_to_glm5_next: _Apply3
apply_liger_kernel_to_glm_moe_dsa: _Apply3
apply_liger_kernel_to_glm_ocr: _Apply3
apply_liger_kernel_to_got_ocr2: _Apply3
apply_liger_kernel_to_gpt_sw3: _Apply3
apply_liger_kernel_to_gpt2: _Apply3
apply_liger_kernel_to_gpt_bigcode: _Apply3
apply_liger_kernel_to_gpt_neo: _Apply3
apply_liger_kernel_to_gptj: _Apply3
apply_liger_kernel_to_granite_docling: _Apply3
apply_liger_kernel_to_hunyuan_vl: _Apply3
apply_liger_kernel_to_hy_v4: _Apply3
apply_liger_kernel_to_idefics2: _Apply3
apply_liger_kernel_to_idefics3: _Apply3
apply_liger_kernel_to_inkling2: _Apply3
apply_liger_kernel_to_inkling2_loop: _Apply3
apply_liger_kernel_to_inkling2_text: _Apply3
apply_liger_kernel_to_janus: _Apply3
apply_liger_kernel_to_kimi_k25: _Apply3
apply_liger_kernel_to_kosmos_2_5: _Apply3
apply_liger_kernel_to_lfm3_vl: _Apply3
apply_liger_kernel_to_llava_next: _Apply3
apply_liger_kernel_to_llava_next_video: _Apply3
apply_liger_kernel_to_llava_onevision: _Apply3
apply_liger_kernel_to_marian: _Apply3
apply_liger_kernel_to_mbart: _Apply3
apply_liger_kernel_to_minicpm_ocr: _Apply3
apply_liger_kernel_to_minicpmv4_6: _Apply3
apply_liger_kernel_to_minicpmv4_7: _Apply3
apply_liger_kernel_to_minimax_m3_vl: _Apply3
apply_liger_kernel_to_minimax_m3_vl_text: _Apply3
apply_liger_kernel_to_mistral_large4: _Apply3
apply_liger_kernel_to_moshi: _Apply3
apply_liger_kernel_to_moss_transcribe_diarize: _Apply3
apply_liger_kernel_to_mpt: _Apply3
apply_liger_kernel_to_muse_spark: _Apply3
apply_liger_kernel_to_mvp: _Apply3
apply_liger_kernel_to_olmo: _Apply3
apply_liger_kernel_to_openai_gpt: _Apply3
apply_liger_kernel_to_opt: _Apply3
apply_liger_kernel_to_ovis2: _Apply3
apply_liger_kernel_to_paddleocr_vl: _Apply3
apply_liger_kernel_to_pegasus: _Apply3
apply_liger_kernel_to_phi4_multimodal: _Apply3
apply_liger_kernel_to_phimoe: _Apply3
apply_liger_kernel_to_plbart: _Apply3
apply_liger_kernel_to_prophetnet: _Apply3
apply_liger_kernel_to_qianfan_ocr: _Apply3
apply_liger_kernel_to_qwen2_5_omni_thinker: _Apply3
apply_liger_kernel_to_qwen3_omni_moe_thinker: _Apply3
apply_liger_kernel_to_qwen4_exp: _Apply3
apply_liger_kernel_to_qwen4_exp_text: _Apply3
apply_liger_kernel_to_reformer: _Apply3
apply_liger_kernel_to_rwkv: _Apply3
apply_liger_kernel_to_stablelm: _Apply3
apply_liger_kernel_to_step3p7: _Apply3
apply_liger_kernel_to_trocr: _Apply3
apply_liger_kernel_to_unlimited_ocr: _Apply3
apply_liger_kernel_to_video_llama_3: _Apply3
apply_liger_kernel_to_video_llava: _Apply3
apply_liger_kernel_to_vipllava: _Apply3
apply_liger_kernel_to_whisper: _Apply3
apply_liger_kernel_to_xglm: _Apply3
apply_liger_kernel_to_xlm: _Apply3
apply_liger_kernel_to_xlnet: _Apply3

class _Apply4(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, layer_norm: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_bert: _Apply4
apply_liger_kernel_to_bert_generation: _Apply4
apply_liger_kernel_to_big_bird: _Apply4
apply_liger_kernel_to_biogpt: _Apply4
apply_liger_kernel_to_blip: _Apply4
apply_liger_kernel_to_blip_2: _Apply4
apply_liger_kernel_to_camembert: _Apply4
apply_liger_kernel_to_data2vec_text: _Apply4
apply_liger_kernel_to_electra: _Apply4
apply_liger_kernel_to_ernie: _Apply4
apply_liger_kernel_to_gemma4_unified: _Apply4
apply_liger_kernel_to_gemma4_unified_text: _Apply4
apply_liger_kernel_to_git: _Apply4
apply_liger_kernel_to_gpt_neox: _Apply4
apply_liger_kernel_to_gpt_neox_japanese: _Apply4
apply_liger_kernel_to_lfm2_vl: _Apply4
apply_liger_kernel_to_megatron_bert: _Apply4
apply_liger_kernel_to_modernbert_decoder: _Apply4
apply_liger_kernel_to_phi: _Apply4
apply_liger_kernel_to_rembert: _Apply4
apply_liger_kernel_to_roberta: _Apply4
apply_liger_kernel_to_roberta_prelayernorm: _Apply4
apply_liger_kernel_to_roc_bert: _Apply4
apply_liger_kernel_to_roformer: _Apply4
apply_liger_kernel_to_starcoder2: _Apply4
apply_liger_kernel_to_t5gemma2: _Apply4
apply_liger_kernel_to_xlm_roberta: _Apply4
apply_liger_kernel_to_xlm_roberta_xl: _Apply4
apply_liger_kernel_to_xmod: _Apply4

class _Apply5(Protocol):
    def __call__(self, rope: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, layer_norm: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_blip_2_qformer: _Apply5
apply_liger_kernel_to_blip_2_vision_model: _Apply5
apply_liger_kernel_to_blip_text_model: _Apply5
apply_liger_kernel_to_blip_vision_model: _Apply5
apply_liger_kernel_to_clip_vision_model: _Apply5
apply_liger_kernel_to_cohere_compass_vision: _Apply5
apply_liger_kernel_to_cosmos3_edge_vision: _Apply5
apply_liger_kernel_to_deepseek_ocr2_sam_vision_model: _Apply5
apply_liger_kernel_to_deepseek_ocr2_vision: _Apply5
apply_liger_kernel_to_ernie4_5_vl_moe_vision: _Apply5
apply_liger_kernel_to_git_vision_model: _Apply5
apply_liger_kernel_to_got_ocr2_vision: _Apply5
apply_liger_kernel_to_granite_docling_vision: _Apply5
apply_liger_kernel_to_hunyuan_vl_vision: _Apply5
apply_liger_kernel_to_idefics2_vision: _Apply5
apply_liger_kernel_to_idefics3_vision: _Apply5
apply_liger_kernel_to_inkling2_vision: _Apply5
apply_liger_kernel_to_internvl_vision: _Apply5
apply_liger_kernel_to_janus_vision_model: _Apply5
apply_liger_kernel_to_janus_vqgan: _Apply5
apply_liger_kernel_to_kimi_k25_vision: _Apply5
apply_liger_kernel_to_llama4_vision_model: _Apply5
apply_liger_kernel_to_mimi: _Apply5
apply_liger_kernel_to_minicpm_ocr_vision: _Apply5
apply_liger_kernel_to_minicpmv4_6_vision: _Apply5
apply_liger_kernel_to_minicpmv4_7_vision: _Apply5
apply_liger_kernel_to_minimax_m3_vl_vision: _Apply5
apply_liger_kernel_to_mllama_vision_model: _Apply5
apply_liger_kernel_to_muse_glimmer_vision: _Apply5
apply_liger_kernel_to_muse_spark_audio: _Apply5
apply_liger_kernel_to_muse_spark_vision: _Apply5
apply_liger_kernel_to_paddleocr_vl_vision: _Apply5
apply_liger_kernel_to_phi4_multimodal_vision: _Apply5
apply_liger_kernel_to_qianfan_ocr_vision: _Apply5
apply_liger_kernel_to_qwen2_vl_vision: _Apply5
apply_liger_kernel_to_qwen3_5_moe_vision: _Apply5
apply_liger_kernel_to_qwen3_5_vision: _Apply5
apply_liger_kernel_to_qwen3_omni_moe_vision_encoder: _Apply5
apply_liger_kernel_to_qwen3_vl_moe_vision: _Apply5
apply_liger_kernel_to_qwen3_vl_vision: _Apply5
apply_liger_kernel_to_qwen4_exp_vision: _Apply5
apply_liger_kernel_to_radio: _Apply5
apply_liger_kernel_to_sam_vision_model: _Apply5
apply_liger_kernel_to_siglip2_vision_model: _Apply5
apply_liger_kernel_to_siglip_vision_model: _Apply5
apply_liger_kernel_to_smolvlm_vision: _Apply5
apply_liger_kernel_to_step3p5_vision: _Apply5
apply_liger_kernel_to_t5gemma2_encoder: _Apply5
apply_liger_kernel_to_unlimited_ocr_sam_vision_model: _Apply5
apply_liger_kernel_to_unlimited_ocr_vision: _Apply5
apply_liger_kernel_to_unlimited_ocr_vision_encoder: _Apply5
apply_liger_kernel_to_video_llama_3_vision: _Apply5

class _Apply6(Protocol):
    def __call__(self, rope: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_blt_global_transformer: _Apply6
apply_liger_kernel_to_blt_local_decoder: _Apply6
apply_liger_kernel_to_blt_local_encoder: _Apply6
apply_liger_kernel_to_blt_patcher: _Apply6
apply_liger_kernel_to_chameleon_vqgan: _Apply6
apply_liger_kernel_to_emu3_text_model: _Apply6
apply_liger_kernel_to_emu3_vqgan: _Apply6
apply_liger_kernel_to_exaone4_5_vision: _Apply6
apply_liger_kernel_to_moshi_depth: _Apply6
apply_liger_kernel_to_pixtral: _Apply6
apply_liger_kernel_to_qwen2_5_vl_vision: _Apply6

class _Apply7(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, relu_squared: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_cosmos3_edge: _Apply7
apply_liger_kernel_to_fuyu: _Apply7
apply_liger_kernel_to_jais2: _Apply7
apply_liger_kernel_to_persimmon: _Apply7

class _Apply8(Protocol):
    def __call__(self, rope: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, relu_squared: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_cosmos3_edge_text: _Apply8

class _Apply9(Protocol):
    def __call__(self, rope: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_deepseek_ocr2_encoder: _Apply9
apply_liger_kernel_to_deepseek_ocr2_text: _Apply9
apply_liger_kernel_to_ernie4_5_vl_moe_text: _Apply9
apply_liger_kernel_to_florence_vision: _Apply9
apply_liger_kernel_to_glm4v_moe_text: _Apply9
apply_liger_kernel_to_glm4v_moe_vision: _Apply9
apply_liger_kernel_to_glm4v_text: _Apply9
apply_liger_kernel_to_glm4v_vision: _Apply9
apply_liger_kernel_to_glm5_next_text: _Apply9
apply_liger_kernel_to_glm5_next_vision: _Apply9
apply_liger_kernel_to_glm_ocr_text: _Apply9
apply_liger_kernel_to_glm_ocr_vision: _Apply9
apply_liger_kernel_to_granite_docling_text: _Apply9
apply_liger_kernel_to_hunyuan_vl_text: _Apply9
apply_liger_kernel_to_idefics2_perceiver: _Apply9
apply_liger_kernel_to_kosmos_2_5_text_model: _Apply9
apply_liger_kernel_to_kosmos_2_5_vision_model: _Apply9
apply_liger_kernel_to_lfm3_vl_vision: _Apply9
apply_liger_kernel_to_mistral_large4_text: _Apply9
apply_liger_kernel_to_moss_transcribe_diarize_audio: _Apply9
apply_liger_kernel_to_muse_glimmer_text: _Apply9
apply_liger_kernel_to_muse_spark_text: _Apply9
apply_liger_kernel_to_ovis2_vision: _Apply9
apply_liger_kernel_to_paddleocr_vl_text: _Apply9
apply_liger_kernel_to_phi4_multimodal_audio: _Apply9
apply_liger_kernel_to_qwen2_5_omni_audio_encoder: _Apply9
apply_liger_kernel_to_qwen2_5_omni_text: _Apply9
apply_liger_kernel_to_qwen2_5_omni_vision_encoder: _Apply9
apply_liger_kernel_to_qwen3_omni_moe_audio_encoder: _Apply9
apply_liger_kernel_to_qwen3_omni_moe_text: _Apply9
apply_liger_kernel_to_step3p5: _Apply9
apply_liger_kernel_to_unlimited_ocr_text: _Apply9

class _Apply10(Protocol):
    def __call__(self, rope: bool | None = False, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_deepseek_v2: _Apply10
apply_liger_kernel_to_deepseek_v3: _Apply10
apply_liger_kernel_to_deepseek_v4: _Apply10
apply_liger_kernel_to_glm4: _Apply10
apply_liger_kernel_to_qwen3_next: _Apply10

class _Apply11(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_gemma: _Apply11
apply_liger_kernel_to_gemma2: _Apply11
apply_liger_kernel_to_gemma3_text: _Apply11
apply_liger_kernel_to_gemma3n_text: _Apply11
apply_liger_kernel_to_recurrent_gemma: _Apply11
apply_liger_kernel_to_vaultgemma: _Apply11
apply_liger_kernel_to_zamba: _Apply11
apply_liger_kernel_to_zamba2: _Apply11

class _Apply12(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, layer_norm: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_gemma3: _Apply12
apply_liger_kernel_to_paligemma: _Apply12

class _Apply13(Protocol):
    def __call__(self, rope: bool | None = False, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, layer_norm: bool | None = False, rms_norm: bool | None = True, geglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_gemma4: _Apply13

class _Apply14(Protocol):
    def __call__(self, rope: bool | None = False, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, model: nn.Module | None = None, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_gemma4_text: _Apply14

class _Apply15(Protocol):
    def __call__(self, rope: bool | None = False, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_glm4v: _Apply15
apply_liger_kernel_to_glm4v_moe: _Apply15
apply_liger_kernel_to_qwen3_5: _Apply15
apply_liger_kernel_to_qwen3_5_moe: _Apply15
apply_liger_kernel_to_qwen3_5_moe_text: _Apply15
apply_liger_kernel_to_qwen3_5_text: _Apply15

class _Apply16(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, attention: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_gpt_oss: _Apply16
apply_liger_kernel_to_granite_swa: _Apply16
apply_liger_kernel_to_granitemoe_swa: _Apply16

class _Apply17(Protocol):
    def __call__(self, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, layer_norm: bool | None = True, model: nn.Module | None = None, rope: bool | None = True, swiglu: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_internvl: _Apply17
apply_liger_kernel_to_smolvlm: _Apply17

class _Apply18(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_llama4: _Apply18
apply_liger_kernel_to_llama4_text: _Apply18
apply_liger_kernel_to_qwen3_vl_moe: _Apply18
apply_liger_kernel_to_qwen3_vl_moe_text: _Apply18

class _Apply19(Protocol):
    def __call__(self, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, model: nn.Module | None = None, rope: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_llava: _Apply19

class _Apply20(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, layer_norm: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_mllama: _Apply20
apply_liger_kernel_to_mllama_text_model: _Apply20
apply_liger_kernel_to_muse_glimmer: _Apply20

class _Apply21(Protocol):
    def __call__(self, relu_squared: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, model: nn.Module | None = None, rope: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = True, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_nemotron: _Apply21

class _Apply22(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, layer_norm: bool | None = True, relu_squared: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_nemotron_h_omni: _Apply22

class _Apply23(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, layer_norm: bool | None = True, swiglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_qwen2_vl: _Apply23
apply_liger_kernel_to_qwen2_vl_text: _Apply23

class _Apply24(Protocol):
    def __call__(self, rope: bool | None = True, cross_entropy: bool | None = False, fused_linear_cross_entropy: bool | None = True, rms_norm: bool | None = True, swiglu: bool | None = False, model: nn.Module | None = None, layer_norm: bool | None = True, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_qwen3_vl: _Apply24
apply_liger_kernel_to_qwen3_vl_text: _Apply24

class _Apply25(Protocol):
    def __call__(self, rope: bool | None = True, rms_norm: bool | None = True, geglu: bool | None = True, model: nn.Module | None = None, *, head_memory: str | int = 'auto', rematerialise: bool | str = True, fused_logprobs: bool = True, recurrent: bool = True, projections: bool = True, fp8: bool | str = False, fp8_filter: Filter | None = None, fp8_head: bool = False, activation_offloading: bool = False, keep_attention: bool = False, tiled_mlp: bool | int = False, unpad: bool = False, batch_invariant: bool = False, graphs: bool | str = False) -> None: ...

apply_liger_kernel_to_t5gemma2_decoder: _Apply25
apply_liger_kernel_to_t5gemma2_text: _Apply25
