"""Kernels compiled ahead are the kernels that training takes; batches of other sizes need no
others."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CONFIGS = {
    "llama": dict(model_type="llama", vocab_size=500, **SIZES),
    "qwen3": dict(model_type="qwen3", vocab_size=500, head_dim=16, **SIZES),
}


def run(env: dict[str, str], *argv: object) -> str:
    done = subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_training_after_warmup_compiles_nothing(family, user_env, tmp_path):
    from triton.runtime import build

    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[family]))
    env = user_env | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    train = (Path(__file__).with_name("fake_gpu.py"), "train", config, "2x32", "3x17")

    warmup = ("-m", "liger_kernel.cli", "warmup", "--model", config, "--batch", 2, "--seq", 64, "--arch", "sm90")
    built = lambda: {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.so")}
    first, libraries = run(env, *warmup), built()
    # what starts kernels, too; that it finds NVIDIA's driver is known by name, or, from Triton 3.8
    # on, by its folder
    assert bool(libraries) != hasattr(build, "compile_so_from_file")
    assert all(b"libcuda.so.1" in path.read_bytes() for path in libraries)
    needed, compiled = map(int, re.search(r"(\d+) kernels for sm90: (\d+) compiled", first).groups())
    assert compiled == needed > 8

    shutil.rmtree(next((tmp_path / "cache").rglob("*.cubin")).parent)
    # nothing but what was removed, and the count counts
    assert json.loads(run(env, *train)) == {"compiled": 1, "cached": needed - 1} and libraries == built()


def test_without_a_c_compiler_kernels_are_compiled_all_the_same(monkeypatch, tmp_path, capsys):
    from triton import knobs
    from triton.runtime import build

    from liger_kernel.compile import ahead

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    before = build._load_module_from_path
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "cache")
        ahead.build_launchers([])
    assert "built at the first launches" in capsys.readouterr().out
    assert build._load_module_from_path is before


def test_batches_of_other_sizes_need_no_other_kernels(counted):
    found = counted["specialisations"]
    assert all(one > 0 for one, _ in found.values())
    assert {name: every for name, (_, every) in found.items()} == {name: one for name, (one, _) in found.items()}


def test_kernels_known_already_are_started_as_triton_would(counted):
    found = counted["launches"]
    assert found["same"] and found["launches"] >= 32 and found["kernels"] >= 10 and found["direct"] >= 10
    assert found["negative"] == 1  # an ignore_index of -100 is no rarity


def test_what_cannot_be_warmed_up_is_said(monkeypatch, tmp_path):
    from liger_kernel import warmup
    from liger_kernel.ops._core import operator
    from liger_kernel.train import kernels
    from liger_kernel.train.config import UserError

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(operator, "INTERPRET", False)
    monkeypatch.setattr(kernels, "use_cache", lambda: None)
    for argv, said in (
        (["--model", "tiny"], "this machine has no GPU: choose the GPU to compile for with --arch"),
        (["--model", str(tmp_path / "config.json"), "--arch", "sm90"], "has no model_type"),
        (["--model", "tiny", "--arch", "sm90", "--seq", "0"], "--seq must be at least 1, got 0"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            warmup.main(argv)


@pytest.mark.slow
def test_a_pod_finds_the_kernels_of_its_image(user_env, tmp_path):
    """Moved and only read, they are all that the pod's init container and training need."""
    from liger_kernel.train.config import TrainConfig

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "liger").write_text(f'#!/bin/sh\nexec {sys.executable} -m liger_kernel.cli "$@"\n')
    (tmp_path / "bin" / "liger").chmod(0o755)
    build = {"ARCHS": "sm90", "MODELS": str(tmp_path / "model"), "KERNELS": str(tmp_path / "built")}
    build |= {"PRECISIONS": "bfloat16"}
    env = user_env | {"PATH": f"{tmp_path / 'bin'}:{user_env['PATH']}"}
    script = Path(__file__).parents[2] / "deploy" / "precompile.sh"
    done = subprocess.run(["sh", str(script)], env=env | build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "built").rename(tmp_path / "image")
    files = lambda: {str(path): path.stat().st_mtime_ns for path in (tmp_path / "image").rglob("*")}
    before = files()
    assert len(before) > 20 and not any(path.stat().st_mode & 0o222 for path in (tmp_path / "image").rglob("*"))

    TrainConfig(model=str(tmp_path / "model"), parallel="fsdp2", length=64, batch=2).save_to(tmp_path / "train.json")
    pod = env | {"TRITON_CACHE_DIR": str(tmp_path / "node"), "LIGER_TRITON_BASE_CACHE": str(tmp_path / "image")}
    said = run(pod, "-m", "liger_kernel.cli", "warmup", "--config", tmp_path / "train.json", "--arch", "sm90")
    assert ": 0 compiled" in said
    manager = {"TRITON_CACHE_MANAGER": "liger_kernel.compile.cache:LigerTritonFileCacheManager"}  # as training sets it
    config = tmp_path / "model" / "config.json"
    found = json.loads(run(pod | manager, Path(__file__).with_name("fake_gpu.py"), "train", config, "2x64"))
    assert found["compiled"] == 0 and found["cached"] > 8
    assert files() == before


@pytest.mark.slow
def test_pods_that_warm_one_cache_at_once_do_no_harm(user_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    env = user_env | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "liger_kernel.cli", "warmup", "--model", str(tmp_path / "config.json")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pods = [subprocess.Popen([*argv, "--arch", "sm90"], env=env, **pipes) for _ in range(4)]
    for pod in pods:
        said = pod.communicate(timeout=300)[0]
        assert pod.returncode == 0, said
    assert not list((tmp_path / "cache").rglob("tmp.pid_*"))
    found = json.loads(run(env, Path(__file__).with_name("fake_gpu.py"), "train", tmp_path / "config.json", "2x64"))
    assert found["compiled"] == 0
