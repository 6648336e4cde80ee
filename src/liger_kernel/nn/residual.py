"""Residual streams: attention residuals and hyper-connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.compat.functions import liger_mhc_forward

__all__ = ["LigerMHC"]


class LigerMHC(nn.Module):
    """``hc`` residual streams of ``c`` channels around ``layer``: x (..., hc, c) to the same shape
    (manifold-constrained hyper-connections).

    ``phi`` (hc c, hc hc + 2 hc), ``b`` and three alphas give the coefficients; h_res uses ``tmax``
    steps of Sinkhorn. ``allow_fp32`` is accepted and ignored.
    """

    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.layer, self.hc, self.c = layer, hc, c
        self.options: dict[str, Any] = dict(
            tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult
        )
        device = next((p.device for p in layer.parameters()), None)
        width = hc * hc + 2 * hc
        self.phi = nn.Parameter(0.02 * torch.randn(hc * c, width, dtype=phi_dtype, device=device))
        self.b = nn.Parameter(torch.zeros(width, device=device))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.ones((), device=device)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"LigerMHC: x must have shape (..., {self.hc}, {self.c}), got {tuple(x.shape)}")
        return liger_mhc_forward(
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res, **self.options
        )

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.options['tmax']}"
