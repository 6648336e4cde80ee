"""Models whose linear layers are trained in FP8: by ``train_in_fp8``, and by torchao's ``convert_to_float8_training``."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import DEVICE, make, served_by_kernels_or_references, step, tokens
from torch import nn

from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear
from liger_kernel.ops.projections import float8
from liger_kernel.ops.projections.float8_training import RECIPES
from liger_kernel.ops.projections.linear import LinearsFunction
from liger_kernel.ops.projections.mlp import AdaptedMLPFunction
from liger_kernel.transformers import _apply_liger_kernel_to_instance as patch
from liger_kernel.transformers import fp8
from liger_kernel.transformers.fp8 import train_in_fp8

pytestmark = pytest.mark.skipif(DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8")
LINEARS = 7  # of a Llama layer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fp8, "SMALL", 0)


@pytest.fixture
def fast():
    """Without interpreted kernels."""
    with served_by_kernels_or_references():
        yield


@pytest.fixture
def nodes(monkeypatch):
    """Names of the nodes that ran."""
    ran = []
    for cls in (LinearsFunction, AdaptedMLPFunction):
        apply = cls.apply
        monkeypatch.setattr(cls, "apply", lambda *a, cls=cls, apply=apply: ran.append(cls.__name__) or apply(*a))
    return ran


def llama(model_type: str = "llama", **more) -> nn.Module:
    return make(model_type, torch.bfloat16, **dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16) | more)


def by_torchao(model: nn.Module, recipe: str) -> nn.Module:
    training = pytest.importorskip("torchao.float8")
    config = training.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", DEVICE != "cuda")
    return training.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)


ONE_LAYER = ["LinearsFunction", "LinearsFunction", "AdaptedMLPFunction"]  # q, k and v; o; the MLP


@pytest.mark.parametrize("recipe", RECIPES)
def test_learning_is_that_of_torchao(recipe, nodes):
    """A patched model of ours or of torchao's layers learns what torchao's model does, within the rounding of FP8; q, k, v and the MLP are single nodes."""
    stock = llama()
    theirs = by_torchao(copy.deepcopy(stock), recipe)
    expected = step(theirs)[1]
    full = step(copy.deepcopy(stock))[1]
    assert not nodes
    for first in ("patch", "convert"):
        for convert in (lambda m: by_torchao(m, recipe), lambda m: train_in_fp8(m, recipe) and m):
            model = copy.deepcopy(stock)
            for what in ("patch", "convert") if first == "patch" else ("convert", "patch"):
                patch(model=model) if what == "patch" else convert(model)
            nodes.clear()
            found = step(model)[1]
            assert nodes == ONE_LAYER
            assert abs(found["loss"] - expected["loss"]) < 0.02 * abs(expected["loss"])
            for name, wanted in expected.items():
                if name != "loss":
                    error = lambda t, name=name: (t.float() - full[name].float()).norm() / full[name].float().norm()
                    assert error(found[name]) < 1.5 * error(wanted) + 0.02, name


def test_parameters_stay(fast):
    """Names, dtypes and state of a model do not change; deepcopies and gradients are those of its own parameters."""
    model = llama()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    left = train_in_fp8(model, "tensorwise")
    assert list(left) == ["lm_head"] and "head" in left["lm_head"]
    assert sum(isinstance(m, LigerFloat8TrainingLinear) for m in model.modules()) == LINEARS
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items()) and list(before) == list(model.state_dict())
    assert "tensorwise" in repr(model)
    copied = copy.deepcopy(model)
    step(copied)
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in copied.parameters())


def test_training(fast):
    """Weights that change are cast again: the loss of a batch falls, as in bf16."""
    losses = {}
    for recipe in (None, "tensorwise", "rowwise"):
        model = llama()
        if recipe:
            train_in_fp8(model, recipe)
        patch(model=model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[recipe] = []
        for _ in range(12):
            loss = model(**tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[recipe].append(loss.item())
    assert losses[None][-1] < 0.8 * losses[None][0]
    for recipe in ("tensorwise", "rowwise"):
        assert losses[recipe][-1] < 0.8 * losses[recipe][0]
        assert abs(losses[recipe][-1] - losses[None][-1]) < 0.1 * losses[None][0]


def test_checkpointing(fast):
    """gives the same bits."""
    found = []
    for checkpointed in (False, True):
        model = llama().train()
        train_in_fp8(model, "tensorwise")
        patch(model=model)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(step(model)[1])
    for name, value in found[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[1][name])), name


def test_compiled_layers_compute_the_same(fast):
    """torch.compile breaks its graph at each layer."""
    layer = LigerFloat8TrainingLinear.of(nn.Linear(32, 16, dtype=torch.bfloat16, device=DEVICE))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).to(DEVICE)
    found = []
    for call in (layer, torch.compile(nn.Sequential(layer, nn.ReLU()), backend="aot_eager")):
        layer.zero_grad()
        y = call(x).relu()
        y.sum().backward()
        found.append((y, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_what_is_left(fast):
    model = llama()
    left = train_in_fp8(model, filter=["o_proj"])
    assert "model.layers.0.self_attn.o_proj" in left and len(left) == 2
    model = llama()
    left = train_in_fp8(model, filter=lambda m, name: "mlp" in name)
    assert sum(isinstance(m, LigerFloat8TrainingLinear) for m in model.modules()) == 3 and left["lm_head"] == "the filter leaves it"
    model = llama(intermediate_size=72)
    left = train_in_fp8(model)
    assert left["model.layers.0.mlp.up_proj"] == "72 x 32 are not multiples of 16"
    with pytest.warns(UserWarning, match="fp8: no linear layer is in FP8"):
        train_in_fp8(llama(), filter=lambda m, name: False)


def test_wrong_arguments(monkeypatch):
    with pytest.raises(ValueError, match="fp8: must be one of tensorwise, rowwise, rowwise_with_gw_hp, or False, got 'fp8'"):
        train_in_fp8(llama(), "fp8")
    monkeypatch.setattr(fp8, "lacking", lambda device: "FP8 needs another GPU")
    with pytest.raises(ValueError, match="fp8: FP8 needs another GPU"):
        train_in_fp8(llama())
    with pytest.raises(ValueError, match="weight must have sizes that are multiples of 16, got"):
        LigerFloat8TrainingLinear.of(nn.Linear(24, 16))
