"""What an operator of another package is made of, as ``torch.library`` is for PyTorch's.

These names keep their meaning from release to release; everything below ``liger_kernel.ops._core``
may move. The guide "Your own operator" has a template that uses them.

For kernels: ``jit`` is ``triton.jit`` for this package's launches, and ``tl`` is
``triton.language``; without Triton both are stand-ins, so that the references of an operator run
anywhere. ``tile_at``, ``load_tile``, ``store_tile`` and ``load_row`` are called in kernels: rows,
columns and mask of a tile; a tile read as fp32; one written in the dtype of its pointer; a vector
over columns, such as a weight, read as fp32. ``launch_config.tile`` chooses the sizes of tiles, and
``launch_config.processors`` counts the multiprocessors of the GPU.
"""

from __future__ import annotations

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, launcher, nbytes, once_differentiable, op
from liger_kernel.ops._core.operator import launch, rows_of, shaped, tracing, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_row, load_tile, store_tile, tile_at, tl

__all__ = ["Case", "Cost", "T", "acc", "cdiv", "column_sum", "jit", "launch", "launch_config", "launcher", "load_row"]
__all__ += ["load_tile", "nbytes", "once_differentiable", "op", "rows_of", "shaped", "store_tile", "tile_at", "tl"]
__all__ += ["tracing", "use_kernels"]
