"""GPUs that kernels can be compiled for, whether they are there or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from liger_kernel.ops._core import config


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: Triton's backend and architecture, threads a warp, processors."""

    backend: str
    arch: int | str
    warp: int
    processors: int


# As ops/config.py names architectures (A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090, MI300X, MI355X)
TARGETS = {
    "sm80": Target("cuda", 80, 32, 108),
    "sm86": Target("cuda", 86, 32, 82),
    "sm89": Target("cuda", 89, 32, 128),
    "sm90": Target("cuda", 90, 32, 132),
    "sm100": Target("cuda", 100, 32, 148),
    "sm120": Target("cuda", 120, 32, 170),
    "gfx942": Target("hip", "gfx942", 64, 304),
    "gfx950": Target("hip", "gfx950", 64, 256),
}


class CompileOnly(DriverBase):
    """A device that can only be compiled for."""

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
    """Compile for ``arch``, a key of ``TARGETS``, instead of the GPU that is there, if one is."""
    before = driver._active
    driver.set_active(CompileOnly(TARGETS[arch]))
    try:
        with config.target(arch, TARGETS[arch].processors):
            yield
    finally:
        driver._active = before
