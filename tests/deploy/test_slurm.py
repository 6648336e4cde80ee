"""deploy/slurm.sbatch, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import children_of, until
from quick import further
from small_runs import write_jsonl

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"
JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
JOB["SLURM_CPUS_PER_TASK"] = "64"
SCONTROL = '[ $1 = show ] && printf "localhost\\nother\\n" || echo "$@" >> calls'
# without flags of its own; liger then is a child of the script
SRUN = 'echo srun "$@" >> calls; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
# the same for two machines, which get the signals that srun gets
SRUN_ON_TWO = f"""#!{sys.executable}
import signal, subprocess, sys
command = [word for i, word in enumerate(sys.argv[1:]) if "liger" in sys.argv[1 : i + 2]]
tasks = [subprocess.Popen(command) for _ in range(2)]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
LIGER = f'exec {sys.executable} -m liger_kernel.cli "$@"'


@pytest.fixture
def slurm(tmp_path, user_env):
    """What runs the script in ``tmp_path``, with the programs given."""

    def started(*argv: str, **programs: str) -> subprocess.Popen:
        for name, text in {"scontrol": SCONTROL, "squeue": "echo RUNNING", "srun": SRUN, **programs}.items():
            path = tmp_path / name
            path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        env = user_env | JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        said = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(["bash", str(SCRIPT), *argv], cwd=tmp_path, env=env, **said)

    return started


@pytest.mark.parametrize(
    ("ends", "code", "state", "again"),
    [
        ("exit 0", 0, "RUNNING", False),
        ("exit 2", 2, "RUNNING", False),
        ("exit 75", 75, "RUNNING", True),
        ("exit 75", 75, "COMPLETING", False),  # scancel
        ("kill -TERM $PPID; sleep 0.1; exit 75", 75, "RUNNING", True),  # Slurm may tell the script as well
    ],
)
def test_what_has_saved_goes_back_to_the_queue(ends, code, state, again, slurm, tmp_path):
    script = slurm("--config", "a b.yaml", liger=f'echo liger "$@" >> calls; {ends}', squeue=f"echo {state}")
    assert script.wait(30) == code, script.stdout.read()
    srun, liger, *requeued = (tmp_path / "calls").read_text().splitlines()
    assert srun.startswith("srun --cpus-per-task=64 --kill-on-bad-exit=0 liger train")
    wanted = "liger train --nproc 0 --nnodes 2 --rdzv-endpoint localhost:22345 --config a b.yaml"
    assert liger == wanted and requeued == ["requeue 12345"] * again


@pytest.mark.parametrize("nodes", further(2))
def test_a_job_that_is_told_to_stop_continues_from_its_queue(nodes, slurm, tmp_path):
    write_jsonl(tmp_path / "text.jsonl", ({"text": f"{i} and {i + 1}. " * 40} for i in range(200)))
    sizes = "--length 32 --batch 2 --hidden 32 --layers 1 --heads 2 --vocab 300 --steps 200 --device cpu --log-every 1"
    sizes += " --timeout 60 --checkpoint-every 100"
    argv = f"{sizes} --nproc 1 --parallel ddp --eval-fraction 0 --data text.jsonl --out run".split()
    lines = tmp_path / "run" / "metrics.jsonl"
    first = slurm(*argv, srun=SRUN_ON_TWO, liger=LIGER)
    until(lambda: first.poll() is not None or (lines.exists() and len(lines.read_text().splitlines()) > 5), 240)
    assert first.poll() is None, first.communicate()[0]
    for pid in (first.pid, *children_of(first.pid)):
        os.kill(pid, signal.SIGTERM)
    output = first.communicate(timeout=240)[0]
    assert first.returncode == 75 and (tmp_path / "calls").read_text() == "requeue 12345\n", output
    stopped = len(lines.read_text().splitlines())
    assert stopped < 200
    second = slurm(*argv, srun=SRUN_ON_TWO, liger=LIGER)
    output = second.communicate(timeout=240)[0]
    assert second.returncode == 0 and f"resuming after step {stopped}" in output, output
    assert len(lines.read_text().splitlines()) == 200 and (tmp_path / "calls").read_text() == "requeue 12345\n"
