"""The right name that is nearest to a wrong one, by meaning or by spelling: what error messages
suggest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path

MANY = 60  # names that a message lists at most: all operators, and not all families

_NAMES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
# Our flag -> what transformers, TRL, axolotl, LLaMA-Factory and others call it, with the same values in
# the same sense: `liger train` and `liger fit` take these names. A comma: the second name is that of
# other commands.
ALIASES = _NAMES["aliases"]
# Our flag, or one with a value -> names that have other values, or nearly the same sense, which are
# answered with ours.
SYNONYMS = _NAMES["synonyms"]


def flag_form(name: str) -> str:
    """``learning_rate``, ``--Learning-Rate`` -> ``learning-rate``."""
    return name.lstrip("-").replace("_", "-").casefold()


ALIAS = {name: ours.split(",")[0] for ours, theirs in ALIASES.items() for name in theirs.split()}


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most like ``name``, whatever its case; None if none is like
    it (``difflib``'s ratio is below ``cutoff``)."""
    plain = {each.casefold(): each for each in names}
    found = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant(name: str, names: Iterable[str]) -> str | None:
    """What others' flag ``name`` is called among ``names``, with a value if it implies one; ""
    if none of these does it, None if it is no such flag."""
    ours, name = {flag_form(each): each for each in names}, flag_form(name)
    for flags, theirs in (*ALIASES.items(), *SYNONYMS.items()):
        if name in theirs.split() or name in flags.split(",")[1:]:
            split = map(str.split, flags.split(","))
            return next((" ".join([ours[flag], *value]) for flag, *value in split if flag in ours), "")
    return None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean rms_norm?``, or nothing."""
    names = list(names)
    near = meant(name, names) or nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def no_such(kind: str, name: str, names: Iterable[str]) -> str:
    """``no operator 'rms_nrm'; did you mean rms_norm?``, or, where no name is near, all of them."""
    names = list(names)
    listed = f"; there are {', '.join(names)}" if len(names) <= MANY else ""
    return f"no {kind} {name!r:.80}{did_you_mean(name, names) or listed}"
