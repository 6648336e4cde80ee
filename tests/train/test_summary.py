"""What a run says before its first step."""

import re
import types
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers
from small_runs import small_run

from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.train import loop, preview, ranks
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.session import Session


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path, [{"text": "def add(a, b): return a + b. " * 60}], layers=2, steps=4, lr=None)


def test_a_run_begins_with_a_summary_and_says_how_long_it_takes(config, capsys):
    loop.train(replace(config, rope=False))
    out = capsys.readouterr().out
    said = dict(line.split(": ", 1) for line in out.splitlines() if re.match(r"[a-z]+: ", line))
    assert re.fullmatch(r"random weights \(llama\), [\d,]+ parameters, all of them trained", said["model"])
    assert "5 x LlamaRMSNorm (rms_norm)" in said["patched"] and "1 x LlamaForCausalLM (fused head)" in said["patched"]
    assert said["stock"] == "2 x LlamaAttention (rope): rope is off, as asked"
    rows = r"text.jsonl, \d+ rows of at most 24 tokens to train on, 1 more for evaluation"
    assert re.search(rf"{rows}; 4 steps of 4 rows: [\d.]+ passes", said["data"])
    assert said["device"].endswith("threads, fp32, trainer torch")
    assert re.fullmatch(r"\d+ RMSNorm, \d+ MLP, head and loss", said["kernels"])
    assert said["memory"] == "not estimated on a CPU"
    steps = [line for line in out.splitlines() if line.startswith("step ") and "tokens/s" in line]
    assert len(steps) == 4 and all(re.search(r"  ETA \d+:\d\d:\d\d$", line) for line in steps[:-1])
    assert "ETA" not in steps[-1]
    assert out.index("memory: ") < out.index("step 1/4")


def test_a_run_without_kernels_says_so(config, capsys):
    loop.train(replace(config, kernels="off", steps=1))
    assert "patched: nothing (--kernels off)" in capsys.readouterr().out


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The summary of a run, as if its model were on a GPU of 1 GB."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("GPU", (), {"total_memory": 10**9}))
    monkeypatch.setattr(preview, "device_name", lambda device: "a GPU")
    monkeypatch.setattr("liger_kernel.train.fit._arch", lambda: "sm90")  # nor is a GPU of this machine asked
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(MODELS["llama-3.2-1b"]), dtype=torch.bfloat16)
    data = types.SimpleNamespace(train=range(10), eval=[], tokenizer=types.SimpleNamespace(eos_token_id=2))

    def said(world=1, **run):
        config, gpu = TrainConfig(kernels="off", **run), torch.device("cuda")
        of_ranks = ranks.Ranks(0, world, None, None)
        return preview.summary(Session(config, data, model, gpu, "bf16", of_ranks, ranks.Stop()), "sdpa")

    return said


def test_a_gpu_that_is_too_small_is_named(on_a_gpu):
    said = (
        r"memory: expected: about [\d.]+ GB of the GPU's 1.00 GB at the peak, in '[a-z ]+', estimated from "
        r"shapes: weights .*: expect to run out of memory"
    )
    assert re.search(said, on_a_gpu(batch=4, length=4096))


@pytest.mark.slow  # test_fit.py estimates parts of ranks of smaller models
def test_ranks_expect_a_part(on_a_gpu):
    """Also in a process that is one of the ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        said = on_a_gpu(4, batch=1, length=512, parallel="fsdp2")
    finally:
        dist.destroy_process_group()
    weights, moments = (
        float(re.search(rf"memory: expected: about .*[:,] {part} ([\d.]+) GB", said)[1])
        for part in ("weights", "optimizer")
    )
    # of 1.236e9 parameters in fp32
    assert weights == pytest.approx(1.236 * 4 / 4, abs=0.01) and moments == pytest.approx(2 * weights, abs=0.02)


def test_what_is_not_known_is_said_and_ends_no_run(on_a_gpu, monkeypatch):
    assert "memory: not estimated: " in on_a_gpu(2, trainer="hf", parallel="deepspeed-z3")
    monkeypatch.setattr("liger_kernel.train.fit.expected", lambda *args: 1 / 0)
    assert "memory: not estimated: division by zero" in on_a_gpu(batch=1, length=512)
