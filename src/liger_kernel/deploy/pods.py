"""What both versions of Flyte accept: a job's pod as an object of the Kubernetes client, and sizes of
elastic training."""

from __future__ import annotations

import json
from typing import Any

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import bare_pod


def pod_spec(job: Job, **variables: str) -> Any:
    """A ``V1PodSpec``. Its container ``primary`` has the job's volumes, security context and
    environment variables, and also ``variables``."""
    from kubernetes import client

    spec = bare_pod(job, "primary")
    spec["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    return client.ApiClient().deserialize(json.dumps(spec), "V1PodSpec", "application/json")


def elastic(job: Job) -> dict[str, Any]:
    """Arguments of Flyte's ``Elastic``: machines, processes on each, restarts."""
    nodes = job.nodes if job.min_nodes in (None, job.nodes) else f"{job.min_nodes}:{job.nodes}"
    return {"nnodes": nodes, "nproc_per_node": job.processes, "max_restarts": job.train.max_restarts}
