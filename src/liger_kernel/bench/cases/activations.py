"""Benchmark cases of ``ops/activations``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch.nn.functional as F

from liger_kernel.bench.measured import Measured
from liger_kernel.ops._core.operator import Case, T


def _glu_upstream(functional, gate, up=None, *, act="silu"):
    return {"silu": functional.liger_swiglu, "gelu_tanh": functional.liger_geglu}[act](
        *(gate.chunk(2, -1) if up is None else (gate, up))
    )


MEASURED = {
    "glu": Measured(
        cases=[
            Case("llama3-8b", dict(gate=T((8192, 14336)), up=T((8192, 14336))), gpu=True),
            Case("phi3-mini", dict(gate=T((4096, 16384)), up=None), gpu=True),
        ],
        rivals={"upstream": _glu_upstream},
    ),
    "relu_squared": Measured(
        cases=[Case("nemotron-8b", dict(x=T((8192, 16384))), gpu=True)],
        rivals={
            "torch": lambda x: F.relu(x).square(),
            "upstream": lambda functional, x: functional.liger_relu_squared(x),
        },
    ),
}
