"""Casts to FP8, and products with frozen weights that are stored in it."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, drawn, needs_kernels
from watching import calls_of

from liger_kernel.ops.projections import adapted, float8, packed_weights  # noqa: F401  # has launchers
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.float8 import E4, E5, Float8LinearFunction, cast, reference
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.mlp import adapted_mlp
from liger_kernel.ops.projections.weights import dense
from liger_kernel.testing import assert_as_accurate

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8"
)
RECIPES = {"tensor": False, "row": True}


def stored(N: int, K: int, per_row: bool, seed: int = 0, keep: bool = True) -> float8.Float8:
    w, scale = cast(drawn(N, K, dtype=torch.float32, seed=seed) * K**-0.5, E4, per_row)
    return float8.float8(w, scale, float8.transposed(w) if keep else None)


def rounded(x: torch.Tensor, dtype: torch.dtype, per_row: bool) -> torch.Tensor:
    """x as FP8 has it, in fp64."""
    q, scale = reference(x, None, dtype, per_row)
    return q.double() * scale.double()


@needs_kernels
@pytest.mark.parametrize(
    "dtype, per_row, by", [(E4, False, False), (E5, False, False), (E4, True, False), (E4, True, True)]
)
@pytest.mark.parametrize(
    "shape", [(5, 48), (17, 2100), (2, 17000)], ids=str
)  # a row, two blocks of one, more than a program holds
def test_casts_as_pytorch_does(shape, dtype, per_row, by):
    for x in (drawn(*shape), drawn(*shape, dtype=torch.float32) * 1e-6, drawn(shape[0], shape[1] + 16)[:, : shape[1]]):
        x[1] = 0
        more = drawn(shape[1], dtype=torch.float32, seed=1).abs() if by else None
        q, scale = cast(x, dtype, per_row, more)
        expected, expected_scale = reference(x, more, dtype, per_row)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, expected_scale)
        assert q.is_contiguous() and scale.shape == ((shape[0], 1) if per_row else ())


@needs_kernels
@pytest.mark.parametrize("dtype, per_row", [(E4, False), (E5, False), (E4, True)])
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale(dtype, per_row):
    x = drawn(4, 32)
    clean = cast(x.where(x.abs() < 1, 0.5), dtype, per_row)[1]
    x = x.where(x.abs() < 1, torch.tensor(float("inf"), device=DEVICE))
    x[0, 0], x[1, 1] = float("nan"), -float("inf")
    q, scale = cast(x, dtype, per_row)
    assert torch.equal(q.float().isnan(), ~x.isfinite()) and scale.isfinite().all() and (scale <= clean).all()
    q, scale = cast(torch.zeros(3, 16, device=DEVICE), dtype, per_row)
    assert not q.float().any() and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "made"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_rounded_values(recipe, kept):
    per_row = RECIPES[recipe]
    weight = stored(48, 80, per_row, keep=kept)
    x, dy, bias = drawn(9, 80, seed=1), drawn(9, 48, seed=2), drawn(48, seed=3)
    w = weight.w.double() * weight.scale.double()
    if per_row:
        q, scale = reference(dy, weight.scale.view(-1), E4, True)
        seen = q.double() * scale.double() / weight.scale.double().t()
    else:
        seen = rounded(dy, E5, False)
    truth = {"y": rounded(x, E4, per_row) @ w.t() + bias.double(), "dx": seen @ w}
    theirs = {"y": (truth["y"] - bias.double()).to(x.dtype) + bias, "dx": truth["dx"].to(x.dtype)}

    leaf, trained = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = Float8LinearFunction.apply(leaf.view(3, 3, 80), trained, weight.w, weight.scale, weight.w_t)
    y.backward(dy.view_as(y))
    assert_as_accurate({"y": y.detach().view(9, 48), "dx": leaf.grad}, theirs, truth)
    torch.testing.assert_close(trained.grad, dy.sum(0))


def casts_of(monkeypatch):
    """Shapes and dtypes of all casts from now on."""
    calls = calls_of(monkeypatch, float8, "cast")
    return lambda: [(tuple(args[0].shape), args[1]) for args, _ in calls]


def adapter(N: int, K: int, seed: int) -> Adapter:
    draw = lambda *shape: drawn(*shape, dtype=torch.float32, seed=seed).mul_(0.1).requires_grad_()
    return Adapter(draw(4, K), draw(N, 4), 0.5)


def same_by_dense(p: Projection) -> Projection:
    wide = lambda t: t.detach().double().requires_grad_()
    adapters = tuple(Adapter(wide(a.a), wide(a.b), a.scale) for a in p.adapters)
    return Projection(dense(p.weight.dense(torch.float64)), p.bias if p.bias is None else p.bias.double(), adapters)


def gradients_of(ys, x, projections):
    ys = ys if isinstance(ys, tuple) else (ys,)
    sum((y * drawn(*y.shape, dtype=y.dtype, seed=i + 5)).sum() for i, y in enumerate(ys)).backward()
    adapters = [t for p in projections for a in p.adapters for t in (a.a, a.b)]
    found = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"dx": x.grad}
    return found | {f"d{i}": t.grad for i, t in enumerate(adapters)}


def assert_close_as_fp8_is(found, truth):
    """Each within the errors of up to four casts, two of them to e5m2: 12 % of its RMS."""
    for name, t in truth.items():
        error = (found[name].double() - t).square().mean().sqrt() / t.square().mean().sqrt()
        assert error < 0.12, (name, error.item())


@needs_kernels
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_cast_serves_all_projections(recipe, monkeypatch):
    per_row = RECIPES[recipe]
    sizes = (64, 32, 48)
    some = [
        Projection(stored(N, 96, per_row, i), drawn(N, seed=i) if i else None, (adapter(N, 96, i),) * (i < 2))
        for i, N in enumerate(sizes)
    ]
    x, counted = drawn(2, 20, 96, seed=9).requires_grad_(), casts_of(monkeypatch)
    found = gradients_of(linears(x, some), x, some)
    backward = E4 if per_row else E5
    assert counted() == [((40, 96), E4), *(((40, N), backward) for N in sizes)]
    exact, wide = [same_by_dense(p) for p in some], x.detach().double().requires_grad_()
    assert_close_as_fp8_is(found, gradients_of(linears(wide, exact), wide, exact))


@needs_kernels
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_casts_what_it_multiplies_once(recipe, recompute, monkeypatch):
    per_row = RECIPES[recipe]
    sizes = (64, 32), (64, 32), (32, 64)
    some = [Projection(stored(*s, per_row, i), None, (adapter(*s, i),)) for i, s in enumerate(sizes)]
    x, counted = drawn(24, 32, seed=9).requires_grad_(), casts_of(monkeypatch)
    found = gradients_of(adapted_mlp(x, some[:2], some[2], recompute=recompute), x, some)
    backward = E4 if per_row else E5
    forwards = [((24, columns), E4) for columns in (32, 64, *[32] * recompute)]
    assert counted() == forwards + [((24, columns), backward) for columns in (32, 64, 64)]
    exact, wide = [same_by_dense(p) for p in some], x.detach().double().requires_grad_()
    linear = lambda x, p: linears(x, [p])[0]
    y = linear(torch.nn.functional.silu(linear(wide, exact[0])) * linear(wide, exact[1]), exact[2])
    assert_close_as_fp8_is(found, gradients_of(y, wide, exact))


def test_no_rows():
    weight, x = stored(32, 16, False), drawn(0, 16).requires_grad_()
    y = Float8LinearFunction.apply(x, None, weight.w, weight.scale, weight.w_t)
    y.sum().backward()
    assert y.shape == (0, 32) and x.grad.shape == (0, 16)


def test_a_gpu_without_fp8_raises(monkeypatch):
    monkeypatch.setattr(float8, "_capability", lambda index: (8, 0))
    said = "FP8 needs an NVIDIA GPU of compute capability 8.9 or newer, got 8.0"
    assert float8.lacking(torch.device("cuda", 0)) == said
    monkeypatch.setattr(float8, "lacking", lambda device: "FP8 needs more")
    with pytest.raises(ValueError, match="FP8 needs more"):
        cast(drawn(4, 16), E4, False)


@needs_kernels
def test_launchers_have_true_schemas_and_fakes():
    x, by = torch.randn(3, 32, device=DEVICE, dtype=torch.bfloat16), torch.rand(32, device=DEVICE)
    words, liger = torch.ones(4, 8, dtype=torch.int32, device=DEVICE), torch.ops.liger
    for op, *args in (
        (liger.float8_cast, x, None, E4, False),
        (liger.float8_cast, x, by, E4, True),
        (liger.transpose_bytes, x.to(E4)),
        (liger.dense_blocks, x.to(E4), by[:1].view(1, 1), *x.shape, torch.bfloat16),
        (liger.float8_cast_blocks, torch.cat([x] * 4, 1)),
        (liger.dense_rows, words.new_ones(4, 4), by[:4].view(4, 1), None, None, 32, 4, torch.bfloat16),
        (liger.dense_columns, words, words[:1, :1], by[:8].view(1, 8), None, 4, 1, False, torch.bfloat16),
    ):
        torch.library.opcheck(op.default, tuple(args), test_utils="test_faketensor")
