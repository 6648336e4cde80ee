"""What every test of patched models needs: stock classes after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _stock_again() -> Iterator[None]:
    yield
    if patches := sys.modules.get("liger_kernel.transformers.patching.patches"):
        patches.restore()


@pytest.fixture
def models_by_references() -> Iterator[None]:
    """Kernels on a GPU; on a CPU, where whole models would take minutes, references."""
    from hf_models import served_by_kernels_or_references

    with served_by_kernels_or_references():
        yield
