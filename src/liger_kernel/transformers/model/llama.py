"""The ``forward`` that patched models have, as a function to assign to a class or bind to a model."""

from transformers.models.llama.modeling_llama import LlamaForCausalLM

from liger_kernel.transformers.patch import stock_with_fused_head

lce_forward = stock_with_fused_head(LlamaForCausalLM)
