"""Experts that are stored in FP8: how they are cast, and how they are made dense."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops.projections import float8
from liger_kernel.ops.projections.float8_experts import cast_experts, dense

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8"
)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Experts of very different sizes, so that a scale of another one shows."""
    sizes = torch.logspace(-3, 2, shape[0]).view(-1, 1, 1)
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * sizes).to(DEVICE, dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_output", [False, True])
def test_an_expert_is_cast_as_a_linear_layer_is(per_output, transposed):
    w = drawn(3, 32, 48)
    q, scale = cast_experts(w.mT.contiguous() if transposed else w, per_output, transposed)
    assert scale.shape == ((3, 1, 1) if not per_output else (3, 1, 32) if transposed else (3, 32, 1))
    assert q.is_contiguous()
    q, scale = (q.view(torch.int8).mT, scale.mT) if transposed else (q.view(torch.int8), scale)
    for e in range(3):
        expected, expected_scale = float8.cast(w[e], float8.E4, per_output)
        assert torch.equal(q[e], expected.view(torch.int8))
        assert torch.equal(scale[e].flatten(), expected_scale.flatten())


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 6, 40), (2, 5, 1), (1, 1, 1), (2, 3, 1030)], ids=str)
def test_dense_as_pytorch_makes_it(shape):
    """Also of other strides, and of no experts."""
    E, A, B = shape
    generator = torch.Generator().manual_seed(0)
    q = (100 * torch.randn(shape, generator=generator)).to(DEVICE, float8.E4)
    for scales in ((E, 1, 1), (E, A, 1), (E, 1, B)):
        scale = torch.rand(scales, generator=generator).to(DEVICE)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for some in (slice(None), slice(None, None, 2), slice(0)):
                found = dense(q[some], scale[some], dtype)
                assert found.dtype == dtype and torch.equal(found, (q.float() * scale).to(dtype)[some])
