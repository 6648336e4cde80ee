"""Experts in MXFP4, as gpt-oss is published: how they are made dense, multiplied, and rounded."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops.projections import moe, mxfp4


def drawn(E: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte, and scales of very different sizes, in the published layout."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(119, 127, (E, N, K // 32), dtype=torch.uint8, generator=generator)
    return blocks.to(DEVICE), scales.to(DEVICE)


def test_a_block_is_what_the_specification_says():
    """Two values of a byte, the lower half first; e2m1; scales are powers of two."""
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    blocks[0, 0, 1, 15] = 0x2F
    w = mxfp4.reference(blocks, torch.tensor([[[127, 129]]], dtype=torch.uint8), torch.float32)[0, 0]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(w[:16], torch.cat([values, -values])) and not w[16:62].any()
    assert w[62:].tolist() == [-24, 4]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_as_pytorch_makes_it(dtype):
    blocks, scales = drawn(3, 50, 64)
    scales[0, 0], scales[1, 0] = 0, 254  # the smallest and the largest
    found = mxfp4.dense_mxfp4(blocks, scales, dtype)
    assert found.shape == (3, 50, 64) and found.dtype == dtype
    assert torch.equal(found, mxfp4.reference(blocks, scales, dtype))
    torch.library.opcheck(torch.ops.liger.dense_mxfp4.default, (blocks, scales, dtype), test_utils="test_faketensor")
    assert torch.equal(mxfp4.dense(blocks[1:, ::2], scales[1:, ::2], dtype), found[1:, ::2])


def test_rounding_gives_the_same_weights_back():
    """As far as the scale is that of the largest value, and what lies between goes to the nearer."""
    blocks, scales = drawn(2, 8, 64)
    w = mxfp4.reference(blocks, scales, torch.float32)
    assert torch.equal(mxfp4.reference(*mxfp4.rounded(w), torch.float32), w)
    assert torch.equal(mxfp4.reference(*mxfp4.rounded(1.05 * w), torch.float32), w)
    assert not mxfp4.reference(*mxfp4.rounded(torch.zeros(1, 1, 32)), torch.float32).any()


@needs_kernels
@pytest.mark.parametrize("experts", [1, 2, 4])
def test_products_in_parts_are_those_of_all_experts(monkeypatch, experts):
    """Forward and input gradient, with any number of experts dense at a time, some without a token."""
    E, H, I = 4, 64, 32
    monkeypatch.setattr(mxfp4, "PART", experts * 2 * I * H * 4)
    weights = [mxfp4.mxfp4_experts(*drawn(E, *sizes)) for sizes in ((2 * I, H), (H, I))]
    dense = [one.dense(torch.float32) for one in weights]
    sizes, made = [], mxfp4.dense
    monkeypatch.setattr(mxfp4, "dense", lambda blocks, *more: sizes.append(len(blocks)) or made(blocks, *more))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, H, generator=generator).to(DEVICE)
    index = torch.tensor([[0, 3], [3, 1], [1, 0]]).repeat(3, 1).to(DEVICE)
    share = torch.rand(9, 2, generator=generator).to(DEVICE)
    bias = dict(gate_up_bias=torch.randn(E, 2 * I).to(DEVICE), down_bias=torch.randn(E, H).to(DEVICE))
    found = []
    for w in (weights, dense):
        inputs = x.clone().requires_grad_(), share.clone().requires_grad_()
        y = moe.adapted_moe(inputs[0], *w, index, inputs[1], **bias, **moe._GPT_OSS)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(ours, dense) for ours, dense in zip(*found))
    part = x, dense[0][:2].mT, torch.tensor([2, 5, 9]).int().to(DEVICE), 1, x.new_empty(9, 2 * I)
    torch.library.opcheck(torch.ops.liger.grouped_mm_part_.default, part, test_utils=("test_schema", "test_faketensor"))
    gate_up, down = [experts] * (E // experts), [min(2 * experts, E)] * -(-E // (2 * experts))
    assert sizes == [*gate_up, *down, *down, *gate_up]


def test_what_cannot_be_is_refused():
    blocks, scales = drawn(2, 8, 64)
    check = lambda *given, shape=None: mxfp4.check("load", "layer.up", *given, shape)
    check(blocks, scales, shape=(2, 8, 64))
    for given, shape, message in (
        ((blocks.char(), scales), None, r"load: layer.up_blocks must be uint8, got torch.int8"),
        ((blocks, scales.float()), None, r"load: layer.up_scales must be uint8, got torch.float32"),
        ((blocks.flatten(2), scales), None, r"layer.up_blocks must have shape \(E, N, K / 32, 16\), got \(2, 8, 32\)"),
        ((blocks, scales), (2, 8, 32), r"layer.up_blocks must hold weights of shape \(2, 8, 32\), got \(2, 8, 64\)"),
        ((blocks, scales[:1]), None, r"layer.up_scales must have shape \(2, 8, 2\), got \(1, 8, 2\)"),
        ((blocks, scales + 129), None, "layer.up_scales must be at most 254, got 255, which is NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            check(*given, shape=shape)
