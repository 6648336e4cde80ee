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

from liger_kernel.ops.projections.float8 import E4, cast
from liger_kernel.ops.projections.float8_blocks import dense as dense_blocks
from liger_kernel.ops.projections.weights import Dequantized


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
    # an expert, or one of its rows or columns, is a block
    blocks = tuple(max(n // max(scales, 1), 1) for n, scales in zip(q.shape[1:], scale.shape[1:]))
    return dense_blocks(q, scale, (blocks[0], blocks[1]), dtype)


def float8_experts(q: Tensor, scale: Tensor, transposed: bool = False) -> Dequantized:
    """The weights of experts as the operators multiply by them. ``transposed``: q is (E, K, N)."""
    # made for one product at a time, from tensors that stay as they are
    made = functools.partial(dense, q, scale)
    E, A, B = q.shape
    if transposed:
        return Dequantized((E, B, A), None, True, dequantize=lambda dtype: made(dtype).mT)
    return Dequantized((E, A, B), None, True, dequantize=made)
