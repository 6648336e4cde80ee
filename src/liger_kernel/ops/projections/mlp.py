"""Gated MLP: ``y = down (act(gate x * gate_multiplier) * up x) * down_multiplier``, as one node of
the graph (Shazeer, arXiv:2002.05202).

Shapes: x, y (..., H), gate, up (I, H), down (H, I).  M = product of the leading dims of x.

PyTorch computes the products. The forward saves gate x and up x, and x if gate or up learn; with
``recompute``, it saves x alone. The backward needs the activation for the gradient of ``down``. The
pass that makes the gradients of gate x and up x also writes the activation, into memory that the
node owns, so the backward uses three buffers (M, I). Autograd of the separate operations needs five
buffers and one more pass. If the graph is kept for another backward, or if hooks of other code have
seen gate x and up x, the backward copies them first.
``down_multiplier`` scales the activation, not y.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel._private import apply_of
from liger_kernel.ops._core import Case, Cost, T, acc, checks, launcher, nbytes, once_differentiable, op
from liger_kernel.ops._core.operator import autocast_dtype, rows_of, shaped, unlike, use_kernels
from liger_kernel.ops._core.saved import CHECKPOINT, HARMLESS, graph_is_kept, saving_hooks
from liger_kernel.ops.activations.glu import MAXIMA, Form, check_act, glu_bwd_, glu_fwd, reference as glu_reference
from liger_kernel.ops.projections.adapted import Group, Projection, Projections, rows_again
from liger_kernel.ops.projections.float8_training import Float8Trained, glu_and_maxima, known_amax, search
from liger_kernel.ops.projections.linear import dtypes_of, stays, without_autocast
from liger_kernel.ops.projections.tiled_mlp import TILE
from liger_kernel.ops.projections.weights import Dense, Dequantized, Operand, as_dtype


def reference(x, gate, up, down, *, act, gate_multiplier, down_multiplier, **how):
    form = dict(act=act, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    return F.linear(glu_reference(F.linear(x, gate), None if up is None else F.linear(x, up), **form), down)


def _form(gate_multiplier: float, down_multiplier: float) -> Form:
    return Form(gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


def _halves(g: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    return (g[:, : g.shape[1] // 2], g[:, g.shape[1] // 2 :]) if u is None else (g, u)


def projections(x: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """gate x and up x, or one tensor with both side by side, and None."""
    return x @ gate.t(), None if up is None else x @ up.t()


def output(
    g: Tensor, u: Tensor | None, down: Tensor, act: str, gate_multiplier: float, down_multiplier: float
) -> Tensor:
    """y from the results of ``projections``."""
    return glu_fwd(*_halves(g, u), act, *_form(gate_multiplier, down_multiplier)) @ down.t()


@launcher(
    "(Tensor dy, Tensor? x, Tensor gate, Tensor? up, Tensor down, Tensor(a!) g, Tensor(b!)? u, bool[] need, str act, "
    "float gate_multiplier,"
    " float down_multiplier) -> (Tensor dx, Tensor dgate, Tensor dup, Tensor ddown)"
)
def mlp_bwd(dy, x, gate, up, down, g, u, need, act, gate_multiplier, down_multiplier):
    """The gradients of x, gate, up and down; those that are not needed are empty. Overwrites g
    and u."""
    need_x, need_gate, need_up, need_down = need
    # multipliers are part of the activation, not of the products
    form = _form(gate_multiplier, down_multiplier)
    dx, dgate, dup, ddown = (dy.new_empty(0) for _ in range(4))
    if not (need_x or need_gate or need_up):
        return dx, dgate, dup, dy.t() @ glu_fwd(*_halves(g, u), act, *form) if need_down else ddown
    # the gradient of the activation, whose memory then takes the activation
    h = dy @ down
    glu_bwd_(h, *_halves(g, u), act, need_down, *form)  # now h holds act(g) u, and g and u hold their gradients
    if need_down:
        ddown = dy.t() @ h
    # before dx is allocated
    del h
    if need_x:
        dx = g @ gate
        if u is not None:
            dx.addmm_(u, up)
    if need_gate:
        dgate = g.t() @ x
    if need_up:
        dup = u.t() @ x
    return dx, dgate, dup, ddown


def _pack(ctx: Any, hooks: Any, saved: Iterable[Tensor | None]) -> None:
    """Save now for a backward, in a checkpoint: its recomputation ends when it has seen everything that
    was saved, so before the products that follow, which nobody needs."""
    ctx.packed, ctx.unpack = [t if t is None else hooks[0](t) for t in saved], hooks[1]


def _saved(ctx: Any) -> tuple[Sequence[Tensor | None], bool]:
    """What the forward has saved, and whether another backward may read it."""
    kept, saved = graph_is_kept(), ctx.saved_tensors  # raises in a second backward after the graph was freed
    if ctx.packed is not None:
        saved = [t if t is None else ctx.unpack(t) for t in ctx.packed]
        if not kept:  # free the hooks, because they hold the input of everything that was checkpointed
            ctx.packed = ctx.unpack = None
    return saved, kept


class LigerMLPFunction(torch.autograd.Function):
    """``apply(x, gate, up or None, down, gate_multiplier=1.0, down_multiplier=1.0, act="silu",
    recompute=False)``."""

    @staticmethod
    def forward(ctx, x, gate, up, down, gate_multiplier=1.0, down_multiplier=1.0, act="silu", recompute=False):
        ctx.form = act, gate_multiplier, down_multiplier
        hooks, owner = saving_hooks()
        ctx.unshared, ctx.packed = owner in HARMLESS and not torch.compiler.is_compiling(), None
        g, u = projections(rows_of(x), gate, up)
        # x is saved only for the gradients of gate and up, or to compute them again
        need_x = recompute or ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        saved = x if need_x else None, gate, up, down, *(() if recompute else (g, u))
        if hooks is not None and owner == CHECKPOINT:
            _pack(ctx, hooks, saved)
        else:
            ctx.save_for_backward(*saved)
        y = output(g, u, down, *ctx.form)
        return shaped(y, (*x.shape[:-1], down.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, gate, up, down, *projected), kept = _saved(ctx)
        shape, need = (*dy.shape[:-1], gate.shape[1]), ctx.needs_input_grad[:4]
        x = None if x is None else rows_of(x)
        # recomputed, if the forward saved none of them
        g, u = projected or projections(x, gate, up)
        # somebody else may read the saved tensors again
        if projected and (kept or not ctx.unshared):
            g, u = g.clone(), u if u is None else u.clone()
        gradients = mlp_bwd(rows_of(dy), x, gate, up, down, g, u, need, *ctx.form)
        dx, *dweights = (d if n else None for d, n in zip(gradients, need))
        return None if dx is None else dx.view(shape), *dweights, None, None, None, None


def _scaled(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype) / shape[-1] ** 0.5


def _args(lead: tuple[int, ...], H: int, I: int) -> dict:
    return dict(x=T((*lead, H)), gate=T((I, H), _scaled), up=T((I, H), _scaled), down=T((H, I), _scaled))


def _cost(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, **_: object) -> Cost:
    M, H, I = x.numel() // x.shape[-1], *down.shape
    weights = 3 * down.nbytes
    return Cost(
        nbytes(x, x) + weights,
        nbytes(x, x, x) + 2 * weights,
        gemms=([(M, H, I)] * 2 + [(M, I, H)], [(M, I, H)] * 2 + [(I, H, M)] * 2 + [(M, H, I), (H, I, M)]),
    )


@op(
    reference=reference,
    cases=[
        Case("llama", _args((2, 9), 32, 48)),
        Case("gemma", _args((17,), 24, 40) | dict(act="gelu_tanh")),
        Case("phi3", _args((2, 5), 16, 24) | dict(gate=T((48, 16), _scaled), up=None)),
        Case("falcon-h1", _args((12,), 24, 33) | dict(gate_multiplier=0.37, down_multiplier=1.9)),
        Case("recomputed", _args((6,), 16, 40) | dict(recompute=True)),
        Case("odd", _args((1,), 7, 5)),
    ],
    cost=_cost,
)
def mlp(
    x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, *,
    act: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0, recompute: bool = False,
) -> Tensor:  # fmt: skip
    """A gated MLP that saves two of its three intermediates for the backward, or none with
    ``recompute``.

    x (..., H); gate and up (I, H), or no up and gate (2 I, H) with up's rows after gate's; down (H,
    I). All have one dtype, which is autocast's if it is on, and any strides. ``act`` as in ``glu``.
    Returns (..., H).
    """
    checks.floating("mlp", x=x)
    if not x.ndim:
        raise ValueError("mlp: x must have at least one dim, got shape ()")
    H = x.shape[-1]
    if gate.ndim != 2 or gate.shape[1] != H:
        raise ValueError(f"mlp: gate must have shape (I, {H}), got {tuple(gate.shape)}")
    if up is None and gate.shape[0] % 2:
        raise ValueError(f"mlp: gate must have shape (2 I, {H}) where up is None, got {tuple(gate.shape)}")
    check_act("mlp", act)
    if (dtype := autocast_dtype(x)) is not None:
        # only up may be None
        x, gate, up, down = (t if t is None else t.to(dtype) for t in (x, gate, up, down))  # type: ignore[assignment]
    I = gate.shape[0] // 2 if up is None else gate.shape[0]
    for name, p, shape in (("gate", gate, gate.shape), ("up", up, gate.shape), ("down", down, (H, I))):
        checks.shape("mlp", shape, **{name: p})
        if p is not None and p.dtype != x.dtype:
            raise ValueError(f"mlp: {name} must have x's dtype, {x.dtype}, got {p.dtype}")
    if not use_kernels(x, fusible=True):
        return reference(x, gate, up, down, act=act, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    return LigerMLPFunction.apply(x, gate, up, down, gate_multiplier, down_multiplier, act, recompute)


class AdaptedMLPFunction(torch.autograd.Function):
    """``apply(x, group of x, group of down, thin dtype, act, gate_multiplier, down_multiplier,
    recompute, ends, tiles, *their tensors)``: ``LigerMLPFunction`` for any ``Projection``: gate and
    up, or one projection that is both side by side.

    ``ends``: the MLP is the last part of a checkpointed layer. Then a recomputation stops before
    the first product, and the backward itself computes gate x and up x, once, as the recomputation
    would have done. In this case, and with more than one of ``tiles``, the forward and the backward
    hold one tile of tokens at a time, and x alone is saved.
    """

    @staticmethod
    def forward(ctx, x, inner, outer, thin, act, gate_multiplier, down_multiplier, recompute, ends, tiles, *tensors):
        ctx.groups, ctx.thin, ctx.form = (inner, outer), thin, (act, *_form(gate_multiplier, down_multiplier))
        hooks, owner = saving_hooks()
        ctx.unshared, ctx.packed, ctx.recompute = owner in HARMLESS, None, recompute
        checkpointed, (down,) = hooks is not None and owner == CHECKPOINT, outer.projections
        casts = inner.casts or outer.casts
        tileable = checkpointed and ends and all(map(_tileable, (*inner.projections, down)))
        ctx.tiles = _tiles(x.numel() // max(1, x.shape[-1]), tiles) if tiles > 1 or tileable else []
        if ctx.tiles and checkpointed:
            _pack(ctx, hooks, (x, *tensors))
        with without_autocast(x.device.type):
            gate_up, last = Projections(inner, x.dtype, thin), Projections(outer, x.dtype, thin)
            # a caller that recomputes keeps x: casts of it need not outlive the forward
            stay, of_x = recompute or (casts and stays(x)), [x]
            rows = Operand(rows_of(x), learns=any(ctx.needs_input_grad), stays=stay)
            ctx.rows_again, ctx.shape, ctx.dtype = rows_again, x.shape, x.dtype
            if ctx.tiles:
                y, kept, of_last = _tiled_outputs(gate_up, last, rows.rows, ctx.form, ctx.tiles), [], []
            else:
                # thin products of the adapters first: the large ones add to them
                gate_up.apply_a(rows.rows)
                if casts:
                    search([*((p.weight, rows) for p in inner.projections), (down.weight, None)])
                projected = gate_up.outputs(rows)
                if not recompute:
                    ctx.rows_again, of_x = gate_up.input_kept(rows, x)
                scaled = len(gate_up.zs) == len(projected)  # the saved z gives the output after the magnitude
                kept = gate_up.products_of_a() if recompute else [*(() if scaled else projected), *gate_up.kept()]
                # not saved: the backward makes it again while it differentiates it
                h = _activated(projected, ctx.form, down)
                last.apply_a(h.rows)
                if checkpointed and down.magnitude is None:
                    _pack(ctx, hooks, (*of_x, *tensors, *kept, *last.products_of_a()))
                (y,) = last.outputs(h)  # the backward computes h again
                of_last = last.kept()
            ctx.places = tuple(itertools.accumulate((len(of_x), len(tensors), len(kept))))
        if ctx.packed is None:
            ctx.save_for_backward(*of_x, *tensors, *kept, *of_last)
        return shaped(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, kept_graph = _saved(ctx)
        first, second, third = ctx.places
        of_x, tensors, kept, of_last = saved[:first], saved[first:second], list(saved[second:third]), saved[third:]
        rows = ctx.rows_again(of_x)
        del saved, of_x
        inner, outer = ctx.groups
        begin = len(inner.tensors)
        need_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[10:]
        needs = inner.split(needs) + outer.split(needs[begin:])
        inner, outer = inner.of(tensors[:begin]), outer.of(tensors[begin:])
        first = inner.projections
        gate_up, last = Projections(inner, ctx.dtype, ctx.thin), Projections(outer, ctx.dtype, ctx.thin)
        dys = rows_of(dy)
        if ctx.tiles:
            dx, grads = _tiled_gradients(gate_up, last, rows.rows, dys, need_x, needs, ctx.form, ctx.tiles)
        else:
            last.restore(of_last)
            if ctx.recompute:
                gate_up.restore(kept)
                projected = gate_up.outputs(rows)
            # what the magnitudes scale was saved, and gives the outputs again
            elif all(p.magnitude is not None for p in first):
                gate_up.restore(kept)
                projected = gate_up.outputs_again()
            else:
                projected = kept[: len(first)]
                gate_up.restore(kept[len(first) :])
                if kept_graph or not ctx.unshared or gate_up.zs:
                    projected = [t.clone() for t in projected]
            dx, grads = _gradients(gate_up, last, projected, rows, dys, need_x, needs, ctx.form)
        return (
            None if dx is None else dx.view(ctx.shape),
            *[None] * 9,
            *[g if g is None else as_dtype(g, t.dtype) for g, t in zip(grads, tensors)],
        )


def _tiles(rows: int, count: int) -> list[slice]:
    """``count`` equal tiles of the tokens; with 1, so many that they cost no time: at most
    eight."""
    # tiles of equal size, the last one shorter
    size = -(-rows // (count if count > 1 else max(1, min(rows // TILE, 8))))
    return unlike([slice(start, start + size) for start in range(0, max(rows, 1), max(size, 1))])


def _tileable(p: Projection) -> bool:
    """Whether a projection may run tile by tile at no more cost: a frozen weight in 16 or 32
    bits, or dequantised to it, and nothing random."""
    weight = p.weight
    frozen = isinstance(weight, Dequantized) or (
        isinstance(weight, Dense) and weight.learnable is not None and not weight.learnable.requires_grad
    )
    return frozen and p.magnitude is None and not any(a.dropout for a in p.adapters)


def _tiled_outputs(gate_up: Projections, last: Projections, x: Tensor, form: tuple, tiles: list[slice]) -> Tensor:
    """y of x, tile by tile: no tensor as wide as gate x is ever stored for all tokens."""
    # the only tensor of all tokens
    y = x.new_empty(x.shape[0], last.projections[0].weight.shape[0])
    gate_up.open()
    last.open()

    def compute(tile: slice) -> None:
        h = _activated(gate_up.part(x[tile]).outputs(Operand(x[tile], learns=False)), form, last.projections[0])
        last.part(h.rows).outputs(h, y[tile])

    for tile in tiles:
        compute(tile)
    return y


def _tiled_gradients(
    gate_up: Projections, last: Projections, x: Tensor, dy: Tensor, need_x: bool, needs: list[list[bool]], form: tuple,
    tiles: list[slice],
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """``_gradients``, tile by tile, from projections that are computed again: no tensor as wide as
    gate x is ever stored for all tokens.

    The gradients of all tiles are added in 32 bits: a product of a tile adds to that of a weight in
    place, and those of adapters and biases are small.
    """
    dx = x.new_empty(x.shape) if need_x else None
    weights = [p.weight for p in (*gate_up.projections, *last.projections)]
    # in 32 bits: a sum of many tiles in 16 bits would be rounded at each
    sums = [x.new_zeros(w.shape, dtype=acc(x.dtype)) if n[0] else None for w, n in zip(weights, needs)]
    total: list[Tensor | None] = []
    gate_up.open()
    last.open()

    def compute(tile: slice) -> list[Tensor | None]:
        first, rows = gate_up.part(x[tile]), Operand(x[tile])
        projected = first.outputs(rows)
        # only adapters read it
        h = _activated(projected, form, last.projections[0]).rows if last.As else x[tile]
        of_tile = (first, last.part(h), projected, rows, dy[tile], need_x, needs, form)
        return _gradients(*of_tile, None if dx is None else dx[tile], sums)[1]

    for tile in tiles:
        wide = [g if g is None else g.to(acc(g.dtype)) for g in compute(tile)]
        total = [t if t is None else t.add_(g) for t, g in zip(total, wide)] if total else wide
    # each comes first among the tensors of its projection
    of_weights = itertools.accumulate((len(n) for n in needs[:-1]), initial=0)
    for at, of_weight in zip(of_weights, sums):
        total[at] = of_weight
    return dx, total


def _activated(projected: list[Tensor], form: tuple, down: Projection) -> Operand:
    """The activation; with its largest values, if ``down`` casts it by them."""
    halves = _halves(*_pair(projected))
    if not _cast_as_a_whole(down):
        return Operand(glu_fwd(*halves, *form), learns=False)
    h, maxima = glu_and_maxima(*halves, *form)
    return Operand(h, learns=False, made=known_amax(maxima))


def _cast_as_a_whole(*projections: Projection) -> bool:
    """Whether one of the layers casts its input, or its output's gradient, with one scale for
    the whole tensor."""
    return any(isinstance(p.weight, Float8Trained) and not p.weight.recipe.by_rows for p in projections)


def _gradients(
    gate_up: Projections, last: Projections, projected: list[Tensor], x: Operand, dy: Tensor, need_x: bool,
    needs: list[list[bool]], form: tuple, out: Tensor | None = None, sums: list[Tensor | None] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradients of x, in ``out`` if it is given, and of all tensors of the projections.
    Overwrites ``projected``.

    ``sums``: for each weight, what its gradient is added to; it then has no other.
    """
    of_first, of_second = (None, None) if sums is None else (sums[:-1], sums[-1:])
    # from the outside in: down, the activation, then gate and up
    last.thin_gradients([Operand(dy)], needs[-1:])
    h = last.input_gradient()
    cast_whole = _cast_as_a_whole(*gate_up.projections, *last.projections)
    maxima = h.new_zeros(3, MAXIMA, dtype=torch.float32) if cast_whole else None
    # now h holds the activation, and ``projected`` holds its gradients
    glu_bwd_(h, *_halves(*_pair(projected)), form[0], any(needs[-1]), *form[1:], maxima=maxima)
    known = [{}] * 3 if maxima is None else [known_amax(t) for t in (maxima[0], maxima[1], maxima[2])]
    activation = Operand(h, made=known[0], ours=True)
    del h
    # while the activation exists
    of_down = last.weight_gradients(activation, needs[-1:], of_second)
    del activation
    if len(projected) == 1:
        dys = [
            Operand(
                projected[0], made={} if maxima is None else known_amax(torch.maximum(maxima[1], maxima[2])), ours=True
            )
        ]
    else:
        dys = [Operand(d, made=made, ours=True) for d, made in zip(projected, known[1:])]
    weights = [p.weight for p in gate_up.projections if isinstance(p.weight, Float8Trained)]
    weights = [weight for weight in weights if weight.recipe.weight_gradient]
    if not gate_up.As and out is None and len(weights) == len(gate_up.projections):
        # that of gate, which is used before that of up is cast
        dys[-1].memory = projected[0] if len(dys) > 1 else None
        if len({weight.recipe for weight in weights}) == 1 and any(each[0] for each in needs[:-1]):
            weights[0].input_cast(x)  # which they share, so that nobody needs x
            x.rows = x.rows.new_empty(0)
        dx, of_first_two = gate_up.gradients_in_turn(dys, x, needs[:-1], need_x, of_first)
        return dx, [*of_first_two, *of_down]
    gate_up.thin_gradients(dys, needs[:-1])
    dx = gate_up.input_gradient(out) if need_x else None
    return dx, [*gate_up.weight_gradients(x, needs[:-1], of_first), *of_down]


def _pair(projected: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return projected[0], projected[1] if len(projected) > 1 else None


def adapted_mlp(
    x: Tensor, first: Sequence[Projection] | Group, down: Projection | Group, *,
    act: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0, recompute: bool = False,
    ends: bool = False, tiles: int = 1,
) -> Tensor:  # fmt: skip
    """``mlp`` for projections with any storage and with adapters: gate and up, or one that is both
    side by side, and down.

    ``ends``: nothing after the MLP in its layer saves anything for the backward. ``tiles`` of the
    tokens, for projections without dropout or magnitude.
    """
    inner = first if isinstance(first, Group) else Group(first)
    outer = down if isinstance(down, Group) else Group((down,))
    dtype, thin = dtypes_of(x, [*inner.projections, *outer.projections])
    how = thin, act, gate_multiplier, down_multiplier, recompute, ends, tiles
    args = as_dtype(x, dtype), inner, outer, *how, *inner.tensors, *outer.tensors
    return apply_of(AdaptedMLPFunction, args)(*args)
