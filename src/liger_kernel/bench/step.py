"""``liger bench step``: whole training steps of Hugging Face models with random weights, each
variant in its own processes (step_child.py).

Every variant starts from the same weights and sees the same batches. A variant that fails, or has
other losses than stock, has no ratio. With ``--data FILE``, stock and ours train a model of the
user's on rows of the user's instead, by turns, as in ``liger demo``.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from liger_kernel.bench import profile
from liger_kernel.bench.arguments import numbers, outputs, several
from liger_kernel.bench.results import Row, parts_of, write_csv
from liger_kernel.bench.tables import text_table
from liger_kernel.model_sizes import MODELS, config_of, step_flops
from liger_kernel.patch_options import SWITCHES
from liger_kernel.train import demo
from liger_kernel.train.adamw import KINDS, require
from liger_kernel.train.config import TrainConfig, configured, read_flags
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import Parser, UserError, aligned, at_least, holds, mistaken


@dataclass(frozen=True)
class Setup:
    """How a variant makes its model: by ``package`` ("ours", "upstream", or None for stock) with
    ``flags``, with the storage ``quantize`` of frozen weights, compiled by ``compile`` ("model" or
    "layers"). ``fp8``: whether --fp8 is for it."""

    package: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    compile: str | None = None
    fp8: bool = True


def _switched() -> dict[str, dict[str, Any]]:
    """Name of a variant, without "ours:" -> its flags: a variant for each value that a switch of the
    patch names, and for each other switch of ours that is off."""
    found: dict[str, dict[str, Any]] = {}
    for name, switch in SWITCHES.items():
        about = switch.metadata
        own = {name: True} if about["ours"] and switch.default is False and not about["choices"] else {}
        found |= {variant: {name: value} for variant, value in (about["variants"] or own).items()}
    found["offload-attention"] = found["offload"] | found["attention"]
    found["offload-tiled"] = found["offload"] | found["tiled"]
    found["long"] = found["offload-attention"] | found["tiled"]
    return found


SWITCHED = {f"ours:{name}": flags for name, flags in _switched().items()}
FP8_STORAGES = ("fp8", "fp8_rowwise")  # of the frozen base, which only ours has: recipes of quantize_base
COMPILED = {"compile": "model", "layers": "layers"}  # layers: each decoder layer separately
RECIPES = SWITCHES["fp8"].metadata["choices"]  # of --fp8
_PACKAGES = {"stock": Setup(), "upstream": Setup("upstream"), "ours": Setup("ours")}
VARIANTS = {
    **_PACKAGES,
    # people say "compile" for the compiled stock model
    **{
        f"{name}+{how}".removeprefix("stock+"): replace(setup, compile=what)
        for name, setup in _PACKAGES.items()
        for how, what in COMPILED.items()
    },
    **{name: Setup("ours", flags) for name, flags in SWITCHED.items()},
    **{f"ours:{storage}": Setup("ours", quantize=storage) for storage in FP8_STORAGES},
    "ours:bf16": Setup("ours", fp8=False),
}
# recipes of --fp8 with which a variant makes sense
NEEDS_FP8 = {"ours:bf16": RECIPES, "ours:head": RECIPES[:2]}
PARITY = {"bfloat16": 1e-2, "float32": 1e-4}  # largest relative difference between a loss and stock's
PARITY_STEPS = 4  # the first steps, whose losses are compared
TRACE_STEPS = 2
UPSTREAM = "liger-kernel==0.8.5"
LONGEST = 1 << 20  # most tokens of a row that --largest-seq tries
UNITS = {"batch": 1, "seq": 256}  # --largest-batch and --largest-seq try multiples of these
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHILD = Path(__file__).with_name("step_child.py")
PACKAGE = Path(__file__).parents[2]  # the folder that holds our liger_kernel
SHARED_ROWS = ("ulysses", "ulysses-fsdp2")  # values of --parallel with which all processes compute the same rows
# settings that a row has, besides model, variant and batch
OPTIONS = (
    *("seq", "gpus", "parallel", "checkpointing", "layers", "autocast", "attention", "quantize", "fp8", "tiled_mlp"),
    *("lora", "lora_targets", "lora_dropout", "dora", "optimizer_in_backward", "optimizer_on_cpu"),
)
META = ("data", "lengths", "masked", "optimizer", "steps", "warmup")  # those that all rows share

# -- flags


def parser_of() -> Parser:
    parser = Parser(prog="liger bench step", description="Measure whole training steps of models in random weights.")
    add = parser.add_argument
    flag = lambda name, *more, help: add(name, *more, action="store_true", help=help)
    add("--model", default="llama-3.2-1b", help=f"comma-separated: {', '.join(MODELS)}")
    several = "several, comma-separated, are measured one after the other until one does not fit"
    add("--batch", default="4", help=f"rows per step and GPU; {several}")
    add("--seq", default=2048, help="tokens per row")
    add("--against", default="stock,ours", help=f"variants, comma-separated: {', '.join(VARIANTS)}")
    add("--layers", type=int, metavar="N", help="the number of layers to keep of the model (default: all)")
    flag("--compile", help="each variant also under torch.compile")
    add("--attention", metavar="NAME", help="such as flex_attention (default: sdpa, or eager for models without it)")
    published = f"where the published package is: pip install --no-deps --target DIR {UPSTREAM}"
    add("--upstream-path", metavar="DIR", help=published)
    what = "random tokens; real: the sources of Python's library; or rows of "
    own = "your own, as in `liger train`, whose flags the others then are"
    add("--data", metavar="random|real|FILE", default="random", help=what + own)
    add(
        "--lengths",
        default=0,
        help="the median length of rows, which are padded: 95 is like Alpaca (default: full rows)",
    )
    add("--masked", default=0.0, help="the part of the labels that is ignored")
    add("--optimizer", choices=("sgd", *KINDS), default="sgd", help="sgd, or as in liger train")
    flag("--optimizer-in-backward", help="step each parameter in the backward, and free its gradient")
    flag("--optimizer-on-cpu", help="weights and moments in the CPU's memory, which steps there")
    flag("--checkpointing", help="recompute the layers in the backward")
    add("--tiled-mlp", type=int, metavar="N", help="tiles of variants with tiled_mlp (default: at most 16)")
    flag("--autocast", "--amp", help="run forwards under torch.autocast in bfloat16")
    add("--lora", default=0, metavar="R", help="train adapters of that rank, also on experts (needs peft)")
    layers = "layers with adapters, comma-separated; those of an MLP also mean experts (default: all)"
    add("--lora-targets", metavar="NAMES", help=f"{layers}: {', '.join(LINEARS)}")
    add("--lora-dropout", default=0.0, help="dropout of the adapters' input")
    flag("--dora", help="train DoRA adapters, with a magnitude for each output")
    frozen = "the frozen weights: nf4 (double quantisation) and int8 by bitsandbytes, fp8 (one scale a weight) and "
    add("--quantize", choices=("nf4", "int8", *FP8_STORAGES), help=f"{frozen}fp8_rowwise by ours alone")
    add("--fp8", choices=RECIPES, help="train linear layers in FP8; ours:bf16 without it, ours:head also with the head")
    add("--gpus", default=1, help="processes, each with a GPU where there are any")
    add(
        "--parallel",
        choices=("ddp", "fsdp2", "ep", *SHARED_ROWS),
        help="how the processes share the model (default: ddp if there are several); ep: its experts, and all "
        "else as with fsdp2, by Transformers 5.23; ulysses: the rows of a step, stock models by our code",
    )
    add("--steps", default=10, help="measured steps")
    add("--warmup", default=4, help="steps before them")
    flag("--largest-batch", help="search for the largest batch that fits (GPU only)")
    flag("--largest-seq", help="search for the longest rows of which the batch fits (GPU only)")
    flag("--profile", help="measure the time of each kind of work")
    peak = "what MFU is relative to (default: the rate of a large matrix product)"
    add("--peak-tflops", type=float, metavar="X", help=peak)
    add("--json", metavar="FILE", help="write rows as they come")
    add("--csv", metavar="FILE", help="write rows as a table")
    flag("--smoke", help="train a tiny model for a few steps, to see that everything works")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of()
    a = parser.parse_args(argv)
    if a.smoke:
        own = dict(model="tiny", batch="2", seq=64, steps=3, warmup=2)
        if given := [name for name in own if getattr(a, name) != parser.get_default(name)]:
            raise UserError(f"--smoke has its own --{given[0]}: leave one of them out")
        vars(a).update(own, profile=True)
    a.batch = numbers("batch", a.batch)
    if Path(a.model).is_dir():
        raise UserError(f"--model {a.model} needs --data FILE: rows of your own")
    a.model, a.against = several("model", a.model, MODELS), several("variant", a.against, VARIANTS)
    if a.compile:
        also = (f"{name}+compile".removeprefix("stock+") for name in a.against)
        a.against = list(dict.fromkeys([*a.against, *(name for name in also if name in VARIANTS)]))
    a.parallel = a.parallel or ("ddp" if a.gpus > 1 else None)
    at_least(1, batch=a.batch[0], seq=a.seq, gpus=a.gpus, steps=a.steps, layers=a.layers, tiled_mlp=a.tiled_mlp)
    at_least(0, lengths=a.lengths, warmup=a.warmup, lora=a.lora)
    if a.lora_targets is not None:
        several("linear layer", a.lora_targets, LINEARS)
    for wrong, message in refused(a):
        if wrong:
            raise UserError(message)
    # refuses what does not combine
    TrainConfig(
        grad_clip=0,
        precision="bf16",
        parallel="fsdp2" if a.parallel == "ep" else a.parallel or "none",
        optimizer="adamw" if a.optimizer == "sgd" else a.optimizer,
        optimizer_in_backward=a.optimizer_in_backward,
        optimizer_on_cpu=a.optimizer_on_cpu,
    )
    with mistaken("", ImportError):
        require(a.optimizer)
    holds("liger_kernel", a.upstream_path, "--upstream-path", UPSTREAM)
    outputs(a.json, a.csv)
    return a


def refused(a: argparse.Namespace) -> Iterator[tuple[object, str]]:
    """What does not go together: whether it is there, and what to say."""
    first = lambda test: next((name for name in a.against if test(VARIANTS[name])), None)
    upstream, stock = first(lambda v: v.package == "upstream"), first(lambda v: v.package is None)
    own = first(lambda v: v.quantize)
    lacks = lambda package: importlib.util.find_spec(package) is None
    yield a.peak_tflops is not None and not a.peak_tflops > 0, f"--peak-tflops must be positive, got {a.peak_tflops}"
    single = "--profile, --largest-batch and --largest-seq need a single --batch"
    yield len(a.batch) > 1 and (a.profile or a.largest_batch or a.largest_seq), single
    counted = f"{PARITY_STEPS}, whose losses are compared; got {a.warmup} and {a.steps}"
    yield a.warmup + a.steps < PARITY_STEPS, f"--warmup and --steps must add up to {counted}"
    yield not 0 <= a.masked < 1, f"--masked must be in [0, 1), got {a.masked}"
    yield not 0 <= a.lora_dropout < 1, f"--lora-dropout must be in [0, 1), got {a.lora_dropout}"
    yield (
        a.optimizer_on_cpu and a.optimizer != "adamw",
        f"--optimizer-on-cpu needs --optimizer adamw, got {a.optimizer}",
    )
    for name in ("lora_targets", "lora_dropout", "dora", "quantize"):
        yield getattr(a, name) and not a.lora, f"--{name.replace('_', '-')} needs --lora R"
    yield own and not a.lora, f"{own} needs --lora R"
    yield own and a.quantize, f"{own} has its own base: leave out --quantize {a.quantize}"
    other, compared = upstream or stock, f"--against {upstream or stock},ours:{a.quantize} compares the two"
    alone = f"only ours supports --quantize {a.quantize}; {compared}"
    yield a.quantize in FP8_STORAGES and other, f"{other} has no frozen FP8 base: {alone}"
    bnb = a.quantize in ("nf4", "int8") and lacks("bitsandbytes")
    yield bnb, f"--quantize {a.quantize} needs bitsandbytes: pip install bitsandbytes"
    yield a.lora and lacks("peft"), "--lora needs peft: pip install peft"
    yield a.fp8 and a.lora, "--fp8 trains the weights themselves: leave out --lora"
    for name in a.against:
        recipes = NEEDS_FP8.get(name, (a.fp8,))
        yield a.fp8 not in recipes, f"{name} needs --fp8 {'|'.join(map(str, recipes))}"
    unshared = upstream and a.parallel in ("ep", *SHARED_ROWS)
    yield unshared, f"{upstream} has no --parallel {a.parallel}: leave it out"
    if a.parallel == "ep":
        dense = next((name for name in a.model if not any(key.endswith("_experts") for key in MODELS[name])), None)
        yield dense, f"--parallel ep needs a mixture of experts, got {dense}"
        others = "leave out --lora, --fp8 and --optimizer-on-cpu"
        whole = f"--parallel ep trains all weights in 16 bits on the GPU: {others}"
        yield a.lora or a.fp8 or a.optimizer_on_cpu, whole
        newer = "the expert parallelism of Transformers 5.23: pip install 'transformers>=5.23'"
        yield lacks("transformers.distributed.expert_parallel"), f"--parallel ep needs {newer}"


# -- processes


def run_child(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run step_child.py and return its result: ``rows``, and ``failed``, the reason why it
    stopped early."""
    given, result, messages = folder / "spec.json", folder / "result.json", folder / "stderr"
    why = folder / "result.json.failed"
    given.write_text(json.dumps(spec))
    result.unlink(missing_ok=True)
    why.unlink(missing_ok=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec['gpus']}"]
    command = [sys.executable, *(ranks if spec["parallel"] else []), str(CHILD), str(given), str(result)]
    with messages.open("w") as stderr:
        env = environment_with(*spec["path"])
        done = subprocess.run(command, env=env, stdout=stderr, stderr=stderr, check=False)
    text = messages.read_text(errors="replace").strip()
    found: dict[str, Any] = {"rows": [], "failed": None} | (json.loads(result.read_text()) if result.exists() else {})
    if why.exists():
        found["failed"] = json.loads(why.read_text())
    elif done.returncode or not result.exists():
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        found["failed"] = f"{how}: {(text.splitlines() or ['no message'])[-1][:300]}"
    if found["failed"] and os.environ.get("LIGER_TRACEBACK") == "1":
        print(text, file=sys.stderr)
    return found


def environment_with(*folders: str) -> dict[str, str]:
    """The environment of a process that finds packages in these folders first."""
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def environment() -> dict[str, Any]:
    """Hardware, versions and the measured peak rate, from a child process: this process must
    hold no GPU memory while others measure theirs."""
    code = (
        "import json, torch; from liger_kernel.bench import clock; "
        "print(json.dumps(clock.hardware() | clock.ceilings() | {'gpus': torch.cuda.device_count()}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment_with(str(PACKAGE)), capture_output=True, text=True, check=False)
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

        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "liger-kernel"
        tokens = data.load(TrainConfig(vocab=min(vocab, 32768), length=1024, cache=str(cache))).rows.ids
        tokens = tokens % vocab  # a byte-level BPE has at least 257 ids
    torch.save(tokens, path)


def values_of(a: argparse.Namespace, model: str) -> dict[str, Any]:
    """The configuration to measure, with positions for the longest row."""
    values = MODELS[model] | ({"num_hidden_layers": a.layers} if a.layers else {})
    longest = max(values.get("max_position_embeddings", 0), LONGEST if a.largest_seq else a.seq)
    return values | {"max_position_embeddings": longest} | ({"pad_token_id": 0} if a.lora else {})


def spec_of(a: argparse.Namespace, model: str, name: str, folder: Path, gpu: bool) -> dict[str, Any]:
    """What step_child.py is told, as JSON: the flags, and how the variant makes its model."""
    variant = VARIANTS[name]
    tiles = {"tiled_mlp": a.tiled_mlp} if "tiled_mlp" in variant.flags and a.tiled_mlp else {}
    package = {"ours": str(PACKAGE), "upstream": a.upstream_path}.get(variant.package or "")
    # stock models share rows by our code
    found_in = package or (str(PACKAGE) if a.parallel in SHARED_ROWS else None)
    return vars(a) | {
        "variant": name,
        "config": values_of(a, model),
        "dtype": "bfloat16" if gpu else "float32",
        "package": package,
        "path": [found_in] if found_in else [],
        "flags": {**variant.flags, **tiles},
        "quantize": variant.quantize or a.quantize,
        "fp8": a.fp8 if variant.package == "ours" and variant.fp8 else None,
        "lora_targets": a.lora_targets.split(",") if a.lora_targets else list(LINEARS),
        "compile": variant.compile,
        "tokens": str(folder / f"{model}.pt"),
        "trial": False,
        "trace": str(folder / "trace.json") if a.profile else None,
        "trace_steps": TRACE_STEPS,
    }


def measure(
    a: argparse.Namespace, model: str, name: str, folder: Path, meta: Mapping[str, Any], peak: float
) -> list[Row]:
    """A row for each batch, until one fails. Each trial of a search for the largest size has a
    process of its own: after one that did not fit, memory may be lost or CUDA be broken."""
    gpu = meta["gpus"] > 0
    spec = spec_of(a, model, name, folder, gpu)
    common: Row = {"model": model, "variant": name, **{option: getattr(a, option) for option in OPTIONS}}
    found = run_child(spec, folder)
    rows = [common | row | {"failed": None} for row in found["rows"]]
    ranks = a.gpus if a.parallel in SHARED_ROWS else 1  # of which each computes a part of these FLOPs
    for row in rows:
        rate = step_flops(spec["config"], row["batch"], a.seq) / row["step_ms"] / 1e9
        row["mfu"] = rate / peak / ranks if gpu and not a.lora else None
    if rows and a.profile:
        trace = json.loads(Path(spec["trace"]).read_text())
        rows[0]["breakdown_ms"] = profile.breakdown(trace["traceEvents"], TRACE_STEPS, rows[0]["step_ms"])
    if found["failed"] and len(rows) < len(a.batch):
        rows.append(common | {"batch": a.batch[len(rows)], "failed": found["failed"]})
    for what in ("batch", "seq"):
        fits = not rows[0]["failed"] or (what == "batch" and rows[0]["failed"] == "out of memory")
        if getattr(a, f"largest_{what}") and fits:
            rows[0] |= _largest(what, spec | {"trace": None, "trial": True}, folder)
    return rows


def _largest(what: str, spec: dict[str, Any], folder: Path) -> Row:
    """The largest batch, or the longest rows, and the reason why larger ones fail."""
    failures, unit = {}, UNITS[what]

    def fits(n: int) -> bool:
        size = {"batch": [n]} if what == "batch" else {"seq": n * unit}
        failed = run_child(spec | size, folder)["failed"]
        if failed:  # not always memory: some kernels fail at 2^31 elements
            failures[f"largest_{what}_limit"] = failed
        return not failed

    start = spec["batch"][0] if what == "batch" else max(1, spec["seq"] // unit)
    return {f"largest_{what}": largest_that(fits, start) * unit} | failures


def largest_that(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, to within 1/16; 0 if even 1 does not fit."""
    low, high, n = 0, None, start
    while high is None or high - low > max(1, low // 16):
        low, high = (n, high) if fits(n) else (low, n)
        n = 2 * low if high is None else (low + high) // 2
    return low


# -- results


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


def tolerance_of(a: argparse.Namespace, dtype: str) -> float:
    return PARITY["bfloat16" if a.autocast or a.quantize else dtype]


def table(rows: list[Row], tolerance: float) -> str:
    """The rows of one model and batch as a table for a terminal, and what it does not say."""
    notes = []
    if any(row.get("accurate") is False for row in rows):
        far = f"losses are more than {tolerance:g} of stock's away within the first {PARITY_STEPS} steps"
        notes.append(f"inaccurate: {far}. Such a step has no ratio.")
    for row in rows:
        for what, larger in (("batch", "larger batches"), ("seq", "longer rows")):
            if (why := row.get(f"largest_{what}_limit", "out of memory")) != "out of memory":
                notes.append(f"{row['variant']}: {larger} fail with {why}")
    return "\n".join([text_table(rows), *notes])


def breakdown_table(rows: list[Row]) -> str:
    """A table of the milliseconds of a step by kind of work, without kinds that no row has."""
    rows = [row for row in rows if row.get("breakdown_ms")]
    kinds = [kind for kind in profile.KINDS if any(row["breakdown_ms"][kind] >= 0.005 for row in rows)]
    lines = [[row["variant"], *(f"{row['breakdown_ms'][kind]:.2f}" for kind in kinds)] for row in rows]
    return aligned([["ms / step", *kinds], *lines], words={0})


def run(a: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure all requested models and variants. Finished rows are printed and written at once."""
    meta = environment()
    gpu = meta["gpus"] > 0
    if gpu and a.gpus > meta["gpus"]:
        raise UserError(f"--gpus is {a.gpus}, but this machine has {meta['gpus']}")
    if not gpu:
        references = "PyTorch references run, so ratios on other devices differ"
        print(f"Measured on a CPU, in fp32: {references}. Memory is that of the whole process.")
        if a.largest_batch or a.largest_seq:
            down = "on a CPU, a batch that is too large takes the machine down instead of failing"
            raise UserError(f"--largest-batch and --largest-seq need a GPU: {down}")
    if not a.upstream_path and any(VARIANTS[name].package == "upstream" for name in a.against):
        print(f"upstream is skipped: pip install --no-deps --target DIR {UPSTREAM}, then --upstream-path DIR")
        a.against = [name for name in a.against if VARIANTS[name].package != "upstream"]
    peak, dtype = a.peak_tflops or meta["gemm_tflops"], "bfloat16" if gpu else "float32"
    tolerance = tolerance_of(a, dtype)
    meta |= {"peak_tflops": peak, "dtype": dtype, **{name: getattr(a, name) for name in META}}
    meta |= {"parity_tolerance": tolerance, "command": "liger bench step " + " ".join(argv)}
    result: dict[str, Any] = {"meta": meta, "rows": []}
    settings = ", ".join([f"{a.gpus} x {a.parallel}"] * bool(a.parallel) + [dtype, a.optimizer])
    settings = ", ".join(dict.fromkeys([settings, *parts_of(vars(a) | {"optimizer": None})]))
    with tempfile.TemporaryDirectory(prefix="liger-bench-") as name:
        folder = Path(name)
        for model in a.model:
            write_tokens(a.data, config_of(values_of(a, model)).vocab_size, folder / f"{model}.pt")
            rows: list[Row] = []
            # Stock first, because the others are compared with it.
            for variant in sorted(a.against, key=lambda name: name != "stock"):
                for row in measure(a, model, variant, folder, meta, peak):
                    same = (r for r in rows if r["variant"] == "stock" and r["batch"] == row["batch"])
                    rows.append(judge(row, row if variant == "stock" else next(same, None), tolerance))
                    result["rows"].append(rows[-1])
                    rate = rows[-1]["failed"] or f"{rows[-1]['tokens_per_s']:,.0f} tokens/s"
                    print(f"{model} {variant}, {row['batch']} rows: {rate}", file=sys.stderr, flush=True)
                if a.json:
                    export(a.json, json.dumps(result, indent=1))
            for batch in a.batch:
                if some := [row for row in rows if row["batch"] == batch]:
                    rate = f", MFU of {peak:,.1f} TFLOP/s" if gpu else ""
                    print(f"\n{model}: {batch} x {a.seq} {a.data} tokens, {settings}; {meta['hardware']}{rate}\n")
                    print(table(some, tolerance))
            if a.profile:
                print(f"\n{breakdown_table(rows)}")
            sys.stdout.flush()
    return result


# -- rows of the user's

OWN = TrainConfig(out="runs/bench-step", steps=40, warmup=5, log_every=4, eval_fraction=0.0)


def names_rows(argv: list[str]) -> bool:
    """Whether ``--data`` names rows, not a kind of those that are made."""
    values = [value for flag, value in pairwise(argv) if flag == "--data"]
    values += [word.partition("=")[2] for word in argv if word.startswith("--data=")]
    return bool(values) and values[-1] not in ("random", "real")


def on_own_rows(argv: list[str]) -> int:
    description = "Train a model on rows, stock and with our kernels, by turns, and compare."
    config = configured(read_flags(argv, "liger bench step", description, OWN, demo.FIXED), OWN)
    if not config.model:
        raise UserError(f"--data {config.data} needs --model: a folder or an id of the hub")
    report = demo.run(config, "liger bench step")
    if report is None:
        return 1
    rate, memory = report["tokens_per_second"], report["peak_memory"]
    speed = f"{rate['ratio']:.2f} times as fast as stock" if rate["clear"] else "at a speed that could not be compared"
    off = f"{report['largest_loss_difference']:.0e}, which is {'' if report['agree'] else 'MORE THAN '}rounding"
    print(
        f"On {Path(config.data).name}, {Path(config.model).name} trains with our kernels {speed}, in "
        f"{memory['ratio']:.2f} times its peak memory ({memory['ours'] / 1e9:.2f} GB), and the losses differ by {off}."
    )
    return 0 if report["agree"] else 1


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if every requested run of ours finished with stock's losses."""
    if names_rows(argv):
        return on_own_rows(argv)
    a = parse(argv)
    result = run(a, argv)
    if a.csv:
        write_csv(result, a.csv)
    ours = [row for row in result["rows"] if row["variant"].startswith("ours")]
    return int(not result["rows"] or any(row["failed"] or row["accurate"] is False for row in ours))
