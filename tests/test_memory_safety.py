"""Kernels touch only memory that is theirs: tensors between unreadable pages, tensors spread over
more than 2^31 elements, indices out of range.

A stray access kills the process, hence each operator runs in one of its own, forked from one that
has imported everything; by hand,
``python test_memory_safety.py guarded rms_norm all``. The interpreter makes real accesses at real
addresses, so none of this needs a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import mmap
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import processes
import pytest
import torch
from torch import Tensor

from liger_kernel.operator_checks import assert_accurate
from liger_kernel.ops import OPS
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops._core.operator import T
from liger_kernel.ops._core.tl import jit, tl
from liger_kernel.testing import backward, forward, upstream

PAGE, PROT_NONE, MAP_NORESERVE = mmap.PAGESIZE, 0, 0x4000
SPARSE_SPAN = 3 << 30  # elements from the first row to the last: int32 offsets wrap to negative ones
MAX_RSS = 2 << 30

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(n_bytes: int) -> int:
    """Address of private zero pages that cost nothing until they are touched; never freed."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    address = libc.mmap(None, n_bytes, protection, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"mmap of {n_bytes} bytes: errno {ctypes.get_errno()}")
    return address


def _elements(shape, stride) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride))


def _at(address: int, shape, stride, dtype: torch.dtype) -> Tensor:
    elements = _elements(shape, stride)
    buffer = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=elements).as_strided(shape, stride)


def contiguous(shape, row_stride: int | None = None) -> tuple[int, ...]:
    """Strides of a contiguous tensor, but for rows ``row_stride`` elements apart."""
    stride = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        stride[i] = row_stride if row_stride and i == len(shape) - 2 else stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


def guarded(shape, dtype: torch.dtype, *, front: bool = False, padding: int = 0) -> Tensor:
    """An empty tensor that ends where an unreadable page begins, or begins where one ends; its
    rows ``padding`` elements apart."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    stride = contiguous(shape, shape[-1] + padding if len(shape) > 1 else None)
    n_bytes = _elements(shape, stride) * dtype.itemsize
    pages = -(-n_bytes // PAGE) * PAGE
    base = _map(pages + 2 * PAGE)
    for guard in (base, base + PAGE + pages):
        assert libc.mprotect(guard, PAGE, PROT_NONE) == 0
    return _at(base + PAGE if front else base + PAGE + pages - n_bytes, shape, stride, dtype)


def sparse(shape, dtype: torch.dtype) -> Tensor:
    """An empty tensor whose last row begins at element ``SPARSE_SPAN`` or beyond."""
    rows = math.prod(shape[:-1])
    if len(shape) < 2 or rows < 2:
        return torch.empty(shape, dtype=dtype)
    stride = contiguous(shape, -(-SPARSE_SPAN // (rows - 1)) // 8 * 8 + 8)
    return _at(_map(_elements(shape, stride) * dtype.itemsize), shape, stride, dtype)


def moved(tensors: dict, place) -> dict:
    """The same arguments, tensors copied into memory from ``place(shape, dtype)``."""
    return {
        k: place(v.shape, v.dtype).copy_(v.detach()).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
        for k, v in tensors.items()
    }


@contextlib.contextmanager
def _allocate_from(place) -> Iterator[None]:
    """Make what launchers allocate come from ``place``."""
    shape_of = lambda size: tuple(size[0]) if size and isinstance(size[0], (tuple, list)) else tuple(size)
    new_empty = lambda t, *size, dtype=None, device=None: place(shape_of(size), dtype or t.dtype)
    empty_like = lambda t, dtype=None: place(tuple(t.shape), dtype or t.dtype)
    zeros = lambda empty: lambda *args, **more: empty(*args, **more).zero_()
    with (
        mock.patch.multiple(torch.Tensor, new_empty=new_empty, new_zeros=zeros(new_empty)),
        mock.patch.multiple(torch, empty_like=empty_like, zeros_like=zeros(empty_like)),
    ):
        yield


FIRST = "first"  # case, and not "all"


def _small_cases(op):
    small = [c for c in op.cases if not c.gpu]
    return small[:1] if FIRST in sys.argv else small


def check_guarded(op) -> None:
    """Every case, with every tensor that it is given or allocates next to an unreadable page."""
    for name, options in {"end": {}, "front": {"front": True}, "rows": {"padding": 3}}.items():
        place = lambda shape, dtype, options=options: guarded(shape, dtype, **options)
        for case in _small_cases(op):
            print(f"{op.name} {case.name}, unreadable page at {name}", flush=True)
            args = case.make(torch.bfloat16, "cpu")
            ours = moved(args, place)
            # outputs are contiguous: launchers do not ask for padding between rows
            with _allocate_from(lambda shape, dtype, front=name == "front": guarded(shape, dtype, front=front)):
                outs = forward(op.fn, ours)
                grads = backward(outs, ours, moved(upstream(outs), place))
            assert_accurate({k: o.detach() for k, o in outs.items()} | grads, op, case, torch.bfloat16)


def check_sparse(op) -> None:
    """Rows of inputs and upstream gradients whose offsets do not fit into 32 bits."""
    for case in _small_cases(op):
        print(f"{op.name} {case.name}, offsets beyond 2^31", flush=True)
        args = case.make(torch.bfloat16, "cpu")
        ours = moved(args, sparse)
        outs = forward(op.fn, ours)
        grads = backward(outs, ours, moved(upstream(outs), sparse))
        assert_accurate({k: o.detach() for k, o in outs.items()} | grads, op, case, torch.bfloat16)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert rss < MAX_RSS, f"{rss >> 20} MiB resident: something touched what lies between the rows"


def check_indices(op) -> None:
    """Some integers out of range: what comes out does not matter, what is read does."""
    for case in _small_cases(op):
        args = case.make(torch.bfloat16, "cpu")
        for name in [k for k, v in args.items() if isinstance(v, Tensor) and not v.is_floating_point()]:
            for wrong in (-1, -(2**40), 10**6, 2**40):
                print(f"{op.name} {case.name}, {name} = {wrong}", flush=True)
                ours = moved(args, guarded)
                ours[name].view(-1)[::2] = wrong
                outs = forward(op.fn, ours)
                backward(outs, ours, upstream(outs))


@jit
def _unmasked(x_ptr, y_ptr, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    tl.store(y_ptr + col, tl.load(x_ptr + col))


def check_alarm(op) -> None:
    """A kernel that forgot its mask: does not survive."""
    _unmasked[(1,)](guarded((100,), torch.float32), torch.empty(128), BLOCK=128)
    print("survived", flush=True)


CHECKS = {"guarded": check_guarded, "sparse": check_sparse, "indices": check_indices, "alarm": check_alarm}


def _main(said: str, checks: list[str], op_name: str, cases: str) -> None:
    sys.argv[1:] = [op_name, cases]
    processes.write_to(said)
    faulthandler.enable(sys.stderr)
    for check in checks:
        CHECKS[check](OPS[op_name])


def _in_its_own_process(checks: list[str], op_name: str, cases: str, folder: Path) -> tuple[int, str]:
    """Exit status, and what it said, which ends with what it did last."""
    said = folder / "said"
    process = processes.forkserver().Process(target=_main, args=(str(said), checks, op_name, cases))
    process.start()
    process.join()
    return process.exitcode, said.read_text() if said.exists() else ""


ELSEWHERE = "addresses are checked in the interpreter; on a GPU by compute-sanitizer"
by_addresses = pytest.mark.skipif(not _op.INTERPRET, reason=ELSEWHERE)


def _takes_integers(op) -> bool:
    return any(isinstance(v, T) and v.dtype == torch.int64 for c in _small_cases(op) for v in c.args.values())


@by_addresses
@pytest.mark.parametrize("cases", [FIRST, pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OPS)
def test_touches_only_its_memory(op, cases, tmp_path):
    checks = ["guarded", "sparse", "indices"][: 2 + _takes_integers(OPS[op])]
    status, said = _in_its_own_process(checks, op, cases, tmp_path)
    assert status == 0, f"exit status {status}\n{said}"


@by_addresses
def test_a_stray_access_is_noticed(tmp_path):
    status, said = _in_its_own_process(["alarm"], next(iter(OPS)), FIRST, tmp_path)
    assert status == -signal.SIGSEGV and "Segmentation fault" in said and "survived" not in said


if __name__ == "__main__":
    CHECKS[sys.argv[1]](OPS[sys.argv[2]])
