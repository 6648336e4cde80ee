"""Outputs of patched models: those of transformers, with the fields ``token_accuracy`` and ``predicted_tokens``."""

from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from liger_kernel.transformers.deferred import output_class

LigerCausalLMOutputWithPast = output_class(CausalLMOutputWithPast)
LigerMoeCausalLMOutputWithPast = output_class(MoeCausalLMOutputWithPast)
