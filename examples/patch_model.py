"""Door 2: patch a family's classes, or one model that exists, and give everything back."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel.transformers import apply_liger_kernel_to_llama, restore

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, other = LlamaForCausalLM(config).to(device).train(), LlamaForCausalLM(config).to(device).train()
ids = torch.randint(0, config.vocab_size, (4, 64), device=device)


def show(title: str) -> None:
    left_out = ["left out" if m(input_ids=ids, labels=ids).logits is None else "computed" for m in (model, other)]
    print(
        f"{title:<24} logits: {left_out[0]} by one model, {left_out[1]} by the other; loss "
        f"{model(input_ids=ids, labels=ids).loss.item():.4f}"
    )


show("as transformers ships it")
apply_liger_kernel_to_llama(model=model)  # this model alone
show("one model patched")
restore(model)
apply_liger_kernel_to_llama(rope=False)  # the classes: every Llama, made before or after, without our rotary embedding
show("the family patched")
restore()
show("restored")
