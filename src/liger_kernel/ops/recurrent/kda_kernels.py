"""The kernels that ``kda`` has of its own, beside those of ``delta_kernels``: ``_kda_prepare``
computes Q, P, and the keys and queries with their decays, for all chunks at once; in the backward,
``_kda_inputs`` computes the gradients of q, k, g and beta from those of states. ``_kda_tables`` has
the matrices by which both add up decays between tokens.

With a decay for each channel, no factor of rows can be taken out of q k^T. But the decay between
two tokens is that from one to any token between them, times that from there to the other: both are
at most 1, so nothing overflows, and what underflows is nothing. Two tokens of a chunk meet at one
level: in halves of 32, 16 ... or 1 tokens they are in the two halves of one whole. There each half
has its decay to the last token of the lower one, and one product has all pairs that meet at the
level; a token and itself have no decay. Where decays are so weak that 2^low tokens are within
2^REACH of the middle one, one product with decays and their inverses has all pairs of these, and
only the levels above are left: one product for a whole chunk instead of six.

- Of 16-bit data, decayed keys and queries of unit length are operands in fp16: of numbers that
  small, it has 3 bits more than bf16. Where keys are nearly equal, the solve enlarges what L loses,
  and dg is a difference of what reads and what writes.
- Sums of g between two tokens, and not differences of sums, so that a strong decay loses nothing of
  the weak ones behind it. Decays stronger than e^-88 a token are that strong, which fp32 cannot
  tell from zero.
- What a norm takes off a gradient, <q, dq> and <k, dk>, is in sums over values, too: <do, o>, and
  2 <d, z> / beta - <v, z>. So no channel waits for the others.
"""

from __future__ import annotations

from liger_kernel.ops._core.tl import jit, tl
from liger_kernel.ops.recurrent.delta_kernels import (
    BETA,
    EPS,
    KIN,
    KOUT,
    LOG2E,
    QIN,
    VECTORS,
    _cut,
    _lower_solve,
    _put_square,
    _tile,
)

# operands of unit length are this times larger in fp16, and for some tokens one product does if each
# of their decays is between 2^-REACH and 2^REACH from the middle one: so both have all bits of fp16
LARGE = tl.constexpr(16.0)
REACH = tl.constexpr(11.0)


@jit
def _columns(x, row, group, col, end, stride, WIDTH: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr):
    """Some columns of a chunk, with 32 bits for places in it."""
    i = tl.arange(0, C)
    c = col + tl.arange(0, COLS)
    mask = (i < end - row)[:, None]
    if WIDTH % COLS != 0:
        mask = mask & (c < WIDTH)[None, :]
    return tl.load(x + (row.to(tl.int64) * stride + group * WIDTH) + (i[:, None] * stride + c[None, :]), mask, 0.0)


@jit
def _columns_of_state(
    x, at, col, value, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Some channels and values of the state before a chunk, or of a gradient."""
    return _tile(x, at * DK + col, 0, value, at * DK + DK, DV, DV, BLOCK_K, BLOCK_V, TMA)


@jit
def _logarithms(g_ptr, row, length, h, col, H, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """g of a chunk, of some channels and in units of log 2."""
    g = _columns(g_ptr, row, h, col, row + length, H * DK, DK, C, BLOCK_K).to(tl.float32)
    return tl.where(g < -88.0, -88.0, g) * LOG2E


@jit
def _kda_tables(sums_ptr, pairs_ptr, LEVELS: tl.constexpr, C: tl.constexpr):
    """Matrices of 0, 1 and -1. Of sums, for the token i of row i: tokens up to it; those behind it;
    for each level those between it and the last token of the lower half of its 2^level
    tokens, with a sign. Then, for each level, which tokens before i are in its 2^level tokens, and
    which of these in the lower half of 2^(level + 1), if i is in the upper one."""
    which = tl.program_id(0)
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    at = (which * C + r) * C + c
    if which < LEVELS + 3:
        upto = (c <= r).to(tl.float32)
        bits = tl.maximum(which - 2, 0)
        middle = (r >> bits << bits) + ((1 << bits) >> 1) - 1
        between = upto - (c <= middle).to(tl.float32)
        found = tl.where(which == 0, upto, tl.where(which == 1, 1 - upto, between))
        tl.store(sums_ptr + at, found.to(sums_ptr.dtype.element_ty))
    apart = r ^ c
    here = tl.where(which <= LEVELS, apart >> which == 0, apart >> tl.maximum(which - LEVELS - 1, 0) == 1)
    tl.store(pairs_ptr + at, (here & (c < r)).to(pairs_ptr.dtype.element_ty))


@jit
def _pairs_at(bits, low, LEVELS: tl.constexpr):
    """Which table has the pairs for which 2^bits tokens do: all of them in the least blocks, and in
    larger ones those of the two halves."""
    return tl.where(bits == low, bits, LEVELS + bits)


@jit
def _table(ptr, which, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.load(ptr + (which * C + i[:, None]) * C + i[None, :])


@jit
def _sums(ptr, which, x, C: tl.constexpr, PRECISION: tl.constexpr):
    """A table times x, in fp32 or in two parts of bf16: what is added up is
    between two tokens, so that nothing large cancels."""
    table = _table(ptr, which, C)
    if tl.bfloat16 == ptr.dtype.element_ty:
        high, low = _cut(x, tl.bfloat16)
        found = tl.dot(table, low)
        found = tl.dot(table, high, found)
    else:
        found = tl.dot(table, x, input_precision=PRECISION)
    return found


@jit
def _diagonal(x, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), 1)


@jit
def _kda_prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr, Q_ptr, P_ptr, vec_ptr, norm_ptr, low_ptr, decayed_ptr, last_ptr,
    sums_ptr, pairs_ptr, sq, sk, H, scale,
    NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, LEVELS: tl.constexpr,
    INNER: tl.constexpr, SOLVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: Q, P, beta, k and q with their decays, and for how many tokens one
    product does, 2 to the power of ``low``."""
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
        P = tl.zeros((C, C), tl.float32)
        L = tl.zeros((C, C), tl.float32)
        low = LEVELS + 0 * length
        for start in range(0, DK, BLOCK_K):
            col = start + tl.arange(0, BLOCK_K)
            known = (col < DK)[None, :]
            g = _logarithms(g_ptr, row, length, h, start, H, C, DK, BLOCK_K)
            last = tl.sum(g, 0)
            k = _columns(k_ptr, row, h, start, end, sk, DK, C, BLOCK_K)
            q = _columns(q_ptr, row, h, start, end, sq, DK, C, BLOCK_K)
            tl.store(last_ptr + at * DK + col, tl.exp2(last), mask=col < DK)
            decayed = decayed_ptr + at * (3 * C * DK) + i[:, None] * DK + col[None, :]
            left = tl.exp2(_sums(sums_ptr, 0, g, C, SOLVE))
            tl.store(decayed + QIN * C * DK, (q * (rq * scale)[:, None] * left).to(DT), mask=known)
            tl.store(decayed + KIN * C * DK, (k * rk[:, None] * left).to(DT), mask=known)
            behind = tl.exp2(_sums(sums_ptr, 1, g, C, SOLVE))
            tl.store(decayed + KOUT * C * DK, (k * rk[:, None] * behind).to(DT), mask=known)
            k, q = (k * (unit_k * LARGE)[:, None]).to(UNIT), (q * (unit_q * LARGE)[:, None]).to(UNIT)
            bits = LEVELS + 1 + 0 * length
            fits = length < 0
            while not fits:
                bits -= 1
                after = _sums(sums_ptr, 2 + bits, g, C, SOLVE)
                fits = (tl.max(tl.max(tl.abs(after), 1), 0) <= REACH) | (bits == 0)
                here = _table(pairs_ptr, _pairs_at(bits, tl.where(fits, bits, -1), LEVELS), C).to(tl.float32)
                x = tl.exp2(tl.minimum(after, REACH)).to(UNIT)
                written = tl.trans(k * tl.exp2(tl.minimum(-after, REACH)).to(UNIT))
                # of what is not here, some is infinite
                L += tl.where(here > 0, tl.dot(k * x, written, input_precision=INNER), 0.0)
                P += tl.where(here > 0, tl.dot(q * x, written, input_precision=INNER), 0.0)
            low = tl.minimum(low, bits)
        tl.store(low_ptr + at, low)
        size_k, size_q = rk / (unit_k * LARGE), rq / (unit_q * LARGE) * scale
        P *= size_q[:, None] * size_k[None, :]
        P = tl.where(i[:, None] == i[None, :], (qk * rq * rk * scale)[:, None], P)
        _put_square(P_ptr, at, P, SPLIT, C)
        beta = tl.load(beta_ptr + (row.to(tl.int64) * H + h) + i * H, mask=i < length, other=0.0).to(tl.float32)
        # so that e = d / beta
        beta = tl.where(tl.abs(beta) < TINY, TINY, beta)
        tl.store(vec_ptr + at * (VECTORS * C) + BETA * C + i, beta)
        _put_square(Q_ptr, at, _lower_solve(L * size_k[:, None] * size_k[None, :], beta, C, SOLVE), SPLIT, C)


@jit
def _kda_inputs(
    g_ptr, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, z_ptr, d_ptr, d_low_ptr, S_ptr, dS_ptr, norm_ptr, last_ptr, low_ptr,
    vec_ptr, sums_ptr, pairs_ptr, own_ptr, part_ptr, chunks_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, sq, sk, sv, sdo, H,
    scale,
    NORM: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, LEVELS: tl.constexpr, INNER: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: dq, dk, dg and dbeta, some columns after others."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = dq_ptr.dtype.element_ty
        UNIT: tl.constexpr = tl.float16 if tl.bfloat16 == DT else tl.float32
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        live = i < length
        at = n.to(tl.int64) * H + h
        first = row.to(tl.int64) * H + h
        dbeta = tl.zeros((C,), tl.float32)
        for slice in tl.static_range(SLICES):
            dbeta += tl.load(part_ptr + (at * SLICES + slice) * (2 * C) + i)
        tl.store(dbeta_ptr + first + i * H, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
        do = _tile(do_ptr, row, h, 0, end, sdo, DV, C, BLOCK_V, TMA)
        z = _tile(z_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V, TMA)
        d = _tile(d_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V, TMA)
        d_low = d
        if SPLIT:
            d_low = _tile(d_low_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V, TMA)
        dot_q = tl.zeros((C,), tl.float32)
        dot_k = tl.zeros((C,), tl.float32)
        if NORM:
            o = _columns(o_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V).to(tl.float32)
            dot_q += tl.sum(o * _tile(do_ptr, row, h, 0, end, sdo, DV, C, BLOCK_V, TMA).to(tl.float32), 1)
            v = _columns(v_ptr, row, h, 0, end, sv, DV, C, BLOCK_V).to(tl.float32)
            beta = tl.load(vec_ptr + at * (VECTORS * C) + BETA * C + i)
            dot_k += 2.0 * beta * dbeta
            dot_k -= tl.sum(v * _tile(z_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V, TMA).to(tl.float32), 1)
        N = tl.dot(do, tl.trans(d), input_precision=PRECISION)
        M = tl.dot(z, tl.trans(d), input_precision=PRECISION)
        if SPLIT:
            # a product whose sum goes into another product would be spread over other warps
            N += tl.dot(do, tl.trans(d_low), input_precision=PRECISION)
            M += tl.dot(z, tl.trans(d_low), input_precision=PRECISION)
        norms = norm_ptr + at * (4 * C) + i
        rq, rk = tl.load(norms) * tl.cast(scale, tl.float32), tl.load(norms + C)
        unit_q, unit_k = tl.load(norms + 2 * C), tl.load(norms + 3 * C)
        # by TMA, rows that are not live may be anything
        r, c = i[:, None], i[None, :]
        N = tl.where((r >= c) & live[:, None], N, 0.0)
        itself = _diagonal(N, C)
        M = tl.where((r > c) & live[:, None], -M, 0.0)
        if NORM:
            N *= tl.cast(scale, tl.float32)
        else:
            N *= (rk / unit_k)[None, :] * (rq / unit_q)[:, None]
            M *= (rk / unit_k)[None, :] * (rk / unit_k)[:, None]
        size = tl.maximum(tl.maximum(tl.max(tl.abs(N), 1), tl.max(tl.abs(M), 1)), 1e-30)
        shrunk = 1 / size
        own = own_ptr + at * (2 * C * C) + i[:, None] * C + i[None, :]
        tl.store(own, (N * shrunk[:, None]).to(UNIT))
        tl.store(own + C * C, (M * shrunk[:, None]).to(UNIT))
        tl.debug_barrier()
        largest = tl.max(size, 0)
        size_q, size_k = size * unit_q / (rq * LARGE), size * unit_k / (rk * LARGE)
        size_w = largest * unit_k / (rk * LARGE)
        size /= largest
        # a token and itself have no decay, so dg has nothing of this; and what norms take off
        scaled_q = tl.load(norms) * tl.cast(scale, tl.float32)
        itself_q, itself_k = itself * rq * rk, itself * rk * scaled_q
        off_q, off_k = dot_q * tl.load(norms) * tl.load(norms), dot_k * rk * rk
        low = tl.load(low_ptr + at)
        for col in range(0, DK, BLOCK_K):
            ch = col + tl.arange(0, BLOCK_K)
            known = live[:, None] & (ch < DK)[None, :]
            out = i[:, None] * (H * DK) + ch[None, :]
            g = _logarithms(g_ptr, row, length, h, col, H, C, DK, BLOCK_K)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
            S = _columns_of_state(S_ptr, n * H + h, col, 0, DK, DV, BLOCK_K, BLOCK_V, TMA)
            dS = _columns_of_state(dS_ptr, n * H + h, col, 0, DK, DV, BLOCK_K, BLOCK_V, TMA)
            dq = tl.dot(do, tl.trans(S), input_precision=PRECISION)
            read = tl.dot(z, tl.trans(S), input_precision=PRECISION)
            written = tl.dot(d, tl.trans(dS), input_precision=PRECISION)
            left = tl.exp2(_sums(sums_ptr, 0, g, C, SOLVE))
            dq *= left
            read *= -left
            written *= tl.exp2(_sums(sums_ptr, 1, g, C, SOLVE))
            carried = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
            carried *= tl.load(last_ptr + at * DK + ch, mask=ch < DK, other=0.0)
            carried += tl.sum(tl.where(live[:, None], written * k * rk[:, None], 0.0), 0)
            keys, queries = (k * (unit_k * LARGE)[:, None]).to(UNIT), (q * (unit_q * LARGE)[:, None]).to(UNIT)
            for bits in tl.range(low, LEVELS + 1, num_stages=1):
                after = _sums(sums_ptr, 2 + bits, g, C, SOLVE)
                x = tl.exp2(tl.minimum(after, REACH))
                y = tl.exp2(tl.minimum(-after, REACH))
                here = _table(pairs_ptr, _pairs_at(bits, low, LEVELS), C)
                N_here, M_here = tl.load(own) * here, tl.load(own + C * C) * here
                other = keys * y.to(UNIT)
                # factors keep the products apart, see N
                dq += tl.dot(N_here, other, input_precision=INNER) * (x * size_q[:, None])
                read += tl.dot(M_here, other, input_precision=INNER) * (x * size_k[:, None])
                x = x * size[:, None]
                part = tl.dot(tl.trans(N_here), queries * x.to(UNIT), input_precision=INNER)
                part = tl.dot(tl.trans(M_here), keys * x.to(UNIT), part, input_precision=INNER)
                written += part * (y * size_w[:, None])
            dg = dq * q * rq[:, None] + (read - written) * k * rk[:, None]
            dg = tl.where(live[:, None], dg, 0.0)
            dg += _sums(sums_ptr, 1, dg, C, SOLVE) + carried[None, :]
            tl.store(dg_ptr + first * DK + out, dg.to(dg_ptr.dtype.element_ty), mask=known)
            dq = dq * scaled_q[:, None] + k * itself_k[:, None] - q * off_q[:, None]
            dk = (read + written) * rk[:, None] + q * itself_q[:, None] - k * off_k[:, None]
            tl.store(dq_ptr + first * DK + out, dq.to(DT), mask=known)
            tl.store(dk_ptr + first * DK + out, dk.to(DT), mask=known)
