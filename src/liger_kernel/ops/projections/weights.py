"""How the frozen or trained weight W (N, K) of a linear layer is stored, as the products that a node needs of it.

``forward``: y (M, N) = x W^T, added to what y holds; ``backward``: dx (M, K) = dy W, likewise; ``gradient``: dw (N, K) = dy^T x, of a W that learns.
A node hands over its input as ``Rows``: what one weight makes of it, a cast for example, the next one finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor


def add_product(y: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``y + scale a b`` in the place of y, which a product adds to in its epilogue; ``scale a b``, in ``out`` or new, if there is no y."""
    if y is not None:
        return y.addmm_(a, b, alpha=scale)
    if scale == 1:
        return a @ b if out is None else torch.mm(a, b, out=out)
    return torch.addmm(a.new_empty(()) if out is None else out, a, b, beta=0, alpha=scale, out=out)


class Rows:
    """``rows`` (M, K) that several weights multiply, and what they make of them: once for all that ask under the same key.

    ``learns``: whether a backward follows, which may want other casts of them.
    """

    def __init__(self, rows: Tensor, learns: bool = True):
        self.rows, self.learns = rows, learns
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def kept(cls, key: Hashable, made: Any) -> Rows:
        """Of rows that are gone what ``made`` made of them under ``key``."""
        rows = cls(torch.empty(0))
        rows._made[key] = made
        return rows

    def made(self, key: Hashable, make: Callable[[Tensor], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make(self.rows)
        return self._made[key]


@dataclass(frozen=True, eq=False)
class Weight:
    """A stored weight, (N, K). ``learnable``: the tensor that may have a gradient; None if what is stored cannot.

    ``accumulates``: whether a product adds to what is there in its epilogue. One that does not comes first, so that what is there is its own.
    """

    accumulates: ClassVar[bool] = True
    gains: ClassVar[bool] = False  # whether a node gains by it without adapters

    shape: tuple[int, int]
    learnable: Tensor | None
    follows_input: bool = False  # whether its layer gives its output the input's dtype under autocast, too

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in ``dtype``; new, unless it is stored so."""
        raise NotImplementedError

    def opened(self, dtype: torch.dtype) -> Weight:
        """The same weight for many products in a row, each of some of the rows."""
        return self

    def forward(self, x: Rows, y: Tensor | None) -> Tensor:
        return add_product(y, x.rows, self.dense(x.rows.dtype).t())

    def backward(self, dy: Rows, dx: Tensor | None) -> Tensor:
        return add_product(dx, dy.rows, self.dense(dy.rows.dtype))

    def of_input(self, x: Rows) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """What ``gradient`` needs of x in its place, and the key of that; None if it needs x itself."""
        return None

    def gradient(self, dy: Rows, x: Rows) -> Tensor:
        """dw (N, K)."""
        return dy.rows.t() @ x.rows


@dataclass(frozen=True, eq=False)
class Dense(Weight):
    """A tensor of 16 or 32 bits, any strides."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.learnable is not None
        return self.learnable.to(dtype)


@dataclass(frozen=True, eq=False)
class Dequantized(Weight):
    """What a function makes a dense tensor of, in each product anew: one of the same size follows and gets the same memory."""

    dequantize: Callable[[torch.dtype], Tensor] = field(kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.dequantize(dtype)

    def opened(self, dtype: torch.dtype) -> Weight:
        return Dense(self.shape, self.dense(dtype))


@dataclass(frozen=True, eq=False)
class Elsewhere(Weight):
    """A weight whose product its own module computes, and why: the node has what adapters add to that, and nothing of the weight."""

    why: str = ""

    def forward(self, x: Rows, y: Tensor | None) -> Tensor:
        return x.rows.new_zeros(x.rows.shape[0], self.shape[0]) if y is None else y

    def backward(self, dy: Rows, dx: Tensor | None) -> Tensor:
        return dy.rows.new_zeros(dy.rows.shape[0], self.shape[1]) if dx is None else dx


def dense(weight: Tensor) -> Dense:
    N, K = weight.shape
    return Dense((N, K), weight)
