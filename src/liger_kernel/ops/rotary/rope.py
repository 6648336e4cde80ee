"""Rotary position embedding of queries and keys in one launch (Su et al., arXiv:2104.09864).

Shapes: q (B, Hq, T, D), k (B, Hk, T, D), or with ``unsqueeze_dim=2`` (B, T, H, D); cos, sin (B or
1, T, R/2), or (T, R/2): one angle for each rotated pair; or (B or 1, T, 2, R/2): one for its first
column and one for its second. R <= D: the last D - R columns pass through.

A pair (a, b) becomes (a cos_a - b sin_a, b cos_b + a sin_b).  ``layout="halves"`` pairs column i
with i + R/2, ``"pairs"`` 2i with 2i + 1. The backward rotates the other way: the same kernel with
-sin_b for sin_a, and -sin_a for sin_b.

``casting`` says where the arithmetic is rounded, as models differ in it:
  fp32    everything in fp32, rounded once, to the dtype of x
  none    no upcast: each product is rounded to the dtype that x and the tables promote to, which
          is that of the result, as in ``q * cos + rotate_half(q) * sin``; in the backward to the
          dtype of x, as autograd's gradients of these products are
  back    the same, and the result is cast back to the dtype of x
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_kernel._private import apply_of
from liger_kernel.ops._core import Case, Cost, T as T_, acc, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import KERNEL_DTYPES, launch, once_differentiable, use_kernels
from liger_kernel.ops._core.tl import jit, mask_of, next_power_of_2, store_tile, tl

# of Llama and most others; of Cohere, GLM and Llama 4
LAYOUTS = ("halves", "pairs")
CASTING = ("none", "back", "fp32")


def reference(q, k, cos, sin, position_ids, *, layout, unsqueeze_dim, casting):
    if position_ids is not None:
        cos, sin = (t.reshape(t.shape[:-1].numel(), t.shape[-1])[position_ids] for t in (cos, sin))
    elif cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    # one table for both columns, or one for each
    cos_a, cos_b = (t.unsqueeze(unsqueeze_dim) for t in columns(cos))
    sin_a, sin_b = (t.unsqueeze(unsqueeze_dim) for t in columns(sin))
    R = 2 * cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        rotated = x[..., :R]
        # otherwise each product below is rounded, as stock's are
        if casting == "fp32":
            rotated = rotated.to(acc(torch.promote_types(x.dtype, cos.dtype)))
        a, b = rotated.chunk(2, -1) if layout == "halves" else (rotated[..., ::2], rotated[..., 1::2])
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        y = torch.cat((a, b), -1) if layout == "halves" else torch.stack((a, b), -1).flatten(-2)
        y = y if casting == "none" else y.to(x.dtype)
        return torch.cat((y, x[..., R:]), -1) if x.shape[-1] > R else y

    return turn(q), turn(k)


def columns(table: Tensor) -> tuple[Tensor, ...]:
    """The angles of first and of second columns of pairs, each (B or 1, T, R/2)."""
    return table.unbind(-2) if table.ndim == 4 else (table, table)


def once(table: Tensor, rotary_dim: int | None = None) -> Tensor:
    """One angle a pair, of a table (..., R) that holds each twice, as in ``cat((angles, angles),
    -1)``; or once already, where ``rotary_dim`` says so."""
    # a table of as many columns as rotate has each angle twice
    width = table.shape[-1]
    if rotary_dim is None or width == rotary_dim:
        return table[..., : width // 2]
    if 2 * width != rotary_dim:
        raise ValueError(
            f"rope: rotary_dim must be {width} or {2 * width} with tables of {width} columns, got {rotary_dim}"
        )
    return table


def of_sections(table: Tensor, sections: Sequence[int]) -> Tensor:
    """One angle a pair (B, T, R/2), of tables (A, B, T, R) for positions along A axes: time, height
    and width.

    The pairs come in ``sections``; section i turns by the position on axis i modulo A.
    """
    return by_sections(once(table), sections)


def by_sections(table: Tensor, sections: Sequence[int]) -> Tensor:
    """(B, T, ..., R/2) of (A, B, T, ..., R/2), as ``of_sections`` describes it."""
    if sum(sections) != table.shape[-1]:
        raise ValueError(f"mrope: mrope_section must sum to {table.shape[-1]}, got {tuple(sections)}")
    return torch.cat([part[i % len(part)] for i, part in enumerate(table.split(list(sections), -1))], -1)


def of_complex(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, as views, of ``cos + i sin``. A model cast to a real dtype leaves its cos
    alone: its sin is zero."""
    # a view: nothing is copied, and nothing computed
    if freqs.is_complex():
        cos, sin = torch.view_as_real(freqs.resolve_conj()).unbind(-1)
        return cos, sin
    return freqs, torch.zeros_like(freqs)


@jit
def load_angles(
    cos_ptr, sin_ptr, pos_ptr, batch, time, L, HALF,
    cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time, sin_second, sin_col, pos_batch, pos_time,
    BOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """cos and sin of the first, then of the second columns of one token's pairs, in ROWS equal rows.

    One row is enough for arithmetic; as many as a tile of heads has arrive in the layout of the
    tile, and need no exchange between threads. A position outside the table gives NaN, not a stray read.
    """
    r = tl.arange(0, BLOCK_R)
    mask = r < HALF
    # a table has no batch: each token reads the row that its position names
    if pos_ptr is not None:
        time = tl.load(pos_ptr + batch * pos_batch + time * pos_time).to(tl.int64)
        batch = batch * 0
        known = (time >= 0) & (time < L)
        mask = mask & known
    cos_ptr += batch * cos_batch + time * cos_time
    sin_ptr += batch * sin_batch + time * sin_time
    mask = tl.broadcast_to(mask[None, :], (ROWS, BLOCK_R))
    cos_ptr = tl.broadcast_to((cos_ptr + r * cos_col)[None, :], (ROWS, BLOCK_R))
    sin_ptr = tl.broadcast_to((sin_ptr + r * sin_col)[None, :], (ROWS, BLOCK_R))
    cos = tl.load(cos_ptr, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr, mask=mask, other=0.0).to(tl.float32)
    # not only zero: a token at no known place must not look like one at the first
    if pos_ptr is not None:
        cos = tl.where(known, cos, float("nan"))
        sin = tl.where(known, sin, float("nan"))
    # two tables only where the columns of a pair turn by different angles
    cos_b, sin_b = cos, sin
    if BOTH:
        cos_b = tl.load(cos_ptr + cos_second, mask=mask, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_ptr + sin_second, mask=mask, other=0.0).to(tl.float32)
    return cos, sin, cos_b, sin_b


@jit
def own_angles(
    cos_ptr, sin_ptr, pos_ptr, T, L, HALF, cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time,
    sin_second, sin_col, pos_batch, pos_time,
    BOTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Batch and time of a program's token, and the angles by which all of its heads turn."""
    token = tl.program_id(0)
    batch, time = (token // T).to(tl.int64), (token % T).to(tl.int64)
    ROWS: tl.constexpr = BLOCK_Q if BLOCK_Q == BLOCK_K else 1
    cos_a, sin_a, cos_b, sin_b = load_angles(
        cos_ptr, sin_ptr, pos_ptr, batch, time, L, HALF, cos_batch, cos_time, cos_second, cos_col,
        sin_batch, sin_time, sin_second, sin_col, pos_batch, pos_time, BOTH, ROWS, BLOCK_R)  # fmt: skip
    return batch, time, cos_a, sin_a, cos_b, sin_b


@jit
def load_pairs(x_ptr, h, x_head, H, HALF, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first and second columns of all pairs of the heads ``h`` of one token, in fp32."""
    # neighbours come by one wide load and are split in registers: two loads of every other column
    # would move each byte twice
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK_R)
        mask = (h < H)[:, None] & (col < 2 * HALF)[None, :]
        x = tl.load(x_ptr + h[:, None] * x_head + col[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(x.to(tl.float32), (BLOCK_H, BLOCK_R, 2)))
    else:
        r = tl.arange(0, BLOCK_R)
        mask = mask_of(h, H, r, HALF)
        x_ptr += h[:, None] * x_head + r[None, :]
        a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    return a, b


@jit
def store_pairs(y_ptr, a, b, h, y_head, H, HALF, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK_R)
        y = tl.reshape(tl.join(a, b), (BLOCK_H, 2 * BLOCK_R)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + h[:, None] * y_head + col[None, :], y, mask=(h < H)[:, None] & (col < 2 * HALF)[None, :])
    else:
        r = tl.arange(0, BLOCK_R)
        mask = mask_of(h, H, r, HALF)
        y_ptr += h[:, None] * y_head + r[None, :]
        tl.store(y_ptr, a.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + HALF, b.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def turned(a, b, cos_a, sin_a, cos_b, sin_b, ROUND: tl.constexpr, DTYPE: tl.constexpr):
    """Pairs turned by their angles, products rounded to DTYPE if asked for."""
    # rounded one by one and only then added, as in a model that does not fuse
    a_cos, a_sin, b_cos, b_sin = a * cos_a, a * sin_b, b * cos_b, b * sin_a
    if ROUND:
        a_cos, a_sin = a_cos.to(DTYPE).to(tl.float32), a_sin.to(DTYPE).to(tl.float32)
        b_cos, b_sin = b_cos.to(DTYPE).to(tl.float32), b_sin.to(DTYPE).to(tl.float32)
    return a_cos - b_sin, b_cos + a_sin


@jit
def _turn(
    x_ptr, y_ptr, cos_a, sin_a, cos_b, sin_b, H, x_head, y_head, HALF, D,
    PAIRS: tl.constexpr, ROUND: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token: pointers to its first head, strides between heads, cos and sin of
    BLOCK_R angles."""
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        a, b = load_pairs(x_ptr, h, x_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        a, b = turned(a, b, cos_a, sin_a, cos_b, sin_b, ROUND, y_ptr.dtype.element_ty)
        store_pairs(y_ptr, a, b, h, y_head, H, HALF, PAIRS, BLOCK_H, BLOCK_R)
        # the columns that pass through: copied, since the result is a new tensor
        if BLOCK_REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            mask = mask_of(h, H, rest, D)
            x = tl.load(x_ptr + h[:, None] * x_head + rest[None, :], mask=mask, other=0.0)
            store_tile(y_ptr, h, rest, y_head, x, mask)


@jit
def _rope(
    q_ptr, k_ptr, cos_ptr, sin_ptr, pos_ptr, yq_ptr, yk_ptr, T, Hq, Hk, L, HALF, D,
    q_batch, q_time, q_head, k_batch, k_time, k_head, yq_batch, yq_time, yq_head, yk_batch, yk_time, yk_head,
    cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time, sin_second, sin_col, pos_batch, pos_time,
    BOTH: tl.constexpr, INVERSE: tl.constexpr, PAIRS: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch, time, cos_a, sin_a, cos_b, sin_b = own_angles(
        cos_ptr, sin_ptr, pos_ptr, T, L, HALF, cos_batch, cos_time, cos_second, cos_col, sin_batch, sin_time,
        sin_second, sin_col, pos_batch, pos_time, BOTH, BLOCK_Q, BLOCK_K, BLOCK_R)  # fmt: skip
    if INVERSE:
        # not a sign: of 0, a difference is +0 in every release of Triton
        sin_a, sin_b = 0.0 - sin_b, 0.0 - sin_a
    # queries and keys in one program, so that the angles of a token are loaded once
    _turn(
        q_ptr + batch * q_batch + time * q_time, yq_ptr + batch * yq_batch + time * yq_time,
        cos_a, sin_a, cos_b, sin_b, Hq, q_head, yq_head, HALF, D, PAIRS, ROUND, BLOCK_Q, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    _turn(
        k_ptr + batch * k_batch + time * k_time, yk_ptr + batch * yk_batch + time * yk_time,
        cos_a, sin_a, cos_b, sin_b, Hk, k_head, yk_head, HALF, D, PAIRS, ROUND, BLOCK_K, BLOCK_R, BLOCK_REST,
    )  # fmt: skip


def unit_stride(x: Tensor) -> Tensor:
    """``x`` with unit column stride: ``x`` itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def token_strides(x: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """The strides of batch, time and head."""
    batch, second, third = x.stride()[:3]
    return (batch, third, second) if heads_first else (batch, second, third)


def sizes(q: Tensor, k: Tensor, cos: Tensor, heads_first: bool) -> tuple[int, ...]:
    """B, T, Hq, Hk, D and R/2."""
    heads, time = (1, 2) if heads_first else (2, 1)
    return q.shape[0], q.shape[time], q.shape[heads], k.shape[heads], q.shape[3], cos.shape[-1]


def angle_strides(cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[int, ...]:
    """The strides for ``load_angles``, from cos_batch to pos_time. A batch of one applies to
    all."""

    def of(t: Tensor) -> tuple[int, ...]:
        # a stride of 0 makes a batch of one that of all
        strides = t.stride()
        return strides[0] if t.shape[0] > 1 else 0, strides[1], strides[2] if len(strides) == 4 else 0, strides[-1]

    return *of(cos), *of(sin), *((0, 0) if position_ids is None else of(position_ids)[:2])


def turned_dtype(dtype: torch.dtype, cos: Tensor, casting: str) -> torch.dtype:
    """The dtype of the result of rotating a tensor of ``dtype`` by the table ``cos``."""
    return dtype if casting != "none" or dtype == cos.dtype else torch.promote_types(dtype, cos.dtype)


def rounding(dtype: torch.dtype, cos: Tensor, casting: str) -> bool:
    """Whether the forward rounds products of ``dtype`` and a table to less than fp32, which is
    then the dtype of the result."""
    return casting != "fp32" and turned_dtype(dtype, cos, "none") != torch.float32


def fusing(rounds: bool) -> dict[str, bool]:
    """Options for the compiler. It may compute in bf16 and fuse a product and a sum, which then
    round once: forbid that if both must round."""
    return {"enable_fp_fusion": not rounds}


@typed_launcher
def rope_turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads_first: bool, pairs: bool,
    rounds: bool, inverse: bool, q_dtype: torch.dtype, k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k (B, H, T, D), or (B, T, H, D) without ``heads_first``; cos, sin as for ``rope``, or
    tables (1, L, R/2) with position_ids (B, T).

    The dtypes are those of the results. ``rounds``: products to the dtype of the result.
    """
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    q, k = unit_stride(q), unit_stride(k)
    # in memory like q and k, which keeps (B, T, H, D) where the projections wrote that
    yq, yk = torch.empty_like(q, dtype=q_dtype), torch.empty_like(k, dtype=k_dtype)
    B, T, Hq, Hk, D, half = sizes(q, k, cos, heads_first)
    block_r = next_power_of_2(half)
    rest = next_power_of_2(D - 2 * half) if 2 * half < D else 0
    # H200, B4 T2048 H32/8 D128: 46 us a direction; 32 heads a tile 48, 4 heads 63 (byte floor 40)
    c = launch_config.tile("rope", 2 * block_r + rest, q.itemsize, elements=2048)
    # a tile that is not wider than the heads there are
    block_q, block_k = (min(next_power_of_2(h), c.block_m) for h in (Hq, Hk))
    strides = [s for x in (q, k, yq, yk) for s in token_strides(x, heads_first)]
    strides += angle_strides(cos, sin, position_ids)
    flags = dict(BOTH=cos.ndim == 4, INVERSE=inverse, PAIRS=pairs)
    # without rounding, fused products and sums are faster and more exact
    flags |= dict(ROUND=rounds, **fusing(rounds))
    blocks = dict(BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_REST=rest, num_warps=c.num_warps)
    numbers = T, Hq, Hk, cos.shape[1], half, D
    launch(_rope, (B * T,), q, k, cos, sin, position_ids, yq, yk, *numbers, *strides, **flags, **blocks)
    return yq, yk


class RopeFunction(torch.autograd.Function):
    """``apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, layout="halves",
    casting="fp32")``; cos and sin hold one angle a pair."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, layout="halves", casting="fp32"):
        # no q and k: a rotation is turned back by its angles alone
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.how = unsqueeze_dim == 1, layout == "pairs"
        # the backward rounds products to the dtype of q and k, whatever that of the result is
        ctx.rounds, ctx.dtypes = casting != "fp32" and q.dtype != torch.float32, (q.dtype, k.dtype)
        dtypes = turned_dtype(q.dtype, cos, casting), turned_dtype(k.dtype, cos, casting)
        rounds = rounding(q.dtype, cos, casting)
        return rope_turn(q, k, cos, sin, position_ids, *ctx.how, rounds, False, *dtypes)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        heads, (need_dq, need_dk) = (1 if ctx.how[0] else 2), ctx.needs_input_grad[:2]
        # a gradient that nobody needs is one of no heads: the kernel has no flags for it
        dq = dq if need_dq else dq.narrow(heads, 0, 0)
        dk = dk if need_dk else dk.narrow(heads, 0, 0)
        dq, dk = rope_turn(dq, dk, *ctx.saved_tensors, *ctx.how, ctx.rounds, True, *ctx.dtypes)
        return dq if need_dq else None, dk if need_dk else None, *(None,) * 6


def in_place_of(q: Tensor, k: Tensor, cos: Tensor) -> str:
    """The ``casting`` of LinkedIn's functions, whose results have the dtypes of q and k: no
    upcast if there is only one dtype."""
    return "none" if q.dtype == k.dtype == cos.dtype else "fp32"


def checked_tables(
    name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, layout: str,
    unsqueeze_dim: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """cos, sin and position_ids in the form for launchers. Raises ``ValueError`` if an argument
    of operator ``name`` is wrong."""
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: layout must be one of {LAYOUTS}, got {layout!r}")
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"{name}: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"{name}: q and k must be 4-dimensional, got {tuple(q.shape)} and {tuple(k.shape)}")
    B, time, D = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    if (B, time, D) != (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]):
        raise ValueError(f"{name}: q and k must agree but for the heads, got {tuple(q.shape)} and {tuple(k.shape)}")
    # tables of any number of leading dims of one, as modules keep them
    if position_ids is not None:
        position_ids = position_ids.reshape(position_ids.shape[:-1].numel(), position_ids.shape[-1])
        if position_ids.shape[0] not in (1, B) or position_ids.shape[1] != time:
            raise ValueError(
                f"{name}: position_ids must have shape ({B} or 1, {time}), got {tuple(position_ids.shape)}"
            )
        if cos.shape != sin.shape or cos.shape[:-2].numel() != 1 or 2 * cos.shape[-1] > D:
            raise ValueError(
                f"{name}: tables cos and sin must have shape (L, at most {D // 2}), got {tuple(cos.shape)} and "
                f"{tuple(sin.shape)}"
            )
        cos, sin = (t.reshape(1, t.shape[:-1].numel(), t.shape[-1]) for t in (cos, sin))
        return cos, sin, position_ids
    # one table for all samples
    if cos.ndim == sin.ndim == 2:
        cos, sin = cos[None], sin[None]
    one_row_a_token = cos.ndim == 3 or (cos.ndim == 4 and cos.shape[2] == 2)
    fits = one_row_a_token and cos.shape[0] in (1, B) and cos.shape[1] == time
    if not fits or cos.shape != sin.shape or 2 * cos.shape[-1] > D:
        raise ValueError(
            f"{name}: cos and sin must have shape ({B} or 1, {time}, at most {D // 2}), got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    return cos, sin, position_ids


def rotated_by_kernels(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether kernels rotate ``q`` and ``k`` with these tables: not if the tables require
    gradients."""
    # learned angles: kernels have no gradient for them
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return False
    # one kernel for both, compiled for one dtype of q and k, and one of the tables
    same = q.dtype == k.dtype and cos.dtype == sin.dtype and cos.dtype in KERNEL_DTYPES
    return same and use_kernels(q, fusible=True)


def _angles(T: int, half: int, B: int = 1, dtype: torch.dtype | None = None) -> dict[str, T_]:
    angle = lambda *shape, dtype: (
        torch.arange(shape[1], dtype=dtype)[None, :, None] * 0.7 ** torch.arange(1, shape[2] + 1, dtype=dtype)
        + 0.1 * torch.arange(shape[0], dtype=dtype).view(-1, 1, 1)
    )
    return {
        "cos": T_((B, T, half), lambda *s, dtype: angle(*s, dtype=dtype).cos(), grad=False, dtype=dtype),
        "sin": T_((B, T, half), lambda *s, dtype: angle(*s, dtype=dtype).sin(), grad=False, dtype=dtype),
    }


def _flat(T: int, half: int) -> dict[str, T_]:
    """Tables (T, R/2)."""
    flat = lambda draw: lambda *shape, dtype: draw(1, *shape, dtype=dtype)[0]
    return {name: dataclasses.replace(t, shape=(T, half), draw=flat(t.draw)) for name, t in _angles(T, half).items()}


def _of_columns(T: int, half: int, B: int = 1) -> dict[str, T_]:
    """Tables (B, T, 2, R/2): angles of first and of second columns, as views of tables (B, T,
    R)."""
    split = lambda draw: lambda B, T, _, half, dtype: draw(B, T, 2 * half, dtype=dtype).view(B, T, 2, half)
    whole = _angles(T, 2 * half, B)
    return {name: dataclasses.replace(t, shape=(B, T, 2, half), draw=split(t.draw)) for name, t in whole.items()}


def _heads(B: int, Hq: int, Hk: int, T: int, D: int, **options) -> dict:
    return dict(q=T_((B, Hq, T, D)), k=T_((B, Hk, T, D)), **options)


def _ids(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 11, shape)


_IDS = T_((2, 5), _ids, dtype=torch.int64)


@op(
    reference=reference,
    cases=[
        Case("llama", _heads(2, 4, 2, 7, 16) | _angles(7, 8)),
        Case("both-columns", _heads(2, 4, 1, 5, 20) | _of_columns(5, 8)),
        Case("both-columns-of-pairs", _heads(2, 4, 2, 5, 16, layout="pairs", casting="none") | _of_columns(5, 8, B=2)),
        Case("batched-angles", _heads(2, 4, 1, 5, 16) | _angles(5, 8, B=2)),
        Case("partial", _heads(2, 3, 3, 5, 20) | _angles(5, 6)),
        Case("cohere", _heads(2, 4, 2, 5, 16, layout="pairs") | _angles(5, 8)),
        Case("glm4", _heads(1, 5, 1, 3, 24, layout="pairs") | _angles(3, 6)),
        Case("time-first", dict(q=T_((2, 7, 4, 16)), k=T_((2, 7, 2, 16)), unsqueeze_dim=2, **_angles(7, 8))),
        Case("packed", _heads(2, 4, 2, 5, 16, position_ids=_IDS) | _angles(11, 8)),
        Case("no-upcast", _heads(2, 4, 2, 7, 16, casting="none") | _angles(7, 8)),
        Case(
            "no-upcast-pairs",
            dict(q=T_((2, 5, 3, 20)), k=T_((2, 5, 1, 20)), casting="none", layout="pairs", unsqueeze_dim=2)
            | _angles(5, 6),
        ),
        Case("autocast", _heads(2, 4, 2, 5, 20, casting="none") | _angles(5, 8, dtype=torch.float32)),
        Case("olmo2", _heads(1, 4, 2, 5, 16, casting="back") | _angles(5, 8, dtype=torch.float32)),
        Case("vision", dict(q=T_((1, 5, 3, 17)), k=T_((1, 5, 3, 17)), unsqueeze_dim=2, **_flat(5, 8))),
        Case("alone", _heads(2, 4, 0, 5, 20, layout="pairs") | _angles(5, 8)),
    ],
    cost=lambda q, k, cos, sin, position_ids=None, **_: Cost(
        nbytes(q, k, q, k, cos, sin, position_ids),
        nbytes(q, k, q, k, cos, sin, position_ids),
        flops=(3 * (q.numel() + k.numel()),) * 2,
    ),
)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
    layout: str = "halves", unsqueeze_dim: int = 1, casting: str = "fp32",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys by the angles of their positions. Returns new tensors with their
    shapes, in the dtypes that ``casting`` defines.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``; any strides.
    cos, sin (B or 1, T, R/2) or (T, R/2) with R <= D; (B or 1, T, 2, R/2) with angles of the first
    and of the second column of each pair; or, with ``position_ids`` (B or 1, T), tables (L, R/2) or
    (1, L, R/2) that it indexes. If cos or sin require gradients, PyTorch computes everything.
    A position outside its table gives NaN on a GPU. Elsewhere it raises ``IndexError``, or, if
    negative, indexes from the end, as in PyTorch.
    """
    if casting not in CASTING:
        raise ValueError(f"rope: casting must be one of {CASTING}, got {casting!r}")
    cos, sin, position_ids = checked_tables("rope", q, k, cos, sin, position_ids, layout, unsqueeze_dim)
    if not rotated_by_kernels(q, k, cos, sin):
        return reference(q, k, cos, sin, position_ids, layout=layout, unsqueeze_dim=unsqueeze_dim, casting=casting)
    args = q, k, cos, sin, position_ids, unsqueeze_dim, layout, casting
    return apply_of(RopeFunction, args)(*args)
