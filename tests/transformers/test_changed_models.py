"""Models that are changed after they were patched: what stock would do at the time of a call, a
patched model does. And what other packages, copies and pickles see of the classes of patched modules."""

import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import types
import warnings
import weakref

import pytest
import torch
from hf_models import DEVICE, assert_same_learning, assert_untouched, group_of_one, make, snapshot, step, tokens
from processes import start_ranks
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.transformers.patching import patches as patching
from liger_kernel.transformers.patching.patches import is_ours, is_patched
from liger_kernel.transformers.recognise import families

pytestmark = pytest.mark.usefixtures("models_by_references")


def patched(model: nn.Module, **flags) -> nn.Module:
    liger._apply_liger_kernel_to_instance(model=model, **flags)
    return model


def llama(patch: bool = True, **options) -> nn.Module:
    model = make("llama", num_hidden_layers=1, **options)
    return patched(model) if patch else model


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"])
@pytest.mark.parametrize("live", [False, True])
def test_what_was_replaced_before_stays(name, live, monkeypatch):
    """Another package's patch is not ours to replace: it is left, with a warning."""
    monkeypatch.setattr(patching, "WARNED", set())
    families.family("llama")  # which looks at what is there under another transformers than the table's
    owner, attribute = getattr(modeling_llama, name), "forward"
    if name == "apply_rotary_pos_emb":
        owner, attribute = modeling_llama, name
    function, double = getattr(owner, attribute), lambda y: tuple(2 * t for t in y) if isinstance(y, tuple) else 2 * y
    replaced = lambda *args, **kwargs: double(function(*args, **kwargs))
    monkeypatch.setattr(owner, attribute, replaced)
    model = llama(False)
    expected = step(model)[1]
    with pytest.warns(UserWarning, match=f"llama: {name}: other code has replaced it"):
        liger.apply_liger_kernel_to_llama(model=model) if live else liger.apply_liger_kernel_to_llama()
    assert getattr(owner, attribute) is replaced
    out, learned = step(model)
    assert out.logits is None
    assert_same_learning(learned, expected)


def frees(rank: int) -> None:
    gc.disable()
    for use in ("stock", "instance", "class"):
        if use == "class":
            liger.apply_liger_kernel_to_llama()
        model = llama(False)
        if use == "instance":
            patched(model)
        step(model), step(model)
        gc.collect()
        parts = [weakref.ref(t) for m in model.modules() for t in (m, *m.parameters())]
        del model
        assert not [p for p in parts if p() is not None], use


def test_del_frees_a_model():
    """At once, without the garbage collector; in a process where nobody else kept anything."""
    start_ranks(frees, (), 1)


UNPICKLED = """
import pickle, sys, torch
sys.modules["liger_kernel"] = None
for statistics in (False, True):
    try:
        o = pickle.load(open(f"{statistics}.pkl", "rb"))
        print(type(o).__name__, [*o], o.loss.item())
    except ModuleNotFoundError as error:
        print(error.name)
m, batch = (torch.load(f, weights_only=False) for f in ("model.pt", "batch.pt"))
out = m(**batch, use_cache=False)
print(out.loss.item())
print(out.logits is None)
"""


def test_what_is_saved_loads_where_liger_is_absent(tmp_path):
    """A model saved whole is the stock one, and so are outputs, but for those with statistics."""
    losses = []
    for statistics in (False, True):
        out = llama()(**tokens(), return_token_accuracy=statistics, use_cache=False)
        out.loss = out.loss.detach()
        assert type(copy.copy(out)) is type(copy.deepcopy(out)) is type(out) and copy.copy(out).loss is out.loss
        (tmp_path / f"{statistics}.pkl").write_bytes(pickle.dumps(out))
        losses.append(out.loss.item())
    model = llama(False).cpu()
    batch = {k: v.cpu() for k, v in tokens().items()}
    expected = step(model, batch)[1]["loss"]
    torch.save(patched(model), tmp_path / "model.pt")
    torch.save(batch, tmp_path / "batch.pt")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", UNPICKLED], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, counted, loss, skipped = done.stdout.splitlines()
    assert plain == f"CausalLMOutputWithPast ['loss'] {losses[0]}" and counted.startswith("liger_kernel")
    assert skipped == "False"
    torch.testing.assert_close(float(loss), expected.item(), rtol=1e-5, atol=1e-6)


def test_functional_transforms():
    """``torch.func`` sees through a patched model: calls, derivatives both ways, batches."""
    from torch.func import functional_call, grad, jvp, vmap

    def results(model):
        weights = {n: p.detach() for n, p in model.named_parameters()}
        batch = tokens()
        given = lambda ids, labels: dict(input_ids=ids, labels=labels, use_cache=False)
        of = lambda w, *rows: functional_call(model, w, (), given(*(rows or batch.values()))).loss
        ones = {n: torch.ones_like(p) for n, p in weights.items()}
        each = vmap(grad(lambda w, i, l: of(w, i[None], l[None])), in_dims=(None, 0, 0))
        many = {n: torch.stack([p, 2 * p]) for n, p in weights.items()}
        return [
            of(weights),
            grad(of)(weights),
            jvp(of, (weights,), (ones,)),
            each(weights, batch["input_ids"], batch["labels"]),
            vmap(of)(many),
        ]

    model = llama(False, attn_implementation="eager")
    expected = results(model)
    torch.testing.assert_close(results(patched(model)), expected, rtol=1e-4, atol=1e-6)
    assert step(model)[0].logits is None


def test_unknown_flags_are_said_once(monkeypatch):
    """With the nearest name; a flag of another family is none of them."""
    monkeypatch.setattr(patching, "WARNED", set())
    model = llama(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(model, geglu=True, layer_norm=True, relu_squared=False, rematerialise="cheap")
        with pytest.warns(UserWarning, match=r"^swigul: .*did you mean swiglu\?$"):
            patched(model, swigul=False)
        patched(model, swigul=False)
        with pytest.warns(UserWarning, match="^zzz: no flag of liger_kernel, so it has no effect$"):
            liger._apply_liger_kernel("llama", zzz=True)


def test_a_patch_without_effect_is_said(monkeypatch):
    """By frameworks' doors, too: a type without kernels, parts of somebody else's classes."""
    monkeypatch.setattr(patching, "WARNED", set())
    with pytest.warns(UserWarning, match="nobody: liger_kernel has no kernels for this type"):
        liger._apply_liger_kernel("nobody")
    model = nn.Sequential(nn.Linear(2, 2))
    model.config = llama(False).config
    with pytest.warns(UserWarning, match="llama: Sequential: nothing of this model was patched"):
        patched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(model)
        patched(llama())
        liger.apply_liger_kernel_to_llama()
        llama()


def test_nothing_changes_if_everything_is_off_or_done():
    """None is off; flags of other families are nothing; again is the same."""
    model = llama(False)
    stock = snapshot(model)
    off = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"))
    patched(model, **off, layer_norm=True)
    assert_untouched(stock)
    once = snapshot(patched(model, geglu=True))
    patched(model, geglu=True)
    assert_untouched(once)


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
    patched(first)
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
    patched(model)
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
        patched(model)
    nn.utils.parametrize.register_parametrization(norm, "weight", halve)
    parametrizations.weight_norm(proj)
    if first != "patch":
        patched(model)
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
        patched(model)
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
            patched(model)
        with torch.no_grad():
            out = model(**{k: v.cpu() for k, v in tokens().items()}, use_cache=False)
        assert out.logits is None
        torch.testing.assert_close(out.loss.to(DEVICE), expected, rtol=1e-5, atol=1e-5)
        if not patch_first:
            liger.restore(model)
            assert_untouched(before)
            patched(model)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert model.to(DEVICE)(**tokens()).logits is None
        liger.restore(model)
        assert model(**tokens()).logits is not None
        assert not any(is_patched(m) or is_ours(m.forward) for m in model.modules())
