"""A job and what is rendered of it, as far as it can be checked without the tools of a cluster
(tests/integrations/test_k8s.py has these)."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml
from hostile_jobs import FIELDS, hostile
from quick import words
from small_runs import refused

import liger_kernel
from liger_kernel import cli
from liger_kernel.deploy import monitoring, steps
from liger_kernel.deploy.job import API, CACHE, IMAGE_KERNELS, KUBERNETES, MOUNTS, ROLE, SHARED, Job, _validator
from liger_kernel.deploy.manifests import USER, labels, objects, train_json
from liger_kernel.deploy.render import CHART_LABELS, _of_release, render, write
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.metrics import EXPORTED

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "deploy" / "jobs"
TRAIN = {"model": "m", "checkpoint_every": 10, "parallel": "fsdp2", "store": "s3://b/run"}
KINDS = {"pytorchjob": dict(min_nodes=1), "trainjob": {}, "jobset": {}}


def job(train=None, **changes):
    given = {"name": "run", "image": "registry.test/liger:1", "nodes": 2, "volume": "claim", **changes}
    return Job(**given, train=TrainConfig(**TRAIN | (train or {})))


def pods(found):
    if isinstance(found, dict):
        return ([found] if "containers" in found else []) + [pod for value in found.values() for pod in pods(value)]
    return [pod for value in found for pod in pods(value)] if isinstance(found, list) else []


def containers(found):
    return [container for pod in pods(found) for container in [*pod["containers"], *pod.get("initContainers", [])]]


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_jobs_that_are_shipped_can_be_rendered_and_save_their_model(path):
    made = Job.load(path)
    kinds = {o["kind"] for o in objects(made)}
    assert {"ConfigMap", "NetworkPolicy", "PodMonitor", "PrometheusRule", "PyTorchJob"} <= kinds
    assert made.train.save and made.config.save == f"/shared/{made.train.save}" and not made.warnings


@pytest.mark.parametrize(
    ("form", "lines", "warning"),
    [
        ("yaml", "volume: v\ntrain: {checkpoint_every: 5, out: runs/a}", "train.save .*/shared/runs/a/model\n"),
        ("helm", "volume: v\ntrain: {checkpoint_every: 5, save: tuned}", ""),
        ("train", "train: {checkpoint_every: 5, store: 's3://b/run', save: tuned}", "without a volume.* s3://b/run\n"),
    ],
)
def test_a_job_saves_its_model_or_is_warned_of(form, lines, warning, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(f"name: run\nimage: r.io/liger:1\ngpus: 1\n{lines}\n")
    assert cli.main(["deploy", "render", str(tmp_path / "job.yaml"), "--as", form, "--to", str(tmp_path / form)]) == 0
    assert re.fullmatch(warning, capsys.readouterr().err)
    files = "".join(path.read_text() for path in (tmp_path / form).rglob("*") if path.is_file())
    assert re.search(r'"?save"?: .*(runs/a/model|tuned)', files)


def test_what_is_rendered_replaces_only_what_was(tmp_path):
    (tmp_path / "run.yaml").write_text("mine")  # such as the job's own file
    refused(r"run.yaml is not as liger deploy has written it", write, render(job(), "yaml"), tmp_path)
    assert (tmp_path / "run.yaml").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "run.yaml").unlink()
    for changes in ({}, dict(nodes=3), dict(nodes=3)):
        write(render(job(**changes), "helm"), tmp_path)
    values = tmp_path / "values.yaml"
    values.write_text(values.read_text() + "# mine\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused(r"values.yaml is not as liger deploy has written it", write, render(job(nodes=4), "helm"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(os.name != "posix", reason="links are those of POSIX")
def test_nothing_is_written_outside_its_folder_or_through_a_link(tmp_path):
    refused("is not below", write, {"base/../../x.yaml": ""}, tmp_path / "k")
    assert not list(tmp_path.rglob("*.yaml"))
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "k").mkdir(exist_ok=True)
    for name in ("run.yaml", ".liger-deploy.json"):
        (tmp_path / "k" / name).symlink_to(tmp_path / "mine")
        with pytest.raises(UserError):
            write(render(job(), "yaml"), tmp_path / "k")
        assert (tmp_path / "mine").read_text() == "mine"
        (tmp_path / "k" / name).unlink()


CIRCLE: dict = {}
CIRCLE["a"] = CIRCLE
VOLUME = {"name": "a", "emptyDir": {}}
MOUNT = {"name": "a", "mountPath": "/a"}


@pytest.mark.parametrize(
    ("changes", "path", "got"),
    [
        (dict(name="run\n"), "name", "run\n"),
        (dict(image="liger:latest"), "image", "liger:latest"),
        (dict(kind="pod"), "kind", "pod"),
        (dict(namespace="a; rm -rf /"), "namespace", "a; rm -rf /"),
        (dict(nodes=0), "nodes", 0),
        (dict(gpus=1_000_000), "gpus", 1_000_000),
        (dict(cpu="lots"), "cpu", "lots"),
        (dict(shm="-3"), "shm", "-3"),
        (dict(queue="../../x"), "queue", "../../x"),
        (dict(labels={"helm.sh/chart": "x"}), "labels", "helm.sh/chart"),
        (dict(annotations={"eks.amazonaws.com/role-arn": "x"}), "annotations", "eks.amazonaws.com/role-arn"),
        (dict(annotations={"a": "x\0"}), "annotations.a", "x\0"),
        (dict(resources={"nvidia.com/gpu": "8"}), "resources", "nvidia.com/gpu"),
        (dict(resources={"rdma/ib": 8}), "resources.rdma/ib", 8),
        (dict(node_selector={"pool": 3}), "node_selector.pool", 3),
        (dict(tolerations=[{"key": "a"}, {"effect": "Never"}]), "tolerations[1].effect", "Never"),
        (dict(tolerations=[{"tolerationSeconds": 3.0}]), "tolerations[0].tolerationSeconds", 3.0),
        (dict(environment={"": "x"}), "environment", ""),
        (dict(environment={"A": None}), "environment.A", None),
        (dict(extra_volumes=[{"name": "shm", "emptyDir": {}}]), "extra_volumes[0].name", "shm"),
        (dict(extra_volumes=[{"name": "a"}]), "extra_volumes[0]", {"name": "a"}),
        (dict(extra_mounts=[MOUNT]), "extra_mounts[0].name", "a"),
        *(
            (dict(extra_volumes=[VOLUME], extra_mounts=[MOUNT | {name: value}]), f"extra_mounts[0].{name}", value)
            for name, values in {
                "mountPath": ("/etc/liger", "/etc//liger/x", "//etc", "/etc", "/shared/", "/", "/../etc", "/a/.."),
                "subPath": ("../..", "a/../../b", "x" * 1001),
                "readOnly": (1,),
            }.items()
            for value in values
        ),
        (dict(train=dict(out="/home/me")), "train.out", "/home/me"),
        (dict(train=dict(save="/tmp/model")), "train.save", "/tmp/model"),
        (dict(train=dict(out="/shared/../etc")), "train.out", "/shared/../etc"),
        (dict(train=dict(save="a/../../b")), "train.save", "a/../../b"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(changes, path, got):
    with pytest.raises(UserError) as refused:
        job(**changes)
    text = str(refused.value)
    assert re.match(rf"{re.escape(path)}(: a name)? must ", text) and f"got {got!r:.80}" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(nodes="2"), "nodes must be of type int, got '2'"),
        (dict(kind="trainjob", min_nodes=1), "min_nodes needs kind pytorchjob"),
        (dict(min_nodes=3), "at most nodes; got 3 of 2"),
        (dict(efa=4), "efa and role need overlay eks"),
        (dict(overlay="eks", role="arn:aws:iam::1:role/r", service_account="there"), "role makes a ServiceAccount"),
        (dict(extra_volumes=[VOLUME, VOLUME]), "extra_volumes must have names that differ, got a"),
        (dict(extra_volumes=[{"name": "a", "csi": CIRCLE}]), "extra_volumes must be objects of text"),
        (dict(volume=None), "several nodes need a volume"),
        (dict(nodes=1, volume=None, train=dict(store=None)), "the run's folder is lost with its pod"),
        (dict(quota_nodes=4), "quota_nodes needs cluster_queue"),
        (dict(gpus=0, train=dict(nproc=10_000)), r"train\.nproc must be at most 64, got 10000"),
        (dict(train=dict(checkpoint_every=0, store=None)), r"train\.checkpoint_every must be set"),
        (dict(train=dict(epochs=2.0)), r"alerts count steps: give train\.steps instead of train\.epochs"),
        (dict(train=dict(parallel="none")), r"16 processes need train\.parallel"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(changes, text):
    refused(text, job, **changes)


def test_a_job_without_jsonschema_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    _validator.cache_clear()
    refused("pip install jsonschema", job)


TOKEN = "hf_" + "a" * 34


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (dict(train=dict(store="s3://key:secret@b/run")), "train.store"),
        (dict(environment={"HF_TOKEN": "hf_x"}), "environment.HF_TOKEN"),
        (dict(environment={"HTTPS_PROXY": "http://me:pw@proxy:80"}), "environment.HTTPS_PROXY"),
        (dict(annotations={"note": TOKEN}), "annotations.note"),
        (dict(annotations={"example.com/api-key": "abc"}), "annotations.example.com/api-key"),
        (dict(labels={TOKEN: "a"}), "labels: a name"),
        (dict(monitor_labels={"a": TOKEN}), "monitor_labels.a"),
        (dict(tolerations=[{"key": "a", "operator": "Equal", "value": TOKEN}]), r"tolerations\[0\].value"),
        (dict(extra_volumes=[{"name": "q", "csi": {"password": "x"}}]), r"extra_volumes\[0\].csi.password"),
        (dict(extra_volumes=[{"name": "q", "nfs": {"o": ["a", f"b={TOKEN}"]}}]), r"extra_volumes\[0\].nfs.o\[1\]"),
        (dict(image=f"r/i:{TOKEN}"), "image"),
    ],
)
def test_credentials_are_for_secrets(changes, where):
    refused(f"{where} holds credentials, which would be readable in the manifests", job, **changes)


def test_what_only_resembles_a_credential_is_accepted():
    environment = {"TOKENIZERS_PARALLELISM": "false", "HTTPS_PROXY": "http://proxy:80", "MAX_TOKENS": "4096"}
    environment |= {"GOOGLE_APPLICATION_CREDENTIALS": "/var/run/key.json", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    secret = {"secretName": "tokens", "items": [{"key": "ca.pem", "path": "ca.pem"}]}
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    job(environment=environment, tolerations=tolerations, extra_volumes=[{"name": "q", "secret": secret}])


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


OTHER = os.geteuid() + 1 if os.name == "posix" else 0


@pytest.mark.parametrize(
    "make, user, reason",
    [
        (lambda folder: folder.symlink_to(folder.parent), None, "is no folder"),
        (lambda folder: folder.touch(), None, "is no folder"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o770)), None, "can be written to"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o757)), None, "can be written to"),
        (lambda folder: folder.with_name(f"liger-{OTHER}").mkdir(mode=0o700), OTHER, "belongs to user"),
    ],
    ids=["link", "file", "group", "world", "other"],
)
def test_a_folder_that_another_may_have_made_is_refused(make, user, reason, temporary, monkeypatch):
    make(temporary)
    if user is not None:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    refused(f"{reason}.*: remove it, or set TMPDIR", steps.once, "s3://b/data", lambda folder: pytest.fail("fetched"))


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_its_form_or_is_refused(name):
    """Hostile values: refused by the field's name, or the same text in every form of manifest."""
    small = functools.partial(job, **({} if name == "gpus" else {"gpus": 1}))  # a port and a monitor, not eight
    accepted = [(value, made) for value, made in hostile(name, small) if made]
    for value, made in accepted:
        text = "".join(render(made, "yaml").values())
        assert list(yaml.load_all(text, LOADER)) == objects(made), value
        assert len(text) < 200_000
    for made in {made.name: made for _, made in accepted}.values():
        for file in render(replace(made, overlay="plain", efa=0, role=None), "kustomize"):
            assert re.fullmatch(r"(base|overlays/\w+)/[a-z0-9.-]+\.yaml", file), file
    assert accepted or not isinstance(getattr(job(), name), dict | list)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_confined_and_hold_no_secrets(kind):
    found = objects(job(kind=kind, secret="tokens", **KINDS[kind]))
    assert pods(found) and len(containers(found)) == 2
    names = {*words("HOME HF_HOME TRITON_CACHE_DIR LIGER_TRITON_BASE_CACHE TORCHINDUCTOR_CACHE_DIR PYTHONUNBUFFERED")}
    names |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_RDZV_ID"} - {"PET_RDZV_ID" if kind == "pytorchjob" else ""}
    policies = [o["spec"]["elasticPolicy"] for o in found if o["kind"] == "PyTorchJob"]
    assert all(policy["rdzvId"] == "run" for policy in policies)  # Kubeflow sets that variable
    for pod in pods(found):
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert all("hostPath" not in volume for volume in pod["volumes"])
        variables = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
        assert 0 < int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    for container in containers(found):
        confined = dict(allowPrivilegeEscalation=False, readOnlyRootFilesystem=True, capabilities={"drop": ["ALL"]})
        assert container["securityContext"] == confined
        assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
        assert {variable["name"] for variable in container["env"]} == names
        folders = {m["mountPath"] for m in container["volumeMounts"]}
        assert folders == {"/cache", "/tmp", "/dev/shm", "/etc/liger", "/shared"}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert not any(o["kind"] == "Secret" for o in found)


def test_processes_meet_where_the_kind_of_job_says():
    flags = {}
    for kind, more in KINDS.items():
        found = objects(job(kind=kind, **more))
        of_runs = [o["spec"]["trainer"]["args"] for o in found if o["kind"] == "TrainJob"]
        (args,) = of_runs or [c["args"] for c in containers(found) if c["name"] != "warm-kernels"]
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


def test_pods_train_what_liger_train_would(tmp_path):
    """By a config that says where pods write, and leaves the number of machines to the flags."""
    made = job(train=dict(steps=7, nproc=3, out="runs/a"))
    (config,) = [o for o in objects(made) if o["kind"] == "ConfigMap"]
    path = tmp_path / "train.json"
    path.write_text(config["data"]["train.json"])
    assert path.read_text() == train_json(made)
    places = dict(out="/shared/runs/a", cache="/shared/data", save="/shared/runs/a/model")
    metrics = dict(metrics_port=9400, metrics_host="0.0.0.0")
    assert TrainConfig.load(path) == replace(made.train, nproc=None, **places, **metrics)
    path.write_text(render(made, "train")["train.json"])
    assert TrainConfig.load(path) == replace(made.train, save="runs/a/model")


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
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert pod["volumes"][-1] == EXTRAS["extra_volumes"][0]
    assert all(c["volumeMounts"][-1] == EXTRAS["extra_mounts"][0] for c in containers(found))
    limits = [c["resources"]["limits"].get("rdma/ib") for c in containers(found) if "resources" in c]
    assert None in limits  # compiling needs no network
    of_trainer = [o["spec"]["trainer"]["resourcesPerNode"] for o in found if o["kind"] == "TrainJob"]
    assert limits[0] == "8" and all(each["limits"]["rdma/ib"] == "8" for each in of_trainer)


def test_a_chart_names_what_it_makes_after_its_release():
    """Nothing but values names the job (test_k8s.py has Helm render two releases)."""
    files = render(job(name="jobname", namespace="spacename"), "helm")
    templates = {name: text for name, text in files.items() if name.startswith("templates/")}
    assert len(templates) == 6 and not any("jobname" in text or "spacename" in text for text in templates.values())
    assert "jobname" in files["Chart.yaml"] and "{{ .Release.Name }}" in files["values.yaml"]
    refused("a chart makes no queues", render, job(queue="team", cluster_queue="gpus"), "helm")


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


def test_versions_of_what_a_cluster_brings_are_named_once():
    """In one table, with which the documentation's and every image's tag agree."""
    sources = (ROOT / "src" / "liger_kernel" / "deploy").glob("*.py")
    outside = "".join(path.read_text() for path in sources if path.name != "job.py")
    wanted = {version for version in API.values() if "/" in version}
    assert len(wanted) > 5 and [version for version in wanted if version in outside] == []
    platform = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    shown = set(re.findall(r"`([a-z0-9.-]+/v1\w*)`", platform))
    assert shown == {v for v in wanted if not v.startswith("networking")}
    assert f"Kubernetes {KUBERNETES} or newer" in platform
    files = [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "".join(path.read_text() for path in files if path.is_file() and path.suffix != ".pyc")
    tags = set(re.findall(r"liger-train:([0-9]+(?:[.][0-9]+)+)", text))
    assert tags == {liger_kernel.__version__.partition("+")[0]}


def test_the_overlay_of_eks_adds_what_is_there():
    plain, eks = job(), job(overlay="eks", efa=32, role="arn:aws:iam::1:role/r", tolerations=[])
    (pod,) = pods(objects(eks))
    assert pod["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert pod["serviceAccountName"] == "run"
    assert "vpc.amazonaws.com" not in json.dumps(objects(plain))
    assert pod["initContainers"][0]["resources"]["limits"] == {"cpu": "32", "memory": "256Gi"}  # compiling needs no GPU


def test_a_queue_suspends_a_job():
    found = objects(job(queue="team", cluster_queue="gpus", quota_nodes=3))
    (run,) = [o for o in found if o["kind"] == "PyTorchJob"]
    assert run["spec"]["runPolicy"]["suspend"] and run["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    (cluster,) = [o for o in found if o["kind"] == "ClusterQueue"]
    quotas = cluster["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    assert {q["name"]: q["nominalQuota"] for q in quotas} == {"cpu": "96", "memory": "768Gi", "nvidia.com/gpu": "24"}
    assert not next(o for o in objects(job()) if o["kind"] == "PyTorchJob")["spec"]["runPolicy"]["suspend"]


def test_rules_and_dashboard_know_every_metric_and_no_other():
    queries = [rule["expr"] for group in monitoring.rules(job())["groups"] for rule in group["rules"]]
    shown = [target["expr"] for panel in monitoring.dashboard()["panels"] for target in panel["targets"]]
    named = lambda texts: set(re.findall(r"\bliger_(\w+)", " ".join(texts)))
    assert named(shown) == EXPORTED.keys()
    assert named(queries) <= EXPORTED.keys()
    page = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    dropped = monitoring.rules(job())["groups"][0]["rules"][-1]
    said = f"less than {100 * float(re.search(r'< ([0-9.]+) [*]', dropped['expr'])[1]):.0f} % of "
    assert said in dropped["annotations"]["summary"] and said in page


@pytest.mark.parametrize("value", ['a "quote"', "back\\slash", "two\nlines", "@age@"])
def test_values_of_rules_are_texts(value):
    """Whatever they hold: the rules are JSON, with marks such as @age@ in their place."""
    _, stuck, *_ = monitoring.rules(job(), dict.fromkeys(monitoring.thresholds(job()), value))["groups"][0]["rules"]
    assert f" < {value} unless " in stuck["expr"]


def test_names_that_manifests_have_are_reserved():
    forms = job().schemas
    assert forms["extra_volumes"]["items"]["properties"]["name"]["not"]["enum"] == [*MOUNTS]
    assert forms["annotations"]["propertyNames"]["not"]["enum"] == [ROLE]
    assert {*labels(job()), *CHART_LABELS} < {*forms["labels"]["propertyNames"]["not"]["enum"]}


def test_the_image_is_what_pods_expect():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    wanted = f"KERNELS={IMAGE_KERNELS}", f"LIGER_TRITON_BASE_CACHE={IMAGE_KERNELS}", f"TRITON_CACHE_DIR={CACHE}/triton"
    wanted += f"--uid {USER} ", f"\nUSER {USER}\n", f"chown liger {CACHE} {SHARED}"
    assert all(part in text for part in wanted)
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for name in line.split()]
    assert len(copied) > 4 and all((ROOT / name).exists() for name in copied)
    context = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert sorted(copied) == sorted(line[1:] for line in context if line.startswith("!"))
    from liger_kernel.compile.targets import TARGETS
    from liger_kernel.model_sizes import MODELS

    defaults = dict(re.findall(r'^ARG (\w+)="([^"]*)"', text, re.M))
    assert set(defaults["MODELS"].split()) <= MODELS.keys() and set(defaults["ARCHS"].split()) <= TARGETS.keys()


def test_rendering_loads_nothing_heavy(user_env):
    code = f"""
import sys
from liger_kernel import cli
assert cli.main(["deploy", "render", {str(JOBS / "plain.yaml")!r}]) == 0
print("LOADED", *{{"torch", "triton", "transformers", "numpy"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], env=user_env, capture_output=True, text=True, check=True)
    assert done.stdout.rpartition("LOADED")[2].strip() == "" and "kind: PyTorchJob" in done.stdout
