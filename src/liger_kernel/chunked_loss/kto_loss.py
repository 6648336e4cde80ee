"""KTO, Kahneman-Tversky optimisation (arXiv:2402.01306): sequences are desirable or not, each by
itself, and gains and losses weigh unequally.

With r = log pi(y) - log pi_ref(y), z = ``kl``, the batch's estimate of KL(pi || pi_ref), not
differentiated and clamped by who estimates it, over B sequences (equation 8):

    loss = 1 / B * sum  w_d (1 - sigmoid(beta (r - z))) if desirable,
                        w_u (1 - sigmoid(beta (z - r))) if not

w_d = ``desirable_weight``, w_u = ``undesirable_weight``. Without a reference log pi_ref is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_preference import Found, passed_to, sigmoid
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase, sums
from liger_kernel.nn.options import WithOptions
from liger_kernel.ops._core import checks

__all__ = ["LigerFusedLinearKTOFunction", "LigerFusedLinearKTOLoss"]


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """``apply`` takes the arguments of ``forward`` by position; ``LigerFusedLinearKTOLoss`` has
    the formula, and names for the options."""

    @staticmethod
    def preference_loss_fn(
        log_prob_chunk: Tensor, preference_labels_chunk: Tensor, full_target: Tensor,
        ref_log_prob_chunk: Tensor | None = None, beta: float = 0.1, kl: Tensor | float | None = None,
        desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Loss, and the sums of rewards beta * r of the desirable and of the other sequences."""
        ratio = log_prob_chunk if ref_log_prob_chunk is None else log_prob_chunk - ref_log_prob_chunk
        desirable = preference_labels_chunk.bool()
        gain = beta * (ratio if kl is None else ratio - kl)
        losses = torch.where(desirable, desirable_weight * sigmoid(-gain), undesirable_weight * sigmoid(gain))
        return losses.sum() / max(full_target.shape[0], 1), *sums(desirable, beta * ratio.detach())

    @classmethod
    @passed_to(LigerFusedLinearUnpairedPreferenceBase.forward)
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None,
        ref_bias=None, kl=None, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False,
        average_log_prob=False, chunk_size=1, desirable_weight=1.0, undesirable_weight=1.0, ref_logps=None,
        compact=True,
    ):  # fmt: skip
        if isinstance(kl, Tensor):
            checks.one_element(cls.__name__, kl=kl)
            kl = kl.detach().reshape(())
        return dict(kl=kl, use_ref_model=use_ref_model or ref_input is not None)


class LigerFusedLinearKTOLoss(WithOptions):
    """``(loss, (chosen_logps, rejected_logps, chosen_logits, rejected_logits, chosen_rewards,
    rejected_rewards))``; the tuple holds 0-dim sums.

    ``kl``: a number, or a tensor with one element. A given reference is used;
    ``use_ref_model=True`` means that a reference is required. ``compiled`` and ``chunk_size`` have
    no effect; ``compact``, ``ref_logps``: ``LigerFusedLinearUnpairedPreferenceBase``.
    """

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    compact: bool = True

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | float | None = None, ref_logps: Tensor | None = None,
    ) -> Found:  # fmt: skip
        reference = ref_input, ref_weight, ref_bias, kl
        return LigerFusedLinearKTOFunction.apply(
            _input, lin_weight, target, preference_labels, bias, *reference, ref_logps=ref_logps, **self.options()
        )
