"""Fixtures of tests of runs."""

import pytest


@pytest.fixture
def references(monkeypatch):
    """On a CPU, references run: the interpreter of the other tests is no part of training."""
    from liger_kernel.ops._core import operator as _op

    monkeypatch.setattr(_op, "_KERNEL_DEVICES", _op._KERNEL_DEVICES - {"cpu"})
