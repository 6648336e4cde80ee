"""The kernels that ``kda`` has of its own, beside those of ``delta_kernels``: ``_kda_prepare``
computes Q, P, and the keys and queries with their decays, for all chunks at once; in the backward,
``_kda_pairs`` computes dbeta, N and M, and from these and the gradients of states ``_kda_inputs``
those of q, k and g. ``_kda_tables`` has the matrices that add up decays between tokens.

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
    _origin,
    _put_square,
    _tile,
)

# operands of unit length are this times larger in fp16, and for some tokens one product does if each
# of their decays is between 2^-REACH and 2^REACH from the middle one: so both have all bits of fp16
LARGE = tl.constexpr(16.0)
REACH = tl.constexpr(11.0)
# for each chunk and head of a backward, C numbers each: the size of a row of N and M beside the
# largest; the largest with k's unit, and the size with q's; what a token gives itself; what norms take off
SIZE, TO_K, TO_Q, ITSELF, OFF_Q, OFF_K = (tl.constexpr(i) for i in range(6))
ROWS = tl.constexpr(6)


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
def _logarithms(g_ptr, row, end, h, col, H, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """g of a chunk, of some channels and in units of log 2."""
    g = _columns(g_ptr, row, h, col, end, H * DK, DK, C, BLOCK_K).to(tl.float32)
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
def _table(ptr, which, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.load(ptr + (which * C + i[:, None]) * C + i[None, :])


@jit
def _pairs(ptr, bits, low, LEVELS: tl.constexpr, C: tl.constexpr):
    """The pairs for which 2^bits tokens do: all of them in the least blocks, and in larger ones those
    of the two halves."""
    return _table(ptr, tl.where(bits == low, bits, LEVELS + bits), C)


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
            g = _logarithms(g_ptr, row, end, h, start, H, C, DK, BLOCK_K)
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
                fits = (tl.max(tl.abs(after)) <= REACH) | (bits == 0)
                here = _pairs(pairs_ptr, bits, tl.where(fits, bits, -1), LEVELS, C).to(tl.float32)
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
def _row(x, which, C: tl.constexpr):
    """A number of each row, beside a tile."""
    return tl.load(x + which * C + tl.arange(0, C)[:, None])


@jit
def _kda_pairs(
    v_ptr, o_ptr, do_ptr, z_ptr, d_ptr, d_low_ptr, norm_ptr, vec_ptr, part_ptr, chunks_ptr, own_ptr, rows_ptr,
    dbeta_ptr, sv, sdo, H, scale,
    NORM: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, C: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_V: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One chunk and one head: dbeta, and what dq, dk and dg need of products of values: N and M,
    each row divided by its largest number, and factors of rows."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        live = (i < length)[:, None]
        at = n.to(tl.int64) * H + h
        dbeta = tl.zeros((C,), tl.float32)
        for slice in tl.static_range(SLICES):
            dbeta += tl.load(part_ptr + (at * SLICES + slice) * (2 * C) + i)
        tl.store(dbeta_ptr + (row.to(tl.int64) * H + h) + i * H, dbeta.to(dbeta_ptr.dtype.element_ty), mask=i < length)
        of_d = row - _origin(chunks_ptr, FULL)
        N = tl.zeros((C, C), tl.float32)
        M = tl.zeros((C, C), tl.float32)
        off_q = tl.zeros((C,), tl.float32)
        off_k = tl.zeros((C,), tl.float32)
        for v0 in range(0, DV, BLOCK_V):
            do = _tile(do_ptr, row, h, v0, end, sdo, DV, C, BLOCK_V, TMA)
            z = _tile(z_ptr, row, h, v0, end, H * DV, DV, C, BLOCK_V, TMA)
            d = _tile(d_ptr, of_d, h, v0, of_d + length, H * DV, DV, C, BLOCK_V, TMA)
            N = tl.dot(do, tl.trans(d), N, input_precision=PRECISION)
            M = tl.dot(z, tl.trans(d), M, input_precision=PRECISION)
            if SPLIT:
                d_low = _tile(d_low_ptr, of_d, h, v0, of_d + length, H * DV, DV, C, BLOCK_V, TMA)
                N = tl.dot(do, tl.trans(d_low), N, input_precision=PRECISION)
                M = tl.dot(z, tl.trans(d_low), M, input_precision=PRECISION)
            if NORM:
                o = _columns(o_ptr, row, h, v0, end, H * DV, DV, C, BLOCK_V).to(tl.float32)
                off_q += tl.sum(o * do.to(tl.float32), 1)
                v = _columns(v_ptr, row, h, v0, end, sv, DV, C, BLOCK_V).to(tl.float32)
                off_k -= tl.sum(v * z.to(tl.float32), 1)
        norms = norm_ptr + at * (4 * C) + i
        unscaled, rk = tl.load(norms), tl.load(norms + C)
        unit_q, unit_k = tl.load(norms + 2 * C), tl.load(norms + 3 * C)
        scale = tl.cast(scale, tl.float32)
        rq = unscaled * scale
        # by TMA, rows that are not live may be anything
        r, c = i[:, None], i[None, :]
        N = tl.where((r >= c) & live, N, 0.0)
        itself = tl.sum(tl.where(r == c, N, 0.0), 1)
        M = tl.where((r > c) & live, -M, 0.0)
        if NORM:
            N *= scale
        else:
            by_k = rk / unit_k
            N *= by_k[None, :] * (rq / unit_q)[:, None]
            M *= by_k[None, :] * by_k[:, None]
        size = tl.maximum(tl.maximum(tl.max(tl.abs(N), 1), tl.max(tl.abs(M), 1)), 1e-30)
        shrunk = 1 / size
        own = own_ptr + at * (2 * C * C) + r * C + c
        tl.store(own, (N * shrunk[:, None]).to(own_ptr.dtype.element_ty))
        tl.store(own + C * C, (M * shrunk[:, None]).to(own_ptr.dtype.element_ty))
        largest = tl.max(size[:, None])
        rows = rows_ptr + at * (ROWS * C) + i
        tl.store(rows + SIZE * C, size / largest)
        tl.store(rows + TO_K * C, largest * unit_k / (rk * LARGE))
        tl.store(rows + TO_Q * C, size * unit_q / (rq * LARGE))
        # a token and itself have no decay, so dg has nothing of this; and what norms take off
        tl.store(rows + ITSELF * C, itself * rq * rk)
        if NORM:
            off_q *= unscaled * unscaled
            beta = tl.load(vec_ptr + at * (VECTORS * C) + BETA * C + i)
            off_k = (off_k + 2.0 * beta * dbeta) * rk * rk
        tl.store(rows + OFF_Q * C, off_q)
        tl.store(rows + OFF_K * C, off_k)


@jit
def _kda_inputs(
    g_ptr, q_ptr, k_ptr, do_ptr, z_ptr, d_ptr, S_ptr, dS_ptr, norm_ptr, last_ptr, low_ptr, sums_ptr, pairs_ptr, own_ptr,
    rows_ptr, chunks_ptr, dq_ptr, dk_ptr, dg_ptr, sq, sk, sdo, H, scale,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LEVELS: tl.constexpr, INNER: tl.constexpr,
    SOLVE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """One chunk, one head and some columns: dq, dk and dg. First what keys write, then what keys and
    queries read, since registers have no room for all three. So keys and queries are loaded again
    where they are needed, and behind barriers, over which compilers move no load."""
    blocks: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    n, h, col = pid // blocks // H, pid // blocks % H, pid % blocks * BLOCK_K
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = dq_ptr.dtype.element_ty
        UNIT: tl.constexpr = own_ptr.dtype.element_ty
        i = tl.arange(0, C)
        live = (i < length)[:, None]
        ch = col + tl.arange(0, BLOCK_K)
        at = n.to(tl.int64) * H + h
        norms, rows = norm_ptr + at * (4 * C), rows_ptr + at * (ROWS * C)
        own = own_ptr + at * (2 * C * C) + i[:, None] * C + i[None, :]
        low = tl.load(low_ptr + at)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        g = _logarithms(g_ptr, row, end, h, col, H, C, DK, BLOCK_K)
        k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
        of_d = row - _origin(chunks_ptr, FULL)
        d = _tile(d_ptr, of_d, h, 0, of_d + length, H * DV, DV, C, BLOCK_V, TMA)
        state = (n * H + h) * DK
        S = _tile(S_ptr, state + col, 0, 0, state + DK, DV, DV, BLOCK_K, BLOCK_V, TMA)
        dS = _tile(dS_ptr, state + col, 0, 0, state + DK, DV, DV, BLOCK_K, BLOCK_V, TMA)
        carried = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        carried *= tl.load(last_ptr + at * DK + ch, mask=ch < DK, other=0.0)
        written = tl.dot(d, tl.trans(dS), input_precision=PRECISION)
        written *= tl.exp2(_sums(sums_ptr, 1, g, C, SOLVE))
        carried += tl.sum(tl.where(live, written * k * _row(norms, 1, C), 0.0), 0)
        for bits in tl.range(low, LEVELS + 1, num_stages=1):
            after = _sums(sums_ptr, 2 + bits, g, C, SOLVE)
            x = (tl.exp2(tl.minimum(after, REACH)) * _row(rows, SIZE, C)).to(UNIT)
            tl.debug_barrier()
            q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
            here = _pairs(pairs_ptr, bits, low, LEVELS, C)
            queries = (q * (_row(norms, 2, C) * LARGE)).to(UNIT) * x
            part = tl.dot(tl.trans(tl.load(own) * here), queries, input_precision=INNER)
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            keys = (k * (_row(norms, 3, C) * LARGE)).to(UNIT) * x
            part = tl.dot(tl.trans(tl.load(own + C * C) * here), keys, part, input_precision=INNER)
            written += part * (tl.exp2(tl.minimum(-after, REACH)) * _row(rows, TO_K, C))
        do = _tile(do_ptr, row, h, 0, end, sdo, DV, C, BLOCK_V, TMA)
        z = _tile(z_ptr, row, h, 0, end, H * DV, DV, C, BLOCK_V, TMA)
        left = tl.exp2(_sums(sums_ptr, 0, g, C, SOLVE))
        dq = tl.dot(do, tl.trans(S), input_precision=PRECISION) * left
        read = tl.dot(z, tl.trans(S), input_precision=PRECISION) * -left
        for bits in tl.range(low, LEVELS + 1, num_stages=1):
            after = _sums(sums_ptr, 2 + bits, g, C, SOLVE)
            x = tl.exp2(tl.minimum(after, REACH))
            tl.debug_barrier()
            k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
            keys = (k * (_row(norms, 3, C) * LARGE)).to(UNIT) * tl.exp2(tl.minimum(-after, REACH)).to(UNIT)
            here = _pairs(pairs_ptr, bits, low, LEVELS, C)
            to_k = x * (_row(rows, SIZE, C) * _row(rows, TO_K, C))
            read += tl.dot(tl.load(own + C * C) * here, keys, input_precision=INNER) * to_k
            dq += tl.dot(tl.load(own) * here, keys, input_precision=INNER) * (x * _row(rows, TO_Q, C))
        out = (row.to(tl.int64) * H + h) * DK + (i[:, None] * (H * DK) + ch[None, :])
        known = live & (ch < DK)[None, :]
        k = _columns(k_ptr, row, h, col, end, sk, DK, C, BLOCK_K)
        q = _columns(q_ptr, row, h, col, end, sq, DK, C, BLOCK_K)
        rk = _row(norms, 1, C)
        dk = (read + written) * rk + q * _row(rows, ITSELF, C) - k * _row(rows, OFF_K, C)
        tl.store(dk_ptr + out, dk.to(DT), mask=known)
        rq = _row(norms, 0, C) * tl.cast(scale, tl.float32)
        dg = tl.where(live, dq * q * rq + (read - written) * k * rk, 0.0)
        dq = dq * rq + k * _row(rows, ITSELF, C) - q * _row(rows, OFF_Q, C)
        tl.store(dq_ptr + out, dq.to(DT), mask=known)
        dg += _sums(sums_ptr, 1, dg, C, SOLVE) + carried[None, :]
        tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=known)
