"""Norms and squared ReLU, where a ``Case`` cannot say it."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside, leaves, needs_kernels

from liger_kernel.nn import (
    LigerFusedAddRMSNorm,
    LigerLayerNorm,
    LigerReLUSquared,
    liger_fused_add_rms_norm,
    liger_layer_norm,
    liger_relu_squared,
)
from liger_kernel.ops import LigerReLUSquaredFunction
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm, reference as fused_add_rms_norm_reference
from liger_kernel.ops.norms.layer_norm import layer_norm, reference as layer_norm_reference
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.testing import assert_as_accurate, like

# the package has the function under this name
fused = sys.modules["liger_kernel.ops.fused_add_rms_norm"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("names", ["", "w", "b", "wb"], ids=lambda n: n or "none")
def test_layer_norm_with_any_parameters(names, dtype, N=123):
    """Constant upstream gradients, as cases have them too, leave nothing of dx without a weight."""
    args = leaves(**{k: (N,) if k in "wb" else (9, N) for k in ("x", *names)})
    assert_beside(layer_norm, layer_norm_reference, like(args, dtype))


@needs_kernels
def test_layer_norm_statistics_are_fp32_and_do_not_cancel():
    x = (1000 + torch.randn(3, 200, device=DEVICE)).to(torch.float16)
    _, mean, rstd = torch.ops.liger.layer_norm_fwd(x, None, None, 0.0)
    truth = x.double()
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), truth.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), truth.var(-1, unbiased=False).rsqrt(), rtol=1e-6, atol=0)


def test_layer_norm_module():
    norm = LigerLayerNorm(8, eps=1e-5, bias=True).to(DEVICE)
    stock = torch.nn.LayerNorm(8, eps=1e-5).to(DEVICE)
    assert not norm.bias.any() and (norm.weight == 1).all() and repr(norm) == "LigerLayerNorm((8,), eps=1e-05)"
    norm.load_state_dict(stock.state_dict())
    LigerLayerNorm(8).load_state_dict(stock.state_dict())
    x = torch.randn(3, 8, device=DEVICE)
    torch.testing.assert_close(norm(x), stock(x))
    torch.testing.assert_close(liger_layer_norm(x, stock.weight, stock.bias, 1e-5), stock(x))
    assert not LigerLayerNorm(8, init_fn="zeros").weight.any()
    plain = LigerLayerNorm((8,), elementwise_affine=False)
    assert not plain.state_dict()
    torch.testing.assert_close(plain(x), F.layer_norm(x, (8,), eps=1e-6))
    with pytest.raises(ValueError, match="LigerLayerNorm: init_fn must be one of"):
        LigerLayerNorm(8, init_fn="randn")
    with pytest.raises(ValueError, match=r"LigerLayerNorm: hidden_size must be one dim, got \(4, 8\)"):
        LigerLayerNorm((4, 8))


SUM_AND_NORM = dict(x=(5, 24), residual=(5, 24), w=(24,))


@pytest.mark.parametrize("out", [0, 1])
def test_a_gradient_of_one_output_alone(out, monkeypatch):
    """What is absent stays absent: no zeros are made or read, and that of the sum launches nothing."""
    if out == 1:
        monkeypatch.setattr(fused, "fused_add_rms_norm_bwd", None)
    alone = lambda outs: {f"out{out}": torch.ones_like(outs[f"out{out}"]) * torch.arange(24, device=DEVICE)}
    found = assert_beside(fused_add_rms_norm, fused_add_rms_norm_reference, leaves(**SUM_AND_NORM), grads=alone)
    assert ("dw" in found) == (out == 0)


def test_the_two_gradients_accumulate_apart():
    """x and residual get equal values; a second backward of one must not reach the other."""
    args = leaves(**SUM_AND_NORM)
    grads = []
    for _ in range(2):
        y, s = fused_add_rms_norm(**args)
        (y.square().sum() + (s * s).sum()).backward()
        grads.append({k: v.grad.clone() for k, v in args.items()})
    for k in args:
        torch.testing.assert_close(grads[1][k], 2 * grads[0][k])
    args["x"].grad.zero_()
    torch.testing.assert_close(args["residual"].grad, grads[1]["residual"])


def test_a_tensor_added_to_itself_and_used_elsewhere():
    torch.manual_seed(0)
    x0, w0 = torch.randn(5, 24, device=DEVICE), torch.randn(24, device=DEVICE)

    def gradient(fn, dtype):
        x, w = x0.to(dtype, copy=True).requires_grad_(), w0.to(dtype)
        h = x * 2
        y, s = fn(h, h, w)
        y2, s2 = fn(y, s, w)  # as in a model: s flows on, and is normalised
        (y2 * s2 * h).sum().backward()
        return {"dx": x.grad}

    stock = fused_add_rms_norm_reference
    ways = (fused_add_rms_norm, torch.float32), (stock, torch.float32), (stock, torch.float64)
    assert_as_accurate(*(gradient(*way) for way in ways))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_the_norm_is_that_of_the_rounded_sum(casting):
    x, residual, w = (torch.randn(*shape, device=DEVICE).to(torch.bfloat16) for shape in ((6, 96), (6, 96), (96,)))
    y, s = fused_add_rms_norm(x, residual, w, casting=casting)
    assert torch.equal(s, x + residual) and torch.equal(y, rms_norm(s, w, casting=casting))


def test_a_sum_changed_in_place_is_noticed():
    """The backward reads it."""
    args = leaves(**SUM_AND_NORM)
    y, s = fused_add_rms_norm(**args)
    with pytest.raises(RuntimeError):
        s.add_(1)
        y.sum().backward()


@needs_kernels
def test_a_write_into_x_as_the_sum_is_refused():
    """Without a residual the sum is x, whose other uses would not hear of it."""
    leaf = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    x = 1 * leaf
    _, s = fused_add_rms_norm(x, None)
    assert s.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="view"):
        s.mul_(2)


def test_fused_add_rms_norm_module():
    how = dict(eps=1e-5, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True)
    norm = LigerFusedAddRMSNorm(8, **how).to(DEVICE)
    x, residual = torch.randn(2, 3, 8, device=DEVICE)
    y, s = norm(x, residual)
    torch.testing.assert_close((y, s), (F.rms_norm(x + residual, (8,), eps=1e-5), x + residual))
    torch.testing.assert_close(liger_fused_add_rms_norm(x, residual, norm.weight, 1e-5, 1.0, "gemma"), (y, s))
    assert set(norm.state_dict()) == {"weight"}


def test_relu_squared_of_what_is_not_finite():
    """And a gradient of what is cut off is zero, whatever flows back."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, -inf, -0.0, 3.0, -2.0], device=DEVICE, requires_grad=True)
    y = LigerReLUSquared()(x)
    y.backward(torch.tensor([1.0, 1.0, inf, nan, 2.0, inf], device=DEVICE))
    torch.testing.assert_close(y, F.relu(x).square(), equal_nan=True)
    torch.testing.assert_close(x.grad.tolist(), [nan, inf, 0.0, 0.0, 12.0, 0.0], equal_nan=True)
    torch.testing.assert_close(liger_relu_squared(torch.tensor(3.0, device=DEVICE)), torch.tensor(9.0, device=DEVICE))
    if _op._KERNEL_DEVICES:
        assert torch.equal(LigerReLUSquaredFunction.apply(x[3:].detach()), y[3:].detach())


@pytest.mark.parametrize("op", [rms_norm, fused_add_rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_few_wide_rows_keep_every_processor_busy(op):
    """One program a row would leave most of a GPU idle."""
    x, w = torch.empty(2, 1 << 18, device="meta", requires_grad=True), torch.empty(1 << 18, device="meta")
    programs = []
    with _op.intercept_launches(lambda kernel, grid, args, meta: programs.append(math.prod(grid))):
        y = op(x, x, w) if op is fused_add_rms_norm else op(x, w)
        torch.autograd.backward(y, [torch.empty_like(x)] * (2 if op is fused_add_rms_norm else 1))
    assert len(programs) >= 4 and min(programs) >= 32


@pytest.mark.parametrize("op", [rms_norm, fused_add_rms_norm], ids=lambda op: op.__name__)
@pytest.mark.parametrize("N, launches", [(1 << 16, 1), ((1 << 16) + 8, 2)])
def test_rows_that_a_program_can_read_twice_take_one_launch(op, N, launches):
    x, w = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((3, N), (N,)))
    found = []
    with _op.intercept_launches(lambda kernel, grid, args, meta: found.append(grid)):
        op(x, x, w) if op is fused_add_rms_norm else op(x, w)
    assert len(found) == launches
