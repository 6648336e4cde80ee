"""Every example of a framework runs as a user would run it; a change is tried where it shows."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from fnmatch import filter as matching
from pathlib import Path

import environments
import processes
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
MARKS = {"trl_sft.py": pytest.mark.smoke, "peft_lora.py": pytest.mark.slow}  # tests/transformers trains adapters


@pytest.mark.parametrize(
    "script", [pytest.param(p.name, marks=MARKS.get(p.name, ())) for p in sorted(FOLDER.glob("*.py"))]
)
def test_it_runs(script, user_env, tmp_path):
    path = FOLDER / script
    imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    for package in {(getattr(n, "module", None) or n.names[0].name).split(".")[0] for n in imports}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-integrations")
    code, said = processes.forked([str(path)], user_env, tmp_path / "said", tmp_path)
    assert code == 0 and "loss" in said, said


def test_environments_of_a_change():
    assert environments.shown_by(["docs/index.md"]) == []
    found = environments.shown_by(["src/liger_kernel/deploy/job.py", "constraints.txt"])
    assert found == ["transformers-4.57", "k8s", "trl"]
    assert environments.shown_by(None) == environments.WITHOUT_HISTORY
    folders = [ROOT / name for name in ("src", "deploy", "examples", "tests")]
    files = [p.relative_to(ROOT).as_posix() for f in [ROOT, *folders] for p in f.glob("*" if f == ROOT else "**/*")]
    places = [place for places in environments.SHOWS.values() for place in places.split()]
    assert [place for place in places if not matching(files, place)] == []


def test_files_of_a_change(tmp_path, monkeypatch):
    """Uncommitted ones, a branch's, the main branch's last commit; unknown of a shallow clone."""

    def git(*args: str, at: Path = tmp_path / "first") -> None:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *args], cwd=at, check=True, capture_output=True)

    def commit(name: str, at: Path = tmp_path / "first") -> None:
        (at / name).touch()
        git("add", name, at=at)
        git("commit", "-m", name, at=at)

    (tmp_path / "first").mkdir()
    git("init")
    commit("one"), commit("two")
    for name, depth in (("whole", []), ("shallow", ["--depth=1"])):
        git("clone", *depth, f"file://{tmp_path}/first", name, at=tmp_path)
    monkeypatch.setattr(environments, "ROOT", tmp_path / "shallow")
    assert environments.changed_files(None) is None
    monkeypatch.setattr(environments, "ROOT", clone := tmp_path / "whole")
    assert environments.changed_files(None) == {"two"}
    git("checkout", "-b", "change", at=clone)
    commit("three", at=clone), commit("four", at=clone)
    (clone / "five").touch()
    assert environments.changed_files(None) == {"three", "four", "five"}
    assert environments.changed_files("HEAD~1") == {"four", "five"}
