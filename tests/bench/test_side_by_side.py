"""``benchmarks/side_by_side.py``: several commands, whose variants are measured one after the other."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_commands_side_by_side(user_env, tmp_path):
    """Each row has the losses of its own command, beside stock's where there is one."""
    tiny = "--model tiny --batch 1 --seq 16 --steps 3 --warmup 1"
    (tmp_path / "commands").write_text(f"{tiny} --against ours,stock\n{tiny} --optimizer adamw --against ours\n")
    env = user_env | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [user_env.get("PYTHONPATH")])]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "benchmarks" / "side_by_side.py", tmp_path / "commands", tmp_path / "out.csv"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["optimizer"], row["accurate"], row["failed"]) for row in rows] == [
        ("stock", "sgd", "True", ""),
        ("ours", "sgd", "True", ""),
        ("ours", "adamw", "", ""),
    ]
    assert done.stdout.count("tiny ours, 1 x 16: ") == 2
