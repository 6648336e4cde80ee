"""SwiGLU of a packed projection, in the place of Megatron-core's ``bias_swiglu_impl``."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor, nn

from liger_kernel.ops.activations.glu import glu

logger = logging.getLogger(__name__)


class LigerMegatronSwiGLU(nn.Module):
    """``silu(gate) * up`` of an input (..., 2 I) with gate and up side by side, which is read
    without a copy and not overwritten.

    With a bias, an input to be stored in fp8, or an input to be offloaded, ``fallback_impl`` runs,
    and a warning says so once; ``ValueError`` without a ``fallback_impl``.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False):
        super().__init__()
        self.fallback_impl = fallback_impl
        self._said: set[str] = set()

    def _fallback(
        self, reason: str, input: Tensor, bias: Tensor | None, fp8_input_store: bool, cpu_offload_input: bool
    ) -> Tensor:
        if self.fallback_impl is None:
            raise ValueError(f"LigerMegatronSwiGLU: {reason} needs a fallback_impl, got None")
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "LigerMegatronSwiGLU: %s is left to %s",
                reason,
                getattr(self.fallback_impl, "__qualname__", self.fallback_impl),
            )
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        for reason, asked in (
            ("a bias", bias is not None),
            ("fp8_input_store", fp8_input_store),
            ("cpu_offload_input", cpu_offload_input),
        ):
            if asked:
                return self._fallback(reason, input, bias, fp8_input_store, cpu_offload_input)
        return glu(input)
