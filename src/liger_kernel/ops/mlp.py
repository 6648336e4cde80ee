"""Gated MLP: ``y = down (act(gate x * gate_multiplier) * up x) * down_multiplier``, as one node of the graph (Shazeer, arXiv:2002.05202).

Shapes: x, y (..., H), gate, up (I, H), down (H, I).  M = product of the leading dims of x.

The products are PyTorch's. Saved are gate x and up x; their activation, which autograd would keep for the gradient of ``down``, is computed again: a third
less of what grows with M I, for one pass over memory beside nine products. ``down_multiplier`` scales the activation, not y.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._op import Case, Cost, T, launcher, nbytes, once_differentiable, op, rows_of, shaped, use_kernels
from liger_kernel.ops.glu import ACTS, Form, glu_bwd, glu_fwd
from liger_kernel.ops.glu import reference as glu_reference


def reference(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, act: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:  # fmt: skip
    form = dict(act=act, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    return F.linear(glu_reference(F.linear(x, gate), F.linear(x, up), **form), down)


def _form(gate_multiplier: float, down_multiplier: float) -> Form:
    return Form(gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


@launcher("(Tensor x, Tensor gate, Tensor up, Tensor down, str act, float gate_multiplier, float down_multiplier) -> (Tensor y, Tensor g, Tensor u)")
def mlp_fwd(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: str, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g, u = x @ gate.t(), x @ up.t()
    return glu_fwd(g, u, act, *_form(gate_multiplier, down_multiplier)) @ down.t(), g, u


@launcher(
    "(Tensor dy, Tensor x, Tensor gate, Tensor up, Tensor down, Tensor g, Tensor u, bool[] need, str act, float gate_multiplier, float down_multiplier)"
    " -> (Tensor dx, Tensor dgate, Tensor dup, Tensor ddown)"
)
def mlp_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, g: Tensor, u: Tensor, need: list[bool],
    act: str, gate_multiplier: float, down_multiplier: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients that are needed, of x, gate, up and down; the others are empty."""
    need_x, need_gate, need_up, need_down = need
    form = _form(gate_multiplier, down_multiplier)
    dx, dgate, dup, ddown = (p.new_empty(0) for p in (x, gate, up, down))
    if need_down:
        ddown = dy.t() @ glu_fwd(g, u, act, *form)
    if need_x or need_gate or need_up:
        dg, du = glu_bwd(dy @ down, g, u, act, False, need_x or need_gate, need_x or need_up, *form)
        if need_x:
            dx = (dg @ gate).addmm_(du, up)
        if need_gate:
            dgate = dg.t() @ x
        del dg
        if need_up:
            dup = du.t() @ x
    return dx, dgate, dup, ddown


class LigerMLPFunction(torch.autograd.Function):
    """``apply(x, gate, up, down, gate_multiplier=1.0, down_multiplier=1.0, act="silu")``."""

    @staticmethod
    def forward(ctx, x, gate, up, down, gate_multiplier=1.0, down_multiplier=1.0, act="silu"):
        ctx.shape, ctx.form = x.shape, (act, gate_multiplier, down_multiplier)
        x = rows_of(x)
        y, g, u = mlp_fwd(x, gate, up, down, *ctx.form)
        ctx.save_for_backward(x, gate, up, down, g, u)
        return shaped(y, (*ctx.shape[:-1], down.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need = ctx.needs_input_grad[:4]
        dx, *dweights = mlp_bwd(rows_of(dy), *ctx.saved_tensors, need, *ctx.form)
        return dx.view(ctx.shape) if need[0] else None, *(d if n else None for d, n in zip(dweights, need[1:])), None, None, None


def _upstream(functional, x, gate, up, down, *, gate_multiplier=1.0, down_multiplier=1.0):
    ops = importlib.import_module("liger_kernel.ops")  # theirs, as theirs is what is imported now
    y = ops.LigerMLPFunction.apply(x.reshape(1, -1, x.shape[-1]), gate, up, down, gate_multiplier, down_multiplier)
    return y.reshape(x.shape)


def _scaled(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype) / shape[-1] ** 0.5


def _args(lead: tuple[int, ...], H: int, I: int) -> dict:
    return dict(x=T((*lead, H)), gate=T((I, H), _scaled), up=T((I, H), _scaled), down=T((H, I), _scaled))


@op(
    reference=reference,
    cases=[
        Case("llama", _args((2, 9), 32, 48)),
        Case("gemma", _args((17,), 24, 40) | dict(act="gelu_tanh")),
        Case("falcon-h1", _args((12,), 24, 33) | dict(gate_multiplier=0.37, down_multiplier=1.9)),
        Case("odd", _args((1,), 7, 5)),
        Case("square", _args((4096,), 8192, 8192), gpu=True),
        Case("llama3-8b", _args((8192,), 4096, 14336), gpu=True),
        Case("qwen3-0.6b", _args((16384,), 1024, 3072), gpu=True, timed=True),
        Case("integers", _args((2,), 4, 8) | dict(x=T((2, 4), dtype=torch.int64)), error="mlp: x must be floating point, got torch.int64"),
        Case("bad-gate", _args((2,), 4, 8) | dict(gate=T((8, 5))), error="mlp: gate must have shape (I, 4), got (8, 5)"),
        Case("bad-up", _args((2,), 4, 8) | dict(up=T((9, 4))), error="mlp: up must have shape (8, 4), got (9, 4)"),
        Case("bad-down", _args((2,), 4, 8) | dict(down=T((4, 9))), error="mlp: down must have shape (4, 8), got (4, 9)"),
        Case("mixed", _args((2,), 4, 8) | dict(down=T((4, 8), dtype=torch.float64)), error="mlp: down must have x's dtype, torch.float32, got torch.float64"),
        Case("bad-act", _args((2,), 4, 8) | dict(act="swish2"),
             error="mlp: act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ],
    cost=lambda x, gate, up, down, **_: Cost(
        nbytes(x, gate, up, down, x), nbytes(x, x, x, gate, up, down, gate, up, down),
        gemms=(
            [(m := x.numel() // x.shape[-1], *gate.shape)] * 2 + [(m, *down.shape)],
            [(m, gate.shape[1], gate.shape[0])] * 2 + [(*gate.shape, m)] * 2 + [(m, down.shape[1], down.shape[0]), (*down.shape, m)],
        ),
    ),
    rivals={"upstream": _upstream},
)  # fmt: skip
def mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, act: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:  # fmt: skip
    """A gated MLP that keeps two of its three intermediates for the backward.

    x (..., H), gate and up (I, H), down (H, I), of one dtype, under autocast of its dtype; any strides. Act as in ``glu``. Returns (..., H).
    """
    if not x.is_floating_point():
        raise ValueError(f"mlp: x must be floating point, got {x.dtype}")
    H = x.shape[-1]
    if gate.ndim != 2 or gate.shape[1] != H:
        raise ValueError(f"mlp: gate must have shape (I, {H}), got {tuple(gate.shape)}")
    if act not in ACTS:
        raise ValueError(f"mlp: act must be one of {sorted(ACTS)}, got {act!r}")
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, gate, up, down = x.to(dtype), gate.to(dtype), up.to(dtype), down.to(dtype)
    for name, p, shape in (("gate", gate, gate.shape), ("up", up, gate.shape), ("down", down, (H, gate.shape[0]))):
        if p.shape != shape:
            raise ValueError(f"mlp: {name} must have shape {tuple(shape)}, got {tuple(p.shape)}")
        if p.dtype != x.dtype:
            raise ValueError(f"mlp: {name} must have x's dtype, {x.dtype}, got {p.dtype}")
    if not use_kernels(x, fusible=True):
        return reference(x, gate, up, down, act=act, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    return LigerMLPFunction.apply(x, gate, up, down, gate_multiplier, down_multiplier, act)
