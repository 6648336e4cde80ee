"""RMSNorm of the heads of queries and keys (arXiv:2010.04245), then rotary embedding, in one pass:
``rope(rms_norm(q, wq), rms_norm(k, wk), cos, sin)``.

Shapes: q (B, Hq, T, D), k (B, Hk, T, D), or with ``unsqueeze_dim=2`` (B, T, H, D); wq, wk (D,),
shared by the heads; cos, sin (B or 1, T, R/2) or (B or 1, T, 2, R/2), see ``rope``. R <= D: the
last D - R columns are only normalised.  ``casting`` as in ``rms_norm``, ``layout`` as in ``rope``,
``rope_casting`` as the ``casting`` of ``rope``.

A normalised value is rounded to its dtype before the rotation, as with two separate operators. Per
head, with a = dy rotated back, x_hat = x rstd and g = a (w + offset):  dw = sum of a x_hat,
dx = (g - x_hat mean(g x_hat)) rstd. The backward reads q, k and the upstream gradients once, and
recomputes rstd in the same pass.
``bench/cases/rotary.py`` has the shapes of real models and the rivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T as T_, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import input_gradients, launch
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, jit, load_tile, mask_of, next_power_of_2, store_tile, tl
from liger_kernel.ops.norms.rms_kernels import CASTING, reference as rms_norm_reference
from liger_kernel.ops.rotary.rope import (
    CASTING as ROPE_CASTING,
    _angles,
    _ids,
    _of_columns,
    angle_strides,
    checked_tables,
    fusing,
    load_angles,
    load_pairs,
    own_angles,
    reference as rope_reference,
    rotated_by_kernels,
    rounding,
    sizes,
    store_pairs,
    token_strides,
    turned,
    turned_dtype,
    unit_stride,
)

# columns of a head that a tile holds; the reference computes wider heads
MAX_D = 1024


# the two operators one after the other, which is what models do
def reference(q, k, wq, wk, cos, sin, position_ids, *, eps, offset, casting, layout, unsqueeze_dim, rope_casting):
    q, k = (rms_norm_reference(x, w, eps=eps, offset=offset, casting=casting) for x, w in ((q, wq), (k, wk)))
    return rope_reference(
        q, k, cos, sin, position_ids, layout=layout, unsqueeze_dim=unsqueeze_dim, casting=rope_casting
    )


@jit
def _plus(w, offset, ROUND: tl.constexpr):
    """A row of w + offset, in fp32; rounded to w's dtype on the way where the forward has it so."""
    x = w.to(tl.float32) + tl.cast(offset, tl.float32)
    if ROUND:
        x = x.to(w.dtype).to(tl.float32)
    return x[None, :]


@jit
def _weights(
    w_ptr, offset, HALF, D, PAIRS: tl.constexpr, ROUND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """w + offset for both columns of the pairs, and for the rest."""
    r = tl.arange(0, BLOCK_R)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    # weights in the order of the columns as they are loaded: even and odd, or halves
    a = tl.load(w_ptr + (2 * r if PAIRS else r), mask=r < HALF, other=0.0)
    b = tl.load(w_ptr + (2 * r + 1 if PAIRS else r + HALF), mask=r < HALF, other=0.0)
    c = tl.load(w_ptr + rest, mask=rest < D, other=0.0)
    return _plus(a, offset, ROUND), _plus(b, offset, ROUND), _plus(c, offset, ROUND)


@jit
def _load_rest(x_ptr, h, x_head, H, HALF, D, PARTIAL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The columns that do not turn, in fp32."""
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    # zeros without a rest: sums over it then need no case of their own
    x = tl.zeros((BLOCK_H, BLOCK_REST), tl.float32)
    if PARTIAL:
        x = load_tile(x_ptr, h, rest, x_head, mask_of(h, H, rest, D))
    return x


@jit
def _store_rest(y_ptr, y, h, y_head, H, HALF, D, BLOCK_REST: tl.constexpr):
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    store_tile(y_ptr, h, rest, y_head, y, mask_of(h, H, rest, D))


@jit
def _sum(a, b, c, PARTIAL: tl.constexpr):
    """Over all columns of each head."""
    # one reduction for both columns of the pairs: half the exchange between threads
    total = tl.sum(a + b, axis=1)
    if PARTIAL:
        total += tl.sum(c, axis=1)
    return total


@jit
def _rstd(a, b, c, h, H, D, eps, PARTIAL: tl.constexpr):
    """1 / rms of each head; 0 for those beyond the last, which have no say in dw, not even with
    eps 0."""
    square = _sum(a * a, b * b, c * c, PARTIAL)
    return tl.where(h < H, tl.rsqrt(square / D + tl.cast(eps, tl.float32)), 0.0)[:, None]


@jit
def _scale(x, rstd, w, X: tl.constexpr, Z: tl.constexpr, CASTING: tl.constexpr):
    """fp32 values of the normed x: x rounded to dtype X before the weight where ``casting`` says
    so, to dtype Z after it."""
    h = x * rstd
    # the weight multiplies what is rounded, except in Gemma's norm
    if CASTING != "gemma":
        h = h.to(X).to(tl.float32)
    return (h * w).to(Z).to(tl.float32)


@jit
def _fwd_heads(
    x_ptr, w_ptr, y_ptr, cos_a, sin_a, cos_b, sin_b, H, x_head, y_head, HALF, D, eps, offset,
    CASTING: tl.constexpr, PAIRS: tl.constexpr, PARTIAL: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token: pointers to its first head, strides between heads."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    W: tl.constexpr = w_ptr.dtype.element_ty
    # of what is normed, before it turns: a norm and a rope of their own would round there, too
    Z: tl.constexpr = X if CASTING == "gemma" or X == W else tl.float32
    w_a, w_b, w_c = _weights(w_ptr, offset, HALF, D, PAIRS, CASTING != "gemma", BLOCK_R, BLOCK_REST)
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        a, b = load_pairs(x_ptr, h, x_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        c = _load_rest(x_ptr, h, x_head, H, HALF, D, PARTIAL, BLOCK_H, BLOCK_REST)
        rstd = _rstd(a, b, c, h, H, D, eps, PARTIAL)
        # everywhere the stock norm rounds
        if CASTING == "none":
            rstd = rstd.to(X).to(tl.float32)
        a = _scale(a, rstd, w_a, X, Z, CASTING)
        b = _scale(b, rstd, w_b, X, Z, CASTING)
        a, b = turned(a, b, cos_a, sin_a, cos_b, sin_b, ROUND, y_ptr.dtype.element_ty)
        store_pairs(y_ptr, a, b, h, y_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        if PARTIAL:
            _store_rest(y_ptr, _scale(c, rstd, w_c, X, Z, CASTING), h, y_head, H, HALF, D, BLOCK_REST)


@jit
def _fwd(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, pos_ptr, yq_ptr, yk_ptr,
    T, Hq, Hk, L, HALF, D, eps, offset, q_batch, q_time, q_head, k_batch, k_time, k_head, yq_batch, yq_time, yq_head,
    yk_batch, yk_time, yk_head, cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time, sin_second, sin_col,
    pos_batch, pos_time,
    BOTH: tl.constexpr, CASTING: tl.constexpr, PAIRS: tl.constexpr, PARTIAL: tl.constexpr,
    ROUND: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch, time, cos_a, sin_a, cos_b, sin_b = own_angles(
        cos_ptr, sin_ptr, pos_ptr, T, L, HALF, cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time,
        sin_second, sin_col, pos_batch, pos_time, BOTH, BLOCK_Q, BLOCK_K, BLOCK_R)  # fmt: skip
    _fwd_heads(
        q_ptr + batch * q_batch + time * q_time, wq_ptr, yq_ptr + batch * yq_batch + time * yq_time,
        cos_a, sin_a, cos_b, sin_b, Hq, q_head, yq_head, HALF, D, eps, offset, CASTING, PAIRS, PARTIAL, ROUND,
        BLOCK_Q, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    _fwd_heads(
        k_ptr + batch * k_batch + time * k_time, wk_ptr, yk_ptr + batch * yk_batch + time * yk_time,
        cos_a, sin_a, cos_b, sin_b, Hk, k_head, yk_head, HALF, D, eps, offset, CASTING, PAIRS, PARTIAL, ROUND,
        BLOCK_K, BLOCK_R, BLOCK_REST,
    )  # fmt: skip


@jit
def _bwd(
    dyq_ptr, dyk_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, dq_ptr, dk_ptr, dw_ptr, cos_ptr, sin_ptr, pos_ptr,
    tokens, T, Hq, Hk, L, HALF, D, eps, offset, dw_stride, dyq_batch, dyq_time, dyq_head, dyk_batch, dyk_time, dyk_head,
    q_batch, q_time, q_head, k_batch, k_time, k_head, dq_batch, dq_time, dq_head, dk_batch, dk_time, dk_head,
    cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time, sin_second, sin_col, pos_batch, pos_time,
    BOTH: tl.constexpr, FLAT: tl.constexpr, PAIRS: tl.constexpr, PARTIAL: tl.constexpr, NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of up to BLOCK_H heads of every so many tokens, and their share of dw; of q or of k.
    ``FLAT``: the batches of all tensors follow each other as tokens do, which takes 96 registers
    instead of 128. NEED_DX, NEED_DW: 1 for q plus 2 for k."""
    # one launch for both: its programs are shared by the processors as they become free
    which = tl.program_id(1)
    if which == 0:
        dy_ptr, x_ptr, w_ptr, dx_ptr, H = dyq_ptr, q_ptr, wq_ptr, dq_ptr, Hq
        dy_batch, dy_time, dy_head = dyq_batch, dyq_time, dyq_head
        x_batch, x_time, x_head, dx_batch, dx_time, dx_head = q_batch, q_time, q_head, dq_batch, dq_time, dq_head
    else:
        dy_ptr, x_ptr, w_ptr, dx_ptr, H = dyk_ptr, k_ptr, wk_ptr, dk_ptr, Hk
        dy_batch, dy_time, dy_head = dyk_batch, dyk_time, dyk_head
        x_batch, x_time, x_head, dx_batch, dx_time, dx_head = k_batch, k_time, k_head, dk_batch, dk_time, dk_head
    w_a, w_b, w_c = _weights(w_ptr, offset, HALF, D, PAIRS, False, BLOCK_R, BLOCK_REST)
    dw_a = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    dw_b = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    dw_c = tl.zeros((BLOCK_H, BLOCK_REST), tl.float32)
    # Programs walk over all tokens, so that each writes its share of dw once, and always with the
    # same heads: an eighth fewer instructions than if a tile had to be divided by the tiles of a token
    program, tiles = tl.program_id(0), tl.maximum(tl.cdiv(H, BLOCK_H), 1)
    # heads in 64 bits, since strides multiply them
    h = ((program % tiles) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    step = tl.num_programs(0) // tiles
    stored = H if NEED_DX == 3 else H * ((NEED_DX >> which) & 1)
    # programs that remain have no tokens
    first = tl.where(program // tiles < step, program // tiles, tokens)
    for token in tl.range(first, tokens, step, num_stages=STAGES):
        batch, time = (token // T).to(tl.int64), (token % T).to(tl.int64)
        if FLAT:
            at = token.to(tl.int64)
            dy_at, x_at, dx_at = dy_ptr + at * dy_time, x_ptr + at * x_time, dx_ptr + at * dx_time
        else:
            dy_at = dy_ptr + batch * dy_batch + time * dy_time
            x_at = x_ptr + batch * x_batch + time * x_time
            dx_at = dx_ptr + batch * dx_batch + time * dx_time
        cos_a, sin_a, cos_b, sin_b = load_angles(
            cos_ptr, sin_ptr, pos_ptr, batch, time, L, HALF, cos_batch, cos_time, cos_second, cos_col,
            sin_batch, sin_time, sin_second, sin_col, pos_batch, pos_time, BOTH, BLOCK_H, BLOCK_R)  # fmt: skip
        a, b = load_pairs(x_at, h, x_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        c = _load_rest(x_at, h, x_head, H, HALF, D, PARTIAL, BLOCK_H, BLOCK_REST)
        dy_a, dy_b = load_pairs(dy_at, h, dy_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        g_c = _load_rest(dy_at, h, dy_head, H, HALF, D, PARTIAL, BLOCK_H, BLOCK_REST)
        # back by the same angles: what reaches the norm
        g_a = dy_a * cos_a + dy_b * sin_b
        g_b = dy_b * cos_b - dy_a * sin_a
        u_a, u_b, u_c = g_a * w_a, g_b * w_b, g_c * w_c
        # x is here for x_hat anyway: computing 1/rms again costs no traffic, saving it would. Both
        # sums over a head are of x itself, so that neither waits for the other
        rstd = _rstd(a, b, c, h, H, D, eps, PARTIAL)
        mean = (_sum(u_a * a, u_b * b, u_c * c, PARTIAL) / D)[:, None] * rstd
        a *= rstd
        b *= rstd
        c *= rstd
        if NEED_DW:
            dw_a += g_a * a
            dw_b += g_b * b
            dw_c += g_c * c
        if NEED_DX:
            dx_a, dx_b = (u_a - a * mean) * rstd, (u_b - b * mean) * rstd
            store_pairs(dx_at, dx_a, dx_b, h, dx_head, stored, HALF, PAIRS, BLOCK_H, BLOCK_R)
            if PARTIAL:
                _store_rest(dx_at, (u_c - c * mean) * rstd, h, dx_head, stored, HALF, D, BLOCK_REST)
    # each program's share of dw, which a second stage adds in a fixed order
    if NEED_DW:
        needed = (NEED_DW >> which) & 1
        dw_ptr += program.to(tl.int64) * dw_stride + (which & NEED_DW) * D
        r = tl.arange(0, BLOCK_R)
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask = r < HALF * needed
        tl.store(dw_ptr + (2 * r if PAIRS else r), tl.sum(dw_a, axis=0), mask=mask)
        tl.store(dw_ptr + (2 * r + 1 if PAIRS else r + HALF), tl.sum(dw_b, axis=0), mask=mask)
        if PARTIAL:
            tl.store(dw_ptr + rest, tl.sum(dw_c, axis=0), mask=rest < D * needed)


def _blocks(D: int, half: int) -> tuple[int, int]:
    """Columns in registers: those of pairs, and those that do not rotate (at least one)."""
    # `tl.arange` takes powers of 2 alone
    return next_power_of_2(half), next_power_of_2(D - 2 * half)


@typed_launcher
def qk_norm_rope_fwd(
    q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    heads_first: bool, eps: float, offset: float, casting: str, pairs: bool, rope_casting: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k with unit column stride; all as for ``rope_turn``."""
    # as of two operators, the second of which takes what the first returns
    normed = [x.dtype if casting == "gemma" else torch.promote_types(x.dtype, w.dtype) for x, w in ((q, wq), (k, wk))]
    yq, yk = (torch.empty_like(x, dtype=turned_dtype(dtype, cos, rope_casting)) for x, dtype in zip((q, k), normed))
    B, T, Hq, Hk, D, half = sizes(q, k, cos, heads_first)
    block_r, block_rest = _blocks(D, half)
    # one token per program, so that its angles are loaded once; the tile of ``rope``, which moves
    # the same bytes
    c = launch_config.tile("qk_norm_rope_fwd", 2 * block_r + block_rest * (2 * half < D), q.itemsize, elements=2048)
    block_q, block_k = (min(next_power_of_2(h), c.block_m) for h in (Hq, Hk))
    # one flag for q and k, which have one dtype; their weights may differ
    rounds = any(rounding(dtype, cos, rope_casting) for dtype in normed)
    args = k, wq, wk, cos, sin, position_ids, yq, yk, T, Hq, Hk, cos.shape[1], half, D, eps, offset
    strides = [s for x in (q, k, yq, yk) for s in token_strides(x, heads_first)]
    strides += angle_strides(cos, sin, position_ids)
    flags = dict(BOTH=cos.ndim == 4, CASTING=casting, PAIRS=pairs)
    flags |= dict(PARTIAL=2 * half < D, ROUND=rounds, **fusing(rounds))
    blocks = dict(BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_REST=block_rest, num_warps=c.num_warps)
    launch(_fwd, (B * T,), q, *args, *strides, **flags, **blocks)
    return yq, yk


@typed_launcher
def qk_norm_rope_bwd(
    dyq: Tensor, dyk: Tensor, q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor,
    position_ids: Tensor | None, heads_first: bool, eps: float, offset: float, pairs: bool, need_dq: bool,
    need_dk: bool, need_dwq: bool, need_dwk: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, and dwq and dwk side by side in their common dtype; gradients that are not needed
    are empty."""
    # weights of two dtypes: a pointer has one
    dtype, w_dtype = torch.promote_types(dyq.dtype, dyk.dtype), torch.promote_types(wq.dtype, wk.dtype)
    dyq, dyk, wq, wk = unit_stride(dyq.to(dtype)), unit_stride(dyk.to(dtype)), wq.to(w_dtype), wk.to(w_dtype)
    B, T, Hq, Hk, D, half = sizes(q, k, cos, heads_first)
    block_r, block_rest = _blocks(D, half)
    # A tile is x, its gradient and a sum for dw, 16 values of each a thread: 16 warps fill a
    # processor. H200, (4, 2048) tokens, 32 and 8 heads of 256, bf16: 150 us; in two launches 162
    name = "qk_norm_rope_bwd" if 2 * half == D else "qk_norm_rope_bwd_partial"
    c = launch_config.tile(name, 2 * block_r + block_rest * (2 * half < D), q.itemsize, elements=2048, pipelined=2 * 4)
    block_h = min(next_power_of_2(max(Hq, Hk)), c.block_m)
    # at least one for all heads of a token
    tiles = max(1, cdiv(max(Hq, Hk), block_h))
    programs = max(tiles, min(launch_config.processors() * max(c.per_sm, 12 // c.num_warps), B * T * tiles))
    need_dx, need_dw = need_dq + 2 * need_dk, need_dwq + 2 * need_dwk
    partials = q.new_empty((programs, D * (need_dwq + need_dwk)) if need_dw else 0, dtype=torch.float32)
    dq, dk = (torch.empty_like(x) if need else x.new_empty(0, 0, 0, 0) for x, need in ((q, need_dq), (k, need_dk)))
    args = dyk, q, k, wq, wk, dq, dk, partials, cos, sin, position_ids
    numbers = B * T, T, Hq, Hk, cos.shape[1], half, D, eps, offset, partials.stride(0)
    of = [token_strides(t, heads_first) for t in (dyq, dyk, q, k, dq, dk)]
    strides = [*sum(of, ()), *angle_strides(cos, sin, position_ids)]
    flat = all(batch == T * time for batch, time, _ in of)
    flags = dict(BOTH=cos.ndim == 4, FLAT=flat, PAIRS=pairs, PARTIAL=2 * half < D, NEED_DX=need_dx, NEED_DW=need_dw)
    blocks = dict(BLOCK_H=block_h, BLOCK_R=block_r, BLOCK_REST=block_rest, STAGES=c.stages, num_warps=c.num_warps)
    launch(_bwd, (programs, 2), dyq, *args, *numbers, *strides, **flags, **blocks)
    return dq, dk, column_sum(partials, w_dtype) if need_dw else q.new_empty(0)


class QKNormRopeFunction(torch.autograd.Function):
    """``apply(q, k, wq, wk, cos, sin, position_ids, eps, offset, casting, layout, unsqueeze_dim,
    rope_casting)``; cos and sin hold one angle a pair."""

    @staticmethod
    def forward(
        ctx, q, k, wq, wk, cos, sin, position_ids, eps, offset, casting, layout, unsqueeze_dim, rope_casting="fp32"
    ):
        # saved as the backward reads them, so that it copies nothing again
        q, k, wq, wk = unit_stride(q), unit_stride(k), wq.contiguous(), wk.contiguous()
        ctx.save_for_backward(q, k, wq, wk, cos, sin, position_ids)
        heads_first, pairs = unsqueeze_dim == 1, layout == "pairs"
        ctx.options = heads_first, eps, offset, pairs
        options = heads_first, eps, offset, casting, pairs, rope_casting
        return qk_norm_rope_fwd(q, k, wq, wk, cos, sin, position_ids, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dyq, dyk):
        saved = ctx.saved_tensors
        dq, dk, dw = qk_norm_rope_bwd(dyq, dyk, *saved, *ctx.options, *ctx.needs_input_grad[:4])
        wq, wk = saved[2:4]
        # side by side in one tensor, both, or the only one there is
        D = len(wq)
        return input_gradients(ctx, (dq, dk, dw[:D].to(wq.dtype), dw[-D:].to(wk.dtype)))


def _qk(
    B: int, Hq: int, Hk: int, T: int, D: int, half: int,
    draw=torch.randn, tokens: int | None = None, w_dtype=None, **options,
) -> dict:  # fmt: skip
    """Arguments of a case, with heads before time."""
    w = T_((D,), dtype=w_dtype)
    return dict(
        q=T_((B, Hq, T, D), draw), k=T_((B, Hk, T, D), draw), wq=w, wk=w, **_angles(tokens or T, half), **options
    )


@op(
    reference=reference,
    cases=[
        Case("qwen3", _qk(2, 4, 2, 3, 16, 8)),
        Case("gemma3", _qk(2, 3, 1, 2, 24, 12, offset=1.0, casting="gemma")),
        Case(
            "glm4-moe",
            dict(
                q=T_((1, 3, 5, 20)), k=T_((1, 3, 2, 20)), wq=T_((20,)), wk=T_((20,)), **_angles(3, 5), unsqueeze_dim=2
            ),
        ),
        Case(
            "pairs",
            _qk(2, 3, 2, 2, 20, 6, layout="pairs", tokens=11, offset=0.5)
            | dict(position_ids=T_((2, 2), _ids, dtype=torch.int64)),
        ),
        Case("both-columns", _qk(2, 4, 2, 3, 20, 8) | _of_columns(3, 8)),
        Case("both-columns-of-pairs", _qk(1, 2, 1, 3, 16, 8, layout="pairs") | _of_columns(3, 8)),
        Case("no-upcast", _qk(1, 2, 1, 2, 16, 8, casting="none", w_dtype=torch.float32)),
        Case(
            "autocast",
            _qk(1, 2, 1, 2, 20, 8, casting="gemma", rope_casting="none") | _angles(2, 8, dtype=torch.float32),
        ),
        Case("rounded", _qk(2, 4, 2, 3, 20, 8, rope_casting="none")),
    ],
    cost=lambda q, k, wq, wk, cos, sin, position_ids=None, **_: Cost(
        nbytes(q, k, q, k, wq, wk, cos, sin, position_ids),
        nbytes(q, k, q, k, q, k, wq, wk, wq, wk, cos, sin, position_ids),
        flops=(7 * (q.numel() + k.numel()), 13 * (q.numel() + k.numel())),
    ),
)
def qk_norm_rope(
    q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
    eps: float = 1e-6, offset: float = 0.0, casting: str = "llama", layout: str = "halves", unsqueeze_dim: int = 1,
    rope_casting: str = "fp32",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm of each head, then rotation: ``rope(rms_norm(q, wq), rms_norm(k, wk), cos, sin)``;
    new tensors of their shapes, dtypes and layout in memory.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``; any strides, slices
    of one projection among them. wq, wk (D,).
    ``eps``, ``offset`` and ``casting`` as in ``rms_norm``; cos, sin, ``position_ids`` and
    ``layout`` as in ``rope``, ``rope_casting`` as its ``casting``.
    """
    if not (q.is_floating_point() and k.is_floating_point()):
        raise ValueError(f"qk_norm_rope: q and k must be floating point, got {q.dtype} and {k.dtype}")
    if casting not in CASTING:
        raise ValueError(f"qk_norm_rope: casting must be one of {CASTING}, got {casting!r}")
    if rope_casting not in ROPE_CASTING:
        raise ValueError(f"qk_norm_rope: rope_casting must be one of {ROPE_CASTING}, got {rope_casting!r}")
    cos, sin, position_ids = checked_tables("qk_norm_rope", q, k, cos, sin, position_ids, layout, unsqueeze_dim)
    if not q.shape[-1:] == wq.shape == wk.shape:
        raise ValueError(
            f"qk_norm_rope: wq and wk must have shape {tuple(q.shape[-1:])}, got {tuple(wq.shape)} and "
            f"{tuple(wk.shape)}"
        )
    if not rotated_by_kernels(q, k, cos, sin) or q.shape[-1] > MAX_D:
        options = dict(layout=layout, unsqueeze_dim=unsqueeze_dim, rope_casting=rope_casting)
        return reference(q, k, wq, wk, cos, sin, position_ids, eps=eps, offset=offset, casting=casting, **options)
    return QKNormRopeFunction.apply(
        q, k, wq, wk, cos, sin, position_ids, eps, offset, casting, layout, unsqueeze_dim, rope_casting
    )
