"""Makes Triton's interpreter twice as fast: what it does anew for every call and value is done
once.

What it computes stays the same. ``ops/_core/interpreter.py`` repairs that, for users, too.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor


def _numpy(stock):
    """The interpreter makes its table of types anew for every value."""
    found: dict[str, np.dtype] = {}

    def get_np_dtype(t):
        scalar = t.scalar
        return (
            stock(scalar)
            if isinstance(scalar, tl.pointer_type)
            else found.get(scalar.name) or found.setdefault(scalar.name, stock(scalar))
        )

    return get_np_dtype


_patched: set[int] = set()  # the modules of the language that are, in the kernel that runs


def _once_a_kernel(stock):
    """The interpreter patches the language anew for every call of a device function, which takes
    longer than most of these functions."""

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

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        if (
            isinstance(lhs, tl.tensor)
            and isinstance(rhs, tl.tensor)
            and lhs.dtype is rhs.dtype
            and not (lhs.dtype.is_ptr() or div_or_mod)
        ):
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


def _kernel(stock):
    def call(self, *args, **kwargs):
        _patched.clear()
        return stock(self, *args, **kwargs)

    return call


def install() -> None:
    """Patch the interpreter of this process."""
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
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, op: (
        None
    )  # computes what nothing asserts where options.debug is off
    GridExecutor.__call__ = _kernel(GridExecutor.__call__)
