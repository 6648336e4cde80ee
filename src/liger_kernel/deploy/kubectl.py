"""A job on its cluster, through kubectl: submitted, looked at, and deleted."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from liger_kernel.deploy.job import API, Job
from liger_kernel.deploy.manifests import PREEMPTED, Object, labels, objects, trainer
from liger_kernel.deploy.render import dump
from liger_kernel.train.mistakes import UserError, aligned

# a queue and its quota are there for other jobs, too
SHARED_KINDS = ("ResourceFlavor", "ClusterQueue", "LocalQueue")
EXITS = {PREEMPTED: "told to stop, and saved", 2: "a mistake in the job: see its logs"}


class Cluster:
    """The namespace of ``job`` in a context of kubectl's configuration."""

    def __init__(self, job: Job, context: str | None = None) -> None:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise UserError(
                "this needs kubectl on the PATH; or apply the files of `liger deploy render` in another way"
            )
        self.job = job
        self.selector = ",".join(f"{name}={value}" for name, value in labels(job).items())
        self.command = [kubectl, *(["--context", context] if context else []), "--namespace", job.namespace]

    def run(self, *argv: str, given: str | None = None) -> int:
        """kubectl's exit code; what it says goes to the terminal."""
        return subprocess.run([*self.command, *argv], input=given, text=True, check=False).returncode

    def submit(self, dry_run: str | None = None) -> int:
        return self._apply("apply", dry_run, objects(self.job))

    def delete(self, dry_run: str | None = None) -> int:
        """Delete the run first, with its pods, which save a checkpoint; then what they used."""
        own = [o for o in reversed(objects(self.job)) if o["kind"] not in SHARED_KINDS]
        # foreground: kubectl returns when the pods have ended
        code = self._apply("delete", dry_run, own, "--ignore-not-found", "--cascade=foreground")
        if not code and not dry_run:
            volume = self.job.volume and f"{self.job.config.out} in the volume {self.job.volume}"
            print("still there:", ", ".join(filter(None, (volume, self.job.train.store))))
        return code

    def _apply(self, verb: str, dry_run: str | None, given: list[Object], *flags: str) -> int:
        return self.run(verb, *flags, *[f"--dry-run={dry_run}"] * bool(dry_run), "-f", "-", given=dump(given))

    def logs(self, container: str | None, follow: bool, previous: bool, tail: int) -> int:
        """Of all nodes, because any of them may have rank 0, which writes the steps."""
        flags = [f"--tail={tail}", *["--follow"] * follow, *["--previous"] * previous]
        return self.run("logs", *self._of_trainer(container), *flags)

    def _of_trainer(self, container: str | None = None) -> list[str]:
        """Flags for the logs of all pods; without the last one, kubectl reads five at most."""
        flags = ["--selector", self.selector, "--container", container or trainer(self.job), "--prefix"]
        return [*flags, f"--max-log-requests={self.job.nodes + 1}"]

    def status(self) -> int:
        """Print the state of the run and of each pod, and its last line. Returns 1 if the run has
        failed or is not there."""
        run = objects(self.job)[-1]
        group, _, version = API[run["kind"]].partition("/")
        found = self._read("get", f"{run['kind'].lower()}.{version}.{group}/{self.job.name}", "--output=json")
        if found is None:
            return 1
        state = _state(json.loads(found).get("status", {}))
        print(f"{run['kind']} {self.job.name}: {state}")
        pods = json.loads(self._read("get", "pods", "--selector", self.selector, "--output=json") or '{"items": []}')
        if pods["items"]:
            print(aligned([["pod", "restarts", "node", "state"], *sorted(map(_pod, pods["items"]))], {0, 1, 2, 3}))
        if any(pod["status"].get("phase") == "Running" for pod in pods["items"]):
            # pods that still compile kernels have no log yet, which is no error here
            print(self._read("logs", *self._of_trainer(), "--tail=1", quiet=True) or "", end="")
        return int(state.startswith("Failed"))

    def _read(self, *argv: str, quiet: bool = False) -> str | None:
        """What kubectl prints; None after an error."""
        errors = subprocess.DEVNULL if quiet else None
        done = subprocess.run(
            [*self.command, *argv], stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", check=False
        )
        return None if done.returncode and not quiet else done.stdout


def _state(status: dict[str, Any]) -> str:
    """The newest condition that holds. Suspended is a run that waits in its queue."""
    held = [condition for condition in status.get("conditions") or [] if condition.get("status") == "True"]
    # a run that has ended keeps its earlier conditions, some of the same second
    ended = [c for c in held if c["type"] in ("Failed", "Succeeded", "Complete", "Completed")]
    newest = max(ended or held, key=lambda condition: condition.get("lastTransitionTime") or "", default=None)
    if newest is None:
        return "no condition yet"
    restarts = f", restarted {status['restarts']} times" if status.get("restarts") else ""
    return f"{newest['type']}{restarts}" + (f": {newest['message']}" if newest.get("message") else "")


def _pod(pod: Object) -> list[str]:
    """Its name, restarts, node and state."""
    of_trainer = pod["status"].get("containerStatuses") or []
    restarts = sum(status.get("restartCount", 0) for status in of_trainer)
    state = next(_reasons(pod["status"]), pod["status"].get("phase", "Unknown"))
    return [pod["metadata"]["name"], str(restarts), pod["spec"].get("nodeName") or "-", state]


def _reasons(status: dict[str, Any]) -> Iterator[str]:
    """What says more of a pod than its phase, the most telling first."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"Pending: {condition.get('message', 'not scheduled')}"
    # a container that runs says nothing but its restarts
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        name, now, before = container["name"], container.get("state") or {}, container.get("lastState") or {}
        if waits := now.get("waiting", {}).get("reason"):
            if waits not in ("PodInitializing", "ContainerCreating"):
                yield f"{name}: {waits}: {now['waiting'].get('message', '')}{_ended(before)}"
        elif now.get("terminated", {}).get("exitCode"):
            yield f"{name}{_ended(now)}"
        elif "running" in now and name == "warm-kernels":
            yield f"{name} compiles"
        elif "running" in now and before:
            yield f"{status['phase']}{_ended(before)}"


def _ended(state: dict[str, Any]) -> str:
    """How a container ended, from its state."""
    if not (end := state.get("terminated")):
        return ""
    code = end["exitCode"]
    return f"; ended with {code} ({EXITS.get(code) or end.get('reason', 'no reason given')})"
