"""``liger bench``: every operator in ``OPS`` on its real-model cases, beside eager PyTorch,
``torch.compile`` and other packages.

A row is one (operator, case, dtype, mode, variant). The variants of a case race in one process.
Each operator has its own process. Finished
rows are written at once, so that a run can be resumed. If a variant is less accurate than the rule
of ``liger_kernel.testing`` allows, it is
measured, but no table shows a speed-up for it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench import clock, flags, rivals
from liger_kernel.bench.cases import OPS
from liger_kernel.bench.measured import MeasuredOp
from liger_kernel.bench.rows import read, text_table, write_csv
from liger_kernel.nearest import no_such
from liger_kernel.ops._core.operator import Case
from liger_kernel.testing import Named, backward, differentiable, errors, floors, forward, like
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import UserError, one_of

DEVICE = "cuda" if clock.GPU else "cpu"
DTYPES = dict(zip(flags.DTYPES, (torch.bfloat16, torch.float16, torch.float32)))
FEW = 16  # with up to so many elements, a tensor's error is chance


def cases_of(op: MeasuredOp, names: list[str], sweep: str | None, small: bool) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases, and what a row says about each in addition to its name."""
    if sweep:
        if sweep in op.sweeps:
            values, arguments = op.sweeps[sweep]
            for value in values:
                yield Case(f"{sweep}={value}", arguments(value), gpu=True), {"sweep": sweep, "x": value}
        return
    valid = [c for c in op.cases if not c.error and (c.name in names if names else c.gpu != small)]
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
        else:  # a package, by itself and "+compile"
            found |= {
                key: _with(function, rival.module)
                for key, function in op.rivals.items()
                if key.partition("+")[0] == name
            }
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
    1/32, which are exact in every dtype, in the
    memory layout of the output."""

    def draw(o: Tensor) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(1)
        values = torch.randn(o.shape, generator=generator, device=DEVICE).mul_(32).round_().clamp_(-255, 255).div_(32)
        return torch.ones_like(o) if o.ndim == 0 else torch.empty_like(o).copy_(values)

    return {name: draw(o) for name, o in outs.items() if o.requires_grad}


def results(fn: Callable[..., Any], args: dict[str, Any]) -> Named:
    """Outputs and gradients by name."""
    outs = forward(fn, args)
    return {k: o.detach() for k, o in outs.items()} | backward(outs, args, gradients(outs))


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
        floor = (
            max(torch.finfo(ours[name].dtype).eps, torch.finfo(dtype).eps / 16)
            if t.numel() < FEW
            else floors(pytorch[name].dtype, t.numel())["rms"]
        )
        good = good and mine <= 2 * reference + floor and bool(ours[name].isfinite().all())
        worst, theirs = max(worst, mine), max(theirs, reference)
    return worst, theirs, good


PRODUCTS = "products"  # a contestant that computes only an operator's matrix products


def measure(
    op: MeasuredOp,
    case: Case,
    dtype: torch.dtype,
    modes: list[str],
    against: list[str],
    loaded: dict[str, rivals.Rival],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """The rows of one case: first accuracy, then the race."""
    base = case.make(dtype, DEVICE)
    functions = implementations(op, against, loaded)
    rows: dict[str, dict[str, Any]] = {}
    truth = results(op.reference, like(base, torch.float64))
    truth = {k: t.float() if t.dtype == torch.float64 and t.numel() > 1 << 28 else t for k, t in truth.items()}
    pytorch = results(op.reference, like(base))
    alive = {}
    for name, fn in functions.items():
        row = rows[name] = {"failed": None, "accurate": False, "error": None, "error_pytorch": None}
        try:
            with _present(loaded.get(name)):
                found = pytorch if name == "eager" else results(fn, inputs(fn, base))
            row["error"], row["error_pytorch"], row["accurate"] = accuracy(found, pytorch, truth, dtype)
            del found
            alive[name] = fn
        except NotImplementedError:
            del rows[name]  # this implementation lacks the option
        except Exception as error:
            row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    del truth, pytorch
    _free()
    shape = {k: list(v.shape) for k, v in base.items() if isinstance(v, Tensor)}
    cost = op.cost(**base)
    for mode in modes:
        if mode == "backward" and not differentiable(base):
            continue
        moved, flops, products = cost.of(mode)
        with contextlib.ExitStack() as stack:
            for name in alive:
                stack.enter_context(_present(loaded.get(name)))
            contestants = {name: _contestant(fn, base, mode) for name, fn in alive.items()}
            # a GPU at its power limit slows down: the products run interleaved with the others, or
            # they would seem faster
            alone = (
                {PRODUCTS: functools.partial(lambda call: call, clock.products(products, dtype))} if products else {}
            )
            timed = clock.race(contestants | alone, repeats)
            alone.clear()
            peaks = {name: clock.peak_bytes(prepare) for name, prepare in contestants.items()}
        floor = max(moved / clock.copy_tb_s() / 1e9, timed[PRODUCTS].device.median / cost.rate if products else 0.0)
        for name, row in rows.items():
            row = {
                "op": op.name,
                "case": case.name,
                "dtype": _name(dtype),
                "mode": mode,
                "variant": name,
                "shape": shape,
            } | row
            row |= {"bytes": moved, "flops": flops, "floor_ms": floor}
            if name in timed:
                t = timed[name]
                ms = t.device.median
                row |= {
                    "device_ms": ms,
                    "device_spread": t.device.spread,
                    "wall_ms": t.wall.median,
                    "host_ms": t.host.median,
                    "kernels": t.kernels,
                }
                row |= {
                    "peak_mb": peaks[name] / 1e6,
                    "percent_of_floor": 100 * floor / ms,
                    "tb_s": moved / ms / 1e9,
                    "tflop_s": flops / ms / 1e9,
                }
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


def _name(dtype: torch.dtype) -> str:
    return next(name for name, d in DTYPES.items() if d == dtype)


def _free() -> None:
    gc.collect()
    if clock.GPU:
        torch.cuda.empty_cache()


def known() -> dict[str, MeasuredOp]:
    """All operators, losses and steps of layers in FP8 that can be measured, by name."""
    from liger_kernel.bench.casts import CASTS
    from liger_kernel.bench.losses import LOSSES

    return OPS | LOSSES | CASTS


def child(a: argparse.Namespace) -> None:
    """Measure operators in this process. It starts when it has read a line, and prints a JSON
    line for each row."""
    ops = [known()[one] for one in a.child.split(",")]
    loaded = {}
    for name in a.against:
        with contextlib.suppress(rivals.Missing):
            if name in rivals.PACKAGES and any(name in op.rivals for op in ops):
                loaded[name] = rivals.load(name, getattr(a, f"{name}_path"))
    if a.base:
        loaded["base"] = rivals.revision(a.base)
    done = {tuple(key) for key in json.loads(a.done)}
    if not sys.stdin.readline():  # the parent process has ended
        return
    for op, case, more in (
        (one, *found) for one in ops for found in cases_of(one, a.case, a.sweep, small=not clock.GPU or a.smoke)
    ):
        for dtype in a.dtype:
            if (op.name, case.name, dtype) not in done:
                for row in measure(op, case, DTYPES[dtype], a.mode, a.against, loaded, a.repeats):
                    print("ROW " + json.dumps(row | more), flush=True)


class _Child:
    """The process of an operator, or of several separated by commas. It does its imports, and
    then waits until its rows are requested."""

    def __init__(self, a: argparse.Namespace, argv: list[str], name: str, rows: list[dict[str, Any]]):
        done = [(r["op"], r["case"], r["dtype"]) for r in rows if r["op"] in name.split(",")]
        command = [
            sys.executable,
            "-m",
            "liger_kernel.bench.operators",
            *argv,
            "--child",
            name,
            "--done",
            json.dumps(done),
        ]
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  __exit__ closes it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages, text=True
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.messages.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # the process has already failed
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])

    def error(self) -> str | None:
        if not self.process.wait():
            return None
        self.messages.seek(0)
        return (self.messages.read().strip().splitlines() or ["?"])[-1]


def run(a: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure all requested operators, each in its own process; in a smoke run, whose times do
    not matter, all in one process."""
    path = Path(a.json) if a.json else None
    result: dict[str, Any] = {
        "meta": clock.hardware() | clock.ceilings() | {"command": "liger bench " + " ".join(argv)},
        "rows": [],
    }
    if a.resume and path and path.exists():
        result["rows"] = read(path)["rows"]
    for name in a.against:
        if name in rivals.PACKAGES:
            try:
                rivals.load(name, getattr(a, f"{name}_path"))
            except rivals.Missing as error:
                if getattr(a, f"{name}_path"):
                    raise UserError(str(error)) from error
                print(error)
    if not clock.GPU:
        print(
            "Measured on a CPU: this measures the CPU path, PyTorch references on small cases. It says nothing about "
            "kernels on a GPU."
        )
    names = a.op or list(known())
    names = [",".join(names)] if a.smoke else names
    ahead = int(clock.GPU and (os.cpu_count() or 1) >= 8)  # importing during a measurement needs free cores
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_Child(a, argv, name, result["rows"])) for name in names[:ahead]]
        for i, name in enumerate(names):
            children += [
                stack.enter_context(_Child(a, argv, following, result["rows"]))
                for following in names[i + ahead : i + ahead + 1]
            ]  # the next process imports meanwhile
            rows: list[dict[str, Any]] = []
            for row in children[i].rows():
                rows.append(row)
                result["rows"].append(row)
                if path:
                    export(path, json.dumps(result, indent=1))
            if why := children[i].error():
                print(f"{name}: stopped after {len(rows)} rows, because of {why}")
            if rows:
                print(text_table(rows), flush=True)
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    a = flags.operators(argv)
    a.dtype = a.dtype or ["bf16" if clock.GPU else "fp32"]
    a.against = a.against or (["eager", "compile", "torch"] if clock.GPU else ["eager"])
    for name in a.op:
        one_of("operator", name, [*known(), "step", "report"])
    check_cases([known()[name] for name in a.op or known()], a.case, a.sweep)
    if a.base and not a.child:
        rivals.check_revision(a.base)
    return a


def check_cases(ops: Sequence[MeasuredOp], cases: Sequence[str], sweep: str | None) -> None:
    """Raise ``UserError`` for a case or a sweep that none of the operators has."""
    there = {case.name for op in ops for case in op.cases if not case.error}
    for name in cases:
        if name not in there:
            raise UserError(no_such("case", name, sorted(there)))
    if sweep:
        one_of("sweep", sweep, sorted({name for op in ops for name in op.sweeps}))


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if everything requested was measured and our operators are
    accurate everywhere."""
    a = parse(argv)
    if a.child:
        child(a)
        return 0
    result = run(a, argv)
    if a.csv:
        write_csv(result, a.csv)
    if a.plot:
        from liger_kernel.bench import plots, report

        folder = Path(a.plot)
        images = plots.operators(result, folder)
        print(report.html(folder / "report.html", result, None, images))
    wrong = [r for r in result["rows"] if r["variant"] == "ours" and (r["failed"] or not r["accurate"])]
    for row in wrong:
        reason = row["failed"] or f"its error is {row['error']:.2e}, that of PyTorch {row['error_pytorch']:.2e}"
        print(f"WRONG: {row['op']} {row['case']} {row['dtype']}: {reason}")
    return 1 if wrong or not result["rows"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
