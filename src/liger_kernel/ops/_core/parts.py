"""Rows that are longer than the registers of a program: each is split into parts, one a program,
and read from memory once.

Two sweeps need a row: the first sums it, the second uses the sum. One launch runs both. Programs
draw tickets, and by these the second sweep of a row comes some rows after the first:

    ticket   0 1 2 3   4 5 6 7   8 9 . .
    first    row 0     row 1     row 2
    second                           row 0     (with a lag of 2)

Between the two, the row stays in the L2 cache, so the lag is a part of its size. The programs of the
first sweep write their sums, and count up their row's flag. Those of the second wait for the flag,
mostly not at all. What they wait for has a lower ticket, so it is running or done: nothing can wait
for ever. Every program adds the sums of all parts in the same order: results are deterministic.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.tl import INTERPRET, jit, tl

# of the L2 cache: rows between the two sweeps
SHARE = 0.2
FIRST_READ = tl.constexpr("evict_last")


def splits_rows(x: Tensor, least: int) -> bool:
    """Whether rows of x (M, N) are split: longer than ``least``, on a GPU whose programs share one L2
    cache. (The compute dies of AMD's have one each.)"""
    return x.shape[1] > least and (INTERPRET or launch_config.arch().startswith("sm"))


@functools.cache
def _cache_bytes() -> int:
    if not torch.cuda.is_available():
        return 1 << 12
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def lag_of(row_bytes: int) -> int:
    """The rows between the two sweeps, of which each holds so many bytes of the cache."""
    return max(1, int(SHARE * _cache_bytes()) // row_bytes)


def flags_of(x: Tensor, M: int) -> Tensor:
    """The ticket counter, and M rows' flags."""
    return x.new_zeros(M + 1, dtype=torch.int32)


@jit
def draw(flags_ptr, first, second, lag):
    """A ticket: its row and part, and whether it is of the second sweep. ``first`` and ``second``:
    programs of a row in each. The row may lie outside, at the beginning and at the end."""
    ticket = tl.atomic_add(flags_ptr, 1, sem="relaxed")
    at = ticket % (first + second)
    row = ticket // (first + second)
    later = at >= first
    row = tl.where(later, row - lag, row)
    return row.to(tl.int64), tl.where(later, at - first, at), later


@jit
def arrive(flags_ptr, row):
    """What this program has stored is seen by whoever ``wait``s for the row."""
    tl.debug_barrier()
    tl.atomic_add(flags_ptr + 1 + row, 1, sem="release")


@jit
def wait(flags_ptr, row, first):
    """Until all programs of the row's first sweep have arrived."""
    while tl.atomic_add(flags_ptr + 1 + row, 0, sem="acquire") < first:
        pass
