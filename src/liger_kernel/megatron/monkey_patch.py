"""Replace functions and classes of Megatron-core by ours."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU

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


def _tensor_parallel_group() -> Any:
    return importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Megatron's function of this name. Without ``tp_group``, it uses Megatron's tensor-parallel
    ranks, as the original does."""
    group = _tensor_parallel_group() if tp_group is None else tp_group
    return LigerMegatronCrossEntropy(label_smoothing=label_smoothing)(vocab_parallel_logits, target, group)


def liger_fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
) -> Tensor:
    """Megatron's fused function of this name; see ``liger_vocab_parallel_cross_entropy``."""
    return liger_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)
