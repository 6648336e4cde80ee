"""SimPO, simple preference optimisation (arXiv:2405.14734): rewards are mean log-probabilities,
without a reference, and have to differ by a margin.

With Delta = log pi(chosen) - log pi(rejected) (means over tokens) and e = label_smoothing, over B
pairs (equation 6 for e = 0 and no NLL):

    z    = beta Delta - gamma
    loss = alpha * NLL(chosen) - 1 / B * sum ((1 - e) log sigmoid(z) + e log sigmoid(-z))

The paper has no NLL: ``compute_nll_loss=False``, the function's default; the module's is True.
"""

from __future__ import annotations

from torch import Tensor

from liger_kernel.chunked_loss.cpo_loss import smoothed_logistic
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase, PairLoss, passed_to

__all__ = ["LigerFusedLinearSimPOFunction", "LigerFusedLinearSimPOLoss"]


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    """``apply`` takes the arguments of ``forward`` by position; ``LigerFusedLinearSimPOLoss``
    has the formula, and names for the options."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1, gamma: float = 0.5,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Loss, and rewards beta * log pi of chosen and rejected."""
        z = beta * (chosen_logps - rejected_logps) - gamma
        return (
            smoothed_logistic(z, label_smoothing).sum() / max(full_target.shape[0] // 2, 1),
            beta * chosen_logps,
            beta * rejected_logps,
        )

    @classmethod
    @passed_to(LigerFusedLinearPreferenceBase.forward)
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
        compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1, compact=True,
    ):  # fmt: skip
        return dict(average_log_prob=True)


class LigerFusedLinearSimPOLoss(PairLoss):
    """``(loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
    chosen_rewards, rejected_rewards))``.

    ``compiled`` and ``chunk_size`` have no effect; ``compact``: ``LigerFusedLinearPreferenceBase``.
    """

    function = LigerFusedLinearSimPOFunction

    gamma: float = 0.5
    chunk_size: int = 1
    compact: bool = True
