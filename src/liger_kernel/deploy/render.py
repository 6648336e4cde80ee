"""Render a job's objects as plain YAML, for Kustomize, or as a Helm chart. All forms describe
the same objects."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import KUBERNETES, SCHEMAS, Job, Schema
from liger_kernel.deploy.manifests import Object, objects
from liger_kernel.train.config import TrainConfig, UserError, _kinds, read_file
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import needs

WRITTEN = ".liger-deploy.json"  # in a folder with rendered files: the digest of each


def write(files: dict[str, str], folder: str | Path) -> list[Path]:
    """Write ``files`` below ``folder``; returns their paths. An existing file is replaced only if
    it is as an earlier call wrote it, by the list of digests in the folder."""
    folder = Path(folder)
    written = read_file(folder / WRITTEN) if (folder / WRITTEN).is_file() else {}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    for name, new in digests.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{name} is not below {folder}")
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() not in (new, written.get(name)):
            raise UserError(f"{path} is not as liger deploy has written it: move it, or give another --to")
    export(folder / WRITTEN, json.dumps(written | digests, indent=1) + "\n")
    for name, text in files.items():
        export(folder / name, text)
    return [folder / name for name in files]


def dump(documents: list[Object], mark: str = "\0") -> str:
    """The documents as YAML. It quotes texts with the ``mark`` of a template, whose value may
    look like a number, and texts that only Go's YAML misreads."""
    with needs("liger deploy", "pyyaml"):
        import yaml

    # libyaml's is five times as fast
    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        ignore_aliases = lambda *_: True

    def text(dumper: Any, value: str) -> Any:
        quote = mark in value or re.fullmatch(r"[-+.]?[0-9][\w.+-]*|[yYnN]", value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, "'" if quote else "|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    Dumper.add_representer(Number, lambda dumper, value: dumper.represent_str(str(value)))
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=len(documents) > 1)


def kustomize(job: Job) -> dict[str, str]:
    """The base is the job on a plain cluster; an overlay adds and patches what differs on
    another cluster."""
    base = objects(dataclasses.replace(job, overlay="plain", efa=0, role=None))
    files = _folder("base", base, {"resources": [_file(o) for o in base]})
    files |= _folder("overlays/plain", [], {"resources": ["../../base"]})
    if job.overlay != "plain":
        files |= _overlay(f"overlays/{job.overlay}", base, objects(job))
    return files


def _overlay(folder: str, base: list[Object], wanted: list[Object]) -> dict[str, str]:
    with needs("liger deploy", "jsonpatch"):
        import jsonpatch
    there = {_file(o): o for o in base}
    new = [o for o in wanted if _file(o) not in there]
    patches: list[dict[str, Any]] = []
    for o in wanted:
        operations: Any = jsonpatch.make_patch(there[_file(o)], o).patch if _file(o) in there else []
        if operations:
            group, _, version = o["apiVersion"].rpartition("/")
            target = {"group": group, "version": version, "kind": o["kind"], "name": o["metadata"]["name"]}
            patches.append({"target": target, "patch": dump([operations])})
    return _folder(folder, new, {"resources": ["../../base", *(_file(o) for o in new)], "patches": patches})


def _folder(folder: str, resources: list[Object], kustomization: Object) -> dict[str, str]:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {f"{folder}/kustomization.yaml": dump([head | kustomization])} | {
        f"{folder}/{_file(o)}": dump([o]) for o in resources
    }


def _file(o: Object) -> str:
    return f"{o['kind'].lower()}-{o['metadata']['name']}.yaml"


# How a chart is made. `objects` renders a job that has marks in the place of its values: image is
# "MARK_image_", nodes Number("MARK_nodes_"), labels {"MARK_each-labels_": ""}. Then the marks in
# the YAML become Helm's expressions:
#
#   image: 'MARK_image_'                         image: '{{ .Values.image }}'
#   nodes: MARK_nodes_                           nodes: {{ int64 .Values.nodes }}
#   labels:                                      labels:
#     app: liger-train                             app: liger-train
#     'MARK_each-labels_': ''                      {{- range $key, $value := .Values.labels }}
#                                                  {{ $key | quote }}: {{ $value | quote }}
#                                                  {{- end }}
#   priorityClassName: 'MARK_priority_class_'    {{- if .Values.priority_class }}
#                                                priorityClassName: '{{ .Values.priority_class }}'
#                                                {{- end }}
#
# MARK is random, so that no text of a job can equal it.


class Number(str):
    """A mark of a value that is no text, so YAML shows it without quotes."""


# Fields of a job that only set values. The other fields decide which objects exist, and are fixed
# when the chart is rendered.
TEXTS = ("image", "cpu", "memory", "shm", "cache", "volume", "queue", "monitoring_namespace")
NUMBERS = ("nodes", "min_nodes", "retries", "checkpoint_age")
OPTIONS = ("priority_class", "service_account")  # if one is empty, its line is omitted
MAPS = ("labels", "monitor_labels", "node_selector", "annotations", "resources")
LISTS = ("pull_secrets", "tolerations", "extra_volumes", "extra_mounts")
VALUES = (*TEXTS, *NUMBERS, *OPTIONS, *MAPS, *LISTS)

PLACES = ("out", "save", "store")  # fields of train: where a run writes, so each release has its own
RELEASE = "{{ .Release.Name }}"
CHART_LABELS = {
    "app.kubernetes.io/version": '.Chart.AppVersion | replace "+" "_" | quote',
    "app.kubernetes.io/managed-by": ".Release.Service | quote",
    "helm.sh/chart": 'printf "%s-%s" .Chart.Name .Chart.Version | quote',
}
THRESHOLDS = {  # of ``monitoring.thresholds``
    "steps": "int64 .Values.train.steps",
    "last": "sub (int64 .Values.train.steps) (mul 2 (int64 .Values.train.log_every))",
    "every": "int64 .Values.train.checkpoint_every",
    "behind": "mul 2 (int64 .Values.train.checkpoint_every)",
    "age": "int64 .Values.checkpoint_age",
}
# name in a mark -> Helm's expression. int64, because Helm would write a large number as 3e+06
EXPRESSIONS = {
    **{name: f".Values.{name}" for name in (*TEXTS, *OPTIONS)},
    **{name: f"int64 .Values.{name}" for name in NUMBERS},
    **{f"limit-{name}": expression for name, expression in THRESHOLDS.items()},
    **CHART_LABELS,
    "name": 'include "liger.name" .',
    "namespace": ".Release.Namespace",
    "train": 'include "liger.train" . | quote',
}
# monitor_labels may repeat a name of labels, and then win: both are ranged over as one map
MONITORED = "merge (dict) .Values.monitor_labels .Values.labels"
HELPERS = Path(__file__).with_name("helpers.tpl")


def helm(job: Job) -> dict[str, str]:
    """A Helm chart of this job. Its values are the job's fields and all of ``train``. Objects
    have the release's name and namespace."""
    if job.cluster_queue:
        raise UserError(
            "a chart makes no queues, as its releases would share them: make these by themselves and leave "
            "cluster_queue and quota_nodes out"
        )
    values: dict[str, Any] = {name: getattr(job, name) for name in VALUES if getattr(job, name) is not None}
    values |= {name: getattr(job, name) or "" for name in OPTIONS}
    if job.role:
        del values["service_account"]
    if job.kind == "pytorchjob":
        values["min_nodes"] = job.min_nodes or job.nodes
    if not job.metrics:  # then there are no monitors and no rules
        del values["checkpoint_age"], values["monitor_labels"]
    config = {name: value for name, value in dataclasses.asdict(job.config).items() if value is not None}
    for name in PLACES:
        if name in config:
            config[name] = _of_release(config[name], job.name)
    from liger_kernel import __version__

    chart = {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"liger train on {job.kind}",
        "type": "application",
        "version": __version__.partition("+")[0],  # registries do not accept "+"
        "appVersion": __version__,
        "kubeVersion": f">={KUBERNETES}.0-0",
    }
    form = SCHEMAS["name"]
    helpers = HELPERS.read_text().replace("PATTERN", form["pattern"][2:-2])  # without ^( and )$
    helpers = helpers.replace("WORDS", form["description"]).replace("PLACES", " ".join(f'"{name}"' for name in PLACES))
    return {
        "Chart.yaml": dump([chart]),
        "values.yaml": dump([values | {"train": config}]),
        "values.schema.json": json.dumps(_schema(list(values), job), indent=1) + "\n",
        "templates/_helpers.tpl": helpers,
        **_templates(job, list(values)),
    }


def _of_release(path: str, name: str) -> str:
    """``path`` with the release's name. It replaces the job's ``name`` if that is the last part
    of the path or the one before; otherwise it is appended."""
    scheme, mark, rest = _escaped(path).rpartition("://")
    root, *parts = rest.rstrip("/").split("/")  # a bucket, or the empty text before the first /
    found = next((i for i in (-1, -2) if len(parts) >= -i and parts[i] == name), None)
    if found is None:
        parts.append(RELEASE)
    else:
        parts[found] = RELEASE
    return scheme + mark + "/".join([root, *parts])


def _escaped(text: str) -> str:
    """A job's own braces, which Helm would read as an expression."""
    return text.replace("{{", '{{ "{{" }}')


def _templates(job: Job, names: list[str]) -> dict[str, str]:
    """The chart's templates: the job's objects, with expressions for the values ``names``."""
    mark = f"value{uuid.uuid4().hex}"
    marked = copy.copy(job)  # not replace(): it would check marks as if they were values
    for name in ["name", "namespace", *names]:
        each = f"{mark}_each-{name}_"
        kind = Number if name in NUMBERS else str
        setattr(marked, name, {each: ""} if name in MAPS else [each] if name in LISTS else kind(f"{mark}_{name}_"))
    limits = {name: f"{mark}_limit-{name}_" for name in THRESHOLDS}
    files = {}
    for o in objects(marked, limits):
        if o["kind"] == "ConfigMap":
            o["data"] = {"train.json": f"{mark}_train_"}
        labels = o["metadata"]["labels"] | {name: f"{mark}_{name}_" for name in CHART_LABELS}
        if f"{mark}_each-monitor_labels_" in labels:
            labels = {name: value for name, value in labels.items() if "_each-" not in name}
            labels[f"{mark}_each-monitored_"] = ""
        o["metadata"]["labels"] = labels
        files[f"templates/{o['kind'].lower()}.yaml"] = _template(_escaped(dump([o], mark)), mark)
    return files


def _template(text: str, mark: str) -> str:
    """YAML with marks as a template."""
    lines = text.splitlines()
    out: list[str] = []
    for i, line in enumerate(lines):
        pad = line[: len(line) - len(line.lstrip())]
        option = re.fullmatch(rf" *\w+: '{mark}_({'|'.join(OPTIONS)})_'", line)
        each = re.fullmatch(rf" *(- name: |- )?'{mark}_each-(\w+)_'(: '')?", line)
        if option:
            out += _block(pad, f"if .Values.{option[1]}", [line])
        elif each:
            values = MONITORED if each[2] == "monitored" else f".Values.{each[2]}"
            if each[1]:
                block = _block(pad, f"range {values}", [f"{pad}{each[1]}{{{{ toJson . }}}}"])
            else:
                pair = "{{ $key | quote }}: {{ $value | quote }}"
                block = _block(pad, f"range $key, $value := {values}", [pad + pair])
            # the only item of its key: without it the key would have null for a value, which is
            # not an empty map or list to Kubernetes, so the key is omitted as well
            parent = re.fullmatch(r"( *)\w+:", lines[i - 1])
            if parent and not (lines[i + 1 :] and lines[i + 1].startswith((f"{parent[1]}  ", f"{parent[1]}- "))):
                block = _block(parent[1], f"if {values}", [out.pop(), *block])
            out += block
        else:
            out.append(line)
    text = "\n".join(out) + "\n"
    for name, expression in EXPRESSIONS.items():
        found = f"{mark}_{name}_"
        # an expression that quotes its value itself stands in the place of YAML's quotes
        text = text.replace(f"'{found}'" if expression.endswith("quote") else found, f"{{{{ {expression} }}}}")
    return text


def _block(pad: str, head: str, lines: list[str]) -> list[str]:
    return [f"{pad}{{{{- {head} }}}}", *lines, f"{pad}{{{{- end }}}}"]


def _schema(names: list[str], job: Job) -> Schema:
    """The schema of a chart's values: those of the job's fields, by which a job itself is checked."""
    forms = {name: dict(job.schemas[name]) for name in names}
    for name in OPTIONS:
        if name in forms:  # may be empty
            forms[name]["pattern"] = forms[name]["pattern"].replace(")$", "|)$")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": [*names, "train"],
        "properties": forms | {"global": {"type": "object"}, "train": _train_schema()},
    }


_JSON = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _train_schema() -> Schema:
    """A schema of the names of ``liger train``, with types, choices and help."""
    properties: Schema = {}
    for field in dataclasses.fields(TrainConfig):
        kind, optional = _kinds(TrainConfig)[field.name]
        properties[field.name] = {
            "type": [_JSON[kind], "null"] if optional else _JSON[kind],
            "description": field.metadata["help"],
        }
        if field.metadata["choices"]:
            properties[field.name]["enum"] = [*field.metadata["choices"], *([None] if optional else [])]
    needed = ("steps", "log_every", "checkpoint_every")  # alert thresholds are computed from them
    for name in needed:
        properties[name]["minimum"] = 1
    return {"type": "object", "additionalProperties": False, "required": list(needed), "properties": properties}


def _train(job: Job) -> dict[str, str]:
    return {"train.json": json.dumps(dataclasses.asdict(job.train) | {"save": job.save}, indent=2) + "\n"}


# form -> the files of a job, by name. A form with a single file has a name without a folder
FORMS: dict[str, Callable[[Job], dict[str, str]]] = {
    "yaml": lambda job: {f"{job.name}.yaml": dump(objects(job))},
    "kustomize": kustomize,
    "helm": helm,
    "train": _train,
    "rules": lambda job: {"rules.yaml": dump([monitoring.rules(job)])},
    "dashboard": lambda job: {"dashboard.json": json.dumps(monitoring.dashboard(), indent=1) + "\n"},
}


def render(job: Job, form: str) -> dict[str, str]:
    """The files of one form, by name."""
    return FORMS[form](job)
