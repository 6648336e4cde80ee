"""Neighbourhood attention as modules, against masked attention over the whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE

from liger_kernel.nn import LigerFusedNeighborhoodAttentionConfig, LigerFusedNeighborhoodAttentionLayer
from liger_kernel.ops import OPS, LigerFusedNeighborhoodAttentionFunction
from liger_kernel.testing import assert_as_accurate, assert_same_bits, like, run
from liger_kernel.transformers.functional import liger_fused_neighborhood_attention


def qkv(*shape: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(*shape).to(DEVICE).requires_grad_() for name in ("query", "key", "value")}


@pytest.mark.parametrize("kernel_size, dilation", [(7, 1), (5, 4), (31, 1)])
def test_is_attention_with_a_band_for_a_mask(kernel_size, dilation):
    apart = torch.arange(19, device=DEVICE)[:, None] - torch.arange(19, device=DEVICE)
    band = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    masked = lambda query, key, value: F.scaled_dot_product_attention(query, key, value, band)
    args = qkv(2, 2, 19, 16)
    ours = run(
        lambda **a: liger_fused_neighborhood_attention(**a, kernel_size=kernel_size, dilation=dilation), like(args)
    )
    assert_as_accurate(ours, run(masked, like(args)), run(masked, like(args, torch.float64)))
    apply = lambda query, key, value: LigerFusedNeighborhoodAttentionFunction.apply(
        query, key, value, kernel_size, dilation
    )
    assert_same_bits(run(apply, like(args)), ours)


def test_large_scores_do_not_cost_accuracy():
    """Of p, where the logsumexp of a row is rounded at its size."""
    draws = []
    for seed in range(5):
        torch.manual_seed(seed)
        draws.append(
            {
                k: torch.randn(1, 3, 21, 32, device=DEVICE).mul(s).requires_grad_()
                for k, s in (("query", 4), ("key", 4), ("value", 1))
            }
        )
    reference = OPS["neighborhood_attention"].reference
    stock = lambda query, key, value: reference(query, key, value)
    expected = [(run(stock, like(a)), run(stock, like(a, torch.float64))) for a in draws]
    ours = lambda i: run(liger_fused_neighborhood_attention, like(draws[i]))
    assert_as_accurate(ours(0), *expected[0], *expected[1:], again=ours)


def test_large_scores_stay_finite():
    args = {k: v.detach().mul(100).requires_grad_() for k, v in qkv(1, 1, 9, 16).items()}
    assert all(t.isfinite().all() for t in run(liger_fused_neighborhood_attention, args).values())


def test_modules():
    config = LigerFusedNeighborhoodAttentionConfig(hidden_size=24, num_heads=3, kernel_size=3, dilation=2)
    layer = LigerFusedNeighborhoodAttentionLayer(**config.to_dict()).to(DEVICE)
    names = {f"attention.{p}_proj.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")} | {
        "layer_norm.weight",
        "layer_norm.bias",
    }
    assert set(layer.state_dict()) == names
    x = torch.randn(2, 11, 24, device=DEVICE)
    moved = x.clone()
    moved[:, 5] *= -1
    changed = (layer(moved) - layer(x)).abs().sum((0, 2)) > 1e-4
    assert changed.nonzero().flatten().tolist() == [3, 5, 7]
    with pytest.raises(ValueError, match="attention_mask must be None, got a tensor of shape"):
        layer(x, x)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_heads, 5, got 24"):
        LigerFusedNeighborhoodAttentionLayer(24, 5)
