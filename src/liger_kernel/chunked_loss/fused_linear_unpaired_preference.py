"""Losses of sequences that are each marked desirable or not, given as a function of their
log-probabilities.

Shapes: ``_input`` (B, T, H), ``target`` (B, T), ``preference_labels`` (B,), true where desirable;
weight (V, H), bias (V,). A sequence's log-probability is the sum over its counted tokens, or with
``average_log_prob`` their mean; tokens whose target is ``ignore_index`` have no part in anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_preference import (
    Found,
    LossFunction,
    check_sequences,
    plain_logprobs,
    reference_logprobs,
    sequences,
    several,
)
from liger_kernel.ops._core.operator import as_index
from liger_kernel.ops.losses.linear_loss import Tokens, linear_loss

__all__ = ["LigerFusedLinearUnpairedPreferenceBase"]


def sums(labels: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of each tensor (n,), over the desirable sequences and over the others."""
    desirable = labels.bool()
    return tuple(t.where(which, 0).sum() for t in tensors for which in (desirable, ~desirable))


class LigerFusedLinearUnpairedPreferenceBase(LossFunction):
    """The base of a loss of labelled sequences: a subclass has ``preference_loss_fn``, and a
    ``forward`` if it has other arguments."""

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """What some sequences add to the loss, 0-dim, or that and tensors to return with it.

        It is called with ``(logps (n,), preference_labels (n,), full_target (B, T),
        **loss_kwargs)`` and, with a reference, ``ref_log_prob_chunk`` (n,), for one chunk after the
        other. Losses and 0-dim tensors are added, other tensors are concatenated. For a mean over
        the batch, divide by ``full_target.shape[0]``.
        """
        raise NotImplementedError("preference_loss_fn")

    @staticmethod
    def chunk_forward(
        input_chunk, weight, target_chunk, preference_labels_chunk, bias=None, ignore_index=-100, average_log_prob=False
    ):
        """Log-probabilities of sequences (n,), their sums over the desirable and the others, and
        those of all logits; see ``plain_logprobs``."""
        logps, _, logits = plain_logprobs(input_chunk, weight, target_chunk, bias, ignore_index, average_log_prob)
        return logps, *sums(preference_labels_chunk, logps, logits.sum((1, 2)))

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100,
        compiled=True, use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False,
        *, ref_logps=None, whole_batch=False, compact=True, **loss_kwargs,
    ):  # fmt: skip
        """``(loss, (chosen_logps, rejected_logps, chosen_logits, rejected_logits, *what
        preference_loss_fn returned))``.

        These are 0-dim sums: of log-probabilities over the desirable and the other sequences, and
        of logits over their counted tokens and the vocabulary. The reference is a head on
        ``ref_input`` (B, T, H), or ``ref_logps`` (B,), known sums over tokens. Other options: those
        of ``LigerFusedLinearPreferenceBase``.
        """
        name = cls.__name__
        check_sequences(name, _input, target, pairs=False)
        target = as_index(target)
        (B, T, H), V = _input.shape, weight.shape[0]
        labels = None if preference_labels is None else torch.as_tensor(preference_labels, device=_input.device)
        if labels is None or labels.shape != (B,):
            got = None if labels is None else tuple(labels.shape)
            raise ValueError(f"{name}: preference_labels must have shape ({B},), got {got}")
        _, lengths, head = sequences(target, ignore_index, average_log_prob, T, compact, whole_batch)
        ref = None
        if ref_logps is not None:
            ref = ref_logps.detach() / lengths
        elif use_ref_model:
            reference = ref_input, ref_weight, target, ref_bias
            ref = reference_logprobs(name, "ref_logps", *reference, **head).sum(1) / lengths

        def fn(tokens: Tokens, first: int, last: int) -> Found:
            logps = tokens.logp.sum(1) / lengths[first:last]
            refs = {} if ref is None else dict(ref_log_prob_chunk=ref[first:last])
            loss, *extra = several(cls.preference_loss_fn(logps, labels[first:last], target, **refs, **loss_kwargs))
            mean_logit: Any = tokens.mean_logit
            return loss, (*sums(labels[first:last], logps, mean_logit.sum(1) * V), *extra)

        return linear_loss(fn, _input.reshape(B * T, H), weight, target.reshape(-1), bias, **head)
