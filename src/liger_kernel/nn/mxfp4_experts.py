"""A frozen parameter of experts that stays in MXFP4, as gpt-oss is published
(``ops/projections/mxfp4.py``).

``store_mxfp4`` puts the published tensors in the place of the parameter. ``LigerMXFP4Experts`` is
the parametrization of PyTorch that makes a view of them for other code, as that of experts in FP8
does (``float8.py``): dense when somebody computes with it, rounded when somebody writes to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.nn.float8 import StoredExperts, parameter_of_experts
from liger_kernel.ops.projections import mxfp4


class LigerMXFP4Experts(StoredExperts):
    """Of experts in MXFP4; made by ``store_mxfp4``. Its bits are the blocks of weights (E, N, K), of
    which the parameter is (E, N, K), or ``transposed`` (E, K, N); ``mxfp4_scale``: the scales, in
    uint8."""

    def __init__(self, scales: Tensor, dtype: torch.dtype, transposed: bool):
        super().__init__(dtype)
        self.mxfp4_scale = nn.Parameter(scales, requires_grad=False)
        self.transposed = transposed

    def shape_of(self, blocks: Tensor) -> torch.Size:
        E, N, G, _ = blocks.shape
        return torch.Size((E, G * mxfp4.BLOCK, N) if self.transposed else (E, N, G * mxfp4.BLOCK))

    def dense(self, blocks: Tensor, some: Any) -> Tensor:
        blocks, scales = blocks[some], self.mxfp4_scale.detach()[some]
        of_experts = blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:])
        w = mxfp4.dense(*of_experts, self.dtype).unflatten(0, blocks.shape[:-3] or (1,))
        w = w if blocks.ndim > 3 else w[0]
        return w.mT if self.transposed else w

    @torch.no_grad()
    def right_inverse(self, w: Tensor) -> Tensor:
        if w.dtype == torch.uint8:
            return w
        blocks, scales = mxfp4.rounded(w.detach().mT if self.transposed else w.detach())
        self.mxfp4_scale.copy_(scales)
        return blocks

    def stored(self, blocks: Tensor) -> mxfp4.MXFP4Experts:
        """The weights (E, N, K) as the operators multiply by them."""
        return mxfp4.mxfp4_experts(blocks.detach(), self.mxfp4_scale.detach())

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, transposed={self.transposed}"


@torch.no_grad()
def store_mxfp4(
    experts: nn.Module, name: str, blocks: Tensor, scales: Tensor, transposed: bool = False, layer: str = ""
) -> None:
    """Put weights in MXFP4 in the place of the parameter ``name`` of ``experts``, whose data, on
    any device, is dropped; whoever reads it gets a view that is made dense when somebody computes with it.

    The parameter is (E, N, K), or ``transposed`` (E, K, N) as that of gpt-oss; blocks (E, N, K / 32,
    16) and scales (E, N, K / 32) in uint8, as published. The ``state_dict`` has
    ``parametrizations.<name>.original`` and ``parametrizations.<name>.0.mxfp4_scale``.
    Raises ``ValueError`` for other dtypes and shapes, which names the ``layer``.
    """
    w = parameter_of_experts("store_mxfp4", experts, name, layer)
    mxfp4.check("store_mxfp4", f"{layer}{name}", blocks, scales, tuple(w.mT.shape if transposed else w.shape))
    LigerMXFP4Experts(scales, w.dtype, transposed).stored_in(experts, name, blocks)
