"""Rotary embeddings as models call them, against the functions of transformers; and fused with
the norm before them."""

from __future__ import annotations

import importlib

import pytest
import torch
from devices import DEVICE, assert_beside, leaves, needs_kernels
from quick import further
from torch import Tensor

from liger_kernel import nn as lnn
from liger_kernel.operator_checks import ones
from liger_kernel.ops import (
    LigerLlama4RopeFunction,
    LigerQwen2VLMRopeFunction,
    LigerRopeFunction,
    qk_norm_rope,
    rms_norm,
    rope,
)
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.rotary.rope import LAYOUTS
from liger_kernel.testing import assert_as_accurate, assert_same_bits, forward, like, run

GPU = torch.cuda.is_available()
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit; a GPU's compiler may fuse a product and a sum."""
    if not GPU:
        return assert_same_bits(ours, theirs)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name])


def random(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype).requires_grad_()


def only_outs(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in found.items() if k.startswith("out")}


def twice(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Tables as transformers makes them."""
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


# -- text: halves of the columns ------------------------------------------------------------


@needs_kernels
@in_dtypes
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("model", "layout", "casting"), [("llama", "halves", "none"), ("glm", "pairs", "none"), ("olmo2", "halves", "back")]
)
@pytest.mark.parametrize("unsqueeze_dim", [1, *further(2)])
def test_without_upcast_it_is_bit_for_bit_what_models_compute(model, layout, casting, unsqueeze_dim, dtype, tables):
    """Products are rounded to bf16, on a GPU as well. Tables in fp32: under autocast."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    torch.manual_seed(0)
    shape = lambda heads: (2, heads, 37, 32) if unsqueeze_dim == 1 else (2, 37, heads, 32)
    args = dict(q=random(*shape(3), dtype=dtype), k=random(*shape(1), dtype=dtype))
    angles = torch.randn(2, 37, 16, device=DEVICE)
    cos, sin = (t.to(tables) for t in twice(angles))
    theirs = run(lambda q, k: module.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim), like(args))
    how, once = dict(layout=layout, unsqueeze_dim=unsqueeze_dim, casting=casting), (cos[..., :16], sin[..., :16])
    ours = run(lambda q, k: rope(q, k, *once, **how), like(args))
    (assert_same if torch.float32 in (dtype, tables) else assert_same_bits)(ours, theirs)


# -- Llama 4: complex numbers ----------------------------------------------------------------


def llama4(dtype: torch.dtype, *table: int) -> tuple[dict, Tensor]:
    torch.manual_seed(0)
    angles = torch.randn(*table, device=DEVICE)
    args = dict(q=random(2, 5, 3, 8, dtype=dtype), k=random(2, 5, 1, 8, dtype=dtype))
    return args, torch.polar(torch.ones_like(angles), angles)


def check_llama4(ours, theirs, args: dict, freqs: Tensor) -> None:
    """Complex products may be fused on some processors; real ones are bit for bit."""
    exact = freqs.to(torch.complex128).reshape(-1, 5, 1, 4)
    product = lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * exact).flatten(3)
    truth = run(lambda q, k: (product(q), product(k)), like(args, torch.float64))
    ours, theirs = (run(lambda q, k, fn=fn: fn(q, k, freqs), like(args)) for fn in (ours, theirs))
    assert_as_accurate(ours, theirs, truth)
    if not freqs.is_complex():
        assert_same(ours, theirs)


@in_dtypes
@pytest.mark.parametrize("batch", [1, 2])
def test_llama4_text(dtype, batch):
    """Each sequence by its own angles."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    args, freqs = llama4(dtype, batch, 5, 4)
    ours = lnn.liger_llama4_text_rotary_pos_emb
    check_llama4(ours, apply_rotary_emb, args, freqs)
    if _op._KERNEL_DEVICES:
        found = run(lambda q, k: LigerLlama4RopeFunction.apply(q, k, freqs, 128), like(args))
        assert_same_bits(found, run(lambda q, k: ours(q, k, freqs), like(args)))


@pytest.mark.parametrize("table", [(5, 1, 4), (5, 4), (1, 5, 1, 4)], ids=str)
@pytest.mark.parametrize("complex", [True, False])
def test_llama4_vision(table, complex):
    """``model.to(dtype)`` makes real numbers of the table; that is the model's loss, and ours."""
    from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb

    args, freqs = llama4(torch.float32, *table)
    freqs = freqs if complex else freqs.real
    check_llama4(lnn.liger_llama4_vision_rotary_pos_emb, vision_apply_rotary_emb, args, freqs)


def test_tables_must_fit():
    """Of Llama 4; and sections, which must be all pairs."""
    args, freqs = llama4(torch.float32, 2, 4, 4)
    said = r"rope: cos and sin must have shape \(2 or 1, 5, at most 4\), got \(2, 4, 4\) and \(2, 4, 4\)"
    with pytest.raises(ValueError, match=said):
        lnn.liger_llama4_vision_rotary_pos_emb(args["q"], args["k"], freqs)
    q, tables = torch.randn(1, 2, 5, 16), twice(torch.randn(3, 1, 5, 8))
    with pytest.raises(ValueError, match=r"mrope: mrope_section must sum to 8, got \(4, 6, 6\)"):
        lnn.liger_multimodal_rotary_pos_emb(q, q, *tables, [4, 6, 6])


# -- Qwen-VL: sections and patches -----------------------------------------------------------


@in_dtypes
def test_vision(dtype):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    torch.manual_seed(0)
    cos, sin = twice(torch.randn(7, 4, device=DEVICE))
    args = dict(q=random(7, 3, 8, dtype=dtype), k=random(7, 3, 8, dtype=dtype))
    assert_same(
        run(lambda q, k: lnn.liger_rotary_pos_emb_vision(q, k, cos, sin), like(args)),
        run(lambda q, k: apply_rotary_pos_emb_vision(q, k, cos, sin), like(args)),
    )


@needs_kernels
@in_dtypes
@pytest.mark.parametrize("width", [16, 17])
def test_tables_of_one_sequence(dtype, width):
    """(T, R) for all; of an odd width the last column passes through."""
    torch.manual_seed(0)
    cos, sin = twice(torch.randn(5, 8, device=DEVICE))
    args = dict(q=random(2, 3, 5, width, dtype=dtype), k=random(2, 1, 5, width, dtype=dtype))
    expected = run(lambda q, k: lnn.liger_rope(q, k, cos[None], sin[None]), like(args))
    assert expected["out0"].dtype == dtype
    for fn in (lnn.liger_rope, LigerRopeFunction.apply):
        assert_same_bits(run(lambda q, k, fn=fn: fn(q, k, cos, sin), like(args)), expected)
    rows = {name: x.detach().transpose(1, 2) for name, x in args.items()}
    vision = lambda q, k: lnn.liger_rotary_pos_emb_vision(q, k, cos, sin)
    of_a_batch = forward(vision, rows)
    for i in range(2):
        alone = forward(vision, {name: x[i] for name, x in rows.items()})
        assert_same_bits({name: out[i] for name, out in of_a_batch.items()}, alone)


@in_dtypes
@pytest.mark.parametrize(
    "model, name", [("qwen2_vl", "Qwen2VLRotaryEmbedding"), ("qwen3_vl", "Qwen3VLTextRotaryEmbedding")]
)
def test_multimodal(model, name, dtype):
    """transformers puts the sections together once a model, in turns or interleaved, and
    ``liger_rope`` takes them as they are.

    Where it gets all three tables, as in earlier releases, ``liger_multimodal_rotary_pos_emb`` does
    so. transformers rounds to bf16 at every step.
    """
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb

    torch.manual_seed(0)
    args = dict(q=random(2, 3, 5, 16, dtype=dtype), k=random(2, 1, 5, 16, dtype=dtype))
    position_ids = torch.randint(0, 9, (3, 2, 5), device=DEVICE)
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    parameters = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
    sizes = dict(hidden_size=48, num_attention_heads=3, head_dim=16, rope_parameters=parameters)
    found = getattr(module, name)(getattr(module, f"{name[:7]}TextConfig")(**sizes)).to(DEVICE)
    cos, sin = found(args["q"].float(), position_ids)
    of = lambda fn, dtype: run(lambda q, k: fn(q, k, cos.to(dtype), sin.to(dtype)), like(args, dtype))
    stock = of(apply_rotary_pos_emb, dtype)

    def check(ours: dict[str, Tensor]) -> None:
        if dtype == torch.float32:
            assert_same(ours, stock)
        else:
            assert_as_accurate(ours, stock, of(apply_rotary_pos_emb, torch.float64))

    check(of(lnn.liger_rope, dtype))
    if model == "qwen2_vl":
        tables = [t.to(dtype) for t in twice(position_ids[..., None] * found.inv_freq)]
        functions = [LigerQwen2VLMRopeFunction.apply] if _op._KERNEL_DEVICES else []
        for fn in (lnn.liger_multimodal_rotary_pos_emb, *functions):
            check(run(lambda q, k, fn=fn: fn(q, k, *tables, [2, 3, 3]), like(args)))


# -- slices of one projection ----------------------------------------------------------------


def _norm_and_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.linspace(0.5, 1.5, q.shape[-1], device=q.device)
    return qk_norm_rope(q, k, w, w, cos, sin, unsqueeze_dim=2, casting="gemma")


@needs_kernels
@pytest.mark.parametrize(
    "fn", [lambda *args: rope(*args, unsqueeze_dim=2), _norm_and_rope], ids=["rope", "qk_norm_rope"]
)
@pytest.mark.parametrize(
    "slices", [lambda x: x.split((4, 2, 2), 2), lambda x: x.unflatten(2, (4, 2)).unbind(3)[:2]], ids=["split", "unbind"]
)
def test_slices_of_a_projection_are_read_where_they_are(fn, slices):
    """Kernels get the caller's memory, gradients included; a packed gradient arrives."""
    torch.manual_seed(0)
    angles = torch.randn(1, 5, 4, device=DEVICE)
    qkv, cos, sin = random(2, 5, 8, 8), angles.cos(), angles.sin()
    launched = []
    with _op.intercept_launches(lambda kernel, grid, args, meta: launched.append(args)):
        q, k = slices(qkv)[:2]
        outs = fn(q, k, cos, sin)
        attention = [torch.randn(o.transpose(1, 2).shape, device=DEVICE).transpose(1, 2) for o in outs]
        torch.autograd.grad(outs, [q, k], attention)
    place = lambda t: (t.data_ptr(), t.stride())
    assert {place(t) for args in launched for t in args[:2]} == {place(t) for t in (q, k, *attention)}

    apart = {name: x.detach().clone().requires_grad_() for name, x in zip("qk", slices(qkv))}
    expected = run(lambda q, k: fn(q, k, cos, sin), apart)
    ours = run(lambda qkv: fn(*slices(qkv)[:2], cos, sin), dict(qkv=qkv))
    assert_same_bits(only_outs(ours) | dict(zip(("dq", "dk"), slices(ours["dqkv"]))), expected)


# -- fused with the norm before --------------------------------------------------------------


def eighths(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose squares add up without rounding, in whatever order."""
    return (torch.randn(*shape, device=DEVICE) * 8).round().div(8).to(dtype).requires_grad_()


@in_dtypes
@pytest.mark.parametrize("casting, offset", [("llama", 0.0), ("llama", 1.0), ("gemma", 1.0), ("none", 0.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_qk_norm_rope_is_the_operators_in_sequence(dtype, casting, offset, layout):
    torch.manual_seed(0)
    angles = torch.randn(2, 3, 5, device=DEVICE)
    q, k = eighths(2, 3, 3, 16, dtype=dtype), eighths(2, 1, 3, 16, dtype=dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wq, wk = random(16, dtype=dtype), random(16, dtype=dtype)
    norm = lambda x, w: rms_norm(x, w, eps=1e-6, offset=offset, casting=casting)
    expected = rope(norm(q, wq), norm(k, wk), cos, sin, layout=layout)
    ours = qk_norm_rope(q, k, wq, wk, cos, sin, eps=1e-6, offset=offset, casting=casting, layout=layout)
    assert_same(dict(zip("qk", ours)), dict(zip("qk", expected)))
    if layout == "halves":
        tables = (torch.cat((t, t), -1) for t in (cos, sin))
        by_name = lnn.liger_qk_norm_rope(q, k, wq, wk, *tables, eps=1e-6, offset=offset, casting_mode=casting)
        assert_same_bits(dict(zip("qk", by_name)), dict(zip("qk", ours)))


@needs_kernels
def test_qk_norm_rope_of_zeros():
    """With eps 0, heads beyond the last of a tile have no finite 1/rms, and no say in dw."""
    args, angles = leaves(q=(1, 3, 2, 8), k=(1, 1, 2, 8), wq=(8,), wk=(8,)), torch.randn(1, 2, 4, device=DEVICE)
    fn = lambda **args: qk_norm_rope(**args, cos=angles.cos(), sin=angles.sin(), eps=0.0)
    assert all(t.isfinite().all() for t in run(fn, args, ones).values())


@needs_kernels
@pytest.mark.parametrize("fn", [rope, qk_norm_rope], ids=lambda f: f.__name__)
def test_positions_of_no_tokens(fn):
    weights = [torch.ones(8, device=DEVICE)] * 2 if fn is qk_norm_rope else []
    ids, table = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE), random(11, 4).detach()
    q, k = fn(random(2, 3, 0, 8), random(2, 1, 0, 8), *weights, table, table, ids)
    assert (q.shape, k.shape) == ((2, 3, 0, 8), (2, 1, 0, 8))


def test_qk_norm_rope_beyond_the_table():
    args, angles = leaves(q=(1, 2, 3, 8), k=(1, 1, 3, 8), wq=(8,), wk=(8,)), torch.randn(4, 4, device=DEVICE)
    ids = torch.tensor([[0, 4, -1]], device=DEVICE)
    yq, yk = qk_norm_rope(**args, cos=angles.cos(), sin=angles.sin(), position_ids=ids)
    assert yq[:, :, 0].isfinite().all() and yq[:, :, 1:].isnan().all() and yk[:, :, 1:].isnan().all()


def test_wide_heads_take_the_reference():
    args, angles = (
        leaves(q=(1, 1, 1, 1026), k=(1, 1, 1, 1026), wq=(1026,), wk=(1026,)),
        torch.randn(1, 1, 513, device=DEVICE),
    )
    assert_beside(qk_norm_rope, qk_norm_rope, args | dict(cos=angles.cos(), sin=angles.sin()))


def test_one_backward_launch_for_q_and_k_of_any_weights():
    """And one that sums their gradients of weights."""
    q, k = (torch.randn(2, H, 3, 16, device=DEVICE, dtype=torch.bfloat16) for H in (6, 2))
    wq, wk = torch.randn(16, device=DEVICE), torch.randn(16, device=DEVICE, dtype=torch.bfloat16)
    angles, launches = torch.rand(1, 3, 8, device=DEVICE), []
    args = [t.requires_grad_() for t in (q, k, wq, wk)]
    y = qk_norm_rope(*args, angles.cos(), angles.sin())
    assert [t.dtype for t in y] == [torch.float32, torch.bfloat16]
    with _op.intercept_launches(lambda kernel, *_: launches.append(kernel)):
        grads = torch.autograd.grad(y, args, [torch.ones_like(t) for t in y])
    assert len(launches) == 2 and [g.dtype for g in grads] == [t.dtype for t in args]
