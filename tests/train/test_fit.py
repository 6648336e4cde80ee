"""The peak of memory that is estimated from shapes is the one that was measured; what fits, and
what a run that does not fit says."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pages
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

import transformers
from estimates import NOT_ESTIMATED, Measured, measured
from quick import further, words
from small_runs import refused, small_run
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import masking_utils

from liger_kernel import cli, memory
from liger_kernel.memory import offload as offloading
from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.train import fit, loop, ranks, simulated
from liger_kernel.train.config import TrainConfig, from_flags
from liger_kernel.transformers.rewrite import joined_steps

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "fit.md"
# Rows of benchmarks/data that are not estimated, and why; the first reason counts
OUTSIDE = NOT_ESTIMATED | {
    "an earlier state of the code, which kept more": lambda row: (
        (row["variant"].startswith("ours") and row["source"] < "2026-11-22" and not row.get("checkpointing"))
        or (row["source"], row["variant"]) in EARLIER
    )
}
EARLIER = {("2026-11-22-h200-steps.csv", "ours:off"), ("2026-11-22-h200-2gpus-batches.csv", "ours")}
ROWS = [row for result in pages.results("peak_allocated_gb") for row in result["rows"] if not row.get("failed")]
ROWS.sort(key=lambda row: row["source"].removesuffix(".csv"))  # the oldest first
REASONS = [next((why for why, outside in OUTSIDE.items() if outside(row)), None) for row in ROWS]
STEPS = [measured(row) for row, why in zip(ROWS, REASONS) if why is None]
ALL = list(dict.fromkeys(STEPS))
# the latest measurement of each step
LATEST = list({replace(step, gb=0.0): step for step in STEPS}.values())


def traits(step: Measured) -> set:
    """Its variant, precision, whether there are ranks, and flags, by their names or words."""
    return {
        step.variant,
        step.precision,
        step.gpus > 1,
        *((name, value) if isinstance(value, str) else name for name, value in step.run),
    }


def some_of_each_trait(steps: list[Measured]) -> list[Measured]:
    """Steps with every trait that there is; each has most that those before it lack."""
    chosen, missing = [], set().union(*map(traits, steps))
    while missing:
        chosen.append(max(steps, key=lambda step: len(traits(step) & missing)))
        missing -= traits(chosen[-1])
    return chosen


# every change estimates these, with most traits; the others take minutes
WITH_MOST_TRAITS = some_of_each_trait(LATEST)[:7]


PHASES, KNOWN = simulated._phases, {}


def phases(form, how):
    """Steps that several tests ask for are made once."""
    key = form.to_json_string(), repr(how)
    if key not in KNOWN:
        KNOWN[key] = PHASES(form, how)
    return copy.deepcopy(KNOWN[key])


@pytest.fixture(autouse=True)
def as_outside_of_tests(monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 16 * 2**20)
    monkeypatch.setattr(simulated, "_phases", phases)


@pytest.fixture
def estimates(once) -> Callable[[Measured], float]:
    """GB of a step, estimated once for all processes."""

    def estimated(step: Measured) -> float:
        if step.precision == "bf16-mixed" or dict(step.run).get("lora"):
            pytest.importorskip("peft")
        key = hashlib.sha1(repr(replace(step, gb=0.0)).encode()).hexdigest()
        return once(f"estimate-{key}", lambda: step.estimate().total / 1e9)

    return estimated


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            s, marks=[pytest.mark.slow] * (s not in WITH_MOST_TRAITS), id=f"{s.variant}-{s}-{s.gb:.2f}".replace(" ", "")
        )
        for s in ALL
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(step, estimates):
    assert estimates(step) == pytest.approx(step.gb, rel=0.10)


@pytest.mark.slow
def test_most_estimates_are_within_a_hundredth(estimates):
    errors = [abs(estimates(step) / step.gb - 1) for step in LATEST]
    assert sum(error <= 0.01 for error in errors) >= 0.8 * len(errors) and len(errors) >= 45


@pytest.mark.parametrize(
    "fp8",
    [
        dict(fp8="rowwise_with_gw_hp"),
        dict(fp8="tensorwise", fp8_head=True),
        *further(dict(fp8="tensorwise"), dict(fp8="rowwise")),
    ],
    ids=str,
)
def test_a_step_in_fp8_needs_what_one_in_bf16_does(fp8):
    run = TrainConfig(model="llama-3-8b-4layers", batch=4, length=2048)
    bf16, ours = (
        simulated.simulated(config_of(MODELS[run.model]), replace(run, **changes), "bf16", optimizer="sgd").total
        for changes in ({}, fp8)
    )
    assert ours <= (1.002 if fp8["fp8"] == "rowwise_with_gw_hp" else 1.0) * bf16


def test_experts_in_fp8_take_half():
    """Weights, and one dense weight at a time while it is multiplied."""
    pytest.importorskip("peft")
    run = TrainConfig(model="qwen3-30b-a3b", batch=1, length=512, lora=4, lora_targets="q_proj,down_proj")
    form = config_of(MODELS[run.model] | dict(num_hidden_layers=2, num_experts=32))
    bf16, fp8 = (
        simulated.simulated(form, replace(run, quantize=how), "bf16-mixed", optimizer="sgd").parts
        for how in (None, "fp8")
    )
    experts = 2 * form.num_experts * 3 * form.hidden_size * form.moe_intermediate_size
    attention = 2 * 2 * form.hidden_size * form.head_dim * (form.num_attention_heads + form.num_key_value_heads)
    assert bf16["weights"] - fp8["weights"] == pytest.approx(experts + attention, rel=1e-3)
    assert fp8["temporary"] < 0.9 * experts, "more than gate_up of one layer is dense"


GROUPS = dict(a=dict(weights=dict(num_bits=4, group_size=128)))
PUBLISHED = {
    "fp8": (dict(quant_method="fp8", weight_block_size=[128, 128]), 1),
    "int4": (dict(quant_method="compressed-tensors", config_groups=GROUPS), 0.5 + 2 / 128),
    "nvfp4": (dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized"), 0.5 + 1 / 16),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=128), 0.5 + 2 / 128),
}


@pytest.mark.parametrize("kind", [*PUBLISHED, "mxfp4"])
def test_a_base_as_it_is_published(kind):
    """Its weights have their own size, and one layer, or a part of its experts, is dense at a time."""
    pytest.importorskip("peft")
    if kind == "mxfp4":
        pytest.importorskip("transformers.core_model_loading", reason="this version has another loader")
        sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        form = transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=16, vocab_size=512, **sizes)
        how, each, quantised = dict(quant_method="mxfp4"), 17 / 32, 16 * 3 * 128 * 256
    else:
        (how, each), form = PUBLISHED[kind], config_of(MODELS["llama-3-8b-4layers"] | dict(num_hidden_layers=1))
        quantised = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    run = TrainConfig(batch=1, length=64, lora=2, lora_targets="q_proj,v_proj")
    parts = []
    for quantization in (None, how):
        form.quantization_config = quantization
        parts.append(simulated.simulated(form, run, "bf16-mixed", optimizer="sgd").parts["weights"])
    assert parts[0] - parts[1] == pytest.approx((2 - each) * quantised, rel=0.01)


def test_every_row_is_estimated_or_has_a_reason():
    assert set(OUTSIDE) <= set(REASONS), "a reason that no row has"
    assert [why for why in OUTSIDE if why not in PAGE.read_text()] == [], "the page does not say this"
    estimated = {row["variant"] for row, why in zip(ROWS, REASONS) if why is None}
    assert estimated == {"stock", "ours", *(f"ours:{how}" for how in words("bf16 head fp8 off mlp offload long"))}


def table(estimates: Callable[[Measured], float], steps: Iterable[Measured]) -> list[str]:
    """Lines of the table of docs/guides/fit.md: each step that was measured."""
    lines = []
    for step in steps:
        gb = estimates(step)
        error = f"{100 * (gb / step.gb - 1):+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
        kind = "stock" if step.variant == "stock" else "patched"
        lines.append(f"| {step} | {kind} | {step.gb:.2f} | {gb:.2f} | {error} % |")
    return sorted(set(lines))


def lines_of_the_page() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if re.search(r"\| [+-]?[\d.]+ % \|$", line)]


@pytest.mark.slow
def test_the_page_has_these_errors(estimates):
    lines = table(estimates, LATEST)
    assert lines_of_the_page() == lines, "\n".join(lines)


def test_the_page_has_each_step(estimates):
    there, steps = lines_of_the_page(), lambda lines: {line.rsplit(" | ", 2)[0] for line in lines}
    assert set(table(estimates, WITH_MOST_TRAITS)) <= set(there)
    assert steps(there) == steps(table(lambda step: step.gb, LATEST))


@pytest.mark.slow
def test_the_page_shows_what_is_printed(said):
    shown = re.search(r"^```bash\nliger fit (.*?)\n```\n\n```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    command, printed = shown.groups()
    assert said(*command.split()) == printed


def test_the_page_is_right_about_eight_gpus():
    """The second command of the page, and the numbers that the text takes from its answer."""
    run = TrainConfig(model="llama-3-8b", batch=1, length=8192, parallel="fsdp2", nproc=8)
    peak = fit.Estimates(config_of(MODELS[run.model]), "sm90", fit.world_of(run)).peak(run)
    needs = f"needs {peak.total / 1e9:.2f} GB on each of eight GPUs, {peak.parts['weights'] / 1e9:.2f} of these"
    gathers = f"and {peak.parts['gathered weights'] / 1e9:.2f} for weights that it gathers"
    assert needs in PAGE.read_text() and gathers in PAGE.read_text(), peak


def llama(layers: int = 12, **more):
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)
    return transformers.LlamaConfig(num_hidden_layers=layers, **sizes | more)


RUN = TrainConfig(model="llama", batch=4, length=4096)
OFFLOADED = dict(gradient_checkpointing="full", activation_offloading=True)


def phases_of(form, config: TrainConfig, world: int = 1) -> dict[str, dict[str, int]]:
    """Of a step in bf16 with a model that is not cut."""
    return simulated._phases(form, simulated._How(config, "bf16", world))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *further(
            OFFLOADED,
            dict(parallel="fsdp2"),
            dict(gradient_checkpointing="full"),
            dict(rematerialise="mlp"),
            dict(kernels="off"),
            dict(parallel="fsdp2", gradient_checkpointing="full", accumulate=2),
        ),
    ],
    ids=str,
)
def test_a_cut_model_has_the_peak_of_the_whole_one(changes):
    config = replace(RUN, **changes, length=65536 if "activation_offloading" in changes else 4096)
    form = llama(11)
    world = 4 if config.fully_sharded else 1
    peak = simulated.simulated(form, config, "bf16", world=world)
    whole = phases_of(form, config, world)
    assert peak.total == max(sum(parts.values()) for parts in whole.values()) + simulated.workspaces("sm90")


def test_parts_are_those_of_the_shapes():
    """Weights, gradients and moments can be counted by hand. Each of four ranks holds a quarter of
    them, all and buckets of gradients, or, where the optimizer is on the CPU, buffers alone."""
    form = llama(2)
    with torch.device("meta"):
        size = 2 * sum(p.numel() for p in transformers.LlamaForCausalLM(form).parameters())
    of = lambda ranks=4, **changes: phases_of(form, replace(RUN, **changes), ranks)["optimizer"]
    alone, sharded, copies = of(1), of(parallel="fsdp2"), of(parallel="ddp")
    on_cpu = of(parallel="fsdp2", optimizer_on_cpu=True)
    for found, parts in ((alone, (1, 1, 2)), (sharded, (0.25, 0.25, 0.5)), (copies, (1, 2, 2)), (on_cpu, (0, 0, 0))):
        expected = [size * part for part in parts]
        assert [found[part] for part in ("weights", "gradients", "optimizer")] == pytest.approx(expected, abs=51200)
    # the loss and what it depends on
    assert alone["temporary"] == 0 and alone["activations"] + alone["head and loss"] <= 2**20
    assert sharded["gathered weights"] == copies["gathered weights"] == 0, "they are given back after the backward"


@pytest.mark.parametrize(
    "flags, measured",
    [({}, 42.6), *further((dict(activation_offloading=True, keep_attention=True, tiled_mlp=0), 39.6))],
    ids=str,
)
def test_rows_that_ranks_share(flags, measured):
    """Peaks of docs/benchmarks/long-rows.md: two H200, Llama-3-8B, one row of 65,536 tokens."""
    run = TrainConfig(length=65536, batch=1, parallel="ulysses-fsdp2", gradient_checkpointing="full", **flags)
    form = config_of(MODELS["llama-3-8b"] | dict(max_position_embeddings=65536))
    assert simulated.simulated(form, run, "bf16", world=2).total / 1e9 == pytest.approx(measured, abs=0.1)


def test_more_ranks_need_less():
    peak = lambda world, **changes: simulated.simulated(llama(2), replace(RUN, **changes), "bf16", world=world).total
    assert peak(8, parallel="fsdp2") < peak(2, parallel="fsdp2") < peak(2, parallel="ddp") == peak(8, parallel="ddp")
    alone = peak(2, parallel="ulysses", sequence_parallel_size=1)
    assert peak(2, parallel="ulysses") < peak(2, parallel="ddp") <= alone
    assert peak(2, parallel="tp") < peak(1)


@pytest.mark.slow
def test_switches_need_less():
    """In rows of 32,768 tokens each step of this ladder needs less than the one above it."""
    ladder = (dict(kernels="off"), dict(), dict(rematerialise="mlp"), dict(gradient_checkpointing="full"))
    ladder += OFFLOADED, OFFLOADED | dict(tiled_mlp=0)
    peaks = [simulated.simulated(llama(), replace(RUN, length=32768, **changes), "bf16").total for changes in ladder]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_memory_of_the_cpu():
    """Every layer's input, what there is room for; beside them what AdamW keeps there."""
    run, form = replace(RUN, length=262144, **OFFLOADED), llama(24)
    of = lambda **how: simulated.simulated(form, run, "bf16", **how)
    assert simulated.simulated(form, RUN, "bf16").cpu == {}
    everything, of_a_layer = of(), 4 * 262144 * 512 * 2
    copies = everything.cpu["activations"]
    assert copies == pytest.approx((24 + 1) * of_a_layer, rel=1e-3)  # the last norm's input, too
    less = of(cpu_memory=copies - 10.5 * of_a_layer)
    assert less.cpu == {"activations": copies - 11 * of_a_layer}
    # the moment that needs most is another one than before, as the backward has freed what stayed
    assert everything.total < less.total <= everything.total + 11 * of_a_layer
    assert of(cpu_memory=copies) == everything
    nothing = of(cpu_memory=0)
    assert nothing.total - less.total == copies - 11 * of_a_layer and not nothing.cpu

    on_cpu = simulated.simulated(form, replace(run, parallel="fsdp2", optimizer_on_cpu=True), "bf16").cpu
    weights = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(form).parameters())
    assert on_cpu["weights, gradients and moments"] == pytest.approx(4 * 2 * weights, rel=1e-3)
    assert on_cpu["activations"] == copies


def test_a_long_row_on_a_machine_with_little_memory():
    """Measured on one H200 beside 134 GB of CPU memory (docs/benchmarks/long-rows.md)."""
    run = TrainConfig(
        model="llama-3-8b", batch=1, length=516096, parallel="fsdp2", optimizer_on_cpu=True, tiled_mlp=0, **OFFLOADED
    )
    form = config_of(MODELS[run.model] | dict(max_position_embeddings=run.length))
    peak = simulated.simulated(form, run, "bf16", reduce_dtype=None, cpu_memory=134e9 - offloading.RESERVE)
    assert peak.total / 1e9 == pytest.approx(135.45, rel=0.02)


LONG = ("--memory-gb", "1", "--seq", "65536", "--precision", "bf16", "--checkpointing", "--activation-offloading")
HELD = 3 * 65536 * 512 * 2 / 1e9  # of a model of two layers


@pytest.mark.slow
def test_memory_of_the_cpu_is_printed(model, said):
    arguments = ["--model", model, *LONG]
    assert f"GB, and {HELD:.2f} GB of the CPU's memory for activations\n" in said(*arguments)
    short = json.loads(said(*arguments, "--cpu-memory-gb", "4.4", "--json"))
    assert short["cpu"]["activations"] <= 4.4e9 - offloading.RESERVE < HELD * 1e9
    on_cpu = [*arguments, "--parallel", "fsdp2", "--optimizer-on-cpu", "--memory-gb", "8", "--json", "--cpu-memory-gb"]
    fits = [json.loads(said(*on_cpu, gb))["fits"] for gb in ("4.3", "10")]
    assert fits == [False, True], "weights, gradients and moments need more than 5 MB"


def test_more_of_a_run_needs_more():
    peak = lambda precision="bf16", optimizer=None, **changes: (
        simulated.simulated(llama(2), replace(RUN, **changes), precision, optimizer=optimizer).total
    )
    assert peak() < peak(accumulate=2) and peak() < peak(batch=8) and peak() < peak("bf16-mixed") < peak("fp32")
    assert peak(optimizer="sgd") < peak(trainer="hf", optimizer="adamw-8bit") < peak()
    assert peak() < peak(cross_entropy=True, fused_linear_cross_entropy=False)


def test_what_is_replaced_comes_back(monkeypatch):
    monkeypatch.setattr(simulated, "_phases", PHASES)
    places = [(torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "dropout")]
    places += [(offloading, "PLAIN"), (memory, "PLAIN"), (offloading, "_lane"), (torch.UntypedStorage, "resize_")]
    places += [(torch.nn.parallel, "DistributedDataParallel")]
    places += [(FSDPParamGroup, "unshard"), (FSDPParamGroup, "post_backward")]
    replaced = lambda: [torch.distributed.is_initialized(), *(getattr(*place) for place in places)]
    before = replaced()
    refused("bitsandbytes", simulated.simulated, llama(1), replace(RUN, lora=2, quantize="int8"), "bf16-mixed")
    simulated.simulated(llama(1), RUN, "bf16")
    simulated.simulated(llama(1), replace(RUN, parallel="fsdp2"), "bf16", world=2)
    assert before == replaced()


def test_what_patched_models_ask_once_is_asked_by_no_simulation(monkeypatch):
    """Else every step after it would ask the GPU whether rows have several documents."""
    monkeypatch.setattr(simulated, "_phases", PHASES)
    stock = lambda positions: None
    with monkeypatch.context() as fresh:
        fresh.setattr(masking_utils, "find_packed_sequence_indices", stock)
        joined_steps.answer_by_documents.cache_clear()
        simulated.simulated(llama(1), RUN, "bf16")
        assert masking_utils.find_packed_sequence_indices.__wrapped__ is stock
    joined_steps.answer_by_documents.cache_clear()


@pytest.mark.parametrize("room", [50, 1000, 999_999])
@pytest.mark.parametrize(
    "peak",
    [lambda n: 100 + 7 * n, lambda n: max(500 + n, 20 + 9 * n), lambda n: 100 + n * n],
    ids=["line", "kink", "square"],
)
def test_the_largest_number_is_found(peak, room):
    found = fit.largest(peak, room)
    assert (peak(found) <= room if found else peak(1) > room) and peak(found + max(1, found // 64)) > room


@pytest.fixture
def model(tmp_path) -> str:
    llama(2).save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


@pytest.fixture
def said(capsys) -> Callable[..., str]:
    return lambda *argv: "" if cli.main(["fit", *argv]) else capsys.readouterr().out


def test_the_table_of_switches(model, said):
    text = said("--model", model, "--memory-gb", "0.5", "--seq", "8192", "--batch", "2", "--precision", "bf16")
    heads = r"on a GPU with 0.50 GB\n\n +peak GB +saves GB +fits +costs\n"
    assert re.search(rf"config.json, 2 x 8192 tokens, {heads}as given +[\d.]+ +no\n", text)
    assert re.search(r"--gradient-checkpointing full +[\d.]+ +[\d.]+ +yes +time: the forward of each layer", text)
    assert re.search(r"--batch 1 --accumulate 2 +[\d.]+ +[\d.]+ +(yes|no) +time: products of fewer tokens\n", text)
    command = re.search(r"fits, with [\d.]+ GB: liger train (--model .*config.json .*--length 8192.*)", text)[1]
    config = from_flags(command.split())
    assert config.batch * config.accumulate == 2 and config.length == 8192 and config.model == model


@pytest.mark.slow
def test_json_agrees_with_the_estimates(model, said):
    found = json.loads(said("--model", model, "--gpu", "rtx4090", "--checkpointing", "--seq", "8192", "--json"))
    run = TrainConfig(model=model, batch=1, length=8192, gradient_checkpointing="full")
    of = fit.Estimates(llama(2), "sm89")
    assert found["peak"] == sum(found["parts"].values()) == of.total(run) and found["memory"] == 24564 * 2**20 - 10**9
    assert found["fits"]
    best = found["recommended"]
    assert best["command"].startswith("liger train --model ") and "--gradient-checkpointing full" in best["command"]
    longest = [of.total(replace(run, length=int(best["longest_row"] * more))) for more in (1, 1.03)]
    assert longest[0] <= found["memory"] < longest[1]
    assert all(each["saves"] > 0 and each["peak"] + each["saves"] == found["peak"] for each in found["switches"])


@pytest.mark.slow
def test_ranks_in_the_table(tmp_path, said):
    llama(1).save_pretrained(tmp_path)
    model, of = str(tmp_path / "config.json"), fit.Estimates(llama(1), "sm90", 8)
    copies, shards = (
        of.total(TrainConfig(model=model, batch=1, length=2048, parallel=parallel)) / 1e9
        for parallel in ("ddp", "fsdp2")
    )
    gb = f"{(copies + shards) / 2:.3f}"
    text = said("--model", model, "--memory-gb", gb, "--parallel", "ddp", "--nproc", "4", "--nnodes", "2:4")
    assert f"1 x 2048 tokens, on each of 8 GPUs: a GPU with {float(gb):.2f} GB" in text
    assert re.search(r"--parallel fsdp2 +[\d.]+ +[\d.]+ +(yes|no) +time: every rank gathers", text)
    assert re.search(r"fits, with [\d.]+ GB: liger train .*--parallel fsdp2.* --nproc 4 --nnodes 2:4", text)


@pytest.mark.slow
def test_nothing_fits(model, said):
    assert "No combination of switches that trains the same model fits" in said("--model", model, "--memory-gb", "0.01")


def test_out_of_memory_is_explained(tmp_path, monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(loop, "_own", mock.Mock(side_effect=error))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loop.train(small_run(tmp_path, [{"text": "def add(a, b): return a + b. " * 60}], layers=2, steps=1))
    said = capsys.readouterr().err
    assert re.search(r"^out of memory: .* a step with 4 x 24 tokens needs about [\d.]+ GB. Turn on:$", said, re.M)
    assert re.search(r"^  --gradient-checkpointing full +saves about [\d.]+ GB; costs time: .* each layer", said, re.M)


@pytest.mark.parametrize("text, lacks", [("CUBLAS_STATUS_ALLOC_FAILED when calling `create`", True), ("else", False)])
def test_other_errors_for_lack_of_memory(text, lacks, monkeypatch, capsys):
    monkeypatch.setattr(fit, "explained", lambda *_: "explained")
    alone = ranks.Ranks(0, 1, None, None)
    with pytest.raises(RuntimeError), loop.explaining(RUN, torch.device("cpu"), alone):
        raise RuntimeError(f"CUDA error: {text}")
    assert ("explained" in capsys.readouterr().err) == lacks


def test_the_error_goes_on_if_it_cannot_be_explained(monkeypatch):
    monkeypatch.setattr(fit, "switches", lambda *args: 1 / 0)
    unknown = "out of memory; what each switch would save is not known: "
    assert fit.explained(llama(1), RUN, 80e9) == f"{unknown}division by zero"
    assert fit.explained("no/such/model/here", RUN, 80e9).startswith(f"{unknown}no such folder")
