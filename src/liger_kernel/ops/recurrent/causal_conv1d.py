"""The short convolution before a recurrent layer: each channel is a sum over its last W tokens,

    u_t = bias + sum_j w_j (before_s x_s),  s = t - (W - 1) + j,      y_t = after_t act(u_t),

as in Mamba (arXiv:2312.00752) and Gated DeltaNet (act SiLU, no gates), and in LFM2 (two gates, no
act).

Shapes: x, before, after and y (B, T, D), w (D, W), bias (D,), states (documents, D, W - 1): of each
channel the last W - 1 values of ``before x``, the latest last, which stand in front of a document.

The sum is in fp32 and rounded once, to x's dtype, after ``after``. Nothing is saved but the inputs:
with du_t = dy_t after_t act'(u_t), where u is computed again,

    d(before x)_s = sum_j w_j du_t,  t = s + (W - 1) - j,      dw_j = sum_t du_t (before x)_s.

A program walks over many tokens of a block of channels, with what W tokens share in registers: it
reads each token once, and W - 1 tokens on either side of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, jit, load_row, tl
from liger_kernel.ops.activations.glu import act_and_slope
from liger_kernel.ops.recurrent.cu_seqlens import bounds, checked, places

WIDTHS = (2, 3, 4)
# the fastest, or within 4 % of it, of 54 and 52 for 8192 tokens on an H200, as multiples of the time
# of their bytes at copy speed: 1.14 and 1.44 with 8192 channels and W = 4, 1.03 and 1.07 with 2048
# channels, W = 3 and two gates. With W = 4 and silu, the backward has as many instructions as bytes
TILES = {
    "fwd": dict(BLOCK_N=256, UNROLL=4, num_warps=1, rows=64),
    "bwd": dict(BLOCK_N=256, UNROLL=2, num_warps=2, rows=128),
}
CPU = dict(BLOCK_N=32, UNROLL=2, num_warps=1, rows=16)


def reference(x, w, bias, *, act, before, after, initial_state, output_final_state, cu_seqlens):
    (B, length, D), (_, W) = x.shape, w.shape
    dtype = acc(x.dtype)
    values = x.to(dtype) if before is None else x.to(dtype) * before.to(dtype)
    document, first = places(B, length, cu_seqlens, x.device)
    u = x.new_zeros(B * length, D, dtype=dtype) if bias is None else bias.to(dtype).expand(B * length, D)
    for j in range(W):
        s = torch.arange(B * length, device=x.device) - (W - 1) + j
        u = u + w[:, j].to(dtype) * _at(s, first, document, values.flatten(0, 1), initial_state)
    y = torch.nn.functional.silu(u) if act == "silu" else u
    y = y.view(x.shape) if after is None else y.view(x.shape) * after.to(dtype)
    return y.to(x.dtype), _final(x, W, before, initial_state, cu_seqlens) if output_final_state else None


def _at(s: Tensor, first: Tensor, document: Tensor, values: Tensor, state: Tensor | None) -> Tensor:
    """Rows s of ``values`` (M, D); of the state, or zero, where s lies before its document's
    ``first`` token."""
    inside = (s >= first)[:, None]
    if state is None:
        return torch.where(inside, values[s.clamp(min=0)], 0)
    # with no token at all, there is a state but no value
    outside = state.to(values.dtype)[document, :, (state.shape[-1] + s - first).clamp(0, state.shape[-1] - 1)]
    return torch.where(inside, values[s.clamp(min=0)], outside) if values.shape[0] else outside


def _final(x: Tensor, W: int, before: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The state behind each document, (documents, D, W - 1): few numbers, so PyTorch's operations
    and their gradients do."""
    (B, length, D), device = x.shape, x.device
    if cu_seqlens is None:
        begins = torch.arange(B, device=device) * length
        ends = begins + length
    else:
        begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    documents = begins.shape[0]
    s = (ends[:, None] - (W - 1) + torch.arange(W - 1, device=device)).flatten()
    per = lambda t: t.repeat_interleave(W - 1)
    # the rows that count, before they are multiplied
    rows = s.clamp(0, max(B * length - 1, 0))
    values = x.flatten(0, 1)[rows] if B * length else x.new_zeros(s.shape[0], D)
    if before is not None and B * length:
        values = (values.to(acc(x.dtype)) * before.flatten(0, 1)[rows].to(acc(x.dtype))).to(x.dtype)
    inside, document = (s >= per(begins))[:, None], per(torch.arange(documents, device=device))
    outside = values.new_zeros(())
    if state is not None:
        outside = state[document, :, (W - 1 + s - per(begins)).clamp(0, W - 2)].to(x.dtype)
    return torch.where(inside, values, outside).view(documents, W - 1, D).transpose(1, 2)


@jit
def _rows(ptr, stride, at, t, low, high, UNROLL: tl.constexpr):
    """Rows t, t + 1 ... after ``begin``, in their dtype: 0 unless low <= t < high, and 1 without a
    tensor."""
    begin, col, D = at
    rows: tl.tuple = ()
    for i in tl.static_range(UNROLL):
        if ptr is None:
            rows += (1.0,)
        else:
            mask = (col < D) & (t + i >= low) & (t + i < high)
            row = ptr + begin * stride + tl.cast(t + i, tl.int64) * stride
            rows += (tl.load(row + col, mask=mask, other=0.0),)
    return rows


@jit
def _ahead(source, after_ptr, after_stride, first_ptr, at, t, high, UNROLL: tl.constexpr):
    """What a walk reads of the next tokens, x, before, after, and where documents begin: before it
    computes those that it has, since no load passes a store."""
    xs = _rows(source[0], source[1], at, t, 0, high, UNROLL)
    befores = _rows(source[2], source[3], at, t, 0, high, UNROLL)
    afters = _rows(after_ptr, after_stride, at, t, 0, high, UNROLL)
    return xs, befores, afters, _rows(first_ptr, 1, (at[0], 0, 1), t, 0, high, UNROLL)


@jit
def _product(x, before):
    return tl.cast(x, tl.float32) * tl.cast(before, tl.float32)


@jit
def _store(ptr, at, t, end, values):
    begin, col, D = at
    if ptr is not None:
        row = ptr + begin * D + tl.cast(t, tl.int64) * D
        tl.store(row + col, values.to(ptr.dtype.element_ty), mask=(col < D) & (t >= 0) & (t < end))


@jit
def _values(source, at, t, low, high, UNROLL: tl.constexpr):
    """``before x`` of these rows."""
    xs = _rows(source[0], source[1], at, t, low, high, UNROLL)
    befores = _rows(source[2], source[3], at, t, low, high, UNROLL)
    values: tl.tuple = ()
    for i in tl.static_range(UNROLL):
        values += (_product(xs[i], befores[i]),)
    return values


@jit
def _window(source, at, t, first, row, W: tl.constexpr):
    """``before x`` of the W - 1 tokens in front of token t, of which those in front of ``first`` are
    the state of its document: without packed ones, of its row."""
    values = _values(source, at, t - (W - 1), first, t, W - 1)
    state_ptr, document_ptr = source[4], source[5]
    if state_ptr is not None:
        begin, col, D = at
        if document_ptr is not None:
            row = tl.load(document_ptr + begin + t)
        inside = values
        values: tl.tuple = ()
        for j in tl.static_range(W - 1):
            place = t - first + j
            state = state_ptr + (row * D + col) * (W - 1) + place
            values += (inside[j] + tl.load(state, mask=(col < D) & (place < W - 1), other=0.0).to(tl.float32),)
    return values


@jit
def _taps(source, window, xs, befores, firsts, first_ptr, at, i, s, end, row, W: tl.constexpr):
    """What w is multiplied by at token s, the ``i``th of those that are read; of which a document may
    begin here."""
    if first_ptr is not None:
        begins = (firsts[i] == at[0] + s) & (s < end)
        if begins:
            window = _window(source, at, s, s, row, W)
    taps = window
    taps += (_product(xs[i], befores[i]), 1.0)
    return taps


@jit
def _weights(w_ptr, bias_ptr, at, W: tl.constexpr):
    """w tap by tap, and the bias, whose tap is 1."""
    col, D = at[1], at[2]
    weights: tl.tuple = ()
    for j in tl.static_range(W):
        weights += (tl.load(w_ptr + col * W + j, mask=col < D, other=0.0).to(tl.float32),)
    if bias_ptr is not None:
        weights += (load_row(bias_ptr, col, D),)
    return weights


@jit
def _act(taps, weights, x_ptr, ACT: tl.constexpr):
    """act(u) and its derivative; silu in half the instructions for what is rounded to 16 bits."""
    u = weights[0] * taps[0]
    for j in tl.static_range(1, len(weights)):
        u += weights[j] * taps[j]
    if ACT is None:
        return u, 1.0
    elif x_ptr.dtype.element_ty == tl.float32:
        return act_and_slope(u, ACT, True)
    else:
        s = 1.0 / (1.0 + tl.exp(-u))
        return u * s, s + u * s * (1.0 - s)


@jit
def _walk(first_ptr, T, D, R, BLOCK_N: tl.constexpr):
    """Where a program is: of which row; its first token ``begin``, its columns, D; from begin on, how
    many tokens it has, how many the row; the first token of begin's document."""
    # columns side by side
    columns = tl.cdiv(D, BLOCK_N)
    col = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    part, parts = tl.program_id(0) // columns, tl.cdiv(T, R)
    row, done = (part // parts).to(tl.int64), part % parts * R
    begin, first = row * T + done, -done
    if first_ptr is not None:
        first = tl.load(first_ptr + begin) - done
    return row, (begin, col, D), tl.minimum(R, T - done), T - done, first


@jit
def _fwd(
    x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, document_ptr, first_ptr, y_ptr,
    T, D, R, x_stride, before_stride, after_stride,
    ACT: tl.constexpr, W: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A walk over R tokens, with the last W - 1 values in registers."""
    row, at, end, _, first = _walk(first_ptr, T, D, R, BLOCK_N)
    weights = _weights(w_ptr, bias_ptr, at, W)
    source = (x_ptr, x_stride, before_ptr, before_stride, state_ptr, document_ptr)
    window = _window(source, at, 0, first, row, W)
    xs, befores, afters, firsts = _ahead(source, after_ptr, after_stride, first_ptr, at, 0, end, UNROLL)
    for t in range(0, end, UNROLL):
        ahead = _ahead(source, after_ptr, after_stride, first_ptr, at, t + UNROLL, end, UNROLL)
        for i in tl.static_range(UNROLL):
            s = t + i
            taps = _taps(source, window, xs, befores, firsts, first_ptr, at, i, s, end, row, W)
            _store(y_ptr, at, s, end, _product(_act(taps, weights, x_ptr, ACT)[0], afters[i]))
            window = taps[1:W]
        xs, befores, afters, firsts = ahead


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, document_ptr, first_ptr, dx_ptr, dbefore_ptr,
    dafter_ptr, dw_ptr, dbias_ptr, T, D, R, dy_stride, x_stride, before_stride, after_stride,
    ACT: tl.constexpr, W: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A walk over R tokens and the W - 1 after them, with the last W - 1 values and the unfinished
    gradients of as many tokens in registers. A program's part of dw and dbias lies as these do."""
    row, at, end, last, first = _walk(first_ptr, T, D, R, BLOCK_N)
    last = tl.minimum(last, end + W - 1)
    weights = _weights(w_ptr, bias_ptr, at, W)
    source = (x_ptr, x_stride, before_ptr, before_stride, state_ptr, document_ptr)
    window = _window(source, at, 0, first, row, W)
    # x and before of the tokens whose gradients are unfinished
    old_xs = _rows(x_ptr if dbefore_ptr is not None else None, x_stride, at, 1 - W, first, 0, W - 1)
    old_befores = _rows(before_ptr, before_stride, at, 1 - W, first, 0, W - 1)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    # index j is of the token that is W - 1 - j before this one
    unfinished = (zero,) * (W - 1)
    dw = (zero,) * len(weights)
    xs, befores, afters, firsts = _ahead(source, after_ptr, after_stride, first_ptr, at, 0, last, UNROLL)
    dys = _rows(dy_ptr, dy_stride, at, 0, 0, last, UNROLL)
    for t in range(0, end + W - 1, UNROLL):
        ahead = _ahead(source, after_ptr, after_stride, first_ptr, at, t + UNROLL, last, UNROLL)
        next_dys = _rows(dy_ptr, dy_stride, at, t + UNROLL, 0, last, UNROLL)
        for i in tl.static_range(UNROLL):
            s = t + i
            taps = _taps(source, window, xs, befores, firsts, first_ptr, at, i, s, last, row, W)
            y, slope = _act(taps, weights, x_ptr, ACT)
            # zero from ``last`` on, as dy is
            du = _product(dys[i], afters[i]) * slope
            _store(dafter_ptr, at, s, end, _product(dys[i], y))
            if dw_ptr is not None:
                mine = tl.where(s < end, du, 0.0)
                sums = dw
                dw: tl.tuple = ()
                for j in tl.static_range(len(weights)):
                    dw += (sums[j] + mine * taps[j],)
            unfinished += (zero,)
            grads: tl.tuple = ()
            for j in tl.static_range(W):
                given = weights[j] * du
                if first_ptr is not None:
                    # of another document, a token takes nothing from this one
                    given = tl.where(firsts[i] <= at[0] + (s - (W - 1) + j), given, 0.0)
                grads += (unfinished[j] + given,)
            old_xs += (xs[i] if dbefore_ptr is not None else 1.0,)
            old_befores += (befores[i],)
            _store(dx_ptr, at, s - (W - 1), end, _product(grads[0], old_befores[0]))
            _store(dbefore_ptr, at, s - (W - 1), end, _product(grads[0], old_xs[0]))
            old_xs, old_befores = old_xs[1:], old_befores[1:]
            unfinished = grads[1:]
            window = taps[1:W]
        xs, befores, afters, firsts = ahead
        dys = next_dys
    if dw_ptr is not None:
        part, col = (tl.program_id(0) // tl.cdiv(D, BLOCK_N)).to(tl.int64), at[1]
        for j in tl.static_range(W):
            tl.store(dw_ptr + (part * D + col) * W + j, dw[j], mask=col < D)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + part * D + col, dw[W], mask=col < D)


@jit
def _bwd_state(
    dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, cu_ptr, dstate_ptr,
    M, T, D, dy_stride, x_stride, before_stride, after_stride,
    ACT: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a document's initial state, which its first W - 1 tokens read."""
    columns = tl.cdiv(D, BLOCK)
    document = (tl.program_id(0) // columns).to(tl.int64)
    col = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    if cu_ptr is None:
        begin, end = document * T, document * T + T
    else:
        begin = tl.maximum(tl.load(cu_ptr + document).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + document + 1).to(tl.int64), M)
    end -= begin
    at = (begin, col, D)
    weights = _weights(w_ptr, bias_ptr, at, W)
    source = (x_ptr, x_stride, before_ptr, before_stride, state_ptr, None)
    window = _window(source, at, 0, 0, document, W)
    dys = _rows(dy_ptr, dy_stride, at, 0, 0, end, W - 1)
    afters = _rows(after_ptr, after_stride, at, 0, 0, end, W - 1)
    values = _values(source, at, 0, 0, end, W - 1)
    dus: tl.tuple = ()
    for t in tl.static_range(W - 1):
        taps = window
        taps += (values[t], 1.0)
        du = _product(dys[t], afters[t]) * _act(taps, weights, x_ptr, ACT)[1]
        dus += (tl.where(t < end, du, 0.0),)
        window = taps[1:W]
        total = tl.zeros((BLOCK,), tl.float32)
        for o in tl.static_range(t + 1):
            total += weights[t - o] * dus[o]
        to = dstate_ptr + (document * D + col) * (W - 1) + t
        tl.store(to, total.to(dstate_ptr.dtype.element_ty), mask=col < D)


def _shape(kernel: str, x: Tensor, length: int) -> tuple[dict[str, int], int, int, int]:
    """Constexprs, tokens of a program, programs along the tokens, and all programs."""
    (M, D), c = x.shape, dict(CPU if launch_config.arch() == "cpu" else TILES[kernel])
    rows = c.pop("rows")
    if x.itemsize == 4 and launch_config.arch() != "cpu":
        # more registers, and sums over many tokens in one order lose what fp32 has
        c["BLOCK_N"], rows = c["BLOCK_N"] // 2, rows // 4
    columns = cdiv(D, c["BLOCK_N"])
    # so few tokens that every processor has programs enough; halves are numbers while M is a symbol
    while rows > 8 and M * columns < 4 * rows * launch_config.processors():
        rows //= 2
    parts = M // length * cdiv(length, rows)
    return c, rows, parts, parts * columns


@typed_launcher
def causal_conv1d_fwd(
    x: Tensor, w: Tensor, bias: Tensor | None, before: Tensor | None, after: Tensor | None, state: Tensor | None,
    cu_seqlens: Tensor | None, length: SymInt, act: str | None,
) -> Tensor:  # fmt: skip
    """y (M, D) of M tokens in rows of ``length``."""
    (M, D), (c, rows, _, programs) = x.shape, _shape("fwd", x, length)
    y = x.new_empty(M, D)
    strides = [0 if t is None else t.stride(0) for t in (x, before, after)]
    packed = (None, None) if cu_seqlens is None else places(1, length, cu_seqlens, x.device)
    given = x, w, bias, before, after, state, *packed
    launch(_fwd, (programs,), *given, y, length, D, rows, *strides, ACT=act, W=w.shape[1], **c)
    return y


@typed_launcher
def causal_conv1d_bwd(
    dy: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, before: Tensor | None, after: Tensor | None,
    state: Tensor | None, cu_seqlens: Tensor | None, length: SymInt, act: str | None, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not ``needed`` are empty."""
    (M, D), W, (c, rows, parts, programs) = x.shape, w.shape[1], _shape("bwd", x, length)
    given = (x, w, bias, before, after, state)
    new = lambda t, need, *shape: x.new_empty(shape if need else 0, dtype=x.dtype if t is None else t.dtype)
    dx, dbefore, dafter = (new(given[i], needed[i], M, D) for i in (0, 3, 4))
    dstate = new(state, needed[5], *(() if state is None else state.shape))
    need_dw = needed[1] or needed[2]
    of_programs = lambda n: x.new_empty((parts, n) if need_dw else 0, dtype=torch.float32)
    dws, dbiases = of_programs(D * W), of_programs(0 if bias is None else D)
    strides = [0 if t is None else t.stride(0) for t in (dy, x, before, after)]
    if any(needed[:5]):
        packed = (None, None) if cu_seqlens is None else places(1, length, cu_seqlens, x.device)
        outs = [d if d.numel() else None for d in (dx, dbefore, dafter, dws, dbiases)]
        launch(_bwd, (programs,), dy, *given, *packed, *outs, length, D, rows, *strides, ACT=act, W=W, **c)
    if needed[5]:
        of_state, grid = dict(BLOCK=128, num_warps=4), (cdiv(D, 128) * state.shape[0],)
        launch(_bwd_state, grid, dy, *given, cu_seqlens, dstate, M, length, D, *strides, ACT=act, W=W, **of_state)
    dw = column_sum(dws, w.dtype).view(D, W) if needed[1] else new(w, False)
    dbias = column_sum(dbiases, bias.dtype) if needed[2] else new(bias, False)
    return dx, dw, dbias, dbefore, dafter, dstate


class CausalConv1dFunction(torch.autograd.Function):
    """``apply(x, w, bias, before, after, state, cu_seqlens, act)``."""

    @staticmethod
    def forward(ctx, x, w, bias, before, after, state, cu_seqlens, act):
        rows = lambda t: None if t is None else rows_of(t)
        dense = lambda t: None if t is None else t.contiguous()
        given = rows_of(x), w.contiguous(), dense(bias), rows(before), rows(after), dense(state), dense(cu_seqlens)
        y = causal_conv1d_fwd(*given, x.shape[1], act)
        ctx.save_for_backward(*given)
        ctx.how = x.shape[1], act
        return shaped(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needed = list(ctx.needs_input_grad[:6])
        grads = causal_conv1d_bwd(rows_of(dy), *ctx.saved_tensors, *ctx.how, needed)
        return input_gradients(ctx, grads, (dy.shape, None, None, dy.shape, dy.shape))


def _tensors(*shape: int, W: int = 4) -> dict[str, T]:
    return dict(x=T(shape), w=T((shape[-1], W)))


def _gates(*shape: int) -> dict[str, T]:
    return dict(before=T(shape), after=T(shape))


def _cost(x: Tensor, w: Tensor, bias: Tensor | None = None, **more: Any) -> Cost:
    state, W = more.get("initial_state"), w.shape[1]
    given, y = nbytes(x, w, bias, *(t for t in more.values() if isinstance(t, Tensor))), x.nbytes
    if more.get("output_final_state"):
        y += x.nbytes // x[0, :, 0].numel() * (W - 1) if state is None else state.nbytes
    return Cost(given + y, 2 * given + y, flops=(2 * W * x.numel(), 6 * W * x.numel()))


@op(
    reference=reference,
    cases=[
        Case("qwen3-next", dict(_tensors(3, 21, 24), act="silu")),
        Case("lfm2", dict(_tensors(2, 19, 33, W=3), **_gates(2, 19, 33), bias=T((33,)))),
        Case(
            "states",
            dict(_tensors(3, 6, 24), bias=T((24,)), act="silu")
            | dict(initial_state=T((3, 24, 3)), output_final_state=True),
        ),
        Case("packed", dict(_tensors(1, 41, 20, W=2), act="silu", cu_seqlens=bounds(0, 1, 1, 20, 41))),
        Case(
            "packed-states",
            dict(_tensors(1, 23, 20), **_gates(1, 23, 20), cu_seqlens=bounds(0, 0, 2, 17, 17, 20, 23), act="silu")
            | dict(initial_state=T((6, 20, 3)), output_final_state=True),
        ),
        Case("one-token", dict(_tensors(3, 1, 8), initial_state=T((3, 8, 3)))),
    ],
    cost=_cost,
)
def causal_conv1d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *,
    act: str | None = None, before: Tensor | None = None, after: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A convolution of each channel over its last 2 to 4 tokens, ``after * act(conv(before * x))``,
    and the state behind it, which is None unless ``output_final_state``.

    x, before and after (B, T, D), any strides; w (D, W), the last of which is for the token itself;
    bias (D,). ``act`` is "silu" or None. States (documents, D, W - 1) hold the last values of
    ``before * x``, the latest last; in front of a document stands its initial state, or zeros.
    ``cu_seqlens`` (documents + 1,), integers that rise from 0 to T: where documents begin in the
    only row; without it, each row is a document. Differentiable in all floating-point tensors, and
    through the final state.
    """
    name = "causal_conv1d"
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point of shape (B, T, D), got {x.dtype} {tuple(x.shape)}")
    D = x.shape[2]
    if w.ndim != 2 or w.shape[0] != D or w.shape[1] not in WIDTHS or not w.is_floating_point():
        form = f"floating point of shape ({D}, W), W one of {WIDTHS}"
        raise ValueError(f"{name}: w must be {form}, got {w.dtype} {tuple(w.shape)}")
    checks.one_of(name, (None, "silu"), act=act)
    documents = checked(name, cu_seqlens, x, "x")
    checks.floating_shape(name, (D,), bias=bias)
    checks.floating_shape(name, x.shape, before=before, after=after)
    checks.floating_shape(name, (documents, D, w.shape[1] - 1), initial_state=initial_state)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(x.device)
    if not use_kernels(x) or not x.numel():
        how = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return reference(x, w, bias, act=act, before=before, after=after, **how)
    y = CausalConv1dFunction.apply(x, w, bias, before, after, initial_state, cu_seqlens, act)
    return y, _final(x, w.shape[1], before, initial_state, cu_seqlens) if output_final_state else None
