"""Weights in FP8 with a scale for each block: how they are made dense, and what they multiply."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops._core import launch_config
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.float8_blocks import (
    BLOCK,
    Float8Blocks,
    cast,
    cast_reference,
    dense,
    float8_blocks as made,
    in_float8,
    reference,
)
from liger_kernel.ops.projections.weights import Operand

ON = (BLOCK, BLOCK)


def drawn(*shape: int, blocks: tuple[int, int] = ON) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    *lead, N, K = shape
    scales = (*lead, -(-N // blocks[0]), -(-K // blocks[1]))
    # of very different sizes, so that the scale of another block shows
    scale = 10 ** (2 * torch.rand(scales, generator=generator) - 2)
    return (100 * torch.randn(shape, generator=generator)).to(DEVICE, E4), scale.to(DEVICE)


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "blocks"), [((300, 200), ON), ((3, 6, 40), (4, 5)), ((2, 1030, 3), (1030, 3)), ((5, 1), ON)], ids=str
)
def test_dense_as_pytorch_makes_it(shape, blocks):
    q, scale = drawn(*shape, blocks=blocks)
    for n, k in ((0, 0), (shape[-2] - 1, shape[-1] - 1)):
        truth = q[..., n, k].float() * scale[..., n // blocks[0], k // blocks[1]]
        assert torch.equal(reference(q, scale, blocks, torch.float32)[..., n, k], truth)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dense(q, scale, blocks, dtype), reference(q, scale, blocks, dtype))
    assert torch.equal(dense(q.mT, scale.mT, blocks[::-1], dtype), reference(q, scale, blocks, dtype).mT)


@needs_kernels
def test_casts_as_pytorch_does():
    x = torch.randn(6, 3 * BLOCK, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[0, :BLOCK], x[1, 5], x[2, BLOCK] = 0, float("inf"), float("nan")
    for given in (x.bfloat16(), x.t().contiguous().t()):
        (q, scale), (expected, expected_scale) = cast(given), cast_reference(given)
        assert torch.equal(scale, expected_scale) and torch.equal(q.view(torch.int8), expected.view(torch.int8))
    assert q.shape == (8, 3 * BLOCK) and not q[6:].float().any() and q[1, 5].isnan()


def test_forms_of_the_products():
    """Decoded, to the rounding of bf16; in FP8, to that of what is cast."""
    q, scale = drawn(2 * BLOCK, 5 * BLOCK)
    x, dy = (torch.randn(6, n, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (640, 256))
    w = reference(q, scale, ON, torch.float32)
    decoded = made(q, scale, ON)
    forward, both = (in_float8(decoded, backward=backward) for backward in (False, True))
    error = lambda found, truth: ((found - 1 - truth).norm() / truth.norm()).item()
    for weight, exact_y, exact_dx in (
        (decoded, True, True),
        (forward, False, True),
        (both, False, False),
        (both.opened(torch.bfloat16), False, False),
    ):
        y = weight.forward(Operand(x.bfloat16()), torch.ones(6, 256, dtype=torch.bfloat16, device=DEVICE))
        dx = weight.backward(Operand(dy.bfloat16()), torch.ones(6, 640, dtype=torch.bfloat16, device=DEVICE))
        for off, exact in ((error(y, x @ w.t()), exact_y), (error(dx, dy @ w), exact_dx)):
            assert off < 0.005 if exact else 0.005 < off < 0.04


def test_what_is_stored():
    q, scale = drawn(200, 300)
    exponents = torch.rand(2, 3, device=DEVICE).to(torch.float8_e8m0fnu)
    assert torch.equal(made(q, exponents, ON).scale, exponents.float())
    assert made(q, scale[0, 0], None).scale.shape == (1, 1) and made(q, scale[0, 0], None).blocks == (200, 300)
    assert type(in_float8(made(q, scale, ON))) is Float8Blocks  # 200 is no multiple of 128
    with pytest.raises(ValueError, match=r"float8_blocks: scale must have shape \(2, 3\) .*128 x 128, got \(3, 2\)"):
        made(q, scale.t(), ON)
    with pytest.raises(ValueError, match=r"q must be in torch.float8_e4m3fn, got torch.int8"):
        made(q.view(torch.int8), scale, ON)
    with pytest.raises(ValueError, match=r"scale must be floating point, got torch.uint8"):
        made(q, scale.byte(), ON)


def test_gpus_without_the_type_decode_by_pytorch(monkeypatch):
    q, scale = torch.randn(256, 256).to(E4), torch.rand(2, 2)
    monkeypatch.setattr(f"{dense.__module__}.dense_blocks", None)
    for arch in ("sm80", "gfx942"):
        monkeypatch.setattr(launch_config, "arch", lambda arch=arch: arch)
        assert dense(q, scale, (128, 128), torch.bfloat16).dtype == torch.bfloat16
