"""What a case cannot say of the cross entropy of given logits: rows whose first block does not
tell how large the rest is."""

import pytest
import torch
import torch.nn.functional as F

from liger_kernel.ops import OPS, cross_entropy, linear_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
inf = float("inf")


@pytest.mark.parametrize("entropy", [False, True])
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
def test_any_order_of_magnitudes(first, rest, last, entropy):
    z = torch.full((3, 20_000), rest, device=DEVICE)
    z[:, :9000] = first
    z[:, -1] = last
    target = torch.tensor([int(z[0].argmax()), 19_999, -100], device=DEVICE)
    logits = z.clone().requires_grad_()
    expected = F.cross_entropy(logits, target, reduction="none")
    if entropy:  # the same rows through a head of one column
        w = z[0][:, None].contiguous()
        x = torch.ones(3, 1, device=DEVICE)
        logp, found = linear_logprobs(x, w.clamp(min=-1e30), target, outputs=("entropy",))
        p = z[0].softmax(0)
        torch.testing.assert_close(-logp.clamp(min=-1e3), expected.clamp(max=1e3))
        torch.testing.assert_close(found[0], torch.special.entr(p).sum(), rtol=1e-5, atol=1e-6)
        return
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


@pytest.mark.parametrize("implementation", ["fn", "reference"])
@pytest.mark.parametrize("name", ["cross_entropy", "vocab_parallel_cross_entropy"])
def test_a_label_out_of_range_makes_the_gradient_nan(name, implementation):
    logits = torch.randn(5, 9, device=DEVICE, requires_grad=True)
    target = torch.tensor([3, 9, -100, -1, 0], device=DEVICE)
    loss = getattr(OPS[name], implementation)(logits, target, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False, True, False]
    assert torch.equal(logits.grad.isnan(), loss.isnan()[:, None].expand(5, 9))
    assert not logits.grad[2].any()
