"""The second stages that operators share."""

import functools

import pytest
import torch
from devices import DEVICE

from liger_kernel import ops
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops._core.reduce import column_sum, scale_


@pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed")
@pytest.mark.parametrize("P, N", [(1, 1), (32, 32), (33, 31), (70, 45)])
def test_column_sum_takes_every_row(P, N):
    """As many partial sums as a large GPU has processors, where the machine has few."""
    torch.manual_seed(0)
    x = torch.randn(P, N, device=DEVICE)
    torch.testing.assert_close(column_sum(x, torch.float32), x.double().sum(0).float())


@pytest.mark.parametrize(
    "s, expected", [(1.0, 3.0), (0.5, 1.5), (float("nan"), float("nan")), (float("inf"), float("inf"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale_by_any_number(s, expected, dtype):
    """Of an upstream gradient that is not a number, too: anomalies and loss scalers look for it."""
    x = torch.full((9001,), 3.0, device=DEVICE, dtype=dtype)
    scale_(x, torch.tensor(s, device=DEVICE))
    torch.testing.assert_close(x, torch.full_like(x, expected), equal_nan=True)


@pytest.mark.parametrize("s", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kernels", [True, False])
def test_nothing_stays_nothing(s, kernels, monkeypatch):
    """What no token contributed to, in a sum that a trainer divides by 0 tokens."""
    if not kernels:
        monkeypatch.setattr(_op, "_KERNEL_DEVICES", set())
    x = torch.zeros(9001, device=DEVICE)
    x[::7] = 2.0
    scale_(x, torch.tensor(s, device=DEVICE))
    assert not x.view(-1)[1::7].any() and not x[::7].isfinite().any()


def _of_logits(x, w, y, **options):
    return ops.cross_entropy(x @ w.T, y, **options)


LOSSES = {
    "cross_entropy": _of_logits,
    "cross_entropy, in the forward": functools.partial(_of_logits, gradient_in_forward=True),
    "linear_cross_entropy": functools.partial(ops.linear_cross_entropy, chunk_rows=3),
    "linear_cross_entropy, one chunk": ops.linear_cross_entropy,
    "linear_cross_entropy, compact": functools.partial(ops.linear_cross_entropy, compact=True),
    "linear_cross_entropy, items": lambda x, w, y, **how: ops.linear_cross_entropy(
        x, w, y, num_items=0.0 * x.sum(), **how
    ),
    "linear_cross_entropy, none": lambda x, w, y, reduction: ops.linear_cross_entropy(x, w, y, reduction="none").sum(),
    "linear_loss": lambda x, w, y, reduction: ops.linear_loss(lambda t, *_: t.logp.sum(), x, w, y)[0],
    "linear_logprobs": lambda x, w, y, reduction: ops.linear_logprobs(x, w, y).sum(),
    "vocab_parallel_linear_cross_entropy": ops.vocab_parallel_linear_cross_entropy,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [7, 0])
def test_losses_of_no_tokens_have_no_gradient(name, reduction, dtype, tokens):
    """0, or the mean of nothing, NaN, as PyTorch's; also divided by 0 tokens, as trainers do."""
    x, w = (torch.randn(n, 16, device=DEVICE, dtype=dtype, requires_grad=True) for n in (tokens, 20))
    loss = LOSSES[name](x, w, torch.full((tokens,), -100, device=DEVICE), reduction=reduction)
    assert loss == 0 or (reduction == "mean" and loss.isnan())
    for each, retained in ((loss, True), (loss / 0.0, True), (loss / 0.0, False)):
        for grad in torch.autograd.grad(each, (x, w), retain_graph=retained):
            assert not grad.any()  # NaN counts as something
