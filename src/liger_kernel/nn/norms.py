"""Norms, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.compat import functional
from liger_kernel.compat.functions import liger_group_norm
from liger_kernel.extra.dyt import dyt
from liger_kernel.extra.modulated_rms_norm import modulated_rms_norm
from liger_kernel.extra.poly_norm import poly_norm
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.rms_norm import rms_norm

__all__ = [
    "LigerDyT",
    "LigerFusedAddRMSNorm",
    "LigerGroupNorm",
    "LigerLayerNorm",
    "LigerModulatedRMSNorm",
    "LigerPolyNorm",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
]

INIT = {"ones": torch.ones, "zeros": torch.zeros}


def _register_weight(owner: nn.Module, init_fn: str, size: Any, affine: bool = True) -> None:
    """Give ``owner`` a weight that begins as ``init_fn`` says, or None if it is not ``affine``."""
    if init_fn not in INIT:
        raise ValueError(f"{type(owner).__name__}: init_fn must be one of {tuple(INIT)}, got {init_fn!r}")
    # without a weight its size may be None
    owner.register_parameter("weight", nn.Parameter(INIT[init_fn](size)) if affine else None)


def _options(norm: Any) -> dict[str, Any]:
    """Not a method: others bind these forwards to modules of their own."""
    return dict(eps=norm.variance_epsilon, offset=norm.offset, casting=norm.casting_mode)


class LigerRMSNorm(nn.Module):
    """``rms_norm`` with a weight: ``x / rms(x) * (weight + offset)``. ``casting_mode``: "llama",
    "gemma" or "none"."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__()
        _register_weight(self, init_fn, hidden_size, elementwise_affine)
        self.hidden_size, self.variance_epsilon, self.offset, self.casting_mode = hidden_size, eps, offset, casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return memory.cheap(rms_norm, hidden_states, self.weight, **_options(self))

    def extra_repr(self) -> str:
        return (
            f"({self.hidden_size},), eps={self.variance_epsilon}, offset={self.offset}, "
            f"casting_mode={self.casting_mode!r}"
        )


class LigerRMSNormForGemma(LigerRMSNorm):
    """``LigerRMSNorm`` with offset 1, casting "gemma", and a weight that begins at zero."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = True, row_mode: bool | None = None,
    ):  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """``LigerRMSNormForGemma`` under another name."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """``LigerRMSNormForGemma`` under another name."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """``LigerRMSNormForGemma`` whose first argument is called ``dim``."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros",
        in_place: bool = False,
    ):  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """``LigerRMSNorm`` with casting "gemma"; ``with_scale=False``: without a weight."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones",
        in_place: bool = False, with_scale: bool = True,
    ):  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, elementwise_affine=with_scale)


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """With ``with_scale=False`` there is no weight, and ``dim`` may be None."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ):  # fmt: skip
        if dim is None and with_scale:
            raise ValueError(f"{type(self).__name__}: dim must be the number of weights, got None")
        super().__init__(dim, eps, offset, casting_mode, init_fn, with_scale=with_scale)


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma):
    """``LigerRMSNormForGemma`` under another name."""


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """Casting is "llama", as in LinkedIn's package. Transformers' Olmo2 rounds like "gemma", and
    patched models do the same."""


class LigerRMSNormForGlm4(LigerRMSNorm):
    """``LigerRMSNorm`` under another name."""


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """``(norm(s), s)`` of ``s = hidden_states + residual``, in one kernel."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ):  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused_add_rms_norm(hidden_states, residual, self.weight, **_options(self))


class LigerLayerNorm(nn.Module):
    """``layer_norm`` with a weight and a bias. The bias exists and begins at zero whatever ``bias``
    is, as in state dicts of LinkedIn's package.

    ``elementwise_affine=False``: without both. ``impl`` (or ``backend``) and ``mode``: see
    ``liger_kernel.functional``.
    """

    impl: str | None = None
    mode: str | None = None

    def __init__(
        self, hidden_size: int | Sequence[int], eps: float = 1e-6, bias: bool = False, init_fn: str = "ones",
        impl: str | None = None, mode: str | None = None, backend: str | None = None, *,
        elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.impl, self.mode = impl or backend, mode
        shape = (hidden_size,) if isinstance(hidden_size, int) else tuple(hidden_size)
        if len(shape) != 1:
            raise ValueError(f"{type(self).__name__}: hidden_size must be one dim, got {shape}")
        self.hidden_size, self.variance_epsilon = shape[0], eps
        _register_weight(self, init_fn, shape, elementwise_affine)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if elementwise_affine else None)

    @property
    def backend(self) -> str | None:
        """Another name for ``impl``."""
        return self.impl

    @backend.setter
    def backend(self, value: str | None) -> None:
        self.impl = value

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.impl or self.mode:
            return functional.layer_norm(
                hidden_states, self.weight, self.bias, self.variance_epsilon, impl=self.impl, mode=self.mode
            )
        return memory.cheap(layer_norm, hidden_states, self.weight, self.bias, eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.variance_epsilon}" + (f", impl={self.impl!r}" if self.impl else "")


class LigerDyT(nn.Module):
    """Dynamic tanh, a replacement for a norm: ``tanh(alpha * x) * gamma + beta``
    (arXiv:2503.10622). ``beta``: whether there is a beta."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, beta={self.beta is not None}, init_alpha={self.init_alpha}"


class LigerModulatedRMSNorm(LigerRMSNorm):
    """``modulated_rms_norm`` with a weight: ``(1 + scale) * norm(hidden_states) + shift``, as in
    diffusion transformers (AdaLN)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, elementwise_affine=elementwise_affine)

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return modulated_rms_norm(hidden_states, scale, shift, self.weight, **_options(self))


class LigerGroupNorm(nn.Module):
    """``group_norm`` with a weight and a bias. The bias exists and begins at zero whatever
    ``bias`` is, as in state dicts of LinkedIn's package."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ):
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"{type(self).__name__}: num_groups must divide the {num_channels} channels, got {num_groups}"
            )
        self.num_channels, self.num_groups, self.variance_epsilon = num_channels, num_groups, eps
        _register_weight(self, init_fn, num_channels)
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


class LigerPolyNorm(nn.Module):
    """``poly_norm`` with three weights, initially 1/3 each, and a bias, initially 1
    (arXiv:2411.03884).

    The bias has one dimension, because parameters without dimensions cannot be sharded. State dicts
    of LinkedIn's package, in which it has none, load, too.
    """

    def __init__(self, eps: float = 1e-6, in_place: bool = True):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}bias" in state_dict:
            state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return poly_norm(hidden_states, self.weight, self.bias, eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"
