"""Triton, or a stand-in where it is not installed, and the ``@jit`` pieces that kernels share."""

from __future__ import annotations

import functools

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


# Integers that change with the batch, and numbers that users choose: a kernel is not compiled anew where one of these is 1 or a multiple of 16. All
# others do without a name here, as loads are wide where widths and strides are known to be such multiples.
VARYING = ("M", "T", "L", "R", "P", "tokens", "n_tokens", "programs", "splits", "ignore_index", "cos_batch", "sin_batch", "pos_batch", "label_stride")
jit = functools.partial(triton.jit, do_not_specialize=VARYING)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@jit
def tanh(x):
    """fp32 tanh in plain Triton, accurate relative to its value: a series below 0.3, exponentials above."""
    t = tl.abs(x)
    e = tl.exp(-2.0 * t)
    s = x * x
    series = x * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.05396825 + s * (0.02186949 - 0.00886324 * s)))))
    return tl.where(t < 0.3, series, tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e))
