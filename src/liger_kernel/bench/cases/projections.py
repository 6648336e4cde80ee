"""Benchmark cases of ``ops/projections``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from liger_kernel.bench.measured import Measured, real, timed
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.activations.glu import ACTS
from liger_kernel.ops.projections.lora import _layer as _lora_layer
from liger_kernel.ops.projections.lora import _magnitudes as _lora_magnitudes
from liger_kernel.ops.projections.lora import _mlp_args as _lora_mlp_args
from liger_kernel.ops.projections.lora import _qkv_args as _lora_qkv_args
from liger_kernel.ops.projections.lora_moe import _args as _lora_moe_args
from liger_kernel.ops.projections.mlp import _args as _mlp_args
from liger_kernel.ops.projections.moe import _GPT_OSS as _moe_GPT_OSS
from liger_kernel.ops.projections.moe import _routed as _moe_routed


def _mlp_upstream(functional, x, gate, up, down, *, gate_multiplier=1.0, down_multiplier=1.0):
    ops = importlib.import_module("liger_kernel.ops")  # LinkedIn's: inside ``present()`` its modules are imported
    y = ops.LigerMLPFunction.apply(x.reshape(1, -1, x.shape[-1]), gate, up, down, gate_multiplier, down_multiplier)
    return y.reshape(x.shape)


def _moe_torch(
    x,
    gate_up,
    down,
    topk_index,
    topk_weight,
    *,
    gate_up_bias=None,
    down_bias=None,
    act="silu",
    interleaved=False,
    alpha=1.0,
    limit=None,
    offset=0.0,
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
    y = (
        plus(torch._grouped_mm(gated * (up + offset if offset else up), down.mT, offs=offs), down_bias)
        * topk_weight.flatten()[order, None]
    )
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return y[inverse].view(*topk_index.shape, -1).sum(1).to(x.dtype)


def _moe_upstream(functional, x, gate_up, down, topk_index, topk_weight):
    ops = importlib.import_module("liger_kernel.ops")  # LinkedIn's: inside ``present()`` its modules are imported
    return ops.LigerFusedMoEFunction.apply(x, gate_up, down, topk_index, topk_weight)


_moe_upstream.prepare = lambda args: args | {"topk_index": args["topk_index"].int()}  # type: ignore[attr-defined]  # any function may have attributes


def _frozen(args: dict) -> dict:
    """Frozen weights: only the adapters and x require gradients."""
    learns = lambda name: name == "x" or name.rpartition("_")[2] in ("a", "b") or name == "magnitude"
    return {k: replace(v, grad=learns(k)) if isinstance(v, T) else v for k, v in args.items()}


def _lora_args(M: int, K: int, N: int, r: int, **more: T) -> dict:
    return _frozen(dict(x=T((M, K)), scale=2.0) | _lora_layer(K, N, r, dtype=torch.float32) | more)


def _lora_moe_peft(x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, *, scale=1.0):
    """The sum of weights and adapters, multiplied by transformers' ``grouped_mm``, as PEFT does."""
    gate_up, down = (
        torch.baddbmm(gate_up, gate_up_b, gate_up_a, alpha=scale),
        torch.baddbmm(down, down_b, down_a, alpha=scale),
    )
    return _moe_torch(x, gate_up, down, topk_index, topk_weight)


MEASURED = {
    "lora_linear": Measured(
        cases=[
            real("llama3-8b-o", **_lora_args(8192, 4096, 4096, 16)),
            timed("llama3-8b-up", **_lora_args(8192, 4096, 14336, 16)),
            real("dora", **_lora_args(8192, 4096, 4096, 16, magnitude=T((4096,), _lora_magnitudes))),
        ],
        sweeps={"rank": ((8, 16, 32, 64, 128, 256), lambda r: _lora_args(8192, 4096, 4096, r))},
    ),
    "lora_qkv": Measured(cases=[real("llama3-8b", **_frozen(_lora_qkv_args((8192,), 4096, 4096, 1024, 16)))]),
    "lora_mlp": Measured(cases=[real("llama3-8b", **_frozen(_lora_mlp_args((8192,), 4096, 14336, 16)))]),
    "lora_moe": Measured(
        cases=[
            real("qwen3-30b-a3b", **_lora_moe_args(8192, 8, 2048, 768, 128, 16)),
            timed("mixtral-8x7b", **_lora_moe_args(4096, 2, 4096, 14336, 8, 16)),
        ],
        rivals={"peft": _lora_moe_peft},
        sweeps={"rank": ((8, 16, 32, 64, 128), lambda r: _lora_moe_args(8192, 8, 2048, 768, 128, r))},
    ),
    "mlp": Measured(
        cases=[
            real("square", **_mlp_args((4096,), 8192, 8192)),
            real("llama3-8b", **_mlp_args((8192,), 4096, 14336)),
            timed("qwen3-0.6b", **_mlp_args((16384,), 1024, 3072)),
        ],
        rivals={"upstream": _mlp_upstream},
    ),
    "moe": Measured(
        cases=[
            real("switch", **_moe_routed(8192, 1, 4096, 1024, 16)),
            real("qwen3-30b-a3b", **_moe_routed(8192, 8, 2048, 768, 128)),
            timed("mixtral-8x7b", **_moe_routed(4096, 2, 4096, 14336, 8)),
            timed(
                "gpt-oss-20b",
                **(
                    _moe_routed(8192, 4, 2880, 2880, 32)
                    | dict(gate_up_bias=T((32, 5760)), down_bias=T((32, 2880)), **_moe_GPT_OSS)
                ),
            ),
        ],
        rivals={"torch": _moe_torch, "upstream": _moe_upstream},
        sweeps={"tokens": ((1024, 2048, 4096, 8192, 16384, 32768), lambda n: _moe_routed(n, 8, 2048, 768, 128))},
    ),
}
