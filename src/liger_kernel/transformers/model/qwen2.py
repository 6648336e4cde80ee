"""The ``forward`` that patched models have, as a function to assign to a class or bind to a model."""

from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from liger_kernel.transformers.patch import stock_with_fused_head

lce_forward = stock_with_fused_head(Qwen2ForCausalLM)
lce_forward_deprecated = lce_forward
