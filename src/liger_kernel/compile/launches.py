"""Find the kernels that a step launches by running it on tensors that have shapes but no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_kernel.ops._core import operator


class Mock(MockTensor):
    """A tensor as the compiler sees it: a dtype, and a pointer that is aligned or not."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype)
        self.offset = int(x.storage_offset()) * x.itemsize

    def data_ptr(self) -> int:
        return self.offset


def described(argument: Any) -> Any:
    """An argument of a launch as the compiler sees it: without data."""
    if isinstance(argument, TensorDescriptor):
        return dataclasses.replace(argument, base=Mock(argument.base))
    return Mock(argument) if isinstance(argument, Tensor) else argument


def _key(argument: Any) -> Any:
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return (argument.dtype, argument.data_ptr() % 16) if isinstance(argument, Mock) else argument


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(step: Callable[[], Any], device: str) -> list[Launch]:
    """(kernel, arguments without data, constexprs and options) of each launch of ``step``.
    Tensors on ``device`` have no data in it."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        found.append((kernel, tuple(map(described, args)), meta))

    with operator.intercept_launches(record, device):
        step()
    return found


def distinct(found: list[Launch]) -> list[Launch]:
    """One launch for each kernel that must be compiled."""
    keyed = {(each[0].fn, tuple(map(_key, each[1])), tuple(each[2].items())): each for each in found}
    return list(keyed.values())
