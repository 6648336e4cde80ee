"""A linear layer that is trained in FP8: a module over ``ops/projections/float8_training.py``."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.float8_training import RECIPES, Float8Trained, Kept, float8_trained
from liger_kernel.ops.projections.linear import linears

_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def trained(weight: Tensor, recipe: str) -> Float8Trained:
    """``weight`` as it is multiplied. Its casts are kept over calls in one process; of several, some free and gather weights, and each call casts anew."""
    kept = None
    if not (dist.is_available() and dist.is_initialized()):
        kept = _KEPT.setdefault(weight, Kept())
    return float8_trained(weight, RECIPES[recipe], kept)


class LigerFloat8TrainingLinear(nn.Linear):
    """``x W^T + bias`` whose three products are in FP8: see ``of``. x is (..., K), of 16 or 32 bits; y and dx have its dtype, or autocast's.

    The parameters are those of ``nn.Linear``, of 16 or 32 bits; both sizes of the weight must be multiples of 16. Micikevicius et al., arXiv:2209.05433.
    """

    recipe: str

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str = "tensorwise") -> LigerFloat8TrainingLinear:
        """``linear`` itself, with this class, by a recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp". Raises ``ValueError`` for others."""
        if recipe not in RECIPES:
            raise ValueError(f"LigerFloat8TrainingLinear: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
        if linear.in_features % 16 or linear.out_features % 16:
            raise ValueError(f"LigerFloat8TrainingLinear: weight must have sizes that are multiples of 16, got {tuple(linear.weight.shape)}")
        cls._break_graphs()
        linear.__class__ = cls  # its hooks, parameters and place in a model stay
        assert isinstance(linear, cls)
        linear.recipe = recipe
        return linear

    @classmethod
    @functools.cache
    def _break_graphs(cls) -> None:
        """Let torch.compile break its graph at these layers, because a graph cannot hold the casts. The first layer does this: it imports torch.compile."""
        cls.forward = torch.compiler.disable(cls.forward)  # type: ignore[method-assign]  # it is the same function to everybody else

    def forward(self, input: Tensor) -> Tensor:
        if is_sharded(self.weight) or not input.numel():
            return F.linear(input, self.weight, self.bias)
        return linears(input, [Projection(trained(self.weight, self.recipe), self.bias)])[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"
