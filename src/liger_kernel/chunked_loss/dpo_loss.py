"""DPO, direct preference optimisation (arXiv:2305.18290), and the losses that came of it.

With c = beta (log pi(chosen) - log pi_ref(chosen)), r the same of rejected, z = c - r and e =
``label_smoothing``, the mean over pairs of

    sigmoid       -(1 - e) log sigmoid(z) - e log sigmoid(-z); for e > 0 cDPO
                  (https://ericmitchell.ai/cdpo.pdf)
    sigmoid_norm  the same of mean log-probabilities: length-normalised DPO (arXiv:2411.15124)
    hinge         max(0, 1 - z): SLiC (arXiv:2305.10425), on normalised likelihoods
                  (arXiv:2309.06657)
    ipo           (z - 1/2)^2 / beta^2, of mean log-probabilities: IPO (arXiv:2310.12036,
                  equation 17 with tau = beta)
    exo_pair      KL([sigmoid(z), sigmoid(-z)] || [1 - e, e]), e > 0: EXO (arXiv:2402.00856,
                  equation 16)
    nca_pair      -log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2: NCA
                  (arXiv:2402.05369)
    robust        (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e), e < 1/2: robust DPO
                  (arXiv:2403.00409)
    bco_pair      -log sigmoid(c) - log sigmoid(-r): BCO (arXiv:2404.04656), without the shift by
                  a running mean of rewards
    sppo_hard     ((c - 1/2)^2 + (r + 1/2)^2) / beta^2: SPPO (arXiv:2405.00675, equation 4.7 with
                  probabilities 1 and 0)
    aot           sigmoid, of the difference of sorted(log pi(chosen) / pi(rejected)) and
                  sorted(log pi_ref(chosen) / pi_ref(rejected))
    aot_unpaired  sigmoid, of sorted(c) - sorted(r); also "aot_pair". AOT, both over the batch
                  (arXiv:2406.05882)
    apo_zero      1 - sigmoid(c) + sigmoid(r): APO (arXiv:2408.06266, equation 7)
    apo_down      sigmoid(c) + 1 - sigmoid(z): APO (equation 8)
    discopop      -(1 - m) log sigmoid(z) + m exp(-z), m = sigmoid(z / discopop_tau): DiscoPOP
                  (arXiv:2406.08414, equation 5)
    sft           nothing: the NLL of chosen alone, with weight 1

plus ``alpha * NLL(chosen)`` with ``compute_nll_loss``. ``label_smoothing`` is refused where the
formula has no e. The two of AOT pair what they sort over the whole batch, which costs one more
product than the others' three.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.chunked_loss.cpo_loss import smoothed_logistic
from liger_kernel.chunked_loss.fused_linear_preference import Found, LigerFusedLinearPreferenceBase, passed_to, sigmoid
from liger_kernel.nn.options import WithOptions

__all__ = ["LigerFusedLinearDPOFunction", "LigerFusedLinearDPOLoss"]

_SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired", "aot_pair")
_OF_MEANS = ("ipo", "sigmoid_norm")
_OF_BATCH = ("aot", "aot_unpaired", "aot_pair")


def _exo(z: Tensor, e: float) -> Tensor:
    return sigmoid(z) * (F.logsigmoid(z) - math.log1p(-e)) + sigmoid(-z) * (F.logsigmoid(-z) - math.log(e))


def _discopop(z: Tensor, tau: float) -> Tensor:
    return sigmoid(z / tau) * torch.exp(-z) - sigmoid(-z / tau) * F.logsigmoid(z)


# of z, c, r, beta, e, tau: losses of pairs
_LOSSES = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", *_OF_BATCH), lambda z, c, r, beta, e, tau: smoothed_logistic(z, e)),
    "hinge": lambda z, c, r, beta, e, tau: F.relu(1 - z),
    "ipo": lambda z, c, r, beta, e, tau: (z / beta - 0.5 / beta).square(),
    "exo_pair": lambda z, c, r, beta, e, tau: _exo(z, e),
    "nca_pair": lambda z, c, r, beta, e, tau: -F.logsigmoid(c) - 0.5 * (F.logsigmoid(-c) + F.logsigmoid(-r)),
    "robust": lambda z, c, r, beta, e, tau: (e * F.logsigmoid(-z) - (1 - e) * F.logsigmoid(z)) / (1 - 2 * e),
    "bco_pair": lambda z, c, r, beta, e, tau: -F.logsigmoid(c) - F.logsigmoid(-r),
    "sppo_hard": lambda z, c, r, beta, e, tau: (c / beta - 0.5 / beta).square() + (r / beta + 0.5 / beta).square(),
    "apo_zero": lambda z, c, r, beta, e, tau: sigmoid(-c) + sigmoid(r),
    "apo_down": lambda z, c, r, beta, e, tau: sigmoid(c) + sigmoid(-z),
    "discopop": lambda z, c, r, beta, e, tau: _discopop(z, tau),
    "sft": lambda z, c, r, beta, e, tau: 0 * z,
}


def _check(name: str, loss_type: str, e: float) -> None:
    if loss_type not in _LOSSES:
        raise ValueError(f"{name}: loss_type must be one of {', '.join(_LOSSES)}, got {loss_type!r}")
    within = {"robust": 0 <= e < 0.5, "exo_pair": 0 < e < 1}.get(loss_type, not e or loss_type in _SMOOTHED)
    if not within:
        bounds = {"robust": "in [0, 0.5)", "exo_pair": "in (0, 1), in its paper 0.001,"}.get(loss_type, "0")
        raise ValueError(f"{name}: label_smoothing must be {bounds} for {loss_type}, got {e}")


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """``apply`` takes the arguments of ``forward`` by position; ``LigerFusedLinearDPOLoss`` has
    the formula, and names for the options."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None, beta: float = 0.1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Loss, and rewards c and r."""
        ref_chosen = torch.zeros_like(chosen_logps) if ref_chosen_logps is None else ref_chosen_logps
        ref_rejected = torch.zeros_like(rejected_logps) if ref_rejected_logps is None else ref_rejected_logps
        c, r = chosen_logps - ref_chosen, rejected_logps - ref_rejected
        if loss_type == "aot":
            z = (chosen_logps - rejected_logps).sort().values - (ref_chosen - ref_rejected).sort().values
        elif loss_type in _OF_BATCH:
            z = c.sort().values - r.sort().values
        else:
            z = c - r
        z, c, r = beta * z, beta * c, beta * r
        losses = _LOSSES[loss_type](z, c, r, beta, label_smoothing, discopop_tau)
        return losses.sum() / max(full_target.shape[0] // 2, 1), c, r

    @classmethod
    @passed_to(LigerFusedLinearPreferenceBase.forward)
    def forward(
        cls, ctx, _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None,
        ignore_index=-100, beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True,
        average_log_prob=False, chunk_size=1, loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0,
        ref_chosen_logps=None, ref_rejected_logps=None, compact=True,
    ):  # fmt: skip
        _check(cls.__name__, loss_type, label_smoothing)
        alone = dict(compute_nll_loss=True, alpha=1.0) if loss_type == "sft" else {}
        average = average_log_prob or loss_type in _OF_MEANS
        return dict(average_log_prob=average, whole_batch=loss_type in _OF_BATCH) | alone


class LigerFusedLinearDPOLoss(WithOptions):
    """``(loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
    chosen_rewards, rejected_rewards))``.

    The reference is a head (``ref_input``, ``ref_weight``, ``ref_bias``), or ``ref_chosen_logps``
    and ``ref_rejected_logps`` (B,), which are sums over tokens that were computed before. For
    ``ipo`` and ``sigmoid_norm``, log-probabilities and rewards are means over tokens. ``compiled``
    and ``chunk_size`` have no effect; ``compact``: ``LigerFusedLinearPreferenceBase``.
    """

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    compact: bool = True

    def check(self) -> None:
        _check(type(self).__name__, self.loss_type, self.label_smoothing)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        ref_chosen_logps: Tensor | None = None, ref_rejected_logps: Tensor | None = None,
    ) -> Found:  # fmt: skip
        known = dict(ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
        return LigerFusedLinearDPOFunction.apply(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, **known, **self.options()
        )
