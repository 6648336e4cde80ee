"""Neighbourhood attention as modules, against masked attention over the whole sequence."""

import functools

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside

from liger_kernel.nn import LigerFusedNeighborhoodAttentionConfig, LigerFusedNeighborhoodAttentionLayer
from liger_kernel.ops import OPS, LigerFusedNeighborhoodAttentionFunction
from liger_kernel.testing import assert_same_bits, like, run
from liger_kernel.transformers.functional import liger_fused_neighborhood_attention


def qkv(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(*shape).to(DEVICE).requires_grad_() for name in ("query", "key", "value")}


@pytest.mark.parametrize("kernel_size, dilation", [(7, 1), (5, 4), (31, 1)])
def test_is_attention_with_a_band_for_a_mask(kernel_size, dilation):
    apart = torch.arange(19, device=DEVICE)[:, None] - torch.arange(19, device=DEVICE)
    band = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    masked = lambda query, key, value: F.scaled_dot_product_attention(query, key, value, band)
    args = qkv(2, 2, 19, 16)
    fn = functools.partial(liger_fused_neighborhood_attention, kernel_size=kernel_size, dilation=dilation)
    ours = assert_beside(fn, masked, args)
    apply = lambda **a: LigerFusedNeighborhoodAttentionFunction.apply(*a.values(), kernel_size, dilation)
    assert_same_bits(run(apply, like(args)), ours)


def test_large_scores_do_not_cost_accuracy():
    """Of p, where the logsumexp of a row is rounded at its size; nor are they infinite."""
    larger = lambda args, times: {k: (t.detach() * times ** (k != "value")).requires_grad_() for k, t in args.items()}
    draw = lambda seed: larger(qkv(1, 3, 21, 32, seed=seed), 4)
    stock = lambda **a: OPS["neighborhood_attention"].reference(*a.values())
    assert_beside(liger_fused_neighborhood_attention, stock, draw, draws=5)
    found = run(liger_fused_neighborhood_attention, larger(qkv(1, 1, 9, 16), 100))
    assert all(t.isfinite().all() for t in found.values())


def test_modules():
    config = LigerFusedNeighborhoodAttentionConfig(hidden_size=24, num_heads=3, kernel_size=3, dilation=2)
    layer = LigerFusedNeighborhoodAttentionLayer(**config.to_dict()).to(DEVICE)
    of = *(f"attention.{p}_proj" for p in ("q", "k", "v", "out")), "layer_norm"
    assert set(layer.state_dict()) == {f"{name}.{w}" for name in of for w in ("weight", "bias")}
    x = torch.randn(2, 11, 24, device=DEVICE)
    moved = x.clone()
    moved[:, 5] *= -1
    changed = (layer(moved) - layer(x)).abs().sum((0, 2)) > 1e-4
    assert changed.nonzero().flatten().tolist() == [3, 5, 7]
    with pytest.raises(ValueError, match="attention_mask must be None, got a tensor of shape"):
        layer(x, x)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_heads, 5, got 24"):
        LigerFusedNeighborhoodAttentionLayer(24, 5)
