"""A job on a cluster: one dataclass from which every manifest, chart and rule is rendered."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.config import TrainConfig, UserError, checked, read_file
from liger_kernel.train.mistakes import needs
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

METRICS_PORT = 9400
RENDEZVOUS_PORT = 29400
SHARED = "/shared"  # the mount point of the volume that all nodes share
CONFIG = "/etc/liger/train.json"
CACHE = "/cache"  # a folder on the node, for kernels and downloads
IMAGE_KERNELS = "/opt/liger/kernels"  # where deploy/Dockerfile compiles kernels in advance

Schema = dict[str, Any]


def _whole(schema: Any, definitions: Schema) -> Any:
    """A part of a schema with what its references name, beside which it may say more."""
    if isinstance(schema, list):
        return [_whole(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("$ref", "").rpartition("/")[2]
    more = {name: _whole(each, definitions) for name, each in schema.items() if name != "$ref"}
    return (_whole(definitions[named], definitions) if named else {}) | more


_FILE = json.loads(Path(__file__).with_suffix(".schema.json").read_text())
# of each field of a job; with these the values of its chart are checked, too
SCHEMAS: dict[str, Schema] = _whole(_FILE["properties"], _FILE["definitions"])
ROLE = "eks.amazonaws.com/role-arn"  # the annotation of a ServiceAccount
MOST_GPUS = SCHEMAS["gpus"]["maximum"]  # of a node: its pod has a port and an endpoint of metrics for each
EFA_RESOURCES = ("vpc.amazonaws.com/efa", "hugepages-2Mi")
# Volume -> where it is mounted. A user's mounts may lie below all but the folder of CONFIG
MOUNTS = {"cache": CACHE, "tmp": "/tmp", "shm": "/dev/shm", "config": str(Path(CONFIG).parent), "shared": SHARED}


@dataclass
class Job:
    """A training run on ``nodes`` machines with ``gpus`` GPUs each. Every field is a name in the
    job's file; ``train`` holds the names of ``liger train``."""

    # job.schema.json has the form of each field; None is not checked: the field is not set
    # a pod has a name such as NAME-worker-0, and a label has at most 63 characters
    name: str
    image: str
    train: TrainConfig
    # pytorchjob stays: Kubeflow Trainer 2.3.0 has no elastic mode, so clusters that want one run
    # training-operator 1.9.4, its maintenance line; Flyte's Elastic tasks are PyTorchJobs, too.
    # trainjob is for Kubeflow Trainer 2, and jobset for clusters without Kubeflow
    kind: str = "pytorchjob"
    overlay: str = "plain"
    namespace: str = "default"
    nodes: int = 1
    # pytorchjob: training continues with so many nodes when machines are lost (default: all)
    min_nodes: int | None = None
    gpus: int = 8  # per node; 0 trains on CPUs
    gpu_resource: str = "nvidia.com/gpu"
    # the GPU for which the init container compiles kernels; with None, the first step compiles them
    arch: str | None = "sm90"
    cpu: str = "32"  # per node
    memory: str = "256Gi"  # per node, including /dev/shm
    shm: str = "16Gi"  # size of /dev/shm
    cache: str = "50Gi"  # scratch on the node: compiled kernels, downloaded models
    # PersistentVolumeClaim that all nodes can write to (ReadWriteMany), mounted at /shared
    volume: str | None = None
    queue: str | None = None  # Kueue's LocalQueue
    cluster_queue: str | None = None  # also render that LocalQueue, for this one
    # also render that ClusterQueue, with a quota for so many nodes
    quota_nodes: int | None = None
    # of the whole job; preemptions do not count if the kind of job can distinguish them
    retries: int = 10
    # seconds from SIGTERM to SIGKILL: must exceed two steps and a checkpoint
    grace: int = 180
    # Secret whose keys become environment variables, such as HF_TOKEN
    secret: str | None = None
    environment: dict = field(default_factory=dict)
    node_selector: dict = field(default_factory=dict)
    tolerations: list = field(default_factory=list)
    # added to every object and pod, as annotations are
    labels: dict = field(default_factory=dict)
    annotations: dict = field(default_factory=dict)
    # names of Secrets with which nodes pull the image
    pull_secrets: list = field(default_factory=list)
    priority_class: str | None = None
    # of pods; it must exist. The overlay eks creates its own for role
    service_account: str | None = None
    # per node, in addition to GPUs, cores and memory: rdma/ib: "8" for InfiniBand
    resources: dict = field(default_factory=dict)
    # in the form of Kubernetes' volumes and volumeMounts
    extra_volumes: list = field(default_factory=list)
    extra_mounts: list = field(default_factory=list)
    # the namespace of the pods that may read metrics
    monitoring_namespace: str = "monitoring"
    # labels with which Prometheus finds monitors and rules, such as release: prometheus
    monitor_labels: dict = field(default_factory=dict)
    # an alert fires if the newest checkpoint is older than so many seconds
    checkpoint_age: int = 7200
    efa: int = 0  # eks: network interfaces per node
    # eks: ARN of the IAM role for the object store
    role: str | None = None

    def __post_init__(self) -> None:
        checked(dict(vars(self)), Job, "job")
        _validate({name: value for name, value in vars(self).items() if value is not None}, self.schemas)
        self._check_volumes()
        self._check_credentials()
        config, ranks = self.train, self.nodes * self.processes
        rules = (
            (self.processes > MOST_GPUS, f"train.nproc must be at most {MOST_GPUS}, got {self.processes}"),
            (
                self.min_nodes is not None and (self.kind != "pytorchjob" or self.min_nodes > self.nodes),
                f"min_nodes needs kind pytorchjob and at most nodes; got {self.min_nodes} of {self.nodes}, "
                f"kind {self.kind}",
            ),
            (self.overlay != "eks" and (self.efa or self.role), "efa and role need overlay eks"),
            (
                self.role and self.service_account,
                "role makes a ServiceAccount, service_account names one that is there: give one of them",
            ),
            (
                (self.cluster_queue and not self.queue) or (self.quota_nodes and not self.cluster_queue),
                "cluster_queue needs queue, quota_nodes needs cluster_queue",
            ),
            (
                self.volume is None and self.nodes > 1,
                "several nodes need a volume that all of them can write to, for checkpoints: give volume",
            ),
            (
                self.volume is None and not config.store,
                "without a volume, the run's folder is lost with its pod: give volume, or train.store (s3://...)",
            ),
            (
                not config.checkpoint_every,
                "train.checkpoint_every must be set: a restart resumes from the latest checkpoint",
            ),
            (config.epochs, "alerts count steps: give train.steps instead of train.epochs"),
            (
                config.parallel == "none" and ranks > 1,
                f"{ranks} processes need train.parallel ddp, fsdp2, tp or ulysses",
            ),
        )
        for broken, text in rules:
            if broken:
                raise UserError(text)
        for name in ("out", "save", "cache"):
            if ".." in Path(getattr(config, name) or "").parts:
                raise UserError(f"train.{name} must be a path without .., got {getattr(config, name)!r}")
        for name, folder in (("out", config.out), ("save", self.save)):
            if self.volume and folder.startswith("/") and not folder.startswith(SHARED + "/"):
                raise UserError(
                    f"train.{name} must be relative or under {SHARED}, where the volume is mounted; got {folder!r}"
                )

    def _check_volumes(self) -> None:
        """What the schema of one volume or mount cannot say."""
        try:
            json.dumps(self.extra_volumes)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                "extra_volumes must be objects of text, numbers and lists, quoted where YAML would take them for "
                f"dates: {error}"
            ) from None
        names = [volume["name"] for volume in self.extra_volumes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"extra_volumes must have names that differ, got {', '.join(twice)}")
        for i, mount in enumerate(self.extra_mounts):
            path, folder = f"extra_mounts[{i}]", Path(mount["mountPath"])
            if mount["name"] not in names:
                raise UserError(f"{path}.name must be one of extra_volumes, got {mount['name']!r:.80}")
            ours = [Path(each) for each in MOUNTS.values()]
            if folder.is_relative_to(MOUNTS["config"]) or any(each.is_relative_to(folder) for each in ours):
                kept = ", ".join(MOUNTS.values())
                raise UserError(f"{path}.mountPath must leave {kept} as they are, got {mount['mountPath']!r:.80}")

    def _check_credentials(self) -> None:
        """Many people can read manifests."""
        shown = self.train.shown()
        found = [f"train.{name}" for name, value in shown.items() if value != getattr(self.train, name)]
        for name in self.schemas:
            found += _credentials(name, "", getattr(self, name))
        if found:
            raise UserError(
                f"{found[0]} holds credentials, which would be readable in the manifests: store it in a Secret, and "
                "give the Secret's name as secret"
            )

    @property
    def schemas(self) -> dict[str, Schema]:
        """The JSON Schema of each field but ``train``."""
        resources = SCHEMAS["resources"]
        names = resources["propertyNames"] | {"not": {"enum": [*self.counted]}}
        found = {name: schema for name, schema in SCHEMAS.items() if name != "train"}
        return found | {"resources": resources | {"propertyNames": names}}

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
        return cls.of(json.loads(text), "LIGER_JOB") if text.startswith("{") else cls.load(text)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a YAML or JSON file. Raises ``UserError`` for unknown names, wrong types and jobs
        that cannot run."""
        return cls.of(read_file(path), str(path))

    @classmethod
    def of(cls, values: dict[str, Any], where: str) -> Job:
        """The job of these names and values; messages say ``where`` they stand."""
        checked({name: value for name, value in values.items() if name != "train"}, Job, where)
        missing = [name for name in ("name", "image", "train") if values.get(name) is None]
        if missing:
            raise UserError(f"{where}: {' and '.join(missing)} must be given")
        if not isinstance(values["train"], dict):
            raise UserError(f"{where}: train must hold names and values of liger train")
        return cls(**values | {"train": TrainConfig(**checked(values["train"], TrainConfig, f"{where}: train"))})


def _validate(values: dict[str, Any], schemas: dict[str, Schema]) -> None:
    """Raise ``UserError`` with the path of the first value that breaks its schema: a cluster would
    refuse it or misread it."""
    for error in _validator()({"properties": schemas}).iter_errors(values):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[1:]
        if "propertyNames" in error.absolute_schema_path:
            path += ": a name"
        words, near = error.schema["description"], ""
        if error.validator == "not" and "enum" in error.validator_value:
            words = f"none of {', '.join(error.validator_value['enum'])}, which are set from other fields"
        if error.validator == "enum":
            near = did_you_mean(error.instance, error.validator_value)
        raise UserError(f"{path} must be {words}; got {error.instance!r:.80}{near}")


@functools.cache
def _validator() -> Any:
    """The class of ``jsonschema``'s validators, stricter where Python is laxer than a manifest."""
    with needs("liger deploy", "jsonschema"):
        import jsonschema
    draft = jsonschema.Draft7Validator

    def pattern(validator: Any, wanted: str, text: Any, schema: Schema) -> Iterator[Any]:
        # Python's $ also matches before a line break at the end, Go's in Helm does not
        if isinstance(text, str) and (len(text) > 1000 or not re.search(wanted.replace("$", r"\Z"), text)):
            yield jsonschema.ValidationError("pattern")

    types = draft.TYPE_CHECKER.redefine_many(
        {
            # 2.0 is a whole number to JSON Schema, not to Kubernetes
            "integer": lambda _, value: type(value) is int,
            "string": lambda _, value: isinstance(value, str) and "\0" not in value and len(value) <= 32_768,
        }
    )
    return jsonschema.validators.extend(draft, {"pattern": pattern}, type_checker=types)


def _credentials(path: str, name: str, value: Any) -> Iterator[str]:
    """The paths of texts below ``path`` that hold a credential, by their form or by ``name``,
    the user's name for them."""
    if isinstance(value, dict):
        for key, part in value.items():
            # what Kubernetes calls "key" is no secret: the key of a taint, which has an effect or
            # operator, and the key in a Secret or ConfigMap, which has a path
            kubernetes = key == "key" and {"path", "effect", "operator"} & value.keys()
            yield from _credentials(f"{path}.{key}", "" if kubernetes else str(key), part)
            yield from _credentials(f"{path}: a name", "", key)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _credentials(f"{path}[{i}]", name, part)
    elif holds_credential(name, str(value)):
        yield path
