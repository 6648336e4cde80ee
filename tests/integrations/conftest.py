"""Frameworks run here as their users run them: on a CPU the references serve, and afterwards every stock class is back."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make setup")

import torch
import torch.nn.functional as F
from hf_models import served_by_kernels_or_references

import liger_kernel.transformers as liger


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch):
    """What accelerate keeps of one training does not reach the next: with older transformers it would go on in its dtype, and compiled."""
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed: make setup")
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _served():
    stock = F.cross_entropy, torch.nn.CrossEntropyLoss, torch.nn.LayerNorm, torch.nn.Linear.forward
    with served_by_kernels_or_references():
        yield
    liger.restore()
    assert stock == (F.cross_entropy, torch.nn.CrossEntropyLoss, torch.nn.LayerNorm, torch.nn.Linear.forward)
