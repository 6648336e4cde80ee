"""A job's objects in the forms that clusters are fed: plain YAML, Kustomize, a Helm chart; each says the same."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import uuid
from pathlib import Path
from typing import Any

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import LIMITS, SHAPES, Job
from liger_kernel.deploy.manifests import Object, objects
from liger_kernel.train.config import TrainConfig, UserError, _kinds

FORMS = ("yaml", "kustomize", "helm", "train", "rules", "dashboard")


def render(job: Job, form: str) -> dict[str, str]:
    """Files by name, of one form: a name alone for what is one file."""
    if form == "kustomize":
        return kustomize(job)
    if form == "helm":
        return helm(job)
    if form == "train":
        return {"train.json": json.dumps(dataclasses.asdict(job.train), indent=2) + "\n"}
    if form == "rules":
        return {"rules.yaml": _dump([monitoring.rules(job)])}
    if form == "dashboard":
        return {"dashboard.json": json.dumps(monitoring.dashboard(), indent=1) + "\n"}
    return {f"{job.name}.yaml": _dump(objects(job))}


def write(files: dict[str, str], folder: str | Path) -> list[Path]:
    """Write ``files`` below ``folder``; returns their paths."""
    paths = []
    for name, text in files.items():
        path = Path(folder) / name
        if not path.resolve().is_relative_to(Path(folder).resolve()):
            raise UserError(f"{name} is not below {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UserError("manifests need pyyaml: pip install pyyaml") from error
    return yaml


def _dump(documents: list[Object], mark: str = "\0") -> str:
    """YAML; texts with the ``mark`` of a template's value are quoted, as it may be one that YAML takes for a number."""
    yaml: Any = _yaml()

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "'" if mark in value else "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.add_representer(Number, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", str(value)))
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=len(documents) > 1)


def kustomize(job: Job) -> dict[str, str]:
    """The base is the job on a plain cluster; an overlay adds and patches what is different on another."""
    base = objects(dataclasses.replace(job, overlay="plain", efa=0, role=None))
    files = _folder("base", base, {"resources": [_file(o) for o in base]})
    files |= _folder("overlays/plain", [], {"resources": ["../../base"]})
    if job.overlay != "plain":
        files |= _overlay(f"overlays/{job.overlay}", base, objects(job))
    return files


def _overlay(folder: str, base: list[Object], wanted: list[Object]) -> dict[str, str]:
    try:
        import jsonpatch
    except ImportError as error:
        raise UserError("overlays need jsonpatch: pip install jsonpatch") from error
    there = {_file(o): o for o in base}
    new = [o for o in wanted if _file(o) not in there]
    patches: list[dict[str, Any]] = []
    for o in wanted:
        operations: Any = jsonpatch.make_patch(there[_file(o)], o).patch if _file(o) in there else []
        if operations:
            group, _, version = o["apiVersion"].rpartition("/")
            target = {"group": group, "version": version, "kind": o["kind"], "name": o["metadata"]["name"]}
            patches.append({"target": target, "patch": _dump([operations])})
    return _folder(folder, new, {"resources": ["../../base", *(_file(o) for o in new)], "patches": patches})


def _folder(folder: str, resources: list[Object], kustomization: Object) -> dict[str, str]:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {f"{folder}/kustomization.yaml": _dump([head | kustomization])} | {f"{folder}/{_file(o)}": _dump([o]) for o in resources}


def _file(o: Object) -> str:
    return f"{o['kind'].lower()}-{o['metadata']['name']}.yaml"


class Number(str):
    """A template whose value is no string: it stands in YAML without quotes."""


# Fields of a job that only fill places; the others decide which objects there are, and are settled when the chart is rendered.
TEXTS = ("image", "cpu", "memory", "shm", "cache", "volume", "queue", "monitoring_namespace")
NUMBERS = ("nodes", "min_nodes", "retries")
VALUES: dict[str, Any] = {name: {"type": "string", "pattern": f"^({SHAPES[name][0]})$"} for name in TEXTS}
VALUES["image"]["allOf"] = [{"pattern": "[:@][^/]+$"}]  # a tag or a digest
VALUES |= {name: {"type": "integer", "minimum": LIMITS[name][0], "maximum": LIMITS[name][1]} for name in NUMBERS}
_JSON = {int: "integer", float: "number", str: "string", bool: "boolean"}


def helm(job: Job) -> dict[str, str]:
    """A chart of this job: its values are the job's, and all of ``train``; a release has the job's name and namespace."""
    if job.quota_nodes:
        raise UserError("a chart cannot compute a quota: create the ClusterQueue separately, and leave out quota_nodes")
    values: dict[str, Any] = {name: getattr(job, name) for name in VALUES if getattr(job, name) is not None}
    if job.kind == "pytorchjob":
        values["min_nodes"] = job.min_nodes or job.nodes
    mark = f"value{uuid.uuid4().hex}"  # nothing that a job holds: what it holds is text, not template
    template = copy.copy(job)  # not replace(): templates are no values to check
    for name in values:
        setattr(template, name, (Number if name in NUMBERS else str)(f"{mark}_{name}_"))
    config = {name: value for name, value in dataclasses.asdict(job.config).items() if value is not None}  # Helm drops these
    texts = {}
    for o in objects(template):
        if o["kind"] == "ConfigMap":
            o = o | {"data": {"train.json": "{{ .Values.train | toPrettyJson }}"}}
            text = _dump([o]).replace("'{{ .Values.train | toPrettyJson }}'", "{{ .Values.train | toPrettyJson | quote }}")
        elif o["kind"] == "PrometheusRule":
            text = "{{`" + _dump([o]) + "`}}\n"  # its braces are Prometheus'
        else:
            text = re.sub(rf"{mark}_([a-z_]+?)_(?![a-z])", r"{{ .Values.\1 }}", _dump([o], mark).replace("{{", '{{ "{{" }}'))
        texts[f"templates/{_file(o)}"] = text
    from liger_kernel import __version__

    chart = {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"liger train on {job.kind}",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.29.0-0",
    }
    files = {
        "Chart.yaml": _dump([chart]),
        "values.yaml": _dump([values | {"train": config}]),
        "values.schema.json": json.dumps(_schema(list(values)), indent=1) + "\n",
    }
    return files | texts


def _schema(names: list[str]) -> Object:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": [*names, "train"],
        "properties": {name: VALUES[name] for name in names} | {"global": {"type": "object"}, "train": _train_schema()},
    }


def _train_schema() -> Object:
    """The names of ``liger train``, with their types, choices and help."""
    properties: Object = {}
    for field in dataclasses.fields(TrainConfig):
        kind, optional = _kinds(TrainConfig)[field.name]
        properties[field.name] = {"type": [_JSON[kind], "null"] if optional else _JSON[kind], "description": field.metadata["help"]}
        if field.metadata["choices"]:
            properties[field.name]["enum"] = [*field.metadata["choices"], *([None] if optional else [])]
    return {"type": "object", "additionalProperties": False, "properties": properties}
