"""``liger bench``: every operator in ``OPS`` on its real-model cases, beside eager PyTorch,
``torch.compile`` and other packages.

A row is one (operator, case, dtype, mode, variant). The variants of a case race in one process.
Each operator has its own process. Finished rows are written at once, so that a run can be resumed.
If a variant is less accurate than the rule of ``liger_kernel.testing`` allows, it is measured, but
no table shows a speed-up for it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench import arguments, clock, rivals
from liger_kernel.bench.cases import OPS
from liger_kernel.bench.measured import MeasuredOp
from liger_kernel.bench.results import Row, read, write_csv
from liger_kernel.bench.tables import text_table
from liger_kernel.ops._core.operator import Case
from liger_kernel.testing import Named, backward, differentiable, errors, floors, forward, like, run
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import UserError, one_of

DEVICE = "cuda" if clock.GPU else "cpu"
DTYPES = dict(zip(arguments.DTYPES, (torch.bfloat16, torch.float16, torch.float32)))
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FEW = 16  # with up to so many elements, a tensor's error is chance


def cases_of(op: MeasuredOp, names: list[str], sweep: str | None, small: bool) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases, and what a row says about each in addition to its name."""
    if sweep:
        if sweep in op.sweeps:
            values, sized = op.sweeps[sweep]
            for value in values:
                yield Case(f"{sweep}={value}", sized(value), gpu=True), {"sweep": sweep, "x": value}
        return
    valid = [c for c in op.cases if (c.name in names if names else c.gpu != small)]
    for case in valid[:2] if small and not names else valid:
        yield case, {}


def implementations(
    op: MeasuredOp, against: list[str], loaded: dict[str, rivals.Rival]
) -> dict[str, Callable[..., Any]]:
    """variant -> function of the operator's arguments, for the variants that exist for this
    operator."""
    found: dict[str, Callable[..., Any]] = {"ours": op.fn, "eager": op.reference}
    if "compile" in against:
        found["compile"] = torch.compile(op.reference, dynamic=False)
    if "torch" in against and "torch" in op.rivals:
        found["torch"] = op.rivals["torch"]
    for name, rival in loaded.items():
        if name == "base":
            found[name] = getattr(rival.module, op.name)
        for key, function in op.rivals.items():
            if key.partition("+")[0] == name:  # a package, by itself and "+compile"
                found[key] = _with(function, rival.module)
    return found


def _with(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    bound: Any = functools.partial(function, module)
    bound.prepare = getattr(function, "prepare", lambda args: args)
    return bound


def inputs(fn: Callable[..., Any], base: dict[str, Any]) -> dict[str, Any]:
    """Fresh arguments in the form that ``fn`` takes."""
    return getattr(fn, "prepare", lambda args: args)(like(base))


def gradients(outs: Named) -> Named:
    """Upstream gradients: 1 for a loss, as in ``loss.backward()``; for tensors random multiples of
    1/32, which are exact in every dtype, in the memory layout of the output."""

    def draw(o: Tensor) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(1)
        values = torch.randn(o.shape, generator=generator, device=DEVICE).mul_(32).round_().clamp_(-255, 255).div_(32)
        return torch.ones_like(o) if o.ndim == 0 else torch.empty_like(o).copy_(values)

    return {name: draw(o) for name, o in outs.items() if o.requires_grad}


def results(fn: Callable[..., Any], args: dict[str, Any]) -> Named:
    """Outputs and gradients by name."""
    return run(fn, args, gradients)


def accuracy(ours: Named, pytorch: Named, truth: Named, dtype: torch.dtype) -> tuple[float, float, bool]:
    """The largest RMS error, PyTorch's, and whether the rule holds: at most twice PyTorch's error,
    for each output and gradient of the reference.

    A loss that is returned in 16 bits may have their rounding error in addition.
    """
    worst, theirs, good = 0.0, 0.0, True
    for name, t in truth.items():
        if not t.is_floating_point() or name not in ours:
            good = good and not t.is_floating_point()
            continue
        mine, reference = errors(ours[name], t)["rms"], errors(pytorch[name], t)["rms"]
        floor = floors(pytorch[name].dtype, t.numel())["rms"]
        if t.numel() < FEW:
            floor = max(torch.finfo(ours[name].dtype).eps, torch.finfo(dtype).eps / 16)
        good = good and mine <= 2 * reference + floor and bool(ours[name].isfinite().all())
        worst, theirs = max(worst, mine), max(theirs, reference)
    return worst, theirs, good


PRODUCTS = "products"  # a contestant that computes only an operator's matrix products


def judge(
    functions: dict[str, Callable[..., Any]], loaded: dict[str, rivals.Rival], base: dict[str, Any], dtype: torch.dtype
) -> dict[str, Row]:
    """variant -> what a row says about its accuracy, without implementations that lack an option
    of the case."""
    reference, rows = functions["eager"], {}
    truth = results(reference, like(base, torch.float64))
    # large results in fp64 would not fit beside those of the variants
    truth = {k: t.float() if t.dtype == torch.float64 and t.numel() > 1 << 28 else t for k, t in truth.items()}
    pytorch = results(reference, like(base))
    for name, fn in functions.items():
        row: Row = {"failed": None, "accurate": False, "error": None, "error_pytorch": None}
        try:
            with _present(loaded.get(name)):
                found = pytorch if name == "eager" else results(fn, inputs(fn, base))
            row["error"], row["error_pytorch"], row["accurate"] = accuracy(found, pytorch, truth, dtype)
            del found  # the next variant needs its memory
        except NotImplementedError:
            continue
        except Exception as error:
            row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rows[name] = row
    return rows


def measure(
    op: MeasuredOp,
    case: Case,
    dtype: torch.dtype,
    modes: list[str],
    against: list[str],
    loaded: dict[str, rivals.Rival],
    repeats: int,
) -> Iterator[Row]:
    """The rows of one case: first accuracy, then the race."""
    base = case.make(dtype, DEVICE)
    functions = implementations(op, against, loaded)
    judged = judge(functions, loaded, base, dtype)
    _free()
    shape = {k: list(v.shape) for k, v in base.items() if isinstance(v, Tensor)}
    about: Row = {"op": op.name, "case": case.name, "dtype": NAMES[dtype]}
    cost = op.cost(**base)
    for mode in modes:
        if mode == "backward" and not differentiable(base):
            continue
        moved, flops, products = cost.of(mode)
        with contextlib.ExitStack() as stack:
            alive = [name for name, row in judged.items() if not row["failed"]]
            for name in alive:
                stack.enter_context(_present(loaded.get(name)))
            contestants = {name: _contestant(functions[name], base, mode) for name in alive}
            # a GPU at its power limit slows down: the products run interleaved with the others, or
            # they would seem faster
            alone = {PRODUCTS: clock.ready(clock.products(products, dtype))} if products else {}
            timed = clock.race(contestants | alone, repeats)
            alone.clear()
            peaks = {name: clock.peak_bytes(prepare) for name, prepare in contestants.items()}
        floor = max(moved / clock.copy_tb_s() / 1e9, timed[PRODUCTS].device.median / cost.rate if products else 0.0)
        for name, found in judged.items():
            row = about | {"mode": mode, "variant": name, "shape": shape} | found
            row |= {"bytes": moved, "flops": flops, "floor_ms": floor}
            if name in timed:
                t, ms = timed[name], timed[name].device.median
                row |= {"device_ms": ms, "device_spread": t.device.spread}
                row |= {"wall_ms": t.wall.median, "host_ms": t.host.median, "kernels": t.kernels}
                row |= {"peak_mb": peaks[name] / 1e6, "percent_of_floor": 100 * floor / ms}
                row |= {"tb_s": moved / ms / 1e9, "tflop_s": flops / ms / 1e9}
            yield row
        _free()


def _contestant(fn: Callable[..., Any], base: dict[str, Any], mode: str) -> clock.Prepare:
    """A contestant with fresh inputs and upstream gradients for each call, because some
    implementations write to both."""
    drawn = gradients(forward(fn, inputs(fn, base)))

    def prepare() -> Callable[[], Any]:
        args, grads = inputs(fn, base), {k: g.clone() for k, g in drawn.items()}
        outs = forward(fn, args) if mode == "backward" else {}
        whole = lambda: backward(forward(fn, args), args, grads)
        return {"forward": lambda: fn(**args), "backward": lambda: backward(outs, args, grads), "full": whole}[mode]

    return prepare


def timed_call(fn: Callable[..., Any], base: dict[str, Any], repeats: int) -> float:
    """The device time of one forward and backward in milliseconds."""
    return clock.race({"": _contestant(fn, base, "full")}, repeats, device_only=True)[""].device.median


def _present(rival: rivals.Rival | None) -> contextlib.AbstractContextManager:
    return rival.present() if rival else contextlib.nullcontext()


def _free() -> None:
    gc.collect()
    if clock.GPU:
        torch.cuda.empty_cache()


ENTRY = ("-m", "liger_kernel.bench.operators")  # what a child runs; a script that adds operators names itself


def child(a: argparse.Namespace) -> None:
    """Measure operators in this process, and print a JSON line for each row."""
    ops = [OPS[name] for name in a.child.split(",")]
    loaded = {}
    for name in a.against:
        with contextlib.suppress(rivals.Missing):
            if name in rivals.PACKAGES and any(name in op.rivals for op in ops):
                loaded[name] = rivals.load(name, getattr(a, f"{name}_path"))
    if a.base:
        loaded["base"] = rivals.revision(a.base)
    done = {tuple(key) for key in json.loads(a.done)}
    for op in ops:
        for case, more in cases_of(op, a.case, a.sweep, small=not clock.GPU or a.smoke):
            for dtype in a.dtype:
                if (op.name, case.name, dtype) not in done:
                    for row in measure(op, case, DTYPES[dtype], a.mode, a.against, loaded, a.repeats):
                        print("ROW " + json.dumps(row | more), flush=True)


def _rows(argv: list[str], names: str, known: list[Row]) -> Iterator[Row]:
    """The rows of an operator, or of several separated by commas, which a process of their own
    measures; without those that are ``known``."""
    done = [(r["op"], r["case"], r["dtype"]) for r in known if r["op"] in names.split(",")]
    command = [sys.executable, *ENTRY, *argv, "--child", names, "--done", json.dumps(done)]
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process,
    ):
        assert process.stdout
        try:
            for line in process.stdout:
                if line.startswith("ROW "):
                    yield json.loads(line[4:])
            if process.wait():
                messages.seek(0)
                print(f"{names}: stopped, because of {(messages.read().strip().splitlines() or ['?'])[-1]}")
        finally:
            process.kill()


def measure_all(a: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure all requested operators, each in its own process; in a smoke run, whose times do
    not matter, all in one process."""
    meta = clock.hardware() | clock.ceilings() | {"command": "liger bench " + " ".join(argv)}
    rows = read(a.json)["rows"] if a.resume and Path(a.json).exists() else []
    for name in rivals.PACKAGES.keys() & set(a.against):
        path = getattr(a, f"{name}_path")
        try:
            rivals.load(name, path)
        except rivals.Missing as error:
            if path:
                raise UserError(str(error)) from error
            print(error)
    if not clock.GPU:
        small = "this measures the CPU path, PyTorch references on small cases"
        print(f"Measured on a CPU: {small}. It says nothing about kernels on a GPU.")
    names = a.op or list(OPS)
    for name in [",".join(names)] if a.smoke else names:
        known = len(rows)
        for row in _rows(argv, name, rows[:]):
            rows.append(row)
            if a.json:
                export(a.json, json.dumps({"meta": meta, "rows": rows}, indent=1))
        if rows[known:]:
            print(text_table(rows[known:]), flush=True)
    return {"meta": meta, "rows": rows}


def parse(argv: list[str]) -> argparse.Namespace:
    a = arguments.operators(argv)
    a.dtype = a.dtype or ["bf16" if clock.GPU else "fp32"]
    a.against = a.against or (["eager", "compile", "torch"] if clock.GPU else ["eager"])
    for name in a.op:
        one_of("operator", name, [*OPS, "step", "report"])
    check_cases([OPS[name] for name in a.op or OPS], a.case, a.sweep)
    if a.base and not a.child:
        rivals.check_revision(a.base)
    return a


def check_cases(ops: Sequence[MeasuredOp], cases: Sequence[str], sweep: str | None) -> None:
    """Raise ``UserError`` for a case or a sweep that none of the operators has."""
    there = {case.name for op in ops for case in op.cases}
    for name in cases:
        one_of("case", name, sorted(there))
    if sweep:
        one_of("sweep", sweep, sorted({name for op in ops for name in op.sweeps}))


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if everything requested was measured and our operators are
    accurate everywhere."""
    a = parse(argv)
    if a.child:
        child(a)
        return 0
    result = measure_all(a, argv)
    if a.csv:
        write_csv(result, a.csv)
    wrong = [r for r in result["rows"] if r["variant"] == "ours" and (r["failed"] or not r["accurate"])]
    for row in wrong:
        reason = row["failed"] or f"its error is {row['error']:.2e}, that of PyTorch {row['error_pytorch']:.2e}"
        print(f"WRONG: {row['op']} {row['case']} {row['dtype']}: {reason}")
    return 1 if wrong or not result["rows"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
