"""What a patched model computes follows its modules as they are at each call: activations that are more than their values, dtypes, choices of the user."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from hf_models import DEVICE, assert_same_learning, batch_of, make, served_by_kernels_or_references, step  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from liger_kernel.transformers import _apply_liger_kernel_to_instance, restore, slots  # noqa: E402

TOLERANCE = 5e-5  # of the largest value of each gradient


@pytest.fixture(autouse=True)
def _served():
    with served_by_kernels_or_references():
        yield
    restore()


def pair(family: str, dtype: torch.dtype = torch.float32, **more) -> tuple[nn.Module, nn.Module]:
    """Two equal models, the second one patched."""
    theirs, ours = make(family, dtype, **more), make(family, dtype, **more)
    _apply_liger_kernel_to_instance(model=ours)
    return theirs, ours


# -- activations -----------------------------------------------------------------------------


class Gained(nn.Module):
    """silu with a gain that is learnt, and begins at 1."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), device=DEVICE))

    def forward(self, x):
        return F.silu(x) * self.gain


class Buffered(nn.SiLU):
    """silu of what is left after a threshold, which is loaded later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor(-100.0))

    def forward(self, x):
        return F.silu(x).maximum(self.least)


def _of_itself(act: nn.Module) -> nn.Module:
    act.forward = type(act).forward.__get__(act)
    return act


def _with(fn: nn.Module, **attributes) -> nn.Module:
    for name, value in attributes.items():
        setattr(fn, name, value)
    return fn


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (nn.SiLU(), "silu"), (ACT2FN["silu"], "silu"), (F.silu, "silu"), (nn.GELU(), "gelu"), (ACT2FN["gelu"], "gelu"), (F.gelu, "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"), (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"), (ACT2FN["relu2"], "relu2"), (nn.Sigmoid(), "sigmoid"),
        (nn.Softplus(), None), (nn.ReLU(), None), (Gained(), None), (Buffered(), None), (nn.Sequential(nn.SiLU()), None), (nn.SiLU(inplace=True), None),
        (lambda x: F.silu(x), None), (functools.partial(F.silu), None), (_of_itself(nn.SiLU()), None), (type("Mine", (nn.SiLU,), {})(), None),
        (_with(ACT2FN["gelu"], act=lambda x: F.gelu(x)), None),
    ],
)  # fmt: skip
def test_activations_are_known_by_what_they_are(fn, name):
    assert slots.activation(fn) == slots.activation(fn) == name


def _gain(m: nn.Module) -> None:
    m.act_fn = Gained()


def _loaded_gain(m: nn.Module) -> None:
    m.act_fn = Gained()
    m.act_fn.gain.data.fill_(3.0)


def _dropout(m: nn.Module) -> None:
    m.act_fn = nn.Sequential(m.act_fn, nn.Dropout(0.5))


def _another(m: nn.Module) -> None:
    m.act_fn = nn.Tanh()


def _function(m: nn.Module) -> None:
    del m.act_fn
    m.act_fn = torch.tanh


def _approximate(m: nn.Module) -> None:
    m.act_fn = nn.GELU()
    slots.activation(m.act_fn)
    m.act_fn.approximate = "tanh"


def _hook(m: nn.Module) -> None:
    m.act_fn.register_forward_hook(lambda m, args, y: 0.5 * y)


def _forward(m: nn.Module) -> None:
    m.act_fn.forward = lambda x: x


def _class(m: nn.Module) -> None:
    m.act_fn.__class__ = nn.Softsign


@pytest.mark.parametrize("family", ["llama", "gemma", "nemotron", "mixtral"])
@pytest.mark.parametrize("change", [_gain, _loaded_gain, _dropout, _another, _function, _approximate, _hook, _forward, _class])
def test_a_changed_activation_counts(family, change):
    """Changed after a step of the patched model, in which it was what it had been; and first looked at while evaluating."""
    models = pair(family, num_hidden_layers=1)
    for m in models:
        step(m)
        for part in [p for p in m.modules() if hasattr(p, "act_fn")]:
            change(part)
    batch = batch_of(models[0])
    with torch.no_grad():
        assert torch.equal(*(m.eval()(**batch, use_cache=False).logits for m in models))
    theirs, ours = (step(m.train(), batch)[1] for m in models)
    assert_same_learning(ours, theirs, TOLERANCE)


@pytest.mark.parametrize(("owner", "name"), [(F, "silu"), (nn.SiLU, "forward"), (type(ACT2FN["silu"]), "forward")])
def test_a_replaced_function_counts(owner, name, monkeypatch):
    models = pair("llama", num_hidden_layers=1)
    before = [step(m)[1] for m in models]
    was = getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(was)(lambda *args, **kwargs: 0.5 * was(*args, **kwargs)))
    theirs, ours = (step(m)[1] for m in models)
    assert_same_learning(ours, theirs, TOLERANCE)
    assert torch.equal(theirs["loss"], before[0]["loss"]) == (owner is nn.SiLU and type(ACT2FN["silu"]) is not nn.SiLU)


def test_global_hooks_see_activations():
    seen = []
    models = pair("llama", num_hidden_layers=1)
    step(models[1])
    with torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m).__name__)):
        for m in models:
            seen.append(m)
            step(m)
    theirs, ours = seen[1 : seen.index(models[1])], seen[seen.index(models[1]) + 1 :]
    assert theirs.count(type(ACT2FN["silu"]).__name__) == ours.count(type(ACT2FN["silu"]).__name__) == 1
