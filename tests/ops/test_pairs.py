"""The ``*_forward`` and ``*_backward`` functions of operators, without autograd, beside the
operators' references and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE
from torch import Tensor

from liger_kernel import ops
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops._core.operator import OPS

pytestmark = pytest.mark.skipif(not (_op.INTERPRET or torch.cuda.is_available()), reason="no kernels here")
TARGET = torch.tensor([0, 3, -100, 10, 7, 7], device=DEVICE)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


def gradients(fn, inputs: list[Tensor], dy: Tensor | tuple[Tensor, ...] | None = None):
    """Results of ``fn`` and its gradients to the inputs."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = fn(*leaves)
    return out, torch.autograd.grad(out, leaves, dy)


def assert_equal(got, want):
    got, want = (tuple(t.detach() for t in (x if isinstance(x, (tuple, list)) else (x,))) for x in (got, want))
    torch.testing.assert_close(got, want)


def reference(op: str, **options):
    return lambda *args: OPS[op].reference(*args, **options)


def test_rms_norms():
    x, r, w, dy, ds = draw((2, 3, 24), (2, 3, 24), (24, 3), (2, 3, 24), (2, 3, 24))
    w = w[:, 1]
    want, grads = gradients(reference("fused_add_rms_norm", offset=1.0, casting="gemma"), [x, r, w], (dy, ds))
    y, s, rstd, *numbers, casting = ops.fused_add_rms_norm_forward(x, r, w, 1e-6, 1.0, "gemma")
    assert_equal((y, s), want)
    assert_equal(ops.fused_add_rms_norm_backward(dy, ds, s, w, rstd, 1.0, casting, *numbers, False), grads)
    assert ops.fused_add_rms_norm_backward(dy, ds, s, w, rstd, 1.0, casting, *numbers, False, needs_dw=False)[2] is None
    want, grads = gradients(reference("rms_norm", offset=1.0, casting="gemma"), [x, w], dy)
    y, rows, rstd, *numbers, casting = ops.rms_norm_forward(x, w, 1e-6, 1.0, "gemma", None)
    assert_equal(y, want)
    assert_equal(ops.rms_norm_backward(dy, rows, w, rstd, 1.0, casting, *numbers, True, None), grads)
    found, grads_found = gradients(
        lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False), [x, w], dy
    )
    assert_equal((found, *grads_found), (want, *grads))
    assert ops.rms_norm_backward(dy, rows, w, rstd, 1.0, "gemma", 0, 0, False, None, needs_dw=False)[1] is None


def test_layer_and_group_norm():
    x, w, b, dy = draw((2, 6, 4), (4,), (4,), (2, 6, 4))
    want, grads = gradients(lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-5), [x, w, b], dy)
    y, rows, mean, rstd, *_ = ops.layer_norm_forward(x, w, b, 1e-5)
    assert_equal(y, want)
    assert_equal(ops.layer_norm_backward(dy, rows, w, b, mean, rstd), grads)
    assert ops.layer_norm_backward(dy, rows, w, b, mean, rstd, needs_dw=False, needs_db=False)[1:] == (None, None)
    w, b = draw((6,), (6,))
    want, grads = gradients(lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5), [x, w, b], dy)
    y, x2, mean, rstd, _ = ops.group_norm_forward(x, 6, 3, w, b, 1e-5)
    assert_equal(y, want)
    assert mean.shape == rstd.shape == (2, 3)
    assert_equal(ops.group_norm_backward(dy, x2, w, b, mean, rstd, 6, 3), grads)


@pytest.mark.parametrize("rows", [(), (2,), (2, 5)])
def test_modulated_rms_norm(rows):
    x, scale, shift, w, dy = draw((2, 5, 24), (*rows, 24), (*rows, 24), (24,), (2, 5, 24))
    wide = lambda t: t[:, None] if rows == (2,) else t
    want, grads = gradients(
        lambda x, s, t, w: OPS["modulated_rms_norm"].reference(x, wide(s), wide(t), w), [x, scale, shift, w], dy
    )
    y, rstd, *numbers, casting, of_scale = ops.modulated_rms_norm_forward(
        x, w, wide(scale), wide(shift), 1e-6, 0.0, "llama"
    )
    assert_equal(y, want)
    assert of_scale == 10 // max(len(rows) and scale.numel() // 24, 1)
    dx, dw, dscale, dshift = ops.modulated_rms_norm_backward(
        dy, x, w, wide(scale), wide(shift), rstd, 0.0, casting, *numbers, of_scale, False
    )
    assert_equal((dx, dscale.view(scale.shape), dshift.view(shift.shape), dw), grads)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_poly_norm(shape):
    """The bias has a gradient of its shape."""
    x, w, b, dy = draw((2, 3, 24), (3,), shape, (2, 3, 24))
    for fn in (ops.LigerPolyNormFunction.apply, OPS["poly_norm"].fn):
        assert gradients(fn, [x, w, b], dy)[1][2].shape == shape
    b = b.view(())
    want, grads = gradients(reference("poly_norm"), [x, w, b], dy)
    y, rows, stats, *numbers = ops.poly_norm_forward(x, w, b)
    assert_equal(y, want)
    assert_equal(ops.poly_norm_backward(dy, rows, w, stats, *numbers, False), grads)


def test_activations():
    a, b, dy = draw((2, 3, 8), (2, 3, 8), (2, 3, 8))
    want, grads = gradients(lambda a, b: F.gelu(a, approximate="tanh") * b, [a, b], dy)
    *saved, c = ops.geglu_forward(a, b)
    assert_equal(c, want)
    assert_equal(ops.geglu_backward(*saved, dy), grads)
    want, grads = gradients(lambda a, b: F.silu(a * 0.5) * b, [a, b], dy)
    *saved, c = ops.swiglu_forward(a, b, 0.5)
    assert_equal(c, want)
    assert_equal(ops.swiglu_backward(*saved, dy, 0.5), grads)
    assert_equal(ops.LigerSiLUMulFunction.apply(a, b, 0.5), want)
    (packed,) = draw((2, 3, 16))
    want, grads = gradients(lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], [packed], dy)
    y, c = ops.swiglu_fused_gate_up_forward(packed)
    assert_equal(c, want)
    assert_equal(ops.swiglu_fused_gate_up_backward(y, dy, in_place=True), grads)
    assert y is packed
    want, grads = gradients(lambda x: F.relu(x).square(), [a], dy)
    assert_equal(ops.relu_squared_forward(a), want)
    assert_equal(ops.relu_squared_backward(a, dy), grads)


def test_cross_entropy():
    x, weight = draw((6, 11), (11,))
    want, grads = gradients(lambda x: F.cross_entropy(x, TARGET, weight.abs()), [x])
    before = x.clone()
    loss, z_loss, accuracy, predicted, dx = ops.cross_entropy_forward(
        x, TARGET, weight.abs(), -100, 0.0, 0.0, "mean", None, False, True
    )
    assert_equal(loss, want)
    assert z_loss is predicted is None and 0 <= accuracy <= 1 and torch.equal(x, before)
    assert_equal(ops.cross_entropy_backward(dx, torch.tensor(3.0)), [3 * g for g in grads])
    g = torch.rand(6, device=DEVICE)
    want, grads = gradients(lambda x: F.cross_entropy(x, TARGET, reduction="none"), [x], g)
    loss, *_, dx = ops.cross_entropy_forward(x, TARGET, None, -100, 0.0, 0.0, "none", None, False)
    assert_equal(loss, want)
    assert_equal(ops.cross_entropy_backward(dx, g), grads)


def test_the_head_with_less_and_with_weights():
    x, w, g = draw((6, 8), (11, 8), (6,))
    of_tokens = lambda x, w: F.cross_entropy(x @ w.t(), TARGET, reduction="none")
    *_, dx, dw, db = ops.fused_linear_cross_entropy_forward(x, w, TARGET, reduction="none", token_grad_output=g)
    assert_equal((dx, dw), gradients(of_tokens, [x, w], g)[1])
    assert db is None
    want, wanted = gradients(lambda x, w, b: F.cross_entropy(x @ w.t() + b, TARGET, reduction="sum"), [x, w, w[:, 0]])
    loss, z_loss, accuracy, predicted, *grads = ops.fused_linear_cross_entropy_forward(
        x, w, TARGET, bias=w[:, 0], reduction="sum", return_token_accuracy=True
    )
    assert_equal(loss, want)
    assert not loss.requires_grad and z_loss is predicted is None and 0 <= accuracy <= 1
    assert_equal(ops.fused_linear_cross_entropy_backward(torch.tensor(3.0), *grads), [3 * g for g in wanted])
    assert ops.fused_linear_cross_entropy_forward(x, w, TARGET, weight_requires_grad=False)[-2] is None
    loss, *rest = ops.fused_linear_cross_entropy_forward(x, w, TARGET, compute_gradients=False)
    assert rest[-3:] == [None] * 3 and not loss.requires_grad
    with pytest.raises(RuntimeError, match="impl must be one of"):
        ops.fused_linear_cross_entropy_forward(x, w, TARGET, ce_impl="cutile")


def test_divergences():
    q, p = (t.log_softmax(-1) for t in draw((6, 11), (6, 11)))
    want, grads = gradients(lambda q: OPS["jsd"].reference(q, p, TARGET, beta=0.3), [q])
    loss, dx = ops.jsd_forward(q, p, TARGET, 0.3, -100, True)
    assert_equal((loss, dx), (want, *grads))
    assert_equal(ops.jsd_backward(dx, torch.tensor(3.0)), [3 * g for g in grads])
    assert_equal(ops.jsd_forward(q, p, TARGET, 0.3, -100, False)[0], OPS["jsd"].reference(q, p, beta=0.3))
    x, w, tx, tw = draw((6, 8), (11, 8), (6, 8), (11, 8))
    want, grads = gradients(
        lambda x, w: OPS["linear_divergence"].reference(x, w, tx, tw, TARGET, beta=0.3, temperature=2.0), [x, w]
    )
    loss, *found = ops.fused_linear_jsd_forward(x, w, tx, tw, TARGET, 0.3, -100, True, 2.0)
    assert_equal(loss, want)
    assert_equal(ops.fused_linear_jsd_backward(torch.tensor(3.0), *found), [3 * g for g in grads])


def test_divergences_of_published_losses():
    s, t, *g = draw((6, 11), (6, 11), (6,), (6,))
    ce, tvd, *saved = ops.fused_ce_tvd_forward(s, t, TARGET, -100)
    want, grads = gradients(lambda s: OPS["fused_ce_tvd"].reference(s, t, TARGET), [s], tuple(g))
    assert_equal((ce, tvd), want)
    assert_equal(ops.fused_ce_tvd_backward(*g, s, t, TARGET, *saved, -100), grads)
    x, w, p = *draw((6, 8), (11, 8)), t.softmax(-1)
    for labels, has_labels in ((TARGET, True), (None, False)):
        kl = reference("linear_divergence", teacher_probs=p, target=labels, kind="forward_kl", eps=1e-10)
        want, grads = gradients(kl, [x, w])
        loss, *found = ops.fused_linear_kl_div_forward(x, w, p, TARGET, "batchmean", -100, has_labels, 1.0, 1e-10)
        assert_equal(loss, want)
        assert_equal(ops.fused_linear_kl_div_backward(torch.tensor(3.0, device=DEVICE), *found), [3 * g for g in grads])


def test_attention_over_depth():
    V, wq, wn, dh = draw((3, 2, 5, 8), (8,), (8,), (2, 5, 8))
    want, (dV, *dw) = gradients(lambda V, wq, wn: OPS["attn_res"].reference(V.movedim(0, -2), wq, wn), [V, wq, wn], dh)
    for blocks in (V, list(V)):
        h, *saved = ops.attn_res_forward(blocks, wq, wn)
        assert_equal(h, want)
        v, alpha, rstd = saved
        assert v.shape == (3, 10, 8) and alpha.shape == rstd.shape == (10, 3)
        assert_equal(alpha.sum(-1), torch.ones(10, device=DEVICE))
        dv, *found = ops.attn_res_backward(dh, v, wq, wn, alpha, rstd)
        assert_equal((dv.reshape(V.shape), *found), (dV, *dw))


def test_neighbourhood_attention():
    from liger_kernel.ops.fused_neighborhood_attention import fused_neighborhood_attention_forward

    q, k, v = draw(*[(1, 2, 9, 8)] * 3)
    o, weights, _ = fused_neighborhood_attention_forward(q, k, v, kernel_size=3, dilation=2)
    assert_equal(weights @ v, o)


def test_ropes():
    from liger_kernel.ops.llama4_rope import llama4_rope_forward
    from liger_kernel.ops.qwen2vl_mrope import qwen2vl_mrope_backward, qwen2vl_mrope_forward

    q, k, dq, dk, angles = draw((2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8), (2, 2, 5, 8), (3, 2, 5, 4))
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    want, grads = gradients(
        lambda q, k: ops.LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, [1, 2, 1]), [q, k], (dq, dk)
    )
    *turned, c, s = qwen2vl_mrope_forward(q, k, cos, sin, [1, 2, 1])
    assert_equal(turned, want)
    assert_equal(qwen2vl_mrope_backward(dq, dk, c, s, [1, 2, 1]), grads)
    q = q.transpose(1, 2).contiguous()
    k = k.transpose(1, 2).contiguous()
    freqs = torch.polar(torch.ones_like(angles[0]), angles[0])
    want = [
        torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (4, 2))) * freqs[:, :, None]).flatten(-2)
        for t in (q, k)
    ]
    turned = llama4_rope_forward(q, k, freqs)
    assert_equal(turned, want)
    assert_equal(llama4_rope_forward(*turned, freqs, imag_sign=-1.0), (q, k))


def test_where_the_tokens_of_experts_are():
    from liger_kernel.ops.fused_moe import compute_routing_metadata

    index = torch.tensor([[2, 0], [0, 3], [3, 0], [0, 2]], dtype=torch.int32, device=DEVICE)
    found = compute_routing_metadata(index, 5, block_m_token=3)
    assert all(t.dtype == torch.int32 for t in found)
    counts, start, token, choice, place, first, expert = (t.tolist() for t in found)
    assert counts == [4, 0, 2, 2, 0] and start == [0, 4, 4, 6, 8, 8]
    assert [index.flatten()[c].item() for c in choice] == [0, 0, 0, 0, 2, 2, 3, 3]
    assert token == [c // 2 for c in choice] and [choice[p] for p in place] == list(range(8))
    assert (first, expert) == ([0, 3, 4, 6], [0, 0, 2, 3])


def test_tables_that_hold_each_angle_once():
    """``rotary_dim`` says so; gpt-oss's do."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_gpt_oss

    from liger_kernel.transformers.functional import liger_rope

    q, k, dq, dk, angles = draw((2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 4))
    cos, sin = angles.cos(), angles.sin()
    twice = [torch.cat((t, t), -1) for t in (cos, sin)]
    want, grads = gradients(lambda q, k: liger_rope(q, k, *twice), [q, k], (dq, dk))
    assert_equal(liger_rotary_pos_emb_gpt_oss(q, k, cos, sin), want)
    assert_equal(liger_rope(q, k, *twice, rotary_dim=8), want)
    got, found = gradients(lambda q, k: ops.LigerRopeFunction.apply(q, k, cos, sin, None, 1, 8), [q, k], (dq, dk))
    assert_equal((*got, *found), (*want, *grads))
    *turned, c, s = ops.rope_forward(q, k, cos, sin, rotary_dim=8)
    assert_equal((*turned, *ops.rope_backward(dq, dk, c, s, rotary_dim=8)), (*want, *grads))
    wide = [t.transpose(1, 2).contiguous() for t in (q, k)]
    assert_equal([t.transpose(1, 2) for t in ops.rope_forward(*wide, *twice, unsqueeze_dim=2)[:2]], want)
    with pytest.raises(ValueError, match="rotary_dim must be 4 or 8"):
        liger_rope(q, k, cos, sin, rotary_dim=6)
