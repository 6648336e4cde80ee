"""Softmax, sparsemax and DyT: extreme values, hard rows and shapes that a case cannot say."""

import pytest
import torch
from devices import DEVICE

from liger_kernel.extra.dyt import reference as dyt_reference
from liger_kernel.extra.sparsemax import reference as sparsemax_reference
from liger_kernel.nn import LigerDyT, LigerSoftmax, LigerSparsemax
from liger_kernel.ops import dyt, softmax, sparsemax
from liger_kernel.testing import assert_as_accurate, like, run
from liger_kernel.transformers import functional

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
LENGTHS = (40, 40000)  # in registers, and in sweeps


def rows(N: int) -> torch.Tensor:
    """Largest values everywhere, at the end, far above and below the first block, behind -inf."""
    torch.manual_seed(0)
    x = torch.randn(8, N, dtype=torch.float64)
    x[1, N - 3 :] += 30
    x[2, N - 2] = 500
    x[3, : N // 2] -= 500
    x[4, : N - 5] = -INF
    x[5, : N - 5] = -INF
    x[5, N - 5 :] -= 300
    x[6] = 7
    x[7, : N - 3] = 300
    return x.float().to(DEVICE)


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize(
    "op, reference", [(softmax, torch.softmax), (sparsemax, sparsemax_reference)], ids=["softmax", "sparsemax"]
)
def test_uneven_rows(op, reference, N):
    for x in rows(N).requires_grad_().split(1):  # one by one: an error is relative to the largest value
        ours, pytorch, truth = (
            run(lambda x, f=f: f(x, dim=-1), like({"x": x.detach().requires_grad_()}, d))
            for f, d in ((op, torch.float32), (reference, torch.float32), (reference, torch.float64))
        )
        assert_as_accurate({"out0": ours["out0"]}, {"out0": pytorch["out0"]}, {"out0": truth["out0"]})
        off = lambda found, truth=truth: (found["dx"] - truth["dx"]).abs().max()
        assert off(ours) <= 2 * off(pytorch) + EPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uneven_rows_of_which_a_part_is_held(dtype):
    far = torch.randn(4, 65552, device=DEVICE).to(dtype)
    far[0, :-5], far[1] = torch.finfo(dtype).min, torch.finfo(dtype).min  # masked
    far[2, :40000], far[3] = 0.9 * torch.finfo(dtype).max, far[3] + 20000
    for x in torch.cat((rows(65552).to(dtype), far)).split(1):
        assert_as_accurate(*({"y": y} for y in (softmax(x), torch.softmax(x, -1), torch.softmax(x.double(), -1))))


@pytest.mark.parametrize("N, dtype", [*((N, torch.float32) for N in LENGTHS), (65552, torch.bfloat16)])
@pytest.mark.parametrize("op", [softmax, sparsemax])
def test_rows_without_an_answer_are_nan_and_their_neighbours_are_not(op, N, dtype):
    x = torch.randn(6, N, device=DEVICE, dtype=dtype)
    x[0], x[1, 5], x[2, N - 5], x[3, 5], x[4, N - 5] = -INF, NAN, NAN, INF, INF
    y = op(x)
    assert y[:5].isnan().all() and y[5].isfinite().all()


@pytest.mark.parametrize("N", LENGTHS)
def test_sparsemax_of_a_row_that_loses_few_at_a_time(N):
    """Values that fall off ever more slowly take Newton many steps."""
    x = (-(0.9 ** torch.arange(N, dtype=torch.float64).flip(0)))[None].float().to(DEVICE)
    y, truth = sparsemax(x), sparsemax_reference(x.double())
    assert torch.equal(y > 0, truth > 0)
    off = lambda found: (found - truth).abs().max()
    assert off(y) <= 2 * off(sparsemax_reference(x)) + EPS * truth.max()


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_dyt_takes_alpha_of_any_shape(shape):
    torch.manual_seed(0)
    shapes = {"x": (6, 40), "alpha": shape, "gamma": (40,), "beta": (40,)}
    draws = [{k: torch.randn(v, device=DEVICE, requires_grad=True) for k, v in shapes.items()} for _ in range(8)]
    pairs = [(run(dyt_reference, like(d)), run(dyt_reference, like(d, torch.float64))) for d in draws]
    assert_as_accurate(run(dyt, like(draws[0])), *pairs[0], *pairs[1:])


def test_modules_and_functions():
    x = torch.randn(3, 5, 8, device=DEVICE)
    assert torch.equal(LigerSoftmax()(x), functional.liger_softmax(x))
    assert torch.equal(LigerSparsemax(1)(x), functional.liger_sparsemax(x, 1))
    assert not torch.equal(LigerSparsemax()(x), functional.liger_sparsemax(x, 1))
    m = LigerDyT(8, init_alpha=0.25).to(DEVICE)
    assert {k: tuple(v.shape) for k, v in m.state_dict().items()} == {"alpha": (1,), "gamma": (8,), "beta": (8,)}
    torch.testing.assert_close(m(x), torch.tanh(0.25 * x))
    assert torch.equal(m(x), functional.liger_dyt(x, m.alpha, m.gamma, m.beta))
    assert LigerDyT(8, beta=False).beta is None
