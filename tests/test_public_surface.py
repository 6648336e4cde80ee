"""The names that other packages import, literally: they are there, and take what they are given."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

_names = str.split

FUNCTIONS = _names("""
    AttnRes CrossEntropy DyT Embedding FusedAddRMSNorm FusedLinearCrossEntropy FusedLinearJSD FusedLinearScaledCrossEntropy FusedMoE
    FusedNeighborhoodAttention GELUMul GroupNorm JSD KLDivLoss LayerNorm Llama4Rope MHCCoeffs MHCPre MHCPostRes MLP ModulatedRMSNorm
    MultiTokenAttention PolyNorm Qwen2VLMRope ReLUSquared RMSNorm Rope Softmax Sparsemax SiLUMul FusedGateUpSiLUMul TiledMLP TVDLoss
""")
MODULES = _names("""
    CrossEntropyLoss FusedLinearCrossEntropyLoss FusedLinearJSD JSD KLDIVLoss TVDLoss VocabParallelCrossEntropy RMSNorm RMSNormForGemma
    RMSNormForGemma2 RMSNormForGemma3 RMSNormForGemma4 RMSNormForOlmo2 RMSNormForGlm4 RMSNormForQwen3Next FusedAddRMSNorm ModulatedRMSNorm LayerNorm
    PolyNorm DyT Softmax Sparsemax ReLUSquared SwiGLUMLP BlockSparseTop2MLP Phi3SwiGLUMLP Qwen3MoeSwiGLUMLP FalconH1SwiGLUMLP Experts MLP FalconH1MLP
    GEGLUMLP TiledGEGLUMLP TiledSwiGLUMLP MHC MultiTokenAttention FusedNeighborhoodAttention
""")
FUNCTIONAL = _names("""
    cross_entropy fused_linear_cross_entropy fused_linear_jsd geglu swiglu group_norm jsd kl_div tvd sparsemax softmax multi_token_attention
    fused_neighborhood_attention layer_norm rms_norm modulated_rms_norm poly_norm fused_add_rms_norm rope qwen2vl_mrope relu_squared dyt mhc_coeffs
    mhc_pre mhc_post_res mhc_apply mhc_forward attn_res
""")
PATHS = _names("""
    ops.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction ops.grpo_loss:fused_selective_log_softmax ops.rms_norm:LigerRMSNormFunction
    ops.rms_norm:rms_norm_backward ops.rms_norm:rms_norm_forward ops.rope:rope_backward ops.rope:rope_forward ops.swiglu:LigerSiLUMulFunction
    ops.utils:calculate_settings ops.utils:compare_version ops.utils:ensure_contiguous ops.utils:torch_to_triton_dtype
    ops.vocab_parallel_cross_entropy:LigerVocabParallelCEFunction ops.cross_entropy:LigerCrossEntropyFunction ops:GrpoLossFunction ops:apply_tiled_mlp
    ops.experimental.mm_int8int2:matmul chunked_loss:LigerFusedLinearGRPOLoss chunked_loss:LigerFusedLinearJSDLoss
    chunked_loss.fused_linear_distillation:LigerFusedLinearDistillationBase transformers:liger_rotary_pos_emb
    transformers:liger_llama4_text_rotary_pos_emb transformers:liger_llama4_vision_rotary_pos_emb transformers.group_norm:LigerGroupNorm
    transformers.geglu:LigerGEGLUMLPForGemma4 transformers.swiglu:LigerHunyuanV1SwiGLUMLP transformers.rope:liger_rotary_pos_emb_vision
    transformers.experimental.embedding:LigerEmbedding transformers.qwen2vl_mrope:liger_multimodal_rotary_pos_emb
    transformers.functional:CrossEntropyOutput
""")
EVERY = [
    *(f"ops:Liger{name}Function" for name in FUNCTIONS),
    *(f"transformers:Liger{name}" for name in MODULES),
    *(f"transformers.functional:liger_{name}" for name in FUNCTIONAL),
    *PATHS,
]


@pytest.mark.parametrize("path", EVERY)
def test_it_is_there(path):
    module, name = path.split(":")
    found = getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    if name.endswith("Function"):
        assert callable(found.apply)
    elif name != "torch_to_triton_dtype":
        assert inspect.getdoc(found)


def test_losses_as_functions():
    from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction, LigerFusedLinearScaledCrossEntropyFunction

    torch.manual_seed(0)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.tensor([0, 3, -100, 10, 7, 7])
    logits = x @ w.t()
    want = torch.nn.functional.cross_entropy(logits, target)
    loss, z_loss, accuracy, predicted = LigerFusedLinearCrossEntropyFunction.apply(x, w, target)
    torch.testing.assert_close(loss, want)
    assert z_loss is accuracy is predicted is None
    asked = LigerCrossEntropyFunction.apply(logits, target, None, -100, 1e-4, 0.0, "mean", None, True, True, True)
    valid = target != -100
    torch.testing.assert_close(asked[1], 1e-4 * logits.logsumexp(-1)[valid].square().mean())
    assert asked[2] == (logits.argmax(-1) == target)[valid].float().mean()
    assert torch.equal(asked[3], logits.argmax(-1).where(valid, -1))
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, target, 0.7, -100, 1, True)
    log_p = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(nll, -log_p.gather(1, target.clamp(min=0)[:, None])[:, 0].where(valid, 0))
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1).where(valid, 0))


def test_pairs_without_autograd(monkeypatch):
    from liger_kernel.ops import _op
    from liger_kernel.ops.glu import swiglu_backward, swiglu_forward
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    if not (_op.INTERPRET or torch.cuda.is_available()):
        pytest.skip("no kernels here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, b, w, dy = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 8, device=device), torch.randn(8, device=device), torch.randn(2, 3, 8, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    want = torch.nn.functional.rms_norm(leaves[0], (8,), leaves[1], 1e-6)
    y, rows, rstd, *rest = rms_norm_forward(x, w, 1e-6, 0.0, "llama", None)
    torch.testing.assert_close(y, want)
    got = rms_norm_backward(dy, rows, w, rstd, 0.0, rest[2], rest[0], rest[1], True, None)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves, dy))
    leaves = [t.clone().requires_grad_() for t in (x, b)]
    want = torch.nn.functional.silu(leaves[0] * 0.5) * leaves[1]
    *saved, c = swiglu_forward(x, b, 0.5)
    torch.testing.assert_close(c, want)
    torch.testing.assert_close(swiglu_backward(*saved, dy, 0.5), torch.autograd.grad(want, leaves, dy))
