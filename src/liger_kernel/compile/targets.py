"""Compile for a GPU that this machine may lack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from liger_kernel.compile.architectures import TARGETS as TARGETS, Target
from liger_kernel.ops._core import launch_config


class CompileOnly(DriverBase):
    """A device for which kernels can be compiled but not launched."""

    def __init__(self, target: Target):
        self.target = GPUTarget(target.backend, target.arch, target.warp)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable:
        raise RuntimeError("nothing runs here")


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Compile for ``arch``, a key of ``TARGETS``, instead of this machine's GPU, if it has one."""
    before = driver._active
    driver.set_active(CompileOnly(TARGETS[arch]))
    try:
        with launch_config.target(arch, TARGETS[arch].processors):
            yield
    finally:
        driver._active = before
