"""``liger demo``: train one small Llama twice from the same weights on the same text, stock and with our kernels, and compare.

Both runs start from random weights (or from ``--model``), each in its own process, so that each has its own peak of memory. The losses of every step
may differ only by rounding; otherwise the exit code is 1.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from liger_kernel.env_report import environment
from liger_kernel.train.config import TrainConfig, configured, read_flags
from liger_kernel.train.mistakes import writable

RUNS = {"stock": "off", "ours": "on"}

# Sizes at which the output head weighs what it weighs in real models: most of the memory beyond the weights.
CPU = TrainConfig(out="runs/demo", hidden=192, heads=3, kv_heads=1, layers=4, vocab=32000, batch=4, steps=40, warmup=5, log_every=2, eval_fraction=0.0)
GPU = dataclasses.replace(CPU, hidden=1024, heads=16, kv_heads=8, layers=8, length=2048, batch=8, steps=100, warmup=10, log_every=10, lr=6e-4)

# Largest relative difference of the two losses at any step. fp32: sums in another order, then amplified by AdamW, whose first steps have the
# size of the learning rate whatever the size of the gradient; 3e-6 seen. bf16: one rounding is up to 2^-9 = 0.2 %, and thousands of them meet.
TOLERANCE = {"fp32": 1e-4, "bf16-mixed": 1e-2, "bf16": 1e-2}


def main(argv: list[str]) -> int:
    """Run both, print the table and write the files. Returns 0 if the losses agree, 1 if they do not or if a run failed."""
    larger = {name: value for name, value in dataclasses.asdict(GPU).items() if value != getattr(CPU, name)}
    description = (
        "Train a small Llama twice from the same weights on the same text, stock and with our kernels, and compare. The defaults below are those without a "
        f"GPU; with a GPU they are {', '.join(f'{name} {value:g}' for name, value in larger.items())}."
    )
    flags = read_flags(argv, "liger demo", description, CPU, fixed=("kernels", "save", "cache", "stream"))  # help and mistakes answer before torch is imported
    import torch

    from liger_kernel.train import data

    config = configured(flags, GPU if torch.cuda.is_available() else CPU)
    out = Path(config.out)
    writable(folder=out)
    started = time.perf_counter()
    prepared = data.load(dataclasses.replace(config, cache=str(out / "cache")))
    tokens = int(prepared.rows.bounds[-1])
    print(f"data: {config.data}, {tokens:,} tokens of a vocabulary of {len(prepared.tokenizer):,} ({time.perf_counter() - started:.0f} s)")
    del prepared

    results = {}
    for name, kernels in RUNS.items():
        print(f"\n{name}: {'our kernels' if kernels == 'on' else 'as Hugging Face ships it'}", flush=True)
        run = dataclasses.replace(config, kernels=kernels, out=str(out / name), cache=str(out / "cache"))
        run.save_to(out / name / "config.json")
        code = subprocess.run([sys.executable, "-m", "liger_kernel.cli", "train", "--config", str(out / name / "config.json")], check=False).returncode
        if code:
            print(f"the {name} run failed with exit code {code}", file=sys.stderr)
            return 1
        results[name] = json.loads((out / name / "metrics.json").read_text(encoding="utf-8"))

    report = compare(results["stock"], results["ours"])
    (out / "demo.json").write_text(json.dumps({**report, "config": config.shown(), "environment": environment(), "runs": results}, indent=1) + "\n")
    print("\n" + table(report, results["ours"]))
    plotted = plot(report, results, out / "demo.png")
    print(f"\n{plotted}{out / 'demo.json'}")
    return 0 if report["agree"] else 1


def compare(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the table, and whether the loss curves agree."""
    last = min(10, len(stock["losses"]))
    rows = {"loss": {name: sum(run["losses"][-last:]) / last for name, run in (("stock", stock), ("ours", ours))}}
    for name in ("tokens_per_second", "peak_memory"):
        rows[name] = {"stock": stock[name], "ours": ours[name]}
    rows["training_memory"] = {name: run["peak_memory"] - run["memory_before_training"] for name, run in (("stock", stock), ("ours", ours))}
    for row in rows.values():
        row["ratio"] = row["ours"] / row["stock"]
    difference = max(abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"]))
    tolerance = TOLERANCE[stock["precision"]]
    return {**rows, "last_steps": last, "largest_loss_difference": difference, "tolerance": tolerance, "agree": difference <= tolerance}


def table(report: dict[str, Any], run: dict[str, Any]) -> str:
    """The table that the terminal shows at the end."""
    rows = [
        (f"loss, mean of the last {report['last_steps']} steps", "loss", lambda x: f"{x:.4f}", ".4f"),
        ("tokens/s (median)", "tokens_per_second", lambda x: f"{x:,.0f}", ".2f"),
        ("peak memory", "peak_memory", _gb, ".2f"),
        ("peak memory beyond the start", "training_memory", _gb, ".2f"),
    ]
    lines = [f"{'':<32}{'stock':>10}{'ours':>10}{'ours/stock':>12}"]
    for label, name, show, ratio in rows:
        lines.append(f"{label:<32}{show(report[name]['stock']):>10}{show(report[name]['ours']):>10}{report[name]['ratio']:>12{ratio}}")
    verdict, difference, allowed = "agree" if report["agree"] else "DO NOT AGREE", report["largest_loss_difference"], report["tolerance"]
    lines += [
        "",
        f"The loss curves {verdict}: largest relative difference of a step {difference:.1e}, allowed {allowed:.0e} in {run['precision']}.",
        f"{run['parameters'] / 1e6:.1f} M parameters on {run['device']}; memory is {run['memory_kind']}; each run has its own process.",
    ]
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def plot(report: dict[str, Any], runs: dict[str, Any], path: Path) -> str:
    """Write the picture and return the text for the last line, which says so if there is no picture."""
    try:
        import matplotlib
    except ImportError:
        return "no plot (matplotlib is missing: pip install matplotlib); "
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink, quiet, colours = "#24292f", "#8c959f", {"stock": "#b6bec8", "ours": "#0a7d6c"}
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": ink,
            "axes.edgecolor": quiet,
            "axes.labelcolor": quiet,
            "xtick.color": quiet,
            "ytick.color": quiet,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    title: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold"}
    figure, (curve, memory, speed) = plt.subplots(1, 3, figsize=(11, 3.8), width_ratios=(2.2, 1, 1), dpi=160)
    figure.set_layout_engine("constrained", wspace=0.06)

    steps = range(1, len(runs["stock"]["losses"]) + 1)
    curve.plot(steps, runs["stock"]["losses"], color=colours["stock"], linewidth=6, solid_capstyle="round", label="stock")
    curve.plot(steps, runs["ours"]["losses"], color=colours["ours"], linewidth=1.8, label="ours")
    verdict = "Loss: the same curve" if report["agree"] else "Loss: NOT the same curve"
    curve.set_title(f"{verdict} (differs by {report['largest_loss_difference']:.0e} at most)", **title)
    curve.set_xlabel("step")
    curve.legend(frameon=False, labelcolor=ink)

    bars = (
        (memory, "peak_memory", lambda x: f"{x / 1e9:.2f} GB", f"Peak memory: {report['peak_memory']['ratio']:.2f}x"),
        (speed, "tokens_per_second", lambda x: f"{x:,.0f}", f"Tokens/s: {report['tokens_per_second']['ratio']:.2f}x"),
    )
    for axes, name, show, heading in bars:
        values = [report[name][run] for run in RUNS]
        drawn = axes.bar(list(RUNS), values, width=0.62, color=[colours[run] for run in RUNS])
        axes.bar_label(drawn, [show(value) for value in values], padding=4, color=ink)
        axes.set_title(heading, **title)
        axes.set_ylim(0, 1.15 * max(values))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", length=0, labelcolor=ink)
    start = [run["memory_before_training"] for run in runs.values()]
    memory.bar(list(RUNS), start, width=0.62, color="white", alpha=0.35)
    if start[0] > 0.15 * report["peak_memory"]["stock"]:  # else there is no room for the words
        memory.text(0, start[0] / 2, "before\ntraining", ha="center", va="center", fontsize=8, color=ink)
    run = runs["ours"]
    note = f"{run['model']}, {run['parameters'] / 1e6:.0f} M parameters, {run['precision']}, on {run['device']}; memory: {run['memory_kind']}"
    figure.supxlabel(note, fontsize=8, color=quiet, x=0.01, ha="left")
    figure.savefig(path)
    plt.close(figure)
    return f"{path}, "
