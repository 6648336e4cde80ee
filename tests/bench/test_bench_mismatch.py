"""``liger bench mismatch``: what its numbers mean, and that it sees a trainer that scores something
else."""

import functools
import json
import math

import pytest
import torch
import transformers

from liger_kernel.bench import mismatch
from liger_kernel.bench.mismatch import ScoredRows, compare
from liger_kernel.train.mistakes import UserError

pytestmark = pytest.mark.usefixtures("exact_dots")
SMALL = ["--prompt", "5", "--new", "4", "--answers", "3", "--batch", "1,3", "--train-batch", "2"]
MIXTURE = dict(
    model_type="qwen3_moe", hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=99, num_experts=8, num_experts_per_tok=2,
    max_position_embeddings=64,
)  # fmt: skip


def test_numbers_of_a_row():
    sampler = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    trainer = sampler + torch.tensor([[0.0, 0.5], [-0.25, 0.0]])
    routes = torch.zeros(2, 2, 4, 2, dtype=torch.int64)  # layers, rows, tokens, experts
    other = routes.clone()
    other[1, 0, 3], other[0, 1, 0] = 1, 1  # one of the tokens that predict an answer, and one of a prompt
    ids = torch.zeros(2, 5, dtype=torch.int64)
    row, quantiles = compare(ScoredRows(ids, sampler, routes), ScoredRows(ids, trainer, other), prompt=3)
    assert (row["tokens"], row["equal"], row["routers"]) == (4, 0.5, 0.25)
    kl = sum(math.exp(d) - 1 - d for d in (0.5, -0.25)) / 4
    assert row["kl"] == pytest.approx(kl, rel=1e-6) and row["most"] == 0.5 and row["ratio"] == math.exp(0.5)
    assert quantiles[0] == 0 and quantiles[-1] == 0.5 and row["median"] == 0.25


def test_rows_of_a_tiny_model(tmp_path, capsys):
    files = "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png")
    assert mismatch.main([*SMALL, "--against", "stock,ours:fp32-head", "--dtype", "fp32", *files]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["variant"], row["batch"]) for row in rows[:3]] == [("stock", 1), ("stock", 3), ("ours:fp32-head", 1)]
    for row in rows:
        assert row["tokens"] == 12 and 0 <= row["kl"] < 1e-9 and row["most"] < 1e-5 and row["routers"] is None
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "ours:fp32-head" in capsys.readouterr().out


def test_a_mixture_shows_its_routers_and_another_policy_is_seen(monkeypatch, capsys):
    monkeypatch.setitem(mismatch.MODELS, "tiny", MIXTURE)
    a = mismatch.parse([*SMALL, "--dtype", "fp32"])
    same = next(mismatch.measure(a, "ours"))
    score = mismatch.score

    def after_a_step(model, *rest):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        return score(model, *rest)

    monkeypatch.setattr(mismatch, "score", after_a_step)
    other = next(mismatch.measure(a, "ours"))
    assert same["routers"] == 0 and same["most"] < 1e-5
    assert other["most"] > 1e-3 and other["equal"] < 0.5 and other["kl"] > same["kl"]


def test_the_invariant_row_is_equal_and_says_so(capsys):
    """A static cache, one answer and three at a time, and two rows at a time in the trainer."""
    flags = "--prompt 19 --new 4 --answers 3 --batch 1,3 --train-batch 2 --dtype fp32 --against ours,ours:invariant"
    assert mismatch.main(flags.split()) == 0
    shares = [line.split()[3] for line in capsys.readouterr().out.splitlines() if line.startswith("ours")]
    assert shares[2:] == ["100.00%", "100.00%"] and shares[:2] != shares[2:]


@pytest.mark.parametrize("growing", [False, True])
def test_a_padded_prompt_with_a_cache_has_the_bits_of_one_alone(growing):
    model = mismatch.stock_model(mismatch.parse([*SMALL, "--dtype", "fp32"]))
    side, kept = mismatch.ROWS["ours:invariant"], []
    ids = torch.arange(40).view(2, 20) + 7
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # the second one has three tokens less, on the left
    with mismatch.patched(model, side), torch.no_grad():
        for rows, seen in ((ids, mask), (ids[1:, 3:], mask[1:, 3:])):
            static = functools.partial(transformers.StaticCache, max_cache_len=24)
            cache = (transformers.DynamicCache if growing else static)(config=model.config)
            places = (seen.cumsum(1) - 1).clamp(min=0)
            prompt, last = slice(0, -2), slice(-2, None)
            how = dict(past_key_values=cache)
            model(rows[:, prompt], attention_mask=seen[:, prompt], position_ids=places[:, prompt], **how)
            # two tokens at once, behind a prompt
            out = model(rows[:, last], attention_mask=seen, position_ids=places[:, last], **how)
            kept.append(out.logits[-1])
        whole = model(ids[1:, 3:], use_cache=False).logits[0, -2:]
    assert torch.equal(*kept) and torch.equal(kept[1], whole)


def test_a_head_that_does_more_is_refused(monkeypatch):
    monkeypatch.setattr(mismatch.ScoringHead, "logits", lambda self, hidden, fp32: hidden.sum(-1, keepdim=True) + 9)
    with pytest.raises(UserError, match="more than its head's product"):
        next(mismatch.measure(mismatch.parse(SMALL), "stock"))
