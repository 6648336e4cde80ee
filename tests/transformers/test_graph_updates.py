"""Steps of optimizers that are replayed: the same weights and moments as those of steps that run. On a
CPU a replay calls PyTorch's operators again, on the tensors and numbers of the recording, as a CUDA graph."""

import copy
import inspect
import weakref
from dataclasses import replace

import pytest
import torch
from hf_models import DEVICE
from repeated import Repeated
from small_runs import small_run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel import _private, graphs
from liger_kernel.graphs import micro_steps, updates
from liger_kernel.ops.projections import float8_training


class Operators(TorchDispatchMode):
    """Notes those that are called, and what they write over."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        given = dict(zip([a.name for a in func._schema.arguments], args)) | (kwargs or {})
        written = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        self.before += [(t, t.clone()) for t in tree_leaves(written) if isinstance(t, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, out := func(*args, **kwargs or {})))
        return out


class Again(Repeated):
    @torch.no_grad()
    def record(self, run):
        with Operators() as noted:
            run()
        for t, before in reversed(noted.before):
            t.copy_(before)

        @torch.no_grad()
        def replay():
            for func, args, kwargs, out in noted.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)

        return replay


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(updates, "recorder_of", lambda device: Again())


def made(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(DEVICE)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 3e-3, "weight_decay": 0.3}]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, kind(groups, **({"lr": 1e-2, "fused": True} | options))


def steps(model, optimizer, numbers, act=lambda i: None):
    for i in numbers:
        torch.manual_seed(i)
        for p in [p for p in model.parameters() if p.grad is not None]:
            p.grad.copy_(torch.randn(p.shape, dtype=p.dtype))
        act(i)
        optimizer.step()


def replays(optimizer) -> int:
    return vars(optimizer)[micro_steps.KEY].replays


def assert_same(a, b) -> None:
    """Learning rates are rounded to fp32, which moves a weight by that at most."""
    for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True):
        states = a[1].state[x], b[1].state[y]
        torch.testing.assert_close([x, *states[0].values()], [y, *states[1].values()], rtol=2e-6, atol=2e-7)


def followed(run, *kind, **options):
    """A model and an optimizer whose steps are replayed, after ``run`` of both; as where they run."""
    ours, want = made(*kind, **options), made(*kind, **options)
    graphs.wrap(ours[1])
    for pair in (ours, want):
        run(*pair)
    assert_same(ours, want)
    return ours


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_schedules_are_followed_without_another_recording(kind):
    def run(model, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        if kind is torch.optim.Adam and micro_steps.KEY in vars(optimizer):
            graphs.forget(optimizer)  # to be wrapped after a schedule is made, as well as before
            assert graphs.wrap(graphs.wrap(optimizer)) is optimizer
        steps(model, optimizer, range(8), lambda i: i and schedule.step())
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 8

    model, optimizer = followed(run, kind, amsgrad=True)
    assert graphs.report(optimizer) == "graphs: 1 optimizer steps recorded, 6 replayed"
    graphs.forget(optimizer)
    steps(model, optimizer, range(3))
    assert replays(optimizer) == 8


def test_other_places_and_numbers_are_noticed():
    def run(model, optimizer):
        for i in range(20):
            if i == 4:  # gradients in another place
                optimizer.kept = [p.grad for p in model.parameters()]
                for p in model.parameters():
                    p.grad = p.grad.clone()
            if i == 8:
                optimizer.param_groups[0]["betas"] = 0.5, 0.9
            if i == 12:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i in (16, 17):
                model[0].bias.grad = None if i == 16 else torch.zeros_like(model[0].bias)
            steps(model, optimizer, [i])

    assert 8 <= replays(followed(run)[1]) <= 14


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_what_a_scaler_says_is_read_anew(bad):
    def run(model, optimizer):
        for i in range(7):
            optimizer.grad_scale = torch.tensor(2.0 + i, device=DEVICE)
            optimizer.found_inf = torch.tensor(bad if i == 5 else 0.0, device=DEVICE)
            steps(model, optimizer, [i])

    model, optimizer = followed(run)
    assert replays(optimizer) == 5 and optimizer.state[model[0].weight]["step"] == 7 - bad


def test_what_is_called_before_is_recorded_and_its_result_returned():
    ours, want = made(), made()
    clip = lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    replayed = updates.Updates(ours[1], lambda: clip(ours[0]))
    found, expected = [], []
    for _ in range(4):
        steps(*want, [3], lambda i: expected.append(clip(want[0])))
        steps(ours[0], optimizer=type("", (), {"step": lambda self: found.append(replayed())})(), numbers=[3])
    assert_same(ours, want)
    assert replayed.replays == 2 and found == expected and len({id(norm) for norm in found}) == 4


def test_versions_say_that_weights_have_changed():
    model, optimizer = made()
    graphs.wrap(optimizer)
    model[0].bias.grad = None
    steps(model, optimizer, range(3))
    updated = vars(optimizer)[micro_steps.KEY]
    (place,) = updated.steps
    updated.steps[place] = lambda: None, [None]  # as a graph, which no counter sees
    before = [p._version for p in model.parameters()]
    optimizer.step()
    changed = [p._version > n for p, n in zip(model.parameters(), before, strict=True)]
    assert changed == [True, False, True, True]


def test_steps_that_cannot_be_replayed(monkeypatch):
    model, optimizer = made()
    graphs.wrap(optimizer)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    steps(model, optimizer, range(3))
    hook.remove()
    assert optimizer.step(lambda: 7) == 7
    assert graphs.report(optimizer).split("\n")[1:] == [
        "  3 as it was: hooks see its steps",
        "  1 as it was: step has a closure",
    ]
    for bad in (torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters()), 3):
        with pytest.raises(ValueError, match=r"graphs\.wrap: (optimizer|model) must be"):
            graphs.wrap(bad)
    refused = lambda self, run: (_ for _ in ()).throw(RuntimeError("it waits"))
    monkeypatch.setattr(type(updates.recorder_of(torch.device(DEVICE))), "record", refused)
    want = made()
    steps(*want, range(4))
    other = made()
    graphs.wrap(other[1])
    torch.set_default_dtype(torch.bfloat16)  # in which rates would be rounded
    try:
        steps(*other, range(4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(other, want)
    assert "2 as it was: it cannot be recorded: RuntimeError: it waits" in graphs.report(other[1])
    monkeypatch.setattr(updates, "recorder_of", lambda device: None)
    graphs.forget(other[1])
    steps(*other, range(2))
    assert "CUDA graphs need all of its tensors whole on one GPU" in graphs.report(other[1])


def test_a_state_of_another_kind_of_step():
    other = made(fused=False, foreach=True)
    steps(*other, [0])

    def run(model, optimizer):
        steps(model, optimizer, range(3))
        optimizer.load_state_dict(copy.deepcopy(other[1].state_dict()))
        steps(model, optimizer, range(3, 6))

    assert "3 as it was: it is neither fused nor capturable" in graphs.report(followed(run)[1])


def test_recordings_know_all_that_they_read():
    def run(model, optimizer):
        for _ in range(64):
            optimizer.add_param_group({"params": []})
        steps(model, optimizer, range(3))
        first, second, *_ = optimizer.param_groups
        second["params"].insert(0, first["params"].pop())  # gets another learning rate
        steps(model, optimizer, range(3))
        optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)
        steps(model, optimizer, range(3))
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(0.0, device=DEVICE)
        steps(model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25, device=DEVICE)
        steps(model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] = float(rate.fill_(0.5))  # which was a tensor
        steps(model, optimizer, range(3))

    assert replays(followed(run, weight_decay=0.3)[1]) == 13


def test_an_optimizer_that_is_gone_leaves_nothing():
    _, optimizer = made()
    gone = weakref.ref(graphs.wrap(optimizer))
    assert list(inspect.signature(optimizer.step).parameters) == ["closure"]
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    del optimizer
    assert gone() is None
    empty = graphs.wrap(torch.optim.AdamW([{"params": []}], fused=True))
    empty.step()
    assert "whole on one GPU" in graphs.report(empty)


def test_numbers_that_change_in_each_step_are_named():
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.OneCycleLR(graphs.wrap(optimizer), 0.01, total_steps=20)
    steps(model, optimizer, range(12), lambda i: i and schedule.step())
    assert "0 replayed" in graphs.report(optimizer) and "or numbers of its groups change" in graphs.report(optimizer)


def test_places_that_seldom_come_again_are_recorded_a_few_times_only():
    model, optimizer = made()
    graphs.wrap(optimizer)
    kept = []
    for _ in range(updates.TRIED + 3):
        kept.append([p.grad for p in model.parameters()])
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        steps(model, optimizer, range(2))
    assert len(vars(optimizer)[micro_steps.KEY].steps) == updates.TRIED
    assert "its gradients seldom lie where they did" in graphs.report(optimizer)
    graphs.forget(optimizer)
    steps(model, optimizer, range(3))
    assert len(vars(optimizer)[micro_steps.KEY].steps) == 1


def test_runs_of_liger_train_replay_clipping_and_the_step(tmp_path, models_by_references, monkeypatch):
    from liger_kernel.train import loop

    own, places = loop._Run._gradients, {}

    def gradients(self, *given):
        loss = own(self, *given)
        for p in self.model.parameters():  # lent ones lie in one place
            p.grad = places.setdefault(p, torch.empty_like(p.grad)).copy_(p.grad)
        if self.step == 3:
            p.grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(loop._Run, "_gradients", gradients)
    monkeypatch.setattr(updates, "recorder_of", lambda device: Again())
    monkeypatch.setattr(loop, "note", (said := []).append)
    records = [{"text": f"def add(a, b): return a + b + {i} " * 30} for i in range(20)]
    config = small_run(tmp_path, records, steps=6, lr=0.1, grad_clip=0.1, nonfinite="skip", warmup=3)
    want = loop.train(config)
    found = loop.train(replace(config, graphs=True, out=f"{config.out}-2"))
    assert found["nonfinite_steps"] == want["nonfinite_steps"] == 1
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-5) and want["losses"][-1] < want["losses"][0]
    assert any("1 optimizer steps recorded, 4 replayed" in text for text in said)


def test_the_counter_of_weight_casts_is_no_hook_of_others():
    float8_training._count_steps()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert not _private.observes_steps(optimizer)
    optimizer.register_step_post_hook(print)
    assert _private.observes_steps(optimizer)
