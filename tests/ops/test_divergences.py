"""What cases cannot say of the divergences: probabilities that are 0, equal distributions,
nothing left to average, gradients in place."""

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside
from quick import further

from liger_kernel import nn as liger
from liger_kernel.ops import OPS, jsd, kl_div, logit_divergence, tvd
from liger_kernel.ops.losses.divergence.distillation import LOGIT_KINDS, Distillation, row_kernel
from liger_kernel.ops.losses.divergence.logit_divergence import reference as of_logits

INF = float("inf")
kinds = pytest.mark.parametrize("kind", LOGIT_KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])


def draw(*shape, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(reduction, log_target):
    x, y = (draw(5, 3, 17, dtype=torch.float64, seed=seed).log_softmax(-1) for seed in (0, 1))
    y, how = y if log_target else y.exp(), dict(reduction=reduction, log_target=log_target)
    (a, b), (c, d) = leaves(x, y), leaves(x, y)
    ours, theirs = kl_div(a, b, **how), F.kl_div(c, d, **how)
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close((a.grad, b.grad), (c.grad, d.grad))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_is_made_of_kls(beta):
    q, p = (draw(5, 17, dtype=torch.float64, seed=seed).log_softmax(-1) for seed in (0, 1))
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()

    def kl(a, b):
        return F.kl_div(b, a, reduction="batchmean", log_target=True)

    expected = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
    torch.testing.assert_close(jsd(q, p, beta=beta), expected)
    torch.testing.assert_close(logit_divergence(2 * q + 3, 2 * p, beta=beta, temperature=2.0), expected)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@dtypes
def test_what_both_exclude_counts_nothing(beta, dtype):
    """Columns of probability 0 in both, as vocabularies padded with -inf have."""
    q, p = draw(4, 9, dtype=dtype).log_softmax(-1), draw(4, 9, dtype=dtype, seed=1).log_softmax(-1)
    padded = leaves(*(F.pad(t, (0, 3), value=-INF) for t in (q, p)))
    for fn, of in ((jsd, dict(beta=beta)), (logit_divergence, dict(beta=beta)), (logit_divergence, dict(kind="tvd"))):
        plain, wide = leaves(q, p), leaves(*padded)
        loss, wide_loss = fn(*plain, **of), fn(*wide, **of)
        torch.testing.assert_close(wide_loss, loss)
        loss.backward()
        wide_loss.backward()
        for a, b in zip(wide, plain):
            torch.testing.assert_close(a.grad, F.pad(b.grad, (0, 3)))


@dtypes
def test_a_teacher_of_zeros_and_ones(dtype):
    """p = 0 counts nothing, also against q = 0; the student's gradient is -p."""
    x = torch.tensor([[-INF, -1.0, -2.0], [-0.5, -INF, -3.0]], dtype=dtype, device=DEVICE).requires_grad_()
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=dtype, device=DEVICE)
    for target, log_target in ((p, False), (p.log(), True)):
        loss = kl_div(x, target, reduction="sum", log_target=log_target)
        assert loss.item() == 4.0
        assert torch.autograd.grad(loss, x)[0].equal(-p)


@dtypes
def test_tvd_of_equals_has_no_gradient(dtype):
    p, q = leaves(*(2 * [draw(4, 9, dtype=dtype).softmax(-1)]))
    loss = tvd(p, q)
    loss.backward()
    assert loss == 0 and not p.grad.any() and not q.grad.any()


@kinds
@dtypes
def test_equal_logits_have_no_divergence(kind, dtype):
    """Also when they are shifted, which softmax does not see."""
    s = draw(4, 300, dtype=dtype)
    loss = logit_divergence(s, s.clone(), kind=kind)
    assert abs(loss.item()) < torch.finfo(dtype).eps


def test_jsd_where_the_mixture_underflows():
    """The smallest probabilities of one, none of the other: finite, and next to nothing."""
    rows = [[-103.0, -87.4, -87.0, 0.0]], [[-INF, -INF, -INF, 0.0]]
    x, y = leaves(*(torch.tensor(row, device=DEVICE) for row in rows))
    loss = jsd(x, y)
    loss.backward()
    assert 0 <= loss < 1e-30 and x.grad.abs().max() < 1e-30 and y.grad.abs().max() < 1e-30


@kinds
def test_large_logits_are_as_good_as_small_ones(kind):
    s, t = leaves(draw(6, 50) + 1e4, draw(6, 50, seed=1) - 1e4)
    how = dict(kind=kind, temperature=0.5, reduction="none")
    assert_beside(logit_divergence, of_logits, dict(student=s, teacher=t, **how))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("name", ["jsd", "tvd", "logit_divergence", "kl_div"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_nothing_left_to_average(name, dtype, reduction):
    """Every row is ignored, or there is none: 0, and no gradient."""
    if reduction == "mean" and name not in ("tvd", "kl_div"):
        return
    for implementation in (OPS[name].fn, OPS[name].reference):
        for rows in (0,) if name == "kl_div" else (0, 3):
            x, y = leaves(*(draw(rows, 8, dtype=dtype, seed=s).log_softmax(-1) for s in (0, 1)))
            labels = () if name == "kl_div" else (torch.full((rows,), -100, device=DEVICE),)
            loss = implementation(x, y, *labels, reduction=reduction)
            loss.sum().backward()
            assert not loss.any() and not x.grad.any() and not y.grad.any()


@pytest.mark.parametrize("fn", [jsd, kl_div])
def test_nan_reaches_every_gradient(fn):
    """Also through a maximum, in which NaN and a number are the number."""
    target = draw(3, 8).softmax(-1) if fn is kl_div else draw(3, 8).log_softmax(-1)
    target[1, 2] = float("nan")
    x, y = leaves(draw(3, 8, seed=1).log_softmax(-1), target)
    loss = fn(x, y)
    loss.backward()
    assert loss.isnan() and y.grad[1, 2].isnan() and (fn is kl_div or x.grad[1, 2].isnan())
    assert x.grad.isnan().sum() <= 1 and y.grad.isnan().sum() == 1


@pytest.mark.parametrize("fn", [jsd, tvd, logit_divergence])
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_ignored_rows_are_not_read(fn, reduction):
    x, y = draw(3, 8).log_softmax(-1), draw(3, 8, seed=1).log_softmax(-1)
    x[1] = float("nan")
    x, y = leaves(x, y)
    loss = fn(x, y, torch.tensor([5, 7, 5], device=DEVICE), ignore_index=7, reduction=reduction)
    loss.sum().backward()
    assert all(t.isfinite().all() for t in (loss, x.grad, y.grad)) and not x.grad[1].any() and not y.grad[1].any()


@pytest.mark.parametrize("scaled", [kl_div, jsd, tvd, *further(logit_divergence)])
def test_fp16_gradients_of_a_mean_do_not_underflow(scaled):
    """A loss scaler multiplies what a mean over many would have made 0."""
    x, y = leaves(*(draw(600, 40, dtype=torch.float16, seed=seed).log_softmax(-1) for seed in (0, 1)))
    if scaled is tvd:
        x, y = leaves(x.exp() / 500, y.exp() / 500)
    mean = dict(reduction="mean")
    of = {kl_div: mean | dict(log_target=True), tvd: mean}.get(scaled, {})
    (65536 * scaled(x, y, **of)).backward()
    a, b = leaves(x.double(), y.double())
    (65536 * scaled(a, b, **of)).backward()
    for ours, true in ((x.grad, a.grad), (y.grad, b.grad)):
        torch.testing.assert_close(ours, true.half())


@kinds
@dtypes
@pytest.mark.parametrize("in_place", [False, True])
def test_row_kernel(kind, dtype, in_place):
    """As fused losses call it: on views of a chunk, the gradient over the logits."""
    s, t = draw(9, 300, dtype=dtype), draw(9, 300, dtype=dtype, seed=1)
    labels = torch.arange(9, device=DEVICE)
    g, norm = draw(9, dtype=dtype, seed=2), torch.tensor(7.0, dtype=dtype, device=DEVICE)
    x = s.clone().requires_grad_()
    expected = of_logits(x, t, labels, kind=kind, temperature=1.7, ignore_index=4, reduction="none")
    (expected * g / norm).sum().backward()
    loss, buffer = s.new_zeros(9), torch.empty(9, 301, dtype=dtype, device=DEVICE)[:, :300]
    z = buffer.copy_(s)
    dz = z if in_place else torch.empty_like(s)
    rows = slice(2, 9)
    d = Distillation(kind, temperature=1.7, ignore_index=4)
    row_kernel(z[rows], t[rows], labels[rows], d, soft=loss[rows], dz=dz[rows], norm=norm, g=g[rows])
    torch.testing.assert_close(loss[rows], expected[rows])
    torch.testing.assert_close(dz[rows], x.grad[rows])
    assert loss[4] == 0 and not dz[4].any() and dz[3].any()


def test_modules_and_functions():
    q, p = (draw(6, 11, seed=seed).log_softmax(-1) for seed in (0, 1))
    labels = torch.tensor([1, -1, 2, 3, -1, 5], device=DEVICE)
    kept = labels != -1
    for ours in (liger.LigerJSD(0.2, -1)(q, p, labels), liger.liger_jsd(q, p, labels, 0.2, -1)):
        torch.testing.assert_close(ours, jsd(q[kept], p[kept], beta=0.2))
    each = F.kl_div(q, p.exp(), reduction="none")
    for reduction, expected in dict(none=each, sum=each.sum(), mean=each.mean(), batchmean=each.sum() / 6).items():
        torch.testing.assert_close(liger.LigerKLDIVLoss(reduction=reduction)(q, p.exp()), expected)
        torch.testing.assert_close(liger.LigerKLDIVLoss(1e-10, None, None, reduction, True)(q, p), expected)
        torch.testing.assert_close(liger.liger_kl_div(q, p.exp(), reduction=reduction), expected)
    torch.testing.assert_close(liger.liger_kl_div(q, p.exp(), size_average=False), each.sum())
    torch.testing.assert_close(liger.liger_kl_div(q, p.exp(), reduce=False), each)
    half = (q.exp() - p.exp()).abs() / 2
    torch.testing.assert_close(liger.LigerTVDLoss(ignore_index=-1)(q.exp(), p.exp(), labels), half[kept].sum() / 4)
    torch.testing.assert_close(liger.liger_tvd(q.exp(), p.exp(), labels, ignore_index=-1), half[kept].mean())
    torch.testing.assert_close(liger.LigerTVDLoss("none")(q.exp(), p.exp()), half)
