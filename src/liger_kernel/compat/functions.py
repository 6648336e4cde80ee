"""Functions of LinkedIn's package, each a few lines over an operator, where shapes, formulas and
errors are; ``liger_kernel.nn`` and ``liger_kernel.transformers.functional`` have them.

``in_place``, ``position_ids``, ``chunk_mem_const``, ``tiles_per_reduce`` and ``allow_fp32`` are
accepted and ignored: nothing here writes to a tensor that it does not own, and every dtype works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from liger_kernel.ops import (
    attn_res,
    cross_entropy,
    dyt,
    fused_add_rms_norm,
    glu,
    group_norm,
    jsd,
    kl_div,
    layer_norm,
    linear_cross_entropy,
    linear_divergence,
    mhc_coeffs,
    mhc_post_res,
    mhc_pre,
    modulated_rms_norm,
    multi_token_attention,
    neighborhood_attention,
    poly_norm,
    qk_norm_rope,
    relu_squared,
    rms_norm,
    rope,
    softmax,
    sparsemax,
    tvd,
)
from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.operator import as_index
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.divergence.by_element import counted
from liger_kernel.ops.losses.vocab_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from liger_kernel.ops.rotary.rope import in_place_of, of_complex, of_sections, once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "CrossEntropyOutput",
    "liger_attn_res",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_fused_neighborhood_attention",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_multimodal_rotary_pos_emb",
    "liger_poly_norm",
    "liger_qk_norm_rope",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
    "token_accuracy",
    "token_counts",
]

# these take what the operators take
liger_dyt, liger_relu_squared, liger_softmax = dyt, relu_squared, softmax
liger_mhc_pre, liger_mhc_post_res = mhc_pre, mhc_post_res


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """``x / rms(x) * (W + offset)`` over the last dim."""
    return rms_norm(X, W, eps=eps, offset=offset, casting=casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``liger_rms_norm`` of ``X + R``, and that sum."""
    return fused_add_rms_norm(X, R, W, eps=eps, offset=offset, casting=casting_mode)


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """``(1 + scale) * liger_rms_norm(X, W) + shift``; scale and shift are (H,), (1, H), (B, H),
    or have a row for each token."""
    return modulated_rms_norm(X, scale, shift, W, eps=eps, offset=offset, casting=casting_mode)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` over the last dim."""
    return layer_norm(X, W, B, eps=eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor | None, affine_shifting_bias: Tensor | None, num_channels: int,
    num_groups: int, eps: float,
) -> Tensor:  # fmt: skip
    """``F.group_norm`` of X (B, num_channels, ...)."""
    if X.shape[1] != num_channels:
        raise ValueError(f"liger_group_norm: X must have {num_channels} channels, got shape {tuple(X.shape)}")
    return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps=eps)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """``W[0] n(X^3) + W[1] n(X^2) + W[2] n(X) + B``, ``n(z) = z / rms(z)`` over the last dim."""
    return poly_norm(X, W, B, eps=eps)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return glu(a, b, act="silu")


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, with the tanh approximation of gelu."""
    return glu(a, b, act="gelu_tanh")


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection onto the simplex along ``dim``."""
    return sparsemax(input, dim=dim)


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1,
    groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Causal softmax, or sparsemax, of scores (B, C, L, L), convolved over neighbouring queries
    and keys; zero above the diagonal."""
    return multi_token_attention(
        scores, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups, sparse=sparse
    )


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attention of query (B, H, T, D) to the ``kernel_size`` keys around it, ``dilation`` apart,
    fewer at the borders."""
    return neighborhood_attention(query, key, value, kernel_size=kernel_size, dilation=dilation, scale=scale)


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k by tables (B or 1, T, R) or (T, R) as Transformers makes them: each angle
    twice, as in ``cat((angles, angles), -1)``; R <= D.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``. ``position_ids`` has
    no effect. Returns new tensors in the dtypes of q and k. Products are rounded to the tensors'
    dtype, as in Transformers; if the tables have another dtype, they are computed in fp32.
    ``rotary_dim``: R, for tables (..., R/2) that hold each angle once.
    """
    return rope(
        q, k, once(cos, rotary_dim), once(sin, rotary_dim), unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos)
    )


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``liger_rope`` with tables (3, B, T, R) for positions in time, height and width; sections of
    the R/2 pairs belong to each of the three in turn.

    Models whose embedding has combined the sections, interleaved or not, call ``liger_rope``.
    """
    cos, sin = of_sections(cos, mrope_section), of_sections(sin, mrope_section)
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos))


liger_rotary_pos_emb, liger_qwen2vl_mrope = liger_rope, liger_multimodal_rotary_pos_emb


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` of whole heads with gpt-oss's tables (B or 1, T, D/2), which hold each
    angle once."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` in fp32 for the patches of all images in one row: q, k (T, H, D), or a
    batch of such rows, tables (T, R)."""
    if q.ndim == 4:
        return rope(q, k, once(cos), once(sin), unsqueeze_dim=2)
    q, k = rope(q[None], k[None], once(cos), once(sin), unsqueeze_dim=2)
    return q[0], k[0]


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply neighbouring columns of xq, xk (B, T, H, D), as complex numbers, by freqs_cis (B
    or 1, T, D/2)."""
    return rope(xq, xk, *of_complex(freqs_cis), layout="pairs", unsqueeze_dim=2)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_llama4_text_rotary_pos_emb``; freqs_ci may also be one table for all images, with
    T * D/2 numbers in any shape."""
    table = query.shape[1], query.shape[-1] // 2
    if freqs_ci.numel() == math.prod(table):
        freqs_ci = freqs_ci.reshape(1, *table)
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci.to(query.device))


def liger_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    offset: float = 0.0, casting_mode: str = "llama", unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``liger_rope`` of the ``liger_rms_norm`` of each head of q and k, in one pass; weights
    (D,), tables (B or 1, T, R)."""
    how: dict[str, Any] = dict(eps=eps, offset=offset, casting=casting_mode, unsqueeze_dim=unsqueeze_dim)
    return qk_norm_rope(q, k, q_weight, k_weight, once(cos), once(sin), **how)


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Average of the N blocks V (N, ..., D), or a list of them, weighted by the softmax of
    ``w_query . (rms_norm(v_n) * w_norm)`` (arXiv:2603.15031)."""
    blocks = V if isinstance(V, Tensor) else torch.stack(tuple(V))
    return attn_res(blocks.movedim(0, -2), w_query, w_norm, eps=eps)


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h_pre (..., H), h_post (..., H) and h_res (..., H, H) of streams x (..., H, C).
    ``allow_fp32`` is accepted and ignored: every dtype works."""
    options: dict[str, Any] = dict(
        tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult
    )
    return mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``liger_mhc_post_res``, and ``liger_mhc_pre`` with ``return_x_in``."""
    x_out = mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor, layer: Any, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, return_coeffs: bool = False,
) -> Any:  # fmt: skip
    """Streams x (..., H, C) around ``layer``, which receives (..., C) in its parameters' dtype.
    With ``return_coeffs`` also (h_pre, h_post, h_res)."""
    options: dict[str, Any] = dict(
        tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult
    )
    h_pre, h_post, h_res = mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    x_in = mhc_pre(x, h_pre)
    parameter = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    x_out = mhc_post_res(x, layer(x_in if parameter is None else x_in.to(parameter.dtype)), h_post, h_res)
    return (x_out, (h_pre, h_post, h_res)) if return_coeffs else x_out


# as it was before any framework put another there
_stock_cross_entropy = F.cross_entropy


@dataclass
class CrossEntropyOutput:
    """A loss and the requested results. ``token_accuracy`` counts only tokens that are not ignored;
    ``predicted_tokens`` is -1 for ignored tokens.

    ``token_accuracy`` is ``correct_tokens`` / ``counted_tokens`` (0-dim int64). Over several
    micro-batches, add up these two; a mean of accuracies is wrong.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    correct_tokens: Tensor | None = None
    counted_tokens: Tensor | None = None


def token_counts(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return how many of ``predicted`` equal ``target``, and how many targets are not ignored."""
    valid = as_index(target) != ignore_index
    return ((predicted == target) & valid).sum(), valid.sum()


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Fraction of ``predicted`` that equals ``target``, among the targets that are not ignored;
    NaN if there are none."""
    correct, counted = token_counts(predicted, target, ignore_index)
    return correct / counted


def _output(
    found: Any, target: Tensor, ignore_index: int, z_loss: bool, accuracy: bool, predictions: bool
) -> Tensor | CrossEntropyOutput:
    if not (z_loss or accuracy or predictions):
        return found
    loss, z, predicted = found
    out = CrossEntropyOutput(loss, z if z_loss else None, predicted_tokens=predicted if predictions else None)
    if accuracy:
        correct, counted = out.correct_tokens, out.counted_tokens = token_counts(predicted, target, ignore_index)
        out.token_accuracy = correct / counted
    return out


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """``F.cross_entropy`` of logits (M, V) and class indices (M,), with the options of language
    models. Logits are not overwritten.

    Inputs of other shapes and class probabilities go to PyTorch, because frameworks replace
    PyTorch's function by this one. ``size_average`` and ``reduce`` have PyTorch's meaning. Returns
    a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """
    requested = return_z_loss, return_token_accuracy, return_predicted_tokens
    # as PyTorch's function does: the logits of a patched model have a cross entropy of their own
    if has_torch_function_unary(input):
        numbers = weight, size_average, ignore_index, reduce, reduction, label_smoothing, lse_square_scale, softcap
        return handle_torch_function(liger_cross_entropy, (input,), input, target, *numbers, *requested)
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    options: dict[str, Any] = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    plain = isinstance(input, Tensor) and input.ndim == 2 and target.ndim == 1 and not target.is_floating_point()
    if not (plain or any(requested) or lse_square_scale or softcap):
        return _stock_cross_entropy(input, target, weight, **options)
    found = cross_entropy(
        input, target, weight, **options, z_loss=lse_square_scale, softcap=softcap, stats=any(requested)
    )
    return _output(found, target, ignore_index, *requested)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities log q = input and log p =
    target, over the rows that are not ignored (none: 0)."""
    return jsd(input, target, shift_labels, beta=beta, ignore_index=ignore_index)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """``F.kl_div``: KL(target || exp(input)). ``reduce=False`` means "none",
    ``size_average=False`` means "sum"; with True, ``reduction`` decides."""
    if reduce is False or size_average is False:
        reduction = "none" if reduce is False else "sum"
    return kl_div(input, target, reduction=reduction, log_target=log_target, eps=eps)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance of probabilities, ``sum |input - target| / 2``."""
    return tvd(input, target, shift_labels, reduction=reduction, ignore_index=ignore_index)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: float = 1, *, num_items: Tensor | float | None = None, compact: bool | Kept = False,
    chunk_rows: int | None = None, fp32_logits: bool = False, fp8: str | None = None,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of ``input @ weight.T + bias`` and class indices, without storing the logits.
    input (M, H), weight (V, H), target (M,).

    ``ce_weight`` (V,) weighs classes. ``accum_dtype`` is the dtype in which the weight's gradient
    is summed over chunks. ``use_token_scaling`` multiplies each loss by the detached probability of
    its target. ``chunk_mem_const`` is accepted and ignored: chunks have a size that follows from
    memory, or ``chunk_rows`` tokens. ``num_items``, ``compact``, ``fp32_logits`` and ``fp8``: see
    ``linear_cross_entropy``.
    """
    requested = return_z_loss, return_token_accuracy, return_predicted_tokens
    options: dict[str, Any] = dict(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=lse_square_scale
    )
    options |= dict(softcap=softcap, token_scaling=use_token_scaling, num_items=num_items, stats=any(requested))
    options |= dict(accum_dtype=accum_dtype, compact=compact, chunk_rows=chunk_rows, fp32_logits=fp32_logits, fp8=fp8)
    found = linear_cross_entropy(input, weight, target, bias, ce_weight, **options)
    return _output(found, target, ignore_index, *requested)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None, jsd_impl: str | None = None, jsd_mode: str | None = None,
    compact: bool | Kept = False,
) -> Tensor:  # fmt: skip
    """Generalised JSD of the tokens of two linear heads without storing logits, the mean over
    tokens not ignored. (M, Hs), (V, Hs), (M, Ht), (V, Ht), (M,)."""
    only_ours("fused_linear_jsd", jsd_impl, jsd_mode)
    options: dict[str, Any] = dict(beta=jsd_beta, ignore_index=ignore_index, temperature=temperature)
    options |= dict(accum_dtype=accum_dtype, compact=compact)
    loss = linear_divergence(student_input, student_weight, teacher_input, teacher_weight, shift_labels, **options)
    assert isinstance(loss, Tensor)  # no parts were requested
    return loss


_REDUCTIONS = ("batchmean", "mean", "sum")


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None, compact: bool | Kept = False,
) -> Tensor:  # fmt: skip
    """KL(p || q) of q = softmax(student_input student_weight^T / temperature) from probabilities p =
    ``target``, 0-dim fp32, without storing logits. (M, H), (V, H), (M, V), labels (M,).

    The sum of p (log max(p, eps) - log q) over the rows whose label is not ``ignore_index``, divided
    by their number n ("batchmean"), by n V ("mean") or not at all ("sum"). It is not multiplied by
    temperature^2. Without such a row, loss and gradients are 0, not NaN as of a mean in PyTorch. A p
    that requires a gradient raises ``ValueError``: it would get none. ``accum_dtype``, ``compact``:
    see ``linear_cross_entropy``.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"fused_linear_kl_div: reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    options: dict[str, Any] = dict(kind="forward_kl", temperature=temperature, eps=eps, ignore_index=ignore_index)
    options |= dict(accum_dtype=accum_dtype, compact=compact, reduction="sum" if reduction == "sum" else "mean")
    if reduction == "mean":
        options["num_items"] = counted(student_input, shift_labels, ignore_index) * student_weight.shape[0]
    loss = linear_divergence(student_input, student_weight, target=shift_labels, teacher_probs=target, **options)
    assert isinstance(loss, Tensor)  # no parts were requested
    return loss


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: ProcessGroup | None, temperature: float = 1.0,
    ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    sizes: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Negative log-probability of each token, and with ``return_entropy`` the entropies, for
    classes that are spread over ranks; both fp32, the same on all ranks, 0 where ignored.

    input (..., H) and target (...) are equal on all ranks of ``tp_group``, which may have any
    backend of torch.distributed; weight (N, H) has the classes of this rank. Ranks have equal
    numbers of classes, in their order, or ``sizes`` lists them. The gradient of input is summed over
    the ranks. ``ValueError`` if the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"fused_linear_scaled_cross_entropy_tp: temperature must be positive, got {temperature}")
    options: dict[str, Any] = dict(ignore_index=ignore_index, reduction="none", entropy=return_entropy)
    options |= dict(logit_scale=1 / temperature, sizes=sizes)
    found = vocab_parallel_linear_cross_entropy(input.flatten(0, -2), weight, target.reshape(-1), tp_group, **options)
    if isinstance(found, tuple):
        return found[0].view(target.shape), found[1].view(target.shape)
    return found.view(target.shape)
