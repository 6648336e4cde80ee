"""Manifold-constrained hyper-connections: H residual streams, mixed by coefficients that depend on
them (DeepSeek, arXiv:2512.24880).

    mix    = flat(x) phi / sqrt(mean(x^2) + rms_eps)      three parts: pre (H), post (H), res (H, H)
    h_pre  = sigmoid(alpha_pre mix + b) + pre_eps
    h_post = sigmoid(alpha_post mix + b) post_mult
    h_res  = sinkhorn(alpha_res mix + b)

h_pre is the share of each stream in the layer's input x_in = sum_i h_pre_i x_i, h_post the share of
its output f that each stream receives: y_o = sum_i h_res_oi x_i + h_post_o f.

Shapes: x, y (..., H, C), phi (H C, P), b (P,), P = H H + 2 H, alphas of one element, f, x_in (...,
C); T = product of the leading dims.

Sinkhorn computes a softmax of each row, plus eps, and divides columns by their sums; then tmax - 1
times it divides rows and columns by their sums. Each sum is increased by eps. The backward repeats
these steps, stores them, and goes back through them, for as many tokens at a time as there are
programs.
The coefficients and everything before them are in fp32.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import (
    input_gradients,
    launch,
    once_differentiable,
    rows_of,
    shaped,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import (
    add_exactly,
    cdiv,
    div,
    exp,
    jit,
    mask_of,
    next_power_of_2,
    rows_at,
    rows_in,
    rsqrt,
    store_tile,
    tl,
)

# with more streams, phi has too many columns for a tile, and the reference computes the coefficients
MAX_STREAMS = 8

_ALPHAS = dict(alpha_pre=T((1,)), alpha_post=T((1,)), alpha_res=T((1,)))


def coeffs_reference(
    x, phi, b, alpha_pre, alpha_post, alpha_res, *, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0
):
    H, dtype = x.shape[-2], acc(x.dtype)
    f = x.flatten(-2).to(dtype)
    with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        mix = f @ phi.to(dtype)
    mix = mix * torch.rsqrt(f.square().mean(-1, keepdim=True) + rms_eps)
    pre, post, steps = coefficients(mix, b, alpha_pre, alpha_post, alpha_res, H, tmax, pre_eps, sinkhorn_eps, post_mult)
    return pre, post, steps[-1]


def coefficients(
    mix, b, alpha_pre, alpha_post, alpha_res, H, tmax, pre_eps, sinkhorn_eps, post_mult
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """h_pre, h_post, and h_res after each step, of ``mix``, in torch."""
    parts = zip(mix.split([H, H, H * H], -1), b.to(mix.dtype).split([H, H, H * H]), (alpha_pre, alpha_post, alpha_res))
    pre, post, res = (m * a.to(mix.dtype) + bias for m, bias, a in parts)
    return (
        torch.sigmoid(pre) + pre_eps,
        torch.sigmoid(post) * post_mult,
        sinkhorn(res.unflatten(-1, (H, H)), tmax, sinkhorn_eps),
    )


def sinkhorn(logits: Tensor, tmax: int, eps: float) -> list[Tensor]:
    """The matrices after each of ``tmax`` steps, in torch."""
    m = torch.softmax(logits, -1) + eps
    steps = [m / (m.sum(-2, keepdim=True) + eps)]
    for _ in range(tmax - 1):
        m = steps[-1] / (steps[-1].sum(-1, keepdim=True) + eps)
        steps.append(m / (m.sum(-2, keepdim=True) + eps))
    return steps


def _check(name: str, x: Tensor, **shapes: tuple[Tensor, tuple[int, ...]]) -> None:
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point of shape (..., H, C), got {x.dtype} {tuple(x.shape)}")
    for argument, (t, shape) in shapes.items():
        checks.shape(name, shape, **{argument: t})


@jit
def _project(
    x_ptr, phi_ptr, mix_ptr, T, K, P, x_stride,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Of some columns: x phi, and as one more column the sums of the squares of x."""
    row = rows_at(tl.program_id(0), BLOCK_T)
    p = tl.arange(0, BLOCK_P)
    mix = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    lost = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_K, K, tl.num_programs(1) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=mask_of(row, T, k, K), other=0.0)
        phi = tl.load(phi_ptr + k[:, None] * P + p[None, :], mask=mask_of(k, K, p, P), other=0.0)
        wide = x.to(tl.float32)
        squares += wide * wide
        if x.dtype == phi.dtype and x.dtype != tl.float32:
            part = tl.dot(x, phi)
        else:
            part = tl.dot(wide, phi.to(tl.float32), input_precision=PRECISION)
        # what a sum of thousands rounds off is kept (Kahan): tensor cores cut it off, and the
        # exponentials to come multiply it
        mix, lost = add_exactly(mix, part, lost)
    at = (tl.program_id(1).to(tl.int64) * T + row) * (P + 1)
    tl.store(mix_ptr + at + P, tl.sum(squares, axis=1), mask=row < T)
    tl.store(mix_ptr + at[:, None] + p[None, :], mix, mask=mask_of(row, T, p, P))


@jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """total + a b, one of which is fp32. "bf16x2": as two bf16 parts, which leaves 16 bits of it
    and products that tensor cores have."""
    if PRECISION == "bf16x2" and a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        total = tl.dot(a, high, total)
        return tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), total)
    elif PRECISION == "bf16x2":
        high = a.to(tl.bfloat16)
        total = tl.dot(high, b, total)
        return tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b, total)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)


@jit
def _project_bwd(
    x_ptr, phi_ptr, dz_ptr, factor_ptr, dx_ptr, dphi_ptr, T, K, P, x_stride,
    OF_PHI: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """dx = dz phi^T + factor x, or a partial sum of dphi = x^T dz, for some columns of x and
    some tiles of its rows."""
    split = tl.program_id(1)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    p = tl.arange(0, BLOCK_P)
    inside = mask_of(k, K, p, P)
    if OF_PHI:
        dphi = tl.zeros((BLOCK_K, BLOCK_P), tl.float32)
    else:
        phi = tl.load(phi_ptr + k[:, None] * P + p[None, :], mask=inside, other=0.0)
    for tile in range(split, tl.cdiv(T, BLOCK_T), tl.num_programs(1)):
        row, mask = rows_in(tile, T, k, K, BLOCK_T)
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
        dz = tl.load(dz_ptr + row[:, None] * P + p[None, :], mask=mask_of(row, T, p, P), other=0.0)
        if OF_PHI:
            dphi = _product(tl.trans(x), dz, dphi, PRECISION)
        else:
            factor = tl.load(factor_ptr + row, mask=row < T, other=0.0)
            dx = _product(dz, tl.trans(phi), x.to(tl.float32) * factor[:, None], PRECISION)
            store_tile(dx_ptr, row, k, K, dx, mask)
    if OF_PHI:
        tl.store(dphi_ptr + (split.to(tl.int64) * K + k[:, None]) * P + p[None, :], dphi, mask=inside)


@jit
def _over_sums(m, padding, eps, AXIS: tl.constexpr):
    return div(m, tl.expand_dims(tl.sum(m, axis=AXIS), AXIS) + eps + padding)


@jit
def _over_sums_bwd(d, m, y, padding, eps, AXIS: tl.constexpr):
    """Of y = m over its sums."""
    total = tl.expand_dims(tl.sum(m, axis=AXIS), AXIS) + eps + padding
    return div(d - tl.expand_dims(tl.sum(d * y, axis=AXIS), AXIS), total)


@jit
def _rstd(mix_ptr, row, T, K, P, eps):
    return rsqrt(tl.load(mix_ptr + row * (P + 1) + P, mask=row < T, other=1.0) / K + tl.cast(eps, tl.float32))


@jit
def _normed(mix_ptr, rstd, row, at, inside, P):
    """x phi rstd, of all ``at`` in each row."""
    return tl.load(mix_ptr + row * (P + 1) + at, mask=inside, other=0.0) * rstd


@jit
def _logits(mix, b_ptr, alpha_ptr, at, inside):
    return mix * tl.load(alpha_ptr).to(tl.float32) + tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)


@jit
def _sigmoid(x):
    return div(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@jit
def _row_softmax(logits, inside):
    shifted = tl.where(inside, logits - tl.expand_dims(tl.max(tl.where(inside, logits, -1e38), axis=2), 2), -1e38)
    e = tl.where(inside, exp(shifted), 0.0)
    total = tl.expand_dims(tl.sum(e, axis=2), 2)
    return div(e, tl.where(total == 0, 1.0, total))


@jit
def _coeffs_fwd(
    mix_ptr, b_ptr, a_pre_ptr, a_post_ptr, a_res_ptr, pre_ptr, post_ptr, res_ptr,
    T, H, K, P, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_T)
    j = tl.arange(0, BLOCK_H)[None, :]
    flat = (row < T)[:, None] & (j < H)
    rstd = _rstd(mix_ptr, row, T, K, P, rms_eps)
    pre = _logits(_normed(mix_ptr, rstd[:, None], row[:, None], j, flat, P), b_ptr, a_pre_ptr, j, flat)
    post = _logits(_normed(mix_ptr, rstd[:, None], row[:, None], H + j, flat, P), b_ptr, a_post_ptr, H + j, flat)
    tl.store(pre_ptr + (row * H)[:, None] + j, _sigmoid(pre) + tl.cast(pre_eps, tl.float32), mask=flat)
    tl.store(post_ptr + (row * H)[:, None] + j, tl.cast(post_mult, tl.float32) * _sigmoid(post), mask=flat)

    r = tl.arange(0, BLOCK_H)[None, :, None]
    c = tl.arange(0, BLOCK_H)[None, None, :]
    row = row[:, None, None]
    inside = (row < T) & (r < H) & (c < H)
    of_rows = (r >= H).to(tl.float32) + (row >= T).to(tl.float32)
    of_columns = (c >= H).to(tl.float32) + (row >= T).to(tl.float32)
    eps = tl.cast(sinkhorn_eps, tl.float32)
    at = 2 * H + r * H + c
    logits = _logits(_normed(mix_ptr, rstd[:, None, None], row, at, inside, P), b_ptr, a_res_ptr, at, inside)
    m = _row_softmax(logits, inside)
    m = _over_sums(tl.where(inside, m + eps, 0.0), of_columns, eps, 1)
    for _ in range(1, tmax):
        m = _over_sums(_over_sums(m, of_rows, eps, 2), of_columns, eps, 1)
    tl.store(res_ptr + row * H * H + r * H + c, m, mask=inside)


@jit
def _coeffs_bwd(
    dpre_ptr, dpost_ptr, dres_ptr, mix_ptr, b_ptr, a_pre_ptr, a_post_ptr, a_res_ptr, dz_ptr, factor_ptr, sums_ptr,
    steps_ptr, T, H, K, P, tmax, rms_eps, sinkhorn_eps, post_mult,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dz, the gradient of x phi; factor x is what dx has of the norm. And each program's sums of
    the gradients of b, and of alpha pre, post and res.

    ``steps`` is the program's memory of its Sinkhorn steps.
    """
    program = tl.program_id(0)
    j = tl.arange(0, BLOCK_H)[None, :]
    r = tl.arange(0, BLOCK_H)[None, :, None]
    c = tl.arange(0, BLOCK_H)[None, None, :]
    at = 2 * H + r * H + c
    eps = tl.cast(sinkhorn_eps, tl.float32)
    a_pre = tl.load(a_pre_ptr).to(tl.float32)
    a_post = tl.load(a_post_ptr).to(tl.float32)
    a_res = tl.load(a_res_ptr).to(tl.float32)
    slot = tl.arange(0, BLOCK_T)[:, None, None] * BLOCK_H * BLOCK_H + r * BLOCK_H + c
    steps_ptr += program.to(tl.int64) * (2 * tmax - 1) * BLOCK_T * BLOCK_H * BLOCK_H + slot
    STEP: tl.constexpr = BLOCK_T * BLOCK_H * BLOCK_H
    db_pre = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    db_post = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    db_res = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_H), tl.float32)
    da_pre = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    da_post = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    da_res = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_H), tl.float32)
    for tile in range(program, tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        rows = rows_at(tile, BLOCK_T)
        flat = (rows < T)[:, None] & (j < H)
        rstd = _rstd(mix_ptr, rows, T, K, P, rms_eps)
        row = rows[:, None]
        mix_pre = _normed(mix_ptr, rstd[:, None], row, j, flat, P)
        mix_post = _normed(mix_ptr, rstd[:, None], row, H + j, flat, P)
        pre = _sigmoid(_logits(mix_pre, b_ptr, a_pre_ptr, j, flat))
        post = _sigmoid(_logits(mix_post, b_ptr, a_post_ptr, H + j, flat))
        dpre = tl.load(dpre_ptr + row * H + j, mask=flat, other=0.0) * pre * (1.0 - pre)
        dpost = tl.load(dpost_ptr + row * H + j, mask=flat, other=0.0) * tl.cast(post_mult, tl.float32)
        dpost = dpost * post * (1.0 - post)

        row = rows[:, None, None]
        inside = (row < T) & (r < H) & (c < H)
        of_rows = (r >= H).to(tl.float32) + (row >= T).to(tl.float32)
        of_columns = (c >= H).to(tl.float32) + (row >= T).to(tl.float32)
        mix = _normed(mix_ptr, rstd[:, None, None], row, at, inside, P)
        s = _row_softmax(_logits(mix, b_ptr, a_res_ptr, at, inside), inside)
        first = tl.where(inside, s + eps, 0.0)
        m = _over_sums(first, of_columns, eps, 1)
        tl.debug_barrier()  # the tile before has read its steps
        for step in range(tmax - 1):
            tl.store(steps_ptr + 2 * step * STEP, m)
            m = _over_sums(m, of_rows, eps, 2)
            tl.store(steps_ptr + (2 * step + 1) * STEP, m)
            m = _over_sums(m, of_columns, eps, 1)
        tl.debug_barrier()
        d = tl.load(dres_ptr + row * H * H + r * H + c, mask=inside, other=0.0)
        for i in range(tmax - 1):
            step = tmax - 2 - i
            halfway = tl.load(steps_ptr + (2 * step + 1) * STEP)
            d = _over_sums_bwd(d, halfway, m, of_columns, eps, 1)
            m = tl.load(steps_ptr + 2 * step * STEP)
            d = _over_sums_bwd(d, m, halfway, of_rows, eps, 2)
        d = _over_sums_bwd(d, first, m, of_columns, eps, 1)
        d = s * (d - tl.expand_dims(tl.sum(d * s, axis=2), 2))
        # d of a row of h_res sums to zero: what all of its mix have in common counts for nothing
        # but rounding
        mix = tl.where(inside, mix - tl.expand_dims(tl.sum(mix, axis=2), 2) / H, 0.0)

        db_pre += dpre
        db_post += dpost
        db_res += d
        da_pre += dpre * mix_pre
        da_post += dpost * mix_post
        da_res += d * mix
        along = tl.sum(a_pre * dpre * mix_pre + a_post * dpost * mix_post, axis=1)
        along += a_res * tl.sum(tl.sum(d * mix, axis=2), axis=1)
        tl.store(factor_ptr + rows, -along * rstd * rstd / K, mask=rows < T)
        tl.store(dz_ptr + rows[:, None] * P + j, a_pre * dpre * rstd[:, None], mask=flat)
        tl.store(dz_ptr + rows[:, None] * P + H + j, a_post * dpost * rstd[:, None], mask=flat)
        tl.store(dz_ptr + row * P + at, a_res * d * rstd[:, None, None], mask=inside)
    sums_ptr += program * (P + 3)
    one = tl.arange(0, BLOCK_H)
    tl.store(sums_ptr + one, tl.sum(db_pre, axis=0), mask=one < H)
    tl.store(sums_ptr + H + one, tl.sum(db_post, axis=0), mask=one < H)
    each = one[:, None] * H + one[None, :]
    tl.store(sums_ptr + 2 * H + each, tl.sum(db_res, axis=0), mask=mask_of(one, H, one, H))
    tl.store(sums_ptr + P, tl.sum(da_pre))
    tl.store(sums_ptr + P + 1, tl.sum(da_post))
    tl.store(sums_ptr + P + 2, tl.sum(da_res))


def _tiles(x: Tensor, phi: Tensor, of: str) -> dict:
    """Of the projection ("mix"), its "dx" or its "dphi"."""
    # Two bf16 products make one that is exact enough for bf16 results, three of tf32 for others;
    # AMD's matrix cores multiply fp32
    block_p = max(16, next_power_of_2(phi.shape[1]))
    # the fastest of a dozen on an H200, of those that fit elsewhere
    if x.dtype == phi.dtype == torch.bfloat16:
        wide = block_p > 32
        # where the operands of products need no registers
        from_shared_memory = launch_config.arch() in ("sm90", "sm100", "sm103")
        block_k = 128 if of == "dphi" and (not wide or from_shared_memory) else 64
        warps = 8 if of == "dphi" or wide else 4
        return dict(PRECISION="bf16x2", BLOCK_T=64, BLOCK_K=block_k, BLOCK_P=block_p, num_warps=warps)
    # at most 2048 values of phi: nothing spills, and 64 KB of shared memory are enough for fp32, too
    precision = "ieee" if x.dtype == torch.float32 or not launch_config.arch().startswith("sm") else "tf32x3"
    # of fp32, sums of few products before they are added exactly
    block_k = 16 if precision == "ieee" else min(64, 2048 // block_p)
    return dict(PRECISION=precision, BLOCK_T=min(32, 2048 // block_p), BLOCK_K=block_k, BLOCK_P=block_p, num_warps=8)


def _tokens(H: int) -> dict[str, int]:
    """Of the coefficients: chains of dependent steps on little matrices, so as many warps as
    there can be, of 4 values of h_res a thread."""
    block_h = next_power_of_2(H)
    return dict(BLOCK_T=max(1, 128 // block_h**2), BLOCK_H=block_h, num_warps=1)


@typed_launcher
def mhc_coeffs_fwd(
    x: Tensor, phi: Tensor, b: Tensor, alphas: list[Tensor], H: int, tmax: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The coefficients; ``mix`` (M, P + 1) is x phi and the sum of x^2."""
    (M, K), P = x.shape, phi.shape[1]
    pre, post, res, mix = (x.new_empty(shape, dtype=torch.float32) for shape in ((M, H), (M, H), (M, H, H), (M, P + 1)))
    if not tracing(x):
        tiles, tokens = _tiles(x, phi, "mix"), _tokens(H)
        blocks = cdiv(M, tiles["BLOCK_T"])
        splits = max(1, min(cdiv(4 * launch_config.processors(), blocks), cdiv(K, 8 * tiles["BLOCK_K"])))
        partials = mix if splits == 1 else x.new_empty((splits, mix.numel()), dtype=torch.float32)
        launch(_project, (blocks, splits), x, phi, partials, M, K, P, x.stride(0), **tiles)
        if splits > 1:
            mix = column_sum(partials, torch.float32).view(M, P + 1)
        numbers = M, H, K, P, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
        launch(_coeffs_fwd, (cdiv(M, tokens["BLOCK_T"]),), mix, b, *alphas, pre, post, res, *numbers, **tokens)
    return pre, post, res, mix


@typed_launcher
def mhc_coeffs_bwd(
    dh: list[Tensor], x: Tensor, phi: Tensor, b: Tensor, alphas: list[Tensor], mix: Tensor, H: int, tmax: int,
    rms_eps: float, sinkhorn_eps: float, post_mult: float, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, phi, b and the alphas; gradients that are not needed are empty."""
    grads: Any = [t.new_empty(t.shape if need else 0) for t, need in zip((x, phi, b, *alphas), needed)]
    if not tracing(x):
        (M, K), P = x.shape, phi.shape[1]
        tokens = _tokens(H)
        programs = min(cdiv(M, tokens["BLOCK_T"]), 8 * launch_config.processors())
        per_step = tokens["BLOCK_T"] * tokens["BLOCK_H"] ** 2
        shapes = (M, P), (M,), (programs, P + 3), (programs, 2 * tmax - 1, per_step)
        dz, factor, sums, steps = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
        numbers = M, H, K, P, tmax, rms_eps, sinkhorn_eps, post_mult
        launch(_coeffs_bwd, (programs,), *dh, mix, b, *alphas, dz, factor, sums, steps, *numbers, **tokens)
        if any(needed[2:]):
            found = sums.sum(0, dtype=torch.float64).split([P, 1, 1, 1])
            each = zip(found, (b, *alphas), grads[2:], needed[2:])
            grads[2:] = [s.to(p.dtype).reshape(p.shape) if need else g for s, p, g, need in each]
        # both at once do not fit in the registers
        for of_phi in (False, True):
            if needed[of_phi]:
                tiles = _tiles(x, phi, "dphi" if of_phi else "dx")
                blocks = cdiv(K, tiles["BLOCK_K"])
                splits = max(1, min(cdiv(2 * launch_config.processors(), blocks), cdiv(M, tiles["BLOCK_T"])))
                partials = x.new_empty((splits, K * P) if of_phi else 0, dtype=torch.float32)
                tensors = x, phi, dz, factor, grads[0], partials
                launch(_project_bwd, (blocks, splits), *tensors, M, K, P, x.stride(0), OF_PHI=of_phi, **tiles)
                if of_phi:
                    grads[1] = column_sum(partials, phi.dtype).view(K, P)
    return tuple(grads)


class LigerMHCCoeffsFunction(torch.autograd.Function):
    """``apply(x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps,
    sinkhorn_eps, post_mult)``; fp32 is always allowed."""

    @staticmethod
    def forward(
        ctx, x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    ):
        ctx.shape, H = x.shape, x.shape[-2]
        ctx.options = H, tmax, rms_eps, sinkhorn_eps, post_mult
        x, phi, b, alphas = rows_of(x.flatten(-2)), phi.contiguous(), b.contiguous(), [alpha_pre, alpha_post, alpha_res]
        pre, post, res, mix = mhc_coeffs_fwd(x, phi, b, alphas, H, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)
        ctx.save_for_backward(x, phi, b, mix, *alphas)
        outer = ctx.shape[:-2]
        return shaped(pre, (*outer, H)), shaped(post, (*outer, H)), shaped(res, (*outer, H, H))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dh):
        x, phi, b, mix, *alphas = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:6])
        grads = mhc_coeffs_bwd([d.contiguous() for d in dh], x, phi, b, alphas, mix, *ctx.options, needed)
        return input_gradients(ctx, grads, [ctx.shape])


@op(
    reference=coeffs_reference,
    cases=[
        Case("streams-4", dict(x=T((2, 19, 4, 20)), phi=T((80, 24)), b=T((24,)), **_ALPHAS, tmax=5)),
        Case(
            "streams-3",
            dict(
                x=T((7, 3, 30)),
                phi=T((90, 15)),
                b=T((15,)),
                **_ALPHAS,
                tmax=3,
                rms_eps=1e-5,
                pre_eps=0.1,
                sinkhorn_eps=0.0,
                post_mult=1.5,
            ),
        ),
        Case(
            "fp32-weights",
            dict(
                x=T((5, 2, 16)), phi=T((32, 8), dtype=torch.float32), b=T((8,), dtype=torch.float32), **_ALPHAS, tmax=1
            ),
        ),
    ],
    cost=lambda x, phi, b, *_, **__: Cost(
        nbytes(x, phi) + x.numel() // x.shape[-1] * (x.shape[-2] + 2) * 4,
        2 * nbytes(x, phi),
        gemms=(
            [(x[..., 0, 0].numel(), phi.shape[1], phi.shape[0])],
            [(x[..., 0, 0].numel(), phi.shape[1], phi.shape[0])] * 2,
        ),
    ),
)
def mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The coefficients h_pre (..., H), h_post (..., H) and h_res (..., H, H) of streams x (...,
    H, C), in fp32, or fp64 if x is."""
    H, C = x.shape[-2:] if x.ndim > 1 else (0, 0)
    _check("mhc_coeffs", x, phi=(phi, (H * C, H * H + 2 * H)), b=(b, (H * H + 2 * H,)))
    checks.one_element("mhc_coeffs", alpha_pre=alpha_pre, alpha_post=alpha_post, alpha_res=alpha_res)
    if tmax < 1:
        raise ValueError(f"mhc_coeffs: tmax must be at least 1, got {tmax}")
    if not use_kernels(x) or H > MAX_STREAMS or not x.numel():
        options = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
        return coeffs_reference(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    return LigerMHCCoeffsFunction.apply(
        x, phi, b, alpha_pre, alpha_post, alpha_res, True, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )
