"""A frozen linear layer whose weight is stored in FP8: a module over ``ops/projections/float8.py``.

``LigerFloat8Linear`` is an ``nn.Linear``, also for PEFT. Its parameters are the bits of W8 and of its scale, stored as integers, so that
``model.to(dtype)`` and optimizers do not change them. Its ``weight`` is a view for other code: a tensor of the layer's dtype that is made dense when somebody
computes with it, and cast to FP8 again when somebody writes to it. Therefore PEFT gives its adapters the right dtype, and DoRA, ``merge``, ``unmerge`` and
``merge_and_unload`` work unchanged; each merge rounds to FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from liger_kernel.ops.projections.float8 import E4, Float8, Float8LinearFunction, cast, float8, transposed

RECIPES = {"fp8": False, "fp8_rowwise": True}  # whether each row has a scale


class _Weight(Tensor):
    """The weight of a layer as others see it; what is written into it, the layer casts."""

    layer: LigerFloat8Linear

    @staticmethod
    def __new__(cls, layer: LigerFloat8Linear) -> _Weight:
        seen = Tensor._make_wrapper_subclass(cls, layer.float8.shape, dtype=layer.dtype, device=layer.float8.device)  # type: ignore[attr-defined]  # not in torch's stubs
        seen.layer = layer
        return seen

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what torch's docs say to write

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if func._schema.is_mutable and args and isinstance(args[0], cls) else None
        args, kwargs = tree_map(lambda t: t.layer.dense() if isinstance(t, cls) else t, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if written is None:
            return found
        written.layer.store(args[0])
        return written

    @property
    def data(self) -> Tensor:
        return self.layer.dense()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.layer.store(value)


class LigerFloat8Linear(nn.Linear):
    """``x W^T + bias`` with a frozen W (N, K) in FP8; made by ``of``. x, dy and the products have x's dtype, or that of autocast.

    Only x and the bias have gradients. ``state_dict`` has ``float8`` (N, K) and ``float8_scale``: the bits of W8 and of its scale, in int8 and int32.
    """

    def __init__(self, w: Tensor, bias: nn.Parameter | None, recipe: str, keep_transposed: bool):
        nn.Module.__init__(self)
        self.out_features, self.in_features = w.shape
        self.recipe, self.dtype, self.keep_transposed = recipe, w.dtype, keep_transposed
        q, scale = cast(w.detach().contiguous(), E4, RECIPES[recipe])
        self.float8 = nn.Parameter(q.view(torch.int8), requires_grad=False)
        self.float8_scale = nn.Parameter(self._bits(scale), requires_grad=False)
        self.bias = bias  # type: ignore[assignment]  # of nn.Linear's, which may be None
        self._transposed: tuple[Tensor, Any] | None = None  # and what it was made of

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str, keep_transposed: bool = True) -> LigerFloat8Linear:
        """Make it from ``linear``: "fp8" has one scale for the weight, "fp8_rowwise" one for each output. The bias is the same parameter."""
        return cls(linear.weight, linear.bias, recipe, keep_transposed).train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in nn.Linear
        return _Weight(self)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the layer, under the name by which PEFT asks quantised layers."""
        return self.dtype

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The weight in the layer's dtype, as a new tensor."""
        return self.stored().dense(self.dtype)

    @torch.no_grad()
    def store(self, w: Tensor) -> None:
        """Cast ``w`` (N, K) and use it as the weight."""
        if w.shape != self.float8.shape:
            raise ValueError(f"LigerFloat8Linear: weight must have shape {tuple(self.float8.shape)}, got {tuple(w.shape)}")
        q, scale = cast(w.detach().to(self.float8.device).contiguous(), E4, RECIPES[self.recipe])
        self.float8.copy_(q.view(torch.int8))
        self.float8_scale.copy_(self._bits(scale))

    @staticmethod
    def _bits(scale: Tensor) -> Tensor:
        return scale.view(torch.int32) if scale.ndim else scale.view(1).view(torch.int32)  # FSDP2 refuses parameters without a dim

    def stored(self, backward: bool = False) -> Float8:
        """The tensors with which the operators multiply; ``backward``: also those of a backward pass."""
        w = self.float8.detach().view(E4)
        kept = backward and self.keep_transposed and not torch.compiler.is_compiling()
        scale = self.float8_scale.detach().view(torch.float32)
        return float8(w, scale if RECIPES[self.recipe] else scale.view(()), self._kept_transposed(w) if kept else None)

    def _kept_transposed(self, w: Tensor) -> Tensor:
        seen = self.float8.data_ptr(), self.float8._version, self.float8.device
        if self._transposed is None or self._transposed[1] != seen:
            self._transposed = None  # the old one is freed before
            self._transposed = transposed(w), seen
        return self._transposed[0]

    def _apply(self, fn: Any, recurse: bool = True) -> LigerFloat8Linear:
        self._transposed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_transposed": None}

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        found = self.stored(backward=torch.is_grad_enabled() and x.requires_grad)
        return Float8LinearFunction.apply(x, self.bias, found.w, found.scale, found.w_t)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}, dtype={self.dtype}"
