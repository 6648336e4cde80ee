"""Frameworks run here as their users run them: on a CPU the references serve, and afterwards
every stock class is back."""

from __future__ import annotations

import os

import newer_kernels  # noqa: F401
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make setup")

import torch
import torch.nn.functional as F
from hf_models import forget_training, served_by_kernels_or_references

import liger_kernel.transformers as liger


@pytest.fixture(autouse=True)
def _apart():
    pytest.importorskip("accelerate", reason="accelerate is not installed: make setup")
    before = {n: v for n, v in os.environ.items() if n.startswith("ACCELERATE_")}
    forget_training()
    yield
    forget_training()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _served():
    stock = F.cross_entropy, torch.nn.CrossEntropyLoss, torch.nn.LayerNorm, torch.nn.Linear.forward
    with served_by_kernels_or_references():
        yield
    liger.restore()
    assert stock == (F.cross_entropy, torch.nn.CrossEntropyLoss, torch.nn.LayerNorm, torch.nn.Linear.forward)
