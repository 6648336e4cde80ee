"""One accuracy rule for every operator, as accurate as PyTorch in the same dtype, and the helpers
that run operators to compare them.

The rule: for every output and gradient, against the reference in fp64,

    error(ours) <= 2 * error(PyTorch in this dtype) + floor

for the largest error (relative to the largest value) and for the RMS error (relative to the RMS
value). The floor is what rounding alone may do:
one fp32 epsilon, as fp32 is what kernels compute in; half an epsilon of the dtype for the largest
error; and for the RMS an epsilon over
``sqrt(numel)``, as the RMS error of a few numbers is a matter of luck. PyTorch's error is the
quadratic mean over the draws of the inputs that a test
has, for the same reason, and over fewer than 16 elements the largest: one number's error may be
zero. Where ours misses on the first draw, it is ours' mean over the same draws that counts: the
exponential of one score may make the error of all. No test has a tolerance of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Named = dict[str, Tensor]


def like(args: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The same values as fresh leaves, floating-point ones in ``dtype`` if given; everything
    that is no tensor as it is."""

    def leaf(t: Tensor) -> Tensor:
        return (
            t.detach()
            .to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True)
            .requires_grad_(t.requires_grad)
        )

    return {k: leaf(v) if isinstance(v, Tensor) else v for k, v in args.items()}


def differentiable(args: Mapping[str, Any]) -> Named:
    """The arguments that ask for a gradient."""
    return {k: v for k, v in args.items() if isinstance(v, Tensor) and v.requires_grad}


def forward(fn: Callable[..., Any], args: Mapping[str, Any]) -> Named:
    """The tensors that ``fn`` returns, as ``out0``, ``out1`` ...; a None among them is left out."""
    outs = fn(**args)
    return {f"out{i}": o for i, o in enumerate(outs if isinstance(outs, tuple) else (outs,)) if o is not None}


def upstream(outs: Named) -> Named:
    """A fixed random gradient for every differentiable output: multiples of 1/32 below 8, which
    every dtype holds exactly."""

    def draw(name: str, o: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1 + int(name[3:]))
        return (torch.randn(o.shape, generator=generator, dtype=torch.float64) * 32).round().div(32).to(o)

    return {name: draw(name, o) for name, o in outs.items() if o.requires_grad}


def backward(outs: Named, args: Mapping[str, Any], grads: Named, *, retain_graph: bool = False) -> Named:
    """Gradients of the arguments that ask for one, as ``d<name>``; a None among them is left
    out."""
    inputs = differentiable(args)
    if not grads or not inputs:
        return {}
    found = torch.autograd.grad(
        [outs[k] for k in grads],
        list(inputs.values()),
        list(grads.values()),
        allow_unused=True,
        retain_graph=retain_graph,
    )
    return {f"d{k}": g for k, g in zip(inputs, found) if g is not None}


def run(fn: Callable[..., Any], args: Mapping[str, Any], grads: Callable[[Named], Named] = upstream) -> Named:
    """Outputs and gradients of ``fn`` by name, for the upstream gradients that ``grads`` makes
    for its outputs."""
    outs = forward(fn, args)
    return {k: o.detach() for k, o in outs.items()} | backward(outs, args, grads(outs))


def errors(value: Tensor, truth: Tensor) -> dict[str, float]:
    """Largest and RMS error of ``value``, relative to the largest and RMS value of ``truth``,
    over the elements where both are finite."""
    if not truth.numel():
        return {"max": 0.0, "rms": 0.0}
    finite = truth.isfinite() & value.isfinite()
    t = torch.where(finite, truth, 0.0).double()
    e = torch.where(finite, value.double() - t, 0.0)
    over = lambda e, t: (
        e / torch.where(t < 1e-12, 1.0, t)
    ).item()  # where all is zero, but for what fp64 rounds: the error itself
    return {"max": over(e.abs().max(), t.abs().max()), "rms": over(e.norm(), t.norm())}


def floors(dtype: torch.dtype, numel: int) -> dict[str, float]:
    """The error that rounding alone may make; of a few numbers, such as a loss, PyTorch's own
    error on some draws says little."""
    eps, fp32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * (4 if numel < 16 else 1)
    return {"max": fp32 + eps / 2, "rms": fp32 + eps / math.sqrt(max(numel, 1))}


def typical_errors(name: str, draws: Sequence[tuple[Named, Named]]) -> dict[str, float]:
    """Quadratic mean over ``draws``, pairs of results and truth, of the errors of ``name``; of
    fewer than 16 elements the largest."""
    each = [errors(value[name], truth[name]) for value, truth in draws]
    if draws[0][1][name].numel() < 16:
        return {kind: max(e[kind] for e in each) for kind in each[0]}
    return {kind: math.sqrt(sum(e[kind] ** 2 for e in each) / len(each)) for kind in each[0]}


def assert_as_accurate(
    ours: Named,
    pytorch: Named,
    truth: Named,
    *other_draws: tuple[Named, Named],
    again: Callable[[int], Named] | None = None,
) -> None:
    """Assert the accuracy rule for every output and gradient; integers must be right, and
    non-finite values where PyTorch has them.

    ``other_draws``: PyTorch's and the true results for other inputs of the same distribution.
    ``again(i)``: ours for the i-th of them, from 1.
    """
    assert ours.keys() == pytorch.keys() == truth.keys(), (
        f"outputs and gradients {[*ours]}, PyTorch {[*pytorch]}, truth {[*truth]}"
    )
    for name, t in truth.items():
        o, p = ours[name], pytorch[name]
        assert (o.dtype, o.shape) == (p.dtype, p.shape), (
            f"{name}: {o.dtype} {tuple(o.shape)}; PyTorch: {p.dtype} {tuple(p.shape)}"
        )
        if (
            not o.is_floating_point()
        ):  # an argmax may fall on another of two values that rounding made equal: then as in this dtype
            wrong = (o != p) & (o != t)
            assert not wrong.any(), (
                f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong: {o[wrong][:4]} instead of {t[wrong][:4]}"
            )
            continue
        assert o.isfinite().equal(p.isfinite()) or o.isfinite().equal(t.isfinite()), (
            f"{name}: not finite where PyTorch is, or the reverse"
        )
        theirs, floor = typical_errors(name, [(pytorch, truth), *other_draws]), floors(o.dtype, o.numel())
        limit = {kind: 2 * theirs[kind] + floor[kind] for kind in floor}
        mine = errors(o, t)
        if again and other_draws and any(mine[kind] > limit[kind] for kind in limit):
            mine = typical_errors(
                name, [(ours, truth), *((again(i), other) for i, (_, other) in enumerate(other_draws, 1))]
            )
        for kind, e in mine.items():
            assert e <= limit[kind], (
                f"{name}: {kind} error {e:.2e}; PyTorch makes {theirs[kind]:.2e}, rounding {floor[kind]:.1e}"
            )


def assert_same_bits(a: Named, b: Named) -> None:
    """Assert that two results are equal bit for bit."""
    assert a.keys() == b.keys(), f"{[*a]} != {[*b]}"
    for name, x in a.items():
        y = b[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), (
            f"{name}: {x.dtype} {tuple(x.shape)} != {y.dtype} {tuple(y.shape)}"
        )
        same = torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        assert same, f"{name}: differs by up to {(x.double() - y.double()).abs().max().item()}"
