"""Compile the kernels of every operator for a GPU that need not be there, and keep what they take.

python tests/compile/compile_kernels.py sm90 kernels report.json   # all rows of one target
python tests/compile/compile_kernels.py --write                    # kernels.csv anew: review how registers change

A script, since the test process interprets kernels. The operators run their cases on the meta
device; each launch becomes a compilation on the path of a real one. Of the launches that differ in
tile sizes alone, those of real-model cases are compiled and, without one, the largest. ``all``
compiles every combination of flags in fp32 and bf16, and in fp16 as many launches as show every
value of every flag; ``flags`` as many of any dtype; ``kernels`` each kernel once, in bf16, with the
most flags on and the largest tile.

``kernels.csv`` has a row for each launch of ``kernels``: what it is (a digest of the kernel's source
and of what that calls, its arguments, its constexprs) and the registers, spills and shared memory
that it takes. A launch whose row is there is not compiled again, so that a change costs the kernels
that it changes, and reviewers see what became of their registers.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from liger_kernel.bench.cases import OPS
from liger_kernel.compile.launches import Mock, described
from liger_kernel.compile.targets import TARGETS, compiling_for
from liger_kernel.ops._core import operator as _op
from liger_kernel.testing import differentiable, run

TABLE = Path(__file__).with_name("kernels.csv")
COLUMNS = ("target", "kernel", "dtypes", "meta", "digest", "registers", "spills", "shared", "threads")
TILE = re.compile("BLOCK|STAGES|num_warps|num_stages|enable_fp_fusion")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Launch = tuple  # kernel, arguments without data, constexprs and options


def of_operators(variants: str) -> list[Launch]:
    """Every kernel, combination of flags and dtypes that the cases of operators reach, with all
    gradients and without each one; or a selection."""
    full = variants == "all"
    found: dict[tuple, dict[tuple, tuple]] = {}

    def recorder(real: bool):
        def record(kernel, grid, args, meta):
            kinds = tuple(str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args)
            # what launches rely on: constexprs come last, all of them named
            constexprs = [p.is_constexpr for p in kernel.params]
            assert constexprs == [False] * len(args) + [True] * (len(kernel.params) - len(args)), kernel
            assert set(kernel.arg_names[len(args) :]) <= set(meta), kernel
            flags = tuple((k, v) for k, v in meta.items() if not TILE.match(k))
            # a kernel sees None as a constant: an argument that may be None is a flag
            flags += tuple((name, a is not None) for name, a in zip(kernel.arg_names, args))
            tiles = found.setdefault((kernel.fn.__module__, kernel.fn.__name__, kinds, flags), {})
            elements = math.prod(v for k, v in meta.items() if k.startswith("BLOCK") and v)
            tiles[tuple(meta.items())] = real, elements, kernel, [described(a) for a in args], meta

        return record

    dtypes = [torch.bfloat16] if variants == "kernels" else DTYPES if full else (torch.bfloat16, torch.float32)
    for op in OPS.values():
        # not every target has FP8: kernels of FP8 have parts of their own, below
        for case in (c for c in op.cases if not c.args.get("fp8")):
            for dtype in dtypes:
                args = case.make(dtype, "meta")
                for frozen in [None] if variants == "kernels" else (None, *differentiable(args)):
                    some = {k: _frozen(v, k == frozen) for k, v in args.items()}
                    with _op.intercept_launches(recorder(case.gpu)):
                        ones = lambda outs: {k: torch.ones_like(o) for k, o in outs.items() if o.requires_grad}
                        run(op.fn, some, ones)
    chosen, shown = [], set()
    on = lambda flags: sum(bool(v) for _, v in flags) if variants == "kernels" else 0
    by_size = lambda found: (-on(found[0][3]), -max(tile[1] for tile in found[1].values()))
    for (*kernel, kinds, flags), tiles in sorted(found.items(), key=by_size):
        each_flag = flags if flags and variants != "kernels" else [()]
        new = {(*kernel, kinds if full else "", flag) for flag in each_flag} - shown
        if (full and "torch.float16" not in kinds) or new:
            shown |= new
            real = [t for t in tiles.values() if t[0]]
            largest = max(real or tiles.values(), key=lambda t: t[1])
            chosen += real if real and variants != "kernels" else [largest]
    return [t[2:] for t in chosen]


def _frozen(value, frozen: bool):
    tensor = isinstance(value, torch.Tensor)
    return value.detach().requires_grad_(value.requires_grad and not frozen) if tensor else value


def recorded(step: Callable[[], None]) -> list[Launch]:
    """Each launch of ``step`` once."""
    found: dict[tuple, Launch] = {}

    def record(kernel, grid, args, meta):
        kinds = *meta.items(), *(str(getattr(a, "dtype", "")) for a in args)
        found.setdefault((kernel, kinds), (kernel, [described(a) for a in args], meta))

    with _op.intercept_launches(record):
        step()
    return list(found.values())


def _new(*shape: int, dtype: torch.dtype = torch.float32, **more) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, **more)


def stored_weights() -> None:
    """Kernels of weights in FP8, of experts in FP8 and MXFP4, and of training in FP8."""
    from liger_kernel.ops.activations import glu
    from liger_kernel.ops.projections import float8, float8_blocks, float8_training, grouped_blocks, magnitude, mxfp4

    for dtype in DTYPES:
        for columns in (4096, 14336, 28672):
            x = _new(64, columns, dtype=dtype)
            for how in ((float8.E4, False), (float8.E5, False), (float8.E4, True)):
                float8.cast(x, *how)
        float8.cast(_new(64, 14336, dtype=dtype), float8.E4, True, _new(14336))
        for by_rows, rows, columns in (
            (False, True, True),
            (True, True, True),
            (True, True, False),
            (True, False, True),
        ):
            for kind in (float8.E4, float8.E5):
                amax = float8_training.amax_of(x, by_rows)
                float8_training.casts(x, kind, amax, by_rows, rows=rows, columns=columns)
        for count in range(1, float8_training.MOST + 1):
            float8_training.maxima_of([x] * count)
        amax = float8_training.amax_of(x, False)
        both = [float8_training.CastRequest(x, kind, amax, True, True) for kind in (float8.E4, float8.E5)]
        for other in (both[0]._replace(rows=False), both[0]._replace(columns=False)):
            for one in both:
                float8_training.casts_together([one, other], False)
        float8_training.glu_and_maxima(x, x, "silu", 1.0, None, 1.0, 0.0, 1.0)
        glu.glu_bwd_(x, x, x, "silu", True, 1.0, None, 1.0, 0.0, 1.0, maxima=_new(3, glu.MAXIMA))
        magnitude.column_sums(x, x)
        magnitude.scaled_columns(x, _new(28672))
        large, block = (128, 1536, 2048), (128, 128)
        for sizes, blocks in (
            ((14336, 4096), block),
            (large, block),
            (large, large[1:]),
            (large, (1, 2048)),
            ((32, 2880, 5760), (2880, 1)),
            ((3, 5, 7), (5, 1)),
        ):
            scales = *sizes[:-2], *(-(-n // of) for n, of in zip(sizes[-2:], blocks))
            float8_blocks.dense_blocks(_new(*sizes, dtype=float8.E4), _new(*scales), *blocks, dtype)
        float8_blocks.float8_cast_blocks(_new(64, 4096, dtype=dtype))
        experts = [_new(8, 5760, 90, *half, dtype=torch.uint8) for half in ((16,), ())]
        part = mxfp4.dense_mxfp4(*experts, dtype)
        for of in (dtype, torch.uint8):
            mxfp4.rounded_sum_mxfp4(*experts, _new(8, 5760, 16), _new(8, 16, 2880), of)
        for x, w in ((_new(64, 2880, dtype=dtype), part.mT), (_new(64, 5760, dtype=dtype), part)):
            mxfp4.grouped_mm_part_(x, w, _new(32, dtype=torch.int32), 8, _new(64, w.shape[2], dtype=dtype))
    float8.transposed(_new(4096, 14336, dtype=float8.E4))
    of_experts = _new(8, 256, 384, dtype=float8.E4), _new(8, 2, 3), _new(8, dtype=torch.int32)
    grouped_blocks.grouped_mm_blocks(_new(64, 384, dtype=torch.bfloat16), *of_experts)


def packed_weights() -> None:
    """Kernels of weights in packed integers, NF4 and NVFP4, which every GPU decodes."""
    from liger_kernel.ops.projections import four_bits, packed_weights
    from liger_kernel.ops.projections.float8 import E4

    for dtype in (torch.bfloat16, torch.float32):
        words = _new(14336, 4096, dtype=torch.int32)
        for bits in (4, 8):
            scale, zero = _new(14336, 32, dtype=torch.bfloat16), _new(14336 * bits // 32, 32, dtype=torch.int32)
            for zeros in (None, zero):
                packed_weights.dense_rows(words[:, : 128 * bits].contiguous(), scale, zeros, None, 4096, bits, dtype)
            scale, zero = _new(32, 14336, dtype=torch.float16), _new(32, 14336 * bits // 32, dtype=torch.int32)
            for index in (None, _new(4096, dtype=torch.int32)):
                by_columns = words.view(4096, 14336)[: 128 * bits], zero, scale, index, bits
                packed_weights.dense_columns(*by_columns, 1, False, dtype)
        packed_weights.dense_columns(
            words.view(4096, 14336)[:, :1792].contiguous(), zero[:, :1792].contiguous(), scale, None, 4, 0, True, dtype
        )
        nvfp4 = _new(14336, 2048, dtype=torch.uint8), _new(14336, 256, dtype=E4), None, _new(1)
        packed_weights.dense_rows(*nvfp4, 4096, 4, dtype)
        packed, absmax = _new(14336 * 2048, 1, dtype=torch.uint8), _new(14336 * 64)
        code, code2, absmax2, offset = (_new(n) for n in (16, 256, 3584, 1))
        sizes = [14336, 4096], 64
        four_bits.dense_four_bits(packed, absmax, code, None, None, None, *sizes, 1, dtype)
        four_bits.dense_four_bits(packed, absmax.to(torch.uint8), code, absmax2, code2, offset, *sizes, 256, dtype)


def heads_in_fp8() -> None:
    from liger_kernel.ops import linear_cross_entropy, linear_logprobs

    for dtype in DTYPES:
        new = lambda *shape: _new(*shape, dtype=dtype, requires_grad=True)  # noqa: B023 (called at once)
        x, w, bias = new(256, 64), new(128256, 64), new(128256)
        target = _new(256, dtype=torch.int64)
        linear_cross_entropy(x, w, target, fp8="tensorwise")
        options = dict(label_smoothing=0.1, softcap=30.0, logit_scale=0.5, stats=True)
        linear_cross_entropy(x, w, target, bias, torch.empty_like(bias), fp8="tensorwise", **options)
        linear_logprobs(x, w, target, bias, outputs=("entropy",), fp8="rowwise")[0].sum().backward()


def mxfp8_casts() -> None:
    from liger_kernel.ops.projections import mxfp8

    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in ((True, True), (True, False), (False, True)):
            mxfp8.mx_casts(_new(64, 4096, dtype=dtype), rows=rows, columns=columns)


def two_bits() -> None:
    from liger_kernel.extra.mm_int8int2 import matmul

    matmul(_new(64, 4096, dtype=torch.int8), _new(1024, 4096, dtype=torch.uint8))


def by_document() -> None:
    """Attention and products whose order of sums does not depend on the batch."""
    from liger_kernel.ops import sink_attention
    from liger_kernel.ops._core import invariance
    from liger_kernel.ops.attention.sink_attention import later_attention
    from liger_kernel.ops.projections import invariant_products

    invariance.hold(1)
    try:
        sinks, first, valid = _new(8), _new(2, 4096, dtype=torch.int32), _new(2, 4096, dtype=torch.bool)
        for D, more in ((128, dict()), (64, dict(window=128, first=first, valid=valid))):
            q, k, v = (_new(2, n, 4096, D, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2))
            sink_attention(q, k, v, sinks, **more).backward(torch.empty_like(q))
        later = dict(window=None, made=first, valid=valid, at=_new(1, dtype=torch.int64)[0], scale=1.0)
        later_attention(
            _new(2, 8, 1, 128, dtype=torch.bfloat16),
            *(_new(2, 2, 4096, 128, dtype=torch.bfloat16),) * 2,
            sinks,
            **later,
        )
        for N, dtype in ((16, torch.float32), (48, torch.float32), (16, torch.bfloat16)):
            a, b, y = _new(64, 4096, dtype=dtype), _new(N, 4096, dtype=dtype).t(), _new(64, N, dtype=dtype)
            invariant_products._own(a, b, y)
    finally:
        invariance.hold(-1)


FP8 = ("sm89", "sm90", "sm100")  # targets whose compiler has casts to FP8
PARTS: list[tuple[Callable[[], None], tuple[str, ...]]] = [
    (stored_weights, FP8),
    (packed_weights, tuple(TARGETS)),
    (heads_in_fp8, FP8),
    (mxfp8_casts, ("sm100",)),
    (two_bits, tuple(TARGETS)),
    (by_document, tuple(TARGETS)),
]


@functools.cache
def digest(kernel: JITFunction) -> str:
    """Of what the kernel and all that it calls say, wherever in their files that stands (Triton's
    own key has their line)."""
    text = [kernel.src]
    for name in sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", kernel.src)) & set(kernel.fn.__globals__)):
        value = kernel.fn.__globals__[name]
        if isinstance(value, JITFunction) and value is not kernel:
            text.append(digest(value))
        elif isinstance(value, (triton.language.constexpr, bool, int, float, str)):
            text.append(f"{name}={value}")
    text += [digest(v) for v in _reached(kernel)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _reached(kernel: JITFunction) -> list[JITFunction]:
    """Functions that the kernel calls through a module: ``tl.exp`` of ours."""
    found = {}
    for module, name in re.findall(r"\b([A-Za-z_]\w*)\.([A-Za-z_]\w*)", kernel.src):
        value = getattr(kernel.fn.__globals__.get(module), name, None)
        if isinstance(value, JITFunction) and value.fn.__module__.startswith("liger_kernel"):
            found[f"{module}.{name}"] = value
    return [found[name] for name in sorted(found)]


def resources(compiled) -> dict[str, int]:
    """Registers a thread, spilled bytes a thread, and shared memory."""
    if "amdgcn" in compiled.asm:
        said = {k: int(v) for k, v in re.findall(r"\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE)}
        # scalar registers spill into lanes of vector registers, not into memory
        spills = 4 * said["vgpr_spill_count"] + said["private_segment_fixed_size"]
        return {"registers": said["vgpr_count"], "spills": spills, "shared": compiled.metadata.shared}
    said = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", _dumped(compiled, "--dump-resource-usage"))}
    return {"registers": said["REG"], "spills": said["STACK"] + said["LOCAL"], "shared": compiled.metadata.shared}


def shared_bytes(compiled) -> list[str]:
    """Results of a conversion to FP8, which has two values, whose second byte is used alone:
    ptxas 12.8 may then read the wrong register (MEASURED.md)."""
    ptx = compiled.asm.get("ptx", "")
    made = set(re.findall(r"cvt\.rn\.satfinite\.(?:relu\.)?e[45]m[23]x2\.f32\s+(%rs\d+)", ptx))
    return [r for r in re.findall(r"shr\.u16\s+%rs\d+, (%rs\d+), 8", ptx) if r in made]


def _dumped(compiled, what: str) -> str:
    """What cuobjdump says of a kernel for an NVIDIA GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, what, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unset_registers(sass: str) -> list[str]:
    """Instructions that compute a uniform register from one that nothing has set: ptxas 12.8 loses
    copies of them when two descriptors of shared memory begin at the same address (MEASURED.md)."""
    found, known = [], {"URZ"}
    line = re.compile(r"\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9.]*) +(UR\d+)((?:, *UP\d)*), ([^;]*)")
    for name, to, _, given in line.findall(sass):
        found += [f"{name} {to}, {given}".strip() for _ in set(re.findall(r"\bUR\d+", given)) - known]
        known |= {to, f"UR{int(to[2:]) + 1}"} if re.search(r"64|WIDE", name) else {to}
    # or, where it has moved descriptors to other registers, from the stack pointer
    return found + re.findall(r"\*/ +(IADD3(?:\.X)? R(?!1,)\d+, (?:P\d, )?R1, [^;]*)", sass)


def known() -> dict[tuple[str, ...], dict]:
    """Rows of ``kernels.csv``, if they are of this Triton."""
    if not TABLE.exists():
        return {}
    with TABLE.open() as file:
        if file.readline().split()[-1] != triton.__version__:
            return {}
        return {tuple(row[k] for k in COLUMNS[:5]): row for row in csv.DictReader(file)}


def rows(target: str, variants: str, table: dict[tuple[str, ...], dict]) -> list[dict]:
    """What each launch takes on ``target``: from ``table``, or by compiling it (``new``)."""
    found = []
    with compiling_for(target):
        launches = of_operators(variants)
        for part, targets in PARTS:
            launches += recorded(part) if target in targets else []
        for kernel, args, meta in launches:
            kinds = [a.dtype if isinstance(a, Mock) else a if isinstance(a, int) else type(a).__name__ for a in args]
            what = repr((kinds, [getattr(a, "offset", 0) % 16 for a in args], digest(kernel)))
            row = {
                "target": target,
                "kernel": f"{kernel.fn.__module__.split('.', 2)[2]}.{kernel.fn.__name__}",
                "dtypes": " ".join(dict.fromkeys(str(a.dtype)[6:] for a in args if isinstance(a, Mock))),
                "meta": " ".join(f"{k}={v}" for k, v in meta.items()),
                "digest": hashlib.sha256(what.encode()).hexdigest()[:16],
                "threads": meta.get("num_warps", 4) * TARGETS[target].warp,
                "new": False,
            }
            if old := table.get(tuple(row[k] for k in COLUMNS[:5])):
                row |= {k: int(old[k]) for k in ("registers", "spills", "shared")}
            else:
                row["new"] = True
                try:
                    compiled = kernel.warmup(*args, grid=(1,), **meta)
                    row |= resources(compiled)
                    # Triton's code then is a trap, which needs four registers
                    if (tensor_memory := getattr(compiled.metadata, "tmem_size", None) or 0) > 512:
                        row["error"] = f"{tensor_memory} columns of tensor memory, of which there are 512"
                    if shared_bytes(compiled):
                        row["error"] = "the second byte of a conversion to FP8 is used alone"
                    if target == "sm90" and (unset := unset_registers(_dumped(compiled, "-sass"))):
                        row["error"] = f"a uniform register is read that nothing has set: {unset[0]}"
                except Exception as error:  # reported with the others rather than one at a time
                    row["error"] = f"{type(error).__name__}: {error}"
            found.append(row)
    return found


EVERY_TIME = ("sm90", "gfx942")  # the others, whose compiler is one of these two, nightly


def write() -> None:
    found: list[dict] = []
    for target in EVERY_TIME:  # each in a process: a kernel keeps the compiler that it met first
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            subprocess.run([sys.executable, __file__, target, "kernels", report.name], check=True)
            found += json.loads(Path(report.name).read_text())
    if broken := [row for row in found if "error" in row]:
        raise SystemExit("\n".join(f"{row['kernel']} {row['dtypes']}: {row['error']}" for row in broken))
    with TABLE.open("w", newline="") as file:
        file.write(f"# python tests/compile/compile_kernels.py --write, Triton {triton.__version__}\n")
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(found, key=lambda row: tuple(str(row[k]) for k in COLUMNS[:5])))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        arch, selection, report = sys.argv[1:]
        # nightly, all variants: nothing is believed
        Path(report).write_text(json.dumps(rows(arch, selection, known() if selection == "kernels" else {})))
