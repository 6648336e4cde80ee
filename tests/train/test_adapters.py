"""Adapters over a frozen base: what is trained and saved, a resume of the same bits whoever
trains, and mistakes that are named before anything is loaded."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers
from accelerate.utils import extract_model_from_parallel
from small_runs import TEXT, forget_the_newest, needs, refused, resumed_alike, save_model, saved, small_run

from liger_kernel.nn.float8 import LigerFloat8Experts
from liger_kernel.train import adapters, checkpoint, loop
from liger_kernel.train.config import UserError
from liger_kernel.train.loop import evaluate
from liger_kernel.train.model import build
from liger_kernel.train.tokenise import train_bpe

pytestmark = pytest.mark.usefixtures("references")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model on disk and a run on it; rows of which every step sees others."""
    folder = tmp_path_factory.mktemp("adapters")
    model = save_model(folder / "model", train_bpe([TEXT], 280), hidden_size=64, intermediate_size=128)
    changes = dict(model=model, batch=2, steps=4, eval_fraction=0.05, checkpoint_every=2)
    records = [{"text": TEXT * 20 + str(i)} for i in range(8)]
    return small_run(folder, records, lora=4, lora_dropout=0.1, **changes)


@pytest.fixture
def config(base, tmp_path):
    return replace(base, out=str(tmp_path / "run"), save=str(tmp_path / "saved"))


def stored(config):
    if config.trainer == "torch":
        (newest, *_) = checkpoint.listed(Path(config.out) / "checkpoints")
        names = checkpoint.read_object(Path(config.out) / "checkpoints" / newest / checkpoint.INDEX)
        return [name for name in names if name.startswith("model.")]
    if config.trainer == "lightning":
        path = Path(config.out) / "checkpoints-lightning" / "step-00000004.ckpt"
        return list(torch.load(path, weights_only=True)["state_dict"])
    from safetensors import safe_open

    (path,) = (Path(config.out) / "checkpoints-hf" / "checkpoint-4").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    "trainer, changes",
    [
        ("torch", dict(lora_targets="q_proj, down_proj", lora_alpha=3.0, rslora=True, dora=True)),
        ("hf", dict(precision="bf16")),
        pytest.param("lightning", dict(precision="bf16-mixed"), marks=needs("lightning")),
        pytest.param("torch", dict(quantize="nf4", precision="bf16-mixed"), marks=needs("bitsandbytes")),
        pytest.param("hf", dict(quantize="int8"), marks=needs("bitsandbytes")),
        pytest.param("lightning", dict(quantize="nf4", dora=True), marks=needs("lightning", "bitsandbytes")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())).replace(" ", ""),
)
def test_a_run(trainer, changes, config, monkeypatch, capfd):
    """Adapters alone are trained and stored; a resume has the same bits; PEFT reads them."""
    config = replace(config, trainer=trainer, **changes)
    built, build = [], loop.build
    monkeypatch.setattr(loop, "build", lambda *args: built.append(build(*args)) or built[-1])
    expected, trained = resumed_alike(config), built[0]
    assert min(expected["losses"][2:]) < expected["losses"][0] and all(e["loss"] < 6 for e in expected["evaluations"])
    assert "adapters: " in capfd.readouterr().out

    learnt = {name: p for name, p in trained.named_parameters() if p.requires_grad}
    assert len(stored(config)) == len(learnt) and all("lora" in name for name in (*stored(config), *learnt))
    assert all(p.dtype == torch.float32 for p in learnt.values())
    half = config.precision.startswith("bf16")
    assert trained.base_model.model.model.norm.weight.dtype == (torch.bfloat16 if half else torch.float32)

    # PEFT's own way, without anything of ours
    if trainer == "hf":
        trained = extract_model_from_parallel(trained, keep_fp32_wrapper=False)  # accelerate's autocast
    q = adapters.quantization(config, "bf16-mixed" if half else "fp32")
    # else transformers takes a GPU if there is one
    quantized = {"quantization_config": q, "device_map": config.device} if q else {}
    dtype = torch.bfloat16 if half else torch.float32
    fresh = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype, **quantized)
    read = peft.PeftModel.from_pretrained(adapters.unchanging(fresh), config.save).eval()
    ids = torch.arange(24)[None] % 200
    outputs = lambda model: model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        expected_logits = outputs(trained.eval())
        assert torch.equal(outputs(read), expected_logits)
        with read.disable_adapter():
            assert not torch.equal(outputs(read), expected_logits)

    for changed, message in (
        (dict(lora=8), "lora 4 there, 8 here"),
        (dict(lora_targets="v_proj"), "lora_targets .* there, v_proj here"),
        (dict(quantize=None) if config.quantize else dict(dora=not config.dora), "(quantize|dora) .* there, .* here"),
    ):
        refused(f"is of other adapters: {message}", loop.train, replace(config, steps=6, **changed))
    other = Path(config.out).parent / "other"
    shutil.copytree(config.model, other)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(config.model)).save_pretrained(other)
    refused("is of another model: digest of base", loop.train, replace(config, model=str(other), steps=6))


def test_a_base_from_random_weights_is_made_again(config):
    config = replace(config, model=None, tokenizer=config.model, hidden=32, heads=2, kv_heads=1, layers=1)
    expected = resumed_alike(config)
    # a saved adapter is evaluated on the base that it is of, which is made again, too
    scores = evaluate(replace(config, model=config.save))
    assert scores["loss"] == pytest.approx(expected["evaluations"][-1]["loss"], rel=1e-5)
    refused("holds adapters, not a model", loop.train, replace(config, model=config.save))


def test_adapters_that_lie_beside_their_model_are_no_part_of_it(config, tmp_path):
    """As users put them there; a run saves to a folder of its own."""
    shutil.copytree(config.model, tmp_path / "beside")
    config = replace(config, model=str(tmp_path / "beside"), eval_fraction=0.0)
    expected = loop.train(config)
    whole = saved(config)
    for path in Path(config.save).glob("adapter_*"):
        shutil.copy(path, config.model)
    forget_the_newest(config)
    assert loop.train(config)["losses"] == expected["losses"] and saved(config) == whole


@pytest.mark.parametrize(
    "missing, changes, message",
    [
        ("peft", {}, "lora needs peft: pip install"),
        ("bitsandbytes", dict(quantize="nf4"), "quantize nf4 needs bitsandbytes and accelerate: pip install"),
        ("accelerate", dict(quantize="int8"), "quantize int8 needs bitsandbytes and accelerate: pip install"),
        (
            None,
            dict(lora_targets="q_proj,query"),
            "lora_targets: llama has no layer 'query' for adapters; it has down_proj, embed_tokens, .*, v_proj$",
        ),
        (None, dict(lora_targets="mlp"), "lora_targets: llama has no layer 'mlp' for adapters"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(missing, changes, message, config, monkeypatch):
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(loop, "load", None)
    with pytest.raises(UserError, match=message) as error:
        loop.train(replace(config, **changes))
    assert "\n" not in str(error.value) and not Path(config.out).exists()


@needs("bitsandbytes")
def test_a_device_without_kernels_of_bitsandbytes_is_refused(config, monkeypatch):
    import bitsandbytes

    monkeypatch.setattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    config = replace(config, quantize="nf4")
    refused(r"quantize nf4 needs a device .* \(cuda\); this run uses cpu", adapters.check, config, CPU)


@needs("bitsandbytes")
def test_a_model_that_is_quantised_already(config, tmp_path):
    """It takes adapters as it is, is not quantised again, and cannot be trained whole."""
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, quantization_config=four)
    for part in (model, transformers.AutoTokenizer.from_pretrained(config.model)):
        part.save_pretrained(tmp_path / "four")
    config = replace(config, model=str(tmp_path / "four"), steps=1, checkpoint_every=0, eval_fraction=0.0)
    assert len(loop.train(config)["losses"]) == 1
    refused("is quantised already: leave out --quantize", loop.train, replace(config, quantize="nf4"))
    refused(
        "is quantised, so it cannot be trained as a whole: give --lora",
        loop.train,
        replace(config, lora=0, lora_dropout=0.0),
    )


def test_fp8_asks_the_patch_for_a_frozen_base(config, monkeypatch):
    import liger_kernel.transformers as patches

    eight = replace(config, quantize="fp8", steps=1, checkpoint_every=0, eval_fraction=0.0)
    cannot = ValueError("quantize_base: this GPU does not compute in FP8")
    asked = mock.Mock(side_effect=[None, cannot])
    monkeypatch.setattr(patches, "quantize_base", asked)
    loop.train(eight)
    refused("does not compute in FP8", loop.train, eight)
    assert {(type(model).__name__, how) for (model, how), _ in asked.call_args_list} == {("LlamaForCausalLM", "fp8")}


def test_experts_in_fp8_have_adapters(config, tmp_path):
    """Whose names are those of a dense model: they are stored after PEFT has found them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    sizes = dict(moe_intermediate_size=16, head_dim=16, num_experts=4, num_experts_per_tok=2)
    moe = save_model(tmp_path / "moe", tokenizer, "Qwen3Moe", intermediate_size=32, **sizes)
    experts = dict(model=moe, lora_targets="all-linear", lora_dropout=0.0, quantize="fp8")
    run = replace(config, **experts, steps=2, checkpoint_every=0, eval_fraction=0.0, save=str(tmp_path / "tuned"))
    model = build(run, tokenizer, CPU, "fp32")
    made = [m for name, m in model.named_modules() if isinstance(m, LigerFloat8Experts)]
    learns = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(made) == 2 and any(name.endswith("experts.lora_A.default.weight") for name in learns)
    losses = loop.train(run)["losses"]
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    loaded = peft.PeftModel.from_pretrained(dense, tmp_path / "tuned")
    learnt = [name for name, p in loaded.named_parameters() if "lora_B" in name and p.any()]
    assert len(losses) == 2 and any("experts" in name for name in learnt)
