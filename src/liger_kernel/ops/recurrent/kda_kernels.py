"""The kernels that ``kda`` has of its own, beside those of ``delta_kernels``: ``_kda_prepare``
computes Q, P, and the keys and queries with their decays, for all chunks at once; in the backward,
``_kda_queries`` and ``_kda_keys`` compute the gradients of q, k, g and beta from those of states.

With a decay for each channel, no factor of rows can be taken out of q k^T. But the decay between
two tokens is that from one to any token between them, times that from there to the other: both are
at most 1, so nothing overflows, and what underflows is nothing. Two tokens of a chunk meet at one
level: in halves of 32, 16 ... or 1 tokens they are in the two halves of one whole. There each half
has its decay to the last token of the lower one, and one product has all pairs that meet at the
level; a token and itself have no decay.

- Of 16-bit data, decayed keys and queries of unit length are operands in fp16 for L and P: of
  numbers that small, it has 3 bits more than bf16, and where keys are nearly equal, the solve
  enlarges what L loses.
- Decays stronger than e^-88 a token are that strong, which fp32 cannot tell from zero: the running
  sum of a chunk stays exact for the tokens that come after.
"""

from __future__ import annotations

from liger_kernel.ops._core.tl import jit, tl
from liger_kernel.ops.recurrent.delta_kernels import (
    BETA,
    EPS,
    KIN,
    KOUT,
    KOUT_LOW,
    LOG2E,
    QIN,
    VECTORS,
    _lower_solve,
    _put_square,
    _split,
    _tile,
)


@jit
def _columns(x, row, group, col, end, stride, DK: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Some columns of a chunk."""
    return _tile(x, row, group, col, end, stride, DK, C, BLOCK_K, False)


@jit
def _columns_of_state(
    x, at, col, value, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Some channels and values of the state before a chunk, or of a gradient."""
    return _tile(x, at * DK + col, 0, value, at * DK + DK, DV, DV, BLOCK_K, BLOCK_V, TMA)


@jit
def _running_sums(g_ptr, G_ptr, row, length, h, col, H, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The running sum of g in a chunk, of some channels and in units of log 2, and its last row.
    In memory, ``_to_middle`` finds it."""
    i = tl.arange(0, C)
    c = col + tl.arange(0, BLOCK_K)
    g = _columns(g_ptr, row, h, col, row + length, H * DK, DK, C, BLOCK_K).to(tl.float32)
    G = tl.cumsum(tl.where(g < -88.0, -88.0, g), 0) * LOG2E
    tl.store(G_ptr + i[:, None] * DK + c[None, :], G, mask=(c < DK)[None, :])
    tl.debug_barrier()
    return G, tl.sum(tl.where((i == C - 1)[:, None], G, 0.0), 0)


@jit
def _rows(G_ptr, i, col, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows ``i`` of the running sum, some channels."""
    c = col + tl.arange(0, BLOCK_K)
    at = G_ptr + i[:, None] * DK + c[None, :]
    return tl.load(at) if DK % BLOCK_K == 0 else tl.load(at, mask=(c < DK)[None, :], other=0.0)


@jit
def _to_middle(G, G_ptr, i, col, bits, UNIT: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The decay between each token and the last one of the lower half of its 2^(bits + 1)
    tokens."""
    middle = (i >> (bits + 1) << (bits + 1)) + ((1 << bits) - 1)
    after = G - _rows(G_ptr, middle, col, DK, BLOCK_K)
    return tl.exp2(tl.where((i > middle)[:, None], after, -after)).to(UNIT)


@jit
def _meet(i, bits):
    """Which tokens of a chunk are in the two halves, of 2^bits tokens, of one whole, in any order."""
    return ((i[:, None] ^ i[None, :]) >> bits) == 1


@jit
def _diagonal(x, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), 1)


@jit
def _kda_prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr, Q_ptr, P_ptr, vec_ptr, norm_ptr, G_ptr, decayed_ptr, last_ptr, sq, sk, H,
    scale,
    NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, LEVELS: tl.constexpr,
    INNER: tl.constexpr, SOLVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: Q, P, beta, and k and q with their decays."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = q_ptr.dtype.element_ty
        UNIT: tl.constexpr = tl.float16 if tl.bfloat16 == DT else tl.float32
        # the least beta whose product with a difference of values has the bits of q's dtype
        TINY: tl.constexpr = 2.0**-14 if tl.float16 == DT else 2.0**-80
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        at = n.to(tl.int64) * H + h
        kk = tl.zeros((C,), tl.float32)
        qq = tl.zeros((C,), tl.float32)
        qk = tl.zeros((C,), tl.float32)
        for start in range(0, DK, BLOCK_K):
            k = _columns(k_ptr, row, h, start, end, sk, DK, C, BLOCK_K).to(tl.float32)
            q = _columns(q_ptr, row, h, start, end, sq, DK, C, BLOCK_K).to(tl.float32)
            kk += tl.sum(k * k, 1)
            qq += tl.sum(q * q, 1)
            qk += tl.sum(q * k, 1)
        unit_k, unit_q = tl.rsqrt(kk + EPS), tl.rsqrt(qq + EPS)
        rk, rq = unit_k, unit_q
        if not NORM:
            rk = tl.full((C,), 1.0, tl.float32)
            rq = rk
        scale = tl.cast(scale, tl.float32)
        norms = norm_ptr + at * (4 * C) + i
        tl.store(norms, rq)
        tl.store(norms + C, rk)
        tl.store(norms + 2 * C, unit_q)
        tl.store(norms + 3 * C, unit_k)
        P = tl.where(i[:, None] == i[None, :], (qk * unit_q * unit_k)[:, None], 0.0)
        L = tl.zeros((C, C), tl.float32)
        for start in range(0, DK, BLOCK_K):
            col = start + tl.arange(0, BLOCK_K)
            known = (col < DK)[None, :]
            sums = G_ptr + at * (C * DK)
            G, last = _running_sums(g_ptr, sums, row, length, h, start, H, C, DK, BLOCK_K)
            k = _columns(k_ptr, row, h, start, end, sk, DK, C, BLOCK_K)
            q = _columns(q_ptr, row, h, start, end, sq, DK, C, BLOCK_K)
            tl.store(last_ptr + at * DK + col, tl.exp2(last), mask=col < DK)
            decayed = decayed_ptr + at * ((3 + SPLIT) * C * DK) + i[:, None] * DK + col[None, :]
            tl.store(decayed + QIN * C * DK, (q * (rq * scale)[:, None] * tl.exp2(G)).to(DT), mask=known)
            tl.store(decayed + KIN * C * DK, (k * rk[:, None] * tl.exp2(G)).to(DT), mask=known)
            behind, behind_low = _split(k * rk[:, None] * tl.exp2(last[None, :] - G), DT)
            tl.store(decayed + KOUT * C * DK, behind, mask=known)
            if SPLIT:
                tl.store(decayed + KOUT_LOW * C * DK, behind_low, mask=known)
            k, q = (k * unit_k[:, None]).to(UNIT), (q * unit_q[:, None]).to(UNIT)
            for level in tl.range(LEVELS, num_stages=1):
                x = _to_middle(G, sums, i, start, level, UNIT, DK, BLOCK_K)
                here = _meet(i, level) & (i[:, None] > i[None, :])
                low = tl.trans(k * x)
                L += tl.where(here, tl.dot(k * x, low, input_precision=INNER), 0.0)
                P += tl.where(here, tl.dot(q * x, low, input_precision=INNER), 0.0)
        size_k, size_q = rk / unit_k, rq / unit_q * scale
        _put_square(P_ptr, at, P * size_q[:, None] * size_k[None, :], SPLIT, C)
        t = row.to(tl.int64) + i
        beta = tl.load(beta_ptr + t * H + h, mask=i < length, other=0.0).to(tl.float32)
        # so that e = d / beta
        beta = tl.where(tl.abs(beta) < TINY, TINY, beta)
        tl.store(vec_ptr + at * (VECTORS * C) + BETA * C + i, beta)
        _put_square(Q_ptr, at, _lower_solve(L * size_k[:, None] * size_k[None, :], beta, C, SOLVE), SPLIT, C)


@jit
def _store_normalised(
    dx_ptr, dx, dot, x, r, row, length, h, col, H,
    NORM: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradient of x, from that of its rows times r, their inverse norms, and
    the products ``dot`` of these rows with their gradients."""
    if NORM:
        dx = (dx - x * (r * dot)[:, None]) * r[:, None]
    i = tl.arange(0, C)
    c = col + tl.arange(0, BLOCK_K)
    out = (row + i).to(tl.int64)[:, None] * (H * DK) + (h * DK + c)[None, :]
    tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=(i < length)[:, None] & (c < DK)[None, :])


@jit
def _kda_queries(
    g_ptr, q_ptr, k_ptr, do_ptr, d_ptr, d_low_ptr, S_ptr, norm_ptr, chunks_ptr, dq_ptr, rows_ptr, N_ptr,
    sq, sk, sdo, H, scale, G_ptr,
    NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LEVELS: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: dq, the part of dg that comes through q, and for ``_kda_keys`` the
    operand N. Some columns after others, as not all fit into registers; their sums wait in the
    memory of that part for the norm, which needs those of all."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = dq_ptr.dtype.element_ty
        UNIT: tl.constexpr = tl.float16 if tl.bfloat16 == DT else tl.float32
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        at = n.to(tl.int64) * H + h
        scale = tl.cast(scale, tl.float32)
        N = tl.zeros((C, C), tl.float32)
        N_low = tl.zeros((C, C), tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            do = _tile(do_ptr, row, h, start, end, sdo, DV, C, BLOCK_V, TMA)
            d = _tile(d_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
            N = tl.dot(do, tl.trans(d), N, input_precision=PRECISION)
            if SPLIT:
                low = _tile(d_low_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
                # a product whose sum goes into another product would be spread over other warps
                N_low = tl.dot(do, tl.trans(low), N_low, input_precision=PRECISION)
        # by TMA, rows that are not live may be anything
        N = tl.where((i[:, None] >= i[None, :]) & (i < length)[:, None], N + N_low, 0.0)
        tl.store(N_ptr + at * (C * C) + i[:, None] * C + i[None, :], N)
        itself = _diagonal(N, C)
        norms = norm_ptr + at * (4 * C) + i
        rq, rk, unit_k = tl.load(norms), tl.load(norms + C), tl.load(norms + 3 * C)
        N *= (rk / unit_k)[None, :]
        size = tl.maximum(tl.max(tl.abs(N), 1), 1e-30)
        N = (N / size[:, None]).to(UNIT)
        dot = tl.zeros((C,), tl.float32)
        for col in range(0, DK, BLOCK_K):
            dq = tl.zeros((C, BLOCK_K), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                do = _tile(do_ptr, row, h, start, end, sdo, DV, C, BLOCK_V, TMA)
                S = _columns_of_state(S_ptr, n * H + h, col, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                dq = tl.dot(do, tl.trans(S), dq, input_precision=PRECISION)
            sums = G_ptr + at * (C * DK)
            G, _ = _running_sums(g_ptr, sums, row, length, h, col, H, C, DK, BLOCK_K)
            dq *= tl.exp2(G)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            unit = (k * unit_k[:, None]).to(UNIT)
            for level in tl.range(LEVELS, num_stages=1):
                x = _to_middle(G, sums, i, col, level, UNIT, DK, BLOCK_K)
                here = tl.where(_meet(i, level), N, 0.0)
                dq += tl.dot(here, unit * x, input_precision=INNER) * size[:, None] * x
            q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
            c = col + tl.arange(0, BLOCK_K)
            mine = rows_ptr + at * (C * DK) + i[:, None] * DK + c[None, :]
            tl.store(mine, dq, mask=(c < DK)[None, :])
            # a token and itself have no decay, so dg has nothing of this
            dot += tl.sum((dq + k * (itself * rk)[:, None]) * q, 1) * (rq * scale)
        tl.debug_barrier()
        for col in range(0, DK, BLOCK_K):
            c = col + tl.arange(0, BLOCK_K)
            mine = rows_ptr + at * (C * DK) + i[:, None] * DK + c[None, :]
            dq = tl.load(mine, mask=(c < DK)[None, :], other=0.0)
            q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            tl.store(mine, dq * q * (rq * scale)[:, None], mask=(c < DK)[None, :])
            dq = (dq + k * (itself * rk)[:, None]) * scale
            _store_normalised(dq_ptr, dq, dot, q, rq, row, length, h, col, H, NORM, C, DK, BLOCK_K)


@jit
def _kda_keys(
    G_ptr, q_ptr, k_ptr, z_ptr, d_ptr, d_low_ptr, S_ptr, dS_ptr, norm_ptr, rows_ptr, N_ptr, part_ptr, chunks_ptr,
    dk_ptr, dg_ptr, dbeta_ptr, sq, sk, H, scale,
    NORM: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, LEVELS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: dk, dg and dbeta, some columns after others as for dq."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        UNIT: tl.constexpr = tl.float16 if tl.bfloat16 == dk_ptr.dtype.element_ty else tl.float32
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        live = i < length
        t = row.to(tl.int64) + i
        at = n.to(tl.int64) * H + h
        M = tl.zeros((C, C), tl.float32)
        M_low = tl.zeros((C, C), tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            z = _tile(z_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
            d = _tile(d_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
            M = tl.dot(z, tl.trans(d), M, input_precision=PRECISION)
            if SPLIT:
                low = _tile(d_low_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
                M_low = tl.dot(z, tl.trans(low), M_low, input_precision=PRECISION)
        norms = norm_ptr + at * (4 * C) + i
        rq, rk = tl.load(norms) * tl.cast(scale, tl.float32), tl.load(norms + C)
        unit_q, unit_k = tl.load(norms + 2 * C), tl.load(norms + 3 * C)
        M = tl.where((i[:, None] > i[None, :]) & live[:, None], -M - M_low, 0.0)
        N = tl.load(N_ptr + at * (C * C) + i[None, :] * C + i[:, None])
        itself = _diagonal(N, C)
        # of both triangles one is zero
        M = (M + tl.trans(M)) * (rk / unit_k)[None, :]
        N *= (rq / unit_q)[None, :]
        size = tl.maximum(tl.maximum(tl.max(tl.abs(N), 1), tl.max(tl.abs(M), 1)), 1e-30)
        M, N = (M / size[:, None]).to(UNIT), (N / size[:, None]).to(UNIT)
        dot = tl.zeros((C,), tl.float32)
        for col in range(0, DK, BLOCK_K):
            read = tl.zeros((C, BLOCK_K), tl.float32)
            written = tl.zeros((C, BLOCK_K), tl.float32)
            written_low = tl.zeros((C, BLOCK_K), tl.float32)
            carried = tl.zeros((BLOCK_K,), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                z = _tile(z_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
                d = _tile(d_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
                S = _columns_of_state(S_ptr, n * H + h, col, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                dS = _columns_of_state(dS_ptr, n * H + h, col, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                read = tl.dot(z, tl.trans(S), read, input_precision=PRECISION)
                written = tl.dot(d, tl.trans(dS), written, input_precision=PRECISION)
                if SPLIT:
                    low = _tile(d_low_ptr, row, h, start, end, H * DV, DV, C, BLOCK_V, TMA)
                    written_low = tl.dot(low, tl.trans(dS), written_low, input_precision=PRECISION)
                carried += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
            sums = G_ptr + at * (C * DK)
            G = _rows(sums, i, col, DK, BLOCK_K)
            last = tl.sum(tl.where((i == C - 1)[:, None], G, 0.0), 0)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
            read *= -tl.exp2(G)
            written = (written + written_low) * tl.exp2(last[None, :] - G)
            # by TMA, rows that are not live may be anything
            carried = carried * tl.exp2(last) + tl.sum(tl.where(live[:, None], written * k * rk[:, None], 0.0), 0)
            unit_keys, unit_queries = (k * unit_k[:, None]).to(UNIT), (q * unit_q[:, None]).to(UNIT)
            for level in tl.range(LEVELS, num_stages=1):
                x = _to_middle(G, sums, i, col, level, UNIT, DK, BLOCK_K)
                here = _meet(i, level)
                # factors keep the products apart, see above
                factor = x * size[:, None]
                part = tl.dot(tl.where(here, M, 0.0), unit_keys * x, input_precision=INNER) * factor
                part += tl.dot(tl.where(here, N, 0.0), unit_queries * x, input_precision=INNER) * factor
                upper = ((i >> level) & 1 == 1)[:, None]
                read += tl.where(upper, part, 0.0)
                written += tl.where(upper, 0.0, part)
            c = col + tl.arange(0, BLOCK_K)
            known = (c < DK)[None, :]
            mine = rows_ptr + at * (C * DK) + i[:, None] * DK + c[None, :]
            dg = tl.load(mine, mask=known, other=0.0).to(tl.float32) + (read - written) * k * rk[:, None]
            dg = tl.cumsum(tl.where(live[:, None], dg, 0.0), 0, reverse=True) + carried[None, :]
            out = dg_ptr + t[:, None] * (H * DK) + (h * DK + c)[None, :]
            tl.store(out, dg.to(dg_ptr.dtype.element_ty), mask=live[:, None] & known)
            dk = read + written + q * (itself * rq)[:, None]
            dot += tl.sum(dk * k, 1) * rk
            tl.store(mine, dk, mask=known)
        tl.debug_barrier()
        for col in range(0, DK, BLOCK_K):
            c = col + tl.arange(0, BLOCK_K)
            mine = rows_ptr + at * (C * DK) + i[:, None] * DK + c[None, :]
            dk = tl.load(mine, mask=(c < DK)[None, :], other=0.0)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            _store_normalised(dk_ptr, dk, dot, k, rk, row, length, h, col, H, NORM, C, DK, BLOCK_K)
        dbeta = tl.zeros((C,), tl.float32)
        for slice in tl.static_range(SLICES):
            dbeta += tl.load(part_ptr + (at * SLICES + slice) * (2 * C) + i)
        tl.store(dbeta_ptr + t * H + h, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
