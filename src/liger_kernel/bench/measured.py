"""What is measured of an operator: beyond its declaration, shapes of real models, other implementations, and series of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from liger_kernel.ops._core.operator import Case, Op

Rivals = Mapping[str, Callable[..., Any]]
Sweeps = Mapping[str, tuple[Sequence[int], Callable[[int], Mapping[str, Any]]]]


@dataclass(frozen=True)
class Measured:
    """``cases`` of real models, too large for anything but a GPU.

    ``rivals`` are other implementations: "torch", or a package, whose function takes the module ``bench.rivals`` loads it as, and the arguments; its
    attribute ``prepare``, if it has one, maps a case's arguments to them, and is not timed. ``sweeps``: name -> (values, arguments of a case for a value).
    """

    cases: Sequence[Case] = ()
    rivals: Rivals = field(default_factory=dict)
    sweeps: Sweeps = field(default_factory=dict)

    def of(self, op: Op) -> MeasuredOp:
        return MeasuredOp(op.name, op.fn, op.reference, [*op.cases, *self.cases], op.cost, op.doc, self.rivals, self.sweeps)


@dataclass(frozen=True, eq=False)
class MeasuredOp(Op):
    """An operator with all that is measured of it."""

    rivals: Rivals
    sweeps: Sweeps
