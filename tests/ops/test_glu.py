"""GLU's values beside those of PyTorch's own kernels."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from liger_kernel.ops.activations.glu import glu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bits are those of PyTorch's kernels for GPUs")
def test_bf16_swiglu_is_pytorchs_to_the_last_bit():
    generator = torch.Generator("cuda").manual_seed(0)
    gate, up = (torch.randn(4096, 8192, generator=generator, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(2))
    assert torch.equal(glu(gate, up, act="silu"), F.silu(gate) * up)


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="accuracy is that of the GPU's exponential")
@pytest.mark.parametrize("act", ACTS)
def test_fp32_is_as_accurate_as_pytorch(act):
    """The exponential that narrow dtypes take would be several units in the last place off."""
    generator = torch.Generator("cuda").manual_seed(0)
    gate, up = (torch.randn(1024, 8192, generator=generator, device="cuda") * 3 for _ in range(2))
    fn = ACTS[act]
    true = fn(gate.double()) * up.double()
    normal = true.abs() > 1e-30
    off = lambda y: ((y.double() - true) / true)[normal].pow(2).mean().sqrt().item()
    ours, stock = off(glu(gate, up, act=act)), off(fn(gate) * up)
    assert ours <= 1.1 * stock, (ours, stock)
