"""Matrix products that add to their output, shared by operators."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import intercepted, on_gpu


def add_mm(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total (M, N) (+)= a (M, K) b (K, N), accumulated in the dtype of ``total``: on a GPU by
    the tensor cores, without a copy of the product."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif not on_gpu(a):
        a, b = a.to(total.dtype), b.to(total.dtype)
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    # PyTorch 2.11 fails where such a sum has only a shape
    elif not intercepted():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
