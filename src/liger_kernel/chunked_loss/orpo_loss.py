"""ORPO, odds ratio preference optimisation (arXiv:2403.07691): no reference model, and the
likelihood of the chosen sequences beside it.

With log pi(y) the mean log-probability of a sequence's tokens, log odds(y) = log pi(y) - log(1 -
pi(y)), over B pairs (equations 6 and 7):

    loss = NLL(chosen) - beta / B * sum log sigmoid(log odds(chosen) - log odds(rejected))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_preference import Found, LigerFusedLinearPreferenceBase, passed_to
from liger_kernel.nn.options import WithOptions

__all__ = ["LigerFusedLinearORPOFunction", "LigerFusedLinearORPOLoss"]


def _log_odds(logp: Tensor) -> Tensor:
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)  # odds of what is certain are infinite
    return logp - torch.log(-torch.expm1(logp))


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """``apply`` takes the arguments of ``forward`` by position; ``LigerFusedLinearORPOLoss`` has
    the formula, and names for the options."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1
    ) -> tuple[Tensor, ...]:
        """Loss, rewards beta * log pi of chosen and rejected, and the batch's means of log
        sigmoid(log odds ratio) and log odds ratio."""
        B = max(full_target.shape[0] // 2, 1)
        ratio = _log_odds(chosen_logps) - _log_odds(rejected_logps)
        log_sigmoid = F.logsigmoid(ratio).sum() / B
        return -beta * log_sigmoid, beta * chosen_logps, beta * rejected_logps, log_sigmoid, ratio.sum() / B

    @classmethod
    @passed_to(LigerFusedLinearPreferenceBase.forward)
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True,
        nll_target=None, compiled=True, chunk_size=1, compact=True,
    ):  # fmt: skip
        return dict(average_log_prob=True)


class LigerFusedLinearORPOLoss(WithOptions):
    """``(loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
    chosen_rewards, rejected_rewards, log_odds_ratio, log_odds))``.

    ``compiled`` and ``chunk_size`` have no effect; ``compact``, ``nll_target``:
    ``LigerFusedLinearPreferenceBase``.
    """

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1
    compact: bool = True

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Found:  # fmt: skip
        return LigerFusedLinearORPOFunction.apply(
            _input, lin_weight, target, bias, nll_target=nll_target, **self.options()
        )
