"""Without a GPU, kernels run in Triton's interpreter: this must be decided before any kernel is defined."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.install()


def in_both_dtypes(cases, *quick) -> list:
    """Parameters ``case, dtype``. In the interpreter, bf16 is slow of what is not ``quick``."""
    slow = lambda c, d: not torch.cuda.is_available() and d == torch.bfloat16 and c not in quick
    return [pytest.param(c, d, id=f"{c}-{d}", marks=[pytest.mark.slow] * slow(c, d)) for c in cases for d in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """``once(name, fn)``: what ``fn`` returns, JSON, which one of the test processes calls; the others wait for it."""
    import fcntl  # not on Windows

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def call(name, fn):
        said = folder / f"{name}.json"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not said.exists():
                said.write_text(json.dumps(fn()))
        return json.loads(said.read_text())

    return call


@pytest.fixture
def user_env() -> dict[str, str]:
    """The environment for a subprocess that is to behave as a user's: without the interpreter."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-report", metavar="DIR", help="write registers, spills and shared memory of every kernel to DIR, one table an architecture")
