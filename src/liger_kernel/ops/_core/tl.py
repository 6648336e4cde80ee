"""Triton, or a stand-in if it is not installed, and the ``@jit`` functions that kernels share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: references only; kernels are defined but never called

    class triton:
        jit = staticmethod(lambda f=None, **_: f if f is not None else lambda g: g)

    class tl:
        constexpr = staticmethod(lambda value: value)

    HAS_TRITON = False


# Integers that change with the batch, and numbers that users choose: a kernel is not compiled again
# if one of these is 1 or a multiple of 16. Others are not in this list, because loads are wide only
# if Triton knows that widths and strides are such multiples.
VARYING = (
    *("M", "M0", "M1", "M2", "M3", "T", "L", "R", "P", "tokens", "n_tokens", "programs", "splits", "ignore_index"),
    *("lower", "upper", "pos_batch", "label_stride"),
)
jit: Callable[..., Any] = functools.partial(triton.jit, do_not_specialize=VARYING)
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:
    from liger_kernel.ops._core.interpreter import repaired

    jit = repaired(jit)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


# Tiles of a matrix of rows, and rows of a weight: read in any dtype, computed in fp32.


@jit
def mask_of(row, M, col, N):
    """Which places of a tile are inside of a matrix (M, N)."""
    return (row < M)[:, None] & (col < N)[None, :]


@jit
def rows_at(i, BLOCK: tl.constexpr):
    """The rows of the ``i``th block, in 64 bits as in ``tile_at``."""
    return tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)


@jit
def rows_in(i, M, col, N, BLOCK: tl.constexpr):
    """The rows of the ``i``th block, and its mask with these columns."""
    row = rows_at(i, BLOCK)
    return row, mask_of(row, M, col, N)


@jit
def tile_at(i, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of the ``i``th tile of whole rows."""
    # rows times a stride of a large tensor pass 2^31
    row = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    return row, col, mask_of(row, M, col, N)


@jit
def own_block(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of a program's tile, of which rows have several: one axis of programs,
    as the second of a grid has at most 65535."""
    blocks = tl.cdiv(N, BLOCK_N)
    row = rows_at(tl.program_id(0) // blocks, BLOCK_M)
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, col, mask_of(row, M, col, N)


@jit
def load_tile(ptr, row, col, stride, mask):
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def store_tile(ptr, row, col, stride, values, mask):
    tl.store(ptr + row[:, None] * stride + col[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@jit
def store_if(ptr, at, value):
    """Where the kernel has such an output."""
    if ptr is not None:
        tl.store(ptr + at, value)


@jit
def store_sums(ptr, program, col, N, a, b, NEED_A: tl.constexpr, NEED_B: tl.constexpr):
    """A program's row of partial sums over rows: of a, then of b; one alone if the other is not needed."""
    ptr += program.to(tl.int64) * N * (NEED_A + NEED_B)
    if NEED_A:
        tl.store(ptr + col, tl.sum(a, axis=0), mask=col < N)
        ptr += N
    if NEED_B:
        tl.store(ptr + col, tl.sum(b, axis=0), mask=col < N)


# by column, or numbers of rows by row
@jit
def load_row(ptr, col, N):
    return tl.load(ptr + col, mask=col < N, other=0.0).to(tl.float32)


# Accurate fp32 functions. tl.exp, tl.log, tl.sqrt and / use the hardware's: off by two units in the
# last place or more, always in the same direction, so that the errors do not average out in long
# sums and iterations.


@jit
def div(a, b):
    """a / b to the last bit."""
    # div_rn itself takes only operands of one shape
    a, b = tl.broadcast(a, b)
    return tl.div_rn(a, b)


@jit
def add_exactly(total, x, lost):
    """total + x, and what rounding loses of it, which the next call takes (Kahan)."""
    x = x - lost
    new = total + x
    return new, (new - total) - x


@jit
def rsqrt(x):
    """1 / sqrt(x) to one and a half units in the last place. tl.rsqrt, to two units on either
    side, does for one norm; scores add the errors of many."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))


@jit
def exp(x):
    """exp(x) to a unit in the last place; tl.exp loses what x log2(e) is rounded by, |x| units."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts, the first of so few bits that its product is exact (Cody and Waite)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    # beyond, tl.exp overflows and underflows as it should, and 2^n would not
    return tl.where(tl.abs(x) < 87.0, tl.exp2(r * 1.4426950408889634) * tl.exp2(n), tl.exp(x))


@jit
def exp_of(x, PRECISE: tl.constexpr):
    """exp(x), in as many instructions as the result is worth: fp32 data take the accurate one."""
    return exp(x) if PRECISE else tl.exp(x)


@jit
def log(x):
    """log(x) to a unit in the last place: a series in s = (m - 1) / (m + 1), where x = m 2^k and
    m is within sqrt(2) of 1 (as in FreeBSD's libm)."""
    # the exponent k, so that the rest lies around 1 and not between 1 and 2
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    k = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = z * (0.66666663 + z * (0.4000097 + z * (0.28498787 + z * 0.24279079)))
    half = 0.5 * f * f
    found = k * 0.693359375 - ((half - (s * (half + series) - k * 2.12194440e-4)) - f)
    # numbers below the normal ones, infinities and NaN
    return tl.where((x > 1.2e-38) & (x < 3.4e38), found, tl.log(x))


@jit
def tanh(x):
    """tanh(x), accurate relative to its value: a series below 0.3, exponentials above."""
    t = tl.abs(x)
    # of -2|x|: of 2|x| it would overflow
    e = tl.exp(-2.0 * t)
    s = x * x
    series = x * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.05396825 + s * (0.02186949 - 0.00886324 * s)))))
    return tl.where(t < 0.3, series, tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e))


@jit
def tanh_slope(x):
    """1 - tanh(x)^2 without a difference of two numbers that are nearly one."""
    e = tl.exp(-2.0 * tl.abs(x))
    return div(4.0 * e, (1.0 + e) * (1.0 + e))
