"""Run a training job on a cluster: one job becomes Kubernetes objects, a Helm chart and alerts.
Flyte workflows call the same runtime layer."""

from liger_kernel.deploy.job import Job

__all__ = ["Job"]
