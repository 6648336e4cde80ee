"""Padded batches without their padding: the same loss and gradients as with it."""

import hf_models
import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import DEVICE, assert_same_learning, make, step, stock
from quick import further
from test_attention import documents_in_a_loop, serve
from watching import Watch

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching import patches, unpad
from liger_kernel.transformers.recognise.families import FAMILIES

pytestmark = pytest.mark.usefixtures("models_by_references")

T, LENGTHS = 12, torch.tensor([[12], [5], [7]])
PLACE = torch.arange(T)
# where padding is -> which tokens are real
SIDES = {"right": PLACE < LENGTHS, "left": PLACE >= T - LENGTHS, "inside": (PLACE < LENGTHS - 2) | (PLACE > 9)}
WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
# model type -> what its tiny config gets: grouped heads, windows narrower than rows, a table of
# positions, experts, keys wider than values
MODELS = {
    "llama": dict(num_key_value_heads=2),
    "gemma3_text": WINDOWS,
    "gpt2": dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "qwen3_moe": {},
    "deepseek_v3": {},
    "olmo_hybrid": {},
}
# of gradients' largest values. Those of diffllama's lambdas, sums over all that attention gives, cancel: in
# fp32 stock is 2.1e-5 from fp64, and so are we
TOLERANCES = {"diffllama": 4.2e-5}


def batch(side: str = "right") -> dict:
    real = SIDES[side]
    ids = torch.randint(3, 200, real.shape, generator=torch.Generator().manual_seed(1))
    # the label of a first token is compared with what the model says at the padding before it
    labels = torch.where(real & F.pad(real, (1, -1)), ids, -100)
    return {k: v.to(DEVICE) for k, v in dict(input_ids=ids, labels=labels, attention_mask=real.long()).items()}


def model_of(model_type: str, flag: bool = True, attends: str = "sdpa", **more) -> torch.nn.Module:
    model = make(model_type, attention=attends, **{**MODELS.get(model_type, {}), **more})
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = False
    _apply_liger_kernel_to_instance(model, unpad=flag)
    return model


@pytest.fixture(autouse=True)
def packed(monkeypatch) -> list:
    """Rows, tokens per row and real tokens of packed batches. Reasons are said anew."""
    patches.WARNED.clear()
    shapes, arguments = [], unpad.Packing.arguments

    def watched(self, given):
        shapes.append((*self.real.shape, len(self.index)))
        return arguments(self, given)

    monkeypatch.setattr(unpad.Packing, "arguments", watched)
    return shapes


def said(call) -> list[str]:
    return hf_models.said(call, "unpad: ")


@pytest.mark.parametrize(
    "model_type, side", [(m, s) for m in MODELS for s in SIDES if (m, s) != ("olmo_hybrid", "inside")]
)
def test_padding_changes_nothing(model_type, side, packed):
    want = step(model_of(model_type, False), batch(side))[1]
    ours = model_of(model_type)
    assert said(lambda: assert_same_learning(step(ours, batch(side))[1], want, 1e-5)) == []
    assert packed[-1] == (3, T, int(SIDES[side].sum()))


@pytest.mark.parametrize("model_type", further(*sorted(FAMILIES.keys() - MODELS)))
def test_every_family_is_right_or_says_why_it_computes_padding(model_type, packed):
    try:
        # eval: dropout, where stock has any, draws other numbers for other shapes
        padded, ours = model_of(model_type, False).eval(), []
        both = [(step(padded, batch(side))[1], side) for side in ("right", "left")]
    except Exception as error:
        pytest.skip(f"stock, with sdpa and without images: {error}")
    texts = said(lambda: ours.append(model_of(model_type).eval()))
    within = TOLERANCES.get(model_type, 1e-5)
    texts += said(lambda: [assert_same_learning(step(ours[0], batch(side))[1], want, within) for want, side in both])
    assert bool(texts) != ((3, T, 24) in packed)


@pytest.mark.parametrize("side, model_type", [("right", "llama"), ("left", "gemma3_text"), ("inside", "llama")])
def test_varlen_attention_of_the_packed_row_makes_no_mask(side, model_type, monkeypatch):
    want, windows = step(model_of(model_type, False), batch(side))[1], []
    ours = tried(model_of(model_type))
    serve(monkeypatch, documents_in_a_loop, windows)
    monkeypatch.setattr(unpad.PackedMask, "padded", None)
    assert_same_learning(step(ours, batch(side))[1], want, 1e-5)
    assert windows == ([(3, 0), (-1, 0)] if model_type == "gemma3_text" else [(-1, 0)] * 2)


def tried(model):
    """After the first call, by which it is known whether padding can be left out."""
    step(model, batch())
    return model


def test_a_window_counts_padding_inside_of_a_row(monkeypatch):
    want, ours = step(model_of("gemma3_text", False), batch("inside"))[1], tried(model_of("gemma3_text"))
    serve(monkeypatch, documents_in_a_loop, windows := [])
    assert_same_learning(step(ours, batch("inside"))[1], want, 1e-5)
    assert windows == [(-1, 0)]  # only the layer without a window


def test_flash_attention_gets_the_bounds(monkeypatch):
    def flash(module, q, k, v, mask, dropout=0.0, scaling=None, cu_seq_lens_q=None, max_length_q=0, **more):
        assert mask is None and more["cu_seq_lens_k"] is cu_seq_lens_q
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        bounds = cu_seq_lens_q, cu_seq_lens_q, max_length_q, more["max_length_k"]
        out = documents_in_a_loop(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None

    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(interface._global_mapping, "flash_attention_2", flash)
    want, ours = step(model_of("llama", False), batch("left"))[1], model_of("llama")
    ours.config._attn_implementation_internal = "flash_attention_2"
    assert_same_learning(step(ours, batch("left"))[1], want, 1e-5)


@pytest.mark.parametrize("as_embeddings", [False, True])
def test_hidden_states_come_back_in_the_padded_shape(as_embeddings):
    padded, ours = (model_of("llama", flag).model.eval() for flag in (False, True))
    given = batch("left") | dict(use_cache=False, position_ids=(SIDES["left"].cumsum(1) - 1).clamp(0).to(DEVICE))
    del given["labels"]
    if as_embeddings:
        given["inputs_embeds"] = padded.embed_tokens(given.pop("input_ids")).detach()
    with torch.no_grad():
        want, found = (m(**given).last_hidden_state for m in (padded, ours))
        assert torch.equal(found, ours(**given, return_dict=False)[0])
    real = SIDES["left"].to(DEVICE)
    torch.testing.assert_close(found[real], want[real])
    assert found.shape == want.shape and not found[~real].any()


OF_PAIRS = torch.ones(3, 1, T, T, device=DEVICE).tril().bool()
DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
# what is asked -> the model, its configuration, the batch, and the reason
REASONS = {
    "states": ("llama", {}, lambda b: b | dict(output_hidden_states=True), "output_hidden_states is True"),
    "labels": ("llama", {}, lambda b: b | dict(labels=b["input_ids"]), "labels count at padding"),
    "mask": ("llama", {}, lambda b: b | dict(attention_mask=OF_PAIRS), "attention_mask is not of its tokens"),
    "axes": ("qwen2_vl", {}, lambda b: b | dict(position_ids=PLACE.expand(3, 3, T).to(DEVICE)), "several axes"),
    "eager": ("llama", dict(attends="eager"), dict, "its attention is eager"),
    "state": ("jamba", {}, dict, "layers.0.mamba (JambaMambaMixer) carries its state"),
    "inside": ("qwen3_next", {}, lambda _: batch("inside"), "recurrent layers lose a part of their state"),
    "rope": ("llama", DYNAMIC, dict, "rope of the kind dynamic"),
    "places": ("llama4_text", {}, dict, "Llama4TextAttention numbers tokens"),
}


@pytest.mark.parametrize("what", REASONS)
def test_what_is_not_understood_runs_as_it_was_and_says_why(what, packed):
    model_type, more, change, reason = REASONS[what]
    given = change(batch())
    with stock(model_type):
        want = step(model_of(model_type, False, **more), given)[1]
    ours = model_of(model_type, **more)
    found = []
    texts = said(lambda: found.append(step(ours, given)[1]))
    assert_same_learning(found[0], want)
    assert len(texts) == 1 and reason in texts[0] and not said(lambda: step(ours, given))
    assert (3, T, 24) not in packed  # only a tiny model was tried


def test_hooks_see_padded_layers(packed):
    ours, shapes = model_of("llama"), []
    see = lambda module, args, out: shapes.append(out.shape[:2])
    see.__module__ = "transformers.integrations.neftune"  # whose noise depends on the number of tokens
    hook = ours.model.layers[1].mlp.register_forward_hook(see)
    (text,) = said(lambda: step(ours, batch()))
    assert "hooks see what its layers compute" in text and shapes == [(3, T)]
    hook.remove()
    step(ours, batch())
    assert packed


@pytest.mark.parametrize("layers", [True, False])
def test_what_is_compiled_computes_padding(layers, packed):
    torch._dynamo.reset()  # it remembers code of other tests that it does not compile again
    graphs = []
    want, ours = step(model_of("llama", False), batch())[1], model_of("llama")
    if layers:
        for layer in ours.model.layers:
            layer.compile(backend="eager")
        (text,) = said(lambda: assert_same_learning(step(ours, batch())[1], want, 1e-5))
        assert "its layers are compiled" in text
    else:
        backend = lambda graph, _: (graphs.append(graph), graph.forward)[1]
        ours.forward = torch.compile(ours.forward, backend=backend, fullgraph=True)
        assert_same_learning(step(ours, batch())[1], want, 1e-5)
    # without a graph, the compiler has left the call to Python
    assert not packed or not (layers or graphs)


def test_generation_and_packed_rows_are_left_alone(packed):
    padded, ours = (model_of("llama", flag).eval() for flag in (False, True))
    given = {n: t for n, t in batch("left").items() if n != "labels"}
    generate = lambda m: m.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert said(lambda: torch.testing.assert_close(generate(ours), generate(padded))) == []
    documents = dict(input_ids=given["input_ids"][:1], position_ids=PLACE[None].to(DEVICE) % 6, use_cache=False)
    assert said(lambda: ours(**documents)) == []
    assert said(lambda: step(ours, {**batch(), "attention_mask": torch.ones(3, T, device=DEVICE)})) == []
    assert not packed


def test_the_host_waits_once(monkeypatch):
    """To read the number of real tokens, and for nothing else."""
    ours, waits = tried(model_of("llama")), []
    look = unpad.look
    monkeypatch.setattr(unpad, "look", lambda *args: waits.append("look") or look(*args))

    given = {n: t for n, t in batch().items() if n != "labels"}
    with Watch() as seen:
        ours.model(**given, use_cache=False)
    assert waits == ["look"] and not {"_local_scalar_dense", "nonzero"} & {*seen.names}
