"""Benchmark cases of ``ops/activations`` and of the embedding of tokens."""

from __future__ import annotations

import torch.nn.functional as F

from liger_kernel.bench.measured import Measured, Passing, real
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.token_embedding import tokens


def _glu_upstream(functional, gate, up, act):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return {"silu": functional.liger_swiglu, "gelu_tanh": functional.liger_geglu}[act](gate, up)


ACTIVATIONS = {
    "embedding": Measured(
        cases=[
            real("llama3-8b", index=tokens(128256, 4, 8192), w=T((128256, 4096))),
            real("gpt2", index=tokens(50257, 64, 1024), w=T((50257, 768)), padding_idx=50256),
        ],
        rivals={"torch": Passing(F.embedding, "index w padding_idx")},
    ),
    "glu": Measured(
        cases=[
            real("llama3-8b", gate=T((8192, 14336)), up=T((8192, 14336))),
            real("phi3-mini", gate=T((4096, 16384)), up=None),
        ],
        rivals={"upstream": Passing(_glu_upstream)},
    ),
    "relu_squared": Measured(
        cases=[real("nemotron-8b", x=T((8192, 16384)))],
        rivals={"torch": Passing(lambda x: F.relu(x).square()), "upstream": "x"},
    ),
}
