"""The declaration of an operator, which tests, benchmarks, docs and warm-up read from ``OPS``.

Only tools read ``OPS``, never the hot path: calling an operator costs one device check.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_kernel._private import (
    FAKE_MODE,
    KEEPING_MODES,
    DelayedError,
    FakeTensor,
    autocast_is_on,
    cuda_stream,
    dispatch_mode,
    dispatch_mode_stack,
    dispatch_modes,
    is_exporting,
    observed,
)
from liger_kernel.ops._core.shards import attempt, is_sharded
from liger_kernel.ops._core.tl import HAS_TRITON, INTERPRET, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor
else:

    class TensorDescriptor: ...


F = TypeVar("F", bound=Callable)

OPS: dict[str, Op] = {}

NAMESPACE = "liger"
_LIB = torch.library.Library(NAMESPACE, "DEF")
_LAUNCHERS: dict[str, str] = {}  # name -> module
# types of arguments that need no dispatcher: subclasses of tensors do
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype, list, tuple}
_tracing = contextvars.ContextVar("liger_tracing", default=False)
_KERNEL_DEVICES = {"cpu"} if INTERPRET else {"cuda"} if HAS_TRITON else set()
if os.environ.get("LIGER_KERNEL_IMPL") == "torch":
    _KERNEL_DEVICES = set()
# read several times in each call of an operator: three lookups of an attribute less each time
_compiling = torch.compiler.is_compiling
KERNEL_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
# integers that do not hold every index and -100
_NARROW = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class T:
    """A tensor argument of a ``Case``: standard normal values unless ``draw(*shape,
    dtype=float64)`` says otherwise."""

    shape: tuple[int, ...]
    draw: Callable[..., Tensor] = torch.randn
    grad: bool = True
    dtype: torch.dtype | None = None  # None: the dtype under test

    def make(self, dtype: torch.dtype, device: str) -> Tensor:
        with torch.device(device):
            t = self.draw(*self.shape, dtype=torch.float64).to(self.dtype or dtype)
        return t.requires_grad_(self.grad and t.is_floating_point())


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments for tests or benchmarks, named after the model from which they come.

    ``gpu`` marks shapes of real models, too large for the interpreter. ``timed`` marks shapes
    that are only measured, because smaller shapes test the same kernels as well.
    """

    name: str
    args: Mapping[str, Any]
    gpu: bool = False
    timed: bool = False

    def make(self, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
        # for devices that are not initialised yet, torch.manual_seed records the stack, which takes
        # longer than drawing the values
        (torch.default_generator if device == "cpu" else torch).manual_seed(seed)
        return {k: v.make(dtype, device) if isinstance(v, T) else v for k, v in self.args.items()}


@dataclass(frozen=True)
class Cost:
    """The least work of an operator: bytes read and written once, elementwise operations, and
    matrix products (m, n, k), by direction.

    A transcendental function counts as one operation.

    ``whole``: the bytes of forward and backward together if one pass can compute both; default:
    their sum. ``rate``: how many times as fast as products of the inputs' dtype a GPU computes
    those of the operator, which are 2 in FP8.
    """

    forward: int
    backward: int
    whole: int | None = None
    flops: tuple[int, int] = (0, 0)
    gemms: tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]]] = ((), ())
    rate: int = 1

    def of(self, mode: str) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Bytes, operations and products of "forward", "backward" or "full"."""
        at = {"forward": (0,), "backward": (1,), "full": (0, 1)}[mode]
        moved = {
            "forward": self.forward,
            "backward": self.backward,
            "full": self.forward + self.backward if self.whole is None else self.whole,
        }[mode]
        products = [g for i in at for g in self.gemms[i]]
        return moved, sum(self.flops[i] for i in at) + sum(2 * m * n * k for m, n, k in products), products


def nbytes(*tensors: Tensor | None) -> int:
    """The total bytes of the tensors; None counts as 0."""
    return sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True, eq=False)
class Op:
    """A public operator with its reference, its cases, and the cost that benchmarks need."""

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Sequence[Case]
    cost: Callable[..., Cost]
    doc: str


def op(*, reference: Callable, cases: Sequence[Case], cost: Callable[..., Cost]) -> Callable[[F], F]:
    """Declare a public operator. ``reference`` has the same signature and defines the result, in
    any dtype, on any device.

    A long signature is written once: a reference that only names its parameters gets the defaults
    and types of the public function. Its last parameter, ``**how``, stands for the options that
    change how a result is computed, not which result.
    ``cost`` takes a case's arguments. ``bench/cases`` has everything else that benchmarks need,
    such as rivals.
    """

    def declare(fn: F) -> F:
        if (there := OPS.get(fn.__name__)) and there.fn.__module__ != fn.__module__:
            raise ValueError(f"op: name must be new, got {fn.__name__!r}, an operator of {there.fn.__module__}")
        if not reference.__annotations__:
            reference.__annotations__, reference.__defaults__, reference.__kwdefaults__ = (
                fn.__annotations__,
                fn.__defaults__,
                fn.__kwdefaults__,
            )
        # tests call either with the arguments of a case
        ours, theirs = inspect.signature(fn), inspect.signature(reference)
        named = [p for p in theirs.parameters.values() if p.kind is not p.VAR_KEYWORD]
        how = (
            [p for p in ours.parameters.values() if p.kind is p.KEYWORD_ONLY and p not in named]
            if len(named) < len(theirs.parameters)
            else []
        )
        if [p for p in ours.parameters.values() if p not in how] != named:
            raise TypeError(f"{fn.__name__}{ours} and its reference{theirs} differ in signature")
        # The operator calls its reference by this name. What PyTorch says of DTensors that it cannot
        # split becomes our ValueError there, at no cost for calls that run kernels: a wrapper of the
        # operator itself would be a frame in each of those
        fn.__globals__[reference.__name__] = functools.partial(attempt, fn.__name__, reference)
        OPS[fn.__name__] = Op(fn.__name__, fn, reference, cases, cost, inspect.getdoc(fn) or "")
        return fn

    return declare


def use_kernels(x: Tensor, dtype: torch.dtype | None = None, *, fusible: bool = False) -> bool:
    """Whether kernels run on ``x``, which makes a result in ``dtype`` if that is given. The
    reference runs for other devices, fp64, DTensors (which PyTorch splits), where ``only_pytorch``,
    and, inside ``torch.compile``, for operators that Inductor fuses better."""
    # a DTensor's `device` is a GPU, too
    if type(x) is not Tensor and is_sharded(x):
        return False
    if x.device.type not in _KERNEL_DEVICES or (dtype or x.dtype) not in KERNEL_DTYPES:
        return False
    if _compiling():
        return not fusible and not is_exporting()
    return not observed()


def only_pytorch() -> bool:
    """Whether only PyTorch's own operators are right: in graphs that are exported or traced, which
    would hold launchers without their gradients, inside transforms of ``torch.func`` (grad, vmap,
    jvp), and in forward-mode AD."""
    return is_exporting() if _compiling() else observed()


def refuse_graphs(name: str, why: str) -> None:
    """Raise where ``only_pytorch``, for what consists of other operators."""
    if only_pytorch():
        raise ValueError(
            f"{name}: the call must be one that PyTorch neither exports, traces nor transforms, because {why}"
        )


def host_can_read(x: Tensor) -> bool:
    """Whether the host may wait for values that are computed from ``x`` now: these exist, and no
    graph or trace records how it goes on."""
    if torch.compiler.is_compiling() or x.is_meta or is_recorded(x) or only_pytorch():
        return False
    return not is_fake(x)


def is_fake(x: Tensor) -> bool:
    """Whether operators on ``x`` compute only shapes: it is a fake tensor, or treated as one."""
    return _intercept is None and (isinstance(x, FakeTensor) or dispatch_mode(FAKE_MODE) is not None)


def as_index(index: Tensor) -> Tensor:
    """Integers of any dtype in one that holds every index and ``ignore_index``: compared with a
    narrower dtype, -100 would wrap to a class."""
    return index.long() if index.dtype in _NARROW else index


def launcher(schema: str) -> Callable[[F], F]:
    """Register a launcher as ``torch.ops.liger.<name>``; its body without the launches is its
    fake kernel."""

    def register(fn):
        _LIB.define(fn.__name__ + schema)
        _LIB.impl(fn.__name__, fn, "CompositeExplicitAutograd")

        def fake(*args, **kwargs):
            # PyTorch traces in threads of its own: a context variable is right in each of them
            token = _tracing.set(_intercept is None)
            try:
                return fn(*args, **kwargs)
            finally:
                _tracing.reset(token)

        torch.library.register_fake(f"{NAMESPACE}::{fn.__name__}", fake, lib=_LIB)
        # for tests, which find each launcher's file by it
        _LAUNCHERS[fn.__name__] = fn.__module__
        registered = getattr(getattr(torch.ops, NAMESPACE), fn.__name__).default
        name = fn.__name__.removesuffix("_fwd").removesuffix("_bwd")

        @functools.wraps(fn)
        def call(*args):
            # only code that observes or traces the call needs PyTorch's dispatcher; a kernel on
            # plain tensors does not
            plain = not _compiling() and not dispatch_modes() and _PLAIN.issuperset(map(type, args))
            if plain:
                return fn(*args)
            if is_exporting() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
                own = "an exported graph must have PyTorch's operators, got an autograd.Function"
                raise ValueError(f"{fn.__name__}: {own}: call the operator or the module")
            return attempt(name, registered, *args)

        return call

    return register


def results_are_kept() -> bool:
    """Whether selective checkpointing may hold the result of any operator, which nobody may then
    write to. Results of launchers are not of this kind."""
    if _compiling() or not dispatch_modes():
        return False
    return any(isinstance(mode, KEEPING_MODES) for mode in dispatch_mode_stack())


def free_to_write() -> bool:
    """Whether a result is new memory, to which its maker may write and which it may give another shape: nobody
    records or keeps it."""
    return not _compiling() and (not dispatch_modes() or not results_are_kept())


def tracing(x: Tensor) -> bool:
    """Whether only shapes are needed: inside a fake kernel, or on the meta device."""
    return _tracing.get() or (x.is_meta and _intercept is None)


Run = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_intercept: Run | None = None
# part of the targets that do not count while launches are intercepted
_ignored = 0.5


@contextlib.contextmanager
def intercept_launches(run: Run, device: str = "meta", ignored: float = 0.5) -> Iterator[None]:
    """Call ``run(kernel, grid, args, meta)`` instead of every launch. Kernels are compiled in this
    way for a device that this machine lacks.

    Operators then use kernels for tensors on ``device``, "meta" or, for fake tensors, "cpu".
    Launchers run as if these tensors were on a GPU. ``ignored``: the part of a loss's targets that
    does not count, which only data would tell.
    """
    # read at each launch: a parameter would go through every launcher
    global _intercept, _ignored
    _intercept, _ignored = run, ignored
    added = {device} - _KERNEL_DEVICES
    _KERNEL_DEVICES.update(added)
    try:
        yield
    finally:
        _intercept = None
        _KERNEL_DEVICES.difference_update(added)


def intercepted() -> bool:
    """Whether launches are intercepted, so that nothing is computed and only shapes are valid."""
    return _intercept is not None


def unlike(parts: list) -> list:
    """Parts of a loop. Where launches are intercepted, without those between the first two and the
    last: they launch the same kernels, and need no other memory."""
    return parts[:2] + parts[2:][-1:] if intercepted() else parts


def counted(targets: int) -> int:
    """How many of so many targets count while launches are intercepted."""
    return int(targets * (1 - _ignored))


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU, or represents a tensor on a GPU while launches are intercepted."""
    return x.is_cuda or _intercept is not None


def is_recorded(x: Tensor) -> bool:
    """Whether what is computed with ``x`` now becomes a part of a CUDA graph: nothing runs yet,
    and the memory of results belongs to the graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# releases of Triton with compiled kernels that we can call directly
DIRECT = ("3.6", "3.7", "3.8", "3.9")
_DIRECT = HAS_TRITON and not INTERPRET and bool(torch.version.cuda) and triton.__version__.rpartition(".")[0] in DIRECT
# everything on which a launch depends -> how to call its compiled kernel
_compiled: dict[tuple, tuple] = {}
if _DIRECT:
    _hook = triton.knobs.runtime.launch_enter_hook
    _stream = cuda_stream


def _start(device: int, kernel, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """``kernel[grid](*args, **meta)``. If the compiled kernel is known, Triton's own work per call
    is skipped, which is a third of the host time.

    The key is everything on which Triton specialises a kernel: constexprs and options, dtypes, and
    which integers are 1 or multiples of 16. Rare calls go through Triton: pointers that are not
    multiples of 16, integers of more than 31 bits, other kinds of arguments, a profiler that hooks
    launches. So do all calls with other releases of Triton and with AMD's compiler, which
    specialises on more.
    """
    global _DIRECT
    if not _DIRECT or _hook.calls:
        kernel[grid](*args, **meta)
        return
    key = [kernel.fn, device, *meta, *meta.values()]
    # one test at the end for all: the bits of every pointer and of every integer, or-ed together
    pointers = integers = 0
    for a in args:
        kind = type(a)
        if kind is int:
            # ~a of a negative number needs as many bits as a does
            integers |= a if a >= 0 else ~a
            key.append(2 if a == 1 else not a & 15)
        elif kind is Tensor or kind is torch.nn.Parameter:
            pointers |= a.data_ptr()
            key.append(a.dtype)
        elif kind is float or a is None:
            key.append(kind)
        elif kind is TensorDescriptor:
            key.append((a.base.dtype, *a.block_shape))
        else:
            # no pointer ends in 1: the call goes through Triton
            pointers = 1
    known = tuple(key)
    if pointers & 15 or integers >> 31:
        kernel[grid](*args, **meta)
    elif found := _compiled.get(known):
        run, function, metadata, constants = found
        x, y, z = (*grid, 1, 1)[:3]
        try:
            run(x, y, z, _stream(device), function, metadata, None, None, None, *args, *constants)
        # raised before anything is launched, by a release of Triton that takes other arguments
        except TypeError as error:
            _DIRECT = False
            warnings.warn(
                f"liger_kernel: Triton {triton.__version__} starts kernels in another way ({error}); calls cost more "
                "host time",
                stacklevel=2,
            )
            kernel[grid](*args, **meta)
    else:
        compiled = kernel[grid](*args, **meta)
        constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
        _compiled[known] = compiled.run, compiled.function, compiled.packed_metadata, constants


def descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """``x``, whose last dim is dense, for a kernel that loads blocks of this shape by TMA. What
    a block has beyond x is zero."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def launch(kernel, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on the device of its first tensor, whatever the current device is.
    Raises ``RuntimeError`` if kernels cannot run here.

    ``args``: all arguments before the constexprs, which are tensors, descriptors, integers, floats
    and None. ``meta``: the constexprs and options by name.
    """
    x = args[0]
    if tracing(x):
        return
    if _intercept is not None:
        return _intercept(kernel, grid, args, meta)
    # of a launch outside a launcher
    if type(x) is FakeTensor:
        return
    device = x.get_device()
    # on a CPU: the interpreter runs the kernel, where it is on
    if device < 0:
        if x.device.type not in _KERNEL_DEVICES:
            raise RuntimeError(
                f"kernels need {'a GPU' if HAS_TRITON else 'Triton'}, got a tensor on {x.device}: call the operator, "
                "which has a reference"
            )
        _start(device, kernel, grid, args, meta)
    elif device == torch.cuda.current_device():
        _start(device, kernel, grid, args, meta)
    else:
        with torch.cuda.device(device):
            _start(device, kernel, grid, args, meta)


def _without_autocast(backward: Callable, ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
    """Run ``backward`` in the dtypes of the forward, whatever the state of autocast in its
    caller is."""
    # autocast is on for each kind of device by itself: that of the gradients counts
    device = next((g.device.type for g in grads if g is not None), "meta")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return backward(ctx, *grads)
    torch.set_autocast_enabled(device, False)
    try:
        return backward(ctx, *grads)
    finally:
        torch.set_autocast_enabled(device, True)


def once_differentiable(backward: Callable) -> Callable:
    """Make a Function's ``backward`` raise if its gradients are differentiated. (torch's own
    treats them as constants if the upstream gradient is constant.)"""

    @functools.wraps(backward)
    def once(ctx, *grads):
        autocast = not _compiling() and autocast_is_on()
        # gradients are enabled in a backward only for create_graph=True
        if not torch.is_grad_enabled():
            return _without_autocast(backward, ctx, grads) if autocast else backward(ctx, *grads)
        with torch.no_grad():
            outs = _without_autocast(backward, ctx, grads) if autocast else backward(ctx, *grads)
        if _compiling():
            return outs
        # torch.autograd.grad runs only nodes between its outputs and its inputs: without edges to
        # the inputs, it would skip this node
        inputs = [*(None if d is None else d.detach().requires_grad_() for d in outs), *leaves(ctx)]
        fail = DelayedError(b"liger_kernel: kernels have no second derivatives; the stock model has", len(inputs))
        refused = fail(*inputs)
        return refused[: len(outs)] if len(inputs) > 1 else refused

    return once


def input_gradients(ctx: Any, grads: Iterable[Any], shapes: Iterable[Sequence[int] | None] = ()) -> tuple[Any, ...]:
    """What a Function's ``backward`` returns: ``grads``, those of its first inputs, where they are
    needed, and None for all others. ``shapes``: of the first ones, None where they have theirs."""
    needs = ctx.needs_input_grad
    found = [d if need else None for d, need in zip(grads, needs)]
    for i, shape in enumerate(shapes):
        if found[i] is not None and shape is not None:
            found[i] = found[i].view(shape)
    return *found, *(None,) * (len(needs) - len(found))


def with_gradients(fn: Callable[..., Any], *inputs: Tensor | None) -> tuple[Any, list[Any]]:
    """``fn(*inputs)`` without a graph, and the gradients of the sum of its first result to the
    inputs that are not None: for losses without autograd."""
    own = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        found = fn(*own)
        loss = found[0] if isinstance(found, tuple) else found
        grads = iter(torch.autograd.grad(loss.sum(), [t for t in own if t is not None]))
    without = (
        tuple(t.detach() if isinstance(t, Tensor) else t for t in found) if isinstance(found, tuple) else found.detach()
    )
    return without, [t if t is None else next(grads) for t in own]


def leaves(node: Any, beyond: Iterable[Any] = ()) -> Iterator[Tensor]:
    """The leaf tensors below ``node`` of an autograd graph, except those at or below the nodes
    ``beyond``."""
    seen, todo = set(beyond), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [edge for edge, _ in node.next_functions]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of a product with ``x``; None if it is off."""
    device = x.device.type
    # "meta" has no autocast, and asking for it raises
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def acc(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype: fp32 for 16 bits, otherwise unchanged, so that references also run
    in fp64."""
    return torch.promote_types(dtype, torch.float32)


def shaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """The new, contiguous ``y`` in another shape, but not as a view: users may write to what a
    Function returns, and autograd refuses that for views."""
    return y.resize_(shape) if free_to_write() else y.view(shape)


def swapped(y: Tensor) -> Tensor:
    """The new ``y`` with dims 1 and 2 exchanged, but not as a view."""
    return y.transpose_(1, 2) if free_to_write() else y.transpose(1, 2)


def computed(x: Tensor) -> Tensor:
    """``x``; of the logits of a patched model, which are computed when somebody needs them,
    their ``value()``. For autograd they are no tensor before."""
    return x if type(x) is Tensor else getattr(x, "value", lambda: x)()


def rows_of(x: Tensor) -> Tensor:
    """``x`` as (M, N) with unit column stride: a view if the strides allow it, else a copy."""
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)
    return x if x.stride(1) == 1 else x.contiguous()
