"""Weights trained in FP8: what the casts give, and the three products of each recipe beside
torchao's own."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, drawn, needs_kernels
from quick import further
from torch import nn
from torch.utils.checkpoint import checkpoint
from watching import calls_of, saved

from liger_kernel.ops.activations.glu import MAXIMA, Form, glu_bwd_, glu_fwd
from liger_kernel.ops.projections import float8_training as f8
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.float8 import E4, E5, lacking
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.mlp import adapted_mlp
from liger_kernel.ops.projections.weights import dense

# those that this machine can run
RECIPES = [r for r in f8.RECIPES.values() if not (r.blocks and lacking(torch.device(DEVICE), r.capability))]
named = dict(ids=lambda r: r.name)


def of_torchao(weight: torch.Tensor, recipe: f8.Recipe) -> nn.Linear:
    """A linear layer that torchao emulates."""
    pytest.importorskip("torchao")
    layer = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype, device=weight.device)
    layer.weight.data.copy_(weight)
    if recipe.blocks:
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference

        how = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
        layer.forward = lambda x: _to_mxfp8_then_scaled_mm(x, layer.weight, *how)
        return layer
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe.name)
    object.__setattr__(config, "emulate", True)
    return Float8Linear.from_float(layer, config)


def assert_same_casts(found, expected) -> None:
    """Of rows and of columns, each or none."""
    for one, other in zip(found, expected):
        assert (one is None) == (other is None)
        for mine, theirs in zip(one or (), other or ()):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("powers_of_2", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("M", "N"), [(70, 144), (1, 16), (64, 300), (33, 5)])
def test_casts_are_those_of_the_reference(M, N, by_rows, powers_of_2):
    x = torch.cat([drawn(M, N), drawn(M, 3)], 1)[:, :N]
    x[0, 0], x[-1, -1], x[M // 2, 1], x[:, 2] = float("inf"), float("nan"), -1e4, 0
    amax, size = f8.amax_of(x, by_rows), x.float().abs().nan_to_num(posinf=0, nan=0)
    if by_rows:
        assert torch.equal(amax.rows, size.amax(1)) and torch.equal(amax.columns, size.amax(0))
    else:
        assert amax.rows.amax() == size.amax()
    for dtype in (E4, E5):
        for rows, columns in ((True, True), (True, False), (False, True)):
            how = dict(rows=rows, columns=columns)
            both = f8.casts(x, dtype, amax, powers_of_2, **how)
            assert_same_casts(both, f8.reference(x, amax, dtype, powers_of_2, **how))
            assert all(found is None or ((found.scale > 0) & found.scale.isfinite()).all() for found in both)


@needs_kernels
def test_tensors_that_one_launch_searches():
    """Each has its own largest value, whatever the sizes, strides and dtypes of the others are."""
    xs = [drawn(70, 144, seed=1), drawn(1, 16, seed=2)]
    xs += [drawn(9, 300, seed=3).t().contiguous().t(), drawn(300, 33, seed=4)[:, :20]]
    for x, size in zip(xs, (3.0, 500.0, 7.0, 1e4)):
        x[0, 3], x[-1, 5] = -size, float("nan")
    for count in range(1, f8.MOST + 1):
        for turned in range(count):
            chosen = [xs[(i + turned) % count] for i in range(count)]
            for found, x in zip(f8.maxima_of(chosen), chosen):
                assert found.columns is None and found.rows.amax() == x.float().abs().nan_to_num(nan=0).max()


@needs_kernels
@pytest.mark.parametrize("powers_of_2", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), *further((True, False), (False, True))])
def test_two_tensors_cast_together(rows, columns, powers_of_2):
    """Each is cast as it would be alone, to its own format and by its own scale."""
    xs = drawn(70, 144, seed=1), drawn(144, 33, seed=2)[:, :17], 100 * drawn(1, 300, seed=3)
    for i, x in enumerate(xs):
        x[0, 0] = float("inf")
        for other in xs:
            one = f8.CastRequest(x, (E4, E5)[i % 2], f8.amax_of(x, False), rows, columns)
            two = f8.CastRequest(other, E4, f8.amax_of(other, False), False, True)
            for found, request in zip(f8.casts_together([one, two], powers_of_2), (one, two)):
                of, dtype, amax, by_rows, by_columns = request
                assert_same_casts(found, f8.casts(of, dtype, amax, powers_of_2, rows=by_rows, columns=by_columns))


@needs_kernels
def test_casts_in_memory_memory():
    """They are the same, and lie there, if they fit."""
    x = drawn(48, 144)
    amax = f8.amax_of(x, False)
    expected = f8.casts(x, E5, amax, False, rows=True, columns=True)
    fitting, others = (drawn(48, 144), drawn(48, 144, dtype=torch.float32)), (drawn(144, 48).t(), drawn(47, 144))
    for memory, fits in (*((m, True) for m in fitting), *((m, False) for m in others)):
        found = f8.casts(x, E5, amax, False, rows=True, columns=True, memory=memory)
        for one, other in zip(found, expected):
            assert torch.equal(one.values.float(), other.values.float()) and one.scale == other.scale
            assert (one.values.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()) == fits


def learning(call, x, dy, learnt):
    x = x.detach().requires_grad_()
    y = call(x)
    return [y, *torch.autograd.grad(y, [x, *learnt], dy)]


def assert_errors_are_those_of(found, theirs, truth) -> None:
    """Beside fp64, at most 1.1 times those."""
    for ours, their, true in zip(found, theirs, truth):
        error = lambda t, true=true: ((t.double() - true).norm() / true.norm()).item()
        assert 1e-4 < error(ours) <= 1.1 * error(their) + 1e-6
        assert ours.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [48, 40])
@pytest.mark.parametrize("recipe", RECIPES, **named)
def test_errors_are_those_of_torchao(recipe, tokens):
    """Of y, dx and dw, beside those of the layer that torchao emulates."""
    K, N = 96, 64
    tokens += -tokens % 32 * recipe.blocks  # torchao has no others
    weight, x, dy = drawn(N, K, seed=1), drawn(tokens, K, seed=2), drawn(tokens, N, seed=3)
    x[0] *= 50  # rows of other sizes
    theirs = of_torchao(weight, recipe)
    w = weight.clone().requires_grad_()
    found = learning(lambda x: linears(x, [Projection(f8.float8_trained(w, recipe))])[0], x, dy, [w])
    other = learning(theirs, x, dy, [theirs.weight])
    wide = weight.double().requires_grad_()
    assert_errors_are_those_of(found, other, learning(lambda x: x @ wide.t(), x.double(), dy.double(), [wide]))


@needs_kernels
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_cast_of_a_weight_for_compiled_graphs(by_rows):
    w = drawn(32, 48, dtype=torch.float32)
    amax = f8.amax_of(w.bfloat16(), by_rows)
    values, scale = f8.float8_transposed(w, torch.bfloat16, *amax, by_rows, w)
    expected = f8.reference(w.bfloat16(), amax, E4, by_rows, False, True)[1]
    assert torch.equal(values.float(), expected.values.float()) and torch.equal(scale, expected.scale)
    args, which = (w, torch.bfloat16, *amax, by_rows, w), ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.liger.float8_transposed.default, args, test_utils=which)


@pytest.mark.parametrize("recipe", RECIPES, **named)
def test_what_outlives_the_forward(recipe):
    """Of x, one transposed cast; x itself where adapters or 16-bit products need it."""
    x = drawn(32, 64, seed=1)
    ws = [drawn(48, 64, seed=i).requires_grad_() for i in (2, 3)]
    adapter = Adapter(drawn(4, 64, seed=4).requires_grad_(), drawn(48, 4, seed=5).requires_grad_())
    for adapters in ((), (adapter,)):
        with saved() as kept:
            linears(x.requires_grad_(), [Projection(f8.float8_trained(w, recipe), None, adapters) for w in ws])
        held = [t for t in kept if t.numel() == x.numel()]
        if adapters or not recipe.weight_gradient:
            assert len(held) == 1 and held[0].data_ptr() == x.data_ptr()
        else:
            assert [(t.dtype, tuple(t.shape)) for t in held] == [(E4, (64, 32))]


@pytest.mark.parametrize("frozen", ["none", *further("x", "w")])
@pytest.mark.parametrize("recipe", RECIPES, **named)
def test_projections_of_one_input(recipe, frozen):
    """Together as each alone, with biases, adapters, frozen parts, and in a checkpoint."""
    x, dy = drawn(2, 24, 32, seed=1), drawn(2, 24, 64, seed=2)
    ws = [drawn(64, 32, seed=i).requires_grad_(frozen != "w") for i in (3, 4)]
    bias = drawn(64, seed=5).requires_grad_()
    adapter = Adapter(drawn(4, 32, seed=6).requires_grad_(), drawn(64, 4, seed=7).requires_grad_(), 0.5)
    make = lambda w, **more: Projection(f8.float8_trained(w, recipe), bias, **more)
    both = [make(ws[0]), make(ws[1], adapters=(adapter,))]
    learnt = [t for t in (*ws, bias, adapter.a, adapter.b) if t.requires_grad]
    x.requires_grad_(frozen != "x")

    def grads(ys):
        return torch.autograd.grad(sum((y * dy).sum() for y in ys), [*([x] if x.requires_grad else []), *learnt])

    together = grads(linears(x, both))
    apart = grads([linears(x, [p])[0] for p in both])
    again = grads(checkpoint(lambda x: linears(x, both), x, use_reentrant=False))
    for one, two, three in zip(together, apart, again):
        torch.testing.assert_close(one, two, rtol=2**-6, atol=2**-6 * one.abs().max().item())
        assert torch.equal(one, three)


@needs_kernels
@pytest.mark.parametrize(("M", "N"), [(40, 144), (1, 16), (70, 33)])
@pytest.mark.parametrize("packed", [False, True])
def test_largest_values_of_an_activation(packed, M, N):
    """Of h, dgate and dup, whose kernel finds them, without an infinity and NaN."""
    whole = torch.cat([drawn(M, N, seed=1), drawn(M, N, seed=2)], 1)
    gate, up = whole.chunk(2, 1) if packed else (whole[:, :N].clone(), whole[:, N:].clone())
    up[0, 0], up[-1, -1], dh = float("inf"), float("nan"), drawn(M, N, seed=3)
    size = lambda t: t.float().abs().nan_to_num(posinf=0, nan=0).max()
    h, maxima = f8.glu_and_maxima(gate, up, "silu", *Form())
    args = (gate, up, "silu", *Form())
    assert torch.equal(h.float().nan_to_num(), glu_fwd(*args).float().nan_to_num()) and maxima.max() == size(h)
    torch.library.opcheck(torch.ops.liger.glu_and_maxima.default, args, test_utils="test_faketensor")
    maxima = torch.zeros(3, MAXIMA, device=DEVICE)
    glu_bwd_(dh, gate, up, "silu", True, *Form(), maxima=maxima)
    for found, t in zip(maxima, (dh, gate, up)):
        assert found.max() == size(t)


@needs_kernels
@pytest.mark.parametrize(("checkpointed", "tiles"), [(True, 3), *further((False, 1), (True, 1), (False, 3))])
@pytest.mark.parametrize("recipe", RECIPES, **named)
def test_a_gated_mlp(recipe, checkpointed, tiles):
    """The errors are at most those of three layers of torchao with an activation between."""
    H, I, M = 64, 96, 64
    values = [drawn(I, H, seed=1) / H**0.5, drawn(I, H, seed=2) / H**0.5, drawn(H, I, seed=3) / I**0.5]
    x, dy = drawn(M, H, seed=4), drawn(M, H, seed=5)
    ours = [w.clone().requires_grad_() for w in values]
    layers = [of_torchao(w, recipe) for w in values]
    gate, up, down = (Projection(f8.float8_trained(w, recipe)) for w in ours)
    node = lambda x: adapted_mlp(x, [gate, up], down, ends=True, tiles=tiles)
    call = (lambda x: checkpoint(node, x, use_reentrant=False)) if checkpointed else node
    of = lambda gate, up, down: lambda x: down(nn.functional.silu(gate(x)) * up(x))
    other = learning(of(*layers), x, dy, [m.weight for m in layers])
    wide = [w.double().requires_grad_() for w in values]
    truth = learning(of(*(lambda x, w=w: x @ w.t() for w in wide)), x.double(), dy.double(), wide)
    assert_errors_are_those_of(learning(call, x, dy, ours), other, truth)


@needs_kernels
def test_a_gated_mlp_of_two_recipes():
    """The gradient of gate reads what the casts for up may not be written over."""
    x, dy = drawn(48, 32, seed=4), drawn(48, 32, seed=5)
    of = {"rowwise_with_gw_hp": drawn(64, 32, seed=1), "tensorwise": drawn(64, 32, seed=2)}
    ws = [w.requires_grad_() for w in (*of.values(), drawn(32, 64, seed=3))]
    gate, up, down = (Projection(f8.float8_trained(w, f8.RECIPES[name])) for w, name in zip(ws, (*of, "tensorwise")))
    found = learning(lambda x: adapted_mlp(x, [gate, up], down), x, dy, ws)
    one = lambda x, p: linears(x, [p])[0]
    apart = learning(lambda x: one(nn.functional.silu(one(x, gate)) * one(x, up), down), x, dy, ws)
    for mine, other in zip(found, apart):
        assert (mine.float() - other.float()).norm() < 0.02 * other.float().norm()


def test_weights_are_searched_once_a_step(monkeypatch):
    """Over accumulation and checkpoints; again after a step, a change in place, ``forget``."""
    calls, w = calls_of(monkeypatch, f8, "maxima_of"), drawn(32, 16, seed=1).requires_grad_()
    kept, x = f8.WeightCache(), drawn(32, 16, seed=2)
    optimizer = torch.optim.SGD([w], lr=1e-2)

    def step() -> int:
        calls.clear()
        for _ in range(2):
            run = lambda x: linears(x, [Projection(f8.float8_trained(w, f8.RECIPES["tensorwise"], kept))])[0]
            checkpoint(run, x, use_reentrant=False).float().sum().backward()
        return sum(t.data_ptr() == w.data_ptr() for (xs,), _ in calls for t in xs)

    assert step() == 1
    assert step() == 0
    optimizer.step()
    assert step() == 1
    with torch.no_grad():
        w.mul_(0.5)
    assert step() == 1
    w.data.copy_(w.data * 2)
    f8.forget()
    assert step() == 1
    w.data = w.data.clone()
    assert step() == 1


def test_adapters_beside_a_dense_weight_are_as_before():
    """A node of an FP8 and a dense weight of one input keeps the input itself."""
    x, w, v = (drawn(16, 32, seed=seed).requires_grad_() for seed in (1, 2, 3))
    a, b = linears(x, [Projection(f8.float8_trained(w, f8.RECIPES["tensorwise"])), Projection(dense(v))])
    (a.sum() + b.sum()).backward()
    assert torch.equal(v.grad, torch.ones(16, 16, dtype=x.dtype, device=x.device) @ x.detach())
    assert w.grad is not None and (w.grad - v.grad).norm() < 0.1 * v.grad.norm()


@needs_kernels
@pytest.mark.parametrize("learns", [False, True])
def test_a_layer_starts_few_kernels(learns, monkeypatch):
    """One launch searches what has one scale; each product casts both operands in one, by columns
    only for a backward."""
    calls, asked = calls_of(monkeypatch, f8, "launch"), calls_of(monkeypatch, f8, "casts_together")
    ws = [drawn(n, 32, seed=n).requires_grad_(learns) for n in (64, 16, 48)]
    made = lambda: [Projection(f8.float8_trained(w, f8.RECIPES["tensorwise"], f8.WeightCache())) for w in ws]
    x = drawn(48, 32).requires_grad_()
    ys = linears(x, made())
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert [args[0].fn.__name__ for args, _ in calls] == 2 * ["_maxima", "_casts", "_casts", "_casts"]
    asked.clear()
    with torch.no_grad():
        assert all(map(torch.equal, linears(x.detach(), made()), ys))
    assert [(each.rows, each.columns) for (requests, *_), _ in asked for each in requests] == 4 * [(True, False)]
