"""Forwards and backwards of LinkedIn's operators without autograd, by the names that others import.

A ``*_forward`` returns what its ``*_backward`` takes; block sizes, warps and stages among it are 0
and have no effect. ``in_place`` has none either: nothing is overwritten. Tensors called ``out_...``
receive results.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.compat.function_classes import (
    LigerCrossEntropyFunction,
    LigerFusedLinearCrossEntropyFunction,
    LigerLlama4RopeFunction,
)
from liger_kernel.compat.functions import (
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_qwen2vl_mrope,
    liger_rope,
)
from liger_kernel.compat.helpers import MAX_FUSED_SIZE as MAX_FUSED_SIZE
from liger_kernel.extra.attn_res import attn_res_bwd, attn_res_fwd
from liger_kernel.extra.group_norm import group_norm_bwd, group_norm_fwd
from liger_kernel.extra.mhc import coefficients, sinkhorn
from liger_kernel.extra.modulated_rms_norm import check_rows, modulated_rms_norm_bwd, modulated_rms_norm_fwd
from liger_kernel.extra.poly_norm import poly_norm_bwd, poly_norm_fwd
from liger_kernel.ops import (
    dyt,
    fused_ce_tvd,
    glu,
    jsd,
    kl_div,
    mhc_post_res,
    mhc_pre,
    neighborhood_attention,
    relu_squared,
    tvd,
)
from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.operator import rows_of, with_gradients
from liger_kernel.ops.activations.glu import Form, glu_bwd
from liger_kernel.ops.activations.relu_squared import relu_squared_bwd
from liger_kernel.ops.losses.divergence.fused_ce_tvd import fused_ce_tvd_bwd
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm_bwd, fused_add_rms_norm_fwd
from liger_kernel.ops.norms.layer_norm import layer_norm_bwd, layer_norm_fwd
from liger_kernel.ops.norms.rms_norm import rms_norm_bwd, rms_norm_fwd


def _dense(t):
    return None if t is None else t.contiguous()


def _gradients(fn, dy, *inputs):
    own = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = fn(*own)
    return torch.autograd.grad(y, own, dy.to(y.dtype))


def _into(outs, results):
    return tuple(result if out is None else out.copy_(result) for out, result in zip(outs, results))


def rms_norm_forward(X, W, eps, offset=0.0, casting_mode="llama", row_mode=None):
    """y, x as rows, 1/rms, 0, 0 and ``casting_mode``."""
    x = rows_of(X)
    y, rstd = rms_norm_fwd(x, _dense(W), eps, offset, casting_mode)
    return y.view(X.shape), x, rstd, 0, 0, casting_mode


def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE=0, num_warps=0, in_place=False, row_mode=None, needs_dw=None
):
    """dX and dW, unless ``needs_dw`` is False."""
    need_dw = W is not None and needs_dw is not False
    dx, dw = rms_norm_bwd(rows_of(dY), rows_of(X), _dense(W), RSTD, offset, True, need_dw)
    return dx.view(dY.shape), dw if need_dw else None


def fused_add_rms_norm_forward(X, R, W, eps, offset, casting_mode):
    """y, the sum, its 1/rms, 0, 0, 0 and ``casting_mode``."""
    y, s, rstd = fused_add_rms_norm_fwd(rows_of(X), rows_of(R), _dense(W), eps, offset, casting_mode)
    return y.view(X.shape), s.view(X.shape), rstd, 0, 0, 0, casting_mode


def fused_add_rms_norm_backward(
    dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE=0, num_warps=0, num_stages=0, in_place=False, needs_dw=None
):
    """dX, the same as dR, and dW, unless ``needs_dw`` is False."""
    need_dw, ds = W is not None and needs_dw is not False, None if dS_out is None else rows_of(dS_out)
    dx, dw = fused_add_rms_norm_bwd(rows_of(dY), ds, rows_of(S), _dense(W), RSTD, offset, True, need_dw)
    return dx.view(dY.shape), dx.view(dY.shape), dw if need_dw else None


def modulated_rms_norm_forward(X, W, scale, shift, eps, offset, casting_mode):
    """y, 1/rms, 0, 0, ``casting_mode``, and how many rows share a scale."""
    check_rows(X, scale)
    x, s, t = rows_of(X), rows_of(scale), None if shift is None else rows_of(shift)
    y, rstd = modulated_rms_norm_fwd(x, _dense(W), s, t, eps, offset, casting_mode)
    return y.view(X.shape), rstd, 0, 0, casting_mode, len(x) // max(len(s), 1)


def modulated_rms_norm_backward(
    dY, X, W, scale, shift, RSTD, offset, casting_mode, BLOCK_SIZE=0, num_warps=0, rows_per_modulation=0, in_place=False
):
    """The gradients of X, W, scale and shift, if these are given."""
    needs = True, W is not None, True, None if shift is None else shift.dtype
    dx, dw, dscale, dshift = modulated_rms_norm_bwd(
        rows_of(dY), rows_of(X), _dense(W), rows_of(scale), RSTD, offset, *needs
    )
    of_shift = None if shift is None else dshift.view(shift.shape)
    return dx.view(X.shape), None if W is None else dw, dscale.view(scale.shape), of_shift


def layer_norm_forward(X, W, B, eps):
    """y, x as rows, mean, 1/std, 0 and 0."""
    x = rows_of(X)
    y, mean, rstd = layer_norm_fwd(x, _dense(W), _dense(B), eps)
    return y.view(X.shape), x, mean, rstd, 0, 0


def layer_norm_backward(dY, X, W, B, Mean, RSTD, needs_dw=None, needs_db=None):
    """dX, and dW and dB unless they are None or not needed."""
    W, B, N = W if needs_dw is not False else None, B if needs_db is not False else None, X.shape[-1]
    needs, w = (True, W is not None, B is not None, torch.float32), _dense(W)
    dx, dwb = layer_norm_bwd(rows_of(dY), rows_of(X), w, Mean, RSTD, *needs)
    return dx.view(dY.shape), *_halves(dwb, N, W, B)


def _halves(dwb, N, w, b):
    """dw and db of both in one tensor, which lacks the one that there is not."""
    return None if w is None else dwb[:N].to(w.dtype), None if b is None else dwb[-N:].to(b.dtype)


def group_norm_forward(X, num_channels, num_groups, W, B, eps):
    """y, x, mean and 1/std of each group, and 0."""
    X = X.contiguous()
    y, *stats = group_norm_fwd(X, num_groups, _dense(W), _dense(B), eps)
    mean, rstd = (s.view(X.shape[0], num_groups) for s in stats)
    return y, X, mean, rstd, 0


def group_norm_backward(dY, X, W, B, Mean, RSTD, num_channels, num_groups):
    """dX, dW and dB; dW is None if W is, and dB if B is."""
    stats, needs = (Mean.reshape(-1), RSTD.reshape(-1)), (True, W is not None, B is not None)
    dx, dwb = group_norm_bwd(dY.contiguous(), X.contiguous(), num_groups, _dense(W), *stats, *needs, torch.float32)
    return dx, *_halves(dwb, X.shape[1], W, B)


def poly_norm_forward(X, W, B, eps=1e-6):
    """y, x as rows, its statistics, 0 and 0."""
    x = rows_of(X)
    y, stats = poly_norm_fwd(x, W.contiguous(), B, eps)
    return y.view(X.shape), x, stats, 0, 0


def poly_norm_backward(dY, X, W, RSTD, BLOCK_SIZE=0, num_warps=0, in_place=False):
    """dX, dW and the 0-dim dB."""
    dx, dwb = poly_norm_bwd(rows_of(dY), rows_of(X), W.contiguous(), RSTD, True, True, True)
    return dx.view(dY.shape), dwb[:3].to(W.dtype), dwb[3].to(W.dtype)


@torch.no_grad()
def swiglu_forward(a, b, gate_multiplier=1.0):
    """a, b and ``silu(a gate_multiplier) b``."""
    return a, b, glu(a, b, act="silu", gate_multiplier=gate_multiplier)


@torch.no_grad()
def geglu_forward(a, b):
    """a, b and ``gelu(a) b``."""
    return a, b, glu(a, b, act="gelu_tanh")


@torch.no_grad()
def swiglu_fused_gate_up_forward(y):
    """y (..., 2 I), and ``silu(gate) up`` of its halves."""
    return y, glu(y)


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    """da and db."""
    return _glu_backward(a, b, dc, "silu", gate_multiplier)


def geglu_backward(a, b, dc):
    """da and db."""
    return _glu_backward(a, b, dc, "gelu_tanh")


def _glu_backward(a, b, dc, act, *form):
    da, db = glu_bwd(rows_of(dc), rows_of(a), rows_of(b), act, False, True, True, *Form(*form))
    return da.view(a.shape), db.view(b.shape)


def swiglu_fused_gate_up_backward(y, dc, in_place=False):
    """dy."""
    gate, up = rows_of(y).chunk(2, -1)
    return glu_bwd(rows_of(dc), gate, up, "silu", True, True, True, *Form())[0].view(y.shape)


@torch.no_grad()
def relu_squared_forward(X):
    """``relu(X)^2``."""
    return relu_squared(X)


def relu_squared_backward(X, dY):
    """dX."""
    return relu_squared_bwd(dY.contiguous(), X.contiguous())


@torch.no_grad()
def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """``liger_rope``: rotated q and k, and the tables."""
    return *liger_rope(q, k, cos, sin, None, unsqueeze_dim, rotary_dim), cos, sin


@torch.no_grad()
def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """The gradients of q and k: rotated back."""
    return liger_rope(dq, dk, cos, -sin, None, unsqueeze_dim, rotary_dim)


@torch.no_grad()
def qwen2vl_mrope_forward(q, k, cos, sin, mrope_section):
    """``liger_qwen2vl_mrope``: rotated q and k, and the tables."""
    return *liger_qwen2vl_mrope(q, k, cos, sin, mrope_section), cos, sin


@torch.no_grad()
def qwen2vl_mrope_backward(dq, dk, cos, sin, mrope_section):
    """The gradients of q and k: rotated back."""
    return liger_qwen2vl_mrope(dq, dk, cos, -sin, mrope_section)


@torch.no_grad()
def llama4_rope_forward(q, k, freqs_cis, BLOCK_SIZE=None, imag_sign=1.0):
    """``liger_llama4_text_rotary_pos_emb``. ``imag_sign=-1`` rotates back, as the backward does."""
    return LigerLlama4RopeFunction.apply(q, k, freqs_cis.conj() if imag_sign < 0 else freqs_cis)


@torch.no_grad()
def fused_neighborhood_attention_forward(query, key, value, kernel_size=7, dilation=1, scale=None, return_lse=False):
    """The output, the weights (B, H, T, T) computed by PyTorch, zero outside the neighbourhood, and
    () for settings."""
    q, k, at = query.float(), key.float(), torch.arange(query.shape[2], device=query.device)
    far = at[None] - at[:, None]
    inside = (far.abs() <= kernel_size // 2 * dilation) & (far % dilation == 0)
    scores = (q @ k.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~inside, -float("inf")).softmax(-1).to(query.dtype)
    o = neighborhood_attention(query, key, value, kernel_size=kernel_size, dilation=dilation, scale=scale)
    return o, weights, ()


@torch.no_grad()
def attn_res_forward(blocks, w_query, w_norm, eps=1e-6):
    """The average of N blocks (..., D), these as (N, M, D), their weights (M, N) and 1/rms (M, N)."""
    V = blocks if isinstance(blocks, Tensor) else torch.stack(tuple(blocks))
    v = V.reshape(V.shape[0], -1, V.shape[-1])
    h, rstd, score = attn_res_fwd(v.transpose(0, 1), w_query.contiguous(), w_norm.contiguous(), eps)
    return h.view(V.shape[1:]), v, score.softmax(-1), rstd


def attn_res_backward(dh, V_3d, w_query, w_norm, Alpha, RSTD, eps=1e-6):
    """dV (N, M, D), dw_query and dw_norm."""
    score = (V_3d.float() @ (w_query.float() * w_norm.float())).t() * RSTD
    weights, stats = (w_query.contiguous(), w_norm.contiguous()), [RSTD, score.contiguous()]
    dv, dq, dn = attn_res_bwd(rows_of(dh), V_3d.transpose(0, 1), *weights, stats, [True] * 3)
    return dv.transpose(0, 1), dq, dn


def cross_entropy_forward(
    _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """Loss, z-loss, token accuracy and predicted classes, None if not requested, and the gradient
    of ``_input``, which stays as it is."""
    numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    rest = target, weight, *numbers, return_z_loss, return_token_accuracy, return_predicted_tokens
    found, (dx,) = with_gradients(lambda x: LigerCrossEntropyFunction.apply(x, *rest), _input)
    return *found, dx


def cross_entropy_backward(_input, grad_output):
    """The gradient that ``cross_entropy_forward`` returned last, ``_input``, times that of the
    loss, or of each row's, as a new tensor."""
    return _input * (grad_output[:, None] if grad_output.ndim else grad_output)


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, token_grad_output=None,
    compute_gradients=None, weight_requires_grad=None, chunk_mem_const=1,
):  # fmt: skip
    """Loss, z-loss, token accuracy and predicted classes, None if not requested, then the gradients
    of _input, weight and bias.

    _input (M, H), weight (V, H), target (M,), bias (V,), ce_weight (V,). With ``reduction="none"``
    the gradients are those of the sum, or of the sum weighted by ``token_grad_output`` (M,).
    ``compute_gradients=False`` and ``weight_requires_grad=False`` leave them out.
    """
    numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
    rest = use_token_scaling, return_token_accuracy, return_predicted_tokens, ce_impl, ce_mode

    def loss(x, w, b):
        return LigerFusedLinearCrossEntropyFunction.apply(x, w, target, b, ce_weight, *numbers, *rest)

    if compute_gradients is False:
        with torch.no_grad():
            return *loss(_input, weight, bias), None, None, None
    found, (dx, dw, db) = with_gradients(loss, _input, weight, bias)
    if token_grad_output is not None:  # the gradients are of the tokens' losses times these
        dx, dw, db = with_gradients(lambda *leaves: (loss(*leaves)[0] * token_grad_output,), _input, weight, bias)[1]
    return *found, dx, dw if weight_requires_grad is not False else None, db


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """The gradients of a reduced loss times that of the loss, as new tensors."""
    return tuple(None if g is None else g * grad_output for g in (grad_input, grad_weight, grad_bias))


def fused_linear_jsd_forward(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, has_label,
    temperature, jsd_impl=None, jsd_mode=None, accum_dtype=None,
):  # fmt: skip
    """The loss, and its gradients of student_input and student_weight. ``has_label``: whether
    ``shift_labels`` count."""
    labels = shift_labels if has_label else None
    rest = teacher_input, teacher_weight, labels, jsd_beta, ignore_index, temperature, accum_dtype, jsd_impl, jsd_mode
    loss, (dx, dw) = with_gradients(lambda x, w: liger_fused_linear_jsd(x, w, *rest), student_input, student_weight)
    return loss, dx, dw


def fused_linear_kl_div_forward(
    student_input, student_weight, target, shift_labels, reduction, ignore_index, has_label, temperature, eps,
    accum_dtype=None,
):  # fmt: skip
    """The loss, and its gradients of student_input and student_weight. ``has_label``: whether
    ``shift_labels`` count."""
    rest = target, shift_labels if has_label else None, reduction, ignore_index, temperature, eps, accum_dtype
    loss, (dx, dw) = with_gradients(lambda x, w: liger_fused_linear_kl_div(x, w, *rest), student_input, student_weight)
    return loss, dx, dw


def fused_linear_jsd_backward(grad_output, grad_input, grad_weight):
    """Those gradients times that of the loss, as new tensors."""
    return fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, None)[:2]


fused_linear_kl_div_backward = fused_linear_jsd_backward


def jsd_forward(_input, target, shift_labels, beta, ignore_index, has_label, jsd_impl=None, jsd_mode=None):
    """The loss, in the dtype of ``_input``, log q, and its gradient to that. ``has_label``: whether
    ``shift_labels`` count."""
    only_ours("jsd", jsd_impl, jsd_mode)
    labels = shift_labels if has_label else None
    loss, (dx,) = with_gradients(lambda x: jsd(x, target, labels, beta=beta, ignore_index=ignore_index), _input)
    return loss.to(_input.dtype), dx


def jsd_backward(dX, grad_output):
    """The gradient of ``jsd_forward`` times the gradient of the loss, as a new tensor."""
    return dX * grad_output


@torch.no_grad()
def fused_ce_tvd_forward(student_logits, teacher_logits, target, ignore_index):
    """Both losses, and three times None, because the backward needs nothing more."""
    return *fused_ce_tvd(student_logits, teacher_logits, target, ignore_index=ignore_index), None, None, None


def fused_ce_tvd_backward(
    grad_ce, grad_tvd, student_logits, teacher_logits, target, student_lse, teacher_lse, sigma, ignore_index
):
    """The gradient of the student's logits (M, V)."""
    logits = rows_of(student_logits), rows_of(teacher_logits)
    return fused_ce_tvd_bwd(grad_ce.contiguous(), grad_tvd.contiguous(), *logits, target.contiguous(), ignore_index)


@torch.no_grad()
def liger_dyt_fwd(x, alpha, gamma, beta):
    """``dyt``."""
    return dyt(x, alpha, gamma, beta)


def liger_dyt_bwd(dy, x, alpha, gamma, beta):
    """Gradients of x, alpha, gamma and beta."""
    if beta is None:
        return *_gradients(dyt, dy, x, alpha, gamma), None
    return _gradients(dyt, dy, x, alpha, gamma, beta)


@torch.no_grad()
def kldiv_forward_triton(y_pred, y_true, log_target, reduction, eps):
    """``kl_div`` in fp32."""
    return kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps).float()


def kldiv_backward_triton(target, grad_output, new_grads, log_target):
    """The gradient of y_pred, of the sum: minus the probabilities, which ``new_grads`` receives,
    times ``grad_output``."""
    return new_grads.copy_(-target.exp() if log_target else -target) * grad_output


def tv_distance_forward_triton(p, q, shift_labels, reduction, ignore_index, has_label):
    """``tvd`` in fp32, and the gradient of p."""
    labels = shift_labels if has_label else None
    loss, (dp,) = with_gradients(lambda p: tvd(p, q, labels, reduction=reduction, ignore_index=ignore_index), p)
    return loss.float(), dp


def tvd_backward_triton(grad_output, grads):
    """That gradient times the gradient of the loss."""
    return grads * grad_output


def _product(a, b):
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


@torch.no_grad()
def mhc_mm_norm_fwd(x, phi, eps, *, out_mix=None, out_invr=None, block_n=32, block_k=256, block_m=32, num_warps=4):
    """mix = x phi invr (N, P) and invr = rsqrt(mean(x^2) + eps) (N,), fp32, of x (N, K) and phi
    (K, P)."""
    invr = torch.rsqrt(x.float().square().mean(-1) + eps)
    return _into((out_mix, out_invr), (_product(x, phi) * invr[:, None], invr))


@torch.no_grad()
def mhc_mm_norm_bwd(
    x, phi, mix, invr, grad_mix, *, out_grad_x=None, out_grad_phi=None, block_n=32, block_k=256, block_m=32, num_warps=4
):
    """Gradients of x, in its dtype, and of phi, in fp32."""
    scaled = grad_mix * invr[:, None]
    along = (grad_mix * mix).sum(-1) * invr.square() / x.shape[-1]
    dx = _product(scaled, phi.t()) - along[:, None] * x.float()
    return _into((out_grad_x, out_grad_phi), (dx.to(x.dtype), _product(x.t(), scaled)))


def _streams(b):
    """H of b (H H + 2 H,)."""
    return math.isqrt(b.numel() + 1) - 1


@torch.no_grad()
def mhc_split_sinkhorn_fwd(
    mix, b, alpha_pre, alpha_post, alpha_res, *, tmax, pre_eps, sinkhorn_eps, post_mult, out_hpre=None,
    out_hpost=None, out_hres=None, out_hist=None, return_hist=False, num_warps=1,
):  # fmt: skip
    """h_pre (N, H), h_post (N, H), h_res (N, H, H) and, with ``return_hist``, h_res after each
    of ``tmax`` steps (N, tmax, H, H)."""
    pre, post, steps = coefficients(
        mix, b, alpha_pre, alpha_post, alpha_res, _streams(b), tmax, pre_eps, sinkhorn_eps, post_mult
    )
    outs = out_hpre, out_hpost, out_hres, *((out_hist,) * return_hist)
    return _into(outs, (pre, post, steps[-1], *((torch.stack(steps, 1),) if return_hist else ())))


def mhc_sinkhorn_bwd(mix, b, alpha_res, grad_hres, *, tmax, sinkhorn_eps, hist=None, out_grad_logits=None, num_warps=1):
    """The gradient of the logits of h_res (N, H, H). The steps are computed again, also if
    ``hist`` has them."""
    H = _streams(b)
    logits = (mix * alpha_res + b)[:, 2 * H :].unflatten(-1, (H, H))
    return _into((out_grad_logits,), _gradients(lambda m: sinkhorn(m, tmax, sinkhorn_eps)[-1], grad_hres, logits))[0]


@torch.no_grad()
def mhc_pre_fwd(x, h_pre, *, out=None, block_n=32, block_c=128, num_warps=4):
    """``mhc_pre`` in fp32."""
    return _into((out,), (mhc_pre(x.float(), h_pre),))[0]


def mhc_pre_bwd(x, h_pre, grad_out, *, out_grad_x=None, out_grad_h=None, block_n=32, block_c=128, num_warps=4):
    """Gradients of x and h_pre in fp32."""
    return _into((out_grad_x, out_grad_h), _gradients(mhc_pre, grad_out, x.float(), h_pre.float()))


@torch.no_grad()
def mhc_post_res_fwd(x, f_out, h_post, h_res, *, out=None, block_n=None, block_c=None, num_warps=None, num_stages=None):
    """``mhc_post_res`` in fp32."""
    return _into((out,), (mhc_post_res(x.float(), f_out.float(), h_post, h_res),))[0]


def mhc_post_res_bwd(
    x, f_out, h_post, h_res, grad_out, *, out_grad_x=None, out_grad_f=None, out_grad_hpost=None, out_grad_hres=None,
    block_n=None, block_c=None, num_warps=None, num_stages=None,
):  # fmt: skip
    """Gradients of x, f_out, h_post and h_res in fp32."""
    found = _gradients(mhc_post_res, grad_out, *(t.float() for t in (x, f_out, h_post, h_res)))
    return _into((out_grad_x, out_grad_f, out_grad_hpost, out_grad_hres), found)


def get_bucket_m(M, threshold=4096, bucket_size=128):
    """Numbers of rows by the kernels that suit them: steps of 32 below 256, of ``bucket_size``
    up to ``threshold``, one bucket for more."""
    return M // 32 if M < 256 else 8 + min(M, threshold) // bucket_size


@torch.no_grad()
def gemm_swiglu(input, gate_weight, up_weight, gate_multiplier, store_preact=True):
    """A = silu(G gate_multiplier) U of the projections G and U of ``input``; with
    ``store_preact`` A, G and U side by side. None: no tile is searched."""
    projected = F.linear(input, torch.cat((gate_weight, up_weight)))
    a = glu(projected, act="silu", gate_multiplier=gate_multiplier)
    return (torch.cat((a, projected), -1) if store_preact else a), None


def swiglu_backward_dGU(dO, down_weight, AGU, fwd_best_config, gate_multiplier, down_multiplier):
    """Overwrite G and U in ``AGU`` with their gradients, for the gradient ``dO`` of the output
    of the down projection."""
    projected = AGU[..., down_weight.shape[1] :]
    dA = dO @ down_weight * down_multiplier
    projected.copy_(_gradients(lambda t: glu(t, act="silu", gate_multiplier=gate_multiplier), dA, projected)[0])


def swiglu_backward_dI(gate_weight, up_weight, AGU):
    """The gradient of the input, of what ``swiglu_backward_dGU`` left."""
    return AGU[..., gate_weight.shape[0] :] @ torch.cat((gate_weight, up_weight))
