"""Mixture of experts where a ``Case`` cannot say it."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from devices import DEVICE, assert_beside, leaves, needs_kernels
from quick import further
from watching import Watch, calls_of, saved, saved_unchanged

from liger_kernel.compile.launches import distinct, launches
from liger_kernel.compile.targets import compiling_for
from liger_kernel.nn import LigerExperts
from liger_kernel.ops import LigerFusedMoEFunction
from liger_kernel.ops.projections import grouped_mm as _grouped_mm, grouped_tma
from liger_kernel.ops.projections.lora_moe import lora_moe
from liger_kernel.ops.projections.moe import moe, moe_route, reference
from liger_kernel.testing import assert_as_accurate, assert_same_bits, differentiable, like, run


def arguments(
    tokens=11, K=2, H=16, I=24, E=4, used=None, *, dtype=torch.float32, grads=("x", "gate_up", "down", "topk_weight")
) -> dict:
    torch.manual_seed(0)
    draw = lambda *shape, scale=1.0: torch.randn(*shape, dtype=torch.float64) * scale
    args = dict(
        x=draw(tokens, H),
        gate_up=draw(E, 2 * I, H, scale=H**-0.5),
        down=draw(E, H, I, scale=I**-0.5),
        topk_index=torch.rand(tokens, used or E).argsort(-1)[:, :K].contiguous(),
        topk_weight=draw(tokens, K).softmax(-1),
    )
    cast = lambda name, t: t.to(DEVICE, dtype).requires_grad_(name in grads) if t.is_floating_point() else t.to(DEVICE)
    return {name: cast(name, t) for name, t in args.items()}


@needs_kernels
@pytest.mark.parametrize("n, E", [(100, 300), (1, 1), (0, 2), (640, 8), *further((5000, 3))])
def test_routing_is_a_stable_sort(n, E):
    """Over several blocks, too; what is no expert comes last."""
    torch.manual_seed(n)
    index = torch.randint(-1, E + 2, (n, 1), dtype=torch.int64, device=DEVICE)
    order, position, offs = moe_route(index, E)
    key = torch.where((index < 0) | (index >= E), E, index).flatten()
    expected = key.argsort(stable=True)
    assert torch.equal(order.long(), expected)
    assert torch.equal(position.long()[expected], torch.arange(n, device=DEVICE))
    assert torch.equal(offs.long(), torch.bincount(key, minlength=E + 1).cumsum(0)[:E])


def far_from_limits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """On one side or the other: where rounding decides, a gradient is a matter of luck."""
    return (torch.randint(-1, 2, shape) * 12.0).to(DEVICE, dtype).requires_grad_()


@needs_kernels
def test_tiles_of_several_strips_and_steps():
    """More row tiles than a strip, columns than a tile, rows of an expert than a step."""
    assert_beside(moe, reference, arguments(400, 1, 40, 20, 2, grads=("x", "gate_up")))


@needs_kernels
def test_no_expert_at_all():
    args = arguments()
    args["topk_index"].fill_(4)
    out = run(moe, args)
    assert len(out) == 5 and not any(t.any() for t in out.values())


@needs_kernels
def test_pytorch_products_that_leave_what_is_empty(monkeypatch):
    """Nothing relies on rows of no group, nor on groups without rows, being written."""

    def grouped(a, b, *, offs):
        ends = offs.tolist()
        rows = [slice(start, stop) for start, stop in zip([0, *ends], ends)]
        if b.ndim == 3:
            y = a.new_full((a.shape[0], b.shape[2]), float("nan"))
            for e, r in enumerate(rows):
                y[r] = a[r] @ b[e]
        else:
            y = a.new_full((len(ends), a.shape[0], b.shape[1]), float("nan"))
            for e, r in enumerate(rows):
                if r.stop > r.start:
                    y[e] = a[:, r] @ b[r]
        calls.append(b.ndim)
        return y

    calls = []
    monkeypatch.setattr(_grouped_mm, "_cutlass", lambda a, b: True)
    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    args = arguments(used=2)
    args["topk_index"][::3, 0] = -1
    assert_beside(moe, reference, args)
    assert calls == [3, 3, 3, 2, 2, 3]


@pytest.mark.parametrize(
    "t, aligned",
    [
        (torch.empty(4, 8), True),
        (torch.empty(3, 8, 16).mT, True),
        (torch.empty(4, 12), False),
        (torch.empty(4, 17)[:, :16], False),
        (torch.empty(4 * 8 + 1)[1:].view(4, 8), False),
        (torch.empty(8).expand(4, 8), False),
        (torch.empty(4, 8, 2)[..., 0], False),
    ],
)
def test_only_aligned_matrices_go_to_tma(t, aligned):
    assert grouped_tma.aligned(t.bfloat16() if t.is_contiguous() and t.storage_offset() == 0 else t) is aligned


@needs_kernels
@pytest.mark.parametrize(
    "grads, mm, outer",
    [
        ((), 2, 0),
        (("x",), 4, 0),
        (("down",), 2, 1),
        (("topk_weight",), 3, 0),
        (("gate_up",), 3, 1),
        (("x", "gate_up", "down", "topk_weight"), 4, 2),
    ],
)
def test_what_is_frozen_has_no_products(grads, mm, outer):
    with Watch() as seen:
        run(moe, arguments(grads=grads))
    count = seen.names.count
    assert (count("moe_up") + count("grouped_mm"), count("grouped_outer")) == (mm, outer)


@needs_kernels
def test_saves_one_activation():
    """Beside the arguments: what gate_up yields, and the order."""
    args = arguments(grads=("x", "gate_up", "down", "topk_weight"))
    with saved() as kept:
        moe(**args)
    sizes = {t.data_ptr(): t.numel() for t in kept}
    assert sum(n for p, n in sizes.items() if p not in {t.data_ptr() for t in args.values()}) == 22 * 48 + 2 * 22 + 4


@needs_kernels
def test_function_takes_what_the_published_one_takes():
    args = arguments()
    args["topk_index"] = args["topk_index"].int()
    assert_same_bits(run(lambda **a: LigerFusedMoEFunction.apply(*a.values()), like(args)), run(moe, like(args)))


def test_autocast():
    args = arguments()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = moe(**args)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in differentiable(args).values())
    config = types.SimpleNamespace(hidden_size=16, intermediate_size=8, num_local_experts=4, hidden_act="silu")
    experts = LigerExperts(config).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert experts(args["x"], args["topk_index"], args["topk_weight"]).dtype == torch.float32


@pytest.mark.parametrize("shape", [(11, 16), (1, 11, 16)])
def test_experts_equal_those_of_transformers(shape):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=4)
    config._experts_implementation = "eager"
    theirs, ours = modeling.Qwen3MoeExperts(config).to(DEVICE), LigerExperts(config).to(DEVICE)
    args = arguments()
    ours.load_state_dict(theirs.state_dict())

    def of(module):
        def forward(x, gate_up, down, *routing):
            return torch.func.functional_call(module, {"gate_up_proj": gate_up, "down_proj": down}, (x, *routing))

        return lambda **args: forward(*args.values())

    assert_beside(of(ours), of(theirs), args)
    out = ours(args["x"].view(shape), args["topk_index"].view(*shape[:-1], 2), args["topk_weight"].view(*shape[:-1], 2))
    assert out.shape == shape


def test_gpt_oss_layout_needs_no_copies():
    """Weights (E, H, 2 I) and (E, I, H) are passed transposed, gradients come back as stored."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=4)
    config._experts_implementation = "eager"
    theirs = modeling.GptOssExperts(config).to(DEVICE)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    args = arguments()
    args = {k: args[k] for k in ("x", "topk_index", "topk_weight")} | like(dict(theirs.named_parameters()))

    def stock(x, topk_index, topk_weight, **parameters):
        return torch.func.functional_call(theirs, parameters, (x, topk_index, topk_weight))

    how = dict(interleaved=True, alpha=theirs.alpha, limit=theirs.limit, offset=1.0)

    def fused(x, topk_index, topk_weight, gate_up_proj, gate_up_proj_bias, down_proj, down_proj_bias):
        biases = dict(gate_up_bias=gate_up_proj_bias, down_bias=down_proj_bias)
        return moe(x, gate_up_proj.mT, down_proj.mT, topk_index, topk_weight, **biases, **how)

    ours = assert_beside(fused, stock, args)
    assert ours["dgate_up_proj"].is_contiguous() and ours["ddown_proj"].is_contiguous()


@needs_kernels
@pytest.mark.parametrize(
    "grads", [("x", "gate_up", "down", "topk_weight"), ("x",), ("down",), ("topk_weight",)], ids=" ".join
)
@pytest.mark.parametrize("adapted", ["none", "down", "both"])
def test_recomputed(adapted, grads):
    """The same bits, from x, the routing, the weights and a thin product alone."""
    args, fn = arguments(grads=grads), moe if adapted == "none" else lora_moe
    args = args if adapted == "none" else with_adapters(args, gate_up=adapted == "both")
    expected = run(fn, args)
    with saved() as kept:
        y = fn(**like(args), recompute=True)
    assert_same_bits(run(functools.partial(fn, recompute=True), like(args)), expected)
    assert y.requires_grad and not [t for t in kept if t.shape == (22, 48)] and kept


def with_adapters(args: dict, *, gate_up: bool = True) -> dict:
    of_gate_up = dict(gate_up_a=(4, 3, 16), gate_up_b=(4, 48, 3)) if gate_up else {}
    return args | leaves(**of_gate_up, down_a=(4, 3, 24), down_b=(4, 16, 3))


@needs_kernels
@pytest.mark.parametrize("adapted", [False, True])
def test_what_others_may_see_is_not_overwritten(adapted):
    """The backward writes the gradient of h into h, unless somebody has kept it."""
    args, fn = (with_adapters(arguments()), lora_moe) if adapted else (arguments(), moe)
    expected = run(fn, like(args))
    with saved_unchanged():
        assert_same_bits(run(fn, like(args)), expected)


@needs_kernels
@pytest.mark.parametrize(
    "form, transposed",
    [
        ({}, False),
        (dict(limit=6.0, offset=1.0, alpha=1.5), False),
        *((dict(interleaved=True), t) for t in (False, True)),
    ],
    ids=["halves", "limits", "interleaved", "transposed"],
)
@pytest.mark.parametrize(
    "sizes", [dict(), dict(tokens=70, K=1, I=40, E=2), dict(tokens=1, E=1, K=1), dict(tokens=40, used=2, E=5)], ids=str
)
def test_products_by_tma(sizes, form, transposed, monkeypatch):
    """With rows of no group, nan where nothing writes, and tiles over the end of groups."""
    args = arguments(dtype=torch.bfloat16, **sizes)
    if transposed:
        args["gate_up"] = args["gate_up"].detach().mT.contiguous().requires_grad_()
    if "limit" in form:
        args["gate_up_bias"] = far_from_limits(*args["gate_up"].shape[:2], dtype=torch.bfloat16)
    if args["topk_index"].numel() > 1:
        args["topk_index"][::3, 0] = -1
    of = lambda op: lambda gate_up, **more: op(gate_up=gate_up.mT if transposed else gate_up, **more, **form)
    plain, truth = run(of(moe), like(args)), run(of(reference), like(args, torch.float64))
    monkeypatch.setattr(grouped_tma, "supported", lambda a, b: b.is_contiguous() or b.mT.is_contiguous())
    ran = calls_of(monkeypatch, grouped_tma, "product")
    with torch.no_grad():
        y = of(moe)(**args)
    by_tma = run(of(moe), like(args))
    assert [len(given) for given, _ in ran] == [7, 4, 7, 4, 4, 4]
    assert torch.equal(y, next(iter(by_tma.values())))
    assert_as_accurate(by_tma, plain, truth)


@needs_kernels
@pytest.mark.parametrize("arch, products", [("sm90", {"_mm_tma"}), ("sm80", {"_glu", "_mm"})])
def test_who_multiplies(arch, products):
    """Launches without data, as a warm-up sees them: one for each kernel."""
    draw = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    def step():
        for tokens in (8, 24):
            moe(draw(tokens, 64), draw(4, 64, 64), draw(4, 64, 32), draw(tokens, 2).long(), draw(tokens, 2))

    with compiling_for(arch):
        names = [kernel.fn.__name__ for kernel, _, _ in distinct(launches(step, "meta"))]
    assert {"_glu", "_mm", "_mm_tma"} & set(names) == products
    assert names.count("_mm_tma") == (2 if arch == "sm90" else 0)  # of gate_up and of down
