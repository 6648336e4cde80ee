"""Experts that Transformers spreads over ranks: its exchange of tokens runs as it is, and calls our
experts on those of this rank.

Expert parallelism replaces the ``forward`` of each module of experts by a closure, which makes the
weights local and calls an ``EPImplementation``. That brings tokens to the ranks of their experts,
and calls ``experts_forward`` with local ids; an id that is not below the number of local experts
has no expert here. It took ``experts_forward`` from the module when the closure was made. A patch
of a class before that is found there; for a live module, the closure is made again around a copy of
the implementation.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_kernel.transformers.patching.classes import ours
from liger_kernel.transformers.recognise.variant import OF_EXPERTS

PLACE, CELL = "transformers.distributed.expert_parallel", "implementation"
# attribute of such a closure: our forward of experts -> what was made of both, as a patch must be
# the same when it is found again
MADE = "_liger_exchanges"


def of_experts(there: Any, m: nn.Module, new: Callable) -> Callable | None:
    """``there``, the forward in ``m`` itself, as a method that exchanges tokens for ``new``;
    None if it is no exchange, or ``new`` no experts."""
    if (
        new not in OF_EXPERTS
        or not isinstance(there, types.FunctionType)
        or there.__module__ != PLACE
        or CELL not in there.__code__.co_freevars
    ):
        return None
    made: dict[Callable, Callable] = there.__dict__.setdefault(MADE, {})
    if new not in made:
        cells = dict(zip(there.__code__.co_freevars, there.__closure__ or ()))
        implementation = _calling(cells[CELL].cell_contents, types.MethodType(new, m))
        if implementation is None:
            return None
        cells[CELL] = types.CellType(implementation)
        exchanged = types.FunctionType(
            there.__code__, there.__globals__, there.__name__, there.__defaults__, tuple(cells.values())
        )
        made[new] = ours(lambda self, *args, **kwargs: exchanged(*args, **kwargs))
    return made[new]


def _calling(implementation: Any, experts_forward: Any) -> Any | None:
    """A copy of Transformers' ``implementation``, and of those that it chooses among, that calls
    these experts; None if it is not Transformers' own."""
    if type(implementation).__module__ != PLACE:
        return None
    new = copy.copy(implementation)
    new.experts_forward = experts_forward
    for name, value in vars(new).items():
        if hasattr(value, "experts_forward"):
            if (inner := _calling(value, experts_forward)) is None:
                return None
            setattr(new, name, inner)
    return new
