"""Makes Triton's interpreter compute what a GPU computes: it runs kernels in numpy, which has no bf16.

The interpreter keeps bf16 as uint16 bit patterns and hands these to integer arithmetic, truncates instead of rounding when it casts, and passes
float arguments and loop indices as Python numbers. Here bf16 is computed in fp32 and rounded to nearest even, as PyTorch and the hardware do, and
these are fp32 and int32 scalars, as in a compiled kernel. FP8 is rounded as PyTorch
rounds it. Only what kernels use is covered; bf16 atomics are refused rather than wrong.
What it does anew for every call and value is done once, which makes it twice as fast.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_UNARY = ("cos", "exp", "exp2", "floor", "ceil", "log", "log2", "precise_sqrt", "sqrt", "sin", "erf", "rsqrt", "fneg")  # the last from Triton 3.8 on
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
    return h.dtype.scalar == tl.bfloat16


def _up(h: TensorHandle) -> TensorHandle:
    return TensorHandle(from_bf16(h.data), tl.float32) if _is_bf16(h) else h


def _down(h: TensorHandle) -> TensorHandle:
    return TensorHandle(to_bf16(h.data), tl.bfloat16)


def _in_fp32(compute, *, rounds: bool):
    """``compute`` with its bf16 operands in fp32; its result rounded to bf16, or not if it is a comparison or accumulates in fp32."""

    def wrapped(self, *operands):
        bf16 = any(isinstance(h, TensorHandle) and _is_bf16(h) for h in operands)
        if not bf16:
            return compute(self, *operands)
        out = compute(self, *(_up(h) if isinstance(h, TensorHandle) else h for h in operands))
        return _down(out) if rounds else out

    return wrapped


def _cast(stock):
    def cast_impl(self, src, dst_type):
        if _is_bf16(src):
            up = _up(src)
            return src if dst_type.scalar == tl.bfloat16 else up if dst_type.scalar == tl.float32 else stock(self, up, dst_type)
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
        return TensorHandle(out.data, tl.int1) if out.data.dtype == bool else out

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
        scope.set_attr(lang, "range", lambda *args, **kwargs: (interpreter._implicit_cvt(i) for i in count(*args, **kwargs)))

    return patch_lang_core


def _tensor(stock):
    """Scalars are arrays of one element, which numpy 2.4 no longer converts to int, as Triton 3.6 still asks it to."""

    def patch_lang_tensor(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch_lang_tensor


def _numpy(stock):
    """The interpreter makes its table of types anew for every value."""
    found: dict[str, np.dtype] = {}

    def get_np_dtype(t):
        scalar = t.scalar
        return stock(scalar) if isinstance(scalar, tl.pointer_type) else found.get(scalar.name) or found.setdefault(scalar.name, stock(scalar))

    return get_np_dtype


_patched: set[int] = set()  # the modules of the language that are, in the kernel that runs


def _once_a_kernel(stock):
    """The interpreter patches the language anew for every call of a device function, which takes longer than most of these functions."""

    @functools.cache
    def languages(fn):
        return {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}

    def patch_lang(fn):
        seen = languages(fn)
        if seen and seen <= _patched:
            return interpreter._LangPatchScope()
        _patched.update(seen)
        return stock(fn)

    return patch_lang


def _block(stock):
    """A type is made anew for every value, and checks its shape; few differ."""
    found: dict[tuple, dict] = {}

    def __init__(self, element_ty, shape):
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in found:
            stock(self, element_ty, shape)
            found[key] = vars(self).copy()
        else:
            vars(self).update(found[key])

    return __init__


@functools.cache
def _shape(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))


def _value(self, handle, type):
    """``tl.tensor.__init__``, which makes these constants anew for every value."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(*type.shape) if type.is_block() else _shape()


def _equal(stock):
    """Types are compared by name."""
    return lambda self, other: self is other or stock(self, other)


def _constant(stock):
    """Numbers in the source of kernels are few."""
    found: dict[tuple[str, str], tl.tensor] = {}

    def scalar_constant(self, value, dtype):
        key = repr(value), dtype.name
        if key not in found:
            found[key] = stock(self, value, dtype)
        return found[key]

    return scalar_constant


def _operands(stock):
    """Operands of one type need no search for a common one, unless they are divided."""

    def binary_op_type_checking_impl(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype and not (lhs.dtype.is_ptr() or div_or_mod):
            return self.broadcast_impl_value(lhs, rhs)
        return stock(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def _broadcast(stock):
    return lambda self, lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else stock(self, lhs, rhs)


def _builtins(stock):
    """For every kernel, the interpreter looks through all of the language for what to patch."""
    found: dict[object, list[tuple]] = {}

    def patch_builtin(pkg, builder, scope):
        if pkg not in found:
            stock(pkg, builder, scope)
            found[pkg] = [(name, getattr(of, name)) for of, name, _ in scope._changes if of is pkg]
        else:
            for name, call in found[pkg]:
                scope.set_attr(pkg, name, call)

    return patch_builtin


def _attribute(obj, name, member, builder, scope):
    """``_patch_attr``, which copies the arguments of every call."""
    semantic = TritonSemantic(builder)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _dot(stock):
    """The bits of a b are those of (b^T a^T)^T, as on a GPU, which adds in one order. Those of NumPy's product depend on the sides and on the layout."""

    def turned(h):
        return TensorHandle(np.ascontiguousarray(h.data.T), h.dtype.scalar)

    def call(self, a, b, d, *more):
        if a.data.ndim == 2 and a.data.shape[0] < b.data.shape[1]:
            return turned(stock(self, turned(b), turned(a), turned(d), *more))
        if a.data.ndim == 2:
            a, b = (TensorHandle(np.ascontiguousarray(h.data), h.dtype.scalar) for h in (a, b))
        return stock(self, a, b, d, *more)

    return call


def _kernel(stock):
    """Lanes that a mask discards may divide by zero or overflow, here as on a GPU."""

    def call(self, *args, **kwargs):
        _patched.clear()
        with np.errstate(all="ignore"):
            return stock(self, *args, **kwargs)

    return call


def install() -> None:
    """Patch the interpreter of this process."""
    B = InterpreterBuilder
    B.create_dot = _dot(B.create_dot)
    for names, rounds in (((*_UNARY, *_BINARY, "fma", "clampf"), True), ((*_COMPARE, "dot"), False)):
        for name in (f"create_{n}" for n in names):
            if hasattr(B, name):
                setattr(B, name, _in_fp32(getattr(B, name), rounds=rounds))
    B.cast_impl = _cast(B.cast_impl)
    B.create_fp_to_fp = _fp_to_fp(B.create_fp_to_fp)
    B.create_atomic_rmw = _atomic(B.create_atomic_rmw)
    for name, least in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):  # where tl.maximum meets NaN, the other number; so from Triton 3.8 on
        setattr(B, name, _in_fp32(lambda self, a, b, least=least: self.binary_op(a, b, least), rounds=True))
    B.binary_op = _comparison(B.binary_op)
    B.get_bf16 = lambda self, value: TensorHandle(to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)
    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)
    interpreter._patch_lang_core = _language(interpreter._patch_lang_core)
    interpreter._patch_lang_tensor = _tensor(interpreter._patch_lang_tensor)
    interpreter._get_np_dtype = _numpy(interpreter._get_np_dtype)
    interpreter._patch_lang = _once_a_kernel(interpreter._patch_lang)
    tl.block_type.__init__ = _block(tl.block_type.__init__)
    tl.tensor.__init__ = _value
    tl.dtype.__eq__ = _equal(tl.dtype.__eq__)
    TritonSemantic.scalar_constant = _constant(TritonSemantic.scalar_constant)
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    interpreter._patch_attr = _attribute
    interpreter._patch_builtin = _builtins(interpreter._patch_builtin)
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, op: None  # computes what nothing asserts where options.debug is off
    GridExecutor.__call__ = _kernel(GridExecutor.__call__)
