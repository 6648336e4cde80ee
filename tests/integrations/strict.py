"""Kubernetes objects against the schemas of their kinds: what is unknown, a kind or a field, is
an error."""

from __future__ import annotations

from typing import Any

import jsonschema
import kubeflow_trainer_api.models as trainer
import kubernetes_validate
from kubeflow.training import models as training

KUBERNETES = "1.37"
CORE = {("v1", "ConfigMap"), ("v1", "ServiceAccount"), ("v1", "Pod"), ("networking.k8s.io/v1", "NetworkPolicy")}
CORE |= {("v1", "Namespace"), ("v1", "PersistentVolumeClaim")}
CORE |= {("rbac.authorization.k8s.io/v1", "ClusterRole"), ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding")}
# enumerations that are comments in the models
CHOICES = {
    "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "action": {"FailJob", "Ignore", "Count", "FailIndex", "FailJobSet", "RestartJob", "RestartJobSet"}
    | {"RestartJobSetAndIgnoreMaxRestarts"},
}


def _o(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(items):
    return {"type": "array", "minItems": 1, "items": items}


TEXT, TEXTS = {"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
SELECTOR = _o(matchLabels=TEXTS)
DURATION = {"type": "string", "pattern": r"^(\d+(ms|[smhdwy]))+$"}
# What we use of kinds whose schemas no package has, after the projects' API references: Kueue 0.19,
# the Prometheus operator 0.86
RESOURCE = _o(["name", "nominalQuota"], name=TEXT, nominalQuota=QUANTITY)
FLAVOR = _o(["name", "resources"], name=TEXT, resources=_list(RESOURCE))
GROUP = _o(["coveredResources", "flavors"], coveredResources=_list(TEXT), flavors=_list(FLAVOR))
PREEMPTION = _o(withinClusterQueue={"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority"]})
RELABELINGS = _list(_o(targetLabel=TEXT, replacement=TEXT))
ENDPOINTS = _list(_o(port=TEXT, interval=DURATION, relabelings=RELABELINGS))
RULE = _o(["expr"], record=TEXT, alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
RULES = _o(["name", "rules"], name=TEXT, rules=_list(RULE))
SPECS = {
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): _o(nodeLabels=TEXTS),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): _o(["clusterQueue"], clusterQueue=TEXT),
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): _o(
        ["resourceGroups"], namespaceSelector=SELECTOR, preemption=PREEMPTION, resourceGroups=_list(GROUP)
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _o(["selector"], selector=SELECTOR, podMetricsEndpoints=ENDPOINTS),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _o(groups=_list(RULES)),
    ("monitoring.coreos.com/v1", "Prometheus"): _o(
        serviceAccountName=TEXT,
        evaluationInterval=DURATION,
        **{f"{part}Selector": SELECTOR for part in ("podMonitor", "podMonitorNamespace", "rule", "ruleNamespace")},
    ),
}
METADATA = _o(["name"], name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)


def _closed(schema: Any) -> Any:
    """The schema of a model in which what is unknown is an error, nothing is null, and enumerations
    that are comments are ones."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "actual_instance" in schema.get("properties", ()):
        return {}  # a number or a text, in pods, which are checked as pods
    schema = {name: _closed(part) for name, part in schema.items()}
    if {"type": "null"} in schema.get("anyOf", ()):
        first, *others = [part for part in schema["anyOf"] if part != {"type": "null"}]
        schema = {"anyOf": [first, *others]} if others else first
    if "properties" in schema:
        known = schema["properties"]
        enumerations = {name: {"enum": sorted(CHOICES[name])} for name in known.keys() & CHOICES.keys()}
        schema |= {"properties": known | enumerations, "additionalProperties": False}
    return schema


PLAIN = {"str": "string", "int": "integer", "bool": "boolean"}


def _of_openapi(kind: str) -> dict[str, Any]:
    """The schema of an older generated model; what is Kubernetes' own may be anything."""
    if kind.startswith("list["):
        return {"type": "array", "items": _of_openapi(kind[5:-1])}
    if kind.startswith("dict("):
        return {"type": "object", "additionalProperties": _of_openapi(kind[5:-1].partition(", ")[2])}
    if model := getattr(training, kind, None):
        names = model.attribute_map
        return _o(**{names[name]: _of_openapi(inner) for name, inner in model.openapi_types.items()})
    return {"type": PLAIN[kind]} if kind in PLAIN else {}


TRAINER = "trainer.kubeflow.org/v1alpha1"
REST = dict(apiVersion=TEXT, kind=TEXT, metadata=METADATA)
SCHEMAS = {kind: _o([*REST, "spec"], **REST, spec=spec) for kind, spec in SPECS.items()} | {
    ("kubeflow.org/v1", "PyTorchJob"): _closed(_of_openapi("KubeflowOrgV1PyTorchJob")),
    (TRAINER, "TrainJob"): _closed(trainer.TrainerV1alpha1TrainJob.model_json_schema()),
    (TRAINER, "TrainingRuntime"): _closed(trainer.TrainerV1alpha1TrainingRuntime.model_json_schema()),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _closed(trainer.JobsetV1alpha2JobSet.model_json_schema()),
}


def errors(o: dict[str, Any]) -> list[str]:
    """What is wrong with ``o``; empty if nothing is."""
    kind = o.get("apiVersion"), o.get("kind")
    if kind in CORE:
        try:
            kubernetes_validate.validate(o, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{kind[1]} {'.'.join(map(str, error.path))}: {error.message}"]
        return []
    if kind not in SCHEMAS:
        return [f"unknown kind {kind}"]
    found = jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(o)
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod} for pod in _pods(o)]
    return [f"{kind[1]} {e.json_path}: {e.message}" for e in found] + [e for pod in pods for e in errors(pod)]


def _pods(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, dict):
        return [found] * ("containers" in found) + [pod for value in found.values() for pod in _pods(value)]
    return [pod for value in found for pod in _pods(value)] if isinstance(found, list) else []
