"""Attention with sinks beside what it must equal: attention without a sink, separate documents,
rows without padding."""

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside
from torch import Tensor

from liger_kernel.ops import OPS, sink_attention
from liger_kernel.testing import like, run

reference = OPS["sink_attention"].reference


def heads(B: int = 2, H: int = 4, K: int = 2, T: int = 45, D: int = 16, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    draw = lambda h: torch.randn(B, T, h, D).transpose(1, 2).to(DEVICE).requires_grad_()
    return dict(q=draw(H), k=draw(K), v=draw(K), sinks=torch.randn(H).to(DEVICE).requires_grad_())


def stock(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """PyTorch's attention with one more key: the sink for a score and zero for a value."""
    B, H, T, _ = q.shape
    k, v = (F.pad(t.repeat_interleave(H // k.shape[1], 1), (0, 0, 1, 0)) for t in (k, v))
    bias = torch.full((T, T + 1), -float("inf"), dtype=q.dtype, device=q.device).triu(2).expand(B, H, T, T + 1)
    return F.scaled_dot_product_attention(
        q, k, v, torch.cat((sinks.view(1, H, 1, 1).expand(B, H, T, 1), bias[..., 1:]), -1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_attention_with_one_more_key(dtype):
    assert_beside(sink_attention, stock, lambda seed: like(heads(seed=seed), dtype), draws=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounds_the_output_does_not_reach_the_gradients(dtype):
    """The gradient of an fp32 sink over one key is that of an fp32 output."""
    args = like(heads(K=4, T=1), dtype) | dict(sinks=torch.full((4,), -2.0, device=DEVICE, requires_grad=True))
    args["k"] = args["q"].detach().clone().requires_grad_()
    expected = run(reference, like(args, torch.float64))["dsinks"]
    found, atol = run(sink_attention, args)["dsinks"].double(), 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("sink", [-float("inf"), -1e4, 1e4])
def test_extreme_sinks(sink):
    args = heads() | dict(sinks=torch.full((4,), sink, device=DEVICE, requires_grad=True))
    out = sink_attention(**args)
    grads = torch.autograd.grad(out.sum(), list(args.values()))
    assert all(g.isfinite().all() for g in grads)
    if sink > 0:
        assert not out.any()
    else:
        k, v = (args[name].repeat_interleave(2, 1) for name in ("k", "v"))
        torch.testing.assert_close(out, F.scaled_dot_product_attention(args["q"], k, v, is_causal=True))


def test_documents_are_rows_of_their_own():
    """Also where they begin within a block, and where one is longer than a block."""
    args, bounds = heads(B=1, T=70), [0, 3, 50, 51, 70]
    sizes = torch.tensor(bounds).diff()
    first = torch.tensor(bounds[:-1]).repeat_interleave(sizes)[None].to(DEVICE)
    packed = run(lambda **a: sink_attention(**a, first=first), like(args))
    parts = lambda t: t.split(sizes.tolist(), 2)
    alone = lambda sinks, **qkv: torch.cat([sink_attention(*row, sinks) for row in zip(*map(parts, qkv.values()))], 2)
    torch.testing.assert_close(packed, run(alone, like(args)), rtol=1e-4, atol=1e-5)


def test_padding_on_the_left_moves_a_row():
    """Tokens see and learn the same; those that see nothing give zero."""
    args, n = heads(B=1, T=37), 9
    moved = {
        name: (F.pad(t.detach(), (0, 0, n, 0), value=1.0) if t.ndim == 4 else t.detach().clone()).requires_grad_()
        for name, t in args.items()
    }
    valid = torch.arange(37 + n, device=DEVICE)[None] >= n
    ours, expected = sink_attention(**moved, valid=valid), sink_attention(**args)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, list(args.values()), dout)
    found = torch.autograd.grad(ours, list(moved.values()), F.pad(dout, (0, 0, n, 0), value=1.0))
    assert not ours[:, :, :n].any()
    for mine, theirs in zip((ours, *found), (expected, *grads)):
        assert theirs.ndim == 1 or not mine[:, :, :n].any()
        torch.testing.assert_close(mine if theirs.ndim == 1 else mine[:, :, n:], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_many_rows():
    """More pairs of rows and heads than a second dimension of a grid can have."""
    args = {
        name: (t.detach().expand(16400, *t.shape[1:]) if t.ndim == 4 else t.detach()).requires_grad_()
        for name, t in heads(B=1, T=3).items()
    }
    out = sink_attention(**args)
    assert torch.equal(out[-1], out[0])
    assert torch.autograd.grad(out.sum(), args["q"])[0][-1].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_long_row():
    """131,072 tokens, whose scores would be 1.1 TB: windows of them by the formula."""
    T, window = 131072, 64
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, T, h, 64, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2).requires_grad_()
        for h in (8, 1, 1)
    )
    sinks = torch.randn(8, device=DEVICE)
    out = sink_attention(q, k, v, sinks, window=window)
    out.backward(torch.ones_like(out))
    cut = [t.detach()[:, :, -200:].float().requires_grad_() for t in (q, k, v)]
    some = reference(*cut, sinks, window=window)
    some.backward(torch.ones_like(some))
    torch.testing.assert_close(out[:, :, -100:].float(), some[:, :, -100:], rtol=2e-2, atol=1e-2)
    for full, few in zip((q, k, v), cut):
        torch.testing.assert_close(full.grad[:, :, -100:].float(), few.grad[:, :, -100:], rtol=2e-2, atol=5e-2)
