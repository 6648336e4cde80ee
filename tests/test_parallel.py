"""Patched models over two processes learn what one process of the stock model learns: DDP, FSDP,
ZeRO, tensor, sequence and pipeline parallel.

A process costs seconds, so that one group of ranks makes all checks; every check is a test of its
own, which reads what the ranks said.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("peft")

import parallel_ranks
from hf_models import assert_same_learning, make, served_by_kernels_or_references, step, tokens

from liger_kernel.parallel import clip_grad_norm_, layers_of, parallelize, tensor_parallel


@pytest.fixture(scope="module")
def outcome(request, once):
    own = lambda item: item.path == request.path and getattr(item, "originalname", "") == "test_over_ranks"
    items = filter(own, request.session.items)
    return once("parallel", lambda: parallel_ranks.run([item.callspec.params["name"] for item in items]))


@pytest.mark.skipif(0 < parallel_ranks.GPUS < parallel_ranks.RANKS, reason="needs a GPU for every rank, or none")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in parallel_ranks.FURTHER)) for name in parallel_ranks.CHECKS],
)
def test_over_ranks(name, outcome):
    said = outcome[name]
    assert said == ["fine"] * parallel_ranks.RANKS, "\n".join(said)


# -- one process ---------------------------------------------------------------------------


def test_modes():
    model = nn.Linear(2, 2)
    assert parallelize(model, "none").model is model
    with pytest.raises(ValueError, match=r"mode must be one of .*, got 'zero'"):
        parallelize(model, "zero")


def test_plans_that_name_no_module_of_the_model():
    """Adapters give modules other names: nothing would be sharded."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="mode tp needs modules that PeftModel's tp_plan names"):
        tensor_parallel(model, SimpleNamespace(size=lambda: 1))


def test_stages_of_a_pipeline():
    """The first has no head, the last one no embedding."""
    first, last, batch = parallel_ranks.patched(), parallel_ranks.patched(), tokens()
    first.model.layers, last.model.layers = first.model.layers[:1], last.model.layers[1:]
    first.model.norm, first.lm_head, last.model.layers[0].self_attn.layer_idx = nn.Identity(), nn.Identity(), 0
    del last.model.embed_tokens
    with served_by_kernels_or_references():
        hidden = first(input_ids=batch["input_ids"], use_cache=False).logits
        out = last(inputs_embeds=hidden, labels=batch["labels"], use_cache=False)
        out.loss.backward()
        expected = step(make("llama"))[1]
    later = {name.replace("layers.0.", "layers.1."): g for name, g in parallel_ranks.gradients(last).items()}
    assert out.logits is None
    assert_same_learning(parallel_ranks.gradients(first) | later | {"loss": out.loss.detach()}, expected, 1e-5)


def test_layers_of_models_that_do_not_say():
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])]))
    assert layers_of(model) == [model[1][0], model[1][1]]


def test_norm_of_one_process():
    model = nn.Linear(2, 2)
    assert clip_grad_norm_(model, 1.0) == 0
    model(torch.ones(1, 2)).sum().backward()
    assert clip_grad_norm_(model, 1.0) == pytest.approx(6**0.5)
    assert clip_grad_norm_(model, None) == pytest.approx(1)
    model.get_global_grad_norm = lambda: 0
    with pytest.raises(ValueError, match="DeepSpeed"):
        clip_grad_norm_(model, 1.0)
