"""The workflow of ``flyte2.py`` for clusters that still run Flyte 1:

    LIGER_JOB=job.yaml PYTHONPATH=. pyflyte run liger_kernel/deploy/flyte1.py pipeline
    LIGER_JOB=job.yaml pyflyte --pkgs liger_kernel.deploy.flyte1 package \\
        --image IMAGE --output workflow.tgz
"""

# Flyte 1 stays as long as it is maintained: flytekit 1.16.31, and the branch master of its back end

import json
import os
from pathlib import Path
from tempfile import mkdtemp

from flytekit import Deck, PodTemplate, Resources, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy

from liger_kernel.deploy import steps
from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import elastic, pod_spec
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.ranks import ELASTIC

job = Job.of_environment()
# torchelastic's agent reads them, and it runs in this process
for name, value in ELASTIC.items():
    os.environ.setdefault(name, value)


def pods(gpus: int) -> dict:
    """Pods with the job's image and resources, and ``gpus`` of its GPUs."""
    size = Resources(cpu=job.cpu, mem=job.memory, gpu=str(gpus) if gpus else None)
    template = PodTemplate(primary_container_name="primary", pod_spec=pod_spec(job, LIGER_JOB=job.to_json()))
    return {"container_image": job.image, "requests": size, "limits": size, "pod_template": template}


@task(**pods(0))
def prepare(config: TrainConfig) -> FlyteDirectory:
    """Return tokenised rows and their tokenizer."""
    return FlyteDirectory(path=str(steps.prepare(config, Path(mkdtemp()) / "data")))


@task(**pods(0))
def warm(config: TrainConfig) -> FlyteDirectory:
    """Return compiled kernels. This needs no GPU."""
    return FlyteDirectory(path=str(steps.warm(config, job.arch if job.gpus else None, Path(mkdtemp()) / "kernels")))


@task(
    **pods(job.gpus),
    task_config=Elastic(
        **elastic(job),
        rdzv_configs={"timeout": 900, "join_timeout": 900},
        increase_shared_mem=False,  # shared_memory sets it
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING, backoff_limit=job.retries),
    ),
    shared_memory=job.shm,
    retries=job.retries,
    interruptible=True,
)
def train(config: TrainConfig, data: FlyteDirectory, kernels: FlyteDirectory) -> FlyteDirectory:
    """Run one rank of the training. Rank 0 returns the model and the metrics."""
    return FlyteDirectory(path=str(steps.train(config, Path(data.download()), Path(kernels.download()), job.processes)))


@task(**pods(min(1, job.gpus)), enable_deck=True)
def evaluate(config: TrainConfig, data: FlyteDirectory, run: FlyteDirectory) -> str:
    """Return the scores of the saved model as JSON. The deck shows the run's curves."""
    folder = Path(run.download())
    scores = steps.evaluate(config, Path(data.download()), folder)
    Deck("liger train", steps.report(folder, scores))
    return json.dumps(scores)


@task(**pods(0))
def export(run: FlyteDirectory, scores: str, target: str) -> str:
    """Copy the model to ``target`` if that is not empty, and return its place."""
    folder = Path(run.download())
    return steps.export(folder, json.loads(scores), target) if target else run.path


@workflow
def pipeline(config: TrainConfig = job.config, target: str = "") -> str:
    """Run all steps and return the scores as JSON. ``target``: a URI to which the model is
    copied in addition to Flyte's own store."""
    data = prepare(config=config)
    run = train(config=config, data=data, kernels=warm(config=config))
    scores = evaluate(config=config, data=data, run=run)
    export(run=run, scores=scores, target=target)
    return scores
