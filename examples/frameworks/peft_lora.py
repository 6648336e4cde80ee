"""PEFT's adapters on a patched model: patch before `get_peft_model` or after it, nothing else
changes. What is saved loads without us."""

import tempfile

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel.transformers import apply_liger_kernel_to_llama

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
ids = torch.randint(0, config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(1)).to(device)


def train(first: str) -> peft.PeftModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device).train()
    if first == "patch":
        apply_liger_kernel_to_llama(model=model)
    adapted = peft.get_peft_model(model, lora)
    if first == "PEFT":
        apply_liger_kernel_to_llama(model=adapted.get_base_model())
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{first} first: loss {loss.item():.4f}")
    return adapted


for first in ("PEFT", "patch"):
    adapted = train(first)

with tempfile.TemporaryDirectory() as folder:
    adapted.save_pretrained(folder)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM(config).to(device), folder)
with torch.no_grad():
    difference = (again.eval()(input_ids=ids).logits - adapted.eval()(input_ids=ids).logits).abs().max()
print(f"read back, without kernels: logits differ by {difference.item():.1e} at most")
