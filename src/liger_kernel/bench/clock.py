"""Clocks and ceilings: device, wall and host time of a call, and the best rates that this machine
reaches.

Device time is the sum of the durations of the kernels that a call launched, as CUPTI records them.
It includes neither host work nor synchronisations inside the call. The L2 cache is overwritten
before each call. Without a GPU, all three are wall time.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from typing import Any

import torch

from liger_kernel.train.measure import device_name

GPU = torch.cuda.is_available()
SEPARATOR = "spin_kernel"  # the kernel of torch.cuda._sleep; no measured call launches it


@dataclass
class Times:
    """The times of repeated calls in milliseconds."""

    all: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median."""
        low, _, high = statistics.quantiles(self.all, n=4) if len(self.all) > 1 else (0.0, 0.0, 0.0)
        return (high - low) / self.median if self.median else 0.0


@dataclass
class Timed:
    """The result of ``race`` for one contestant. ``kernels``: the number of kernels per call."""

    device: Times = field(default_factory=Times)
    wall: Times = field(default_factory=Times)
    host: Times = field(default_factory=Times)
    kernels: int = 0


@functools.cache
def _scratch() -> torch.Tensor:
    return torch.empty(1 << 28, dtype=torch.int8, device="cuda")  # several times larger than any L2


def flush_l2() -> None:
    """Overwrite the L2 cache."""
    if GPU:
        _scratch().zero_()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


Prepare = Callable[[], Callable[[], Any]]


def race(
    contestants: dict[str, Prepare], repeats: int = 11, warmup: int = 2, device_only: bool = False
) -> dict[str, Timed]:
    """Time contestants against each other: interleaved, in a new random order each time, with a
    cold L2.

    A GPU at its power limit is slower after matrix products than after copies. If a contestant
    always followed the same other one, that one's heat would change its time.

    A contestant is a function that does the work that is not timed (such as the forward before a
    backward) and returns the call to time.
    """
    for prepare in contestants.values():
        for _ in range(warmup):
            prepare()()
    synchronize()
    names, found = list(contestants), {name: Timed() for name in contestants}
    draw = random.Random(0)
    order = [name for _ in range(repeats) for name in draw.sample(names, len(names))]
    for name in () if device_only and GPU else order:
        call = contestants[name]()
        flush_l2()
        synchronize()
        start = time.perf_counter()
        out = call()
        enqueued = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        found[name].host.all.append(1e3 * (enqueued - start))
        found[name].wall.all.append(1e3 * (done - start))
        del call, out
    if not GPU:
        for timed in found.values():
            timed.device.all = list(timed.wall.all)
        return found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for name in order:
            call = contestants[name]()
            flush_l2()
            torch.cuda._sleep(1000)
            out = call()
            torch.cuda._sleep(1000)
            del call, out
        torch.cuda.synchronize()
    for name, kernels in zip(order, _between_separators(profile)):
        found[name].device.all.append(sum(kernels) / 1e3)
        found[name].kernels = len(kernels)
    return found


def _between_separators(profile: Any) -> list[list[float]]:
    """For each call, the durations of its kernels in microseconds."""
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    calls: list[list[float]] = []
    inside = False
    for event in sorted(events, key=lambda e: e.time_range.start):
        if SEPARATOR in event.name:
            inside = not inside
            if inside:
                calls.append([])
        elif inside:
            calls[-1].append(event.time_range.elapsed_us())
    return calls


def ready(call: Callable[[], Any]) -> Prepare:
    """A contestant of a call that needs no preparation."""
    return lambda: call


def device_ms(calls: dict[str, Callable[[], Any]], repeats: int = 11) -> dict[str, Times]:
    """The device time of calls that need no preparation."""
    contestants = {name: ready(call) for name, call in calls.items()}
    return {name: timed.device for name, timed in race(contestants, repeats, device_only=True).items()}


def peak_bytes(prepare: Prepare) -> int:
    """Peak memory of a call, without the memory that was allocated before it; 0 without a GPU."""
    if not GPU:
        return 0
    call = prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def copy_tb_s() -> float:
    """Terabytes per second, read and written, of a large device-to-device copy."""
    n = 1 << (30 if GPU else 26)
    x = torch.randint(0, 127, (n,), dtype=torch.int8, device="cuda" if GPU else "cpu")
    y = torch.empty_like(x)
    return 2 * n / device_ms({"copy": lambda: y.copy_(x)})["copy"].median / 1e9


def products(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> Callable[[], Any]:
    """A contestant that computes (m, k) x (k, n) products of random values, one after another."""
    device = "cuda" if GPU else "cpu"
    draw = lambda *shape: torch.randn(shape, device=device, dtype=dtype)
    ready = [(draw(m, k), draw(k, n), draw(m, n)) for m, n, k in shapes]

    def call() -> None:
        for a, b, out in ready:
            torch.mm(a, b, out=out)

    return call


def ceilings() -> dict[str, float]:
    """Measure on this machine: copy bandwidth, and the bf16 rate of an 8192 x 8192 x 8192
    product (without a GPU: fp32, size 1024)."""
    size, dtype = (8192, torch.bfloat16) if GPU else (1024, torch.float32)
    gemm = device_ms({"gemm": products([(size, size, size)], dtype)}, repeats=7)["gemm"]
    return {"copy_tb_s": copy_tb_s(), "gemm_tflops": 2 * size**3 / gemm.median / 1e9}


def hardware() -> dict[str, Any]:
    """The machine and the versions with which a number was measured."""
    versions = {"torch": str(torch.__version__)}  # includes the build, which the metadata may lack
    for name in ("triton", "transformers", "liger_kernel"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    device = torch.device("cuda" if GPU else "cpu")
    return {
        "hardware": device_name(device),
        "python": platform.python_version(),
        **versions,
        "date": date.today().isoformat(),
    }
