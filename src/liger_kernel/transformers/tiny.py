"""A tiny random model of any family, for tests and for the table of families; its scales and caps are not 1."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 257

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, moe_shared_expert_intermediate_size=32, shared_intermediate_size=32,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=96, d_model=64, n_layers=2, n_heads=4, ffn_dim=96, ffn_hidden_size=96, word_embed_proj_dim=64,
    mamba_d_state=8, mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128, mamba_n_groups=1, state_size=8, sliding_window=8,
    query_pre_attn_scalar=16, rotary_dim=8,
)  # fmt: skip

# Multipliers that are 1, or None, by default in at least one family
SCALES: dict[str, Any] = dict(
    logits_scaling=3.0, logit_scale=0.25, lm_head_multiplier=0.5, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3,
    final_logit_softcapping=1.5, attn_logit_softcapping=5.0,
)  # fmt: skip


# Sizes to set even where the default is None, which then means that they follow from others
ALWAYS = {"num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "eos_token_id"}


def tiny_config(model_type: str, **more: Any) -> PretrainedConfig:
    """A configuration of a few thousand parameters, with the sizes this type knows."""
    cls = CONFIG_MAPPING[model_type]
    default = cls()
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", {})) | {k for k in SIZES if hasattr(default, k)}
    values = {k: v for k, v in (SIZES | SCALES).items() if k in known and (k in ALWAYS or getattr(default, k, None) is not None)}
    if "qk_rope_head_dim" in known:  # latent attention: head_dim is that
        values.pop("head_dim", None)
        values["num_key_value_heads"] = values["num_attention_heads"]
    return cls(**values | more)


def tiny_model(model_type: str, *, attention: str = "eager", **more: Any) -> PreTrainedModel:
    """A causal language model of ``tiny_config``, in training mode, in fp32 and without dropout."""
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **more), attn_implementation=attention).float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
