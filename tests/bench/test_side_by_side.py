"""``benchmarks/side_by_side.py``: several commands, whose variants are measured one after the
other."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


TINY = "--model tiny --batch 1 --seq 16 --steps 3 --warmup 1"


def rows_of(env, folder, commands, *mode):
    (folder / "commands").write_text(commands)
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, ROOT / "benchmarks" / "side_by_side.py", folder / "commands", folder / "out.csv", *mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with open(folder / "out.csv", newline="") as file:
        return list(csv.DictReader(file)), done.stdout


@pytest.mark.slow
def test_commands_side_by_side(user_env, tmp_path):
    """Each row has the losses of its own command, beside stock's where there is one."""
    rows, said = rows_of(user_env, tmp_path, f"{TINY} --against ours,stock\n{TINY} --optimizer adamw --against ours\n")
    assert [(row["variant"], row["optimizer"], row["accurate"], row["failed"]) for row in rows] == [
        ("stock", "sgd", "True", ""),
        ("ours", "sgd", "True", ""),
        ("ours", "adamw", "", ""),
    ]
    assert said.count("tiny ours, 1 x 16: ") == 2


@pytest.mark.slow
def test_one_step(user_env, tmp_path):
    (row,), said = rows_of(user_env, tmp_path, f"{TINY} --against ours", "--without-attention")
    assert not row["failed"] and float(row["step_ms"]) > 0
    assert "tiny ours, 1 x 16: " in said


def test_weights_are_saved_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from side_by_side import SavedOnce

    saved = []

    def save(spec, folder):
        saved.append(spec["config"]["layers"])
        if saved.count(3) != 1:  # the first time, that one fails
            Path(spec["unsloth"]).mkdir()

    once = SavedOnce(save)
    for number, layers in enumerate((1, 2, 1, 3, 3)):
        (tmp_path / str(number)).mkdir()
        once(
            {"config": {"layers": layers}, "dtype": "bfloat16", "unsloth": str(tmp_path / str(number) / "weights")},
            tmp_path,
        )
    assert saved == [1, 2, 3, 3]
    assert (tmp_path / "2" / "weights").resolve() == tmp_path / "0" / "weights" and not (
        tmp_path / "3" / "weights"
    ).exists()
    assert (tmp_path / "4" / "weights").is_dir()


def test_attention_that_computes_nothing():
    """Beside the real operator: shapes and types of all that it returns, and zero as gradients
    of what it was given."""
    code = """
import torch, side_by_side
q, k, v = (torch.randn(2, h, 5, 8, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
side_by_side.replace_attention("CPU")
out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
assert torch.equal(out, q) and out.transpose(1, 2).is_contiguous() and (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
out.sum().backward()
assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
