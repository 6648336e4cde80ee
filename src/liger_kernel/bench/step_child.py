"""One variant of ``liger bench step`` in its own process, or in one per GPU: ``step_child.py
SPEC RESULT``. Both are JSON files; step.py writes ``SPEC``."""

from __future__ import annotations

import os
import sys

# Only PYTHONPATH decides which package `liger_kernel` is here: ours or LinkedIn's. Therefore this
# file is run by its path, imports no file beside it, and removes its folder from the path, where
# `profile.py` would hide Python's own module.
if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]

import contextlib
import functools
import gc
import importlib.util
import json
import statistics
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Functions import transformers and PEFT themselves, because some packages change both and must be
# imported first.


def load(path: str | Path) -> ModuleType:
    """A module by its path."""
    spec = importlib.util.spec_from_file_location(f"_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
models = load(HERE / "step_model.py")
adamw = load(HERE.parent / "train" / "adamw.py")
measures = load(HERE.parent / "train" / "measure.py")

BATCHES = 4  # distinct batches, which steps use in turn
IGNORE = -100
SHARED_ROWS = ("ulysses", "ulysses-fsdp2")  # all ranks compute the same rows
GPU = torch.cuda.is_available()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


# Names of modules, and the kind of their kernels apart from GEMMs and attention, whose own names
# show their kind.
SCOPES = (("norm", "norm"), ("mlp", "activation"), ("rotary", "rope"), ("attention", "rope"))


def annotate(model: Any) -> None:
    """Annotate the work of modules and of the loss, so that the profile can distinguish a norm's
    multiplication from a rotary embedding's. It stays: nothing is measured after the profile."""
    active = []

    def enter(kind: str, *_: Any) -> None:
        active.append(torch.profiler.record_function(f"bench/{kind}"))
        active[-1].__enter__()

    def leave(*_: Any) -> None:
        active.pop().__exit__(None, None, None)

    for module in model.modules():
        kind = next((kind for word, kind in SCOPES if word in type(module).__name__.lower()), None)
        if kind:
            module.register_forward_pre_hook(functools.partial(enter, kind))
            module.register_forward_hook(leave, always_call=True)  # an exception ends a recomputation
    # the model inside PEFT's wrapper, which only forwards its attributes
    model = getattr(model, "get_base_model", lambda: model)()
    model.loss_function = torch.profiler.record_function("bench/loss")(model.loss_function)


def parallel(model: Any, how: str | None, device: torch.device, on_cpu: bool = False) -> Any:
    if how in SHARED_ROWS:
        from liger_kernel.parallel import parallelize  # stock models, too: Transformers has nothing of the kind

        return parallelize(model, how, cpu_offload=on_cpu).model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if GPU else None)
    if how == "ep":
        world = dist.get_world_size()
        config, _, meshes = model.prepare_distribute_model({"fsdp_size": world, "ep_size": world})
        return model.maybe_distribute_model(model, config, meshes)
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if on_cpu:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=GPU)
        for layer in models.layers_of(model):
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    return model


def batches(spec: dict[str, Any], batch: int, rank: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Batches: the same for every variant, different for every rank."""
    tokens = torch.load(spec["tokens"]).long()
    B, T = batch, spec["seq"]
    generator = torch.Generator().manual_seed(1 + rank)
    for i in range(BATCHES):
        at = (torch.arange(B * T) + (i * spec["gpus"] + rank) * B * T) % len(tokens)
        ids = tokens[at].view(B, T)
        masked = torch.rand(B, T, generator=generator) < spec["masked"]
        found = {"input_ids": ids}
        if spec["lengths"]:  # rows end there and are padded after it
            lengths = (spec["lengths"] * torch.exp(0.6 * torch.randn(B, generator=generator))).long().clamp(8, T)
            found["attention_mask"] = (torch.arange(T) < lengths[:, None]).long()
            masked |= found["attention_mask"] == 0
        found["labels"] = ids.masked_fill(masked, IGNORE)
        yield {name: value.to(device) for name, value in found.items()}


def optimizer_of(spec: dict[str, Any], model: Any) -> torch.optim.Optimizer:
    trained, name = [p for p in model.parameters() if p.requires_grad], spec["optimizer"]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-3)
    # fused is the default of transformers' Trainer
    fused = {"fused": GPU or spec["optimizer_on_cpu"]} if name == "adamw" else {}
    return adamw.make(name, trained, lr=1e-4, **fused)


class Training:
    """A model and its training on this rank, according to the spec."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = spec
        rank, shared = int(os.environ.get("RANK", 0)), spec["parallel"] in SHARED_ROWS
        self.share, self.shares = (0, 1) if shared else (rank, int(spec["gpus"]))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")
        if GPU:
            torch.cuda.set_device(self.device)
        if spec["parallel"]:
            dist.init_process_group("nccl" if GPU else "gloo", device_id=self.device if GPU else None)
        self.model = models.build(spec, self.device)
        self.run = parallel(self.model, spec["parallel"], self.device, spec["optimizer_on_cpu"])
        if spec["parallel"] and GPU:
            gc.collect()
            torch.cuda.empty_cache()  # whole weights, of which each rank now has a part
        if spec["compile"] == "layers":
            for layer in models.layers_of(self.model):
                layer.compile()
        elif spec["compile"] == "model":
            self.run = torch.compile(self.run)
        self.optimizer = optimizer_of(spec, self.model)
        self.in_backward = adamw.InBackward(self.optimizer) if spec["optimizer_in_backward"] else None
        self.losses: list[Tensor] = []
        self.gradient: Tensor | None = None  # the norm of the first step's gradient

    def step(self, data: list[dict[str, Tensor]]) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec["autocast"]):
            loss = self.run(**data[len(self.losses) % len(data)]).loss
        loss.backward()
        if self.gradient is None and not self.spec["parallel"]:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.gradient = self.in_backward.norm() if self.in_backward else nn.utils.get_total_norm(gradients)
        if not self.in_backward:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def times(self, data: list[dict[str, Tensor]]) -> list[float]:
        """Milliseconds of each step. On a GPU the host does not wait between them."""
        clock = measures.StepClock(self.device)
        for _ in range(self.spec["steps"]):
            clock.start()
            self.step(data)
            clock.stop()
        synchronize()
        return [1e3 * seconds for seconds in clock.read()]

    def measure(self, batch: int) -> dict[str, Any]:
        """Train with batches of this size, and return the fields of a row."""
        spec = self.spec
        data = list(batches(spec, batch, self.share, self.device))
        self.losses.clear()
        for _ in range(spec["warmup"]):
            self.step(data)
        synchronize()
        memory = measures.PeakMemory(self.device)
        times = self.times(data)
        peaks = [memory.read() / 1e9, torch.cuda.max_memory_reserved() / 1e9 if GPU else 0.0]
        first = torch.stack(self.losses[:BATCHES]).float()
        if spec["parallel"]:
            highest = torch.tensor(peaks, device=self.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            peaks = highest.tolist()
            dist.all_reduce(first)
            first /= dist.get_world_size()
        if spec["trace"]:
            self.trace(data)
        low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        return {
            "batch": batch,
            "tokens_per_s": batch * spec["seq"] * self.shares / median * 1e3,
            "step_ms": median,
            "spread": (high - low) / median,
            "peak_allocated_gb": peaks[0],
            "peak_reserved_gb": peaks[1] if GPU else None,
            "losses": first.tolist(),
            "gradient": None if self.gradient is None else self.gradient.item(),
        }

    def trace(self, data: list[dict[str, Tensor]]) -> None:
        """Write ``spec["trace_steps"]`` steps as a Chrome trace. Every rank runs them, and the first
        rank writes."""
        # hooks would change compiled code, and the names of generated kernels list what they fuse
        if not self.spec["compile"]:
            annotate(self.model)
        self.step(data)
        synchronize()
        first = int(os.environ.get("RANK", 0)) == 0
        with torch.profiler.profile() if first else contextlib.nullcontext() as profile:
            for _ in range(self.spec["trace_steps"]):
                self.step(data)
            synchronize()
        if profile is not None:
            profile.export_chrome_trace(self.spec["trace"])

    def trial(self, batch: int) -> float:
        """The peak of two steps, in GB: only the second one has the optimizer's state from its
        start."""
        memory = measures.PeakMemory(self.device)
        data = [next(batches(self.spec, batch, self.share, self.device))]
        self.step(data)
        self.step(data)
        synchronize()
        return memory.read() / 1e9


def measure(spec: dict[str, Any], found: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Train according to the spec. Returns one row per batch, or the peak of a trial; ``found``
    receives each result when it is ready."""
    training = Training(spec)
    if spec["trial"]:
        return {"rows": [], "peak": training.trial(spec["batch"][0])}
    result: dict[str, Any] = {"rows": []}
    for batch in spec["batch"]:
        result["rows"].append(training.measure(batch))
        found(result)
    return result


def _text(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
        return "out of memory"
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
        # the first rank to fail says why; it makes the others fail
        with contextlib.suppress(FileExistsError), Path(f"{result}.failed").open("x") as file:
            json.dump(_text(error), file)
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one in a collective, and a regular exit would wait for them
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
