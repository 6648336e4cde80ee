"""A training run as one dataclass. Flags, ``--help``, configuration files and their checks are
derived from its fields."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.patch_options import SWITCHES, PatchOptions
from liger_kernel.train.adamw import FULLY_SHARDED, KINDS
from liger_kernel.train.files import write
from liger_kernel.train.mistakes import (
    METAVAR,
    Parser,
    UserError as UserError,
    either,
    needs,
    regular,
    similar_file,
    unique,
)
from liger_kernel.train.redact import MARK, in_a_line, redacted

# variable with the URI of the store, where a config file has it without credentials
STORE = "LIGER_STORE"
PARALLEL = ("none", "ddp", "fsdp2", "tp", "ulysses", "ulysses-fsdp2", "deepspeed-z2", "deepspeed-z3")
ULYSSES = ("ulysses", "ulysses-fsdp2")
REPORTS = ("tensorboard", "wandb", "mlflow")
EVERY_LINEAR = "all-linear"
FP8 = SWITCHES["fp8"].metadata["choices"]
# fields that say what is trained beside a frozen base; checkpoints of other adapters do not fit
ADAPTERS = ("lora", "lora_alpha", "lora_dropout", "lora_targets", "dora", "rslora", "quantize", "merge_aware")
SIZES = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocab")  # of a model from random weights
# more than a run has of anything, and small enough for integers of PyTorch and the system
MANY = 10**9
COUNTS = (
    "hidden intermediate layers heads kv_heads vocab steps batch accumulate global_batch log_every timeout "
    "checkpoint_keep limit sequence_parallel_size max_record_mb"
)
AMOUNTS = "tiled_mlp warmup eval_every weight_decay lora nproc max_restarts checkpoint_every stream epochs samples"
# the names that records have, one kind after the other
COLUMNS = ("text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output")
# (what numbers of these fields must be, whether one is: not a NaN, which is in no range)
LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("at least 1", lambda x: 1 <= x <= MANY, COUNTS),
    # the first token of a row is predicted by nothing
    ("at least 2", lambda x: 2 <= x <= MANY, "length"),
    ("at least 0", lambda x: 0 <= x <= MANY, AMOUNTS),
    ("at least 0", lambda x: x >= 0, "grad_clip"),
    ("positive", lambda x: 0 < x < math.inf, "lr lora_alpha"),
    ("in [0, 1]", lambda x: 0 <= x <= 1, "min_lr"),
    ("in [0, 1)", lambda x: 0 <= x < 1, "beta2 eval_fraction lora_dropout"),
    ("in (0, 1]", lambda x: 0 < x <= 1, "decay"),
    ("in [0, 65535]", lambda x: 0 <= x < 2**16, "metrics_port"),
    # the range of NumPy's seeds
    ("in [0, 4294967295]", lambda x: 0 <= x < 2**32, "seed"),
)
# of a field's choices, those that a trainer has
OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"parallel": ("none", "ddp", "fsdp2", "tp", *ULYSSES)},
    "hf": {"parallel": ("none", "ddp", "fsdp2", "deepspeed-z2", "deepspeed-z3"), "nonfinite": ("stop",)},
    "lightning": {"parallel": ("none", "ddp"), "nonfinite": ("stop",)},
}


# (a field that a run sets, another field, the values that it then needs, why others do not do)
NEEDS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("sequence_parallel_size", "parallel", ULYSSES, ""),
    ("optimizer_in_backward", "trainer", ("torch",), ""),
    ("optimizer_on_cpu", "trainer", ("torch",), ""),
    ("optimizer_in_backward", "parallel", ("none", *FULLY_SHARDED), "elsewhere gradients are complete only later"),
    ("optimizer_in_backward", "grad_clip", (0,), "when the norm is known, the steps are made"),
    ("optimizer_in_backward", "accumulate", (1,), "each backward makes a step"),
    ("optimizer_in_backward", "nonfinite", ("stop",), "some weights have made their step before a gradient is seen"),
    ("optimizer_on_cpu", "parallel", FULLY_SHARDED, "it is their CPU offload, also for one GPU"),
    ("optimizer_on_cpu", "optimizer", ("adamw",), "it has a kernel for CPUs"),
    ("optimizer_on_cpu", "optimizer_in_backward", (False,), "the backward would wait for each step on the CPU"),
    ("lora", "parallel", tuple(mode for mode in PARALLEL if mode != "tp"), "tp does not split adapters"),
    ("quantize", "parallel", ("none", "ddp"), ""),
    # PEFT 0.21 with bitsandbytes 0.50 loses them in the second step
    ("dora", "quantize", ("nf4", "fp8", None), "with int8, DoRA loses the scales of the weights"),
    ("merge_aware", "quantize", (None,), "the base must be one whose files are quantised"),
    ("merge_aware", "dora", (False,), "a magnitude is merged into scales"),
    ("merge_aware", "lora_dropout", (0,), "a merged model drops nothing"),
    ("fp8_filter", "fp8", FP8, ""),
    ("fp8_head", "fp8", FP8, ""),
    ("fp8", "kernels", ("on",), ""),
    ("fp8", "lora", (0,), "it trains the whole model; quantize fp8 stores a frozen one in FP8"),
    ("fp8", "parallel", ("none", "ddp", "fsdp2"), "elsewhere rows, or weights that are multiplied, are split"),
    ("keep_attention", "gradient_checkpointing", ("full",), ""),
    ("batch_invariant", "kernels", ("on",), ""),
    ("batch_invariant", "compile", (False,), "a compiled graph chooses its kernels by the batch"),
    ("batch_invariant", "parallel", ("none", "ddp", "fsdp2"), "elsewhere ranks have parts of a sum"),
    ("epochs", "stream", (0,), "how many rows a stream has is known at its end; give steps"),
)


def _field(group: str, default: Any, help: str, choices: tuple[str, ...] | None = None, fit: bool = False) -> Any:
    """``fit``: the memory of a run depends on it, so that it is a flag of ``liger fit``, too."""
    values = {"group": group, "help": help, "choices": choices, "fit": fit}
    return dataclasses.field(default=default, metadata=values)


# in the order of --help; each makes a field of its group
GROUPS = ["model", "adapters", "data", "optimisation", "kernels", "run", "ranks", "checkpoints", "memory", "metrics"]
_model, _adapters, _data, _optimisation, _kernels, _run, _ranks, _checkpoints, _memory, _metrics = (
    functools.partial(_field, group) for group in GROUPS
)

# The switches of a patch; each is None where the model family decides.
if TYPE_CHECKING:

    @dataclass
    class _Kernels(PatchOptions):
        attention: Any = None  # of a run: which attention its model has
        kernels: str = "on"
        fp8: Any = None
        fp8_filter: Any = None

else:
    _OFF = "off: the model as Hugging Face ships it; on: as its family supports, but for the next flags"
    _Kernels = dataclasses.make_dataclass(
        "_Kernels",
        [("kernels", "str", _kernels("on", _OFF, ("on", "off"), fit=True))]
        + [
            (name, f"{kind} | None", _kernels(None, field.metadata["help"], field.metadata["choices"], True))
            for name, field in SWITCHES.items()
            if (kind := field.metadata["option"])
        ],
    )


@dataclass
class TrainConfig(_Kernels):
    """A training run. Each field is a flag of ``liger train``: ``batch`` is ``--batch``,
    ``grad_clip`` is ``--grad-clip``."""

    model: str | None = _model(
        None, "folder or Hugging Face id; without it, a small Llama of the sizes below in random weights", fit=True
    )
    trust_remote_code: bool = _model(
        False,
        "run Python code that comes with the model or tokenizer, with your rights; else such a model is refused",
        fit=True,
    )
    hidden: int = _model(256, "hidden size")
    intermediate: int | None = _model(None, "inner size of the MLP (default: 8/3 of hidden, in steps of 64)")
    layers: int = _model(4, "number of layers")
    heads: int = _model(4, "attention heads")
    kv_heads: int | None = _model(None, "key and value heads (default: half of heads)")
    vocab: int = _model(16384, "size of the BPE vocabulary trained on the data where no tokenizer is given")
    attention: str = _model(
        "auto",
        "sdpa, eager, flash_attention_2 ... of transformers; auto: sdpa or what the model has instead, or PyTorch's "
        "varlen_attn for packed documents if it can",
        fit=True,
    )

    lora: int = _adapters(
        0, "rank of LoRA adapters; only they are trained (needs peft). 0 trains the whole model", fit=True
    )
    lora_alpha: float | None = _adapters(None, "scale adapters by alpha / rank (default: alpha is twice the rank)")
    lora_dropout: float = _adapters(0.0, "dropout of the adapters' input", fit=True)
    lora_targets: str = _adapters(
        EVERY_LINEAR,
        "layers with adapters, such as q_proj,v_proj; all-linear: every linear layer but the head",
        fit=True,
    )
    dora: bool = _adapters(
        False, "DoRA: adapters learn the direction of a weight, and a vector learns its magnitude", fit=True
    )
    rslora: bool = _adapters(False, "scale adapters by alpha / sqrt(rank)")
    merge_aware: bool = _adapters(
        False,
        "round each sum of a quantised base and its adapters to the base's own numbers, which liger merge"
        " --to base writes",
    )
    quantize: str | None = _adapters(
        None,
        "store the frozen model in 4 bits (nf4) or 8 bits (int8) by bitsandbytes, or in fp8 on GPUs that compute in it",
        ("nf4", "int8", "fp8"),
        fit=True,
    )

    data: str = _data(
        "stdlib",
        "stdlib (Python's own sources), a .jsonl, .parquet, .csv, .tsv, .json or .txt file, a folder of "
        "them or of prepared rows, or a Hugging Face dataset id",
    )
    columns: str | None = _data(
        None,
        "other names for columns of the data, THEIRS=OURS with commas between, such as "
        f"question=prompt,answer=completion; ours are {', '.join(COLUMNS)}",
    )
    split: str = _data("train", "split of a Hugging Face dataset")
    eval_data: str | None = _data(None, "data to evaluate on (default: a part of the rows, see eval_fraction)")
    eval_split: str = _data("test", "split of a Hugging Face dataset that is eval_data")
    limit: int | None = _data(None, "read at most this many records, of data and of eval_data")
    tokenizer: str | None = _data(
        None, "tokenizer folder or id (default: the model's; with neither, a BPE trained on the data)"
    )
    max_record_mb: int = _data(64, "largest record in MB: a longer line or text is refused before it is read")
    length: int = _data(
        512, "tokens per row: plain text is packed into rows of this length, conversations are cut to it", fit=True
    )
    packing: str = _data(
        "auto",
        "auto joins plain text, a conversation is a row; documents packs both, and a document attends to no other",
        ("auto", "documents"),
    )
    stream: float = _data(
        0.0,
        "read, tokenise and shuffle so many millions of characters at a time, during training; 0: all before training",
    )
    eval_fraction: float = _data(0.02, "part of the rows that are kept for evaluation; 0 keeps none")

    steps: int = _optimisation(100, "optimizer steps")
    epochs: float = _optimisation(0.0, "passes over the data, which then decide the number of steps; 0: see steps")
    batch: int = _optimisation(8, "rows per forward pass", fit=True)
    accumulate: int = _optimisation(1, "forward passes per step; each token weighs the same", fit=True)
    global_batch: int | None = _optimisation(
        None, "rows per step of all ranks (default: batch x accumulate x ranks, of the first start)"
    )
    optimizer: str = _optimisation(
        "adamw",
        "AdamW of PyTorch (adamw) or torchao: moments in 8 bits (8bit), stochastic rounding of weights in bf16 (bf16)",
        tuple(KINDS),
        fit=True,
    )
    optimizer_in_backward: bool = _optimisation(
        False,
        "step each parameter when the backward has its gradient, and free the gradient; needs grad_clip 0",
        fit=True,
    )
    optimizer_on_cpu: bool = _optimisation(
        False,
        "keep weights and moments in the CPU's memory, and step there; needs fsdp2 or ulysses-fsdp2, also for one GPU",
        fit=True,
    )
    lr: float | None = _optimisation(
        None, "peak learning rate of AdamW (default: 2e-5 with a model, 2e-4 with adapters, 1e-3 from random weights)"
    )
    weight_decay: float = _optimisation(0.1, "weight decay of matrices; vectors have none")
    beta2: float = _optimisation(0.95, "AdamW's decay of the squared gradient")
    grad_clip: float = _optimisation(1.0, "largest gradient norm; 0 does not clip", fit=True)
    schedule: str = _optimisation("cosine", "learning rate after warm-up", ("cosine", "linear", "constant", "wsd"))
    warmup: int = _optimisation(10, "steps of linear warm-up")
    min_lr: float = _optimisation(0.1, "last learning rate as a part of the peak")
    decay: float = _optimisation(0.2, "part of the steps at the end in which wsd (warm-up, stable, decay) falls")
    nonfinite: str = _optimisation(
        "stop",
        "a step with a NaN or Inf gradient never changes weights: skip continues with the next, stop ends the run",
        ("stop", "skip"),
    )

    trainer: str = _run(
        "torch",
        "what runs the loop: plain PyTorch, transformers' Trainer, or Lightning's",
        ("torch", "hf", "lightning"),
        fit=True,
    )
    parallel: str = _ranks(
        "none",
        "how ranks share the work: copies of the model, its shards, or parts of rows (ulysses); "
        "deepspeed-z2 and -z3 need trainer hf, tp and ulysses need torch",
        PARALLEL,
        fit=True,
    )
    sequence_parallel_size: int | None = _ranks(
        None, "ranks that share each row, with parallel ulysses (default: all)", fit=True
    )
    nproc: int | None = _ranks(
        None,
        "start so many processes here, again when one dies; 0: one per GPU (default: one, or torchrun's)",
        fit=True,
    )
    nnodes: str = _ranks("1", "machines, or MIN:MAX; with nproc", fit=True)
    rdzv_endpoint: str = _ranks("localhost:0", "HOST:PORT of one of the machines, the same on all; with nproc")
    max_restarts: int = _ranks(3, "restarts after a process died; with nproc")
    timeout: int = _ranks(600, "seconds without progress after which every rank writes its stack and exits")

    checkpoint_every: int = _checkpoints(
        0, "steps between checkpoints; the last step and SIGTERM write one, too. 0 writes none"
    )
    checkpoint_keep: int = _checkpoints(2, "newest checkpoints to keep")
    checkpoint_async: bool = _checkpoints(True, "write while training goes on")
    store: str | None = _checkpoints(
        None, "URI (s3://bucket/run ...) to copy checkpoints to; a run whose own folder has none resumes from there"
    )
    resume: bool = _checkpoints(
        True, "resume from the run's latest checkpoint; --no-resume refuses a folder that has any"
    )

    gradient_checkpointing: str = _memory(
        "none",
        "recompute activations in the backward: full: all; selective: all but matrix products and attention",
        ("none", "selective", "full"),
        fit=True,
    )
    compile: bool = _memory(False, "torch.compile of each layer")

    report: str | None = _metrics(
        None, f"where else to report metrics: any of {', '.join(REPORTS)}, with commas between"
    )
    metrics_port: int = _metrics(0, "serve metrics for Prometheus on this port plus the local rank; 0: do not")
    metrics_host: str = _metrics("127.0.0.1", "address that metrics are served on")

    out: str = _run("runs/train", "folder for metrics.json, liger-run.json (the configuration) and checkpoints")
    cache: str | None = _run(None, "folder for tokenised data (default: cache in the folder of the run)")
    save: str | None = _run(None, "folder for the trained model and its tokenizer, as from_pretrained reads them")
    device: str = _run("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one")
    precision: str = _run(
        "auto",
        "bf16-mixed trains fp32 weights, bf16 keeps all in bf16 but adapters; auto: bf16-mixed on a GPU, fp32 on a CPU",
        ("auto", "fp32", "bf16-mixed", "bf16"),
        fit=True,
    )
    seed: int = _run(0, "seed of the weights and of the order of the data")
    deterministic: bool = _run(False, "only deterministic PyTorch algorithms: the same bits in every run")
    log_every: int = _run(10, "steps between log lines; the run waits for the GPU only at these lines")
    eval_every: int = _run(0, "steps between evaluations; 0 evaluates once, at the end")
    samples: int = _run(
        3, "answers to show, before training and after it, if a model is tuned to answer and not sharded"
    )
    dry_run: bool = _run(
        False, "show the summary, three rows with labels marked, and about how long the run takes; then stop"
    )

    def __post_init__(self) -> None:
        for limit, fits, names in LIMITS:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    most = f" and at most {MANY}" if limit.startswith("at least") and value > MANY else ""
                    raise UserError(f"{name} must be {limit}{most}, got {value!s:.80}")
        for field in dataclasses.fields(self):
            name, value, choices = field.name, getattr(self, field.name), field.metadata["choices"]
            _check_text(name, value)
            if choices and value not in (*choices, field.default):
                raise UserError(
                    f"{name} must be one of {', '.join(choices)}; got {value!r}{did_you_mean(value, choices)}"
                )
        for name, offered in OFFERED[self.trainer].items():
            if getattr(self, name) not in offered:
                raise UserError(f"trainer {self.trainer} offers {name} {', '.join(offered)}; got {getattr(self, name)}")
        for name, other, values, why in NEEDS:
            if getattr(self, name) and (got := getattr(self, other)) not in values:
                needs = f"{self._named(name)} needs {other} {either(map(_shown, values))}, got {_shown(got)}"
                raise UserError(f"{needs}: {why}" if why else needs)
        self._check_optimizer()
        if self.store and (self.trainer != "torch" or not self.checkpoint_every):
            raise UserError("store needs trainer torch and checkpoint_every")
        if self.store and "://" not in self.store:
            raise UserError(f"store must be a URI, such as s3://bucket/run or file:///folder/run; got {self.store!r}")
        kv_heads = self.kv_heads or max(1, self.heads // 2)
        # a head is even, as rotary embeddings turn pairs
        if not self.model and (self.hidden % (2 * self.heads) or self.heads % kv_heads):
            sizes = f"hidden {self.hidden}, heads {self.heads}, kv_heads {kv_heads}"
            raise UserError(f"heads must divide hidden into even parts, and kv_heads must divide heads; got {sizes}")
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise UserError("cross_entropy and fused_linear_cross_entropy exclude each other")
        self._check_adapters()
        if self.epochs and self.steps != TrainConfig.steps:
            raise UserError("steps and epochs exclude each other")
        self.renamed  # noqa: B018  # or it says what is wrong
        if self.fp8_filter is not None and not all(in_commas(self.fp8_filter)):
            raise UserError(f"fp8_filter must be names of layers with commas between; got {self.fp8_filter!r}")
        if self.kernels == "off" and (
            named := [name for name, value in self.kernel_flags.items() if value is True or name == "tiled_mlp"]
        ):
            raise UserError(f"{named[0]} needs kernels on, got off")

    def _named(self, name: str) -> str:
        """A field that is set, with its value if that is a choice."""
        return f"{name} {getattr(self, name)}" if isinstance(getattr(self, name), str) else name

    def _check_optimizer(self) -> None:
        kind = KINDS[self.optimizer]
        if self.parallel not in kind.parallel:
            modes = either(kind.parallel)
            raise UserError(f"optimizer {self.optimizer} needs parallel {modes}, got {self.parallel}")
        if kind.by == "torchao" and self.fully_sharded and self.trainer != "torch":
            raise UserError(
                f"optimizer {self.optimizer} with parallel {self.parallel} needs trainer torch, got {self.trainer}"
            )
        if kind.stochastic and (self.precision != "bf16" or self.lora):
            got = f"lora {self.lora}, whose adapters are kept in fp32" if self.lora else f"precision {self.precision}"
            raise UserError(
                f"optimizer {self.optimizer} rounds weights that are kept in bf16, so it needs precision bf16; got "
                f"{got}"
            )

    def _check_adapters(self) -> None:
        """What is wrong with adapters whatever the model is; ``train/adapters.py`` checks the
        rest."""
        for name in ("quantize", *ADAPTERS) if not self.lora else ():
            if getattr(self, name) != getattr(TrainConfig, name):
                raise UserError(f"{self._named(name)} needs lora, a rank of 1 or more")
        names = in_commas(self.lora_targets)
        if not all(names) or (len(names) > 1 and EVERY_LINEAR in names):
            raise UserError(
                f"lora_targets must be {EVERY_LINEAR}, or names of layers with commas between; got "
                f"{self.lora_targets!r}"
            )

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 holds the weights."""
        return self.parallel in FULLY_SHARDED

    @property
    def machines(self) -> tuple[int, int]:
        """The fewest and the most machines, of ``nnodes``."""
        least, _, most = self.nnodes.partition(":")
        if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
            raise UserError(f"nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, got {self.nnodes!r}")
        return int(least), int(most or least)

    def sharing(self, world: int) -> int:
        """How many of ``world`` ranks read the same rows."""
        return (
            world if self.parallel == "tp" else self.sequence_parallel_size or world if self.parallel in ULYSSES else 1
        )

    @property
    def target_modules(self) -> str | list[str]:
        """``lora_targets`` in PEFT's form."""
        targets = self.lora_targets
        return targets if targets == EVERY_LINEAR else sorted({*in_commas(targets)})

    @property
    def alpha(self) -> float:
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * self.lora

    @property
    def adapters(self) -> dict[str, Any]:
        """The settings of the adapters, by field name, equal for two ways to write the same;
        only the rank, 0, if the whole model is trained."""
        if not self.lora:
            return {"lora": 0}
        targets = self.target_modules
        same = {"lora_alpha": self.alpha, "lora_targets": targets if isinstance(targets, str) else ",".join(targets)}
        # checkpoints of earlier versions do not have it
        names = [name for name in ADAPTERS if name != "merge_aware" or self.merge_aware]
        return {name: same.get(name, getattr(self, name)) for name in names}

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else 2e-4 if self.lora else 2e-5 if self.model else 1e-3

    @property
    def reports(self) -> list[str]:
        return in_commas(self.report) if self.report else []

    @property
    def renamed(self) -> dict[str, str]:
        """``columns``: their name -> ours."""
        pairs = [name.split("=") for name in in_commas(self.columns)] if self.columns is not None else []
        if not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise UserError(f"columns must be THEIRS=OURS with commas between; got {self.columns!r}")
        renamed = {theirs.strip(): ours.strip() for theirs, ours in pairs}
        for ours in renamed.values():
            if ours not in COLUMNS:
                known = f"{', '.join(COLUMNS)}{did_you_mean(ours, COLUMNS)}"
                raise UserError(f"columns: {ours!r} is no name of ours, which are {known}")
        if len(set(renamed.values())) < len(pairs):
            raise UserError(f"columns must name each column once; got {self.columns!r}")
        return renamed

    def in_steps(self, rows: int, of: int) -> TrainConfig:
        """The run in steps of so many ``rows``, where it asks for passes over ``of`` rows."""
        if not self.epochs:
            return self
        # without the rounding errors of a product
        steps = math.ceil(self.epochs * of / rows - 1e-9)
        return dataclasses.replace(self, steps=max(1, steps), epochs=0.0)

    @property
    def kernel_flags(self) -> dict[str, Any]:
        """The kernels that are switched on or off by name; the model family decides about the
        others."""
        fields = [field.name for field in dataclasses.fields(self) if field.metadata["group"] == "kernels"]
        flags = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        del flags["kernels"]
        if self.fp8_filter:
            flags["fp8_filter"] = in_commas(self.fp8_filter)
        flags |= {"tiled_mlp": True} if self.tiled_mlp == 0 else {}
        return flags | ({"graphs": "auto"} if self.graphs else {})

    def shown(self) -> dict[str, Any]:
        """Names and values without credentials, which may be written or reported, and without the
        sizes of a random model beside the name of another."""
        return {
            name: redacted(value) if isinstance(value, str) else value
            for name, value in dataclasses.asdict(self).items()
            if not (self.model and name in SIZES)
        }

    @property
    def store_uri(self) -> str | None:
        """The store. A file does not have its credentials: the launcher passes them to its
        workers in their environment."""
        if not self.store or MARK not in self.store:
            return self.store
        whole = os.environ.get(STORE, "")
        if redacted(whole) != self.store:
            raise UserError(
                f"store {self.store} has no credentials, as files keep none: give the whole URI, or set the "
                "variables that its package reads"
            )
        return whole

    def save_to(self, path: str | Path) -> None:
        """Write YAML (``.yaml``, ``.yml``) or JSON (all other names), without credentials."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        values, yaml = self.shown(), _is_yaml(path)
        write(path, _yaml().safe_dump(values, sort_keys=False) if yaml else json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TrainConfig:
        """Read what ``save_to`` wrote, or a subset of it."""
        return cls(**read_values(path))


def read_values(path: str | Path) -> dict[str, Any]:
    """The names and values in a configuration file. Raises ``UserError`` for unknown names and
    wrong types."""
    return checked(read_file(path), TrainConfig, str(path))


def read_file(path: str | Path) -> dict[str, Any]:
    """The content of a YAML or JSON file: names and values, or ``UserError``."""
    path = Path(path)
    try:
        text = regular(path).read_text(encoding="utf-8-sig")
        values = _yaml().load(text, _loader()) if _is_yaml(path) else json.loads(text, object_pairs_hook=unique)
    except OSError as error:
        near = "" if path.exists() else similar_file(path)
        if (Path(__file__).parents[1] / "recipes" / f"{path.stem}.yaml").is_file() and not near:
            near = f"; the recipe of that name is copied by: liger recipes {path.stem}"
        raise UserError(f"cannot read {path}: {error.strerror}{near}") from error
    except UserError:
        raise
    # the two parsers share no exception class
    except Exception as error:
        raise UserError(f"{path} is not valid {'YAML' if _is_yaml(path) else 'JSON'}: {in_a_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold names and values, got a {type(values).__name__}")
    return values


def checked(values: dict[str, Any], cls: type, where: str) -> dict[str, Any]:
    """``values`` for the fields of the dataclass ``cls``. Raises ``UserError`` for unknown names
    and wrong types; its text begins with ``where``."""
    kinds = _kinds(cls)
    for name, value in values.items():
        if name not in kinds:
            raise UserError(f"{where}: unknown name {name!r:.80}{did_you_mean(str(name), kinds)}")
        kind, optional = kinds[name]
        if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
            # YAML reads 1e-3 as a string, and 1 as an int
            with contextlib.suppress(ValueError, OverflowError):
                value = values[name] = float(value)
        if not (type(value) is kind or (value is None and optional)):
            raise UserError(f"{where}: {name} must be of type {kind.__name__}, got {value!r:.80}")
    return values


def in_commas(names: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in names.split(",")]


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _check_text(name: str, value: Any) -> None:
    """``UserError`` for text that no path, command line or environment can hold."""
    if not isinstance(value, str):
        return
    try:
        fits = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise UserError(f"{name} must be text without NUL and without halves of characters, got {value!r:.80}")
    if name in ("out", "save", "cache") and value.encode(errors="replace").decode() != value:
        raise UserError(
            f"{name} must be a name in UTF-8 (PYTHONUTF8=1 helps where the locale has only ASCII), got {value!r:.80}"
        )


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _yaml() -> Any:
    with needs("YAML", "pyyaml"):
        import yaml
    return yaml


@functools.cache
def _loader() -> type:
    """YAML's safe loader without aliases, of which a few bytes can stand for more than the
    memory holds, and without names that stand twice."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]  # mypy knows no module that a function returns
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(
                    f"aliases are not read (*{self.peek_event().anchor}): write the value where it is used"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            unique([(repr(key.value), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    return Loader


@functools.cache
def _kinds(cls: type) -> dict[str, tuple[type, bool]]:
    """Field name -> (type, whether None is allowed)."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = (next(kind for kind in options if kind is not types.NoneType), types.NoneType in options)
    return kinds


def by_group() -> list[dataclasses.Field]:
    """The fields of a run, in the order of --help."""
    return sorted(dataclasses.fields(TrainConfig), key=lambda field: GROUPS.index(field.metadata["group"]))


def add_flags(parser: argparse.ArgumentParser, defaults: TrainConfig, fixed: tuple[str, ...]) -> None:
    """One flag per field, by group. A flag that is not given leaves no trace, so that config
    files and defaults show through."""
    groups: dict[str, Any] = {}
    for field in by_group():
        if field.name in fixed:
            continue
        name, kind, choices = field.metadata["group"], _kinds(TrainConfig)[field.name][0], field.metadata["choices"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        options: dict[str, Any] = {
            "type": kind,
            "choices": choices,
            "metavar": None if choices else METAVAR.get(kind, "NAME"),
        }
        groups[name].add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field, getattr(defaults, field.name)),
            **({"action": argparse.BooleanOptionalAction} if kind is bool else options),
        )


def _help(field: dataclasses.Field, default: Any) -> str:
    text = field.metadata["help"].replace("%", "%%")
    return text if default is None or isinstance(default, bool) else f"{text} (default: {_shown(default)})"


def from_flags(argv: list[str]) -> TrainConfig:
    """The configuration of a command line: flags override ``--config FILE``, which overrides the
    defaults."""
    description, defaults = "Train or fine-tune a causal language model.", TrainConfig()
    return configured(read_flags(argv, "liger train", description, defaults), defaults)


def read_flags(
    argv: list[str], prog: str, description: str, defaults: TrainConfig, fixed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The flags that are given, without those of ``fixed`` names; ``--help`` shows ``defaults``."""
    usage = "%(prog)s [--config FILE] [--name value ...]"
    parser = Parser(prog=prog, usage=usage, description=description, formatter_class=Formatter)
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file of these names; flags win over it")
    add_flags(parser, defaults, fixed)
    if "save" not in fixed:
        # others' folder of checkpoints, and at the end of the model
        parser.add_argument("--output-dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return vars(parser.parse_args(parser.as_ours(argv)))


def configured(flags: dict[str, Any], defaults: TrainConfig) -> TrainConfig:
    """The config that ``read_flags`` and the file that they name ask for."""
    path = flags.get("config")
    given = {name: value for name, value in flags.items() if name != "config"}
    if "output_dir" in given:
        folder = given.pop("output_dir")
        given = {"out": folder, "save": folder} | given
    if given.keys() >= {"steps", "epochs"}:
        raise UserError("--steps and --epochs exclude each other")
    # a flag replaces the other of the two in the file
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if given.get(one):
            given[other] = getattr(TrainConfig, other)
    return TrainConfig(**{**dataclasses.asdict(defaults), **(read_values(path) if path else {}), **given})


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(130, shutil.get_terminal_size().columns))
