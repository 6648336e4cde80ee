"""What people might write into fields of a job that would be something else in YAML, a shell or
a template."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from liger_kernel.deploy.job import Job
from liger_kernel.train.config import UserError

FIELDS = [field.name for field in dataclasses.fields(Job) if field.name != "train"]
TEXTS = ["", " ", "a b", "a; rm -rf /", "$(reboot)", "`id`", "{{ .Values.image }}", '{{ include "x" . }}', "}}", "<b>"]
TEXTS += ["<{{ x }}>", "'", '"', "a'b", 'a"b', "a: b", "- a", "&a", "*a", "!!python/object/apply:os.system [id]", "# a"]
TEXTS += ["a\nb: c", "a\n---\nkind: Secret", "../../../x", "/etc/passwd", "..", "A=B", "-3", "1e3", "0x10", "yes"]
TEXTS += ["null", "lots", "x" * 5000, "\0", "\ufeff", "Ünïcode"]
MAPS = [{}, {"a": 1}, {"a; b": "c"}, {"a": "b c"}, {"": "x"}, {"A=B": "x"}]
HOSTILE: list[Any] = [*TEXTS, 10**6, -1, 1.5, True, [], [1, "x"], *MAPS]
OF_ITEMS = {  # of fields that hold items: what a value may be in them
    **{
        name: [lambda v: {"A": v}, lambda v: {"example.com/a": v}]
        for name in ("environment", "node_selector", "monitor_labels", "labels", "annotations")
    },
    "resources": [lambda v: {"rdma/ib": v}, lambda v: {"rdma/ib": "8", str(v): "1"}],
    "pull_secrets": [lambda v: [v], lambda v: ["tokens", v]],
    "extra_volumes": [
        lambda v: [{"name": v, "emptyDir": {}}],
        lambda v: [{"name": "a", "csi": {"driver": v}}],
        lambda v: [{"name": "a", "csi": v}],
    ],
    "extra_mounts": [
        lambda v: [{"name": "x", "mountPath": v}],
        lambda v: [{"name": "x", "mountPath": "/x", "subPath": v}],
        lambda v: [v],
    ],
}


def hostile(name: str, job: Callable[..., Job]) -> Iterator[tuple[Any, Job | None]]:
    """(value, the job that has it in field ``name``, by ``job``, or None where it was refused by
    its name) of each hostile value."""
    for value in HOSTILE:
        around = {"queue": "team", "cluster_queue": "gpus", "quota_nodes": 3}
        around |= {"extra_volumes": [{"name": "x", "emptyDir": {}}]}
        around |= {"overlay": "eks"} if name in ("efa", "role") else {}
        for put in [value, *(form(value) for form in OF_ITEMS.get(name, ()))]:
            try:
                yield put, job(**around | {name: put})
            except UserError as error:
                assert name in str(error) or "credentials" in str(error), (put, error)
                yield put, None
