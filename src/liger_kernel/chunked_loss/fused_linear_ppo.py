"""Policy-gradient losses of a head's per-token log-probabilities, on ``ops.linear_loss``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_preference import passed_to, reference_logprobs
from liger_kernel.ops._core import checks
from liger_kernel.ops.losses.grpo_loss import IGNORED, unmasked
from liger_kernel.ops.losses.linear_logprobs import linear_logprobs
from liger_kernel.ops.losses.linear_loss import Tokens, counted, linear_loss

__all__ = ["LigerFusedLinearPPOBase"]


def _check(x: Tensor, given: dict[str, Tensor | None]) -> tuple[int, int]:
    checks.dims("fused_linear_ppo", "(B, T, H)", _input=x)
    B, T = x.shape[:2]
    for name, t in given.items():
        shapes = ((B,), (B, 1), (B, T)) if name in ("advantages", "vllm_is_ratio") else ((B, T),)
        if t is not None and tuple(t.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"fused_linear_ppo: {name} must have shape {expected}, got {tuple(t.shape)}")
    return B, T


def of_tokens(
    own, _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
    old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio, temperature, use_ref_model, compact,
    entropy=False, ctx=None, cls=None, compiled=None, chunk_size=None, **numbers,
):  # fmt: skip
    """``LigerFusedLinearPPOBase.forward``; ``numbers`` go to ``ppo_loss_fn``."""
    given: dict[str, Any] = dict(advantages=advantages, vllm_is_ratio=vllm_is_ratio)
    given |= dict(ref_per_token_logps=ref_per_token_logps, old_per_token_logps=old_per_token_logps)
    B, T = _check(_input, given | dict(selected_token_ids=selected_token_ids, attention_mask=attention_mask))
    target = selected_token_ids.where(attention_mask != 0, IGNORED).reshape(-1)
    head: dict[str, Any] = dict(group=max(T, 1), temperature=temperature, ignore_index=IGNORED, entropy=entropy)
    head["compact"] = compact and counted(target, IGNORED, T)
    if use_ref_model and numbers["beta"] != 0 and ref_per_token_logps is None:
        known, reference = "ref_per_token_logps", (ref_input, ref_weight, target.view(B, T), ref_bias)
        given[known] = reference_logprobs("fused_linear_ppo", known, *reference, **head)
    fill = dict(vllm_is_ratio=1.0)
    tensors = {name: unmasked(attention_mask, t, fill.get(name, 0.0)) for name, t in given.items()}
    tensors["attention_mask"] = attention_mask

    def loss(tokens: Tokens, first: int, last: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        here = {name: None if t is None else t[first:last] for name, t in tensors.items()}
        here |= dict(entropies=tokens.entropy) if entropy else {}
        part, metrics = own.ppo_loss_fn(
            per_token_logps=tokens.logp, full_attention_mask=attention_mask, **here, **numbers
        )
        return part, tuple(metrics)

    return linear_loss(loss, _input.reshape(B * T, _input.shape[2]), weight, target, bias, **head)


class LigerFusedLinearPPOBase:
    """The base of a policy-gradient loss: a subclass has ``ppo_loss_fn``. ``Subclass.apply(_input,
    weight, ...)`` returns loss and a tuple of metrics.

    ``apply`` consists of operators that have gradients in _input, weight and bias, so a subclass
    needs no ``backward``, and a ``forward`` only if its arguments differ. No autograd context is
    passed to a ``forward``: ``ctx`` is None.
    """

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What some sequences add to the loss, and metrics. Metrics with dimensions are
        concatenated over calls, 0-dim metrics are added.

        It is called with keywords: ``per_token_logps, attention_mask, advantages,
        ref_per_token_logps, old_per_token_logps, vllm_is_ratio`` of these sequences,
        ``full_attention_mask`` of all sequences, the numbers given to ``apply``, and with
        ``entropy`` the ``entropies`` of these sequences. Where the mask is 0, (B, T) tensors are 0
        (``vllm_is_ratio``: 1), whatever was given.
        """
        raise NotImplementedError("LigerFusedLinearPPOBase: a subclass must define ppo_loss_fn")

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """Log-probabilities (n, T) of ids (n, T) by a head on input_chunk (n, T, H), without
        storing all logits: for a ``forward`` with its own loop."""
        return linear_logprobs(input_chunk, weight, selected_token_ids, bias, temperature=temperature)

    @classmethod
    def apply(own, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return own.forward(None, *args, **kwargs)

    # ``cls`` as a keyword is what an overriding ``forward`` of the published package passes on
    @classmethod
    @passed_to(of_tokens)
    def forward(
        own, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None,
        ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None,
        epsilon_low=0.2, epsilon_high=0.2, beta=0.04, loss_type="dapo", max_completion_length=None,
        importance_sampling_level="token", temperature=1.0, compiled=True, use_ref_model=False, chunk_size=1,
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None,
        use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        num_items_in_batch=None, *, cls=None, compact=True, entropy=False, **more,
    ):  # fmt: skip
        """_input (B, T, H), weight (V, H), bias (V,), ids and mask (B, T), advantages (B,) or (B,
        T); ``more`` goes to ``ppo_loss_fn``.

        With ``compact``, tokens whose mask is 0 take part in no product, and the call waits for
        their number; ``compact=False`` waits for nothing. The reference's log-probabilities are the
        given ones; without them, and if beta is not 0, those of ``ref_input``. ``compiled`` and
        ``chunk_size`` have no effect: the engine chooses chunks of whole sequences.
        """
        return {}
