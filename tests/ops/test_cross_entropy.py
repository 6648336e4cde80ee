"""What a case cannot say of the cross entropy of given logits: rows whose first block does not
tell how large the rest is."""

import functools

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE

from liger_kernel.ops import OPS, cross_entropy, linear_logprobs
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.losses.cross_entropy_rows import Loss, RowLosses, row_kernel

inf = float("inf")


@pytest.mark.parametrize(
    "first, rest, last",
    [
        (0.0, 0.0, 200.0),  # exp of what follows overflows
        (300.0, 0.0, 0.0),  # ... vanishes
        (-inf, 1.0, 2.0),  # the first block has no class that is possible
        (-inf, -inf, 3.0),
        (-inf, -200.0, -200.0),  # exp of all vanishes
        (-inf, 150.0, -inf),
    ],
)
def test_any_order_of_magnitudes(first, rest, last):
    z = torch.full((3, 20_000), rest, device=DEVICE)
    z[:, :9000] = first
    z[:, -1] = last
    target = torch.tensor([int(z[0].argmax()), 19_999, -100], device=DEVICE)
    logits = z.clone().requires_grad_()
    expected = F.cross_entropy(logits, target, reduction="none")

    (grad,) = torch.autograd.grad(expected[:1].sum(), logits)
    ours = cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours[:1].sum(), logits)[0], grad)


@pytest.mark.parametrize("dtype, value", [(torch.float32, 2e19), (torch.float32, 1e38), (torch.float64, 1e200)])
def test_logits_whose_square_overflows(dtype, value):
    """In fp64, PyTorch's code runs in the place of the kernels."""
    z = torch.zeros(2, 5, dtype=dtype, device=DEVICE)
    z[:, 2] = value
    target, one = torch.tensor([2, -100], device=DEVICE), torch.ones(2, 1, dtype=dtype, device=DEVICE)
    of_head = lambda fn: lambda z: fn(one, z[0][:, None], target)
    losses = {
        "linear_cross_entropy": of_head(OPS["linear_cross_entropy"].fn),
        "linear_logprobs": of_head(linear_logprobs),
    }
    for name in ("cross_entropy", "vocab_parallel_cross_entropy"):
        losses[name] = lambda z, op=OPS[name]: op.fn(z, target)
        losses[f"{name}, reference"] = lambda z, op=OPS[name]: op.reference(z, target)
    for name, loss in losses.items():
        logits = z.clone().requires_grad_()
        found = loss(logits)
        assert not found.any() and not torch.autograd.grad(found.sum(), logits)[0].any(), name


of_logits, of_head = lambda fn, x, w, y, **how: fn(x @ w.t(), y, **how), lambda fn, *xwy, **how: fn(*xwy, **how)
OF_HEADS = {
    **dict.fromkeys(("cross_entropy", "vocab_parallel_cross_entropy"), of_logits),
    **dict.fromkeys(("linear_cross_entropy", "vocab_parallel_linear_cross_entropy"), of_head),
    "linear_divergence": lambda fn, x, w, y, **how: fn(
        x, w, target=y, teacher_logits=(x @ w.t()).detach(), weight_hard=0.5, **how
    ),
}


@pytest.mark.parametrize("implementation", ["fn", "reference"])
@pytest.mark.parametrize("name", OF_HEADS)
def test_a_label_out_of_range_makes_loss_and_gradient_nan(name, implementation):
    x, w = (torch.randn(n, 4, device=DEVICE, requires_grad=True) for n in (6, 9))
    target = torch.tensor([3, 9, -100, -1, 0, 1 << 40], device=DEVICE)
    loss_of = functools.partial(OF_HEADS[name], getattr(OPS[name], implementation), x, w, target)
    loss = loss_of(reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == [False, True, False, True, False, True] and loss_of().isnan()
    assert torch.equal(dx.isnan(), loss.isnan()[:, None].expand(6, 4)) and not dx[2].any()


@pytest.mark.parametrize("scaled", [False, True])
def test_programs_that_share_a_row_may_write_over_its_logits(scaled):
    M, V = 5, 20_000
    z, target = torch.randn(M, V, device=DEVICE), torch.tensor([0, 8191, 8192, -100, V - 1], device=DEVICE)
    s = Loss(reduction="none", token_scaling=scaled)
    out, g, apart = RowLosses.empty(target, s), torch.rand(M, device=DEVICE), torch.empty_like(z)
    row_kernel(z, target, s, out=out)
    launched = []
    for dz in (apart, z):
        with _op.intercept_launches(lambda kernel, grid, *_: launched.append(grid[0])):
            row_kernel(z, target, s, dz=dz, g=g, lse=out.lse)
        row_kernel(z, target, s, dz=dz, g=g, lse=out.lse)
    assert torch.equal(z, apart) and not z[3].any()
    # unless all of them need the logit of the target
    assert min(launched) == max(launched) == (M if scaled else 5 * M)
