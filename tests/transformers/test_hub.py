"""Layers, layouts and experts that Transformers itself puts in place, without a patch; with the
library ``kernels``: ``integrations/test_hf_kernels.py``."""

import collections
import functools
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

monkey_patching = pytest.importorskip("transformers.monkey_patching", reason="this version builds no other classes")

from adapters import learnt
from hf_models import DEVICE, assert_same_learning, make, recognised
from transformers.loss.loss_utils import ForCausalLMLoss
from watching import noted

from liger_kernel import hub
from liger_kernel.hub import layers, layouts
from liger_kernel.transformers import _apply_liger_kernel_to_instance, restore
from liger_kernel.transformers.recognise import experts as of_experts

# what a tiny model has of ours, by family: of two layers
BUILT = {
    "llama": {"LlamaRMSNorm": 5, "LlamaMLP": 2},
    "qwen3_moe": {"Qwen3MoeRMSNorm": 9, "Qwen3MoeExperts": 2},
    "gemma2": {"Gemma2RMSNorm": 9, "Gemma2MLP": 2},
    "gemma3_text": {"Gemma3RMSNorm": 13, "Gemma3MLP": 2},
}


def built(model_type: str, path) -> nn.Module:
    """What ``from_pretrained`` makes with ``kernel_config``, but for the library ``kernels``."""
    named = hub.kernel_config(model_type).names
    names = {name: getattr(layers, f"{of}Layout") for name, of in named.items() if name[0] == "^"}
    monkey_patching.register_patch_mapping(names)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    finally:
        monkey_patching.unregister_patch_mapping([*names])


@pytest.mark.parametrize("model_type", BUILT)
def test_models_built_by_layouts(model_type, tmp_path):
    """Checkpoints load unchanged and are saved unchanged; the model learns what stock learns."""
    recognised(model_type)
    make(model_type).save_pretrained(tmp_path / "stock")
    # loaded, too: the implementation of attention is not in a checkpoint
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32).to(DEVICE)
    model = built(model_type, tmp_path / "stock").to(DEVICE).train()
    laid = [m for m in model.modules() if type(m).__qualname__.endswith("Layout")]
    assert collections.Counter(type(m).__name__ for m in laid) == BUILT[model_type]
    assert all(type(m).__mro__[1].__module__.startswith("transformers.") for m in laid)
    expected = learnt(stock.train())
    assert_same_learning(learnt(model), expected)
    _apply_liger_kernel_to_instance(model)
    # what is allowed to kernels, which here are more than those of the layouts
    assert_same_learning(learnt(model), expected, tolerance=1e-5)
    restore(model)
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    state, expected = again.state_dict(), stock.state_dict()
    assert not any(type(m).__qualname__.endswith("Layout") for m in again.modules())
    assert state.keys() == expected.keys() and all(torch.equal(state[n].to(DEVICE), t) for n, t in expected.items())
    mlp = laid[0]
    assert type(pickle.loads(pickle.dumps(mlp))) is type(mlp)


def test_names_that_are_no_layers():
    for name in ("llama__LlamaAttention", "llama__LlamaMLPs", "nope__LlamaMLP", "LigerNope", "llama__"):
        assert not hasattr(layers, name)
    assert "^LlamaMLP$" in layouts.classes_of("llama") and not layouts.classes_of("nope")


def test_configurations_that_cannot_be(monkeypatch):
    with pytest.raises(ValueError, match=r"kernel_config: model_type .*'lama'; did you mean llama\?"):
        hub.kernel_config("lama")
    monkeypatch.setitem(sys.modules, "liger_kernel.hub.layout_config", None)  # which raises ImportError
    with pytest.raises(ValueError, match=r"kernel_config: transformers must be 5\.17 or later"):
        hub.kernel_config("llama")


@pytest.mark.parametrize("layer, act", [("SwiGLUMLP", "silu"), ("GEGLUMLP", "gelu_pytorch_tanh")])
def test_tiled_mlps(layer, act):
    torch.manual_seed(0)
    mlp = make("llama", hidden_act=act).model.layers[0].mlp
    x = torch.randn(1, 2 * 64 + 3, 64, device=DEVICE, requires_grad=True)
    run = lambda f: torch.autograd.grad((f(x) ** 2).sum(), [x, *mlp.parameters()])
    forward = getattr(layers, f"LigerTiled{layer}").forward
    for ours, stock in zip(run(lambda x: forward(mlp, x)), run(mlp)):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4 * stock.abs().max().item())


def test_linear_and_loss():
    linear, x = nn.Linear(8, 12).to(DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    assert torch.equal(layers.LigerLinear.forward(linear, x), linear(x))
    z = torch.randn(2, 5, 19, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 19, (2, 5), device=DEVICE)
    labels[0, :3] = -100
    for more in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": labels}):
        found = layers.LigerForCausalLMLossLayer.forward(nn.Module(), z, labels, vocab_size=19, **more)
        expected = ForCausalLMLoss(z, labels, vocab_size=19, **more)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, z), torch.autograd.grad(expected, z))


@functools.cache
def forward_is_known(model_type: str) -> None:
    learnt(tiny(model_type, "liger"))


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The operators that multiplied by experts, from now on."""
    for model_type in ("qwen3_moe", "mixtral", "gpt_oss"):  # recognition calls them, too
        forward_is_known(model_type)
    calls: list[str] = []
    for name in ("moe", "adapted_moe"):
        noted(monkeypatch, of_experts, name, lambda *_, name=name, **__: name, calls)
    return calls


def tiny(model_type: str, implementation: str) -> nn.Module:
    more = dict(layer_types=["full_attention"]) if model_type == "gpt_oss" else {}
    model = make(model_type, num_hidden_layers=1, **more).train()
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts(model_type, ran):
    expected = learnt(tiny(model_type, "eager"))
    assert not ran
    assert_same_learning(learnt(tiny(model_type, "liger")), expected)
    assert ran == ["moe"]


@pytest.mark.parametrize("blocks", [(4, 5), None])
@pytest.mark.parametrize("limit", [None, 0.3])
def test_experts_of_a_checkpoint_in_fp8(blocks, limit, ran):
    """Beside the same experts with dense weights; 12, 8 and 24 are no multiples of the blocks."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = make("qwen3_moe", hidden_size=16, moe_intermediate_size=12, num_attention_heads=2).config
    config.swiglu_limit, config._experts_implementation = limit, "liger"
    cls = transformers.integrations.moe.use_experts_implementation(
        type("Experts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    module, dense = cls(config, block_size=blocks).to(DEVICE), {}
    torch.manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        w, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        w.data = torch.randn(w.shape, device=DEVICE).to(w.dtype)
        scale.data = torch.rand(scale.shape, device=DEVICE) / 4 + 0.1
        rows, columns = blocks or (w.shape[1] // scale.shape[1], w.shape[2])
        each = scale.data.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        dense[name] = w.data.float() * each[:, : w.shape[1], : w.shape[2]]
    x = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    index = torch.randint(0, module.num_experts, (5, 2), device=DEVICE)
    weights = torch.rand(5, 2, device=DEVICE)
    y = module(x, index, weights)
    expected = torch.zeros_like(x)
    for k in range(2):
        gate, up = torch.einsum("tk,tnk->tn", x, dense["gate_up_proj"][index[:, k]]).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = F.silu(gate) * up
        expected = expected + weights[:, k, None] * torch.einsum("tn,tkn->tk", h, dense["down_proj"][index[:, k]])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    found, truth = (torch.autograd.grad((t**2).sum(), x)[0] for t in (y, expected))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
    assert len(ran) == 1
