"""Every kernel compiles for every GPU we claim, without one: in registers, within shared memory
and thread limits. ``-s`` shows the table."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from liger_kernel.ops import OPS

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

# test_float8, test_float8_head, test_mxfp8 and test_lora compile the last ones
OWN = (".experimental", ".projections.float8", ".projections.mxfp8", ".losses.float8_head", ".projections.four_bits")
HOPPER = {"projections.grouped_tma._mm_tma"}  # launched nowhere else
SHARED = {
    "sm80": 166912,
    "sm89": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "gfx942": 65536,
    "gfx950": 163840,
}  # bytes a program may have
# Bytes that a thread may spill. None of these kernels is short of registers (255): ptxas spills a
# few values in some variants, to fit another program on
# a processor; which ones differs from release to release.
SPILLS = 48


def launched_kernels() -> set[str]:
    """Names of the kernels that the sources launch. Those of ``OWN``, which have no cases, are
    compiled by tests of their own."""
    of_ops = lambda name: name.startswith("liger_kernel.ops.") and not any(own in name for own in OWN)
    modules = {sys.modules[op.fn.__module__] for op in OPS.values()} | {m for n, m in sys.modules.items() if of_ops(n)}
    calls = (
        r"\blaunch\(\s*(\w+)(?: if \w+ else (\w+))?,",
        r"\blaunch_(?:fwd|bwd)\((\w+), (\w+),",
    )  # the latter of ops.attention.rows: of short and long rows
    named = lambda m: filter(
        None, itertools.chain(*(found for call in calls for found in re.findall(call, inspect.getsource(m))))
    )
    kernels = [kernel.fn for m in modules for k in named(m) if (kernel := vars(m).get(k))]
    return {f"{fn.__module__.removeprefix('liger_kernel.ops.')}.{fn.__name__}" for fn in kernels}


def table(rows: list[dict]) -> str:
    """The heaviest variant of each kernel, by spills, then registers; one line a kernel and
    dtypes."""
    worst: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda r: (r["spills"], r["registers"], r["shared"])):
        worst[row["kernel"], row["dtypes"]] = row
    lines = [
        "| kernel | dtypes | registers | spilled bytes | shared bytes | threads | heaviest variant |",
        "|---|---|---|---|---|---|---|",
    ]
    columns = ("kernel", "dtypes", "registers", "spills", "shared", "threads", "meta")
    return "\n".join([*lines, *("| " + " | ".join(str(worst[k][c]) for c in columns) + " |" for k in sorted(worst))])


EVERY_TIME = ("sm90", "gfx942")  # the others, whose compiler is one of these two, with -m slow
VARIANTS = [
    pytest.param(t, v, marks=[pytest.mark.slow] * (v == "all" or t not in EVERY_TIME))
    for v in ("kernels", "all")
    for t in SHARED
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target, variants", VARIANTS)
def test_every_kernel_compiles(target, variants, user_env, tmp_path, request):
    report = tmp_path / "kernels.json"
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, target, report, variants], env=user_env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())

    failed = [f"{r['kernel']} {r['dtypes']} {r['meta']}: {r['error']}" for r in rows if "error" in r]
    assert not failed, "\n".join(failed)
    assert {r["kernel"] for r in rows} == launched_kernels() - (set() if target == "sm90" else HOPPER), (
        "a kernel that no case reaches"
    )

    text = f"{target}: {len(rows)} kernels\n{table(rows)}\n"
    print(f"\n{text}")
    if to := request.config.getoption("--kernel-report"):
        Path(to).mkdir(parents=True, exist_ok=True)
        (Path(to) / f"{target}.md").write_text(text)
    limits = {"spills": SPILLS, "shared": SHARED[target], "threads": 1024}
    broken = [
        f"{r['kernel']} {r['dtypes']} {r['meta']} has {r[k]} {k}"
        for r in rows
        for k, limit in limits.items()
        if r[k] > limit
    ]
    assert not broken, "\n".join(broken)


ROUNDS_TWICE = """
import torch
from liger_kernel.compile.launches import Mock
from liger_kernel.compile.targets import compiling_for
from liger_kernel.ops import qk_norm_rope, rope
from liger_kernel.ops._core import operator as _op

def compile(kernel, grid, args, meta):
    compiled = kernel.warmup(*(Mock(a) if isinstance(a, torch.Tensor) else a for a in args), grid=(1,), **meta)
    print(*(line.split()[0] for line in compiled.asm["ptx"].splitlines() if ".bf16 " in line))

q = torch.empty(1, 2, 8, 64, device="meta", dtype=torch.bfloat16)
w, angles = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((64,), (1, 8, 32)))
with compiling_for("sm90"), _op.intercept_launches(compile):
    rope(q, q, angles, angles, casting="none")
    qk_norm_rope(q, q, w, w, angles, angles, rope_casting="none")
"""


def test_no_product_and_sum_share_a_rounding(user_env):
    """Where models round a product to bf16 before they add, no compiler may fuse the two."""
    done = subprocess.run([sys.executable, "-c", ROUNDS_TWICE], env=user_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mul" in done.stdout and "fma" not in done.stdout, done.stdout
