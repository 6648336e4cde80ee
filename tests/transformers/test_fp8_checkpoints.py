"""Adapters on checkpoints in FP8 with scales of blocks, beside the same models with decoded weights.
Transformers loads such folders; only its wish for a GPU is switched off."""

import copy

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

import transformers
from adapters import BATCH, EVERY, learnt, nodes_run, over_storage, patch
from fp8_checkpoints import publish, stays_in_fp8
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from watching import noted

from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.projections import mxfp4
from liger_kernel.transformers import projections_report, restore
from liger_kernel.transformers.recognise import experts, projections, storages

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
ONLY_ATTENTION = EVERY[:4]
BLOCKS = 8, 24  # the tiny weights have no multiples of 24 columns


def published(model_type: str, path) -> nn.Module:
    return publish(make(model_type, torch.float32, num_hidden_layers=1).cpu(), path, BLOCKS).to(DEVICE)


@pytest.fixture
def load(monkeypatch):
    stays_in_fp8(monkeypatch)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return lambda path: load(path, dtype=torch.float32, device_map=DEVICE)


def test_adapters_learn_as_over_the_decoded_weights(tmp_path, load, monkeypatch):
    """All layers adapted, before or after the patch, or some; also without adapters, as DPO's reference."""
    dense = published("llama", tmp_path)
    stored, ran = load(tmp_path), nodes_run(monkeypatch)
    for targets in (EVERY, ["q_proj", "down_proj"]):
        truth = learnt(over_storage(copy.deepcopy(dense), target_modules=targets))
        for model in (
            patch(over_storage(copy.deepcopy(stored), target_modules=targets)),
            over_storage(patch(copy.deepcopy(stored)), target_modules=targets),
        ):
            ran.clear()
            assert_same_learning(learnt(model), truth, 1e-5)
            assert ran == [3, 1, 3]
            report = projections_report(model)
            assert len(report.layers) == 7 and not report.stock
            assert "FP8 in blocks of 8 x 24, 0.0 MB, decoded for each product" in str(report)
    with torch.no_grad(), model.disable_adapter():
        batch = tokens(batch=3, length=30)
        assert len(ran) == 3 and torch.allclose(model(**batch).loss, dense(**batch).loss, rtol=1e-5)
        assert len(ran) == 6
    names = {n for n, m in model.named_modules() if type(m) is fp8.FP8Linear}
    restore(model)
    assert names == {n for n, m in model.named_modules() if type(m) is fp8.FP8Linear} and len(names) == 7
    ran.clear()
    with pytest.raises(ImportError, match="finegrained-fp8"):  # the kernels of stock are not installed
        step(model, tokens(**BATCH))
    assert not ran


def test_frozen_layers_keep_no_input(tmp_path, load):
    """Without adapters nobody reads x again in the backward."""
    published("llama", tmp_path)
    kept: list[torch.Size] = []
    q_proj = load(tmp_path).model.layers[0].self_attn.q_proj
    x = torch.randn(80, q_proj.in_features, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        projections.linear(q_proj, x).sum().backward()
    assert not kept
    w = projections.projection(q_proj, torch.float32).weight.dense(torch.float32)
    torch.testing.assert_close(x.grad, w.sum(0).expand_as(x))


def inside_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, fp8.FP8Experts))


@pytest.mark.parametrize("adapters", ["attention", "experts"])
def test_experts(adapters, tmp_path, load, monkeypatch):
    """Frozen, as what is below them learns; or with adapters, which PEFT would add to the numbers in FP8."""
    dense = published("qwen3_moe", tmp_path)
    how = dict(target_modules=ONLY_ATTENTION)
    if adapters == "experts":
        how |= dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    ran = noted(monkeypatch, experts, "adapted_moe", lambda *_, **__: "adapted_moe")
    truth = learnt(over_storage(dense, **how))
    model = patch(over_storage(load(tmp_path), **how))
    assert_same_learning(learnt(model), truth, 1e-5)
    monkeypatch.setattr(mxfp4, "PART", 2 * inside_of(model).down_proj[0].numel() * 4)  # two experts at a time
    assert_same_learning(learnt(model), truth, 1e-5)
    report = projections_report(model)
    assert ran == ["adapted_moe"] * 2 and not report.stock, report
    if adapters == "attention":
        layer = next(layer for layer in report.layers if layer.name.endswith(".experts"))
        assert layer.reason == "FP8 in blocks of 8 x 24, 0.0 MB, decoded for each product"
    inside_of(model).down_proj_scale_inv.data[1, 0, 0] = float("nan")
    with pytest.raises(
        ValueError, match=r"\.experts.*: down_proj_scale_inv must be finite and at least 0, got 1 other"
    ):
        patch(model)


def test_scales_that_cannot_be_right(tmp_path, load):
    published("llama", tmp_path)
    model = load(tmp_path)
    wrong = model.model.layers[0].mlp.up_proj
    scale = wrong.weight_scale_inv.data
    for value, message in (
        (scale.t(), r"up_proj: FP8Linear.weight_scale_inv: .* must have shape .* in blocks of 8 x 24"),
        (-scale, "up_proj: weight_scale_inv must be finite and at least 0, got .* other values"),
        (scale.to(torch.uint8), "up_proj: .* must be floating point, got torch.uint8"),
    ):
        wrong.weight_scale_inv = nn.Parameter(value, requires_grad=False)
        for call in (patch, projections_report):
            with pytest.raises(ValueError, match=rf"^model.layers.0.mlp.{message}"):
                call(model)


def test_products_are_chosen(monkeypatch):
    layer = fp8.FP8Linear(256, 128, block_size=(128, 128))
    layer.weight_scale_inv.data.fill_(1)
    said = lambda dtype=torch.bfloat16: projections.projection(layer, dtype).weight.products
    assert said() == "decoded for each product" or DEVICE == "cuda"
    monkeypatch.setattr(storages, "multiplies", lambda device: True)
    assert said(torch.float16) == "decoded for each product"
    for how, words in (("forward", "FP8, in the backward decoded"), ("decoded", "each product"), ("fp8", "in FP8")):
        monkeypatch.setenv("LIGER_FP8_BLOCKS", how)
        assert said().endswith(words)
    found = projections.projection(layer, torch.bfloat16).weight
    assert projections.projection(layer, torch.bfloat16).weight.forth is found.forth  # made once
    before = found.forth.clone(), found.back.clone()
    with torch.no_grad():
        layer.weight_scale_inv.mul_(2)
    again = projections.projection(layer, torch.bfloat16).weight
    assert torch.equal(again.forth, 2 * before[0]) and torch.equal(again.back, 2 * before[1])
    layer.activation_scale = nn.Parameter(torch.ones(()))
    assert said() == "decoded for each product"
    monkeypatch.setenv("LIGER_FP8_BLOCKS", "bf16")
    with pytest.raises(ValueError, match="LIGER_FP8_BLOCKS must be one of fp8, forward, decoded, got 'bf16'"):
        said()


def test_scales_are_read_at_each_call(monkeypatch):
    monkeypatch.setattr(storages, "multiplies", lambda device: True)
    lora = over_storage(
        nn.Sequential(fp8.FP8Linear(256, 128, block_size=(128, 128))), target_modules=["0"]
    ).base_model.model[0]
    layer = lora.base_layer
    layer.weight_scale_inv.data.fill_(1)
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    itself = lambda found, x: found
    read = lambda: projections.kept(itself, x, [lora])[0].weight
    first = read().forth.clone()
    with torch.no_grad():
        layer.weight_scale_inv.mul_(2)
    assert torch.equal(read().forth, 2 * first)
    monkeypatch.setenv("LIGER_FP8_BLOCKS", "decoded")
    assert read().products == "decoded for each product"


def test_what_stays_stock():
    layer = fp8.FP8Linear(32, 32, block_size=(16, 16))
    layer.weight_scale_inv.data.fill_(1)
    assert isinstance(projections.projection(layer, torch.bfloat16), projections.Projection)
    layer.register_forward_hook(lambda *_: None)
    assert projections.projection(layer, torch.bfloat16) == "a base in FP8 that is sharded, hooked or made dense"
    lora = over_storage(nn.Sequential(fp8.FP8Linear(32, 32, block_size=(16, 16)))[0:1], target_modules=["0"])
    lora.base_model.model[0].lora_variant["default"] = None
    reason = projections.projection(lora.base_model.model[0], torch.bfloat16)
    assert reason == "a magnitude over a base in FP8 blocks, or packed"
