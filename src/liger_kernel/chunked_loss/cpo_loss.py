"""CPO, contrastive preference optimisation (arXiv:2401.08417): DPO with a uniform reference, and
the likelihood of the chosen sequences beside it.

With Delta = log pi(chosen) - log pi(rejected) (sums over tokens) and e = label_smoothing, the
probability that a preference is reversed (as in cDPO, https://ericmitchell.ai/cdpo.pdf), over B
pairs (equation 3 for e = 0):

    loss = alpha * NLL(chosen)
           - 1 / B * sum ((1 - e) log sigmoid(beta Delta) + e log sigmoid(-beta Delta))
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase, PairLoss, passed_to

__all__ = ["LigerFusedLinearCPOFunction", "LigerFusedLinearCPOLoss"]


def smoothed_logistic(z: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(z), mixed with that of -z with probability ``label_smoothing``."""
    return -(1 - label_smoothing) * F.logsigmoid(z) - (label_smoothing * F.logsigmoid(-z) if label_smoothing else 0)


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """``apply`` takes the arguments of ``forward`` by position; ``LigerFusedLinearCPOLoss`` has
    the formula, and names for the options."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor,
        rejected_logps: Tensor,
        full_target: Tensor,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:
        """Loss, and rewards beta * log pi of chosen and rejected."""
        loss = smoothed_logistic(beta * (chosen_logps - rejected_logps), label_smoothing).sum() / max(
            full_target.shape[0] // 2, 1
        )
        return loss, beta * chosen_logps, beta * rejected_logps

    @classmethod
    @passed_to(LigerFusedLinearPreferenceBase.forward)
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
        compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1, compact=True,
    ):  # fmt: skip
        return {}


class LigerFusedLinearCPOLoss(PairLoss):
    """``(loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
    chosen_rewards, rejected_rewards))``.

    ``compiled`` and ``chunk_size`` have no effect; ``compact``: ``LigerFusedLinearPreferenceBase``.
    """

    function = LigerFusedLinearCPOFunction

    average_log_prob: bool = False
    chunk_size: int = 1
    compact: bool = True
