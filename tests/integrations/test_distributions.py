"""The sdist and the wheel that a release is: built from a copy of the sources, checked, and the
wheel installed and used as by someone who has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build.__main__", reason="tests/integrations/environments.py dist")

import liger_kernel

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[2]
USE = """
import sys
from pathlib import Path
import liger_kernel
assert Path(liger_kernel.__file__).is_relative_to(sys.prefix), liger_kernel.__file__
import torch, transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama
apply_liger_kernel_to_llama()
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
tokens = torch.arange(16).view(1, 16)
out = model(input_ids=tokens, labels=tokens)
out.loss.backward()
assert out.logits is None and all(p.grad is not None for p in model.parameters())
print("loss", out.loss.item())
"""  # noqa: E501


def ran(*argv, **options):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    how = dict(capture_output=True, text=True, check=False, env=env | options.pop("env", {}))
    done = subprocess.run([*map(str, argv)], **how, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel made of that sdist."""
    copy, found = tmp_path_factory.mktemp("copy") / "sources", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", found, copy)
    return found


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_both_are_as_an_index_wants_them(built, tmp_path):
    assert sorted(path.suffix for path in built.iterdir()) == [".gz", ".whl"]
    ran(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    broken = tmp_path / "broken"
    shutil.copytree(built, broken)
    (wheel,) = broken.glob("*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:  # the last of two files of one name counts
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        archive.writestr(metadata, f"Metadata-Version: 2.4\nName: liger-kernel\nVersion: {liger_kernel.__version__}\n")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_both_hold_every_file_of_the_package(built, wheel):
    wanted = {
        p.relative_to(ROOT / "src").as_posix()
        for p in (ROOT / "src" / "liger_kernel").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_wheel_works_where_there_is_no_checkout(wheel, tmp_path):
    """Alone, as far as that needs no PyTorch; then with this environment's packages."""
    venv.create(tmp_path / "env")
    python, liger = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "liger"
    requirement = f"liger-kernel[k8s] @ {wheel.as_uri()}"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps", requirement)
    here = dict(cwd=tmp_path)
    assert ran(liger, "--version", **here).split() == ["liger-kernel", liger_kernel.__version__]
    report = ran(liger, "env", **here)
    assert "none: PyTorch is not installed" in report and f"(not LinkedIn's package) in {tmp_path}" in report
    assert "no other package named liger_kernel" in report
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    folders = [path for path in sys.path if Path(path).name == "site-packages" or path == sysconfig.get_path("purelib")]
    (site / "over.pth").write_text("\n".join(folders) + "\n")
    assert "loss" in ran(python, "-c", USE, **here, env={"OMP_NUM_THREADS": "1"})
    assert "linear_cross_entropy" in ran(liger, "ops", **here)
    job = ROOT / "deploy" / "jobs" / "plain.yaml"
    assert "kind: PyTorchJob" in ran(liger, "deploy", "render", job, **here)
