"""Without a GPU, kernels run in Triton's interpreter: this must be decided before any kernel is defined."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import sys
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.install()


SETTING_UP = ["conftest", "test_memory_safety"]
PRELOADED = [
    "transformers.models.llama.modeling_llama",
    "liger_kernel.transformers",
    "liger_kernel.bench.models",
    "liger_kernel.train.loop",
]


@functools.cache
def forkserver() -> multiprocessing.context.BaseContext:
    """Processes forked from one, the same for all tests, that has imported all they need: what is not there is skipped."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    # conftest asks for GPUs; where there are some, what is forked after that cannot use them
    context.set_forkserver_preload(PRELOADED if torch.cuda.is_available() else SETTING_UP + PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # before Python 3.13 the server does not see sys.path
        forkserver.ensure_running()
    return context


def start_ranks(fn, args: tuple, ranks: int) -> None:
    """``fn(rank, *args)`` in a process for each rank; returns when all have ended, raises ``ProcessException`` if one failed."""
    from torch.multiprocessing.spawn import start_processes

    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        forkserver()
    start_processes(fn, args, ranks, start_method=method)


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
