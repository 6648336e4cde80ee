"""Where tests of operators run, the tensors that they draw, and how they compare results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_kernel.ops._core import operator as _op
from liger_kernel.testing import Named, assert_as_accurate, like, run, upstream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call"
)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """The same normal values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def leaves(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Normal values that ask for gradients, the same in every run."""
    torch.manual_seed(0)
    return {name: torch.randn(shape, device=DEVICE, requires_grad=True) for name, shape in shapes.items()}


def assert_beside(
    fn: Callable, stock: Callable, args: Any, draws: int = 1, grads: Callable[[Named], Named] = upstream
) -> Named:
    """``fn`` is as accurate as ``stock`` in the same dtype, results and gradients. ``args`` are
    arguments, or a function that draws them from a seed, if there are several ``draws``."""
    draw = args if callable(args) else lambda seed: args
    pairs = [tuple(run(stock, like(draw(i), dtype), grads) for dtype in (None, torch.float64)) for i in range(draws)]
    ours = lambda i: run(fn, like(draw(i)), grads)
    assert_as_accurate(found := ours(0), *pairs[0], *pairs[1:], again=ours)
    return found
