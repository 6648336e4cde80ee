"""Rows of tokens over several processes: see ``liger_kernel.parallel.ulysses``."""

from liger_kernel.parallel.ulysses import share_rows

__all__ = ["share_rows"]
