"""Batch invariance of operators: a row has the same bits in any batch, and without the switch it has
not."""

import os

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE

from liger_kernel import batch_invariant
from liger_kernel.ops import fused_add_rms_norm, glu, linear_logprobs, rms_norm, sink_attention
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops.attention.sink_attention import documents, later_attention
from liger_kernel.ops.losses.divergence import probabilities
from liger_kernel.ops.projections import invariant_products

pytestmark = pytest.mark.usefixtures("exact_dots")
PARTS = ((0, 1), (3, 9), (5, 36), (36, 37), (1, 37))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def differing(run, *tensors: torch.Tensor) -> int:
    """How many numbers of rows differ between a run of some rows and a run of all."""
    whole, count = run(*tensors), 0
    for a, b in PARTS:
        for part, of in zip(run(*(t[a:b] for t in tensors)), whole):
            count += int((part != of[a:b]).sum())
    return count


def products(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    w, bias, b = draw(64, 96, dtype=x.dtype), draw(64, dtype=x.dtype), draw(64, 32, dtype=x.dtype)
    x = x.clone().requires_grad_()
    y = F.linear(x, w, bias)
    y.backward(dy)
    total = dy.clone().addmm_(x.detach(), w.t(), alpha=0.5)
    out = torch.mm(total, b, out=x.new_empty(0))
    scaled = torch.addmm(out.new_empty(()), y.detach(), b, beta=0, alpha=2.0)
    batch = torch.bmm(x.detach()[:, None], w.t().expand(len(x), -1, -1))[:, 0]
    apart = torch.cat((total, total), 1)[:, :64].addmm_(x.detach(), w.t())
    into = torch.cat((total, total), 1)[:, :64]
    torch.addmm(out.new_empty(()), x.detach(), w.t(), beta=0, out=into)
    of_vector = torch.addmv(total[:, 0], x.detach(), w[0], beta=0.5, alpha=2.0)
    vector = [x.detach() @ w[0], of_vector, total[:, 1].clone().addmv_(x.detach(), w[1])]
    return [y.detach(), x.grad, total, out, scaled, batch, apart, into, *vector]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype):
    torch.manual_seed(0)
    x, dy = draw(37, 96, dtype=dtype), draw(37, 64, dtype=dtype)
    stock = products(x, dy)
    before = differing(products, x, dy)
    with batch_invariant(), batch_invariant():
        assert differing(products, x, dy) == 0
        for ours, theirs in zip(products(x, dy), stock):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-4 if dtype == torch.bfloat16 else 1e-4)
    assert dtype != torch.float32 or DEVICE != "cpu" or before > 0
    assert not is_invariant() and "CUBLASLT_WORKSPACE_SIZE" not in os.environ
    assert all(map(torch.equal, products(x, dy), stock))  # PyTorch's operators are back


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU chooses by itself")
@pytest.mark.parametrize("most, dtype", [(16, torch.float32), (16, torch.bfloat16), (64, torch.float32)])
def test_products_of_the_vendor_in_pieces(monkeypatch, most, dtype):
    """As a GPU computes them: pieces with so many rows, and few rows filled up; or all rows at once."""
    monkeypatch.setattr(invariant_products, "_way", lambda *args: "vendor")
    tried = invariant_products._tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(invariant_products, "_known", {})
    monkeypatch.setattr(invariant_products, "_tried", lambda *args: tried(*args) in (True, False))  # rows apart, too
    monkeypatch.setattr(invariant_products, "_most", lambda N: most)
    monkeypatch.setattr(invariant_products, "_LEAST", 8)
    x, dy = draw(37, 96, dtype=dtype), draw(37, 64, dtype=dtype)
    stock = products(x, dy)
    with batch_invariant():
        for ours, theirs in zip(products(x, dy), stock):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-4 if dtype == torch.bfloat16 else 1e-4)


def scaled_mm(q: torch.Tensor) -> torch.Tensor:
    a, one = torch.zeros(16, 16, device=DEVICE).to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    return torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call, what",
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), "attention must sum in an order of its"),
        (scaled_mm, "a product in FP8 must sum in an order of its"),
        (lambda q: torch.native_dropout(q, 0.5, True), "dropout must be off"),
    ],
)
def test_operators_of_pytorch_are_refused(call, what):
    q = draw(1, 2, 5, 8)
    with batch_invariant(), pytest.raises(ValueError, match=f"batch_invariant: {what}"):
        call(q)
    call(q)


def attention(heads: list[torch.Tensor], window: int | None, **keys: torch.Tensor) -> list[torch.Tensor]:
    q, k, v, do = (t.clone().requires_grad_() for t in heads)
    o = sink_attention(q, k, v, torch.full((4,), -1e30, device=DEVICE), window=window, **keys)
    o.backward(do.detach())
    return [t.detach() for t in (o, q.grad, k.grad, v.grad)]


def attention_differs(window: int | None, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    lengths, T = [5, 33, 18], 40
    rows = [[draw(1, h, n, 16, dtype=dtype) for h in (4, 2, 2, 4)] for n in lengths]
    alone, count = [attention(row, window) for row in rows], 0
    first = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])[None].to(DEVICE)
    packed = attention([torch.cat(each, 2) for each in zip(*rows)], window, first=first)
    for expected, parts in zip(alone, zip(*(t.split(lengths, 2) for t in packed))):
        count += sum(int((a != b).sum()) for a, b in zip(expected, parts))
    for left in (False, True):
        places = [slice(T - n, T) if left else slice(0, n) for n in lengths]
        padded = [draw(len(rows), h, T, 16, dtype=dtype) for h in (4, 2, 2, 4)]
        padded[3].zero_()  # nobody differentiates padding
        valid = torch.zeros(len(rows), T, dtype=torch.bool, device=DEVICE)
        for i, (row, place) in enumerate(zip(rows, places)):
            valid[i, place] = True
            for t, of in zip(padded, row):
                t[i, :, place] = of[0]
        found = attention(padded, window, valid=valid)
        for i, (expected, place) in enumerate(zip(alone, places)):
            count += sum(int((a[0] != b[i, :, place]).sum()) for a, b in zip(expected, found))
    return count


@pytest.mark.parametrize("window, dtype", [(None, torch.bfloat16), (19, torch.float32)])
def test_attention(window, dtype):
    assert DEVICE != "cpu" or attention_differs(window, dtype) > 0  # tiles of a GPU are larger than these rows
    with batch_invariant():
        assert attention_differs(window, dtype) == 0


@pytest.mark.parametrize("window", [None, 19])
def test_attention_of_later_tokens(window):
    """As a cache has them: those of the last tokens alone."""
    torch.manual_seed(0)
    q, k, v = (draw(2, h, 70, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    sinks, valid = torch.full((4,), -1e30, device=DEVICE), torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    valid[1, :3] = False
    with batch_invariant():
        whole = sink_attention(q, k, v, sinks, window=window, valid=valid)
        made = documents(2, 70, q.device, None, valid)
        for at, count in ((0, 5), (33, 1), (60, 7)):
            some = q[:, :, at : at + count]
            found = later_attention(some, k, v, sinks, window, made, valid, torch.tensor(at, device=DEVICE), 0.25)
            assert torch.equal(found, whole[:, :, at : at + count])


def test_log_probabilities():
    """In chunks of any size, and for whatever gradients."""
    torch.manual_seed(0)
    x, w, y = draw(37, 64), draw(160, 64), torch.randint(0, 160, (37,), device=DEVICE)

    def run(x, y, g, frozen=True, **how):
        x = x.clone().requires_grad_()
        found = linear_logprobs(x, w.clone().requires_grad_(not frozen), y, outputs=("entropy",), **how)
        (found[0] * g).sum().backward()
        return *(t.detach() for t in found), x.grad

    with batch_invariant():
        g = draw(37)
        expected = run(x, y, g)
        assert differing(run, x, y, g) == 0
        for how in (dict(chunk_rows=5), dict(frozen=False), dict(frozen=False, chunk_rows=5)):
            logp, entropy, dx = run(x, y, g, **how)
            assert torch.equal(logp, expected[0]) and torch.equal(entropy, expected[1])
            torch.testing.assert_close(dx, expected[2])


def launches(run, rows: int) -> list:
    """What kernels are launched with, for so many rows, but for numbers that count rows."""
    found: dict = {}

    def record(kernel, grid, args, meta):
        numbers = [a for a in args if isinstance(a, int) and a not in (rows, rows * 4096)]
        found[kernel.fn.__name__] = (dict(meta), numbers)

    with _op.intercept_launches(record):
        run(rows)
    return sorted(found.items(), key=lambda item: item[0])


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


KERNELS = {
    "rms_norm": lambda M: rms_norm(_meta(M, 4096), _meta(4096)),
    "fused_add_rms_norm": lambda M: fused_add_rms_norm(_meta(M, 4096), _meta(M, 4096), _meta(4096)),
    "glu": lambda M: glu(_meta(M, 4096), _meta(M, 4096)),
    "divergence": lambda M: probabilities._launch(
        "sums", _meta(M, 131072), _meta(M, 131072), None, None, None, "jsd", 0.5, 1e-9, -100, True, False
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_tiles_do_not_depend_on_the_number_of_rows(name):
    with batch_invariant():
        few = launches(KERNELS[name], 3)
        assert few and few == launches(KERNELS[name], 4099)
