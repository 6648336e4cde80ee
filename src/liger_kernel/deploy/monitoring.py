"""Alerts and a dashboard for the metrics of the trainer (``train.metrics.EXPORTED``). Every
series of a job has its name as the label ``run``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from liger_kernel.deploy.job import Job


class Thresholds(NamedTuple):
    """The thresholds of a job's alerts. A chart has expressions in their place, because its
    values may change them."""

    steps: Any  # all steps of the run
    last: Any  # a run that stands still after this step has ended: its last log line may be missed
    every: Any  # steps between checkpoints
    behind: Any  # largest number of steps without a checkpoint
    age: Any  # largest age of the newest checkpoint in seconds


def thresholds(job: Job) -> Thresholds:
    train = job.train
    last = train.steps - 2 * train.log_every
    return Thresholds(train.steps, last, train.checkpoint_every, 2 * train.checkpoint_every, job.checkpoint_age)


def rules(
    job: Job, window: str = "15m", hold: str = "5m", memory: str = "6h", limits: Thresholds | None = None
) -> dict[str, Any]:
    """The Prometheus rules of one job: alerts over the last ``window`` (or ``memory``, for
    comparison with usual values) that fire after ``hold``.

    What grew is compared with its value one window ago: a series that did not exist then counts
    from 0, unlike with ``increase()``.
    """
    values = {"run": job.name, "window": window, "hold": hold, "memory": memory}
    values |= (limits or thresholds(job))._asdict()
    text = Path(__file__).with_name("rules.json").read_text()
    # escaped as in a JSON string, whose quotes are there already
    return json.loads(re.sub(r"@(\w+)@", lambda mark: json.dumps(str(values[mark[1]]))[1:-1], text))


def dashboard() -> dict[str, Any]:
    """A Grafana dashboard of all runs, for Grafana's import dialogue and its sidecar."""
    return json.loads(Path(__file__).with_name("dashboard.json").read_text())
