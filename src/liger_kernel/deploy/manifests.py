"""A job as Kubernetes objects: the pods, the queue, restarts, the network policy and monitoring.

``objects.json`` has them, with marks such as ``@name@`` in the place of values: fields of the job, and
what follows from them. What is None for a job, it does not set.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import (
    API,
    CACHE,
    CONFIG,
    EFA_RESOURCES,
    IMAGE_KERNELS,
    METRICS_PORT,
    MOUNTS,
    RENDEZVOUS_PORT,
    ROLE,
    Job,
)

Object = dict[str, Any]

STARTUP = 3600  # seconds for downloads, tokenising and loading, before the metrics endpoint answers
PREEMPTED = 75  # train.ranks.EXIT_PREEMPTED; that module needs torch, this one must not
USER = 1000
FORMS: Object = json.loads(Path(__file__).with_name("objects.json").read_text())
# kind of job -> its objects, the run last, and where its processes meet.
# A PyTorchJob has any number of workers between two limits and no master (c10d), and restarts them
# OnFailure, not by ExitCode, which treats codes below 128 as final, but 75 means "run again". If a pod of
# the others fails or is evicted, its Job fails, and the JobSet starts all pods again. The controller of a
# TrainingRuntime sets the number of pods from numNodes.
RUNS = {
    "pytorchjob": (("PyTorchJob",), f"{{0}}-worker-0:{RENDEZVOUS_PORT}"),
    "trainjob": (("TrainingRuntime", "TrainJob"), "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
    "jobset": (("JobSet",), f"{{0}}-node-0-0.{{0}}:{RENDEZVOUS_PORT}"),
}


def objects(job: Job, limits: dict[str, Any] | None = None) -> list[Object]:
    """All objects that the job needs on a cluster with its operators, in the order for applying
    them. ``limits``: alert thresholds (default: the job's)."""
    values = _values(job)
    own = lambda kind, added=None: _object(kind, job, _filled(FORMS[kind], values), added)
    found = [own("ConfigMap")]
    if job.role:
        found.append(own("ServiceAccount"))
        found[-1]["metadata"]["annotations"] = {ROLE: job.role} | job.annotations
    found += [*_queue(job), own("NetworkPolicy")]
    if job.metrics:
        values["rules"] = monitoring.rules(job, limits)
        found += [own(kind, job.monitor_labels) for kind in ("PodMonitor", "PrometheusRule")]
    queued = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    framework = {"trainer.kubeflow.org/framework": "torch"}
    return found + [own(kind, framework if kind == "TrainingRuntime" else queued) for kind in RUNS[job.kind][0]]


def _filled(part: Any, values: Object) -> Any:
    """A part of ``FORMS`` with its values, without those that are None."""
    if isinstance(part, str) and part[0] == part[-1] == "@":
        return values[part[1:-1]]
    if isinstance(part, list):
        return [found for each in part if (found := _filled(each, values)) is not None]
    if isinstance(part, dict):
        return {name: found for name, each in part.items() if (found := _filled(each, values)) is not None}
    return part


def _values(job: Job) -> Object:
    """Of the marks in ``FORMS``: the fields of the job, and what follows from them."""
    ports = range(METRICS_PORT, METRICS_PORT + job.processes)
    least, of_jobset = job.min_nodes or job.nodes, job.kind == "jobset"
    values: Object = vars(job) | {
        "own": labels(job),
        "config": train_json(job),
        "user": USER,
        "preempted": PREEMPTED,
        "trainer": trainer(job),
        "processes": job.processes,
        "nproc": str(job.processes),
        "least": least,
        "restarts": job.train.max_restarts,
        "suspend": bool(job.queue),
        "group": API["TrainingRuntime"].partition("/")[0],
        "parallelism": job.nodes if of_jobset else None,
        "completion_mode": "Indexed" if of_jobset else None,
        "restart_policy": None if job.kind == "pytorchjob" else "Never",
        "first_port": ports[0],
        "last_port": ports[-1],
        "variables": _environment(job),
        "secrets": [{"secretRef": {"name": job.secret}}] if job.secret else None,
        "pod_labels": labels(job) | job.labels,
        "pod_annotations": job.annotations or None,
        "account": job.service_account or (job.name if job.role else None),
        "pulls": [{"name": name} for name in job.pull_secrets] or None,
        "selected": job.node_selector or None,
    }
    form = lambda name, **more: _filled(FORMS[name], values | more)
    values["scraped"] = form("scraped") if job.metrics else None
    named = [{"targetLabel": "run", "replacement": job.name}]
    names = {f"metrics-{i}": port for i, port in enumerate(ports)}
    values["endpoints"] = [{"port": name, "interval": "15s", "relabelings": named} for name in names]
    eks = [{"key": job.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}] if job.overlay == "eks" else []
    values["tolerated"] = (job.tolerations + (eks if job.gpus else [])) or None
    volumes = form("volumes", shared=form("shared") if job.volume else None)
    mounts: list[Object] = [{"name": volume["name"], "mountPath": MOUNTS[volume["name"]]} for volume in volumes]
    mounts[list(MOUNTS).index("config")]["readOnly"] = True
    values |= {"volumes": volumes + job.extra_volumes, "mounts": mounts + job.extra_mounts}
    values |= {"command": ["liger"], "ports": None, "startup": None, "liveness": None}
    # compiling needs no GPU
    warm = {"args": ["warmup", "--config", CONFIG, "--arch", job.arch], "limits": _resources(job, devices=False)}
    warms = job.gpus and job.arch and job.train.model and job.train.kernels == "on"
    values["warms"] = [form("container", container="warm-kernels", **warm)] if warms else None
    flags = ["--nproc", str(job.processes), "--nnodes", f"{least}:{job.nodes}"]
    meet = RUNS[job.kind][1].format(job.name)
    values |= {"args": ["train", "--config", CONFIG, *flags, "--rdzv-endpoint", meet], "limits": _resources(job)}
    # a TrainJob itself has what its runtime's containers run
    node: Object = {"command": None, "args": None} if job.kind == "trainjob" else {}
    if job.metrics:
        # the trainer ends itself if it makes no progress, and workers that restart have no endpoint for
        # a while: the kubelet must be the slower of the two
        patience = math.ceil(job.train.timeout / 30) + 4
        node["ports"] = [{"name": name, "containerPort": port} for name, port in names.items()]
        node |= {"startup": form("probe", period=10, failures=STARTUP // 10)}
        node |= {"liveness": form("probe", period=30, failures=patience)}
    values["trains"] = form("container", container=trainer(job), **node)
    values["pod"] = form("pod")
    return values | {name: form(name) for name in ("node", "failure_policy")}


def trainer(job: Job) -> str:
    """The name of the container that trains. Controllers look for theirs."""
    return "pytorch" if job.kind == "pytorchjob" else "node"


def pod_spec(job: Job, **variables: str) -> Any:
    """A ``V1PodSpec`` for a platform that adds command, image and resources. Its container
    ``primary`` has the job's volumes, security context and environment variables, and also
    ``variables``."""
    from kubernetes import client

    spec = _values(dataclasses.replace(job, arch=None))["pod"]["spec"] | {"restartPolicy": None}
    node = spec["containers"][0]
    # the platform has its own configuration, and its own size of /dev/shm
    kept = lambda found: [each for each in found if each["name"] not in ("config", "shm")]
    bare = {"name": "primary", **{name: node[name] for name in ("envFrom", "securityContext") if name in node}}
    bare["env"] = node["env"] + [{"name": name, "value": value} for name, value in variables.items()]
    spec["containers"] = [{**bare, "volumeMounts": kept(node["volumeMounts"])}]
    spec["volumes"] = kept(spec["volumes"])
    return client.ApiClient().deserialize(json.dumps(spec), "V1PodSpec", "application/json")


def elastic(job: Job) -> dict[str, Any]:
    """Arguments of Flyte's ``Elastic``: machines, processes on each, restarts."""
    nodes = job.nodes if job.min_nodes in (None, job.nodes) else f"{job.min_nodes}:{job.nodes}"
    return {"nnodes": nodes, "nproc_per_node": job.processes, "max_restarts": job.train.max_restarts}


def _environment(job: Job) -> list[Object]:
    values = {
        "HOME": CACHE,  # the root file system is read-only
        "HF_HOME": f"{CACHE}/huggingface",
        "TRITON_CACHE_DIR": f"{CACHE}/triton",
        "LIGER_TRITON_BASE_CACHE": IMAGE_KERNELS,
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(
            job.grace - 30
        ),  # the launcher waits for the last checkpoint, but not as long as the kubelet
        "PYTHONUNBUFFERED": "1",
    }
    if job.kind != "pytorchjob":  # PyTorchJob's operator sets it to rdzvId
        values["PET_RDZV_ID"] = job.name
    if job.efa:
        values["FI_PROVIDER"] = "efa"
    return [{"name": name, "value": str(value)} for name, value in (values | job.environment).items()]


def _resources(job: Job, devices: bool = True) -> Object:
    """The limits, which are also the requests, so that the pod is evicted last."""
    limits = {"cpu": job.cpu, "memory": job.memory}
    if job.gpus and devices:
        limits[job.gpu_resource] = str(job.gpus)
    if job.efa and devices:
        limits |= dict(zip(EFA_RESOURCES, (str(job.efa), "5120Mi")))
    if devices:
        limits |= job.resources
    return {"limits": limits, "requests": dict(limits)}


def train_json(job: Job) -> str:
    """The JSON file for ``liger train --config`` in a pod, or anywhere else."""
    return json.dumps(dataclasses.asdict(job.config), indent=2) + "\n"


def _queue(job: Job) -> list[Object]:
    """Kueue's objects. Usually the cluster's administrator has created them."""
    if not job.cluster_queue:
        return []
    values, flavor = vars(job), f"{job.cluster_queue}-nodes"
    names: Object = {"LocalQueue": {"name": job.queue, "namespace": job.namespace}}
    if job.quota_nodes:
        counted = _resources(job)["limits"]
        quotas = [{"name": name, "nominalQuota": times(size, job.quota_nodes)} for name, size in counted.items()]
        values = values | {"flavor": flavor, "counted": list(counted), "quotas": quotas}
        names = {"ResourceFlavor": {"name": flavor}, "ClusterQueue": {"name": job.cluster_queue}} | names
    return [_of_kind(kind, metadata, _filled(FORMS[kind], values)) for kind, metadata in names.items()]


def times(quantity: str, count: int) -> str:
    """A Kubernetes quantity multiplied by ``count``: twice 256Gi is 512Gi."""
    digits = len(quantity) - len(quantity.lstrip("0123456789"))
    return f"{int(quantity[:digits]) * count}{quantity[digits:]}"


def labels(job: Job) -> dict[str, str]:
    """Which objects and pods are of this job."""
    return {"app.kubernetes.io/name": "liger-train", "app.kubernetes.io/instance": job.name}


def _object(kind: str, job: Job, form: Object, added: dict[str, str] | None) -> Object:
    """An object of the job's own, with ``added`` labels."""
    names = {"name": job.name, "namespace": job.namespace, "labels": labels(job) | job.labels | (added or {})}
    return _of_kind(kind, names | ({"annotations": job.annotations} if job.annotations else {}), form)


def _of_kind(kind: str, metadata: Object, form: Object) -> Object:
    return {"apiVersion": API[kind], "kind": kind, "metadata": metadata, **form}
