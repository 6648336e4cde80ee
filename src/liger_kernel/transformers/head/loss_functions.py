"""The loss of a causal model as functions of hidden states and head, which frameworks call, wrap or
replace.

Patched models do not need these functions. But if somebody has replaced one of the three (these
two, and ``functional.liger_fused_linear_cross_entropy``), patched models compute their loss with
the replacement. Names are looked up when a loss is computed, not before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import parallel
from liger_kernel.compat import functions as functional
from liger_kernel.compat.functions import CrossEntropyOutput, liger_fused_linear_cross_entropy

# what callers may pass on in kwargs; Transformers passes more, which has no meaning here
_OPTIONS = inspect.signature(liger_fused_linear_cross_entropy).parameters.keys() - {
    "reduction",
    "num_items",
    "softcap",
    "input",
    "weight",
    "target",
}


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: Any = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of hidden_states (M, H), lm_head_weight (V, H) and target (M,): the sum divided
    by ``num_items_in_batch``, or the mean.

    Options of ``liger_fused_linear_cross_entropy`` in ``kwargs`` are passed on, others are ignored.
    Returns 0 if every target is ignored.
    """
    options = {k: v for k, v in kwargs.items() if k in _OPTIONS}
    # the mean of no tokens is NaN, and of class weights a mean of its own
    if num_items_in_batch is None and options.get("ce_weight") is None:
        num_items_in_batch = (target != ignore_index).sum().clamp(min=1)
    named: dict[str, Any] = dict(softcap=final_logit_softcapping, accum_dtype=accum_dtype, num_items=num_items_in_batch)
    statistics: dict[str, Any] = dict(
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens
    )
    # by its module, so that a replacement is found
    return functional.liger_fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, ignore_index=ignore_index, **named, **statistics, **options
    )


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """``fixed_fused_linear_cross_entropy`` of each token's prediction of the next token.

    hidden_states (..., T, hidden_size); ``shift_labels``, or ``labels`` shifted by one, of any
    shape with one element per token.
    """
    # padding instead of a slice of the hidden states keeps the rows in one piece, without a copy
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    x, y = hidden_states.reshape(-1, hidden_size), shift_labels.reshape(-1).to(hidden_states.device)
    kwargs |= dict(return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens)
    return fixed_fused_linear_cross_entropy(
        x, lm_head_weight, y, num_items_in_batch, ignore_index, final_logit_softcapping, **kwargs
    )


def lce_maybe_trainable_lm_head(
    self: nn.Module,
    hidden_states: Tensor,
    hidden_size: int,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    **loss_kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """``LigerForCausalLMLoss`` with the weight of ``self.lm_head``: PEFT's trained copy if there
    is one, gathered if FSDP or ZeRO has sharded it."""
    head = self.lm_head

    # inside of the call of a sharded head, where its weight is whole
    def loss(x: Tensor) -> Tensor | CrossEntropyOutput:
        return LigerForCausalLMLoss(
            x, parallel.bare(head).weight, labels, hidden_size, shift_labels=shift_labels, **loss_kwargs
        )

    return parallel.run_gathered(head, loss, hidden_states)


def unpack_cross_entropy_result(result: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return loss, z-loss, token accuracy and predicted tokens of a ``CrossEntropyOutput``, of a
    tuple of up to four of these, or of a loss."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    loss, *more = result if isinstance(result, tuple) else (result,)
    z_loss, accuracy, predicted = (*more, None, None, None)[:3]
    return loss, z_loss, accuracy, predicted


# as they are when this module is imported
_OURS = LigerForCausalLMLoss, fixed_fused_linear_cross_entropy, liger_fused_linear_cross_entropy


def replaced() -> bool:
    """Whether somebody has replaced one of our functions."""
    return (
        LigerForCausalLMLoss,
        fixed_fused_linear_cross_entropy,
        functional.liger_fused_linear_cross_entropy,
    ) != _OURS
