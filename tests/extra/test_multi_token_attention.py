"""Multi-token attention: long rows, the module, and what lies above the diagonal."""

import pytest
import torch
from devices import DEVICE

from liger_kernel.extra.softmax import softmax_fwd
from liger_kernel.extra.sparsemax import reference as sparsemax, sparsemax_fwd
from liger_kernel.nn import LigerMultiTokenAttention
from liger_kernel.transformers.functional import liger_multi_token_attention


@pytest.mark.parametrize(
    "launch, plain",
    [(softmax_fwd, torch.softmax), (sparsemax_fwd, lambda x, dim: sparsemax(x))],
    ids=["softmax", "sparsemax"],
)
def test_causal_rows_of_any_length(launch, plain):
    """The first rows of a wide matrix, and one whose last columns are the largest."""
    N = 33001
    torch.manual_seed(0)
    x = torch.randn(3, N, device=DEVICE)
    x[1, 2:] = float("nan")
    x[2, 1:] = 1e4
    y = launch(x, True)
    for row in range(3):
        torch.testing.assert_close(y[row, : row + 1], plain(x[row, : row + 1], -1))
        assert not y[row, row + 1 :].any()


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_above_the_diagonal_does_not_matter(sparse):
    torch.manual_seed(0)
    module = LigerMultiTokenAttention(2, 4, (3, 5), padding=(1, 2), groups=2, sparse=sparse).to(DEVICE)
    shapes = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    assert shapes == {"weight": (4, 1, 3, 5), "bias": (4,)} and not module.bias.any()
    scores = torch.randn(1, 2, 20, 20, device=DEVICE)
    hidden = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).triu(1)
    wild = scores.masked_fill(hidden, float("nan")).requires_grad_()
    y = module(wild)
    assert torch.equal(y, liger_multi_token_attention(scores, module.weight, module.bias, 1, (1, 2), 1, 2, sparse))
    y.sum().backward()
    assert not y[..., hidden].any() and not wild.grad[..., hidden].any()
    assert wild.grad.isfinite().all() and module.weight.grad.isfinite().all()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("of", [lambda q: q @ q.mT, lambda q: q], ids=["product", "fp32"])
def test_autocast(of, sparse):
    """Scores in autocast's dtype, as its products are, and weights that are not, or neither."""
    torch.manual_seed(0)
    module = LigerMultiTokenAttention(2, 2, 3, padding=1, sparse=sparse).to(DEVICE)
    q = torch.randn(1, 2, 9, 9, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = module(of(q))
        assert y.dtype == torch.bfloat16
        y.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(y.float(), module(of(q)), rtol=5e-2, atol=5e-2)
    for t in (q, module.weight, module.bias):
        assert t.grad.dtype == torch.float32 and t.grad.isfinite().all()
