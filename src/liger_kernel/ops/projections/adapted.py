"""Linear layers with low-rank adapters (LoRA, Hu et al., arXiv:2106.09685; DoRA, Liu et al.,
arXiv:2402.09353) as nodes of the graph.

A projection of x (M, K) is  z = x W^T + sum_j s_j drop_j(x) A_j^T B_j^T,  A_j (r_j, K), B_j (N,
r_j);  y = z + bias, or, with a magnitude m (N,),
y = m / |W + s B A| * z + bias. The gradient treats the norms of the rows as constants.

``Projections`` holds all projections of one input while a node runs. It stacks the A's that read x
itself, so that x is read once for all of them. The product with a B is written first, and the large
product adds to it in its epilogue. The node saves for the backward: x, the thin x A^T (M, r), the
dropout masks, z if there is a magnitude, and the adapters in the dtype of the products if they have
another. It saves no cast of x and no output of an adapter.

Dtypes: the products with W are in ``dtype``. Without autocast, adapters in 32 bits beside products
in 16 bits are multiplied in 32 bits, as in PEFT. The thin results are then cast to 16 bits before
the products that add to y and dx; in fp16, whose range they may leave, these products stay in 32
bits.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import acc
from liger_kernel.ops._core.operator import rows_of
from liger_kernel.ops.projections.float8_training import Float8Trained, search
from liger_kernel.ops.projections.magnitude import dot_columns, row_norms, times_columns
from liger_kernel.ops.projections.weights import Operand, Weight, add_product, added, as_dtype, product_in


@dataclass(frozen=True, eq=False)
class Adapter:
    """``scale * (drop(x) a^T b^T + bias)``: a (r, K), b (N, r), bias (N,) or None."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0
    bias: Tensor | None = None

    @staticmethod
    def scaled(
        a: Tensor, b: Tensor, scale: float | Tensor, dropout: float = 0.0, bias: Tensor | None = None
    ) -> Adapter:
        """An adapter whose scale may be a tensor: of one element, or (N,). Then it multiplies b and
        bias: autograd computes its gradient, and the host does not wait for its value."""
        if not isinstance(scale, Tensor):
            return Adapter(a, b, float(scale), dropout, bias)
        # b and bias have N rows; a scale of one element broadcasts by itself
        by_rows = scale.reshape(-1, 1) if scale.ndim == 1 else scale
        return Adapter(
            a, (b * by_rows).to(b.dtype), 1.0, dropout, bias if bias is None else (bias * scale).to(bias.dtype)
        )


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear layer: its weight, bias (N,), adapters, and the magnitude (N,) if its only
    adapter is a DoRA adapter."""

    weight: Weight
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    magnitude: Tensor | None = None

    @property
    def gains(self) -> bool:
        """Whether a node of ours helps: there are adapters, or products that PyTorch does not
        have."""
        return bool(self.adapters) or self.weight.gains

    def tensors(self) -> list[Tensor | None]:
        """All tensors that may have a gradient, in the order of
        ``Projections.weight_gradients``."""
        return [
            self.weight.learnable,
            self.bias,
            self.magnitude,
            *(t for a in self.adapters for t in (a.a, a.b, a.bias)),
        ]

    def of(self, tensors: Sequence[Tensor | None]) -> Projection:
        """The same projection with other tensors, which come in the order of ``tensors``."""
        learnable, bias, magnitude, *rest = tensors
        adapters = tuple(
            dataclasses.replace(a, a=rest[3 * j], b=rest[3 * j + 1], bias=rest[3 * j + 2])
            for j, a in enumerate(self.adapters)
        )
        return Projection(dataclasses.replace(self.weight, learnable=learnable), bias, adapters, magnitude)


class _Stack(NamedTuple):
    """Adapters that read the same input: several that read x, or one that reads x after its
    dropout. ``sizes``: the stacked rows of each."""

    adapters: list[tuple[int, int]]  # projection, adapter
    numbers: list[int]  # of each among all adapters
    sizes: list[int]
    rows: int
    dropout: float


class _Place(NamedTuple):
    """Where an adapter is: the index of its stack, its rows there, and its number among all
    adapters."""

    stack: int
    span: slice
    number: int


def _layout(adapters: list[list[tuple[int, float]]]) -> tuple[list[_Stack], list[list[_Place]]]:
    """The stacks of adapters, and the places of those of each projection, from the rank and
    dropout of each adapter of each projection."""
    every = [(i, j) for i, own in enumerate(adapters) for j in range(len(own))]
    # adapters with dropout see inputs of their own, each with its own mask
    plain = [(i, j) for i, j in every if not adapters[i][j][1]]
    stacks: list[_Stack] = []
    found: dict[tuple[int, int], tuple[int, slice]] = {}
    for group in [plain] * bool(plain) + [[at] for at in every if at not in plain]:
        ends = list(itertools.accumulate((adapters[i][j][0] for i, j in group), initial=0))
        i, j = group[0]
        sizes = [adapters[i][j][0] for i, j in group]
        stacks.append(_Stack(group, [every.index(at) for at in group], sizes, ends[-1], adapters[i][j][1]))
        found |= {at: (len(stacks) - 1, slice(*span)) for at, span in zip(group, itertools.pairwise(ends))}
    numbers = itertools.count()
    return stacks, [[_Place(*found[i, j], next(numbers)) for j in range(len(own))] for i, own in enumerate(adapters)]


class Group:
    """Projections of one input, with all that follows from them alone: who calls them again and
    again keeps it."""

    def __init__(self, projections: Sequence[Projection]):
        self.projections = tuple(projections)
        each = [p.tensors() for p in projections]
        self.tensors = [t for own in each for t in own]
        # of each projection in the list of all tensors
        ends = list(itertools.accumulate(map(len, each), initial=0))
        self.parts = [slice(*part) for part in itertools.pairwise(ends)]
        self.stacks, self.places = _layout([[(a.a.shape[0], a.dropout) for a in p.adapters] for p in projections])
        # the largest values of operands are searched, or casts of them kept
        self.casts = any([isinstance(p.weight, Float8Trained) for p in projections])

    def of(self, tensors: Sequence[Tensor | None]) -> Group:
        """The same projections with other tensors, which come in the order of ``tensors``."""
        # hooks may have moved saved tensors; mostly nothing was exchanged, and nothing need be built
        if all(map(operator.is_, tensors, self.tensors)):
            return self
        other = copy.copy(self)
        other.projections = tuple([p.of(own) for p, own in zip(self.projections, self.split(tensors))])
        other.tensors = list(tensors)
        return other

    def split(self, values: Sequence) -> list[Sequence]:
        """Values in the order of ``tensors``, for each projection."""
        return [values[part] for part in self.parts]


def may_overflow(dtype: torch.dtype, thin: torch.dtype) -> bool:
    """Whether thin results may leave the range of ``dtype``, while those of PEFT, in the dtype
    ``thin``, do not."""
    return dtype == torch.float16 and thin != dtype


class Projections:
    """The projections of one input while a node runs."""

    def __init__(self, group: Group, dtype: torch.dtype, thin: torch.dtype):
        self.group, self.projections, self.dtype, self.thin = group, group.projections, dtype, thin
        self.adding = (
            thin if may_overflow(dtype, thin) else dtype
        )  # the dtype of the products of thin tensors that add to y and dx
        self.stacks, self.places = group.stacks, group.places
        self.As: list = []
        self.bs: list = []
        self.xas: list = []
        self.masks: list = []
        self.zs: list = []
        self.norms: list = []
        self.dxas: list[Tensor] = []
        self.dy_rows: list[Operand] = []
        self.grads: list[list] = []

    def _of(self, at: tuple[int, int]) -> Adapter:
        return self.projections[at[0]].adapters[at[1]]

    def _cast(self) -> None:
        """Stack the A's, and cast the A's and B's to the dtype of their products. One copy moves
        everything that has another dtype or place."""
        # parts of a stack are copied into it; what needs neither a cast nor a place stays where it
        # is
        there: list[Tensor] = []
        here: list[Tensor] = []
        self.As, self.bs = [], []
        for stack in self.stacks:
            parts = [self._of(at).a for at in stack.adapters]
            whole = parts[0]
            if len(parts) > 1 or whole.dtype != self.thin:
                whole = whole.new_empty(stack.rows, whole.shape[1], dtype=self.thin)
                there += parts
                here += whole.split_with_sizes(stack.sizes) if len(parts) > 1 else [whole]
            self.As.append(whole)
        for b in (a.b for p in self.projections for a in p.adapters):
            self.bs.append(b if b.dtype == self.thin else torch.empty_like(b, dtype=self.thin))
            if b.dtype != self.thin:
                there.append(b)
                here.append(self.bs[-1])
        if there:
            torch._foreach_copy_(here, there)

    def open(self) -> None:
        """Cast the adapters, and prepare the weights for many products. Call it before ``part``;
        there must be no dropout and no magnitude."""
        # once for all tiles
        self._cast()
        self.projections = tuple([dataclasses.replace(p, weight=p.weight.opened(self.dtype)) for p in self.projections])
        self.masks = [None] * len(self.As)

    def part(self, x: Tensor) -> Projections:
        """The same projections of some of the rows, after their ``apply_a(x)``. Call ``open``
        first."""
        # casts and weights are shared; only the thin products are those of the tile
        part = copy.copy(self)
        part.xas = [F.linear(as_dtype(x, self.thin), a) for a in self.As]
        return part

    def apply_a(self, x: Tensor) -> None:
        """Cast the adapters, and compute the products of x (M, K) with the A's."""
        self._cast()
        self.xas, self.masks = [], []
        for stack, a in zip(self.stacks, self.As):
            seen, mask = torch.native_dropout(x, stack.dropout, True) if stack.dropout else (x, None)
            # one product for all adapters of a stack
            self.xas.append(F.linear(as_dtype(seen, self.thin), a))
            self.masks.append(mask)

    def outputs(self, rows: Operand, out: Tensor | None = None) -> list[Tensor]:
        """The y (M, N) of each projection of the rows x, in new memory, or in ``out`` if there
        is only one. Call ``apply_a`` first."""
        ys: list[Tensor] = []
        self.zs, self.norms = [], []
        # FP8: the largest values of all operands in one launch
        if self.group.casts:
            search((p.weight, rows) for p in self.projections)
        xas = self._parts(self.xas)
        for i, p in enumerate(self.projections):
            # a product that cannot add to y runs first
            y = None if p.weight.accumulates else p.weight.forward(rows, None)
            wide: Tensor | None = None
            for adapter, place in zip(p.adapters, self.places[i]):
                xa, b = as_dtype(xas[place.number], self.adding), as_dtype(self.bs[place.number], self.adding)
                # the thin product is written first, the large one adds to it in its epilogue
                if self.adding == self.dtype:
                    y = add_product(y, xa, b.t(), adapter.scale, out)
                else:
                    wide = add_product(wide, xa, b.t(), adapter.scale)
            if p.weight.accumulates:
                y = p.weight.forward(rows, y)
            if wide is not None:
                y = added(y, wide) if p.magnitude is None else y + wide
            if out is not None and y is not out:
                y = out.copy_(y)
            if p.magnitude is not None:
                ((stack, span, number),) = self.places[i]
                a = self.As[stack][span]
                self.zs.append(y)
                # of the dense weight with its adapter: made for this, and not kept
                self.norms.append(row_norms(p.weight.dense(self.dtype), a, self.bs[number], p.adapters[0].scale))
                y = self._scaled(y, p.magnitude, self.norms[-1])
            ys.append(added(y, _summed_bias(p)))
        return ys

    def outputs_again(self) -> list[Tensor]:
        """The y of each projection again, in new memory, from what was saved. Every projection
        must have a magnitude."""
        ys = [
            self._scaled(z, p.magnitude, norm)
            for p, z, norm in zip(self.projections, self.zs, self.norms)
            if p.magnitude is not None
        ]
        return [added(y, _summed_bias(p)) for p, y in zip(self.projections, ys)]

    def _parts(self, thin: list[Tensor]) -> dict[int, Tensor]:
        """The columns of each adapter in the products of all stacks."""
        found: dict[int, Tensor] = {}
        for stack, whole in zip(self.stacks, thin):
            parts = whole.split_with_sizes(stack.sizes, 1) if stack.sizes[1:] else (whole,)
            found.update(zip(stack.numbers, parts))
        return found

    def _scaled(self, z: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
        return as_dtype(times_columns(z, magnitude / norm), self.dtype)

    def input_kept(
        self, rows: Operand, x: Tensor
    ) -> tuple[Callable[[Sequence[Tensor | None]], Operand], list[Tensor | None]]:
        """What the backward needs from x, and a function that makes the rows from it: x itself,
        or what trained weights need. Call ``outputs`` first."""
        if self.stacks:  # adapters multiply x itself
            return rows_again, [x]
        trained = [
            p.weight for p in self.projections if p.weight.learnable is not None and p.weight.learnable.requires_grad
        ]
        if not trained:  # frozen weights alone: nobody reads x again
            nothing = rows.rows.new_empty(0)
            return lambda saved: Operand(nothing), []
        # a trained weight in FP8 needs a cast of x and not x
        found = [weight.of_input(rows) for weight in trained]
        first = found[0]
        # weights that need different things of x share x itself
        if first is None or any(other is None or other[0] != first[0] for other in found):
            return rows_again, [x]
        key, tensors = first
        weight, dtype = trained[0], rows.dtype

        def again(saved: Sequence[Tensor | None]) -> Operand:
            x, *rest = saved
            return Operand(
                torch.empty(0, dtype=dtype) if x is None else rows_of(x), made={key: weight.made_again(key, rest)}
            )

        return again, [x if rows.stays else None, *tensors]

    def products_of_a(self) -> list[Tensor | None]:
        """The results of ``apply_a``, to be saved for the backward."""
        return [*self.As, *self.bs, *self.xas, *self.masks]

    def kept(self) -> list[Tensor | None]:
        """The results of ``apply_a`` and ``outputs``, to be saved for the backward."""
        return [*self.products_of_a(), *self.zs, *self.norms]

    def restore(self, kept: Sequence[Tensor | None]) -> None:
        """Put back what the forward saved: the tensors of ``kept()`` or of ``products_of_a()``."""
        many = len(self.stacks)
        sizes, each = (many, sum(map(len, self.places)), many, many), iter(kept)
        self.As, self.bs, self.xas, self.masks = [list(itertools.islice(each, n)) for n in sizes]
        left = list(each)  # as many z as norms
        self.zs, self.norms = left[: len(left) // 2], left[len(left) // 2 :]

    def thin_gradients(self, dy_rows: Sequence[Operand], need: Sequence[Sequence[bool]]) -> None:
        """Compute the gradients that need the gradients of the y's but not x: those of the B's,
        biases and magnitudes, and of the thin x A^T."""
        self.dy_rows = list(dy_rows)
        dys = [rows.rows for rows in dy_rows]
        self.grads = [[None] * len(n) for n in need]
        self.dxas = [dys[0].new_empty(dys[0].shape[0], stack.rows, dtype=self.thin) for stack in self.stacks]
        zs, norms = iter(self.zs), iter(self.norms)
        xas, dxas = self._parts(self.xas), self._parts(self.dxas)
        for i, p in enumerate(self.projections):
            dy, grad, needs = dys[i], self.grads[i], need[i]
            # one sum for the bias of the layer and those of its adapters
            total = dy.sum(0, dtype=acc(dy.dtype)) if needs[1] or any(needs[5::3]) else dy
            if needs[1]:
                grad[1] = total
            if p.magnitude is not None:
                z, norm = next(zs), next(norms)
                if needs[2]:
                    grad[2] = dot_columns(dy, z) / norm
                # from here on the gradient of z, as the norms are constants
                dy = times_columns(dy, p.magnitude / norm)
                self.dy_rows[i] = Operand(dy)
            wide = as_dtype(dy, self.thin) if p.adapters else dy
            for j, (adapter, (_, _, n)) in enumerate(zip(p.adapters, self.places[i])):
                # straight into its columns of the stack's gradient
                torch.addmm(dxas[n], wide, self.bs[n], beta=0, alpha=adapter.scale, out=dxas[n])
                if needs[3 + 3 * j + 1]:
                    grad[3 + 3 * j + 1] = product_in(adapter.b.dtype, wide.t(), xas[n], adapter.scale)
                if needs[3 + 3 * j + 2]:
                    grad[3 + 3 * j + 2] = total * adapter.scale

    def input_gradient(self, out: Tensor | None = None) -> Tensor:
        """Return dx (M, K), in ``out`` if it is given."""
        dx: Tensor | None = None
        if self.group.casts:
            search((p.weight, dy) for p, dy in zip(self.projections, self.dy_rows))
        for p, dy in zip(self.projections, self.dy_rows):
            if not p.weight.accumulates:
                dx = p.weight.backward(dy, dx)
        wide: Tensor | None = None
        # thin products first, to which the large ones add
        for dxa, a, mask in zip(self.dxas, self.As, self.masks):
            if mask is None and self.adding == self.dtype:
                dx = add_product(dx, as_dtype(dxa, self.dtype), as_dtype(a, self.dtype), out=out)
            elif mask is None:
                wide = add_product(wide, dxa, as_dtype(a, self.adding))
        for p, dy in zip(self.projections, self.dy_rows):
            if p.weight.accumulates:
                dx = p.weight.backward(dy, dx)
        assert dx is not None
        dx = added(dx, wide)
        # through a dropout, the gradient is masked before it is added
        for stack, dxa, a, mask in zip(self.stacks, self.dxas, self.As, self.masks):
            if mask is not None:
                dx.add_(
                    torch.ops.aten.native_dropout_backward(
                        as_dtype(dxa, self.adding) @ as_dtype(a, self.adding), mask, 1 / (1 - stack.dropout)
                    )
                )
        return dx if out is None or dx is out else out.copy_(dx)

    def weight_gradients(
        self, x: Operand, need: Sequence[Sequence[bool]], totals: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """The gradient of each tensor that ``Projection.tensors`` lists, in the dtype of that
        tensor.

        ``totals``: for each weight, what its gradient is added to in place; then the list has None
        for it.
        """
        for stack, dxa, mask in zip(self.stacks, self.dxas, self.masks):
            if any(need[i][3 + 3 * j] for i, j in stack.adapters):
                # the input as its adapters saw it
                seen = (
                    x.rows
                    if mask is None
                    else torch.ops.aten.native_dropout_backward(x.rows, mask, 1 / (1 - stack.dropout))
                )
                da = product_in(self._of(stack.adapters[0]).a.dtype, dxa.t(), as_dtype(seen, self.thin))
                parts = da.split_with_sizes(stack.sizes) if stack.sizes[1:] else (da,)
                for (i, j), part in zip(stack.adapters, parts):
                    self.grads[i][3 + 3 * j] = part
        flat: list[Tensor | None] = []
        there: list[Tensor] = []
        here: list[Tensor] = []
        tensors = self.group.split(self.group.tensors)
        for i, (p, dy, grad, needs) in enumerate(zip(self.projections, self.dy_rows, self.grads, need)):
            total = None if totals is None else totals[i]
            # tiles: all of them add to one sum
            if total is not None:
                p.weight.add_gradient(total, dy, x)
            elif needs[0]:
                grad[0] = p.weight.gradient(dy, x)
            for place, (g, n, t) in enumerate(zip(grad, needs, tensors[i])):
                if g is None or not n or t is None:
                    g = None
                elif place >= 3 and g.dtype != t.dtype:  # of an adapter, so small that all may be there in both dtypes
                    there.append(g)
                    g = torch.empty_like(g, dtype=t.dtype)
                    here.append(g)
                flat.append(g if g is None else as_dtype(g, t.dtype))
        if there:
            torch._foreach_copy_(here, there)
        self.dy_rows = []
        return flat

    def gradients_in_turn(
        self, dys: list[Operand], x: Operand, need: Sequence[Sequence[bool]], need_x: bool,
        totals: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
        """dx and the gradients of all tensors, without adapters and magnitudes: nothing that was
        made of one dy is there while the next is used.

        Empties ``dys``.
        """
        dx: Tensor | None = None
        flat: list[Tensor | None] = []
        for i, p in enumerate(self.projections):
            # a layer by itself, so that the casts of one gradient are freed before the next is cast
            one, dy = Projections(Group((p,)), self.dtype, self.thin), dys.pop(0)
            one.restore([])
            one.thin_gradients([dy], need[i : i + 1])
            dx = p.weight.backward(dy, dx) if need_x else None
            flat += one.weight_gradients(x, need[i : i + 1], None if totals is None else totals[i : i + 1])
            del dy
        return dx, flat


def rows_again(saved: Sequence[Tensor | None]) -> Operand:
    """The rows of a node that saved x itself."""
    (x,) = saved
    assert x is not None
    return Operand(rows_of(x))


def _summed_bias(p: Projection) -> Tensor | None:
    bias = p.bias
    for adapter in p.adapters:
        if adapter.bias is not None:
            bias = adapter.scale * adapter.bias if bias is None else bias + adapter.scale * adapter.bias
    return bias
