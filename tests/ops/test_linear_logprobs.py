"""``linear_logprobs`` beyond what every operator is tested for (test_ops.py)."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from chunk_loop import watch_products
from torch import Tensor

from liger_kernel.ops import linear_cross_entropy, linear_divergence, linear_logprobs
from liger_kernel.ops.losses.linear_loss import linear_loss

lp = sys.modules["liger_kernel.ops.losses.linear_logprobs"]


def head(M: int = 12, H: int = 16, V: int = 50, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, V, (M,))
    y[::4] = -100
    return torch.randn(M, H, dtype=dtype).requires_grad_(), torch.randn(V, H, dtype=dtype), y


def products(call) -> int:
    """How many matrix products of the size of the logits ``call`` makes."""
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_products(patch)
        call()
    return len(seen)


@pytest.mark.parametrize("planned", [False, True])
def test_a_frozen_head_costs_two_products(planned):
    """One more for a gradient of the entropy if it was planned, two more if not: the numbers are the same."""
    x, w, y = head()
    one = dict(outputs=("entropy",), entropy_grad=planned, chunk_rows=1 if planned else 64, chunk_classes=64)

    def step(with_entropy: bool) -> list[Tensor]:
        logp, entropy = linear_logprobs(x, w, y, **one)
        return torch.autograd.grad(logp.sum() + (entropy.square().sum() if with_entropy else 0), x)

    assert products(lambda: step(False)) == (3 if planned else 2)
    assert products(lambda: step(True)) == (3 if planned else 4)
    trained = w.clone().requires_grad_()
    logp, entropy = linear_logprobs(x, trained, y, outputs=("entropy",))
    torch.testing.assert_close(step(True), torch.autograd.grad(logp.sum() + entropy.square().sum(), (x,)))


def test_losses_of_frozen_heads_cost_two_products():
    """One more for the teacher's logits: a trained head costs one product of its own and the logits again."""
    x, w, y = head()
    total = lambda tokens, first, last: tokens.logp.sigmoid().sum()
    losses = {
        "none": lambda w: linear_cross_entropy(x, w, y, reduction="none", chunk_rows=5).square().sum(),
        "whole": lambda w: linear_loss(total, x, w, y, group=12, whole=True, chunk_rows=5)[0],
        "distillation": lambda w: linear_divergence(x, w, x.detach(), w.detach().flip(0), **distilled).square().sum(),
    }
    distilled = dict(kind="forward_kl", reduction="none", chunk_rows=5)
    for name, loss in losses.items():
        grads: list[tuple[Tensor, ...]] = []
        count = products(lambda loss=loss, to=grads: to.append(torch.autograd.grad(loss(w), x)))
        assert count == 3 * (3 if name == "distillation" else 2), name  # three chunks
        torch.testing.assert_close(grads[0], torch.autograd.grad(loss(w.clone().requires_grad_()), (x,)), msg=name)


def test_a_unit_gradient_serves_every_loss():
    """Whatever a loss makes of log-probabilities, also twice from a retained graph."""
    x, w, y = head()
    logp = linear_logprobs(x, w, y)
    trained = linear_logprobs(x, w.clone().requires_grad_(), y)
    for loss in (torch.sum, lambda t: -torch.nn.functional.logsigmoid(t.view(3, 4).sum(1)).mean()):
        found = torch.autograd.grad(loss(logp), x, retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(loss(trained), x, retain_graph=True))


def test_ignored_tokens_have_no_gradient_whatever_comes_from_above():
    x, w, y = head()
    (dx,) = torch.autograd.grad(linear_logprobs(x, w, y), x, torch.full((12,), float("nan")))
    assert (dx[::4] == 0).all() and dx[1].isnan().all()


def test_a_call_without_gradients_stores_only_its_outputs():
    x, w, y = head()
    with torch.no_grad():
        logp, top1 = linear_logprobs(x, w, y, outputs=("top1",))
    assert logp.grad_fn is None and top1.dtype == torch.int64
    assert torch.equal(top1[1:4], (x.detach() @ w.t()).argmax(1)[1:4]) and (top1[::4] == -1).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_casts_tiles_of_the_head(frozen):
    """A head in fp32 under autocast: as with a copy in bf16, which is not made; dw in fp32."""
    x, w, y = head()
    master, copy = (t.requires_grad_(not frozen) for t in (w.clone(), w.bfloat16()))
    wants = lambda t: (x,) if frozen else (x, t)
    with torch.autocast("cpu", torch.bfloat16):
        logp = linear_logprobs(x, master, y, chunk_classes=16)
    expected = linear_logprobs(x.bfloat16(), copy, y, chunk_rows=1, chunk_classes=16)
    torch.testing.assert_close(logp, expected, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(logp.sum(), wants(master))
    assert found[-1].dtype == torch.float32
    torch.testing.assert_close(
        found, torch.autograd.grad(expected.sum(), wants(copy)), rtol=2e-2, atol=2e-2, check_dtype=False
    )


def test_a_head_of_fp32_products_over_16_bit_weights():
    x, w, y = head()
    w = w.bfloat16().requires_grad_()
    logp = linear_logprobs(x, w, y, chunk_classes=16)
    expected = torch.log_softmax(x @ w.float().t(), -1).gather(1, y.clamp(min=0)[:, None])[:, 0].where(y >= 0, 0)
    torch.testing.assert_close(logp, expected)
    dw, ew = (torch.autograd.grad(t.sum(), w)[0] for t in (logp, expected))
    torch.testing.assert_close(dw, ew, rtol=1e-2, atol=1e-2)


def test_many_blocks_of_tokens(monkeypatch):
    """dw is a sum over blocks of tokens."""
    x, w, y = head()
    w.requires_grad_()
    expected = torch.autograd.grad(linear_logprobs(x, w, y).sum(), (x, w))
    monkeypatch.setattr(lp, "_TOKENS", 5)
    found = torch.autograd.grad(linear_logprobs(x, w, y, chunk_rows=1, chunk_classes=16).sum(), (x, w))
    torch.testing.assert_close(found, expected)


OF_HEADS = {
    "log-probabilities": lambda x, w, _, y: linear_logprobs(x, w, y, chunk_rows=1, chunk_classes=16),
    "divergences": lambda x, w, t, y: linear_divergence(x, w, x.detach(), t, y, reduction="none", chunk_rows=5),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("of_heads", OF_HEADS)
def test_zero_3_gathers_the_heads_for_the_backward(of_heads, tied, monkeypatch):
    """They are empty by then, and have a ``ds_id``; what is ``tied`` to a used one is whole."""
    x, w, y = head()
    heads = [torch.nn.Parameter(t) for t in (w, w.flip(0))]
    expected = torch.autograd.grad(OF_HEADS[of_heads](x, *heads, y).sum(), (x, heads[0]))
    whole, gathered = [t.data for t in heads], []

    def divide(parts):
        for t in parts:
            t.data = t.data.new_empty(0)

    @contextmanager
    def gathering(parts):
        gathered.extend(t.ds_id for t in parts)
        for t in parts:
            t.data = whole[t.ds_id]
        yield
        divide(parts)

    zero = types.SimpleNamespace(GatheredParameters=gathering)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))
    for i, t in enumerate(heads):
        t.ds_id = i
    found = OF_HEADS[of_heads](x, *heads, y)
    divide(heads[tied:])
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, heads[0])), expected)
    assert gathered == list(range(1 + (of_heads == "divergences")))[tied:]
