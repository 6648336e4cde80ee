"""Offloading: equal bits, the order of copies, copies that are late, a host without room, and what
stays where it is.

Without a GPU the "device" is the CPU, too: copies go from its memory to its memory. ``Late`` is a
lane whose copies run as late as they may.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from devices import DEVICE
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from liger_kernel.memory import offload as offloading

Log = list[tuple[str, int]]


class Late(offloading.Lane):
    """Copies run when a stream waits for them. What nobody waits for is never copied, and what
    is freed before its copy is lost."""

    class Stream:
        def __init__(self) -> None:
            self.queue: list[Callable[[], None]] = []

        def wait_event(self, event: int) -> None:
            for i in range(event):
                self.queue[i]()
                self.queue[i] = self.done

        @staticmethod
        def done() -> None: ...

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = self.Stream()

    def now(self) -> Late.Stream:
        return self.stream

    def _copy(self, pairs: Iterator[tuple[Tensor, Tensor]]) -> int:
        for there, here in pairs:
            there.fill_(255)  # as a number NaN: who does not wait reads it
            self.stream.queue.append(functools.partial(late_copy, *weakly(there), *weakly(here), len(here)))
        return len(self.stream.queue)


def weakly(t: Tensor) -> tuple[StorageWeakRef, int]:
    return StorageWeakRef(t.untyped_storage()), t.storage_offset()


def late_copy(there: StorageWeakRef, to: int, here: StorageWeakRef, at: int, size: int) -> None:
    if there.expired():
        return
    target = torch.UntypedStorage._new_with_weak_ptr(there.cdata)
    if here.expired():
        target[to : to + size] = 254  # the memory was freed, and somebody else's values are in it
    else:
        target[to : to + size].copy_(torch.UntypedStorage._new_with_weak_ptr(here.cdata)[at : at + size])


@pytest.fixture(autouse=True)
def device(monkeypatch) -> Iterator[None]:
    """Every tensor is worth a copy, in blocks of 256 bytes."""
    for name, value in dict(LEAST=1, LATE=1, BLOCK=256, STAYS=("meta",), RESERVE=0).items():
        monkeypatch.setattr(offloading, name, value)
    lane = offloading._lane
    lane.cache_clear()
    offloading._warn.cache_clear()
    yield
    lane.cache_clear()
    assert offloading.top_hooks() is None


@pytest.fixture(params=["at once", "late"])
def lane(request, monkeypatch) -> None:
    if request.param == "late":
        if DEVICE != "cpu":
            pytest.skip("a simulation on the CPU")
        lanes: dict[torch.device, Late] = {}
        monkeypatch.setattr(offloading, "_lane", lambda device: lanes.setdefault(device, Late(device)))


@pytest.fixture
def moved(monkeypatch) -> list[Tensor]:
    """What is copied to the host."""
    found: list[Tensor] = []
    init = offloading._Moved.__init__
    noted = lambda self, run, lane, t, blocks: found.append(t.detach()) or init(self, run, lane, t, blocks)
    monkeypatch.setattr(offloading._Moved, "__init__", noted)
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Layers(nn.Module):
    """``checkpointed``: None, or ``use_reentrant``."""

    def __init__(self, checkpointed: bool | None = None, layers: int = 5):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.checkpointed = checkpointed
        self.to(DEVICE)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Offloaded(Layers):
    forward = offloading.offloaded(Layers.body)


def x_of() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()


def learn(module: nn.Module, backwards: int = 1, run=lambda module, x: module(x)) -> dict[str, Tensor]:
    x = x_of()
    module.zero_grad()
    y = run(module, x * 1.0)
    for i in range(backwards):
        y.square().sum().backward(retain_graph=i < backwards - 1)
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | grads


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def offloads(body: Callable) -> nn.Module:
    """A module with this forward, which offloads."""
    return type("Module", (nn.Module,), {"forward": offloading.offloaded(body)})()


# -- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_equal_bits(checkpointed, autocast, moved, lane):
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return module(x)

    assert_equal(learn(Offloaded(checkpointed), run=run), learn(Layers(checkpointed), run=run))
    assert len(moved) == (5 if checkpointed is not None else 15)


@pytest.mark.parametrize("checkpointed", [None, False])
def test_a_graph_that_is_kept(checkpointed, lane):
    assert_equal(learn(Offloaded(checkpointed), backwards=3), learn(Layers(checkpointed), backwards=3))


class Marked(Tensor):
    pass


def views_and_repetitions(self, x: Tensor) -> Tensor:
    y = x.exp()  # saves its output
    a, b = y.transpose(0, 2), y[:, 1:]
    return (a * a.sin()).sum() + (b @ b.mT).sum() + (y[0] * y[1]).sum() + (y.view(torch.int32) & 1).sum() * y.sum()


def several_readers(self, x: Tensor) -> Tensor:
    """The first one waits for the copy, too."""
    first = x * 1
    y = first.sin()
    for _ in range(4):
        y = y.exp().sin()
    return y * first.cos() * first.tanh()


def changed_between_two_savings(self, x: Tensor) -> Tensor:
    """Each has its own value; only the second one is read."""
    y = x * 1
    self.unread = y.square()
    y.add_(1)
    z = y.square()
    for _ in range(4):
        z = z.sin()
    return z


def other_tensors(self, x: Tensor) -> Tensor:
    z = torch.complex(x, x)
    return x.as_subclass(Marked).exp().as_subclass(Tensor).sum() + torch.view_as_real(z.conj() * z).sum()


@pytest.mark.parametrize("body", [views_and_repetitions, several_readers, changed_between_two_savings, other_tensors])
def test_gradients_of_other_forwards(body, moved, lane):
    x, other = x_of(), x_of()
    offloads(body)(x).sum().backward()
    stock = SimpleNamespace()
    body(stock, other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert not any(type(t) is Marked or t.is_conj() for t in moved)
    if body is views_and_repetitions:  # exp, sin, cos, and a view as integers are copied, each once
        storages = [t.untyped_storage()._cdata for t in moved]
        assert len(set(storages)) == len(storages) and sum(t.numel() == x.numel() for t in moved) <= 4


def changed_in_place(self, x: Tensor) -> Tensor:
    y = x * 1
    z = y.square()  # saves y
    y.add_(1)
    return z * y


def changed_before_it_is_saved_again(self, x: Tensor) -> Tensor:
    y = x * 1
    z = (y.detach() * x).sum()
    y.add_(1)  # what was saved of y was detached: it has the same storage, and the same versions
    return z * 0 + (y * y.exp()).sum()


@pytest.mark.parametrize("body", [changed_in_place, changed_before_it_is_saved_again])
def test_a_change_in_place_is_noticed(body, lane):
    for run in (functools.partial(body, None), offloads(body)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(x_of()).sum().backward()


# -- the order of copies ---------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch) -> Log:
    """Copies out and back, reads, and when a tensor leaves, by place in the order of saving."""
    found: Log = []
    cls = offloading._Moved
    for name, said in (("fetch", "back"), ("read", "read"), ("let_go", "leaves")):
        inner = getattr(cls, name)

        def spy(self, inner=inner, said=said):
            if said == "read" or (self.here is None) == (said == "back"):
                found.append((said, self.index))
            return inner(self)

        monkeypatch.setattr(cls, name, spy)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_layer_ahead(log, checkpointed, monkeypatch):
    module = Offloaded(checkpointed, layers=4)
    y = module(x_of() * 1)
    assert log == [("leaves", 0), ("leaves", 1), ("leaves", 2)]
    log.clear()
    monkeypatch.setattr(offloading, "AHEAD", 1)  # so that it fetches one at a time
    y.sum().backward()
    steps = [[("read", i), ("back", i - 1), ("leaves", i)] for i in (3, 2, 1, 0)]  # a layer a step
    assert log == [each for step in steps for each in step if each != ("back", -1)]


def test_nothing_comes_back_twice(log):
    """Not even if the graph is kept and the tensors of one node are not read in reverse order."""
    y = offloads(lambda self, x: functools.reduce(lambda y, _: (y * 2).mul(y.sin()), range(4), x * 1))(x_of())
    y.sum().backward(retain_graph=True)
    back = [i for said, i in log if said == "back"]
    assert len(set(back)) == len(back) > 5


def test_further_ahead_where_tensors_are_small(log, monkeypatch):
    monkeypatch.setattr(offloading, "AHEAD", 2 * x_of().nbytes)
    y = Offloaded(False, layers=4)(x_of() * 1)
    log.clear()
    y.sum().backward()
    said = " ".join(f"{what} {i}" for what, i in log if what != "leaves")
    assert said == "read 3 back 2 back 1 read 2 back 0 read 1 read 0"


def test_some_copies_may_be_late(monkeypatch, log):
    monkeypatch.setattr(offloading, "LATE", 3 * x_of().nbytes)
    module = Offloaded(False, layers=6)
    y = module(x_of() * 1)
    assert log == [("leaves", 0), ("leaves", 1), ("leaves", 2)]  # each when the third after it is saved
    log.clear()
    y.sum().backward()
    assert [i for said, i in log if said == "back"] == [2, 1, 0]


def test_what_was_fetched_for_nothing_is_waited_for(monkeypatch):
    """Its memory would be used again while the copy still writes to it."""
    lanes: dict[torch.device, Late] = {}
    monkeypatch.setattr(offloading, "_lane", lambda device: lanes.setdefault(device, Late(device)))
    module, x = Offloaded(False, layers=3), x_of()
    y = module(x * 1)
    last = [*module.layers[2].parameters()]
    torch.autograd.grad(y.sum(), last)  # reads the input of the last layer alone, and fetches that of the second
    (lane,) = lanes.values()
    pending = len(lane.stream.queue)
    del y
    gc.collect()
    assert pending and all(step is Late.Stream.done for step in lane.stream.queue)


# -- the host --------------------------------------------------------------------------------


def test_pinned_memory_is_used_again(monkeypatch):
    pinned: list[int] = []
    pin = offloading.Lane._pin
    monkeypatch.setattr(offloading.Lane, "_pin", lambda self, size: pinned.append(size) or pin(self, size))
    module = Offloaded(False)
    learn(module)
    first = len(pinned)
    assert sum(pinned) == 5 * x_of().nbytes and set(pinned) == {256}
    for _ in range(3):
        learn(module)
    with torch.no_grad():
        module(x_of())
    assert len(pinned) == first
    learn(module, run=lambda module, x: module(x[:, :4] * 1))  # shorter rows take from the same blocks
    assert len(pinned) == first


def test_memory_is_given_back_without_a_backward():
    lane = offloading._lane(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    held = lambda: sum(map(len, lane.free.values()))
    y = Offloaded(None)(x_of() * 1)
    assert held() == 0
    del y
    assert held() > 0  # without the garbage collector: nothing is in a cycle


@pytest.mark.parametrize("fits", [0, 2])
def test_what_the_host_has_no_room_for_stays(monkeypatch, moved, fits):
    size = x_of().nbytes
    left = [fits * size]
    pin = offloading.Lane._pin

    def counted(self, size):
        block = pin(self, size)
        left[0] -= size if block is not None else 0
        return block

    monkeypatch.setattr(offloading.Lane, "_pin", counted)
    monkeypatch.setattr(offloading, "host_memory_left", lambda: left[0])
    text = r"activation_offloading: the host has 0\.0 GB of memory left, so the activations that do not fit stay"
    with pytest.warns(UserWarning, match=text) as said:
        ours = learn(Offloaded(False))
    assert_equal(ours, learn(Layers(False)))
    assert len(moved) == fits and len(said) == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory\nmore"), OSError("CUDA error: out of memory")]
)
def test_memory_that_cannot_be_pinned(monkeypatch, error):
    lane = offloading.Lane(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=error))
    with pytest.warns(UserWarning, match=r"no more memory can be pinned \(CUDA error: out of memory\)"):
        assert lane.take(1000) is None


GB = 2**30


def group(most: int | str, used: int, folder: str = "", stat: str | None = None) -> dict[str, int | str]:
    """Files of a control group of the second version."""
    files = {f"{folder}memory.max": most, f"{folder}memory.current": used}
    return files | ({} if stat is None else {f"{folder}memory.stat": stat})


def first(folder: str, most: int, used: int) -> dict[str, int | str]:
    """Of the first version."""
    return {f"{folder}/memory.limit_in_bytes": most, f"{folder}/memory.usage_in_bytes": used}


@pytest.mark.parametrize(
    "own, files, gb",
    [
        ("0::/", group(8 * GB, GB, stat=f"anon 5\ninactive_file {GB}\n"), 8),  # a container
        ("0::/", group("max", GB), 24),
        ("0::/system.slice/run.scope", group(8 * GB, GB, "system.slice/run.scope/"), 7),
        ("0::/job/step", group(6 * GB, GB, "job/") | group("max", 5, "job/step/"), 5),
        ("0::/gone", group(8 * GB, GB, stat="anon 5\n"), 7),
        ("4:cpu,memory:/job\n2:pids:/x", first("memory/job", 4 * GB, GB), 3),
        ("4:memory:/docker/1", first("memory", 4 * GB, 0), 4),
        (None, group(8 * GB, GB), 7),
    ],
    ids=str,
)
def test_limits_of_the_host(tmp_path, own, files, gb):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {24 * 2**20} kB\n")
    if own is not None:
        (tmp_path / "proc" / "self" / "cgroup").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert offloading.host_memory_left(tmp_path) == gb * GB
    assert offloading.host_memory_left(tmp_path / "a host that says nothing") > 2**50
    assert 2**20 < offloading.host_memory_left() < 2**50


def no_pages(*args, **more):
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    "answer, device, mapped, pages",
    [
        (0, "cuda", None, 1),
        (KeyboardInterrupt(), "cuda", None, 1),  # while they are registered: they may be
        (2, "cuda", None, 0),  # the driver refuses
        (AssertionError("Torch not compiled with CUDA enabled"), "xpu", None, 0),  # others pin as PyTorch does
        (0, "cuda", no_pages, 0),
    ],
)
def test_pages_that_are_registered_stay(answer, device, mapped, pages, monkeypatch):
    register = mock.Mock(side_effect=[answer])
    runtime = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(offloading, "_pages", [])
    empty = torch.empty
    unpinned = lambda *size, **more: empty(*(n if n < 2**40 else 0 for n in size), **more | {"pin_memory": False})
    monkeypatch.setattr(torch, "empty", unpinned)
    if mapped:
        monkeypatch.setattr(offloading.mmap, "mmap", mapped)
    with pytest.raises(KeyboardInterrupt) if isinstance(answer, KeyboardInterrupt) else contextlib.nullcontext():
        block = offloading._pinned(2**20, torch.device(device, 0))
        assert block.nbytes == 2**20 and not (pages and block.any())
    assert len(offloading._pages) == pages


# -- what stays ------------------------------------------------------------------------------


def test_small_tensors_and_parts_of_large_ones_stay(monkeypatch, moved):
    monkeypatch.setattr(offloading, "LEAST", 256)
    large = torch.randn(100, 64, device=DEVICE, requires_grad=True)
    y = offloads(lambda self, x: (x * 1)[3].exp() + (x * 1)[:63].sin().sum() + (x * 1)[:2].cos().sum())(large)
    assert [tuple(t.shape) for t in moved] == [(64,), (63, 64)]  # the two rows are a small part of what would be copied
    y.sum().backward()


def test_on_a_cpu_nothing_is_moved(monkeypatch, moved):
    monkeypatch.setattr(offloading, "STAYS", ("cpu", "meta"))
    module = Offloaded().cpu()
    module(x_of().cpu()).sum().backward()
    assert not moved


# -- beside other code -----------------------------------------------------------------------


def under_hooks(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)


OF_HOOKS = r"activation_offloading: it steps aside for the hooks for saved tensors of torch\."
ASIDE = {  # of save_on_cpu, or the hooks of TRL and torchtune, which are in place around the whole step
    "hooks": (under_hooks, OF_HOOKS + r"autograd\.graph"),
    "checkpoint": (lambda module, x: checkpoint(module, x, use_reentrant=False), OF_HOOKS + r"utils\.checkpoint"),
    "torch.func": (lambda module, x: torch.func.vjp(module, x)[0], "steps aside for torch.func"),
    "torch.compile": (
        lambda module, x: torch.compile(module, backend="aot_eager", fullgraph=True)(x),
        "steps aside for torch.compile, which chooses what it keeps: compile the layers, not the model",
    ),
}


@pytest.mark.parametrize("how", ASIDE)
def test_it_steps_aside(how, moved):
    torch._dynamo.reset()
    run, said = ASIDE[how]
    with pytest.warns(UserWarning, match=said):
        ours = learn(Offloaded(False if how == "hooks" else None), run=run)
    stock = learn(Layers())
    (torch.testing.assert_close if how.startswith("torch") else assert_equal)(ours, stock)
    with torch.no_grad():
        assert torch.equal(Offloaded()(x_of()), Layers()(x_of()))
    assert not moved


def test_torch_compile_of_the_layers(moved):
    torch._dynamo.reset()
    learned = []
    for module in (Offloaded(), Layers()):
        for layer in module.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        learned.append(learn(module))
    assert_equal(*learned)
    assert moved


def test_an_error_in_the_forward_leaves_no_hooks():
    def fail(self, x):
        raise KeyError

    with pytest.raises(KeyError):
        offloads(fail)(x_of())
    assert offloading.top_hooks() is None


def test_several_graphs_at_once(lane):
    """Two forwards before their backwards, as losses of preference have them; of a copied module."""
    learned = []
    for module in (copy.deepcopy(Offloaded(False)), Layers(False)):
        x = x_of()
        one, other = module(x * 1), module(x * 2)
        (one * other).sum().backward()
        learned.append({"x": x.grad} | {n: p.grad for n, p in module.named_parameters()})
    assert_equal(*learned)


# -- on a GPU --------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_less_memory_of_a_gpu(monkeypatch, checkpointed):
    monkeypatch.undo()
    monkeypatch.setattr(offloading, "LATE", 2**26)  # of 512 MB in all: bytes that may wait for their copies
    layer = lambda: nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.SiLU(), nn.Linear(1024, 1024, bias=False))
    learned, kept = [], []
    for cls in (Layers, Offloaded):
        module = cls(checkpointed, 0)
        module.layers.extend(layer().to(DEVICE, torch.bfloat16) for _ in range(16))
        torch.manual_seed(0)
        for p in module.parameters():
            nn.init.normal_(p, std=0.02)
        for _ in range(3):
            generator = torch.Generator(DEVICE).manual_seed(0)
            x = torch.randn(16384, 1024, device=DEVICE, dtype=torch.bfloat16, generator=generator).requires_grad_()
            module.zero_grad()
            before = torch.cuda.memory_allocated()
            y = module(x)
            kept.append(torch.cuda.memory_allocated() - before)
            y.float().square().mean().backward()
        learned.append({"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in module.named_parameters()})
    assert_equal(*learned)
    assert kept[-1] < 0.3 * kept[0]
