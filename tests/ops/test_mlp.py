"""Gated MLP where a ``Case`` cannot say it."""

from __future__ import annotations

import sys
import types
import weakref

import pytest
import torch
from devices import DEVICE, assert_beside, leaves, needs_kernels
from torch.utils.checkpoint import checkpoint
from watching import calls_of, saved, saved_unchanged

from liger_kernel.nn import LigerFalconH1MLP, LigerMLP, LigerSwiGLUMLP
from liger_kernel.ops import LigerMLPFunction
from liger_kernel.ops.projections.mlp import mlp
from liger_kernel.testing import assert_same_bits, like, run

CONFIG = types.SimpleNamespace(
    hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=False, mlp_multipliers=(0.5, 0.75)
)


def arguments() -> dict:
    return leaves(x=(3, 5, 16), gate=(24, 16), up=(24, 16), down=(16, 24))


def of(module):
    """``module`` as a function of its input and weights."""

    def forward(x, **weights):
        return torch.func.functional_call(module, {f"{k}_proj.weight": w for k, w in weights.items()}, (x,))

    return forward


@needs_kernels
def test_saves_two_activations():
    args = arguments()
    with saved() as kept:
        mlp(**args)
    sizes = {t.data_ptr(): t.numel() for t in kept}
    assert sum(sizes.values()) - sum(t.numel() for t in args.values()) == 2 * 15 * 24


@needs_kernels
def test_function_takes_what_the_published_one_takes():
    args = arguments()
    ours = run(lambda x, gate, up, down: LigerMLPFunction.apply(x, gate, up, down, 0.5, 2.0), like(args))
    assert_same_bits(ours, run(mlp, like(args) | dict(gate_multiplier=0.5, down_multiplier=2.0)))
    assert_same_bits(run(lambda **a: LigerMLPFunction.apply(*a.values()), like(args)), run(mlp, like(args)))


@pytest.mark.parametrize("falcon", [False, True])
def test_modules(falcon):
    """As one of linear layers, and as that of transformers."""
    ours, theirs = LigerMLP(CONFIG), LigerSwiGLUMLP(CONFIG)
    if falcon:
        modeling = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
        ours, theirs = LigerFalconH1MLP(CONFIG), modeling.FalconH1MLP(CONFIG)
        with pytest.raises(ValueError, match="mlp_bias must be False"):
            LigerFalconH1MLP(types.SimpleNamespace(**vars(CONFIG) | {"mlp_bias": True}))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert_beside(of(ours), of(theirs), arguments())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_in_another_autocast(recompute, create_graph):
    """A part in fp32 within a step under autocast, whose backward runs there, too."""
    args = arguments()
    with torch.autocast(DEVICE, enabled=False):
        expected = torch.autograd.grad(mlp(**args).sum(), [*args.values()])
    with torch.autocast(DEVICE, torch.bfloat16):
        with torch.autocast(DEVICE, enabled=False):
            out = mlp(**args, recompute=recompute)
        found = torch.autograd.grad(out.sum(), [*args.values()], create_graph=create_graph)
        assert torch.is_autocast_enabled(DEVICE)
    torch.testing.assert_close([t.detach() for t in found], [*expected])


# -- in patched models -------------------------------------------------------------------


class Gated(torch.nn.Module):
    def __init__(self, packed: bool):
        super().__init__()
        torch.manual_seed(0)
        linear = lambda n, k: torch.nn.Linear(k, n, bias=False, device=DEVICE)
        if packed:
            self.gate_up_proj = linear(48, 16)
        else:
            self.gate_proj, self.up_proj = linear(24, 16), linear(24, 16)
        self.down_proj, self.act_fn = linear(16, 24), torch.nn.SiLU()

    def forward(self, x):
        """Runs only where the activation is unknown, or somebody sees its calls."""
        assert type(self.act_fn) is not torch.nn.SiLU or torch.nn.modules.module._has_any_global_hook()
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def wholes(monkeypatch) -> list[dict]:
    """Calls of the operator by patched models."""
    return calls_of(monkeypatch, pytest.importorskip("liger_kernel.transformers.recognise.mlps"), "mlp")


def gated(packed: bool = False):
    """A module, and what a patch makes of its forward."""
    from liger_kernel.transformers.recognise import slots

    module, label = Gated(packed), f"glu({'gate_up_proj' if packed else 'gate_proj, up_proj'}, down_proj, act_fn)"
    return module, lambda x, *tiles: slots.VARIANTS[label](Gated.forward, *tiles)(module, x)


def gradients(module, y) -> dict[str, torch.Tensor]:
    module.zero_grad()
    y.square().sum().backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@needs_kernels
@pytest.mark.parametrize("packed", [False, True])
def test_patched_mlps_in_tiles_are_one_node(packed):
    module, forward = gated(packed)
    x = torch.randn(3, 5, 16, device=DEVICE)
    y = forward(x, 4)
    assert y.grad_fn.name() == "AdaptedMLPFunctionBackward"
    tiled = gradients(module, y)
    for name, t in gradients(module, forward(x)).items():
        torch.testing.assert_close(tiled[name], t)


@needs_kernels
@pytest.mark.parametrize("packed", [False, True])
def test_patched_mlps_are_one_operator(wholes, packed):
    module, forward = gated(packed)
    x = torch.randn(3, 5, 16, device=DEVICE)
    alone = gradients(module, forward(x))
    assert len(wholes) == 1
    seen = []
    handle = module.down_proj.register_forward_hook(lambda m, args, y: seen.append(y))
    for name, d in gradients(module, forward(x)).items():
        torch.testing.assert_close(d, alone[name], rtol=1e-5, atol=1e-5)
    assert len(seen) == len(wholes) == 1
    handle.remove()
    forward(x)
    assert len(wholes) == 2


def _replaced(module):
    module.gate_proj.forward = lambda x: torch.nn.functional.linear(x, module.gate_proj.weight)


CHANGES = {
    "adapted": lambda m: setattr(m, "up_proj", torch.nn.Sequential(m.up_proj)),
    "biased": lambda m: setattr(m.gate_proj, "bias", torch.nn.Parameter(torch.zeros(24, device=DEVICE))),
    "replaced": _replaced,
    "parametrised": lambda m: torch.nn.utils.parametrizations.weight_norm(m.down_proj),
    "hooked": lambda m: m.down_proj.register_full_backward_hook(lambda *_: None),
    "another activation": lambda m: setattr(m, "act_fn", torch.nn.Softplus()),
    "mixed": lambda m: m.double(),
}


@needs_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_more_than_products_is_called(wholes, change):
    module, forward = gated()
    CHANGES[change](module)
    x = torch.randn(3, 5, 16, device=DEVICE, dtype=torch.float64 if change == "mixed" else torch.float32)
    gradients(module, forward(x))
    with torch.no_grad():
        forward(x.repeat(5, 1, 1))  # fewer rows are a step of generation
    assert not wholes


@needs_kernels
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_written_over_that_is_seen_again(packed):
    """Two backwards through one graph, and hooks that keep what is saved, find what was there."""
    module, forward = gated(packed)
    x = torch.randn(3, 5, 16, device=DEVICE, requires_grad=True)
    once = torch.autograd.grad(forward(x).square().sum(), [x, *module.parameters()])
    loss = forward(x).square().sum()
    for retain_graph in (True, True, False):
        again = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=retain_graph)
        assert all(map(torch.equal, once, again))
    with saved_unchanged():
        again = torch.autograd.grad(forward(x).square().sum(), [x, *module.parameters()])
    assert all(map(torch.equal, once, again))


@needs_kernels
def test_projections_are_written_over():
    """Where nobody sees them again: otherwise a backward would need two buffers more."""
    y = mlp(**arguments())
    kept = y.grad_fn.saved_tensors[4:]
    before = [t.clone() for t in kept]
    y.sum().backward()
    assert len(kept) == 2 and not any(map(torch.equal, kept, before))


@needs_kernels
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(monkeypatch, reentrant, recompute):
    """The same bits; what is computed again ends before the last product, as in stock."""
    products = calls_of(monkeypatch, sys.modules[LigerMLPFunction.__module__], "output")
    args = arguments()
    call = lambda x: x + mlp(x, **{k: v for k, v in args.items() if k != "x"}, recompute=recompute)
    expected = torch.autograd.grad(call(args["x"]).square().sum(), list(args.values()))
    assert len(products) == 1
    y = checkpoint(call, args["x"], use_reentrant=reentrant)
    y.square().sum().backward()
    assert all(map(torch.equal, expected, [t.grad for t in args.values()]))
    assert len(products) == (3 if reentrant else 2)


@needs_kernels
def test_checkpointing_frees_its_input():
    """As soon as a layer's backward is over, not with the graph."""
    args, alive = arguments(), []
    x = args["x"] * 1
    x.register_hook(lambda _: alive.append(inner() is not None))
    inner = weakref.ref(y := x * 2)
    y = checkpoint(lambda x: mlp(x, args["gate"], args["up"], args["down"]), y, use_reentrant=False)
    y.sum().backward()
    assert alive == [False]
