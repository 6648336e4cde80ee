"""The norms but RMSNorm, and squared ReLU, where a ``Case`` cannot say it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from liger_kernel.nn import (
    LigerFusedAddRMSNorm,
    LigerGroupNorm,
    LigerLayerNorm,
    LigerModulatedRMSNorm,
    LigerPolyNorm,
    LigerReLUSquared,
    liger_fused_add_rms_norm,
    liger_group_norm,
    liger_layer_norm,
    liger_modulated_rms_norm,
    liger_poly_norm,
    liger_relu_squared,
)
from liger_kernel.ops import (
    LigerFusedAddRMSNormFunction,
    LigerGroupNormFunction,
    LigerLayerNormFunction,
    LigerModulatedRMSNormFunction,
    LigerPolyNormFunction,
    LigerReLUSquaredFunction,
    rms_norm_backward,
    rms_norm_forward,
)
from liger_kernel.ops._core import config as _config
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.norms.fused_add_rms_norm import reference as fused_add_rms_norm_reference
from liger_kernel.ops.norms.group_norm import group_norm
from liger_kernel.ops.norms.group_norm import reference as group_norm_reference
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.layer_norm import reference as layer_norm_reference
from liger_kernel.ops.norms.modulated_rms_norm import modulated_rms_norm
from liger_kernel.ops.norms.modulated_rms_norm import reference as modulated_rms_norm_reference
from liger_kernel.ops.norms.poly_norm import poly_norm
from liger_kernel.ops.norms.poly_norm import reference as poly_norm_reference
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.testing import assert_as_accurate, like, run

# the package has the functions under these names
fused, group, poly = (
    sys.modules[f"liger_kernel.ops.{name}"] for name in ("fused_add_rms_norm", "group_norm", "poly_norm")
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call"
)


# -- layer_norm ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("names", ["", "w", "b", "wb"], ids=lambda n: n or "none")
@pytest.mark.parametrize("N", [40, 123])
def test_layer_norm_with_any_parameters(names, N, dtype):
    """Constant upstream gradients, as cases have them too, leave nothing of dx without a weight."""
    torch.manual_seed(0)
    args = {
        k: torch.randn(N if k in "wb" else (9, N), dtype=dtype, device=DEVICE).requires_grad_() for k in ("x", *names)
    }
    draws = [(run(layer_norm_reference, like(args)), run(layer_norm_reference, like(args, torch.float64)))]
    assert_as_accurate(run(layer_norm, args), *draws[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_layer_norm_is_torchs(dtype):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=dtype, device=DEVICE) for shape in ((4, 7, 96), (96,), (96,)))
    expected = F.layer_norm(x, (96,), w, b, 1e-5)
    for y in (layer_norm(x, w, b, eps=1e-5), liger_layer_norm(x, w, b, 1e-5), layer_norm_reference(x, w, b, eps=1e-5)):
        torch.testing.assert_close(y, expected)


@needs_kernels
def test_layer_norm_statistics_are_fp32_and_do_not_cancel():
    x = (1000 + torch.randn(3, 200, device=DEVICE)).to(torch.float16)
    _, mean, rstd = torch.ops.liger.layer_norm_fwd(x, None, None, 0.0)
    truth = x.double()
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), truth.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), truth.var(-1, unbiased=False).rsqrt(), rtol=1e-6, atol=0)


@needs_kernels
def test_layer_norm_sums_the_weights_gradients_once():
    """dw and db are halves of one tensor: one finishing kernel."""
    dy, x, w, stats = (
        torch.randn(4, 8, device=DEVICE),
        torch.randn(4, 8, device=DEVICE),
        torch.ones(8, device=DEVICE),
        torch.ones(4, device=DEVICE),
    )
    for need_dw, need_db in ((True, True), (True, False), (False, True), (False, False)):
        dx, dwb = torch.ops.liger.layer_norm_bwd(dy, x, w, stats, stats, False, need_dw, need_db, torch.float32)
        assert dx.numel() == 0 and dwb.numel() == 8 * (need_dw + need_db)


@needs_kernels
def test_layer_norm_accumulates_into_gradients_that_are_apart():
    norm = LigerLayerNorm(6).to(DEVICE)
    x = torch.randn(5, 6, device=DEVICE)
    norm(x).sum().backward()
    first = norm.weight.grad.clone()
    norm(x).sum().backward()
    torch.testing.assert_close(norm.weight.grad, 2 * first)
    torch.testing.assert_close(norm.bias.grad, torch.full((6,), 10.0, device=DEVICE))
    norm.weight.grad.zero_()
    torch.testing.assert_close(norm.bias.grad, torch.full((6,), 10.0, device=DEVICE))


def test_layer_norm_of_a_number_is_refused():
    with pytest.raises(ValueError, match=r"layer_norm: x must have at least one dim, got shape \(\)"):
        layer_norm(torch.tensor(1.0))


@needs_kernels
def test_layer_norm_function_takes_published_arguments():
    x, w = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    torch.testing.assert_close(LigerLayerNormFunction.apply(x, w, None, 1e-6), F.layer_norm(x, (8,), w, None, 1e-6))


def test_layer_norm_module():
    norm = LigerLayerNorm(8, eps=1e-5, bias=True).to(DEVICE)
    stock = torch.nn.LayerNorm(8, eps=1e-5).to(DEVICE)
    assert not norm.bias.any() and (norm.weight == 1).all() and repr(norm) == "LigerLayerNorm((8,), eps=1e-05)"
    norm.load_state_dict(stock.state_dict())
    LigerLayerNorm(8).load_state_dict(stock.state_dict())
    x = torch.randn(3, 8, device=DEVICE)
    torch.testing.assert_close(norm(x), stock(x))
    assert not LigerLayerNorm(8, init_fn="zeros").weight.any()
    plain = LigerLayerNorm((8,), elementwise_affine=False)
    assert not plain.state_dict()
    torch.testing.assert_close(plain(x), F.layer_norm(x, (8,), eps=1e-6))
    with pytest.raises(ValueError, match="LigerLayerNorm: init_fn must be one of"):
        LigerLayerNorm(8, init_fn="randn")
    with pytest.raises(ValueError, match=r"LigerLayerNorm: hidden_size must be one dim, got \(4, 8\)"):
        LigerLayerNorm((4, 8))


# -- fused_add_rms_norm --------------------------------------------------------------------


def _sum_and_norm(N: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {k: torch.randn(N if k == "w" else (5, N), device=DEVICE).requires_grad_() for k in ("x", "residual", "w")}


@pytest.mark.parametrize("out", [0, 1])
def test_a_gradient_of_one_output_alone(out):
    """What is absent stays absent: no zeros are made or read."""
    alone = lambda outs: {f"out{out}": torch.ones_like(outs[f"out{out}"]) * torch.arange(24, device=DEVICE)}
    args = _sum_and_norm()
    expected = (
        run(fused_add_rms_norm_reference, like(args), alone),
        run(fused_add_rms_norm_reference, like(args, torch.float64), alone),
    )
    assert ("dw" in expected[0]) == (out == 0)
    assert_as_accurate(run(fused_add_rms_norm, args, alone), *expected)


@needs_kernels
def test_a_gradient_of_the_sum_alone_launches_nothing(monkeypatch):
    args = _sum_and_norm()
    _, s = fused_add_rms_norm(**args)
    monkeypatch.setattr(fused, "fused_add_rms_norm_bwd", None)
    s.sum().backward()
    assert (args["x"].grad == 1).all() and (args["residual"].grad == 1).all() and args["w"].grad is None


def test_the_two_gradients_accumulate_apart():
    """x and residual get the same values; a second backward, or a step on one of them, must not
    reach the other."""
    args = _sum_and_norm()
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

    assert_as_accurate(
        *(
            gradient(fn, dtype)
            for fn, dtype in (
                (fused_add_rms_norm, torch.float32),
                (fused_add_rms_norm_reference, torch.float32),
                (fused_add_rms_norm_reference, torch.float64),
            )
        )
    )


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_the_norm_is_that_of_the_rounded_sum(casting):
    x, residual, w = (torch.randn(*shape, device=DEVICE).to(torch.bfloat16) for shape in ((6, 96), (6, 96), (96,)))
    y, s = fused_add_rms_norm(x, residual, w, casting=casting)
    assert torch.equal(s, x + residual) and torch.equal(y, rms_norm(s, w, casting=casting))


def test_a_sum_changed_in_place_is_noticed():
    """The backward reads it."""
    args = _sum_and_norm()
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


def test_fused_add_rms_norm_function_takes_published_arguments():
    args = _sum_and_norm()
    y, s = LigerFusedAddRMSNormFunction.apply(args["x"], args["residual"], args["w"], 1e-6, 1.0, "gemma", True)
    torch.testing.assert_close(y, rms_norm(s, args["w"], eps=1e-6, offset=1.0, casting="gemma"))


def test_fused_add_rms_norm_module():
    norm = LigerFusedAddRMSNorm(8, eps=1e-5, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True).to(
        DEVICE
    )
    x, residual = torch.randn(3, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    y, s = norm(x, residual)
    torch.testing.assert_close((y, s), (F.rms_norm(x + residual, (8,), eps=1e-5), x + residual))
    torch.testing.assert_close(liger_fused_add_rms_norm(x, residual, norm.weight, 1e-5, 1.0, "gemma"), (y, s))
    assert set(norm.state_dict()) == {"weight"}
    with pytest.raises(ValueError, match="LigerFusedAddRMSNorm: init_fn must be one of"):
        LigerFusedAddRMSNorm(8, init_fn="randn")


# -- modulated_rms_norm --------------------------------------------------------------------


def _broadcast(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """scale over the rows of x that follow each other."""
    S, N = scale.shape[:-1].numel(), x.shape[-1]
    return scale.reshape(S, 1, N).expand(S, x.shape[:-1].numel() // S, N).reshape(x.shape)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8), (2, 1, 8), (6, 8), (2, 3, 8), (1, 1, 8)])
def test_scales_that_serve_rows(shape):
    torch.manual_seed(0)
    x, scale, shift = (
        torch.randn(2, 3, 8, device=DEVICE),
        torch.randn(shape, device=DEVICE),
        torch.randn(shape, device=DEVICE),
    )
    expected = (1 + _broadcast(scale, x)) * F.rms_norm(x, (8,), eps=1e-6) + _broadcast(shift, x)
    torch.testing.assert_close(modulated_rms_norm(x, scale, shift), expected)
    torch.testing.assert_close(modulated_rms_norm_reference(x, scale, shift), expected)


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (4, 8), (2, 3, 1), (3, 1, 8), ()])
def test_scales_that_would_be_guessed_at_are_refused(shape):
    """(T, N) and (1, T, N) among them: PyTorch would broadcast these along the samples."""
    with pytest.raises(ValueError, match="modulated_rms_norm: scale must have shape"):
        modulated_rms_norm(torch.randn(2, 3, 8, device=DEVICE), torch.randn(shape, device=DEVICE))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_a_scale_of_zero_leaves_the_norm(casting):
    x, w = (torch.randn(*shape, device=DEVICE).to(torch.bfloat16) for shape in ((6, 96), (96,)))
    assert torch.equal(
        modulated_rms_norm(x, torch.zeros_like(w), None, w, casting=casting), rms_norm(x, w, casting=casting)
    )


@needs_kernels
@pytest.mark.parametrize("M, S", [(40, 1), (40, 4), (40, 40), (2, 2), (1, 1)])
def test_partial_sums_of_samples(M, S, monkeypatch):
    """Several programs a sample, several samples, and a scale for each row, whatever tiles and
    processors say."""
    monkeypatch.setattr(_config, "tile", lambda *_, **__: _config.Tile(2, 32, 1))
    torch.manual_seed(0)
    shapes = dict(x=(M, 24), scale=(S, 24), shift=(S, 24), w=(24,))
    args = {k: torch.randn(shape, device=DEVICE).requires_grad_() for k, shape in shapes.items()}
    draws = run(modulated_rms_norm_reference, like(args)), run(modulated_rms_norm_reference, like(args, torch.float64))
    assert_as_accurate(run(modulated_rms_norm, args), *draws)


@needs_kernels
def test_modulated_rms_norm_function_takes_published_arguments():
    x, w, scale = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE), torch.randn(8, device=DEVICE)
    y = LigerModulatedRMSNormFunction.apply(x, w, scale, None, 1e-6, 1.0, "gemma", False)
    torch.testing.assert_close(y, (1 + scale) * rms_norm(x, w, offset=1.0, casting="gemma"))
    torch.testing.assert_close(liger_modulated_rms_norm(x, w, scale, None, 1e-6, 1.0, "gemma"), y)


def test_modulated_rms_norm_module():
    norm = LigerModulatedRMSNorm(8, init_fn="zeros", offset=1.0).to(DEVICE)
    x, scale, shift = (
        torch.randn(2, 3, 8, device=DEVICE),
        torch.randn(2, 8, device=DEVICE),
        torch.randn(2, 8, device=DEVICE),
    )
    plain = LigerModulatedRMSNorm(8, elementwise_affine=False)
    assert [*norm.state_dict()] == ["weight"] and not plain.state_dict()
    torch.testing.assert_close(norm(x, scale, shift), plain(x, scale, shift))
    with pytest.raises(ValueError, match="LigerModulatedRMSNorm: init_fn must be one of"):
        LigerModulatedRMSNorm(8, init_fn="randn")


# -- group_norm ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("names", ["", "w", "b"], ids=lambda n: n or "none")
@pytest.mark.parametrize("long", [False, True])
def test_group_norm_with_any_parameters(names, long, dtype, monkeypatch):
    """Constant upstream gradients, as cases have them too, leave nothing of dx without a weight."""
    if long:
        monkeypatch.setattr(group, "MAX_N", 8)
    torch.manual_seed(0)
    args = {
        k: torch.randn((6,) if k in "wb" else (2, 6, 3, 37), dtype=dtype, device=DEVICE).requires_grad_()
        for k in ("x", *names)
    } | {"num_groups": 2}
    draws = run(group_norm_reference, like(args)), run(group_norm_reference, like(args, torch.float64))
    assert_as_accurate(run(group_norm, args), *draws)


@needs_kernels
@pytest.mark.parametrize("N", [1, 15, 16, 17, 127, 128, 129, 1000])
def test_parts_of_a_group(N, monkeypatch):
    """Groups that end within, at and after a block, in one part and in several, some of them
    empty: exact statistics, whatever the mean."""
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
    torch.manual_seed(0)
    args = {
        k: torch.randn(shape, device=DEVICE).requires_grad_() for k, shape in dict(x=(3, 6, 75), w=(6,), b=(6,)).items()
    } | {"num_groups": 3}
    monkeypatch.setattr(group, "MAX_N", 0)
    draws = run(group_norm_reference, like(args)), run(group_norm_reference, like(args, torch.float64))
    assert_as_accurate(run(group_norm, args), *draws)


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
    x, w, b = (
        torch.randn(shape, device=DEVICE, requires_grad=True),
        torch.ones(4, device=DEVICE, requires_grad=True),
        torch.ones(4, device=DEVICE),
    )
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
    assert (
        not norm.bias.any()
        and (norm.weight == 1).all()
        and repr(norm) == "LigerGroupNorm(num_channels=6, num_groups=3, eps=1e-05)"
    )
    norm.load_state_dict(stock.state_dict())
    x = torch.randn(2, 6, 7, device=DEVICE)
    torch.testing.assert_close(norm(x), stock(x))
    for wrong, said in (
        (dict(init_fn="randn"), "init_fn must be one of"),
        (dict(num_groups=4), "num_groups must divide the 6 channels, got 4"),
    ):
        with pytest.raises(ValueError, match=f"LigerGroupNorm: {said}"):
            LigerGroupNorm(**dict(dict(num_channels=6, num_groups=3), **wrong))


# -- poly_norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 3e4, 1e7, 1e30])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_powers_of_large_and_small_numbers(scale, wide, dtype, monkeypatch):
    """x^6 is neither infinite nor lost where fp32 does not hold it."""
    if wide:
        monkeypatch.setattr(poly, "FWD_N", 8)
        monkeypatch.setattr(poly, "BWD_N", 8)
    torch.manual_seed(0)
    args = dict(
        x=(scale * torch.randn(5, 40, device=DEVICE)).to(dtype),
        w=torch.randn(3, device=DEVICE).to(dtype),
        b=torch.randn(1, device=DEVICE).to(dtype),
    )
    args = {k: v.requires_grad_() for k, v in args.items()}
    ours, expected, truth = (
        run(poly_norm, like(args)),
        run(poly_norm_reference, like(args)),
        run(poly_norm_reference, like(args, torch.float64)),
    )
    assert_as_accurate(ours, expected, truth)
    assert all(v.isfinite().all() for v in ours.values())
    x, w, b = (v.detach().double() for v in args.values())
    plain = sum(w[3 - p] * x**p / (x ** (2 * p)).mean(-1, keepdim=True).add(1e-6).sqrt() for p in (3, 2, 1)) + b
    torch.testing.assert_close(truth["out0"], plain)


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


# -- relu_squared --------------------------------------------------------------------------


def test_relu_squared_of_what_is_not_finite():
    """And a gradient of what is cut off is zero, whatever flows back."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.0, -2.0], device=DEVICE, requires_grad=True)
    y = LigerReLUSquared()(x)
    y.backward(torch.tensor([1.0, 1.0, float("inf"), float("nan"), 2.0, float("inf")], device=DEVICE))
    torch.testing.assert_close(y, F.relu(x).square(), equal_nan=True)
    torch.testing.assert_close(
        x.grad, torch.tensor([float("nan"), float("inf"), 0.0, 0.0, 12.0, 0.0], device=DEVICE), equal_nan=True
    )
    torch.testing.assert_close(liger_relu_squared(torch.tensor(3.0, device=DEVICE)), torch.tensor(9.0, device=DEVICE))
    if _op._KERNEL_DEVICES:
        assert torch.equal(LigerReLUSquaredFunction.apply(x[3:].detach()), y[3:].detach())


# -- rms norm -------------------------------------------------------------------------------


@needs_kernels
def test_published_launchers_take_a_strided_weight():
    torch.manual_seed(0)
    x, dy, w = (
        torch.randn(5, 40, device=DEVICE),
        torch.randn(5, 40, device=DEVICE),
        torch.randn(40, 3, device=DEVICE)[:, 1],
    )
    y, rows, rstd, block, warps, casting = rms_norm_forward(x, w, 1e-6)
    expected, _, again, *_ = rms_norm_forward(x, w.contiguous(), 1e-6)
    assert torch.equal(y, expected)
    found = rms_norm_backward(dy, rows, w, rstd, 0.0, casting, block, warps)
    torch.testing.assert_close(found, rms_norm_backward(dy, rows, w.contiguous(), again, 0.0, casting), rtol=0, atol=0)


def test_a_scalar_has_no_last_dim():
    x = torch.ones((), device=DEVICE)
    for normed in (
        lambda: rms_norm(x),
        lambda: layer_norm(x),
        lambda: fused_add_rms_norm(x, x),
        lambda: fused_add_rms_norm(x, None),
    ):
        with pytest.raises(ValueError, match=r"norm: x must have at least one dim, got shape \(\)"):
            normed()
