"""GRPO and related losses from hidden states and a head, with three products and without storing
logits; the formulas are those of ``ops.grpo_loss``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase, of_tokens
from liger_kernel.chunked_loss.fused_linear_preference import passed_to
from liger_kernel.nn.options import WithOptions
from liger_kernel.ops._core import acc
from liger_kernel.ops.losses.grpo_loss import (
    Policy,
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    normaliser,
    reduced,
    sapo_loss_fn,
    token_count,
    token_losses,
)

__all__ = [
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearGRPOLoss",
    "clip_coef_fn",
    "get_gamma_weights",
    "k3_loss_fn",
    "sapo_loss_fn",
]


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """``apply`` returns loss and metrics: the mean divergence if beta is not 0, the mean entropy
    if requested, the fraction of clipped tokens."""

    @staticmethod
    def ppo_loss_fn(
        per_token_logps: Tensor, attention_mask: Tensor, advantages: Tensor, full_attention_mask: Tensor,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, beta: float = 0.04, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None, *, entropies: Tensor | None = None,
        entropy_coef: float = 0.0, n: Tensor | int | None = None, tokens: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``n`` and ``tokens``: the normaliser and the number of tokens of the whole batch, if
        they are known."""
        mask = attention_mask.to(per_token_logps.dtype)
        bounds = beta, epsilon_low, epsilon_high, delta, use_bias_correction_kl
        sapo, vespo = (sapo_temperature_pos, sapo_temperature_neg), (vespo_k_pos, vespo_lambda_pos)
        p = Policy(loss_type, importance_sampling_level, *bounds, *sapo, *vespo, vespo_k_neg, vespo_lambda_neg)
        n = normaliser(loss_type, full_attention_mask, max_completion_length, num_items_in_batch) if n is None else n
        tokens = token_count(full_attention_mask) if tokens is None else tokens
        losses, kl, clipped = token_losses(
            p, per_token_logps, mask, advantages, ref_per_token_logps, old_per_token_logps, vllm_is_ratio
        )
        loss, mean = reduced(losses, mask, loss_type, n), lambda t: (t * mask).sum() / tokens
        zero, metrics = mask.new_zeros(()), []
        if beta != 0:
            metrics.append(zero if kl is None else mean(kl))  # without a reference the policy is its own
        if entropies is not None:
            metrics.append(mean(entropies))
            loss = loss - entropy_coef * metrics[-1] if entropy_coef else loss
        return loss, (*metrics, zero if clipped is None else mean(clipped))

    @classmethod
    @passed_to(of_tokens)
    def forward(
        own, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None,
        ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None,
        beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo", max_completion_length=None,
        importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0,
        compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None,
        use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        num_items_in_batch=None, entropy_coef=0.0, return_entropy=False, compact=True, **more,
    ):  # fmt: skip
        mask = attention_mask.to(acc(_input.dtype))
        n = normaliser(loss_type, mask, max_completion_length, num_items_in_batch)
        entropy = return_entropy or entropy_coef != 0
        return dict(attention_mask=mask, entropy=entropy, n=n, tokens=token_count(mask))


class LigerFusedLinearGRPOLoss(WithOptions):
    """Loss and metrics of completions: the mean divergence from the reference if beta is not 0, the
    mean entropy if requested, the fraction of clipped tokens.

    ``entropy_coef`` times the mean entropy of the tokens is subtracted from the loss. That entropy
    is the second last metric, then and with ``return_entropy``. ``compact``: masked tokens are
    omitted from all products, and the call waits once for their number. ``compiled`` and
    ``chunk_size`` have no effect.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    entropy_coef: float = 0.0
    return_entropy: bool = False
    compact: bool = True

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """_input (B, T, H), lin_weight (V, H), ids and mask (B, T), advantages (B,), (B, 1) or
        (B, T), log-probabilities (B, T)."""
        tensors = _input, lin_weight, selected_token_ids, attention_mask, advantages, bias
        reference = ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias
        more = dict(vllm_is_ratio=vllm_is_ratio, num_items_in_batch=num_items_in_batch)
        return LigerFusedLinearGRPOFunction.apply(*tensors, *reference, **more, **self.options())
