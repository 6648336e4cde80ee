"""``benchmarks/side_by_side.py``: several commands, whose variants are measured one after the other;
and ``step_rivals.py``: more variants."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import processes
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


def test_attention_that_computes_nothing(tmp_path):
    """Shapes and types of all that the real operator returns, and zero as gradients."""
    code = """
import torch, side_by_side
q, k, v = (torch.randn(2, h, 5, 8, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
side_by_side.replace_attention("CPU")
out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
assert torch.equal(out, q) and out.transpose(1, 2).is_contiguous() and (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
out.sum().backward()
assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))
"""  # noqa: E501
    exit_code, said = processes.forked(["-c", code], dict(os.environ), tmp_path / "said")
    assert exit_code == 0, said


@pytest.fixture
def rivals(monkeypatch):
    """``liger bench step`` with the variants of campaigns."""
    import step_rivals

    from liger_kernel.bench import step

    for name in ("VARIANTS", "NEEDS_FP8"):
        monkeypatch.setattr(step, name, dict(getattr(step, name)))
    for name in ("parser_of", "refused", "spec_of", "CHILD"):
        monkeypatch.setattr(step, name, getattr(step, name))
    step_rivals.register()
    return step


def test_layers_of_torchao(rivals, tmp_path):
    """Linear layers but the head, in a model that we patch."""
    torchao = pytest.importorskip("torchao.float8.float8_linear")
    import step_rivals
    import torch

    a = rivals.parse(["--model", "tiny", "--fp8", "rowwise", "--against", "torchao", "--seq", "8"])
    spec = rivals.spec_of(a, "tiny", "torchao", tmp_path, False)
    assert (spec["package"], spec["fp8"], spec["compile"]) == (str(rivals.PACKAGE), None, "layers")
    model = step_rivals.load_child(spec["child"]).models.build(spec, torch.device("cpu"))
    assert sum(type(m) is torchao.Float8Linear for m in model.modules()) == 14
    assert type(model.lm_head) is torch.nn.Linear


UNSLOTH = """
import sys

assert not {"transformers", "peft"} & sys.modules.keys(), "it has to come first"
import os, peft, transformers


class FastLanguageModel:
    def from_pretrained(path, max_seq_length, dtype, use_gradient_checkpointing, local_files_only, **options):
        assert os.environ["HF_HUB_OFFLINE"] == "1" and max_seq_length == 64 and use_gradient_checkpointing == "unsloth"
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype), None

    def get_peft_model(model, use_gradient_checkpointing, **adapters):
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))

    def for_training(model):
        model.train()
"""


@pytest.mark.slow
def test_unsloth_end_to_end(user_env, tmp_path):
    """It needs a GPU: a package with its name stands for it, and learns the same."""
    pytest.importorskip("peft")
    (tmp_path / "unsloth.py").write_text(UNSLOTH)
    argv = [*TINY.split(), "--seq", "64", "--layers", "1", "--checkpointing", "--lora", "8"]
    argv += ["--against", "unsloth:offload,stock", "--unsloth-path", str(tmp_path), "--json", str(tmp_path / "r.json")]
    env = user_env | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "benchmarks" / "step_rivals.py", *argv]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, unsloth = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert not unsloth["failed"] and unsloth["loss_parity"] < 1e-6 and unsloth["gradient_parity"] < 1e-5
