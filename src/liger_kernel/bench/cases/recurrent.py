"""Benchmark cases of ``ops/recurrent``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import Measured, Passing, real, timed
from liger_kernel.ops._core import Case
from liger_kernel.ops.recurrent.causal_conv1d import _gates as gates, _tensors as channels
from liger_kernel.ops.recurrent.gated_delta_rule import _states_of as states, _tensors as heads
from liger_kernel.ops.recurrent.kda import _tensors as kda_heads
from liger_kernel.ops.recurrent.log_decay import _tensors as gates_of
from liger_kernel.ops.recurrent.ssd import _states_of as ssd_states, _tensors as scanned


def _causal_conv1d_torch(x: Tensor, w: Tensor, act: str | None):
    """As Transformers does without other packages."""
    y = F.conv1d(x.transpose(1, 2), w[:, None], padding=w.shape[1] - 1, groups=w.shape[0])[..., : x.shape[1]]
    return (F.silu(y) if act else y).transpose(1, 2), None


def _gated_delta_rule_torch(q, k, v, g, beta, qk_l2norm):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=qk_l2norm)


def _ssd_torch(x, dt, A, B, C, D, dt_bias, dt_softplus):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    given = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
    return mamba2_chunk_scan(x, dt, A, B, C, 256, **given).to(x.dtype), None


def _kda_torch(q, k, v, g, beta, qk_l2norm):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return chunk_kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=qk_l2norm)


def _log_decay_torch(a, A_log, dt_bias):
    return -A_log.float().exp().repeat_interleave(a.shape[-1] // len(A_log)) * F.softplus(a.float() + dt_bias)


def _of_rule(model: str, tensors: Callable[..., dict[str, Any]], *sizes: int) -> list[Case]:
    """Cases of a delta rule: ``sizes`` of its tensors after batch and length, the last three of its states."""
    return [
        real(model, **tensors(4, 2048, *sizes)),
        real("states", **tensors(2, 1024, *sizes), **states(2, *sizes[-3:])),
        timed(f"{model}-8k", **tensors(1, 8192, *sizes)),
        timed(f"{model}-32k", **tensors(1, 32768, *sizes)),
    ]


RECURRENT = {
    "causal_conv1d": Measured(
        cases=[
            real("qwen3-next", **channels(4, 2048, 8192), act="silu"),
            real("lfm2", **channels(4, 2048, 2048, W=3), **gates(4, 2048, 2048)),
            timed("qwen3-next-long", **channels(1, 32768, 8192), act="silu"),
        ],
        rivals={"torch": Passing(_causal_conv1d_torch)},
    ),
    "gated_delta_rule": Measured(
        cases=_of_rule("qwen3-next", heads, 16, 32, 128, 128), rivals={"torch": Passing(_gated_delta_rule_torch)}
    ),
    "kda": Measured(cases=_of_rule("kimi-linear", kda_heads, 32, 128, 128), rivals={"torch": Passing(_kda_torch)}),
    "log_decay": Measured(
        cases=[real("kimi-linear", **gates_of(8192, 4096, H=32)), timed("qwen3-next", **gates_of(8192, 32, H=32))],
        rivals={"torch": Passing(_log_decay_torch)},
    ),
    "ssd": Measured(
        cases=[
            real("granite-4-h-tiny", **scanned(4, 2048, 48, 64, 1, 128)),
            real("states", **scanned(2, 1024, 48, 64, 1, 128), **ssd_states(2, 48, 64, 128)),
            timed("granite-4-h-tiny-8k", **scanned(1, 8192, 48, 64, 1, 128)),
            timed("nemotron-h", **scanned(4, 2048, 128, 64, 8, 128)),
            timed("nemotron-h-8k", **scanned(1, 8192, 128, 64, 8, 128)),
        ],
        rivals={"torch": Passing(_ssd_torch)},
    ),
}
