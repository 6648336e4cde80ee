"""Benchmark cases of ``ops/rotary``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.measured import Measured, Passing, real
from liger_kernel.ops._core.operator import T as T_
from liger_kernel.ops.rotary.qk_norm_rope import _qk as normed
from liger_kernel.ops.rotary.rope import _angles as angles


def _projected(B: int, H: int, T: int, D: int, dtype: torch.dtype) -> Tensor:
    """A tensor in the memory layout of a projection's output: time before heads."""
    return torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2)


def _qk_norm_rope_upstream(functional, q, k, wq, wk, cos, sin, eps, offset, casting):
    q, k = (functional.liger_rms_norm(x, w, eps, offset, casting) for x, w in ((q, wq), (k, wk)))
    return functional.liger_rope(q, k, cos, sin)


def _doubled(args: dict[str, Any]) -> dict[str, Any]:
    """LinkedIn's package takes tables that hold each angle twice; models make them before the
    call."""
    return args | {name: torch.cat((args[name], args[name]), -1) for name in ("cos", "sin")}


ROTARY = {
    "qk_norm_rope": Measured(
        cases=[
            real("qwen3-8b", **normed(4, 32, 8, 2048, 128, 64, _projected)),
            real("gemma3-4b", **normed(1, 8, 4, 4096, 256, 128, _projected, offset=1.0, casting="gemma")),
            real("glm4.5-air", **normed(1, 96, 8, 2048, 128, 32, _projected)),
        ],
        rivals={"upstream": Passing(_qk_norm_rope_upstream, ignored="rope_casting", prepare=_doubled)},
    ),
    "rope": Measured(
        cases=[
            real(
                "llama3-8b",
                q=T_((4, 32, 2048, 128), _projected),
                k=T_((4, 8, 2048, 128), _projected),
                **angles(2048, 64),
            ),
            real(
                "gemma", q=T_((1, 8, 1000, 256), _projected), k=T_((1, 1, 1000, 256), _projected), **angles(1000, 128)
            ),
        ],
        rivals={"upstream": Passing("liger_rope", "q k cos sin", "casting", prepare=_doubled)},
    ),
}
