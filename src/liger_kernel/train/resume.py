"""What must hold for a run to continue where it stopped, for every trainer, and what the trainers of other packages need for it."""

from __future__ import annotations

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
from liger_kernel.train.files import write
from liger_kernel.train.ranks import Ranks, restarts
from liger_kernel.train.rows import Data

UNMOVED: dict[str, Any] = {"tokens_per_second": 0.0, "seconds": 0.0, "evaluations": []}  # of a run that was finished before, whose numbers are gone


def refuse_other(path: Path | None, there: dict[str, Any], here: dict[str, Any]) -> None:
    """``UserError`` if the checkpoint ``path`` was written with another identity than this run's: order of the data, model, or adapters."""
    later = lambda name: name.startswith("digest of ") or name in ("moments", *ADAPTERS)  # which earlier releases did not write
    wrong = [name for name, value in here.items() if there.get(name) != value and (name in there or not later(name))]
    if wrong:
        models = dict.fromkeys(("model", "digest of base", "digest of weights"), "another model")
        kinds = {**dict.fromkeys(ADAPTERS, "other adapters"), "moments": "another optimizer", **models}
        kind = kinds.get(wrong[0], "other data")
        raise UserError(f"checkpoint {path} is of {kind}: {'; '.join(f'{name} {there.get(name)} there, {here[name]} here' for name in wrong)}")


def moments(config: TrainConfig) -> dict[str, str]:
    """How the optimizer stores its moments: a checkpoint of others does not fit."""
    return {"moments": "8 bits" if KINDS[config.optimizer].moments == 1 else "dtype of the weights"}


def accept(config: TrainConfig, data: Data, model: Any, ranks: Ranks, folder: Path, last: Path | None) -> int:
    """The rows of a step, which are those of the first start unless the config says otherwise. ``model`` is on its device and not yet sharded.

    ``UserError`` where the run must not go on from ``last``: it is not to, or the order of the data, the place in it, or the adapters would be others.
    """
    if last and not config.resume and restarts() == 0:
        raise UserError(f"{folder} holds checkpoints: remove them, give another --out, or leave out --no-resume")
    path = folder / "identity.json"
    there = ranks.agreed(json.loads(path.read_text()) if ranks.first and last and path.is_file() else None) or {}
    rows = config.global_batch or there.get("global_batch") or config.batch * config.accumulate * ranks.world
    here = {"seed": config.seed, "length": config.length} | data.identity() | {"global_batch": rows} | moments(config) | identity(config, model)
    if there:
        refuse_other(last, {"global_batch": rows} | there, here)  # which earlier releases did not write
    if ranks.first and config.checkpoint_every:
        folder.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(here))
    return rows


def finished(config: TrainConfig, ranks: Ranks) -> dict[str, Any] | None:
    """The numbers of the run that made the last step, as this run had no step to make."""
    path = Path(config.out) / "metrics.json"
    if ranks.first:
        print("no step was left to make", flush=True)
    found = json.loads(path.read_text(encoding="utf-8")) if ranks.first and path.is_file() else None  # rank 0 writes it again
    return found if found and found["trainer"] == config.trainer else None


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter group, what follows from the configuration: peak learning rate, weight decay and so on."""
    copied = lambda value: value.clone() if isinstance(value, torch.Tensor) else value  # torchao's learning rate is a tensor, which schedules change
    return [{name: copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def configured(optimizer: Any, schedule: Any, numbers: list[dict[str, Any]]) -> None:
    """Set the numbers of this configuration again, because loading has replaced them by those of the checkpoint."""
    schedule = getattr(schedule, "scheduler", schedule)  # accelerate's wrapper
    schedule.base_lrs = [group["lr"] for group in numbers]
    for group, own, part in zip(optimizer.param_groups, numbers, schedule.lr_lambdas):
        group.update(own, initial_lr=own["lr"], lr=own["lr"] * part(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def _seed(*numbers: int) -> int:
    """One seed of several numbers."""
    return functools.reduce(lambda seed, number: seed * 1_000_003 + number, numbers) % 2**63


def seed_all(*numbers: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy; collators and models of others may use any of them."""
    torch.manual_seed(_seed(*numbers))
    random.seed(_seed(*numbers))
    np.random.seed(_seed(*numbers) % 2**32)
