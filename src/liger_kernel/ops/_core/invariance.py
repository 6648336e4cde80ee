"""The switch of batch invariance, which everything asks that would look at the number of rows.
``ops/projections/invariant_products.py`` turns it, and says what it means."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

_holders = 0


class _Sums(threading.local):
    over_tokens = False


_sums = _Sums()


@contextlib.contextmanager
def _over_tokens() -> Any:
    before, _sums.over_tokens = _sums.over_tokens, True
    try:
        yield
    finally:
        _sums.over_tokens = before


def over_tokens() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile products of this thread are the gradients of weights, sums over all tokens: they
    may have any order."""
    return _over_tokens() if is_invariant() else contextlib.nullcontext()


def is_over_tokens() -> bool:
    return _sums.over_tokens


def is_invariant() -> bool:
    """Whether results of a row must have the same bits in any batch."""
    return _holders > 0


def hold(change: int) -> int:
    """Count one holder more (1) or less (-1) of the switch; returns how many there are."""
    global _holders
    _holders += change
    return _holders
