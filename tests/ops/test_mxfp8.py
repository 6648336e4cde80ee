"""Casts with scales of blocks, beside torchao's."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, needs_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_kernel.nn import LigerFloat8TrainingLinear
from liger_kernel.ops.projections import float8, mxfp8


def drawn(M: int, N: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Values of very different sizes: blocks of zeros, of one value, and of tiny ones as well."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-20, 20, (M, N // 32), generator=generator)).repeat_interleave(32, 1)
    x = torch.randn(M, N, generator=generator) * sizes
    x[0, :32], x[-1, -32:], x[M // 2, :32] = 0, 448.0, 1e-38
    return x.to(dtype).to(DEVICE)


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Bit for bit; a NaN may have either sign."""
    bits = lambda t: t.view(torch.uint8).where(~t.float().isnan(), 127)
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M, N", [(64, 128), (160, 96), (32, 288)])
def test_casts_are_those_of_torchao(M, N, dtype):
    """Bit for bit, values and swizzled scales, in both directions."""
    theirs = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = drawn(M, N, dtype).cpu()  # a CPU divides by 448, a GPU multiplies by its inverse
    for found, t in zip(mxfp8.reference(x, True, True), (x, x.t().contiguous())):
        exponents, values = theirs.to_mx(t, float8.E4, mxfp8.BLOCK, theirs.ScaleCalculationMode.RCEIL)
        assert same(found, (values, theirs.to_blocked(exponents)))
        assert torch.equal(mxfp8.exponents_of(found[1], t.shape[0], t.shape[1] // 32), exponents.view(torch.uint8))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M, N", [(64, 128), (70, 96), (1, 32), (130, 288)])
def test_casts_are_those_of_the_reference(M, N, dtype):
    """With infinities, NaN, rows that are no multiple of 32, and strides; also one cast alone."""
    x = torch.cat([drawn(M, N, dtype), drawn(M, 32, dtype)], 1)[:, :N]
    x[0, 0], x[-1, -1] = float("inf"), float("nan")
    expected = mxfp8.reference(x, True, True)
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = mxfp8.mx_casts(x, rows=rows, columns=columns)
        assert [f is not None for f in found] == [rows, columns]
        assert all(same(f, e) for f, e in zip(found, expected) if f is not None)
    assert expected[0][0].float().isnan().sum() == expected[1][0].float().isnan().sum() == 2
    assert expected[1][0].shape == (N, M + -M % 32)


LACKING = float8.lacking(torch.device(DEVICE), mxfp8.CAPABILITY)


@pytest.mark.skipif(LACKING is not None, reason="this GPU has no FP8 with scales of blocks")
def test_products_are_those_of_the_rounded_values():
    a, b = (mxfp8.reference(drawn(M, 96, seed=M), True, False)[0] for M in (48, 64))
    wide = lambda values, scale: (
        values.double() * torch.exp2(mxfp8.exponents_of(scale, len(values), 3).double() - 127).repeat_interleave(32, 1)
    )
    for dtype in (torch.bfloat16, torch.float32):
        found, truth = mxfp8.mx_product(*a, *b, dtype), wide(*a) @ wide(*b).t()
        assert found.dtype == dtype and (found.double() - truth).norm() < torch.finfo(dtype).eps * truth.norm()


def test_scales_have_the_shape_that_torchs_product_wants():
    """Its fake kernel checks what its kernel does."""

    def multiplied(M: int, K: int, N: int, too_many: int = 0) -> torch.Tensor:
        size = lambda rows: mxfp8._scales(torch.empty(0, device="meta"), rows, K).numel()
        with FakeTensorMode():
            a, b = (torch.empty(rows, K, dtype=float8.E4, device="cuda") for rows in (M, N))
            scales = (torch.empty(n, dtype=mxfp8.E8, device="cuda") for n in (size(M) + too_many, size(N)))
            return mxfp8.mx_product(a, next(scales), b, next(scales), torch.bfloat16)

    for M, K, N in ((70, 96, 48), (128, 256, 32), (1, 32, 160)):
        y = multiplied(M, K, N)
        assert y.shape == (M, N) and y.dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="scale_a should have"):
            multiplied(M, K, N, too_many=16)


def test_other_gpus_and_shapes_are_refused(monkeypatch):
    monkeypatch.setattr(float8, "_capability", lambda index: (9, 0))
    cuda = torch.device("cuda", 0)
    assert float8.lacking(cuda) is None
    said = "FP8 with scales of blocks needs an NVIDIA GPU of compute capability 10.0 or newer, got 9.0"
    assert float8.lacking(cuda, mxfp8.CAPABILITY) == said
    said = "LigerFloat8TrainingLinear: weight must have sizes that are multiples of 32, got"
    with pytest.raises(ValueError, match=said):
        LigerFloat8TrainingLinear.of(torch.nn.Linear(48, 64), "mxfp8_rceil")
