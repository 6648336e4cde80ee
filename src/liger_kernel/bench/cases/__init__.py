"""Every operator with the shapes of real models, the rivals and the sweeps that benchmarks use:
one file for each folder of ``ops``; and the operators of other packages, with their own cases."""

from __future__ import annotations

import importlib.metadata
import warnings

from liger_kernel.bench.cases.activations import ACTIVATIONS
from liger_kernel.bench.cases.attention import ATTENTION
from liger_kernel.bench.cases.divergence import DIVERGENCES
from liger_kernel.bench.cases.losses import LOSSES
from liger_kernel.bench.cases.norms import NORMS
from liger_kernel.bench.cases.projections import PROJECTIONS
from liger_kernel.bench.cases.recurrent import RECURRENT
from liger_kernel.bench.cases.residual import RESIDUALS
from liger_kernel.bench.cases.rotary import ROTARY
from liger_kernel.bench.measured import Measured, MeasuredOp
from liger_kernel.ops import OPS as DECLARED

_MEASURED = ACTIVATIONS | ATTENTION | DIVERGENCES | LOSSES | NORMS | PROJECTIONS | RECURRENT | RESIDUALS | ROTARY


def import_others() -> None:
    """Import the modules that installed packages name in the entry point group
    ``liger_kernel.operators``, which declare operators. One that fails is missing, not an error."""
    for found in importlib.metadata.entry_points(group="liger_kernel.operators"):
        try:
            found.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"liger_kernel: the operators of {found.value} are missing ({why})", stacklevel=2)


import_others()
OPS: dict[str, MeasuredOp] = {name: _MEASURED.get(name, Measured()).of(op) for name, op in DECLARED.items()}
