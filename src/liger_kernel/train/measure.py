"""The cost of a run: time of steps, peak memory, fraction of the GPU's peak; and the device on
which it ran. ``bench/step_child.py`` loads this file by its path: it imports nothing of ours."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")


# first steps, in which memory is reserved: no part of tokens/s
UNTIMED = 2


class PeakMemory:
    """The highest memory between ``start`` and ``read``; pausing leaves a stretch out.

    On a GPU: bytes that PyTorch's allocator handed out. On a CPU: the process's resident set,
    Python and libraries included, of which ``before`` is what was there at the start.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.kind = "GPU memory allocated" if device.type == "cuda" else "resident memory of the process"
        self._peak = 0
        self.start()
        self.before = self._now()

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif STATUS.exists():
            # some containers do not allow it: the peak then includes the start-up
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def pause(self) -> None:
        """Record the peak so far; ``start`` resumes."""
        self._peak = max(self._peak, self._high())

    def read(self) -> int:
        self.pause()
        return self._peak

    def _high(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if STATUS.exists():
            return _status("VmHWM")
        if sys.platform == "win32":
            # Python's library has no function for it on Windows
            return 0
        import resource

        # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _status("VmRSS") if STATUS.exists() else self._high()


def as_clock(seconds: float) -> str:
    """``0:01:05``, as people read how long something takes."""
    return str(timedelta(seconds=round(seconds)))


class Pace:
    """Tokens per second of steps up to the ``last``, without the first ``UNTIMED`` where there
    are more; ``tokens(step)`` are those of one."""

    def __init__(self, tokens: Callable[[int], int], last: int):
        self._tokens, self._last = tokens, last
        self.begin(0)

    def begin(self, first: int) -> None:
        """Behind step ``first``."""
        self.first, self._made, self._started = first, 0, time.perf_counter()

    def made(self, step: int) -> None:
        self._made += self._tokens(step)
        if step - self.first == UNTIMED and step < self._last:
            self._made, self._started = 0, time.perf_counter()

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._started
        return {"tokens_per_second": self._made / seconds, "seconds": seconds}


class StepClock:
    """Seconds between ``start`` and ``stop``, without waiting for the GPU: there they are events
    in its stream, read when it has passed them."""

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self._marks.append((self._started, self._now()))

    def read(self) -> list[float]:
        """Return one number for each interval, and forget them. The GPU must have passed them
        all."""
        seconds = [a.elapsed_time(b) / 1e3 if self._gpu else b - a for a, b in self._marks]
        self._marks.clear()
        return seconds

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# Dense bf16 TFLOP/s by the makers' data sheets, first match of the GPU's name
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "MI355": 2500,
    "MI325": 1307,
    "MI300": 1307,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak FLOPs per second of this GPU, if it is known; otherwise None, and in fp32."""
    if device.type != "cuda" or precision == "fp32":
        return None
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in torch.cuda.get_device_name(device)), None)


def _status(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    with contextlib.suppress(OSError, StopIteration):
        model = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    return f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
