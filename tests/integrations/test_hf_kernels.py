"""Hugging Face's ``kernels``: our layers taken from a local repository, gradients and
torch.compile included. With Transformers 5.23 and later, ``newer_kernels.py`` gives ``kernels``
another version."""

from __future__ import annotations

import collections
import importlib
import inspect
import json

import pytest
import torch
import transformers
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from torch import nn
from watching import calls_of

from liger_kernel import hub
from liger_kernel.hub import layers

LAYERS = [c for c in vars(layers).values() if isinstance(c, type) and issubclass(c, nn.Module)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda c: c.__name__)
def test_layers_have_no_state(layer):
    """What kernels asks of a layer: no constructor, and no members but two flags."""
    assert layer.__init__ is nn.Module.__init__
    members = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert members == {"can_torch_compile", "has_backward"}
    assert json.loads((hub.PATH / "metadata.json").read_text())["license"] == "BSD-2-Clause"


def with_layers(model: nn.Module, names: dict[str, str], compiled: bool = False) -> nn.Module:
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: make test-integrations")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    layer_of = lambda layer: kernels.LocalLayerRepository(hub.PATH, layer_name=layer)
    mapping = {name: {DEVICE: {mode: layer_of(layer)}} for name, layer in names.items()}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(model.train(), mode=mode, device=DEVICE, use_fallback=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
def test_models_learn_the_same(model_type, compiled, monkeypatch):
    """olmo2 multiplies by the weight before it rounds, llama after: so does the layer."""
    calls = {name: calls_of(monkeypatch, layers, name) for name in ("rope", "rms_norm")}
    model = make(model_type)
    expected = step(model)[1]
    model = with_layers(model, {"RMSNorm": "LigerRMSNorm", "rotary_pos_emb": "LigerRotaryPosEmb"}, compiled)
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    assert norms and all("forward" in m.__dict__ for m in norms)
    if compiled:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(**tokens(), use_cache=False).loss.detach(), expected["loss"])
    else:
        assert_same_learning(step(model)[1], expected)
        assert (len(calls["rope"]), len(calls["rms_norm"])) == (len(model.model.layers), len(norms))


def test_in_bf16_every_bit(monkeypatch):
    for model_type in ("llama", "olmo2"):
        model = make(model_type, torch.bfloat16)
        norm = next(m for m in model.modules() if "RMSNorm" in type(m).__name__)
        x = torch.randn(3, norm.weight.shape[0], device=DEVICE, dtype=torch.bfloat16)
        expected = norm(x)
        with_layers(model, {"RMSNorm": "LigerRMSNorm"})
        assert "forward" in norm.__dict__ and torch.equal(norm(x), expected)


def test_a_norm_that_nothing_reproduces():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(8, device=DEVICE)), 1e-6

        def forward(self, hidden_states):
            return hidden_states.abs() * self.weight

    norm, x = OddRMSNorm(), torch.randn(2, 8, device=DEVICE)
    assert torch.equal(layers.LigerRMSNorm.forward(norm, x), norm(x))


def ran_by_ours(model: nn.Module) -> collections.Counter[str]:
    """How many modules run a forward of ours, by their class."""
    ours = lambda f: getattr(f, "__module__", "").startswith("liger_kernel.")
    return collections.Counter(
        type(m).__name__ for m in model.modules() if ours(getattr(vars(m).get("forward"), "__func__", None))
    )


# what a tiny model has of ours with ``use_kernels=True``, and what ``kernel_config`` adds
REACHED = {
    "llama": ({"LlamaRMSNorm": 5}, {"LlamaMLP": 2}),
    "qwen3_moe": ({"Qwen3MoeRMSNorm": 9}, {"Qwen3MoeExperts": 2}),
    "gemma2": ({}, {"Gemma2RMSNorm": 9, "Gemma2MLP": 2}),
    "gemma3_text": ({}, {"Gemma3RMSNorm": 13, "Gemma3MLP": 2}),
}


@pytest.fixture
def in_place_of_the_hub(monkeypatch):
    """Our folder in the place of Transformers' repository. Without a network, which tells what commit
    a version is, and without a GPU, whose capability other mappings are for."""
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: make test-integrations")
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/liger-kernels={hub.PATH}")
    folders = importlib.import_module("kernels.load" if hasattr(kernels, "load") else "kernels.utils")
    folders._parse_local_kernel_overrides.cache_clear()
    monkeypatch.setattr(kernels.layer.layer, "select_revision_or_version", lambda *args, **kwargs: "main")
    monkeypatch.setattr(kernels.layer.repos, "_find_capability", lambda: 90)
    # which Transformers 5.17 takes from another repository in training
    mapped = transformers.integrations.hub_kernels.get_kernel_mapping_transformers()
    monkeypatch.delitem(mapped, "rotary_pos_emb", raising=False)
    yield kernels
    folders._parse_local_kernel_overrides.cache_clear()


def test_every_layer_that_transformers_maps(in_place_of_the_hub):
    mapped = transformers.integrations.hub_kernels.get_kernel_mapping_transformers()
    repositories = {r for of in mapped.values() for value in of.values() for r in _repositories(value)}
    names = {r.layer_name for r in repositories if getattr(r, "_repo_id", "") == "kernels-community/liger-kernels"}
    mlps = {f"Liger{tiled}{act}MLP" for tiled in ("", "Tiled") for act in ("SwiGLU", "GEGLU")}
    assert names == {"LigerRMSNorm", "LigerLinear", "LigerForCausalLMLossLayer"} | mlps
    found = in_place_of_the_hub.get_kernel("kernels-community/liger-kernels", version=3, backend="cpu")
    assert all(getattr(found.layers, name) is getattr(layers, name) for name in names)


def _repositories(value):
    return value.values() if isinstance(value, dict) else [value]


@pytest.mark.parametrize("model_type", REACHED)
def test_modules_on_ours(model_type, in_place_of_the_hub, tmp_path):
    """By ``use_kernels=True``, and by ``kernel_config``, which leaves no trace."""
    stock = make(model_type).train()
    stock.save_pretrained(tmp_path)
    expected = step(stock)[1]
    model = make(model_type).train()
    with pytest.MonkeyPatch.context() as patch:  # Transformers maps nothing of ours for a CPU
        patch.setattr(transformers.PreTrainedModel, "device", torch.device("cuda"))
        model.set_use_kernels(True)
    marked, added = REACHED[model_type]
    assert ran_by_ours(model) == marked
    assert_same_learning(step(model)[1], expected)

    auto = transformers.AutoModelForCausalLM
    # the implementation of attention is not in a checkpoint
    expected = step(auto.from_pretrained(tmp_path, dtype=torch.float32).to(DEVICE).train())[1]
    how = dict(dtype=torch.float32, use_kernels=True, kernel_config=hub.kernel_config(model_type))
    model = auto.from_pretrained(tmp_path, **how).to(DEVICE)
    for mode in (False, True):
        assert ran_by_ours(model.train(mode)) == marked | added
    assert_same_learning(step(model)[1], expected)
    assert not any(type(m).__qualname__.endswith("Layout") for m in auto.from_pretrained(tmp_path).modules())
