"""A mixture of experts that receives its weights in each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.backends import ImplNotAvailableError
from liger_kernel.ops.projections.moe import moe


class LigerExpertParallelFusedMoe(nn.Module):
    """``sum_k weight_k A (silu(B x) * (C x))`` over the experts of each token. All experts must be
    on this rank.

    Raises ``ImplNotAvailableError`` for a ``process_group`` of several ranks, because that needs
    native kernels over NVSHMEM, which do not exist here. Use Transformers' own expert parallelism
    with ``LigerExperts`` instead.
    """

    def __init__(self, process_group: Any = None):
        super().__init__()
        if process_group is not None and process_group.size() > 1:
            raise ImplNotAvailableError(
                "LigerExpertParallelFusedMoe: process_group must be None or of one rank, got "
                f"{process_group.size()}: NVSHMEM is needed"
            )
        self.process_group = process_group

    def forward(
        self,
        hidden_states: Tensor,
        expert_indices: Tensor,
        expert_weights: Tensor,
        all_B: Tensor,
        all_C: Tensor,
        all_A: Tensor,
        num_experts: int,
    ) -> Tensor:
        """hidden_states (M, H), expert_indices and expert_weights (M, K), all_B and all_C (E, I,
        H), all_A (E, H, I)."""
        if all_B.shape[0] != num_experts:
            raise ValueError(
                f"LigerExpertParallelFusedMoe: all_B must hold {num_experts} experts, got {all_B.shape[0]}"
            )
        return moe(hidden_states, torch.cat((all_B, all_C), 1), all_A, expert_indices, expert_weights)
