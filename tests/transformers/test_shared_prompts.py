"""Prompts computed once: the same log-probabilities and gradients as of padded rows."""

import functools

import hf_models
import pytest
import torch
from hf_models import DEVICE, assert_same_learning, checkpointed, make, step
from torch import Tensor

from liger_kernel.transformers import _apply_liger_kernel_to_instance, answer_logprobs, prefix_attention, shared_prompts
from liger_kernel.transformers.patching import patches
from liger_kernel.transformers.prompt_trees import Prompts

pytestmark = pytest.mark.usefixtures("models_by_references")

A = 4
# tokens of each prompt, which prompt a row has, and tokens of its answer: a prompt of one answer, an answer of
# none, and a prompt whose only answer has none
PROMPTS, OWNER, ANSWERS = (6, 3, 5, 2), (1, 0, 1, 3, 2, 0, 1), (4, 2, 0, 0, 3, 4, 1)
TOKENS = sum(PROMPTS) + sum(ANSWERS)
WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
MODELS = {"llama": dict(num_key_value_heads=2), "qwen3": {}, "qwen3_moe": {}, "gemma3_text": WINDOWS}


def batch(owner=OWNER, answers=ANSWERS) -> dict[str, Tensor]:
    """Prompts padded on the left, answers on the right; only answers have labels."""
    P, draw = max(PROMPTS), torch.Generator().manual_seed(1)
    of_prompts = torch.randint(3, 90, (len(PROMPTS), P), generator=draw)
    ids = torch.cat((of_prompts[list(owner)], torch.randint(3, 90, (len(owner), A), generator=draw)), 1)
    before = torch.arange(P) >= P - torch.tensor(PROMPTS)[list(owner), None]
    real = torch.cat((before, torch.arange(A) < torch.tensor(answers)[:, None]), 1)
    ids = torch.where(real, ids, torch.randint(3, 90, ids.shape, generator=draw))
    labels = ids.masked_fill(~real, -100).index_fill(1, torch.arange(P), -100)
    return {k: v.to(DEVICE) for k, v in dict(input_ids=ids, attention_mask=real.long(), labels=labels).items()}


def model_of(model_type: str, patched: bool = True, **more) -> torch.nn.Module:
    model = make(model_type, attention="sdpa", **{**MODELS.get(model_type, {}), **more})
    model.config.output_router_logits = False
    if patched:
        _apply_liger_kernel_to_instance(model)
    return model


def shared(model, given=None) -> dict[str, Tensor]:
    with shared_prompts(model, A):
        return step(model, given or batch())[1]


def said(call) -> list[str]:
    patches.WARNED.clear()
    return hf_models.said(call, "shared_prompts: ")


@pytest.fixture(autouse=True)
def rows(monkeypatch) -> list[int]:
    """Tokens of each row that layers compute."""
    found, arguments = [], Prompts.arguments
    monkeypatch.setattr(
        Prompts, "arguments", lambda self, given: found.append(len(self.index)) or arguments(self, given)
    )
    return found


def scores(q, k, span, scale):
    """Scores (H, queries, keys), and keys' index of each query's head."""
    ends = lambda n, bounds: torch.bucketize(torch.arange(n), bounds[1:].long(), right=True)
    i, j = ends(len(q), span.of_q), ends(len(k), span.of_k)
    sees = i[:, None] == j
    if span.causal:
        sees &= torch.arange(len(q))[:, None] >= torch.arange(len(k))
    assert span.longest_q == span.of_q.diff().max() and span.longest_k == span.of_k.diff().max()
    assert span.of_q[-1] == len(q) and span.of_k[-1] == len(k) and span.of_q.diff().min() > 0 < span.of_k.diff().min()
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s.masked_fill(~sees, -torch.inf)


def grouped(t, q):
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def forward(q, k, v, span, scale):
    """What Flash Attention gives, in plain PyTorch."""
    s = scores(q, grouped(k, q), span, scale)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), grouped(v, q)), s.logsumexp(-1)


def backward(do, q, k, v, o, lse, span, scale):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p = (scores(q, grouped(k, q), span, scale) - lse[..., None]).exp()
    ds = p * (torch.einsum("ihd,jhd->hij", do, grouped(v, q)) - (do * o).sum(-1).t()[..., None]) * scale
    of_heads = lambda t: t.view(len(k), k.shape[1], -1, k.shape[2]).sum(2)
    dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p, do)
    return torch.einsum("hij,jhd->ihd", ds, grouped(k, q)), of_heads(dk), of_heads(dv)


@pytest.fixture
def served(monkeypatch) -> list:
    """Prefix attention runs, by plain PyTorch on a CPU; its calls."""
    calls = []
    if DEVICE == "cpu":
        monkeypatch.setattr(prefix_attention, "supports", lambda *_: True)
        monkeypatch.setattr(prefix_attention, "_forward", lambda *given: calls.append(given[3]) or forward(*given))
        monkeypatch.setattr(prefix_attention, "_backward", backward)
    return calls


@pytest.mark.parametrize("by_prefix", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_loss_and_gradients_are_those_of_padded_rows(model_type, by_prefix, rows, request):
    want = step(model_of(model_type), batch())[1]
    calls = request.getfixturevalue("served") if by_prefix else None
    model = model_of(model_type)
    assert said(lambda: assert_same_learning(shared(model), want, 1e-5)) == []
    assert rows[-1:] == [TOKENS]
    if calls is not None and DEVICE == "cpu":
        assert len(calls) == (2 if model_type == "gemma3_text" else 4)  # a window is the model's own attention's
    assert "forward" not in vars(model.model)


def test_what_is_stock_checkpointed_or_unpads_shares_prompts_too(served, rows):
    want = step(model_of("llama", False), batch())[1]
    assert_same_learning(shared(model_of("llama", False)), want, 1e-5)
    assert_same_learning(shared(checkpointed(model_of("llama", False).train())), want, 1e-5)
    model = model_of("llama", False)
    _apply_liger_kernel_to_instance(model, unpad=True, keep_attention=True)
    assert_same_learning(shared(checkpointed(model.train())), want, 1e-5)
    assert rows.count(TOKENS) == 3


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("prompts", [1, 2])  # of a single one, cuDNN computes the second call on Hopper
def test_attention_in_16_bits(prompts, monkeypatch):
    span = lambda of_q, of_k, causal: prefix_attention.Span(
        *(torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (of_q, of_k)), max(of_q), max(of_k), causal
    )
    asked, answers = [70, 33][:prompts], [40, 9, 25, 1]
    by_prompt = [sum(answers[i::prompts]) for i in range(prompts)]
    P, N = sum(asked), sum(asked + answers)
    of = prefix_attention.Branches(span(asked + answers, asked + answers, True), span(by_prompt, asked, False), 0, P)
    torch.manual_seed(0)
    given = [torch.randn(N, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2, 4)]

    def learn(device, dtype):
        q, k, v, do = (t.to(device, dtype) for t in given)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = prefix_attention._Joined.apply(*leaves, of.to(torch.device(device)), None)
        return [t.detach().cpu().float() for t in (out, *torch.autograd.grad(out, leaves, do))]

    found = learn(DEVICE, torch.bfloat16)
    monkeypatch.setattr(prefix_attention, "_forward", forward)
    monkeypatch.setattr(prefix_attention, "_backward", backward)
    for got, want in zip(found, learn("cpu", torch.float32)):
        assert (got - want).norm() < 0.02 * want.norm()


def test_log_probabilities_of_answers(served, rows):
    given = batch()
    given.pop("labels")
    real = given["attention_mask"][:, -A:] != 0
    weights = torch.randn(real.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def learnt(model, logp, entropy):
        (weights * (logp + 0.1 * entropy)).sum().backward()
        return {n: p.grad for n, p in model.named_parameters()} | {"logp": logp.detach(), "entropy": entropy.detach()}

    model = model_of("llama", False)
    z = (model(**given, use_cache=False).logits[:, -A - 1 : -1].float() / 0.7).log_softmax(-1)
    logp, entropy = z.gather(-1, given["input_ids"][:, -A:, None])[..., 0] * real, -(z.exp() * z).sum(-1) * real
    want = learnt(model, logp, entropy)
    for model in (model_of("llama", False), model_of("llama")):
        got = learnt(model, *answer_logprobs(model, **given, answers=A, temperature=0.7, entropy=True))
        assert_same_learning(got, want, 1e-5)
    assert rows == [TOKENS] * 2
    with torch.no_grad():
        torch.testing.assert_close(answer_logprobs(model, **given, answers=A, temperature=0.7), want["logp"])


def test_a_batch_without_padding_or_mask_shares_prompts(served, rows):
    given = {k: v[:, -A - 2 :] for k, v in batch(OWNER, (A,) * 7).items()}
    model, mask = model_of("llama"), given.pop("attention_mask")
    want = step(model, given)[1]
    assert mask.all()
    assert_same_learning(shared(model, given), want, 1e-5)
    assert rows == [4 * 2 + 7 * A]


def test_other_prompts_and_other_positions_run_as_they_are(rows):
    model, places = model_of("llama"), torch.arange(max(PROMPTS) + A) * torch.tensor([[1], [2]])
    other, moved = batch((0, 1, 2), (4, 2, 3)), batch((0, 0), (4, 2)) | dict(position_ids=places.to(DEVICE))
    want = [step(model, given)[1] for given in (other, moved)]
    ours = []
    assert said(lambda: ours.extend(shared(model, given) for given in (other, moved))) == []
    for got, each in zip(ours, want):
        assert_same_learning(got, each, 0)
    assert rows == []


def test_a_recurrent_layer_says_why_and_runs_as_it_was(rows):
    for patched in (False, True):
        model = model_of("olmo_hybrid", patched)
        texts = said(functools.partial(shared, model))
        assert len(texts) == 1 and "OlmoHybridModel computes a prompt for each" in texts[0]
    assert rows == [] and "recurrent" in texts[0]


def test_what_is_no_batch_of_answers_is_refused():
    model = model_of("llama", False)
    for answers, got in ((0, "0"), (10, "10")):
        refused = pytest.raises(ValueError, match=f"shared_prompts: answers must be .*, got {got}")
        with refused, shared_prompts(model, answers):
            model(**batch())
    with pytest.raises(ValueError, match=r"shared_prompts: model must be .*, got Linear"):
        shared_prompts(torch.nn.Linear(2, 2), 1).__enter__()
