"""The class that a patched module gets: what other packages, copies and pickles see of it."""

import copy
import inspect
import pickle
import types

import pytest
import torch
from hf_models import DEVICE, assert_same_learning, assert_untouched, group_of_one, make, snapshot, step, tokens
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.transformers.patching.patches import is_ours, is_patched

pytestmark = pytest.mark.usefixtures("models_by_references")


def llama(patch: bool = True, **options) -> nn.Module:
    model = make("llama", num_hidden_layers=1, **options)
    if patch:
        liger._apply_liger_kernel_to_instance(model=model)
    return model


def test_what_others_see():
    model = llama()
    for m in filter(is_patched, model.modules()):
        cls, (stock, *_) = type(m), type(m).__bases__
        assert isinstance(m, stock) and cls is not stock and "forward" not in m.__dict__
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(cls, name) == getattr(stock, name)
        assert is_ours(m.forward) and m.forward.__self__ is m and m.forward.__func__ is cls.forward
        assert inspect.getsource(m.forward) and inspect.getsource(cls) == inspect.getsource(stock)
        assert not any(is_patched(part) for part in model.modules() if isinstance(part, (nn.Linear, nn.Embedding)))
    # what is made by the class is stock, as by the class of any model
    made = type(model)(model.config)
    assert type(made) is modeling_llama.LlamaForCausalLM and not any(map(is_patched, made.modules()))
    norm = type(model.model.norm)(8, eps=1e-5)
    assert type(norm) is modeling_llama.LlamaRMSNorm and norm.variance_epsilon == 1e-5
    liger.restore(model)
    assert not any(map(is_patched, model.modules())) and type(model) is modeling_llama.LlamaForCausalLM


def test_modules_of_one_class_share_their_new_class():
    first, second = llama(), llama()
    assert type(first) is type(second) and type(first.model.norm) is type(second.model.norm)
    liger._apply_liger_kernel_to_instance(model=first)
    assert type(first) is type(second)


def test_a_single_module_is_copied_and_pickled():
    norm = llama().model.norm
    for twin in (copy.copy(norm), copy.deepcopy(norm), norm._replicate_for_data_parallel()):
        assert type(twin) is type(norm) and twin.__dict__ is not norm.__dict__ and twin.forward.__self__ is twin
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(norm, protocol))) is modeling_llama.LlamaRMSNorm
    norm.forward = types.MethodType(modeling_llama.LlamaRMSNorm.forward, norm)
    model = nn.Sequential(norm)
    model.config = llama(False).config
    before = snapshot(model)
    liger._apply_liger_kernel_to_instance(model=model)
    again = pickle.loads(pickle.dumps(model))[0]
    assert not is_patched(again) and again.forward.__self__ is again
    liger.restore(model)
    assert norm.forward is before[1][1]["forward"]


@pytest.mark.parametrize("first", ["patch", "parametrization"])
def test_parametrizations(first):
    """PyTorch changes the class, too."""
    model = llama(False)
    proj, norm = model.model.layers[0].mlp.down_proj, model.model.norm
    halve = nn.Module()
    halve.forward = lambda w: 0.5 * w
    if first == "patch":
        liger._apply_liger_kernel_to_instance(model=model)
    nn.utils.parametrize.register_parametrization(norm, "weight", halve)
    parametrizations.weight_norm(proj)
    if first != "patch":
        liger._apply_liger_kernel_to_instance(model=model)
    assert is_patched(norm) and is_parametrized(norm)
    ours = step(model)[1]
    liger.restore(model)
    assert not is_patched(norm) and is_parametrized(norm)
    assert_same_learning(ours, step(model)[1])
    nn.utils.parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is modeling_llama.LlamaRMSNorm


@pytest.fixture
def mesh():
    with group_of_one() as found:
        yield found


@pytest.mark.parametrize("first", ["patch", "fully_shard"])
def test_fsdp2(first, mesh):
    """It makes its classes over ours, or finds ours over its own; both come off alone."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = llama(first == "patch").train()
    expected = step(llama())[1]
    layer = model.model.layers[0]
    for m in (layer, model.model.norm, model):
        fully_shard(m, mesh=mesh)
    before = snapshot(model)
    if first != "patch":
        liger._apply_liger_kernel_to_instance(model=model)
    assert is_patched(model) and is_patched(model.model.norm) and type(layer).__name__ == "FSDPLlamaDecoderLayer"
    whole = lambda found: {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    out, learned = step(model)
    assert out.logits is None
    assert_same_learning(whole(learned), expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_learning(whole(step(model)[1]), expected)
    model.gradient_checkpointing_disable()
    liger.restore(model)
    assert not any(map(is_patched, model.modules())) and step(model)[0].logits is not None
    for m in (layer, model.model.norm, model):
        assert isinstance(m, FSDPModule) and type(m).__name__.startswith("FSDPLlama")
    if first != "patch":
        assert [type(m) for m in model.modules()] == [attributes["__class__"] for _, attributes in before]


def test_hooks_of_accelerate():
    """Those that offload weights see every call, patched before and after they came, and come off."""
    accelerate = pytest.importorskip("accelerate")
    expected = step(llama(False))[1]["loss"]
    for patch_first in (True, False):
        model = llama(patch_first)
        accelerate.cpu_offload(model, execution_device=torch.device(DEVICE))
        before = snapshot(model)
        if not patch_first:
            liger._apply_liger_kernel_to_instance(model=model)
        with torch.no_grad():
            out = model(**{k: v.cpu() for k, v in tokens().items()}, use_cache=False)
        assert out.logits is None
        torch.testing.assert_close(out.loss.to(DEVICE), expected, rtol=1e-5, atol=1e-5)
        if not patch_first:
            liger.restore(model)
            assert_untouched(before)
            liger._apply_liger_kernel_to_instance(model=model)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert model.to(DEVICE)(**tokens()).logits is None
        liger.restore(model)
        assert model(**tokens()).logits is not None
        assert not any(is_patched(m) or is_ours(m.forward) for m in model.modules())
