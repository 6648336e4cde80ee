"""group_norm, modulated_rms_norm and poly_norm, where a ``Case`` cannot say it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside, leaves, needs_kernels

from liger_kernel.extra.group_norm import group_norm, reference as group_norm_reference
from liger_kernel.extra.modulated_rms_norm import modulated_rms_norm, reference as modulated_rms_norm_reference
from liger_kernel.extra.poly_norm import poly_norm, reference as poly_norm_reference
from liger_kernel.nn import (
    LigerGroupNorm,
    LigerModulatedRMSNorm,
    LigerPolyNorm,
    liger_group_norm,
    liger_modulated_rms_norm,
    liger_poly_norm,
)
from liger_kernel.ops import LigerGroupNormFunction, LigerModulatedRMSNormFunction, LigerPolyNormFunction
from liger_kernel.ops._core import launch_config as _config, operator as _op
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.testing import like, run

group, poly = (sys.modules[f"liger_kernel.extra.{name}"] for name in ("group_norm", "poly_norm"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("names", ["", "w", "b"], ids=lambda n: n or "none")
@pytest.mark.parametrize("long", [False, True])
def test_group_norm_with_any_parameters(names, long, dtype, monkeypatch):
    """Constant upstream gradients, as cases have them too, leave nothing of dx without a weight."""
    if long:
        monkeypatch.setattr(group, "MAX_N", 8)
    args = leaves(**{k: (6,) if k in "wb" else (2, 6, 3, 37) for k in ("x", *names)}) | {"num_groups": 2}
    assert_beside(group_norm, group_norm_reference, like(args, dtype))


@needs_kernels
@pytest.mark.parametrize("N", [1, 15, 16, 17, 127, 128, 129, 1000])
def test_parts_of_a_group(N, monkeypatch):
    """Groups that end within, at and after a block, in several parts, some of them empty."""
    monkeypatch.setattr(group, "MAX_N", 0)
    monkeypatch.setattr(group, "BLOCK", 16)
    x = 1000 + torch.randn(2, 2, N, device=DEVICE)
    truth = x.double()
    for processors in (1, 3, 64):
        monkeypatch.setattr(_config, "processors", lambda processors=processors: processors)
        y, mean, rstd = torch.ops.liger.group_norm_fwd(x, 2, None, None, 1e-3)
        expected = (truth.var(-1, unbiased=False) + 1e-3).rsqrt().view(-1)
        torch.testing.assert_close(mean.double(), truth.mean(-1).view(-1), rtol=2e-7, atol=0)
        torch.testing.assert_close(rstd.double(), expected, rtol=2e-6, atol=0)
        torch.testing.assert_close(
            y.double(), (truth - truth.mean(-1, keepdim=True)) * expected.view(2, 2, 1), rtol=1e-4, atol=1e-3
        )


@needs_kernels
@pytest.mark.parametrize("processors", [1, 16])
def test_channels_in_parts(processors, monkeypatch):
    monkeypatch.setattr(_config, "processors", lambda: processors)
    monkeypatch.setattr(_config, "tile", lambda *_, **__: _config.Tile(2, 16, 1))
    monkeypatch.setattr(group, "MAX_N", 0)
    assert_beside(group_norm, group_norm_reference, leaves(x=(3, 6, 75), w=(6,), b=(6,)) | {"num_groups": 3})


@needs_kernels
def test_the_channel_of_every_number_of_the_longest_group():
    """Found without dividing integers."""
    for channels in (1, 3, 127, 128, group.MAX_N):
        D = group.MAX_N // channels
        b = torch.arange(channels, dtype=torch.float32, device=DEVICE)
        y = group_norm(torch.zeros(1, channels, D, device=DEVICE), 1, b=b)
        assert torch.equal(y, b[:, None].expand(1, channels, D))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 4, 0, 3)])
def test_group_norm_of_nothing(shape):
    x, w, b = leaves(x=shape, w=(4,), b=(4,)).values()
    y = group_norm(x, 2, w, b)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape and not w.grad.any()


def test_group_norm_is_torchs():
    x, w, b = (torch.randn(shape, device=DEVICE) for shape in ((2, 6, 5, 4), (6,), (6,)))
    for layout in (x, x.to(memory_format=torch.channels_last), x[:, :, :, ::2]):
        torch.testing.assert_close(liger_group_norm(layout, w, b, 6, 3, 1e-5), F.group_norm(layout, 3, w, b))
    if _op._KERNEL_DEVICES:
        torch.testing.assert_close(LigerGroupNormFunction.apply(x, w, None, 6, 3, 1e-5), F.group_norm(x, 3, w))
    with pytest.raises(ValueError, match="liger_group_norm: X must have 4 channels, got shape"):
        liger_group_norm(x, w, b, 4, 2, 1e-5)


def test_group_norm_module():
    norm, stock = LigerGroupNorm(6, 3, eps=1e-5, bias=True).to(DEVICE), torch.nn.GroupNorm(3, 6).to(DEVICE)
    assert not norm.bias.any() and (norm.weight == 1).all()
    assert repr(norm) == "LigerGroupNorm(num_channels=6, num_groups=3, eps=1e-05)"
    norm.load_state_dict(stock.state_dict())
    x = torch.randn(2, 6, 7, device=DEVICE)
    torch.testing.assert_close(norm(x), stock(x))

    with pytest.raises(ValueError, match="LigerGroupNorm: num_groups must divide the 6 channels, got 4"):
        LigerGroupNorm(6, 4)


def _broadcast(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """scale over the rows of x that follow each other."""
    S, N = scale.shape[:-1].numel(), x.shape[-1]
    return scale.reshape(S, 1, N).expand(S, x.shape[:-1].numel() // S, N).reshape(x.shape)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8), (2, 1, 8), (6, 8), (2, 3, 8), (1, 1, 8)])
def test_scales_that_serve_rows(shape):
    x, scale, shift = leaves(x=(2, 3, 8), scale=shape, shift=shape).values()
    expected = (1 + _broadcast(scale, x)) * F.rms_norm(x, (8,), eps=1e-6) + _broadcast(shift, x)
    torch.testing.assert_close(modulated_rms_norm(x, scale, shift), expected)
    torch.testing.assert_close(modulated_rms_norm_reference(x, scale, shift), expected)


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (4, 8), (2, 3, 1), (3, 1, 8), ()])
def test_scales_that_would_be_guessed_at_are_refused(shape):
    """(T, N) and (1, T, N) among them: PyTorch would broadcast these along the samples."""
    with pytest.raises(ValueError, match="modulated_rms_norm: scale must have shape"):
        modulated_rms_norm(torch.randn(2, 3, 8, device=DEVICE), torch.randn(shape, device=DEVICE))


@needs_kernels
@pytest.mark.parametrize("M, S", [(40, 1), (40, 4), (40, 40), (2, 2), (1, 1)])
def test_partial_sums_of_samples(M, S, monkeypatch):
    """Several programs a sample, several samples, and a scale for each row."""
    monkeypatch.setattr(_config, "tile", lambda *_, **__: _config.Tile(2, 32, 1))
    args = leaves(x=(M, 24), scale=(S, 24), shift=(S, 24), w=(24,))
    assert_beside(modulated_rms_norm, modulated_rms_norm_reference, args)


@needs_kernels
def test_modulated_rms_norm_function_takes_published_arguments():
    x, w, scale = leaves(x=(3, 8), w=(8,), scale=(8,)).values()
    y = LigerModulatedRMSNormFunction.apply(x, w, scale, None, 1e-6, 1.0, "gemma", False)
    torch.testing.assert_close(y, (1 + scale) * rms_norm(x, w, offset=1.0, casting="gemma"))
    torch.testing.assert_close(liger_modulated_rms_norm(x, w, scale, None, 1e-6, 1.0, "gemma"), y)


def test_modulated_rms_norm_module():
    norm = LigerModulatedRMSNorm(8, init_fn="zeros", offset=1.0).to(DEVICE)
    x, scale, shift = leaves(x=(2, 3, 8), scale=(2, 8), shift=(2, 8)).values()
    plain = LigerModulatedRMSNorm(8, elementwise_affine=False)
    assert [*norm.state_dict()] == ["weight"] and not plain.state_dict()
    torch.testing.assert_close(norm(x, scale, shift), plain(x, scale, shift))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 3e4, 1e7, 1e30])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_powers_of_large_and_small_numbers(scale, wide, dtype, monkeypatch):
    """x^6 is neither infinite nor lost where fp32 does not hold it."""
    if wide:
        monkeypatch.setattr(poly, "FWD_N", 8)
        monkeypatch.setattr(poly, "BWD_N", 8)
    args = leaves(x=(5, 40), w=(3,), b=(1,))
    args = like(args | dict(x=(scale * args["x"]).detach().requires_grad_()), dtype)
    assert all(v.isfinite().all() for v in assert_beside(poly_norm, poly_norm_reference, args).values())
    x, w, b = (v.detach().double() for v in args.values())
    plain = sum(w[3 - p] * x**p / (x ** (2 * p)).mean(-1, keepdim=True).add(1e-6).sqrt() for p in (3, 2, 1)) + b
    torch.testing.assert_close(run(poly_norm_reference, like(args, torch.float64))["out0"], plain)


def test_a_row_with_no_number_is_nan_alone():
    x = torch.randn(3, 8, device=DEVICE)
    x[1, 2], x[2, 5] = float("nan"), float("inf")
    y = poly_norm(x, torch.ones(3, device=DEVICE), torch.zeros(1, device=DEVICE))
    assert y[0].isfinite().all() and y[1].isnan().all() and y[2].isnan().all()


def test_poly_norm_module():
    norm = LigerPolyNorm(eps=1e-5).to(DEVICE)
    assert {k: v.shape for k, v in norm.state_dict().items()} == {"weight": (3,), "bias": (1,)}
    assert (norm.weight == 1 / 3).all() and norm.bias == 1
    published = {"weight": torch.tensor([0.5, 0.25, 2.0]), "bias": torch.tensor(3.0)}
    norm.load_state_dict(published)
    assert norm.bias.shape == (1,) and norm.bias == 3 and published["bias"].shape == ()
    x, w, b = torch.randn(2, 5, 8, device=DEVICE), norm.weight, torch.tensor(3.0, device=DEVICE, requires_grad=True)
    y = liger_poly_norm(x, w, b, 1e-5)
    torch.testing.assert_close(norm(x), y)
    y.sum().backward()
    assert b.grad.shape == () and b.grad == 80
    if _op._KERNEL_DEVICES:
        torch.testing.assert_close(LigerPolyNormFunction.apply(x, w, b, 1e-5, False), y)
