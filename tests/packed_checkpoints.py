"""Layers of checkpoints in packed integers and NVFP4, made here as compressed-tensors and GPT-QModel
leave them in a model that Transformers has loaded, and the files of such checkpoints."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_kernel.ops.projections import mxfp4
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.packed_weights import (
    PackedWeight,
    awq_columns,
    columns_reference,
    gptq_columns,
    integer_rows,
    nvfp4_rows,
    rows_reference,
)

SCHEMES: dict[str, dict[str, Any]] = {
    "int4": dict(num_bits=4, symmetric=True, group_size=16),
    "asymmetric": dict(num_bits=4, symmetric=False, group_size=8),
    "int8": dict(num_bits=8, symmetric=True, group_size=None),
    "nvfp4": dict(num_bits=4, symmetric=True, group_size=16),
    "int3": dict(num_bits=3, symmetric=True, group_size=16),
}


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words_of(rows: int, words: int) -> Tensor:
    return bytes_of(rows, 4 * words).view(torch.int32)


def compress(m: Any, kind: str) -> Tensor:
    """Give a linear layer the parameters of a scheme and the forward of compressed-tensors. Returns
    the decoded weight."""
    (N, K), how = m.weight.shape, SimpleNamespace(**SCHEMES[kind])
    groups, bits = K // (how.group_size or K), how.num_bits
    scale = torch.rand(N, groups) / 2 ** (bits + 2) + 2 ** -(bits + 4)
    parts = dict(weight_packed=words_of(N, -(-K * bits // 32)), weight_scale=scale)
    zero = divisor = None
    if kind == "nvfp4":
        divisor = torch.tensor([400.0])
        parts = dict(weight_packed=bytes_of(N, K // 2), weight_scale=(40 * scale * 16).to(E4))
        parts["weight_global_scale"] = divisor
    elif not how.symmetric:
        parts["weight_zero_point"] = zero = words_of(-(-N * bits // 32), groups)
    if kind == "int3":
        decoded = m.weight.detach().clone()
    else:
        of = parts["weight_packed"], parts["weight_scale"]
        decoded = rows_reference(*of, zero, divisor, K, bits, torch.float32)
    if kind != "nvfp4":
        parts["weight_shape"] = torch.tensor([N, K])
    del m.weight
    for name, t in parts.items():
        m.register_parameter(name, nn.Parameter(t, requires_grad=False))
    form = "nvfp4-pack-quantized" if kind == "nvfp4" else "pack-quantized"
    m.quantization_scheme = SimpleNamespace(format=form, weights=how, output_activations=None)
    m.forward = types.MethodType(lambda self, x: type(self).forward(self, x), m)
    return decoded


def compressed(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Compress the projections of ``model``, with the hook that makes them dense in its first call.
    Returns the decoded weights by name."""
    torch.manual_seed(0)
    layers = {name: m for name, m in model.named_modules() if name.endswith("proj")}
    decoded = {name: compress(m, kind) for name, m in layers.items()}

    def hook(model: Any, args: Any) -> None:
        for name, m in model.named_modules():
            if "weight_packed" in m._parameters:
                weight, where = decoded[name.removesuffix(".base_layer")], m.weight_packed.device
                for part in [part for part in m._parameters if part.startswith("weight_")]:
                    delattr(m, part)
                m.weight = nn.Parameter(weight.to(where, copy=True), requires_grad=False)
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook

    model.ct_decompress_hook = model.register_forward_pre_hook(hook)
    return {f"{name}.weight": t for name, t in decoded.items()}


_LAYER = """
import torch
class {name}(torch.nn.Module):
    def forward(self, x):
        y = x @ self.decoded.to(x)
        return y if self.bias is None else y + self.bias
    def qzero_format(self):
        return self.version
"""


def by_columns(monkeypatch: pytest.MonkeyPatch, module: str, name: str, N: int, K: int, **given: Any) -> Any:
    """A layer of GPT-QModel: of GPTQ if it has bits in ``given``, else of AWQ; in a class of its
    own package."""
    home: Any = types.ModuleType(f"gptqmodel.nn_modules.qlinear.{module}")
    exec(_LAYER.format(name=name), home.__dict__)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    m = getattr(home, name)()
    how = dict(bits=4, group_size=16, in_features=K, out_features=N, version=2, bias=None, adapter=None) | given
    bits, groups, awq = how["bits"], K // how["group_size"], "Awq" in name
    index = how.pop("g_idx", torch.arange(K) // how["group_size"]).int()
    for key, value in how.items():
        m.register_buffer(key, value) if isinstance(value, Tensor) else setattr(m, key, value)
    words = words_of(*(K, N // 8) if awq else (K * bits // 32, N))
    held = dict(qweight=words, qzeros=words_of(groups, N * bits // 32), scales=torch.rand(groups, N) / 2 ** (bits + 2))
    m.decoded = columns_reference(*held.values(), None if awq else index, bits, 2 - m.version, awq, torch.float32)
    for key, t in (held if awq else held | dict(g_idx=index)).items():
        m.register_buffer(key, t)
    return m


def stored_as(w: Tensor, kind: str) -> tuple[dict[str, Tensor], PackedWeight]:
    """The tensors, by the last parts of their names, that hold a weight (N, K) in a published form, and what
    they decode to."""
    (N, K), w = w.shape, w.detach().float()
    scale = w.unflatten(1, (-1, 16)).abs().amax(2) / 7
    if kind == "nvfp4":
        parts = {"weight_global_scale": torch.tensor([300.0]), "weight_scale": (scale * 400).to(E4)}
        made = nvfp4_rows(bytes_of(N, K // 2), parts["weight_scale"], parts["weight_global_scale"])
        name = "weight_packed"
    elif kind == "int4":
        parts = {"weight_scale": scale, "weight_shape": torch.tensor([N, K])}
        made, name = integer_rows(words_of(N, K // 8), scale, None, (N, K), 16, 4), "weight_packed"
    else:
        zeros = torch.full((K // 16, N // 8), 0x77777777 if kind == "gptq" else -0x77777778, dtype=torch.int32)
        parts, name = {"scales": scale.t().contiguous(), "qzeros": zeros}, "qweight"
        of = zeros, parts["scales"]
        if kind == "gptq":
            parts["g_idx"] = torch.arange(K).int() // 16
            made = gptq_columns(words_of(K // 8, N), *of, parts["g_idx"], (N, K), 16, 4, 1)
        else:
            made = awq_columns(words_of(K, N // 8), *of, (N, K), 16)
    made = made.nearest(w)
    return parts | {name: made.values}, made


_METHODS: dict[str, dict[str, Any]] = {
    "int4": dict(quant_method="compressed-tensors", format="pack-quantized"),
    "nvfp4": dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized"),
    "gptq": dict(quant_method="gptq", bits=4, group_size=16),
    "awq": dict(quant_method="awq", bits=4, group_size=16),
}


def publish_as(model: nn.Module, path: Path, kind: str) -> nn.Module:
    """Write ``model`` with its projections in this form, and return it with their values."""
    state: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        if not name.endswith("proj.weight"):
            state[name] = p.clone()
            continue
        parts, made = stored_as(p, kind)
        p.copy_(made.dense(p.dtype))
        state |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    config = model.config.to_dict() | dict(quantization_config=_METHODS[kind])
    (path / "config.json").write_text(json.dumps(config))
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return model


def publish_mxfp4(model: nn.Module, path: Path) -> None:
    """Write a gpt-oss with its experts in MXFP4."""
    state = {name: t.contiguous() for name, t in model.state_dict().items()}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        state[f"{name}_blocks"], state[f"{name}_scales"] = mxfp4.rounded(state.pop(name).mT.contiguous())
    config = model.config.to_dict() | dict(quantization_config=dict(quant_method="mxfp4"))
    (path / "config.json").write_text(json.dumps(config | dict(architectures=["GptOssForCausalLM"])))
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
