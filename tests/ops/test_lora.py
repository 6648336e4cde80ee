"""What cases of linear layers with adapters cannot say: which products are computed, arguments that
are elsewhere, four bits."""

from __future__ import annotations

import importlib

import pytest
import torch
from devices import DEVICE, assert_beside, leaves, needs_kernels
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from watching import Watch, calls_of

from liger_kernel.ops import OPS, lora_linear
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.projections import lora
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.four_bits import dense_four_bits
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.lora import _layer
from liger_kernel.ops.projections.magnitude import dot_columns, row_norms, times_columns
from liger_kernel.ops.projections.mlp import adapted_mlp
from liger_kernel.ops.projections.weights import Dequantized, Weight, dense
from liger_kernel.testing import assert_as_accurate, differentiable, run


def products(op, learn: set[str]) -> int:
    args = op.cases[0].make(torch.float32, DEVICE)
    args = {k: v.detach().requires_grad_(k in learn) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with Watch() as seen:
        run(op.fn, args)
    return seen.products


@needs_kernels
@pytest.mark.parametrize("name", ["lora_linear", "lora_qkv", "lora_mlp"])
def test_frozen_inputs_cost_no_products(name):
    """A weight that learns adds a product; the A's of one input are one product."""
    op = OPS[name]
    names = set(differentiable(op.cases[0].make(torch.float32, DEVICE)))
    weights = {n for n in names if n in ("weight", "q", "k", "v", "gate", "up", "down")}
    adapters = {n for n in names if n.endswith(("a", "b")) and n not in weights}
    usual = products(op, {"x"} | adapters)
    assert products(op, names) == usual + len(weights)
    assert products(op, set()) < products(op, {"x"}) < usual
    assert products(op, set()) <= {"lora_linear": 3, "lora_qkv": 7, "lora_mlp": 8}[name]


@needs_kernels
@pytest.mark.parametrize("name", ["lora_linear", "lora_qkv", "lora_mlp"])
def test_selective_checkpointing(name):
    """A policy may keep the results of all matrix products: nobody writes to them."""
    op = OPS[name]
    args = op.cases[0].make(torch.float32, DEVICE)
    names, given = zip(*differentiable(args).items())
    seen = []

    def policy(ctx, what, *args, **kwargs):
        seen.append((ctx.is_recompute, name := what.overloadpacket.__name__))
        kept = name in ("mm", "addmm", "add")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    call = lambda *tensors: tuple(torch.utils._pytree.tree_leaves(op.fn(**(args | dict(zip(names, tensors))))))
    total = lambda out: sum(t.square().sum() for t in out)
    expected = torch.autograd.grad(total(call(*given)), given)
    out = checkpoint(call, *given, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    for e, got in zip(expected, torch.autograd.grad(total(out), given), strict=True):
        assert torch.equal(e, got)
    assert (False, "addmm") in seen


@pytest.mark.parametrize("name", ["weight", "a", "b", "bias", "magnitude"])
def test_arguments_are_where_x_is(name):
    shapes = dict(x=(6, 8), weight=(4, 8), a=(2, 8), b=(4, 2), bias=(4,), magnitude=(4,))
    args = {k: torch.randn(shape) for k, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"lora_linear: {name} must be on x's device, cpu, got meta"):
        lora_linear(**args | {name: args[name].to("meta")})


@needs_kernels
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits(nested, dtype):
    """The first value of a byte is its upper half; scales are of blocks, or bytes of blocks."""
    generator = torch.Generator().manual_seed(0)
    N, K, block, block2 = 6, 128, 64, 4
    packed = torch.randint(0, 256, (N * K // 2, 1), dtype=torch.uint8, generator=generator)
    code, code2 = torch.randn(16, generator=generator), torch.randn(256, generator=generator)
    if nested:
        absmax = torch.randint(0, 256, (N * K // block,), dtype=torch.uint8, generator=generator)
        absmax2, offset = torch.rand(3, generator=generator), torch.tensor(0.3)
        scales = code2[absmax.long()] * absmax2.repeat_interleave(block2) + offset
    else:
        absmax, absmax2, offset = torch.rand(N * K // block, generator=generator), None, None
        scales = absmax
    halves = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()
    expected = (code[halves.long()] * scales.repeat_interleave(block)).view(N, K).to(dtype)
    tensors = packed, absmax, code, absmax2, code2 if nested else None, offset
    args = (*(t if t is None else t.to(DEVICE) for t in tensors), [N, K], block, block2, dtype)
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(dense_four_bits(*args).cpu(), expected, rtol=rtol, atol=0)
    torch.library.opcheck(torch.ops.liger.dense_four_bits.default, args, test_utils="test_faketensor")


@needs_kernels
@pytest.mark.parametrize("made_dense", [False, True])
@pytest.mark.parametrize(("rows", "tiles"), [(10, [5, 5]), (9, [5, 4]), (4, [4]), (3, [3])])
def test_a_checkpointed_mlp_has_a_tile_at_a_time(rows, tiles, made_dense, monkeypatch):
    """Recomputation projects once more, a tile at a time, and ends before the last product."""
    monkeypatch.setattr(importlib.import_module("liger_kernel.ops.projections.mlp"), "TILE", 4)
    products, opened = calls_of(monkeypatch, Weight, "forward"), []
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(DEVICE)
    stored = lambda w: Dequantized(tuple(w.shape), None, dequantize=lambda dtype: opened.append(1) or w.to(dtype))
    adapter = lambda N, K: Adapter(drawn(3, K).requires_grad_(), drawn(N, 3).requires_grad_(), 0.5)
    layer = lambda N, K: Projection((stored if made_dense else dense)(drawn(N, K)), drawn(N), (adapter(N, K),))
    gate, up, down = layer(24, 16), layer(24, 16), layer(16, 24)
    learnt = [t for p in (gate, up, down) for a in p.adapters for t in (a.a, a.b)]
    x, dy = drawn(rows, 16).requires_grad_(), drawn(rows, 16)
    each = lambda times: [n for n in tiles for _ in range(times)]
    found, node = [], lambda x: adapted_mlp(x, [gate, up], down, ends=True)
    for call, forward, backward in (
        (node, [rows] * 3, []),
        (lambda x: checkpoint(node, x, use_reentrant=False), each(3), each(2)),
    ):
        products.clear()
        opened.clear()
        y = call(x)
        found.append([y, *torch.autograd.grad(y, [x, *learnt], dy)])
        assert [args[1].rows.shape[0] for args, _ in products] == forward + backward
        assert len(opened) == made_dense * 6
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "N"), [(70, 130), (1, 5), (0, 4), (3, 300)])
def test_columns_of_a_magnitude(M, N, dtype):
    a, b = torch.randn(M, 2 * N, dtype=dtype, device=DEVICE)[:, :N], torch.randn(M, N, dtype=dtype, device=DEVICE)
    torch.testing.assert_close(dot_columns(a, b), (a.double() * b).sum(0).float(), rtol=1e-5, atol=1e-4)
    scale = torch.randn(N, device=DEVICE)
    assert torch.equal(times_columns(a, scale), (a.float() * scale).to(dtype))


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize(("a", "b"), [(1e5, 1e-6), (1e-6, 1e5)])
def test_thin_results_beyond_fp16(a, b, magnitude):
    """A x in the forward, or B^T dy in the backward, of adapters in fp32."""
    args = dict(x=T((7, 64)), scale=0.5, **_layer(64, 40, 3, dtype=torch.float32))
    torch.manual_seed(0)
    args = {k: v.make(torch.float16, DEVICE) if isinstance(v, T) else v for k, v in args.items()}
    args = {k: v.detach() * {"a": a, "b": b}.get(k, 1) if k in ("x", "a", "b") else v for k, v in args.items()}
    args = {k: v.detach().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    args["magnitude"] = torch.rand(40, device=DEVICE, requires_grad=True) if magnitude else None
    thin = lambda x, a, b: args[x].detach().float() @ args[a].detach().t()
    assert max(thin("x", "a", "b").abs().max(), args["b"].abs().max()) > 65504
    assert all(t.isfinite().all() for t in assert_beside(lora_linear, lora.reference, args).values())


def test_dropout_of_thin_results_beyond_fp16():
    x = torch.full((6, 64), 30.0, dtype=torch.float16, device=DEVICE, requires_grad=True)
    full = lambda value, *shape: torch.full(shape, value, device=DEVICE)
    w, a, b = full(0.0, 40, 64), full(1e3, 3, 64), full(1e-4, 40, 3)
    for p, q in ((a, b), (a * 1e-8, b * 1e8)):
        (y,) = linears(x, [Projection(dense(w.half()), None, (Adapter(p, q, 1.0, 0.5), Adapter(p, q)))])
        dy = torch.full_like(y, 10.0)
        z, dz = p.sum(1) @ q[0] * 30, 10 * q.sum(0) @ p[:, 0]
        assert 0.5 * z < (y.mean() - z) < 1.5 * z and y.isfinite().all()
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.isfinite().all() and {round(d.item(), 1) for d in (dx / dz).unique()} == {1.0, 3.0}


@needs_kernels
@pytest.mark.parametrize(
    ("w_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(("N", "K", "r"), [(70, 130, 3), (5, 20, 1), (33, 64, 40), (40, 48, 300)])
def test_norms_of_rows(N, K, r, w_dtype, dtype):
    """Of rows of which the adapter leaves little or nothing, as exact as by the sum in fp32."""
    torch.manual_seed(0)
    w = torch.randn(N, 2 * K, device=DEVICE).to(w_dtype)[:, ::2]
    a, b = torch.randn(r, K, device=DEVICE).to(dtype), torch.zeros(N, r, device=DEVICE, dtype=dtype)
    b[3:] = torch.randn(N - 3, r) / 8
    a[0] = w[0]
    for row, left in enumerate((0.0, 2.0**-7, 0.125)):  # numbers of bf16
        w[row], b[row, 0] = w[0], 2 * (left - 1)
    named = lambda norms: {f"row {i}": norms[i : i + 1] for i in range(3)} | {"rows": norms[3:]}
    by_sum = lambda w, a, b: torch.linalg.vector_norm(w + 0.5 * (b @ a), dim=1)
    stock, truth = (named(by_sum(*(t.to(kind) for t in (w, a, b)))) for kind in (torch.float32, torch.float64))
    assert_as_accurate(named(row_norms(w, a, b, 0.5)), stock, truth)
    assert row_norms(w.double(), a.double(), b.double(), 0.5)[:3].tolist() == pytest.approx(
        [t.item() for t in truth.values() if len(t) == 1], rel=1e-12
    )


@pytest.mark.parametrize("shape", [(), (1,), (40,)], ids=str)
def test_a_scale_that_is_a_tensor(shape):
    args = leaves(x=(7, 24), **{k: t.shape for k, t in _layer(24, 40, 3).items()})
    args["scale"] = (torch.rand(shape, device=DEVICE) + 0.5).requires_grad_()
    assert assert_beside(lora_linear, lora.reference, args)["dscale"].shape == shape
