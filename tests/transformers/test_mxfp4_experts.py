"""gpt-oss with its experts in MXFP4, as published: loaded, multiplied, adapted, saved."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", minversion="0.17")
pytest.importorskip("transformers.core_model_loading", reason="this version has another loader")

import transformers
from adapters import BATCH, assert_as_near_as_stock, drawn, learnt, patch, recomputed
from hf_models import DEVICE, assert_same_learning, make, recognised, tokens
from safetensors.torch import load_file, save_file
from test_experts_in_fp8 import NAMES, experts_of, needs_kernels
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from watching import noted

from liger_kernel.nn.mxfp4_experts import store_mxfp4
from liger_kernel.ops.projections import mxfp4
from liger_kernel.transformers import load_in_mxfp4, projections_report
from liger_kernel.transformers.recognise import experts

BOTH = [f"model.layers.0.mlp.experts.{name}" for name in NAMES]  # PEFT finds these parameters by their whole names
SIZES = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=1, layer_types=["full_attention"])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as that of openai/gpt-oss-20b, with random blocks."""
    folder, model = tmp_path_factory.mktemp("published"), make("gpt_oss", torch.bfloat16, **SIZES)
    model.config.architectures, model.config.dtype = ["GptOssForCausalLM"], "bfloat16"
    tensors = {name: t.contiguous().cpu() for name, t in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(NAMES)]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (E, N, K // 32), dtype=torch.uint8)
    written(folder, model.config.to_dict(), tensors)
    return folder


def written(folder, config: dict, tensors: dict, **quantization) -> str:
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]} | quantization
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def dequantised(folder) -> nn.Module:
    config = transformers.Mxfp4Config(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, quantization_config=config, dtype=torch.bfloat16).train().to(DEVICE)


def twins(folder, of=BOTH, dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """Adapted: experts in MXFP4, and what Transformers makes of them."""
    found = []
    for model in (load_in_mxfp4(folder).train(), dequantised(folder)):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], target_parameters=of)
        found.append(drawn(peft.get_peft_model(model.to(DEVICE, dtype), config)).to(DEVICE))
    return found[0], found[1]


def test_transformers_loads_and_saves_the_published_tensors(published, tmp_path):
    model, stock = load_in_mxfp4(published), dequantised(published)
    for name in NAMES:
        w, expected = getattr(experts_of(model), name), getattr(experts_of(stock), name)
        assert torch.equal((w + 0).cpu(), expected.cpu()) and w.dtype == torch.bfloat16 and not w.requires_grad
        index = torch.tensor([[0, 1], [3, 3]])
        assert torch.equal(w[2].cpu(), expected[2].cpu()) and torch.equal(w[index].cpu(), expected.cpu()[index])
    assert all(p.dtype == torch.uint8 for n, p in model.named_parameters() if "parametrizations" in n)
    model.to(torch.float16).save_pretrained(tmp_path)
    tensors, again = (load_file(folder / "model.safetensors") for folder in (published, tmp_path))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(again[n], t) for n, t in tensors.items() if t.dtype == torch.uint8)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    model, info = load_in_mxfp4(str(tmp_path), output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and experts_of(model).down_proj.dtype == torch.float32


@needs_kernels
@pytest.mark.parametrize("of", [BOTH, None], ids=["experts", "attention"])
def test_learns_as_the_dequantised_model(published, monkeypatch, of):
    """Adapters of attention, and of the experts too; nothing dense is saved."""
    recognised("gpt_oss")
    (model, dense), calls = twins(published, of), noted(monkeypatch, experts, "adapted_moe", lambda *_, **__: 1)
    # PEFT nests its wrappers of stored parameters the other way, and draws other adapters
    expected = learnt(model if of else dense)
    assert_same_learning(learnt(model), expected, 1e-5)
    assert not calls
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        assert_same_learning(learnt(patch(model)), expected, 1e-5)
    assert calls == [1] and not {getattr(experts_of(dense), name).numel() for name in NAMES} & set(sizes)
    report = projections_report(model)
    assert not report.stock and "in MXFP4, 0.0 MB" in str(report)
    assert_same_learning(learnt(recomputed(model, reentrant=False)), expected, 1e-5)


@needs_kernels
def test_the_report_names_experts_without_adapters(published):
    recognised("gpt_oss")
    model = load_in_mxfp4(published).to(DEVICE)
    (alone,) = projections_report(model).layers
    assert alone.name == "model.layers.0.mlp.experts" and "is not patched" in alone.reason
    assert not projections_report(patch(model)).stock
    model.model.layers[0].mlp.experts = Mxfp4GptOssExperts(model.config)
    assert "load it by load_in_mxfp4" in str(*projections_report(model).layers)


@needs_kernels
def test_as_near_to_the_decoded_weights_as_stock(published):
    recognised("gpt_oss")
    assert_as_near_as_stock(twins(published, dtype=torch.bfloat16)[0], torch.float32, False)


def test_merging_rounds_to_mxfp4(published):
    model, _ = twins(published)
    wrappers = {m.parameter_name: m for m in model.modules() if experts.is_wrapper(m)}
    of = experts_of(model)
    wanted = {name: getattr(of, name) + m.get_delta_weight("default") for name, m in wrappers.items()}
    model.merge_adapter()
    for name in NAMES:
        found = getattr(of, name) + 0
        assert 0 < (found - wanted[name]).norm() < 0.15 * wanted[name].norm()
        assert torch.equal(found.mT, mxfp4.reference(*mxfp4.rounded(found.mT), torch.float32))


@pytest.mark.parametrize("patched", [False, True])
def test_dequantised_to_merge_without_rounding(published, patched):
    model, _ = twins(published, dtype=torch.bfloat16)
    base, of = patch(model).get_base_model() if patched else model.get_base_model(), experts_of(model)
    wrappers = {m.parameter_name: m for m in model.modules() if experts.is_wrapper(m)}
    wanted = {name: getattr(of, name) + m.get_delta_weight("default") for name, m in wrappers.items()}
    assert base.dequantize() is base
    merged = model.merge_and_unload()
    assert not of._modules.get("parametrizations") and not hasattr(merged.config, "quantization_config")
    assert all(torch.equal(getattr(experts_of(merged), name), w) for name, w in wanted.items())


def test_what_cannot_be_loaded_is_refused(published, tmp_path):
    config, tensors = json.loads((published / "config.json").read_text()), load_file(published / "model.safetensors")
    down = "model.layers.0.mlp.experts.down_proj"
    for change, message in (
        ({f"{down}_scales": torch.full_like(tensors[f"{down}_scales"], 255)}, f"{down}_scales must be at most 254"),
        (
            {f"{down}_blocks": tensors[f"{down}_blocks"][:, 1:].clone()},
            rf"{down}_blocks must (have shape \(4, 64, 1, 16|hold weights of shape \(4, 64, 32)\), got",
        ),
        ({f"{down}_scales": None}, f"must have {down}_scales, got none"),
    ):
        changed = {name: t for name, t in (tensors | change).items() if t is not None}
        with pytest.raises(ValueError, match=f"load_in_mxfp4: .*{message}"):
            load_in_mxfp4(written(tmp_path / "wrong", config, changed))
    with pytest.raises(ValueError, match=r"must be a gpt_oss .* got gpt_oss with .*'fp8'"):
        load_in_mxfp4(written(tmp_path / "fp8", config, tensors, quant_method="fp8"))
    with pytest.raises(ValueError, match="quantization_config must be left out"):
        load_in_mxfp4(published, quantization_config=transformers.Mxfp4Config())
    with pytest.raises(ValueError, match=r"store_mxfp4: no must be a floating point parameter \(E, N, K\), got none"):
        store_mxfp4(experts_of(make("gpt_oss", **SIZES)), "no", *map(tensors.get, (f"{down}_blocks", f"{down}_scales")))
    with pytest.raises(ValueError, match=r"LigerMXFP4Experts: weights must have shape \(4, 32, 64\), got \(1, 2, 3\)"):
        experts_of(load_in_mxfp4(published)).down_proj.data = torch.zeros(1, 2, 3)


def test_a_patched_model_is_freed(published):
    """PyTorch's class of its experts holds them, and our cache of classes must not hold that."""
    freed = weakref.ref(experts_of(patch(load_in_mxfp4(published))))
    gc.collect()
    assert freed() is None


def test_liger_train_loads_it_for_adapters(published):
    from liger_kernel.train import TrainConfig
    from liger_kernel.train.model import build

    config = TrainConfig(model=str(published), lora=2, lora_targets="q_proj,v_proj", gradient_checkpointing="full")
    model = build(config, None, torch.device(DEVICE), "bf16-mixed")
    assert experts_of(model).parametrizations.down_proj.original.dtype == torch.uint8
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learned and all("lora_" in name for name in learned)
    with torch.autocast(DEVICE, torch.bfloat16):
        model(**tokens(**BATCH)).loss.backward()
