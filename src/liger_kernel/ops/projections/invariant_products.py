"""Batch invariance: the results of a token have the same bits alone, padded, packed, and in any batch.

While the switch is on, each row of a matrix product is summed in an order that depends on the shape
(N, K) of the weight and not on the number of rows M:

    CUDA  cuBLASLt's product, with the smallest workspace, for pieces of 64 to ``_most`` rows
          (fewer rows are filled up with zeros), where this card has been seen to keep the bits of
          rows for many M; else our own product, whose tiles are fixed and which sums K in order
    CPU   one product of numbers after another, slowly: for tests and small models

PyTorch's own operators do so, too, so that layers of stock models are included; they are put back
when the switch is turned off. A product whose left operand is transposed, in a backward, is the
gradient of a weight, a sum over tokens: that depends on the batch in any case, and is the vendor's.
Attention of PyTorch, whose order depends on the batch, raises ``ValueError``.

Shapes: a (M, K), b (K, N), c (M, N) or (N,), y = beta c + alpha a b.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernel._private import backward_id, has_kernel, kernel_of, new_workspaces
from liger_kernel.ops._core import acc, launch_config
from liger_kernel.ops._core.invariance import hold, is_over_tokens
from liger_kernel.ops._core.tl import next_power_of_2
from liger_kernel.ops.projections import grouped_tma
from liger_kernel.ops.projections.grouped_mm import reduced_precision, write_mm

_LEAST = 64  # rows: with fewer, cuBLAS takes kernels that sum in another order
# numbers of rows for which a card is tried; those of between are of the same kernels
_TRIED = [n for p in range(6, 13) for n in (2**p, 2**p + 1, 5 << p - 2, 3 << p - 1, 7 << p - 2, (2 << p) - 1)]
_TRIED += [67, 94, 147, 217, 254, 303, 471, 647, 806, 1118, 1950, 2745, 3333, 4999, 6007, 7777]
_lock = threading.RLock()
_undo: list[Callable[[], Any]] = []


class _Thread(threading.local):
    inside = False  # whether a product of the vendor runs, which may call others


_thread = _Thread()


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Meanwhile the results of a token do not depend on its batch, in the whole process.

    Enclose the backward, too. ``ValueError`` for what cannot be so.
    """
    turn(1)
    try:
        yield
    finally:
        turn(-1)


def turn(change: int) -> None:
    """Count a holder of the switch more (1) or less (-1): the first turns it on, the last off."""
    with _lock:
        if hold(change) == (1 if change > 0 else 0):
            _turn_on() if change > 0 else _turn_off()


def _turn_on() -> None:
    # KiB, read in each product: without room, none is split along K. cuBLAS's own variable does the same for its
    # products, but PyTorch reads it by a regular expression, which takes the host 40 us a product
    if "CUBLASLT_WORKSPACE_SIZE" not in os.environ:
        os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
        _undo.append(lambda: os.environ.pop("CUBLASLT_WORKSPACE_SIZE", None))
    if torch.cuda.is_available():
        library = torch.backends.cuda.preferred_blas_library
        _undo.append(functools.partial(library, library()))
        library("cublaslt")
        of: Any = torch.backends.cuda.matmul
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            _undo.append(functools.partial(setattr, of, name, getattr(of, name)))
            setattr(of, name, False)
    _undo.append(new_workspaces)
    new_workspaces()
    operators = torch.library.Library("aten", "IMPL")
    _undo.append(operators._destroy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that its kernels are replaced
        # all before the first is replaced, because they call the vendor's
        ours = [
            (name, make(name, key), key)
            for key in ("CPU", "CUDA")
            for name, make in _OPERATORS.items()
            if has_kernel(name, key) or (name in _COMPOSITE and has_kernel("mm", key))
        ]
        for each in ours:
            operators.impl(*each)


def _turn_off() -> None:
    while _undo:
        _undo.pop()()


# -- one product

Vendor = Callable[..., Any]


def _is_free(a: Tensor, b: Tensor) -> bool:
    """Whether a product may be computed in any order: it has no sums, or these are over tokens."""
    if _thread.inside or is_over_tokens() or not a.is_floating_point() or a.shape[-1] < 2 or not a.numel():
        return True
    # the gradient of a weight, dy^T x. Where gradients are enabled, a forward runs again
    transposed = a.ndim == 2 and a.stride(1) != 1 and a.stride(0) == 1
    return transposed and backward_id() != -1 and not torch.is_grad_enabled()


def _write(run: Vendor, way: str, a: Tensor, b: Tensor, c: Tensor | None, beta: Any, alpha: Any, y: Tensor) -> Tensor:
    """y, each row in an order of its own. ``run(c, a, b, y)`` is the vendor's."""
    (M, K), N = a.shape, b.shape[1]
    a = a if a.stride(1) == 1 and (a.stride(0) == K or M == 1) else a.contiguous()
    c = c.expand(M, N) if c is not None and c.ndim == 2 else c
    if way == "each":
        return _combined(_in_order(a, b), c, beta, alpha, y)
    if way == "ours":
        if c is None and alpha == 1 and y.is_contiguous():
            return _own(a, b, y)
        return _combined(_own(a, b, a.new_empty(M, N, dtype=torch.float32)), c, beta, alpha, y)
    part = lambda t, at: t if t is None or t.ndim < 2 else t[at]
    full = lambda t: t if t is None or t.ndim < 2 else torch.nn.functional.pad(t, (0, 0, 0, _LEAST - len(t)))
    step = _most(N)
    for at in (slice(start, min(start + step, M)) for start in range(0, M, step)):
        if at.stop - at.start >= _LEAST:
            run(part(c, at), a[at], b, y[at])
        else:
            wide = y.new_empty(_LEAST, N)
            run(full(part(c, at)), full(a[at]), b, wide)
            y[at].copy_(wide[: at.stop - at.start])
    return y


def _combined(t: Tensor, c: Tensor | None, beta: Any, alpha: Any, y: Tensor) -> Tensor:
    t = t if alpha == 1 else t * alpha
    t = t if c is None or beta == 0 else t + (c if beta == 1 else c.to(t.dtype) * beta)
    return y.copy_(t)


def _in_order(a: Tensor, b: Tensor) -> Tensor:
    """a b in the dtype of sums: each number by itself."""
    wide = acc(a.dtype)
    b = b.t().to(wide).contiguous()
    step = max(1, (1 << 22) // max(1, b.numel()))
    parts = [(part[:, None, :].to(wide) * b).sum(-1) for part in a.split(step)]
    return torch.cat(parts) if parts else a.new_zeros(0, b.shape[0], dtype=wide)


def _own(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a b by our kernels for products of groups: of one group."""
    if a.dtype == torch.float64:
        raise ValueError(f"batch_invariant: products must be in 32 bits or fewer on this GPU, got {a.dtype}")
    offs = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
    thin = _thin_tile(a, b.shape[1])
    if thin is None and y.dtype == a.dtype and grouped_tma.supported(a, b[None]):
        grouped_tma.product(a, b[None], offs, y)
    else:
        write_mm(a, b[None], offs, y, tile=thin)
    return y


def _thin_tile(a: Tensor, N: int) -> dict[str, Any] | None:
    """The tile of a product of few columns, as adapters have it, whose operands take the time. In
    fp32, beside a base in 16 bits, three products of TF32 on tensor cores, nearly as exact as fp32."""
    if N > 64 or not launch_config.arch().startswith("sm"):
        return None
    if a.dtype != torch.float32:
        stages = min(4, launch_config.shared_memory() // (256 * (32 + max(16, next_power_of_2(N)))))
        blocks = dict(BLOCK_M=32, BLOCK_N=max(16, next_power_of_2(N)), BLOCK_K=128, num_warps=4, num_stages=stages)
        return dict(PRECISION="ieee") | blocks
    blocks = dict(SPAN=0, BLOCK_M=64, BLOCK_N=max(16, next_power_of_2(N)), BLOCK_K=64, num_warps=4, num_stages=2)
    return dict(PRECISION="tf32" if reduced_precision(a.dtype) == "tf32" else "tf32x3") | blocks


def _way(run: Vendor, a: Tensor, b: Tensor, c: Tensor | None, beta: Any, dtype: torch.dtype) -> str:
    if not a.is_cuda:
        return "each"
    return "vendor" if _keeps_bits(run, a, b, c, beta, dtype) else "ours"


# -- is the vendor's order that of K, whatever the number of rows is?

_known: dict[tuple, bool] = {}


def _most(N: int) -> int:
    """Rows of a piece: as many as are tried, of which the results take at most 256 MiB in 16 bits."""
    return max(512, min(8192, (1 << 27) // max(1, N) // 64 * 64))


def _keeps_bits(
    run: Vendor, a: Tensor, b: Tensor, c: Tensor | None, beta: Any, dtype: torch.dtype,
    apart: tuple[int, int, int] = (0, 0, 0),
) -> bool:  # fmt: skip
    """Whether rows have the same bits in products of any number of rows; and, with rows ``apart``,
    those that they have side by side."""
    (K, N), (down, across), size = b.shape, b.stride(), 16 // a.itemsize
    # the vendor's kernel may depend on where a row begins
    if (down != 1 and across != 1) or (N | K | max(down, across)) % size or (a.data_ptr() | b.data_ptr()) % 16:
        return False
    key = a.get_device(), a.dtype, dtype, N, K, down, across, apart, None if c is None else (c.ndim, beta == 0)
    found = _known.get(key)
    if found is None:
        # a recorded graph computes nothing yet, so that nobody can look
        found = not torch.cuda.is_current_stream_capturing() and _tried(run, a, b, c, dtype, apart)
        _known[key] = found
    return found


def _tried(
    run: Vendor, a: Tensor, b: Tensor, c: Tensor | None, dtype: torch.dtype, apart: tuple[int, int, int]
) -> bool:
    """The host waits once."""
    (K, N), most = b.shape, _most(b.shape[1])
    random = torch.Generator(a.device).manual_seed(0)
    new = lambda N: torch.randn(most, N, generator=random, dtype=a.dtype, device=a.device)
    spread = lambda t, by: t if t is None or not by else t.new_empty(len(t), by)[:, : t.shape[1]].copy_(t)
    x, rows = new(K), None if c is None or c.ndim < 2 else new(N).to(c.dtype)

    def product(at: slice, x: Tensor, rows: Tensor | None, of_y: int) -> Tensor:
        y = a.new_empty(at.stop - at.start, of_y or N, dtype=dtype)[:, :N]
        run(c if rows is None else rows[at], x[at], b, y)
        return y

    whole, same = product(slice(0, most), x, rows, 0), torch.ones((), dtype=torch.bool, device=a.device)
    of_x, of_rows, of_y = apart
    given = spread(x, of_x), spread(rows, of_rows), of_y
    for m in (*(m for m in _TRIED if m < most), most):
        for at in {(0, m), (most - m, most)}:
            same &= (product(slice(*at), *given) == whole[slice(*at)]).all()
    return bool(same)


def _is_whole(
    run: Vendor, a: Tensor, b: Tensor, c: Tensor | None, beta: Any, dtype: torch.dtype, y: Tensor | None
) -> bool:
    """Whether the vendor's product is one piece of rows as they are."""
    M, N, size = a.shape[0], b.shape[1], 16 // a.itemsize
    if not _LEAST <= M <= _most(N):
        return False
    rows = None if c is None or c.ndim < 2 else c
    if any(t is not None and t.shape != (M, N) for t in (rows, y)):
        return False
    apart = []
    for t in (a, rows, y):
        if t is None:
            apart.append(0)
            continue
        by, dense = t.stride()
        if dense != 1 or by % size or by < t.shape[1] or t.data_ptr() % 16:
            return False
        apart.append(0 if by == t.shape[1] else by)
    return not any(apart) or _keeps_bits(run, a, b, c, beta, dtype, tuple(apart))


# -- PyTorch's operators while the switch is on


def _mm(name: str, key: str) -> Callable[..., Any]:
    """mm, addmm and their forms: with ``out``, in place, and with another dtype of the result."""
    stock, typed, adds = kernel_of(name, key), ".dtype" in name, name.startswith("addmm")
    forms = {False: ".out", True: ".dtype_out"}  # whether the result has another dtype -> the form that is given it
    names = {other: name.partition(".")[0].rstrip("_") + form for other, form in forms.items()}
    writers = {other: kernel_of(each, key) for other, each in names.items() if has_kernel(each, key)}

    def product(*args: Any, out: Tensor | None = None, beta: Any = 1, alpha: Any = 1) -> Tensor:
        given = dict(out=out) if out is not None else {}
        given |= dict(beta=beta, alpha=alpha) if adds else {}
        c, (a, b, *rest) = (args[0], args[1:]) if adds else (None, args)
        if _is_free(a, b):
            return stock(*args, **given)
        if name == "addmm_":
            out = c
        shape = a.shape[0], b.shape[1]
        dtype = out.dtype if out is not None else rest[0] if typed else a.dtype
        how, other = dict(beta=beta, alpha=alpha) if adds else {}, dtype != a.dtype
        write = writers[other]

        def run(c: Tensor | None, a: Tensor, b: Tensor, y: Tensor) -> None:
            _thread.inside = True
            try:
                write(*([c] if adds else ()), a, b, *([y.dtype] if other else ()), out=y, **how)
            finally:
                _thread.inside = False

        way = _way(run, a, b, c, beta, dtype)
        if way == "vendor" and _is_whole(run, a, b, c, beta, dtype, out):
            _thread.inside = True
            try:
                return stock(*args, **given)
            finally:
                _thread.inside = False
        if out is None:
            out = a.new_empty(shape, dtype=dtype)
        elif out.shape != shape:
            out.resize_(shape)
        return _write(run, way, a, b, c, beta, alpha, out)

    return product


def _bmm(name: str, key: str) -> Callable[..., Any]:
    """Products of batches, each by itself: by our kernels for products of groups."""
    stock, adds = kernel_of(name, key), name.startswith("baddbmm")

    def product(*args: Any, out: Tensor | None = None, beta: Any = 1, alpha: Any = 1) -> Tensor:
        given = dict(out=out) if out is not None else {}
        c, (a, b) = (args[0], args[1:]) if adds else (None, args)
        if _is_free(a, b) and a.shape[-1] != 1:
            return stock(*args, **given, **(dict(beta=beta, alpha=alpha) if adds else {}))
        (B, M, K), N = a.shape, b.shape[2]
        if K == 1:
            t = a * b  # one term: nothing is summed
        elif a.is_cuda:
            t = a.new_empty(B * M, N, dtype=torch.float32)
            offs = torch.arange(M, B * M + 1, M, dtype=torch.int32, device=a.device)
            write_mm(a.reshape(B * M, K).contiguous(), b, offs, t)
        else:
            t = torch.cat([_in_order(each, of) for each, of in zip(a, b)])
        y = c if name == "baddbmm_" else a.new_empty(B, M, N) if out is None else out
        return _combined(t.view(B, M, N), c, beta, alpha, y)

    return product


def _mv(name: str, key: str) -> Callable[..., Any]:
    """A product of a matrix and a vector: of one column."""
    stock = kernel_of(name, key)

    def product(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, **into: Tensor) -> Tensor:
        if _is_free(a, b):
            return stock(c, a, b, beta=beta, alpha=alpha, **into)
        y = c if name == "addmv_" else into["out"] if into else a.new_empty(0)
        if y.shape != a.shape[:1]:
            y.resize_(a.shape[0])
        return _combined(torch.mm(a, b[:, None])[:, 0], c, beta, alpha, y)

    return product


def _refused(what: str) -> Callable[[str, str], Callable[..., Any]]:
    def make(name: str, key: str) -> Callable[..., Any]:
        stock = kernel_of(name, key) if "_mm" in name else None

        def refuse(*args: Any, **more: Any) -> Any:
            if stock is not None and is_over_tokens():
                return stock(*args, **more)
            raise ValueError(f"batch_invariant: {what}, got aten::{name}")

        return refuse

    return make


_ORDER = "must sum in an order of its own, as in a model that is patched with batch_invariant=True"


_PRODUCTS = ("", ".out", ".dtype", ".dtype_out")
_OPERATORS: dict[str, Callable[[str, str], Callable[..., Any]]] = {
    **{f"{name}{form}": _mm for name in ("mm", "addmm") for form in _PRODUCTS},
    "addmm_": _mm,
    **{f"{name}{form}": _bmm for name in ("bmm", "baddbmm") for form in ("", ".out")},
    "baddbmm_": _bmm,
    **dict.fromkeys(("addmv", "addmv_", "addmv.out"), _mv),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_flash_attention_forward",
            "_efficient_attention_forward",
            "_safe_softmax",
        ),
        _refused(f"attention {_ORDER}"),
    ),
    "_grouped_mm": _refused(f"experts {_ORDER}"),
    **dict.fromkeys(("_scaled_mm", "_scaled_grouped_mm"), _refused(f"a product in FP8 {_ORDER}")),
    # on a GPU; on a CPU, nobody can tell it from other random numbers
    "native_dropout": _refused("dropout must be off"),
}
_COMPOSITE = {"_safe_softmax"}  # of no kernel for one kind of device
