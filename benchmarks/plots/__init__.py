"""Plots of benchmark results: PNG files from the dicts that ``liger bench`` and ``liger bench
step`` write.

Every function takes such a dict and a directory, and returns the paths of the files that it wrote.
Titles state the finding. Variants that failed or are inaccurate are hatched and labelled as such,
and never have a ratio.
"""

from __future__ import annotations

from plots.drawing import bar_label as bar_label
from plots.drawing import finding as finding
from plots.of_operators import memory_bars as memory_bars
from plots.of_operators import operators as operators
from plots.of_operators import sweeps as sweeps
from plots.of_operators import time_bars as time_bars
from plots.of_steps import batch_curves as batch_curves
from plots.of_steps import breakdown as breakdown
from plots.of_steps import length_curves as length_curves
from plots.of_steps import step_bars as step_bars
from plots.of_steps import steps as steps
