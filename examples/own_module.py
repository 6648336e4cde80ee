"""Door 3: modules and functions in a model of your own, without transformers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from liger_kernel.nn import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = LigerRMSNorm(width), LigerRMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = LigerSwiGLUMLP(SimpleNamespace(hidden_size=width, intermediate_size=2 * width, hidden_act="silu"))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.loss = LigerRMSNorm(width), LigerFusedLinearCrossEntropyLoss()
        self.register_buffer("frequencies", 10000.0 ** -torch.linspace(0, 1, width // heads // 2))

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1], device=ids.device)[None, :, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        x = self.norm(x)[:, :-1]
        return self.loss(self.head.weight, x.flatten(0, 1), ids[:, 1:].flatten())  # the logits never exist


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, 512, (4, 64), device=device)
for step in range(10):
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
