"""Attention residuals and hyper-connections as modules and published functions, and what cases
cannot say."""

import pytest
import torch
from devices import DEVICE, assert_beside, leaves
from torch import nn

from liger_kernel.extra.attn_res import reference as attn_res_reference
from liger_kernel.extra.mhc import coeffs_reference
from liger_kernel.extra.mhc_mixing import post_res_reference, pre_reference
from liger_kernel.nn import LigerMHC
from liger_kernel.ops import (
    LigerAttnResFunction,
    LigerMHCCoeffsFunction,
    LigerMHCPostResFunction,
    LigerMHCPreFunction,
    mhc_coeffs,
)
from liger_kernel.testing import assert_same_bits, like, run
from liger_kernel.transformers.functional import (
    liger_attn_res,
    liger_mhc_apply,
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
)


def test_attn_res_of_blocks_first_or_a_list():
    args = leaves(V=(40, 2, 3, 16), w_query=(16,), w_norm=(16,))
    blocks_last = lambda V, w_query, w_norm: attn_res_reference(V.movedim(0, -2), w_query, w_norm)
    ours = assert_beside(liger_attn_res, blocks_last, args)
    assert_same_bits(run(lambda **a: LigerAttnResFunction.apply(*a.values(), 1e-6), like(args)), ours)
    assert_same_bits(run(lambda V, w_query, w_norm: liger_attn_res(list(V), w_query, w_norm), like(args)), ours)


def streams(H: int, C: int, seed: int = 0, **dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"x": (2, 5, H, C), "phi": (H * C, H * H + 2 * H), "b": (H * H + 2 * H,)}
    shapes |= dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), ())
    return {
        k: torch.randn(s, dtype=torch.float64).to(DEVICE, dtypes.get(k, torch.float32)).requires_grad_()
        for k, s in shapes.items()
    }


@pytest.mark.parametrize(
    "H, dtypes",
    [(4, {}), (5, dict(x=torch.bfloat16, phi=torch.float16)), (12, {})],
    ids=["default", "mixed", "many-streams"],
)
def test_published_defaults(H, dtypes):
    """20 steps, alphas without dims, phi of another dtype, more streams than kernels serve."""
    draw = lambda seed: streams(H, 8, seed, **dtypes)
    # gradients of alphas are single numbers
    ours, args = assert_beside(liger_mhc_coeffs, coeffs_reference, draw, draws=6), draw(0)
    apply = lambda *a, **k: LigerMHCCoeffsFunction.apply(*k.values(), True, 20, 1e-6, 0.0, 1e-6, 2.0)
    if H < 12:
        assert_same_bits(run(apply, like(args)), ours)


@pytest.mark.parametrize("H", [4, 12])
def test_autocast_leaves_coefficients_in_fp32(H):
    args = streams(H, 8)

    def under_autocast(**args):
        with torch.autocast(DEVICE, torch.bfloat16):
            return mhc_coeffs(**args)

    assert_same_bits(run(under_autocast, like(args)), run(mhc_coeffs, like(args)))


def test_h_res_is_doubly_stochastic_even_of_extreme_logits():
    args = streams(4, 8)
    with torch.no_grad():
        args["b"].mul_(40)
    outs = mhc_coeffs(**args, tmax=30)
    torch.testing.assert_close(outs[2].sum(-2), torch.ones(2, 5, 4, device=DEVICE), rtol=0, atol=1e-5)
    assert all(torch.autograd.grad(outs[2].square().sum(), args["b"])[0].isfinite())


def test_nan_does_not_leave_a_row_of_h_res():
    args = {k: v.detach() for k, v in streams(3, 8).items()}
    args["b"][6] = float("nan")  # of the first row's first column
    *_, h_res = liger_mhc_coeffs(**args, tmax=1)
    assert h_res[..., 0, :].isnan().all()


def test_module():
    torch.manual_seed(0)
    module = LigerMHC(nn.Linear(16, 16, dtype=torch.bfloat16), hc=4, c=16).to(DEVICE)
    shapes = {k: (tuple(v.shape), v.dtype) for k, v in module.state_dict().items() if not k.startswith("layer")}
    scalars = dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), ((), torch.float32))
    assert shapes == {"phi": ((64, 24), torch.float16), "b": ((24,), torch.float32), **scalars}
    # all streams alike at first, as views of one
    x = torch.randn(2, 3, 1, 16, device=DEVICE).expand(2, 3, 4, 16).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.shape == x.shape and y.dtype == x.dtype and all(p.grad is not None for p in module.parameters())

    weights = (module.phi, module.b, module.alpha_pre, module.alpha_post, module.alpha_res)
    out, (pre, post, res) = liger_mhc_forward(x, module.layer, *weights, return_coeffs=True)
    assert torch.equal(out, y)
    x_in = liger_mhc_pre(x, pre)
    f = module.layer(x_in.bfloat16())
    again, x_in_again = liger_mhc_apply(x, f, pre, post, res, return_x_in=True)
    assert torch.equal(again, y) and torch.equal(x_in_again, x_in)
    assert torch.equal(LigerMHCPreFunction.apply(x, pre), x_in) and torch.equal(
        LigerMHCPostResFunction.apply(x, f, post, res), y
    )
    torch.testing.assert_close(x_in, pre_reference(x, pre))
    torch.testing.assert_close(liger_mhc_post_res(x, f, post, res), post_res_reference(x, f, post, res))
    with pytest.raises(ValueError, match=r"LigerMHC: x must have shape \(..., 4, 16\), got \(2, 16\)"):
        module(torch.ones(2, 16))
