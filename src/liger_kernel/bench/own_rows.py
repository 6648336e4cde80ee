"""``liger bench step --model FOLDER --data FILE``: stock and ours train a model of the user's on rows
of the user's, by turns, as in ``liger demo``."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from liger_kernel.train import demo
from liger_kernel.train.config import TrainConfig, configured, read_flags
from liger_kernel.train.mistakes import UserError

NAME = "liger bench step"
RUN = TrainConfig(out="runs/bench-step", steps=40, warmup=5, log_every=4, eval_fraction=0.0)


def named(argv: list[str]) -> bool:
    """Whether ``--data`` names rows, not a kind of those that are made."""
    values = [value for flag, value in pairwise(argv) if flag == "--data"]
    values += [word.partition("=")[2] for word in argv if word.startswith("--data=")]
    return bool(values) and values[-1] not in ("random", "real")


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if the losses agree."""
    description = "Train a model on rows, stock and with our kernels, by turns, and compare."
    config = configured(read_flags(argv, NAME, description, RUN, demo.FIXED), RUN)
    if not config.model:
        raise UserError(f"--data {config.data} needs --model: a folder or an id of the hub")
    report = demo.run(config, NAME)
    if report is None:
        return 1
    print(sentence(config, report))
    return 0 if report["agree"] else 1


def sentence(config: TrainConfig, report: dict[str, Any]) -> str:
    """The result."""
    rate, memory = report["tokens_per_second"], report["peak_memory"]
    speed = f"{rate['ratio']:.2f} times as fast as stock" if rate["clear"] else "at a speed that could not be compared"
    off = f"{report['largest_loss_difference']:.0e}, which is {'' if report['agree'] else 'MORE THAN '}rounding"
    return (
        f"On {Path(config.data).name}, {Path(str(config.model)).name} trains with our kernels {speed}, in "
        f"{memory['ratio']:.2f} times its peak memory ({memory['ours'] / 1e9:.2f} GB), and the losses differ by {off}."
    )
