"""The kernels of ``gated_delta_rule``, whose docstring has the formulas and the letters. Three of
them serve ``kda``, too: there ``last_ptr`` has the decay of each channel behind a chunk, and q and
k come as what ``_kda_prepare`` made of them.

``_chunks`` says which tokens each chunk has, ``_prepare`` computes Q and P of all chunks at once,
``_states`` goes through the chunks of a document with a slice of the state in registers, and
``_outputs`` computes o of all chunks at once. In the backward, ``_dstates`` goes back with the
gradient of the state; ``_queries``, ``_keys`` and ``_gates`` compute the other gradients of all
chunks at once.

- Norms, decays and the scale of q are factors of rows, which multiply results in fp32: products
  have the raw q and k as operands, and no copy of these exists.
- The two loops over chunks have tokens or keys as rows of their sums, and values as columns: rows of
  a product on Hopper are 64 at least, and of columns a program can have few, so that there are many
  programs.
- A program of ``_queries`` and ``_keys`` has one head of keys and every head of values that shares
  it: nothing is added up in memory, and equal inputs give equal bits.
- With ``SPLIT``, of 16-bit data, the operands P, Q, y, d and N of products come in two parts, high
  and low, each with the bits of the dtype, but d does not where it meets the gradient of states.
  Where keys are nearly equal, sums of d almost cancel, and o, dq, dv and dbeta would have up to 7
  times the error of products in fp32.
- The diagonal of W cancels and is left out, and what leaves a chunk is a sum over the tokens
  before, so that dg has no difference of large sums.
"""

from __future__ import annotations

from liger_kernel.ops._core.tl import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(1e-6)
# for each chunk and head of values, C numbers each: the factors of rows of raw k before and behind
# the state and of raw q, beta, the running sum of g in units of log 2, and of fp32 data what this sum
# lost when it was rounded, since decays are e to differences of it
KIN, KOUT, QIN, BETA, GATE, GATE_LOW = (tl.constexpr(i) for i in range(6))
VECTORS = tl.constexpr(6)
ALL = tl.constexpr(2147483647)


@jit
def _chunks(documents_ptr, chunks_ptr, cu_ptr, T, M, tokens, C: tl.constexpr, BLOCK: tl.constexpr):
    """For each document its first token and its first chunk; for each of ``M`` chunks its first
    token and its length, zero for chunks that nobody needs. One program for each document, and one
    for what follows the last."""
    document = tl.program_id(0)
    last = tl.num_programs(0) - 1
    i = tl.arange(0, BLOCK)
    if cu_ptr is None:
        begin, end = document * T, document * T + T
        first = document * tl.cdiv(T, C)
    else:
        # bounds that are wrong lead to wrong results, but to no token that does not exist
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + document), 0), tokens).to(tl.int32)
        end = tl.load(cu_ptr + document + 1, mask=document < last, other=0)
        end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
        chunks = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, document, BLOCK):
            before = start + i < document
            left = tl.load(cu_ptr + start + i, mask=before, other=0)
            right = tl.load(cu_ptr + start + i + 1, mask=before, other=0)
            left, right = tl.minimum(tl.maximum(left, 0), tokens), tl.minimum(tl.maximum(right, 0), tokens)
            chunks += (tl.maximum(right - left + (C - 1), 0) // C).to(tl.int32)
        first = tl.minimum(tl.sum(chunks, 0), M)
    tl.store(documents_ptr + 2 * document, begin)
    tl.store(documents_ptr + 2 * document + 1, first)
    if document < last:
        for token0 in range(begin, end, BLOCK * C):
            at = first + (token0 - begin) // C + i
            token = token0 + i * C
            mask = (token < end) & (at < M)
            tl.store(chunks_ptr + 2 * at, token, mask=mask)
            tl.store(chunks_ptr + 2 * at + 1, tl.minimum(end - token, C), mask=mask)
    else:
        for unused in range(first, M, BLOCK):
            tl.store(chunks_ptr + 2 * (unused + i) + 1, i * 0, mask=unused + i < M)


@jit
def _tile(
    x, row, group, col, end, stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of a tensor (rows, groups, WIDTH), zero beyond ``WIDTH`` and from row ``end`` on. By
    TMA, such a row may be another document's: whoever reads it multiplies it by zero. Places within
    a tile have 32 bits: fewer registers."""
    if TMA:
        found = x.load([row, group * WIDTH + col])
    else:
        r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
        mask = (r < end - row)[:, None]
        if WIDTH % COLS != 0:
            mask = mask & (c < WIDTH - col)[None, :]
        first = x + (row.to(tl.int64) * stride + (group * WIDTH + col))
        found = tl.load(first + (r[:, None] * stride + c[None, :]), mask=mask, other=0.0)
    return found


@jit
def _state(
    x, at, col, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Some values of the state before a chunk, or of a gradient."""
    return _tile(x, at * DK, 0, col, at * DK + DK, DV, DV, ROWS, COLS, TMA)


@jit
def _put_state(
    x, at, col, state, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    if TMA:
        x.store([at * DK, col], state)
    else:
        r = tl.arange(0, ROWS)
        first = x + (at.to(tl.int64) * (DK * DV) + col)
        tl.store(first + (r[:, None] * DV + tl.arange(0, COLS)[None, :]), state, mask=(r < DK)[:, None])


@jit
def _decayed(
    x, which, at, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Of a chunk and head, the keys before or behind the state or the queries, with their decays."""
    return _tile(x, (at * 3 + which) * ROWS, 0, 0, ALL, WIDTH, WIDTH, ROWS, COLS, TMA)


@jit
def _left(vec, last_ptr, at, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The decay of a state behind a chunk, of all its rows or of each."""
    if last_ptr is None:
        left = tl.exp2(tl.load(vec + GATE * C + C - 1))
    else:
        row = tl.arange(0, BLOCK_K)
        left = tl.load(last_ptr + at * DK + row, mask=row < DK, other=0.0)[:, None]
    return left


@jit
def _split(x, DT: tl.constexpr):
    """x in fp32 as a sum of two parts."""
    high = x.to(DT)
    return high, (x - high.to(tl.float32)).to(DT)


@jit
def _cut(x, DT: tl.constexpr):
    """x in fp32 as a sum of two parts that no product has without each other: in bf16, the first is
    x without its last bits, which are fewer instructions than x rounded."""
    if tl.bfloat16 == DT:
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        high = x.to(DT).to(tl.float32)
    return high.to(DT), (x - high).to(DT)


@jit
def _product(a, a_low, b, b_low, total, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b, of both in two parts if ``SPLIT``."""
    total = tl.dot(a, b, total, input_precision=PRECISION)
    if SPLIT:
        total = tl.dot(a_low, b, total, input_precision=PRECISION)
        total = tl.dot(a, b_low, total, input_precision=PRECISION)
    return total


@jit
def _square(x, at, SPLIT: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The matrix of a chunk and head: its two parts, or itself twice."""
    high = _tile(x, at * ((1 + SPLIT) * C), 0, 0, ALL, C, C, C, C, TMA)
    low = high
    if SPLIT:
        low = _tile(x, at * (2 * C) + C, 0, 0, ALL, C, C, C, C, TMA)
    return high, low


@jit
def _put_square(ptr, at, x, SPLIT: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, C)
    places = ptr + at * ((1 + SPLIT) * C * C) + i[:, None] * C + i[None, :]
    high, low = _cut(x, ptr.dtype.element_ty)
    tl.store(places, high)
    if SPLIT:
        tl.store(places + C * C, low)


@jit
def _fine(a, b, PRECISION: tl.constexpr):
    """a b of fp32 operands; with "bf16x3", of two parts of each."""
    if PRECISION == "bf16x3":
        a, a_low = _cut(a, tl.bfloat16)
        b, b_low = _cut(b, tl.bfloat16)
        total = tl.dot(a, b_low)
        total = tl.dot(a_low, b, total)
        found = tl.dot(a, b, total)
    else:
        found = tl.dot(a, b, input_precision=PRECISION)
    return found


@jit
def _lower_solve(L, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L beta)^-1 L of a strictly lower triangular L: row by row in the blocks of 16 on the
    diagonal, all side by side, then by blocks.

    With D the inverses of the diagonal blocks, Y = D L, and N what Y beta has below these blocks,
    Q = Y - N Q, which as many steps as there are blocks solve exactly. A series of the whole would
    have terms up to 1e18 where keys are equal.
    """
    B: tl.constexpr = C // 16
    block = tl.arange(0, B)
    r = tl.arange(0, 16)
    i = tl.arange(0, C)
    same = block[:, None, None, None] == block[None, None, :, None]
    A = tl.reshape(L * beta[None, :], (B, 16, B, 16))
    A = tl.sum(tl.where(same, A, 0.0), 2)
    A = tl.trans(A, (0, 2, 1))
    X = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0) + tl.zeros((B, 16, 16), tl.float32)
    for n in tl.static_range(1, 16):
        a = tl.sum(tl.where(r[None, None, :] == n, A, 0.0), 2)
        s = tl.sum(a[:, :, None] * X, 1)
        X = tl.where(r[None, :, None] == n, X - s[:, None, :], X)
    D = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), (C, C))
    Y = _fine(D, L, PRECISION)
    N = tl.where(i[:, None] // 16 > i[None, :] // 16, Y, 0.0) * beta[None, :]
    Q = Y
    for _ in tl.static_range(B - 1):
        Q = Y - _fine(N, Q, PRECISION)
    return Q


@jit
def _decays(G, low, C: tl.constexpr, SPLIT: tl.constexpr):
    """E: the decay between a token and those before it, zero where these are behind it."""
    i = tl.arange(0, C)
    between = G[:, None] - G[None, :]
    if not SPLIT:
        between += low[:, None] - low[None, :]
    return tl.exp2(tl.where(i[:, None] >= i[None, :], between, -float("inf")))


@jit
def _gate(vec, C: tl.constexpr, SPLIT: tl.constexpr):
    """The running sum of g, and what it lost."""
    G = tl.load(vec + GATE * C + tl.arange(0, C))
    low = G
    if not SPLIT:
        low = tl.load(vec + GATE_LOW * C + tl.arange(0, C))
    return G, low


@jit
def _prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr, Q_ptr, P_ptr, vec_ptr, norm_ptr, sq, sk, HK, scale,
    GROUP: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One chunk and one head of values: Q, P, and the factors of rows."""
    HV = HK * GROUP
    n, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    hk = hv // GROUP
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = q_ptr.dtype.element_ty
        # the least beta whose product with a difference of values has the bits of q's dtype
        TINY: tl.constexpr = 2.0**-14 if tl.float16 == DT else 2.0**-80
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        t = row.to(tl.int64) + i
        live = i < length
        k = _tile(k_ptr, row, hk, 0, row + length, sk, DK, C, BLOCK_K, False)
        q = _tile(q_ptr, row, hk, 0, row + length, sq, DK, C, BLOCK_K, False)
        rk = tl.full((C,), 1.0, tl.float32)
        rq = tl.full((C,), 1.0, tl.float32)
        if NORM:
            rk = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
            rq = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS)
        if hv % GROUP == 0:
            norms = norm_ptr + (n.to(tl.int64) * HK + hk) * 2 * C + i
            tl.store(norms, rq)
            tl.store(norms + C, rk)
        scale = tl.cast(scale, tl.float32)
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * rk[:, None] * rk[None, :]
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (rq * scale)[:, None] * rk[None, :]
        g = tl.load(g_ptr + t * HV + hv, mask=live, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + t * HV + hv, mask=live, other=0.0).to(tl.float32)
        # so that e = d / beta
        beta = tl.where(tl.abs(beta) < TINY, TINY, beta)
        if SPLIT:
            G = tl.cumsum(g, 0) * LOG2E
            low = G
        else:
            exact = tl.cumsum(g.to(tl.float64), 0) * LOG2E
            G = exact.to(tl.float32)
            low = (exact - G.to(tl.float64)).to(tl.float32)
        # the decay behind the last token, as exactly as that of the last token itself
        behind = tl.sum(tl.where(i == C - 1, G, 0.0), 0) - G
        if not SPLIT:
            behind += tl.sum(tl.where(i == C - 1, low, 0.0), 0) - low
        at = n.to(tl.int64) * HV + hv
        vec = vec_ptr + at * (VECTORS * C) + i
        tl.store(vec + KIN * C, tl.where(live, rk * tl.exp2(G), 0.0))
        tl.store(vec + KOUT * C, tl.where(live, rk * tl.exp2(behind), 0.0))
        tl.store(vec + QIN * C, tl.where(live, rq * scale * tl.exp2(G), 0.0))
        tl.store(vec + BETA * C, beta)
        tl.store(vec + GATE * C, G)
        if not SPLIT:
            tl.store(vec + GATE_LOW * C, low)
        E = _decays(G, low, C, SPLIT)
        _put_square(P_ptr, at, qk * E, SPLIT, C)
        Q = _lower_solve(tl.where(i[:, None] > i[None, :], kk * E, 0.0), beta, C, SOLVE)
        _put_square(Q_ptr, at, Q, SPLIT, C)


@jit
def _walk(
    documents_ptr, lower, upper, HV,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What a program goes through, some values of one head of one document, as far as its chunks lie
    between two: its first token and chunk, counted from ``lower``, the token behind the document and
    the chunk behind the last, the head, the first value, and where states are, of documents and of
    the head. Last: whether the document begins here, ends here, or goes on from before or behind."""
    slices: tl.constexpr = DV // BLOCK_V
    pid = tl.program_id(0)
    document, hv, v0 = pid // (HV * slices), pid // slices % HV, pid % slices * BLOCK_V
    at = documents_ptr + 2 * document
    begin, first, end, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    # a document without tokens ends where it begins
    behind = tl.maximum(stop, first + 1)
    begins, ends = (first >= lower) & (first < upper), (behind > lower) & (behind <= upper)
    where = begins, ends, (first < lower) & (behind > lower), (first < upper) & (behind > upper)
    inside = tl.maximum(first, lower)
    state = tl.arange(0, BLOCK_K)[:, None] * DV + (v0 + tl.arange(0, BLOCK_V))[None, :]
    states = (document.to(tl.int64) * HV + hv) * (DK * DV) + state, hv * (DK * DV) + state
    stop = tl.minimum(stop, upper)
    return begin + (inside - first) * C, inside - lower, end, stop - lower, hv, v0, states, where


@jit
def _origin(chunks_ptr, FULL: tl.constexpr):
    """The token of which d has the first row: of all tokens, or of these chunks."""
    return 0 if FULL else tl.load(chunks_ptr)


@jit
def _enter(document_ptr, carry_ptr, states, known, mine, goes_on, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """The state with which a walk begins: of the document, or of a walk that came before."""
    S = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if document_ptr is not None:
        S += tl.load(document_ptr + states[0], mask=known & mine, other=0.0).to(tl.float32)
    if carry_ptr is not None:
        S += tl.load(carry_ptr + states[1], mask=known & goes_on, other=0.0)
    return S


@jit
def _leave(S, document_ptr, carry_ptr, states, known, mine, goes_on):
    if document_ptr is not None:
        tl.store(document_ptr + states[0], S.to(document_ptr.dtype.element_ty), mask=known & mine)
    if carry_ptr is not None:
        tl.store(carry_ptr + states[1], S, mask=known & goes_on)


@jit
def _states(
    vec_ptr, last_ptr, k_ptr, v_ptr, Q_ptr, documents_ptr, chunks_ptr, h0_ptr, S_ptr, d_ptr, d_low_ptr, ht_ptr,
    from_ptr, to_ptr, sk, sv, lower, upper, HV,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Some values of one head of one document, chunk after chunk."""
    DT: tl.constexpr = d_ptr.dtype.element_ty
    # of few values, the state is stored beside the last product and not before the first, which waits
    # for it: 279 -> 225 us at 1 x 8192 tokens, and back 337 -> 305; of 64 values, that is slower
    LATE: tl.constexpr = BLOCK_V <= 32
    begin, first, end, stop, hv, v0, states, where = _walk(documents_ptr, lower, upper, HV, C, DK, DV, BLOCK_K, BLOCK_V)
    origin = _origin(chunks_ptr, FULL)
    i = tl.arange(0, C)
    vcol = v0 + tl.arange(0, BLOCK_V)
    known = (tl.arange(0, BLOCK_K) < DK)[:, None]
    S = _enter(h0_ptr, from_ptr, states, known, where[0], where[2], BLOCK_K, BLOCK_V)
    for n in tl.range(first, stop, num_stages=STAGES):
        row = begin + (n - first) * C
        at = n.to(tl.int64) * HV + hv
        if last_ptr is None:
            k = _tile(k_ptr, row, hv // GROUP, 0, end, sk, DK, C, BLOCK_K, TMA)
            behind = k
        else:
            k = _decayed(k_ptr, KIN, n * HV + hv, DK, C, BLOCK_K, TMA)
            behind = _decayed(k_ptr, KOUT, n * HV + hv, DK, C, BLOCK_K, TMA)
        v = _tile(v_ptr, row, hv, v0, end, sv, DV, C, BLOCK_V, TMA)
        Q, Q_low = _square(Q_ptr, n * HV + hv, SPLIT, C, TMA)
        vec = vec_ptr + at * (VECTORS * C)
        beta = tl.load(vec + BETA * C + i)
        S16 = S.to(DT)
        if not LATE:
            _put_state(S_ptr, n * HV + hv, v0, S16, DK, DV, BLOCK_K, BLOCK_V, TMA)
        y = tl.dot(k, S16, input_precision=PRECISION)
        if last_ptr is None:
            y *= tl.load(vec + KIN * C + i)[:, None]
        y = v.to(tl.float32) - y
        high, low = _cut(y * -beta[:, None], DT)
        d = _product(Q, Q_low, high, low, y, SPLIT, PRECISION) * beta[:, None]
        added = d
        if last_ptr is None:
            added = d * tl.load(vec + KOUT * C + i)[:, None]
        S *= _left(vec, last_ptr, at, C, DK, BLOCK_K)
        if LATE:
            _put_state(S_ptr, n * HV + hv, v0, S16, DK, DV, BLOCK_K, BLOCK_V, TMA)
        S = tl.dot(tl.trans(behind), added.to(DT), S, input_precision=PRECISION)
        out = (row - origin + i).to(tl.int64)[:, None] * (HV * DV) + hv * DV + vcol[None, :]
        high, low = _split(d, DT)
        tl.store(d_ptr + out, high, mask=(row + i < end)[:, None])
        if SPLIT:
            tl.store(d_low_ptr + out, low, mask=(row + i < end)[:, None])
    _leave(S, ht_ptr, to_ptr, states, known, where[1], where[3])


@jit
def _outputs(
    vec_ptr, q_ptr, P_ptr, S_ptr, d_ptr, d_low_ptr, chunks_ptr, o_ptr, sq, HV, CHANNELS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o = e^G q S + P d of one chunk and some values of one head."""
    slices: tl.constexpr = DV // BLOCK_V
    pid = tl.program_id(0)
    n, hv = pid // (HV * slices), pid // slices % HV
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        i = tl.arange(0, C)
        v0 = pid % slices * BLOCK_V
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        origin = _origin(chunks_ptr, FULL)
        at = n.to(tl.int64) * HV + hv
        if CHANNELS:
            q = _decayed(q_ptr, QIN, n * HV + hv, DK, C, BLOCK_K, False)
        else:
            q = _tile(q_ptr, row, hv // GROUP, 0, end, sq, DK, C, BLOCK_K, False)
        S = _state(S_ptr, n * HV + hv, v0, DK, DV, BLOCK_K, BLOCK_V, False)
        P, P_low = _square(P_ptr, n * HV + hv, SPLIT, C, False)
        d = _tile(d_ptr, row - origin, hv, v0, end - origin, HV * DV, DV, C, BLOCK_V, False)
        d_low = d
        if SPLIT:
            d_low = _tile(d_low_ptr, row - origin, hv, v0, end - origin, HV * DV, DV, C, BLOCK_V, False)
        o = tl.dot(q, S, input_precision=PRECISION)
        if not CHANNELS:
            o *= tl.load(vec_ptr + at * (VECTORS * C) + QIN * C + i)[:, None]
        o = _product(P, P_low, d, d_low, o, SPLIT, PRECISION)
        first = o_ptr + (row.to(tl.int64) * (HV * DV) + (hv * DV + v0))
        out = first + (i[:, None] * (HV * DV) + tl.arange(0, BLOCK_V)[None, :])
        tl.store(out, o.to(o_ptr.dtype.element_ty), mask=(i < length)[:, None])


@jit
def _dstates(
    vec_ptr, last_ptr, q_ptr, k_ptr, do_ptr, d_ptr, Q_ptr, P_ptr, documents_ptr, chunks_ptr, dht_ptr, dv_ptr, part_ptr,
    dS_ptr, dh0_ptr, from_ptr, to_ptr, sq, sk, sdo, lower, upper, HV,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The same values, from the last chunk to the first: dv, parts of dbeta and of what dg takes
    from what leaves a chunk, and for each chunk the gradient of the state behind it."""
    DT: tl.constexpr = dv_ptr.dtype.element_ty
    slices: tl.constexpr = DV // BLOCK_V
    LATE: tl.constexpr = BLOCK_V <= 32
    begin, first, end, stop, hv, v0, states, where = _walk(documents_ptr, lower, upper, HV, C, DK, DV, BLOCK_K, BLOCK_V)
    origin = _origin(chunks_ptr, FULL)
    i = tl.arange(0, C)
    vcol = v0 + tl.arange(0, BLOCK_V)
    known = (tl.arange(0, BLOCK_K) < DK)[:, None]
    dS = _enter(dht_ptr, from_ptr, states, known, where[1], where[3], BLOCK_K, BLOCK_V)
    for m in tl.range(0, stop - first, num_stages=STAGES):
        n = stop - 1 - m
        row = begin + (n - first) * C
        at = n.to(tl.int64) * HV + hv
        if last_ptr is None:
            k = _tile(k_ptr, row, hv // GROUP, 0, end, sk, DK, C, BLOCK_K, TMA)
            behind = k
            q = _tile(q_ptr, row, hv // GROUP, 0, end, sq, DK, C, BLOCK_K, TMA)
        else:
            k = _decayed(k_ptr, KIN, n * HV + hv, DK, C, BLOCK_K, TMA)
            behind = _decayed(k_ptr, KOUT, n * HV + hv, DK, C, BLOCK_K, TMA)
            q = _decayed(q_ptr, QIN, n * HV + hv, DK, C, BLOCK_K, TMA)
        do = _tile(do_ptr, row, hv, v0, end, sdo, DV, C, BLOCK_V, TMA)
        d = _tile(d_ptr, row - origin, hv, v0, end - origin, HV * DV, DV, C, BLOCK_V, TMA)
        P, P_low = _square(P_ptr, n * HV + hv, SPLIT, C, TMA)
        Q, Q_low = _square(Q_ptr, n * HV + hv, SPLIT, C, TMA)
        vec = vec_ptr + at * (VECTORS * C)
        beta = tl.load(vec + BETA * C + i)
        dS16 = dS.to(DT)
        if not LATE:
            _put_state(dS_ptr, n * HV + hv, v0, dS16, DK, DV, BLOCK_K, BLOCK_V, TMA)
        dd = tl.dot(behind, dS16, input_precision=PRECISION)
        if last_ptr is None:
            dd *= tl.load(vec + KOUT * C + i)[:, None]
        outer = tl.sum(dd * d.to(tl.float32), 1)
        dd = tl.dot(tl.trans(P), do, dd, input_precision=PRECISION)
        if SPLIT:
            dd = tl.dot(tl.trans(P_low), do, dd, input_precision=PRECISION)
        high, low = _cut(dd * -beta[:, None], DT)
        x = _product(tl.trans(Q), tl.trans(Q_low), high, low, dd, SPLIT, PRECISION)
        part = part_ptr + (at * slices + v0 // BLOCK_V) * (2 * C) + i
        tl.store(part, tl.sum(x * d.to(tl.float32), 1) / beta)
        tl.store(part + C, outer)
        z = x * beta[:, None]
        out = (row + i).to(tl.int64)[:, None] * (HV * DV) + hv * DV + vcol[None, :]
        tl.store(dv_ptr + out, z.to(DT), mask=(row + i < end)[:, None])
        if LATE:
            _put_state(dS_ptr, n * HV + hv, v0, dS16, DK, DV, BLOCK_K, BLOCK_V, TMA)
        dS *= _left(vec, last_ptr, at, C, DK, BLOCK_K)
        if last_ptr is None:
            through_o = (do.to(tl.float32) * tl.load(vec + QIN * C + i)[:, None]).to(DT)
            erased = z * -tl.load(vec + KIN * C + i)[:, None]
        else:
            through_o = do
            erased = -z
        dS = tl.dot(tl.trans(q), through_o, dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(k), erased.to(DT), dS, input_precision=PRECISION)
    _leave(dS, dh0_ptr, to_ptr, states, known, where[0], where[2])


@jit
def _of_normalised(dx, x, r, NORM: tl.constexpr):
    """The gradient of x, from that of its rows times r, their inverse norms."""
    if NORM:
        unit = x.to(tl.float32) * r[:, None]
        dx = (dx - unit * tl.sum(dx * unit, 1)[:, None]) * r[:, None]
    return dx


@jit
def _places_of_N(N_ptr, row, hk, h, HK, C: tl.constexpr, WIDTH: tl.constexpr):
    """Where the matrix of a chunk and of a head of values lies, by rows of tokens: in the place of
    dk, if that has room for all heads that share a head of keys."""
    i = tl.arange(0, C)
    first = N_ptr + (row.to(tl.int64) * (HK * WIDTH) + (hk * WIDTH + h * C))
    return first + (i[:, None] * (HK * WIDTH) + i[None, :])


@jit
def _inner(x, y, C: tl.constexpr, PRECISION: tl.constexpr):
    """The products of rows of x and y, from one of matrices: registers have no room for y."""
    i = tl.arange(0, C)
    pairs = tl.dot(x.to(y.dtype), tl.trans(y), input_precision=PRECISION)
    return tl.sum(tl.where(i[:, None] == i[None, :], pairs, 0.0), 1)


@jit
def _queries(
    vec_ptr, q_ptr, k_ptr, do_ptr, d_ptr, S_ptr, norm_ptr, chunks_ptr, dq_ptr, sums_ptr, N_ptr,
    sq, sk, sdo, HK, tokens, scale,
    GROUP: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One chunk and one head of keys: dq, the part of dg that comes through q, and for ``_keys``
    the operand N with the factors of q. ``d_ptr`` has ``tokens`` rows, and as many of their low parts."""
    n, hk = tl.program_id(0) // HK, tl.program_id(0) % HK
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = dq_ptr.dtype.element_ty
        HV = HK * GROUP
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        of_d = row - _origin(chunks_ptr, FULL)
        live = i < length
        norms = norm_ptr + (n.to(tl.int64) * HK + hk) * 2 * C + i
        rk = tl.load(norms + C)
        scale = tl.cast(scale, tl.float32)
        rq = tl.load(norms)
        k = _tile(k_ptr, row, hk, 0, end, sk, DK, C, BLOCK_K, False)
        q = _tile(q_ptr, row, hk, 0, end, sq, DK, C, BLOCK_K, False)
        dq = tl.zeros((C, BLOCK_K), tl.float32)
        for h in range(GROUP):
            hv = hk * GROUP + h
            at = n.to(tl.int64) * HV + hv
            G, low = _gate(vec_ptr + at * (VECTORS * C), C, SPLIT)
            from_S = tl.zeros((C, BLOCK_K), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                do = _tile(do_ptr, row, hv, start, end, sdo, DV, C, BLOCK_V, TMA)
                S = _state(S_ptr, n * HV + hv, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                from_S = tl.dot(do, tl.trans(S), from_S, input_precision=PRECISION)
            from_S *= (tl.exp2(G) * scale)[:, None]
            inner = _inner(from_S, q, C, PRECISION) * rq
            dq += from_S
            N = tl.zeros((C, C), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                do = _tile(do_ptr, row, hv, start, end, sdo, DV, C, BLOCK_V, TMA)
                d = _tile(d_ptr, of_d, hv, start, of_d + length, HV * DV, DV, C, BLOCK_V, TMA)
                N = tl.dot(do, tl.trans(d), N, input_precision=PRECISION)
                if SPLIT:
                    d_low = _tile(d_ptr, tokens + of_d, hv, start, tokens + of_d + length, HV * DV, DV, C, BLOCK_V, TMA)
                    N = tl.dot(do, tl.trans(d_low), N, input_precision=PRECISION)
            # what d has behind the last token may be no number
            N = tl.where((i[:, None] >= i[None, :]) & live[:, None], N * _decays(G, low, C, SPLIT), 0.0) * scale
            tl.store(_places_of_N(N_ptr, row, hk, h, HK, C, WIDTH), (N * rq[:, None]).to(DT), mask=live[:, None])
            W = N * tl.dot(q, tl.trans(k), input_precision=PRECISION) * (rq[:, None] * rk[None, :])
            W = tl.where(i[:, None] > i[None, :], W, 0.0)
            sums = tl.where(live, inner, 0.0) + tl.sum(W, 1) - tl.sum(W, 0)
            tl.store(sums_ptr + at * (3 * C) + i, sums)
            high, rest = _cut(N * rk[None, :], DT)
            dq = tl.dot(high, k, dq, input_precision=PRECISION)
            if SPLIT:
                dq = tl.dot(rest, k, dq, input_precision=PRECISION)
        dq = _of_normalised(dq, _tile(q_ptr, row, hk, 0, end, sq, DK, C, BLOCK_K, False), rq, NORM)
        col = tl.arange(0, BLOCK_K)
        out = dq_ptr + (row.to(tl.int64) * (HK * DK) + hk * DK) + (i[:, None] * (HK * DK) + col[None, :])
        tl.store(out, dq.to(DT), mask=live[:, None] & (col < DK)[None, :])


@jit
def _keys(
    vec_ptr, q_ptr, k_ptr, z_ptr, d_ptr, S_ptr, dS_ptr, norm_ptr, sums_ptr, N_ptr, chunks_ptr, dk_ptr,
    sq, sk, HK, tokens,
    GROUP: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One chunk and one head of keys: dk, and for ``_gates`` the parts of dg that come through k."""
    n, hk = tl.program_id(0) // HK, tl.program_id(0) % HK
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        DT: tl.constexpr = dk_ptr.dtype.element_ty
        HV = HK * GROUP
        i = tl.arange(0, C)
        row = tl.load(chunks_ptr + 2 * n)
        end = row + length
        of_d = row - _origin(chunks_ptr, FULL)
        live = i < length
        below = (i[:, None] > i[None, :]) & live[:, None]
        rk = tl.load(norm_ptr + (n.to(tl.int64) * HK + hk) * 2 * C + C + i)
        k = _tile(k_ptr, row, hk, 0, end, sk, DK, C, BLOCK_K, False)
        q = _tile(q_ptr, row, hk, 0, end, sq, DK, C, BLOCK_K, False)
        dk = tl.zeros((C, BLOCK_K), tl.float32)
        for h in range(GROUP):
            hv = hk * GROUP + h
            at = n.to(tl.int64) * HV + hv
            vec = vec_ptr + at * (VECTORS * C)
            G, low = _gate(vec, C, SPLIT)
            last = tl.load(vec + GATE * C + C - 1)
            behind = last - G
            if not SPLIT:
                behind += tl.load(vec + GATE_LOW * C + C - 1) - low
            part = tl.zeros((C, BLOCK_K), tl.float32)
            M = tl.zeros((C, C), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                d = _tile(d_ptr, of_d, hv, start, of_d + length, HV * DV, DV, C, BLOCK_V, TMA)
                dS = _state(dS_ptr, n * HV + hv, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                z = _tile(z_ptr, row, hv, start, end, HV * DV, DV, C, BLOCK_V, TMA)
                part = tl.dot(d, tl.trans(dS), part, input_precision=PRECISION)
                M = tl.dot(z, tl.trans(d), M, input_precision=PRECISION)
                if SPLIT:
                    d_low = _tile(d_ptr, tokens + of_d, hv, start, tokens + of_d + length, HV * DV, DV, C, BLOCK_V, TMA)
                    M = tl.dot(z, tl.trans(d_low), M, input_precision=PRECISION)
            dk += part * tl.exp2(behind)[:, None]
            M = tl.where(below, -M * _decays(G, low, C, SPLIT), 0.0)
            W = M * (tl.dot(k, tl.trans(k), input_precision=PRECISION) * (rk[:, None] * rk[None, :]))
            sums = tl.sum(W, 1) - tl.sum(W, 0)
            # one of the two is zero
            both = (M * rk[None, :]).to(DT) + tl.trans((M * rk[:, None]).to(DT))
            dk = tl.dot(both, k, dk, input_precision=PRECISION)
            N = tl.load(_places_of_N(N_ptr, row, hk, h, HK, C, WIDTH), mask=live[:, None], other=0.0)
            dk = tl.dot(tl.trans(N), q, dk, input_precision=PRECISION)
            part = tl.zeros((C, BLOCK_K), tl.float32)
            carried = tl.zeros((BLOCK_K,), tl.float32)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                z = _tile(z_ptr, row, hv, start, end, HV * DV, DV, C, BLOCK_V, TMA)
                S = _state(S_ptr, n * HV + hv, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                part = tl.dot(z, tl.trans(S), part, input_precision=PRECISION)
                dS = _state(dS_ptr, n * HV + hv, start, DK, DV, BLOCK_K, BLOCK_V, TMA)
                carried += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
            tl.store(sums_ptr + at * (3 * C) + 2 * C, tl.sum(carried, 0) * tl.exp2(last))
            part *= -tl.exp2(G)[:, None]
            sums += tl.where(live, _inner(part, k, C, PRECISION) * rk, 0.0)
            tl.store(sums_ptr + at * (3 * C) + C + i, sums)
            dk += part
        dk = _of_normalised(dk, _tile(k_ptr, row, hk, 0, end, sk, DK, C, BLOCK_K, False), rk, NORM)
        col = tl.arange(0, BLOCK_K)
        out = dk_ptr + (row.to(tl.int64) * (HK * DK) + hk * DK) + (i[:, None] * (HK * DK) + col[None, :])
        tl.store(out, dk.to(DT), mask=live[:, None] & (col < DK)[None, :])


@jit
def _gates(
    sums_ptr, part_ptr, chunks_ptr, dg_ptr, dbeta_ptr, HV, SLICES: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One chunk and some heads of values: dg and dbeta."""
    n = tl.program_id(0)
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        i = tl.arange(0, C)[None, :]
        hv = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
        at = n.to(tl.int64) * HV + hv
        known = hv < HV
        sums = sums_ptr + at * (3 * C) + i
        rows = tl.load(sums, mask=known, other=0.0) + tl.load(sums + C, mask=known, other=0.0)
        dbeta = tl.zeros((BLOCK, C), tl.float32)
        outer = tl.zeros((BLOCK, C), tl.float32)
        for slice in tl.static_range(SLICES):
            part = part_ptr + (at * SLICES + slice) * (2 * C) + i
            dbeta += tl.load(part, mask=known, other=0.0)
            # of the tokens before: the token's own, taken from a sum, would leave its rounding
            outer += tl.load(part + C - 1, mask=known & (i > 0), other=0.0)
        dg = tl.cumsum(rows, 1, reverse=True) + tl.cumsum(outer, 1)
        dg += tl.load(sums_ptr + at * (3 * C) + 2 * C, mask=known, other=0.0)
        out = (tl.load(chunks_ptr + 2 * n) + i).to(tl.int64) * HV + hv
        mask = known & (i < length)
        tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        tl.store(dbeta_ptr + out, dbeta.to(dbeta_ptr.dtype.element_ty), mask=mask)
