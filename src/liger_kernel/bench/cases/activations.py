"""Benchmark cases of ``ops/activations``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch.nn.functional as F

from liger_kernel.bench.measured import Measured, real
from liger_kernel.ops._core.operator import T


def _glu_upstream(functional, gate, up=None, *, act="silu"):
    return {"silu": functional.liger_swiglu, "gelu_tanh": functional.liger_geglu}[act](
        *(gate.chunk(2, -1) if up is None else (gate, up))
    )


MEASURED = {
    "glu": Measured(
        cases=[
            real("llama3-8b", gate=T((8192, 14336)), up=T((8192, 14336))),
            real("phi3-mini", gate=T((4096, 16384)), up=None),
        ],
        rivals={"upstream": _glu_upstream},
    ),
    "relu_squared": Measured(
        cases=[real("nemotron-8b", x=T((8192, 16384)))],
        rivals={
            "torch": lambda x: F.relu(x).square(),
            "upstream": lambda functional, x: functional.liger_relu_squared(x),
        },
    ),
}
