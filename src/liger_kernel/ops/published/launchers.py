"""What LinkedIn's operators start their kernels with, without autograd, by the names that others
import.

Tensors called ``out_...`` receive the results. Tiles, warps and stages have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core.operator import with_gradients
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.losses.divergence.probabilities import kl_div, tvd
from liger_kernel.ops.norms.dyt import dyt
from liger_kernel.ops.published.utils import get_num_warps as get_num_warps
from liger_kernel.ops.residual.mhc import coefficients, sinkhorn
from liger_kernel.ops.residual.mhc_mixing import mhc_post_res, mhc_pre


def _gradients(fn: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    own = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = fn(*own)
    return torch.autograd.grad(y, own, dy.to(y.dtype))


def _into(outs: tuple[Tensor | None, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result if out is None else out.copy_(result) for out, result in zip(outs, results))


@torch.no_grad()
def liger_dyt_fwd(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """``dyt``."""
    return dyt(x, alpha, gamma, beta)


def liger_dyt_bwd(
    dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of x, alpha, gamma and beta."""
    if beta is None:
        return *_gradients(dyt, dy, x, alpha, gamma), None
    return _gradients(dyt, dy, x, alpha, gamma, beta)


@torch.no_grad()
def kldiv_forward_triton(y_pred: Tensor, y_true: Tensor, log_target: bool, reduction: str, eps: float) -> Tensor:
    """``kl_div`` in fp32."""
    return kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps).float()


def kldiv_backward_triton(target: Tensor, grad_output: Tensor, new_grads: Tensor, log_target: bool) -> Tensor:
    """The gradient of y_pred, of the sum: minus the probabilities, which ``new_grads`` receives,
    times ``grad_output``."""
    return new_grads.copy_(-target.exp() if log_target else -target) * grad_output


def tv_distance_forward_triton(
    p: Tensor, q: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int, has_label: bool
) -> tuple[Tensor, Tensor]:
    """``tvd`` in fp32, and the gradient of p."""
    labels = shift_labels if has_label else None
    loss, (dp,) = with_gradients(lambda p: tvd(p, q, labels, reduction=reduction, ignore_index=ignore_index), p)
    return loss.float(), dp


def tvd_backward_triton(grad_output: Tensor, grads: Tensor) -> Tensor:
    """That gradient times the gradient of the loss."""
    return grads * grad_output


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


@torch.no_grad()
def mhc_mm_norm_fwd(
    x: Tensor,
    phi: Tensor,
    eps: float,
    *,
    out_mix: Tensor | None = None,
    out_invr: Tensor | None = None,
    block_n: int = 32,
    block_k: int = 256,
    block_m: int = 32,
    num_warps: int = 4,
) -> tuple[Tensor, ...]:
    """mix = x phi invr (N, P) and invr = rsqrt(mean(x^2) + eps) (N,), fp32, of x (N, K) and phi
    (K, P)."""
    invr = torch.rsqrt(x.float().square().mean(-1) + eps)
    return _into((out_mix, out_invr), (_product(x, phi) * invr[:, None], invr))


@torch.no_grad()
def mhc_mm_norm_bwd(
    x: Tensor,
    phi: Tensor,
    mix: Tensor,
    invr: Tensor,
    grad_mix: Tensor,
    *,
    out_grad_x: Tensor | None = None,
    out_grad_phi: Tensor | None = None,
    block_n: int = 32,
    block_k: int = 256,
    block_m: int = 32,
    num_warps: int = 4,
) -> tuple[Tensor, ...]:
    """Gradients of x, in its dtype, and of phi, in fp32."""
    scaled = grad_mix * invr[:, None]
    along = (grad_mix * mix).sum(-1) * invr.square() / x.shape[-1]
    dx = _product(scaled, phi.t()) - along[:, None] * x.float()
    return _into((out_grad_x, out_grad_phi), (dx.to(x.dtype), _product(x.t(), scaled)))


def _streams(b: Tensor) -> int:
    """H of b (H H + 2 H,)."""
    return math.isqrt(b.numel() + 1) - 1


@torch.no_grad()
def mhc_split_sinkhorn_fwd(
    mix: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    tmax: int,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    out_hpre: Tensor | None = None,
    out_hpost: Tensor | None = None,
    out_hres: Tensor | None = None,
    out_hist: Tensor | None = None,
    return_hist: bool = False,
    num_warps: int = 1,
) -> tuple[Tensor, ...]:
    """h_pre (N, H), h_post (N, H), h_res (N, H, H) and, with ``return_hist``, h_res after each
    of ``tmax`` steps (N, tmax, H, H)."""
    pre, post, steps = coefficients(
        mix, b, alpha_pre, alpha_post, alpha_res, _streams(b), tmax, pre_eps, sinkhorn_eps, post_mult
    )
    outs = out_hpre, out_hpost, out_hres, *((out_hist,) * return_hist)
    return _into(outs, (pre, post, steps[-1], *((torch.stack(steps, 1),) if return_hist else ())))


def mhc_sinkhorn_bwd(
    mix: Tensor,
    b: Tensor,
    alpha_res: Tensor,
    grad_hres: Tensor,
    *,
    tmax: int,
    sinkhorn_eps: float,
    hist: Tensor | None = None,
    out_grad_logits: Tensor | None = None,
    num_warps: int = 1,
) -> Tensor:
    """The gradient of the logits of h_res (N, H, H). The steps are computed again, also if
    ``hist`` has them."""
    H = _streams(b)
    logits = (mix * alpha_res + b)[:, 2 * H :].unflatten(-1, (H, H))
    return _into((out_grad_logits,), _gradients(lambda m: sinkhorn(m, tmax, sinkhorn_eps)[-1], grad_hres, logits))[0]


@torch.no_grad()
def mhc_pre_fwd(
    x: Tensor, h_pre: Tensor, *, out: Tensor | None = None, block_n: int = 32, block_c: int = 128, num_warps: int = 4
) -> Tensor:
    """``mhc_pre`` in fp32."""
    return _into((out,), (mhc_pre(x.float(), h_pre),))[0]


def mhc_pre_bwd(
    x: Tensor,
    h_pre: Tensor,
    grad_out: Tensor,
    *,
    out_grad_x: Tensor | None = None,
    out_grad_h: Tensor | None = None,
    block_n: int = 32,
    block_c: int = 128,
    num_warps: int = 4,
) -> tuple[Tensor, ...]:
    """Gradients of x and h_pre in fp32."""
    return _into((out_grad_x, out_grad_h), _gradients(mhc_pre, grad_out, x.float(), h_pre.float()))


@torch.no_grad()
def mhc_post_res_fwd(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    *,
    out: Tensor | None = None,
    block_n: int | None = None,
    block_c: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """``mhc_post_res`` in fp32."""
    return _into((out,), (mhc_post_res(x.float(), f_out.float(), h_post, h_res),))[0]


def mhc_post_res_bwd(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    grad_out: Tensor,
    *,
    out_grad_x: Tensor | None = None,
    out_grad_f: Tensor | None = None,
    out_grad_hpost: Tensor | None = None,
    out_grad_hres: Tensor | None = None,
    block_n: int | None = None,
    block_c: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of x, f_out, h_post and h_res in fp32."""
    found = _gradients(mhc_post_res, grad_out, *(t.float() for t in (x, f_out, h_post, h_res)))
    return _into((out_grad_x, out_grad_f, out_grad_hpost, out_grad_hres), found)


def get_bucket_m(M: int, threshold: int = 4096, bucket_size: int = 128) -> int:
    """Numbers of rows by the kernels that suit them: steps of 32 below 256, of ``bucket_size``
    up to ``threshold``, one bucket for more."""
    return M // 32 if M < 256 else 8 + min(M, threshold) // bucket_size


@torch.no_grad()
def gemm_swiglu(
    input: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_multiplier: float, store_preact: bool = True
) -> tuple[Tensor, Any]:
    """A = silu(G gate_multiplier) U of the projections G and U of ``input``; with
    ``store_preact`` A, G and U side by side. None: no tile is searched."""
    projected = F.linear(input, torch.cat((gate_weight, up_weight)))
    a = glu(projected, act="silu", gate_multiplier=gate_multiplier)
    return (torch.cat((a, projected), -1) if store_preact else a), None


def swiglu_backward_dGU(
    dO: Tensor, down_weight: Tensor, AGU: Tensor, fwd_best_config: Any, gate_multiplier: float, down_multiplier: float
) -> None:
    """Overwrite G and U in ``AGU`` with their gradients, for the gradient ``dO`` of the output
    of the down projection."""
    projected = AGU[..., down_weight.shape[1] :]
    dA = dO @ down_weight * down_multiplier
    projected.copy_(_gradients(lambda t: glu(t, act="silu", gate_multiplier=gate_multiplier), dA, projected)[0])


def swiglu_backward_dI(gate_weight: Tensor, up_weight: Tensor, AGU: Tensor) -> Tensor:
    """The gradient of the input, of what ``swiglu_backward_dGU`` left."""
    return AGU[..., gate_weight.shape[0] :] @ torch.cat((gate_weight, up_weight))
