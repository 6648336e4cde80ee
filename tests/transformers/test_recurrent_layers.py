"""Models with short convolutions and gated delta rules: as stock, and packed as alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hf_models import DEVICE, assert_same_bits, assert_same_learning, make, step, stock, tokens
from quick import further
from torch import Tensor
from transformers import CONFIG_MAPPING
from watching import noted

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching.report import patches_report
from liger_kernel.transformers.recognise.families import options_of

pytestmark = pytest.mark.usefixtures("models_by_references")

CONV = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
FAMILIES = {"qwen3_next": {}, "lfm2": CONV, "olmo_hybrid": {}, "qwen3_5_text": {}, "nemotron_h": {}, "kimi_linear": {}}
CHANNELS = {"kimi_linear": {}, "bailing_hybrid": {}, "glm5_next": {}}
STATE_SPACES = {"nemotron_h": {}, "granitemoehybrid": {}, "bamba": {}, "falcon_h1": {}, "zamba2": {}}
MORE = {"qwen3_5_moe_text": {}, "lfm2_moe": {}, "lfm3": CONV, "lara_mini": {}, "qwen4_exp": {}, "inkling2_text": {}}
MORE |= {n: {} for n in (STATE_SPACES | CHANNELS) if n not in FAMILIES}
EACH = pytest.mark.parametrize("family", [*FAMILIES, *further(*MORE)])
ENDS = [0, 5, 6, 14, 17]
IDS = tokens(1, 17)["input_ids"]
PLACES = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ENDS)])[None].to(DEVICE)
INDEX = (PLACES == 0).cumsum(1).int()


def model_of(family: str, ours: bool = True, **flags) -> torch.nn.Module:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {family}")
    attention = "eager" if family.startswith("inkling") else "sdpa"
    model = make(family, attention=attention, **(FAMILIES | MORE)[family])
    model.config.output_router_logits = False
    if ours:
        _apply_liger_kernel_to_instance(model, **flags)
    return model


def learnt(model: torch.nn.Module, *calls: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of these calls, one behind the other, and gradients of their squares."""
    model.zero_grad()
    # a tiny model of scans alone has no cache
    more = {"use_cache": False} if model.config.model_type in MORE else {}
    logits = torch.cat([model(**call, **more).logits for call in calls], 1)
    loss = logits.square().sum()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads | {"loss": loss.detach()}


def alone(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    return learnt(model, *(dict(input_ids=IDS[:, a:b]) for a, b in itertools.pairwise(ENDS)))


@EACH
@pytest.mark.parametrize("checkpointed", [False, True])
def test_learns_as_stock(family, checkpointed):
    batch = tokens()
    batch["attention_mask"] = (torch.arange(12) >= torch.tensor([[0], [4]])).long().to(DEVICE)
    found = []
    for ours in (False, True):
        model = model_of(family, ours)
        if checkpointed:
            model.gradient_checkpointing_enable()
        with stock(family):
            found.append(step(model, batch)[1])
    # stock's sums of decays are rounded more than ours, and most those of channels (5.7e-5)
    assert_same_learning(found[1], found[0], 1e-4 if family in CHANNELS else 1e-5)
    report = str(patches_report(model))
    rule = "ssd" if family in STATE_SPACES else "kda" if family in CHANNELS else "gated_delta_rule"
    assert "causal_conv1d" in report and (rule in report) == (not family.startswith(("lfm", "inkling")))


def assert_as_alone(model: torch.nn.Module, call: dict) -> None:
    """The documents of a packed row learn as alone, in each row of a call."""
    want, want_grads = alone(model)
    found, grads = learnt(model, dict(input_ids=IDS) | call)
    torch.testing.assert_close(found, want.expand_as(found), rtol=1e-5, atol=1e-5)
    assert_same_learning(grads, {n: len(found) * g for n, g in want_grads.items()}, 1e-4)


# glm5_next pools keys of the whole row; a warning says so
@pytest.mark.parametrize("family", [*FAMILIES, *further(*(name for name in MORE if name != "glm5_next"))])
def test_a_packed_row_is_its_documents(family):
    assert_as_alone(model_of(family), dict(position_ids=PLACES))


def given_bounds() -> dict:
    bounds = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    return {f"cu_seq_lens_{t}": bounds for t in "qk"} | {f"max_length_{t}": 8 for t in "qk"} | dict(position_ids=PLACES)


# how a call says where documents begin
SAYS = {
    "bounds": given_bounds,
    "index": lambda: dict(seq_idx=INDEX, position_ids=PLACES),
    "mask": lambda: dict(attention_mask=(INDEX.mT == INDEX).tril()[None, None], position_ids=PLACES),
    "rows": lambda: dict(input_ids=IDS.expand(2, -1), position_ids=PLACES.expand(2, -1)),
    "once for two rows": lambda: dict(input_ids=IDS.expand(2, -1), position_ids=PLACES),
}


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_how_documents_are_known(family, says):
    model = model_of(family)
    model.gradient_checkpointing_enable()
    assert_as_alone(model, SAYS[says]())


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_as_stock(family):
    """The prompt by our functions, which give a cache its states, and each token by stock's."""
    ids, mask = tokens(2, 9)["input_ids"], torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    mask[1, :4] = 0
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=mask, return_dict_in_generate=True)
    found = []
    for ours in (False, True):
        out = model_of(family, ours).eval().generate(ids, **options, output_logits=True)
        found.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)
    model = model_of(family).eval()
    with torch.no_grad():  # a prompt in two parts
        first = model(ids, use_cache=True)
        cache = {n: v for n, v in first.items() if n in ("cache", "past_key_values")}
        second = model(tokens(2, 3)["input_ids"], **cache, use_cache=True)
        whole = model(torch.cat((ids, tokens(2, 3)["input_ids"]), 1), use_cache=False)
    torch.testing.assert_close(second.logits, whole.logits[:, 9:], rtol=1e-4, atol=1e-5)


def test_packed_documents_are_not_continued():
    with pytest.raises(ValueError, match="Qwen3NextModel: packed documents have no state to continue"):
        model_of("qwen3_next")(IDS, position_ids=PLACES, use_cache=True)


def test_long_rows_on_a_cpu(monkeypatch):
    """Token by token they would take longer than stock's chunks, which then run each document."""
    monkeypatch.setattr("liger_kernel.transformers.recognise.recurrences.SHORT", 4)
    assert_as_alone(model_of("qwen3_5_text"), dict(position_ids=PLACES))


def test_compiles():
    """As one graph, and in two if positions have to be looked at."""
    model = model_of("lfm2").eval()
    want = alone(model)[0]
    with torch.no_grad():
        model.model.compile(backend="eager", fullgraph=True)
        one = model.model(IDS[:, :5], use_cache=False).last_hidden_state
        model.model.compile(backend="eager")
        found = model(IDS, position_ids=PLACES).logits
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.lm_head(one), want[:, :5], rtol=1e-5, atol=1e-5)


def test_gated_norms_are_computed_again(monkeypatch):
    """The projection after a rule saves what its norm computes again, to the same bits."""
    from liger_kernel.transformers.recognise import norms

    models = [model_of("kimi_linear", rematerialise=level) for level in (False, True)]
    # only now: classes that families.json does not know are tried when a model is patched
    calls = noted(monkeypatch, norms, "gated_rms_norm", lambda *_, **__: 1)
    found = [step(model)[1] for model in models]
    assert len(calls) == 1 + 2
    assert_same_bits(*found)


def test_with_everything_off_nothing_changes():
    off = dict(rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=False)
    assert not options_of("qwen3_next", off).recurrent and options_of("qwen3_next", {}).recurrent
    assert options_of("qwen3_next", off | {"recurrent": True}).recurrent
