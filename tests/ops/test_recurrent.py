"""Recurrent layers beside what they must equal: documents alone, a sequence in two halves, and the
chunked form in PyTorch."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs_kernels
from torch import Tensor

from liger_kernel.ops import OPS, causal_conv1d, gated_delta_rule, kda, ssd
from liger_kernel.ops._core import operator
from liger_kernel.testing import assert_as_accurate, assert_same_bits, errors, floors, like, run

delta = importlib.import_module("liger_kernel.ops.recurrent.gated_delta_rule")
scan = importlib.import_module("liger_kernel.ops.recurrent.ssd")


def heads(
    length: int = 37, HV: int = 2, D: int = 16, dtype: torch.dtype = torch.float32, equal: float = 0.0,
    channels: bool = False, strong: float = 0.0,
) -> dict:  # fmt: skip
    """Arguments of the gated delta rule, or with ``channels`` of KDA; keys that are the more alike
    the larger ``equal`` is."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, h, D) for h in ((HV, HV, HV) if channels else (1, 1, HV)))
    k = k + equal * torch.randn(1, 1, 1, D)
    g = -F.softplus(torch.randn(1, length, HV, *([D] if channels else [])) - 3)
    # some channels forget all that they knew
    g = torch.where(torch.rand(g.shape) < strong, 100 * g, g)
    given = dict(q=q, k=k, v=v, g=g, beta=torch.randn(1, length, HV).sigmoid())
    kept = {"g": torch.float32}
    return {name: t.to(DEVICE, kept.get(name, dtype)).requires_grad_() for name, t in given.items()}


def rule(**args):
    return (kda if args["g"].ndim == 4 else gated_delta_rule)(**args, qk_l2norm=True)


def kda_heads(**how) -> dict:
    return heads(HV=1, channels=True, **how)


def channels(length: int = 37, W: int = 3) -> dict:
    torch.manual_seed(0)
    given = {name: torch.randn(1, length, 20) for name in ("x", "before", "after")}
    given |= dict(w=torch.randn(20, W), bias=torch.randn(20))
    return {name: t.to(DEVICE).requires_grad_() for name, t in given.items()}


def conv(**args):
    return causal_conv1d(**args, act="silu")


def scanned(length: int = 37, dtype: torch.dtype = torch.float32, step: float = -3.0) -> dict:
    """Arguments of the scan, whose steps are softplus(step) or so."""
    torch.manual_seed(0)
    given = dict(x=torch.randn(1, length, 4, 16), dt=torch.randn(1, length, 4) + step, A=-8 * torch.rand(4) - 0.5)
    given |= dict(B=torch.randn(1, length, 2, 16), C=torch.randn(1, length, 2, 16))
    return {name: t.to(DEVICE, dtype).requires_grad_() for name, t in given.items()}


def softplus_scan(**args):
    return ssd(**args, dt_softplus=True)


LAYERS = pytest.mark.parametrize(
    "layer, args",
    [(rule, heads), (rule, kda_heads), (conv, channels), (softplus_scan, scanned)],
    ids=["delta", "kda", "conv", "ssd"],
)


def parts(args: dict, bounds: list[int]) -> list[dict]:
    """The tokens between bounds, of tensors that have tokens."""
    some = lambda t, a, b: t[:, a:b] if t.ndim > 2 else t
    return [{k: some(t, a, b) for k, t in args.items()} for a, b in itertools.pairwise(bounds)]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-5 * (1 + t.abs().max().item()), msg=name)


@LAYERS
def test_documents_are_rows_of_their_own(layer, args):
    bounds = [0, 1, 34, 37]
    alone = lambda **a: tuple(
        torch.cat(t, i) for i, t in zip((1, 0), zip(*(layer(**p, output_final_state=True) for p in parts(a, bounds))))
    )
    cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    packed = lambda **a: layer(**a, cu_seqlens=cu, output_final_state=True)
    assert_close(run(packed, like(args())), run(alone, like(args())))


@LAYERS
@pytest.mark.parametrize("at", [1, 35])
def test_a_state_carries_from_one_half_to_the_other(layer, args, at):
    def halves(**a):
        one, other = parts(a, [0, at, 37])
        y, state = layer(**one, output_final_state=True)
        z, state = layer(**other, initial_state=state, output_final_state=True)
        return torch.cat((y, z), 1), state

    whole = lambda **a: layer(**a, output_final_state=True)
    assert_close(run(halves, like(args())), run(whole, like(args())))


def test_is_a_grouped_convolution():
    args = channels(W=4)
    x, w = (args["before"] * args["x"]).mT, args["w"][:, None]
    u = F.conv1d(x, w, args["bias"], padding=3, groups=20)[..., :37]
    torch.testing.assert_close(causal_conv1d(**args)[0], args["after"] * u.mT)
    torch.testing.assert_close(conv(**args)[0], args["after"] * F.silu(u).mT)


class Product16(torch.autograd.Function):
    """a b and its gradients, with operands in bf16 and sums in fp32."""

    @staticmethod
    def forward(ctx, a, b):
        a, b = a.bfloat16().float(), b.bfloat16().float()
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        (a, b), g = ctx.saved_tensors, g.bfloat16().float()
        return g @ b.mT, a.mT @ g


def chunked(q, k, v, g, beta, product=torch.matmul, C: int = 64) -> Tensor:
    """The chunked form, in fp32 but for the operands of products."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]
    unit = lambda t: F.normalize(t[0].float(), dim=-1, eps=1e-6).repeat_interleave(group, 1)
    q, k, v, g, beta = (t.transpose(0, 1) for t in (unit(q), unit(k), v[0].float(), g[0].float(), beta[0].float()))
    channels = g.ndim == 3
    S, out = v.new_zeros(v.shape[0], q.shape[-1], v.shape[-1]), []
    for rows in zip(*(t.split(C, 1) for t in (q * q.shape[-1] ** -0.5, k, v, g, beta))):
        Q, K, V, G, b = rows
        G, b = G.cumsum(1), b[..., None]
        G = G if channels else G[..., None]
        before = torch.ones(G.shape[1], G.shape[1], device=G.device).tril().bool()[..., None]
        E = torch.where(before, G[:, :, None] - G[:, None], -torch.inf).exp()
        L, P = (
            product(a[:, :, None], (K[:, None] * E).mT)[:, :, 0] if channels else product(a, K.mT) * E[..., 0]
            for a in (K, Q)
        )
        L = L.tril(-1)
        y = b * (V - product(G.exp() * K, S))
        d = torch.linalg.solve_triangular(torch.eye(L.shape[1], device=L.device) + b * L, y, upper=False)
        out.append(product(G.exp() * Q, S) + product(P, d))
        S = G[:, -1:].mT.exp() * S + product(((G[:, -1:] - G).exp() * K).mT, d)
    return torch.cat(out, 1).transpose(0, 1)[None].to(dtype)


def test_places_in_a_tile_have_32_bits():
    """Rows of a wider stride are copied: of 64 of them, the last is beyond 2^31 elements."""
    rows = lambda stride: torch.empty_strided((2, 1, 16), (stride, 16, 1), device="meta")
    near, far = rows(2**25 - 1), rows(2**25)
    assert delta._dense(near) is near and delta._dense(far).stride() == (16, 16, 1)


@LAYERS
@pytest.mark.parametrize("wrong", [[0, 36], [1, 37], [0, 20, 10, 37]])
def test_bounds_that_are_none_are_refused_on_a_cpu(layer, args, wrong, monkeypatch):
    monkeypatch.setattr(operator, "_KERNEL_DEVICES", set())
    given = {name: t.cpu() for name, t in args().items()}
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 37"):
        layer(**given, cu_seqlens=torch.tensor(wrong))


def test_decays_that_forget_at_once():
    """Sums of them are large, and what a token adds to them is not to be lost."""
    args = heads(70, 4, strong=1.0)
    found = run(rule, like(args))["dg"]
    truth = run(lambda **a: OPS["gated_delta_rule"].reference(**a, **REST), like(args, torch.float64))["dg"]
    assert errors(found, truth)["rms"] < 6e-7


@needs_kernels
@pytest.mark.parametrize(
    "equal, channels, strong", [(0.0, False, 0.0), (4.0, False, 0.0), (4.0, True, 0.0), (4.0, True, 0.1)]
)
def test_chunks_are_as_exact_as_those_of_pytorch(equal, channels, strong, monkeypatch):
    """Of 64 tokens, as on a GPU; the gradient of an fp32 g beside one from products in bf16."""
    monkeypatch.setattr(delta, "_chunk", lambda *_: 64)
    args = heads(130, 1 if channels else 2, 32, torch.bfloat16, equal, channels, strong)
    truth = run(lambda **a: OPS["gated_delta_rule"].reference(**a, **REST), like(args, torch.float64))
    ours, stock = run(rule, like(args)), run(chunked, like(args))
    in_bf16 = run(lambda **a: chunked(**a, product=Product16.apply), like(args))
    for name, t in truth.items():
        rival = in_bf16 if name == "dg" else stock
        mine, theirs, floor = errors(ours[name], t), errors(rival[name], t), floors(ours[name].dtype, t.numel())
        assert all(mine[kind] <= 2 * theirs[kind] + floor[kind] for kind in mine), (name, mine, theirs)


REST = dict(scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, qk_l2norm=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_of_beta_where_it_is_zero(dtype):
    args = heads(dtype=dtype)
    args["beta"] = (args["beta"].detach() * (torch.arange(37, device=DEVICE) % 3 > 0)[:, None]).requires_grad_()
    found = run(rule, like(args))["dbeta"]
    truth = run(lambda **a: OPS["gated_delta_rule"].reference(**a, **REST), like(args, torch.float64))["dbeta"]
    assert errors(found, truth)["rms"] < 4 * torch.finfo(dtype).eps


@needs_kernels
@pytest.mark.parametrize("step", [-12.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scan_with_decays_near_one_and_near_zero(step, dtype, monkeypatch):
    """In 16 bits, of chunks as on a GPU."""
    if dtype == torch.bfloat16:
        monkeypatch.setattr(scan, "_chunk", lambda *_: (64, 64))
    args, rest = scanned(70, dtype, step), dict.fromkeys(("D", "dt_bias", "initial_state", "cu_seqlens"))
    rest |= dict(dt_softplus=True, dt_limit=(0.0, float("inf")), output_final_state=False)
    expected = [run(lambda **a: OPS["ssd"].reference(**a, **rest), like(args, to)) for to in (dtype, torch.float64)]
    assert_as_accurate(run(softplus_scan, like(args)), *expected)


@needs_kernels
@pytest.mark.parametrize("layer, args", [(rule, heads), (softplus_scan, scanned)], ids=["delta", "ssd"])
def test_recomputed_states_change_no_bit(layer, args):
    given = args(dtype=torch.bfloat16) | dict(cu_seqlens=torch.tensor([0, 1, 35, 37], device=DEVICE))
    assert_same_bits(run(lambda **a: layer(**a, recompute=True), like(given)), run(layer, like(given)))


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103"])
def test_loops_over_chunks_by_tma_have_stages(arch, monkeypatch):
    """Of 32 values and one stage, Triton 3.6 makes a kernel with an illegal access."""
    monkeypatch.setattr(delta.launch_config, "arch", lambda: arch)
    monkeypatch.setattr(delta.launch_config, "processors", lambda: 132)
    for DK, DV, many in itertools.product((16, 64, 128, 256), (16, 64, 256), (1, 9999)):
        q, v = (torch.empty(8, 1, D, dtype=torch.bfloat16, device="meta") for D in (DK, DV))
        assert delta._by_tma(q, q, v)
        for kernel in ("states", "dstates", "kda_dstates"):
            assert delta._tile(kernel, q, DV, many)["STAGES"] > 1


@needs_kernels
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 140, 165, 165]], ids=["row", "packed"])
@pytest.mark.parametrize("args", [heads, kda_heads], ids=["delta", "kda"])
def test_parts_of_a_row_change_no_bit(args, bounds, recompute, monkeypatch):
    """Documents that end where a part ends or go on through several, with states at both ends."""
    given, cu = args(length=165, dtype=torch.bfloat16), None if bounds is None else torch.tensor(bounds, device=DEVICE)
    state = torch.randn(1 if bounds is None else 5, given["v"].shape[2], 16, 16, device=DEVICE, requires_grad=True)
    given |= dict(initial_state=state, output_final_state=True, cu_seqlens=cu)
    expected = run(rule, like(given))
    monkeypatch.setattr(delta, "PART", 1)
    if DEVICE == "cpu":  # whose interpreter loads blocks in both ways
        monkeypatch.setattr(delta, "_by_tma", lambda *_: True)
    stock, counted = delta._parts, []

    def count(*sizes):
        counted.append(stock(*sizes))
        return counted[-1]

    monkeypatch.setattr(delta, "_parts", count)
    assert_same_bits(run(lambda **a: rule(**a, recompute=recompute), like(given)), expected)
    # a backward of kda, whose gradients of states are large, goes in parts in any case
    assert max(counted, default=1) > 1 or (not recompute and args is heads)


@needs_kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter loads blocks in both ways")
def test_blocks_by_tma_change_no_bit(monkeypatch):
    args = heads(dtype=torch.bfloat16) | dict(cu_seqlens=torch.tensor([0, 1, 35, 37], device=DEVICE))
    expected = run(rule, like(args))
    monkeypatch.setattr(delta, "_by_tma", lambda *_: True)
    assert_same_bits(run(rule, like(args)), expected)
