from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def counted(once, user_env) -> dict:
    """What ``fake_gpu.py`` counts, by one process for all tests: to import takes longer than to count."""

    def count() -> dict:
        command = [sys.executable, Path(__file__).with_name("fake_gpu.py"), "counts"]
        done = subprocess.run(command, env=user_env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return once("counts", count)
