"""Models whose attention has sinks: eager attention replaced by a kernel, with masks that nobody
makes."""

import copy
import itertools
import pickle

import pytest
import torch
import transformers
from hf_models import assert_same_bits, assert_same_learning, checkpointed, make, step, stock, tokens
from quick import further
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from watching import noted

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.lazy_mask import LAZILY_EAGER, LazyMask, first_of, known
from liger_kernel.transformers.recognise import attentions
from liger_kernel.transformers.recognise.attentions import SinkAttention
from liger_kernel.transformers.recognise.compare import reproduces
from liger_kernel.transformers.recognise.families import family, modeling

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("keeps eager attention under transformers older than 5", allow_module_level=True)

FAMILIES = [t for t in ("gpt_oss", "granite_swa", "granitemoe_swa") if t in transformers.CONFIG_MAPPING]
LENGTH = 14
# no flag but attention
ALONE = dict(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False, rematerialise=False)


@pytest.fixture
def seen(monkeypatch) -> list[dict]:
    """What our attention was told in each call, but those of recognition."""
    for model_type in FAMILIES:
        family(model_type)
    return noted(monkeypatch, attentions, "sink_attention", lambda *_, **options: options)


def sink_model(model_type: str = "gpt_oss", **more) -> nn.Module:
    """Two layers, the first with a window of 4 tokens."""
    kinds = dict(layer_types=["sliding_attention", "full_attention"])
    return make(model_type, num_hidden_layers=2, **kinds, **{"sliding_window": 4} | more)


def pair(model_type: str = "gpt_oss", config=None, **flags) -> tuple[nn.Module, nn.Module]:
    theirs, ours = (sink_model(model_type, **config or {}) for _ in range(2))
    _apply_liger_kernel_to_instance(ours, **flags)
    return theirs, ours


def assert_alike(models: tuple[nn.Module, nn.Module], batch: dict | None = None, tolerance: float = 1e-5) -> None:
    theirs, ours = (step(model, batch)[1] for model in models)
    assert_same_learning(ours, theirs, tolerance)


def padded(side: str) -> dict[str, Tensor]:
    batch = tokens(3, LENGTH)
    kept = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 4, 6])[:, None]
    mask = (kept if side == "right" else kept.flip(1)).to(batch["labels"].device)
    return batch | {"attention_mask": mask.long(), "labels": batch["labels"].masked_fill(~mask, -100)}


BATCHES = {"full": lambda: tokens(2, LENGTH), "right": lambda: padded("right"), "left": lambda: padded("left")}
EACH_ONCE = list(zip(FAMILIES, BATCHES))


@pytest.mark.slow
def test_recognition_depends_on_no_draw():
    """Gradients of sinks in bf16 may be rounded to neighbours; that is no other attention."""
    module = modeling("gpt_oss")
    for seed in range(2):
        torch.manual_seed(seed)
        assert reproduces(SinkAttention(), module, module.eager_attention_forward), seed


@pytest.mark.parametrize(
    "model_type, form",
    [*EACH_ONCE, *further(*(both for both in itertools.product(FAMILIES, BATCHES) if both not in EACH_ONCE))],
)
def test_learns_as_stock(seen, model_type, form):
    batch = BATCHES[form]()
    theirs, ours = pair(model_type)
    with stock(model_type):
        expected = step(theirs, batch)[1]
    found = step(ours, batch)[1]
    assert [call["window"] for call in seen] == [4, None]
    assert_same_learning(found, expected, 1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_off_is_stock(seen, model_type):
    theirs, ours = pair(model_type, attention=False, **ALONE)
    with stock(model_type):
        expected = step(theirs, padded("right"))[1]
    assert_same_bits(step(ours, padded("right"))[1], expected)
    assert not seen


def test_attention_weights_are_stock(seen):
    theirs, ours = pair()
    batch = tokens(2, LENGTH)
    expected, found = (m(**batch, output_attentions=True).attentions for m in (theirs, ours))
    assert len(found) == 2 and all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected))
    assert not seen


def test_a_mask_of_somebodys_own_for_eager_attention_is_stock(seen, monkeypatch):
    """It shows everybody the first token."""
    shown = lambda mask: mask.index_fill(3, torch.tensor(0, device=mask.device), 0)
    functions = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, "eager", lambda **given: shown(eager_mask(**given)))
    assert_alike(pair("granite_swa", **ALONE), padded("left"))
    assert not seen


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_padding_mask_that_is_filled_anew(seen, recomputed):
    """Of the next batch, before the backward."""
    found = []
    for model in pair("granite_swa", **ALONE):
        if recomputed:
            checkpointed(model)
        batch = padded("left")
        batch["attention_mask"] = batch["attention_mask"].bool()
        loss = model.train()(**batch, use_cache=False).loss
        batch["attention_mask"].fill_(True)
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()})
    assert_same_learning(found[1], found[0], 1e-5)
    assert len(seen) == (4 if recomputed else 2)


def drop(model: nn.Module) -> None:
    for m in model.modules():
        if hasattr(m, "attention_dropout"):
            m.attention_dropout = 0.5


def hide(model: nn.Module) -> None:
    hides = lambda module, args, kwargs: kwargs["attention_mask"].__setitem__((..., slice(3)), -1e9)
    model.model.layers[1].register_forward_pre_hook(hides, with_kwargs=True)


def of_every_pair(batch: dict) -> dict:
    ahead = torch.ones(3, 1, LENGTH, LENGTH, device=batch["labels"].device).triu(3)
    return batch | {"attention_mask": -1e9 * ahead}


# what stock does -> what of a model and its batch asks for it, and the windows of our calls
LEFT_TO_STOCK = {
    "dropout": ({}, drop, dict, []),
    "a mask of the user's for every pair of tokens": ({}, lambda model: None, of_every_pair, []),
    "a mask that a hook writes to": ({}, hide, dict, [4]),
    "a window of none": (dict(sliding_window=0), lambda model: None, dict, [None]),
}


@pytest.mark.parametrize("what", LEFT_TO_STOCK)
def test_what_is_left_to_stock(seen, what):
    config, change, of_batch, windows = LEFT_TO_STOCK[what]
    models = pair("granite_swa", config, **ALONE)
    for model in models:
        change(model)
    assert_alike(models, of_batch(padded("right")))
    assert [call["window"] for call in seen] == windows


def test_values_of_another_dtype_fail_as_in_stock(seen):
    for model in pair():
        model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, out: out.double())
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            step(model)
    assert not seen


@pytest.mark.parametrize("model_type", [FAMILIES[0], *further(*FAMILIES[1:])])
def test_generates_as_stock(model_type):
    theirs, ours = (m.eval() for m in pair(model_type))
    given = dict(input_ids=tokens(2, 5)["input_ids"], max_new_tokens=9, do_sample=False, pad_token_id=0)
    with stock(model_type):
        expected = theirs.generate(**given)
    assert torch.equal(ours.generate(**given), expected)


@pytest.mark.parametrize("flags", [{"keep_attention": True}, *further({}, {"activation_offloading": True})], ids=str)
@pytest.mark.parametrize("reentrant", [True, *further(False)])
def test_checkpointed(seen, reentrant, flags):
    """The backward runs the same attention again, unless it was kept."""
    models = pair(**flags)
    for model in models:
        checkpointed(model, reentrant).enable_input_require_grads()
    assert_alike(models, padded("right"))
    assert len(seen) == 4


@pytest.mark.parametrize("model_type", [t for t in FAMILIES if t != "gpt_oss"])
def test_packed_rows(seen, model_type):
    """In families that give positions to those who make masks."""
    batch = tokens(1, LENGTH)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (5, 1, LENGTH - 6)])[None].to(batch["labels"].device)
    theirs, ours = pair(model_type)
    with stock(model_type):
        expected = step(theirs, batch)[1]
    assert_same_learning(step(ours, batch)[1], expected, 1e-5)
    assert len(seen) == 2


def test_first_tokens_of_documents():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 3, 3]])
    assert first_of(documents).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 3, 3]]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("backend", further("aot_eager", "inductor"))
def test_compiled(backend, whole):
    """A mask that nobody makes reaches layers that are compiled one by one, too."""
    theirs, ours = pair("granite_swa")
    for m in [ours] if whole else ours.model.layers:
        m.compile(fullgraph=not whole, backend=backend)
    assert_alike((theirs, ours), padded("right"), 1e-4)


def masks(window: int | None, padding: bool, packed: bool) -> tuple[LazyMask, Tensor]:
    """A mask that is made when it is read, and the same made by Transformers."""
    B, T = 3, 9
    starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]] * B) if packed else None
    valid = torch.arange(T).expand(B, T) >= torch.arange(B)[:, None] if padding else None
    config = transformers.LlamaConfig(sliding_window=window, hidden_size=8, num_attention_heads=2)
    kind = "sliding_window_causal" if window else "causal"
    create = getattr(transformers.masking_utils, f"create_{kind}_mask")
    of = dict(attention_mask=valid, past_key_values=None, position_ids=starts)
    made = []
    for config._attn_implementation in (LAZILY_EAGER, "eager"):
        made.append(create(config, torch.zeros(B, T, 8), **of))
    return made[0], made[1]


@pytest.mark.parametrize(
    "window, padding, packed",
    [(None, False, False), (3, True, False), (None, True, False), (3, False, True), (None, False, True)],
)
def test_masks_are_those_of_transformers(window, padding, packed):
    mask, expected = masks(window, padding, packed)
    assert mask.shape == expected.shape and mask.dtype == expected.dtype and "LazyMask" in repr(mask)
    assert mask.made is None
    assert_same_bits({"": mask.dense()}, {"": expected})
    assert mask.dense() is mask.dense()


READS = {
    "numpy": lambda mask: mask.detach().cpu().numpy(),
    "tolist": Tensor.tolist,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "dlpack": torch.from_dlpack,
    "index": lambda mask: mask[..., :],
}


@pytest.mark.parametrize("read", READS)
def test_readers_get_the_mask(read):
    mask, expected = masks(3, True, False)
    assert torch.equal(torch.as_tensor(READS[read](mask)), expected)
    assert known(mask) is mask.keys  # nobody wrote to it


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "view",
    [lambda mask: mask, lambda mask: mask[0], lambda mask: mask.data, lambda mask: mask.detach().view(-1)],
    ids=range(4),
)
def test_who_writes_to_a_mask_is_seen(view, inference):
    with torch.inference_mode(inference):
        mask, expected = masks(None, True, False)
        for m in (mask, expected):
            view(m).fill_(-7)
        assert known(mask) is None and torch.equal(mask + 0, expected)


def test_a_mask_moves_unmade():
    mask, _ = masks(3, True, False)
    moved = mask.to("meta", non_blocking=True)
    assert isinstance(moved, LazyMask) and moved.shape == mask.shape
    assert {moved.device, moved.keys.valid.device} == {torch.device("meta")}
    assert mask.made is None and mask.to(mask.device) is mask
    assert torch.equal(mask.to(torch.float64), mask.dense().double())


def test_look_alikes_are_not_taken():
    """Of families whose layers change masks, make them elsewhere, or score in fp32."""
    others = {"deepseek_v4", "flint", "hy_v4", "mimo_v2_flash", "openai_privacy_filter", "llama"}
    for model_type in others & {*transformers.CONFIG_MAPPING}:
        function = modeling(model_type).eager_attention_forward
        assert not attentions.has_sinks("eager_attention_forward", function), model_type
