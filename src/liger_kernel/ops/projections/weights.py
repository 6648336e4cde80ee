"""Storages of the frozen or trained weight W (N, K) of a linear layer. Each storage implements the
products that a node needs.

``forward``: y (M, N) = x W^T, added to the present values of y. ``backward``: dx (M, K) = dy W,
added likewise. ``gradient``: dw (N, K) = dy^T x, if W learns. A node passes its input as ``Operand``.
If one weight computes something from it, for example a cast, the next weight finds the result
there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_kernel._private import dispatch_modes
from liger_kernel.ops._core.operator import free_to_write, results_are_kept
from liger_kernel.ops._core.products import add_mm


def add_product(y: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``y + scale a b``, written to y if nobody keeps y: the product adds in its epilogue.
    Without y: ``scale a b``, in ``out`` if it is given."""
    # selective checkpointing may keep y: then it is not written to
    if y is not None:
        return torch.addmm(y, a, b, alpha=scale) if results_are_kept() else y.addmm_(a, b, alpha=scale)
    # a plain product where there is nothing to scale
    if scale == 1:
        return a @ b if out is None else torch.mm(a, b, out=out)
    if out is None and free_to_write():
        return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale)  # 2 us less of the host
    return torch.addmm(a.new_empty(()) if out is None else out, a, b, beta=0, alpha=scale, out=out)


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """``scale a b``: in ``dtype`` if that is fp32 and tensor cores can write their sums as they are, which saves a
    rounding and a cast; otherwise in the dtype of a."""
    if dtype != torch.float32 or a.itemsize != 2 or not a.is_cuda or torch.compiler.is_compiling() or dispatch_modes():
        return add_product(None, a, b, scale)
    y = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    return torch.addmm(y, a, b, beta=0, alpha=scale, out_dtype=dtype, out=y)


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, without the dispatcher if there is nothing to do: a layer in FP8 asks
    this some forty times."""
    return t if t.dtype == dtype else t.to(dtype)


def added(y: Tensor, t: Tensor | None) -> Tensor:
    """``y + t``, written to y if nobody keeps y."""
    return y if t is None else (y + t).to(y.dtype) if results_are_kept() else y.add_(t)


class Operand:
    """``rows`` (M, K) that several weights multiply, and what the weights compute from them, once
    for each key.

    ``learns``: whether a backward follows, which may need other casts of the rows. ``stays``:
    whether somebody else keeps or recomputes the rows for that backward, so that keeping them costs
    nothing. ``memory``: a tensor of the same size that nobody needs any more, whose memory may be
    used. ``ours``: one weight alone multiplies them, and nobody else has them: it may drop them and
    what it made of them, and use their memory.
    """

    def __init__(
        self, rows: Tensor, learns: bool = True, stays: bool = False, made: dict[Hashable, Any] | None = None,
        memory: Tensor | None = None, ours: bool = False,
    ):  # fmt: skip
        self.rows, self.dtype, self.learns, self.stays = rows, rows.dtype, learns, stays
        self.memory, self.ours = memory, ours
        self._made = dict(made or {})

    def has(self, key: Hashable) -> bool:
        """Whether ``made`` would find something."""
        return key in self._made

    def made(self, key: Hashable, make: Callable[[Tensor], Any]) -> Any:
        # the second weight of one input finds the cast of the first
        if key not in self._made:
            self._made[key] = make(self.rows)
        return self._made[key]

    def remade(self, key: Hashable, found: Any) -> None:
        """Let ``made`` find this from now on."""
        self._made[key] = found


@dataclass(frozen=True, eq=False)
class Weight:
    """A stored weight, (N, K). ``learnable``: the tensor that may have a gradient; None if the
    storage cannot have one.

    ``accumulates``: whether a product can add to its output in its epilogue. A product that cannot
    runs first, so that there is nothing to add to.
    """

    accumulates: ClassVar[bool] = True
    gains: ClassVar[bool] = False  # whether a node of ours helps even without adapters

    shape: tuple[int, ...]
    learnable: Tensor | None
    follows_input: bool = False  # whether the layer's output has the dtype of its input even under autocast

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in ``dtype``: the stored tensor if it has this dtype, else a new one."""
        raise NotImplementedError

    @property
    def values(self) -> Tensor | None:
        """The one stored tensor that is another one in ``nearest``; None if there is no such form."""
        return None

    def nearest(self, w: Tensor) -> Weight:
        """The weight of this storage, with the scales of this one, whose values are nearest to w in
        fp32."""
        raise NotImplementedError

    def opened(self, dtype: torch.dtype) -> Weight:
        """The same weight, prepared for many products one after another, each with some of the
        rows."""
        return self

    def forward(self, x: Operand, y: Tensor | None) -> Tensor:
        return add_product(y, x.rows, self.dense(x.rows.dtype).t())

    def backward(self, dy: Operand, dx: Tensor | None) -> Tensor:
        return add_product(dx, dy.rows, self.dense(dy.rows.dtype))

    def of_input(self, x: Operand) -> tuple[Hashable, Sequence[Tensor | None]] | None:
        """A key, and tensors that a node saves for ``gradient``: instead of x, or besides x if x
        stays. None if ``gradient`` needs only x."""
        return None

    def made_again(self, key: Hashable, tensors: Sequence[Tensor | None]) -> Any:
        """What ``Operand.made`` finds under ``key``, from the tensors that ``of_input`` returned."""
        raise NotImplementedError

    def gradient(self, dy: Operand, x: Operand) -> Tensor:
        """dw (N, K)."""
        return dy.rows.t() @ x.rows

    def add_gradient(self, total: Tensor, dy: Operand, x: Operand) -> None:
        """Add dw to ``total`` (N, K), which is in 32 bits if dw is in 16."""
        total.add_(self.gradient(dy, x))


@dataclass(frozen=True, eq=False)
class Dense(Weight):
    """A tensor in 16 or 32 bits with any strides."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        assert self.learnable is not None
        return as_dtype(self.learnable, dtype)

    @property
    def values(self) -> Tensor | None:
        return self.learnable

    def nearest(self, w: Tensor) -> Weight:
        assert self.learnable is not None
        return replace(self, learnable=w.to(self.learnable.dtype))

    def opened(self, dtype: torch.dtype) -> Weight:
        return replace(self, learnable=self.dense(dtype))

    def add_gradient(self, total: Tensor, dy: Operand, x: Operand) -> None:
        add_mm(total, dy.rows.t(), x.rows)


@dataclass(frozen=True, eq=False)
class Dequantized(Weight):
    """A weight from which a function makes a dense tensor for each product. The next one of the
    same size reuses the memory."""

    dequantize: Callable[[torch.dtype], Tensor] = field(kw_only=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.dequantize(dtype)

    def opened(self, dtype: torch.dtype) -> Weight:
        return Dense(self.shape, self.dense(dtype))


@dataclass(frozen=True, eq=False)
class ByItsModule(Weight):
    """A weight that its own module multiplies, with the reason. The node computes only what the
    adapters add, and does not see the weight."""

    why: str = ""

    def forward(self, x: Operand, y: Tensor | None) -> Tensor:
        return x.rows.new_zeros(x.rows.shape[0], self.shape[0]) if y is None else y

    def backward(self, dy: Operand, dx: Tensor | None) -> Tensor:
        return dy.rows.new_zeros(dy.rows.shape[0], self.shape[1]) if dx is None else dx


def dense(weight: Tensor) -> Dense:
    N, K = weight.shape
    return Dense((N, K), weight)
