"""Offloading of activations for modules of your own: see ``liger_kernel.memory.offload``."""

from liger_kernel.memory.offload import offloaded

__all__ = ["offloaded"]
