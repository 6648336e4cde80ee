"""Steps of a layer that one kernel does at once: the rewritten forward computes what the source
says, whatever the norm is."""

import contextlib
import functools
import gc
import inspect
import linecache
import os
import traceback
import weakref

import pytest
import torch
import transformers
from hf_models import DEVICE, assert_same_learning, checkpointed, group_of_one, make, step, tokens
from quick import further
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.deprecation import deprecate_kwarg
from watching import noted

import liger_kernel.transformers as ours
from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import class_patches, restore
from liger_kernel.transformers.patching.patches import core, within
from liger_kernel.transformers.recognise import slots
from liger_kernel.transformers.rewrite import joined_steps, rules

needs_kernels = pytest.mark.skipif(
    not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call"
)
RMS_NORM = slots.VARIANTS["rms_norm(0, llama, eps)"](nn.RMSNorm.forward)


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """Calls of the operator that adds and norms; whether there was a residual."""
    return noted(monkeypatch, joined_steps, "apply_of", lambda _, args: args[1] is not None)


@pytest.fixture
def turns(monkeypatch) -> list[dict]:
    """Calls of the operator that norms and turns."""
    return noted(monkeypatch, joined_steps, "qk_norm_rope", lambda *_, **options: options)


class Norm(nn.Module):
    """Of transformers' kind, with ours as its forward."""

    def __init__(self, n: int = 8):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, n)), 0.1

    forward = RMS_NORM


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first_norm, self.second_norm, self.third_norm = Norm(), Norm(), Norm()
        self.attention, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, scale: float = 0.5, *, again: bool = False) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.first_norm(hidden_states)
        hidden_states = self.attention(hidden_states)
        # a comment
        hidden_states = residual + hidden_states * scale
        residual = hidden_states
        hidden_states = self.second_norm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        if again:
            total = hidden_states + residual
            normed = self.third_norm(total)
            hidden_states = total * normed
        return hidden_states


renamed = functools.partial(deprecate_kwarg, version="99.0")


class Renamed(Layer):
    @renamed("factor", new_name="scale")
    @renamed("more", new_name="again")
    def forward(self, hidden_states, scale=0.5, again=False):
        residual = hidden_states
        hidden_states = self.first_norm(hidden_states)
        hidden_states = residual + self.attention(hidden_states) * scale
        residual = hidden_states
        hidden_states = self.second_norm(hidden_states)
        outputs = (residual + self.mlp(hidden_states),)
        if again:
            outputs += (residual,)
        return sum(outputs)


def run(forward, layer: nn.Module, **options) -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    y = forward(layer.to(DEVICE), x, **options)
    leaves = {"x": x} | dict(layer.named_parameters())
    found = zip(leaves, torch.autograd.grad(y.square().sum(), leaves.values(), allow_unused=True))
    return {"y": y} | {name: d for name, d in found if d is not None}


def interpreted() -> None:
    """From here on kernels serve, after what references have."""
    _op._KERNEL_DEVICES.add(DEVICE)


@needs_kernels
@pytest.mark.parametrize("again", [False, True])
def test_computes_what_the_source_says(calls, again):
    new = rules.fused(Layer.forward)
    assert_same_learning(run(new, Layer(), again=again), run(Layer.forward, Layer(), again=again), 1e-5)
    assert calls == [False, True] + [True] * again


def test_is_the_same_function_to_others():
    new = rules.fused(Layer.forward)
    assert inspect.signature(new) == inspect.signature(Layer.forward) and new.__qualname__ == "Layer.forward"
    assert new.__globals__ is Layer.forward.__globals__ and not any("liger" in name for name in globals())
    with pytest.raises((RuntimeError, ValueError)) as caught:
        new(Layer(), torch.randn(3, 7))
    assert any("_liger_add_norm(self.first_norm, hidden_states)" in line for line in traceback.format_tb(caught.tb))


@needs_kernels
@pytest.mark.filterwarnings("ignore:`(factor|more)` is deprecated")
def test_within_wrappers_of_transformers(calls):
    new = within(Renamed.forward, lambda f: rules.fused(f) or f)
    assert rules.fused(Renamed.forward) is None and new is not Renamed.forward
    assert inspect.signature(new) == inspect.signature(Renamed.forward)
    options = dict(factor=0.25, more=True)  # names that the wrappers know
    assert_same_learning(run(new, Renamed(), **options), run(Renamed.forward, Renamed(), **options), 1e-5)
    assert calls == [False, True]
    assert within(Renamed.forward, lambda f: f) is Renamed.forward
    # what wrappers of others do besides, or to whom, is not known
    timed = lambda forward: functools.wraps(forward)(lambda self, x: forward(self, x))
    assert core(others := timed(Layer.forward)) is others and rules.fused(others) is None


class Decorated(Norm):
    @functools.wraps(Norm.forward)
    def forward(self, x):
        return Norm.forward(self, x)


MORE_THAN_OURS = {
    "hooked": lambda layer: layer.first_norm.register_forward_hook(lambda *_: None),
    "stock": lambda layer: setattr(layer, "first_norm", nn.RMSNorm(8, eps=0.1)),
    "wrapped": lambda layer: setattr(layer.first_norm, "forward", functools.partial(Norm.forward, layer.first_norm)),
    "decorated": lambda layer: setattr(layer.first_norm, "__class__", Decorated),
}


@needs_kernels
@pytest.mark.parametrize("change", MORE_THAN_OURS)
def test_norms_that_are_more_are_called(calls, change):
    layers = Layer(), Layer()
    for layer in layers:
        MORE_THAN_OURS[change](layer)
    assert_same_learning(run(rules.fused(Layer.forward), layers[0]), run(Layer.forward, layers[1]), 1e-5)
    assert calls == [True]


@needs_kernels
def test_what_does_not_fit_is_added_as_it_was(calls):
    layer, x = Layer().to(DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    for a, b in ((x, torch.ones(8, device=DEVICE)), (x, x.double()), (x, 1.0), (x.double(), x)):
        s, y = joined_steps.add_norm(layer.first_norm, a, b)
        torch.testing.assert_close(s, a + b)
        torch.testing.assert_close(y, layer.first_norm(a + b))
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        joined_steps.add_norm(layer.first_norm, x.bool())
    assert not calls


@needs_kernels
def test_a_residual_that_is_changed_raises_as_in_stock():
    norm, x = Norm().to(DEVICE), torch.randn(3, 8, device=DEVICE, requires_grad=True)
    s, y = joined_steps.add_norm(norm, x * 1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|is being modified inplace"):
        s.mul_(2)
        y.sum().backward()


def attentions_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "q_norm")]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "whole_class"), [("qwen3", True), ("gemma3_text", False), *further(("qwen3_next", True))]
)
def test_norms_of_heads_go_with_their_rotation(turns, family, whole_class, models_by_references):
    model, batch = make(family), tokens(2, 9, ignored=2)
    _, expected = step(model, batch)
    interpreted()
    if whole_class:
        getattr(ours, f"apply_liger_kernel_to_{family}")(rope=True)
    else:
        ours._apply_liger_kernel_to_instance(model, rope=True)
    _, learned = step(model, batch)
    assert len(turns) == len(attentions_of(model)) > 0
    assert_same_learning(learned, expected, 1e-4)

    attentions_of(model)[0].k_norm.register_forward_hook(lambda *_: None)
    turns.clear()
    _, hooked = step(model, batch)
    assert len(turns) == len(attentions_of(model)) - 1
    assert_same_learning(hooked, expected, 1e-4)
    turns.clear()
    restore(None if whole_class else model)
    step(model, batch)
    assert not turns


JOINED = "residual = x; x = self.first_norm(x); x = residual + x; y = self.second_norm(x); return x + y"
TURNED = "q = self.q_norm(q); k = self.k_norm(k); q, k = apply_rotary(q, k, cos, sin); return q, k"
STAY = {
    "no sum of two": "x = self.first_norm(x); total = x + 1; total = self.second_norm(total); return self.mlp(total)",
    "in place": "residual = x; x = self.first_norm(x); x += residual; return x",
    "super": "residual = x; x = self.first_norm(x); return residual + super().forward(x)",
    "a private name": "residual = x; x = self.first_norm(x); return residual + self.__scale * x",
    "queries that are looked at": TURNED.replace("; q, k", "; total = q.sum(); q, k"),
    "queries that are transposed": TURNED.replace("norm(q)", "norm(q).transpose(1, 2)"),
    "a condition": TURNED.replace("k = self", "if cos is not None: k = self"),
}


def written(body: str):
    """A forward of these statements."""
    lines = ["class Written:", "  def forward(self, x, q, k, cos, sin):", *(f"    {line}" for line in body.split("; "))]
    source = "\n".join(lines) + "\n"
    linecache.cache["<written>"] = (len(source), None, source.splitlines(True), "<written>")
    exec(compile(source, "<written>", "exec"), names := {"apply_rotary": None, "__name__": __name__})
    return names["Written"].forward


@pytest.mark.parametrize("form", STAY)
def test_other_forwards_stay(form):
    assert rules.fused(written(STAY[form])) is None
    assert rules.fused(nn.Linear.forward) is None
    assert rules.fused(written(JOINED)) is not None and rules.fused(written(TURNED)) is not None


@needs_kernels
def test_few_frames_lie_between_the_model_and_a_kernel(monkeypatch, models_by_references):
    """Each is host time, and a line of every traceback."""
    package, found = os.path.dirname(_op.__file__).removesuffix("ops/_core"), {}

    def launched(kernel, *_, **__):
        files = [f.f_code.co_filename for f, _ in traceback.walk_stack(None)]
        found.setdefault(kernel.__name__, sum(file.startswith((package, "<liger_kernel")) for file in files))

    model = make("llama", num_hidden_layers=1)
    ours._apply_liger_kernel_to_instance(model)
    monkeypatch.setattr(_op, "_start", lambda _, *launch: launched(*launch))
    interpreted()
    model(**tokens())
    # without the last, which is the test's own
    most = {"_fwd": 7, "_rope": 9, "_rows": 11}
    assert all(found[name] - 1 <= most[name] for name in most), found


@needs_kernels
def test_nothing_is_kept_by_the_graph(monkeypatch, models_by_references):
    found, stock = [], joined_steps.apply_of

    def applied(*args):
        y, s = stock(joined_steps.LigerFusedAddRMSNormFunction, args)(*args)
        found.append(weakref.ref(y.grad_fn))
        return y, s

    monkeypatch.setattr(joined_steps, "apply_of", lambda *_: applied)
    interpreted()
    model = make("llama", num_hidden_layers=1)
    ours._apply_liger_kernel_to_instance(model)
    gc.collect()
    gc.disable()
    try:
        loss = model(**tokens(1, 5, ignored=1)).loss
        assert len(found) == 2 and all(each() is not None for each in found)
        del loss
        assert all(each() is None for each in found)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("patched", "level", "sharded"),
    [("class", True, True), ("instance", True, False), ("both", False, False), ("both", True, True)],
)
def test_layers_are_checkpointed(patched, level, sharded, monkeypatch, models_by_references):
    """transformers' wrapper, which checkpoints, knows itself by ``type(layer).forward``."""
    recomputed = noted(monkeypatch, transformers.modeling_utils, "checkpoint", lambda *_, **__: None)
    if patched != "instance":
        ours.apply_liger_kernel_to_llama(rematerialise=level)
    model = make("llama").train()
    if patched != "class":
        ours._apply_liger_kernel_to_instance(model, rematerialise=level)
    with group_of_one() if sharded else contextlib.nullcontext() as mesh:
        for layer in model.model.layers if sharded else ():
            fully_shard(layer, mesh=mesh)
        step(checkpointed(model))
    assert len(recomputed) == 2


def test_what_is_rewritten():
    """In the installed transformers: most layers, and no others than those of these forms."""
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    forms = {cls: rules.fused(core(cls.forward)) for cls in (LlamaDecoderLayer, Gemma2DecoderLayer, BertLayer)}
    count = lambda cls: inspect.getsource(forms[cls]).count(rules.ADD_NORM)
    assert (count(LlamaDecoderLayer), count(Gemma2DecoderLayer), forms[BertLayer]) == (2, 2, None)
    from liger_kernel.transformers.table import table

    rows = table(["qwen3"])
    assert "Qwen3Attention <- norm_rope, projections\n" in rows
    assert "Qwen3DecoderLayer <- add_norm, rematerialised(cheap)" in rows
    labels = [str(p) for p in class_patches("llama", {"rms_norm": True, "glu": False, "rope": False}, None)]
    assert "LlamaDecoderLayer.forward <- add_norm" in labels
    others = {"rms_norm": False, "glu": True, "rope": True, "rematerialise": True}
    assert not any("add_norm" in str(p) for p in class_patches("llama", others, None))
