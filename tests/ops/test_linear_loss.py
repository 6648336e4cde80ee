"""A loss of log-probabilities, differentiated chunk by chunk, against the same loss over all of
them."""

import pytest
import torch
import torch.nn.functional as F
from chunk_loop import multiplications, watch_products
from devices import DEVICE, assert_beside
from quick import further

from liger_kernel.ops.losses.linear_logprobs import reference
from liger_kernel.ops.losses.linear_loss import Tokens, linear_loss
from liger_kernel.testing import assert_as_accurate

B, T, H, V = 6, 5, 16, 61


def inputs(dtype=torch.float32, ignored=True, seed=0):
    torch.manual_seed(seed)
    new = lambda *s, k=1.0: (k * torch.randn(*s, device=DEVICE, dtype=torch.float64)).to(dtype).requires_grad_()
    x, w, bias = new(B * T, H), new(V, H, k=0.3), new(V)
    target = torch.randint(0, V, (B * T,), device=DEVICE)
    if ignored:
        target[torch.rand(B * T, device=DEVICE) < 0.4] = -100
        target[:T] = -100  # a group without a token
    return x, w, target, bias


def dpo(tokens, first, last):
    chosen, rejected = tokens.logp.view(last - first, 2, -1).sum(-1).unbind(1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).sum() / 3, (chosen, (chosen > rejected).sum())


def with_entropy(tokens, first, last):
    weight = torch.arange(first + 1, last + 1, device=tokens.logp.device)[:, None] / B
    return (weight * tokens.logp.exp() - 0.01 * tokens.entropy).sum()


def undivided(fn, x, w, target, bias, group):
    """Named results, and what ``fn`` returned beside the loss."""
    logp, entropy = (t.view(-1, group) for t in reference(x, w, target, bias, temperature=0.8, outputs=("entropy",)))
    result = fn(Tokens(logp, entropy), 0, logp.shape[0])
    loss, aux = result if isinstance(result, tuple) else (result, ())
    return named(loss, x, w, bias), aux


def named(loss, *leaves):
    return {"out": loss.detach()} | {f"d{i}": g for i, g in enumerate(torch.autograd.grad(3 * loss, leaves))}


def expected(fn, group, dtype, seed):
    """PyTorch's results in ``dtype``, the true ones."""
    x, w, target, bias = inputs(dtype, seed=seed)
    exact = lambda t: t.detach().double().requires_grad_()
    return undivided(fn, x, w, target, bias, group), undivided(fn, exact(x), exact(w), target, exact(bias), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *further(torch.float16)], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 10, 1])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fn, group, entropy", [(dpo, 2 * T, False), (with_entropy, T, True)])
def test_as_accurate_as_the_whole(fn, group, entropy, whole, chunk_rows, compact, dtype):
    x, w, target, bias = inputs(dtype)
    options = dict(group=group, entropy=entropy, chunk_rows=chunk_rows, compact=compact, whole=whole)
    loss, aux = linear_loss(fn, x, w, target, bias, temperature=0.8, **options)
    draws = [expected(fn, group, dtype, seed) for seed in range(6)]
    (pytorch, pytorch_aux), (truth, _) = draws[0]
    assert_as_accurate(named(loss, x, w, bias), pytorch, truth, *((p, t) for (p, _), (t, _) in draws[1:]))
    for a, b in zip(aux, pytorch_aux):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("whole, chunk_rows, compact", [(False, 10, False), (False, 10, True), (True, None, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_head_with_adapters(whole, chunk_rows, compact, dtype):
    def draw(seed):
        x, w, target, bias = inputs(torch.float64, seed=seed)
        xa, wb = (torch.randn(n, 3, device=DEVICE, dtype=torch.float64) for n in (B * T, V))
        leaves = dict(x=x, w=w, bias=bias, xa=xa, wb=wb)
        return dict(target=target) | {k: t.detach().to(dtype).requires_grad_() for k, t in leaves.items()}

    def ours(target, x, w, bias, xa, wb):
        options = dict(group=T, temperature=0.8, entropy=True, chunk_rows=chunk_rows, compact=compact, whole=whole)
        return linear_loss(with_entropy, x, w, target, bias, xa=xa, wb=wb, **options)[0]

    def stock(target, x, w, bias, xa, wb):
        logp, entropy = (
            t.view(-1, T) for t in reference(x, w, target, bias, temperature=0.8, outputs=("entropy",), xa=xa, wb=wb)
        )
        return with_entropy(Tokens(logp, entropy), 0, B)

    assert_beside(ours, stock, draw, draws=6)


def test_three_products_and_no_full_logits(monkeypatch):
    """With entropies and in chunks: what ``linear_logprobs`` would need four for."""
    x, w, target, _ = inputs(ignored=False)
    seen = watch_products(monkeypatch)
    call = lambda x: linear_loss(with_entropy, x, w, target, group=T, entropy=True, chunk_rows=10)[0]
    for products, run in ((3, call), (2, lambda x: call(x.detach())), (1, torch.no_grad()(call))):
        seen.clear()
        loss = run(x)
        if loss.requires_grad:
            loss.backward()
        assert multiplications(seen) == products * B * T * H * V


def test_compiles_whole():
    args = inputs()
    fn = lambda *args: linear_loss(dpo, *args, group=2 * T)
    eager, compiled = fn(*args), torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled[0], args[:2]), torch.autograd.grad(eager[0], args[:2]))


def test_a_loss_without_gradient():
    x, w, target, _ = inputs()
    fn = lambda tokens, *_: (tokens.logp.detach().sum(), (tokens.predicted,))
    loss, (kept,) = linear_loss(fn, x, w, target, group=T, predicted=True, chunk_rows=10)
    loss.backward()
    assert not x.grad.any() and not w.grad.any()
    assert kept.shape == (B, T) and torch.equal(kept.view(-1) < 0, target == -100)


@pytest.mark.parametrize(
    "group, temperature, message",
    [(7, 1.0, "group must divide the 30 rows of x, got 7"), (5, 0.0, "temperature must be positive, got 0.0")],
)
def test_mistakes_are_named(group, temperature, message):
    x, w, target, _ = inputs()
    with pytest.raises(ValueError, match="linear_loss: " + message):
        linear_loss(dpo, x, w, target, group=group, temperature=temperature)


@pytest.mark.parametrize("chunk_rows, products, whole", [(10, 3, False), (2, 4, False), (10, 4, True)])
def test_the_head_is_not_needed_after_the_forward(chunk_rows, products, whole, monkeypatch):
    """ZeRO-3 gathers it for the forward alone; of groups longer than two chunks, too."""
    x, w, target, _ = inputs()
    expected = torch.autograd.grad(linear_loss(with_entropy, x, w, target, group=T, entropy=True)[0], (x, w))
    head = w.detach().clone().requires_grad_()
    seen = watch_products(monkeypatch)
    how = dict(chunk_rows=chunk_rows, whole=whole)
    loss, _ = linear_loss(with_entropy, x, head, target, group=T, entropy=True, **how)
    head.data.fill_(float("nan"))
    loss.backward()
    torch.testing.assert_close((x.grad, head.grad), expected)
    assert multiplications(seen) == products * B * T * H * V


@pytest.mark.parametrize("slopes", [(1, 1), (1e-7, 1), (1, 1e-7), (0, 1e-4), (300, 0)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_fp16_slopes_of_any_size(slopes, whole, compact):
    """Nothing overflows, nor underflows what a loss scaler could save."""
    x, w, target, bias = inputs(torch.float16)
    rate = torch.tensor(slopes, device=DEVICE, dtype=torch.float64).repeat_interleave(B // 2)[:, None]
    scaler = 2.0**10 / max(slopes)
    fn = lambda tokens, first, last: (
        -(rate[first:last].to(tokens.logp.dtype) * tokens.logp).sum() + (rate[first:last] * tokens.entropy).sum()
    )
    loss, _ = linear_loss(fn, x, w, target, bias, group=T, entropy=True, chunk_rows=T, whole=whole, compact=compact)
    found = torch.autograd.grad(scaler * loss, (x, w, bias))
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    loss, _ = linear_loss(fn, *exact[:2], target, exact[2], group=T, entropy=True)
    for ours, truth in zip(found, torch.autograd.grad(scaler * loss, exact)):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-2, atol=2e-3 * truth.abs().max().item())


@pytest.mark.parametrize("frozen", [0, 1, 3])
@pytest.mark.parametrize("tokens", [129, 1])
def test_fp16_steep_sums(tokens, frozen):
    """The slope of each token is 300, whatever their number."""
    x = torch.ones(tokens, 1, device=DEVICE, dtype=torch.float16)
    w = torch.tensor([[-3.0], [3.0]], device=DEVICE, dtype=torch.float16)
    bias = torch.zeros(2, device=DEVICE, dtype=torch.float16)
    target = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    leaves = [t.requires_grad_() for i, t in enumerate((x, w, target, bias)) if i not in (2, frozen)]
    ours, _ = linear_loss(lambda t, *_: -300 * t.logp.sum(), x, w, target, bias, chunk_rows=80)
    theirs = 300 * F.cross_entropy(F.linear(x, w, bias).float(), target, reduction="sum")
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=0)
