"""The GPUs for which kernels can be compiled. This file imports neither torch nor Triton, so
`liger warmup --help` lists them at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: Triton's backend and architecture, threads per warp, number of
    processors."""

    backend: str
    arch: int | str
    warp: int
    processors: int


# Architectures have the names of ops/_core/launch_config.py (A100, RTX 3090, RTX 4090, H100 and H200,
# B200, RTX 5090, MI300X, MI355X)
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
# GPUs by the names of `liger fit --gpu`
OF_GPU = {"a100": "sm80", "l40s": "sm89", "rtx4090": "sm89", "h100": "sm90", "h200": "sm90", "b200": "sm100"}
OF_GPU |= {"mi300x": "gfx942"}
