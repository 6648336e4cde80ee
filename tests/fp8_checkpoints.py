"""Models in the form in which checkpoints in FP8 with scales of blocks are published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.float8_blocks import reference


def stored_in_blocks(w: Tensor, blocks: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """w (..., N, K) in e4m3, and the scale of each block."""
    *lead, N, K = w.shape
    scale = torch.rand(*lead, -(-N // blocks[0]), -(-K // blocks[1])) / 100 + 0.001
    # PyTorch before 2.12 makes a NaN of what is beyond the largest number
    most = torch.finfo(E4).max
    return (w.float() / reference(torch.ones_like(w), scale, blocks, torch.float32)).clamp(-most, most).to(E4), scale


def publish(model: nn.Module, path: Path, blocks: tuple[int, int]) -> nn.Module:
    """Write ``model`` in the published form, and return it with its weights decoded."""
    torch.manual_seed(0)
    state = {}
    for name, p in model.state_dict().items():
        if not name.endswith(("proj.weight", "experts.gate_up_proj", "experts.down_proj")):
            state[name] = p.clone()
            continue
        q, scale = stored_in_blocks(p, blocks)
        p.copy_(reference(q, scale, blocks, p.dtype))
        if p.ndim == 2:
            state |= {name: q, f"{name}_scale_inv": scale}
            continue
        of, _, part = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for kind, t in (("weight", q), ("weight_scale_inv", scale)):  # each expert by itself, gate and up apart
            for e, one in enumerate(t):
                halves = zip(parts, one.chunk(len(parts)))
                state |= {f"{of}.{e}.{half}.{kind}": values.contiguous() for half, values in halves}
    model.config.quantization_config = dict(
        quant_method="fp8", weight_block_size=list(blocks), activation_scheme="dynamic"
    )
    model.config.save_pretrained(path)
    del model.config.quantization_config
    save_file(state, path / "model.safetensors")
    return model


def stays_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers loads such a model without a GPU, too, which it would decode."""
    if not torch.cuda.is_available():
        quantizer = transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
        monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
