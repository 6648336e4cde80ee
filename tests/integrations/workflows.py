"""What the tests of both versions of Flyte share: a job, its text, a rank to kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from processes import children_of, until
from small_runs import write_jsonl

STEPS = 200  # seconds, of which the rank that is killed sees the first
TRAIN = dict(length=64, batch=2, hidden=32, layers=1, heads=2, vocab=400, nproc=2, parallel="ddp", steps=STEPS)
TRAIN |= dict(checkpoint_every=20, checkpoint_async=False, log_every=2, eval_fraction=0.02, device="cpu")
TRAIN |= dict(max_restarts=2, timeout=120)


def job_file(folder: Path, **changes) -> Path:
    """A job that two processes of this machine can do, on text from this repository."""
    docs = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    text = write_jsonl(folder / "text.jsonl", ({"text": path.read_text()} for path in docs))
    train = TRAIN | {"data": text, "store": (folder / "store").as_uri()} | changes.pop("train", {})
    path = folder / "job.json"
    job = {"name": "tiny", "image": "registry.test/liger:1", "nodes": 1, "gpus": 0, "cpu": "2", "memory": "4Gi"}
    path.write_text(json.dumps({**job, **changes, "train": train}))
    return path


def large_job(folder: Path) -> Path:
    """A job for 2 to 4 machines with 8 GPUs each."""
    train = dict(parallel="fsdp2", nproc=None, model="m", device="auto", out="runs/tiny")
    return job_file(folder, gpus=8, nodes=4, min_nodes=2, volume="claim", secret="tokens", arch="sm90", train=train)


def pod_of_elastic_training(task: dict) -> dict:
    """The pod of a serialised task that trains ``large_job``."""
    assert task["type"] == "pytorch" and task["metadata"]["interruptible"]
    assert task["metadata"]["retries"]["retries"] == 10 and task["custom"]["workerReplicas"]["replicas"] == 4
    elastic = dict(minReplicas=2, maxReplicas=4, nprocPerNode=8, maxRestarts=2, rdzvBackend="c10d")
    assert task["custom"]["elasticConfig"].items() >= elastic.items()
    return task["k8sPod"]["podSpec"]


def started(*argv, env, cwd=None) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([*map(str, argv)], env=env, cwd=cwd, **pipes)


def environment(folder: Path, job: Path) -> dict[str, str]:
    """Of processes that run this job; files of Flyte's own stay in ``folder``."""
    source = str(Path(__file__).parents[2] / "src")
    places = {"HOME": folder, "TMPDIR": folder / "tmp", "FLYTE_INTERNAL_EXECUTION_ID": "run"}
    (folder / "tmp").mkdir(exist_ok=True)
    more = {"LIGER_JOB": str(job), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return inherited | {name: str(value) for name, value in places.items()} | more


def kill_a_rank(process, store: Path) -> None:
    """SIGKILL to the last rank that ``process`` has started, once a checkpoint is in the store."""
    until(lambda: process.poll() is not None or (store / "checkpoints" / "latest").is_file(), 180)
    assert process.poll() is None
    below = lambda pid: [one for child in children_of(pid) for one in (child, *below(child))]
    # a rank is a command of ours, or a function that multiprocessing runs
    marks = b"liger_kernel.cli", b"spawn_main"
    is_rank = lambda pid: any(mark in Path(f"/proc/{pid}/cmdline").read_bytes() for mark in marks)
    os.kill(max(pid for pid in below(process.pid) if is_rank(pid)), signal.SIGKILL)
