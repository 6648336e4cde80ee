"""What every test of patched models needs: stock classes after it."""

import importlib.util
import sys
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


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
