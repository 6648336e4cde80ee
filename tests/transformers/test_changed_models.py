"""Models that are changed after they were patched: what stock would do at the time of a call, a
patched model does."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from hf_models import assert_same_learning, make, step, tokens
from processes import start_ranks
from torch import nn
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.transformers.patching import patches as patching
from liger_kernel.transformers.recognise import families

pytestmark = pytest.mark.usefixtures("models_by_references")


def patched(model: nn.Module, **flags) -> nn.Module:
    liger._apply_liger_kernel_to_instance(model=model, **flags)
    return model


def doubled(function):
    def twice(*args, **kwargs):
        y = function(*args, **kwargs)
        return tuple(2 * t for t in y) if isinstance(y, tuple) else 2 * y

    return twice


GLOBALS = ["apply_rotary_pos_emb", "eager_attention_forward", "repeat_kv"]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"])
@pytest.mark.parametrize("live", [False, True])
def test_what_was_replaced_before_stays(name, live, monkeypatch):
    """Another package's patch is not ours to replace: it is left, with a warning."""
    monkeypatch.setattr(patching, "WARNED", set())
    families.family("llama")  # which looks at what is there under another transformers than the table's
    owner, attribute = (modeling_llama, name) if name in GLOBALS else (getattr(modeling_llama, name), "forward")
    replaced = doubled(getattr(owner, attribute))
    monkeypatch.setattr(owner, attribute, replaced)
    model = make("llama", num_hidden_layers=1)
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
        model = make("llama", num_hidden_layers=1)
        if use == "instance":
            liger._apply_liger_kernel_to_instance(model=model)
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
        out = patched(make("llama", num_hidden_layers=1))(**tokens(), return_token_accuracy=statistics, use_cache=False)
        out.loss = out.loss.detach()
        assert type(copy.copy(out)) is type(copy.deepcopy(out)) is type(out) and copy.copy(out).loss is out.loss
        (tmp_path / f"{statistics}.pkl").write_bytes(pickle.dumps(out))
        losses.append(out.loss.item())
    model = make("llama", num_hidden_layers=1).cpu()
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

    model = make("llama", num_hidden_layers=1, attn_implementation="eager")
    expected = results(model)
    torch.testing.assert_close(results(patched(model)), expected, rtol=1e-4, atol=1e-6)
    assert step(model)[0].logits is None


def test_unknown_flags_are_said_once(monkeypatch):
    """With the nearest name; a flag of another family is none of them."""
    monkeypatch.setattr(patching, "WARNED", set())
    model = make("llama", num_hidden_layers=1)
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
    model.config = make("llama", num_hidden_layers=1).config
    with pytest.warns(UserWarning, match="llama: Sequential: nothing of this model was patched"):
        patched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(model)
        patched(patched(make("llama", num_hidden_layers=1)))
        liger.apply_liger_kernel_to_llama()
        patched(make("llama", num_hidden_layers=1))
