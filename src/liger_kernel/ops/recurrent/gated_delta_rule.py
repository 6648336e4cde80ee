"""The gated delta rule (Yang et al., arXiv:2406.06484, arXiv:2412.06464; Qwen3-Next, OLMo-hybrid): a
layer that remembers values by keys,

    S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T,      o_t = scale S_t^T q_t.

Shapes: q, k (B, T, HK, DK), v, o (B, T, HV, DV), g, beta (B, T, HV), states (documents, HV, DK,
DV). Each head of keys and queries belongs to HV / HK successive heads of values.

The reference goes from token to token. The kernels go from chunk to chunk of C tokens: with G the
running sum of g in a chunk, E_ij = e^(G_i - G_j) for i >= j, G_C the last of G, q with its scale,
and S the state before the chunk,

    L = (k k^T E) below the diagonal,  P = (q k^T E) on it and below,  y = v - e^G k S
    e = y - L beta e,  so  e = y - Q beta y,  Q = (I + L beta)^-1 L
    d = beta e,   o = e^G q S + P d,   S' = e^G_C S + (e^(G_C - G) k)^T d

e is by how much a value differs from what is remembered. The identity in the inverse is not a part
of Q, so only a correction is rounded. The same Q serves the backward, with dS' the gradient of S':

    dd = P^T do + e^(G_C - G) k dS',   x = dd - Q^T beta dd,   z = beta x
    dv = z,   dbeta = <x, e>,   dS = e^G_C dS' + (e^G q)^T do - (e^G k)^T z
    N = (do d^T E) on the diagonal and below,   M = (-z d^T E) below,   W = N (q k^T) + M (k k^T)
    dq = e^G do S^T + N k,   dk = -e^G z S^T + e^(G_C - G) d dS'^T + (M + M^T) k + N^T q
    dg_t = sum_{i>=t} (<q_i, e^G do S^T> - <k_i, e^G z S^T> + sum_j (W_ij - W_ji))
           + sum_{j<t} <k_j, e^(G_C - G) d dS'^T> + e^G_C <S, dS'>

Memory: the backward needs Q and P, d, and the state before each chunk, 4 C + 2 DV + DK DV / C
numbers for each token and head of values, or with ``recompute`` a state for each part of the
chunks, from which the backward makes the others of one part after the other. Products have operands of q's
dtype and sums in fp32: in 16 bits, dg and states in fp32 are as exact as that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import (
    descriptor,
    intercepted,
    launch,
    once_differentiable,
    shaped,
    tracing,
    use_kernels,
)
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, next_power_of_2
from liger_kernel.ops.recurrent.cu_seqlens import bounds, checked, token_by_token
from liger_kernel.ops.recurrent.delta_kernels import (
    _chunks,
    _dstates,
    _gates,
    _keys,
    _outputs,
    _prepare,
    _queries,
    _states,
)
from liger_kernel.ops.recurrent.kda_kernels import _kda_inputs, _kda_pairs, _kda_prepare, _kda_tables

# heads that kernels have registers for; the reference computes others
MAX_D = 256


def recurrence(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm
):  # fmt: skip
    """Token by token, with a decay for each head (B, T, HV) or for each of its channels (B, T, HV,
    DK)."""
    (HV, DV), DK, given, dtype = v.shape[2:], q.shape[-1], q.dtype, acc(q.dtype)
    q, k, v, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q = q * (max(DK, 1) ** -0.5 if scale is None else scale)
    q, k = (t.repeat_interleave(HV // max(t.shape[2], 1), 2) for t in (q, k))

    def step(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        S = S * g[:, t].exp().reshape(*S.shape[:2], -1, 1)
        e = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * e)[:, :, None]
        return S, torch.einsum("bhkv,bhk->bhv", S, q[:, t])

    o, final = token_by_token(step, v, (HV, DK, DV), initial_state, cu_seqlens, output_final_state)
    return (v if o is None else o).to(given), final


def reference(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm, **how
):  # fmt: skip
    return recurrence(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm)


# bytes of the states of a part of the chunks, where a backward computes states again: 4096 tokens of
# 32 heads of 128. With halves of that, the host takes longer than an H200
PART = 2**26
# kernel -> values of a program or of a step, warps and stages, where these are not 16, 4 and 1: the
# fastest of six for 1 x 8192 tokens, 16 and 32 heads of 128, on an H200
# Never one stage for the two loops over chunks where blocks come by TMA: of 32 values, Triton 3.6 makes
# a kernel with an illegal access
TILES = {
    # by registers and shared memory on sm90, not measured
    "kda_dstates": (32, 4, 2),
    "states": (32, 4, 3),
    "outputs": (64, 2, 1),
    "dstates": (32, 4, 3),
    "queries": (64, 4, 3),
    "keys": (64, 4, 2),
}
# the two loops over chunks, if nine in ten processors have a program of theirs with as many values (4 x
# 2048 tokens: 275 -> 158 and 341 -> 248 us; of kda, 412 -> 253)
MANY = {"states": (64, 4, 2), "dstates": (64, 4, 2), "kda_dstates": (64, 4, 2)}


def _precise(q: Tensor) -> bool:
    return q.dtype == torch.float32


def _chunk(q: Tensor, DV: int) -> int:
    """Tokens of a chunk: fewer where wide heads or fp32 would not leave registers for 64. Of narrow
    heads, too: products of 64 rows on Hopper have descriptors of shared memory, and ptxas 12.8 may
    lose those of narrow tiles (``unset_registers`` in tests/compile)."""
    if launch_config.arch() == "cpu":
        return 32
    widths = q.shape[-1], DV
    return 16 if _precise(q) else 64 if min(widths) >= 64 and max(widths) <= 128 else 32


def _tile(kernel: str, q: Tensor, DV: int, heads: int = 0) -> dict[str, Any]:
    """The meta parameters of a kernel, for so many heads of values of all documents."""
    arch, exact = launch_config.arch(), _precise(q)
    many = kernel in MANY and 10 * heads * DV >= 9 * 64 * launch_config.processors()
    values, warps, stages = (MANY if many else TILES).get(kernel, (16, 4, 1))
    if arch == "cpu" or arch.startswith("gfx") or exact:
        values, warps, stages = min(values, 32), 4, 1
    # other tensor cores than Hopper's take states from the registers of more threads, and three
    # stages would not fit into the shared memory of all
    elif arch != "sm90" and kernel.endswith("states"):
        values, warps, stages = 32, 8, 2
    # heads of 256 on GPUs with 99 KiB
    elif kernel == "queries" and launch_config.shared_memory() < 2**17:
        stages = 2
    # values go into slices of one size
    while DV % values:
        values //= 2
    precision = solve = "ieee"
    if arch.startswith("sm"):
        solve = "tf32x3" if exact else "bf16x3"
        if exact:
            precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    whole = dict(BLOCK_V=max(16, next_power_of_2(DV)))
    found = dict(PRECISION=precision, BLOCK_K=max(16, next_power_of_2(q.shape[-1])), num_warps=warps, num_stages=stages)
    # three programs on each processor instead of two
    limit = dict(maxnreg=168) if arch == "sm90" and not exact and q.shape[-1] <= 128 else {}
    if kernel == "kda_pairs":
        del found["BLOCK_K"]
        return found | (dict(BLOCK_V=values) if exact else whole) | limit
    if kernel in ("kda_prepare", "kda_inputs"):
        # bf16 has its products of unit length in fp16, fp16 has them in fp32; a chunk is halved
        # until it is one token
        inner = precision if q.dtype != torch.float16 else "tf32x3" if arch.startswith("sm") else "ieee"
        # of narrower tiles in shared memory, ptxas 12.8 loses descriptors (MEASURED.md)
        columns = max(16, min(64 if arch == "sm90" and _chunk(q, DV) == 64 else 32, next_power_of_2(q.shape[-1])))
        found |= dict(INNER=inner, LEVELS=_chunk(q, DV).bit_length() - 1, BLOCK_K=columns, SOLVE=solve)
        if kernel == "kda_inputs":
            return found | whole
        del found["PRECISION"]
        return found | dict(SPLIT=not exact)
    if kernel == "prepare":
        return found | dict(SOLVE=solve, SPLIT=not exact) | limit
    return found | dict(BLOCK_V=values) | ({} if kernel == "outputs" else dict(STAGES=stages))


def _by_tma(*tensors: Tensor) -> bool:
    """Whether blocks of these, the first of which is q, can be loaded by TMA: 16 bits, aligned to
    16 bytes, and keys that are as wide as a block."""
    DK = tensors[0].shape[2]
    if launch_config.arch() not in ("sm90", "sm100", "sm103") or _precise(tensors[0]) or next_power_of_2(DK) != DK:
        return False
    # meta tensors have no address
    at = [2 * t.storage_offset() if intercepted() else t.data_ptr() for t in tensors]
    return all(a % 16 == 0 for a in at) and all(t.stride(0) % 8 == t.shape[2] % 8 == 0 for t in tensors)


def _blocks(tma: bool, rows: int, columns: int, *tensors: Tensor) -> tuple[Any, ...]:
    """Tensors (rows, groups, columns) for kernels that load blocks of rows and columns."""
    return tuple(descriptor(t.flatten(1), (rows, columns)) if tma else t for t in tensors)


def _dense(t: Tensor) -> Tensor:
    """(M, H, D) with the heads of a token side by side, and places in 64 tokens that have 32 bits. Of
    launchers, since torch.compile does not take strides as numbers."""
    dense = t.stride(2) == 1 and t.stride(1) == t.shape[2] and t.stride(0) < 2**25
    return t if dense else t.contiguous()


def chunks_of(x: Tensor, cu_seqlens: Tensor | None, length: int, C: int) -> tuple[Tensor, Tensor]:
    """Where each document of x (M, ...) and its chunks of C tokens begin, and where each chunk lies."""
    M = x.shape[0]
    if cu_seqlens is None:
        documents = M // length
        chunks = documents * cdiv(length, C)
    else:
        documents = cu_seqlens.shape[0] - 1
        chunks = M // C + documents
    begins, at = (x.new_empty(n, 2, dtype=torch.int32) for n in (documents + 1, chunks))
    launch(_chunks, (documents + 1,), begins, at, cu_seqlens, length, chunks, M, C=C, BLOCK=128, num_warps=4)
    return begins, at


def _matrix(t: Tensor) -> Tensor:
    """As the rows of one group."""
    return t.view(-1, 1, t.shape[-1])


def _parts(chunks: int, HV: int, DK: int, DV: int, itemsize: int) -> int:
    """Into how many parts work on chunks is divided where the backward computes states again."""
    return cdiv(chunks, max(2, PART // (HV * DK * DV * itemsize) // 2 * 2))


def _part(part: int, parts: int, chunks: int, carries: Tensor) -> tuple[int, int, Tensor | None, Tensor | None]:
    """Which chunks a part has, and where states are that enter it and leave it."""
    size = cdiv(chunks, 2 * parts) * 2
    lower, upper = part * size, min(chunks, part * size + size)
    return lower, upper, carries[part - 1] if part else None, carries[part] if part < parts - 1 else None


def _heads(begins: Tensor, places_of: Tensor, lower: int, upper: int, HV: int) -> int:
    """About how many heads of documents have chunks here."""
    return max(HV, (begins.shape[0] - 1) * HV * (upper - lower) // places_of.shape[0])


def _chunk_states(
    given: tuple, begins: Tensor, places_of: Tensor, lower: int, upper: int, scale: float, norm: bool,
    ht: Tensor | None, before: Tensor | None, behind: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Of the chunks from ``lower`` to ``upper``, what the backward needs. The document that goes on
    from chunks before takes its state from ``before``, the one that goes on behind leaves it."""
    q, k, v, g, beta, state = given
    (M, HK, DK), (HV, DV), C, channels = q.shape, v.shape[1:], _chunk(q, v.shape[2]), g.ndim == 3
    documents, chunks, heads = begins.shape[0] - 1, upper - lower, _heads(begins, places_of, lower, upper, HV)
    full = chunks == places_of.shape[0]
    places_of = places_of[lower:upper]
    new, fp32, split = q.new_empty, dict(dtype=torch.float32), not _precise(q)
    Q, P = (new(chunks, HV, 1 + split, C, C) for _ in range(2))
    factors, norms = new(chunks, HV, 6, C, **fp32), new(chunks, HK, 4 if channels else 2, C, **fp32)
    S, d = new(chunks, HV, DK, DV), new(1 + split, M if full else chunks * C, HV, DV)
    group = dict(GROUP=HV // HK, C=C, DK=DK)
    sq, sk, sv = q.stride(0), k.stride(0), v.stride(0)
    args: tuple[Any, ...]
    grid, outs = (chunks * HV,), (Q, P, factors, norms)
    # each channel's decay behind a chunk, and keys and queries with their decays
    last = new(chunks, HV, DK, **fp32) if channels else None
    decayed = new(chunks, HV, 3, C, DK) if channels else None
    lows, tables = new(chunks, HV, dtype=torch.int32) if channels else None, []
    if channels:
        how = dict(NORM=norm, C=C, DK=DK, **_tile("kda_prepare", q, DV))
        # in the dtypes of their products
        levels, unit = how["LEVELS"], torch.float16 if q.dtype == torch.bfloat16 else torch.float32
        dtypes = torch.bfloat16 if split else torch.float32, unit
        tables = [new(2 * levels + 1, C, C, dtype=dtype) for dtype in dtypes]
        launch(_kda_tables, (2 * levels + 1,), *tables, LEVELS=levels, C=C, num_warps=4)
        args = lows, decayed, last, *tables, sq, sk, HK, scale
        launch(_kda_prepare, grid, q, k, g, beta, places_of, *outs, *args, **how)
    else:
        how = dict(NORM=norm, **_tile("prepare", q, DV))
        launch(_prepare, grid, q, k, g, beta, places_of, *outs, sq, sk, HK, scale, **group, **how)
    how = dict(SPLIT=split, DV=DV, FULL=full, TMA=_by_tma(q, k, v), **_tile("states", q, DV, heads))
    values, width = how["BLOCK_V"], how["BLOCK_K"]
    (kb,) = _blocks(how["TMA"], C, width, k if decayed is None else _matrix(decayed))
    (vb,) = _blocks(how["TMA"], C, values, v)
    (Qb,), (Sb,) = _blocks(how["TMA"], C, C, _matrix(Q)), _blocks(how["TMA"], width, values, _matrix(S))
    grid, ends = (documents * HV * (DV // values),), (ht, before, behind)
    args = state, Sb, d[0], d[1] if split else None, *ends, sk, sv, lower, upper, HV
    launch(_states, grid, factors, last, kb, vb, Qb, begins, places_of, *args, **group, **how)
    return [d, Q, P, factors, norms, S, *(t for t in (decayed, last, lows, *tables) if t is not None)]


@typed_launcher
def gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None,
    length: SymInt, scale: float, norm: bool, output: bool, final: bool, keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Of M tokens in rows of ``length``, as far as they are asked for: o (M, HV, DV), the final
    state, and what the backward needs. g (M, HV), or of ``kda`` (M, HV, DK)."""
    q, k, v = map(_dense, (q, k, v))
    (M, HK, DK), (HV, DV), C, channels = q.shape, v.shape[1:], _chunk(q, v.shape[2]), g.ndim == 3
    begins, places_of = chunks_of(q, cu_seqlens, length, C)
    documents, chunks, new = begins.shape[0] - 1, places_of.shape[0], q.new_empty
    o = new((M, HV, DV) if output else 0)
    ht = new((documents, HV, DK, DV) if final else 0, dtype=torch.float32 if state is None else state.dtype)
    parts = 1 if keep else _parts(chunks, HV, DK, DV, q.itemsize)
    carries = new(parts - 1, HV, DK, DV, dtype=torch.float32)
    given, saved = (q, k, v, g, beta, state), []

    def of_part(part: int) -> list[Tensor]:
        lower, upper, *carried = _part(part, parts, chunks, carries)
        saved = _chunk_states(given, begins, places_of, lower, upper, scale, norm, ht if final else None, *carried)
        if output:
            d, _, P, factors, _, S, *of_channels = saved
            how = dict(SPLIT=len(d) > 1, CHANNELS=channels, FULL=parts == 1, GROUP=HV // HK, C=C, DK=DK, DV=DV)
            how |= _tile("outputs", q, DV)
            grid, queries = ((upper - lower) * HV * (DV // how["BLOCK_V"]),), of_channels[0] if channels else q
            of_values = P, S, d[0], d[1] if len(d) > 1 else None
            launch(_outputs, grid, factors, queries, *of_values, places_of[lower:upper], o, q.stride(0), HV, **how)
        return saved

    # without a loop over symbols; what a part made goes before the next part
    for part in range(parts if keep or not tracing(q) else 0):
        saved = of_part(part) if keep else of_part(part)[:0]
    return o, ht, [begins, places_of, carries, *saved]


@typed_launcher
def gated_delta_rule_bwd(
    do: Tensor | None, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    state: Tensor | None, o: Tensor | None, saved: list[Tensor], scale: float, norm: bool, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not ``needed`` are empty."""
    begins, places_of, carries, *kept = saved
    (M, HK, DK), (HV, DV), C, documents = q.shape, v.shape[1:], _chunk(q, v.shape[2]), begins.shape[0] - 1
    # without a gradient, only the final state has one
    q, k, v, do = map(_dense, (q, k, v, v.new_zeros(v.shape) if do is None else do))
    dfinal = None if dfinal is None else dfinal.contiguous()
    dense = lambda t: q.new_empty(t.shape, dtype=t.dtype)
    dq, dk, dv, dg, dbeta = (dense(t) for t in (q, k, v, g, beta))
    dstate = dense(state) if needed[5] else q.new_empty(0)
    channels, split, fp32 = g.ndim == 3, not _precise(q), dict[str, Any](dtype=torch.float32)
    group = dict(GROUP=HV // HK, SPLIT=split, C=C, DK=DK, DV=DV, FULL=bool(kept), TMA=_by_tma(q, k, do))
    strides = q.stride(0), k.stride(0), do.stride(0)

    def blocks(
        c: dict[str, Any], of_tokens: list[Tensor], of_states: list[Tensor], tma: bool = bool(group["TMA"])
    ) -> tuple[Any, ...]:
        tokens = _blocks(tma, C, c["BLOCK_V"], *of_tokens)
        return *tokens, *_blocks(tma, c["BLOCK_K"], c["BLOCK_V"], *map(_matrix, of_states))

    # until a program has its rows of dk, N lies there
    width = max(DK, HV // HK * C)
    N = dk if width == DK or channels else q.new_empty(M, HK, width)
    through_states, through_keys = channels or any(needed[1:]), needed[1] or needed[3] or needed[4]
    # what is only here has the size of a part in ``kda``, too: 102 MiB of 1,180 less at 8192 tokens, 710
    # of 4,718 at 32768, for 2 and 3 % of the time; with decays of heads, 68 of 724 for 3 %
    all_chunks = places_of.shape[0]
    parts = _parts(all_chunks, HV, DK, DV, q.itemsize) if channels else carries.shape[0] + 1
    back = q.new_empty(parts - 1, HV, DK, DV, **fp32)

    def of_part(part: int) -> None:
        args: tuple[Any, ...]
        lower, upper, to, come = _part(part, parts, all_chunks, back)
        given, before = (q, k, v, g, beta, state), carries[part - 1] if part and not kept else None
        made = kept or _chunk_states(given, begins, places_of, lower, upper, scale, norm, None, before, None)
        mine = slice(lower, upper) if kept else slice(None)
        # but d and tables are of all chunks
        d, Q, P, factors, norms, S, *of_channels = (t[mine] if 0 < i < 9 else t for i, t in enumerate(made))
        decayed, last, lows, *tables = of_channels or (None, None, None)
        chunks, places, all_of_d = upper - lower, places_of[lower:upper], d.flatten(0, 1)
        sums = q.new_empty(0 if channels else (chunks, HV, 3, C), **fp32)
        if not channels and (needed[0] or through_keys):
            c = _tile("queries", q, DV)
            args = q, k, *blocks(c, [do, all_of_d], [S]), norms, places, dq, sums, N, *strides, HK, d.shape[1], scale
            launch(_queries, (chunks * HK,), factors, *args, NORM=norm, WIDTH=width, **group, **c)
        dS = torch.empty_like(S) if through_states else S
        heads = _heads(begins, places_of, lower, upper, HV)
        c = _tile("kda_dstates" if channels else "dstates", q, DV, heads)
        slices = DV // c["BLOCK_V"]
        sums_of_slices = q.new_empty(chunks, HV, slices, 2, C, **fp32)
        if through_states:
            dob, db, dSb = blocks(c, [do, d[0]], [dS])
            qk, QP = _blocks(group["TMA"], C, c["BLOCK_K"], q, k), _blocks(group["TMA"], C, C, _matrix(Q), _matrix(P))
            if decayed is not None:
                qk = 2 * _blocks(group["TMA"], C, c["BLOCK_K"], _matrix(decayed))
            args = *qk, dob, db, *QP, begins, places, dfinal, dv, sums_of_slices, dSb, dstate if needed[5] else None
            args = *args, come, to, *strides, lower, upper, HV
            launch(_dstates, (documents * HV * slices,), factors, last, *args, **group, **c)
        if channels and any(needed[:5]):
            c, how = _tile("kda_inputs", q, DV), _tile("kda_pairs", q, DV)
            own = dict(C=C, DV=DV, FULL=bool(kept), TMA=bool(group["TMA"] and c["BLOCK_V"] == DV))
            dob, zb, *db, Sb, dSb = blocks(c, [do, dv, *d], [S, dS], own["TMA"])
            pairs, rows = tables[1].new_empty(chunks, HV, 2, C, C), factors.new_empty(chunks, HV, 6, C)
            args = v, o, dob, zb, db[0], db[-1], norms, factors, sums_of_slices, places, pairs, rows, dbeta
            args = *args, v.stride(0), strides[2], HV, scale
            launch(_kda_pairs, (chunks * HV,), *args, NORM=norm, SPLIT=split, SLICES=slices, **own, **how)
            args = q, k, dob, zb, db[0], Sb, dSb, norms, last, lows, *tables, pairs, rows, places, dq, dk, dg
            grid = (chunks * HV * cdiv(DK, c["BLOCK_K"]),)
            launch(_kda_inputs, grid, g, *args, *strides, HV, scale, DK=DK, **own, **c)
        elif through_keys:
            c = _tile("keys", q, DV)
            args = q, k, *blocks(c, [dv, all_of_d], [S, dS]), norms, sums, N, places, dk, *strides[:2], HK, d.shape[1]
            launch(_keys, (chunks * HK,), factors, *args, NORM=norm, WIDTH=width, **group, **c)
            args, how = (sums_of_slices, places, dg, dbeta, HV), dict(SLICES=slices, C=C, BLOCK=8, num_warps=4)
            launch(_gates, (chunks, cdiv(HV, 8)), sums, *args, **how)

    # from the last part to the first, without a loop over symbols
    for part in reversed(range(0 if tracing(q) else parts)):
        of_part(part)
    grads = zip((dq, dk, dv, dg, dbeta), needed)
    dq, dk, dv, dg, dbeta = (t if need else q.new_empty(0, dtype=t.dtype) for t, need in grads)
    return dq, dk, dv, dg, dbeta, dstate


class GatedDeltaRuleFunction(torch.autograd.Function):
    """Of ``gated_delta_rule``, and of ``kda`` if g has four dimensions:
    ``apply(q, k, v, g, beta, state, cu_seqlens, scale, norm, final, keep)``: o and the final
    state, or an empty tensor. Without ``keep``, a backward computes again what it needs."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, cu_seqlens, scale, norm, final, keep):
        ctx.set_materialize_grads(False)
        given = [t.flatten(0, 1) for t in (q, k, v)]
        given += [t.flatten(0, 1).contiguous() for t in (g, beta)]
        given += [None if t is None else t.contiguous() for t in (state, cu_seqlens)]
        how = v.shape[1], scale, norm
        o, ht, saved = gated_delta_rule_fwd(*given, *how, True, final, keep)
        o = shaped(o, v.shape)
        # a gradient of ``kda`` is in its output, too
        ctx.save_for_backward(o if g.ndim == 4 and norm else None, *given[:6], *saved)
        ctx.how, ctx.final = how, final
        return o, ht

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        needed = list(ctx.needs_input_grad[:6])
        o, q, k, v, g, beta, state, *saved = ctx.saved_tensors
        do, dfinal = None if do is None else do.flatten(0, 1), dfinal if ctx.final else None
        given = q, k, v, g, beta, state, None if o is None else o.flatten(0, 1), list(saved)
        *grads, dstate = gated_delta_rule_bwd(do, dfinal, *given, *ctx.how[1:], needed)
        found = [d.unflatten(0, (-1, ctx.how[0])) if need else None for d, need in zip(grads, needed)]
        return *found, dstate if needed[5] else None, None, None, None, None, None


def _decay(*shape: int, dtype: torch.dtype) -> Tensor:
    """Logarithms of decays, most of them above -0.2."""
    return -torch.nn.functional.softplus(torch.randn(*shape, dtype=dtype) - 3)


def _gate(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).sigmoid()


def _unit(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def _tensors(B: int, length: int, HK: int, HV: int, DK: int, DV: int, unit: bool = False) -> dict[str, Any]:
    """``unit``: keys that are normalised already."""
    keys = T((B, length, HK, DK), _unit if unit else torch.randn)
    gates = dict(g=T((B, length, HV), _decay), beta=T((B, length, HV), _gate))
    return dict(q=keys, k=keys, v=T((B, length, HV, DV)), **gates, qk_l2norm=not unit)


def _states_of(documents: int, HV: int, DK: int, DV: int) -> dict[str, Any]:
    return dict(initial_state=T((documents, HV, DK, DV)), output_final_state=True)


def _cost(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Cost:
    (_, _, HV, DV), DK, state = v.shape, q.shape[-1], more.get("initial_state")
    given, out = nbytes(q, k, v, g, beta, state, more.get("cu_seqlens")), nbytes(v)
    if more.get("output_final_state"):
        out += 4 * v.shape[0] * HV * DK * DV if state is None else state.nbytes
    # token by token, where a token's part of the state is no product
    product = [(v.numel() // DV, DV, DK)]
    return Cost(given + out, 2 * given + out, gemms=(product * 2, product * 4))


def rule(
    name: str, reference: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, qk_l2norm: bool, recompute: bool,
    channels: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The operator called ``name``; ``channels``: g has a decay for each channel of the keys."""
    if q.ndim != 4 or not q.is_floating_point():
        raise ValueError(f"{name}: q must be floating point of shape (B, T, HK, DK), got {q.dtype} {tuple(q.shape)}")
    B, length, HK, DK = q.shape
    if k.shape != q.shape or k.dtype != q.dtype:
        raise ValueError(
            f"{name}: k must have q's shape and dtype, {tuple(q.shape)} {q.dtype}, got {tuple(k.shape)} {k.dtype}"
        )
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.dtype != q.dtype:
        raise ValueError(
            f"{name}: v must have shape ({B}, {length}, HV, DV) and dtype {q.dtype}, got {v.dtype} {tuple(v.shape)}"
        )
    HV, DV = v.shape[2:]
    if HV and (not HK or HV % HK):
        raise ValueError(f"{name}: v must have a multiple of q's {HK} heads, got {HV}")
    if channels and HV != HK:
        raise ValueError(f"{name}: v must have q's {HK} heads, got {HV}")
    documents = checked(name, cu_seqlens, q, "q")
    heads = B, length, HV
    checks.floating_shape(name, (*heads, DK) if channels else heads, g=g)
    checks.floating_shape(name, heads, beta=beta)
    checks.floating_shape(name, (documents, HV, DK, DV), initial_state=initial_state)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device)
    wide = not 16 <= DK <= MAX_D or not 16 <= DV <= MAX_D or DV % 16
    if wide or not use_kernels(q) or not q.numel():
        how = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return reference(q, k, v, g, beta, scale=scale, qk_l2norm=qk_l2norm, **how)
    given = q, k, v, g, beta, initial_state
    keep = not recompute and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    scale = DK**-0.5 if scale is None else scale
    o, ht = GatedDeltaRuleFunction.apply(*given, cu_seqlens, scale, qk_l2norm, output_final_state, keep)
    return o, ht if output_final_state else None


# six documents of 40 tokens
PACKED = dict(cu_seqlens=bounds(0, 0, 1, 34, 34, 37, 40))


@op(
    reference=reference,
    cases=[
        Case("qwen3-next", _tensors(2, 37, 1, 2, 16, 16)),
        Case("states", _tensors(2, 39, 1, 2, 16, 32, unit=True) | _states_of(2, 2, 16, 32)),
        Case("packed", _tensors(1, 40, 1, 2, 24, 16) | _states_of(6, 2, 24, 16) | PACKED),
        Case("recomputed", _tensors(1, 34, 2, 2, 16, 48) | dict(recompute=True, scale=0.3)),
        Case("one-token", _tensors(16, 1, 1, 1, 32, 16)),
    ],
    cost=_cost,
)
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, qk_l2norm: bool = False, recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with a decay and a delta rule: a token's value replaces a part ``beta`` of
    what its key has stored. Returns o (B, T, HV, DV) in q's dtype, and the state behind each
    document, which is None unless ``output_final_state``.

    q and k (B, T, HK, DK), v (B, T, HV, DV): one dtype, any strides; HK divides HV. g (B, T, HV):
    the logarithm of the decay, at most 0. beta (B, T, HV): from 0 to 1, or to 2. With
    ``qk_l2norm``, q and k are divided by their norms, else they should have length 1. ``scale``
    defaults to ``DK ** -0.5``. States (documents, HV, DK, DV); the final one has the dtype of the
    initial one, or fp32. ``cu_seqlens`` (documents + 1,), integers that rise from 0 to T: where
    documents begin in the only row; without it, each row is a document. Differentiable in all
    floating-point tensors, and through the final state. ``recompute``: the backward computes states
    again instead of saving them.

    In 16 bits, gradients of an fp32 g and states in fp32 come from products of 16-bit operands,
    too. Kernels have heads of 16 to 256 columns, multiples of 16 for v.
    """
    how = dict(scale=scale, initial_state=initial_state, output_final_state=output_final_state)
    how |= dict(cu_seqlens=cu_seqlens, qk_l2norm=qk_l2norm, recompute=recompute)
    return rule("gated_delta_rule", reference, q, k, v, g, beta, **how)
