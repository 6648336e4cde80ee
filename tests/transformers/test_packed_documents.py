"""Layers in which the documents of a packed row depend on each other, found by what they do."""

import dataclasses
import json
import sys
import warnings

import pytest
import torch
import transformers
from hf_models import tiny_model
from quick import further, words
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.data import ROWS
from liger_kernel.train.loop import train
from liger_kernel.train.model import check_packing
from liger_kernel.transformers import documents
from liger_kernel.transformers.patching.apply import _apply_liger_kernel_to_instance

SIXTEEN = {"num_hidden_layers": 16, "layer_types": ["full_attention"] * 16}
CONV = SIXTEEN | {"layer_types": ["full_attention", "conv"] * 8}
# what a model of this type and configuration has -> its first layer that carries a state, or attention that reads
# no positions: masks of these families do not say where documents end
JOINING = {
    ("qwen3_next", None): "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) carries",
    ("lfm2", "conv"): "model.layers.1.conv (Lfm2ShortConv) carries",
    ("granitemoehybrid", None): "model.layers.0.mamba (GraniteMoeHybridMambaLayer) carries",
    ("rwkv", None): "rwkv.blocks.0.attention (RwkvSelfAttention) carries",
    ("minimax", None): "model.layers.1.self_attn (MiniMaxLightningAttention) carries",
    ("opt", None): "(OPTAttention) sees",
    ("granitemoehybrid", "attention"): "(GraniteMoeHybridAttention) sees",
}
APART = [(name, None) for name in ("llama", "gpt2", "mixtral", "gemma3_text")] + [("lfm2", "attention")]
OFTEN = list(JOINING)
LAYERS = words("""
    bailing_hybrid=BailingHybridDeltaAttention bamba=BambaMixer falcon_h1=FalconH1Mixer falcon_mamba=FalconMambaMixer
    inkling_text=InklingShortConvolution jamba=JambaMambaMixer kimi_linear=KimiLinearDeltaAttention lfm3=Lfm3ShortConv
    mamba=MambaMixer mamba2=Mamba2Mixer nemotron_h=NemotronHMamba2Mixer olmo_hybrid=OlmoHybridGatedDeltaNet
    qwen3_5_moe_text=Qwen3_5MoeGatedDeltaNet qwen3_5_text=Qwen3_5GatedDeltaNet xlstm=xLSTMLayer
    recurrent_gemma=RecurrentGemmaRecurrentBlock zamba=ZambaMambaMixer zamba2=Zamba2MambaMixer zaya=ZayaCCAProjection
""")
MORE = {(name, None): f"({layer}) carries" for name, layer in (pair.split("=") for pair in LAYERS)}
JOINING |= MORE


def untrained(model_type, **config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**config))


@pytest.mark.parametrize("model_type, layers", [*OFTEN, *APART, *further(*MORE)])
def test_layers_that_join_documents(model_type, layers):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"stock of {transformers.__version__}: it lacks {model_type}")
    found = documents.joining(untrained(model_type, **{None: {}, "conv": CONV, "attention": SIXTEEN}[layers]))
    assert JOINING.get((model_type, layers), "None") in str(found)


CONVOLUTION = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
IDS = torch.arange(3, 15)[None]
POSITIONS = torch.cat((torch.arange(5), torch.arange(7)))[None]


def said(model, **batch):
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        model(input_ids=IDS, use_cache=False, **batch)
    return [str(w.message) for w in found if "documents" in str(w.message)]


def patched(model_type, **config):
    model = tiny_model(model_type, **config)
    _apply_liger_kernel_to_instance(model, recurrent=False)
    return model


def test_a_patched_model_warns_once():
    model = patched("olmo_hybrid")
    padding = torch.tensor([[0, 0] + 10 * [1]])
    numbered = torch.arange(12)[None]
    quiet = [
        {},
        dict(position_ids=numbered),
        dict(position_ids=(padding.cumsum(1) - 1).masked_fill(padding == 0, 1), attention_mask=padding),
        dict(position_ids=(numbered < 9) * numbered, attention_mask=(numbered < 9).long()),
    ]
    assert not any(said(model, **batch) for batch in quiet)
    (text,) = said(model, position_ids=POSITIONS)
    assert "OlmoHybridForCausalLM: model.layers.0.linear_attn (OlmoHybridGatedDeltaNet) carries its state" in text
    assert not said(model, position_ids=POSITIONS)


def test_bounds_of_documents_warn_without_a_look_at_positions(monkeypatch):
    monkeypatch.setattr(documents, "_packed", None)
    model = patched("lfm2", **CONVOLUTION)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    assert len(said(model, position_ids=POSITIONS, cu_seq_lens_q=bounds)) == 1


INDEX = (POSITIONS == 0).cumsum(1).int()


@pytest.mark.parametrize(
    "model_type, layer", [("mamba2", "Mamba2Mixer"), ("zamba", "ZambaMambaMixer"), ("bamba", None)]
)
def test_numbers_of_documents_that_some_layer_does_not_read(model_type, layer):
    """Zamba's convolution reads them, and its scan does not."""
    model = tiny_model(model_type)
    _apply_liger_kernel_to_instance(model)
    texts = said(model, position_ids=POSITIONS, seq_idx=INDEX)
    assert (layer in texts[0] and len(texts) == 1) if layer else not texts


def test_kernels_of_other_packages_read_numbers_of_documents(monkeypatch):
    """Where they do not run, older versions of Transformers call code that does not."""
    model = untrained("mamba2")
    monkeypatch.setattr(sys.modules[type(model).__module__], "is_fast_path_available", True, raising=False)
    assert documents.joining(model) and not documents.joining(model, numbered=True)


def test_a_configuration_without_tiny_sizes(monkeypatch):
    monkeypatch.setattr(documents, "tiny_of", None)
    assert "MambaMixer" in documents.joining(untrained("mamba")).layer


@pytest.mark.parametrize("waits, joins, times", [(False, False, 10), (True, True, 10), (True, False, 0)])
def test_positions_are_seldom_looked_at(waits, joins, times, monkeypatch):
    """Where a look is a wait for the GPU, never if no layer joins documents."""
    looks = []
    monkeypatch.setattr(documents, "_waits", lambda _: waits)
    monkeypatch.setattr(documents, "_packed", lambda *_: looks.append(1))
    model = patched("lfm2", **CONVOLUTION) if joins else patched("llama")
    for _ in range(1000):
        documents.warn_if_joined(model, {"position_ids": POSITIONS})
    assert len(looks) == times


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_model("lfm2", **CONVOLUTION).config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("more", [{}, dict(trainer="hf"), dict(trainer="lightning"), dict(stream=1.0), dict(lora=2)])
def test_packing_documents_is_refused_before_anything_is_written(hybrid, tmp_path, more):
    more |= dict(out=str(tmp_path / "out"), device="cpu")
    config = TrainConfig(model=str(hybrid), packing="documents", recurrent=False, **more)
    with pytest.raises(UserError, match=r"^packing documents: model\.layers\.0\.conv \(Lfm2ShortConv\) carries"):
        train(config)
    assert not list(tmp_path.iterdir())


def test_documents_that_were_packed_before_are_refused(hybrid, tmp_path):
    packed = {"ids": torch.ones(4, dtype=torch.int32), "positions": torch.zeros(4, dtype=torch.int32)}
    save_file(packed, tmp_path / ROWS)
    config = TrainConfig(model=str(hybrid), data=str(tmp_path))
    check_packing(config)
    with pytest.raises(UserError, match="Lfm2ShortConv"):
        check_packing(dataclasses.replace(config, recurrent=False))
    save_file({"ids": packed["ids"]}, tmp_path / ROWS)
    check_packing(dataclasses.replace(config, packing="documents"))


def test_attention_that_reads_no_positions_is_named(tmp_path, capsys):
    tiny_model("opt").config.save_pretrained(tmp_path)
    check_packing(TrainConfig(model=str(tmp_path), packing="documents"))
    assert "OPTAttention" in capsys.readouterr().err
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    check_packing(TrainConfig(model=str(adapters), packing="documents", lora=2))
    assert "OPTAttention" in capsys.readouterr().err
