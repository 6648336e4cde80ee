"""Kernels in Triton's interpreter compute what PyTorch computes, to the bit, in the dtype that
it does not know; other kernels stay as they are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from liger_kernel.ops._core import operator as _op
from liger_kernel.ops._core.tl import jit, tl

pytestmark = pytest.mark.skipif(not _op.INTERPRET, reason="kernels are not interpreted")


@jit
def _all(x_ptr, y_ptr, out_ptr, scalar, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + BLOCK + i, x * y - x)
    tl.store(out_ptr + 2 * BLOCK + i, tl.maximum(-x, tl.abs(y)))
    tl.store(out_ptr + 3 * BLOCK + i, tl.where(x < y, x, 0.0))
    tl.store(out_ptr + 4 * BLOCK + i, (x.to(tl.float32) * scalar.to(tl.float32)).to(x.dtype))
    tl.store(out_ptr + 5 * BLOCK + i, tl.sum(x.to(tl.float32), axis=0) + i)
    for step in tl.range(0, 2):
        tl.store(out_ptr + 6 * BLOCK + i, y / step.to(tl.float32))


@jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out_ptr + i * N + j, tl.dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
def test_arithmetic(dtype):
    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    x[:3] = torch.tensor([float("inf"), float("nan"), 0.0])
    out = torch.empty(7, 64, dtype=dtype)
    _all[(1,)](x, y, out, 1.1, BLOCK=64)
    expected = [
        x + y, x * y - x, torch.fmax(-x, y.abs()), x.where(x < y, 0), (x.float() * torch.tensor(1.1)).to(dtype),
        (torch.from_numpy(x.float().numpy().sum(keepdims=True)) + torch.arange(64)).to(dtype), y,
    ]  # fmt: skip
    for got, want in zip(out, expected):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_rounds_to_nearest_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.3895e38, 1e-40, 2**-133])
    out = torch.empty(8, dtype=torch.bfloat16)
    source = torch.cat([x, x.new_zeros(2)])
    _cast[(1,)](source, out, BLOCK=8)
    assert torch.equal(out, source.bfloat16())


@jit
def _cast(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


def test_dot():
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    out = torch.empty(16, 16)
    _dot[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out, a.float() @ b.float())


OF_A_USER = """
import torch
from triton.runtime import interpreter
import liger_kernel.ops as ops
from liger_kernel.ops._core import operator
from liger_kernel.testing import assert_as_accurate, like, run

stock = vars(interpreter).copy(), vars(interpreter.InterpreterBuilder).copy()
for name in ("rms_norm", "layer_norm", "dyt"):
    op = ops.OPS[name]
    for dtype in (torch.float32, torch.bfloat16):
        args = op.cases[0].make(dtype, "cpu")
        launched = []
        with operator.intercept_launches(lambda *call: launched.append(call)):
            run(op.fn, args, lambda outs: {k: torch.ones_like(o) for k, o in outs.items()})
        assert launched, name
        assert_as_accurate(run(op.fn, args), run(op.reference, like(args)), run(op.reference, like(args, torch.float64)))
assert stock == (vars(interpreter), vars(interpreter.InterpreterBuilder))
"""  # noqa: E501


def test_a_user_sets_the_variable(user_env):
    """The interpreter is repaired while a kernel of ours runs, and no longer."""
    done = subprocess.run(
        [sys.executable, "-c", OF_A_USER], env=user_env | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr  # of lanes that a mask discards
