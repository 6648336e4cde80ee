"""Frozen weights that are stored in FP8: a linear layer over ``ops/projections/float8.py``, and
experts over ``ops/projections/float8_experts.py``.

``LigerFloat8Linear`` is an ``nn.Linear``, also for PEFT. Its parameters are the bits of W8 and of
its scale, stored as integers, so that ``model.to(dtype)`` and optimizers do not change them. Its
``weight`` is a view for other code: a tensor of the layer's dtype that is made dense when somebody
computes with it, and cast to FP8 again when somebody writes to it. Therefore PEFT gives its
adapters the right dtype, and DoRA, ``merge``, ``unmerge`` and ``merge_and_unload`` work unchanged;
each merge rounds to FP8.

``store_experts`` puts the same bits in the place of a parameter of experts, which a module of
another package multiplies. There, ``LigerFloat8Experts`` is the parametrization of PyTorch that
makes the view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from liger_kernel.ops._core.operator import is_recorded, refuse_graphs
from liger_kernel.ops.projections.float8 import E4, Float8, Float8LinearFunction, cast, float8, transposed
from liger_kernel.ops.projections.float8_experts import cast_experts, float8_experts
from liger_kernel.ops.projections.weights import Dequantized

RECIPES = {"fp8": False, "fp8_rowwise": True}  # whether each row has a scale


class StoredView(Tensor):
    """A stored weight as others see it; what is written into it, its ``layer`` casts. Who takes
    some experts of it makes only these dense."""

    layer: LigerFloat8Linear | _OfExperts

    @staticmethod
    def __new__(cls, layer: LigerFloat8Linear | _OfExperts, shape: tuple[int, ...], device: torch.device) -> StoredView:
        # not in torch's stubs
        seen = Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=device)  # type: ignore[attr-defined]
        seen.layer = layer
        return seen

    # what torch's docs say to write
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if (
            isinstance(first, cls)
            and isinstance(first.layer, _OfExperts)
            and (some := _some_experts(func, args)) is not None
        ):
            return first.layer.dense(some)
        written = first if func._schema.is_mutable and isinstance(first, cls) else None
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


def _some_experts(func: Any, args: Any) -> Any:
    """The index of ``weight[index]`` if it is one of the first dim alone: a number, or a tensor
    of numbers."""
    if func is torch.ops.aten.select.int and args[1] == 0:
        return args[2]
    if (
        func is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype in (torch.int64, torch.int32)
    ):  # others are masks
        return args[1][0]
    return None


class LigerFloat8Linear(nn.Linear):
    """``x W^T + bias`` with a frozen W (N, K) in FP8; made by ``of``. x, dy and the products have
    x's dtype, or that of autocast.

    Only x and the bias have gradients. ``state_dict`` has ``float8`` (N, K) and ``float8_scale``:
    the bits of W8 and of its scale, in int8 and int32.
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
        """Make it from ``linear``: "fp8" has one scale for the weight, "fp8_rowwise" one for
        each output. The bias is the same parameter."""
        return cls(linear.weight, linear.bias, recipe, keep_transposed).train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in nn.Linear
        return StoredView(self, self.float8.shape, self.float8.device)

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
            raise ValueError(
                f"LigerFloat8Linear: weight must have shape {tuple(self.float8.shape)}, got {tuple(w.shape)}"
            )
        q, scale = cast(w.detach().to(self.float8.device).contiguous(), E4, RECIPES[self.recipe])
        self.float8.copy_(q.view(torch.int8))
        self.float8_scale.copy_(self._bits(scale))

    @staticmethod
    def _bits(scale: Tensor) -> Tensor:
        return (
            scale.view(torch.int32) if scale.ndim else scale.view(1).view(torch.int32)
        )  # FSDP2 refuses parameters without a dim

    def stored(self, backward: bool = False) -> Float8:
        """The tensors with which the operators multiply; ``backward``: also those of a backward
        pass."""
        w = self.float8.detach().view(E4)
        kept = backward and self.keep_transposed and not torch.compiler.is_compiling()
        scale = self.float8_scale.detach().view(torch.float32)
        return float8(w, scale if RECIPES[self.recipe] else scale.view(()), self._kept_transposed(w) if kept else None)

    def _kept_transposed(self, w: Tensor) -> Tensor:
        seen = self.float8.data_ptr(), self.float8._version, self.float8.device
        if self._transposed is None or self._transposed[1] != seen:
            self._transposed = None  # the old one is freed before
            if is_recorded(w):
                return transposed(w)
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
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, self.bias)):
            refuse_graphs("LigerFloat8Linear", "products in FP8 have gradients of their own")
        found = self.stored(backward=torch.is_grad_enabled() and x.requires_grad)
        return Float8LinearFunction.apply(x, self.bias, found.w, found.scale, found.w_t)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}, dtype={self.dtype}"


class _OfExperts:
    """The stored bits of all experts with what they mean, for ``StoredView``."""

    def __init__(self, bits: Tensor, how: StoredExperts):
        self.bits, self.how, self.dtype, self.shape = bits.detach(), how, how.dtype, how.shape_of(bits)

    def dense(self, some: Any = None) -> Tensor:
        """The weights of all experts, or of those with this index, as a new tensor."""
        return self.how.dense(self.bits, slice(None) if some is None else some)

    @torch.no_grad()
    def store(self, w: Tensor) -> None:
        """Cast ``w`` and use it as the weights of all experts."""
        if w.shape != self.shape:
            name = type(self.how).__name__
            raise ValueError(f"{name}: weights must have shape {tuple(self.shape)}, got {tuple(w.shape)}")
        self.bits.copy_(self.how.right_inverse(w.to(self.bits.device)))


class StoredExperts(nn.Module):
    """The parametrization of a frozen parameter of experts. It is called with the stored bits, and
    returns a view of ``dtype``, which ``model.to(dtype)`` changes. Its one parameter are the scales."""

    transposed: bool  # whether the parameter is (E, K, N), not (E, N, K)

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def shape_of(self, bits: Tensor) -> torch.Size:
        """That of the parameter."""
        return bits.shape

    def dense(self, bits: Tensor, some: Any) -> Tensor:
        """The weights of the experts ``bits[some]``."""
        raise NotImplementedError

    def right_inverse(self, w: Tensor) -> Tensor:
        """The bits of new weights, whose scales it keeps; bits remain as they are."""
        raise NotImplementedError

    def forward(self, bits: Tensor) -> Tensor:
        seen = _OfExperts(bits, self)
        return seen.dense() if torch.compiler.is_compiling() else StoredView(seen, seen.shape, bits.device)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredExperts:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.parameters()).device)).dtype
        return super()._apply(fn, recurse)

    def stored_in(self, experts: nn.Module, name: str, bits: Tensor) -> None:
        """Put ``bits`` in the place of the parameter ``name``, and this parametrization above them."""
        setattr(experts, name, nn.Parameter(bits, requires_grad=False))
        parametrize.register_parametrization(experts, name, self, unsafe=True)
        parametrization(experts, name).__class__ = StoredParametrizations


def parametrization(experts: nn.Module, name: str) -> Any:
    """What makes the parameter ``name`` when it is read, a ``ParametrizationList``; None if nothing does."""
    computed = experts._modules.get("parametrizations")
    return computed[name] if isinstance(computed, nn.ModuleDict) and name in computed else None


def parameter_of_experts(op: str, experts: nn.Module, name: str, layer: str = "") -> Tensor:
    """The parameter to be stored. ``ValueError`` for none, or another."""
    w = experts._parameters.get(name)
    if w is None or w.ndim != 3 or not w.is_floating_point():
        got = "none" if w is None else f"{w.dtype} {tuple(w.shape)}"
        raise ValueError(f"{op}: {layer}{name} must be a floating point parameter (E, N, K), got {got}")
    return w


class LigerFloat8Experts(StoredExperts):
    """Of experts in FP8; made by ``store_experts``. Bits are (E, N, K) or ``transposed`` (E, K, N) in
    int8; ``float8_scale``: those of the scales, in int32."""

    def __init__(self, scale: Tensor, dtype: torch.dtype, recipe: str, transposed: bool):
        super().__init__(dtype)
        self.float8_scale = nn.Parameter(scale.view(torch.int32), requires_grad=False)
        self.recipe, self.transposed = recipe, transposed

    def dense(self, bits: Tensor, some: Any) -> Tensor:
        bits, scale = bits[some], self.float8_scale.detach()[some]
        of_experts = (t.view(-1, *t.shape[-2:]) for t in (bits.view(E4), scale.view(torch.float32)))
        return float8_experts(*of_experts).dense(self.dtype).view(bits.shape)

    @torch.no_grad()
    def right_inverse(self, w: Tensor) -> Tensor:
        if w.dtype == torch.int8:
            return w
        q, scale = cast_experts(w.detach(), RECIPES[self.recipe], self.transposed)
        self.float8_scale.copy_(scale.view(torch.int32))
        return q.view(torch.int8)

    def stored(self, bits: Tensor, transposed: bool = False) -> Dequantized:
        """The weights as the operators multiply by them. ``transposed``: turned, as bits (E, K,
        N) have to be."""
        return float8_experts(bits.detach().view(E4), self.float8_scale.detach().view(torch.float32), transposed)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe!r}, dtype={self.dtype}"


class StoredParametrizations(parametrize.ParametrizationList):
    """The bits, and what makes weights of them. Where the engine does not run, PEFT puts its sum
    above them during a call."""

    def append(self, module: nn.Module) -> StoredParametrizations:  # type: ignore[override]  # torch says Self
        # of its two kinds of sum, PEFT 0.21 takes only this one out again after the call
        if type(module).__name__ == "_LoraFactorsProxy":
            from peft.tuners.lora.layer import _LoraParameterProxy

            made: Any = module
            with torch.autocast(made.lhs.device.type, enabled=False):
                module = _LoraParameterProxy(made.scaling * (made.lhs @ made.rhs))
        super().append(module)
        parametrize._cache.clear()  # PEFT has read the weight without this sum, within a call that keeps what it reads
        return self


@torch.no_grad()
def store_experts(experts: nn.Module, name: str, recipe: str, transposed: bool = False) -> None:
    """Store the parameter ``name`` of ``experts`` in FP8; whoever reads it gets a view that is made
    dense when somebody computes with it.

    The parameter is (E, N, K), or ``transposed`` (E, K, N), in 16 or 32 bits. ``recipe``: "fp8",
    one scale for each expert, or "fp8_rowwise", one for each output of each expert. The
    ``state_dict`` has ``parametrizations.<name>.original`` and
    ``parametrizations.<name>.0.float8_scale``.
    Raises ``ValueError`` for another recipe or shape, and on a GPU without FP8.
    """
    if recipe not in RECIPES:
        raise ValueError(f"store_experts: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    w = parameter_of_experts("store_experts", experts, name)
    q, scale = cast_experts(w.detach(), RECIPES[recipe], transposed)
    LigerFloat8Experts(scale, w.dtype, recipe, transposed).stored_in(experts, name, q.view(torch.int8))
