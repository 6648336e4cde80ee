"""What tests of PEFT's adapters share: which nodes of the engine ran, adapters that do
something, and the gradients that a trainer's optimizer gets."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from liger_kernel.transformers.recognise import mlps, projections

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def nodes_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each node of the engine had, from now on."""
    found: list[int] = []

    def counted(function, layers):
        return lambda *args, **options: found.append(layers(*args)) or function(*args, **options)

    monkeypatch.setattr(projections, "linears", counted(projections.linears, lambda x, p: len(p)))
    monkeypatch.setattr(mlps, "adapted_mlp", counted(mlps.adapted_mlp, lambda x, first, down: len(first) + 1))
    return found


def drawn(model: nn.Module) -> nn.Module:
    """``model`` with adapters that do something: B's and biases are zero at first."""
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator).to(p) / 3
    return model


class Gradients(transformers.TrainerCallback):
    """``found``: gradients of every step of a trainer's optimizer."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found |= {
            f"{state.global_step}: {n}": p.grad.detach().float().clone()
            for n, p in model.named_parameters()
            if p.grad is not None
        }


def assert_rounds_as(ours: dict[str, Tensor], stock: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """All gradients together are at most twice as far from the truth as stock's. (For one of a
    tiny model, how it rounds is luck.)"""
    assert ours.keys() == stock.keys() == truth.keys()
    distance = lambda found: sum(((found[n] - t).norm() / t.norm()).square().item() for n, t in truth.items()) ** 0.5
    assert 0 < distance(ours) <= 2 * distance(stock), f"{distance(ours):.1e}, stock {distance(stock):.1e}"
