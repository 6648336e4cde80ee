"""Experts in FP8 blocks, decoded within their products."""

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops._core import launch_config
from liger_kernel.ops.projections import grouped_blocks, moe, mxfp4
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.float8_blocks import float8_blocks


@needs_kernels
def test_the_sum_alone_is_rounded(monkeypatch):
    torch.manual_seed(0)
    if launch_config.arch() not in ("cpu", "sm90"):
        pytest.skip("decoded before on this GPU")
    E, N, K = 3, 128, 256
    q, scale = torch.randn(E, N, K).mul(60).clamp(-448, 448).to(E4), torch.rand(E, 1, 2) / 500
    weight = float8_blocks(q.to(DEVICE), scale.to(DEVICE), (128, 128))
    offs, rows = torch.tensor([3, 3, 40], dtype=torch.int32, device=DEVICE), torch.randn(42, K)
    rows = rows.bfloat16().to(DEVICE)
    assert grouped_blocks.decoded_inside(weight, rows) and not grouped_blocks.decoded_inside(weight, rows.float())
    assert not grouped_blocks.decoded_inside(weight, rows.expand(20, -1, -1).flatten(0, 1))
    monkeypatch.setattr(mxfp4, "PART", 0)  # of experts that are larger
    y = moe._product(rows, weight, offs)
    w = weight.dense(torch.float64 if DEVICE == "cpu" else torch.float32)
    for begin, end, e in ((0, 3, 0), (3, 40, 2)):
        exact = rows[begin:end].to(w.dtype) @ w[e].mT
        error, least = ((t - exact).norm() for t in (y[begin:end], exact.bfloat16()))
        # W rounded to bf16 before would be further off
        assert error <= 1.01 * least
    args = rows, weight.q, weight.scale, offs
    torch.library.opcheck(torch.ops.liger.grouped_mm_blocks.default, args, test_utils="test_faketensor")
