"""Repairs Triton's interpreter (``TRITON_INTERPRET=1``) while it runs a kernel of ours; ``tl.py``
imports this only then.

The interpreter runs kernels in numpy, which has no bf16. It hands bit patterns of bf16 to integer
arithmetic, truncates where a GPU rounds, and passes float arguments and loop indices as Python
numbers, which have no ``.to``. Here bf16 is computed in fp32 and rounded to nearest even, FP8 as
PyTorch rounds it, and those are fp32 and int32 scalars, as in a compiled kernel. Only what our
kernels use is covered; bf16 atomics are refused rather than wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

BOOL = np.dtype(bool)
# the last from Triton 3.8 on
_UNARY = ("cos", "exp", "exp2", "floor", "ceil", "log", "log2", "precise_sqrt", "sqrt", "sin", "erf", "rsqrt", "fneg")
_BINARY = ("fadd", "fsub", "fmul", "fdiv", "frem", "precise_divf", "minimumf", "maximumf")
_COMPARE = tuple(f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "LE", "GT", "GE", "EQ", "NE"))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))


def _is_bf16(h: TensorHandle) -> bool:
    return h.dtype.name == "bf16"


def _up(h: TensorHandle) -> TensorHandle:
    return TensorHandle(from_bf16(h.data), tl.float32) if _is_bf16(h) else h


def _down(h: TensorHandle) -> TensorHandle:
    return TensorHandle(to_bf16(h.data), tl.bfloat16)


def _in_fp32(compute, *, rounds: bool):
    """``compute`` with bf16 operands in fp32; ``rounds``: the result becomes bf16, unlike
    comparisons and sums in fp32."""

    def wrapped(self, *operands):
        for h in operands:  # a generator would take longer than most of these operations
            if isinstance(h, TensorHandle) and _is_bf16(h):
                break
        else:
            return compute(self, *operands)
        out = compute(self, *(_up(h) if isinstance(h, TensorHandle) else h for h in operands))
        return _down(out) if rounds else out

    return wrapped


def _cast(stock):
    def cast_impl(self, src, dst_type):
        if _is_bf16(src):
            up = _up(src)
            if dst_type.scalar == tl.bfloat16:
                return src
            return up if dst_type.scalar == tl.float32 else stock(self, up, dst_type)
        if dst_type.scalar == tl.bfloat16:
            return _down(TensorHandle(src.data.astype(np.float32), tl.float32))
        return stock(self, src, dst_type)

    return cast_impl


_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _fp_to_fp(stock):
    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if (fp8 := _FP8.get(dst_type.scalar)) is not None and src.dtype.scalar == tl.float32:
            bytes_of = torch.from_numpy(np.ascontiguousarray(src.data)).to(fp8).view(torch.uint8)
            return TensorHandle(bytes_of.numpy().reshape(src.data.shape), dst_type.scalar)
        if tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar):
            return stock(self, src, dst_type, rounding_mode)
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"bf16 with rounding mode {rounding_mode}")
        return self.cast_impl(src, dst_type)

    return create_fp_to_fp


def _comparison(stock):
    """What compares scalars is a bit, which Triton 3.9 asks masks to be."""

    def binary_op(self, lhs, rhs, op):
        out = stock(self, lhs, rhs, op)
        return TensorHandle(out.data, tl.int1) if out.data.dtype is BOOL else out

    return binary_op


def _atomic(stock):
    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        if _is_bf16(val):
            raise NotImplementedError("bf16 atomics")
        return stock(self, op, ptr, val, mask, sem, scope)

    return create_atomic_rmw


def _argument(stock):
    def implicit_cvt(arg):
        if isinstance(arg, float):
            return tl.core.tensor(TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return stock(arg)

    return implicit_cvt


def _language(stock):
    """``tl.range`` counts in int32 scalars, which have ``.to``, rather than in Python integers."""

    def patch_lang_core(lang, scope):
        stock(lang, scope)
        count = lang.range
        scope.set_attr(
            lang, "range", lambda *args, **kwargs: (interpreter._implicit_cvt(i) for i in count(*args, **kwargs))
        )

    return patch_lang_core


def _tensor(stock):
    """Scalars are arrays of one element, which numpy 2.4 no longer converts to int, as Triton
    3.6 still asks it to."""

    def patch_lang_tensor(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch_lang_tensor


def _dot(stock):
    """The bits of a b are those of (b^T a^T)^T, as on a GPU, which adds in one order.

    Those of numpy's product depend on the sides and on the layout.
    """

    def turned(h):
        return TensorHandle(np.ascontiguousarray(h.data.T), h.dtype.scalar)

    def call(self, a, b, d, *more):
        if a.data.ndim == 2 and a.data.shape[0] < b.data.shape[1]:
            return turned(stock(self, turned(b), turned(a), turned(d), *more))
        if a.data.ndim == 2:
            a, b = (TensorHandle(np.ascontiguousarray(h.data), h.dtype.scalar) for h in (a, b))
        return stock(self, a, b, d, *more)

    return call


def _repairs() -> list[tuple[Any, str, Any]]:
    """Owner, attribute and replacement."""
    # each replacement closes over what it replaces, which is stock when this module is imported
    B = InterpreterBuilder
    changes = dict(cast_impl=_cast, create_fp_to_fp=_fp_to_fp, create_atomic_rmw=_atomic, binary_op=_comparison)
    changes["create_dot"] = lambda stock: _in_fp32(_dot(stock), rounds=False)
    found = [(B, name, change(getattr(B, name))) for name, change in changes.items()]
    for names, rounds in (((*_UNARY, *_BINARY, "fma", "clampf"), True), (_COMPARE, False)):
        found += [(B, n, _in_fp32(getattr(B, n), rounds=rounds)) for name in names if hasattr(B, n := f"create_{name}")]
    # where tl.maximum meets NaN, the other number; so from Triton 3.8 on
    for name, least in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        found.append((B, name, _in_fp32(lambda self, a, b, least=least: self.binary_op(a, b, least), rounds=True)))
    found.append(
        (B, "get_bf16", lambda self, value: TensorHandle(to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16))
    )
    of_module = (("_implicit_cvt", _argument), ("_patch_lang_core", _language), ("_patch_lang_tensor", _tensor))
    return found + [(interpreter, name, change(getattr(interpreter, name))) for name, change in of_module]


_REPAIRS = _repairs()


@contextlib.contextmanager
def _repairing() -> Iterator[None]:
    scope = interpreter._LangPatchScope()
    try:
        for repair in _REPAIRS:
            scope.set_attr(*repair)
        # lanes that a mask discards may divide by zero or overflow, here as on a GPU
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


class _Kernel(InterpretedFunction):
    def run(self, *args, **kwargs):
        with _repairing():
            return super().run(*args, **kwargs)


def repaired(jit: Callable) -> Callable:
    """``jit``, whose kernels run with the repairs. Those of others run as without this package."""

    def decorator(fn):
        """A kernel of ``fn``."""
        kernel = jit(fn)
        # `triton.jit` decides the class itself
        kernel.__class__ = _Kernel
        return kernel

    return decorator
