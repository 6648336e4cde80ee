"""Linear layers with low-rank adapters (LoRA, Hu et al., arXiv:2106.09685; DoRA, Liu et al., arXiv:2402.09353) as nodes of the graph.

A projection of x (M, K) is  z = x W^T + sum_j s_j drop_j(x) A_j^T B_j^T,  A_j (r_j, K), B_j (N, r_j);  y = z + bias, or, with a magnitude m (N,),
y = m / |W + s B A| * z + bias, the norms of the rows being constants for the gradient.

``Projections`` holds those of one input while a node runs. The A's that see x itself are stacked, so that x is read once for all of them; the product of
a B is written first and the large product adds to it in its epilogue. Kept for the backward are x, the thin x A^T (M, r), masks of dropout, z where there is
a magnitude, and the adapters in the dtype of the products if that is not theirs: no cast of x, no output of an adapter.

Dtypes: ``dtype`` is that of the products with W. Adapters of 32 bits beside products of 16 bits, without autocast, are multiplied in 32 bits, as PEFT does.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import acc
from liger_kernel.ops.projections.magnitude import dot_columns, times_columns
from liger_kernel.ops.projections.weights import Rows, Weight, add_product


@dataclass(frozen=True, eq=False)
class Adapter:
    """``scale * (drop(x) a^T b^T + bias)``: a (r, K), b (N, r), bias (N,) or None."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear layer: its weight, bias (N,), adapters, and the magnitude (N,) of its only adapter, if that is one of DoRA."""

    weight: Weight
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    magnitude: Tensor | None = None

    @property
    def gains(self) -> bool:
        """Whether a node has anything to gain: adapters, or products that are not PyTorch's."""
        return bool(self.adapters) or self.weight.gains

    def tensors(self) -> list[Tensor | None]:
        """All that may have a gradient, in the order of ``Projections.gradients``."""
        return [self.weight.learnable, self.bias, self.magnitude, *(t for a in self.adapters for t in (a.a, a.b, a.bias))]

    def of(self, tensors: Sequence[Tensor | None]) -> Projection:
        """The same of other tensors, in that order."""
        learnable, bias, magnitude, *rest = tensors
        adapters = tuple(dataclasses.replace(a, a=rest[3 * j], b=rest[3 * j + 1], bias=rest[3 * j + 2]) for j, a in enumerate(self.adapters))
        return Projection(dataclasses.replace(self.weight, learnable=learnable), bias, adapters, magnitude)


@dataclass(eq=False)
class _Stack:
    """Adapters that see the same input: x, or one of them a dropped x. ``begin`` of each in the stacked rows."""

    adapters: list[tuple[int, int]]  # projection, adapter
    spans: list[tuple[int, int]]
    dropout: float


def _norms(p: Projection, dtype: torch.dtype, thin: torch.dtype) -> Tensor:
    """|W + s B A| of each row (N,), of |W|^2 + 2 s <W A^T, B> + s^2 <B A A^T, B>, without the sum of the two."""
    (adapter,) = p.adapters
    w, wide = p.weight.dense(dtype), acc(dtype)
    a, b = adapter.a.to(thin).to(wide), adapter.b.to(wide)
    squares = torch.linalg.vector_norm(w, dim=1, dtype=wide).square()
    sb = adapter.scale * b
    if w.is_cuda and thin == dtype != wide:
        wa = torch.mm(w, adapter.a.to(thin).t(), out_dtype=wide)  # by the tensor cores, without a copy of W
    else:
        wa = w.to(wide) @ a.t()
    return (squares + (sb * (2 * wa + sb @ (a @ a.t()))).sum(1)).clamp_(min=0).sqrt()


class Projections:
    """Projections of one input while a node runs."""

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype, thin: torch.dtype):
        self.projections, self.dtype, self.thin = projections, dtype, thin
        every = [(i, j) for i, p in enumerate(projections) for j in range(len(p.adapters))]
        plain = [at for at in every if not self._of(at).dropout]
        groups = [plain] * bool(plain) + [[at] for at in every if self._of(at).dropout]
        self.stacks = []
        for group in groups:
            ends = list(itertools.accumulate((self._of(at).a.shape[0] for at in group), initial=0))
            self.stacks.append(_Stack(group, list(itertools.pairwise(ends)), self._of(group[0]).dropout))
        self.place = {at: (s, i) for s, stack in enumerate(self.stacks) for i, at in enumerate(stack.adapters)}
        self.As: list = []
        self.bs: list = []
        self.xas: list = []
        self.masks: list = []
        self.zs: list = []
        self.norms: list = []
        self.dxas: list[Tensor] = []
        self.dy_rows: list[Rows] = []
        self.grads: list[list] = []

    def _of(self, at: tuple[int, int]) -> Adapter:
        return self.projections[at[0]].adapters[at[1]]

    def _spans(self, i: int) -> Iterator[tuple[Adapter, int, slice, int]]:
        """Of projection i: each adapter, its stack, its rows there, and its number among all."""
        before = sum(len(p.adapters) for p in self.projections[:i])
        for j, adapter in enumerate(self.projections[i].adapters):
            s, n = self.place[i, j]
            yield adapter, s, slice(*self.stacks[s].spans[n]), before + j

    def _cast(self) -> None:
        """The A's, stacked, and the B's, in the dtype of their products: by one copy of all that have another dtype or place."""
        there, here = [], []
        self.As, self.bs = [], []
        for stack in self.stacks:
            parts = [self._of(at).a for at in stack.adapters]
            whole = parts[0]
            if len(parts) > 1 or whole.dtype != self.thin:
                whole = whole.new_empty(stack.spans[-1][1], whole.shape[1], dtype=self.thin)
                there += parts
                here += [whole[begin:end] for begin, end in stack.spans]
            self.As.append(whole)
        for b in (a.b for p in self.projections for a in p.adapters):
            self.bs.append(b if b.dtype == self.thin else torch.empty_like(b, dtype=self.thin))
            if b.dtype != self.thin:
                there.append(b)
                here.append(self.bs[-1])
        if there:
            torch._foreach_copy_(here, there)

    def open(self) -> None:
        """Casts of the adapters, and weights for many products: for ``part``, of what has no dropout and no magnitude."""
        self._cast()
        self.projections = [dataclasses.replace(p, weight=p.weight.opened(self.dtype)) for p in self.projections]
        self.masks = [None] * len(self.As)

    def part(self, x: Tensor) -> Projections:
        """The same of some rows x, which it has taken; after ``open``."""
        part = copy.copy(self)
        part.xas = [x.to(self.thin) @ a.t() for a in self.As]
        return part

    def take(self, x: Tensor) -> None:
        """Casts of the adapters, and the products of x (M, K) with the A's."""
        self._cast()
        self.xas, self.masks = [], []
        for stack, a in zip(self.stacks, self.As):
            seen, mask = torch.native_dropout(x, stack.dropout, True) if stack.dropout else (x, None)
            self.xas.append(seen.to(self.thin) @ a.t())
            self.masks.append(mask)

    def outputs(self, rows: Rows, out: Tensor | None = None) -> list[Tensor]:
        """The y's (M, N), new, or the only one in ``out``, of the rows x; after ``take``."""
        ys: list[Tensor] = []
        self.zs, self.norms = [], []
        for i, p in enumerate(self.projections):
            y = None if p.weight.accumulates else p.weight.forward(rows, None)
            for adapter, s, span, n in self._spans(i):
                y = add_product(y, self.xas[s][:, span].to(self.dtype), self.bs[n].to(self.dtype).t(), adapter.scale, out)
            if p.weight.accumulates:
                y = p.weight.forward(rows, y)
            if out is not None and y is not out:
                y = out.copy_(y)
            bias = _summed_bias(p)
            if p.magnitude is not None:
                self.zs.append(y)
                self.norms.append(_norms(p, self.dtype, self.thin))
                y = times_columns(y, p.magnitude / self.norms[-1])
            ys.append(y if bias is None else y.add_(bias))
        return ys

    def outputs_again(self) -> list[Tensor]:
        """The y's, new, of what was kept, where every projection has a magnitude."""
        ys = [times_columns(z, p.magnitude / norm) for p, z, norm in zip(self.projections, self.zs, self.norms) if p.magnitude is not None]
        return [y if (bias := _summed_bias(p)) is None else y.add_(bias) for p, y in zip(self.projections, ys)]

    def input_kept(self, x: Rows) -> tuple[Hashable, list[Tensor]]:
        """What the backward needs of x, and under which key: x itself under None, or what the weights that learn need in its place; after ``outputs``."""
        of_weights = [p.weight.of_input(x) for p in self.projections if p.weight.learnable is not None and p.weight.learnable.requires_grad]
        if not of_weights or self.place or any(found is None or found[0] != of_weights[0][0] for found in of_weights if of_weights[0] is not None):
            return None, [x.rows]
        return (None, [x.rows]) if of_weights[0] is None else (of_weights[0][0], list(of_weights[0][1]))

    def taken(self) -> list[Tensor | None]:
        """What ``take`` made, to be kept for the backward."""
        return [*self.As, *self.bs, *self.xas, *self.masks]

    def kept(self) -> list[Tensor | None]:
        """What ``take`` and ``outputs`` made, to be kept for the backward."""
        return [*self.taken(), *self.zs, *self.norms]

    def restore(self, kept: Sequence[Tensor | None]) -> None:
        """Have what was kept, all of it or what was ``taken``."""
        kept, many = list(kept), len(self.stacks)
        first = lambda n: [kept.pop(0) for _ in range(n)]
        self.As, self.bs, self.xas, self.masks = first(many), first(len(self.place)), first(many), first(many)
        self.zs, self.norms = kept[: len(kept) // 2], kept[len(kept) // 2 :]

    def thin_gradients(self, dys: Sequence[Tensor], need: Sequence[Sequence[bool]]) -> None:
        """What follows from the gradients of the y's without x: those of B's, biases and magnitudes, and of the thin x A^T."""
        self.dy_rows = [Rows(dy) for dy in dys]
        self.grads = [[None] * len(n) for n in need]
        self.dxas = [dys[0].new_empty(dys[0].shape[0], stack.spans[-1][1], dtype=self.thin) for stack in self.stacks]
        zs, norms = iter(self.zs), iter(self.norms)
        for i, p in enumerate(self.projections):
            dy, grad, needs = dys[i], self.grads[i], need[i]
            total = dy.sum(0, dtype=acc(dy.dtype)) if needs[1] or any(needs[5::3]) else dy
            if needs[1]:
                grad[1] = total
            if p.magnitude is not None:
                z, norm = next(zs), next(norms)
                if needs[2]:
                    grad[2] = dot_columns(dy, z) / norm
                dy = times_columns(dy, p.magnitude / norm)
                self.dy_rows[i] = Rows(dy)
            wide = dy.to(self.thin)
            for j, (adapter, s, span, n) in enumerate(self._spans(i)):
                dxa = self.dxas[s][:, span]
                torch.addmm(dxa, wide, self.bs[n], beta=0, alpha=adapter.scale, out=dxa)
                if needs[3 + 3 * j + 1]:
                    grad[3 + 3 * j + 1] = add_product(None, wide.t(), self.xas[s][:, span], adapter.scale)
                if needs[3 + 3 * j + 2]:
                    grad[3 + 3 * j + 2] = total * adapter.scale

    def input_gradient(self, out: Tensor | None = None) -> Tensor:
        """dx (M, K), new, or in ``out``."""
        dx: Tensor | None = None
        for p, dy in zip(self.projections, self.dy_rows):
            if not p.weight.accumulates:
                dx = p.weight.backward(dy, dx)
        for dxa, a, mask in zip(self.dxas, self.As, self.masks):
            if mask is None:
                dx = add_product(dx, dxa.to(self.dtype), a.to(self.dtype), out=out)
        for p, dy in zip(self.projections, self.dy_rows):
            if p.weight.accumulates:
                dx = p.weight.backward(dy, dx)
        assert dx is not None
        for stack, dxa, a, mask in zip(self.stacks, self.dxas, self.As, self.masks):
            if mask is not None:
                dx.add_(torch.ops.aten.native_dropout_backward(dxa.to(self.dtype) @ a.to(self.dtype), mask, 1 / (1 - stack.dropout)))
        return dx if out is None or dx is out else out.copy_(dx)

    def weight_gradients(self, x: Rows, need: Sequence[Sequence[bool]]) -> list[Tensor | None]:
        """The gradients of all that ``Projection.tensors`` lists, in its dtypes."""
        for stack, dxa, mask in zip(self.stacks, self.dxas, self.masks):
            if any(need[i][3 + 3 * j] for i, j in stack.adapters):
                seen = x.rows if mask is None else torch.ops.aten.native_dropout_backward(x.rows, mask, 1 / (1 - stack.dropout))
                da = dxa.t() @ seen.to(self.thin)
                for (i, j), span in zip(stack.adapters, stack.spans):
                    self.grads[i][3 + 3 * j] = da[slice(*span)]
        flat: list[Tensor | None] = []
        for p, dy, grad, needs in zip(self.projections, self.dy_rows, self.grads, need):
            if needs[0]:
                grad[0] = p.weight.gradient(dy, x)
            flat += [g.to(t.dtype) if n else None for g, n, t in zip(grad, needs, p.tensors())]
        return flat


def _summed_bias(p: Projection) -> Tensor | None:
    bias = p.bias
    for adapter in p.adapters:
        if adapter.bias is not None:
            bias = adapter.scale * adapter.bias if bias is None else bias + adapter.scale * adapter.bias
    return bias
