"""``liger demo``: train one small Llama twice from the same weights on the same text, stock and
with our kernels, and compare.

Both runs start from random weights (or from ``--model``), each in its own process, so that each has
its own peak of memory. They take turns: while one makes the steps up to its next log line, the
other waits. So what else runs on the machine slows down both, and each pair of such blocks has a
ratio of its own. The losses of every step may differ only by rounding; otherwise the exit code is 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_kernel.env_report import environment
from liger_kernel.train.config import TrainConfig, configured, read_flags
from liger_kernel.train.files import write
from liger_kernel.train.mistakes import UserError, note, writable

RUNS = {"stock": "off", "ours": "on"}
# its files, and how they begin
BEGINS = {
    name: r'{\s*"%s":' % ("loss" if name == "demo.json" else "(kernels|model)")
    for name in ("stock.json", "ours.json", "demo.json")
}
BEGINS["demo.png"] = "\ufffdPNG"
BESIDE = re.compile(r"stock|ours|cache(\.lock)?|\..*|.*\.(log|out|err|txt)")

# Sizes at which the output head weighs what it weighs in real models: most of the memory beyond the
# weights.
CPU = TrainConfig(
    out="runs/demo",
    hidden=192,
    heads=3,
    kv_heads=1,
    layers=4,
    vocab=32000,
    batch=4,
    steps=40,
    warmup=5,
    log_every=2,
    eval_fraction=0.0,
)
GPU = dataclasses.replace(
    CPU, hidden=1024, heads=16, kv_heads=8, layers=8, length=2048, batch=8, steps=100, warmup=10, log_every=5, lr=6e-4
)

# Turns need one process each, of our own trainer, whose every step is new
_UNUSED = [
    field.name for field in dataclasses.fields(TrainConfig) if field.metadata["group"] in ("ranks", "checkpoints")
]
FIXED = ("kernels", "save", "cache", "stream", "trainer", *_UNUSED)
# the fewest pairs of blocks; fewer say nothing about a spread
PAIRS = 5
# The upper quartile of the ratios over the lower one, beyond which they do not tell which is faster
UNCLEAR = 1.25

# Largest relative difference of the two losses at any step. fp32: sums in another order, then
# amplified by AdamW, whose first steps have the
# size of the learning rate whatever the size of the gradient; 3e-6 seen. bf16: one rounding is up
# to 2^-9 = 0.2 %, and thousands of them meet.
TOLERANCE = {"fp32": 1e-4, "bf16-mixed": 1e-2, "bf16": 1e-2}


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if the losses agree, 1 if they do not or if a run failed."""
    larger = {name: value for name, value in dataclasses.asdict(GPU).items() if value != getattr(CPU, name)}
    description = (
        "Train a small Llama twice from the same weights on the same text, stock and with our kernels, and compare. "
        "The defaults below are those without a "
        f"GPU; with a GPU they are {', '.join(f'{name} {value:g}' for name, value in larger.items())}."
    )
    # help and mistakes of users need no torch, whose import takes seconds
    flags = read_flags(argv, "liger demo", description, CPU, FIXED)
    import torch

    config = configured(flags, GPU if torch.cuda.is_available() else CPU)
    report = run(config)
    return 0 if report and report["agree"] else 1


def run(config: TrainConfig, by: str = "liger demo") -> dict[str, Any] | None:
    """Run both for the command ``by``, print the table and write the files. Returns the content of
    ``demo.json``; None if a run failed."""
    from liger_kernel.train import data

    # they have no flags, but a file may have them
    for name in FIXED:
        if getattr(config, name) != getattr(CPU, name):
            raise UserError(f"{name} must be {getattr(CPU, name)} in {by}, got {getattr(config, name)}")
    out = Path(config.out)
    if other := [
        path.name for path in sorted(out.glob("*")) if not (path.name in BEGINS or BESIDE.fullmatch(path.name))
    ]:
        raise UserError(f"{out} holds {other[0]}, which is not of {by}: give another --out")
    for name, begin in BEGINS.items():
        writable(file=out / name, ours=begin)
    started = time.perf_counter()
    prepared = data.load(dataclasses.replace(config, cache=str(out / "cache")))
    tokens = int(prepared.rows.bounds[-1])
    print(
        f"data: {config.data}, {tokens:,} tokens of a vocabulary of {len(prepared.tokenizer):,} "
        f"({time.perf_counter() - started:.0f} s)"
    )
    del prepared

    for name, code in _trained(config, out).items():
        if code:
            note(f"the {name} run failed with exit code {code}; the two runs share the memory of the device")
            return None
    results = {name: json.loads((out / name / "metrics.json").read_text(encoding="utf-8")) for name in RUNS}

    report = compare(results["stock"], results["ours"])
    written = {**report, "config": config.shown(), "environment": environment(), "runs": results}
    write(out / "demo.json", json.dumps(written, indent=1) + "\n")
    print("\n" + table(report, results["ours"]))
    plotted = plot(report, results, out / "demo.png")
    print(f"\n{plotted}{out / 'demo.json'}")
    return written


CHILD = """
import sys
from liger_kernel import cli
from liger_kernel.train import demo
demo.take_turns(*sys.argv[2:])
sys.exit(cli.main(["train", "--config", sys.argv[1]]))
"""


def _trained(config: TrainConfig, out: Path) -> dict[str, int]:
    """Train both, and return their exit codes.

    The second run starts when the first one has made a block, or not at all if it could not. A byte
    in a run's pipe says that it is its turn; the end of the pipe, that the other run is over.
    """
    (first, second), pipes, processes = RUNS, {name: os.pipe() for name in RUNS}, {}
    try:
        for name, other in ((first, second), (second, first)):
            if name == second and not os.read(pipes[name][0], 1):
                break
            print(f"\n{name}: {'our kernels' if RUNS[name] == 'on' else 'as Hugging Face ships it'}", flush=True)
            run = dataclasses.replace(config, kernels=RUNS[name], out=str(out / name), cache=str(out / "cache"))
            run.save_to(out / f"{name}.json")
            ends = pipes[name][0], pipes[other][1]
            argv = [sys.executable, "-c", CHILD, str(out / f"{name}.json"), name, *map(str, ends)]
            processes[name] = subprocess.Popen(argv, pass_fds=ends)
            # else a run that is over would leave its pipe open
            for end in ends:
                os.close(end)
        return {name: process.wait() for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def take_turns(name: str, turn: str, other: str) -> None:
    """Between two blocks, write a byte to the pipe ``other``, and wait for one in the pipe
    ``turn``."""
    import torch

    from liger_kernel.train import card, loop

    # the second run has its turn when it starts, and until its second block is made
    own_turn = name != next(iter(RUNS))

    def pause() -> None:
        nonlocal own_turn
        if own_turn:
            own_turn = False
            return
        if torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():
            # the GPU may have no room for the caches of both runs
            torch.cuda.empty_cache()
        with contextlib.suppress(BrokenPipeError):
            os.write(int(other), b".")
        os.read(int(turn), 1)

    # in this process alone
    run: Any = loop._Run
    run.pause, run.label = staticmethod(pause), f"{name:<5} "
    card.finish = lambda *_: None  # nothing is saved


def compare(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the table, and whether the loss curves agree."""
    last = min(10, len(stock["losses"]))
    of = lambda number: dict(zip(RUNS, map(number, (stock, ours))))
    rows = {
        "loss": of(lambda run: sum(run["losses"][-last:]) / last),
        "peak_memory": of(lambda run: run["peak_memory"]),
        "training_memory": of(lambda run: run["peak_memory"] - run["memory_before_training"]),
    }
    for row in rows.values():
        row["ratio"] = row["ours"] / row["stock"]
    difference = max(abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"]))
    tolerance = TOLERANCE[stock["precision"]]
    rows["tokens_per_second"] = speed(stock, ours)
    return {
        **rows,
        "last_steps": last,
        "largest_loss_difference": difference,
        "tolerance": tolerance,
        "agree": difference <= tolerance,
    }


def speed(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of the pair of blocks whose ratio is the median, and the quartiles of all ratios.

    ``spread`` is the line for the user: the quartiles, or why they tell nothing if not ``clear``.
    """
    pairs = sorted(zip(stock["rates"], ours["rates"]), key=lambda pair: pair[1] / pair[0])
    if len(pairs) < PAIRS:
        few = f"There are too few blocks of steps to tell which is faster, {len(pairs)} of at least {PAIRS}"
        few += ": raise --steps or lower --log-every."
        none = dict.fromkeys(("stock", "ours", "ratio", "quartiles"))
        return none | {"pairs": len(pairs), "clear": False, "spread": few}
    # both numbers are of one pair; the medians of the two runs may be of different moments
    a, b = pairs[len(pairs) // 2]
    low, _, high = statistics.quantiles([ours / stock for stock, ours in pairs], n=4, method="inclusive")
    clear = high <= UNCLEAR * low
    spread = f"half of the ratios of {len(pairs)} pairs of blocks of steps, made in turn, are"
    spread += f" between {low:.2f} and {high:.2f}"
    clearly = f"Speed: {spread}{', so no difference shows' if low <= 1 <= high else ''}."
    busy = f"This machine is too busy to tell which is faster: {spread}."
    busy += " Try again when nothing else runs."
    numbers = {"stock": a, "ours": b, "ratio": b / a, "quartiles": [low, high], "pairs": len(pairs)}
    return {**numbers, "clear": clear, "spread": clearly if clear else busy}


def table(report: dict[str, Any], run: dict[str, Any]) -> str:
    """The table that the terminal shows at the end."""
    rows = [
        (f"loss, mean of the last {report['last_steps']} steps", "loss", lambda x: f"{x:.4f}", ".4f"),
        ("peak memory", "peak_memory", _gb, ".2f"),
        ("peak memory beyond the start", "training_memory", _gb, ".2f"),
    ]
    lines = [f"{'':<32}{'stock':>10}{'ours':>10}{'ours/stock':>12}"]
    for label, name, show, ratio in rows:
        row = report[name]
        lines.append(f"{label:<32}{show(row['stock']):>10}{show(row['ours']):>10}{row['ratio']:>12{ratio}}")
    rate = report["tokens_per_second"]
    cells = f"{'unclear':>10}{'unclear':>10}{'unclear':>12}"
    if rate["clear"]:
        low, high = rate["quartiles"]
        cells = f"{rate['stock']:>10,.0f}{rate['ours']:>10,.0f}{rate['ratio']:>12.2f} ({low:.2f} to {high:.2f})"
    lines.insert(2, f"{'tokens/s, median pair of blocks':<32}{cells}")
    lines += [
        "",
        f"The loss curves {'agree' if report['agree'] else 'DO NOT AGREE'}: largest relative difference of a step "
        f"{report['largest_loss_difference']:.1e}, allowed {report['tolerance']:.0e} in {run['precision']}.",
        rate["spread"],
        f"{run['parameters'] / 1e6:.1f} M parameters on {run['device']}; memory is {run['memory_kind']}; each run "
        "has its own process.",
    ]
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def plot(report: dict[str, Any], runs: dict[str, Any], path: Path) -> str:
    """Write the picture and return the text for the last line, which says so if there is no
    picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot (matplotlib is missing: pip install matplotlib); "
    figure, colours = Figure(figsize=(11, 3.8), dpi=160, layout="constrained"), ("#b6bec8", "#0a7d6c")
    curve, memory, speeds = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for (name, run), colour, width in zip(runs.items(), colours, (6, 1.8)):
        curve.plot(range(1, len(run["losses"]) + 1), run["losses"], color=colour, linewidth=width, label=name)
    verdict = "Loss: the same curve" if report["agree"] else "Loss: NOT the same curve"
    curve.set_title(f"{verdict} (differs by {report['largest_loss_difference']:.0e} at most)")
    curve.set_xlabel("step")
    curve.legend()

    def bars(axes: Any, name: str, show: Callable[[float], str], title: str) -> None:
        values = [report[name][run] for run in RUNS]
        axes.bar_label(axes.bar(list(RUNS), values, color=colours), [show(value) for value in values])
        axes.set(title=f"{title}: {report[name]['ratio']:.2f}x", ylim=(0, 1.15 * max(values)), yticks=[])

    bars(memory, "peak_memory", _gb, "Peak memory")
    memory.bar(list(RUNS), [run["memory_before_training"] for run in runs.values()], color="white", alpha=0.35)
    memory.set_xlabel("lighter: before training")
    rate, run = report["tokens_per_second"], runs["ours"]
    if rate["clear"]:
        bars(speeds, "tokens_per_second", "{:,.0f}".format, "Tokens/s")
        low, high = rate["quartiles"]
        speeds.set_xlabel(f"{low:.2f}x to {high:.2f}x, half of {rate['pairs']} pairs")
    else:
        speeds.set_title("Tokens/s: unclear")
        speeds.axis("off")
    what = f"{run['model']}, {run['parameters'] / 1e6:.0f} M parameters, {run['precision']}, on {run['device']}"
    figure.supxlabel(f"{what}; memory: {run['memory_kind']}", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write(path, picture.getvalue())
    return f"{path}, "
