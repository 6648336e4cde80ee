"""Policy-gradient losses of sampled completions (GRPO and its variants), as formulas over per-token
log-probabilities, and also from logits.

Shapes: log-probabilities, mask (B, T); advantages A (B,), (B, 1) or (B, T); logits (B, T + 1, V),
of which the last position predicts nothing.

r is the ratio of a token's probability to its probability at sampling time. With importance
sampling at the level of the sequence, r is the geometric mean of these ratios over the sequence
(GSPO, arXiv:2507.18071). With [x] for a detached x, a token's loss is

    grpo, bnpo, dr_grpo, dapo, luspo    -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)
    cispo                               -[min(r, epsilon_high)] A log p
    sapo                                -A sigmoid(t (r - 1)) 4 / t, with t for A > 0 or for A <= 0
    vespo                               -[W^k exp(l (1 - W))] A log p, W the product of a sequence's ratios, k and l for A >= 0 or for A < 0

The last three use only ratios of tokens. (delta: arXiv:2505.07291; cispo: arXiv:2506.13585; sapo:
arXiv:2511.20347; vespo: arXiv:2602.10693.) All are multiplied by ``vllm_is_ratio``, which corrects
for an engine that samples with other probabilities (vespo: it is part of W). Added is beta times
the estimate exp(d) - d - 1 of the divergence from a reference policy, d = log p_ref - log p, itself
times r with ``use_bias_correction_kl`` (arXiv:2512.02556). The sum over tokens is divided by

    grpo, sapo            B and the tokens of the sequence (arXiv:2402.03300)
    bnpo                  the tokens of the batch
    dapo, cispo, vespo    the tokens a rank has on average, or ``num_items_in_batch``, those of all ranks, by the number of ranks (arXiv:2503.14476)
    dr_grpo               B * max_completion_length (arXiv:2503.20783)
    luspo                 B (arXiv:2602.05261)
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_kernel.ops._core import acc, checks
from liger_kernel.ops._core.operator import computed
from liger_kernel.ops.losses.cross_entropy import cross_entropy, items

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# defined only for ratios of tokens; vespo computes the ratio of a sequence from them itself
OF_TOKENS = ("cispo", "sapo", "vespo")
LOSS_TYPES = (*CLIPPED, *OF_TOKENS)
# the target of masked tokens; not -100, so that a -100 at a token that is not masked is out of
# range and gives NaN
IGNORED = 1 - 2**31


@dataclass(frozen=True)
class Policy:
    """The options that define a token's loss, apart from its tensors."""

    loss_type: str
    importance_sampling_level: str
    beta: float
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    use_bias_correction_kl: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self):
        checks.one_of("grpo_loss", LOSS_TYPES, loss_type=self.loss_type)
        checks.one_of("grpo_loss", ("token", "sequence"), importance_sampling_level=self.importance_sampling_level)
        if self.importance_sampling_level == "sequence" and self.loss_type in OF_TOKENS:
            raise ValueError(
                f"grpo_loss: importance_sampling_level must be 'token' for loss_type {self.loss_type!r}, got 'sequence'"
            )
        temperatures = dict(sapo_temperature_pos=self.sapo_temperature_pos)
        checks.positive("grpo_loss", **temperatures, sapo_temperature_neg=self.sapo_temperature_neg)


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(q || p) from a sample of q (Schulman,
    "Approximating KL divergence", 2020)."""
    # expm1: exp(d) - 1 - d cancels where the policies agree
    d = log_p - log_q
    return torch.expm1(d) - d


def clip_coef_fn(
    coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped ratio (cispo: detached, and clipped only from above), and masks of the ratios
    below and above the bounds."""
    if loss_type == "cispo":
        return coef.detach().clamp(max=epsilon_high), torch.zeros_like(coef, dtype=torch.bool), coef > epsilon_high
    # both bounds, also where only one can act: the caller reports which ratios were clipped
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def sapo_loss_fn(importance_ratio: Tensor, temperature: float | Tensor) -> Tensor:
    """The soft gate of SAPO. Its slope is 1 at ratio 1 and decreases on both sides."""
    if not isinstance(temperature, Tensor):
        checks.positive("sapo_loss_fn", temperature=temperature)
    return torch.sigmoid(temperature * (importance_ratio - 1)) * 4 / temperature


def get_gamma_weights(
    advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """VESPO's weights W^k exp(l (1 - W)), without gradient: (B, 1), or (B, T) if the advantages (B,
    1) or (B, T) are.

    Logarithms are clamped between log(1e-8) and 20; those of single tokens also from below at -20.
    """
    least, most = math.log(1e-8), 20.0
    # clamped token by token first, so that one token cannot decide a sequence
    log_w = (log_ratio_per_token.detach().clamp(-most, most) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        correction = importance_sampling_ratio.detach().to(log_w.dtype).log().clamp(least, most)
        log_w = log_w + (correction if correction.shape[-1] == 1 else (correction * mask).sum(-1, keepdim=True))
    log_w = log_w.clamp(least, most)
    positive = advantages.detach() >= 0
    choose = lambda yes, no: torch.full_like(advantages, no, dtype=log_w.dtype).masked_fill_(positive, yes)
    # max: a rate of 0 would let the weight grow without bound
    k, rate = choose(k_pos, k_neg), choose(max(lambda_pos, 1e-4), max(lambda_neg, 1e-4))
    return (k * log_w - rate * torch.expm1(log_w)).exp().nan_to_num(0.0, 0.0, 0.0)


def unmasked(mask: Tensor, t: Tensor | None, fill: float = 0.0) -> Tensor | None:
    """``t`` (B, T) with ``fill`` where the mask is 0; (B,) and (B, 1) unchanged. Without
    gradient."""
    return t if t is None else t.detach() if t.shape != mask.shape else t.detach().masked_fill(mask == 0, fill)


def _column(t: Tensor | None, like: Tensor) -> Tensor | None:
    """``t`` in the dtype of ``like``, with (B,) as (B, 1)."""
    return t if t is None else (t[:, None] if t.ndim == 1 else t).to(like.dtype)


def token_losses(
    p: Policy, logp: Tensor, mask: Tensor, advantages: Tensor, ref_logp: Tensor | None = None,
    old_logp: Tensor | None = None, vllm_is_ratio: Tensor | None = None, phi_seq: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Each token's loss, divergence (None without beta or reference) and whether its ratio was
    clipped (None for sapo and vespo).

    Results are (B, T), or (B, 1) if all tokens of a sequence share them. Multiply them by the mask:
    they mean nothing where it is 0, but all tensors must be finite there (``unmasked``).
    ``old_logp`` None: the tokens were sampled with these probabilities. ``phi_seq``: VESPO's
    weights, if known.
    """
    # in the dtype of log-probabilities: advantages in bf16 would round the loss
    A, correction = _column(advantages, logp), _column(vllm_is_ratio, logp)
    # without old log-probabilities the ratio is 1, but has a slope
    log_ratio = logp - (logp.detach() if old_logp is None else old_logp.to(logp.dtype))
    log_r = log_ratio
    if p.importance_sampling_level == "sequence":
        log_r = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    r = log_r.exp()
    clipped = None
    if p.loss_type == "sapo":
        # the temperature depends on the sign of the advantage
        t = torch.full_like(A, p.sapo_temperature_neg).masked_fill_(A > 0, p.sapo_temperature_pos)
        gain = sapo_loss_fn(r, t) * A
    elif p.loss_type == "vespo":
        if phi_seq is None:
            rates = p.vespo_k_pos, p.vespo_lambda_pos, p.vespo_k_neg, p.vespo_lambda_neg
            phi_seq = get_gamma_weights(A, log_ratio, mask, correction, *rates)
        gain = phi_seq * A * logp
    else:
        of = r if p.delta is not None else r.detach()
        inside, low, high = clip_coef_fn(of, p.epsilon_low, p.epsilon_high, p.loss_type)
        if p.loss_type == "cispo":
            gain, clipped = inside * A * logp, high & (A > 0)
        else:
            free, bound = (r if p.delta is None else r.clamp(max=p.delta)) * A, inside * A
            # without delta, this holds only outside the bounds, where the clipped ratio has no gradient
            clipped = bound < free
            gain = torch.where(clipped, bound, free)
            if p.delta is not None:
                clipped = clipped & torch.where(A < 0, low, high)
    # vespo has it in its weights
    if correction is not None and p.loss_type != "vespo":
        gain = gain * correction
    if p.beta == 0 or ref_logp is None:
        return -gain, None, clipped
    kl = k3_loss_fn(ref_logp.to(logp.dtype), logp)
    # an unbiased gradient under the sampling policy
    kl = kl * r if p.use_bias_correction_kl else kl
    return p.beta * kl - gain, kl.detach(), clipped


def token_count(mask: Tensor) -> Tensor:
    """The number of tokens that count, at least 1, as a float on the device."""
    return mask.sum(dtype=acc(mask.dtype) if mask.is_floating_point() else torch.float32).clamp(min=1)


def normaliser(
    loss_type: str, mask: Tensor, max_completion_length: int | None = None, num_items: Tensor | float | None = None
) -> Tensor | int:
    """The divisor of the sum over the batch's tokens. The host does not wait for the device.

    Call it once per step with the mask of the whole batch: dapo, cispo and vespo without
    ``num_items`` sum over all ranks of ``torch.distributed``.
    """
    sequences = max(mask.shape[0], 1)
    if loss_type in ("grpo", "sapo", "luspo"):
        return sequences
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("grpo_loss: max_completion_length must be given for loss_type 'dr_grpo', got None")
        return sequences * max_completion_length
    if loss_type == "bnpo":
        return token_count(mask)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items is not None:
        return items(num_items, mask).clamp(min=1) / ranks
    # the one collective of this loss; with ``num_items`` there is none
    tokens = token_count(mask)
    if ranks > 1:
        dist.all_reduce(tokens)
    return tokens / ranks


def reduced(losses: Tensor, mask: Tensor, loss_type: str, n: Tensor | int) -> Tensor:
    """The contribution of these sequences to the loss: their tokens' ``losses`` (B, T), divided
    by the ``normaliser`` ``n`` of the whole batch."""
    losses = losses * mask
    if loss_type in ("grpo", "sapo"):
        losses = losses.sum(-1) / mask.sum(-1).clamp(min=1)
    return losses.sum() / n


def _reduce_grpo_loss(
    per_token_loss: Tensor,
    completion_mask: Tensor | None,
    loss_type: str,
    max_completion_length: int | None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """The loss of a whole batch from its tokens' losses (B, T), under the name of LinkedIn's
    package. ``max_completion_length`` defaults to T."""
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask.to(per_token_loss.dtype)
    longest = mask.shape[1] if max_completion_length is None else max_completion_length
    return reduced(per_token_loss, mask, loss_type, normaliser(loss_type, mask, longest, num_items_in_batch))


def _logprobs(logits: Tensor, input_ids: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    """Differentiable log-probabilities (B, T) in fp32. The kernel runs on all rows of the
    logits, so that these need no copy without the last position."""
    if logits.ndim != 3 or logits.shape[1] < 1:
        raise ValueError(f"grpo_loss: logits must have shape (B, T + 1, V), got {tuple(logits.shape)}")
    checks.positive("grpo_loss", temperature=temperature)
    B, T, V = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
    for name, t in (("input_ids", input_ids), ("mask", mask)):
        if t is not None and (t.ndim != 2 or t.shape[0] != B or t.shape[1] < T):
            raise ValueError(f"grpo_loss: {name} must have shape {(B, T)}, got {tuple(t.shape)}")
    last = lambda t: t[:, t.shape[1] - T :]
    # the last position predicts nothing: its row of logits is ignored and not cut off, which would
    # copy the logits
    target = input_ids.new_full((B, T + 1), IGNORED, dtype=torch.int64)
    target[:, :T] = last(input_ids) if mask is None else last(input_ids).where(last(mask) != 0, IGNORED)
    nll = cross_entropy(
        logits.reshape(-1, V), target.view(-1), reduction="none", logit_scale=1 / temperature, ignore_index=IGNORED
    )
    return -nll.view(B, T + 1)[:, :T]


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """fp32 log-probabilities (B, T) of ``input_ids`` (B, T) under logits (B, T + 1, V) /
    temperature, without gradient, 0 where the mask (B, T) is.

    If ids and mask are longer, their last T positions count. One kernel reads the logits once and
    does not change them; no length makes it compile again.
    """
    return _logprobs(logits, input_ids, temperature, mask)


class GrpoLossFunction:
    """``apply`` -> loss, divergence (None if beta is 0), clipped: (B, T) each, or reduced to their
    mean.

    This is not an autograd Function itself: the cross entropy kernel computes the gradient in a new
    tensor. ``inplace`` has no effect, because the logits belong to the caller.
    """

    @staticmethod
    def apply(
        logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
        completion_mask: Tensor | None, temperature: float, beta: float, eps_low: float, eps_high: float,
        inplace: bool, loss_type: str = "grpo", max_completion_length: int | None = None, reduce: bool = True,
        importance_sampling_level: str = "token", sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None,
        phi_seq: Tensor | None = None, **vespo: float,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        clip = beta, eps_low, eps_high, delta, use_bias_correction_kl
        p = Policy(loss_type, importance_sampling_level, *clip, sapo_temperature_pos, sapo_temperature_neg, **vespo)
        if beta != 0 and ref_logp is None:
            raise ValueError("grpo_loss: ref_logp must be given unless beta is 0, got None")
        logp = _logprobs(logits, completion_ids, temperature, completion_mask)
        mask = torch.ones_like(logp)
        if completion_mask is not None:
            mask = completion_mask[:, completion_mask.shape[1] - logp.shape[1] :].to(logp.dtype)
        # where the mask is 0 nothing may be NaN, not even what is multiplied by 0
        ratio = unmasked(mask, vllm_is_ratio, 1.0)
        given = unmasked(mask, advantages), unmasked(mask, ref_logp), unmasked(mask, old_logp), ratio
        loss, kl, clipped = token_losses(p, logp, mask, *given, phi_seq)
        kl, clipped = None if kl is None else kl * mask, torch.zeros_like(mask) if clipped is None else clipped * mask
        if not reduce:
            return loss * mask, kl, clipped
        tokens = token_count(mask)
        loss = _reduce_grpo_loss(loss, mask, loss_type, max_completion_length, num_items_in_batch)
        return loss, None if kl is None else kl.sum() / tokens, clipped.sum() / tokens


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple:  # fmt: skip
    """Losses, divergences (None if beta is 0) and whether clipped, (B, T) each, of logits (B, T +
    1, V), differentiable in these.

    completion_ids (B, T), advantages (B,) or (B, T), old_logp and ref_logp (B, T). With ``reduce``:
    the loss, and the list of the mean divergence (unless beta is 0) and the share of clipped
    tokens. ``max_completion_length`` None is T. ``inplace`` has no effect: the logits stay as they
    are.
    """
    tensors = computed(logits), old_logp, ref_logp, completion_ids, advantages, completion_mask
    numbers = temperature, beta, eps_low, eps_high, inplace, loss_type, max_completion_length, reduce
    sapo = importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg
    vespo = dict(vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos)
    vespo |= dict(vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg)
    more = vllm_is_ratio, delta, use_bias_correction_kl, num_items_in_batch
    loss, *metrics = GrpoLossFunction.apply(*tensors, *numbers, *sapo, *more, **vespo)
    return (loss, [m for m in metrics if m is not None]) if reduce else (loss, *metrics)
