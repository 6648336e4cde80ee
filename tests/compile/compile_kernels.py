"""``python compile_kernels.py sm90 report.json flags``: compile the kernels of every operator for a
GPU that need not be there.

A script, since the test process interprets kernels. The operators run their cases on the meta
device; each launch becomes a compilation on the path of
a real one. Of the launches that differ in tile sizes alone, those of real-model cases are compiled
and, without one, the largest. ``all`` compiles
every combination of flags in fp32 and bf16, and in fp16 as many launches as show every value of
every flag; ``flags`` as many of any dtype;
``kernels`` each kernel once, in bf16, with the most flags on and the largest tile.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from triton import knobs

from liger_kernel.bench.cases import OPS
from liger_kernel.compile.launches import Mock, described
from liger_kernel.compile.targets import TARGETS, compiling_for
from liger_kernel.ops._core import operator as _op
from liger_kernel.testing import differentiable, run

TILE = re.compile("BLOCK|STAGES|num_warps|num_stages|enable_fp_fusion")


def launches(variants: str) -> list[tuple]:
    """(kernel, args, meta) for every kernel, combination of flags and dtypes that the cases
    reach, with all gradients and without each one; or a selection."""
    full = variants == "all"
    found: dict[tuple, dict[tuple, tuple]] = {}

    def recorder(real: bool):
        def record(kernel, grid, args, meta):
            kinds = tuple(str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args)
            # what _op.launch relies on: constexprs come last, all of them named
            assert [p.is_constexpr for p in kernel.params] == [False] * len(args) + [True] * (
                len(kernel.params) - len(args)
            ), kernel
            assert set(kernel.arg_names[len(args) :]) <= set(meta), kernel
            flags = tuple((k, v) for k, v in meta.items() if not TILE.match(k))
            tiles = found.setdefault((kernel.fn.__module__, kernel.fn.__name__, kinds, flags), {})
            mocks = list(map(described, args))
            elements = math.prod(v for k, v in meta.items() if k.startswith("BLOCK") and v)
            tiles[tuple(meta.items())] = real, elements, kernel, mocks, meta

        return record

    for op in OPS.values():
        for case in (
            c for c in op.cases if not c.error and not c.args.get("fp8")
        ):  # not every target has FP8: its kernels are compiled by tests of their own
            for dtype in (
                [torch.bfloat16]
                if variants == "kernels"
                else (torch.bfloat16, torch.float32, *([torch.float16] if full else []))
            ):
                args = case.make(dtype, "meta")
                for frozen in [None] if variants == "kernels" else (None, *differentiable(args)):
                    some = {
                        k: v.detach().requires_grad_(v.requires_grad and k != frozen)
                        if isinstance(v, torch.Tensor)
                        else v
                        for k, v in args.items()
                    }
                    with _op.intercept_launches(recorder(case.gpu)):
                        run(
                            op.fn,
                            some,
                            lambda outs: {k: torch.ones_like(o) for k, o in outs.items() if o.requires_grad},
                        )
    chosen, shown = [], set()
    on = lambda flags: sum(bool(v) for _, v in flags) if variants == "kernels" else 0
    for (*kernel, kinds, flags), tiles in sorted(
        found.items(), key=lambda kv: (-on(kv[0][3]), -max(t[1] for t in kv[1].values()))
    ):
        new = {
            (*kernel, kinds if full else "", flag) for flag in (flags if flags and variants != "kernels" else [()])
        } - shown
        if (full and "torch.float16" not in kinds) or new:
            shown |= new
            real = [t for t in tiles.values() if t[0]]
            largest = max(real or tiles.values(), key=lambda t: t[1])
            chosen += real if real and variants != "kernels" else [largest]
    return [t[2:] for t in chosen]


def resources(compiled) -> dict[str, int]:
    """Registers a thread, spilled bytes a thread, and shared memory."""
    if "amdgcn" in compiled.asm:
        said = {k: int(v) for k, v in re.findall(r"\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE)}
        spills = (
            4 * said["vgpr_spill_count"] + said["private_segment_fixed_size"]
        )  # scalar registers spill into lanes of vector registers, not into memory
        return {"registers": said["vgpr_count"], "spills": spills, "shared": compiled.metadata.shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    said = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": said["REG"], "spills": said["STACK"] + said["LOCAL"], "shared": compiled.metadata.shared}


def shared_bytes(compiled) -> list[str]:
    """Results of a conversion to FP8, which has two values, whose second byte is used alone:
    ptxas 12.8 may then read the wrong register (MEASURED.md)."""
    ptx = compiled.asm.get("ptx", "")
    made = set(re.findall(r"cvt\.rn\.satfinite\.(?:relu\.)?e[45]m[23]x2\.f32\s+(%rs\d+)", ptx))
    return [r for r in re.findall(r"shr\.u16\s+%rs\d+, (%rs\d+), 8", ptx) if r in made]


def main(arch: str, report: str, variants: str) -> None:
    rows = []
    with compiling_for(arch):
        for kernel, args, meta in launches(variants):
            row = {
                "kernel": f"{kernel.fn.__module__.removeprefix('liger_kernel.ops.')}.{kernel.fn.__name__}",
                "dtypes": " ".join(dict.fromkeys(str(a.dtype)[6:] for a in args if isinstance(a, Mock))),
                "meta": " ".join(f"{k}={v}" for k, v in meta.items()),
                "threads": meta.get("num_warps", 4) * TARGETS[arch].warp,
            }
            try:
                row |= resources(kernel.warmup(*args, grid=(1,), **meta))
            except Exception as error:  # reported with the others rather than one at a time
                row["error"] = f"{type(error).__name__}: {error}"
            rows.append(row)
    Path(report).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
