"""Patched models whose head multiplies in FP8 where the loss is computed."""

import types

import pytest
import torch
from hf_models import make, step, tokens
from torch import nn
from watching import noted

from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.transformers.head import loss as head_loss, loss_functions
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.head.head_weights import FP8

pytestmark = [
    pytest.mark.usefixtures("models_by_references"),
    pytest.mark.skipif(
        torch.cuda.is_available() and lacking(torch.device("cuda")) is not None, reason="this GPU has no FP8"
    ),
]


@pytest.fixture
def asked(monkeypatch) -> list[str | None]:
    """What the loss of each head was asked for."""
    return noted(monkeypatch, head_loss, "linear_cross_entropy", lambda *_, fp8=None, **__: fp8)


def with_head(model: nn.Module, recipe: str | None) -> nn.Module:
    model.forward = types.MethodType(fused(type(model).forward), model)
    if recipe is not None:
        model.__dict__[FP8] = recipe
    return model.train()


@pytest.mark.parametrize(
    "options",
    [{}, dict(num_items_in_batch=torch.tensor(18)), dict(return_token_accuracy=True, label_smoothing=0.1)],
    ids=str,
)
@pytest.mark.parametrize(
    "family, recipe", [("llama", "tensorwise"), ("gemma2", "rowwise")]
)  # gemma2: tied embeddings, soft-capped logits
def test_a_step_learns_almost_the_same(family, recipe, options, asked):
    exact_out, exact = step(with_head(make(family, torch.bfloat16), None), **options)
    ours_out, ours = step(with_head(make(family, torch.bfloat16), recipe), **options)
    assert asked == [None, recipe] and ours.keys() == exact.keys() and ours_out.logits is None
    assert 0 < (ours["loss"] - exact["loss"]).abs() < 5e-3 * exact["loss"]
    for name, g in exact.items():
        assert (ours[name].float() - g.float()).norm() < 0.1 * g.float().norm() + 1e-4, name
    if "return_token_accuracy" in options:
        assert (ours_out.token_accuracy - exact_out.token_accuracy).abs() <= 1 / 18


def test_logits_that_somebody_reads_are_those_of_the_model(asked):
    model = with_head(make("llama"), "tensorwise")
    out = model(**tokens(), skip_logits=False)
    expected = model.lm_head(model.model(tokens()["input_ids"]).last_hidden_state)
    torch.testing.assert_close(out.logits, expected)
    assert asked == [] or asked == ["tensorwise"]


def test_a_loss_of_another_package_stays_in_16_bits(asked, monkeypatch):
    model, ours = with_head(make("llama"), "tensorwise"), loss_functions.LigerForCausalLMLoss
    monkeypatch.setattr(loss_functions, "LigerForCausalLMLoss", lambda *args, **kw: ours(*args, **kw))
    with pytest.warns(
        UserWarning, match="fp8_head: the head stays in 16 bits, because other code has replaced its loss"
    ):
        model(**tokens()).loss.backward()


def test_a_head_with_adapters_stays_in_16_bits():
    peft = pytest.importorskip("peft")
    model = with_head(make("llama", torch.bfloat16), "tensorwise")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"]), model)
    with pytest.warns(UserWarning, match="fp8_head: the head stays in 16 bits, because it has adapters"):
        model(**tokens()).loss.backward()


@pytest.mark.parametrize("why", ["another loss", "a hook that needs the logits"])
def test_where_it_has_no_effect_it_says_so(why, asked):
    model = with_head(make("llama"), "tensorwise")
    if why == "another loss":
        model.loss_function = lambda logits, labels, **_: logits.square().mean()
    else:
        model.lm_head.register_forward_hook(lambda m, args, out: out.clone())
    with pytest.warns(UserWarning, match="fp8_head: the head stays in 16 bits, because "):
        model(**tokens()).loss.backward()
    assert not asked
