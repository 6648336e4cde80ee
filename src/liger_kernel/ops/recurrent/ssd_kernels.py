"""The kernels of ``ssd``, whose docstring has the formulas and the letters.

``_steps`` computes dt and the running sum G of all chunks at once, ``_walk_states`` goes through the
chunks of a document with a slice of the state in registers, forward or backward, and ``_outputs``
computes y of all chunks at once. In the backward, ``_readers`` computes dC, ``_writers`` dx, dB and
dD, and ``_dsteps``, from what these two leave, the gradients of dt, its bias and A.

- A program of ``_outputs``, ``_readers`` or ``_writers`` has ``ROWS`` tokens of a chunk and ``HEADS``
  heads of a group, which share the product of B and C. What their gradients have in common is added
  up before its product with B or C, which is then one for all of these heads.
- Decays are factors of rows, in fp32; B and C enter products as they are.
- ``steps`` has, for each chunk and head, L numbers each: dt, G and, with ``PRECISE`` for fp32 data,
  what G lost when it was rounded: decays are e to differences of G, which are exact where G is large.
  Without ``PRECISE``, G is in units of log 2.
"""

from __future__ import annotations

from liger_kernel.ops._core.tl import exp, jit, load_row, log, tl
from liger_kernel.ops.recurrent.delta_kernels import LOG2E, _tile


@jit
def _softplus(x):
    """log(1 + e^x), as exact where e^x is small: there 1 + e^x loses bits of e^x, and a factor of
    as much as was lost repairs the logarithm. Linear above 20, as PyTorch's."""
    e = exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    found = tl.where(u == 1.0, e, log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, found)


@jit
def _decay(x, PRECISE: tl.constexpr):
    """e to a difference of G."""
    return exp(x) if PRECISE else tl.exp2(x)


@jit
def _product(a, b, PRECISION: tl.constexpr, PRECISE: tl.constexpr):
    """a b: with ``PRECISE`` a sum of sums of 16 products each, which rounds less than one sum of all."""
    if PRECISE and a.shape[1] > 16:
        parts: tl.constexpr = a.shape[1] // 16
        of_a, of_b = tl.reshape(a, (a.shape[0], parts, 16)), tl.reshape(b, (parts, 16, b.shape[1]))
        k = tl.arange(0, parts)
        found = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
        for part in tl.static_range(parts):
            left = tl.sum(tl.where((k == part)[None, :, None], of_a, 0.0), 1)
            right = tl.sum(tl.where((k == part)[:, None, None], of_b, 0.0), 0)
            found += tl.dot(left, right, input_precision=PRECISION)
    else:
        found = tl.dot(a, b, input_precision=PRECISION)
    return found


@jit
def _added(a, b, total, PRECISION: tl.constexpr, PRECISE: tl.constexpr):
    """total + a b: with ``PRECISE`` a sum of one sum a head."""
    if PRECISE:
        total += _product(a, b, PRECISION, PRECISE)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@jit
def _between(steps, i, j, CHUNK: tl.constexpr, PRECISE: tl.constexpr):
    """The logarithm of the decay from tokens j to tokens i of a chunk."""
    found = tl.load(steps + CHUNK + i) - tl.load(steps + CHUNK + j)
    if PRECISE:
        found += tl.load(steps + 2 * CHUNK + i) - tl.load(steps + 2 * CHUNK + j)
    return found


@jit
def _decays(steps, i, j, CHUNK: tl.constexpr, PRECISE: tl.constexpr):
    """E of readers i and writers j, one of them rows and one columns."""
    return _decay(tl.where(i >= j, _between(steps, i, j, CHUNK, PRECISE), -float("inf")), PRECISE)


@jit
def _given_steps(dt_ptr, bias_ptr, t, h, live, sdt, H):
    """What dt is computed from: (tokens, heads)."""
    raw = tl.load(dt_ptr + t[:, None] * sdt + h[None, :], mask=live, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        raw += load_row(bias_ptr, h, H)[None, :]
    return raw


@jit
def _steps(
    dt_ptr, bias_ptr, A_ptr, chunks_ptr, steps_ptr, sdt, H, low, high,
    SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dt and G, in units of log 2, of one chunk and some heads; dt is zero behind its end."""
    blocks = tl.cdiv(H, BLOCK_H)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, CHUNK)
    length = tl.load(chunks_ptr + 2 * n + 1)
    if length > 0:
        live = (i < length)[:, None] & (h < H)[None, :]
        t = tl.load(chunks_ptr + 2 * n).to(tl.int64) + i
        dt = _given_steps(dt_ptr, bias_ptr, t, h, live, sdt, H)
        if SOFTPLUS:
            dt = _softplus(dt)
        # unlike tl.minimum, a comparison leaves a NaN as it is
        dt = tl.where(dt < low, tl.cast(low, tl.float32), dt)
        dt = tl.where(live, tl.where(dt > high, tl.cast(high, tl.float32), dt), 0.0)
        A = load_row(A_ptr, h, H)
        at = steps_ptr + ((n * H + h) * ((2 + PRECISE) * CHUNK))[None, :] + i[:, None]
        tl.store(at, dt, mask=(h < H)[None, :])
        if PRECISE:
            exact = tl.cumsum(dt.to(tl.float64) * A.to(tl.float64)[None, :], 0)
            G = exact.to(tl.float32)
            tl.store(at + 2 * CHUNK, (exact - G.to(tl.float64)).to(tl.float32), mask=(h < H)[None, :])
        else:
            G = tl.cumsum(dt * A[None, :], 0) * LOG2E
        tl.store(at + CHUNK, G, mask=(h < H)[None, :])


@jit
def _walk_states(
    x_ptr, B_ptr, steps_ptr, documents_ptr, given_ptr, S_ptr, found_ptr, other_ptr, carried_ptr, sx, sB, H,
    GROUP: tl.constexpr, BACK: tl.constexpr, CHUNK: tl.constexpr, DP: tl.constexpr, DN: tl.constexpr,
    PRECISION: tl.constexpr, PRECISE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one head of one document, chunk after chunk: what is before each
    of them. With ``BACK``, x and B are dy and C, and what comes out is the gradient of the state
    behind each chunk, from the last to the first, and if it is needed, its product with the state
    before the chunk, the ``other``."""
    slices: tl.constexpr = BLOCK_N // BLOCK_S
    pid = tl.program_id(0)
    document, h, n0 = pid // (H * slices), pid // slices % H, pid % slices * BLOCK_S
    at = documents_ptr + 2 * document
    begin, first, end, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    i = tl.arange(0, CHUNK)
    p, col = tl.arange(0, BLOCK_P)[:, None], n0 + tl.arange(0, BLOCK_S)[None, :]
    known = (p < DP) & (col < DN)
    state = p * DN + col
    whole = (document.to(tl.int64) * H + h) * (DP * DN)
    S = tl.zeros((BLOCK_P, BLOCK_S), tl.float32)
    if given_ptr is not None:
        S += tl.load(given_ptr + whole + state, mask=known, other=0.0).to(tl.float32)
    for m in tl.range(0, stop - first, num_stages=STAGES):
        n = stop - 1 - m if BACK else first + m
        row = begin + (n - first) * CHUNK
        x = _tile(x_ptr, row, h, 0, end, sx, DP, CHUNK, BLOCK_P, False)
        B = _columns(B_ptr, row, h // GROUP, n0, end, sB, DN, CHUNK, BLOCK_S)
        steps = steps_ptr + (n.to(tl.int64) * H + h) * ((2 + PRECISE) * CHUNK)
        last = tl.load(steps + 2 * CHUNK - 1)
        if BACK:
            factor = _decay(tl.load(steps + CHUNK + i), PRECISE)
        else:
            factor = tl.load(steps + i) * _decay(_between(steps, i * 0 + (CHUNK - 1), i, CHUNK, PRECISE), PRECISE)
        own = (n.to(tl.int64) * H + h) * (DP * DN) + state
        tl.store(S_ptr + own, S.to(S_ptr.dtype.element_ty), mask=known)
        if carried_ptr is not None:
            other = tl.load(other_ptr + own, mask=known, other=0.0).to(tl.float32)
            tl.store(carried_ptr + (n.to(tl.int64) * H + h) * slices + n0 // BLOCK_S, tl.sum(other * S))
        left = (tl.trans(x).to(tl.float32) * factor[None, :]).to(B.dtype)
        S = tl.dot(left, B, S * _decay(last, PRECISE), input_precision=PRECISION)
    if found_ptr is not None:
        tl.store(found_ptr + whole + state, S.to(found_ptr.dtype.element_ty), mask=known)


@jit
def _columns(x, row, group, col, end, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Like ``_tile``, of columns that do not divide ``WIDTH``, either."""
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    at = x + r.to(tl.int64)[:, None] * stride + (group * WIDTH + c)[None, :]
    return tl.load(at, mask=(r < end)[:, None] & (c < WIDTH)[None, :], other=0.0)


@jit
def _state(S_ptr, n, h, H, DP: tl.constexpr, DN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The state of a chunk and head."""
    p, col = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_N)[None, :]
    at = S_ptr + (n.to(tl.int64) * H + h) * (DP * DN) + p * DN + col
    if DP == BLOCK_P and DN == BLOCK_N:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(p < DP) & (col < DN), other=0.0)
    return found


@jit
def _program(chunks_ptr, GROUPS, CHUNK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """What a program has: its chunk, the group, which of its parts and the heads of that, the first
    of its tokens in the chunk and in all, and where the chunk begins and ends."""
    tiles: tl.constexpr = CHUNK // ROWS
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    n = pid // (tiles * parts * GROUPS)
    group, part, r = pid // parts % GROUPS, pid % parts, pid // (parts * GROUPS) % tiles * ROWS
    begin = tl.load(chunks_ptr + 2 * n)
    end = begin + tl.load(chunks_ptr + 2 * n + 1)
    h0 = group * GROUP + part * HEADS
    return n, group, part, h0, tl.minimum(h0 + HEADS, (group + 1) * GROUP), r, begin + r, begin, end


@jit
def _skip(D_ptr, h, DP: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr):
    """D of a head: one number for all of its values or one for each."""
    p = tl.arange(0, BLOCK_P)
    if WIDE:
        D = tl.load(D_ptr + h * DP + p, mask=p < DP, other=0.0)
    else:
        D = tl.load(D_ptr + h + p * 0)
    return D.to(tl.float32)


@jit
def _outputs(
    x_ptr, B_ptr, C_ptr, D_ptr, steps_ptr, S_ptr, chunks_ptr, y_ptr, sx, sB, sC, GROUPS,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    DP: tl.constexpr, DN: tl.constexpr, PRECISION: tl.constexpr, PRECISE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of some tokens of a chunk and some heads."""
    n, group, _, h0, stop, r, row, begin, end = _program(chunks_ptr, GROUPS, CHUNK, ROWS, GROUP, HEADS)
    if row < end:
        DT: tl.constexpr = y_ptr.dtype.element_ty
        H = GROUPS * GROUP
        i, j, p = r + tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
        C = _columns(C_ptr, row, group, 0, end, sC, DN, ROWS, BLOCK_N)
        B = _columns(B_ptr, begin, group, 0, end, sB, DN, CHUNK, BLOCK_N)
        CB = _product(C, tl.trans(B), PRECISION, PRECISE)
        t = begin.to(tl.int64) + i
        mask = (t < end)[:, None] & (p < DP)[None, :]
        for h in tl.range(h0, stop, num_stages=STAGES):
            x = _tile(x_ptr, begin, h, 0, end, sx, DP, CHUNK, BLOCK_P, False)
            S = _state(S_ptr, n, h, H, DP, DN, BLOCK_P, BLOCK_N)
            steps = steps_ptr + (n.to(tl.int64) * H + h) * ((2 + PRECISE) * CHUNK)
            dt, own = tl.load(steps + j), tl.load(steps + CHUNK + i)
            E = _decays(steps, i[:, None], j[None, :], CHUNK, PRECISE)
            y = _product(C, tl.trans(S), PRECISION, PRECISE) * _decay(own, PRECISE)[:, None]
            y = tl.dot((CB * E * dt[None, :]).to(DT), x, y, input_precision=PRECISION)
            if D_ptr is not None:
                mine = _tile(x_ptr, row, h, 0, end, sx, DP, ROWS, BLOCK_P, False)
                y += mine.to(tl.float32) * _skip(D_ptr, h, DP, WIDE, BLOCK_P)[None, :]
            out = t[:, None] * (H * DP) + (h * DP + p)[None, :]
            tl.store(y_ptr + out, y.to(DT), mask=mask)


@jit
def _readers(
    x_ptr, B_ptr, C_ptr, dy_ptr, steps_ptr, S_ptr, chunks_ptr, dC_ptr, rows_ptr,
    sx, sB, sC, sdy, GROUPS, M,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    DP: tl.constexpr, DN: tl.constexpr, PRECISION: tl.constexpr, PRECISE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tokens as those that read states: dC, summed over the heads of this program, and with
    ``rows`` what their y says of the decays."""
    n, group, part, h0, stop, r, row, begin, end = _program(chunks_ptr, GROUPS, CHUNK, ROWS, GROUP, HEADS)
    if row < end:
        DT: tl.constexpr = x_ptr.dtype.element_ty
        H = GROUPS * GROUP
        i, j = r + tl.arange(0, ROWS), tl.arange(0, CHUNK)
        before = i[:, None] > j[None, :]
        C = _columns(C_ptr, row, group, 0, end, sC, DN, ROWS, BLOCK_N)
        B = _columns(B_ptr, begin, group, 0, end, sB, DN, CHUNK, BLOCK_N)
        CB = _product(C, tl.trans(B), PRECISION, PRECISE)
        dCB = tl.zeros((ROWS, CHUNK), tl.float32)
        dC = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for h in tl.range(h0, stop, num_stages=STAGES):
            dy = _tile(dy_ptr, row, h, 0, end, sdy, DP, ROWS, BLOCK_P, False)
            x = _tile(x_ptr, begin, h, 0, end, sx, DP, CHUNK, BLOCK_P, False)
            S = _state(S_ptr, n, h, H, DP, DN, BLOCK_P, BLOCK_N)
            at = n.to(tl.int64) * H + h
            steps = steps_ptr + at * ((2 + PRECISE) * CHUNK)
            dt, own = tl.load(steps + j), tl.load(steps + CHUNK + i)
            E = _decays(steps, i[:, None], j[None, :], CHUNK, PRECISE)
            W = _product(dy, tl.trans(x), PRECISION, PRECISE) * (E * dt[None, :])
            dCB += W
            decayed = dy.to(tl.float32) * _decay(own, PRECISE)[:, None]
            if rows_ptr is not None:
                R = tl.where(before, W * CB, 0.0)
                # by what y has of S, which needs fewer registers than what C has of it
                rows = tl.sum(_product(C, tl.trans(S), PRECISION, PRECISE) * decayed, 1)
                out = rows_ptr + at * ((1 + PRECISE) * CHUNK)
                if PRECISE:
                    # of all pairs around token j + 1
                    tl.store(out + CHUNK + j, tl.sum(tl.where(before, tl.cumsum(R, 1), 0.0), 0))
                else:
                    rows += tl.sum(R, 1)
                tl.store(out + i, rows)
            dC = _added(decayed.to(DT), S, dC, PRECISION, PRECISE)
        dC += tl.dot(dCB.to(DT), B, input_precision=PRECISION)
        _put_shared(dC_ptr, part, M, begin.to(tl.int64) + i, end, group, GROUPS, dC, DN, BLOCK_N)


@jit
def _put_shared(ptr, part, M, t, end, group, GROUPS, values, DN: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the heads of a program add to a gradient (parts, M, groups, N)."""
    col = tl.arange(0, BLOCK_N)
    at = ((part.to(tl.int64) * M + t) * GROUPS + group)[:, None] * DN + col[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=(t < end)[:, None] & (col < DN)[None, :])


@jit
def _writers(
    x_ptr, B_ptr, C_ptr, dy_ptr, D_ptr, steps_ptr, dS_ptr, chunks_ptr, dx_ptr, dB_ptr, dD_ptr, cols_ptr,
    sx, sB, sC, sdy, GROUPS, M,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    DP: tl.constexpr, DN: tl.constexpr, PRECISION: tl.constexpr, PRECISE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same tokens as those that write states: dx, the part of dB, dD of these tokens, and with
    ``cols`` what is needed of them for the gradients of dt."""
    n, group, part, h0, stop, r, row, begin, end = _program(chunks_ptr, GROUPS, CHUNK, ROWS, GROUP, HEADS)
    if row < end:
        DT: tl.constexpr = x_ptr.dtype.element_ty
        H = GROUPS * GROUP
        i, j, p = tl.arange(0, CHUNK), r + tl.arange(0, ROWS), tl.arange(0, BLOCK_P)
        B = _columns(B_ptr, row, group, 0, end, sB, DN, ROWS, BLOCK_N)
        C = _columns(C_ptr, begin, group, 0, end, sC, DN, CHUNK, BLOCK_N)
        BC = _product(B, tl.trans(C), PRECISION, PRECISE)
        dBC = tl.zeros((ROWS, CHUNK), tl.float32)
        dB = tl.zeros((ROWS, BLOCK_N), tl.float32)
        t = begin.to(tl.int64) + j
        mask = (t < end)[:, None] & (p < DP)[None, :]
        for h in tl.range(h0, stop, num_stages=STAGES):
            x = _tile(x_ptr, row, h, 0, end, sx, DP, ROWS, BLOCK_P, False)
            dy = _tile(dy_ptr, begin, h, 0, end, sdy, DP, CHUNK, BLOCK_P, False)
            dS = _state(dS_ptr, n, h, H, DP, DN, BLOCK_P, BLOCK_N)
            at = n.to(tl.int64) * H + h
            steps = steps_ptr + at * ((2 + PRECISE) * CHUNK)
            dt, last = tl.load(steps + j), _decay(_between(steps, j * 0 + (CHUNK - 1), j, CHUNK, PRECISE), PRECISE)
            E = _decays(steps, i[None, :], j[:, None], CHUNK, PRECISE)
            W = _product(x, tl.trans(dy), PRECISION, PRECISE) * E
            decayed = (BC * E).to(DT)
            dBC += W * dt[:, None]
            cols = cols_ptr
            x32 = x.to(tl.float32)
            if cols_ptr is not None:
                cols += at * (3 * CHUNK) + j
                W *= BC
                if not PRECISE:
                    tl.store(cols, tl.sum(tl.where(i[None, :] > j[:, None], W, 0.0), 1))
                direct = tl.sum(W, 1)
            u = _product(B, tl.trans(dS), PRECISION, PRECISE) * last[:, None]
            if cols_ptr is not None:
                through = tl.sum(u * x32, 1)
                tl.store(cols + CHUNK, through)
                tl.store(cols + 2 * CHUNK, direct + through)
            dx = tl.dot(decayed, dy, u, input_precision=PRECISION) * dt[:, None]
            if D_ptr is not None:
                mine = _tile(dy_ptr, row, h, 0, end, sdy, DP, ROWS, BLOCK_P, False).to(tl.float32)
                dx += mine * _skip(D_ptr, h, DP, WIDE, BLOCK_P)[None, :]
                if dD_ptr is not None:
                    dD = dD_ptr + ((n.to(tl.int64) * (CHUNK // ROWS) + r // ROWS) * H + h) * DP + p
                    tl.store(dD, tl.sum(mine * x32, 0), mask=p < DP)
            tl.store(dx_ptr + t[:, None] * (H * DP) + (h * DP + p)[None, :], dx.to(DT), mask=mask)
            dB = _added((x32 * (dt * last)[:, None]).to(DT), dS, dB, PRECISION, PRECISE)
        dB += tl.dot(dBC.to(DT), C, input_precision=PRECISION)
        _put_shared(dB_ptr, part, M, t, end, group, GROUPS, dB, DN, BLOCK_N)


@jit
def _dsteps(
    dt_ptr, bias_ptr, A_ptr, chunks_ptr, steps_ptr, rows_ptr, cols_ptr, carried_ptr, ddt_ptr, sums_ptr,
    sdt, H, low, high,
    SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The gradient of dt as it was given, of one chunk and some heads, and what they add to those of
    A and of the bias.

    The decay of a token counts for all pairs of one token before it and one from it on. So the
    gradient of its logarithm is a sum over what its later readers read, less what of that was written
    from it on; one over what earlier tokens write to the state behind the chunk; and what the state
    itself carries through the chunk. Pairs of a token with itself are left out. With ``PRECISE``,
    ``_readers`` sums over pairs of tokens of the chunk, since a difference has errors of pairs that
    are not in it.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, CHUNK)
    length = tl.load(chunks_ptr + 2 * n + 1)
    live = (i < length)[:, None] & (h < H)[None, :]
    at = (n * H + h)[None, :]
    steps = steps_ptr + at * ((2 + PRECISE) * CHUNK) + i[:, None]
    dt = tl.load(steps, mask=live, other=0.0)
    from_rows = rows_ptr + at * ((1 + PRECISE) * CHUNK) + i[:, None]
    rows = tl.load(from_rows, mask=live, other=0.0)
    cols = cols_ptr + at * (3 * CHUNK) + i[:, None]
    if not PRECISE:
        rows -= dt * tl.load(cols, mask=live, other=0.0)
    # of the tokens before: the token's own, taken from a sum, would leave its rounding
    earlier = live & (i > 0)[:, None]
    through = tl.load(cols + CHUNK - 1, mask=earlier, other=0.0) * tl.load(steps - 1, mask=earlier, other=0.0)
    some = (h < H) & (length > 0)
    last = tl.load(steps_ptr + (n * H + h) * ((2 + PRECISE) * CHUNK) + 2 * CHUNK - 1, mask=some, other=0.0)
    carried = tl.zeros((BLOCK_H,), tl.float32)
    for slice in tl.static_range(SLICES):
        carried += tl.load(carried_ptr + (n * H + h) * SLICES + slice, mask=some, other=0.0)
    carried *= _decay(last, PRECISE)
    da = tl.cumsum(rows, 0, reverse=True) + tl.cumsum(through, 0) + carried[None, :]
    if PRECISE:
        da += tl.load(from_rows + (CHUNK - 1), mask=earlier, other=0.0)
    A = load_row(A_ptr, h, H)
    t = tl.load(chunks_ptr + 2 * n, mask=length > 0, other=0).to(tl.int64) + i
    raw = _given_steps(dt_ptr, bias_ptr, t, h, live, sdt, H)
    ddt = A[None, :] * da + tl.load(cols + 2 * CHUNK, mask=live, other=0.0)
    unlimited = raw
    if SOFTPLUS:
        unlimited = _softplus(raw)
        ddt *= tl.where(raw > 20.0, 1.0, tl.div_rn(tl.full(raw.shape, 1.0, tl.float32), 1.0 + exp(-raw)))
    ddt = tl.where(live & (unlimited >= low) & (unlimited <= high), ddt, 0.0)
    tl.store(ddt_ptr + t[:, None] * H + h[None, :], ddt.to(ddt_ptr.dtype.element_ty), mask=live)
    sums = sums_ptr + n * (2 * H) + h
    tl.store(sums, tl.sum(tl.where(live, dt * da, 0.0), 0), mask=h < H)
    tl.store(sums + H, tl.sum(ddt, 0), mask=h < H)
