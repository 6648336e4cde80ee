"""Hugging Face's kernels: our layers from the local repository that comes with the package, for
any model whose layers are marked."""

import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel import hub

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(config).to(device).train()

mode = Mode.TRAINING | Mode.TORCH_COMPILE
layers = {"RMSNorm": "LigerRMSNorm", "rotary_pos_emb": "LigerRotaryPosEmb"}
mapping = {name: {device: {mode: LocalLayerRepository(hub.PATH, layer_name=layer)}} for name, layer in layers.items()}
with use_kernel_mapping(mapping, inherit_mapping=False):
    model = kernelize(model, mode=mode, device=device)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, 512, (4, 64), device=device)
for step in range(6):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
