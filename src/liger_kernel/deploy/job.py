"""What runs on a cluster: one dataclass, of which every manifest, chart and rule is a rendering."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.config import TrainConfig, UserError, checked, read_file
from liger_kernel.train.redact import redacted, secret_name

KINDS = ("pytorchjob", "trainjob", "jobset")
OVERLAYS = ("plain", "eks")

METRICS_PORT = 9400
RENDEZVOUS_PORT = 29400
SHARED = "/shared"  # where the volume of all nodes is mounted
CONFIG = "/etc/liger/train.json"
CACHE = "/cache"  # of the node: kernels, downloads
IMAGE_KERNELS = "/opt/liger/kernels"  # where deploy/Dockerfile puts those compiled in advance


# The forms of Kubernetes' own names (RFC 1123), labels and quantities; as regular expressions that JSON Schema takes, too, with what they say
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_DOMAIN}/)?{_WORD}"
_NAME = (_LABEL, "at most 63 of a-z, 0-9 and -, no - at an end")
_BYTES = ("[1-9][0-9]{0,14}([kMGTPE]|[KMGTPE]i)?", "a number of bytes, such as 16Gi")
SHAPES = {
    "name": ("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "at most 40 of a-z, 0-9 and -, a letter first"),  # pods are called NAME-worker-0: a label has 63 characters
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
    "role": (r"arn:[a-z-]+:iam::[0-9]{1,12}:role/[A-Za-z0-9_+=,.@/-]{1,512}", "the ARN of an IAM role"),
}
LIMITS = {  # of numbers; a pod has a port and an endpoint of metrics for every GPU
    "nodes": (1, 10_000),
    "min_nodes": (1, 10_000),
    "gpus": (0, 64),
    "retries": (0, 1_000_000),
    "grace": (60, 604_800),
    "efa": (0, 64),
    "quota_nodes": (1, 100_000),
    "checkpoint_age": (1, 31_536_000),
}
TOLERATION = {
    "key": (_KEY, "a key of a taint"),
    "operator": ("Exists|Equal", "Exists or Equal"),
    "value": (f"({_WORD})?", "a value of a taint"),
    "effect": ("NoSchedule|PreferNoSchedule|NoExecute", "NoSchedule, PreferNoSchedule or NoExecute"),
}


@dataclass
class Job:
    """A training run on ``nodes`` machines of ``gpus`` each; every field is a name in the job's file, ``train`` holds the names of ``liger train``."""

    name: str
    image: str  # with a tag or a digest
    train: TrainConfig
    kind: str = "pytorchjob"  # elastic (Kubeflow training-operator 1.9), trainjob (Kubeflow Trainer 2), or jobset
    overlay: str = "plain"
    namespace: str = "default"
    nodes: int = 1
    min_nodes: int | None = None  # pytorchjob: goes on with so many when machines are lost (default: all)
    gpus: int = 8  # of a node; 0 trains on CPUs
    gpu_resource: str = "nvidia.com/gpu"
    arch: str | None = "sm90"  # what the init container compiles kernels for; None leaves it to the first step
    cpu: str = "32"  # of a node
    memory: str = "256Gi"  # of a node, /dev/shm included
    shm: str = "16Gi"  # /dev/shm
    cache: str = "50Gi"  # scratch on the node: compiled kernels, downloaded models
    volume: str | None = None  # PersistentVolumeClaim that all nodes can write to (ReadWriteMany), mounted at /shared
    queue: str | None = None  # Kueue's LocalQueue
    cluster_queue: str | None = None  # render that LocalQueue, too, as one of this ClusterQueue
    quota_nodes: int | None = None  # render that ClusterQueue, too, with room for so many nodes
    retries: int = 10  # of the whole job, preemptions not counted where the kind of job can tell
    grace: int = 180  # seconds from SIGTERM to SIGKILL: must exceed two steps and a checkpoint
    secret: str | None = None  # Secret whose keys become environment variables, such as HF_TOKEN
    environment: dict = field(default_factory=dict)
    node_selector: dict = field(default_factory=dict)
    tolerations: list = field(default_factory=list)
    monitoring_namespace: str = "monitoring"  # whose pods may read metrics
    monitor_labels: dict = field(default_factory=dict)  # by which that Prometheus finds monitors and rules, such as release: prometheus
    checkpoint_age: int = 7200  # seconds after which a newest checkpoint is worth an alert
    efa: int = 0  # eks: network interfaces of a node
    role: str | None = None  # eks: ARN of the IAM role for the object store

    def __post_init__(self) -> None:
        config = self.train
        self._check_forms()
        if not re.search(r"[:@][^/]+$", self.image) or self.image.endswith(":latest"):
            raise UserError(f"image must have a tag other than latest, or a digest; got {self.image!r}")
        for name, choices in (("kind", KINDS), ("overlay", OVERLAYS)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}{did_you_mean(getattr(self, name), choices)}")
        if self.processes > LIMITS["gpus"][1]:
            raise UserError(f"train.nproc must be at most {LIMITS['gpus'][1]}, got {self.processes}")
        if self.min_nodes is not None and (self.kind != "pytorchjob" or self.min_nodes > self.nodes):
            raise UserError(f"min_nodes needs kind pytorchjob and at most nodes; got {self.min_nodes} of {self.nodes}, kind {self.kind}")
        if self.overlay != "eks" and (self.efa or self.role):
            raise UserError("efa and role need overlay eks")
        if (self.cluster_queue and not self.queue) or (self.quota_nodes and not self.cluster_queue):
            raise UserError("cluster_queue needs queue, quota_nodes needs cluster_queue")
        if self.volume is None and self.nodes > 1:
            raise UserError("several nodes need a volume that all of them can write to, for checkpoints: give volume")
        if self.volume is None and not config.store:
            raise UserError("without a volume, the run's folder is lost with its pod: give volume, or train.store (s3://...)")
        if not config.checkpoint_every:
            raise UserError("train.checkpoint_every must be set: a restart resumes from the latest checkpoint")
        if config.parallel == "none" and self.nodes * self.processes > 1:
            raise UserError(f"{self.nodes * self.processes} processes need train.parallel ddp, fsdp2 or tp")
        open_ = [f"train.{name}" for name, value in config.shown().items() if value != getattr(config, name)]
        open_ += [f"environment.{n}" for n, v in self.environment.items() if redacted(str(v)) != str(v) or (secret_name(n) and not str(v).startswith("/"))]
        if open_:  # manifests are read by many
            raise UserError(
                f"{open_[0]} holds credentials, which would be readable in the manifests: store it in a Secret, and give the Secret's name as secret"
            )
        if self.volume and config.out.startswith("/") and not config.out.startswith(SHARED + "/"):
            raise UserError(f"train.out must be relative or under {SHARED}, where the volume is mounted; got {config.out!r}")

    def _check_forms(self) -> None:
        """``UserError`` with its path for a field that is not of its type or form: clusters would refuse it, or take it for something else."""
        checked({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, Job, "job")
        for name, shape in SHAPES.items():
            if getattr(self, name) is not None:
                _shaped(name, getattr(self, name), shape)
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{name} must be {f'at least {least}' if value < least else f'at most {most}'}, got {value}")
        for name in ("node_selector", "monitor_labels"):
            for key, value in getattr(self, name).items():
                _shaped(f"{name}: a label's name", key, (_KEY, "as Kubernetes has them, such as example.com/pool"))
                _shaped(f"{name}.{key}", value, (f"({_WORD})?", "text of at most 63 letters, digits and -_., quoted where YAML would take it for a number"))
        for key, value in self.environment.items():
            _shaped("environment: a variable's name", key, ("[A-Za-z_][A-Za-z0-9_]{0,252}", "letters, digits and _, no digit first"))
            if type(value) not in (str, int, float) or "\0" in str(value) or len(str(value)) > 32_768:
                raise UserError(f"environment.{key} must be text or a number, got {value!r:.80}")
        for i, toleration in enumerate(self.tolerations):
            _check_toleration(f"tolerations[{i}]", toleration)

    @property
    def processes(self) -> int:
        """Of a node: one a GPU; without GPUs what ``train.nproc`` says."""
        return self.gpus or self.train.nproc or 1

    @property
    def metrics(self) -> bool:
        """Whether the trainer has an endpoint of metrics."""
        return self.train.trainer == "torch"

    @property
    def config(self) -> TrainConfig:
        """What ``liger train`` is given in a pod; processes, machines and their meeting point are flags beside it."""
        root = Path(SHARED if self.volume else CACHE)
        return dataclasses.replace(
            self.train,
            nproc=None,
            nnodes=TrainConfig.nnodes,
            rdzv_endpoint=TrainConfig.rdzv_endpoint,
            out=str(root / self.train.out),
            cache=str(root / (self.train.cache or "data")),
            save=str(root / (self.train.save or f"{self.train.out}/model")),
            metrics_port=METRICS_PORT if self.metrics else 0,
            metrics_host="0.0.0.0" if self.metrics else TrainConfig.metrics_host,
        )

    def to_json(self) -> str:
        """What ``LIGER_JOB`` holds in pods."""
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value is not None})

    @classmethod
    def of_environment(cls) -> Job:
        """The job that the variable LIGER_JOB holds as JSON, or whose file it names."""
        text = os.environ.get("LIGER_JOB")
        if not text:
            raise UserError("set LIGER_JOB to the file of a job (docs/platform.md)")
        return cls(**checked_job(json.loads(text), "LIGER_JOB")) if text.startswith("{") else cls.load(text)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a YAML or JSON file. ``UserError`` on unknown names, wrong types and what cannot run."""
        values = checked_job(read_file(path), str(path))
        return cls(**values)


def _shaped(path: str, value: Any, shape: tuple[str, str]) -> None:
    if not isinstance(value, str) or not re.fullmatch(shape[0], value) or len(value) > 1000:
        raise UserError(f"{path} must be {shape[1]}; got {value!r:.80}")


def _check_toleration(path: str, toleration: Any) -> None:
    if not isinstance(toleration, dict):
        raise UserError(f"{path} must be an object with {', '.join(TOLERATION)}; got {toleration!r:.80}")
    for name, value in toleration.items():
        if name == "tolerationSeconds":
            if type(value) is not int:
                raise UserError(f"{path}.tolerationSeconds must be a whole number, got {value!r:.80}")
        elif name not in TOLERATION:
            raise UserError(f"{path} has an unknown name {name!r:.80}; there are {', '.join(TOLERATION)} and tolerationSeconds")
        else:
            _shaped(f"{path}.{name}", value, TOLERATION[name])


def checked_job(values: dict[str, Any], where: str) -> dict[str, Any]:
    """``values`` as ``Job`` takes them."""
    train = values.pop("train", None)
    checked(values, Job, where)
    missing = [name for name, value in (("name", values.get("name")), ("image", values.get("image")), ("train", train)) if value is None]
    if missing:
        raise UserError(f"{where}: {' and '.join(missing)} must be given")
    if not isinstance(train, dict):
        raise UserError(f"{where}: train must hold names and values of liger train")
    return values | {"train": TrainConfig(**checked(train, TrainConfig, f"{where}: train"))}
