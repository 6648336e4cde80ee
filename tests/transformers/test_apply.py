"""``liger_kernel.apply``: one line for any model, and what it says about it."""

import copy
import logging
import sys

import pytest
import torch
import transformers
from hf_models import DEVICE, make
from torch import nn
from watching import noted

import liger_kernel
import liger_kernel.transformers as liger


class Norm(nn.Module):
    """As remote code writes Llama's, under another name."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Sometimes(Norm):
    """It may do something else, which no comparison shows."""

    def forward(self, x):
        return super().forward(x) * getattr(self, "scale", 1.0)


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ShiftedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + 0.1)


class Remote(transformers.PreTrainedModel):
    class config_class(transformers.PretrainedConfig):
        model_type = "remote"

    def __init__(self, config, *parts):
        super().__init__(config)
        self.parts = nn.Sequential(*parts)
        self.post_init()

    def forward(self, x):
        return self.parts(x)


def remote(*kinds) -> Remote:
    torch.manual_seed(0)
    return Remote(Remote.config_class(), *(kind(16) for kind in kinds)).to(DEVICE)


def learned(model: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 96, device=DEVICE).view(2, 3, 16).requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def test_a_model_of_remote_code():
    model = remote(Norm, MLP, nn.LayerNorm, ShiftedMLP, Sometimes)
    stock = copy.deepcopy(model)
    report = liger_kernel.apply(model)
    assert report.patched == ("1 x Norm (rms_norm)", "1 x MLP (glu)", "1 x LayerNorm (layer_norm)")
    assert report.line == "liger_kernel: 1 RMSNorm, 1 LayerNorm, 1 MLP"
    assert report.stock[:2] == ("ShiftedMLP: no variant computes the same", "Sometimes: its code uses getattr")
    assert "'remote'" in report.stock[2]
    for ours, theirs in zip(learned(model), learned(stock)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert liger_kernel.apply(model) == liger.patches_report(model) == report
    liger.restore(model)
    assert type(model.parts[0]) is Norm
    off = liger_kernel.apply(model, swiglu=False)
    assert off.line == "liger_kernel: 1 RMSNorm, 1 LayerNorm" and "1 x MLP (glu): swiglu is off, as asked" in off.stock


def test_nothing_to_patch_is_said():
    with pytest.warns(UserWarning, match="Sequential: liger_kernel has no kernels for this type of model"):
        report = liger_kernel.apply(nn.Sequential(nn.Linear(4, 4)))
    assert report.line == "liger_kernel: nothing of this model is patched" and not report.patched
    assert report.stock[0] == "no norm, gated MLP or experts were found among its modules"


@pytest.mark.parametrize(
    ("model_type", "line"),
    [
        ("llama", "5 RMSNorm, 2 MLP, rope, head and loss"),
        ("bert", "5 LayerNorm"),
        ("vit", "5 LayerNorm"),
        ("qwen3_moe", "9 RMSNorm, 2 experts, rope, head and loss"),
        ("mine", "5 RMSNorm, 2 MLP, rope, head and loss"),  # derived from Llama
    ],
)
def test_models_of_transformers(model_type, line):
    model = built(model_type)
    assert liger_kernel.apply(model).line == f"liger_kernel: {line}"
    assert "RMSNorm" not in liger_kernel.apply(built(model_type), rms_norm=False).line


def built(model_type: str) -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    if model_type in ("bert", "vit"):
        auto = {"bert": transformers.AutoModel, "vit": transformers.AutoModelForImageClassification}[model_type]
        more = {"bert": dict(vocab_size=64), "vit": dict(image_size=8, patch_size=4)}[model_type]
        return auto.from_config(transformers.AutoConfig.for_model(model_type, **sizes, **more))
    model = make("llama" if model_type == "mine" else model_type, num_hidden_layers=2)
    model.config.model_type = model_type
    return model


def test_norms_of_ones_own_in_a_family():
    """A subclass counts once; another name is recognised, another function is not."""
    model = make("llama", num_hidden_layers=1)
    layer = model.model.layers[0]
    same = type("MyNorm", (type(model.model.norm),), {})
    width = model.config.hidden_size
    layer.input_layernorm, layer.post_attention_layernorm = same(width), Norm(width)
    model.model.norm = type("Doubled", (Norm,), {"forward": lambda self, x: 2 * Norm.forward(self, x)})(width)
    report = liger_kernel.apply(model.to(DEVICE))
    assert report.line == "liger_kernel: 2 RMSNorm, 1 MLP, rope, head and loss"
    assert "1 x MyNorm (rms_norm)" in report.patched and "1 x Norm (rms_norm)" in report.patched


def test_classes_that_are_patched_are_reported():
    liger.apply_liger_kernel_to_llama()
    assert liger.patches_report(built("llama")).line == "liger_kernel: 5 RMSNorm, 2 MLP, rope, head and loss"


def test_the_trainers_entry_logs_one_line(caplog):
    model = remote(Norm, MLP)
    with caplog.at_level(logging.INFO, "liger_kernel"):
        assert liger._apply_liger_kernel_to_instance(model) is None
        liger._apply_liger_kernel_to_instance(model)
    assert caplog.messages == ["liger_kernel: 1 RMSNorm, 1 MLP"]


@pytest.mark.parametrize(
    ("model", "flags", "text"),
    [
        ("meta-llama/Llama-3.2-1B", {}, "model must be a model that is built"),
        (nn.Linear(2, 2), dict(rop=False), r"unexpected keyword argument 'rop'; did you mean rope\?"),
        (nn.Linear(2, 2), dict(rope="no"), "rope must be True or False"),
    ],
)
def test_mistakes(model, flags, text):
    with pytest.raises(TypeError, match=text):
        liger_kernel.apply(model, **flags)


@pytest.mark.parametrize(("rows", "grad", "ours"), [(64, False, False), (65, False, True), (4, True, True)])
def test_a_step_of_generation_runs_stock_modules(monkeypatch, rows, grad, ours):
    model, ran = make("qwen3"), []
    liger._apply_liger_kernel_to_instance(model)
    for module, names in (
        ("recognise.norms", ["rms_norm"]),
        ("recognise.ropes", ["rope"]),
        ("recognise.mlps", ["glu", "mlp"]),
        ("rewrite.joined_steps", ["apply_of", "qk_norm_rope"]),
    ):
        for name in names:
            place = sys.modules[f"liger_kernel.transformers.{module}"]
            noted(monkeypatch, place, name, lambda *_, name=name, **__: name, ran)
    with torch.set_grad_enabled(grad):
        model(input_ids=torch.ones(rows, 1, dtype=torch.long, device=DEVICE), use_cache=False)
    assert bool(ran) == ours, ran
