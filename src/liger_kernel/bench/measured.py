"""What benchmarks need in addition to an operator's declaration: shapes of real models, other
implementations, and series of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from liger_kernel.ops._core.operator import Case, Op

Rivals = Mapping[str, Callable[..., Any]]
Sweeps = Mapping[str, tuple[Sequence[int], Callable[[int], Mapping[str, Any]]]]


def real(name: str, **args: Any) -> Case:
    """A case with shapes of a real model, which tests run on a GPU."""
    return Case(name, args, gpu=True)


def timed(name: str, **args: Any) -> Case:
    """One that is only measured, because smaller shapes test the same kernels as well."""
    return Case(name, args, gpu=True, timed=True)


@dataclass(frozen=True)
class Measured:
    """``cases``: shapes of real models, for GPUs only.

    ``rivals``: other implementations: "torch", or a package. A package's function takes the module
    that ``bench.rivals`` loads, and the arguments. Its optional attribute ``prepare`` maps a case's
    arguments to them and is not timed. ``sweeps``: name -> (values, arguments of a case for a
    value).
    """

    cases: Sequence[Case] = ()
    rivals: Rivals = field(default_factory=dict)
    sweeps: Sweeps = field(default_factory=dict)

    def of(self, op: Op) -> MeasuredOp:
        return MeasuredOp(
            op.name, op.fn, op.reference, [*op.cases, *self.cases], op.cost, op.doc, self.rivals, self.sweeps
        )


@dataclass(frozen=True, eq=False)
class MeasuredOp(Op):
    """An operator with everything that benchmarks need."""

    rivals: Rivals
    sweeps: Sweeps
