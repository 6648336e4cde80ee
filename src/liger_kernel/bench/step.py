"""``liger bench step``: whole training steps of Hugging Face models with random weights, each
variant in its own processes (step_child.py).

Every variant starts from the same weights and sees the same batches. A variant that fails, or has
other losses than stock, has no ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from liger_kernel.bench import profile
from liger_kernel.bench.flags import outputs
from liger_kernel.bench.rows import beyond, headline, noise, parts_of, peak_of, usable, write_step_csv
from liger_kernel.model_sizes import MODELS, config_of, step_flops
from liger_kernel.train.adamw import KINDS, check, require
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import Parser, UserError, at_least, holds, one_of

BASES = ("stock", "upstream", "ours")
SWITCHED: dict[str, dict[str, Any]] = {  # ours with other flags than the default
    "ours:off": {"rematerialise": "off"},
    "ours:mlp": {"rematerialise": "mlp"},
    "ours:experts": {"swiglu": True},
    "ours:offload": {"activation_offloading": True},
    "ours:attention": {"keep_attention": True},
    "ours:tiled": {"tiled_mlp": True},
    "ours:offload-attention": {"activation_offloading": True, "keep_attention": True},
    "ours:offload-tiled": {"activation_offloading": True, "tiled_mlp": True},
    "ours:head": {"fp8_head": True},
    "ours:long": {"activation_offloading": True, "keep_attention": True, "tiled_mlp": True},
}
FP8 = ("fp8", "fp8_rowwise")  # ours with another storage of the frozen base: recipes of quantize_base
OPTIMIZERS = ("sgd", *KINDS)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_rceil")  # of --fp8, as torchao names them
GATHERED = (
    "ours:gathered",
    "torchao:gathered",
)  # layers of torchao whose weights FSDP2 gathers in FP8, on our kernels or compiled
UNSLOTH = (
    "unsloth",
    "unsloth:offload",
)  # Unsloth's own functions; with --checkpointing the second one keeps the layers' inputs in the CPU's memory
COMPILED = {
    "compile": "model",
    "layers": "layers",
}  # what torch.compile compiles: the whole model, or each decoder layer separately
VARIANTS = (
    *BASES,
    *SWITCHED,
    *(f"ours:{how}" for how in (*FP8, "bf16")),
    "torchao",
    *GATHERED,
    *UNSLOTH,
    *COMPILED,
    *(f"{base}+{how}" for base in BASES[1:] for how in COMPILED),
)
PARITY = {
    "bfloat16": 1e-2,
    "float32": 1e-4,
}  # largest relative difference between a loss and stock's over the first steps
PARITY_STEPS = 4
TRACE_STEPS = 2
GET = {"upstream": "liger-kernel==0.8.5", "unsloth": "unsloth"}  # what pip installs
GET_UPSTREAM = f"upstream is skipped: pip install --no-deps --target DIR {GET['upstream']}, then --upstream-path DIR"
GET_UNSLOTH = f"unsloth is skipped: pip install --target DIR {GET['unsloth']}, then --unsloth-path DIR"
APART = ("unsloth:offload",)  # variants that keep buffers for the longest row they have tried, also if it did not fit
LONGEST = 1 << 20  # most tokens of a row that --largest-seq tries
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHILD = Path(__file__).with_name("step_child.py")
PACKAGE = Path(__file__).parents[2]  # the folder that holds our liger_kernel
SHARED_ROWS = ("ulysses", "ulysses-fsdp2")  # values of --parallel with which all processes compute the same rows

Row = dict[str, Any]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="liger bench step", description="Measure whole training steps of models in random weights.")
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help=f"comma-separated (default: llama-3.2-1b): {', '.join(MODELS)}")
    add(
        "--batch",
        default="4",
        help="rows per step and GPU (default: 4); several, comma-separated, are measured one after the other until "
        "one does not fit",
    )
    add("--seq", type=int, default=2048, help="tokens per row (default: 2048)")
    add(
        "--against",
        default="stock,ours",
        help=f"variants, comma-separated (default: stock,ours): {', '.join(VARIANTS)}",
    )
    add("--layers", type=int, metavar="N", help="the number of layers to keep of the model (default: all)")
    add("--compile", action="store_true", help="each variant also under torch.compile")
    add(
        "--attention",
        metavar="NAME",
        help="an implementation of Transformers, such as flex_attention (default: sdpa, or eager for models without "
        "it)",
    )
    add(
        "--upstream-path",
        metavar="DIR",
        help="where the published package is: pip install --no-deps --target DIR liger-kernel==0.8.5",
    )
    add(
        "--unsloth-path",
        metavar="DIR",
        help="where Unsloth is, unless it is installed: pip install --target DIR unsloth",
    )
    add(
        "--data",
        choices=("random", "real"),
        default="random",
        help="random tokens (default), or the sources of Python's library through a BPE trained on them",
    )
    add(
        "--lengths",
        type=int,
        default=0,
        metavar="M",
        help="the median length of rows, which are padded: 95 is like Alpaca (default: all rows are full)",
    )
    add("--masked", type=float, default=0.0, metavar="F", help="the part of the labels that is ignored (default: 0)")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="(default: sgd); those with 8bit or bf16 in their names are torchao's, as in liger train",
    )
    add(
        "--optimizer-in-backward",
        action="store_true",
        help="step each parameter when the backward has its gradient, and free the gradient",
    )
    add(
        "--optimizer-on-cpu",
        action="store_true",
        help="keep weights and moments in the CPU's memory, and step there (adamw with --parallel fsdp2)",
    )
    add("--checkpointing", action="store_true", help="recompute the layers in the backward")
    add(
        "--tiled-mlp",
        type=int,
        metavar="N",
        help="the tiles of the MLPs of variants with tiled_mlp (default: tiled_mlp=True, at most 16)",
    )
    add(
        "--autocast",
        "--amp",
        action="store_true",
        help="run forwards under torch.autocast in bfloat16, as Hugging Face's Trainer does with bf16=True",
    )
    add(
        "--lora",
        type=int,
        default=0,
        metavar="R",
        help="train adapters of that rank on all linear layers but the head, and on experts (needs peft)",
    )
    add(
        "--lora-targets",
        metavar="NAMES",
        help="put adapters only on these layers, comma-separated; those of an MLP also mean experts: "
        f"{', '.join(LINEARS)}",
    )
    add("--lora-dropout", type=float, default=0.0, metavar="P", help="dropout of the adapters' input (default: 0)")
    add("--dora", action="store_true", help="train DoRA adapters, with a magnitude for each output")
    add(
        "--quantize",
        choices=("nf4", "int8", *FP8),
        help="the frozen weights: nf4 (double quantisation) and int8 by bitsandbytes, fp8 (one scale a weight) and "
        "fp8_rowwise by ours alone",
    )
    add(
        "--fp8",
        choices=RECIPES,
        help="train linear layers but the head in FP8: ours by our kernels, torchao by torchao's layers in a model "
        "patched by ours whose layers torch.compile"
        " compiles; ours:bf16 is ours without it, ours:head also with the head in FP8",
    )
    add("--gpus", type=int, default=1, metavar="N", help="processes, each with a GPU where there are any (default: 1)")
    add(
        "--parallel",
        choices=("ddp", "fsdp2", "ep", *SHARED_ROWS),
        help="how the processes share the model (default: ddp if there are several); ep: each has a part of the "
        "experts, and all else is as with fsdp2, by"
        " Transformers 5.23; with ulysses they share the rows of a step, stock models by our code",
    )
    add("--steps", type=int, default=10, help="measured steps (default: 10)")
    add("--warmup", type=int, default=4, help="steps before them (default: 4)")
    add("--largest-batch", action="store_true", help="search for the largest batch that fits (GPU only)")
    add("--largest-seq", action="store_true", help="search for the longest rows of which the batch fits (GPU only)")
    add("--profile", action="store_true", help="measure the time of each kind of work")
    add(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="what MFU is relative to (default: the rate of a large matrix product, measured now)",
    )
    add("--json", metavar="FILE", help="write rows as they come")
    add("--csv", metavar="FILE", help="write rows as a table")
    add("--plot", metavar="DIR", help="write PNG charts and report.html")
    add("--smoke", action="store_true", help="train a tiny model for a few steps, to see that everything works")
    a = parser.parse_args(argv)
    if a.smoke:
        a.model, a.batch, a.seq, a.steps, a.warmup, a.profile = "tiny", "2", 64, 3, 2, True
    try:
        a.batch = sorted(map(int, a.batch.split(",")))
    except ValueError as error:
        raise UserError(f"--batch must be numbers, comma-separated, got {a.batch!r}") from error
    a.model = [one_of("model", name, MODELS) for name in a.model.split(",")]
    a.against = [one_of("variant", name, VARIANTS) for name in a.against.split(",")]
    if a.compile:
        a.against += ["compile" if name == "stock" else f"{name}+compile" for name in a.against if name in BASES]
    a.against = list(dict.fromkeys(a.against))
    a.parallel = a.parallel or ("ddp" if a.gpus > 1 else None)
    at_least(1, batch=a.batch[0], seq=a.seq, gpus=a.gpus, steps=a.steps, layers=a.layers, tiled_mlp=a.tiled_mlp)
    at_least(0, lengths=a.lengths, warmup=a.warmup, lora=a.lora)
    if a.peak_tflops is not None and not a.peak_tflops > 0:
        raise UserError(f"--peak-tflops must be positive, got {a.peak_tflops:g}")
    if len(a.batch) > 1 and (a.profile or a.largest_batch or a.largest_seq):
        raise UserError("--profile, --largest-batch and --largest-seq need a single --batch")
    if a.warmup + a.steps < PARITY_STEPS:
        raise UserError(
            f"--warmup and --steps must add up to {PARITY_STEPS}, whose losses are compared; got {a.warmup} and "
            f"{a.steps}"
        )
    if not 0 <= a.masked < 1:
        raise UserError(f"--masked must be in [0, 1), got {a.masked}")
    _check_adapters(a)
    _check_fp8(a)
    _check_experts(a)
    try:
        check(
            a.optimizer,
            "fsdp2" if a.parallel == "ep" else a.parallel or "none",
            a.optimizer_in_backward,
            a.optimizer_on_cpu,
        )
        require(a.optimizer)
    except (ValueError, ImportError) as error:
        raise UserError(str(error)) from error
    for name, package in (("upstream", "liger_kernel"), ("unsloth", "unsloth")):
        holds(package, getattr(a, f"{name}_path"), f"--{name}-path", GET[name])
    outputs(a.json, a.csv, a.plot)
    return a


def _check_fp8(a: argparse.Namespace) -> None:
    needed = {"torchao": RECIPES, "ours:bf16": RECIPES, "ours:head": RECIPES[:2]} | dict.fromkeys(GATHERED, RECIPES[:1])
    for name, recipes in needed.items():
        if name in a.against and a.fp8 not in recipes:
            raise UserError(f"{name} needs --fp8 {'|'.join(recipes)}")
    if a.fp8 and a.lora:
        raise UserError("--fp8 trains the weights themselves: leave out --lora")
    if (gathered := [name for name in GATHERED if name in a.against]) and a.parallel != "fsdp2":
        raise UserError(f"{gathered[0]} needs --parallel fsdp2, which gathers the weights")
    if "torchao" in a.against and a.fp8 == "mxfp8_rceil":
        raise UserError(
            "torchao converts layers to mxfp8_rceil in another way, which is not measured here: leave it out of "
            "--against"
        )
    if {"torchao", *GATHERED} & set(a.against) and importlib.util.find_spec("torchao") is None:
        raise UserError("torchao is not installed: pip install torchao")


def _check_experts(a: argparse.Namespace) -> None:
    if a.parallel != "ep":
        return
    if dense := [name for name in a.model if not any(value.endswith("_experts") for value in MODELS[name])]:
        raise UserError(f"--parallel ep needs a mixture of experts, got {dense[0]}")
    if others := [name for name in a.against if not name.startswith(("stock", "ours", *COMPILED))]:
        raise UserError(f"{others[0]} has no --parallel ep: leave it out")
    if a.lora or a.fp8 or a.optimizer_on_cpu:
        raise UserError(
            "--parallel ep trains all weights in 16 bits on the GPU: leave out --lora, --fp8 and --optimizer-on-cpu"
        )
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        raise UserError(
            "--parallel ep needs the expert parallelism of Transformers 5.23: pip install 'transformers>=5.23'"
        )


def _check_adapters(a: argparse.Namespace) -> None:
    if not 0 <= a.lora_dropout < 1:
        raise UserError(f"--lora-dropout must be in [0, 1), got {a.lora_dropout}")
    for name in (a.lora_targets or "").split(",") if a.lora_targets is not None else ():
        one_of("linear layer", name, LINEARS)
    theirs = [name for name in a.against if name in UNSLOTH]
    wanting = {
        "--lora-targets": a.lora_targets,
        "--lora-dropout": a.lora_dropout,
        "--dora": a.dora,
        "--quantize": a.quantize,
    }
    own = [name for name in a.against if name.partition(":")[2] in FP8]
    wanting |= {"unsloth": theirs} | dict.fromkeys(own, True)
    for name, given in wanting.items():
        if given and not a.lora:
            raise UserError(f"{name} needs --lora R")
    if theirs and a.attention:
        raise UserError("unsloth has its own attention: leave out --attention")
    if theirs and a.parallel not in (None, "ddp"):
        raise UserError(f"unsloth has no --parallel {a.parallel}: only ddp, or one GPU")
    if a.parallel in SHARED_ROWS and (others := [name for name in a.against if name.startswith("upstream")]):
        raise UserError(f"{others[0]} has no --parallel {a.parallel}: leave it out")
    if a.quantize in FP8 and (others := [name for name in a.against if not name.startswith("ours")]):
        raise UserError(
            f"{others[0]} has no frozen FP8 base: only ours supports --quantize {a.quantize}; --against "
            f"{others[0]},ours:{a.quantize} compares the two"
        )
    if a.quantize and own:
        raise UserError(f"{own[0]} has its own base: leave out --quantize {a.quantize}")
    if a.quantize in ("nf4", "int8") and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--quantize {a.quantize} needs bitsandbytes: pip install bitsandbytes")
    if a.lora and importlib.util.find_spec("peft") is None:
        raise UserError("--lora needs peft: pip install peft")


def run_child(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run step_child.py and return its result: ``rows``, and ``failed``, the reason why it
    stopped early."""
    given, result, messages, why = (
        folder / "spec.json",
        folder / "result.json",
        folder / "stderr",
        folder / "result.json.failed",
    )
    given.write_text(json.dumps(spec))
    result.unlink(missing_ok=True)
    why.unlink(missing_ok=True)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec['gpus']}"] if spec["parallel"] else []
    )
    path = [spec[name] for name in ("package", "unsloth_path") if spec[name]]
    if spec["parallel"] in SHARED_ROWS and not spec["package"]:
        path.append(str(PACKAGE))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with messages.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, *launch, str(CHILD), str(given), str(result)],
            env=env,
            stdout=stderr,
            stderr=stderr,
            check=False,
        )
    said = messages.read_text(errors="replace").strip()
    found: dict[str, Any] = {"rows": [], "failed": None} | (json.loads(result.read_text()) if result.exists() else {})
    if why.exists():
        found["failed"] = json.loads(why.read_text())
    elif done.returncode or not result.exists():
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        found["failed"] = f"{how}: {(said.splitlines() or ['it said nothing'])[-1][:300]}"
    if found["failed"] and os.environ.get("LIGER_TRACEBACK") == "1":
        print(said, file=sys.stderr)
    return found


def environment() -> dict[str, Any]:
    """Hardware, versions and the measured peak rate, from a child process: this process must
    hold no GPU memory while others measure theirs."""
    code = (
        "import json, torch; from liger_kernel.bench import clock; print(json.dumps(clock.hardware() | "
        "clock.ceilings() | {'gpus': torch.cuda.device_count()}))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"cannot measure this machine: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_tokens(kind: str, vocab: int, path: Path) -> None:
    """Write a stream of token ids below ``vocab``, because children cannot import our tokeniser."""
    import torch

    if kind == "random":
        tokens = torch.randint(0, vocab, (1 << 22,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    else:
        from liger_kernel.train import data
        from liger_kernel.train.config import TrainConfig

        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "liger-kernel"
        tokens = data.load(TrainConfig(vocab=min(vocab, 32768), length=1024, cache=str(cache))).rows.ids
        tokens = tokens % vocab  # a byte-level BPE has at least 257 ids
    torch.save(tokens, path)


def judge(row: Row, stock: Row | None, tolerance: float) -> Row:
    """Compare a row with stock's: ``loss_parity``, ``gradient_parity``, and ``accurate``, which
    its losses decide. They are None if stock has no value."""
    row |= {"loss_parity": None, "gradient_parity": None, "accurate": None}
    if row["failed"]:
        return row
    if not all(map(math.isfinite, row["losses"])):
        return row | {"failed": "the loss is not finite", "losses": None}
    if stock is None or stock["failed"]:
        return row
    parity = max(abs(x - y) / abs(y) for x, y in zip(row["losses"], stock["losses"]))
    if row.get("gradient") and stock.get("gradient"):
        row["gradient_parity"] = abs(row["gradient"] / stock["gradient"] - 1)
    return row | {"loss_parity": parity, "accurate": parity <= tolerance}


def ratio(row: Row, stock: Row | None, field: str) -> float | None:
    """``row[field]`` divided by stock's; None if one of the two failed or their losses differ."""
    if (
        stock is None
        or row["failed"]
        or stock["failed"]
        or not row["accurate"]
        or not stock.get(field)
        or row.get(field) is None
    ):
        return None
    return row[field] / stock[field]


OPTIONS = (
    *(
        "seq",
        "gpus",
        "parallel",
        "checkpointing",
        "layers",
        "autocast",
        "lora",
        "lora_targets",
        "lora_dropout",
        "dora",
        "quantize",
        "fp8",
        "tiled_mlp",
    ),
    "attention",
    *("optimizer_in_backward", "optimizer_on_cpu"),
)


def values_of(a: argparse.Namespace, model: str) -> dict[str, Any]:
    """The configuration to measure. With it, Unsloth builds the same model as the others.

    Otherwise, Unsloth would stretch the rotary embedding of rows that are longer than the last
    position. It also sets its padding token's embedding to 0.
    """
    values = (
        MODELS[model] | ({"num_hidden_layers": a.layers} if a.layers else {}) | ({"pad_token_id": 0} if a.lora else {})
    )
    return values | {
        "max_position_embeddings": max(values["max_position_embeddings"], LONGEST if a.largest_seq else a.seq)
    }


def measure(a: argparse.Namespace, model: str, variant: str, folder: Path, peak: float, gpu: bool) -> list[Row]:
    """A row for each batch, until one fails. One child measures and searches for the largest
    sizes; of several ranks, or ``APART``, each trial has its own."""
    apart = a.gpus > 1 or variant in APART
    base, _, rest = variant.partition("+")
    base, rest = ("stock", base) if base in COMPILED else (base, rest)
    base, _, level = base.partition(":")
    options = {name: getattr(a, name) for name in OPTIONS}
    common: Row = {"model": model, "variant": variant, **options}
    values, fp8, flags = values_of(a, model), level in FP8, SWITCHED.get(f"{base}:{level}", {})
    spec = {
        **options,
        "config": values,
        "dtype": "bfloat16" if gpu else "float32",
        "package": {
            "stock": None,
            "upstream": a.upstream_path,
            "ours": str(PACKAGE),
            "torchao": str(PACKAGE),
            "unsloth": None,
        }[base],
        "quantize": level if fp8 else a.quantize,
        "fp8": a.fp8 if base in ("ours", "torchao") and level != "bf16" else None,
        "torchao": base == "torchao" or variant in GATHERED,
        "gathered": variant in GATHERED,
        "flags": flags | ({"tiled_mlp": a.tiled_mlp} if "tiled_mlp" in flags and a.tiled_mlp else {}),
        "lora_targets": a.lora_targets.split(",") if a.lora_targets else list(LINEARS),
        "unsloth": str(folder / f"{model}-weights") if base == "unsloth" else None,
        "unsloth_path": a.unsloth_path if base == "unsloth" else None,
        "offload": base == "unsloth" and level == "offload",
        "save": None,
        "compile": "layers" if base == "torchao" else COMPILED.get(rest),
        "tokens": str(folder / f"{model}.pt"),
        "batches": a.batch,
        "median": a.lengths,
        "largest": [what for what in ("batch", "seq") if getattr(a, f"largest_{what}")] if not apart else [],
        "trial": False,
        "trace": str(folder / "trace.json") if a.profile else None,
        "trace_steps": TRACE_STEPS,
        **{name: getattr(a, name) for name in ("masked", "optimizer", "steps", "warmup")},
    }
    if spec["unsloth"] and not Path(spec["unsloth"]).exists():
        save_weights(spec, folder)
    found = run_child(spec, folder)
    rows = [common | row | {"failed": None} for row in found["rows"]]
    ranks = a.gpus if a.parallel in SHARED_ROWS else 1  # of which each computes a part of these FLOPs
    for row in rows:
        row["mfu"] = (
            None if a.lora or not gpu else step_flops(values, row["batch"], a.seq) / row["step_ms"] / 1e9 / peak / ranks
        )
    if rows and a.profile:
        with open(spec["trace"]) as file:
            rows[0]["breakdown_ms"] = profile.breakdown(json.load(file)["traceEvents"], TRACE_STEPS, rows[0]["step_ms"])
    if found["failed"] and len(rows) < len(a.batch):
        rows.append(common | {"batch": a.batch[len(rows)], "failed": found["failed"]})
    elif found["failed"] and (
        searched := [what for what in spec["largest"] if f"largest_{what}" in rows[0]]
    ):  # it failed in the last of these searches
        rows[0][f"largest_{searched[-1]}_limit"] = found["failed"]
    if a.largest_batch and (apart or (rows[0]["failed"] == "out of memory")):
        rows[0] |= _largest("batch", spec | {"trace": None}, folder)
    if a.largest_seq and apart:
        rows[0] |= _largest("seq", spec | {"trace": None}, folder)
    return rows


def save_weights(spec: dict[str, Any], folder: Path) -> None:
    """Let a child save the weights that Unsloth loads, where ``spec["unsloth"]`` says."""
    run_child(
        spec | {"unsloth": None, "unsloth_path": None, "save": spec["unsloth"], "parallel": None, "gpus": 1}, folder
    )


def _largest(what: str, spec: dict[str, Any], folder: Path) -> Row:
    """The largest batch, or the longest rows, of which each trial has a process of its own on
    every GPU."""
    from liger_kernel.bench.step_child import UNITS, largest_that

    limit, unit = {}, UNITS[what]

    def peak(n: int) -> float | None:
        size = {"batches": [n]} if what == "batch" else {"seq": n * unit}
        trial = run_child(spec | size | {"trial": True}, folder)
        if trial["failed"]:
            limit[f"largest_{what}_limit"] = trial[
                "failed"
            ]  # the limit is not always memory: some kernels fail at 2^31 elements
        return None if trial["failed"] else trial["peak"]

    start = spec["batches"][0] if what == "batch" else max(1, spec["seq"] // unit)
    return {f"largest_{what}": largest_that(peak, start) * unit} | limit


RIVALS = ("stock", "upstream", "unsloth")  # the variants with which headlines compare ours


def headlines(rows: list[Row], cpu: bool = False) -> list[str]:
    """A sentence for each rival that was measured: what is faster or needs less memory, and what
    is noise."""
    ours = next((row for row in rows if row["variant"] == "ours" and usable(row)), None)
    rivals = [row for name in RIVALS for row in rows if row["variant"] == name and usable(row)]
    return [said for rival in rivals if ours and (said := headline(ours, rival, cpu))]


def table(rows: list[Row], tolerance: float, cpu: bool = False) -> str:
    """The rows of one model as a table for a terminal, relative to stock."""
    stock = next((row for row in rows if row["variant"] == "stock"), None)
    heads = [
        "variant",
        "tokens/s",
        "/ stock",
        "step ms",
        "spread",
        "MFU",
        "peak GB",
        "/ stock",
        "reserved GB",
        "loss diff",
        "grad diff",
    ]
    heads += ["largest batch", "longest rows"]
    lines = [heads]
    for row in rows:
        show = lambda field, form, row=row: "" if row.get(field) is None else format(row[field], form)
        times = lambda field, row=row: "" if (r := ratio(row, stock, field)) is None else f"{r:.2f}x"
        if row["failed"]:
            lines.append([row["variant"], f"failed: {row['failed']}", *[""] * 9, show("largest_batch", "d"), ""])
            continue
        faster = "losses differ" if row["accurate"] is False else times("tokens_per_s")
        if (
            faster
            and stock
            and row is not stock
            and (r := ratio(row, stock, "tokens_per_s"))
            and not beyond(r, noise(row, stock, cpu))
        ):
            faster = "in noise"
        speed = [
            show("tokens_per_s", ",.0f"),
            faster,
            show("step_ms", ".2f"),
            show("spread", ".1%"),
            show("mfu", ".1%"),
        ]
        memory = [show("peak_allocated_gb", ".2f"), times("peak_allocated_gb"), show("peak_reserved_gb", ".2f")]
        parity = [show("loss_parity", ".1e"), show("gradient_parity", ".1e")]
        lines.append([row["variant"], *speed, *memory, *parity, show("largest_batch", "d"), show("largest_seq", ",d")])
    empty = {
        i for i in range(1, len(heads)) if not any(line[i] for line in lines[1:])
    }  # without a GPU there is no MFU, and nothing is reserved
    lines = [[cell for i, cell in enumerate(line) if i not in empty] for line in lines]
    notes = headlines(rows, cpu)
    if stock is None or stock["failed"]:
        notes.append("There are no ratios: they are relative to stock, which was not measured.")
    if any(row["accurate"] is False for row in rows):
        notes.append(
            f"losses differ: they are more than {tolerance:g} of stock's away within the first {PARITY_STEPS} steps. "
            "Such a step has no ratio."
        )
    for row in rows:
        if not row["failed"]:
            ms, gb, phase = peak_of(row["memory_timeline"])
            notes.append(f"{row['variant']}: memory peaks at {gb:.2f} GB in '{phase}', {ms:.0f} ms into a step")
        for what, larger in (("batch", "larger batches"), ("seq", "longer rows")):
            if (why := row.get(f"largest_{what}_limit", "out of memory")) != "out of memory":
                notes.append(f"{row['variant']}: {larger} fail with {why}")
    return "\n".join([_aligned(lines), *notes])


def breakdown_table(rows: list[Row]) -> str:
    """A table of the milliseconds of a step by kind of work, without kinds that no row has."""
    rows = [row for row in rows if row.get("breakdown_ms")]
    kinds = [kind for kind in profile.KINDS if any(row["breakdown_ms"][kind] >= 0.005 for row in rows)]
    return (
        _aligned(
            [
                ["ms / step", *kinds],
                *[[row["variant"], *[f"{row['breakdown_ms'][kind]:.2f}" for kind in kinds]] for row in rows],
            ]
        )
        if rows
        else ""
    )


def _aligned(lines: list[list[str]]) -> str:
    """The lines as text: words left-aligned, numbers right-aligned; a failure may extend over
    the empty cells after it."""
    widths = [max(len(line[i]) for line in lines if not line[1].startswith("failed")) for i in range(len(lines[0]))]
    widths[0] = max(len(line[0]) for line in lines)
    text = []
    for line in lines:
        if line[1].startswith("failed"):
            more = f"  (largest batch {line[-2]})" if line[-2] else ""
            text.append(f"{line[0]:<{widths[0]}}  {line[1]}{more}")
        else:
            text.append(
                "  ".join(
                    [f"{line[0]:<{widths[0]}}", *[f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:])]]
                ).rstrip()
            )
    return "\n".join(text)


def run(a: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure all requested models and variants. Finished rows are printed and written at once."""
    meta = environment()
    gpu = meta["gpus"] > 0
    if gpu and a.gpus > meta["gpus"]:
        raise UserError(f"--gpus is {a.gpus}, but this machine has {meta['gpus']}")
    dtype = "bfloat16" if gpu else "float32"
    if not gpu:
        print(
            "Measured on a CPU, in fp32: PyTorch references run, so ratios on other devices differ. Memory is that "
            "of the whole process."
        )
        if a.largest_batch or a.largest_seq:
            raise UserError(
                "--largest-batch and --largest-seq need a GPU: on a CPU, a batch that is too large takes the machine "
                "down instead of failing"
            )
    if a.plot:
        _plots()
    if any(name.startswith("upstream") for name in a.against) and not a.upstream_path:
        print(GET_UPSTREAM)
        a.against = [name for name in a.against if not name.startswith("upstream")]
    if (
        any(name in UNSLOTH for name in a.against)
        and not a.unsloth_path
        and importlib.util.find_spec("unsloth") is None
    ):
        print(GET_UNSLOTH)
        a.against = [name for name in a.against if name not in UNSLOTH]
    peak = a.peak_tflops or meta["gemm_tflops"]
    options = {name: getattr(a, name) for name in ("data", "lengths", "masked", "optimizer", "steps", "warmup")}
    tolerance = PARITY["bfloat16" if a.autocast or a.quantize else dtype]
    meta |= {
        "peak_tflops": peak,
        "dtype": dtype,
        **options,
        "parity_tolerance": tolerance,
        "command": "liger bench step " + " ".join(argv),
    }
    result: dict[str, Any] = {"meta": meta, "rows": []}
    with tempfile.TemporaryDirectory(prefix="liger-bench-") as name:
        folder = Path(name)
        for model in a.model:
            write_tokens(a.data, config_of(values_of(a, model)).vocab_size, folder / f"{model}.pt")
            rows: list[Row] = []
            # Stock first, because the others are compared with it.
            for variant in sorted(a.against, key=lambda name: name != "stock"):
                for row in measure(a, model, variant, folder, peak, gpu):
                    stock = (
                        row
                        if variant == "stock"
                        else next((r for r in rows if r["variant"] == "stock" and r["batch"] == row["batch"]), None)
                    )
                    rows.append(judge(row, stock, tolerance))
                    result["rows"].append(rows[-1])
                    said = rows[-1]["failed"] or f"{rows[-1]['tokens_per_s']:,.0f} tokens/s"
                    print(f"{model} {variant}, {row['batch']} rows: {said}", file=sys.stderr, flush=True)
                if a.json:
                    export(a.json, json.dumps(result, indent=1))
            where = f", {a.gpus} x {a.parallel}" if a.parallel else ""
            extras = "".join(f", {part}" for part in parts_of(vars(a)))
            for batch in a.batch:
                some = [row for row in rows if row["batch"] == batch]
                if not some:
                    continue
                rate = f", MFU of {peak:,.1f} TFLOP/s" if gpu else ""
                print(
                    f"\n{model}: {batch} x {a.seq} {a.data} tokens{where}, {dtype}, {a.optimizer}{extras}; "
                    f"{meta['hardware']}{rate}\n"
                )
                print(table(some, tolerance, not gpu))
            if a.profile:
                print(f"\n{breakdown_table(rows)}")
            sys.stdout.flush()
    return result


def _plots() -> Any:
    """The module that draws. It is imported before the measurement, so that a missing package
    does not show only hours later."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from error
    from liger_kernel.bench import plots

    return plots


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if every requested run of ours finished with stock's losses."""
    a = parse(argv)
    result = run(a, argv)
    if a.csv:
        write_step_csv(result, a.csv)
    if a.plot:
        from liger_kernel.bench import report

        folder = Path(a.plot)
        print(report.html(folder / "report.html", None, result, _plots().steps(result, folder)))
    bad = [
        row
        for row in result["rows"]
        if row["variant"].startswith("ours") and (row["failed"] or row["accurate"] is False)
    ]
    return 1 if bad or not result["rows"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"liger bench step: {error}")
