"""What must hold for a run to continue where it stopped, for every trainer, and what the
trainers of other packages need for it."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from liger_kernel.train.adamw import KINDS
from liger_kernel.train.adapters import identity
from liger_kernel.train.config import ADAPTERS, TrainConfig, UserError
from liger_kernel.train.files import read_object, write
from liger_kernel.train.ranks import Ranks, restarts
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.rows import Data

UNMOVED: dict[str, Any] = {
    "tokens_per_second": 0.0,
    "seconds": 0.0,
    "evaluations": [],
}  # of a run that was finished before, whose numbers are gone


def refuse_other(path: Path | None, there: dict[str, Any], here: dict[str, Any]) -> None:
    """``UserError`` if the checkpoint ``path`` was written with another identity than this
    run's: order of the data, model, or adapters."""
    later = lambda name: (
        name.startswith("digest of ") or name in ("moments", *ADAPTERS)
    )  # which earlier releases did not write
    wrong = [name for name, value in here.items() if there.get(name) != value and (name in there or not later(name))]
    if wrong:
        models = dict.fromkeys(("model", "digest of base", "digest of weights"), "another model")
        kinds = {**dict.fromkeys(ADAPTERS, "other adapters"), "moments": "another optimizer", **models}
        kind = kinds.get(wrong[0], "other data")
        raise UserError(
            f"checkpoint {path} is of {kind}: "
            f"{'; '.join(f'{name} {there.get(name)!s:.200} there, {here[name]!s:.200} here' for name in wrong)}"
        )


def moments(config: TrainConfig) -> dict[str, str]:
    """How the optimizer stores its moments: a checkpoint of others does not fit."""
    return {"moments": "8 bits" if KINDS[config.optimizer].moments == 1 else "dtype of the weights"}


def accept(config: TrainConfig, data: Data, model: Any, ranks: Ranks, folder: Path, last: Path | None) -> int:
    """The rows of a step, which are those of the first start unless the config says otherwise.
    ``model`` is on its device and not yet sharded.

    ``UserError`` where the run must not go on from ``last``: it is not to, or the order of the
    data, the place in it, or the adapters would be others.
    """
    if last and not config.resume and restarts() == 0:
        raise UserError(f"{folder} holds checkpoints: remove them, give another --out, or leave out --no-resume")
    path = folder / "identity.json"
    there, problem = ranks.agreed(_identity(path) if ranks.first and last else ({}, None))
    if problem:
        raise UserError(problem)
    rows = config.global_batch or there.get("global_batch") or config.batch * config.accumulate * ranks.world
    here = (
        {"seed": config.seed, "length": config.length}
        | data.identity()
        | {"global_batch": rows}
        | moments(config)
        | identity(config, model)
    )
    if there:
        refuse_other(last, {"global_batch": rows} | there, here)  # which earlier releases did not write
    if ranks.first and config.checkpoint_every:
        folder.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(here))
    return rows


def _identity(path: Path) -> tuple[dict[str, Any], str | None]:
    """(what identity.json holds, why it cannot be read); earlier releases have not written it."""
    try:
        there = read_object(path)
        if "global_batch" in there and (
            type(there["global_batch"]) is not int or not 1 <= there["global_batch"] < 1 << 24
        ):
            raise ValueError(f"global_batch is {there['global_batch']!r:.40}")
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        return (
            {},
            f"{path}, which says of what data and model the checkpoints are, is damaged ({in_a_line(error, 100)}): "
            "restore it, or give another --out",
        )
    return there, None


def finished(config: TrainConfig, ranks: Ranks) -> dict[str, Any] | None:
    """The numbers of the run that made the last step, as this run had no step to make."""
    path = Path(config.out) / "metrics.json"
    if ranks.first:
        print("no step was left to make", flush=True)
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = read_object(path) if ranks.first else {}  # rank 0 writes it again
    losses = found.get("losses")
    numbers = [
        *(losses if isinstance(losses, list) else [None]),
        found.get("tokens_per_second"),
        found.get("peak_memory"),
    ]
    whole = all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers) and isinstance(
        found.get("memory_kind"), str
    )
    return found if whole and found.get("trainer") == config.trainer else None


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter group, what follows from the configuration: peak learning rate, weight
    decay and so on."""
    copied = lambda value: (
        value.clone() if isinstance(value, torch.Tensor) else value
    )  # torchao's learning rate is a tensor, which schedules change
    return [
        {name: copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def configured(optimizer: Any, schedule: Any, numbers: list[dict[str, Any]]) -> None:
    """Set the numbers of this configuration again, because loading has replaced them by those of
    the checkpoint."""
    schedule = getattr(schedule, "scheduler", schedule)  # accelerate's wrapper
    schedule.base_lrs = [group["lr"] for group in numbers]
    for group, own, part in zip(optimizer.param_groups, numbers, schedule.lr_lambdas):
        group.update(own, initial_lr=own["lr"], lr=own["lr"] * part(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def _seed(*numbers: int) -> int:
    """One seed of several numbers."""
    return functools.reduce(lambda seed, number: seed * 1_000_003 + number, numbers) % 2**63


def seed_all(*numbers: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy; collators and models of others may use
    any of them."""
    torch.manual_seed(_seed(*numbers))
    random.seed(_seed(*numbers))
    np.random.seed(_seed(*numbers) % 2**32)
