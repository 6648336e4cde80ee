"""One variant of ``liger bench step`` in its own process, or in one per GPU: ``step_child.py
SPEC RESULT``. Both are JSON files; step.py writes ``SPEC``."""

from __future__ import annotations

import os
import sys

# Only PYTHONPATH decides which package `liger_kernel` is here: ours or LinkedIn's. Therefore this
# file is run by its path, imports no file beside it,
# and removes its folder from the path, where `profile.py` would hide Python's own module.
if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]

import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Functions import transformers and PEFT themselves, because Unsloth changes both and must be
# imported first.


def _beside(name: str, room: str = "bench") -> ModuleType:
    """Load a module beside this file, or of another room, by its path."""
    spec = importlib.util.spec_from_file_location(f"_{name}", Path(__file__).parents[1] / room / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _beside("step_model")
adamw = _beside("adamw", "train")

BATCHES = 4  # distinct batches, which steps use in turn
IGNORE = -100
OUT_OF_MEMORY = "out of memory"
SHARED_ROWS = ("ulysses", "ulysses-fsdp2")  # all ranks compute the same rows


class Memory:
    """GB that PyTorch's allocator holds on a GPU, or without a GPU the whole process."""

    def __init__(self, gpu: bool):
        self.gpu = gpu

    def now(self) -> float:
        return (torch.cuda.memory_allocated() if self.gpu else _status("VmRSS")) / 1e9

    def peak(self) -> float:
        return (torch.cuda.max_memory_allocated() if self.gpu else _status("VmHWM")) / 1e9

    def reserved(self) -> float | None:
        return torch.cuda.max_memory_reserved() / 1e9 if self.gpu else None

    def reset(self) -> None:
        if self.gpu:
            return torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # some containers forbid it: then the peak includes the start-up
            Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        return next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(name + ":")
        )
    return 0


class Timeline:
    """Memory during one step. ``points``: milliseconds, GB and phase, at the end of each phase,
    and at its peak if that is higher."""

    def __init__(self, memory: Memory, synchronize: Callable[[], None]):
        self.memory, self.synchronize = memory, synchronize
        synchronize()
        memory.reset()
        self.start = time.perf_counter()
        self.points: list[tuple[float, float, str]] = [(0.0, memory.now(), "start")]

    def mark(self, phase: str) -> None:
        """Record that ``phase`` has ended."""
        self.synchronize()
        now, held, peak = 1e3 * (time.perf_counter() - self.start), self.memory.now(), self.memory.peak()
        before, held_before, _ = self.points[-1]
        if peak > max(held, held_before):
            self.points.append(((before + now) / 2, peak, phase))
        self.points.append((now, held, phase))
        self.memory.reset()


@contextlib.contextmanager
def layers_marked(model: Any, timeline: Timeline) -> Iterator[None]:
    """Mark the layers of one forward and backward. The head gets no hook, because our package
    does not fuse a head with hooks."""
    layers = models.layers_of(model)
    last = len(layers) - 1

    def backward_reached(i: int, gradient: Tensor) -> None:
        timeline.mark("backward: loss and head" if i == last else f"backward: layer {i + 1}")

    def forward_left(layer: nn.Module, args: Any, out: Any, *, i: int) -> None:
        if ("forward", i) in seen:
            return  # a recomputation is a part of the layer's backward
        seen.add(("forward", i))
        timeline.mark(f"forward: layer {i}")
        out = out[0] if isinstance(out, tuple) else out
        out.register_hook(functools.partial(backward_reached, i))

    def forward_reached(layer: nn.Module, args: Any) -> None:
        if "embedding" not in seen:
            seen.add("embedding")
            timeline.mark("forward: embedding")

    seen: set[Any] = set()
    hooks = [layers[0].register_forward_pre_hook(forward_reached)]
    hooks += [layer.register_forward_hook(functools.partial(forward_left, i=i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Names of modules, and the kind of their kernels apart from GEMMs and attention, whose own names
# show their kind.
SCOPES = (("norm", "norm"), ("mlp", "activation"), ("rotary", "rope"), ("attention", "rope"))


@contextlib.contextmanager
def scopes(model: Any) -> Iterator[None]:
    """Annotate the work of modules and of the loss, so that the profile can distinguish a norm's
    multiplication from a rotary embedding's."""
    hooks, active = [], []

    def enter(kind: str, *_: Any) -> None:
        active.append(torch.profiler.record_function(f"bench/{kind}"))
        active[-1].__enter__()

    def leave(*_: Any) -> None:
        active.pop().__exit__(None, None, None)

    for module in model.modules():
        kind = next((kind for word, kind in SCOPES if word in type(module).__name__.lower()), None)
        if kind:
            hooks.append(module.register_forward_pre_hook(functools.partial(enter, kind)))
            hooks.append(module.register_forward_hook(leave, always_call=True))  # an exception ends a recomputation
    model = getattr(
        model, "get_base_model", lambda: model
    )()  # the model inside PEFT's wrapper, which only forwards its attributes
    stock, had = model.loss_function, "_loss_function" in model.__dict__

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("bench/loss"):
            return stock(*args, **kwargs)

    model.loss_function = loss_function
    try:
        yield
    finally:
        model.loss_function = stock
        if not had:
            del model._loss_function
        for hook in hooks:
            hook.remove()


def parallel(model: Any, how: str | None, device: torch.device, on_cpu: bool = False) -> Any:
    if how in SHARED_ROWS:
        from liger_kernel.parallel import parallelize  # stock models, too: Transformers has nothing of the kind

        return parallelize(model, how, cpu_offload=on_cpu).model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if how == "ep":
        config, _, meshes = model.prepare_distribute_model(
            {"fsdp_size": dist.get_world_size(), "ep_size": dist.get_world_size()}
        )
        return model.maybe_distribute_model(model, config, meshes)
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if on_cpu:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for layer in models.layers_of(model):
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    return model


def batches(spec: dict[str, Any], rank: int, device: torch.device, count: int = BATCHES) -> list[dict[str, Tensor]]:
    """Batches: the same for every variant, different for every rank."""
    tokens = torch.load(spec["tokens"]).long()
    B, T = spec["batch"], spec["seq"]
    generator = torch.Generator().manual_seed(1 + rank)
    found = []
    for i in range(count):
        at = (torch.arange(B * T) + (i * spec["gpus"] + rank) * B * T) % len(tokens)
        ids = tokens[at].view(B, T)
        masked = torch.rand(B, T, generator=generator) < spec["masked"]
        batch = {"input_ids": ids}
        if spec["median"]:  # rows end there and are padded after it
            lengths = (spec["median"] * torch.exp(0.6 * torch.randn(B, generator=generator))).long().clamp(8, T)
            batch["attention_mask"] = (torch.arange(T) < lengths[:, None]).long()
            masked |= batch["attention_mask"] == 0
        batch["labels"] = ids.masked_fill(masked, IGNORE)
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def optimizer_of(name: str, model: Any, gpu: bool) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-3)
    return adamw.make(
        name, trained, lr=1e-4, **({"fused": gpu} if name == "adamw" else {})
    )  # fused is the default of transformers' Trainer


class Training:
    """A model and its training on this rank, according to the spec."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.gpu = spec, torch.cuda.is_available()
        self.rank = int(os.environ.get("RANK", 0))
        shared = spec["parallel"] in SHARED_ROWS
        self.share, self.shares = 0 if shared else self.rank, 1 if shared else int(spec["gpus"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        if spec["parallel"]:
            dist.init_process_group("nccl" if self.gpu else "gloo", device_id=self.device if self.gpu else None)
        self.synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        self.memory = Memory(self.gpu)
        self.model = models.build(spec, self.device)
        self.marked = not (
            spec["compile"] or spec["unsloth"]
        )  # hooks would change the compiled code, and Unsloth compiles its layers
        self.run = parallel(self.model, spec["parallel"], self.device, spec["optimizer_on_cpu"])
        if spec["parallel"] and self.gpu:
            gc.collect()
            torch.cuda.empty_cache()  # whole weights, of which each rank now has a part
        if spec["compile"] == "layers":
            for layer in models.layers_of(self.model):
                layer.compile()
        elif spec["compile"]:
            self.run = torch.compile(self.run)
        self.optimizer = optimizer_of(spec["optimizer"], self.model, self.gpu or spec["optimizer_on_cpu"])
        self.in_backward = adamw.InBackward(self.optimizer) if spec["optimizer_in_backward"] else None
        self.losses: list[Tensor] = []
        self.gradient: Tensor | None = None  # the norm of the first step's gradient
        self.why = ""

    def step(self, data: list[dict[str, Tensor]], mark: Callable[[str], None] = lambda phase: None) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec["autocast"]):
            loss = self.run(**data[len(self.losses) % len(data)]).loss
        mark("forward: loss and head")
        loss.backward()
        mark("backward: layer 0 and embedding" if self.marked else "backward")
        if self.gradient is None and not self.spec["parallel"]:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.gradient = self.in_backward.norm() if self.in_backward else nn.utils.get_total_norm(gradients)
        if not self.in_backward:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.spec["gathered"]:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        mark("optimizer")
        self.losses.append(loss.detach())

    def measure(self, batch: int) -> dict[str, Any]:
        """Train with batches of this size, and return the fields of a row."""
        spec, memory = self.spec | {"batch": batch}, self.memory
        data = batches(spec, self.share, self.device)
        self.losses.clear()
        for _ in range(spec["warmup"]):
            self.step(data)
        self.synchronize()
        memory.reset()
        clock = _EventClock() if self.gpu else _HostClock()
        for _ in range(spec["steps"]):
            self.step(data)
            clock.tick()
        times = clock.read()
        peaks = [memory.peak(), memory.reserved() or 0.0]
        first = torch.stack(self.losses[:BATCHES]).float()
        if spec["parallel"]:
            both = torch.tensor(peaks, device=self.device)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            peaks = both.tolist()
            dist.all_reduce(first)
            first /= dist.get_world_size()

        timeline = Timeline(memory, self.synchronize)
        with layers_marked(self.model, timeline) if self.marked else contextlib.nullcontext():
            self.step(data, timeline.mark)
        if spec["trace"]:
            _trace(
                spec,
                scopes(self.model) if self.marked else contextlib.nullcontext(),
                lambda: self.step(data),
                self.synchronize,
                self.rank,
            )

        low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        return {
            "batch": batch,
            "tokens_per_s": batch * spec["seq"] * self.shares / median * 1e3,
            "step_ms": median,
            "spread": (high - low) / median,
            "peak_allocated_gb": peaks[0],
            "peak_reserved_gb": peaks[1] if self.gpu else None,
            "losses": first.tolist(),
            "gradient": None if self.gradient is None else self.gradient.item(),
            "memory_timeline": timeline.points,
        }

    def peak(self, batch: int, seq: int, steps: int = 2) -> float | None:
        """The peak of steps of that size in GB; None, and the reason in ``why``, if they fail.
        For one GPU: other ranks would wait for the failing one."""
        held = self.memory.now()
        self.memory.reset()
        try:
            data = batches(self.spec | {"batch": batch, "seq": seq}, self.share, self.device, 1)
            for _ in range(steps):
                self.step(data)
            self.synchronize()
            return self.memory.peak()
        except Exception as error:
            self.why = _text(error)
            if self.why != OUT_OF_MEMORY and "CUDA error" in str(error):  # after such an error, CUDA no longer works
                raise
        finally:
            data = []
            self.losses.clear()
            self.optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
        if self.memory.now() > 1.02 * held + 0.1:
            raise RuntimeError(
                f"{self.memory.now():.1f} GB are held after a step that did not fit, {held:.1f} before it: what fits "
                "cannot be told"
            )
        return None


UNITS = {"batch": 1, "seq": 256}  # the search for the largest size uses multiples of these


def largest_that(peak: Callable[[int], float | None], start: int, capacity: float | None = None) -> int:
    """The largest number that fits, to within 1/16; 0 if even 1 does not fit. ``peak(n)`` is the
    memory for n, or None if n does not fit.

    Memory is nearly linear in n, so the next number to test is where the line reaches the capacity.
    """
    peaks: dict[int, float] = {}
    n, high = start, None
    while True:
        taken = peak(n)
        if taken is None:
            high = n
        else:
            peaks[n] = taken
        low, step = max(peaks, default=0), max(1, max(peaks, default=0) // 16)
        if high is not None and high - low <= step:
            return low
        n = 2 * low
        if len(peaks) > 1 and capacity:
            a, b = sorted(peaks)[-2:]
            slope = (peaks[b] - peaks[a]) / (b - a)
            n = min(4 * low, int(b + 0.99 * (capacity - peaks[b]) / slope)) if slope > 0 else n
        n = max(n, low + step)
        if high is not None and n >= high:
            n = (low + high) // 2


def measure(spec: dict[str, Any], found: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Train according to the spec. Returns one row per batch, and the largest sizes that fit;
    ``found`` receives each result when it is ready."""
    if spec["save"]:
        models.save(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return {"rows": []}
    training = Training(spec)
    result: dict[str, Any] = {"rows": []}
    if spec["trial"]:
        data = batches(spec | {"batch": spec["batches"][0]}, training.share, training.device, 1)
        training.step(data)
        training.step(data)
        training.synchronize()
        return result | {"peak": training.memory.peak()}
    for batch in spec["batches"]:
        result["rows"].append(training.measure(batch))
        found(result)
    for what in spec["largest"]:
        _search(training, what, result["rows"][0], lambda: found(result))
    return result


def _search(training: Training, what: str, row: dict[str, Any], found: Callable[[], None]) -> None:
    """Set ``row["largest_" + what]``, after each trial, so that it is known even if a larger
    size ends the process."""
    sizes, unit = {"batch": row["batch"], "seq": training.spec["seq"]}, UNITS[what]
    row[f"largest_{what}"], known = 0, {sizes[what]: row["peak_allocated_gb"]}  # where the search begins

    def peak(n: int) -> float | None:
        taken = known.get(n * unit) or training.peak(**sizes | {what: n * unit})
        if taken is None:
            row[f"largest_{what}_limit"] = training.why
        else:
            row[f"largest_{what}"] = max(row[f"largest_{what}"], n * unit)
        found()
        return taken

    largest_that(
        peak, max(1, sizes[what] // unit), torch.cuda.get_device_properties(training.device).total_memory / 1e9
    )


def _trace(
    spec: dict[str, Any],
    scopes: contextlib.AbstractContextManager[None],
    step: Callable[[], None],
    synchronize: Callable[[], None],
    rank: int,
) -> None:
    """Write ``spec["trace_steps"]`` steps as a Chrome trace. Every rank runs them, and the first
    rank writes."""
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        *([torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with scopes:  # no scopes under torch.compile: the names of generated kernels list what they fuse
        step()
        synchronize()
        with torch.profiler.profile(activities=activities) if rank == 0 else contextlib.nullcontext() as profile:
            for _ in range(spec["trace_steps"]):
                step()
            synchronize()
    if profile is not None:
        profile.export_chrome_trace(spec["trace"])


class _EventClock:
    """Milliseconds between ticks on the device; the host does not wait."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.tick()

    def tick(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def read(self) -> list[float]:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self.events)]


class _HostClock:
    """Milliseconds between ticks on the host."""

    def __init__(self) -> None:
        self.ticks = [time.perf_counter()]

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    def read(self) -> list[float]:
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.ticks)]


def _text(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
        return OUT_OF_MEMORY
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main(spec: str, result: str) -> int:
    first = int(os.environ.get("RANK", 0)) == 0

    def write(so_far: dict[str, Any]) -> None:
        if first:
            Path(result).write_text(json.dumps(so_far))

    try:
        write(measure(json.loads(Path(spec).read_text()), write))
    except Exception as error:  # any error becomes the text of the row
        traceback.print_exc()
        with (
            contextlib.suppress(FileExistsError),
            Path(f"{result}.failed").open("x") as file,
        ):  # the first rank to fail says why; it makes the others fail
            json.dump(_text(error), file)
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one in a collective, and a regular exit would wait for them
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
