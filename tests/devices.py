"""Where tests of operators run, and the tensors that they draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_kernel.ops._core import operator as _op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call"
)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """The same normal values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
