"""Experts in FP8 blocks, decoded within their products."""

import pytest
import torch

from liger_kernel.ops._core import operator
from liger_kernel.ops.projections import grouped_blocks, moe
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.float8_blocks import float8_blocks

pytestmark = pytest.mark.skipif(not operator._KERNEL_DEVICES, reason="Triton is not installed")


@pytest.mark.parametrize("turned", [False, True])
def test_the_sum_alone_is_rounded(turned, monkeypatch):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    E, N, K = 3, 128, 256
    q, scale = torch.randn(E, N, K).mul(60).clamp(-448, 448).to(E4), torch.rand(E, 1, 2) / 500
    weight = float8_blocks(q.to(device), scale.to(device), (128, 128))
    offs, rows = torch.tensor([3, 3, 40], dtype=torch.int32, device=device), torch.randn(42, N if turned else K)
    monkeypatch.setattr(grouped_blocks, "ON", True)
    assert grouped_blocks.decoded_inside(weight, torch.bfloat16) is weight
    assert grouped_blocks.decoded_inside(weight, torch.float32) is None
    rows = rows.bfloat16().to(device)
    y = moe._product(rows, weight, offs, turned)
    w = weight.dense(torch.float64 if device == "cpu" else torch.float32)
    for begin, end, e in ((0, 3, 0), (3, 40, 2)):
        exact = rows[begin:end].to(w.dtype) @ (w[e] if turned else w[e].mT)
        assert (y[begin:end] - exact).norm() <= 2 * (exact.bfloat16() - exact).norm()
