"""What a run says before its first step, and that the memory it expects is the memory that was measured."""

import dataclasses
import re

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.train import loop
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.expected import Expected, Form, expected
from liger_kernel.train.measure import as_clock
from liger_kernel.train.summary import form_of, summary

TINY = dict(hidden=32, heads=2, kv_heads=1, layers=2, vocab=300, length=24, batch=4, steps=4, warmup=1, log_every=1, device="cpu")


def on_meta(name, lora=0, **changes):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(MODELS[name] | changes), dtype=torch.bfloat16)
        if lora:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=lora, target_modules="all-linear"))
            for p in model.parameters():
                if p.requires_grad:
                    p.data = p.data.float()
    return model


STOCK = dict(patched=False, fused_head=False)
EIGHT = dict(num_hidden_layers=8)
# Peak GB of one rank, measured on H200s and written in MEASURED.md or docs, and how far the estimate is from it
MEASURED = [
    ("llama-3.2-1b", {}, 0, dict(tokens=4 * 4096, states=0), 17.52, -0.006),
    ("llama-3.2-1b", {}, 0, dict(tokens=4 * 4096, states=0, level="off"), 19.7, -0.007),
    ("llama-3.2-1b", {}, 0, dict(tokens=4 * 4096, states=0, level="mlp"), 9.45, -0.010),
    ("llama-3.2-1b", {}, 0, dict(tokens=4 * 4096, states=0, **STOCK), 56.52, -0.004),
    ("llama-3-8b-4layers", {}, 0, dict(tokens=4 * 2048, states=0), 8.61, -0.019),
    ("llama-3-8b-4layers", {}, 0, dict(tokens=4 * 2048, states=0, **STOCK), 23.4, -0.010),
    ("gemma-2b", {}, 0, dict(tokens=4 * 2048, states=0), 19.0, -0.004),
    ("qwen3-0.6b", {}, 0, dict(tokens=8 * 4096, states=0), 35.34, -0.021),
    ("llama-3-8b", EIGHT, 16, dict(tokens=4 * 2048), 12.51, -0.012),
    ("llama-3-8b", EIGHT, 16, dict(tokens=4 * 2048, checkpointing="full"), 7.47, 0.003),
    ("llama-3-8b", {}, 0, dict(tokens=16 * 512, shards=2), 57.0, -0.065),
    ("llama-3-8b", {}, 0, dict(tokens=48 * 512, shards=2), 114.0, -0.089),
]


@pytest.mark.parametrize("name, changes, lora, form, measured, error", MEASURED, ids=lambda value: str(value).replace(" ", ""))
def test_the_expected_peak_is_the_measured_one(name, changes, lora, form, measured, error, monkeypatch):
    from liger_kernel import memory

    monkeypatch.setattr(memory, "SMALL", 16 * 2**20)  # as it is outside of tests
    found = expected(on_meta(name, lora, **changes), Form(activation=2, residual=2, **form)).peak / 1e9 / measured - 1
    assert found == pytest.approx(error, abs=0.002)


def test_layers_of_another_form_are_not_estimated():
    config = transformers.MixtralConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=50)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = expected(model, Form(tokens=8, activation=2, residual=2))
    assert found.peak is None and found.weights > 0 and "activations" not in str(found)


def test_more_is_expected_of_more():
    """Every field of the form counts: more tokens, less recomputed, more states need more."""
    model = on_meta("tiny")
    peak = lambda **changes: expected(model, Form(**dict(tokens=4096, activation=2, residual=2, level="cheap") | changes)).peak
    for less, more in (
        (dict(), dict(tokens=8192)),
        (dict(level="cheap"), dict(level="off")),
        (dict(level="mlp"), dict(level="cheap")),
        (dict(checkpointing="full"), dict(checkpointing="selective")),
        (dict(checkpointing="selective"), dict(checkpointing="none", **STOCK)),
        (dict(states=0.5), dict(states=2.0)),
        (dict(on_cpu=True), dict()),
        (dict(tokens=1, in_backward=True), dict(tokens=1)),
        (dict(), dict(buckets=True)),
        (dict(), dict(residual=4)),
        (dict(), dict(fused_head=False)),
        (dict(), STOCK),
    ):
        assert peak(**less) < peak(**more), (less, more)


def test_how_a_run_trains_is_read_from_its_config():
    model = on_meta("tiny")
    of = lambda precision="bf16-mixed", device="cuda", world=1, **changes: form_of(TrainConfig(**changes), model, torch.device(device), precision, world)
    assert (of().activation, of().residual, of().casts, of().states, of().shards) == (2, 4, True, 2.0, 1)
    assert of(lora=8).residual == 2 and not of(lora=8).casts
    assert (of("fp32").activation, of("fp32").residual) == (4, 4)
    assert of("bf16").residual == 2
    assert of(world=4, parallel="fsdp2").shards == 4 and of(world=4, parallel="fsdp2").residual == 2
    assert of(world=4, parallel="ddp").shards == 1 and of(world=4, parallel="ddp").buckets
    assert not of(kernels="off").patched and not of(kernels="off").fused_head and not of(device="cpu").patched
    assert not of(cross_entropy=True).fused_head and of(rematerialise="mlp").level == "mlp"
    in_bf16 = lambda name: form_of(TrainConfig(precision="bf16", optimizer=name), model, torch.device("cuda"), "bf16", 1).states
    assert (of(optimizer="adamw-8bit").states, in_bf16("adamw-8bit-bf16"), in_bf16("adamw-bf16")) == (0.5, 1.0, 2.0)
    assert of(optimizer_in_backward=True, grad_clip=0.0).in_backward and of(parallel="fsdp2", optimizer_on_cpu=True).on_cpu


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "%s"}\n' % ("def add(a, b): return a + b. " * 60))
    return TrainConfig(**TINY, data=str(tmp_path / "text.jsonl"), out=str(tmp_path / "run"))


def test_a_run_begins_with_a_summary_and_says_how_long_it_takes(config, capsys):
    loop.train(dataclasses.replace(config, rope=False))
    out = capsys.readouterr().out
    said = dict(line.split(": ", 1) for line in out.splitlines() if re.match(r"[a-z]+: ", line))
    assert re.fullmatch(r"random weights \(llama\), [\d,]+ parameters, all of them trained", said["model"])
    assert "5 x LlamaRMSNorm (rms_norm)" in said["patched"] and "1 x LlamaForCausalLM (fused head)" in said["patched"]
    assert said["stock"] == "2 x LlamaAttention (rope): rope is off, as asked"
    assert re.search(r"text.jsonl, \d+ rows of at most 24 tokens to train on, 1 more for evaluation; 4 steps of 4 rows: [\d.]+ passes", said["data"])
    assert said["device"].endswith("threads, fp32, trainer torch")
    now, peak = re.search(r"about ([\d.]+) GB resident at the peak, estimated from shapes: ([\d.]+) GB that the process has now", said["memory"]).groups()[::-1]
    assert 0 < float(now) <= float(peak)
    steps = [line for line in out.splitlines() if line.startswith("step ") and "tokens/s" in line]
    assert len(steps) == 4 and all(re.search(r"  ETA \d+:\d\d:\d\d$", line) for line in steps[:-1]) and "ETA" not in steps[-1]
    assert out.index("memory: ") < out.index("step 1/4")


def test_a_run_without_kernels_says_so(config, capsys):
    loop.train(dataclasses.replace(config, kernels="off", steps=1))
    assert "patched: nothing (--kernels off)" in capsys.readouterr().out


def test_adapters_are_counted(config, capsys):
    pytest.importorskip("peft")
    loop.train(dataclasses.replace(config, lora=2, steps=1))
    out = capsys.readouterr().out
    assert re.search(r"model: random weights \(llama\), [\d,]+ parameters, 2,816 of them trained \(\d+\.\d\d%\)", out)
    assert "projections: the engine runs " in out


def test_a_gpu_that_is_too_small_is_named(config, monkeypatch):
    """On meta tensors, as if a GPU of 1 GB held them."""
    from liger_kernel.train import summary as module

    model = on_meta("llama-3.2-1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("GPU", (), {"total_memory": 10**9}))
    monkeypatch.setattr(module, "device_name", lambda device: "a GPU")
    data = type("Rows", (), {"train": range(10), "eval": []})()
    text = summary(TrainConfig(batch=4, length=4096, kernels="off"), data, model, "sdpa", torch.device("cuda"), "bf16", 1)
    assert re.search(r"memory: expected: about [\d.]+ GB of the GPU's 1.00 GB at the peak.*more than the GPU has: expect to run out of memory", text)


def test_clock():
    assert [as_clock(s) for s in (0.4, 65, 3661, 90_000)] == ["0:00:00", "0:01:05", "1:01:01", "1 day, 1:00:00"]


def test_an_estimate_in_words():
    found = Expected(2e9, 1e9, 4e9, 3e9, 5e8)
    assert found.peak == 9.5e9
    assert str(found) == "weights 2.00 GB, gradients 1.00 GB, optimizer state 4.00 GB, activations 3.00 GB, head and loss 0.50 GB"
    assert Expected(2e9, 5e9, 4e9, 3e9, 5e8).peak == 11e9  # few layers and tokens: gradients are larger than activations
