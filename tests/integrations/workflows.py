"""What the tests of both versions of Flyte share: a job, its text, a rank to kill."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

STEPS = 200  # seconds, of which the rank that is killed sees the first
TRAIN = dict(length=64, batch=2, hidden=32, layers=1, heads=2, vocab=400, nproc=2, parallel="ddp", steps=STEPS)
TRAIN |= dict(checkpoint_every=20, checkpoint_async=False, log_every=2, eval_fraction=0.02, device="cpu")
TRAIN |= dict(max_restarts=2, timeout=120)


def job_file(folder: Path, **changes) -> Path:
    """A job that two processes of this machine can do, on text from this repository."""
    text = folder / "text.jsonl"
    docs = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    text.write_text("".join(json.dumps({"text": path.read_text()}) + "\n" for path in docs))
    train = TRAIN | {"data": str(text), "store": (folder / "store").as_uri()} | changes.pop("train", {})
    path = folder / "job.json"
    job = {"name": "tiny", "image": "registry.test/liger:1", "nodes": 1, "gpus": 0, "cpu": "2", "memory": "4Gi"}
    path.write_text(json.dumps({**job, **changes, "train": train}))
    return path


def environment(folder: Path, job: Path) -> dict[str, str]:
    """Of processes that run this job; files of Flyte's own stay in ``folder``."""
    source = str(Path(__file__).parents[2] / "src")
    places = {"HOME": folder, "TMPDIR": folder / "tmp", "FLYTE_INTERNAL_EXECUTION_ID": "run"}
    (folder / "tmp").mkdir(exist_ok=True)
    more = {"LIGER_JOB": str(job), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    return (
        {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {name: str(value) for name, value in places.items()}
        | more
    )


def kill_a_rank(process, store: Path) -> None:
    """SIGKILL to the last rank that ``process`` has started, once the first checkpoint is in the
    store."""
    end = time.monotonic() + 180
    while process.poll() is None and not (store / "checkpoints" / "latest").is_file():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert process.poll() is None
    parents = {
        int(path.parent.name): int(path.read_text().rpartition(")")[2].split()[1])
        for path in Path("/proc").glob("[0-9]*/stat")
    }

    def below(pid: int) -> list[int]:
        children = [child for child, parent in parents.items() if parent == pid]
        return children + [one for child in children for one in below(child)]

    # a rank is a command of ours, or a function that multiprocessing runs
    is_rank = lambda pid: any(
        mark in Path(f"/proc/{pid}/cmdline").read_bytes() for mark in (b"liger_kernel.cli", b"spawn_main")
    )
    os.kill(max(pid for pid in below(process.pid) if is_rank(pid)), signal.SIGKILL)
