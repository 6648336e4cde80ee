"""Benchmark cases of ``ops/rotary``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.bench.measured import Measured, real
from liger_kernel.ops._core.operator import T as T_
from liger_kernel.ops.rotary.qk_norm_rope import _qk as _qk_norm_rope_qk
from liger_kernel.ops.rotary.rope import _angles as _rope_angles


def _projected(B: int, H: int, T: int, D: int, dtype: torch.dtype) -> Tensor:
    """A tensor in the memory layout of a projection's output: time before heads."""
    return torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2)


def _rope_upstream(functional, q, k, cos, sin, position_ids=None, *, layout="halves", unsqueeze_dim=1, casting="fp32"):
    if layout != "halves" or position_ids is not None or unsqueeze_dim != 1:
        raise NotImplementedError
    return functional.liger_rope(q, k, cos, sin)


def _qk_norm_rope_upstream(
    functional,
    q,
    k,
    wq,
    wk,
    cos,
    sin,
    position_ids=None,
    *,
    eps=1e-6,
    offset=0.0,
    casting="llama",
    layout="halves",
    unsqueeze_dim=1,
    rope_casting="fp32",
):
    if layout != "halves" or position_ids is not None or unsqueeze_dim != 1:
        raise NotImplementedError
    norm = lambda x, w: functional.liger_rms_norm(x, w, eps, offset, casting)
    return functional.liger_rope(norm(q, wq), norm(k, wk), cos, sin)


# LinkedIn's package takes tables that hold each angle twice; models make them before the call, so
# this is not timed
_twice = lambda args: args | {name: torch.cat((args[name], args[name]), -1) for name in ("cos", "sin")}
_rope_upstream.prepare = _qk_norm_rope_upstream.prepare = _twice  # type: ignore[attr-defined]  # any function may have attributes


MEASURED = {
    "qk_norm_rope": Measured(
        cases=[
            real("qwen3-8b", **_qk_norm_rope_qk(4, 32, 8, 2048, 128, 64, _projected)),
            real("gemma3-4b", **_qk_norm_rope_qk(1, 8, 4, 4096, 256, 128, _projected, offset=1.0, casting="gemma")),
            real("glm4.5-air", **_qk_norm_rope_qk(1, 96, 8, 2048, 128, 32, _projected)),
        ],
        rivals={"upstream": _qk_norm_rope_upstream},
    ),
    "rope": Measured(
        cases=[
            real(
                "llama3-8b",
                q=T_((4, 32, 2048, 128), _projected),
                k=T_((4, 8, 2048, 128), _projected),
                **_rope_angles(2048, 64),
            ),
            real(
                "gemma",
                q=T_((1, 8, 1000, 256), _projected),
                k=T_((1, 1, 1000, 256), _projected),
                **_rope_angles(1000, 128),
            ),
        ],
        rivals={"upstream": _rope_upstream},
    ),
}
