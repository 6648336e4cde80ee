"""Classes of LinkedIn's package that have ``apply`` and are no ``torch.autograd.Function`` here: they
call operators, which have gradients. The Functions over one kernel are beside it in ``ops``."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.compat.functional import OF_OPERATOR, Four
from liger_kernel.compat.functions import (
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_fused_linear_scaled_cross_entropy_tp,
    liger_geglu,
    liger_llama4_text_rotary_pos_emb,
    liger_multimodal_rotary_pos_emb,
    liger_rope,
)
from liger_kernel.ops import glu, linear_logprobs
from liger_kernel.ops._core.impl import only_ours
from liger_kernel.ops._core.operator import as_index


class LigerSiLUMulFunction:
    """``apply(a, b, gate_multiplier=1.0, down_multiplier=1.0)``: ``silu(a gate_multiplier) b
    down_multiplier``."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        return glu(a, b, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


class LigerGELUMulFunction:
    """``apply(a, b)``: ``gelu(a) b``, gelu by its tanh approximation."""

    apply = staticmethod(liger_geglu)


class LigerFusedGateUpSiLUMulFunction:
    """``apply(y, in_place=False)``: ``silu(gate) up`` of y (..., 2 I), gate and up side by side."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        return glu(y)


class LigerRopeFunction:
    """``apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None)``: ``liger_rope``."""

    apply = staticmethod(liger_rope)


class LigerQwen2VLMRopeFunction:
    """``apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1)``: ``liger_multimodal_rotary_pos_emb``."""

    apply = staticmethod(liger_multimodal_rotary_pos_emb)


class LigerLlama4RopeFunction:
    """``apply(q, k, freqs_cis, BLOCK_SIZE=None)``: ``liger_llama4_text_rotary_pos_emb``, also
    with freqs_cis (T, D/2)."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        return liger_llama4_text_rotary_pos_emb(q, k, freqs_cis.reshape(-1, *freqs_cis.shape[-2:]))


class LigerCrossEntropyFunction:
    """``apply`` takes the arguments of ``liger_kernel.functional.cross_entropy``, and returns loss,
    z-loss, token accuracy and predicted classes, None if not requested."""

    apply = staticmethod(OF_OPERATOR["cross_entropy"])


class LigerFusedLinearCrossEntropyFunction:
    """``apply`` takes the arguments of ``liger_kernel.functional.fused_linear_cross_entropy``,
    ``ce_impl``, ``ce_mode`` and ``chunk_mem_const``, and returns loss, z-loss, token accuracy and
    predicted classes, None if not requested."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, ce_impl: str | None = None, ce_mode: str | None = None,
        chunk_mem_const: float = 1,
    ) -> Four:  # fmt: skip
        only_ours("fused_linear_cross_entropy", ce_impl, ce_mode)
        numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
        requested = use_token_scaling, return_token_accuracy, return_predicted_tokens
        return OF_OPERATOR["fused_linear_cross_entropy"](_input, weight, target, bias, ce_weight, *numbers, *requested)


class LigerFusedLinearJSDFunction:
    """``apply`` is ``liger_fused_linear_jsd``, differentiable in student_input and student_weight."""

    apply = staticmethod(liger_fused_linear_jsd)


class LigerFusedLinearKLDivFunction:
    """``apply`` is ``liger_fused_linear_kl_div``, differentiable in student_input and
    student_weight."""

    apply = staticmethod(liger_fused_linear_kl_div)


class LigerFusedLinearScaledCrossEntropyFunction:
    """``apply`` is differentiable in _input (..., H) and weight (V, H); logits are divided by
    ``temperature``."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Negative log-probability of each token of target (...), fp32, 0 where that is
        ``ignore_index``; if requested, the entropies (...) and the log-probabilities of
        selected_token_ids (K,), as (..., K)."""
        y, ids, chosen = as_index(target), selected_token_ids, []
        if ids is not None:
            if ids.ndim != 1 or ids.is_floating_point():
                raise ValueError(
                    "fused_linear_scaled_cross_entropy: selected_token_ids must be integers of shape (K,), got "
                    f"{ids.dtype} of {tuple(ids.shape)}"
                )
            y = torch.cat([y[..., None], ids.where(y[..., None] != ignore_index, ignore_index)], -1)
        outputs = ("entropy",) if return_entropy else ()
        found = linear_logprobs(_input, weight, y, temperature=temperature, ignore_index=ignore_index, outputs=outputs)
        logp, *entropy = found if return_entropy else (found,)
        if ids is not None:
            logp, chosen = logp[..., 0], [logp[..., 1:]]
        results = -logp, *entropy, *chosen
        return results if len(results) > 1 else results[0]


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """``apply`` is ``liger_fused_linear_scaled_cross_entropy_tp``."""

    apply = staticmethod(liger_fused_linear_scaled_cross_entropy_tp)
