"""Residual streams: attention residuals and hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.residual.attn_res import attn_res
from liger_kernel.ops.residual.mhc import mhc_coeffs
from liger_kernel.ops.residual.mhc_mixing import mhc_post_res, mhc_pre


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Average of the N blocks V (N, ..., D), or a list of them, weighted by the softmax of
    ``w_query . (rms_norm(v_n) * w_norm)`` (arXiv:2603.15031)."""
    blocks = V if isinstance(V, Tensor) else torch.stack(tuple(V))
    return attn_res(blocks.movedim(0, -2), w_query, w_norm, eps=eps)


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """h_pre (..., H), h_post (..., H) and h_res (..., H, H) of streams x (..., H, C).
    ``allow_fp32`` is accepted and ignored: every dtype works."""
    options = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
    return mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre_i x_i`` of streams x (..., H, C)."""
    return mhc_pre(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """``y_o = sum_i h_res_oi x_i + h_post_o f_out`` of streams x (..., H, C)."""
    return mhc_post_res(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``liger_mhc_post_res``, and ``liger_mhc_pre`` with ``return_x_in``."""
    x_out = mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: Any,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """Streams x (..., H, C) around ``layer``, which receives (..., C) in its parameters' dtype.
    With ``return_coeffs`` also (h_pre, h_post, h_res)."""
    options = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
    h_pre, h_post, h_res = mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    x_in = mhc_pre(x, h_pre)
    parameter = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    x_out = mhc_post_res(x, layer(x_in if parameter is None else x_in.to(parameter.dtype)), h_post, h_res)
    return (x_out, (h_pre, h_post, h_res)) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """``hc`` residual streams of ``c`` channels around ``layer``: x (..., hc, c) to the same shape
    (manifold-constrained hyper-connections).

    ``phi`` (hc c, hc hc + 2 hc), ``b`` and three alphas give the coefficients; h_res uses ``tmax``
    steps of Sinkhorn. ``allow_fp32`` is accepted and ignored.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ):
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
