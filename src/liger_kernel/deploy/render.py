"""Render a job's objects as plain YAML, for Kustomize, or as a Helm chart. All forms describe
the same objects."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import uuid
from pathlib import Path
from typing import Any

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import (
    KUBERNETES,
    LABEL,
    LABEL_VALUE,
    LIMITS,
    MOUNT,
    OUR_LABELS,
    OUR_VOLUMES,
    PULL_SECRET,
    QUANTITY,
    RESOURCE,
    ROLE,
    SHAPES,
    SUB_PATH,
    TOLERATION,
    VOLUME,
    Job,
)
from liger_kernel.deploy.manifests import Object, objects
from liger_kernel.train.config import TrainConfig, UserError, _kinds, read_file
from liger_kernel.train.files import export

WRITTEN = ".liger-deploy.json"  # in a folder with rendered files: the digest of each
FORMS = ("yaml", "kustomize", "helm", "train", "rules", "dashboard")


def render(job: Job, form: str) -> dict[str, str]:
    """The files of one form, by name. A form with a single file has a name without a folder."""
    if form == "kustomize":
        return kustomize(job)
    if form == "helm":
        return helm(job)
    if form == "train":
        return {"train.json": json.dumps(dataclasses.asdict(job.train) | {"save": job.save}, indent=2) + "\n"}
    if form == "rules":
        return {"rules.yaml": _dump([monitoring.rules(job)])}
    if form == "dashboard":
        return {"dashboard.json": json.dumps(monitoring.dashboard(), indent=1) + "\n"}
    return {f"{job.name}.yaml": _dump(objects(job))}


def write(files: dict[str, str], folder: str | Path) -> list[Path]:
    """Write ``files`` below ``folder``; returns their paths.

    A file that is there is replaced if it is as it was written before, which a list of digests
    there says.
    """
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


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UserError("manifests need pyyaml: pip install pyyaml") from error
    return yaml


def _dump(documents: list[Object], mark: str = "\0") -> str:
    """The documents as YAML. It quotes texts with the ``mark`` of a template, whose value may
    look like a number, and texts that only Go's YAML misreads."""
    yaml: Any = _yaml()

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = (
            "'"
            if mark in value or re.fullmatch(r"[-+.]?[0-9][\w.+-]*|[yYnN]", value)
            else "|"
            if "\n" in value
            else None
        )
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.add_representer(Number, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", str(value)))
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
    return {f"{folder}/kustomization.yaml": _dump([head | kustomization])} | {
        f"{folder}/{_file(o)}": _dump([o]) for o in resources
    }


def _file(o: Object) -> str:
    return f"{o['kind'].lower()}-{o['metadata']['name']}.yaml"


class Number(str):
    """A template with a value that is not a string, so YAML shows it without quotes."""


# Fields of a job that only set values. The other fields decide which objects exist, and are fixed
# when the chart is rendered.
TEXTS = ("image", "cpu", "memory", "shm", "cache", "volume", "queue", "monitoring_namespace")
NUMBERS = ("nodes", "min_nodes", "retries", "checkpoint_age")
OPTIONS = ("priority_class", "service_account")  # if one is empty, its line is omitted
MAPS = ("labels", "annotations", "node_selector", "monitor_labels", "resources")
LISTS = ("tolerations", "pull_secrets", "extra_volumes", "extra_mounts")


def _form(shape: str) -> Object:
    return {"type": "string", "pattern": f"^({shape})$"}


def _map(key: Object, value: Object) -> Object:
    return {"type": "object", "propertyNames": key, "additionalProperties": value}


_OUR_LABELS = {**_form(LABEL[0]), "not": {"enum": list(OUR_LABELS)}}
VALUES: dict[str, Any] = {name: _form(SHAPES[name][0]) for name in TEXTS}
VALUES["image"]["allOf"] = [{"pattern": "[:@][^/]+$"}, {"not": {"pattern": ":latest$"}}]  # a tag or a digest
VALUES |= {name: {"type": "integer", "minimum": LIMITS[name][0], "maximum": LIMITS[name][1]} for name in NUMBERS}
VALUES |= {name: _form(f"{SHAPES[name][0]}|") for name in OPTIONS}
VALUES |= {
    "labels": _map(_OUR_LABELS, _form(LABEL_VALUE[0])),
    "monitor_labels": _map(_OUR_LABELS, _form(LABEL_VALUE[0])),
    "node_selector": _map(_form(LABEL[0]), _form(LABEL_VALUE[0])),
    "annotations": _map({**_form(LABEL[0]), "not": {"enum": [ROLE]}}, {"type": "string"}),
    "resources": {},  # filled with the resources that the job counts
    "pull_secrets": {"type": "array", "items": _form(PULL_SECRET[0])},
    "tolerations": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _form(shape) for name, (shape, _) in TOLERATION.items()}
            | {"tolerationSeconds": {"type": "integer"}},
        },
    },
    "extra_volumes": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "minProperties": 2,
            "maxProperties": 2,
            "properties": {"name": {**_form(VOLUME[0]), "not": {"enum": list(OUR_VOLUMES)}}},
            "additionalProperties": {"type": "object"},
        },
    },
    "extra_mounts": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "mountPath"],
            "additionalProperties": False,
            "properties": {
                "name": _form(VOLUME[0]),
                "mountPath": _form(MOUNT[0]),
                "subPath": _form(SUB_PATH[0]),
                "readOnly": {"type": "boolean"},
            },
        },
    },
}
_JSON = {int: "integer", float: "number", str: "string", bool: "boolean"}

PLACES = ("out", "save", "store")  # fields of train: folders to which a run writes, so each release has its own
THRESHOLDS = monitoring.Thresholds(
    steps="int64 .Values.train.steps",
    last="sub (int64 .Values.train.steps) (mul 2 (int64 .Values.train.log_every))",
    every="int64 .Values.train.checkpoint_every",
    behind="mul 2 (int64 .Values.train.checkpoint_every)",
    age="int64 .Values.checkpoint_age",
)
HELPERS = """\
{{- /* Every object and pod is called as the release. */}}
{{- define "liger.name" -}}
{{- if not (regexMatch "^NAME$" .Release.Name) -}}
{{- fail (printf "the release's name must be SAID; got %s" .Release.Name) -}}
{{- end -}}
{{- .Release.Name -}}
{{- end }}

{{- /* The config of liger train: folders may name the release, so that two of them do not write to one. */}}
{{- define "liger.train" -}}
{{- $train := deepCopy .Values.train -}}
{{- range $name := list PLACES -}}
{{- with index $train $name }}{{ $_ := set $train $name (tpl . $) }}{{ end -}}
{{- end -}}
{{- toPrettyJson $train -}}
{{- end }}
"""


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
    mark = f"value{uuid.uuid4().hex}"  # no job can contain this text, so a job's own text never becomes a template
    template = copy.copy(job)  # not replace(): it would check templates as if they were values
    for name in ["name", "namespace", *values]:
        setattr(template, name, _template_value(name, mark))
    limits = monitoring.Thresholds(*(f"{mark}_limit-{name}_" for name in THRESHOLDS._fields))
    config = {
        name: value for name, value in dataclasses.asdict(job.config).items() if value is not None
    }  # Helm drops null values
    for name in PLACES:
        if name in config:
            config[name] = _of_release(config[name], job.name)
    texts = {}
    for o in objects(template, limits):
        if o["kind"] == "ConfigMap":
            o = o | {"data": {"train.json": f"{mark}_train_"}}
        labels = o["metadata"]["labels"] | {name: f"{mark}_{name}_" for name in CHART_LABELS}
        if any("each-monitor_labels" in name for name in labels):  # monitor_labels may repeat a name of labels
            labels = {name: value for name, value in labels.items() if "each-" not in name} | {
                f"{mark}_each-{MONITORED}_": ""
            }
        o["metadata"]["labels"] = labels
        texts[f"templates/{o['kind'].lower()}.yaml"] = _templates(_dump([o], mark).replace("{{", '{{ "{{" }}'), mark)
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
    helpers = (
        HELPERS.replace("NAME", SHAPES["name"][0])
        .replace("SAID", SHAPES["name"][1])
        .replace("PLACES", " ".join(f'"{name}"' for name in PLACES))
    )
    files = {
        "Chart.yaml": _dump([chart]),
        "values.yaml": _dump([values | {"train": config}]),
        "values.schema.json": json.dumps(_schema(list(values), job), indent=1) + "\n",
        "templates/_helpers.tpl": helpers,
    }
    return files | texts


RELEASE = "{{ .Release.Name }}"
MONITORED, MERGED = "monitored", "merge (dict) .Values.monitor_labels .Values.labels"
CHART_LABELS = {
    "app.kubernetes.io/version": '.Chart.AppVersion | replace "+" "_" | quote',
    "app.kubernetes.io/managed-by": ".Release.Service | quote",
    "helm.sh/chart": 'printf "%s-%s" .Chart.Name .Chart.Version | quote',
}


def _of_release(path: str, name: str) -> str:
    """``path`` with the release's name. It replaces the job's ``name`` if that is the last part
    of the path or the one before; otherwise it is appended."""
    scheme, mark, rest = path.replace("{{", '{{ "{{" }}').rpartition("://")
    root, *parts = rest.rstrip("/").split("/")  # a bucket, or the empty text before the first /
    found = next((i for i in (-1, -2) if len(parts) >= -i and parts[i] == name), None)
    if found is None:
        parts.append(RELEASE)
    else:
        parts[found] = RELEASE
    return scheme + mark + "/".join([root, *parts])


def _template_value(name: str, mark: str) -> Any:
    if name in MAPS:
        return {f"{mark}_each-{name}_": ""}
    if name in LISTS:
        return [f"{mark}_each-{name}_"]
    return (Number if name in NUMBERS else str)(f"{mark}_{name}_")


def _templates(text: str, mark: str) -> str:
    """Turn YAML with marks into a template. It omits an empty option, and a map or list that
    would have only the items of an empty value."""
    entry, item = rf"'{mark}_each-(?P<{{}}>\w+?)_': ''", rf"- (?P<before>name: )?'{mark}_each-(?P<{{}}>\w+?)_'"
    alone = (
        r"^(?P<pad> *)(?P<lines>\w+:\n(?P=pad)(?:  "
        rf"{entry.format('map')}|{item.format('list')})\n)(?!(?P=pad)(?:  |- ))"
    )
    option = rf"^(?P<pad> *)(?P<lines>\w+: '{mark}_(?P<map>{'|'.join(OPTIONS)})_'\n)(?P<list>)"
    for form in (alone, option):
        text = re.sub(
            form,
            lambda m: _block(m["pad"], f"if .Values.{m['map'] or m['list']}", m["pad"] + m["lines"]),
            text,
            flags=re.M,
        )
    pairs, items = rf"^(?P<pad> *){entry.format('name')}\n", rf"^(?P<pad> *){item.format('name')}\n"
    text = re.sub(
        pairs, lambda m: _range(m, "$key, $value := ", "{{ $key | quote }}: {{ $value | quote }}"), text, flags=re.M
    )
    text = re.sub(items, lambda m: _range(m, "", f"- {m['before'] or ''}{{{{ toJson . }}}}"), text, flags=re.M)
    for name, expression in {"train": 'include "liger.train" . | quote', **CHART_LABELS}.items():
        text = text.replace(f"'{mark}_{name}_'", f"{{{{ {expression} }}}}")
    places = {"name": 'include "liger.name" .', "namespace": ".Release.Namespace"}
    places |= {name: f"int64 .Values.{name}" for name in NUMBERS} | {
        f"limit-{name}": expression for name, expression in THRESHOLDS._asdict().items()
    }
    return re.sub(rf"{mark}_([a-z_-]+?)_(?![a-z])", lambda m: f"{{{{ {places.get(m[1], f'.Values.{m[1]}')} }}}}", text)


def _range(found: re.Match[str], variables: str, line: str) -> str:
    pad, values = found["pad"], MERGED if found["name"] == MONITORED else f".Values.{found['name']}"
    return _block(pad, f"range {variables}{values}", f"{pad}{line}\n")


def _block(pad: str, head: str, lines: str) -> str:
    return f"{pad}{{{{- {head} }}}}\n{lines}{pad}{{{{- end }}}}\n"


def _schema(names: list[str], job: Job) -> Object:
    forms = {name: VALUES[name] for name in names}
    forms["resources"] = _map({**_form(RESOURCE[0]), "not": {"enum": list(job.counted)}}, _form(QUANTITY[0]))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": [*names, "train"],
        "properties": forms | {"global": {"type": "object"}, "train": _train_schema()},
    }


def _train_schema() -> Object:
    """A schema of the names of ``liger train``, with types, choices and help."""
    properties: Object = {}
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
