"""Gated MLP where a ``Case`` cannot say it."""

from __future__ import annotations

import types

import pytest
import torch

from liger_kernel.nn import LigerFalconH1MLP, LigerMLP, LigerSwiGLUMLP
from liger_kernel.ops import LigerMLPFunction, _op
from liger_kernel.ops.mlp import mlp
from liger_kernel.testing import assert_as_accurate, assert_same_bits, like, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = types.SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=False, mlp_multipliers=(0.5, 0.75))
needs_kernels = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")


def arguments() -> dict:
    torch.manual_seed(0)
    shapes = dict(x=(3, 5, 16), gate=(24, 16), up=(24, 16), down=(16, 24))
    return {k: torch.randn(s, device=DEVICE, requires_grad=True) for k, s in shapes.items()}


def of(module):
    """``module`` as a function of its input and weights."""

    def forward(x, **weights):
        return torch.func.functional_call(module, {f"{k}_proj.weight": w for k, w in weights.items()}, (x,))

    return forward


@needs_kernels
def test_saves_two_activations():
    args, saved = arguments(), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t.numel()}), lambda t: t):
        mlp(**args)
    assert sum(saved.values()) - sum(t.numel() for t in args.values()) == 2 * 15 * 24


@needs_kernels
def test_function_takes_what_the_published_one_takes():
    args = arguments()
    ours = run(lambda x, gate, up, down: LigerMLPFunction.apply(x, gate, up, down, 0.5, 2.0), like(args))
    assert_same_bits(ours, run(mlp, like(args) | dict(gate_multiplier=0.5, down_multiplier=2.0)))
    assert_same_bits(run(lambda **a: LigerMLPFunction.apply(*a.values()), like(args)), run(mlp, like(args)))


def test_module_equals_one_of_linear_layers():
    ours, theirs = LigerMLP(CONFIG), LigerSwiGLUMLP(CONFIG)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    args = arguments()
    assert_as_accurate(run(of(ours), like(args)), run(of(theirs), like(args)), run(of(theirs), like(args, torch.float64)))


def test_falcon_equals_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    ours, theirs, args = LigerFalconH1MLP(CONFIG), modeling.FalconH1MLP(CONFIG), arguments()
    assert_as_accurate(run(of(ours), like(args)), run(of(theirs), like(args)), run(of(theirs), like(args, torch.float64)))
    with pytest.raises(ValueError, match="mlp_bias must be False"):
        LigerFalconH1MLP(types.SimpleNamespace(**vars(CONFIG) | {"mlp_bias": True}))


def test_autocast():
    args = arguments()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = mlp(**args)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in args.values())
