"""Losses that only their published names have: given probabilities, cross entropy with total
variation, scaled cross entropy with chosen classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside

from liger_kernel import ops
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
from liger_kernel.nn import LigerFusedCETVDLoss, LigerFusedLinearJSD, LigerFusedLinearKLDivLoss
from liger_kernel.ops.losses.grpo_loss import fused_selective_log_softmax

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(DEVICE, dtype)


def labels(M, V, every=3):
    y = torch.randint(0, V, (M,), generator=torch.Generator().manual_seed(1))
    y[::every] = -100
    return y.to(DEVICE)


# -- given probabilities ---------------------------------------------------------------------


def given(x, w, p, shift_labels=None, *, reduction="batchmean", temperature=1.0, eps=1e-10):
    """From the definition."""
    z = (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32)) / temperature
    p = p.to(z.dtype)
    kl = (p * (p.clamp(min=eps).log() - z.log_softmax(-1))).sum(-1)
    if shift_labels is not None:
        kl = kl[shift_labels != -100]
    return kl.sum() / {"batchmean": len(kl), "mean": len(kl) * w.shape[0], "sum": 1}[reduction]


@DTYPES
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_kl_of_given_probabilities(dtype, reduction):
    M, H, V = 11, 16, 61
    y = labels(M, V)
    loss = LigerFusedLinearKLDivLoss(reduction, temperature=2.0, accum_dtype=torch.float32)

    def draw(seed):
        x, w = (randn(n, H, dtype=dtype, seed=seed + more).requires_grad_() for n, more in ((M, 0), (V, 100)))
        # and classes that the teacher excludes
        return dict(x=x, w=w, p=F.pad(randn(M, V - 4, seed=seed + 200).softmax(-1), (0, 4)).to(dtype))

    theirs = lambda x, w, p: given(x, w, p, y, reduction=reduction, temperature=2.0)
    assert_beside(lambda x, w, p: loss(x, w, p, y), theirs, draw, draws=8)


def test_kl_with_no_row_that_counts_is_0():
    for dtype in (torch.float32, torch.float16, torch.float64):
        x = randn(5, 8, dtype=dtype).requires_grad_()
        w = randn(30, 8, dtype=dtype, seed=1).requires_grad_()
        p = randn(5, 30, seed=2).softmax(-1)
        for reduction in ("batchmean", "mean", "sum"):
            loss = LigerFusedLinearKLDivLoss(reduction)(x, w, p, torch.full((5,), -100, device=DEVICE))
            assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))


def test_kl_ignores_what_its_rows_hold():
    """Rows to ignore may be NaN, and an ``ignore_index`` of one's own counts."""
    x, w, p = randn(6, 8).requires_grad_(), randn(30, 8, seed=1).requires_grad_(), randn(6, 30, seed=2).softmax(-1)
    y = torch.tensor([0, 7, 7, 1, 2, 7], device=DEVICE)
    expected = given(x[y != 7], w, p[y != 7])
    wild = p.clone()
    wild[y == 7] = float("nan")
    loss = LigerFusedLinearKLDivLoss(ignore_index=7)(x, w, wild, y)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)))


def test_kl_refuses():
    x, w, p = randn(5, 8), randn(30, 8), randn(5, 30).softmax(-1)
    for options, probs, said in (
        (dict(reduction="none"), p, r"fused_linear_kl_div: reduction must be one of .*, got 'none'"),
        (dict(temperature=0), p, "temperature must be positive, got 0"),
        ({}, p[:, 1:], r"teacher_probs must have shape \(5, 30\), got \(5, 29\)"),
        ({}, p.clone().requires_grad_(), "teacher_probs must not require a gradient"),
    ):
        with pytest.raises(ValueError, match=said):
            LigerFusedLinearKLDivLoss(**options)(x, w, probs)


# -- cross entropy and total variation -------------------------------------------------------


@DTYPES
def test_cross_entropy_and_total_variation(dtype):
    M, V = 9, 70
    y = labels(M, V)
    new = lambda seed: randn(M, V, dtype=dtype, seed=seed)
    draw = lambda seed: dict(s=new(seed).requires_grad_(), t=new(seed + 100))

    def theirs(s, t):
        valid, log_q = y != -100, s.to(torch.promote_types(s.dtype, torch.float32)).log_softmax(-1)
        distance = (log_q.exp() - t.to(log_q.dtype).softmax(-1)).abs().sum(-1) / 2
        return F.nll_loss(log_q, y, reduction="none"), distance.where(valid, 0)

    assert_beside(lambda s, t: LigerFusedCETVDLoss()(s, t, y), theirs, draw, draws=8)
    assert_beside(lambda s, t: ops.LigerFusedCETVDFunction.apply(s, t, y), theirs, draw, draws=8)


def test_the_teacher_is_constant_and_nothing_may_count():
    for dtype in (torch.float32, torch.float64):
        s, t = randn(6, 40, dtype=dtype).requires_grad_(), randn(6, 40, dtype=dtype, seed=1).requires_grad_()
        ce, tvd = LigerFusedCETVDLoss(ignore_index=3)(s, t, torch.full((6,), 3, device=DEVICE))
        assert not ce.any() and not tvd.any()
        ds, dt = torch.autograd.grad((ce + tvd).sum(), (s, t), allow_unused=True)
        assert dt is None and not ds.any()


# -- extreme logits ----------------------------------------------------------------------------


@DTYPES
def test_extreme_logits_make_no_nan(dtype):
    """Student and teacher are certain of different classes, 32768 apart."""
    x = torch.eye(4, device=DEVICE, dtype=dtype).mul(128).requires_grad_()
    w = torch.zeros(50, 4, device=DEVICE, dtype=dtype)
    w[torch.arange(4), torch.arange(4)], w[torch.arange(4) + 4, torch.arange(4)] = 128.0, -128.0
    w, opposite, y = w.requires_grad_(), -w.detach(), torch.arange(4, device=DEVICE)
    tx = x.detach()
    certain = torch.zeros(4, 50, device=DEVICE, dtype=dtype)
    certain[torch.arange(4), torch.arange(4)] = 1
    logits = x @ w.t()
    found = {
        "LigerFusedLinearJSD": LigerFusedLinearJSD()(x, w, tx, opposite),
        "with hard loss": LigerFusedLinearJSDLoss()(x, w, tx, opposite, y),
        "forward": LigerFusedLinearJSD(0.0)(x, w, tx, opposite),
        "reverse": LigerFusedLinearJSD(1.0)(x, w, tx, opposite),
        "given": LigerFusedLinearKLDivLoss()(x, w, certain),
        "ce": LigerFusedCETVDLoss()(logits, -logits.detach(), y)[0].mean(),
        "tvd": LigerFusedCETVDLoss()(logits, -logits.detach(), y)[1].mean(),
    }
    for name, loss in found.items():
        assert loss.isfinite(), name
        for g in torch.autograd.grad(loss, (x, w), retain_graph=True):
            assert g.isfinite().all(), name
    assert found["LigerFusedLinearJSD"].item() == pytest.approx(math.log(2))  # they share no class
    assert found["forward"].item() == found["reverse"].item() == 32768
    assert found["given"].item() == found["ce"].item() == 0 and found["tvd"].item() == 1


# -- scaled cross entropy ----------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=str)
def test_scaled_cross_entropy(dtype, shape):
    """Losses, entropies and chosen log-probabilities, of two and three dims, with gradients."""
    V, H, temperature = 61, 16, 0.7
    y, ids = labels(10, V).view(shape), torch.tensor([3, 60, 3, 0], device=DEVICE)
    draw = lambda seed: dict(
        x=randn(*shape, H, dtype=dtype, seed=seed).requires_grad_(),
        w=randn(V, H, dtype=dtype, seed=seed + 100, scale=0.5).requires_grad_(),
    )

    def theirs(x, w):
        z = x @ w.t()
        log_p, valid = (z.to(torch.promote_types(z.dtype, torch.float32)) / temperature).log_softmax(-1), y != -100
        nll = -log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
        return (
            nll.where(valid, 0),
            -(log_p.exp() * log_p).sum(-1).where(valid, 0),
            log_p[..., ids].where(valid[..., None], 0),
        )

    apply = ops.LigerFusedLinearScaledCrossEntropyFunction.apply
    assert_beside(lambda x, w: apply(x, w, y, temperature, -100, 1, True, ids), theirs, draw, draws=8)
    args = draw(0)
    nll, entropy = apply(
        **dict(_input=args["x"], weight=args["w"]), target=y, temperature=temperature, return_entropy=True
    )
    alone, chosen = apply(args["x"], args["w"], y, temperature, selected_token_ids=ids)
    assert torch.equal(alone, nll) and torch.equal(apply(args["x"], args["w"], y, temperature), nll)
    assert nll.shape == entropy.shape == shape and chosen.shape == (*shape, 4)
    assert torch.equal(chosen[..., 0], chosen[..., 2])


def test_scaled_cross_entropy_refuses():
    given, fn = (randn(4, 8), randn(20, 8), labels(4, 20)), ops.LigerFusedLinearScaledCrossEntropyFunction.apply
    for wrong in (torch.tensor([[1]], device=DEVICE), torch.tensor([1.0], device=DEVICE)):
        with pytest.raises(ValueError, match=r"selected_token_ids must be integers of shape \(K,\), got"):
            fn(*given, selected_token_ids=wrong)
    for call in (fn, lambda *args, **how: ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply(*args, None, **how)):
        with pytest.raises(ValueError, match="temperature must be positive, got 0"):
            call(*given, temperature=0.0)


@pytest.mark.parametrize("V", [65, 4099])
def test_log_probabilities_are_not_positive_nor_entropies_negative(V):
    """Of the likeliest class, from uncertain to certain; V is no multiple of a block."""
    for scale in (0.0, 1.0, 8.0, 80.0, 1000.0):
        x = randn(12, 16, dtype=torch.bfloat16, scale=scale).requires_grad_()
        w = randn(V, 16, dtype=torch.bfloat16, seed=1)
        logits = x.detach() @ w.t()
        y = logits.float().argmax(-1)
        logp, entropy = ops.linear_logprobs(x, w, y, outputs=("entropy",))
        assert torch.autograd.grad((logp + entropy).sum(), x)[0].isfinite().all()
        of_chunks = ops.linear_logprobs(x, w, y, outputs=("entropy",), chunk_rows=5, compact=True)
        scaled = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, y, 0.7, return_entropy=True)
        losses = ops.linear_cross_entropy(x, w, y, reduction="none", chunk_rows=5)
        of_logits = ops.cross_entropy(logits, y, reduction="none")
        selected = fused_selective_log_softmax(logits.view(2, 6, V), y.view(2, 6)[:, :-1])
        for t in (-logp, entropy, -of_chunks[0], of_chunks[1], *scaled, losses, of_logits, -selected):
            assert t.isfinite().all() and (t >= 0).all()


@pytest.mark.parametrize("top, others", [(22.0, 0.0), (60.0, 0.0), (87.0, 0.0), (300.0, 0.0), (3.0, -1e30)])
def test_entropies_of_a_class_that_comes_late(top, others):
    """The largest logit by far is beyond the first block, by whose largest sums are counted."""
    V = 9001
    w = torch.full((V, 1), others, device=DEVICE)
    w[-2:] = top
    w[-1] -= 1
    x, y = torch.ones(2, 1, device=DEVICE, requires_grad=True), torch.tensor([V - 1, 0], device=DEVICE)
    entropy = ops.linear_logprobs(x, w, y, outputs=("entropy",))[1]
    a = x.detach().double().requires_grad_()
    log_p = (a @ w.double().t()).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-6, atol=0)
    dx, da = torch.autograd.grad(entropy.sum(), x)[0], torch.autograd.grad(expected.sum(), a)[0]
    torch.testing.assert_close(dx.double(), da, rtol=1e-4, atol=1e-6)
