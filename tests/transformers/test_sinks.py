"""Models whose attention has sinks: eager attention replaced by a kernel, with masks that nobody makes."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_models import assert_same_bits, assert_same_learning, make, step, stock, tokens
from torch import Tensor, nn

from liger_kernel.train.config import TrainConfig
from liger_kernel.transformers import _apply_liger_kernel, _apply_liger_kernel_to_instance, restore
from liger_kernel.transformers.lazy_mask import LazyMask, Seen
from liger_kernel.transformers.recognise import attentions
from liger_kernel.transformers.recognise.rows import family

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("keeps eager attention under transformers older than 5", allow_module_level=True)

FAMILIES = [t for t in ("gpt_oss", "granite_swa", "granitemoe_swa") if t in transformers.CONFIG_MAPPING]
LENGTH = 14


@pytest.fixture
def seen(monkeypatch) -> list[dict]:
    """What our attention was told in each call, but those of recognition."""
    calls, attention = [], attentions.sink_attention
    for model_type in FAMILIES:
        family(model_type)

    def spied(*args, **kwargs):
        calls.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(attentions, "sink_attention", spied)
    return calls


def sink_model(model_type: str = "gpt_oss", **more) -> nn.Module:
    """Two layers, the first with a window of 4 tokens."""
    return make(model_type, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4, **more)


def pair(model_type: str = "gpt_oss", **flags) -> tuple[nn.Module, nn.Module]:
    """The same model stock and patched."""
    ours = sink_model(model_type)
    _apply_liger_kernel_to_instance(ours, **flags)
    return sink_model(model_type), ours


def padded(side: str) -> dict[str, Tensor]:
    batch = tokens(3, LENGTH)
    kept = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 4, 6])[:, None]
    mask = (kept if side == "right" else kept.flip(1)).to(batch["labels"].device)
    return batch | {"attention_mask": mask.long(), "labels": batch["labels"].masked_fill(~mask, -100)}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("batch", [tokens(2, LENGTH), padded("right"), padded("left")], ids=["full", "right", "left"])
def test_learns_as_stock(seen, model_type, batch):
    theirs, ours = pair(model_type)
    with stock(model_type):
        expected = step(theirs, batch)[1]
    found = step(ours, batch)[1]
    assert [call["window"] for call in seen] == [4, None]
    assert_same_learning(found, expected, 1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_off_is_stock(seen, model_type):
    theirs, ours = pair(model_type, attention=False, rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False, rematerialise=False)
    with stock(model_type):
        expected = step(theirs, padded("right"))[1]
    assert_same_bits(step(ours, padded("right"))[1], expected)
    assert not seen


def test_a_run_that_names_eager_attention_gets_it():
    assert TrainConfig(attention="eager").kernel_flags["attention"] is False
    assert "attention" not in TrainConfig().kernel_flags


def test_attention_weights_are_stock(seen):
    theirs, ours = pair()
    batch = tokens(2, LENGTH)
    expected, found = (m(**batch, output_attentions=True).attentions for m in (theirs, ours))
    assert len(found) == 2 and all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected))
    assert not seen


def test_dropout_is_stock(seen):
    theirs, ours = pair()
    for model in (theirs, ours):
        for m in model.modules():
            if hasattr(m, "attention_dropout"):
                m.attention_dropout = 0.5
    assert_same_learning(step(ours)[1], step(theirs)[1], 1e-5)
    assert not seen


def test_other_masks_are_stock(seen):
    """A mask of the user's for every pair of tokens."""
    batch = tokens(2, LENGTH)
    ahead = torch.ones(2, 1, LENGTH, LENGTH, device=batch["labels"].device).triu(3)
    mask = -1e9 * ahead
    theirs, ours = pair(next(t for t in FAMILIES if t != "gpt_oss"))
    assert_same_learning(step(ours, batch | {"attention_mask": mask})[1], step(theirs, batch | {"attention_mask": mask})[1], 1e-5)
    assert not seen


@pytest.mark.parametrize("model_type", FAMILIES)
def test_generates_as_stock(model_type):
    theirs, ours = (m.eval() for m in pair(model_type))
    given = dict(input_ids=tokens(2, 5)["input_ids"], max_new_tokens=9, do_sample=False, pad_token_id=0)
    with stock(model_type):
        expected = theirs.generate(**given)
    assert torch.equal(ours.generate(**given), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("flags", [{}, {"keep_attention": True}, {"activation_offloading": True}], ids=str)
def test_checkpointed(seen, reentrant, flags):
    """The backward runs the same attention again, unless it was kept."""
    theirs, ours = pair(**flags)
    for model in (theirs, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same_learning(step(ours, padded("right"))[1], step(theirs, padded("right"))[1], 1e-5)
    assert len(seen) == 4


@pytest.mark.parametrize("model_type", [t for t in FAMILIES if t != "gpt_oss"])
def test_packed_rows(seen, model_type):
    """Positions that begin anew say where documents begin, in families that give them to those who make masks."""
    batch = tokens(1, LENGTH)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (5, 1, LENGTH - 6)])[None].to(batch["labels"].device)
    theirs, ours = pair(model_type)
    with stock(model_type):
        expected = step(theirs, batch)[1]
    assert_same_learning(step(ours, batch)[1], expected, 1e-5)
    assert len(seen) == 2


def test_first_tokens_of_documents():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 3, 3]])
    assert Seen(None, documents, None).first.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 3, 3]]


def test_classes(seen):
    expected = step(sink_model(), padded("right"))[1]
    try:
        _apply_liger_kernel("gpt_oss")
        assert_same_learning(step(sink_model(), padded("right"))[1], expected, 1e-5)
        assert len(seen) == 2
    finally:
        restore("gpt_oss")
    assert_same_bits(step(sink_model(), padded("right"))[1], expected)
    assert len(seen) == 2


def test_compiled_layers():
    """A mask that nobody makes reaches layers that are compiled one by one."""
    theirs, ours = pair()
    for layer in ours.model.layers:
        layer.compile()
    assert_same_learning(step(ours, padded("right"))[1], step(theirs, padded("right"))[1], 1e-4)


def test_compiled_whole():
    theirs, ours = pair()
    batch = padded("right")
    expected, found = step(theirs, batch)[0].loss, torch.compile(ours)(**batch).loss
    assert torch.allclose(found, expected, rtol=1e-5)


def test_a_mask_is_made_once_and_only_if_it_is_read():
    made = []

    def maker(**arguments):
        made.append(arguments)
        return torch.zeros(1, 1, 3, 3)

    mask = LazyMask(Seen(None, None, None), maker, dict(batch_size=1, q_length=3, kv_length=3, device=torch.device("cpu")), torch.float32)
    assert mask.shape == (1, 1, 3, 3) and mask.dtype == torch.float32 and "LazyMask" in repr(mask) and not made
    assert (mask + 1).sum() == 9 and mask[..., :2].shape == (1, 1, 3, 2) and len(made) == 1


def test_look_alikes_are_not_taken():
    """Attention of families whose layers change their masks, make them elsewhere, or compute scores in fp32."""
    from liger_kernel.transformers.recognise.family import modeling

    for model_type in {"deepseek_v4", "flint", "hy_v4", "mimo_v2_flash", "openai_privacy_filter", "llama"} & {*transformers.CONFIG_MAPPING}:
        function = modeling(model_type).eager_attention_forward
        assert not attentions.has_sinks("eager_attention_forward", function), model_type
