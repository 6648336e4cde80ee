"""What of the tests is quick enough to run every time without a GPU."""

from __future__ import annotations

import pytest
import torch


def further(*values) -> list:
    """Parameters of what others of the same test show already: on a GPU, and nightly."""
    marks = [pytest.mark.slow] * (not torch.cuda.is_available())
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks) for v in values]


def in_both_dtypes(cases, *quick) -> list:
    """Parameters ``case, dtype``. In the interpreter, bf16 is slow of what is not ``quick``."""
    slow = lambda c, d: not torch.cuda.is_available() and d == torch.bfloat16 and c not in quick
    return [
        pytest.param(c, d, id=f"{c}-{d}", marks=[pytest.mark.slow] * slow(c, d))
        for c in cases
        for d in (torch.float32, torch.bfloat16)
    ]


def words(text: str) -> list[str]:
    """A list of names, which the formatter would give a line each."""
    return text.split()
