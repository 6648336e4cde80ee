"""What the three trainers share: what they are given, what must hold for a run to continue where
it stopped, its optimizer and learning rate, who hears of it while it is under way, and what
``metrics.json`` says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from liger_kernel.parallel import by_sharding, in_blocks
from liger_kernel.train import adamw, adapters
from liger_kernel.train.config import ADAPTERS, TrainConfig, UserError
from liger_kernel.train.files import NUMBER, read_object, write
from liger_kernel.train.folder import record
from liger_kernel.train.measure import Pace, PeakMemory, device_name
from liger_kernel.train.metrics import CURVES, Endpoint, Reports
from liger_kernel.train.mistakes import mistaken
from liger_kernel.train.ranks import DelayedReduce, Preempted, Ranks, Stop, Watch, local_rank, restarts
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.store import Store
from liger_kernel.train.token_rows import Data


@dataclasses.dataclass
class Session:
    """A run that is ready to begin: its model is on its device and patched, and not sharded."""

    config: TrainConfig
    data: Data
    model: Any
    device: torch.device
    precision: str
    ranks: Ranks
    stop: Stop
    store: Store | None = None

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to go on from a checkpoint: the order of the data, and the
        function that is trained. First read before the model is sharded, which has all weights."""
        config, form = self.config, self.model.config.get_text_config()
        names = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim")
        return (
            {"seed": config.seed, "length": config.length}
            | self.data.identity()
            | {"model": {name: getattr(form, name, None) for name in names}}
            # a checkpoint of other moments does not fit
            | {"moments": "8 bits" if adamw.KINDS[config.optimizer].moments == 1 else "dtype of the weights"}
            | adapters.identity(config, self.model)
        )

    def metrics(self, memory: PeakMemory, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """What ``metrics.json`` says for every trainer: the run, and the curves of its ``lines``."""
        config, model = self.config, self.model
        return {
            "trainer": config.trainer,
            "steps": config.steps,
            "model": model.config.model_type,
            # parameters of ZeRO-3 are empty here, and ``ds_numel`` has their size
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
            "kernels": config.kernels,
            "device": device_name(self.device),
            "precision": self.precision,
            "ranks": self.ranks.world,
            "parallel": config.parallel,
            "restarts": restarts(),
            "memory_kind": memory.kind,
            "peak_memory": memory.read(),
            "memory_before_training": memory.before,
        } | {name: [line.get(key, math.nan) for line in lines] for name, key in CURVES.items()}

    def finished(self) -> dict[str, Any] | None:
        """The numbers of the run that made the last step, as this run had no step to make."""
        if not self.ranks.first:
            # only rank 0 writes the file
            return None
        print("no step was left to make", flush=True)
        form = dict(losses=[NUMBER, ...], tokens_per_second=NUMBER, peak_memory=NUMBER, memory_kind=str, trainer=str)
        with contextlib.suppress(OSError, ValueError):
            found = read_object(Path(self.config.out) / "metrics.json", **form)
            if found["trainer"] == self.config.trainer:
                return found
        return None


def accept(session: Session, folder: Path, last: Path | None) -> int:
    """The rows of a step, which are those of the first start unless the config says otherwise; they
    make steps of its epochs. The model is on its device and not yet sharded.

    ``UserError`` where the run must not go on from ``last``: it is not to, or the order of the
    data, the place in it, or the adapters would be others.
    """
    config, ranks = session.config, session.ranks
    if last and not config.resume and restarts() == 0:
        raise not_to_resume(folder)
    path = folder / "identity.json"
    there = ranks.by_first(lambda: _identity(path) if last else {})
    rows = config.global_batch or there.get("global_batch") or config.batch * config.accumulate * ranks.world
    here = session.identity | {"global_batch": rows}
    session.config = config.in_steps(rows, len(session.data.train))
    if last:
        refuse_other(last, there, here)
    if ranks.first and config.checkpoint_every:
        folder.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(here))
    return rows


def _identity(path: Path) -> dict[str, Any]:
    """What identity.json holds; ``UserError`` where it cannot be read."""
    try:
        return read_object(path, global_batch=range(1, 1 << 24))
    except (OSError, ValueError) as error:
        of_what = "which says of what data and model the checkpoints are"
        mend = "restore it, or give another --out"
        raise UserError(f"{path}, {of_what}, is damaged ({in_a_line(error, 100)}): {mend}") from error


def refuse_other(path: Path | None, there: dict[str, Any], here: dict[str, Any]) -> None:
    """``UserError`` if the checkpoint ``path`` was written with another identity than this
    run's: order of the data, model, or adapters."""
    wrong = [name for name, value in here.items() if there.get(name) != value]
    if wrong:
        models = dict.fromkeys(("model", "digest of base", "digest of weights"), "another model")
        kinds = {**dict.fromkeys(ADAPTERS, "other adapters"), "moments": "another optimizer", **models}
        kind = kinds.get(wrong[0], "other data")
        raise UserError(
            f"checkpoint {path} is of {kind}: "
            f"{'; '.join(f'{name} {there.get(name)!s:.200} there, {here[name]!s:.200} here' for name in wrong)}"
        )


def not_to_resume(folder: Path) -> UserError:
    return UserError(f"{folder} holds checkpoints: remove them, give another --out, or leave out --no-resume")


def optimizer_of(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """The config's optimizer of the trained parameters. Vectors have no weight decay."""
    trained = [p for p in parameters if p.requires_grad]
    # fused kernels take one kind of tensor
    groups = [
        {"params": same, "weight_decay": config.weight_decay if matrices else 0.0}
        for matrices in (True, False)
        for same in by_sharding([p for p in trained if (p.ndim > 1) == matrices])
    ]
    if adamw.KINDS[config.optimizer].moments == 1:
        for p in trained:
            if in_blocks(p, adamw.LEAST, adamw.BLOCK) is False:
                raise UserError(
                    f"optimizer {config.optimizer} cannot cut a weight of shape {tuple(p.shape)} into blocks of "
                    f"{adamw.BLOCK} values on every rank: "
                    "take another number of ranks, or optimizer adamw"
                )
    return adamw.make(config.optimizer, groups, lr=config.peak_lr, betas=(0.9, config.beta2))


def require(config: TrainConfig) -> None:
    """``UserError`` if what the config's optimizer needs is not installed: better known before
    data and model are loaded."""
    with mistaken("", ImportError):
        adamw.require(config.optimizer)
    if adamw.KINDS[config.optimizer].by == "torchao":
        import torchao.optim  # noqa: F401  # from here on, torch.load(weights_only=True) reads its moments


def scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """``learning_rate`` as a scheduler of PyTorch, for other trainers."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(config, min(step, config.steps - 1)) / config.peak_lr
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to ``min_lr``
    of the peak at the last step."""
    if step < config.warmup:
        return config.peak_lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    falling = min(1.0, (config.steps - 1 - step) / max(1, config.steps * config.decay))
    high = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": falling,
    }[config.schedule]
    return config.peak_lr * (config.min_lr + (1 - config.min_lr) * high)


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter group, what follows from the configuration: peak learning rate, weight
    decay and so on."""
    # torchao's learning rate is a tensor, which schedules change
    copied = lambda value: value.clone() if isinstance(value, torch.Tensor) else value
    return [
        {name: copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def configured(optimizer: Any, schedule: Any, numbers: list[dict[str, Any]]) -> None:
    """Set the numbers of this configuration again, because loading has replaced them by those of
    the checkpoint."""
    # accelerate wraps the scheduler
    schedule = getattr(schedule, "scheduler", schedule)
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


class Observers(contextlib.ExitStack):
    """The watch over progress, the endpoint and the reports of a rank, open while it trains."""

    def __init__(self, session: Session):
        super().__init__()
        config, ranks = session.config, session.ranks
        port = config.metrics_port and config.metrics_port + local_rank()
        self.endpoint = Endpoint(config.metrics_host, port, ranks.rank) if port else None
        self.reports = Reports(config, config.shown()) if ranks.first else None
        for each in (self.reports, self.endpoint):
            if each:
                self.callback(each.close)
        # it ends before they are closed, which may take longer than a step
        self.watch = self.enter_context(Watch(Path(config.out), ranks.rank, config.timeout))

    def progress(self) -> None:
        self.watch.progress()
        if self.endpoint:
            self.endpoint.progress = time.time()

    def publish(self, values: dict[str, Any]) -> None:
        if self.endpoint:
            self.endpoint.values, self.endpoint.progress = values | {"restarts": restarts()}, time.time()
        if self.reports:
            self.reports.send(values)


def refuse_nonfinite(step: int, loss: float, norm: float) -> None:
    """``UserError`` for a step from which no run recovers."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise UserError(f"the {name} is {value} at step {step}: lower the learning rate, or look at the data")


class Following(Observers):
    """What a callback of another package's trainer keeps of a run, and does in it."""

    def __init__(self, session: Session, rows: int):
        self.session, self.delayed = session, DelayedReduce(session.ranks)
        config, data = session.config, session.data
        self.pace = Pace(lambda step: data.tokens_of((step - 1) * rows, step * rows, config.seed), config.steps)
        self.memory = PeakMemory(session.device)
        self.lines: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []
        self.preempted = False
        super().__init__(session)  # the watch begins

    def begin(self, step: int) -> None:
        record(self.session.config, self.session.ranks, step)
        self.pace.begin(step)

    def seed(self, step: int) -> None:
        """Of dropout: what was drawn before, or before a restart, plays no part."""
        seed_all(self.session.config.seed, step, self.session.ranks.rank)

    def made(self, step: int) -> bool:
        """A step; whether all ranks stop behind it, as some rank was told to."""
        config = self.session.config
        self.watch.progress()
        self.pace.made(step)
        stop = bool(config.checkpoint_every) and self.delayed.exchange(self.session.stop.is_set(), -1)[0]
        self.preempted = self.preempted or (stop and step < config.steps)
        return self.preempted

    def logged(self, line: dict[str, Any], norm: float) -> None:
        """Publish a line. ``norm``: its gradients', or 0 where the trainer does not say it."""
        self.publish(line)
        refuse_nonfinite(line["step"], line["loss"], norm)

    def end(self, step: int, folder: Path) -> dict[str, float]:
        """Tokens per second, once the last step is made. Raises ``Preempted`` if it was not the
        last one of the run."""
        self.delayed.last()
        self.memory.pause()
        if self.preempted:
            raise Preempted(f"stopped after step {step} by SIGTERM; checkpoint: {folder}")
        return self.pace.read()

    @property
    def evaluated(self) -> bool:
        """Whether that is done behind the last step."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.session.config.steps

    def metrics(self, speed: dict[str, float]) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        if self.lines:
            return self.session.metrics(self.memory, self.lines) | speed | {"evaluations": self.evaluations}
        # the run was finished before, and its numbers may be gone
        unmoved = {"tokens_per_second": 0.0, "seconds": 0.0, "evaluations": []}
        return self.session.finished() or self.session.metrics(self.memory, []) | unmoved
