"""Every operator with the shapes of real models, the rivals and the sweeps that benchmarks use:
one file for each folder of ``ops``."""

from __future__ import annotations

from liger_kernel.bench.cases import (
    activations,
    attention,
    divergence,
    losses,
    norms,
    projections,
    residual,
    rotary,
    token_embedding,
    vocab_parallel,
)
from liger_kernel.bench.measured import Measured, MeasuredOp
from liger_kernel.ops import OPS as DECLARED

_SUBJECTS = (
    activations,
    attention,
    divergence,
    losses,
    norms,
    projections,
    residual,
    rotary,
    token_embedding,
    vocab_parallel,
)
_MEASURED: dict[str, Measured] = {
    name: measured for subject in _SUBJECTS for name, measured in subject.MEASURED.items()
}

OPS: dict[str, MeasuredOp] = {name: _MEASURED.get(name, Measured()).of(op) for name, op in DECLARED.items()}
