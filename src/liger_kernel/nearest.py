"""The right name that is nearest to a wrong one: what error messages suggest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 40  # names that a message lists at most


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most like ``name``, whatever its case; None if none is like it (``difflib``'s ratio is below ``cutoff``)."""
    plain = {each.casefold(): each for each in names}
    found = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean rms_norm?``, or nothing."""
    near = nearest(name, names, cutoff)
    return f"; did you mean {near}?" if near else ""


def no_such(kind: str, name: str, names: Iterable[str]) -> str:
    """``no operator 'rms_nrm'; did you mean rms_norm?``, or, where no name is near, all of them."""
    names = list(names)
    listed = f"; there are {', '.join(names)}" if len(names) <= MANY else ""
    return f"no {kind} {name!r}{did_you_mean(name, names) or listed}"
