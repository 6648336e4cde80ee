"""Kubernetes objects against the schemas of their kinds: what is unknown, a kind or a field, is
an error."""

from __future__ import annotations

import inspect
import typing

import jsonschema
import kubeflow_trainer_api.models as trainer
import kubernetes_validate
from kubeflow.training import models as training

KUBERNETES = "1.37"
CORE = {("v1", "ConfigMap"), ("v1", "ServiceAccount"), ("v1", "Pod"), ("networking.k8s.io/v1", "NetworkPolicy")}
CORE |= {("v1", "Namespace"), ("v1", "PersistentVolumeClaim")}
CORE |= {("rbac.authorization.k8s.io/v1", "ClusterRole"), ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding")}
MODELS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): trainer.TrainerV1alpha1TrainJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): trainer.TrainerV1alpha1TrainingRuntime,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): trainer.JobsetV1alpha2JobSet,
}
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
SCHEMAS = {
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


def errors(o) -> list[str]:
    """What is wrong with ``o``; empty if nothing is."""
    kind = o.get("apiVersion"), o.get("kind")
    found = []
    if kind in CORE:
        try:
            kubernetes_validate.validate(o, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{kind[1]} {'.'.join(map(str, error.path))}: {error.message}")
    elif kind in MODELS:
        try:
            MODELS[kind].from_dict(o)
        except ValueError as error:
            found.append(f"{kind[1]}: {' '.join(str(error).split())}")
        found += _unknown(MODELS[kind], o, kind[1])
    elif kind == ("kubeflow.org/v1", "PyTorchJob"):
        found += _openapi("KubeflowOrgV1PyTorchJob", o, kind[1])
    elif kind in SCHEMAS:
        parts = dict(apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=SCHEMAS[kind])
        validator = jsonschema.Draft202012Validator(_o([*parts], **parts))
        found += [f"{kind[1]} {error.json_path}: {error.message}" for error in validator.iter_errors(o)]
    else:
        return [f"unknown kind {kind}"]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod} for pod in _pods(o)]
    return [*found, *_choices(o), *(e for pod in pods for e in errors(pod))]


def _pods(found):
    if isinstance(found, dict) and found.get("kind") != "Pod":
        return ([found] if "containers" in found else []) + [pod for value in found.values() for pod in _pods(value)]
    return [pod for value in found for pod in _pods(value)] if isinstance(found, list) else []


def _choices(found):
    if isinstance(found, dict):
        wrong = {name: value for name, value in found.items() if name in CHOICES and value not in CHOICES[name]}
        wrong = [f"{name}: {value!r} is none of {sorted(CHOICES[name])}" for name, value in wrong.items()]
        return wrong + [e for value in found.values() for e in _choices(value)]
    return [e for value in found for e in _choices(value)] if isinstance(found, list) else []


def _unknown(model, value, where):
    """Fields that a pydantic model does not have: by themselves these models let them pass."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    found = []
    for name, inner in value.items():
        if name not in fields:
            found.append(f"{where}.{name}: unknown field")
        else:
            found += _inside(fields[name].annotation, inner, f"{where}.{name}")
    return found


def _inside(annotation, value, where):
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union:
        return _inside(next(a for a in args if a is not type(None)), value, where)
    if origin is list and isinstance(value, list):
        return [e for i, item in enumerate(value) for e in _inside(args[0], item, f"{where}[{i}]")]
    if inspect.isclass(annotation) and hasattr(annotation, "model_fields") and isinstance(value, dict):
        return _unknown(annotation, value, where)
    return []


PLAIN = {"str": str, "int": int, "bool": bool, "object": object}


def _openapi(kind, value, where):
    """The same for the older generated models; what is in pods is checked as pods."""
    if kind in PLAIN:
        right = isinstance(value, PLAIN[kind]) and not (kind == "int" and isinstance(value, bool))
        return [] if right else [f"{where}: {value!r} is no {kind}"]
    if kind.startswith("list["):
        return [e for i, item in enumerate(value) for e in _openapi(kind[5:-1], item, f"{where}[{i}]")]
    if kind.startswith("dict("):
        inner = kind[5:-1].partition(", ")[2]
        return [e for name, item in value.items() for e in _openapi(inner, item, f"{where}.{name}")]
    model = getattr(training, kind, None)
    if model is None:  # pods, metadata, times: Kubernetes' own
        return []
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no {kind}"]
    types = {model.attribute_map[name]: t for name, t in model.openapi_types.items()}
    wrong = [f"{where}.{name}: unknown field" for name in value if name not in types]
    known = [(name, item) for name, item in value.items() if name in types]
    return wrong + [e for name, item in known for e in _openapi(types[name], item, f"{where}.{name}")]
