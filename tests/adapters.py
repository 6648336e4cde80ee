"""What tests of PEFT's adapters share: which nodes of the engine ran, adapters that do
something, comparisons with PEFT's own code, and the gradients that a trainer's optimizer gets."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hf_models import DEVICE, assert_same_learning, checkpointed, step, tokens
from torch import Tensor, nn
from watching import noted

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.recognise import mlps, projections

# what else is ours is tested elsewhere
ONLY = dict(rope=False, rms_norm=False, fused_linear_cross_entropy=False, rematerialise=False)
BATCH = dict(batch=1, length=6, ignored=2)
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def nodes_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each node of the engine had, from now on."""
    found = noted(monkeypatch, projections, "linears", lambda x, p, **_: len(getattr(p, "projections", p)))
    return noted(monkeypatch, mlps, "adapted_mlp", lambda x, first, down, **_: len(first.projections) + 1, found)


def drawn(model: nn.Module) -> nn.Module:
    """``model`` with adapters that do something: B's and biases are zero at first."""
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator).to(p) / 3
    return model


def lora(model: nn.Module, *names: str, **options: Any) -> Any:
    """PEFT's wrapper around ``model``, with an adapter of each name that does something from the
    first step on."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    first, *others = names or ("default",)
    config = peft.LoraConfig(**dict(r=4, target_modules=EVERY, init_lora_weights=False) | options)
    found = peft.get_peft_model(model, config, adapter_name=first)
    for name in others:
        found.add_adapter(name, config)
    return found


def over_storage(model: nn.Module, **options: Any) -> Any:
    """``lora`` over weights that are no floats, in whose dtype PEFT would draw."""
    found = drawn(lora(model, **options))
    for name, p in found.named_parameters():
        if "lora_A" in name:
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(6)).to(p) / 8
    return found


def learnt(model: nn.Module) -> dict[str, Tensor]:
    return step(model, tokens(**BATCH))[1]


def patch(model: nn.Module, **flags: Any) -> nn.Module:
    _apply_liger_kernel_to_instance(model, **ONLY | flags)
    return model


def assert_same(model: nn.Module, tolerance: float = 1e-5, **flags: Any) -> nn.Module:
    """``model`` learns by the engine what it learns by PEFT. Returns it, patched."""
    expected = learnt(model)
    assert_same_learning(learnt(patch(model, **flags)), expected, tolerance)
    return model


def assert_alike(twins: tuple[nn.Module, nn.Module], ran: list, nodes: list, change: Any = None) -> None:
    """``change`` of a patched and a stock model, and the same learning after it, by these nodes."""
    learned = []
    for model in twins:
        with (change(model) if change else None) or contextlib.nullcontext():
            ran.clear()
            learned.append(learnt(model))
            assert ran == (nodes if model is twins[0] else [])
    assert_same_learning(*learned, 1e-5)


@contextlib.contextmanager
def disabled(twins: tuple[nn.Module, nn.Module]) -> Iterator[None]:
    """Without adapters, where the head learns."""
    with contextlib.ExitStack() as stack:
        for model in twins:
            stack.enter_context(model.disable_adapter())
            model.get_base_model().lm_head.requires_grad_(True)
        yield
    for model in twins:
        model.get_base_model().lm_head.requires_grad_(False)


def recomputed(model: nn.Module, reentrant: bool) -> nn.Module:
    """``model`` with checkpointed layers, of which the first needs an input with a gradient."""
    checkpointed(model, reentrant).enable_input_require_grads()
    return model


def assert_as_near_as_stock(model: nn.Module, thin: torch.dtype, autocast: bool) -> None:
    """In 16 bits, with adapters in ``thin``: at most twice as far from the truth, in fp64."""
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(thin)
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped products have no fp64
    truth = learnt(exact)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        stock, found = learnt(model), learnt(patch(model))
    for name, t in truth.items():
        assert found[name].dtype == stock[name].dtype
        error, theirs = ((g.double() - t).norm() / t.norm() for g in (found[name], stock[name]))
        assert error <= 2 * theirs + 2**-8, f"{name}: {error:.1e}, stock {theirs:.1e}"


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
