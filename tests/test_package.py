"""What installing gives: names, versions, pins, and an import that costs nothing."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import liger_kernel

ROOT = Path(__file__).parents[1]
HEAVY = "torch", "triton", "transformers", "numpy", "matplotlib"


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after ``code``."""
    code = f"import sys\n{code}\nprint('LOADED', *({HEAVY!r} & sys.modules.keys()))".replace(repr(HEAVY), repr(set(HEAVY)))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(out.rpartition("LOADED")[2].split())


def project(section: str) -> str:
    """The lines of a section of pyproject.toml (tomllib is not in Python 3.10)."""
    return (ROOT / "pyproject.toml").read_text().split(f"[{section}]\n", 1)[1].split("\n[", 1)[0]


def requirement_names(text: str) -> set[str]:
    return {re.match(r"[\w-]+", quoted).group().lower() for quoted in re.findall(r'"([^"]+)"', text)}


def test_the_version_is_one():
    assert re.search(r'^version = "(.+)"$', project("project"), re.M).group(1) == liger_kernel.__version__ == "0.8.90"


def test_the_distribution_is_liger_kernel():
    assert importlib.metadata.metadata("liger-kernel")["Name"] == "liger-kernel"
    assert importlib.metadata.version("liger-kernel") == liger_kernel.__version__


def test_names_by_which_it_is_looked_up():
    """Both spellings, and the directory that it owns."""
    assert importlib.metadata.version("liger_kernel") == importlib.metadata.version("liger-kernel")
    assert importlib.metadata.distribution("liger-kernel").read_text("top_level.txt").split() == ["liger_kernel"]
    assert importlib.metadata.packages_distributions()["liger_kernel"] == ["liger-kernel"]


def test_published_packages_beside_ours_are_reported(tmp_path):
    for name, version in (("liger_kernel", "0.8.5"), ("liger_kernel_nightly", "0.9.0.dev1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    code = "from liger_kernel import env_report as e; print(e.others()); e.PACKAGES = (); e.importlib.util.find_spec = lambda _: None; e.print_env_report()"
    path = str(Path(liger_kernel.__file__).parents[1])
    run = lambda path, code: subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    said = f"liger-kernel 0.8.5 in {tmp_path}, liger-kernel-nightly 0.9.0.dev1 in {tmp_path}"
    assert f"not loaded    {said}" in run(f"{tmp_path}{os.pathsep}{path}", code).stdout
    assert run(path, code).stdout.startswith("[]")
    assert f"is loaded, not {said}" in run(f"{tmp_path}{os.pathsep}{path}", "import liger_kernel.transformers").stderr


def test_only_torch_and_triton_are_required():
    needed = [r for r in importlib.metadata.requires("liger-kernel") if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r).group() for r in needed} == {"torch", "triton"}
    assert all("Linux" in r for r in needed if r.startswith("triton"))


def test_what_is_installed_is_pinned():
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.M))
    dependencies = project("project").split("dependencies = [", 1)[1].split("]", 1)[0]
    wanted = requirement_names(dependencies + project("project.optional-dependencies")) - {"liger-kernel"}
    assert wanted <= pins.keys()


@pytest.mark.parametrize("module", ["liger_kernel", "liger_kernel.cli", "liger_kernel.env_report", "liger_kernel.train"])
def test_importing_is_instant(module):
    assert loaded_by(f"import {module}") == set()


def test_the_check_above_sees_what_is_loaded():
    assert "torch" in loaded_by("import torch")


def test_the_console_script_exists():
    (script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "liger"]
    assert callable(script.load())


def test_importing_asks_no_gpu(user_env):
    """Asking for a GPU starts its driver, after which forked processes cannot use it."""
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = None; import liger_kernel.ops.utils, liger_kernel.nn, liger_kernel.chunked_loss"
    done = subprocess.run([sys.executable, "-c", code], env=user_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
