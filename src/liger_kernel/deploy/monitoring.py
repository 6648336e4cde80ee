"""Alerts and a dashboard for the metrics of the trainer (``train.metrics.EXPORTED``). Every
series of a job has its name as the label ``run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from liger_kernel.deploy.job import Job

BY = "by (namespace, run)"


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
    comparison with usual values) that fire after ``hold``."""
    of = lambda metric: f'liger_{metric}{{run="{job.name}"}}'
    most = lambda metric: f"max {BY} ({of(metric)})"
    over = lambda function, metric, time: f"max {BY} ({function}{of(metric)}[{time}]))"
    # more than one window ago; a series that did not exist then counts from 0, unlike with
    # increase()
    grew = lambda metric: f"{most(metric)} > (max {BY} ({of(metric)} offset {window}) or max {BY} (0 * {of(metric)}))"
    limits = limits or thresholds(job)
    # name, severity, how long before it fires, query, summary
    alerts = [
        (
            "LigerTrainingStalled",
            "critical",
            hold,
            f"{over('max_over_time(', 'step', memory)} < {limits.last} unless {over('changes(', 'step', window)} > 0",
            f"{{{{ $labels.run }}}} made no step in {window}, after step {{{{ $value }}}} of {limits.steps}: stuck, "
            "restarting without end, or gone",
        ),
        (
            "LigerCheckpointMissing",
            "critical",
            hold,
            f"{most('step')} - ({most('checkpoint_step')} or max {BY} (0 * {of('step')})) > {limits.behind}",
            f"{{{{ $labels.run }}}} would lose {{{{ $value }}}} steps; checkpoints are due every {limits.every}",
        ),
        (
            "LigerCheckpointOld",
            "warning",
            hold,
            f"time() - {most('checkpoint_time_seconds')} > {limits.age}",
            "the newest checkpoint of {{ $labels.run }} was written {{ $value | humanizeDuration }} ago",
        ),
        (
            "LigerCheckpointFailed",
            "critical",
            "0s",
            grew("checkpoint_failures_total"),
            "{{ $labels.run }} cannot write checkpoints",
        ),
        (
            "LigerTrainingRestarted",
            "warning",
            "0s",
            grew("restarts_total"),
            "processes of {{ $labels.run }} were started anew",
        ),
        (
            "LigerNotFinite",
            "critical",
            "0s",
            f"{grew('nonfinite_steps_total')} or max {BY} ({of('loss')} != {of('loss')})",
            "{{ $labels.run }} meets NaN or Inf: steps that change nothing",
        ),
        (
            "LigerThroughputDropped",
            "warning",
            hold,
            f"{over('avg_over_time(', 'tokens_per_second', window)} < 0.7 * "
            f"{over('quantile_over_time(0.5, ', 'tokens_per_second', memory)}",
            "{{ $labels.run }} trains at {{ $value | humanize }} tokens/s, less than 70 % of what was usual",
        ),
    ]
    found: list[dict[str, Any]] = [{"record": "run:liger_tokens_per_second", "expr": most("tokens_per_second")}]
    for name, severity, wait, expr, summary in alerts:
        labels, annotations = {"severity": severity}, {"summary": summary}
        found.append({"alert": name, "expr": expr, "for": wait, "labels": labels, "annotations": annotations})
    return {"groups": [{"name": f"liger-{job.name}", "rules": found}]}


def dashboard() -> dict[str, Any]:
    """A Grafana dashboard of all runs, for Grafana's import dialogue and its sidecar."""
    return json.loads(Path(__file__).with_name("dashboard.json").read_text())
