"""Optimizers with fewer bytes for each parameter, the step in the backward, and the optimizer on
the CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from quick import further
from small_runs import refused, resumed_alike, saved, small_run
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_kernel.parallel import Parallel, in_blocks, parallelize, plain_parts
from liger_kernel.train import adamw, loop

torchao = pytest.importorskip("torchao.optim")
pytestmark = pytest.mark.usefixtures("references")
LR, BETAS, STEPS = 1e-2, (0.9, 0.95), 4
OPTIONS = {"lr": LR, "betas": BETAS, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _compiled_once(request, monkeypatch):
    """torchao compiles its steps, for seconds each: here those of one run are, the others eager.
    Inductor adds the C++ compiler's seconds, and nothing to what goes on."""
    compiled = request.function is test_a_run_that_goes_on_has_the_bits_of_one_that_was_left_alone
    if compiled and not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        yield


def trained(make, dtype, steps=STEPS, shape=(32, 256)):
    """A parameter and its optimizer after steps with gradients that do not depend on it."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).to(dtype))
    gradients = torch.randn(steps, *shape, dtype=torch.float64)
    optimizer = make([{"params": [p]}])
    for g in gradients:
        p.grad = g.to(dtype)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize(
    "name, theirs, dtype",
    [
        ("adamw-8bit", lambda groups: torchao.AdamW8bit(groups, **OPTIONS), torch.float32),
        *further(
            (
                "adamw-8bit-bf16",
                lambda groups: torchao.AdamW8bit(groups, **OPTIONS, bf16_stochastic_round=True),
                torch.bfloat16,
            )
        ),
        ("adamw-bf16", lambda groups: torchao._AdamW(groups, **OPTIONS, bf16_stochastic_round=True), torch.bfloat16),
        ("adamw", lambda groups: torch.optim.AdamW(groups, **OPTIONS, fused=True), torch.float32),
    ],
)
def test_bits_are_those_of_the_library(name, theirs, dtype):
    ours, optimizer = trained(lambda groups: adamw.make(name, groups, **OPTIONS), dtype)
    assert torch.equal(ours, trained(theirs, dtype)[0])
    moment = optimizer.state[ours]["exp_avg"]
    assert isinstance(moment, torchao.subclass_8bit.OptimState8bit) == (adamw.KINDS[name].moments == 1)
    assert adamw.KINDS[name].moments == 1 or moment.dtype == dtype


class Tied(nn.Module):
    """An embedding that is the head, too, a layer that is checkpointed, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 256)
        self.inner = nn.Linear(256, 256)
        self.frozen = nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(lambda x: self.frozen(torch.tanh(self.inner(x))), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.norm(x) @ self.embedding.weight.T, tokens.roll(1))


def learnt(make, in_backward):
    model = Tied()
    of = lambda n: [p for p in model.parameters() if p.ndim == n and p.requires_grad]
    optimizer = make([{"params": of(2), "weight_decay": 0.1}, {"params": of(1), "weight_decay": 0.0}])
    stepping = adamw.InBackward(optimizer) if in_backward else None
    alive, norms, losses = [], [], []
    for p in model.parameters():
        if p.requires_grad:
            count = lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
            p.register_post_accumulate_grad_hook(count)
    for step in range(3):
        adamw.set_lr(optimizer, LR / (step + 1))
        loss = model(torch.arange(step, step + 40))
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(stepping.norm() if stepping else torch.nn.utils.get_total_norm(gradients))
        assert stepping is None or not any(g is not None for g in gradients)
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, alive, [p.detach() for p in model.parameters()], optimizer


@pytest.mark.parametrize("name", ["adamw", *further("adamw-8bit")])
def test_a_step_in_the_backward_has_the_bits_of_the_one_after_it(name):
    make = lambda groups: adamw.make(name, groups, lr=LR)
    losses, norms, alive, weights, optimizer = learnt(make, False)
    found, their_norms, one, theirs, other = learnt(make, True)
    assert found == losses and all(map(torch.equal, theirs, weights))
    assert torch.equal(torch.stack(their_norms), torch.stack(norms))
    # hooks run in the order in which they were registered: each gradient is gone before the next
    assert max(alive) == 5 and max(one) == 0
    state, same = optimizer.state_dict(), other.state_dict()
    assert state["state"].keys() == same["state"].keys() and state["param_groups"] == same["param_groups"]


def test_gradients_are_dropped_while_it_is_off():
    model = Tied()
    before = [p.clone() for p in model.parameters()]
    stepping = adamw.InBackward(adamw.make("adamw", [p for p in model.parameters() if p.requires_grad], lr=LR))
    stepping.on = False
    model(torch.arange(40)).backward()
    assert all(p.grad is None for p in model.parameters()) and all(map(torch.equal, model.parameters(), before))
    assert stepping.norm() == 0


@pytest.fixture
def config(tmp_path):
    pytest.importorskip("transformers")
    records = [{"text": f"def add(a, b): return a + b + {i} " * 30} for i in range(20)]
    sizes = dict(hidden=64, heads=1, intermediate=64, length=48, batch=2, steps=4, eval_fraction=0.0, grad_clip=0.0)
    return small_run(tmp_path, records, save=str(tmp_path / "saved"), checkpoint_every=2, checkpoint_keep=3, **sizes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(optimizer="adamw-8bit"),
        *further(
            dict(optimizer="adamw-bf16", precision="bf16"),
            dict(optimizer="adamw-8bit-bf16", precision="bf16"),
            dict(optimizer_in_backward=True),
        ),
        *further(dict(optimizer="adamw-8bit-bf16", precision="bf16", optimizer_in_backward=True)),
        dict(parallel="fsdp2", optimizer_on_cpu=True),
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_left_alone(changes, config):
    config = replace(config, **changes)
    assert len(resumed_alike(config)["losses"]) == config.steps
    other = dict(optimizer="adamw" if "8bit" in config.optimizer else "adamw-8bit", optimizer_on_cpu=False)
    refused(r"is of another optimizer: moments .* there, .* here", loop.train, replace(config, **other, steps=6))


@pytest.mark.parametrize(
    "run, other",
    [
        ({}, dict(optimizer_in_backward=True)),
        (dict(parallel="fsdp2", grad_clip=0.5, accumulate=2), dict(optimizer_on_cpu=True)),
    ],
    ids=["in the backward", "on the CPU, clipped"],
)
def test_runs_that_step_elsewhere_have_the_same_bits(run, other, config):
    config = replace(config, checkpoint_every=0, **run)
    other = replace(config, **other, out=f"{config.out}-2", save=f"{config.save}-2")
    plain, found = loop.train(config), loop.train(other)
    assert found["losses"] == plain["losses"] and saved(other) == saved(config)
    # added in another order
    assert found["gradient_norms"] == pytest.approx(plain["gradient_norms"], rel=4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_steps_without_finite_gradients_change_nothing(optimizer, config, monkeypatch):
    norms, clip = [], Parallel.clip_grad_norm_

    def poisoned(self, norm):
        norms.append(clip(self, norm))
        before.append([p.detach().clone() for p in self.module.parameters()])
        return norms[-1] * (float("nan") if len(norms) == 3 else 1)

    before = []
    monkeypatch.setattr(Parallel, "clip_grad_norm_", poisoned)
    loop.train(replace(config, optimizer=optimizer, nonfinite="skip", checkpoint_every=0))
    assert [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(before)] == [False, False, True]


def test_a_step_in_the_backward_has_one_backward(config):
    config = replace(config, optimizer_in_backward=True, global_batch=4)
    refused(r"needs at most .* 2 rows in a step, got global_batch 4", loop.train, config)


def test_what_a_checkpoint_holds_shares_memory_with_the_moment():
    p, optimizer = trained(lambda groups: adamw.make("adamw-8bit", groups, **OPTIONS), torch.float32)
    moment = optimizer.state[p]["exp_avg"]
    parts = plain_parts(moment)
    assert {name: (type(part), part.shape) for name, part in parts.items()} == {
        "codes": (torch.Tensor, (32, 256)),
        "scale": (torch.Tensor, (32, 1)),
    }
    assert all(part.data_ptr() == getattr(moment, name).data_ptr() for name, part in parts.items())
    assert plain_parts(p) == {"": p}


@pytest.mark.parametrize(
    "shape, found", [((32, 256), True), ((64, 64), True), ((63, 64), None), ((4097,), None), ((4096,), True)]
)
def test_weights_in_blocks(shape, found):
    assert in_blocks(torch.zeros(shape), adamw.LEAST, adamw.BLOCK) is found


def test_offload_is_fsdp2s():
    with pytest.raises(ValueError, match="parallelize: cpu_offload needs mode fsdp2 or ulysses-fsdp2, got none"):
        parallelize(nn.Linear(2, 2), "none", cpu_offload=True)


def test_what_is_missing_is_said_before_the_data_are_read(config, monkeypatch):
    config = replace(config, optimizer="adamw-8bit", data="/nowhere.jsonl")
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(r"adamw-8bit needs a C\+\+ compiler, .*no-such-compiler was not found", loop.train, config)
    monkeypatch.setattr(adamw.importlib.util, "find_spec", lambda name: None)
    refused("optimizer adamw-8bit needs torchao: pip install torchao", loop.train, config)
