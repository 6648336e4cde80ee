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


def _one_a_block(stock):
    """A type is made anew for every value, and checks its shape; few differ, and are one object each."""
    found: dict[tuple, tl.block_type] = {}

    def __new__(cls, element_ty, shape):
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if (one := found.get(key)) is None:
            one = found[key] = object.__new__(cls)
            stock(one, element_ty, shape)
        return one

    return __new__


def _one_a_pointer(stock):
    """The same of pointers, whose types are made anew for every launch."""
    found: dict[tuple, tl.pointer_type] = {}

    def __new__(cls, element_ty, address_space=1, const=False):
        element_ty = element_ty.value if isinstance(element_ty, tl.constexpr) else element_ty
        key = str(element_ty), address_space, const
        if (one := found.get(key)) is None:
            one = found[key] = object.__new__(cls)
            stock(one, element_ty, address_space, const)
        return one

    return __new__


@functools.cache
def _shape(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))


def _value(self, handle, type):
    """``tl.tensor.__init__``, which makes these constants anew for every value."""
    self.handle, self.type = handle, type
    try:
        self.dtype, self.shape, self.numel = type.of_values
    except AttributeError:
        type.of_values = type.scalar, *(_shape(*type.shape) if type.is_block() else _shape())
        self.dtype, self.shape, self.numel = type.of_values


def _equal(self, other):
    """Types are compared by name."""
    other = other.value if isinstance(other, tl.constexpr) else other
    return self is other or (isinstance(other, tl.dtype) and self.name == other.name)


def _handle(self, data, dtype, attr=None):
    """``TensorHandle.__init__``, which asks a type in many ways for its size."""
    try:
        most = dtype.of_an_element
    except AttributeError:
        most = dtype.of_an_element = math.inf if dtype.is_ptr() else max(8, dtype.primitive_bitwidth) // 8
    if data.itemsize > most:
        raise ValueError(f"elements of {data.itemsize} bytes for {dtype}")
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


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
    """What two operands become depends on their types, and on a number's value, alone."""
    common: dict[tuple, tl.dtype] = {}  # of two types that are no pointers
    numbers: dict[tuple, tuple[tl.dtype, tl.tensor]] = {}  # of a type and a number: the other operand's, and the number

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if left and right:
            a, b = lhs.dtype, rhs.dtype
            if a.is_ptr() or b.is_ptr():
                if not (allow_lhs_ptr and a.is_ptr() and b.is_int()):
                    return stock(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            elif arithmetic_check and (a is not b or div_or_mod):
                key = a.name, b.name, div_or_mod
                if (to := common.get(key)) is None:
                    to = common[key] = self.computation_type_impl(a, False, b, False, div_or_mod)
                lhs, rhs = self.cast(lhs, to), self.cast(rhs, to)
            return self.broadcast_impl_value(lhs, rhs)
        value, number = (lhs, rhs) if left else (rhs, lhs)
        if not (left or right) or value.dtype.is_ptr():
            return stock(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        key = left, value.dtype.name, type(number), repr(number), arithmetic_check, div_or_mod
        if key not in numbers:
            # beside a value that is no block: the number is none
            zero = self.tensor(self.builder.get_null_value(value.dtype.to_ir(self.builder)), value.dtype)
            both = stock(self, *((zero, rhs) if left else (lhs, zero)), False, False, arithmetic_check, div_or_mod)
            numbers[key] = both[not left].dtype, both[left]
        to, number = numbers[key]
        value = self.cast(value, to)
        return self.broadcast_impl_value(*((value, number) if left else (number, value)))

    return binary_op_type_checking_impl


def _broadcast(stock):
    """How two blocks become one shape depends on their types alone."""
    splats: dict[tuple, tuple[tl.block_type, tl.block_type]] = {}

    def splat(self, value, like):
        key = like.name, value.dtype.name
        if key not in splats:
            made = like.with_element_ty(value.dtype)
            splats[key] = made, made.to_ir(self.builder)
        made, ir_type = splats[key]
        return self.tensor(self.builder.create_splat(ir_type, value.handle), made)

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not lhs.type.is_block():
            return splat(self, lhs, rhs.type), rhs
        if not rhs.type.is_block():
            return lhs, splat(self, rhs, lhs.type)
        return stock(self, lhs, rhs)

    return broadcast_impl_value


def _unwrapped(stock):
    """Most of what is asked for its constant has none."""
    plain = {tl.tensor, int, bool, type(None)}
    return lambda o: o if type(o) in plain else o.value if type(o) is tl.constexpr else stock(o)


def _cast(stock):
    """Most casts are to the type that a value has."""

    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        return input if input.dtype is dst_ty else stock(self, input, dst_ty, fp_downcast_rounding)

    return cast


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
    member = getattr(member, "__wrapped__", member)  # without the check that there is a semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    if obj is tl.tensor and name in _UFUNCS:
        call = _directly(call, name, semantic)
    elif obj is tl.tensor and name == "__getitem__":
        call = _indexed(call)
    scope.set_attr(obj, name, call)


_UFUNCS = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__rmul__": np.multiply,
    "__truediv__": np.divide, "__and__": np.bitwise_and, "__or__": np.bitwise_or, "__lt__": np.less,
    "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip


def _directly(stock, name, semantic):
    """Operators of two values whose types, or of a value and a number that, have met before:
    numpy's function, which broadcasts, without the way there, which takes ten times as long. Where
    more happens than this (bf16, two dtypes), always ``stock``."""
    compute = _UFUNCS[name]
    tensor, handle_of, new = tl.tensor, interpreter.TensorHandle, object.__new__
    known: dict[tuple, tuple] = {}  # types, or a type and a number: what else goes in, the types that come out
    kept = []  # types whose identities are keys

    def direct(dtype) -> bool:
        return (
            dtype.is_int()
            if name in ("__and__", "__or__")
            else dtype.name != "bf16"
            and (dtype.is_standard_floating() or (dtype.is_int() and name != "__truediv__" and dtype is not tl.int1))
        )

    def learn(key, self, other, out):
        """What the operator does, if it is the function alone, of operands of these types."""
        kept.append((self.type, other.type if isinstance(other, tensor) else None, out.type))
        known[key] = ()
        found = out.handle.dtype, out.type, out.handle.data.dtype
        if self.dtype.is_ptr() and name == "__add__":
            width = np.uint64(max(1, self.dtype.element_ty.primitive_bitwidth // 8))
            if isinstance(other, int):
                known[key] = np.array([other]).astype(np.uint64) * width, *found
            elif other.dtype in (tl.int32, tl.int64):
                known[key] = width, *found
        elif not direct(self.dtype):
            pass
        elif isinstance(other, tensor):
            same = self.dtype is other.dtype and self.handle.data.dtype == other.handle.data.dtype
            if same or {self.dtype.name, other.dtype.name} == {"int32", "int64"}:
                known[key] = None, *found
        elif isinstance(other, (int, float)):
            whole, number = semantic.binary_op_type_checking_impl(self, other)
            if whole.dtype is self.dtype and number.dtype is self.dtype:
                known[key] = np.ascontiguousarray(number.handle.data.ravel()[:1]), *found

    def call(self, other):
        kind = type(other)
        if kind is tl.constexpr:
            other, kind = other.value, type(other.value)
        key = (id(self.type), id(other.type)) if kind is tensor else (id(self.type), kind, other)
        try:
            found = known[key]
        except KeyError:
            out = stock(self, other)
            if kind is not float or other:  # 0.0 is -0.0 in a dictionary
                learn(key, self, other, out)
            return out
        if not found:
            return stock(self, other)
        more, element, made, kind_of_data = found
        a = self.handle.data
        if kind is not tensor:
            data = compute(a, more)
        elif more is None:
            data = compute(a, other.handle.data)
        else:  # bytes from a pointer
            data = a + more * other.handle.data.astype(np.uint64)
        if data.dtype is not kind_of_data:
            return stock(self, other)
        handle = new(handle_of)
        handle.data, handle.dtype, handle.attr = data, element, {}
        out = new(tensor)
        out.handle, out.type = handle, made
        out.dtype, out.shape, out.numel = made.of_values
        return out

    return call


def _indexed(stock):
    """``x[:, None]`` of a type that has met it before: numpy's own."""
    known: dict[tuple, tuple] = {}

    def call(self, slices):
        if type(slices) is not tuple:
            return stock(self, slices)
        key = id(self.type), *[s if s is None else s.start is s.stop for s in slices]
        if (found := known.get(key)) is None:
            out = stock(self, slices)  # which refuses what is neither None nor a whole slice
            known[key] = out.type, self.type  # whose identity is part of the key
            return out
        return tl.tensor(interpreter.TensorHandle(self.handle.data[slices], self.handle.dtype), found[0])

    return call


def _kernel(stock):
    def call(self, *args, **kwargs):
        _patched.clear()
        return stock(self, *args, **kwargs)

    return call


def install() -> None:
    """Patch the interpreter of this process."""
    interpreter._get_np_dtype = _numpy(interpreter._get_np_dtype)
    interpreter._patch_lang = _once_a_kernel(interpreter._patch_lang)
    tl.block_type.__new__ = _one_a_block(tl.block_type.__init__)
    tl.block_type.__init__ = lambda self, element_ty, shape: None
    tl.pointer_type.__new__ = _one_a_pointer(tl.pointer_type.__init__)
    tl.pointer_type.__init__ = lambda self, element_ty, address_space=1, const=False: None
    tl.tensor.__init__ = _value
    tl.dtype.__eq__ = _equal
    interpreter.TensorHandle.__init__ = _handle
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrapped(tl.core._unwrap_if_constexpr)
    TritonSemantic.cast = _cast(TritonSemantic.cast)
    TritonSemantic.scalar_constant = _constant(TritonSemantic.scalar_constant)
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    interpreter._patch_attr = _attribute
    interpreter._patch_builtin = _builtins(interpreter._patch_builtin)
    # computes what nothing asserts where options.debug is off
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, op: None
    GridExecutor.__call__ = _kernel(GridExecutor.__call__)
