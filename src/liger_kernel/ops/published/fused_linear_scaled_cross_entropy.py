"""The published functions of tokens' log-probabilities and entropies under a linear head, on one
rank and over a vocabulary that ranks share.

The operators are ``linear_logprobs`` and ``vocab_parallel_linear_cross_entropy``, with formulas and
shapes; logits are divided by ``temperature``.
Losses and entropies are fp32, of the shape of the target, 0 where that is ``ignore_index``, and
differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core.operator import acc, as_index
from liger_kernel.ops.losses.linear_logprobs import linear_logprobs
from liger_kernel.ops.losses.vocab_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LigerFusedLinearScaledCrossEntropyFunction:
    """``apply`` is differentiable in _input (..., H) and weight (V, H)."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Negative log-probability of each token of target (...); then, if asked for, the entropies
        (...), and the log-probabilities of selected_token_ids (K,), as (..., K).
        ``m_tiles_per_cluster`` is accepted and ignored."""
        x, y = _input.flatten(0, -2), as_index(target.reshape(-1))
        found = linear_logprobs(
            x, weight, y, temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy
        )
        logp, *entropy = found if isinstance(found, tuple) else (found,)
        outs = [-logp, *entropy]
        if selected_token_ids is not None:
            outs.append(_selected(x, weight, y, logp, selected_token_ids, temperature, ignore_index))
        shaped = [t.view(*target.shape, *t.shape[1:]) for t in outs]
        return tuple(shaped) if len(shaped) > 1 else shaped[0]


def _selected(
    x: Tensor, w: Tensor, y: Tensor, logp: Tensor, ids: Tensor, temperature: float, ignore_index: int
) -> Tensor:
    """Log-probabilities (M, K): z_k - z_y + log p_y, as log p_y is known. The logits are rounded
    as those are that made it."""
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(
            f"fused_linear_scaled_cross_entropy: selected_token_ids must be integers of shape (K,), got {ids.dtype} "
            f"of {tuple(ids.shape)}"
        )
    valid, inside = y != ignore_index, (y >= 0) & (y < w.shape[0])
    z_k = F.linear(x, w[ids])
    z_y = (x.to(z_k.dtype).to(acc(z_k.dtype)) * w[y.where(inside, 0)].to(z_k.dtype)).sum(-1).to(z_k.dtype)
    z_k, z_y = (z.to(acc(z.dtype)) / temperature for z in (z_k, z_y))
    return (z_k - z_y[:, None] + logp[:, None]).where(valid[:, None], 0)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """``apply`` is differentiable in _input (..., H), whose gradient is summed over the ranks,
    and in weight (N, H), this rank's classes."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: ProcessGroup | None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Negative log-probability of each token of target (...) among all classes, the same on all
        ranks, and with ``return_entropy`` the entropies.

        Ranks have equal numbers of classes, in their order, or ``sizes`` lists them. _input and
        target are the same on all ranks of ``tp_group``, of which a torch.distributed backend is
        all that is asked: NVSHMEM is not used, and ``tiles_per_reduce`` is accepted and ignored.
        ``ValueError`` if the temperature is not positive.
        """
        if not temperature > 0:
            raise ValueError(f"fused_linear_scaled_cross_entropy_tp: temperature must be positive, got {temperature}")
        options = dict(
            ignore_index=ignore_index,
            reduction="none",
            logit_scale=1 / temperature,
            sizes=sizes,
            entropy=return_entropy,
        )
        found = vocab_parallel_linear_cross_entropy(
            _input.flatten(0, -2), weight, target.reshape(-1), tp_group, **options
        )
        return (
            (found[0].view(target.shape), found[1].view(target.shape))
            if isinstance(found, tuple)
            else found.view(target.shape)
        )
