"""The packed weights of a mixture's experts in FP8 (e4m3), made dense by one kernel for one product
at a time.

W (E, N, K), or (E, K, N) if it is ``transposed``, is about q s with q in e4m3. The scale s in fp32
is (E, 1, 1), one for each expert ("fp8"), or (E, N, 1) and (E, 1, N), one for each output of each
expert ("fp8_rowwise"). An expert is cast as the weight of a linear layer is in ``float8.py``, which
has the errors. The products are in the dtype of x, because an expert has too few rows to gain by
casts of them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import acc, launch, launcher, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, mask_of, next_power_of_2, tl
from liger_kernel.ops.projections.float8 import E4, cast
from liger_kernel.ops.projections.weights import Dequantized


def reference(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q (E, N, K) times the scale, in ``dtype``."""
    wide = acc(dtype)
    return (q.to(wide) * scale).to(dtype)


@jit
def _dense_experts(
    q_ptr, scale_ptr, y_ptr, rows, cols, group,
    BY_COLUMN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``rows`` of all experts, one after another; ``group`` of them have one scale, or with
    BY_COLUMN one for each column."""
    program, tiles = tl.program_id(0), tl.cdiv(cols, BLOCK_COLS)
    row = (program // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = mask_of(row, rows, col, cols)
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BY_COLUMN:
        scale = tl.load(scale_ptr + (row // group).to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0.0)
    else:
        scale = tl.load(scale_ptr + row // group, mask=row < rows, other=0.0)[:, None]
    tl.store(y_ptr + at, (q * scale).to(y_ptr.dtype.element_ty), mask=mask)


_VALUES, _COLS = 4096, 1024  # values of a program, and the most columns of it


@launcher("(Tensor q, Tensor scale, ScalarType dtype) -> Tensor")
def dense_experts(q, scale, dtype) -> Tensor:
    (E, A, B), y = q.shape, q.new_empty(q.shape, dtype=dtype)
    cols = min(next_power_of_2(B), _COLS)
    rows = _VALUES // cols
    # a scale for each row, or one for all rows of an expert
    group = 1 if scale.shape[1] == A else A  # where both are 1, they are the same
    grid = (cdiv(E * A, rows) * cdiv(B, cols),)
    how = dict(BY_COLUMN=scale.shape[2] > 1, BLOCK_ROWS=rows, BLOCK_COLS=cols, num_warps=4)
    launch(_dense_experts, grid, q, scale, y, E * A, B, group, **how)
    return y


def cast_experts(w: Tensor, per_output: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Cast w (E, N, K), or (E, K, N) if ``transposed``, to e4m3, expert by expert; the fp32 scale
    is (E, 1, 1), or (E, N, 1) or (E, 1, N) ``per_output``.

    Raises ``ValueError`` on a GPU without FP8.
    """
    E, A, B = w.shape
    q = torch.empty(w.shape, dtype=E4, device=w.device)
    shape = (1, 1) if not per_output else (1, B) if transposed else (A, 1)
    scale = torch.empty((E, *shape), dtype=torch.float32, device=w.device)
    # the cast is by rows, and outputs are columns here
    turned = transposed and per_output
    for e in range(E):  # a cast of all of them would need another copy of all of them
        one, s = cast((w[e].t() if turned else w[e]).contiguous(), E4, per_output)
        q[e].view(torch.int8).copy_((one.t() if turned else one).view(torch.int8))
        scale[e].copy_(s.view(shape))
    return q, scale


def dense(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights q (E, N, K) times their scales, as a new tensor of ``dtype``."""
    if q.numel() and use_kernels(q.new_empty(0, dtype=dtype)) and q.is_contiguous() and scale.is_contiguous():
        return dense_experts(q, scale, dtype)
    return reference(q, scale, dtype)


def float8_experts(q: Tensor, scale: Tensor, transposed: bool = False) -> Dequantized:
    """The weights of experts as the operators multiply by them. ``transposed``: q is (E, K, N)."""
    # made for one product at a time, from tensors that stay as they are
    made = functools.partial(dense, q, scale)
    E, A, B = q.shape
    if transposed:
        return Dequantized((E, B, A), None, True, dequantize=lambda dtype: made(dtype).mT)
    return Dequantized((E, A, B), None, True, dequantize=made)
