"""What both versions of Flyte need of a job: its pod as the Kubernetes client's object, and the variables of elastic training."""

from __future__ import annotations

from typing import Any

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import bare_pod
from liger_kernel.train import ranks

ELASTIC = ranks.ELASTIC


def pod_spec(job: Job, **variables: str) -> Any:
    """A ``V1PodSpec`` whose container ``primary`` has the job's volumes, confinement and variables, and ``variables``."""
    from kubernetes import client

    spec = bare_pod(job, "primary")
    spec["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    return client.ApiClient()._ApiClient__deserialize(spec, "V1PodSpec")
