"""The ``forward`` that patched models have, as a function to assign to a class or bind to a model."""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from liger_kernel.transformers.patch import stock_with_fused_head

lce_forward = stock_with_fused_head(Qwen3_5MoeForCausalLM)
lce_forward_conditional_generation = stock_with_fused_head(Qwen3_5MoeForConditionalGeneration)
