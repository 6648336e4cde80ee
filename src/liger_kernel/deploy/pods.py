"""What both versions of Flyte need of a job: its pod as the Kubernetes client's object, and the variables of elastic training."""

from __future__ import annotations

from typing import Any

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import bare_pod
from liger_kernel.train import ranks

ELASTIC = ranks.ELASTIC


def pod_spec(job: Job) -> Any:
    """A ``V1PodSpec`` whose container ``primary`` has the job's volumes, variables and confinement."""
    from kubernetes import client

    api = client.ApiClient()
    return api._ApiClient__deserialize(bare_pod(job, "primary"), "V1PodSpec")
