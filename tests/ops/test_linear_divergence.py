"""What a case cannot say of the linear divergence: memory, products, kernels beside their
formulas, teachers of other forms."""

import sys

import pytest
import torch
from devices import DEVICE
from watching import Watch

from liger_kernel.ops import OPS
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence, reference


def inputs(M=12, H=16, G=24, V=50, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    new = lambda *s: torch.randn(*s, device=DEVICE, dtype=torch.float64).to(dtype)
    x, w, tx, tw = new(M, H).requires_grad_(), new(V, H).mul_(0.3).requires_grad_(), new(M, G), new(V, G).mul_(0.3)
    target = torch.randint(0, V, (M,), device=DEVICE)
    target[::3] = -100
    return x, w, tx, tw, target


def topk_of(tx, tw, K, temperature=1.0):
    log_probs = ((tx @ tw.t()).float() / temperature).log_softmax(-1)
    top = log_probs.topk(K)
    return dict(topk_log_probs=top.values, topk_indices=top.indices)


@pytest.fixture
def watch(monkeypatch):
    """Watches the inside of the chunk loop, which dispatch modes around launchers do not see."""
    module, mode = sys.modules[linear_divergence.__module__], Watch()
    chunks = module._chunks

    def watched(*args, **kwargs):
        with mode:
            return chunks(*args, **kwargs)

    monkeypatch.setattr(module, "_chunks", watched)
    return mode


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("compact", [False, True])
def test_neither_full_logits_exist(compact, reduction, watch):
    x, w, tx, tw, target = inputs(M=40, H=4, G=6, V=60)
    options = dict(weight_hard=0.5, reduction=reduction, compact=compact, chunk_rows=5)
    linear_divergence(x, w, tx, tw, target, **options).sum().backward()
    assert watch.largest == 5 * 60


def test_only_the_products_that_are_needed(watch):
    M, H, G, V = 12, 16, 24, 50
    x, w, tx, tw, target = inputs()

    def work(*args, **options):
        watch.work = 0
        linear_divergence(*args, weight_hard=0.5, chunk_rows=5, **options)
        return watch.work

    student, teacher = M * H * V, M * G * V
    assert work(x, w, tx, tw, target) == 3 * student + teacher
    assert work(x.detach(), w, tx, tw, target) == 2 * student + teacher
    with torch.no_grad():
        assert work(x, w, tx, tw, target) == student + teacher
    assert work(x, w, tx, tw, target, compact=True) == (3 * student + teacher) * 2 // 3
    assert work(x, w, target=target, teacher_logits=tx @ tw.t()) == 3 * student
    assert work(x, w, target=target, kind="forward_kl", **topk_of(tx, tw, 4)) == 3 * student


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["jsd", "cosine", "topk", "no-tail"])
def test_without_kernels(kind, reduction):
    """fp64 runs in torch, chunk by chunk: against all logits at once."""
    x, w, tx, tw, target = inputs(dtype=torch.float64)
    bias, teacher_bias = (torch.randn(50, dtype=torch.float64, device=DEVICE) for _ in range(2))
    options = dict(target=target, bias=bias.requires_grad_(), beta=0.3, temperature=1.7, reduction=reduction)
    options |= dict(weight_hard=0.4, weight_soft=0.7)
    if kind in ("topk", "no-tail"):
        options |= dict(kind="forward_kl", tail=kind == "topk", **topk_of(tx, tw, 5, 1.7))
    else:
        options |= dict(kind=kind, teacher_x=tx, teacher_w=tw, teacher_bias=teacher_bias)
    ours, theirs = linear_divergence(x, w, chunk_rows=5, **options), reference(x, w, **options)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad((out * out.detach().cos()).sum(), (x, w, bias)) for out in (ours, theirs))):
        torch.testing.assert_close(a, b)


def test_lumping_the_tail_bounds_forward_kl_from_below():
    x, w, tx, tw, _ = inputs()
    losses = [linear_divergence(x, w, kind="forward_kl", **topk_of(tx, tw, K)).item() for K in (1, 3, 9, 27, 50)]
    assert losses == sorted(losses) and losses[0] >= 0
    assert losses[-1] == pytest.approx(linear_divergence(x, w, tx, tw, kind="forward_kl").item(), rel=1e-5)


@pytest.mark.parametrize("tail", [True, False])
def test_padding_of_the_top_k(tail):
    """Indices outside the vocabulary count as none, whatever their probability."""
    x, w, tx, tw, target = inputs()
    top = topk_of(tx, tw, 5)
    strays = torch.full((12, 2), -0.1, device=DEVICE), torch.tensor([[-1, 50]], device=DEVICE).expand(12, 2)
    padded = {name: torch.cat([t, more], 1) for (name, t), more in zip(top.items(), strays)}
    for dtype in (torch.float32, torch.float64):
        x, w = (t.detach().to(dtype).requires_grad_() for t in (x, w))
        options = dict(kind="forward_kl", target=target, tail=tail, weight_hard=0.5)
        a, b = (linear_divergence(x, w, **options, **some) for some in (top, padded))
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(torch.autograd.grad(a, (x, w)), torch.autograd.grad(b, (x, w)))


def test_a_tail_without_student_mass():
    """exp of the student's tail underflows in fp32; the loss and its gradient are those of fp64."""
    x = torch.tensor([[1.0]], device=DEVICE, requires_grad=True)
    w = torch.tensor([[150.0], [149.0], [1.0], [0.0]], device=DEVICE)
    log_probs = torch.tensor([[0.5, 0.25]], device=DEVICE).log()
    top = dict(topk_log_probs=log_probs, topk_indices=torch.tensor([[0, 1]], device=DEVICE))
    loss = linear_divergence(x, w, kind="forward_kl", **top)
    truth = reference(x.detach().double().requires_grad_(), w.double(), kind="forward_kl", **top)
    torch.testing.assert_close(loss.double(), truth)
    assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
@pytest.mark.parametrize("tail", [True, False])
def test_top_k_rows_without_tokens(tail, dtype):
    """Row 0 has no tokens, row 1 none of any probability; the student excludes one of row 2."""
    x, w, tx, tw, _ = inputs(dtype=dtype)
    bias = torch.zeros(50, dtype=dtype, device=DEVICE)
    bias[7] = -float("inf")
    top = topk_of(tx, tw, 5)
    log_p, index = top.values()
    index[index == 7] = -1
    index[0], log_p[1] = -1, -float("inf")
    index[2, 1], log_p[2, 1] = 7, -float("inf")
    if not tail:
        log_p[3] -= 200  # normalised, they are what they were
    options = dict(kind="forward_kl", tail=tail, bias=bias, reduction="none")
    loss = linear_divergence(x, w, chunk_rows=5, **options, **top)
    truth = OPS["linear_divergence"].reference(x, w, **options, **top)
    torch.testing.assert_close(loss, truth)
    grads, true = (torch.autograd.grad(t.sum(), (x, w)) for t in (loss, truth))
    torch.testing.assert_close(grads, true, rtol=1e-5, atol=1e-6)
    nothing = loss == 0
    assert nothing.tolist() == [True, not tail, *[False] * 10] and not grads[0][nothing].any()
    assert not true[0][nothing].any()
    assert not linear_divergence(x, w, **options, **{name: t[:, :0] for name, t in top.items()}).any()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd"])
@pytest.mark.parametrize("likely", [3, 8999], ids=["in the first block", "in the last block"])
def test_entropy_of_certain_rows(kind, likely):
    """Never negative, small numbers exact, also where the largest logit comes late."""
    x = torch.tensor([[0.0], [1.0], [5.0], [12.0], [20.0], [60.0], [1000.0]], device=DEVICE)
    w = torch.zeros(9000, 1, device=DEVICE)
    w[likely] = 1
    _, entropy = linear_divergence(x, w, x, w, kind=kind, reduction="none", entropy=True)
    log_p = (x.double() @ w.double().T).log_softmax(-1)
    assert entropy.min() >= 0
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-6)
