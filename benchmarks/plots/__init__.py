"""Plots of benchmark results, as SVG, from the dicts that ``liger bench`` and ``liger bench step``
write.

Every function takes such a dict and yields the plots. Titles state the finding. Variants that
failed or are inaccurate are outlined and labelled as such, and never have a ratio.
"""

from __future__ import annotations

from collections.abc import Iterator

from plots.drawing import Data, Plot as Plot, bar_label as bar_label, finding as finding
from plots.of_operators import operators as operators
from plots.of_steps import length_curves as length_curves, steps as steps


def plots_of(data: Data) -> Iterator[Plot]:
    """All plots of results of either kind."""
    yield from (steps if any("model" in row for row in data["rows"]) else operators)(data)
