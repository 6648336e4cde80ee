"""The embedding, where a ``Case`` cannot say it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs_kernels

from liger_kernel.nn import LigerEmbedding
from liger_kernel.ops import LigerEmbeddingFunction
from liger_kernel.ops.token_embedding import embedding, reference
from liger_kernel.transformers import experimental

module = sys.modules["liger_kernel.ops.token_embedding"]
GPU = torch.cuda.is_available()
MANY = [0] * 3 + [1] * 5 + [2] * 4 + [3] * 7


@needs_kernels
@pytest.mark.parametrize("cut", [1, 2, 4, 8, 64])
@pytest.mark.parametrize(
    "index", [[], [1], [2] * 8, [2] * 9, MANY, [0] * 4 + [2] * 13, [3, 1, 0, 3, 2, 3, 3, 1] * 3, [4] * 9], ids=str
)
def test_runs_that_end_before_at_and_after_a_cut(index, cut, monkeypatch):
    """Row 2 is the padding, 4 is no row."""
    monkeypatch.setattr(module, "CUT", cut)
    index = torch.tensor(index, dtype=torch.int64, device=DEVICE)
    dy = torch.arange(1, 1 + 5 * len(index), device=DEVICE).float().view(-1, 5)
    for padding in (None, 2):
        learns = (index < 4) & (index != padding) if padding else index < 4
        expected = torch.zeros(4, 5, device=DEVICE).index_add_(0, index[learns], dy[learns])
        assert torch.equal(torch.ops.liger.embedding_bwd(dy, index, 4, padding), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_gradients_are_summed_in_fp32_and_rounded_once(dtype):
    torch.manual_seed(0)
    index, w = torch.randint(0, 3, (300,), device=DEVICE), torch.randn(3, 4, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randint(-99, 99, (300, 4), device=DEVICE).to(dtype)  # their sums are exact in fp32
    LigerEmbeddingFunction.apply(w, index).backward(dy)  # as the published one is called
    expected = torch.zeros(3, 4, dtype=torch.float64, device=DEVICE).index_add_(0, index, dy.double())
    assert w.grad.dtype == dtype and torch.equal(w.grad, expected.to(dtype))


@pytest.mark.parametrize("far", [2**40, 2**30])
@pytest.mark.parametrize("fn", [embedding, reference], ids=["embedding", "reference"])
def test_an_index_that_names_no_row(fn, far):
    dtype = torch.int64 if far >= 2**31 else torch.int32
    index = torch.tensor([[0, 4, -1], [3, far, -far]], dtype=dtype, device=DEVICE)
    w = torch.ones(4, 5, device=DEVICE, requires_grad=True)
    y = fn(index, w)
    assert y.shape == (2, 3, 5) and torch.equal(y.isnan().all(-1), (index < 0) | (index >= 4))
    assert y.isfinite().sum() == 10
    y.nansum().backward()
    assert w.grad.sum(1).tolist() == [5, 0, 0, 5]


def test_checked_mode_names_the_index(monkeypatch):
    monkeypatch.setenv("LIGER_CHECKS", "1")
    w = torch.ones(4, 5, device=DEVICE)
    embedding(torch.tensor([0, 3], device=DEVICE), w)
    with pytest.raises(ValueError, match=r"embedding: index must be in \[0, 4\), got -7"):
        embedding(torch.tensor([[0, -7]], device=DEVICE), w)


def test_shapes_of_indices_of_64_and_32_bits():
    w = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    strided = torch.randint(0, 6, (3, 8), device=DEVICE)[:, ::2].T
    for index in (torch.tensor(3, device=DEVICE), torch.randint(0, 6, (2, 0), device=DEVICE), strided):
        expected = F.embedding(index, w)
        for dtype in (torch.int64, torch.int32):
            y = embedding(index.to(dtype), w)
            assert torch.equal(y, expected)
            assert torch.equal(*(torch.autograd.grad(t.sum(), w, retain_graph=True)[0] for t in (y, expected)))


def test_module():
    for padding in (None, 1, -1):
        modules = []
        for cls in (LigerEmbedding, torch.nn.Embedding):
            torch.manual_seed(0)
            modules.append(cls(7, 4, padding).to(DEVICE))
        ours, stock = modules
        assert torch.equal(ours.weight, stock.weight) and repr(ours) == f"Liger{stock}"
        assert ours.padding_idx == stock.padding_idx and (padding is None or not ours.weight[padding].any())
        ours.load_state_dict(stock.state_dict())
        index = torch.tensor([[0, 1, 6, 1], [5, 5, 6, 0]], device=DEVICE)
        for m in (ours, stock):
            m(index).square().sum().backward()
        torch.testing.assert_close(ours.weight.grad, stock.weight.grad)
    assert experimental.LigerEmbedding is LigerEmbedding


@pytest.mark.skipif(not GPU or torch.cuda.mem_get_info()[1] < 70 << 30, reason="needs 70 GB of GPU memory")
def test_more_than_2_to_31_elements():
    """Of the table and of the output: the last rows of both are right, forward and backward."""
    V = M = 2**31 // 1024 + 9
    w = torch.zeros(V, 1024, dtype=torch.bfloat16, device=DEVICE)
    w[-4:] = torch.randn(4, 1024, device=DEVICE)
    index = torch.arange(M, device=DEVICE)
    y = embedding(index, w.requires_grad_())
    assert torch.equal(y[-4:], w[-4:])
    y.backward(w.detach())
    assert torch.equal(w.grad, w)
