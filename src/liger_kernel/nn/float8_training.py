"""A linear layer that is trained in FP8: a module over ``ops/projections/float8_training.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from liger_kernel.ops._core.operator import intercepted, is_recorded, only_pytorch
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.ops.projections.float8_training import RECIPES, Float8Trained, WeightCache, float8_trained, forget
from liger_kernel.ops.projections.linear import dtypes_of, linears

_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()
_recorded = [False]  # whether a CUDA graph multiplies by trained weights
DTYPES = (
    torch.bfloat16,
    torch.float32,
)  # not float16, which is trained with a gradient scaler: the scales of the casts do its work


def trained(weight: Tensor, recipe: str) -> Float8Trained:
    """``weight`` as it is multiplied. Its largest values are kept over calls if it is trained in one
    process, else from a forward to its backward.

    Of several processes, some free and gather weights. A CUDA graph searches them, and from then on
    every forward, because no version counter shows the optimizer's steps in a graph. PEFT merges
    adapters into the ``data`` of frozen weights, which no version counter shows. A compiled
    graph searches them, because it cannot see a weight's version; once for all its products.
    """
    if not torch.compiler.is_compiling() and (why := lacking(weight.device, RECIPES[recipe].capability)):
        raise ValueError(f"fp8: {why}")
    if torch.compiler.is_compiling():
        kept = None
    elif weight.requires_grad and _alone() and not _in_graphs(weight):
        kept = _KEPT.get(weight)
        if kept is None:
            kept = _KEPT.setdefault(weight, WeightCache())
    else:
        kept = WeightCache()
    return float8_trained(weight, RECIPES[recipe], kept)


def _alone() -> bool:
    """Whether there is one process."""
    return not (dist.is_available() and dist.is_initialized())


def _in_graphs(weight: Tensor) -> bool:
    """Whether a CUDA graph that trains in FP8 has been recorded, or is now."""
    _recorded[0] = _recorded[0] or is_recorded(weight)
    return _recorded[0]


def is_whole(weight: Tensor) -> bool:
    """Whether a weight can be cast: it is neither sharded (DTensor, ZeRO-3) nor quantised."""
    return (type(weight) in (Tensor, nn.Parameter) or intercepted()) and not hasattr(weight, "ds_id")


class LigerFloat8TrainingLinear(nn.Linear):
    """``x W^T + bias`` whose three products are in FP8: see ``of``. x is (..., K), in bfloat16 or
    float32; y and dx have its dtype, or autocast's.

    The parameters are those of ``nn.Linear``; both sizes of the weight must be multiples of 16 (of
    32 with "mxfp8_rceil"). A weight that is sharded when it is multiplied, or quantised, is
    multiplied by ``F.linear``; so is every weight where PyTorch
    exports, traces or transforms the call. Raises ``ValueError`` for other dtypes of x, and on a
    GPU without FP8. Micikevicius et al., arXiv:2209.05433.
    """

    recipe: str
    forget = staticmethod(forget)

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str = "tensorwise") -> LigerFloat8TrainingLinear:
        """``linear`` itself, with this class, by a recipe of torchao, one of ``RECIPES``. Raises
        ``ValueError`` for others."""
        if recipe not in RECIPES:
            raise ValueError(f"LigerFloat8TrainingLinear: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
        if linear.in_features % (multiple := RECIPES[recipe].multiple) or linear.out_features % multiple:
            raise ValueError(
                f"LigerFloat8TrainingLinear: weight must have sizes that are multiples of {multiple}, got "
                f"{tuple(linear.weight.shape)}"
            )
        linear.__class__ = cls  # its hooks, parameters and place in a model stay
        assert isinstance(linear, cls)
        linear.recipe = recipe
        return linear

    def given_back(self) -> nn.Linear:
        """This layer itself, as the ``nn.Linear`` that it was."""
        del self.recipe
        self.__class__ = nn.Linear  # type: ignore[assignment]  # its base, of which it has all attributes
        return self

    def forward(self, input: Tensor) -> Tensor:
        if only_pytorch() or not is_whole(self.weight) or not input.numel():
            return F.linear(input, self.weight, self.bias)
        if (dtype := dtypes_of(input, ())[0]) not in DTYPES:
            raise ValueError(
                f"LigerFloat8TrainingLinear: input must be of bfloat16 or float32, under autocast, too, got {dtype}"
            )
        return linears(input, [Projection(trained(self.weight, self.recipe), self.bias)])[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"
