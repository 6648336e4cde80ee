"""The short convolution before a recurrent layer: each channel is a sum over its last W tokens,

    u_t = bias + sum_j w_j (before_s x_s),  s = t - (W - 1) + j,      y_t = after_t act(u_t),

as in Mamba (arXiv:2312.00752) and Gated DeltaNet (act SiLU, no gates), and in LFM2 (two gates, no
act).

Shapes: x, before, after and y (B, T, D), w (D, W), bias (D,), states (documents, D, W - 1): of each
channel the last W - 1 values of ``before x``, the latest last, which stand in front of a document.

The sum is in fp32 and rounded once, to x's dtype, after ``after``. Nothing is saved but the inputs:
with du_t = dy_t after_t act'(u_t), where u is computed again,

    d(before x)_s = sum_j w_j du_t,  t = s + (W - 1) - j,      dw_j = sum_t du_t (before x)_s.

So the backward reads each input once from memory. A token is needed by W tokens before or after it,
which finds it in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, op
from liger_kernel.ops._core.operator import launch, launcher, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, tl
from liger_kernel.ops.activations.glu import act_and_slope, act_of
from liger_kernel.ops.recurrent.cu_seqlens import bounds, checked, places

WIDTHS = (2, 3, 4)


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
def _tap(x_ptr, before_ptr, state_ptr, s, first, document, ok, col, D, x_stride, before_stride, W: tl.constexpr):
    """``before x`` of tokens s, or what the state has in front of their documents."""
    inside = ok & (s >= first)[:, None]
    x = tl.load(x_ptr + s[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if before_ptr is not None:
        x *= tl.load(before_ptr + s[:, None] * before_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if state_ptr is not None:
        at = (document[:, None] * D + col[None, :]) * (W - 1) + (W - 1 + s - first)[:, None]
        x += tl.load(state_ptr + at, mask=ok & (s < first)[:, None], other=0.0).to(tl.float32)
    return x


@jit
def _place(first_ptr, document_ptr, t, M, T):
    """The first token and the document of tokens t."""
    if first_ptr is None:
        document = t // T
        first = document * T
    else:
        first = tl.load(first_ptr + t, mask=t < M, other=0)
        document = tl.load(document_ptr + t, mask=t < M, other=0)
    return first, document


@jit
def _sum(
    x_ptr, before_ptr, state_ptr, w_ptr, bias_ptr, t, first, document, ok, col, D, x_stride, before_stride,
    W: tl.constexpr,
):  # fmt: skip
    """u of tokens t."""
    u = tl.zeros(ok.shape, tl.float32)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        w = tl.load(w_ptr + col * W + j, mask=col < D, other=0.0).to(tl.float32)
        s = t - (W - 1) + j
        u += w[None, :] * _tap(x_ptr, before_ptr, state_ptr, s, first, document, ok, col, D, x_stride, before_stride, W)
    return u


@jit
def _fwd(
    x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, first_ptr, document_ptr, y_ptr,
    M, T, D, x_stride, before_stride, after_stride,
    ACT: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # columns side by side: what W - 1 tokens share with the block above is still in the cache
    columns = tl.cdiv(D, BLOCK_N)
    t = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = (t < M)[:, None] & (col < D)[None, :]
    first, document = _place(first_ptr, document_ptr, t, M, T)
    y = _sum(x_ptr, before_ptr, state_ptr, w_ptr, bias_ptr, t, first, document, ok, col, D, x_stride, before_stride, W)
    if ACT is not None:
        y = act_of(y, ACT, x_ptr.dtype.element_ty == tl.float32)
    if after_ptr is not None:
        y *= tl.load(after_ptr + t[:, None] * after_stride + col[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + t[:, None] * D + col[None, :], y.to(y_ptr.dtype.element_ty), mask=ok)


@jit
def _du(
    dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, t, first, document, ok, col, D,
    dy_stride, x_stride, before_stride, after_stride, ACT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of u and of ``after`` for tokens t."""
    du = tl.load(dy_ptr + t[:, None] * dy_stride + col[None, :], mask=ok, other=0.0).to(tl.float32)
    dafter = du
    if after_ptr is not None:
        du *= tl.load(after_ptr + t[:, None] * after_stride + col[None, :], mask=ok, other=0.0).to(tl.float32)
    if ACT is not None or after_ptr is not None:
        u = _sum(
            x_ptr, before_ptr, state_ptr, w_ptr, bias_ptr, t, first, document, ok, col, D, x_stride, before_stride, W
        )
        if ACT is not None:
            u, slope = act_and_slope(u, ACT, x_ptr.dtype.element_ty == tl.float32)
            du *= slope
        dafter *= u
    return du, dafter


@jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, first_ptr, document_ptr, dx_ptr, dbefore_ptr,
    dafter_ptr, dw_ptr, M, T, D, dy_stride, x_stride, before_stride, after_stride,
    ACT: tl.constexpr, NEED_DW: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of columns. A program's part of dw and dbias is one row: tap by tap,
    then the bias."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tap = tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, BLOCK_N), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        t = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        ok = (t < M)[:, None] & (col < D)[None, :]
        here = t[:, None] * D + col[None, :]
        first, document = _place(first_ptr, document_ptr, t, M, T)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for o in tl.static_range(W):
            # the token that takes this one by weight W - 1 - o; of another document, none
            _, place = _place(first_ptr, document_ptr, t + o, M, T)
            reached = ok & ((t + o < M) & (place == document))[:, None]
            du, dafter = _du(
                dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, t + o, first, document, reached, col,
                D, dy_stride, x_stride, before_stride, after_stride, ACT, W,
            )  # fmt: skip
            w = tl.load(w_ptr + col * W + W - 1 - o, mask=col < D, other=0.0).to(tl.float32)
            total += w[None, :] * du
            if o == 0:
                if dafter_ptr is not None:
                    tl.store(dafter_ptr + here, dafter.to(dafter_ptr.dtype.element_ty), mask=ok)
                if NEED_DW:
                    for j in tl.static_range(W):
                        s = t - (W - 1) + j
                        x = _tap(
                            x_ptr, before_ptr, state_ptr, s, first, document, ok, col, D, x_stride, before_stride, W
                        )
                        sums += tl.where((tap == j)[:, None], tl.sum(du * x, 0)[None, :], 0.0)
                    sums += tl.where((tap == W)[:, None], tl.sum(du, 0)[None, :], 0.0)
        if dbefore_ptr is not None:
            x = tl.load(x_ptr + t[:, None] * x_stride + col[None, :], mask=ok, other=0.0).to(tl.float32)
            tl.store(dbefore_ptr + here, (total * x).to(dbefore_ptr.dtype.element_ty), mask=ok)
        if dx_ptr is not None:
            if before_ptr is not None:
                at = before_ptr + t[:, None] * before_stride + col[None, :]
                total *= tl.load(at, mask=ok, other=0.0).to(tl.float32)
            tl.store(dx_ptr + here, total.to(dx_ptr.dtype.element_ty), mask=ok)
    if NEED_DW:
        at = (tl.program_id(1).to(tl.int64) * (W + 1) + tap)[:, None] * D + col[None, :]
        tl.store(dw_ptr + at, sums, mask=(tap <= W)[:, None] & (col < D)[None, :])


@jit
def _bwd_state(
    dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, cu_ptr, dstate_ptr,
    M, T, D, dy_stride, x_stride, before_stride, after_stride, ACT: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a document's initial state, which its first W - 1 tokens read."""
    columns = tl.cdiv(D, BLOCK)
    n = (tl.program_id(0) // columns).to(tl.int64)
    col = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    if cu_ptr is None:
        first, end = n * T, n * T + T
    else:
        first = tl.maximum(tl.load(cu_ptr + n).to(tl.int64), 0)
        end = tl.load(cu_ptr + n + 1).to(tl.int64)
    for p in tl.static_range(W - 1):
        total = tl.zeros((1, BLOCK), tl.float32)
        for o in tl.static_range(p + 1):
            t = first + o + tl.arange(0, 1)
            ok = (t < tl.minimum(end, M))[:, None] & (col < D)[None, :]
            du, _ = _du(
                dy_ptr, x_ptr, w_ptr, bias_ptr, before_ptr, after_ptr, state_ptr, t, t * 0 + first, t * 0 + n, ok, col,
                D, dy_stride, x_stride, before_stride, after_stride, ACT, W,
            )  # fmt: skip
            total += tl.load(w_ptr + col * W + p - o, mask=col < D, other=0.0).to(tl.float32)[None, :] * du
        at = (n * D + col) * (W - 1) + p
        tl.store(dstate_ptr + at[None, :], total.to(dstate_ptr.dtype.element_ty), mask=(col < D)[None, :])


def _shape(kernel: str, x: Tensor) -> dict[str, int]:
    """Tiles of few rows: a program reads W - 1 rows more than it has."""
    if launch_config.arch() == "cpu":
        return dict(BLOCK_M=16, BLOCK_N=32, num_warps=1)
    # by registers, not measured: with 16 values of a thread, variants with states and gates spill
    return dict(BLOCK_M=16, BLOCK_N=64, num_warps=8 if kernel == "bwd" else 4)


def _document_of(x: Tensor, length: int, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if cu_seqlens is None:
        return None, None
    document, first = places(1, length, cu_seqlens, x.device)
    return first.int(), document.int()


@launcher(
    "(Tensor x, Tensor w, Tensor? bias, Tensor? before, Tensor? after, Tensor? state, Tensor? cu_seqlens, SymInt "
    "length, str? act) -> Tensor"
)
def causal_conv1d_fwd(x, w, bias, before, after, state, cu_seqlens, length, act) -> Tensor:
    """y (M, D) of M tokens in rows of ``length``."""
    (M, D), c = x.shape, _shape("fwd", x)
    y = x.new_empty(M, D)
    strides = [0 if t is None else t.stride(0) for t in (x, before, after)]
    given = x, w, bias, before, after, state, *_document_of(x, length, cu_seqlens)
    grid = (cdiv(D, c["BLOCK_N"]) * cdiv(M, c["BLOCK_M"]),)
    launch(_fwd, grid, *given, y, M, length, D, *strides, ACT=act, W=w.shape[1], **c)
    return y


@launcher(
    "(Tensor dy, Tensor x, Tensor w, Tensor? bias, Tensor? before, Tensor? after, Tensor? state, Tensor? cu_seqlens, "
    "SymInt length, str? act, bool[] needed) -> (Tensor dx, Tensor dw, Tensor dbias, Tensor dbefore, Tensor dafter, "
    "Tensor dstate)"
)
def causal_conv1d_bwd(
    dy, x, w, bias, before, after, state, cu_seqlens, length, act, needed
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not ``needed`` are empty."""
    (M, D), W, c = x.shape, w.shape[1], _shape("bwd", x)
    given = (x, w, bias, before, after, state)
    new = lambda t, need, *shape: x.new_empty(shape if need else 0, dtype=x.dtype if t is None else t.dtype)
    dx, dbefore, dafter = (new(given[i], needed[i], M, D) for i in (0, 3, 4))
    dstate = new(state, needed[5], *(() if state is None else state.shape))
    need_dw = needed[1] or needed[2]
    programs = max(1, min(cdiv(M, c["BLOCK_M"]), cdiv(4 * launch_config.processors(), cdiv(D, c["BLOCK_N"]))))
    partials = x.new_empty((programs, (W + 1) * D) if need_dw else 0, dtype=torch.float32)
    strides = [0 if t is None else t.stride(0) for t in (dy, x, before, after)]
    if any(needed[:5]):
        wanted = [d if need else None for d, need in zip((dx, dbefore, dafter), (needed[0], *needed[3:5]))]
        flags = dict(ACT=act, NEED_DW=need_dw, W=W, TAPS=8 if W == 4 else 4)
        places_of = _document_of(x, length, cu_seqlens)
        outs = *wanted, partials
        grid = cdiv(D, c["BLOCK_N"]), programs
        launch(_bwd, grid, dy, *given, *places_of, *outs, M, length, D, *strides, **flags, **c)
    if needed[5]:
        flags = dict(ACT=act, W=W, BLOCK=128, num_warps=4)
        launch(
            _bwd_state,
            (cdiv(D, 128) * state.shape[0],),
            dy,
            *given,
            cu_seqlens,
            dstate,
            M,
            length,
            D,
            *strides,
            **flags,
        )
    sums = column_sum(partials, torch.float32).view(W + 1, D) if need_dw else partials.new_empty(W + 1, 0)
    dw = sums[:W].t().to(w.dtype).contiguous() if needed[1] else new(w, False)
    dbias = sums[W].to(bias.dtype, copy=True) if needed[2] else new(bias, False)
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
        of_rows = (0, 3, 4)
        found = [
            None if not need else d.view(dy.shape) if i in of_rows else d
            for i, (d, need) in enumerate(zip(grads, needed))
        ]
        return *found, None, None


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
        Case("qwen3-next", dict(_tensors(3, 21, 40), act="silu")),
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
    D, floating = x.shape[2], "must be floating point of shape"
    if w.ndim != 2 or w.shape[0] != D or w.shape[1] not in WIDTHS or not w.is_floating_point():
        raise ValueError(f"{name}: w {floating} ({D}, W), W one of {WIDTHS}, got {w.dtype} {tuple(w.shape)}")
    if act not in (None, "silu"):
        raise ValueError(f"{name}: act must be 'silu' or None, got {act!r}")
    documents = checked(name, cu_seqlens, x, "x")
    shapes = {"bias": (D,), "before": x.shape, "after": x.shape, "initial_state": (documents, D, w.shape[1] - 1)}
    for (what, shape), t in zip(shapes.items(), (bias, before, after, initial_state)):
        if t is not None and (t.shape != shape or not t.is_floating_point()):
            raise ValueError(f"{name}: {what} {floating} {tuple(shape)}, got {t.dtype} {tuple(t.shape)}")
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(x.device)
    if not use_kernels(x) or not x.numel():
        how = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return reference(x, w, bias, act=act, before=before, after=after, **how)
    y = CausalConv1dFunction.apply(x, w, bias, before, after, initial_state, cu_seqlens, act)
    return y, _final(x, w.shape[1], before, initial_state, cu_seqlens) if output_final_state else None
