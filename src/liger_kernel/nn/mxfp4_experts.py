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
from torch.nn.utils import parametrize

from liger_kernel.nn.float8 import StoredExperts, StoredParametrizations, StoredView
from liger_kernel.ops.projections import mxfp4


class _Blocks(StoredExperts):
    """The blocks of a parameter with what they mean, for ``StoredView``."""

    def __init__(self, blocks: Tensor, how: LigerMXFP4Experts):
        self.blocks, self.how, self.dtype = blocks.detach(), how, how.dtype
        E, N, G, _ = blocks.shape
        self.shape = (E, G * mxfp4.BLOCK, N) if how.transposed else (E, N, G * mxfp4.BLOCK)

    def dense(self, some: Any = None) -> Tensor:
        index = slice(None) if some is None else some
        blocks, scales = self.blocks[index], self.how.mxfp4_scale.detach()[index]
        of_experts = blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:])
        w = mxfp4.dense(*of_experts, self.dtype).unflatten(0, blocks.shape[:-3] or (1,))
        w = w if blocks.ndim > 3 else w[0]
        return w.mT if self.how.transposed else w

    @torch.no_grad()
    def store(self, w: Tensor) -> None:
        if w.shape != self.shape:
            raise ValueError(f"LigerMXFP4Experts: weights must have shape {self.shape}, got {tuple(w.shape)}")
        self.blocks.copy_(self.how.right_inverse(w.to(self.blocks.device)))


class LigerMXFP4Experts(nn.Module):
    """The parametrization of a frozen parameter of experts in MXFP4; made by ``store_mxfp4``.

    It is called with the blocks of weights (E, N, K), and returns a view (E, N, K), or
    ``transposed`` (E, K, N), of ``dtype``, which ``model.to(dtype)`` changes. ``mxfp4_scale``: the
    scales, in uint8.
    """

    def __init__(self, scales: Tensor, dtype: torch.dtype, transposed: bool):
        super().__init__()
        self.mxfp4_scale = nn.Parameter(scales, requires_grad=False)
        self.dtype, self.transposed = dtype, transposed

    def forward(self, blocks: Tensor) -> Tensor:
        seen = _Blocks(blocks, self)
        return seen.dense() if torch.compiler.is_compiling() else StoredView(seen, seen.shape, blocks.device)

    @torch.no_grad()
    def right_inverse(self, w: Tensor) -> Tensor:
        """The blocks of new weights, whose scales it keeps; blocks remain as they are."""
        if w.dtype == torch.uint8:
            return w
        blocks, scales = mxfp4.rounded(w.detach().mT if self.transposed else w.detach())
        self.mxfp4_scale.copy_(scales)
        return blocks

    def stored(self, blocks: Tensor) -> mxfp4.MXFP4Experts:
        """The weights (E, N, K) as the operators multiply by them."""
        return mxfp4.mxfp4_experts(blocks.detach(), self.mxfp4_scale.detach())

    def _apply(self, fn: Any, recurse: bool = True) -> LigerMXFP4Experts:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.mxfp4_scale.device)).dtype
        return super()._apply(fn, recurse)

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
    w = experts._parameters.get(name)
    if w is None or w.ndim != 3 or not w.is_floating_point():
        got = "none" if w is None else f"{w.dtype} {tuple(w.shape)}"
        raise ValueError(f"store_mxfp4: {layer}{name} must be a floating point parameter (E, N, K), got {got}")
    E, N, K = w.mT.shape if transposed else w.shape
    mxfp4.check("store_mxfp4", f"{layer}{name}", blocks, scales, (E, N, K))
    setattr(experts, name, nn.Parameter(blocks, requires_grad=False))
    parametrize.register_parametrization(experts, name, LigerMXFP4Experts(scales, w.dtype, transposed), unsafe=True)
    made: Any = experts.parametrizations
    made[name].__class__ = StoredParametrizations
