"""What benchmarks need in addition to an operator's declaration: shapes of real models, other
implementations, and series of sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from liger_kernel.ops._core.operator import Case, Op

Sweeps = Mapping[str, tuple[Sequence[int], Callable[[int], Mapping[str, Any]]]]


def real(name: str, **args: Any) -> Case:
    """A case with shapes of a real model, which tests run on a GPU."""
    return Case(name, args, gpu=True)


def timed(name: str, **args: Any) -> Case:
    """One that is only measured, because smaller shapes test the same kernels as well."""
    return Case(name, args, gpu=True, timed=True)


@dataclass(frozen=True)
class Passing:
    """Another implementation, which has its own parameters.

    ``function``: a function, or the name of one in the package's module. ``names``: the arguments
    of our operator that it takes, in its order; ``weight=w`` passes w as ``weight``; by default, its
    parameters of these names. For a case that sets another argument, there is none:
    ``NotImplementedError``, except for those in ``ignored``, which do not change what is computed.
    ``prepare`` changes the arguments that are passed, and is not timed.
    """

    function: Callable[..., Any] | str
    names: str = ""
    ignored: str = ""
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def of(self, op: Op) -> Callable[..., Any]:
        """The implementation as a function of arguments that its attribute ``prepare`` has made of
        the operator's. A package's takes its module first."""
        defaults = {p.name: p.default for p in inspect.signature(op.fn).parameters.values()}
        function: Any = self.function
        names = self.names.split() or [name for name in inspect.signature(function).parameters if name in defaults]
        passed = [each.rpartition("=")[::2] for each in names]
        known = {ours for _, ours in passed} | {*self.ignored.split()}

        def prepare(args: dict[str, Any]) -> dict[str, Any]:
            for name in args.keys() - known:
                if isinstance(args[name], Tensor) or args[name] != defaults[name]:
                    raise NotImplementedError
            return self.prepare({ours: args.get(ours, defaults[ours]) for _, ours in passed})

        # host time is measured, too: nothing that can be done before the call is done in it
        def call(*module: Any, **args: Any) -> Any:
            by_position = [args[ours] for theirs, ours in passed if not theirs]
            by_name = {theirs: args[ours] for theirs, ours in passed if theirs}
            if isinstance(function, str):
                return getattr(module[0], function)(*by_position, **by_name)
            return function(*module, *by_position, **by_name)

        vars(call)["prepare"] = prepare
        return call


@dataclass(frozen=True)
class Measured:
    """``cases``: shapes of real models, for GPUs only. ``rivals``: other implementations, PyTorch's
    as "torch", or a package's; text: arguments of its function ``liger_NAME``. ``sweeps``: name ->
    (values, arguments of a case for a value)."""

    cases: Sequence[Case] = ()
    rivals: Mapping[str, Passing | str] = field(default_factory=dict)
    sweeps: Sweeps = field(default_factory=dict)

    def of(self, op: Op) -> MeasuredOp:
        declared = {each.name: getattr(op, each.name) for each in dataclasses.fields(Op)}
        passing = lambda rival: Passing(f"liger_{op.name}", rival) if isinstance(rival, str) else rival
        rivals = {name: passing(rival).of(op) for name, rival in self.rivals.items()}
        return MeasuredOp(**declared | {"cases": [*op.cases, *self.cases]}, rivals=rivals, sweeps=self.sweeps)


@dataclass(frozen=True, eq=False)
class MeasuredOp(Op):
    """An operator with everything that benchmarks need."""

    rivals: Mapping[str, Callable[..., Any]]
    sweeps: Sweeps
