"""What installing gives: names, versions, pins, and an import that costs nothing."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import liger_kernel
from liger_kernel import _others

ROOT = Path(__file__).parents[1]
HEAVY = "torch", "triton", "transformers", "numpy", "matplotlib", "importlib.metadata"


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after ``code``."""
    code = f"import sys\n{code}\nprint('LOADED', *({set(HEAVY)!r} & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(out.rpartition("LOADED")[2].split())


def project(section: str) -> str:
    """The lines of a section of pyproject.toml (tomllib is not in Python 3.10)."""
    return (ROOT / "pyproject.toml").read_text().split(f"[{section}]\n", 1)[1].split("\n[", 1)[0]


def requirement_names(text: str) -> set[str]:
    return {re.match(r"[\w-]+", quoted).group().lower() for quoted in re.findall(r'"([^"]+)"', text)}


def test_the_version_is_one():
    assert re.search(r'^version = "(.+)"$', project("project"), re.M).group(1) == liger_kernel.__version__


def test_what_names_the_version_names_this_one():
    assert f'version: "{liger_kernel.__version__}"' in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert liger_kernel.__version__.partition("+")[0] in changelog
    assert re.findall(r"^## (.*)", changelog, re.M)[0] == "[Unreleased]"
    kinds = set(re.findall(r"^### (.*)", changelog, re.M))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_forms_of_issues_are_yaml_with_a_name_and_fields():
    yaml = pytest.importorskip("yaml")
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= part.keys() for part in form["body"])
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert forms


def test_the_distribution_is_liger_kernel():
    """By both spellings; the directory is its own."""
    assert importlib.metadata.metadata("liger-kernel")["Name"] == "liger-kernel"
    for name in ("liger-kernel", "liger_kernel"):
        assert importlib.metadata.version(name) == liger_kernel.__version__
    assert importlib.metadata.distribution("liger-kernel").read_text("top_level.txt").split() == ["liger_kernel"]
    assert importlib.metadata.packages_distributions()["liger_kernel"] == ["liger-kernel"]


def test_frameworks_see_a_version_of_the_08_series_that_no_index_has():
    """A pin of ours never matches LinkedIn's release of the same number."""
    version = Version(liger_kernel.__version__)
    assert Version("0.8.5") < version < Version("0.9") and liger_kernel.__version__.endswith(_others.MARK)
    assert version.local and Version(version.public) not in SpecifierSet(f"=={version}")
    assert version in SpecifierSet(f"=={version.public}")
    transformers = pytest.importorskip("transformers.utils")
    assert transformers.is_liger_kernel_available()


def run(path: list, code: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | variables
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=folder)


SRC = Path(liger_kernel.__file__).parents[1]
REPORT = (
    "from liger_kernel import env_report as e; e.PACKAGES = (); e.importlib.util.find_spec = lambda _: None; "
    "e.print_env_report()"
)


def installed(folder: Path, name: str, version: str, package: bool = True) -> Path:
    """What pip leaves in ``folder`` of another package of our name."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    if package:
        (folder / "liger_kernel").mkdir(exist_ok=True)
        (folder / "liger_kernel" / "__init__.py").touch()
    return folder


def of_linkedin(tmp_path: Path) -> list[tuple[list[Path], str]]:
    """(``sys.path`` on which ours is the one that is loaded, how the other one is called)."""
    bare = tmp_path / "bare"
    (bare / "liger_kernel").mkdir(parents=True)
    (bare / "liger_kernel" / "__init__.py").touch()
    stable = installed(tmp_path / "stable", "liger_kernel", "0.8.5")
    both = installed(tmp_path / "both", "liger_kernel", "0.8.5", package=False)
    installed(both, "liger_kernel_nightly", "0.9.0.dev1", package=False)
    found = f"liger-kernel 0.8.5 in {both}, liger-kernel-nightly 0.9.0.dev1 in {both}"
    return [
        ([SRC, stable], f"liger-kernel 0.8.5 in {stable}"),
        ([both, SRC], found),  # ours is an editable install
        ([SRC, bare], f"a liger_kernel without metadata in {bare}"),
    ]


def test_another_package_of_our_name_is_reported_once(tmp_path):
    more = ".cli, liger_kernel.train.config"  # imports after the first are silent
    for path, name in of_linkedin(tmp_path):
        done = run(path, f"import liger_kernel, liger_kernel{more}")
        assert done.stderr.count("UserWarning") == 1, done.stderr
        assert f"is loaded from {SRC / 'liger_kernel'}, but there is also {name};" in done.stderr, done.stderr
        assert run(path, "import liger_kernel", LOCAL_RANK="1").stderr == ""
        assert f"also installed  {name}\n" in run(path, REPORT).stdout


def test_ours_alone_is_silent(tmp_path):
    """Also on the path twice, beside a folder of data of its name, or a path that is no folder."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "rows.jsonl").touch()
    installed(tmp_path, "liger_kernel", liger_kernel.__version__, package=False)
    installed(tmp_path, "liger_kernel_other", "1.0", package=False)
    done = run([SRC, tmp_path, tmp_path / "none", "a.zip"], "import liger_kernel", tmp_path)
    assert done.stderr == ""
    report = run([SRC], REPORT).stdout
    assert "also installed  no other package named liger_kernel\n" in report
    version = liger_kernel.__version__
    assert report.startswith(f"liger-kernel    {version} (not LinkedIn's package) in {SRC / 'liger_kernel'}\n")


def texts() -> dict[str, str]:
    """Every file of the repository that people read or run, by its path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found = {name: ROOT / name for name in names if name and not name.startswith("benchmarks/data/")}
    binary = (".png", ".svg", ".ico", ".gz")
    return {name: p.read_text() for name, p in found.items() if p.is_file() and p.suffix not in binary}


# where pip is given a version for a folder of its own, a file or a repository, takes the package
# away, or LinkedIn's package is what the text is about
MEANT = re.compile(r"--target|liger-kernel(\[[\w,-]+\])? @ |uninstall|LinkedIn")


def fetched_from_an_index(text: str) -> list[str]:
    """Lines that have pip fetch LinkedIn's package where ours is meant."""
    lines = text.splitlines()
    meant = lambda i: MEANT.search(" ".join(lines[max(i - 1, 0) : i + 2]))
    found = [(i, line) for i, line in enumerate(lines) if re.search(r"pip3? install.*\bliger[-_]kernel\b", line)]
    return [line.strip() for i, line in found if not meant(i)]


def test_no_text_installs_linkedins_package_for_ours():
    me = Path(__file__).relative_to(ROOT).as_posix()
    found = {name: fetched_from_an_index(text) for name, text in texts().items() if name != me}
    assert {name: lines for name, lines in found.items() if lines} == {}
    for wrong in ("x\n    pip install -q 'liger-kernel[k8s]'\n", "`pip install -U liger_kernel`"):
        assert fetched_from_an_index(wrong)
    for right in ("pip install 'liger-kernel[k8s] @ file:///tmp/x.whl'", "pip install -e '.[k8s]'"):
        assert not fetched_from_an_index(right)


def test_extras_that_are_named_exist():
    extras = set(re.findall(r"^(\w+) = \[", project("project.optional-dependencies"), re.M))
    named = {
        (name, extra)
        for name, text in texts().items()
        for found in re.findall(r"(?:['\" ]\.|liger-kernel)\[([a-z][\w,-]*)\]", text)
        for extra in found.split(",")
    }
    assert len(named) > 8 and {(name, extra) for name, extra in named if extra not in extras} == set()


def test_only_torch_and_triton_are_required():
    needed = [r for r in importlib.metadata.requires("liger-kernel") if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r).group() for r in needed} == {"torch", "triton"}
    assert all("Linux" in r for r in needed if r.startswith("triton"))


def test_what_is_installed_is_pinned():
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.M))
    dependencies = project("project").split("dependencies = [", 1)[1].split("]", 1)[0]
    wanted = requirement_names(dependencies + project("project.optional-dependencies")) - {"liger-kernel"}
    assert wanted <= pins.keys()


@pytest.mark.parametrize("module", ["liger_kernel", "liger_kernel.cli", "liger_kernel.train"])
def test_importing_is_instant(module):
    assert loaded_by(f"import {module}") == set()


def test_the_check_above_sees_what_is_loaded():
    assert loaded_by("import liger_kernel.env_report, numpy") == {"numpy", "importlib.metadata"}


def test_the_console_script_exists():
    (script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "liger"]
    assert callable(script.load())


def test_importing_asks_no_gpu_and_imports_no_compiler(user_env):
    """After a GPU's driver has started, forked processes cannot use it."""
    code = (
        "import torch; torch.cuda.is_available = torch.cuda.device_count = None; import liger_kernel.ops.utils, "
        "liger_kernel.nn, liger_kernel.chunked_loss, sys; assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], env=user_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
