"""Benchmark cases of ``ops/projections``."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from liger_kernel.bench.measured import Measured, Passing, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.activations.glu import ACTS
from liger_kernel.ops.projections.lora import (
    _layer as layer,
    _magnitudes as magnitudes,
    _mlp_args as lora_mlp,
    _qkv_args as lora_qkv,
)
from liger_kernel.ops.projections.lora_moe import _args as lora_moe
from liger_kernel.ops.projections.mlp import _args as mlp
from liger_kernel.ops.projections.moe import _GPT_OSS as GPT_OSS, _routed as routed


def _published(name: str) -> Any:
    """A class of LinkedIn's ``ops``; imports are of its package where a rival runs."""
    return getattr(importlib.import_module("liger_kernel.ops"), name)


def _mlp_upstream(functional, x, gate, up, down, gate_multiplier, down_multiplier):
    rows = x.reshape(1, -1, x.shape[-1])
    return _published("LigerMLPFunction").apply(rows, gate, up, down, gate_multiplier, down_multiplier).reshape(x.shape)


def _moe_upstream(functional, x, gate_up, down, topk_index, topk_weight):
    return _published("LigerFusedMoEFunction").apply(x, gate_up, down, topk_index, topk_weight)


def _moe_torch(
    x, gate_up, down, topk_index, topk_weight, gate_up_bias, down_bias, act, interleaved, alpha, limit, offset
):
    """The experts as transformers computes them with ``experts_implementation="grouped_mm"``."""
    K = topk_index.shape[1]
    expert, order = topk_index.flatten().sort()
    offs = torch.histc(expert.int(), gate_up.shape[0], 0, gate_up.shape[0] - 1).cumsum(0, dtype=torch.int32)
    plus = lambda y, bias: y if bias is None else y + bias[expert]
    z = plus(torch._grouped_mm(x[order // K], gate_up.mT, offs=offs), gate_up_bias)
    gate, up = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = ACTS[act](gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    h = gated * (up + offset if offset else up)
    y = plus(torch._grouped_mm(h, down.mT, offs=offs), down_bias) * topk_weight.flatten()[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return y[inverse].view(*topk_index.shape, -1).sum(1).to(x.dtype)


def _frozen(args: dict) -> dict:
    """Frozen weights: only the adapters and x require gradients."""
    learns = lambda name: name == "x" or name.rpartition("_")[2] in ("a", "b") or name == "magnitude"
    return {k: replace(v, grad=learns(k)) if isinstance(v, T) else v for k, v in args.items()}


def _lora_linear(M: int, K: int, N: int, r: int, **more: T) -> dict:
    return _frozen(dict(x=T((M, K)), scale=2.0) | layer(K, N, r, dtype=torch.float32) | more)


PROJECTIONS = {
    "lora_linear": Measured(
        cases=[
            real("llama3-8b-o", **_lora_linear(8192, 4096, 4096, 16)),
            timed("llama3-8b-up", **_lora_linear(8192, 4096, 14336, 16)),
            real("dora", **_lora_linear(8192, 4096, 4096, 16, magnitude=T((4096,), magnitudes))),
        ],
        sweeps={"rank": ((8, 16, 32, 64, 128, 256), lambda r: _lora_linear(8192, 4096, 4096, r))},
    ),
    "lora_qkv": Measured(cases=[real("llama3-8b", **_frozen(lora_qkv((8192,), 4096, 4096, 1024, 16)))]),
    "lora_mlp": Measured(cases=[real("llama3-8b", **_frozen(lora_mlp((8192,), 4096, 14336, 16)))]),
    "lora_moe": Measured(
        cases=[
            real("qwen3-30b-a3b", **lora_moe(8192, 8, 2048, 768, 128, 16)),
            timed("mixtral-8x7b", **lora_moe(4096, 2, 4096, 14336, 8, 16)),
        ],
        sweeps={"rank": ((8, 16, 32, 64, 128), lambda r: lora_moe(8192, 8, 2048, 768, 128, r))},
    ),
    "mlp": Measured(
        cases=[
            real("square", **mlp((4096,), 8192, 8192)),
            real("llama3-8b", **mlp((8192,), 4096, 14336)),
            timed("qwen3-0.6b", **mlp((16384,), 1024, 3072)),
        ],
        rivals={"upstream": Passing(_mlp_upstream)},
    ),
    "moe": Measured(
        cases=[
            real("switch", **routed(8192, 1, 4096, 1024, 16)),
            real("qwen3-30b-a3b", **routed(8192, 8, 2048, 768, 128)),
            timed("mixtral-8x7b", **routed(4096, 2, 4096, 14336, 8)),
            timed(
                "gpt-oss-20b",
                **routed(8192, 4, 2880, 2880, 32) | GPT_OSS,
                gate_up_bias=T((32, 5760)),
                down_bias=T((32, 2880)),
            ),
        ],
        rivals={
            "torch": Passing(_moe_torch),
            "upstream": Passing(_moe_upstream, prepare=lambda args: args | {"topk_index": args["topk_index"].int()}),
        },
        sweeps={"tokens": ((1024, 2048, 4096, 8192, 16384, 32768), lambda n: routed(n, 8, 2048, 768, 128))},
    ),
}
