"""Adapters that train as they will be merged into a quantised base."""

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from adapters import BATCH, drawn, learnt, lora, patch
from hf_models import DEVICE, assert_same_learning, make, recognised, tokens
from packed_checkpoints import compressed
from test_experts_in_fp8 import experts_of, needs_kernels
from test_mxfp4_experts import BOTH, NAMES, published, twins  # noqa: F401

from liger_kernel.ops.projections.merge_aware import merged
from liger_kernel.transformers import merge_aware, projections_report
from liger_kernel.transformers.recognise.experts import adapters_of, is_wrapper, stored
from liger_kernel.transformers.recognise.projections import adapted_layer
from liger_kernel.transformers.recognise.storages import compressed_weight


def packed(kind: str) -> nn.Module:
    model = make("llama", torch.float32, num_hidden_layers=1, attention_bias=True).cpu()
    compressed(model, kind)
    return patch(model.to(DEVICE))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tokens(**BATCH)).logits


@pytest.mark.parametrize("kind", ["int4", "asymmetric", "nvfp4"])
def test_the_merged_model_is_the_trained_one(kind):
    model = drawn(lora(packed(kind)))
    plain = logits(model)
    assert merge_aware(model) is model
    trained, gradients = logits(model), learnt(model)
    assert not torch.allclose(trained, plain, rtol=0.01) and all(g.abs().sum() > 0 for g in gradients.values())
    assert "runs 7 of 7" in (said := str(projections_report(model))) and said.count("its adapters merged and rounded")
    assert_same_learning(learnt(merge_aware(model)), gradients, 0)  # again
    with torch.no_grad():
        for m in [m for m in model.modules() if hasattr(m, "lora_A")]:
            found = merged(compressed_weight(m.base_layer), adapted_layer(m, torch.float32).adapters)
            m.base_layer.weight_packed.copy_(found.values)
    with model.disable_adapter():
        assert torch.equal(logits(model), trained)
    merge_aware(model, on=False)
    assert not torch.equal(logits(model), trained)


def test_what_cannot_be_rounded_is_refused_by_name():
    for how, said in (
        (dict(lora_dropout=0.1), "layers.0.self_attn.q_proj cannot be rounded .*: an adapter with dropout"),
        (dict(lora_bias=True), "an adapter with dropout, a magnitude"),
        (dict(target_modules=["embed_tokens"]), "embed_tokens cannot .*, which is no linear layer with LoRA"),
    ):
        with pytest.raises(ValueError, match=f"merge_aware: .*{said}"):
            merge_aware(lora(make("llama", torch.float32, num_hidden_layers=1), **how).train())
    with pytest.raises(ValueError, match="merge_aware: model must have adapters of PEFT, got none"):
        merge_aware(make("llama", torch.float32, num_hidden_layers=1))
    model = merge_aware(lora(make("llama", torch.float32, num_hidden_layers=1)))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match="must be called with x alone, got adapter_names"):
        layer(torch.ones(1, 1, layer.in_features, device=DEVICE), adapter_names=["default"])
    layer.lora_dropout["default"] = nn.Dropout(0.1)  # meanwhile
    with pytest.raises(ValueError, match="an adapter with dropout"):
        learnt(model)


@needs_kernels
def test_experts_in_mxfp4(published):  # noqa: F811
    recognised("gpt_oss")
    model, dense = twins(published)
    with pytest.raises(ValueError, match=r"experts cannot be rounded .*is not patched"):
        merge_aware(model)
    merge_aware(patch(model))
    report = projections_report(model)
    assert "MB, decoded in parts for each product, its adapters merged and rounded" in str(report) and not report.stock
    wrapper = next(m for m in model.modules() if is_wrapper(m))
    while is_wrapper(wrapper):
        weight = stored(experts_of(model), wrapper.parameter_name).weight(True)
        values = merged(weight, adapters_of(wrapper, True)).dense(torch.float32)
        getattr(experts_of(dense), wrapper.parameter_name).data.copy_(values.mT)
        wrapper = wrapper.base_layer
    for m in [m for m in dense.modules() if is_wrapper(m)]:
        m.scaling["default"] = 0.0
    gradients = learnt(model)
    assert all(g.abs().sum() > 0 for name, g in gradients.items() if "experts" in name)
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-4)
