"""Transformers' wrappers around a forward: how to look inside them, and how to put them around a
replacement."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

WRAPPING = (
    "transformers.",
    "torch.utils._contextlib",
)  # Python modules whose wrappers call what they wrap with the same arguments, or renamed ones


def wrapped(forward: Any) -> Any:
    """Return what ``forward`` wraps, if it is torch's ``no_grad`` or a wrapper of Transformers
    (checkpointing, arguments with older names); else None."""
    inner, closure = getattr(forward, "__wrapped__", None), getattr(forward, "__closure__", None) or ()
    own = (
        inner is not None
        and isinstance(forward, types.FunctionType)
        and forward.__globals__.get("__name__", "").startswith(WRAPPING)
    )
    return inner if own and any(cell.cell_contents is inner for cell in closure) else None


def core(forward: Any) -> Any:
    """Return the forward inside Transformers' wrappers."""
    while (inner := wrapped(forward)) is not None:
        forward = inner
    return forward


def within(forward: Callable, change: Callable[[Any], Callable], *, of_class: bool = True) -> Callable:
    """Return ``change(forward)``; if Transformers has wrapped it, return that wrapper around
    ``change`` of what it wraps.

    A wrapper that checkpoints does so only if it is ``type(self).forward``. The new wrapper
    compares itself with it if it becomes the class's forward (``of_class``); otherwise it compares
    the old wrapper.
    """
    inner = wrapped(forward)
    if inner is None:
        return change(forward)
    changed = within(inner, change, of_class=False)
    if changed is inner:
        return forward
    outer: Any = forward
    code = outer.__code__
    cells = {
        name: types.CellType(changed) if cell.cell_contents is inner else cell
        for name, cell in zip(code.co_freevars, outer.__closure__)
    }
    if of_class and code.co_name in cells:
        cells[code.co_name] = types.CellType()
    new: Any = types.FunctionType(code, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells.values()))
    new.__kwdefaults__ = outer.__kwdefaults__
    functools.update_wrapper(new, forward)
    new.__wrapped__ = changed
    if of_class and code.co_name in cells:
        cells[code.co_name].cell_contents = new
    return new
