"""A job as Kubernetes objects: the pods, the queue, restarts, the network policy and monitoring."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
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


def objects(job: Job, limits: dict[str, Any] | None = None) -> list[Object]:
    """All objects that the job needs on a cluster with its operators, in the order for applying
    them. ``limits``: alert thresholds (default: the job's)."""
    config = _object("ConfigMap", job, data={"train.json": train_json(job)})
    found = [config, *_service_account(job), *_queue(job), _network_policy(job)]
    if job.metrics:
        rules = monitoring.rules(job, limits=limits)
        found += [_pod_monitor(job), _object("PrometheusRule", job, job.monitor_labels, spec=rules)]
    return found + RUNS[job.kind](job)


def _pytorchjob(job: Job) -> list[Object]:
    spec = {
        "nprocPerNode": str(job.processes),
        # c10d: any number of workers between the two limits, and no master
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "rdzvId": job.name,
            "minReplicas": _least(job),
            "maxReplicas": job.nodes,
            "maxRestarts": job.train.max_restarts,
        },
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.retries, "suspend": bool(job.queue)},
        "pytorchReplicaSpecs": {
            # OnFailure, not ExitCode: ExitCode treats codes below 128 as final, but 75 means "run
            # again"
            "Worker": {
                "replicas": job.nodes,
                "restartPolicy": "OnFailure",
                "template": _template(job, trainer(job), f"{job.name}-worker-0"),
            }
        },
    }
    return [_object("PyTorchJob", job, _queued(job), spec=spec)]


def _trainjob(job: Job) -> list[Object]:
    # the controller of the runtime sets the number of pods from numNodes
    node = _node(job, "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    container = node["template"]["spec"]["containers"][0]
    moved = {name: container.pop(name) for name in ("command", "args")}
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    replicated = [{"name": "node", "template": {"metadata": step, "spec": node}}]
    template = {"spec": {"failurePolicy": _failure_policy(job), "replicatedJobs": replicated}}
    of_runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": template}
    runtime = _object("TrainingRuntime", job, {"trainer.kubeflow.org/framework": "torch"}, spec=of_runtime)
    spec = {
        "suspend": bool(job.queue),
        "runtimeRef": {
            "apiGroup": API["TrainingRuntime"].partition("/")[0],
            "kind": "TrainingRuntime",
            "name": job.name,
        },
        "trainer": {
            "numNodes": job.nodes,
            "numProcPerNode": job.processes,
            "image": job.image,
            **moved,
            "resourcesPerNode": _resources(job),
        },
    }
    return [runtime, _object("TrainJob", job, _queued(job), spec=spec)]


def _jobset(job: Job) -> list[Object]:
    size = {"parallelism": job.nodes, "completions": job.nodes, "completionMode": "Indexed"}
    node = size | _node(job, f"{job.name}-node-0-0.{job.name}", str(RENDEZVOUS_PORT))
    spec = {
        "suspend": bool(job.queue),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": node}}],
    }
    return [_object("JobSet", job, _queued(job), spec=spec)]


RUNS: dict[str, Callable[[Job], list[Object]]] = {"pytorchjob": _pytorchjob, "trainjob": _trainjob, "jobset": _jobset}


def trainer(job: Job) -> str:
    """The name of the container that trains. Controllers look for theirs."""
    return "pytorch" if job.kind == "pytorchjob" else "node"


def _node(job: Job, host: str, port: str) -> Object:
    """The specification of a Job with a pod for each node. If a pod fails or is evicted, its Job
    fails, and the JobSet starts all pods again."""
    template = _template(job, trainer(job), host, port)
    template["spec"]["restartPolicy"] = "Never"
    preempted = {"containerName": trainer(job), "operator": "In", "values": [PREEMPTED]}
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": preempted},
    ]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}, "template": template}


def _failure_policy(job: Job) -> Object:
    rule = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": job.retries, "restartStrategy": "Recreate", "rules": [rule]}


def _template(job: Job, container: str, host: str, port: str = str(RENDEZVOUS_PORT)) -> Object:
    sources: dict[str, Object] = {
        "cache": {"emptyDir": {"sizeLimit": job.cache}},
        "tmp": {"emptyDir": {}},
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
        "config": {"configMap": {"name": job.name}},
    }
    if job.volume:
        sources["shared"] = {"persistentVolumeClaim": {"claimName": job.volume}}
    volumes = [{"name": name, **source} for name, source in sources.items()] + job.extra_volumes
    mounts: list[Object] = [{"name": name, "mountPath": MOUNTS[name]} for name in sources]
    mounts[list(sources).index("config")]["readOnly"] = True
    mounts += job.extra_mounts
    common = {
        "image": job.image,
        "env": _environment(job),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "envFrom": [{"secretRef": {"name": job.secret}}] if job.secret else None,
        "command": ["liger"],
    }
    machines = f"{_least(job)}:{job.nodes}"
    flags = ["--nproc", str(job.processes), "--nnodes", machines, "--rdzv-endpoint", f"{host}:{port}"]
    node = {
        "name": container,
        **common,
        "args": ["train", "--config", CONFIG, *flags],
        "resources": _resources(job),
        **(_metrics_and_probes(job) if job.metrics else {}),
    }
    warm = {
        "name": "warm-kernels",
        **common,
        "args": ["warmup", "--config", CONFIG, "--arch", job.arch],
        "resources": _resources(job, devices=False),  # compiling needs no GPU
    }
    warms = job.gpus and job.arch and job.train.model and job.train.kernels == "on"
    tolerations = list(job.tolerations)
    if job.overlay == "eks" and job.gpus:
        tolerations.append({"key": job.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    user = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER)
    spec = {
        "terminationGracePeriodSeconds": job.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_set(node)],
        "volumes": volumes,
        "initContainers": [_set(warm)] if warms else None,
        "serviceAccountName": job.service_account or (job.name if job.role else None),
        "priorityClassName": job.priority_class,
        "imagePullSecrets": [{"name": name} for name in job.pull_secrets] or None,
        "nodeSelector": job.node_selector or None,
        "tolerations": tolerations or None,
    }
    return {"metadata": {"labels": labels(job) | job.labels, **_annotated(job)}, "spec": _set(spec)}


def _set(o: Object) -> Object:
    """``o`` without the names that a job does not set."""
    return {name: value for name, value in o.items() if value is not None}


def _metrics_and_probes(job: Job) -> Object:
    probe = {"httpGet": {"path": "/healthz", "port": METRICS_PORT}, "timeoutSeconds": 5}
    # the trainer ends itself if it makes no progress, and workers that restart have no endpoint for
    # a while: the kubelet must be the slower of the two
    patience = math.ceil(job.train.timeout / 30) + 4
    return {
        "ports": [{"name": f"metrics-{i}", "containerPort": METRICS_PORT + i} for i in range(job.processes)],
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": STARTUP // 10},
        "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": patience},
    }


def pod_spec(job: Job, **variables: str) -> Any:
    """A ``V1PodSpec`` for a platform that adds command, image and resources. Its container
    ``primary`` has the job's volumes, security context and environment variables, and also
    ``variables``."""
    from kubernetes import client

    spec = _template(dataclasses.replace(job, arch=None), "primary", "")["spec"]
    node = spec["containers"][0]
    # the platform has its own configuration, and its own size of /dev/shm
    kept = lambda found: [each for each in found if each["name"] not in ("config", "shm")]
    bare = {name: value for name, value in node.items() if name in ("name", "envFrom", "securityContext")}
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


def _service_account(job: Job) -> list[Object]:
    if not job.role:
        return []
    account = _object("ServiceAccount", job, automountServiceAccountToken=False)
    account["metadata"]["annotations"] = {ROLE: job.role} | job.annotations
    return [account]


def _queue(job: Job) -> list[Object]:
    """Kueue's objects. Usually the cluster's administrator has created them."""
    found: list[Object] = []
    if job.quota_nodes:
        flavor = f"{job.cluster_queue}-nodes"
        found.append(_of_kind("ResourceFlavor", {"name": flavor}, spec={"nodeLabels": job.node_selector}))
        quotas = [
            {"name": name, "nominalQuota": times(quantity, job.quota_nodes)}
            for name, quantity in _resources(job)["limits"].items()
        ]
        groups = [{"coveredResources": [q["name"] for q in quotas], "flavors": [{"name": flavor, "resources": quotas}]}]
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": groups,
        }
        found.append(_of_kind("ClusterQueue", {"name": job.cluster_queue}, spec=spec))
    if job.cluster_queue:
        metadata = {"name": job.queue, "namespace": job.namespace}
        found.append(_of_kind("LocalQueue", metadata, spec={"clusterQueue": job.cluster_queue}))
    return found


def times(quantity: str, count: int) -> str:
    """A Kubernetes quantity multiplied by ``count``: twice 256Gi is 512Gi."""
    digits = len(quantity) - len(quantity.lstrip("0123456789"))
    return f"{int(quantity[:digits]) * count}{quantity[digits:]}"


def _network_policy(job: Job) -> Object:
    """Ingress: from its own pods, and from Prometheus to the metrics. Egress: to its own pods,
    DNS, and HTTPS for models, data and the object store."""
    own = {"podSelector": {"matchLabels": labels(job)}}
    ingress: list[Object] = [{"from": [own]}]
    if job.metrics:
        prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.monitoring_namespace}}}
        ports = [{"protocol": "TCP", "port": METRICS_PORT, "endPort": METRICS_PORT + job.processes - 1}]
        ingress.append({"from": [prometheus], "ports": ports})
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress = [{"to": [own]}, {"ports": dns}, {"ports": [{"protocol": "TCP", "port": 443}]}]
    spec = {
        "podSelector": {"matchLabels": labels(job)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return _object("NetworkPolicy", job, spec=spec)


def _pod_monitor(job: Job) -> Object:
    named = [{"targetLabel": "run", "replacement": job.name}]
    endpoints = [{"port": f"metrics-{i}", "interval": "15s", "relabelings": named} for i in range(job.processes)]
    spec = {"selector": {"matchLabels": labels(job)}, "podMetricsEndpoints": endpoints}
    return _object("PodMonitor", job, job.monitor_labels, spec=spec)


def labels(job: Job) -> dict[str, str]:
    """Which objects and pods are of this job."""
    return {"app.kubernetes.io/name": "liger-train", "app.kubernetes.io/instance": job.name}


def _annotated(job: Job) -> Object:
    return {"annotations": job.annotations} if job.annotations else {}


def _object(kind: str, job: Job, added: dict[str, str] | None = None, **rest: Any) -> Object:
    """An object of the job's own, with ``added`` labels."""
    names = {"name": job.name, "namespace": job.namespace, "labels": labels(job) | job.labels | (added or {})}
    return _of_kind(kind, names | _annotated(job), **rest)


def _of_kind(kind: str, metadata: Object, **rest: Any) -> Object:
    return {"apiVersion": API[kind], "kind": kind, "metadata": metadata, **rest}


def _queued(job: Job) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}


def _least(job: Job) -> int:
    return job.min_nodes or job.nodes
