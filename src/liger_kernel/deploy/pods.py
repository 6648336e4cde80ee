"""A job's pod as the Kubernetes client's object, which both versions of Flyte take."""

from __future__ import annotations

import json
from typing import Any

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import bare_pod


def pod_spec(job: Job, **variables: str) -> Any:
    """A ``V1PodSpec`` whose container ``primary`` has the job's volumes, confinement and variables, and ``variables``."""
    from kubernetes import client

    spec = bare_pod(job, "primary")
    spec["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    return client.ApiClient().deserialize(json.dumps(spec), "V1PodSpec", "application/json")
