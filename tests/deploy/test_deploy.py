"""A job and what is rendered of it, as far as it can be checked without the tools of a cluster
(tests/integrations/test_k8s.py has these)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml
from hostile_jobs import FIELDS, hostile

import liger_kernel
from liger_kernel import cli
from liger_kernel.deploy import monitoring, steps
from liger_kernel.deploy.command import submit
from liger_kernel.deploy.job import API, CACHE, IMAGE_KERNELS, KUBERNETES, SHARED, Job
from liger_kernel.deploy.manifests import USER, objects, train_json
from liger_kernel.deploy.render import _of_release, render, write
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.metrics import EXPORTED

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "deploy" / "jobs"
TRAIN = {"model": "m", "checkpoint_every": 10, "parallel": "fsdp2", "store": "s3://b/run"}
KINDS = {"pytorchjob": dict(min_nodes=1), "trainjob": {}, "jobset": {}}


def job(train=None, **changes):
    return Job(
        **{
            "name": "run",
            "image": "registry.test/liger:1",
            "nodes": 2,
            "volume": "claim",
            **changes,
            "train": TrainConfig(**TRAIN | (train or {})),
        }
    )


def pods(found):
    """Every pod specification in ``found``."""
    if isinstance(found, dict):
        return ([found] if "containers" in found else []) + [pod for value in found.values() for pod in pods(value)]
    return [pod for value in found for pod in pods(value)] if isinstance(found, list) else []


def containers(found):
    return [container for pod in pods(found) for container in [*pod["containers"], *pod.get("initContainers", [])]]


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_jobs_that_are_shipped_can_be_rendered(path):
    found = objects(Job.load(path))
    assert {"ConfigMap", "NetworkPolicy", "PodMonitor", "PrometheusRule", "PyTorchJob"} <= {o["kind"] for o in found}


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_jobs_that_are_shipped_say_where_their_model_will_be(path):
    made = Job.load(path)
    assert made.train.save and made.config.save == f"/shared/{made.train.save}" and not made.warnings


@pytest.mark.parametrize("form", ["yaml", "train", "kustomize", "helm"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "volume: v\ntrain: {checkpoint_every: 5, out: runs/a}",
            "train.save is not set: the trained model will be in /shared/runs/a/model\n",
        ),
        ("volume: v\ntrain: {checkpoint_every: 5, save: tuned}", ""),
        (
            "train: {checkpoint_every: 5, store: 's3://b/run', save: tuned}",
            "without a volume, the trained model is lost with its pod: only .* s3://b/run\n",
        ),
    ],
    ids=["default", "set", "no volume"],
)
def test_where_the_model_will_be_is_said(lines, said, form, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(f"name: run\nimage: r.io/liger:1\ngpus: 1\n{lines}\n")
    assert cli.main(["deploy", "render", str(tmp_path / "job.yaml"), "--as", form, "--to", str(tmp_path / form)]) == 0
    assert re.fullmatch(said, capsys.readouterr().err)


def test_every_form_of_a_job_saves_its_model():
    made = job(train=dict(out="runs/a"))
    forms = {form: "\n".join(render(made, form).values()) for form in ("yaml", "kustomize", "helm", "train")}
    assert all(re.search(r'"?save"?: .*runs/.*model', text) for text in forms.values())


def test_what_is_rendered_replaces_only_what_was(tmp_path):
    (tmp_path / "run.yaml").write_text("mine")  # such as the job's own file
    with pytest.raises(
        UserError, match=r"run.yaml is not as liger deploy has written it: move it, or give another --to"
    ):
        write(render(job(), "yaml"), tmp_path)
    assert (tmp_path / "run.yaml").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "run.yaml").unlink()
    for changes in ({}, dict(nodes=3), dict(nodes=3)):
        write(render(job(**changes), "helm"), tmp_path)
    values = tmp_path / "values.yaml"
    values.write_text(values.read_text() + "# mine\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"values.yaml is not as liger deploy has written it"):
        write(render(job(nodes=4), "helm"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(os.name != "posix", reason="links are those of POSIX")
def test_nothing_is_rendered_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "k").mkdir()
    for name in ("run.yaml", ".liger-deploy.json"):
        (tmp_path / "k" / name).symlink_to(tmp_path / "mine")
        with pytest.raises(UserError):
            write(render(job(), "yaml"), tmp_path / "k")
        assert (tmp_path / "mine").read_text() == "mine"
        (tmp_path / "k" / name).unlink()


CIRCLE: dict = {}
CIRCLE["a"] = CIRCLE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(name="Run"), "name must be at most 40"),
        (dict(image="liger"), "image must have a tag"),
        (dict(image="liger:latest"), "image must have a tag other than latest"),
        (dict(kind="pod"), "kind must be one of pytorchjob, trainjob, jobset; got 'pod'"),
        (dict(kind="trainjob", min_nodes=1), "min_nodes needs kind pytorchjob"),
        (dict(min_nodes=3), "at most nodes; got 3 of 2"),
        (dict(nodes=0), "nodes must be at least 1, got 0"),
        (dict(efa=4), "efa and role need overlay eks"),
        (
            dict(overlay="eks", role="arn:aws:iam::1:role/r", service_account="there"),
            "role makes a ServiceAccount, service_account names one",
        ),
        (dict(labels={"helm.sh/chart": "x"}), r"labels\.helm\.sh/chart is a label that the manifests set"),
        (dict(annotations={"eks.amazonaws.com/role-arn": "x"}), r"annotations\.eks.* is what role sets"),
        (dict(resources={"nvidia.com/gpu": "8"}), r"resources\.nvidia\.com/gpu is what gpus and efa count"),
        (dict(extra_volumes=[{"name": "shm", "emptyDir": {}}]), "extra_volumes: names must differ .* got shm"),
        (dict(extra_volumes=[{"name": "a"}]), r"extra_volumes\[0\] must be an object with name and one source"),
        (
            dict(extra_mounts=[{"name": "a", "mountPath": "/a"}]),
            r"extra_mounts\[0\]\.name must be one of extra_volumes, got 'a'",
        ),
        (dict(volume=None), "several nodes need a volume"),
        (dict(quota_nodes=4), "quota_nodes needs cluster_queue"),
        (dict(train=dict(checkpoint_every=0, store=None)), r"train\.checkpoint_every must be set"),
        (dict(train=dict(parallel="none")), r"16 processes need train\.parallel"),
        (dict(train=dict(out="/home/me")), r"train\.out must be relative or under /shared"),
        (dict(train=dict(save="/tmp/model")), r"train\.save must be relative or under /shared"),
        (dict(train=dict(out="../../etc")), r"train\.out must be a path without \.\., got '\.\./\.\./etc'"),
        (dict(train=dict(out="/shared/../etc")), r"train\.out must be a path without"),
        (dict(train=dict(save="a/../../b")), r"train\.save must be a path without"),
        (dict(extra_volumes=[{"name": "a", "csi": CIRCLE}]), "extra_volumes must be objects of text"),
        *[
            (
                dict(
                    extra_volumes=[{"name": "a", "emptyDir": {}}],
                    extra_mounts=[{"name": "a", "mountPath": "/a"} | mount],
                ),
                rf"extra_mounts\[0\]\.{said}",
            )
            for mount, said in (
                (
                    {"mountPath": "/etc/liger"},
                    "mountPath must leave /dev/shm, /etc/liger, /tmp, /cache, /shared as they are, got '/etc/liger'",
                ),
                ({"mountPath": "/etc//liger/x"}, "mountPath must leave"),
                ({"mountPath": "//etc"}, "mountPath must be an absolute path without"),
                ({"mountPath": "/etc"}, "mountPath must leave"),
                ({"mountPath": "/shared/"}, "mountPath must leave"),
                ({"mountPath": "/"}, r"mountPath must be an absolute path without"),
                ({"mountPath": "/../etc"}, r"mountPath must be an absolute path without"),
                ({"mountPath": "/a/.."}, r"mountPath must be an absolute path without"),
                ({"subPath": "../.."}, r"subPath must be a relative path without"),
                ({"subPath": "a/../../b"}, r"subPath must be a relative path without"),
            )
        ],
        (dict(nodes=1, volume=None, train=dict(store=None)), "the run's folder is lost with its pod"),
    ],
)
def test_what_cannot_run_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        job(**changes)


TOKEN = "hf_" + "a" * 34


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (dict(train=dict(store="s3://key:secret@b/run")), "train.store"),
        (dict(environment={"HF_TOKEN": "hf_x"}), "environment.HF_TOKEN"),
        (dict(environment={"HTTPS_PROXY": "http://me:pw@proxy:80"}), "environment.HTTPS_PROXY"),
        (dict(environment={"PGPASSWORD": "correct-horse"}), "environment.PGPASSWORD"),
        (dict(annotations={"note": TOKEN}), "annotations.note"),
        (dict(annotations={"example.com/api-key": "abc"}), "annotations.example.com/api-key"),
        (dict(labels={"a": TOKEN}), "labels.a"),
        (dict(labels={TOKEN: "a"}), "labels: a name"),
        (dict(node_selector={"a": TOKEN}), "node_selector.a"),
        (dict(monitor_labels={"a": TOKEN}), "monitor_labels.a"),
        (dict(tolerations=[{"key": "a", "operator": "Equal", "value": TOKEN}]), r"tolerations\[0\].value"),
        (
            dict(extra_volumes=[{"name": "q", "csi": {"volumeAttributes": {"password": "x"}}}]),
            r"extra_volumes\[0\].csi.volumeAttributes.password",
        ),
        (
            dict(extra_volumes=[{"name": "q", "nfs": {"options": ["a", f"b={TOKEN}"]}}]),
            r"extra_volumes\[0\].nfs.options\[1\]",
        ),
        (dict(image=f"r/i:{TOKEN}"), "image"),
    ],
)
def test_credentials_are_for_secrets(changes, where):
    with pytest.raises(UserError, match=f"{where} holds credentials, which would be readable in the manifests"):
        job(**changes)
    job(
        environment={
            "TOKENIZERS_PARALLELISM": "false",
            "GOOGLE_APPLICATION_CREDENTIALS": "/var/run/key.json",
            "HTTPS_PROXY": "http://proxy:80",
        }
    )
    job(
        environment={"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "MAX_TOKENS": "4096"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
    )
    job(
        extra_volumes=[
            {"name": "q", "secret": {"secretName": "tokens", "items": [{"key": "ca.pem", "path": "ca.pem"}]}}
        ]
    )


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"liger-{os.geteuid()}"


def test_what_processes_share_is_this_users_alone(temporary):
    fetched = []
    fetch = lambda folder: (fetched.append(folder), Path(folder).mkdir())
    found = steps.once("s3://b/data", fetch)
    assert steps.once("s3://b/data", fetch) == found and len(fetched) == 1
    assert temporary.stat().st_mode & 0o777 == 0o700 and found.parent == temporary
    temporary.chmod(0o755)  # as earlier releases made it
    steps.once("s3://b/data", fetch)
    assert temporary.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "made, said",
    [
        ("link", "is no folder"),
        ("file", "is no folder"),
        ("group", "can be written to"),
        ("world", "can be written to"),
        ("other", "belongs to user"),
    ],
)
def test_a_folder_that_another_may_have_made_is_refused(made, said, temporary, tmp_path, monkeypatch):
    if made == "link":
        (tmp_path / "elsewhere").mkdir()
        temporary.symlink_to(tmp_path / "elsewhere")
    elif made == "file":
        temporary.touch()
    else:
        temporary.mkdir()
        temporary.chmod({"group": 0o770, "world": 0o757}.get(made, 0o700))
    if made == "other":
        mine = os.geteuid()
        temporary.rename(tmp_path / f"liger-{mine + 1}")
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(UserError, match=f"{said}.*: remove it, or set TMPDIR"):
        steps.once("s3://b/data", lambda folder: pytest.fail("fetched"))


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_its_form_or_is_refused(name):
    """Hostile values of every field: refused by the field's name, or the same text in every form
    of manifest, and files below their folder."""
    taken = 0
    for value, made in hostile(name, job):
        taken += made is not None
        if made is None:
            continue
        wanted = objects(made)
        assert list(yaml.load_all(text := "".join(render(made, "yaml").values()), LOADER)) == wanted, value
        for file in render(dataclasses.replace(made, overlay="plain", efa=0, role=None), "kustomize"):
            assert re.fullmatch(r"(base|overlays/\w+)/[a-z0-9.-]+\.yaml", file), file
        assert len(text) < 200_000
    assert taken or name not in (
        "environment",
        "node_selector",
        "tolerations",
        "labels",
        "annotations",
        "pull_secrets",
        "extra_volumes",
        "extra_mounts",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(namespace="a; rm -rf /"), "namespace must be at most 63 of a-z"),
        (dict(cpu="lots"), "cpu must be a number of cores, such as 32 or 500m; got 'lots'"),
        (dict(shm="-3"), "shm must be a number of bytes, such as 16Gi; got '-3'"),
        (dict(node_selector={"pool": 3}), r"node_selector\.pool must be text .* got 3"),
        (dict(tolerations=[1, "x"]), r"tolerations\[0\] must be an object with key, operator, value, effect; got 1"),
        (dict(tolerations=[{"key": "a", "effect": "Never"}]), r"tolerations\[0\]\.effect must be NoSchedule"),
        (dict(environment={"": "x"}), "environment: a variable's name must be letters, digits and _"),
        (dict(environment={"A=B": "x"}), "environment: a variable's name must be letters, digits and _"),
        (dict(environment={"A": None}), r"environment\.A must be text or a number, got None"),
        (dict(gpus=1_000_000), "gpus must be at most 64, got 1000000"),
        (dict(gpus=0, train=dict(nproc=10_000)), r"train\.nproc must be at most 64, got 10000"),
        (dict(queue="../../x"), "queue must be at most 63 of a-z"),
        (dict(nodes="2"), "nodes must be of type int, got '2'"),
    ],
)
def test_what_a_cluster_would_not_take_is_said_with_its_path(changes, said):
    with pytest.raises(UserError, match=said):
        job(**changes)


def test_no_file_is_written_outside_its_folder(tmp_path):
    with pytest.raises(UserError, match="is not below"):
        write({"base/../../x.yaml": ""}, tmp_path / "k")
    assert not list(tmp_path.rglob("*.yaml"))


def test_mistakes_in_a_file_are_named(tmp_path):
    path = tmp_path / "job.json"
    good = {"name": "run", "image": "i:1", "nodes": 1, "volume": "v", "train": TRAIN}
    for change, said in (
        ({"node": 2}, "unknown name 'node'"),
        ({"nodes": "2"}, "nodes must be of type int, got '2'"),
        ({"train": {**TRAIN, "stepz": 1}}, "train: unknown name 'stepz'"),
        ({"train": None}, "train must be given"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=said):
            Job.load(path)
    path.write_text(json.dumps(good))
    assert Job.load(path).train.store == "s3://b/run"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_confined_and_hold_no_secrets(kind):
    found = objects(job(kind=kind, secret="tokens", **KINDS[kind]))
    assert pods(found) and len(containers(found)) == 2
    for pod in pods(found):
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert all("hostPath" not in volume for volume in pod["volumes"])
        shutdown = next(
            int(e["value"]) for e in pod["containers"][0]["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        )
        assert 0 < shutdown < pod["terminationGracePeriodSeconds"]
    for container in containers(found):
        confined = container["securityContext"]
        assert (
            confined["readOnlyRootFilesystem"]
            and not confined["allowPrivilegeEscalation"]
            and confined["capabilities"] == {"drop": ["ALL"]}
        )
        assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
        assert {m["mountPath"] for m in container["volumeMounts"]} == {
            "/cache",
            "/tmp",
            "/dev/shm",
            "/etc/liger",
            "/shared",
        }
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert not any(o["kind"] == "Secret" for o in found)


@functools.cache
def environment_read():
    """Names of variables that the package reads, from its sources."""
    names = set()
    for path in (ROOT / "src" / "liger_kernel").rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            key = None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.environ.get",
                "os.getenv",
                "os.environ.setdefault",
            ):
                key = node.args[0]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                key = node.slice
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
                key = node.left
            if isinstance(key, ast.Constant):
                names.add(key.value)
            elif isinstance(key, ast.Name) and key.id in constants:
                names.add(constants[key.id])
    return names


# who sets what the manifests leave alone
ELSEWHERE = {
    "torch's launcher": {
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
    },
    "our launcher": {"LIGER_LAUNCHER", "LIGER_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"},
    "Flyte's pods": {"LIGER_JOB"},
    "nobody, if g++ is the C++ compiler": {"CXX"},
    "nobody: HOME serves": {"XDG_CACHE_HOME"},
    "whoever wants another implementation": {"LIGER_KERNEL_IMPL", "LIGER_KERNEL_STRICT"},
    "our trainer": {"TRITON_CACHE_MANAGER", "CUBLAS_WORKSPACE_CONFIG"},
    "whoever looks for a mistake": {"LIGER_CHECKS", "LIGER_TRACEBACK", "TRITON_INTERPRET"},
    "`liger bench`, for its own processes": {"PYTHONPATH"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_that_is_read_is_set_somewhere(kind):
    read = environment_read()
    assert {"RANK", "PET_RDZV_ID", "LIGER_TRITON_BASE_CACHE"} <= read  # the search finds
    found = objects(job(kind=kind, **KINDS[kind]))
    set_here = {variable["name"] for container in containers(found) for variable in container["env"]}
    if any(o["spec"].get("elasticPolicy", {}).get("rdzvId") == "run" for o in found if o["kind"] == "PyTorchJob"):
        set_here.add("PET_RDZV_ID")
    assert read - set_here == set().union(*ELSEWHERE.values())


def test_processes_meet_where_the_kind_of_job_says():
    flags = {}
    for kind, more in KINDS.items():
        found = objects(job(kind=kind, **more))
        (args,) = [o["spec"]["trainer"]["args"] for o in found if o["kind"] == "TrainJob"] or [
            c["args"] for c in containers(found) if c["name"] != "warm-kernels"
        ]
        flags[kind] = " ".join(args).partition("train.json ")[2]
    assert flags == {
        "pytorchjob": "--nproc 8 --nnodes 1:2 --rdzv-endpoint run-worker-0:29400",
        "trainjob": "--nproc 8 --nnodes 2:2 --rdzv-endpoint $(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
        "jobset": "--nproc 8 --nnodes 2:2 --rdzv-endpoint run-node-0-0.run:29400",
    }


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_preemption_does_not_use_up_restarts(kind):
    from liger_kernel.train.ranks import EXIT_PREEMPTED

    text = json.dumps(objects(job(kind=kind)))
    assert '"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]' in text
    assert '"onPodConditions": [{"type": "DisruptionTarget"' in text and f'"values": [{EXIT_PREEMPTED}]' in text


def test_pods_train_what_liger_train_would(tmp_path, monkeypatch):
    """The file in the ConfigMap is a config of liger train: it says where pods write, and leaves
    the number of machines to the flags beside it."""
    made = job(train=dict(steps=7, nproc=3, out="runs/a"))
    (config,) = [o for o in objects(made) if o["kind"] == "ConfigMap"]
    path = tmp_path / "train.json"
    path.write_text(config["data"]["train.json"])
    assert path.read_text() == train_json(made)
    loaded = TrainConfig.load(path)
    assert (loaded.steps, loaded.nproc, loaded.out, loaded.metrics_port, loaded.metrics_host) == (
        7,
        None,
        "/shared/runs/a",
        9400,
        "0.0.0.0",
    )
    assert (
        dataclasses.replace(
            loaded,
            **{n: getattr(made.train, n) for n in ("out", "cache", "save", "metrics_port", "metrics_host", "nproc")},
        )
        == made.train
    )
    path.write_text(render(made, "train")["train.json"])
    assert TrainConfig.load(path) == dataclasses.replace(made.train, save="runs/a/model")


EXTRAS = dict(
    labels={"team": "nlp"},
    annotations={"example.com/note": "1"},
    pull_secrets=["registry"],
    priority_class="high",
    service_account="trainer",
    resources={"rdma/ib": "8"},
    extra_volumes=[{"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}],
    extra_mounts=[{"name": "scratch", "mountPath": "/scratch", "readOnly": True}],
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_clusters_ask_for_is_in_every_pod(kind):
    found = objects(job(kind=kind, **KINDS[kind], **EXTRAS))
    for o in found:
        assert o["metadata"]["labels"]["team"] == "nlp" and o["metadata"]["annotations"] == {"example.com/note": "1"}
    (pod,) = pods(found)
    assert (
        pod["imagePullSecrets"] == [{"name": "registry"}]
        and pod["priorityClassName"] == "high"
        and pod["serviceAccountName"] == "trainer"
    )
    assert pod["volumes"][-1] == EXTRAS["extra_volumes"][0] and all(
        c["volumeMounts"][-1] == EXTRAS["extra_mounts"][0] for c in containers(found)
    )
    limits = [c["resources"]["limits"].get("rdma/ib") for c in containers(found) if "resources" in c]
    assert None in limits  # compiling needs no network
    node = next(
        (o["spec"]["trainer"]["resourcesPerNode"] for o in found if o["kind"] == "TrainJob"),
        {"limits": {"rdma/ib": limits[0]}},
    )
    assert node["limits"]["rdma/ib"] == "8"


def test_a_chart_names_what_it_makes_after_its_release():
    """Nothing but values names the job or its namespace; tests/integrations/test_k8s.py has Helm
    render two releases."""
    files = render(job(name="jobname", namespace="spacename"), "helm")
    templates = {name: text for name, text in files.items() if name.startswith("templates/")}
    assert len(templates) == 6 and not any("jobname" in text or "spacename" in text for text in templates.values())
    assert "jobname" in files["Chart.yaml"] and "{{ .Release.Name }}" in files["values.yaml"]
    with pytest.raises(UserError, match="a chart makes no queues"):
        render(job(queue="team", cluster_queue="gpus"), "helm")


@pytest.mark.parametrize(
    ("path", "release"),
    [
        ("/shared/runs/run", "/shared/runs/RELEASE"),
        ("/shared/runs/run/model", "/shared/runs/RELEASE/model"),
        ("/shared/run/a/model", "/shared/run/a/model/RELEASE"),
        ("/shared/runs/a{{x", '/shared/runs/a{{ "{{" }}x/RELEASE'),
        ("s3://run", "s3://run/RELEASE"),
        ("s3://run/run/", "s3://run/RELEASE"),
    ],
)
def test_releases_write_to_places_of_their_own(path, release):
    assert _of_release(path, "run") == release.replace("RELEASE", "{{ .Release.Name }}")


def test_versions_of_what_a_cluster_brings_are_said_once():
    """The sources name them in one table; the documentation's table and every image's tag agree
    with it and with our version."""
    sources = (ROOT / "src" / "liger_kernel" / "deploy").glob("*.py")
    outside = {path.name: text for path in sources if (text := path.read_text()) and path.name != "job.py"}
    wanted = {version for version in API.values() if "/" in version}
    assert len(wanted) > 5 and not [
        (name, version) for name, text in outside.items() for version in wanted if version in text
    ]
    platform = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    assert (
        set(re.findall(r"`([a-z0-9.-]+/v1\w*)`", platform)) == {v for v in wanted if not v.startswith("networking")}
        and f"Kubernetes {KUBERNETES} or newer" in platform
    )
    tags = {
        tag
        for path in [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        if path.is_file()
        for tag in re.findall(r"liger-train:([0-9]+(?:[.][0-9]+)+)", path.read_text())
    }
    assert tags == {liger_kernel.__version__.partition("+")[0]}


def test_the_overlay_of_eks_adds_what_is_there():
    plain, eks = job(), job(overlay="eks", efa=32, role="arn:aws:iam::1:role/r", tolerations=[])
    (pod,) = pods(objects(eks))
    assert (
        pod["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
        and pod["serviceAccountName"] == "run"
    )
    assert "vpc.amazonaws.com" not in json.dumps(objects(plain))
    assert pod["initContainers"][0]["resources"]["limits"] == {"cpu": "32", "memory": "256Gi"}  # compiling needs no GPU


def test_a_queue_suspends_until_there_is_room():
    found = objects(job(queue="team", cluster_queue="gpus", quota_nodes=3))
    (run,) = [o for o in found if o["kind"] == "PyTorchJob"]
    assert run["spec"]["runPolicy"]["suspend"] and run["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    (cluster,) = [o for o in found if o["kind"] == "ClusterQueue"]
    quotas = cluster["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    assert {q["name"]: q["nominalQuota"] for q in quotas} == {"cpu": "96", "memory": "768Gi", "nvidia.com/gpu": "24"}
    assert not next(o for o in objects(job()) if o["kind"] == "PyTorchJob")["spec"]["runPolicy"]["suspend"]


def test_rules_and_dashboard_know_every_metric_and_no_other():
    queries = [rule["expr"] for group in monitoring.rules(job())["groups"] for rule in group["rules"]]
    shown = [expression for _, _, targets in monitoring.PANELS for expression, _ in targets]
    named = lambda texts: set(re.findall(r"\bliger_(\w+)", " ".join(texts)))
    assert named(shown) == EXPORTED.keys()
    assert named(queries) <= EXPORTED.keys()


def test_the_image_is_what_pods_expect():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert (
        f"KERNELS={IMAGE_KERNELS}" in text
        and f"LIGER_TRITON_BASE_CACHE={IMAGE_KERNELS}" in text
        and f"TRITON_CACHE_DIR={CACHE}/triton" in text
    )
    assert f"--uid {USER} " in text and f"\nUSER {USER}\n" in text and f"chown liger {CACHE} {SHARED}" in text
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for name in line.split()]
    assert len(copied) > 4 and all((ROOT / name).exists() for name in copied)
    context = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert sorted(copied) == sorted(line[1:] for line in context if line.startswith("!"))
    from liger_kernel.compile.targets import TARGETS
    from liger_kernel.model_sizes import MODELS

    defaults = dict(re.findall(r'^ARG (\w+)="([^"]*)"', text, re.M))
    assert set(defaults["MODELS"].split()) <= MODELS.keys() and set(defaults["ARCHS"].split()) <= TARGETS.keys()


def test_submitting_without_kubectl_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="submit needs kubectl"):
        submit(job())


def test_submitting_gives_kubectl_what_is_rendered(tmp_path, user_env):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/flags\nexec cat > {tmp_path}/applied\n')
    kubectl.chmod(0o755)
    argv = [
        sys.executable,
        "-m",
        "liger_kernel.cli",
        "deploy",
        "submit",
        str(JOBS / "plain.yaml"),
        "--dry-run",
        "server",
        "--context",
        "there",
    ]
    subprocess.run(argv, env=user_env | {"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert (tmp_path / "flags").read_text() == "--context there apply --dry-run=server -f -\n"
    assert list(yaml.load_all((tmp_path / "applied").read_text(), LOADER)) == objects(Job.load(JOBS / "plain.yaml"))


def test_rendering_loads_nothing_heavy(user_env):
    code = f"""
import sys
from liger_kernel import cli
assert cli.main(["deploy", "render", {str(JOBS / "plain.yaml")!r}]) == 0
print("LOADED", *{{"torch", "triton", "transformers", "numpy"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], env=user_env, capture_output=True, text=True, check=True)
    assert done.stdout.rpartition("LOADED")[2].strip() == "" and "kind: PyTorchJob" in done.stdout
