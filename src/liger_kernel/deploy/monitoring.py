"""Alerts and a dashboard for the metrics of the trainer (``train.metrics.EXPORTED``). Every
series of a job has its name as the label ``run``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_kernel.deploy.job import Job


def thresholds(job: Job) -> dict[str, Any]:
    """Those of a job's alerts."""
    train = job.train
    return {
        "steps": train.steps,
        # a run that stands still after this step has ended: its last log line may be missed
        "last": train.steps - 2 * train.log_every,
        "every": train.checkpoint_every,
        # the most steps without a checkpoint
        "behind": 2 * train.checkpoint_every,
        # the most seconds since the newest checkpoint
        "age": job.checkpoint_age,
    }


def rules(job: Job, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Prometheus rules of one job: alerts over the last 15 minutes (or 6 hours, for comparison
    with usual values) that fire after 5. A chart has expressions as ``limits`` in the place of the
    job's thresholds, because its values may change them.

    What grew is compared with its value one window ago: a series that did not exist then counts
    from 0, unlike with ``increase()``.
    """
    values = {"run": job.name} | (limits or thresholds(job))
    text = Path(__file__).with_name("rules.json").read_text()
    # escaped as in a JSON string, whose quotes are there already
    return json.loads(re.sub(r"@(\w+)@", lambda mark: json.dumps(str(values[mark[1]]))[1:-1], text))


def dashboard() -> dict[str, Any]:
    """A Grafana dashboard of all runs, for Grafana's import dialogue and its sidecar."""
    return json.loads(Path(__file__).with_name("dashboard.json").read_text())
