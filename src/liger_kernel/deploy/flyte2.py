"""A Flyte 2 workflow of the job that LIGER_JOB describes: prepare the data, warm the kernels, train
elastically, evaluate, export.

    LIGER_JOB=job.yaml flyte run --local liger_kernel/deploy/flyte2.py pipeline --out runs/here
    LIGER_JOB=job.yaml flyte run liger_kernel/deploy/flyte2.py pipeline \\
        --target s3://models/llama-sft

LIGER_JOB is the job's file, or in pods the job itself as JSON. A task's image, nodes and processes
must be known wherever this module is imported.
"""

import dataclasses
import json
import random
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import flyte
import flyte.report
from flyte.io import Dir
from flyteplugins.pytorch import Elastic
from flyteplugins.pytorch.task import RunPolicy

from liger_kernel.deploy import steps
from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import elastic, pod_spec
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.ranks import ELASTIC

job = Job.of_environment()
variables = {"LIGER_JOB": job.to_json(), **ELASTIC}


def environment(name: str, gpus: int, **more: Any) -> flyte.TaskEnvironment:
    """Pods with the job's image and resources, and ``gpus`` of its GPUs."""
    return flyte.TaskEnvironment(
        name=f"{job.name}-{name}",
        image=flyte.Image.from_base(job.image),
        resources=flyte.Resources(cpu=job.cpu, memory=job.memory, gpu=gpus or None, shm=job.shm),
        env_vars=variables,
        pod_template=flyte.PodTemplate(pod_spec=pod_spec(job), primary_container_name="primary"),
        **more,
    )


ranks = environment(
    "train",
    job.gpus,
    interruptible=True,
    plugin_config=Elastic(
        **elastic(job),
        nccl_async_error_handling=True,
        run_policy=RunPolicy(clean_pod_policy="Running", backoff_limit=job.retries),
    ),
)
one = environment("evaluate", min(1, job.gpus))
none = environment("steps", 0)
driver = flyte.TaskEnvironment(
    name=job.name,
    image=flyte.Image.from_base(job.image),
    resources=flyte.Resources(cpu=1, memory="2Gi"),
    env_vars=variables,
    depends_on=[ranks, one, none],
)


@none.task
def prepare(config: TrainConfig) -> Dir:
    """Return tokenised rows and their tokenizer."""
    return Dir.from_local_sync(str(steps.prepare(config, Path(mkdtemp()) / "data")))


@none.task
def warm(config: TrainConfig) -> Dir:
    """Return compiled kernels. This needs no GPU."""
    return Dir.from_local_sync(str(steps.warm(config, job.arch if job.gpus else None, Path(mkdtemp()) / "kernels")))


@ranks.task(retries=job.retries)
def train(config: TrainConfig, data: Dir, kernels: Dir) -> Dir | None:
    """Run one rank of the training. Rank 0 returns the model and the metrics."""
    rows = steps.once(data.path, lambda folder: data.download_sync(local_path=folder))
    compiled = steps.once(kernels.path, lambda folder: kernels.download_sync(local_path=folder))
    run = steps.train(config, rows, compiled, job.processes)
    # the ranks of every attempt are forked with the same random state, and Flyte derives the folder
    # of its result from it
    random.seed()
    return Dir.from_local_sync(str(run)) if steps.first() else None


@one.task(report=True)
def evaluate(config: TrainConfig, data: Dir, run: Dir) -> str:
    """Return the scores of the saved model as JSON. The report shows the run's curves."""
    rows = steps.once(data.path, lambda folder: data.download_sync(local_path=folder))
    folder = steps.once(run.path, lambda folder: run.download_sync(local_path=folder))
    scores = steps.evaluate(config, rows, folder)
    flyte.report.replace(steps.report(folder, scores), do_flush=True)
    return json.dumps(scores)


@none.task
def export(run: Dir, scores: str, target: str) -> str:
    """Copy the model to ``target``, and return its place."""
    return steps.export(
        steps.once(run.path, lambda folder: run.download_sync(local_path=folder)), json.loads(scores), target
    )


@driver.task
def pipeline(config: TrainConfig = job.config, target: str = "", out: str = "") -> str:
    """Run all steps; returns the scores as JSON. ``target``: a URI for a copy of the model.
    ``out``: a folder to use instead of the pods' own."""
    if out:
        config = dataclasses.replace(config, out=out, cache=None)
    data = prepare(config)
    run = train(config, data, warm(config))
    scores = evaluate(config, data, run)
    if target:
        export(run, scores, target)
    return scores
