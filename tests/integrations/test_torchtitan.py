"""``benchmarks/experts_torchtitan.py``: torchtitan's experts over ranks learn what its FSDP2
learns from the same tokens."""

from __future__ import annotations

import csv
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = importlib.util.find_spec("torchtitan")
if FOUND is None or FOUND.origin is None:
    pytest.skip("tests/integrations/environments.py torchtitan", allow_module_level=True)


def test_steps_of_a_tiny_model(user_env, tmp_path):
    out = tmp_path / "out.csv"
    command = [sys.executable, ROOT / "benchmarks" / "experts_torchtitan.py", out, "--smoke"]
    command += ["--variants", "fsdp2+ep", "fsdp2", "--torchtitan", Path(FOUND.origin).parents[1]]
    command += ["--gpus", "2", "--batch", "2", "--seq", "64", "--steps", "2", "--warmup", "2"]
    done = subprocess.run(command, env=user_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    with open(out, newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["fsdp2+ep", "fsdp2"]
    assert all(row["gpus"] == "2" and row["torchtitan"] == "0.2.2" for row in rows.values())
    exchanged, gathered = ([float(loss) for loss in rows[name]["losses"].split()] for name in rows)
    assert exchanged == pytest.approx(gathered, rel=1e-3)
    assert exchanged[0] == pytest.approx(math.log(2048), rel=0.05)  # of random weights and as many classes
