"""Launch configurations: the committed table first, then a heuristic. Nothing tunes itself
during training."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from liger_kernel.ops._core.tl import cdiv, next_power_of_2

# sm90.json, gfx942.json ...: {"rms_norm_fwd/2/4096": {"block_m": 1, ...}}
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Tile:
    """A tile of ``block_m`` rows and ``block_n`` columns, its warps, and for persistent kernels
    the programs per processor and pipeline depth. ``gain``: what the operator, forward and backward,
    took with the heuristic's tile, as a multiple; a note that nothing reads."""

    block_m: int
    block_n: int
    num_warps: int
    per_sm: int = 1
    stages: int = 1
    gain: float = field(default=1.0, compare=False)

    @functools.cached_property
    def tile(self) -> dict[str, int]:
        """The constexprs of a kernel that works on tiles."""
        return dict(BLOCK_M=self.block_m, BLOCK_N=self.block_n, num_warps=self.num_warps)

    @functools.cached_property
    def row(self) -> dict[str, int]:
        """The constexprs of a kernel that works on one row at a time."""
        return dict(BLOCK=self.block_n, num_warps=self.num_warps)


# architecture and processors, if not those of the current device
_target: tuple[str, int] | None = None


@contextlib.contextmanager
def target(arch_name: str, n_processors: int) -> Iterator[None]:
    """Choose configurations for another device than the current one, to compile for it."""
    global _target
    before, _target = _target, (arch_name, n_processors)
    _forget()
    try:
        yield
    finally:
        _target = before
        _forget()


def _forget() -> None:
    for cached in (arch, processors, tile):
        cached.cache_clear()


@functools.cache
def arch() -> str:
    """The architecture of the current device, such as ``sm90`` or ``gfx942``; ``cpu`` without a
    GPU."""
    if _target:
        return _target[0]
    if not torch.cuda.is_available():
        return "cpu"
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return p.gcnArchName.split(":")[0] if torch.version.hip else f"sm{p.major}{p.minor}"


@functools.cache
def _table(arch_name: str) -> dict:
    path = TUNED / f"{arch_name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def processors() -> int:
    """The number of streaming multiprocessors of the current device."""
    if _target:
        return _target[1]
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def shared_memory() -> int:
    """The bytes of shared memory that a program may use."""
    known = {"gfx950": 163840, "sm80": 166912, "sm90": 232448, "sm100": 232448, "sm103": 232448}
    return known.get(arch(), 65536 if arch().startswith("gfx") else 101376)


def max_warps() -> int:
    """The most warps of a program: 1024 threads in warps of 32, or of 64 on CDNA."""
    return 16 if arch().startswith("gfx") else 32


@functools.cache
def tile(
    op: str,
    n: int,
    itemsize: int,
    *,
    elements: int,
    per_thread: int = 16,
    max_block_n: int = 1 << 20,
    pipelined: int = 0,
) -> Tile:
    """The tile of kernel ``op`` for rows of ``n`` columns: about ``elements`` values per program
    and ``per_thread`` values per thread.

    ``pipelined``: the number of tensors that a kernel with a loop over tiles streams through shared
    memory, in up to three stages (AMD: two) if they fit.
    """
    # measured for these sizes on this GPU
    if found := _table(arch()).get(f"{op}/{itemsize}/{n}"):
        return Tile(**found)
    block_n = min(next_power_of_2(n), max_block_n)
    block_m = max(1, elements // block_n)
    # one warp is enough for a tile that would leave most of four idle
    least = 4 if block_m * block_n >= 2048 else 1
    warps = min(max_warps(), max(least, next_power_of_2(cdiv(block_m * block_n, 32 * per_thread))))
    stages = 1
    if pipelined:
        fitting = shared_memory() // (block_m * block_n * itemsize * pipelined)
        stages = min(2 if arch().startswith("gfx") else 3, max(1, fitting))
    return Tile(block_m, block_n, warps, stages=stages)
