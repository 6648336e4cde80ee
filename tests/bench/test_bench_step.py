"""``liger bench step``: that it measures what it says, and that a step which learns something
else gets no ratio."""

import argparse
import csv
import importlib.util
import json
import math
import re
import subprocess
import sys
import types

import processes
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel.bench import profile, step, step_child
from liger_kernel.model_sizes import MODELS, config_of, step_flops
from liger_kernel.nn import LigerFloat8Linear
from liger_kernel.nn.float8 import LigerFloat8Experts
from liger_kernel.ops._core import operator as _op
from liger_kernel.patch_options import SWITCHES
from liger_kernel.train.config import UserError

# Interpreted kernels are made on import, before a fixture below leaves the interpreter
from liger_kernel.transformers import _apply_liger_kernel_to_instance, quantize_base  # noqa: F401

TINY = MODELS["tiny"]

# -- kinds of work -------------------------------------------------------------------------

KERNELS = {
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>": "gemm",
    "triton_tem_fused_mm_3": "gemm",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, cutlass::bfloat16_t>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64_4x1x1_kernel0_0": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float>>": "optimizer",
    "_rms_norm_backward_kernel": "norm",
    "_swiglu_forward_kernel": "activation",
    "_triton_rope": "rope",
    "liger_cross_entropy_kernel": "loss",
    "void at::native::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>": "loss",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>": "activation",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3": "norm",
    "triton_poi_fused_mul_silu_5": "activation",
    "triton_poi_fused_add_cat_cos_mul_neg_sin_1": "rope",
    "triton_red_fused__log_softmax__to_copy_nll_loss_forward_9": "loss",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": "other",
    "Memcpy DtoD (Device -> Device)": "other",
}


@pytest.mark.parametrize("name", KERNELS, ids=lambda name: name[:40])
def test_kind_of_a_kernel_by_its_name(name):
    assert profile.kind_of(name) == KERNELS[name]


def event(category, name, start, duration, tid=1, **args):
    args = {k.replace("_", " "): v for k, v in args.items()}
    return dict(ph="X", cat=category, name=name, pid=1, tid=tid, ts=start, dur=duration, args=args)


def test_breakdown_follows_kernels_to_their_launch_and_the_backward_to_its_forward():
    forward, backward, device = 1, 2, 7
    events = [
        event("user_annotation", "bench/norm", 0, 100, forward),
        event("cpu_op", "aten::mul", 10, 20, forward, External_id=1, Sequence_number=5, Fwd_thread_id=0),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, forward, correlation=100),
        event("cpu_op", "liger::glu_fwd", 120, 20, forward, External_id=2),
        event("cuda_driver", "cuLaunchKernelEx", 122, 2, forward, correlation=101),
        event("cpu_op", "MulBackward0", 200, 30, backward, External_id=3, Sequence_number=5, Fwd_thread_id=1),
        event("cpu_op", "aten::mul", 205, 20, backward, External_id=4),
        event("cuda_runtime", "cudaLaunchKernel", 206, 2, backward, correlation=102),
        event("kernel", "elementwise", 1000, 100, device, correlation=100),
        event("kernel", "_fwd", 1200, 50, device, correlation=101),
        event("kernel", "elementwise", 1300, 200, device, correlation=102),
        event("kernel", "ncclDevKernel_AllReduce", 1400, 300, device + 1, correlation=999),
        # the launch is not in the trace, the operator is
        event("kernel", "elementwise", 2000, 40, device, correlation=998, External_id=2),
    ]
    found = profile.breakdown(events, steps=2, step_ms=0.5)
    expected = {"norm": 150.0, "activation": 45.0, "communication": 150.0, "idle": 500 - (100 + 50 + 400 + 40) / 2}
    assert {kind: round(1e3 * ms, 6) for kind, ms in found.items() if ms} == expected


def test_a_recomputed_forward_is_the_one_that_its_backward_belongs_to():
    operator = dict(External_id=1, Sequence_number=5, Fwd_thread_id=0)
    events = [
        event("user_annotation", "bench/norm", 0, 10),
        event("cpu_op", "aten::mul", 1, 5, **operator),
        event("user_annotation", "bench/rope", 20, 10),
        event("cpu_op", "aten::mul", 21, 5, **operator),
        event("cpu_op", "MulBackward0", 40, 7, External_id=2, Sequence_number=5, Fwd_thread_id=1),
    ]
    found = profile.breakdown(events, steps=1, step_ms=0.02)
    assert {kind: round(1e3 * ms, 6) for kind, ms in found.items() if ms} == {"norm": 5, "rope": 12, "idle": 3}


# -- FLOPs ---------------------------------------------------------------------------------


EXPERTS = dict(model_type="qwen3_moe", head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen3", "head_dim": 32, "num_hidden_layers": 3},
        {"model_type": "gemma", "head_dim": 16},
        EXPERTS,
    ],
)
def test_flops_are_what_pytorch_counts(changes):
    B, T = 2, 24
    values = TINY | changes
    config = config_of(values)
    config._experts_implementation = "eager"  # products that the counter knows
    # eager computes the masked half, too
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 500, (B, T))
    # angles by a product with one column: not the model's work
    rotary = 2 * B * T * model.model.rotary_emb.inv_freq.numel()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 0 <= counter.get_total_flops() - step_flops(values, B, T, causal=False) <= rotary


def test_models_are_of_the_size_in_their_names():
    def billions(name):
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config_of(MODELS[name])).num_parameters() / 1e9

    sizes = {"llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3-8b": 8.03, "qwen3-0.6b": 0.60, "qwen3-8b": 8.19}
    sizes |= {"qwen3-14b": 14.77, "gemma-2b": 2.51, "gemma-3-1b": 1.00, "qwen3-30b-a3b": 30.53}
    sizes |= {"qwen3.5-9b": 8.95, "qwen3-next-80b": 79.67, "lfm2-1.2b": 1.17, "kimi-linear": 49.12, "granite-4-h": 6.94}
    assert {name: round(billions(name), 2) for name in sizes} == sizes


# -- judgement -----------------------------------------------------------------------------


def row(variant, **fields):
    measured = dict(failed=None, tokens_per_s=100.0, step_ms=10.0, spread=0.01, mfu=0.5, peak_allocated_gb=8.0)
    return {"model": "tiny", "variant": variant, **measured, "losses": [4.0, 3.0, 2.0, 1.0], **fields}


def measured(**fields):
    return {name: value for name, value in row("", **fields).items() if name not in ("model", "variant")}


def judged(*rows):
    return [step.judge(r, rows[0], 1e-2) for r in rows]


def test_other_losses_give_no_ratio():
    same, other = [4.0, 3.0, 2.0, 1.005], [4.0, 3.0, 2.0, 1.02]
    for losses, accurate in ((same, True), (other, False)):
        stock, ours = judged(row("stock"), row("ours", tokens_per_s=150.0, peak_allocated_gb=4.0, losses=losses))
        assert ours["accurate"] is accurate and ours["loss_parity"] == pytest.approx(losses[-1] - 1)
        text = step.table([stock, ours], 1e-2)
        assert ("1.50x" in text, "0.50x" in text, "inaccurate" in text) == (accurate, accurate, not accurate)


def test_a_loss_that_is_not_finite_is_a_failure():
    stock, ours = judged(row("stock"), row("ours", losses=[4.0, math.nan, math.nan, math.nan]))
    assert ours["failed"] == "the loss is not finite" and "failed" in step.table([stock, ours], 1e-2)
    json.dumps(ours, allow_nan=False)


@pytest.mark.parametrize("stock", [row("stock", failed="out of memory"), None])
def test_without_stock_there_is_no_ratio(stock):
    stock = stock and step.judge(stock, stock, 1e-2)
    ours = step.judge(row("ours"), stock, 1e-2)
    assert ours["accurate"] is None and not re.search(r"\dx", step.table([r for r in (stock, ours) if r], 1e-2))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 15, 16, 1000])
@pytest.mark.parametrize("start", [1, 4])
def test_largest_size(most, start):
    """To within 1/16, and after few trials: each is a process that builds the model."""
    tried = []
    found = step.largest_that(lambda n: tried.append(n) or n <= most, start)
    assert most * 15 / 16 <= found <= most and len(tried) == len(set(tried)) <= 15


def test_quantising_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs bitsandbytes: pip install"):
        step.parse(["--lora", "8", "--quantize", "int8"])


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(step, "environment", lambda: {"hardware": "CPU", "gemm_tflops": 0.1, "gpus": 0})


def test_every_switch_of_the_patch_is_a_variant():
    """A new one needs no line here."""
    named = {flag for flags in step.SWITCHED.values() for flag in flags}
    off = {n for n, f in SWITCHES.items() if f.metadata["ours"] and f.default is False and not f.metadata["choices"]}
    assert named == off | {"rematerialise", "swiglu", "head_memory"}
    assert step.VARIANTS["ours:tiled"].flags == {"tiled_mlp": True}
    assert step.SWITCHED["ours:long"].keys() == {"activation_offloading", "keep_attention", "tiled_mlp"}


def test_compile_adds_the_compiled_variants():
    assert step.parse(["--against", "stock,ours", "--compile"]).against == ["stock", "ours", "compile", "ours+compile"]
    assert step.parse(["--against", "stock,compile", "--compile"]).against == ["stock", "compile"]


# -- the command ---------------------------------------------------------------------------


def test_a_cpu_is_not_filled_up(machine):
    with pytest.raises(UserError, match="need a GPU"):
        step.main(["--smoke", "--largest-batch"])


def test_the_exit_code_says_that_ours_learns_something_else(machine, monkeypatch, capsys):
    losses = {None: [4.0, 3.0, 2.0, 1.0], str(step.PACKAGE): [4.0, 3.0, 2.0, 1.001]}
    rows = lambda spec: [measured(batch=2, losses=losses[spec["package"]])]
    monkeypatch.setattr(step, "run_child", lambda spec, folder: {"rows": rows(spec), "failed": None})
    argv = ["--model", "tiny", "--batch", "2", "--seq", "8"]
    assert step.main(argv) == 1 and "inaccurate" in capsys.readouterr().out
    losses[str(step.PACKAGE)] = losses[None]
    assert step.main(argv) == 0


@pytest.mark.parametrize("parallel", ["ulysses-fsdp2", "fsdp2"])
def test_the_search_for_the_largest_sizes(parallel, machine, monkeypatch, capsys, tmp_path):
    """A process for each trial; why the next one fails is told unless it is memory. Of ranks that
    share rows, each computes a part of the FLOPs."""
    gpus = {"hardware": "GPU", "gemm_tflops": 700.0, "gpus": 2}
    monkeypatch.setattr(step, "environment", lambda: dict(gpus))
    tried = []

    def run_child(spec, folder):
        if not spec["trial"]:
            return {"rows": [measured(batch=4)], "failed": None}
        tried.append((spec["batch"][0], spec["seq"]))
        why = "RuntimeError: 2^31" if tried[-1][0] > 9 else "out of memory" if tried[-1][1] > 3000 else None
        return {"rows": [], "failed": why}

    monkeypatch.setattr(step, "run_child", run_child)
    argv = ["--model", "tiny", "--batch", "4", "--seq", "1024", "--against", "stock", "--gpus", "2"]
    argv += ["--parallel", parallel, "--largest-batch", "--largest-seq", "--json", str(tmp_path / "r.json")]
    assert step.main(argv) == 0
    (found,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [batch for batch, _ in tried[:6]] == [4, 8, 16, 12, 10, 9] and found["largest_batch"] == 9
    assert [seq for _, seq in tried[6:]] == [1024, 2048, 4096, 3072, 2560, 2816] and found["largest_seq"] == 2816
    assert "stock: larger batches fail with RuntimeError: 2^31" in capsys.readouterr().out
    alone = step_flops(MODELS["tiny"], 4, 1024) / 10.0 / 1e9 / 700.0
    assert found["mfu"] == pytest.approx(alone / (2 if parallel.startswith("ulysses") else 1))


def test_batches_are_measured_until_one_fails(machine, monkeypatch, capsys, tmp_path):
    fits = {None: 2, str(step.PACKAGE): 4}

    def run_child(spec, folder):
        rows = [measured(batch=batch) for batch in spec["batch"] if batch <= fits[spec["package"]]]
        return {"rows": rows, "failed": None if len(rows) == len(spec["batch"]) else "out of memory"}

    monkeypatch.setattr(step, "run_child", run_child)
    argv = ["--model", "tiny", "--batch", "4,1,2,8", "--seq", "8", "--json", str(tmp_path / "r.json")]
    assert step.main(argv) == 1
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(r["variant"], r["batch"], r["failed"]) for r in rows] == [
        *[("stock", 1, None), ("stock", 2, None), ("stock", 4, "out of memory")],
        *[("ours", 1, None), ("ours", 2, None), ("ours", 4, None), ("ours", 8, "out of memory")],
    ]
    assert [r["accurate"] for r in rows] == [True, True, None, True, True, None, None]
    out = capsys.readouterr().out
    assert out.count("tiny: ") == 4 and out.index("tiny: 1 x 8") < out.index("tiny: 8 x 8")


def forked(command, env, stdout, **_):
    """``subprocess.run`` of a child that measures: importing takes longer than the rest."""
    return types.SimpleNamespace(returncode=processes.forked(command[1:], env, stdout.name)[0])


def test_smoke_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whatever this machine has, children measure it on a CPU
    children = lambda command, **how: (forked if str(step.CHILD) in command else subprocess.run)(command, **how)
    monkeypatch.setattr(step, "subprocess", types.SimpleNamespace(run=children))
    # stands for the published package: its name is that of ours
    published = tmp_path / "published" / "liger_kernel" / "transformers"
    published.mkdir(parents=True)
    (published.parent / "__init__.py").touch()
    (published / "__init__.py").write_text(
        "def _apply_liger_kernel_to_instance(model):\n    model.model.norm.weight.data *= 2\n"
    )
    argv = ["--smoke", "--against", "ours,stock,upstream", "--upstream-path", str(tmp_path / "published")]
    argv += ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    assert step.main(argv) == 0
    out = capsys.readouterr().out
    assert "Measured on a CPU" in out and "inaccurate" in out
    assert not re.search(r"GPU|[Kk]ernel|MFU|FLOP|reserved", out)

    result = json.loads((tmp_path / "r.json").read_text())
    assert result["meta"]["torch"] == torch.__version__ and result["meta"]["dtype"] == "float32"
    stock, ours, upstream = result["rows"]
    assert [r["variant"] for r in result["rows"]] == ["stock", "ours", "upstream"]
    assert ours["accurate"] and ours["loss_parity"] < 1e-6
    assert ours["losses"] == pytest.approx([math.log(500)] * 4, rel=0.05)
    assert not upstream["accurate"] and not upstream["failed"]
    for r in (stock, ours):
        assert r["tokens_per_s"] == pytest.approx(2 * 64 / r["step_ms"] * 1e3)
        assert r["mfu"] is None  # that is of a GPU
        kinds = ("gemm", "attention", "norm", "activation", "rope", "loss", "optimizer")
        assert all(r["breakdown_ms"][kind] > 0 for kind in kinds)
        assert r["breakdown_ms"]["communication"] == 0
    with open(tmp_path / "r.csv") as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines] == ["stock", "ours", "upstream"]
    assert float(lines[1]["gemm_ms"]) > 0 and float(lines[1]["loss_0"]) == pytest.approx(ours["losses"][0], rel=1e-4)


@pytest.fixture(autouse=True)
def children_run_references(monkeypatch):
    """As in this process: the interpreter is slow, and kernels are tested elsewhere."""
    monkeypatch.setattr(_op, "_KERNEL_DEVICES", _op._KERNEL_DEVICES - {"cpu"})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def spec(tmp_path, **changes):
    a = step.parse(["--model", "tiny", "--batch", "2", "--seq", "32", "--steps", "3", "--warmup", "1"])
    generator = torch.Generator().manual_seed(3)
    torch.save(torch.randint(0, 500, (4096,), generator=generator, dtype=torch.int32), tmp_path / "tiny.pt")
    return step.spec_of(a, "tiny", "ours", tmp_path, False) | changes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_learn_what_one_does(how, tmp_path):
    one = step.run_child(spec(tmp_path), tmp_path)
    two = step.run_child(spec(tmp_path, batch=[1], gpus=2, parallel=how), tmp_path)
    assert not two["failed"]
    (one,), (two,) = one["rows"], two["rows"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert two["tokens_per_s"] == pytest.approx(2 * 32 / two["step_ms"] * 1e3)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("transformers.distributed.expert_parallel"),
    reason="needs the expert parallelism of Transformers 5.23",
)
@pytest.mark.parametrize("package", [None, str(step.PACKAGE)])
def test_experts_over_two_processes(package, tmp_path):
    """They learn what one process does, checkpointed, too. The exchange reorders sums."""
    same = dict(config=TINY | EXPERTS, package=package)
    one = step.run_child(spec(tmp_path, **same), tmp_path)
    changes = dict(batch=[1], gpus=2, parallel="ep", checkpointing=True)
    two = step.run_child(spec(tmp_path, **same, **changes), tmp_path)
    assert not two["failed"]
    assert two["rows"][0]["losses"] == pytest.approx(one["rows"][0]["losses"], rel=1e-5)


def test_a_child_that_finds_another_package_fails_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "subprocess", types.SimpleNamespace(run=forked))
    found = step.run_child(spec(tmp_path, package=str(tmp_path)), tmp_path)
    assert found["failed"].startswith("ImportError: liger_kernel was found in") and str(tmp_path) in found["failed"]


def test_batches(tmp_path):
    """Labels are masked at random, rows padded; ranks have other batches, the same each time."""
    of = lambda rank, rows=8, **more: list(
        step_child.batches(spec(tmp_path, masked=0.5, gpus=2) | more, rows, rank, torch.device("cpu"))
    )
    masked, other, again = of(0), of(1), of(0)
    assert 0.4 < torch.cat([batch["labels"] == -100 for batch in masked]).float().mean() < 0.6
    assert all(torch.equal(a[name], b[name]) for a, b in zip(masked, again) for name in a)
    assert not torch.equal(masked[0]["input_ids"], other[0]["input_ids"])
    for batch in masked:
        kept = batch["labels"] != -100
        assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    for batch in of(0, rows=64, lengths=12, masked=0.0):
        lengths = batch["attention_mask"].sum(1)
        assert 8 <= lengths.min() < 12 < lengths.max() <= 32 and 9 <= lengths.median() <= 15
        assert torch.equal(batch["attention_mask"] == 0, batch["labels"] == -100)
        assert all(mask[: int(length)].all() for mask, length in zip(batch["attention_mask"], lengths))


def test_options_train_the_same_model(tmp_path):
    """Checkpointing does not change the losses, AdamW does; a trial measures nothing."""
    rows = lambda **changes: step_child.measure(spec(tmp_path, package=None, **changes))["rows"]
    (plain,) = rows()
    (checkpointed,) = rows(checkpointing=True)
    assert checkpointed["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert rows(optimizer="adamw")[0]["losses"][1:] != plain["losses"][1:]
    (after,), (within,) = rows(optimizer="adamw"), rows(optimizer="adamw", optimizer_in_backward=True)
    assert within["losses"] == after["losses"] and within["gradient"] == pytest.approx(after["gradient"], rel=1e-6)
    assert [row["batch"] for row in rows(batch=[2, 3])] == [2, 3]
    trial = step_child.measure(spec(tmp_path, package=None, trial=True))
    assert trial["rows"] == [] and trial["peak"] > 0


@pytest.mark.slow
def test_weights_on_the_cpu_learn_what_others_do(tmp_path):
    expected = step_child.measure(spec(tmp_path, optimizer="adamw"))
    found = step.run_child(spec(tmp_path, optimizer="adamw", parallel="fsdp2", optimizer_on_cpu=True), tmp_path)
    assert not found["failed"] and found["rows"][0]["losses"] == expected["rows"][0]["losses"]


def test_adapters_alone_are_trained(tmp_path):
    pytest.importorskip("peft")
    for package in (None, str(step.PACKAGE)):
        training = step_child.Training(spec(tmp_path, package=package, lora=4, optimizer="adamw", checkpointing=True))
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        training.measure(2)
        changed = {name for name, p in training.model.named_parameters() if not torch.equal(p, before[name])}
        assert changed and all("lora" in name for name in changed)


@pytest.mark.parametrize(
    ("how", "config", "kind", "count"),
    [
        ("fp8", {}, LigerFloat8Linear, 14),
        ("fp8_rowwise", {}, LigerFloat8Linear, 14),
        ("fp8", EXPERTS, LigerFloat8Experts, 4),
    ],
)
def test_a_base_in_fp8_learns(how, config, kind, count, tmp_path, monkeypatch):
    """PEFT finds experts by their whole names."""
    pytest.importorskip("peft", minversion="0.17")
    monkeypatch.setattr("liger_kernel.transformers.quantize.SMALL", 0)
    changes = dict(config=TINY | config, lora=4, lora_targets=["q_proj", "up_proj", "down_proj"])
    stock, ours = (
        step_child.Training(spec(tmp_path, package=package, **changes, quantize=quantize))
        for package, quantize in ((None, None), (str(step.PACKAGE), how))
    )
    assert sum(isinstance(module, kind) for module in ours.model.modules()) == count
    assert ours.measure(2)["losses"] == pytest.approx(stock.measure(2)["losses"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("how", step.COMPILED.values())
def test_compiled_models_learn_the_same(how, tmp_path):
    plain, compiled = (step.run_child(spec(tmp_path, compile=c), tmp_path)["rows"][0] for c in (None, how))
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_positions_for_the_longest_row(name):
    a = argparse.Namespace(layers=None, seq=200_000, largest_seq=False, lora=0)
    assert step.values_of(a, name)["max_position_embeddings"] >= a.seq
