"""Runs in FP8: what is said at their start, resumes of the same bits whoever trains, and
mistakes that are named."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")
from small_runs import TEXT, refused, resumed_alike, small_run

pytest.importorskip("accelerate")

from liger_kernel.ops.projections import float8
from liger_kernel.ops.projections.float8_training import RECIPES
from liger_kernel.patch_options import SWITCHES
from liger_kernel.train import loop
from liger_kernel.train.config import from_flags
from liger_kernel.transformers import fp8


@pytest.fixture(autouse=True)
def small_layers(references, monkeypatch):
    monkeypatch.setattr(fp8, "SMALL", 0)


@pytest.fixture
def config(tmp_path):
    often = dict(eval_fraction=0.05, eval_every=2, checkpoint_every=2, save=str(tmp_path / "saved"))
    records = [{"text": TEXT * 20 + str(i)} for i in range(8)]
    return small_run(tmp_path, records, vocab=280, batch=2, steps=4, fp8="tensorwise", **often)


def test_recipes_are_those_of_the_operator():
    assert tuple(RECIPES) == SWITCHES["fp8"].metadata["choices"]


@pytest.mark.parametrize(
    "trainer, precision", [("torch", "fp32"), ("torch", "bf16-mixed"), ("torch", "bf16"), ("hf", "bf16-mixed")]
)
def test_a_run(trainer, precision, config, capfd):
    """learns, says which layers it leaves, and resumes with the same bits."""
    config = replace(config, trainer=trainer, precision=precision, fp8_filter="o_proj, gate_proj", accumulate=2)
    expected = resumed_alike(config)
    said = capfd.readouterr().out
    assert "projections: the engine runs 5 of 8 layers with adapters, quantised weights or FP8" in said
    assert "2 stock: left by the filter of fp8 (model.layers.0.self_attn.o_proj and 1 more)" in said
    assert "1 stock: a head, a router, or left by its name (lm_head)" in said
    assert expected["losses"][-1] < expected["losses"][0]
    stock = loop.train(replace(config, fp8=None, fp8_filter=None, out=f"{config.out}-stock", save=None))
    assert stock["losses"] != expected["losses"]
    assert expected["losses"] == pytest.approx(stock["losses"], rel=2e-2)


def test_flags():
    config = from_flags(["--fp8", "rowwise", "--fp8-filter", "o_proj,mlp", "--fp8-head"])
    assert config.kernel_flags == {"fp8": "rowwise", "fp8_filter": ["o_proj", "mlp"], "fp8_head": True}


def test_what_cannot_be_is_said(config, monkeypatch):
    refused(r"has no linear layer 'oproj'; did you mean o_proj\?", loop.train, replace(config, fp8_filter="oproj"))
    monkeypatch.setattr(float8, "lacking", lambda *_: "FP8 needs an NVIDIA GPU")
    monkeypatch.setattr(loop, "load", None)  # before anything is loaded
    refused("fp8 tensorwise: FP8 needs an NVIDIA GPU", loop.train, config)


def test_a_family_without_kernels(config, capsys):
    import transformers

    from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear
    from liger_kernel.train.model import patch

    own = type("OwnConfig", (transformers.LlamaConfig,), {"model_type": "nobody_knows"})
    model = transformers.LlamaForCausalLM(
        own(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    )
    patch(model, {"fp8": "rowwise"})
    assert "no kernels for nobody_knows: training it as Hugging Face ships it, but in FP8" in capsys.readouterr().out
    assert sum(isinstance(m, LigerFloat8TrainingLinear) for m in model.modules()) == 7
