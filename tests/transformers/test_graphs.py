"""Training steps that are replayed: the same losses and gradients as those of steps that run. On a CPU
a replay calls the recorded function again, on the same fixed inputs."""

import copy
import dataclasses
import gc
import random
import sys
import types
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hf_models import DEVICE, assert_same_bits, assert_same_learning, checkpointed, make, said, step, tokens
from repeated import Repeated
from torch import nn
from watching import Watch

from liger_kernel import graphs
from liger_kernel.graphs import batches, micro_steps
from liger_kernel.graphs.recorder import FilledNumbers, other_leaves
from liger_kernel.ops.losses.chunks import Kept, counting_at_most
from liger_kernel.transformers import _apply_liger_kernel_to_instance, apply_liger_kernel_to_llama, restore
from liger_kernel.transformers.patching.report import patches_report

pytestmark = pytest.mark.usefixtures("models_by_references")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(micro_steps, "recorder_of", lambda device: Repeated())


def patched(model_type: str = "llama", on: bool | str = True, unpad: bool = False, **more: Any) -> Any:
    model = make(model_type, **{"attention": "sdpa", **more})
    model.config.output_router_logits = False
    _apply_liger_kernel_to_instance(model, graphs=on, unpad=unpad)
    return model


def batch(T: int = 64, seed: int = 0, side: str = "", ignored: int = 0) -> dict[str, Any]:
    """Two rows, the second with 7 real tokens on a ``side``, if any."""
    given, place = tokens(length=T, seed=seed, ignored=ignored), torch.arange(T, device=DEVICE)
    if side:
        real = torch.stack((place >= 0, place < 7 if side == "right" else place >= T - 7))
        given["attention_mask"] = real.long()
        given["labels"][~(real & F.pad(real, (1, -1)))] = -100
    return given


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    return model(**batch(64, seed), use_cache=False).loss


def recorded(model: Any) -> micro_steps.Graphs:
    return vars(model)[micro_steps.KEY]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_random_lengths_and_padding(model_type):
    stock, model = patched(model_type, on=False), patched(model_type)
    for i, side in enumerate(["", "", "right", "", "left", "right", "left", "left"]):
        given, items = batch(40 + 3 * i, i, side, ignored=3), torch.tensor(80 + i, device=DEVICE)
        ours, want = (step(m, given, num_items_in_batch=items)[1] for m in (model, stock))
        assert_same_learning(ours, want)
    assert recorded(model).replays >= 3
    assert not recorded(model).reasons


def test_bits_of_equal_shapes_and_accumulated_gradients():
    stock, model = patched(on=False), patched()
    for _ in range(4):
        assert_same_bits(step(model, batch())[1], step(stock, batch())[1])
    kept = {n: p.grad for n, p in model.named_parameters()}
    before = {n: g.clone() for n, g in kept.items()}
    model.zero_grad(set_to_none=True)
    loss_of(model, 1).backward()
    assert all(torch.equal(kept[n], g) for n, g in before.items())  # nobody writes to gradients of before
    loss_of(model, 2).mul(3).backward()
    stock.zero_grad(set_to_none=True)
    for seed, scale in ((1, 1), (2, 3)):
        loss_of(stock, seed).mul(scale).backward()
    assert_same_bits(*({n: p.grad for n, p in m.named_parameters()} for m in (model, stock)))
    assert recorded(model).replays == 5


def test_gradients_that_are_lent_are_those_of_the_replay_until_the_next_forward():
    stock, model = patched(on=False), patched()
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, got int"):
        graphs.lend_gradients(3)
    graphs.lend_gradients(model)
    gradients = lambda m: {n: p.grad for n, p in m.named_parameters()}
    for _ in range(3):
        assert_same_bits(step(model, batch())[1], step(stock, batch())[1])
    (recording,) = recorded(model).steps.values()
    places = [g.data_ptr() for g in gradients(model).values()]
    assert places == [g.data_ptr() for g in recording.grads]
    replay, lent = recording._replay_forward, lambda: [g.fill_(torch.nan) for g in recording.grads]
    recording._replay_forward = lambda: (lent(), replay())  # which uses their memory
    for m in (stock, model):
        m.zero_grad()
        first, second = loss_of(m, 1), loss_of(m, 2)  # the second one runs
        for loss in (first, second):
            loss.backward()
        loss_of(m, 3).backward()
    assert_same_learning(gradients(model), gradients(stock))
    assert recorded(model).replays == 4
    recording.grads = [t := torch.ones(3), t, torch.ones(3), None]
    a, b, c, nothing = recording._in_place()
    assert len({t.data_ptr(), a.data_ptr(), b.data_ptr()}) == 3 and nothing is None
    assert c.data_ptr() == recording.grads[2].data_ptr()


def test_dropout_draws_anew():
    model = patched(attention="eager")
    model.config.attention_dropout = 0.2
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    losses = [loss_of(model)]
    for _ in range(4):
        losses[-1].backward()
        losses.append(loss_of(model))
    assert len({x.item() for x in losses}) == 5 and recorded(model).replays == 4


def test_a_recording_copies_no_numbers_from_the_host():
    make = lambda: (
        [torch.tensor(x, device=DEVICE) for x in (0.5, 3, True, [1, 2])] + [torch.tensor(2, dtype=torch.half)]
    )
    with FilledNumbers(), Watch() as seen:
        found = make()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, make(), strict=True))
    assert seen.names == ["full", "full", "full", "lift_fresh", "full"]


CHANGES = {
    "eval": lambda m: m.eval().train(),
    "freeze": lambda m: m.model.norm.weight.requires_grad_(False),
    "storage": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.clone() * 2),
    "another parameter": lambda m: setattr(m.model.norm, "weight", nn.Parameter(m.model.norm.weight.detach() * 2)),
    "a number": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.1),
    "a forward": lambda m: setattr(m.model.norm, "forward", lambda x: x * 2),
    "class": lambda m: setattr(m.model.norm, "__class__", nn.Identity),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change):
    stock, model = patched(on=False), patched()
    for m in (stock, model):
        for _ in range(3):
            step(m, batch())
        CHANGES[change](m)
    for _ in range(3):
        assert_same_bits(step(model, batch())[1], step(stock, batch())[1])
    assert recorded(model).replays == (5 if change == "eval" else 4)


def test_hooks_see_every_step_and_changes_have_an_end():
    model, seen = patched(), []
    step(model, batch())
    model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    with_hook = said(lambda: [step(model, batch()) for _ in range(3)], "graphs: ")
    assert with_hook == ["graphs: LlamaForCausalLM runs as it was: hooks see what its layers compute"]
    assert len(seen) == 3
    model.model.norm._forward_hooks.clear()
    for i in range(10):
        model.model.layers[0].self_attn.scaling = 0.1 + i
        step(model, batch())
    assert "changes too often: the attribute 'scaling'" in graphs.report(model)


def test_one_forward_at_a_time():
    model = patched()
    for _ in range(2):
        step(model, batch())
    first, second = loss_of(model), loss_of(model, 1)
    (first + second).backward()
    assert "a second forward before the backward of the first" in graphs.report(model)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()
    del loss, first
    abandoned = loss_of(model)  # a loss without a backward, which then is gone
    del abandoned
    replays = recorded(model).replays
    step(model, batch())
    assert recorded(model).replays == replays + 1


def test_checkpointing():
    model = checkpointed(patched())
    model.enable_input_require_grads()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    want = step(model, batch())[1]
    for _ in range(2):
        assert_same_bits(step(model, batch())[1], want)
    assert recorded(model).replays == 2
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions


def test_other_leaves_of_the_same_memory():
    model = patched(on=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    params = list(model.parameters())
    loss_of(model).backward()
    with other_leaves(model, params) as own:
        assert len(list(model.parameters())) == len(own) and not {*map(id, own)} & {*map(id, params)}
        grads = torch.autograd.grad(loss_of(model), own)
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, params))
    assert [*map(id, model.parameters())] == [*map(id, params)]


def test_memory_of_smaller_recordings_is_given_to_a_larger_one():
    model, replays = patched(), []
    for T in (64, 64, 128, 128, 64, 64):
        step(model, batch(T))
        replays.append((recorded(model).replays, len(recorded(model).steps)))
    assert replays == [(0, 0), (1, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_recording_scores_all_tokens_for_trl_and_frees_no_cycles(monkeypatch):
    trl, seen = types.ModuleType("trl.trainer.utils"), []
    trl._use_triton = lambda device: True  # "the host may count labels"
    monkeypatch.setitem(sys.modules, trl.__name__, trl)
    model = patched()
    norm, forward = model.model.norm, type(model.model.norm).forward
    now = lambda: (trl._use_triton("cuda"), gc.isenabled())
    monkeypatch.setattr(type(norm), "forward", lambda self, x: seen.append(now()) or forward(self, x))
    step(model, batch())
    n = len(seen)  # norms in a forward
    step(model, batch())
    assert seen[: 3 * n] == [*[(True, True)] * n, *[(False, True)] * n, *[(False, False)] * n] and now() == (True, True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"position_ids": torch.arange(64)[None]}, ""),
        ({"shift_labels": None}, ""),
        ({"some": {}}, "some is a dict"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 64, 64)}, "there are no input_ids"),
        ({"output_hidden_states": True}, ""),
    ],
)
def test_kinds_of_batches(more, why):
    stock, model = patched(on=False), patched()
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (batch() | more).items()}
    for _ in range(4):
        assert_same_bits(step(model, given)[1], step(stock, given)[1])
    # the first request for hidden states leaves hooks of Transformers
    assert recorded(model).replays == (0 if why else 2 if "output_hidden_states" in more else 3)
    assert why in graphs.report(model)


def test_a_model_that_cannot_be_recorded(monkeypatch):
    model = patched()
    monkeypatch.setattr(Repeated, "record", lambda self, run: (_ for _ in ()).throw(RuntimeError("it waits")))
    if DEVICE == "cuda":
        monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x * x.sum().item())
    want = step(model, batch())[1]
    for _ in range(3):
        assert_same_bits(step(model, batch())[1], want)
    assert "3 as it was: it cannot be recorded: " in graphs.report(model)


def test_a_model_that_draws_on_the_host(monkeypatch):
    model = patched()
    norm, forward = model.model.norm, type(model.model.norm).forward
    monkeypatch.setattr(type(norm), "forward", lambda self, x: forward(self, x) * random.random())
    for _ in range(3):
        step(model, batch())
    assert "its forward draws random numbers on the host" in graphs.report(model)


def test_rows_of_a_model_that_sees_both_sides_are_not_padded():
    model = patched("bert")
    step(model, batch(12))
    assert "rows are not padded: a tiny model of it computes another loss" in graphs.report(model)


def test_the_flag(monkeypatch):
    model = patched()
    assert any("graphs" in part for part in patches_report(model, {"graphs": True}).patched)
    for _ in range(2):
        step(model, batch())
    other = copy.deepcopy(model)
    assert not recorded(other).steps and recorded(model).steps
    graphs.forget(model)
    assert micro_steps.KEY not in vars(model)
    step(model, batch())
    restore(model)
    assert micro_steps.KEY not in vars(model) and not hasattr(type(model).forward, micro_steps.MARK)
    apply_liger_kernel_to_llama(graphs=True)
    model = make("llama", attention="sdpa")
    for _ in range(2):
        step(model, batch())
    assert recorded(model).replays == 1


def test_a_model_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(300, 8)

        def forward(self, input_ids, labels):
            return F.cross_entropy(self.table(input_ids).sum(-1, keepdim=True).expand(-1, -1, 3)[:, :, 0], labels[:, 0])

    model = graphs.wrap(Own().to(DEVICE))
    assert graphs.wrap(model) is model
    labels = torch.tensor([[1], [2]], device=DEVICE)
    given = {"input_ids": torch.arange(24, device=DEVICE).view(2, 12), "labels": labels}
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(**given)
        loss.backward()
        found.append({"loss": loss.detach(), "table": model.table.weight.grad})
    assert_same_bits(found[2], found[0])
    assert recorded(model).replays == 2 and "head" not in graphs.report(model)  # these labels are not of tokens
    with pytest.raises(ValueError, match=r"model must be an nn\.Module or an optimizer, got int"):
        graphs.wrap(3)


@pytest.mark.parametrize(("T", "up"), [(1, 64), (64, 64), (65, 128), (513, 576), (1025, 1152), (2048, 2048)])
def test_buckets(T, up):
    assert batches.bucket(T) == up
    assert batches.bucket(T, longest=T) == T


def prepared(**given: Any) -> Any:
    return batches.batch_of(given, True, None, CPU)


def test_masks_that_are_left_out():
    ids = torch.ones(2, 5, dtype=torch.long)
    labels, right = ids.clone(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    labels[1, 2:] = -100
    found = prepared(input_ids=ids, labels=labels, attention_mask=right)
    assert "attention_mask" not in found.tensors and found.counts == 7 and found.added == 59
    assert found.shapes == {"input_ids": (2, 64), "labels": (2, 64)}
    assert found.bounds() == [16, 32, 64, 96, 128]
    for mask, target in ((right.flip(1), labels), (right, ids)):  # on the left; labels at padding
        assert "attention_mask" in prepared(input_ids=ids, labels=target, attention_mask=mask).tensors
    positions = torch.arange(5)[None]
    assert list(prepared(input_ids=ids, position_ids=positions, attention_mask=right).tensors) == ["input_ids"]
    assert len(prepared(input_ids=ids, position_ids=positions % 3, attention_mask=right).tensors) == 3
    # a tensor that is not of tokens: nothing is padded
    assert prepared(input_ids=ids, labels=labels, pixels=torch.zeros(3)).shapes["input_ids"] == (2, 5)


def test_positions_go_on():
    ids = torch.ones(1, 4, dtype=torch.long)
    found = prepared(input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1]]))
    inputs = {n: torch.full(shape, 9) for n, shape in found.shapes.items()}
    found.copy_to(inputs)
    assert inputs["position_ids"][0, :6].tolist() == [0, 1, 0, 1, 2, 3]
    assert inputs["input_ids"][0, 3:6].tolist() == [1, 0, 0]


def test_packed_rows():
    stock, model = patched(on=False), patched()
    for i in range(4):
        lengths = [20 + i, 9, 11]
        bounds = F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).int().to(DEVICE)
        given = tokens(batch=1, length=sum(lengths), seed=i)
        given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
        given |= dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=20 + i, max_length_k=20 + i)
        assert_same_learning(step(model, given)[1], step(stock, given)[1])
    assert recorded(model).replays == 3 and not recorded(model).reasons
    (recording,) = recorded(model).steps.values()
    assert recording.inputs["cu_seq_lens_q"].tolist() == [0, 23, 32, 43, *[64] * 12]
    assert recording.inputs["position_ids"][0, 42:46].tolist() == [10, 0, 1, 2]


def test_a_bound_of_labels_keeps_those_that_count():
    target = torch.tensor([-100, 3, -100, 4, -100, -100, -100, -100])
    with counting_at_most(4):
        rows = Kept(target).rows()
    assert rows is not None and len(rows) == 4 and {1, 3} <= set(rows.tolist())
    with counting_at_most(8):
        assert Kept(target).rows() is None


@pytest.mark.skipif(DEVICE == "cuda", reason="times are given")
def test_sizes_whose_steps_wait_for_the_host_are_recorded(monkeypatch):
    times, clocks = iter([(10.0, 10.9), (10.0, 11.1)]), []
    monkeypatch.setattr(Repeated, "clock", lambda self: clocks.append(Mock(times=lambda: next(times))) or clocks[-1])
    model = patched(on="auto")
    for T in (64, 64, 64, 128, 128, 128, 192, 192, 192, 64):
        step(model, batch(T))
    assert len(clocks) == 2 and all(clock.stop_after.call_count == 1 for clock in clocks)
    assert graphs.report(model).split("\n") == [
        "graphs: 1 recorded, 2 steps replayed",
        "  128 tokens: host 10.0 ms, GPU 10.9 ms: recorded",
        "  256 tokens: host 10.0 ms, GPU 11.1 ms: not recorded",
    ]
    with pytest.raises(ValueError, match="graphs: must be True, False or 'auto', got 'always'"):
        patched(on="always")


@pytest.mark.parametrize("model_type", ["llama", "kimi_linear"])
def test_padded_rows_become_one(model_type):
    stock, model = patched(model_type, on=False), patched(model_type, unpad=True)
    for i, side in enumerate(["right", "right", "left", "right", "", "right"]):
        given, items = batch(50 + i, i, side, ignored=3), torch.tensor(80 + i, device=DEVICE)
        found = [step(m, given, num_items_in_batch=items, skip_logits=False) for m in (model, stock)]
        real = given.get("attention_mask", given["input_ids"]) != 0
        torch.testing.assert_close(*(out.logits[real] for out, _ in found), atol=1e-5, rtol=1e-5)
        assert_same_learning(*(learnt for _, learnt in found), 1e-5)
    (recording, *_) = recorded(model).steps.values()
    assert set(recording.inputs) == {"input_ids", "labels", "position_ids", "cu_seq_lens_q", "num_items_in_batch"}
    assert recording.inputs["input_ids"].shape == (1, 64)
    assert recorded(model).replays == 4 and graphs.report(model).count("\n") == 0


def test_labels_that_nobody_counts_take_the_whole_head(monkeypatch):
    uncounted = lambda *args: dataclasses.replace(batches.batch_of(*args), counts=None)
    said = "the whole head is computed: labels are on the GPU, and nobody counted them"
    monkeypatch.setattr(micro_steps, "batch_of", uncounted)  # as those on a GPU
    model = patched()
    for T in (64, 64, 128, 128):
        step(model, batch(T, ignored=5))
    assert graphs.report(model).count(said) == 1
    assert [s.most for s in recorded(model).steps.values()] == [256]
