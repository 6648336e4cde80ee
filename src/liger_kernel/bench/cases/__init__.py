"""Every operator with the shapes of real models, the rivals and the sweeps that benchmarks use:
one file for each folder of ``ops``."""

from __future__ import annotations

from liger_kernel.bench.cases.activations import ACTIVATIONS
from liger_kernel.bench.cases.attention import ATTENTION
from liger_kernel.bench.cases.divergence import DIVERGENCES
from liger_kernel.bench.cases.losses import LOSSES
from liger_kernel.bench.cases.norms import NORMS
from liger_kernel.bench.cases.projections import PROJECTIONS
from liger_kernel.bench.cases.residual import RESIDUALS
from liger_kernel.bench.cases.rotary import ROTARY
from liger_kernel.bench.measured import Measured, MeasuredOp
from liger_kernel.ops import OPS as DECLARED

_MEASURED = ACTIVATIONS | ATTENTION | DIVERGENCES | LOSSES | NORMS | PROJECTIONS | RESIDUALS | ROTARY

OPS: dict[str, MeasuredOp] = {name: _MEASURED.get(name, Measured()).of(op) for name, op in DECLARED.items()}
