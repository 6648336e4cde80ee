"""Softmax, sparsemax, and attention of special forms."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from liger_kernel.extra.multi_token_attention import multi_token_attention
from liger_kernel.extra.neighborhood_attention import neighborhood_attention
from liger_kernel.extra.softmax import softmax
from liger_kernel.extra.sparsemax import sparsemax
from liger_kernel.nn.norms import LigerLayerNorm

__all__ = [
    "LigerFusedNeighborhoodAttention",
    "LigerFusedNeighborhoodAttentionConfig",
    "LigerFusedNeighborhoodAttentionLayer",
    "LigerMultiTokenAttention",
    "LigerSoftmax",
    "LigerSparsemax",
]


class LigerSoftmax(nn.Module):
    """Softmax over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x)


class LigerSparsemax(nn.Module):
    """Euclidean projection onto the simplex along ``dim`` (arXiv:1602.02068)."""

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, dim=self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerMultiTokenAttention(nn.Module):
    """``multi_token_attention`` of scores (B, in_channels, L, L), with the weights of an
    ``nn.Conv2d`` (arXiv:2504.00927)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0,
        dilation: int = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ):  # fmt: skip
        super().__init__()
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, groups=groups, bias=bias)
        self.weight, self.bias = conv.weight, conv.bias
        self.reset_parameters()
        self.options: dict[str, Any] = dict(
            stride=stride, padding=padding, dilation=dilation, groups=groups, sparse=sparse
        )

    def reset_parameters(self) -> None:
        """Initialise the weights as ``nn.Conv2d`` does, and the bias with zero."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return multi_token_attention(scores, self.weight, self.bias, **self.options)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, " + ", ".join(f"{k}={v}" for k, v in self.options.items())


class LigerFusedNeighborhoodAttention(nn.Module):
    """Neighbourhood attention over hidden states (B, T, hidden_size), between its projections;
    dropout before the last one."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ):  # fmt: skip
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(
                f"{type(self).__name__}: hidden_size must be a multiple of num_heads, {num_heads}, got {hidden_size}"
            )
        self.head_dim, self.kernel_size, self.dilation, self.scale = (
            hidden_size // num_heads,
            kernel_size,
            dilation,
            scale,
        )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise ValueError(
                f"{type(self).__name__}: attention_mask must be None, got a tensor of shape "
                f"{tuple(attention_mask.shape)}"
            )
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = neighborhood_attention(q, k, v, kernel_size=self.kernel_size, dilation=self.dilation, scale=self.scale)
        return self.out_proj(self.dropout(o.transpose(1, 2).flatten(-2)))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, kernel_size={self.kernel_size}, dilation={self.dilation}, scale={self.scale}"


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """``x + dropout(attention(layer_norm(x)))``."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ):  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm, self.dropout = LigerLayerNorm(hidden_size, layer_norm_eps), nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states + self.dropout(self.attention(self.layer_norm(hidden_states), attention_mask))


@dataclass
class LigerFusedNeighborhoodAttentionConfig:
    """Arguments of ``LigerFusedNeighborhoodAttentionLayer``."""

    hidden_size: int = 768
    num_heads: int = 12
    kernel_size: int = 7
    dilation: int = 1
    bias: bool = True
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    scale: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
