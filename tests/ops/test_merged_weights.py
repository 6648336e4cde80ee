"""Weights and adapters, merged and rounded to the numbers of a storage."""

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops.projections import float8_blocks, mxfp4, packed_weights
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.merge_aware import merged, merged_linear, rounded_experts
from liger_kernel.ops.projections.weights import dense


def bytes_of(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape):
    return bytes_of(shape[0], 4 * shape[1]).view(torch.int32)


def stored(kind):
    """A weight (24, 32)."""
    torch.manual_seed(0)
    N, K = 24, 32
    scale = lambda *shape: (torch.rand(shape) + 0.1) / 16
    if kind == "bf16":
        return dense(torch.randn(N, K).bfloat16() / 8)
    if kind == "FP8 blocks":
        q = torch.randn(N, K).mul(100).clamp(-448, 448).to(E4)
        return float8_blocks.float8_blocks(q, scale(3, 2) / 100, (8, 16))
    if kind == "NVFP4":
        of = (500 * scale(N, 2)).to(E4), torch.tensor([400.0])
        return packed_weights.nvfp4_rows(bytes_of(N, K // 2), *of)
    if kind == "GPTQ":
        index = torch.randperm(K).int() % 2
        return packed_weights.gptq_columns(words(K // 8, N), words(2, N // 8), scale(2, N), index, (N, K), 16, 4, 1)
    if kind == "AWQ":
        return packed_weights.awq_columns(words(K, N // 8), words(2, N // 8), scale(2, N), (N, K), 16)
    bits, zero = (8, None) if kind == "int8" else (4, words(3, 2))
    return packed_weights.integer_rows(words(N, K * bits // 32), scale(N, 2), zero, (N, K), 16, bits)


KINDS = ["bf16", "FP8 blocks", "int4", "int8", "NVFP4", "GPTQ", "AWQ"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_of_all_numbers(kind):
    weight = stored(kind)
    w = weight.dense(torch.float32)
    # what is stored stays; scales, too
    assert torch.equal(weight.nearest(w.clone()).dense(torch.float32), w)
    target = w + torch.randn_like(w) / 16
    near = weight.nearest(target)
    assert near.values.shape == weight.values.shape and near.values.dtype == weight.values.dtype
    off = (near.dense(torch.float32) - target).abs()
    # none of many other numbers of the storage is nearer; beyond its range is its end
    for other in [*torch.linspace(-1, 1, 30), -1e4, 1e4]:
        number = weight.nearest(torch.full_like(w, other)).dense(torch.float32)
        assert number.isfinite().all() and (off <= (number - target).abs() + 1e-6).all()


def steps(weight, x, adapters):
    """y and the gradients, by autograd through a rounded sum whose rounding has the gradient 1."""
    w = weight.dense(torch.float32) + sum(a.scale * a.b @ a.a for a in adapters)
    w = w + (merged(weight, adapters).dense(torch.float32) - w).detach()
    return x @ w.t()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_the_rounding(kind):
    weight = stored(kind)
    x, *tensors = (torch.randn(s).requires_grad_() for s in ((2, 3, 32), (4, 32), (24, 4), (2, 32), (24, 2)))
    adapters = Adapter(tensors[0], tensors[1], 0.02), Adapter(tensors[2], tensors[3], -0.01)
    y = merged_linear(x, Projection(weight, torch.ones(24), adapters)) if kind != "bf16" else None
    if y is None:
        with torch.autocast("cpu", torch.bfloat16):
            y = merged_linear(x, Projection(weight, torch.ones(24), adapters))
        assert y.dtype == torch.bfloat16
    truth = steps(weight, x, adapters) + 1
    dy = torch.randn_like(truth)
    limit = 1e-5 if y.dtype == torch.float32 else 0.02
    found, expected = (torch.autograd.grad(t, [x, *tensors], dy.to(t.dtype)) for t in (y, truth))
    for one, other in zip((y, *found), (truth, *expected)):
        assert (one - other).norm() <= limit * other.norm()
    plain = x @ (weight.dense(torch.float32) + sum(a.scale * a.b @ a.a for a in adapters)).t() + 1
    assert (truth - plain).norm() > 1e-3 * plain.norm()


def test_experts_with_what_they_lack():
    torch.manual_seed(0)
    E, N, K = 3, 8, 64
    weight = mxfp4.mxfp4_experts(
        bytes_of(E, N, K // 32, 16), torch.randint(118, 121, (E, N, K // 32), dtype=torch.uint8)
    )
    w = weight.dense(torch.float32)
    assert torch.equal(weight.nearest(w).dense(torch.float32), w)
    adapter = Adapter(torch.randn(E, 2, K) / 30, torch.randn(E, N, 2) / 30, 0.5)
    delta, expected = 0.5 * adapter.b @ adapter.a, merged(weight, [adapter]).dense(torch.float32)
    torch.testing.assert_close(
        rounded_experts(weight, [adapter]).part(slice(1, 3), torch.float32) + delta[1:], expected[1:]
    )
    assert not torch.equal(expected, w)


@needs_kernels
def test_experts_are_rounded_by_one_kernel():
    """To the bits of PyTorch, between two numbers too. The products have no rounding of their own."""
    torch.manual_seed(0)
    E, N, K, R = 3, 70, 160, 20
    blocks, scales = bytes_of(E, N, K // 32, 16), torch.randint(120, 124, (E, N, K // 32), dtype=torch.uint8)
    scales[0, 0, :2] = torch.tensor([0, 254])
    whole = lambda *shape: torch.randint(-3, 4, shape).float() / 64
    adapters = [Adapter(whole(E, r, K), whole(E, N, r), scale) for r, scale in ((R, 0.5), (3, 0.25))]
    product = sum(a.scale * a.b @ a.a for a in adapters)
    plain = mxfp4.reference(blocks, scales, torch.float32)
    nearest = mxfp4.blocks_of((plain + product).unflatten(-1, (-1, 32)), scales.int() - 127)
    assert 0.2 < (nearest != blocks).float().mean() < 0.999
    moved = [Adapter(a.a.to(DEVICE), a.b.to(DEVICE), a.scale) for a in adapters]
    weight = mxfp4.mxfp4_experts(blocks.to(DEVICE), scales.to(DEVICE))
    assert torch.equal(merged(weight, moved).values.cpu(), nearest)
    lacking = mxfp4.reference(nearest, scales, torch.float32) - product
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(rounded_experts(weight, moved).dense(dtype).cpu(), lacking.to(dtype))
    args = weight.blocks, weight.scales, moved[0].b, moved[0].a, torch.uint8
    torch.library.opcheck(torch.ops.liger.rounded_sum_mxfp4.default, args, test_utils="test_faketensor")
