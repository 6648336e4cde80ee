"""Without a GPU, kernels run in Triton's interpreter: this must be decided before any kernel is defined."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.install()


@pytest.fixture
def user_env() -> dict[str, str]:
    """The environment for a subprocess that is to behave as a user's: without the interpreter."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-report", metavar="DIR", help="write registers, spills and shared memory of every kernel to DIR, one table an architecture")
