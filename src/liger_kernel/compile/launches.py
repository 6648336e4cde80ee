"""Find the kernels that a step launches by running it on tensors that have shapes but no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime.jit import MockTensor

from liger_kernel.ops._core import operator


class Mock(MockTensor):
    """A tensor as the compiler sees it: a dtype, and a pointer that is aligned or not."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype)
        self.offset = int(x.storage_offset()) * x.itemsize

    def data_ptr(self) -> int:
        return self.offset


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(step: Callable[[], Any], device: str) -> list[Launch]:
    """(kernel, arguments without data, constexprs and options) of each launch of ``step``. Tensors on ``device`` have no data in it."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        found.append((kernel, tuple(Mock(a) if isinstance(a, Tensor) else a for a in args), meta))

    with operator.intercept_launches(record, device):
        step()
    return found


def distinct(found: list[Launch]) -> list[Launch]:
    """One launch for each kernel that must be compiled."""
    key = lambda a: (a.dtype, a.data_ptr() % 16) if isinstance(a, Mock) else a
    return list({(kernel.fn, tuple(map(key, args)), tuple(meta.items())): (kernel, args, meta) for kernel, args, meta in found}.values())
