"""Every example of a framework runs as a user would run it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"


@pytest.mark.parametrize(
    "script",
    [pytest.param(p.name, marks=[pytest.mark.smoke] * (p.name == "trl_sft.py")) for p in sorted(FOLDER.glob("*.py"))],
)
def test_it_runs(script, user_env, tmp_path):
    path = FOLDER / script
    imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    for package in {(getattr(n, "module", None) or n.names[0].name).split(".")[0] for n in imports}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-integrations")
    done = subprocess.run(
        [sys.executable, str(path)], env=user_env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
