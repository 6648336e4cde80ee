"""``make kind``: its commands, given to stand-ins of the programs of a cluster, and the drill by processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from quick import further

pytest.importorskip("yaml")

import yaml

from liger_kernel.deploy.job import Job

ROOT = Path(__file__).parents[2]
KIND = ROOT / "deploy" / "kind"
NOTE = '#!/bin/sh\ncd FOLDER\necho "${0##*/} $*" >> calls\n'
PROGRAMS = {
    "docker": "",
    "kind": "",
    # steps go on with each look; after a pod is gone, from its checkpoint
    "liger": """[ "$2" = logs ] || exit 0
grep -q "delete pod" calls && echo "resuming after step 40"
echo "[pod/drill-worker-0/pytorch] step $((20 * $(grep -c "deploy logs" calls)))/100000"
""",
    "kubectl": """case "$*" in
*alerts)
    labels='"labels": {"alertname": "LigerTrainingRestarted"}'
    echo '{"data": {"alerts": [{'$labels', "annotations": {"summary": "anew"}}]}}'
    ;;
*query*) echo '{"data": {"result": [{"value": [0, "7"]}]}}' ;;
*"-f -"*) cat > given ;;
esac
""",
}


@pytest.fixture
def drill(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("drill", KIND / "drill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(NOTE.replace("FOLDER", str(tmp_path)) + text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(module, "LIGER", ("liger",))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return module


def test_a_drill_kills_a_worker_and_waits_for_what_must_follow(drill, tmp_path, capsys):
    drill.drill(drill.Cluster(keep=False))
    calls = [
        call.replace("--context kind-liger-drill ", "").removesuffix(" --context kind-liger-drill")
        for call in (tmp_path / "calls").read_text().splitlines()
        if "deploy logs" not in call and "get --raw" not in call
    ]
    submit, status, delete = (f"liger deploy {verb} {KIND / 'job.yaml'}" for verb in ("submit", "status", "delete"))
    assert calls[0].startswith("docker build -f deploy/Dockerfile -t liger-train:drill --build-arg TORCH_INDEX=")
    assert calls[3] == "kind load docker-image liger-train:drill --name liger-drill"
    assert calls[-7:] == [
        *("kubectl apply --server-side -f -", submit, status),
        *("kubectl delete pod drill-worker-1 --grace-period=0 --force", status, delete),
        "kind delete cluster --name liger-drill",
    ]
    given = yaml.safe_load((tmp_path / "given").read_text())
    assert (
        given["metadata"]["name"] == "drill-text" and len(given["data"]["text.txt"]) < 1_000_000
    )  # a ConfigMap's limit
    said = capsys.readouterr().out
    assert "resuming after step 40" in said and " anew\n" in said and "Loss: 7\n" in said


def test_the_drills_job_finds_what_the_cluster_has():
    job = Job.load(KIND / "job.yaml")
    made = {o["kind"]: o for o in yaml.safe_load_all((KIND / "cluster.yaml").read_text())}
    claim, prometheus = made["PersistentVolumeClaim"]["metadata"], made["Prometheus"]
    assert (claim["name"], claim["namespace"]) == (job.volume, job.namespace)
    assert prometheus["metadata"]["namespace"] == job.monitoring_namespace == made["Namespace"]["metadata"]["name"]
    (subject,) = made["ClusterRoleBinding"]["subjects"]
    account = made["ServiceAccount"]["metadata"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert prometheus["spec"]["serviceAccountName"] == account["name"]
    assert job.config.data.startswith(job.extra_mounts[0]["mountPath"]) and not job.warnings


def test_what_is_missing_is_said(drill, tmp_path):
    assert drill.missing() == ""
    (tmp_path / "kind").unlink()
    assert drill.missing() == "kind not installed"
    (tmp_path / "kind").write_text(""), (tmp_path / "kind").chmod(0o755)
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    assert drill.missing() == "no Docker daemon answers"


def test_what_never_comes_ends_the_drill(drill):
    with pytest.raises(SystemExit, match="not seen within 0 s: the alert"):
        drill.wait("the alert", lambda: "", 0)


@pytest.mark.parametrize("how", further("--processes"))
def test_the_drill_passes_by_processes(how, user_env):
    argv = [sys.executable, str(KIND / "drill.py"), how]
    done = subprocess.run(
        argv, env=user_env | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended with [75, 75]" in done.stdout and "liger_restarts_total" in done.stdout
