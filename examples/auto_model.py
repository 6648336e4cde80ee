"""Door 1: load a model with kernels in place. A tiny random Llama stands in for a checkpoint;
give a path or a hub id to use yours."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel.transformers import AutoLigerKernelForCausalLM


def tiny_checkpoint(folder: str) -> str:
    sizes = dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


with tempfile.TemporaryDirectory() as folder:
    path = sys.argv[1] if len(sys.argv) > 1 else tiny_checkpoint(folder)
    # flags of apply_liger_kernel_to_llama are taken out of the keywords; all others go to
    # transformers
    model = AutoLigerKernelForCausalLM.from_pretrained(path, dtype=torch.float32, rope=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, model.config.vocab_size, (4, 64), device=device)
for step in range(10):
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {out.loss.item():.4f}, logits {out.logits}")
