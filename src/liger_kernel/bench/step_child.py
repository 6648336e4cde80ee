"""One variant of ``liger bench step`` in a process of its own, or one per GPU: ``step_child.py SPEC RESULT``, both JSON files; ``SPEC`` is made in step.py."""

from __future__ import annotations

import os
import sys

# Whose package is called `liger_kernel` here, ours or the published one, PYTHONPATH alone decides. Therefore this file is run by its path, imports nothing
# that lies next to it, and takes its folder off the path, where `profile.py` would hide the one of Python's library.
if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]

import contextlib
import functools
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

BATCHES = 4  # distinct ones, taken in turn
IGNORE = -100


# -- what is measured ----------------------------------------------------------------------


class Memory:
    """GB held by PyTorch's allocator on a GPU; without one, by the whole process."""

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
        with contextlib.suppress(OSError):  # not allowed in some containers: the peak then includes the start-up
            Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return 0


class Timeline:
    """Memory over one step: ``points`` of milliseconds, GB and phase, at the end of each phase and at its peak where that is higher."""

    def __init__(self, memory: Memory, synchronize: Callable[[], None]):
        self.memory, self.synchronize = memory, synchronize
        synchronize()
        memory.reset()
        self.start = time.perf_counter()
        self.points: list[tuple[float, float, str]] = [(0.0, memory.now(), "start")]

    def mark(self, phase: str) -> None:
        """``phase`` is over."""
        self.synchronize()
        now, held, peak = 1e3 * (time.perf_counter() - self.start), self.memory.now(), self.memory.peak()
        before, held_before, _ = self.points[-1]
        if peak > max(held, held_before):
            self.points.append(((before + now) / 2, peak, phase))
        self.points.append((now, held, phase))
        self.memory.reset()


@contextlib.contextmanager
def layers_marked(model: Any, timeline: Timeline) -> Iterator[None]:
    """Mark the layers of one forward and backward. The head is not hooked: that would keep ours from fusing it."""
    layers = model.base_model.layers
    last = len(layers) - 1

    def backward_reached(i: int, gradient: Tensor) -> None:
        timeline.mark("backward: loss and head" if i == last else f"backward: layer {i + 1}")

    def forward_left(layer: nn.Module, args: Any, out: Any, *, i: int) -> None:
        if ("forward", i) in seen:
            return  # recomputed in the backward: part of the backward of the layer
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


# Names of modules, and what their kernels do besides GEMMs and attention, which are known by their own names.
SCOPES = (("norm", "norm"), ("mlp", "activation"), ("rotary", "rope"), ("attention", "rope"))


@contextlib.contextmanager
def scopes(model: Any) -> Iterator[None]:
    """Annotate what modules and the loss do, so that the profile can tell a norm's multiplication from a rotary embedding's."""
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
            hooks.append(module.register_forward_hook(leave, always_call=True))  # recomputation stops by an exception
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


# -- a step --------------------------------------------------------------------------------


def build(spec: dict[str, Any], device: torch.device) -> Any:
    """The model of the spec, on the device, patched if the variant says so. Equal weights in every variant and on every rank."""
    values = dict(spec["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa").train()
    model.config.use_cache = False
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec["package"]:
        import liger_kernel
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        found = Path(liger_kernel.__file__ or "").resolve().parents[1]
        if found != Path(spec["package"]).resolve():
            raise ImportError(f"liger_kernel was found in {found}, not in {spec['package']}")
        _apply_liger_kernel_to_instance(model=model, **spec["flags"])
    return model


def parallel(model: Any, how: str | None, device: torch.device) -> Any:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def batches(spec: dict[str, Any], rank: int, device: torch.device) -> list[dict[str, Tensor]]:
    """The same for every variant, different ones for every rank."""
    tokens = torch.load(spec["tokens"]).long()
    B, T = spec["batch"], spec["seq"]
    generator = torch.Generator().manual_seed(1 + rank)
    found = []
    for i in range(BATCHES):
        at = (torch.arange(B * T) + (i * spec["gpus"] + rank) * B * T) % len(tokens)
        ids = tokens[at].view(B, T)
        masked = torch.rand(B, T, generator=generator) < spec["masked"]
        found.append({"input_ids": ids.to(device), "labels": ids.masked_fill(masked, IGNORE).to(device)})
    return found


def optimizer_of(name: str, model: Any, gpu: bool) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=gpu)  # what transformers' Trainer takes
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Train as the spec says; fields of a row. With ``trial``, only find out whether two steps fit."""
    gpu = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if spec["parallel"]:
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    memory = Memory(gpu)

    model = build(spec, device)
    run = parallel(model, spec["parallel"], device)
    if spec["compile"] == "layers":
        for layer in model.base_model.layers:
            layer.compile()
    elif spec["compile"]:
        run = torch.compile(run)
    optimizer = optimizer_of(spec["optimizer"], model, gpu)
    data = batches(spec, rank, device)
    losses: list[Tensor] = []

    def step(mark: Callable[[str], None] = lambda phase: None) -> None:
        loss = run(**data[len(losses) % BATCHES]).loss
        mark("forward: loss and head")
        loss.backward()
        mark("backward" if spec["compile"] else "backward: layer 0 and embedding")
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")
        losses.append(loss.detach())

    for _ in range(2 if spec["trial"] else spec["warmup"]):
        step()
    synchronize()
    if spec["trial"]:
        return {}
    memory.reset()
    clock = _EventClock() if gpu else _HostClock()
    for _ in range(spec["steps"]):
        step()
        clock.tick()
    times = clock.read()
    peaks = [memory.peak(), memory.reserved() or 0.0]
    first = torch.stack(losses[:BATCHES]).float()
    if spec["parallel"]:
        both = torch.tensor(peaks, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        peaks = both.tolist()
        dist.all_reduce(first)
        first /= dist.get_world_size()

    timeline = Timeline(memory, synchronize)
    with contextlib.nullcontext() if spec["compile"] else layers_marked(model, timeline):
        step(timeline.mark)
    if spec["trace"]:
        _trace(spec, model, step, synchronize, rank)

    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {
        "tokens_per_s": spec["batch"] * spec["seq"] * spec["gpus"] / median * 1e3,
        "step_ms": median,
        "spread": (high - low) / median,
        "peak_allocated_gb": peaks[0],
        "peak_reserved_gb": peaks[1] if gpu else None,
        "losses": first.tolist(),
        "memory_timeline": timeline.points,
    }


def _trace(spec: dict[str, Any], model: Any, step: Callable[[], None], synchronize: Callable[[], None], rank: int) -> None:
    """``spec["trace_steps"]`` steps as a Chrome trace. Every rank takes them, the first one writes."""
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # Under torch.compile hooks would change the graph, and generated kernels name what they fuse.
    with contextlib.nullcontext() if spec["compile"] else scopes(model):
        step()
        synchronize()
        with torch.profiler.profile(activities=activities) if rank == 0 else contextlib.nullcontext() as profile:
            for _ in range(spec["trace_steps"]):
                step()
            synchronize()
    if profile is not None:
        profile.export_chrome_trace(spec["trace"])


class _EventClock:
    """Milliseconds between ticks on the device; the host is not held up."""

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
    """Milliseconds between ticks."""

    def __init__(self) -> None:
        self.ticks = [time.perf_counter()]

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    def read(self) -> list[float]:
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.ticks)]


def main(spec: str, result: str) -> int:
    path = Path(result)
    try:
        found = measure(json.loads(Path(spec).read_text()))
    except Exception as error:  # whatever it is, it is what the row says
        text = " ".join(f"{type(error).__name__}: {error}".split())
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text
        traceback.print_exc()
        with contextlib.suppress(FileExistsError), path.open("x") as file:  # the first rank to fail says why: the others fail because of it
            json.dump({"failed": "out of memory" if out_of_memory else text[:300]}, file)
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one in a collective, and so would a regular exit
    if int(os.environ.get("RANK", 0)) == 0:
        path.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
