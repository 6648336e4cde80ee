"""Adapters on layers in packed integers and NVFP4, beside the same models with decoded weights."""

import copy

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")

from adapters import BATCH, drawn, learnt, nodes_run, over_storage, patch
from hf_models import DEVICE, assert_same_learning, make, tokens
from packed_checkpoints import by_columns, compressed
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear

from liger_kernel.ops._core import operator as _op
from liger_kernel.train import adapters
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.transformers import projections_report, restore
from liger_kernel.transformers.recognise import projections
from liger_kernel.transformers.recognise.storages import is_compressed

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """A Llama of compressed-tensors, and the same with decoded weights."""
    dense = make("llama", torch.float32, num_hidden_layers=1, attention_bias=True).cpu()
    model = copy.deepcopy(dense)
    dense.load_state_dict(compressed(model, kind), strict=False)
    return model.to(DEVICE), dense.to(DEVICE)


def packed(model: nn.Module) -> int:
    return sum(map(is_compressed, model.modules()))


@pytest.mark.parametrize("kind", ["int4", "asymmetric", "int8", "nvfp4"])
def test_adapters_learn_as_over_the_decoded_weights(kind, monkeypatch):
    model, dense = pair(kind)
    assert len(projections_report(model).stock) == 7
    model, ran = over_storage(patch(model)), nodes_run(monkeypatch)
    truth = learnt(over_storage(copy.deepcopy(dense)))
    assert_same_learning(learnt(model), truth, 1e-5)
    assert ran == [3, 1, 3] and packed(model) == 7
    assert all(layer.runs for layer in projections_report(model).layers)
    if kind != "int4":
        return
    batch = tokens(batch=3, length=30)
    with torch.no_grad(), model.disable_adapter():
        for few in (batch, {name: t[:1, :4] for name, t in batch.items()}):
            assert torch.allclose(model(**few).loss, dense(**few).loss, rtol=1e-5)
    assert_same_learning(learnt(copy.deepcopy(model)), truth, 1e-5)
    # back at stock: the first call makes all layers dense, as without the patch
    restore(model)
    ran.clear()
    assert packed(model) == 7
    assert_same_learning(learnt(model), truth, 1e-5)
    assert not ran and not packed(model)


def test_adapters_of_liger_train():
    model, _ = pair("int4")
    model = adapters.adapted(model, TrainConfig(lora=4))
    assert packed(model) == 7 and {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with pytest.raises(UserError, match=r"lora: PEFT cannot adapt this model as it is stored: .*q_proj: .* in 3 bits"):
        adapters.adapted(pair("int3")[0], TrainConfig(lora=4))


def test_made_dense_meanwhile():
    """compressed-tensors may put its hook there again, when it saves the model."""
    model, dense = pair("int4")
    hook = next(iter(model._forward_pre_hooks.values()))
    patch(model).ct_decompress_hook = model.register_forward_pre_hook(hook)
    truth = dense(**tokens(**BATCH)).loss
    for left in (0, 0):
        assert torch.allclose(model(**tokens(**BATCH)).loss, truth) and packed(model) == left


def test_what_cannot_be_decoded_runs_stock():
    model, dense = pair("int3")
    with pytest.warns(UserWarning, match="q_proj: .* stored as pack-quantized in 3 bits. So compressed-tensors makes"):
        patch(model)
    assert all("makes dense in the first call" in layer.reason for layer in projections_report(model).layers)
    assert torch.allclose(model(**tokens(**BATCH)).loss, dense(**tokens(**BATCH)).loss) and not packed(model)
    model, _ = pair("int4")
    model.model.layers[0].mlp.up_proj._hf_hook = object()
    with pytest.warns(UserWarning, match="up_proj: a layer of compressed-tensors in a hook of accelerate. So"):
        patch(model)


def test_parts_that_cannot_be_right():
    model, _ = pair("asymmetric")
    wrong = model.model.layers[0].mlp.up_proj
    held = dict(wrong._parameters)
    for name, value, message in (
        ("weight_scale", held["weight_scale"].t(), r"up_proj: integer_rows: scale must have shape"),
        ("weight_scale", held["weight_scale"] * float("nan"), "up_proj: scales must be finite, got .* other values"),
        ("weight_packed", held["weight_packed"].long(), "up_proj: .* packed must be torch.int32, got torch.int64"),
        ("weight_zero_point", None, "up_proj: weight_zero_point is missing"),
        ("weight_shape", held["weight_shape"].flip(0) + 1, r"up_proj: weight_shape must be \(\d+, \d+\), got"),
    ):
        wrong._parameters[name] = value if value is None else nn.Parameter(value, requires_grad=False)
        for call in (patch, projections_report):
            with pytest.raises(ValueError, match=message):
                call(model)
        wrong._parameters[name] = held[name]


@pytest.mark.parametrize(
    ("module", "name", "given", "form"),
    [
        ("torch", "TorchLinear", dict(version=1, bias=torch.ones(24)), "GPTQ, 4 bits in groups of 16,"),
        ("tritonv2", "TritonV2Linear", dict(bits=8, g_idx=torch.arange(32) % 2), "GPTQ, 8 bits in groups of 16 by"),
        ("gemm_awq", "AwqGEMMLinear", {}, "AWQ, 4 bits in groups of 16"),
    ],
)
def test_layers_of_gptqmodel(module, name, given, form, monkeypatch):
    torch.manual_seed(0)
    base = by_columns(monkeypatch, module, name, 24, 32, **given).to(DEVICE)
    layer = (AwqLoraLinear if "Awq" in name else GPTQLoraLinear)(base, "default", config=peft.LoraConfig(r=4), r=4)
    layer = drawn(layer.to(DEVICE))
    x = torch.randn(2, 5, 32, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *(p for p in layer.parameters() if p.requires_grad)])
    assert form in projections.projection(layer, torch.float32).weight.said()
    base.decoded = None  # which only the layer's own forward reads
    y = projections.linear(layer, x)
    found = torch.autograd.grad(y.square().sum(), [x, *(p for p in layer.parameters() if p.requires_grad)])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_layers_of_gptqmodel_that_run_stock(monkeypatch):
    for module, name, given, why in (
        ("marlin", "MarlinLinear", {}, "a MarlinLinear, whose order of values is its kernel's"),
        ("torch", "TorchLinear", dict(adapter="LoRA"), "a TorchLinear with an adapter of its own"),
        ("torch", "TorchLinear", dict(online_full_had=True), "a TorchLinear that rotates its input"),
        ("torch", "TorchLinear", dict(planar=True), "bits in planes"),
    ):
        m = by_columns(monkeypatch, module, name, 24, 32, **given)
        assert why in projections.projection(m, torch.float32)
    m.planar, m.g_idx = False, m.g_idx + 5
    with pytest.raises(ValueError, match="q: g_idx must name one of 2 groups"):
        projections_report(nn.ModuleDict(dict(q=m)))
