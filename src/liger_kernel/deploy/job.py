"""A job on a cluster: one dataclass from which every manifest, chart and rule is rendered."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.config import TrainConfig, UserError, checked, read_file
from liger_kernel.train.redact import holds_credential

# API versions of the cluster's operators. No other source file names them (docs/guides/clusters.md
# says which operators have them)
API = {
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LocalQueue": "kueue.x-k8s.io/v1beta2",
    "ClusterQueue": "kueue.x-k8s.io/v1beta2",
    "ResourceFlavor": "kueue.x-k8s.io/v1beta2",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
}
KUBERNETES = "1.29"  # the oldest supported version

KINDS = ("pytorchjob", "trainjob", "jobset")
OVERLAYS = ("plain", "eks")

METRICS_PORT = 9400
RENDEZVOUS_PORT = 29400
SHARED = "/shared"  # the mount point of the volume that all nodes share
CONFIG = "/etc/liger/train.json"
CACHE = "/cache"  # a folder on the node, for kernels and downloads
IMAGE_KERNELS = "/opt/liger/kernels"  # where deploy/Dockerfile puts kernels that were compiled in advance


# The forms of Kubernetes' names (RFC 1123), labels and quantities, as regular expressions that JSON
# Schema also accepts, each with its meaning in words
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_DOMAIN}/)?{_WORD}"
_NAME = (_LABEL, "at most 63 of a-z, 0-9 and -, no - at an end")
_BYTES = ("[1-9][0-9]{0,14}([kMGTPE]|[KMGTPE]i)?", "a number of bytes, such as 16Gi")
SHAPES = {
    "name": (
        "[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
        "at most 40 of a-z, 0-9 and -, a letter first",
    ),  # pods are called NAME-worker-0: a label has 63 characters
    "image": ("[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}", "an image's name, such as registry.example.com/liger:1"),
    "namespace": _NAME,
    "monitoring_namespace": _NAME,
    "queue": _NAME,
    "cluster_queue": _NAME,
    "volume": _NAME,
    "secret": _NAME,
    "gpu_resource": (_KEY, "the name of a resource, such as nvidia.com/gpu"),
    "arch": ("(sm|gfx)[0-9a-z]{2,6}", "an architecture, such as sm90"),
    "cpu": ("[1-9][0-9]{0,8}m?", "a number of cores, such as 32 or 500m"),
    "memory": _BYTES,
    "shm": _BYTES,
    "cache": _BYTES,
    "priority_class": (_DOMAIN, "the name of a PriorityClass"),
    "service_account": (_DOMAIN, "the name of a ServiceAccount"),
    "role": (r"arn:[a-z-]+:iam::[0-9]{1,12}:role/[A-Za-z0-9_+=,.@/-]{1,512}", "the ARN of an IAM role"),
}
ROLE = "eks.amazonaws.com/role-arn"  # the annotation
EFA_RESOURCES = ("vpc.amazonaws.com/efa", "hugepages-2Mi")
LIMITS = {  # smallest and largest numbers; a pod has a port and a metrics endpoint for each GPU
    "nodes": (1, 10_000),
    "min_nodes": (1, 10_000),
    "gpus": (0, 64),
    "retries": (0, 1_000_000),
    "grace": (60, 604_800),
    "efa": (0, 64),
    "quota_nodes": (1, 100_000),
    "checkpoint_age": (1, 31_536_000),
}
VOLUME = _NAME
PULL_SECRET = (_DOMAIN, "the name of a Secret")
RESOURCE = (
    f"{_DOMAIN}/{_WORD}|ephemeral-storage|hugepages-[1-9][0-9]*[KMG]i",
    "the name of a resource, such as rdma/ib",
)
_STEP = r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]*"  # a part of a path: neither . nor ..; Helm's schemas know no lookahead
SUB_PATH = (f"{_STEP}(/+{_STEP})*/?", "a relative path without ..")
QUANTITY = ("[1-9][0-9]{0,14}(m|[kMGTPE]|[KMGTPE]i)?", "a quantity, such as 8 or 100Gi, quoted")
LABEL = (_KEY, "as Kubernetes has them, such as example.com/pool")
LABEL_VALUE = (
    f"({_WORD})?",
    "text of at most 63 letters, digits and -_., quoted where YAML would take it for a number",
)
OUR_LABELS = (  # labels that manifests or a chart set
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
    "kueue.x-k8s.io/queue-name",
)
OUR_VOLUMES = ("cache", "tmp", "shm", "config", "shared")
OUR_MOUNTS = (
    "/dev/shm",
    str(Path(CONFIG).parent),
    "/tmp",
    CACHE,
    SHARED,
)  # volumes of a user's may be below the last three
MOUNT = (f"/{SUB_PATH[0]}", "an absolute path without ..")
TOLERATION = {
    "key": (_KEY, "a key of a taint"),
    "operator": ("Exists|Equal", "Exists or Equal"),
    "value": (f"({_WORD})?", "a value of a taint"),
    "effect": ("NoSchedule|PreferNoSchedule|NoExecute", "NoSchedule, PreferNoSchedule or NoExecute"),
}


@dataclass
class Job:
    """A training run on ``nodes`` machines with ``gpus`` GPUs each. Every field is a name in the
    job's file; ``train`` holds the names of ``liger train``."""

    name: str
    image: str  # with a tag or a digest
    train: TrainConfig
    kind: str = "pytorchjob"  # elastic (Kubeflow training-operator 1.9), trainjob (Kubeflow Trainer 2), or jobset
    overlay: str = "plain"
    namespace: str = "default"
    nodes: int = 1
    min_nodes: int | None = (
        None  # pytorchjob: training continues with so many nodes when machines are lost (default: all)
    )
    gpus: int = 8  # per node; 0 trains on CPUs
    gpu_resource: str = "nvidia.com/gpu"
    arch: str | None = (
        "sm90"  # the GPU for which the init container compiles kernels; with None, the first step compiles them
    )
    cpu: str = "32"  # per node
    memory: str = "256Gi"  # per node, including /dev/shm
    shm: str = "16Gi"  # size of /dev/shm
    cache: str = "50Gi"  # scratch on the node: compiled kernels, downloaded models
    volume: str | None = None  # PersistentVolumeClaim that all nodes can write to (ReadWriteMany), mounted at /shared
    queue: str | None = None  # Kueue's LocalQueue
    cluster_queue: str | None = None  # also render that LocalQueue, for this ClusterQueue
    quota_nodes: int | None = None  # also render that ClusterQueue, with a quota for so many nodes
    retries: int = 10  # of the whole job; preemptions do not count if the kind of job can distinguish them
    grace: int = 180  # seconds from SIGTERM to SIGKILL: must exceed two steps and a checkpoint
    secret: str | None = None  # Secret whose keys become environment variables, such as HF_TOKEN
    environment: dict = field(default_factory=dict)
    node_selector: dict = field(default_factory=dict)
    tolerations: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)  # added to every object and pod
    annotations: dict = field(default_factory=dict)  # added to every object and pod
    pull_secrets: list = field(default_factory=list)  # names of Secrets with which nodes pull the image
    priority_class: str | None = None  # of pods
    service_account: str | None = None  # of pods; it must exist. The overlay eks creates its own for role
    resources: dict = field(
        default_factory=dict
    )  # per node, in addition to GPUs, cores and memory: rdma/ib: "8" for InfiniBand
    extra_volumes: list = field(default_factory=list)  # in the form of Kubernetes' volumes
    extra_mounts: list = field(default_factory=list)  # mounts of extra_volumes, in the form of Kubernetes' volumeMounts
    monitoring_namespace: str = "monitoring"  # the namespace of the pods that may read metrics
    monitor_labels: dict = field(
        default_factory=dict
    )  # labels with which Prometheus finds monitors and rules, such as release: prometheus
    checkpoint_age: int = 7200  # an alert fires if the newest checkpoint is older than so many seconds
    efa: int = 0  # eks: network interfaces per node
    role: str | None = None  # eks: ARN of the IAM role for the object store

    def __post_init__(self) -> None:
        config = self.train
        self._check_forms()
        if not re.search(r"[:@][^/]+$", self.image) or self.image.endswith(":latest"):
            raise UserError(f"image must have a tag other than latest, or a digest; got {self.image!r}")
        for name, choices in (("kind", KINDS), ("overlay", OVERLAYS)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"{name} must be one of {', '.join(choices)}; got "
                    f"{getattr(self, name)!r}{did_you_mean(getattr(self, name), choices)}"
                )
        if self.processes > LIMITS["gpus"][1]:
            raise UserError(f"train.nproc must be at most {LIMITS['gpus'][1]}, got {self.processes}")
        if self.min_nodes is not None and (self.kind != "pytorchjob" or self.min_nodes > self.nodes):
            raise UserError(
                f"min_nodes needs kind pytorchjob and at most nodes; got {self.min_nodes} of {self.nodes}, kind "
                f"{self.kind}"
            )
        if self.overlay != "eks" and (self.efa or self.role):
            raise UserError("efa and role need overlay eks")
        if self.role and self.service_account:
            raise UserError("role makes a ServiceAccount, service_account names one that is there: give one of them")
        if (self.cluster_queue and not self.queue) or (self.quota_nodes and not self.cluster_queue):
            raise UserError("cluster_queue needs queue, quota_nodes needs cluster_queue")
        if self.volume is None and self.nodes > 1:
            raise UserError("several nodes need a volume that all of them can write to, for checkpoints: give volume")
        if self.volume is None and not config.store:
            raise UserError(
                "without a volume, the run's folder is lost with its pod: give volume, or train.store (s3://...)"
            )
        if not config.checkpoint_every:
            raise UserError("train.checkpoint_every must be set: a restart resumes from the latest checkpoint")
        if config.parallel == "none" and self.nodes * self.processes > 1:
            raise UserError(f"{self.nodes * self.processes} processes need train.parallel ddp, fsdp2, tp or ulysses")
        open_ = [f"train.{name}" for name, value in config.shown().items() if value != getattr(config, name)]
        for name, value in vars(self).items():
            if name != "train":
                open_ += _credentials(name, "", value)
        if open_:  # many people can read manifests
            raise UserError(
                f"{open_[0]} holds credentials, which would be readable in the manifests: store it in a Secret, and "
                "give the Secret's name as secret"
            )
        for name in ("out", "save", "cache"):
            if ".." in Path(getattr(config, name) or "").parts:
                raise UserError(f"train.{name} must be a path without .., got {getattr(config, name)!r}")
        for name, folder in (("out", config.out), ("save", self.save)):
            if self.volume and folder.startswith("/") and not folder.startswith(SHARED + "/"):
                raise UserError(
                    f"train.{name} must be relative or under {SHARED}, where the volume is mounted; got {folder!r}"
                )

    def _check_forms(self) -> None:
        """Raise ``UserError`` with the path of a field that has a wrong type or form: a cluster
        would refuse it or misread it."""
        checked({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, Job, "job")
        for name, shape in SHAPES.items():
            if getattr(self, name) is not None:
                _shaped(name, getattr(self, name), shape)
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(
                    f"{name} must be {f'at least {least}' if value < least else f'at most {most}'}, got {value}"
                )
        for name in ("node_selector", "monitor_labels", "labels"):
            for key, value in getattr(self, name).items():
                _shaped(f"{name}: a label's name", key, LABEL)
                _shaped(f"{name}.{key}", value, LABEL_VALUE)
                if name != "node_selector" and key in OUR_LABELS:
                    raise UserError(f"{name}.{key} is a label that the manifests set: leave it out")
        for key, value in self.annotations.items():
            _shaped("annotations: an annotation's name", key, LABEL)
            if key == ROLE:
                raise UserError(f"annotations.{key} is what role sets: leave it out")
            if not isinstance(value, str) or "\0" in value or len(value) > 32_768:
                raise UserError(
                    f"annotations.{key} must be text, quoted where YAML would take it for a number; got {value!r:.80}"
                )
        for key, value in self.resources.items():
            _shaped("resources: a resource's name", key, RESOURCE)
            _shaped(f"resources.{key}", value, QUANTITY)
            if key in self.counted:
                raise UserError(f"resources.{key} is what gpus and efa count: leave it out")
        for i, name in enumerate(self.pull_secrets):
            _shaped(f"pull_secrets[{i}]", name, PULL_SECRET)
        self._check_volumes()
        for key, value in self.environment.items():
            _shaped(
                "environment: a variable's name",
                key,
                ("[A-Za-z_][A-Za-z0-9_]{0,252}", "letters, digits and _, no digit first"),
            )
            if type(value) not in (str, int, float) or "\0" in str(value) or len(str(value)) > 32_768:
                raise UserError(f"environment.{key} must be text or a number, got {value!r:.80}")
        for i, toleration in enumerate(self.tolerations):
            _check_toleration(f"tolerations[{i}]", toleration)

    def _check_volumes(self) -> None:
        try:
            json.dumps(self.extra_volumes)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                "extra_volumes must be objects of text, numbers and lists, quoted where YAML would take them for "
                f"dates: {error}"
            ) from None
        for i, volume in enumerate(self.extra_volumes):
            path = f"extra_volumes[{i}]"
            if (
                not isinstance(volume, dict)
                or len(volume) != 2
                or not all(isinstance(v, dict) for k, v in volume.items() if k != "name")
            ):
                raise UserError(
                    f"{path} must be an object with name and one source, such as persistentVolumeClaim; got "
                    f"{volume!r:.80}"
                )
            _shaped(f"{path}.name", volume.get("name"), VOLUME)
        names = [volume["name"] for volume in self.extra_volumes]
        if clash := {name for name in names if name in OUR_VOLUMES or names.count(name) > 1}:
            raise UserError(
                f"extra_volumes: names must differ from each other and from {', '.join(OUR_VOLUMES)}; got "
                f"{', '.join(sorted(clash))}"
            )
        for i, mount in enumerate(self.extra_mounts):
            path = f"extra_mounts[{i}]"
            if not isinstance(mount, dict) or not {"name", "mountPath"} <= mount.keys() <= {
                "name",
                "mountPath",
                "readOnly",
                "subPath",
            }:
                raise UserError(
                    f"{path} must be an object with name and mountPath, and readOnly or subPath; got {mount!r:.80}"
                )
            if mount["name"] not in names:
                raise UserError(f"{path}.name must be one of extra_volumes, got {mount['name']!r:.80}")
            _shaped(f"{path}.mountPath", mount["mountPath"], MOUNT)
            place = Path(mount["mountPath"])
            if place.is_relative_to(OUR_MOUNTS[1]) or any(Path(ours).is_relative_to(place) for ours in OUR_MOUNTS):
                raise UserError(
                    f"{path}.mountPath must leave {', '.join(OUR_MOUNTS)} as they are, got {mount['mountPath']!r:.80}"
                )
            if "subPath" in mount:
                _shaped(f"{path}.subPath", mount["subPath"], SUB_PATH)
            if type(mount.get("readOnly", True)) is not bool:
                raise UserError(f"{path}.readOnly must be true or false, got {mount['readOnly']!r:.80}")

    @property
    def processes(self) -> int:
        """Processes per node: one per GPU, or without GPUs ``train.nproc``."""
        return self.gpus or self.train.nproc or 1

    @property
    def counted(self) -> tuple[str, ...]:
        """The resources that ``gpus`` and ``efa`` set."""
        return (self.gpu_resource, *EFA_RESOURCES)

    @property
    def metrics(self) -> bool:
        """Whether the trainer has an endpoint of metrics."""
        return self.train.trainer == "torch"

    @property
    def save(self) -> str:
        """The folder for the trained model, as ``train.out`` is given: in that one, where the
        job names no other."""
        return self.train.save or f"{self.train.out}/model"

    @property
    def warnings(self) -> list[str]:
        """What a user should know of the job, which can run."""
        if self.volume is None:
            return [
                "without a volume, the trained model is lost with its pod: only checkpoints are in "
                f"{self.train.store}\n"
            ]
        if self.train.save is None:
            return [f"train.save is not set: the trained model will be in {self.config.save}\n"]
        return []

    @property
    def config(self) -> TrainConfig:
        """The configuration of ``liger train`` in a pod, without processes, machines and
        rendezvous, which are separate flags."""
        root = Path(SHARED if self.volume else CACHE)
        return dataclasses.replace(
            self.train,
            nproc=None,
            nnodes=TrainConfig.nnodes,
            rdzv_endpoint=TrainConfig.rdzv_endpoint,
            out=str(root / self.train.out),
            cache=str(root / (self.train.cache or "data")),
            save=str(root / self.save),
            metrics_port=METRICS_PORT if self.metrics else 0,
            metrics_host="0.0.0.0" if self.metrics else TrainConfig.metrics_host,
        )

    def to_json(self) -> str:
        """The job as JSON, the value of ``LIGER_JOB`` in pods."""
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value is not None})

    @classmethod
    def of_environment(cls) -> Job:
        """The job in the environment variable LIGER_JOB, which holds JSON or the path of a job's
        file."""
        text = os.environ.get("LIGER_JOB")
        if not text:
            raise UserError("set LIGER_JOB to the file of a job (docs/guides/clusters.md)")
        return cls(**checked_job(json.loads(text), "LIGER_JOB")) if text.startswith("{") else cls.load(text)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a YAML or JSON file. Raises ``UserError`` for unknown names, wrong types and jobs
        that cannot run."""
        values = checked_job(read_file(path), str(path))
        return cls(**values)


def _shaped(path: str, value: Any, shape: tuple[str, str]) -> None:
    if not isinstance(value, str) or not re.fullmatch(shape[0], value) or len(value) > 1000:
        raise UserError(f"{path} must be {shape[1]}; got {value!r:.80}")


def _credentials(path: str, name: str, value: Any) -> Iterator[str]:
    """The paths of texts below ``path`` that hold a credential, by their form or by ``name``,
    the user's name for them."""
    if isinstance(value, dict):
        for key, part in value.items():
            # `key` is a name of Kubernetes': of a taint beside `effect`, of what a Secret or
            # ConfigMap holds beside `path`
            yield from _credentials(
                f"{path}.{key}",
                "" if key == "key" and {"path", "effect", "operator"} & value.keys() else str(key),
                part,
            )
            yield from _credentials(f"{path}: a name", "", key)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _credentials(f"{path}[{i}]", name, part)
    elif holds_credential(name, str(value)):
        yield path


def _check_toleration(path: str, toleration: Any) -> None:
    if not isinstance(toleration, dict):
        raise UserError(f"{path} must be an object with {', '.join(TOLERATION)}; got {toleration!r:.80}")
    for name, value in toleration.items():
        if name == "tolerationSeconds":
            if type(value) is not int:
                raise UserError(f"{path}.tolerationSeconds must be a whole number, got {value!r:.80}")
        elif name not in TOLERATION:
            raise UserError(
                f"{path} has an unknown name {name!r:.80}; there are {', '.join(TOLERATION)} and tolerationSeconds"
            )
        else:
            _shaped(f"{path}.{name}", value, TOLERATION[name])


def checked_job(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``values`` in the form that ``Job`` takes."""
    train = values.pop("train", None)
    checked(values, Job, where)
    missing = [
        name
        for name, value in (("name", values.get("name")), ("image", values.get("image")), ("train", train))
        if value is None
    ]
    if missing:
        raise UserError(f"{where}: {' and '.join(missing)} must be given")
    if not isinstance(train, dict):
        raise UserError(f"{where}: train must hold names and values of liger train")
    return values | {"train": TrainConfig(**checked(train, TrainConfig, f"{where}: train"))}
