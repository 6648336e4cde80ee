"""Models whose frozen linear layers are in FP8, beside the same models with these weights made
dense."""

import copy
import io
import re

import pytest
import torch
from adapters import lora
from hf_models import DEVICE, group_of_one, make, step
from quick import further
from torch import nn
from watching import noted

from liger_kernel import transformers as liger
from liger_kernel.nn import LigerFloat8Linear
from liger_kernel.ops.projections import float8
from liger_kernel.ops.projections.linear import LinearsFunction
from liger_kernel.ops.projections.mlp import AdaptedMLPFunction
from liger_kernel.transformers import quantize, quantize_base

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8"
)
LINEARS = 7  # of a Llama layer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(quantize, "SMALL", 0)


def llama(dtype: torch.dtype = torch.bfloat16, **more) -> nn.Module:
    return make("llama", dtype, num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16, **more)


def layers(model: nn.Module) -> dict[str, LigerFloat8Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LigerFloat8Linear)}


def adapted(model: nn.Module, **more) -> nn.Module:
    wrapped = lora(model, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=True, **more)
    for name, p in sorted(wrapped.named_parameters()):
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return wrapped


def dense_again(model: nn.Module) -> nn.Module:
    """The model with the weights that FP8 left, as plain layers."""
    model = copy.deepcopy(model)
    for name, m in layers(model).items():
        plain = nn.Linear(m.in_features, m.out_features, m.bias is not None, device=DEVICE, dtype=m.dtype)
        plain.weight.data, plain.bias = m.dense(), m.bias
        model.set_submodule(name, plain.requires_grad_(False))
    return model


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of root mean squares."""
    norm = expected.double().norm().clamp(min=1e-12 * expected.numel() ** 0.5)
    return ((found.double() - expected.double()).norm() / norm).item()


def rough(found, expected, worst=0.25):
    """What FP8 casts of activations leave of equality of the gradients of a tiny model."""
    assert found.keys() == expected.keys()
    for name, e in expected.items():
        assert distance(found[name], e) < worst, (name, distance(found[name], e))


def test_sizes_that_are_left(monkeypatch):
    double = nn.Linear(64, 64, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(32, 64), double, nn.Embedding(64, 32))
    monkeypatch.setattr(quantize, "SMALL", 4096)
    tied = nn.Linear(32, 64)
    model.append(tied).append(nn.Embedding.from_pretrained(tied.weight, freeze=False))
    model[-1].weight = tied.weight
    said = r"no linear layer is in FP8 \(0: 24 x 32 are not multiples of 16; 1: 64 x 32 are too few"
    with pytest.warns(UserWarning, match=said):
        left = quantize_base(model)
    assert [why.split()[-2:] for why in left.values()] == [["of", "16"], ["by", "it"], ["on", "cpu"], ["shares", "it"]]


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise"])
@pytest.mark.parametrize("autocast", [True, *further(False)])
def test_nodes_serve_adapters_over_it(recipe, autocast, monkeypatch):
    model, ran = llama(), []
    quantize_base(model, recipe)
    model = adapted(model)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        stock, dense = step(model)[1], step(dense_again(model))[1]
    for node in (LinearsFunction, AdaptedMLPFunction):
        noted(monkeypatch, node, "forward", lambda *_, node=node: node.__name__, ran)
    liger._apply_liger_kernel_to_instance(model=model)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        ours = step(model)[1]
    assert ran == ["LinearsFunction", "LinearsFunction", "AdaptedMLPFunction"]
    rough(ours, dense)
    rough(ours, stock)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise"])
def test_a_layer_is_saved_copied_and_moved(recipe, models_by_references):
    def made(seed):
        torch.manual_seed(seed)
        return LigerFloat8Linear.of(nn.Linear(48, 32, dtype=torch.bfloat16).to(DEVICE), recipe)

    def run(layer):
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        y.backward(torch.ones_like(y))
        return y.detach(), leaf.grad

    first, other, x = made(0), made(1), torch.randn(4, 48, device=DEVICE).bfloat16()
    expected = run(first)
    assert not torch.equal(run(other)[0], expected[0])
    other.load_state_dict(first.state_dict())
    buffer = io.BytesIO()
    torch.save(first, buffer)
    buffer.seek(0)
    for same in (other, copy.deepcopy(first), first.half().to(torch.float64), torch.load(buffer, weights_only=False)):
        same.bias.data = same.bias.data.bfloat16()
        torch.testing.assert_close(run(same), expected, rtol=0, atol=0)
    assert {*first.state_dict()} == {"float8", "float8_scale", "bias"} and first.float8_scale.dtype == torch.int32


def test_the_transpose_is_of_what_is_multiplied_now(monkeypatch):
    layer, made = LigerFloat8Linear.of(nn.Linear(48, 32, bias=False).to(DEVICE), "fp8"), []
    stock = float8.transposed
    monkeypatch.setattr("liger_kernel.nn.float8.transposed", lambda w: made.append(1) or stock(w))
    x = torch.randn(4, 48, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()
    layer(x).sum().backward()
    assert len(made) == 1
    with torch.no_grad():
        layer(x)
    layer.weight.data = 2 * layer.weight.data
    before, x.grad = x.grad / 2, None
    layer(x).sum().backward()
    assert len(made) == 2
    torch.testing.assert_close(x.grad, 2 * before, rtol=1e-5, atol=1e-5)
    free = LigerFloat8Linear.of(nn.Linear(48, 32).to(DEVICE), "fp8", keep_transposed=False)
    free(x).sum().backward()
    assert len(made) == 2 and free._transposed is None


@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("safe", [False, True])
def test_merging_is_a_cast_of_the_sum(safe, more, models_by_references):
    model = llama(torch.float32)
    quantize_base(model)
    model = adapted(model, **more)
    dense = dense_again(model)
    rough(step(model)[1], step(dense)[1])
    before = {name: m.dense() for name, m in layers(model).items()}
    model.merge_adapter(safe_merge=safe)
    dense.merge_adapter()
    for name, m in layers(model).items():
        assert (m.dense() - before[name]).abs().max() > 0.01
        assert distance(m.dense(), dense.get_submodule(name).weight) < 0.03
    model.unmerge_adapter()
    assert all(distance(m.dense(), before[name]) < 0.08 for name, m in layers(model).items())
    plain = model.merge_and_unload(safe_merge=safe)
    assert len(layers(plain)) == LINEARS and not any("lora" in n for n, _ in plain.named_modules())


def test_layers_compile_whole():
    layer = LigerFloat8Linear.of(nn.Linear(48, 32, dtype=torch.bfloat16).to(DEVICE), "fp8_rowwise")
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = torch.ones(4, 48, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        y = run(x)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of PyTorch 2.11 asks gradients of integers")
def test_layers_are_sharded():
    """By FSDP2, whose mixed precision casts all but integers, and refuses what has no dim."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with group_of_one("cpu") as mesh:
        x = torch.randn(4, 48).bfloat16().requires_grad_()
        layer = LigerFloat8Linear.of(nn.Linear(48, 32, dtype=torch.bfloat16), "fp8", keep_transposed=False)
        expected = layer(x)
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert torch.equal(layer(x), expected)


def test_writing_into_the_weight_casts():
    layer = LigerFloat8Linear.of(nn.Linear(32, 32, bias=False).to(DEVICE), "fp8_rowwise")
    with torch.no_grad():
        layer.weight.fill_(0.5)
        assert torch.equal(layer.weight + 0, torch.full((32, 32), 0.5, device=DEVICE))
        layer.weight.mul_(2)
        assert torch.equal(layer(torch.eye(32, device=DEVICE)), torch.ones(32, 32, device=DEVICE))
    with pytest.raises(ValueError, match=r"weight must have shape \(32, 32\), got \(1, 32\)"):
        layer.weight.data = torch.zeros(1, 32)


def test_wrong_calls(monkeypatch):
    model = llama()
    with pytest.raises(ValueError, match="recipe must be one of fp8, fp8_rowwise, got 'int4'"):
        quantize_base(model, "int4")
    needs = "FP8 needs an NVIDIA GPU of compute capability 8.9 or newer, got 8.0"
    monkeypatch.setattr(quantize, "lacking", lambda device: needs)
    with pytest.raises(ValueError, match=f"^quantize_base: {re.escape(needs)}$"):
        quantize_base(model)
    assert not layers(model)


def test_checkpoints_of_others_in_fp8_are_not_cast_again():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = fp8.FP8Linear(32, 32, block_size=(16, 16))
    assert "not a plain nn.Linear" in quantize_base(nn.Sequential(layer))["0"]
