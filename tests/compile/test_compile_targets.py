"""Every kernel compiles for every GPU we claim, without one: in registers, within shared memory
and thread limits."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from quick import further

from liger_kernel import extra, ops

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

# Kernels that may not spill a byte
SMALL = (
    "mm_int8int2",
    *(f"projections.{name}" for name in ("float8", "mxfp8", "four_bits", "packed_weights")),
    "losses.float8_head",
)
# Kernels that a target does not have: PARTS of compile_kernels.py says why
LACKING = {
    "sm90": ("projections.mxfp8",),
    "gfx942": (
        *(f"projections.{name}" for name in ("float8", "mxfp8", "mxfp4", "grouped_blocks")),
        "projections.grouped_tma._mm_tma",
        "losses.float8_head",
    ),
}
TABLE = Path(__file__).with_name("kernels.csv")
# bytes a program may have
SHARED = {"sm80": 166912, "sm89": 101376, "sm90": 232448, "sm100": 232448, "gfx942": 65536, "gfx950": 163840}
# Bytes that a thread may spill. None of these kernels is short of registers (255): ptxas spills a
# few values in some variants, to fit another program on
# a processor; which ones differs from release to release.
SPILLS = 48
# What kernels may spill that no GPU has measured yet: addresses before a loop; in all variants (fp32, heads of 256
# columns, sm80, sm100) more
UNTUNED = {
    # with a window, by documents, with padding: of the batch-invariant mode alone
    "attention.sink_attention": (192, 192),
    "recurrent.delta_kernels": (384, 8192),
    # tiles of 64 columns, since ptxas 12.8 loses descriptors of narrower ones, and two programs a processor
    "recurrent.kda_kernels": (384, 2048),
    "recurrent.ssd_kernels": (384, 2048),
}


def launched_kernels() -> set[str]:
    """Names of the kernels that the sources launch."""
    found = [m for of in (ops, extra) for m in pkgutil.walk_packages(of.__path__, f"{of.__name__}.")]
    modules = [importlib.import_module(m.name) for m in found]
    # the latter of extra.softmax: of short and long rows
    calls = r"\blaunch\(\s*(\w+)(?: if \w+ else (\w+))?,", r"\blaunch_(?:fwd|bwd)\((\w+), (\w+),"
    of_call = lambda m, call: itertools.chain(*re.findall(call, inspect.getsource(m)))
    named = lambda m: [name for call in calls for name in of_call(m, call) if name]
    kernels = [kernel.fn for m in modules for k in named(m) if (kernel := vars(m).get(k))]
    return {f"{fn.__module__.split('.', 2)[2]}.{fn.__name__}" for fn in kernels}


def found(target: str, variants: str, env: dict[str, str], report: Path) -> list[dict]:
    """Rows of ``compile_kernels.py``, whose limits hold."""
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, script, target, variants, report]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    name = lambda r: f"{r['kernel']} {r['dtypes']} {r['meta']}"
    failed = [f"{name(r)}: {r['error']}" for r in rows if "error" in r]
    assert not failed, "\n".join(failed)
    limits = lambda r: {"shared": SHARED[target], "threads": 1024, "spills": spills(r["kernel"], variants)}
    broken = [f"{name(r)} has {r[k]} {k}" for r in rows for k, limit in limits(r).items() if r[k] > limit]
    assert not broken, "\n".join(broken)
    return rows


def spills(kernel: str, variants: str) -> int:
    """The bytes that a kernel may spill."""
    if kernel.startswith(SMALL):
        return 0
    return UNTUNED.get(kernel.rpartition(".")[0], (SPILLS, SPILLS))[variants == "all"]


@pytest.mark.parametrize("target", ["sm90", *further("gfx942")])
def test_every_kernel_compiles(target, user_env, tmp_path):
    """Those that ``kernels.csv`` has are the same as when they were compiled; all others are
    compiled now, and their rows belong into the table, which is written for both targets at once."""
    rows = found(target, "kernels", user_env, tmp_path / "kernels.json")
    missing = launched_kernels() - {r["kernel"] for r in rows}
    assert not [kernel for kernel in missing if not kernel.startswith(LACKING[target])], "no case reaches it"
    new = sorted({r["kernel"] for r in rows if r["new"]})
    if new and of_this_triton():
        pytest.fail(f"{new} changed: run python tests/compile/compile_kernels.py --write, and review its registers")


def of_this_triton() -> bool:
    return TABLE.read_text().splitlines()[0].endswith(f"Triton {version('triton')}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", SHARED)
def test_every_variant_compiles(target, user_env, tmp_path):
    found(target, "all", user_env, tmp_path / "kernels.json")


def test_a_register_that_nothing_has_set_is_found():
    from compile_kernels import unset_registers

    right = """
        /*0010*/                   S2UR UR17, SR_CTAID.X ;
        /*0020*/                   ULDC.64 UR6, c[0x0][0x240] ;
        /*0050*/                   ULEA UR5, UP0, UR17, UR6, 0x3 ;
        /*0060*/              @!P0 UIADD3.X UR4, UR7, URZ, URZ, UP0, !UPT ;"""
    assert unset_registers(right) == []
    wrong = "/*07e0*/ UIADD3 UR18, UP0, UR18, 0x20, URZ ;"
    assert unset_registers(f"{right}\n{wrong}") == ["UIADD3 UR18, UR18, 0x20, URZ"]


def test_no_product_and_sum_share_a_rounding(counted):
    """Where models round a product to bf16 before they add, no compiler may fuse the two."""
    operations = counted["in_bf16"]
    assert any("mul" in name for name in operations) and not any("fma" in name for name in operations)
