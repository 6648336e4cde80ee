"""Training steps that are replayed over quantised weights, and in FP8: the same losses and gradients as those of
steps that run, while the trained weights change. bitsandbytes is not needed: a class in its module stands in."""

import copy
import sys
import types
from types import SimpleNamespace

import peft
import pytest
import torch
from fp8_checkpoints import stored_in_blocks
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from repeated import Repeated
from torch import nn
from transformers.integrations import finegrained_fp8

from liger_kernel.graphs import micro_steps
from liger_kernel.ops._core import operator
from liger_kernel.ops.projections import float8
from liger_kernel.transformers import _apply_liger_kernel_to_instance, fp8, projections_report

pytestmark = pytest.mark.skipif(not operator._KERNEL_DEVICES, reason="Triton is not installed")
CODE = torch.linspace(-1, 1, 16)  # any sixteen numbers


@pytest.fixture(autouse=True)
def here(monkeypatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(micro_steps, "recorder_of", lambda device: Repeated())
    monkeypatch.setattr(fp8, "SMALL", 0)


def linear4bit(monkeypatch) -> type:
    home = types.ModuleType("bitsandbytes.nn.modules")
    lines = "class Linear4bit(torch.nn.Linear):", "    def forward(self, x):", "        raise NotImplementedError"
    exec("\n".join(("import torch", *lines)), home.__dict__)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home.Linear4bit


def stored(m: nn.Linear, kind: str, cls: type) -> nn.Linear:
    N, K = m.weight.shape
    if kind == "fp8 in blocks":
        new = cls(K, N, block_size=(16, 16))
        q, scale = stored_in_blocks(m.weight.detach().cpu(), (16, 16))
        new.weight, new.weight_scale_inv = (nn.Parameter(t, requires_grad=False) for t in (q, scale))
        new.bias = None
        return new.to(DEVICE)
    new = cls(K, N, bias=False)
    packed = torch.randint(0, 256, (N * K // 2, 1), dtype=torch.uint8)
    new.weight, new.compute_dtype = nn.Parameter(packed.to(DEVICE), requires_grad=False), torch.float32
    how = dict(shape=m.weight.shape, blocksize=64, dtype=torch.float32, state2=None, offset=None)
    new.weight.quant_state = SimpleNamespace(
        absmax=torch.rand(N * K // 64, device=DEVICE) / 10, code=CODE.to(DEVICE), **how
    )
    return new


@pytest.mark.parametrize("kind", ["nf4", "fp8 in blocks", "tensorwise", "rowwise"])
def test_steps_are_those_that_run(kind, monkeypatch):
    if kind in ("tensorwise", "rowwise") and (why := float8.lacking(torch.device(DEVICE))):
        pytest.skip(why)
    base = make("llama", num_hidden_layers=1, attention="sdpa")
    if kind in ("nf4", "fp8 in blocks"):
        cls = linear4bit(monkeypatch) if kind == "nf4" else finegrained_fp8.FP8Linear
        base = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4))
        for m in [m for m in base.modules() if hasattr(m, "lora_A")]:
            m.base_layer = stored(m.base_layer, kind, cls)
            nn.init.normal_(m.lora_B["default"].weight, std=0.1)
    flags = {"fp8": kind} if kind in ("tensorwise", "rowwise") else {}
    stock, model = base, copy.deepcopy(base)
    if kind == "nf4":
        for a, b in zip(stock.modules(), model.modules(), strict=True):
            if type(a) is cls:
                b.weight.quant_state = a.weight.quant_state
    for m, on in ((stock, False), (model, True)):
        _apply_liger_kernel_to_instance(m.train(), graphs=on, **flags)
    assert {layer.name for layer in projections_report(model).stock} <= {"lm_head"}
    for seed in range(4):
        batch = tokens(batch=1, length=64, seed=seed)
        found, want = (step(m, batch)[1] for m in (model, stock))
        assert_same_learning(found, want, 1e-5)
        with torch.no_grad():
            for m in (model, stock):
                for p in m.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    (graphs,) = (vars(m)[micro_steps.KEY] for m in model.modules() if micro_steps.KEY in vars(m))
    assert graphs.replays == 3 and not graphs.reasons
