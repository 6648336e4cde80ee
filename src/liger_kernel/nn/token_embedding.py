"""A table of embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from liger_kernel.ops.token_embedding import (
    embedding as look_up,
)  # ``embedding`` is a module here, by a path of LinkedIn's


class LigerEmbedding(nn.Module):
    """``nn.Embedding`` whose gradient is summed in fp32 and bit-identical in every run; names
    and initial values are those of PyTorch."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        super().__init__()
        stock = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        self.num_embeddings, self.embedding_dim, self.padding_idx, self.weight = (
            num_embeddings,
            embedding_dim,
            stock.padding_idx,
            stock.weight,
        )

    def forward(self, indices: Tensor) -> Tensor:
        return look_up(indices, self.weight, padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}" + (
            "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        )
