"""Kernels for Megatron-core, which is imported only when it is patched."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _legacy
from liger_kernel.nn import LigerVocabParallelCrossEntropy
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.norms.rms_norm import rms_norm as _rms_norm

__all__ = ["LigerMegatronCrossEntropy", "LigerMegatronRMSNorm", "LigerMegatronSwiGLU", "apply_liger_kernel_to_megatron"]

logger = logging.getLogger(__name__)


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """``LigerVocabParallelCrossEntropy`` with Megatron's label smoothing over each rank's own
    classes. Returns a loss per token (S, B) of logits (S, B, N).

    Raises ``ValueError`` for a ``reduction`` other than "none", and for logits with other
    dimensions: in Megatron the sequence is the first one.
    """

    label_smoothing_formula: str = "megatron"
    label_smoothing_mode: str = "partition"

    def check(self) -> None:
        if self.reduction != "none":
            raise ValueError(f"{type(self).__name__}: reduction must be 'none', got {self.reduction!r}")
        super().check()

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        if vocab_parallel_logits.ndim != 3:
            raise ValueError(
                f"{type(self).__name__}: logits must be 3-D, (sequence, batch, classes), got "
                f"{tuple(vocab_parallel_logits.shape)}"
            )
        return super().forward(vocab_parallel_logits, target, tp_group)


class LigerMegatronRMSNorm(nn.Module):
    """``x / rms(x) * weight``, or with ``zero_centered_gamma`` (here or in ``config``) ``* (1 +
    weight)``; rounded once, as in ``torch.nn.RMSNorm``.

    Under ``config.sequence_parallel`` the weight is marked, so that Megatron sums its gradient over
    the tensor-parallel ranks. ``persist_layer_norm``, which chooses among Apex's kernels, has no
    effect. Raises ``ValueError`` for another normalization, here or in ``config``.
    """

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ):  # fmt: skip
        super().__init__()
        for name in (normalization, getattr(config, "normalization", "RMSNorm")):
            if name != "RMSNorm":
                raise ValueError(f"LigerMegatronRMSNorm: normalization must be 'RMSNorm', got {name!r}")
        self.config, self.hidden_size, self.eps = config, hidden_size, eps
        self.zero_centered_gamma = zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered_gamma else torch.ones(hidden_size))
        # a Parameter declares no such attribute
        vars(self.weight)["sequence_parallel"] = getattr(config, "sequence_parallel", False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight) if self.zero_centered_gamma else nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        offset = 1.0 if self.zero_centered_gamma else 0.0
        return _rms_norm(x, self.weight, eps=self.eps, offset=offset, casting="gemma")

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronSwiGLU(nn.Module):
    """``silu(gate) * up`` of an input (..., 2 I) with gate and up side by side, which is read
    without a copy and not overwritten.

    With a bias, an input to be stored in fp8, or an input to be offloaded, ``fallback_impl`` runs,
    and a warning says so once; ``ValueError`` without a ``fallback_impl``.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False):
        super().__init__()
        self.fallback_impl = fallback_impl
        self._warned: set[str] = set()

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        given = {"a bias": bias is not None, "fp8_input_store": fp8_input_store, "cpu_offload_input": cpu_offload_input}
        reason = next((name for name, is_given in given.items() if is_given), None)
        if reason is None:
            return glu(input)
        if self.fallback_impl is None:
            raise ValueError(f"LigerMegatronSwiGLU: {reason} needs a fallback_impl, got None")
        if reason not in self._warned:
            self._warned.add(reason)
            fallback = getattr(self.fallback_impl, "__qualname__", self.fallback_impl)
            logger.warning("LigerMegatronSwiGLU: %s is left to %s", reason, fallback)
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)


MARK = "__liger_patched__"


def apply_liger_kernel_to_megatron(rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False) -> None:
    """Let the Megatron-core models that are built from now on use our kernels. Patching again
    changes nothing.

    rms_norm: the RMSNorm of local layer specs (``WrappedTorchNorm``); Transformer Engine's specs
    have their own norms, which stay.
    cross_entropy: ``vocab_parallel_cross_entropy`` and ``fused_vocab_parallel_cross_entropy``;
    labels of -100 count as 0, other labels that are no class give NaN.
    swiglu: ``bias_swiglu_impl`` if there is no bias.
    Raises ``ImportError`` without Megatron-core. Patched functions and classes have
    ``__liger_patched__``; ``__wrapped__`` is the original (for the norm: on its ``__new__``).
    """
    if rms_norm:
        _patch_norm(_found("megatron.core.transformer.torch_norm", "WrappedTorchNorm"))
    if cross_entropy:
        _replace(
            "megatron.core.tensor_parallel.cross_entropy",
            "vocab_parallel_cross_entropy",
            lambda _: liger_vocab_parallel_cross_entropy,
        )
        _replace(
            "megatron.core.fusions.fused_cross_entropy",
            "fused_vocab_parallel_cross_entropy",
            lambda _: liger_fused_vocab_parallel_cross_entropy,
        )
    if swiglu:
        _replace("megatron.core.fusions.fused_bias_swiglu", "bias_swiglu_impl", LigerMegatronSwiGLU)


def _found(source: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"apply_liger_kernel_to_megatron: requires megatron-core with {source}.{name}: {error}"
        ) from error


def _patch_norm(norm: Any) -> None:
    """Patch the class in place, because layer specs hold the class itself."""
    if getattr(norm, MARK, False):
        return
    stock = norm.__new__

    @functools.wraps(stock, assigned=(), updated=())
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.normalization != "RMSNorm":
            return stock(cls, config, *args, **kwargs)
        # the stock class ignores ``normalization``, because the config decides
        return LigerMegatronRMSNorm(config, *args[:4], **{k: v for k, v in kwargs.items() if k != "normalization"})

    norm.__new__ = staticmethod(new)
    setattr(norm, MARK, True)


def _replace(source: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by ``make(function)``, in its module and in every module of Megatron
    that has imported it by name."""
    stock = _found(source, name)
    if getattr(stock, MARK, False):
        return
    ours = make(stock)
    setattr(ours, MARK, True)
    ours.__wrapped__ = stock
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "megatron":
            for key in [k for k, v in vars(module).items() if v is stock]:
                setattr(module, key, ours)


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Megatron's function of this name. Without ``tp_group``, it uses Megatron's tensor-parallel
    ranks, as the original does."""
    if tp_group is None:
        tp_group = importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()
    return LigerMegatronCrossEntropy(label_smoothing=label_smoothing)(vocab_parallel_logits, target, tp_group)


def liger_fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
) -> Tensor:
    """Megatron's fused function of this name; see ``liger_vocab_parallel_cross_entropy``."""
    return liger_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


_legacy.alias(__name__)  # this is a file, in which Python finds no other module
