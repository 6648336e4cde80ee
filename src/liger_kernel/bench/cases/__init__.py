"""Every operator with its cases of real models, its rivals and its sweeps: a file for each room of ``ops``."""

from __future__ import annotations

from liger_kernel.bench.cases import activations, attention, divergence, losses, norms, projections, residual, rotary, token_embedding, vocab_parallel
from liger_kernel.bench.measured import Measured, MeasuredOp
from liger_kernel.ops import OPS as DECLARED

_ROOMS = activations, attention, divergence, losses, norms, projections, residual, rotary, token_embedding, vocab_parallel
_MEASURED: dict[str, Measured] = {name: measured for room in _ROOMS for name, measured in room.MEASURED.items()}

OPS: dict[str, MeasuredOp] = {name: _MEASURED.get(name, Measured()).of(op) for name, op in DECLARED.items()}
