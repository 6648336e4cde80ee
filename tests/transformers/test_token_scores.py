"""Scores of tokens, which trainers ask of a model's forward instead of logits: those of its
logits, whatever is around it."""

import importlib

import pytest
import torch
from adapters import lora
from hf_models import DEVICE, assert_same_learning, make, stock, tokens
from quick import words
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.head.token_scores import TokenScores, give_scores

# a cap, a multiplier, scales, a head behind a dense layer and a norm; states instead of attention
FAMILIES = words("llama gemma2 recurrent_gemma falcon_h1 xlstm modernbert-decoder cohere granite gpt2 mamba phi")
by_references = pytest.mark.usefixtures("models_by_references")


def targets(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as a preference trainer has them: of some tokens none, of some two."""
    first, second = torch.full_like(ids, -100), torch.full_like(ids, -100)
    first[0, 2:-2], first[1, -4:] = ids[0, 3:-1], 5
    second[1, -6:-3] = 7
    return first, second


def expected(logits: torch.Tensor, ids: torch.Tensor) -> TokenScores:
    logp = logits.float().log_softmax(-1)
    picked = [logp.gather(-1, t.clamp(min=0)[..., None])[..., 0].where(t != -100, 0) for t in targets(ids)]
    return TokenScores(*picked, logits.float().mean(-1).detach())


def learned(model: nn.Module, scores: TokenScores) -> dict[str, torch.Tensor]:
    """The scores, and gradients of a loss made of both sets."""
    weights = torch.linspace(-1, 1, scores.logp.numel(), device=DEVICE).view(scores.logp.shape)
    loss = (weights * scores.logp + weights.flip(0) * scores.logp_of_others).sum()
    model.zero_grad()
    loss.backward()
    of_tokens = {"first": scores.logp.detach(), "second": scores.logp_of_others.detach(), "mean": scores.mean_logit}
    found = {"loss": loss.detach()} | of_tokens
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def of_logits(model: nn.Module, **kwargs) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    ids = tokens()["input_ids"]
    return learned(model, expected(model(ids, use_cache=False, **kwargs).logits, ids))


def of_scores(model: nn.Module, **kwargs) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    ids = tokens()["input_ids"]
    give_scores(model)
    out = model(ids, use_cache=False, token_targets=targets(ids), **kwargs)
    assert isinstance(out, TokenScores)
    return learned(model, out)


class Rows(TorchDispatchMode):
    """The most rows of a tensor with ``width`` columns that an operator makes."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.ndim > 1 and t.shape[-1] == self.width and t.is_contiguous():
                self.most = max(self.most, t.numel() // self.width)
        return out


@by_references
@pytest.mark.parametrize("model_type", FAMILIES)
def test_scores_are_those_of_the_logits(model_type):
    with stock(model_type):
        before = of_logits(make(model_type))
    assert_same_learning(of_scores(make(model_type)), before, 3e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_no_logits(model_type, monkeypatch):
    """Gemma-2's cap makes the mean of the logits no mean of the head's weight: chunks, again."""
    for module in ("ops.losses.chunks", "ops.losses.linear_cross_entropy", "transformers.head.token_scores"):
        monkeypatch.setattr(importlib.import_module(f"liger_kernel.{module}"), "auto_chunk_rows", lambda *_: 4)
    V = 263
    model = make(model_type, vocab_size=V)
    with Rows(V) as stock:
        before = of_logits(model)
    with Rows(V) as seen:
        found = of_scores(model)
    assert_same_learning(found, before, 3e-5)
    assert stock.most == 24 and seen.most <= 4, f"{seen.most} rows of logits"


@by_references
@pytest.mark.parametrize("first", ["patch", "scores"])
def test_a_patched_model(first):
    before, model = of_logits(make("llama")), make("llama")
    if first == "scores":
        give_scores(model)
    _apply_liger_kernel_to_instance(model=model)
    assert_same_learning(of_scores(model), before, 3e-5)
    batch = tokens()
    assert model(**batch).logits is None  # and learns as before
    assert model(batch["input_ids"]).logits is not None


def with_bias(model):
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.lm_head.out_features, device=DEVICE))


AROUND = {
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda head, args, out: out * 1.5) and None,
    "lora": lambda model: lora(model, target_modules=["q_proj", "lm_head"], lora_dropout=0.5),
    "lora of the body": lambda model: lora(model, target_modules=["q_proj"]),
    "a bias": with_bias,
    "checkpointed": lambda model: model.train().gradient_checkpointing_enable(),
}


@by_references
@pytest.mark.parametrize("change", AROUND)
def test_whatever_is_around_the_model(change):
    def changed():
        model = make("llama")
        return AROUND[change](model) or model

    assert_same_learning(of_scores(changed()), of_logits(changed()), 3e-5)


@by_references
def test_nothing_to_score():
    model, ids = make("llama"), tokens()["input_ids"]
    give_scores(model)
    none = torch.full_like(ids, -100)
    out = model(ids, token_targets=(none, none))
    (out.logp.sum() + out.logp_of_others.sum()).backward()
    assert not out.logp.any() and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with pytest.raises(ValueError, match=r"logits must be of \(2, 11\) tokens, got \(2, 12\)"):
        model(ids, token_targets=(none[:, 1:], none[:, 1:]))


@by_references
def test_the_head_is_back(monkeypatch):
    """After a call, after an error, and for calls that want no scores."""
    model, ids = make("llama"), tokens()["input_ids"]
    head = model.lm_head
    give_scores(model)
    give_scores(model)
    assert isinstance(model(ids, token_targets=targets(ids)), TokenScores) and model.lm_head is head
    assert not isinstance(model(ids), TokenScores)
    with pytest.raises(RuntimeError, match="broken"), monkeypatch.context() as m:
        m.setattr(model.model.layers[0], "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("broken")))
        model(ids, token_targets=targets(ids))
    assert model.lm_head is head and isinstance(model(ids, token_targets=targets(ids)), TokenScores)
    assert model(ids).logits is not None


@pytest.mark.slow
@by_references
def test_compiled():
    model, ids = make("llama", num_hidden_layers=1), tokens()["input_ids"]
    give_scores(model)
    out = torch.compile(model, backend="aot_eager")(ids, use_cache=False, token_targets=targets(ids))
    assert_same_learning(learned(model, out), of_logits(make("llama", num_hidden_layers=1)), 3e-5)
