"""Experts with adapters where a ``Case`` cannot say it: several adapters, stored weights, which
products run, what is saved, autocast."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, assert_beside, needs_kernels
from torch import Tensor
from watching import Watch, saved

from liger_kernel.ops._core.operator import Case
from liger_kernel.ops.projections import moe as moe_module
from liger_kernel.ops.projections.adapted import Adapter
from liger_kernel.ops.projections.lora_moe import _args, lora_moe
from liger_kernel.ops.projections.moe import adapted_moe, experts_in_torch as reference
from liger_kernel.ops.projections.weights import Dequantized
from liger_kernel.testing import assert_same_bits, like, run

ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
WEIGHTS = ("gate_up", "down")


def arguments(
    tokens=11, K=2, H=16, I=24, E=4, r=3, *, dtype=torch.float32, learn=("x", "topk_weight", *ADAPTERS), seed=0, **more
) -> dict:
    torch.manual_seed(seed)
    drawn = Case("", _args(tokens, K, H, I, E, r, **more)).make(dtype, DEVICE, seed)
    drawn["topk_index"] = drawn["topk_index"].contiguous()
    learns = lambda k, t: t.detach().requires_grad_(k in learn and t.is_floating_point())
    return {k: learns(k, v) if isinstance(v, Tensor) else v for k, v in drawn.items()}


@needs_kernels
@pytest.mark.parametrize("sizes", [*((11, 2, 16, 24, 4, r) for r in (1, 16, 33, 100)), (200, 1, 40, 70, 2, 5)], ids=str)
def test_any_rank_and_size(sizes):
    """Of one block or several, with columns left over; more rows, columns and steps than a tile."""
    assert_beside(lora_moe, reference, arguments(*sizes))


PARTS, SCALES = [2, 3], (0.5, -2.0)


def of_adapters(x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, *, scale):
    """``lora_moe`` with each adapter cut into several of these ranks and scales."""
    cut = lambda a, b: [Adapter(*each) for each in zip(a.split(PARTS, 1), b.split(PARTS, 2), SCALES)]
    pairs = cut(gate_up_a, gate_up_b), cut(down_a, down_b)
    return adapted_moe(x, gate_up, down, topk_index, topk_weight, *pairs)


def of_weights(x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, *, scale):
    """What ``of_adapters`` means, by W + scale B A."""
    scales = torch.tensor(SCALES, dtype=x.dtype, device=x.device)
    s = scales.repeat_interleave(torch.tensor(PARTS, device=x.device))
    total = lambda w, a, b: w + (b * s) @ a
    weights = total(gate_up, gate_up_a, gate_up_b), total(down, down_a, down_b)
    return reference(x, *weights, topk_index, topk_weight)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_adapters(dtype):
    """They are joined; the sum of weights and adapters, as PEFT makes it, is the same."""
    assert_beside(of_adapters, of_weights, arguments(r=5, dtype=dtype))


@needs_kernels
def test_dtypes_of_adapters():
    """In 32 bits beside 16: multiplied in 16, gradients in 32, as those of a cast."""
    args = arguments(dtype=torch.bfloat16)
    wide = args | {name: args[name].detach().float().requires_grad_() for name in ADAPTERS}
    narrow, found = run(lora_moe, like(args)), run(lora_moe, like(wide))
    assert all(found[f"d{name}"].dtype == torch.float32 for name in ADAPTERS)
    assert_same_bits({k: v.to(narrow[k].dtype) for k, v in found.items()}, narrow)


@needs_kernels
@pytest.mark.parametrize("of", ["gate_up", "down"])
@pytest.mark.parametrize(("a", "b"), [(1e4, 1e-4), (1e-4, 2e4)])
def test_thin_results_beyond_fp16(of, a, b, monkeypatch):
    """A x in the forward, or B^T dy in the backward; gradients of fp32 adapters are in fp32."""
    thin, thin_rows = [], moe_module.thin_rows
    monkeypatch.setattr(moe_module, "thin_rows", lambda *args: thin.append(thin_rows(*args)) or thin[-1])
    args = arguments(dtype=torch.float16, H=64, learn=("x", *ADAPTERS))
    args |= dict.fromkeys(name for name in ADAPTERS if not name.startswith(of))
    for name, size in ((f"{of}_a", a), (f"{of}_b", b)):
        args[name] = (args[name].detach().float().abs() * size).requires_grad_()
    args["x"] = (args["x"].detach().abs() * 4).requires_grad_()
    found, truth = run(lora_moe, like(args)), run(reference, like(args, torch.float64))
    assert any((t.abs() > 65504).any() for t in thin)  # not all rows are written
    for name, t in truth.items():
        assert found[name].isfinite().all() and (found[name] - t).norm() < 0.01 * t.norm(), name


@needs_kernels
def test_a_stored_weight_is_made_dense_for_each_product():
    """As for four bits: the node holds what is stored, not the dense weight."""
    args = arguments()
    made: list[tuple[int, ...]] = []

    def stored(name: str) -> Dequantized:
        weight, shape = args[name].detach(), tuple(args[name].shape)
        return Dequantized(shape, None, dequantize=lambda dtype: made.append(shape) or weight.to(dtype, copy=True))

    def fn(x, gate_up, down, topk_index, topk_weight, gate_up_a, gate_up_b, down_a, down_b, *, scale):
        pairs = [Adapter(gate_up_a, gate_up_b, scale)], [Adapter(down_a, down_b, scale)]
        with saved() as kept:
            y = adapted_moe(x, stored("gate_up"), stored("down"), topk_index, topk_weight, *pairs)
        assert not {args[name].numel() for name in WEIGHTS} & {t.numel() for t in kept}
        return y

    found = run(fn, like(args))
    assert made == [(4, 48, 16), (4, 16, 24), (4, 16, 24), (4, 48, 16)]
    assert_same_bits(found, run(lora_moe, like(args)))


@needs_kernels
@pytest.mark.parametrize(
    ("learn", "wide", "thin"),
    [
        ((), 2, (2, 2, 0)),
        (("x",), 4, (4, 4, 0)),
        (("topk_weight",), 3, (3, 3, 0)),
        (("down_a",), 2, (3, 2, 1)),
        (("down_b",), 2, (3, 2, 1)),
        (("gate_up_a",), 3, (4, 3, 1)),
        (("gate_up_b",), 3, (3, 3, 1)),
        (("x", "topk_weight", *ADAPTERS), 4, (5, 4, 4)),
    ],
)
def test_what_is_frozen_has_no_products(learn, wide, thin):
    """Grouped products with weights; thin ones of rows, added, and over rows."""
    args = arguments(learn=learn)
    with Watch() as seen:
        run(lora_moe, args)
    assert seen.names.count("grouped_mm") == wide and "grouped_outer" not in seen.names
    assert 0 < seen.largest < args["down"].numel()
    assert tuple(map(seen.names.count, ("thin_rows", "add_thin_", "thin_outer"))) == thin


@needs_kernels
def test_what_is_saved():
    """Output of gate_up, thin product, order, and each b as the kernels read it."""
    args = arguments()
    given = {t.data_ptr() for t in args.values() if isinstance(t, Tensor)}
    with saved() as kept:
        lora_moe(**args)
    sizes = {t.data_ptr(): t.numel() for t in kept if t.data_ptr() not in given}
    b = args["gate_up_b"].numel() + args["down_b"].numel()
    assert sum(sizes.values()) == 22 * 48 + 22 * 3 + 2 * 22 + 4 + b


def test_arguments_are_where_x_is():
    args = arguments()
    with pytest.raises(ValueError, match=r"lora_moe: down_b must be on x's device, \w+(:0)?, got meta"):
        lora_moe(**args | {"down_b": args["down_b"].to("meta")})
