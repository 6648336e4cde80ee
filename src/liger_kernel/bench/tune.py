"""``liger tune OP``: search the launch configurations of an operator's kernels on this GPU, and
write faster ones to ``ops/_core/tuned``.

Only kernels that call ``config.tile`` are tuned. Each configuration that they request for the
operator's real-model cases is varied alone, while the others stay. Candidates are compiled ahead,
on all cores. A candidate that breaks the accuracy rule is rejected, whatever its speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch

from liger_kernel.bench import arguments, clock
from liger_kernel.bench.cases import OPS
from liger_kernel.bench.operators import DEVICE, DTYPES, accuracy, cases_of, check_cases, results, timed_call
from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.launch_config import Tile
from liger_kernel.ops._core.operator import Case, Op
from liger_kernel.testing import forward, like
from liger_kernel.train.files import write as write_file
from liger_kernel.train.mistakes import UserError, one_of

PIPELINES = ((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (4, 2))  # programs per multiprocessor, stages
GAIN = 0.02  # least gain as a share of the operator's device time: less is noise


@contextlib.contextmanager
def configured(override: dict[str, Tile] | None = None) -> Iterator[dict[str, tuple[int, Tile]]]:
    """Give kernels the tiles of ``override``. Yields key -> (columns, tile) of all requested
    tiles."""
    tile, requested = launch_config.tile, {}

    def chosen(op: str, n: int, itemsize: int, **rule: Any) -> Tile:
        key = f"{op}/{itemsize}/{n}"
        requested[key] = (n, (override or {}).get(key) or tile(op, n, itemsize, **rule))
        return requested[key][1]

    with mock.patch.object(launch_config, "tile", chosen):
        yield requested


def candidates(n: int, tile: Tile) -> list[Tile]:
    """The neighbours of ``tile``: other rows, warps and pipeline depths; and other columns if a
    row has several blocks."""
    whole = tile.block_n >= n
    columns = [tile.block_n] if whole else [b for b in (1024, 2048, 4096, 8192, 16384) if b <= 2 * n]
    rows = sorted({max(1, tile.block_m * f // 4) for f in (1, 2, 4, 8)}) if whole else [tile.block_m]
    pipelines = PIPELINES if tile.stages > 1 else ((tile.per_sm, tile.stages),)
    found = [
        Tile(block_m, block_n, num_warps, per_sm, stages)
        for block_n, block_m, num_warps in itertools.product(columns, rows, (2, 4, 8, 16, 32))
        for per_sm, stages in pipelines
        if num_warps <= launch_config.max_warps() and 4 <= block_m * block_n / (32 * num_warps) <= 64
    ]
    return [c for c in found if c != tile]


def compile_ahead(
    op_name: str, case_name: str, sweep: str | None, dtype: str, arch: str, override: dict[str, Tile]
) -> None:
    """Compile the kernels of one forward and backward for ``arch`` into Triton's cache, without
    a GPU."""
    from liger_kernel.compile.ahead import compile_launches
    from liger_kernel.compile.launches import launches
    from liger_kernel.compile.targets import compiling_for

    cases = cases_of(OPS[op_name], [] if sweep else [case_name], sweep, small=False)
    case = next(case for case, _ in cases if case.name == case_name)

    def step() -> None:
        outs = [o for o in forward(OPS[op_name].fn, case.make(DTYPES[dtype], "meta")).values() if o.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    # a candidate that does not compile fails again when it is measured, and is reported then
    with contextlib.suppress(Exception), compiling_for(arch), configured(override):
        compile_launches(launches(step, "meta"))


def search(
    op: Op, case: Case, dtype: str, repeats: int, sweep: str | None = None, pool: Executor | None = None
) -> dict[str, tuple[Tile, float, float]]:
    """key -> (best tile, ms before, ms after) for those kernels of one case that get faster."""
    base = case.make(DTYPES[dtype], DEVICE)
    truth, pytorch = results(op.reference, like(base, torch.float64)), results(op.reference, like(base))
    accurate = lambda: accuracy(results(op.fn, like(base)), pytorch, truth, DTYPES[dtype])[2]
    with configured() as requested:
        if not accurate():
            raise UserError(f"{op.name} {case.name} {dtype} is not accurate with its present configuration")
        before = timed_call(op.fn, base, repeats)
    better: dict[str, tuple[Tile, float, float]] = {}
    for key, (n, tile) in dict(requested).items():
        chosen = {key: tile for key, (tile, *_) in better.items()}
        if pool:
            compiled = [
                pool.submit(
                    compile_ahead, op.name, case.name, sweep, dtype, launch_config.arch(), chosen | {key: candidate}
                )
                for candidate in candidates(n, tile)
            ]
            for each in compiled:
                each.result()
        best, best_ms = tile, before
        for candidate in candidates(n, tile):
            with configured(chosen | {key: candidate}):
                try:
                    ms = timed_call(op.fn, base, max(3, repeats // 3))
                    if ms < best_ms * (1 - GAIN) and (ms := timed_call(op.fn, base, repeats)) < best_ms * (1 - GAIN):
                        if not accurate():
                            print(f"  refused, because it is not accurate: {key} {candidate}")
                            continue
                        best, best_ms = candidate, ms
                except Exception as error:  # the tile does not fit this GPU
                    print(f"  does not run: {key} {candidate}: {' '.join(str(error).split())[:100]}")
        if best is not tile:
            gain = round(tile.gain * before / best_ms, 2)
            better[key] = dataclasses.replace(best, gain=gain), before, best_ms
            before = best_ms
    return better


def write(found: dict[str, Tile]) -> str:
    """Add the tiles to the table of this architecture, and return its path."""
    launch_config.TUNED.mkdir(exist_ok=True)
    path = launch_config.TUNED / f"{launch_config.arch()}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    table |= {key: dataclasses.asdict(tile) for key, tile in found.items()}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    write_file(path, f"{{\n{lines}\n}}\n")
    return str(path)


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 even if no tile is faster."""
    a = arguments.tune(argv)
    for name in a.op:
        one_of("operator", name, OPS)
    check_cases([OPS[name] for name in a.op], a.case, a.sweep)
    if not clock.GPU:
        raise UserError("tuning needs a GPU: it times the kernels on the GPU whose table it writes")
    chosen: dict[str, Tile] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=spawn) as pool:
        for op in (OPS[name] for name in a.op):
            for case, _ in cases_of(op, a.case, a.sweep, small=False):
                better = search(op, case, a.dtype, a.repeats, a.sweep, pool)
                print(f"{op.name} {case.name} {a.dtype}:{'' if better else ' no configuration is faster'}", flush=True)
                for key, (tile, before, after) in better.items():
                    print(f"  {key}: {before:.4f} -> {after:.4f} ms ({before / after:.2f}x) with {tile}", flush=True)
                    chosen[key] = tile
                if chosen and not a.dry_run:
                    path = write(chosen)
    if chosen and not a.dry_run:
        print(f"written to {path}: review it like code")
    return 0
