"""``make kind``: the way of a job on a cluster, without a GPU. Builds the image for CPUs, starts a
cluster in containers, runs a job of two workers, kills one, and shows the resume, the alert and what
the dashboard shows.

Without Docker, kind or kubectl, two launchers on this machine are the pods, and there are no
Prometheus and no containers. ``--keep`` leaves the cluster there; ``--processes`` uses none.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.monitoring import dashboard

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOB = HERE / "job.yaml"
ALERT = "LigerTrainingRestarted"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# the versions of docs/guides/clusters.md
OPERATORS = (
    ("-k", "https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"),
    ("-f", "https://github.com/prometheus-operator/prometheus-operator/releases/download/v0.86.0/bundle.yaml"),
)
DEPLOYMENTS = {"training-operator": "kubeflow", "prometheus-operator": "default"}
PROXY = "/api/v1/namespaces/monitoring/services/prometheus-operated:9090/proxy/api/v1/"
LIGER = (sys.executable, "-m", "liger_kernel.cli")


def said(*argv: str, check: bool = True, **options: Any) -> str:
    """What a command prints; an error ends the drill with what it says."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, **options)
    if check and done.returncode:
        sys.exit(f"failed with {done.returncode}: {shlex.join(argv)}")
    return done.stdout


def shown(*argv: str, **options: Any) -> None:
    print(f"\n$ {shlex.join(argv)}", flush=True)
    if code := subprocess.run(argv, check=False, **options).returncode:
        sys.exit(f"failed with {code}")


def wait(what: str, found: Callable[[], Any], seconds: int = 300) -> Any:
    print(f"\nwaiting for {what}", end="", flush=True)
    end = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > end:
            sys.exit(f"\nnot seen within {seconds} s: {what}")
        time.sleep(2)
        print(".", end="", flush=True)
    print(f" {value}", flush=True)
    return value


def text() -> str:
    """What the model is trained on."""
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs" / "guides").glob("*.md")))


class Cluster:
    """In containers."""

    def __init__(self, keep: bool) -> None:
        self.keep, self.context = keep, ("--context", "kind-liger-drill")

    def kubectl(self, *argv: str, **options: Any) -> str:
        return said("kubectl", *self.context, *argv, **options)

    def start(self) -> None:
        arguments = {"TORCH_INDEX": CPU_TORCH, "MODELS": "", "ARCHS": ""}
        flags = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        shown("docker", "build", "-f", "deploy/Dockerfile", "-t", Job.load(JOB).image, *flags, ".", cwd=ROOT)
        if "liger-drill" not in said("kind", "get", "clusters").split():
            shown("kind", "create", "cluster", "--name", "liger-drill", "--wait", "5m")
        shown("kind", "load", "docker-image", Job.load(JOB).image, "--name", "liger-drill")
        for operator in OPERATORS:
            shown("kubectl", *self.context, "apply", "--server-side", *operator)
        for name, namespace in DEPLOYMENTS.items():
            shown("kubectl", *self.context, "rollout", "status", f"deployment/{name}", "-n", namespace, "--timeout=5m")
        shown("kubectl", *self.context, "apply", "-f", str(HERE / "cluster.yaml"))
        data = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "drill-text"},
            "data": {"text.txt": text()},
        }
        self.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump(data))
        self.liger("submit")

    def liger(self, command: str) -> None:
        shown(*LIGER, "deploy", command, str(JOB), *self.context)

    def log(self) -> str:
        return said(*LIGER, "deploy", "logs", str(JOB), *self.context, check=False, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.liger("status")
        # not the first: the others meet there, and all would start anew
        shown("kubectl", *self.context, "delete", "pod", "drill-worker-1", "--grace-period=0", "--force")

    def alert(self) -> str:
        alerts = self.ask("alerts", check=False)["alerts"]
        return next((a["annotations"]["summary"] for a in alerts if a["labels"]["alertname"] == ALERT), "")

    def ask(self, path: str, check: bool = True) -> dict[str, Any]:
        found = self.kubectl("get", "--raw", PROXY + path, check=check, stderr=None if check else subprocess.DEVNULL)
        return json.loads(found)["data"] if found else {"alerts": []}

    def value(self, query: str) -> float | None:
        found = self.ask(f"query?query={urllib.parse.quote(query)}")["result"]
        return float(found[0]["value"][1]) if found else None

    def end(self) -> None:
        self.liger("status")
        self.liger("delete")
        if not self.keep:
            shown("kind", "delete", "cluster", "--name", "liger-drill")


class Processes:
    """Two launchers on this machine in the place of pods, each with a rank."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="liger-drill-"))
        self.pods: list[subprocess.Popen] = []
        self.ports = [free_port() for _ in range(3)]
        atexit.register(self.abandon)

    def abandon(self) -> None:
        for pod in self.pods:
            pod.kill()

    def start(self) -> None:
        config = Job.load(JOB).config
        (self.folder / "text.txt").write_text(text())
        here = {name: str(self.folder / name) for name in ("out", "save", "cache", "text.txt")}
        here = {"data": here.pop("text.txt"), **here, "metrics_host": "127.0.0.1"}
        (self.folder / "train.json").write_text(json.dumps(dataclasses.asdict(config) | here))
        self.add(self.ports[1])
        # the first one has to be where all meet: it is the one that stays
        wait("the first launcher", lambda: "listens" * listens(self.ports[0]))
        self.add(self.ports[2])

    def add(self, port: int) -> None:
        meet = ("--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{self.ports[0]}")
        argv = (*LIGER, "train", "--config", str(self.folder / "train.json"), *meet, "--metrics-port", str(port))
        print(f"\n$ {shlex.join(argv)}", flush=True)
        with (self.folder / "log").open("a") as log:
            self.pods.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        print(f"\nkilling launcher {self.pods[1].pid}", flush=True)
        self.pods.pop(1).kill()
        self.add(self.ports[2])  # as a controller does

    def metrics(self) -> str:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/metrics", timeout=5).read().decode()
        except OSError:
            return ""

    def alert(self) -> str:
        """The metric whose growth Prometheus would report."""
        found = re.search(r"^liger_restarts_total.* [1-9]\d*(\.0)?$", self.metrics(), re.M)
        return found[0] if found else ""

    def value(self, query: str) -> float | None:
        name = re.search(r"liger_\w+", query)
        found = re.search(rf"^{name[0]}\{{.*\}} (\S+)$", self.metrics(), re.M) if name else None
        value = float(found[1]) if found else None
        return time.time() - value if value and query.startswith("time()") else value

    def end(self) -> None:
        for pod in self.pods:
            pod.send_signal(signal.SIGTERM)
        codes = [pod.wait(300) for pod in self.pods]
        latest = (self.folder / "out" / "checkpoints" / "latest").read_text().split()
        print(f"\nSIGTERM: ended with {codes} (75 is saved); newest checkpoint {latest[0]}")
        if any(code != 75 for code in codes):
            sys.exit(self.log()[-2000:])
        shutil.rmtree(self.folder)


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def missing() -> str:
    """What a cluster in containers lacks here."""
    if absent := [name for name in ("docker", "kind", "kubectl") if not shutil.which(name)]:
        return f"{' and '.join(absent)} not installed"
    asked = subprocess.run(["docker", "info"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return "no Docker daemon answers" if asked.returncode else ""


def drill(place: Cluster | Processes) -> None:
    step = lambda: max(map(int, re.findall(r"step +(\d+)/", place.log())), default=0)
    place.start()
    wait("step 50", lambda: step() >= 50 and f"step {step()}", 1200)
    place.kill()
    resumed = lambda: (re.findall(r"resuming after step \d+", place.log()) or [""])[-1]
    wait("the run to continue from its checkpoint", resumed)
    wait(f"the alert {ALERT}", place.alert)
    before = step()
    wait("further steps", lambda: step() > before + 20 and f"step {step()}")
    print("\nthe dashboard shows:")
    for panel in dashboard()["panels"]:
        values = [place.value(target["expr"].replace('=~"$run"', '=~".*"')) for target in panel["targets"]]
        print(f"  {panel['title']}: {', '.join('-' if value is None else f'{value:.4g}' for value in values)}")
    place.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the cluster there")
    parser.add_argument("--processes", action="store_true", help="use processes of this machine, no containers")
    a = parser.parse_args()
    reason = "asked for" if a.processes else missing()
    if reason:
        print(f"by processes of this machine, without containers, scheduler and Prometheus: {reason}")
    drill(Processes() if reason else Cluster(a.keep))
    print("\nthe drill passed" + (", by processes" if reason else ""))


if __name__ == "__main__":
    main()
