"""`liger deploy submit`, `status`, `logs` and `delete`, with a stand-in for kubectl that notes what it is
told and answers from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml

from liger_kernel import cli
from liger_kernel.deploy.job import Job
from liger_kernel.deploy.kubectl import SHARED_KINDS
from liger_kernel.deploy.manifests import objects

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "deploy" / "jobs" / "plain.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# kubectl's answer is the file that is called as the last resource or command that it is asked for
STAND_IN = """#!/bin/sh
cd FOLDER
echo "$@" >> calls
for word in "$@"; do
    case $word in
    apply | delete) exec /bin/cat > given ;;
    pods | logs) answer=$word ;;
    *job.v1.*) answer=run ;;
    esac
done
[ -e $answer ] || { echo "Error from server (NotFound): $answer" >&2; exit 1; }
exec /bin/cat $answer
"""
SELECTOR = "--selector app.kubernetes.io/name=liger-train,app.kubernetes.io/instance=llama-sft"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(STAND_IN.replace("FOLDER", str(tmp_path)))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def called(folder):
    return (folder / "calls").read_text().splitlines()


def test_without_kubectl_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["deploy", "status", str(PLAIN)]) == 2
    assert "needs kubectl on the PATH" in capsys.readouterr().err


def test_what_is_submitted_is_what_is_rendered(cluster):
    assert cli.main(["deploy", "submit", str(PLAIN), "--dry-run", "server", "--context", "there"]) == 0
    assert called(cluster) == ["--context there --namespace default apply --dry-run=server -f -"]
    assert list(yaml.load_all((cluster / "given").read_text(), LOADER)) == objects(Job.load(PLAIN))


def test_what_is_deleted_is_the_jobs_own_and_the_run_first(cluster, capsys):
    text = PLAIN.read_text() + "  store: s3://bucket/run\ncluster_queue: gpus\nquota_nodes: 2\n"
    (cluster / "job.yaml").write_text(text)
    assert cli.main(["deploy", "delete", str(cluster / "job.yaml")]) == 0
    kinds = [o["kind"] for o in yaml.load_all((cluster / "given").read_text(), LOADER)]
    made = [o["kind"] for o in objects(Job.load(cluster / "job.yaml"))]
    assert set(SHARED_KINDS) < set(made) and kinds[0] == "PyTorchJob"
    assert kinds == [kind for kind in reversed(made) if kind not in SHARED_KINDS]
    wanted = "still there: /shared/runs/llama-sft in the volume training, s3://bucket/run\n"
    assert capsys.readouterr().out == wanted
    assert cli.main(["deploy", "delete", str(cluster / "job.yaml"), "--dry-run", "client"]) == 0
    assert capsys.readouterr().out == "" and "--dry-run=client" in called(cluster)[-1]


def test_logs_are_those_of_all_nodes(cluster, capfd):
    (cluster / "logs").write_text("a line\n")
    assert cli.main(["deploy", "logs", str(PLAIN)]) == 0
    assert cli.main(["deploy", "logs", str(PLAIN), "--container", "warm-kernels", "-f", "-p", "--tail", "3"]) == 0
    wanted = f"--namespace default logs {SELECTOR} --container"
    assert called(cluster) == [
        f"{wanted} pytorch --prefix --max-log-requests=5 --tail=-1",
        f"{wanted} warm-kernels --prefix --max-log-requests=5 --tail=3 --follow --previous",
    ]
    assert capfd.readouterr().out == "a line\na line\n"


def container(name="pytorch", restarts=0, last=None, **state):
    return {"name": name, "restartCount": restarts, "state": state, "lastState": last or {}}


ended = lambda code, reason="Error": {"terminated": {"exitCode": code, "reason": reason}}
waiting = lambda reason, **more: {"waiting": {"reason": reason} | more}
RUNNING = {"running": {}}
FULL = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}


def pod(phase, more=(), /, **of_trainer):
    return {"phase": phase, **dict(more), **({"containerStatuses": [container(**of_trainer)]} if of_trainer else {})}


COMPILES = {"initContainerStatuses": [container("warm-kernels", **RUNNING)]}
# and what is said of it
PODS = [
    (pod("Running", **RUNNING), "Running"),
    (pod("Running", restarts=2, last=ended(75), **RUNNING), "Running; ended with 75 (told to stop, and saved)"),
    (pod("Running", restarts=1, last=ended(137, "OOMKilled"), **RUNNING), "Running; ended with 137 (OOMKilled)"),
    (pod("Pending", {"conditions": [FULL]}), f"Pending: {FULL['message']}"),
    (pod("Pending", COMPILES, **waiting("PodInitializing")), "warm-kernels compiles"),
    (pod("Pending", **waiting("ImagePullBackOff", message="no i:1")), "pytorch: ImagePullBackOff: no i:1"),
    (
        pod("Running", restarts=3, last=ended(2), **waiting("CrashLoopBackOff")),
        "pytorch: CrashLoopBackOff: ; ended with 2 (a mistake in the job: see its logs)",
    ),
    (pod("Failed", **ended(1)), "pytorch; ended with 1 (Error)"),
    (pod("Succeeded", **ended(0, "Completed")), "Succeeded"),
    (pod("Unknown"), "Unknown"),
]


def test_status_shows_the_run_each_pod_and_the_last_line(cluster, capsys):
    time = "2026-11-28T01:00:0{}Z".format
    conditions = [
        {"type": "Created", "status": "True", "lastTransitionTime": time(1)},
        {"type": "Running", "status": "True", "lastTransitionTime": time(2), "message": "is running."},
        {"type": "Restarting", "status": "False", "lastTransitionTime": time(3)},
    ]
    (cluster / "run").write_text(json.dumps({"status": {"conditions": conditions}}))
    names = [f"llama-sft-worker-{i}" for i in range(len(PODS))]
    pods = [
        {"metadata": {"name": name}, "spec": {"nodeName": "a"} if i else {}, "status": status}
        for i, (name, (status, _)) in enumerate(zip(names, PODS))
    ]
    (cluster / "pods").write_text(json.dumps({"items": pods[::-1]}))
    (cluster / "logs").write_text("[pod/llama-sft-worker-1/pytorch] step 7/2000\n")
    assert cli.main(["deploy", "status", str(PLAIN)]) == 0
    first, titles, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "PyTorchJob llama-sft: Running: is running."
    assert titles.split() == ["pod", "restarts", "node", "state"]
    assert [row.split("  ", 1)[0].strip() for row in rows] == names
    assert [row[titles.index("state") :] for row in rows] == [said for _, said in PODS]
    assert last == "[pod/llama-sft-worker-1/pytorch] step 7/2000"
    assert called(cluster)[0] == "--namespace default get pytorchjob.v1.kubeflow.org/llama-sft --output=json"


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        ({}, "no condition yet", 0),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, "Suspended", 0),
        (
            {
                "restarts": 3,
                "conditions": [
                    {"type": "Failed", "status": "True", "lastTransitionTime": "1", "message": "gave up"},
                    {"type": "Running", "status": "True", "lastTransitionTime": "1"},
                ],
            },
            "Failed, restarted 3 times: gave up",
            1,
        ),
    ],
)
def test_a_run_without_pods_has_a_state(status, said, code, cluster, capsys):
    (cluster / "run").write_text(json.dumps({"status": status}))
    (cluster / "pods").write_text('{"items": []}')
    assert cli.main(["deploy", "status", str(PLAIN)]) == code
    assert capsys.readouterr().out == f"PyTorchJob llama-sft: {said}\n"


def test_a_run_that_is_not_there_fails(cluster, capfd):
    assert cli.main(["deploy", "status", str(PLAIN)]) == 1
    assert "NotFound" in capfd.readouterr().err
