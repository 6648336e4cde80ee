"""A job's pod as an object of the Kubernetes client, which both versions of Flyte accept."""

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
