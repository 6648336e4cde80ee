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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.patch_options import SWITCHES, PatchOptions
from liger_kernel.train.adamw import FULLY_SHARDED, KINDS, check
from liger_kernel.train.files import write
from liger_kernel.train.mistakes import Parser, regular, similar_file, unique
from liger_kernel.train.mistakes import UserError as UserError
from liger_kernel.train.redact import MARK, in_a_line, redacted

# variable with the URI of the store, where a config file has it without credentials
STORE = "LIGER_STORE"
TRAINERS = ("torch", "hf", "lightning")
PARALLEL = ("none", "ddp", "fsdp2", "tp", "ulysses", "ulysses-fsdp2", "deepspeed-z2", "deepspeed-z3")
ULYSSES = ("ulysses", "ulysses-fsdp2")
PRECISIONS = ("auto", "fp32", "bf16-mixed", "bf16")
OPTIMIZERS = tuple(KINDS)
PACKINGS = ("auto", "documents")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
REPORTS = ("tensorboard", "wandb", "mlflow")
QUANTIZED = ("nf4", "int8", "fp8")
EVERY_LINEAR = "all-linear"
# fields that say what is trained beside a frozen base; checkpoints of other adapters do not fit
ADAPTERS = ("lora", "lora_alpha", "lora_dropout", "lora_targets", "dora", "rslora", "quantize")
# more than a run has of anything, and small enough for integers of PyTorch and the system
MANY = 10**9
RANGES = (
    (
        "hidden intermediate layers heads kv_heads vocab steps batch accumulate global_batch log_every timeout "
        "checkpoint_keep limit",
        1,
        MANY,
    ),
    ("sequence_parallel_size max_record_mb", 1, MANY),
    # the first token of a row is predicted by nothing
    ("length", 2, MANY),
    ("tiled_mlp warmup eval_every weight_decay lora nproc max_restarts checkpoint_every stream", 0, MANY),
    ("grad_clip", 0, math.inf),
    ("min_lr", 0, 1),
    ("metrics_port", 0, 2**16 - 1),
    # the range of NumPy's seeds
    ("seed", 0, 2**32 - 1),
)
# of a field's choices, those that a trainer has
OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"parallel": ("none", "ddp", "fsdp2", "tp", *ULYSSES)},
    "hf": {"parallel": ("none", "ddp", "fsdp2", "deepspeed-z2", "deepspeed-z3"), "nonfinite": ("stop",)},
    "lightning": {"parallel": ("none", "ddp"), "nonfinite": ("stop",)},
}


def _field(default: Any, group: str, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": help, "choices": choices})


# The switches of a patch; each is None where the model family decides.
if TYPE_CHECKING:

    @dataclass
    class _Kernels(PatchOptions):
        attention: Any = None  # of a run: which attention its model has
        kernels: str = "on"
        fp8: Any = None
        fp8_filter: Any = None

else:
    _OFF = "off trains the model as Hugging Face ships it; on: as the model family supports, but for the next flags"
    _Kernels = dataclasses.make_dataclass(
        "_Kernels",
        [("kernels", "str", _field("on", "kernels", _OFF, ("on", "off")))]
        + [
            (name, f"{kind} | None", _field(None, "kernels", field.metadata["help"], field.metadata["choices"]))
            for name, field in SWITCHES.items()
            if (kind := field.metadata["option"])
        ],
    )
# in the order of --help
GROUPS = ["model", "adapters", "data", "optimisation", "kernels", "run", "ranks", "checkpoints", "memory", "metrics"]


@dataclass
class TrainConfig(_Kernels):
    """A training run. Each field is a flag of ``liger train``: ``batch`` is ``--batch``,
    ``grad_clip`` is ``--grad-clip``."""

    model: str | None = _field(
        None,
        "model",
        "checkpoint folder or Hugging Face id; without it, a small Llama of the sizes below from random weights",
    )
    trust_remote_code: bool = _field(
        False,
        "model",
        "run Python code that comes with the model or tokenizer, on every rank and with your rights; without it, "
        "such a model is refused",
    )
    hidden: int = _field(256, "model", "hidden size")
    intermediate: int | None = _field(None, "model", "inner size of the MLP (default: 8/3 of hidden, in steps of 64)")
    layers: int = _field(4, "model", "number of layers")
    heads: int = _field(4, "model", "attention heads")
    kv_heads: int | None = _field(None, "model", "key and value heads (default: half of heads)")
    vocab: int = _field(16384, "model", "size of the BPE vocabulary trained on the data where no tokenizer is given")
    attention: str = _field(
        "auto",
        "model",
        "sdpa, eager, flash_attention_2 ... of transformers; auto: sdpa or what the model has instead, or PyTorch's "
        "varlen_attn for packed documents if it can",
    )

    lora: int = _field(
        0, "adapters", "rank of LoRA adapters; only they are trained (needs peft). 0 trains the whole model"
    )
    lora_alpha: float | None = _field(
        None, "adapters", "scale adapters by alpha / rank (default: alpha is twice the rank)"
    )
    lora_dropout: float = _field(0.0, "adapters", "dropout of the adapters' input")
    lora_targets: str = _field(
        EVERY_LINEAR,
        "adapters",
        "layers with adapters: names with commas between, such as q_proj,v_proj; all-linear: every linear layer but "
        "the head",
    )
    dora: bool = _field(
        False, "adapters", "DoRA: adapters learn the direction of a weight, and a vector learns its magnitude"
    )
    rslora: bool = _field(False, "adapters", "scale adapters by alpha / sqrt(rank)")
    quantize: str | None = _field(
        None,
        "adapters",
        "store the frozen model in 4 bits (nf4) or 8 bits (int8) by bitsandbytes, or in fp8 on GPUs that compute in it",
        QUANTIZED,
    )

    data: str = _field(
        "stdlib",
        "data",
        "'stdlib' (Python's own sources), a .jsonl or .parquet file, a folder of them or of prepared rows, or a "
        "Hugging Face dataset id",
    )
    split: str = _field("train", "data", "split of a Hugging Face dataset")
    limit: int | None = _field(None, "data", "read at most this many texts")
    tokenizer: str | None = _field(
        None, "data", "tokenizer folder or id (default: the model's; with neither, a BPE trained on the data)"
    )
    max_record_mb: int = _field(
        64, "data", "largest record in MB: a longer line of a .jsonl file is refused before it is read"
    )
    length: int = _field(
        512, "data", "tokens per row: plain text is packed into rows of this length, conversations are cut to it"
    )
    packing: str = _field(
        "auto",
        "data",
        "auto joins plain text, and a conversation is a row; documents packs both, and a document attends to no other",
        PACKINGS,
    )
    stream: float = _field(
        0.0,
        "data",
        "read, tokenise and shuffle so many millions of characters at a time, during training; 0 tokenises and "
        "shuffles all data before training",
    )
    eval_fraction: float = _field(0.02, "data", "part of the rows that are kept for evaluation; 0 keeps none")

    steps: int = _field(100, "optimisation", "optimizer steps")
    batch: int = _field(8, "optimisation", "rows per forward pass")
    accumulate: int = _field(
        1, "optimisation", "forward passes per step; each token weighs the same whichever pass and rank it is in"
    )
    global_batch: int | None = _field(
        None,
        "optimisation",
        "rows per step of all ranks (default: batch x accumulate x ranks of the first start; a resumed run keeps it)",
    )
    optimizer: str = _field(
        "adamw",
        "optimisation",
        "AdamW of PyTorch (adamw) or torchao: with moments in 8 bits (8bit), with stochastic rounding of weights in "
        "bf16 (bf16), or both",
        OPTIMIZERS,
    )
    optimizer_in_backward: bool = _field(
        False,
        "optimisation",
        "step each parameter when the backward has its gradient, and free the gradient; needs grad_clip 0, trainer "
        "torch",
    )
    optimizer_on_cpu: bool = _field(
        False,
        "optimisation",
        "keep weights and moments in the CPU's memory, and step there (CPU offload, also for one GPU); needs fsdp2 "
        "or ulysses-fsdp2",
    )
    lr: float | None = _field(
        None,
        "optimisation",
        "peak learning rate of AdamW (default: 2e-5 with a model, 2e-4 with adapters, 1e-3 from random weights)",
    )
    weight_decay: float = _field(0.1, "optimisation", "weight decay of matrices; vectors have none")
    beta2: float = _field(0.95, "optimisation", "AdamW's decay of the squared gradient")
    grad_clip: float = _field(1.0, "optimisation", "largest gradient norm; 0 does not clip")
    schedule: str = _field("cosine", "optimisation", "learning rate after warm-up", SCHEDULES)
    warmup: int = _field(10, "optimisation", "steps of linear warm-up")
    min_lr: float = _field(0.1, "optimisation", "last learning rate as a part of the peak")
    decay: float = _field(
        0.2, "optimisation", "part of the steps at the end in which wsd (warm-up, stable, decay) falls, linearly"
    )
    nonfinite: str = _field(
        "stop",
        "optimisation",
        "a step with a NaN or Inf gradient never changes weights: skip continues with the next, stop ends the run",
        ("stop", "skip"),
    )

    trainer: str = _field(
        "torch", "run", "what runs the loop: plain PyTorch, transformers' Trainer, or Lightning's", TRAINERS
    )
    parallel: str = _field(
        "none",
        "ranks",
        "how several ranks share the work: copies of the model, its shards, or parts of rows (ulysses, with copies "
        "or with fsdp2's shards);"
        " deepspeed-z2 and -z3 need trainer hf, tp and ulysses need torch",
        PARALLEL,
    )
    sequence_parallel_size: int | None = _field(
        None, "ranks", "ranks that share each row, with parallel ulysses (default: all)"
    )
    nproc: int | None = _field(
        None,
        "ranks",
        "start so many processes here, and restart them when one dies; 0: one per GPU (default: one, or torchrun's)",
    )
    nnodes: str = _field("1", "ranks", "machines, or MIN:MAX; with nproc")
    rdzv_endpoint: str = _field("localhost:0", "ranks", "HOST:PORT of one of the machines, the same on all; with nproc")
    max_restarts: int = _field(3, "ranks", "restarts after a process died; with nproc")
    timeout: int = _field(600, "ranks", "seconds without progress after which every rank writes its stack and exits")

    checkpoint_every: int = _field(
        0,
        "checkpoints",
        "steps between checkpoints in the run's folder; the last step and SIGTERM write one, too. 0 writes none",
    )
    checkpoint_keep: int = _field(2, "checkpoints", "newest checkpoints to keep")
    checkpoint_async: bool = _field(True, "checkpoints", "write while training goes on")
    store: str | None = _field(
        None,
        "checkpoints",
        "URI (s3://bucket/run ...) to copy checkpoints to, by fsspec; a run whose own folder has none resumes from "
        "there",
    )
    resume: bool = _field(
        True, "checkpoints", "resume from the run's latest checkpoint; --no-resume refuses a folder that has any"
    )

    gradient_checkpointing: str = _field(
        "none",
        "memory",
        "recompute activations in the backward: full: all; selective: all but matrix products and attention",
        ("none", "selective", "full"),
    )
    compile: bool = _field(False, "memory", "torch.compile of each layer")

    report: str | None = _field(
        None, "metrics", f"where else to report metrics: any of {', '.join(REPORTS)}, with commas between"
    )
    metrics_port: int = _field(0, "metrics", "serve metrics for Prometheus on this port plus the local rank; 0: do not")
    metrics_host: str = _field("127.0.0.1", "metrics", "address that metrics are served on")

    out: str = _field(
        "runs/train", "run", "folder for metrics.json, liger-run.json (the configuration) and checkpoints"
    )
    cache: str | None = _field(None, "run", "folder for tokenised data (default: cache in the folder of the run)")
    save: str | None = _field(
        None, "run", "folder for the trained model (safetensors) and its tokenizer, as from_pretrained reads them"
    )
    device: str = _field("auto", "run", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one")
    precision: str = _field(
        "auto",
        "run",
        "bf16-mixed trains fp32 weights, bf16 keeps all in bf16 but adapters; auto: bf16-mixed on a GPU, fp32 on a CPU",
        PRECISIONS,
    )
    seed: int = _field(0, "run", "seed of the weights and of the order of the data")
    deterministic: bool = _field(False, "run", "only deterministic PyTorch algorithms: the same bits in every run")
    log_every: int = _field(10, "run", "steps between log lines; the run waits for the GPU only at these lines")
    eval_every: int = _field(0, "run", "steps between evaluations; 0 evaluates once, at the end")

    def __post_init__(self) -> None:
        for names, least, most in RANGES:
            for name in names.split():
                value = getattr(self, name)
                # written so that NaN, which is in no range, is refused
                if value is not None and not least <= value <= most:
                    limits = (
                        f"at least {least}"
                        if most in (MANY, math.inf) and not value > most
                        else f"in [{least}, {most}]"
                    )
                    raise UserError(f"{name} must be {limits}, got {value!s:.80}")
        for name, wanted, fits in (
            ("lr", "positive", lambda x: x is None or 0 < x < math.inf),
            ("beta2", "in [0, 1)", lambda x: 0 <= x < 1),
            ("eval_fraction", "in [0, 1)", lambda x: 0 <= x < 1),
            ("decay", "in (0, 1]", lambda x: 0 < x <= 1),
            ("lora_alpha", "positive", lambda x: x is None or 0 < x < math.inf),
            ("lora_dropout", "in [0, 1)", lambda x: 0 <= x < 1),
        ):
            if not fits(value := getattr(self, name)):
                raise UserError(f"{name} must be {wanted}, got {value}")
        for field in dataclasses.fields(self):
            _check_text(field.name, getattr(self, field.name))
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in (*choices, field.default):
                value = getattr(self, field.name)
                raise UserError(
                    f"{field.name} must be one of {', '.join(choices)}; got {value!r}{did_you_mean(value, choices)}"
                )
        for name, offered in OFFERED[self.trainer].items():
            if getattr(self, name) not in offered:
                raise UserError(f"trainer {self.trainer} offers {name} {', '.join(offered)}; got {getattr(self, name)}")
        if self.sequence_parallel_size and self.parallel not in ULYSSES:
            raise UserError(f"sequence_parallel_size needs parallel {' or '.join(ULYSSES)}, got {self.parallel}")
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
        self._check_fp8()
        if self.kernels == "off" and (
            named := [name for name, value in self.kernel_flags.items() if value is True or name == "tiled_mlp"]
        ):
            raise UserError(f"{named[0]} needs kernels on, got off")
        if self.keep_attention and self.gradient_checkpointing != "full":
            raise UserError(f"keep_attention needs gradient_checkpointing full, got {self.gradient_checkpointing}")

    def _check_optimizer(self) -> None:
        try:
            check(self.optimizer, self.parallel, self.optimizer_in_backward, self.optimizer_on_cpu)
        except ValueError as error:
            raise UserError(str(error)) from error
        for name in ("optimizer_in_backward", "optimizer_on_cpu"):
            if getattr(self, name) and self.trainer != "torch":
                raise UserError(f"{name} needs trainer torch, got {self.trainer}")
        kind = KINDS[self.optimizer]
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
        if not self.optimizer_in_backward:
            return
        if self.grad_clip:
            raise UserError(
                f"optimizer_in_backward needs grad_clip 0, got {self.grad_clip:g}: when the norm is known, the steps "
                "are made"
            )
        if self.accumulate > 1:
            raise UserError(
                f"optimizer_in_backward needs accumulate 1, got {self.accumulate}: each backward makes a step"
            )
        if self.nonfinite != "stop":
            raise UserError(
                f"optimizer_in_backward needs nonfinite stop, got {self.nonfinite}: when a gradient is not finite, "
                "others have made their step"
            )

    def _check_adapters(self) -> None:
        """What is wrong with adapters whatever the model is; ``train/adapters.py`` checks the
        rest."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        alone = [name for name in ADAPTERS if getattr(self, name) != defaults[name]] if not self.lora else []
        if self.quantize and alone:
            raise UserError(
                f"quantize {self.quantize} needs lora, a rank of 1 or more: a quantised model cannot be trained whole"
            )
        if alone:
            raise UserError(f"{alone[0]} needs lora, a rank of 1 or more")
        names = self.lora_targets.split(",")
        if not all(name.strip() for name in names) or (len(names) > 1 and EVERY_LINEAR in map(str.strip, names)):
            raise UserError(
                f"lora_targets must be {EVERY_LINEAR}, or names of layers with commas between; got "
                f"{self.lora_targets!r}"
            )
        if self.lora and self.parallel == "tp":
            raise UserError("lora needs parallel none, ddp, fsdp2 or deepspeed: tp does not split adapters")
        if self.quantize and self.parallel not in ("none", "ddp"):
            raise UserError(f"quantize {self.quantize} needs parallel none or ddp, got {self.parallel}")
        # PEFT 0.21 with bitsandbytes 0.50 loses the scales in the second step
        if self.dora and self.quantize == "int8":
            raise UserError("dora needs quantize nf4, fp8 or none: with int8, DoRA loses the scales of the weights")

    def _check_fp8(self) -> None:
        if not self.fp8:
            if self.fp8_filter is not None or self.fp8_head:
                raise UserError(f"{'fp8_head' if self.fp8_head else 'fp8_filter'} needs fp8, a recipe")
            return
        if self.fp8_filter is not None and not all(name.strip() for name in self.fp8_filter.split(",")):
            raise UserError(f"fp8_filter must be names of layers with commas between; got {self.fp8_filter!r}")
        if self.kernels != "on":
            raise UserError(f"fp8 {self.fp8} needs kernels on")
        if self.lora:
            raise UserError(
                f"fp8 {self.fp8} trains the whole model: with lora, quantize fp8 stores the frozen model in FP8"
            )
        if self.parallel not in ("none", "ddp", "fsdp2"):
            why = (
                "scales would be those of a part of each row"
                if self.parallel in ULYSSES
                else "elsewhere weights are sharded while they are multiplied"
            )
            raise UserError(f"fp8 {self.fp8} needs parallel none, ddp or fsdp2, got {self.parallel}: {why}")

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 holds the weights."""
        return self.parallel in FULLY_SHARDED

    def sharing(self, world: int) -> int:
        """How many of ``world`` ranks read the same rows."""
        return (
            world if self.parallel == "tp" else self.sequence_parallel_size or world if self.parallel in ULYSSES else 1
        )

    @property
    def target_modules(self) -> str | list[str]:
        """``lora_targets`` in PEFT's form."""
        targets = self.lora_targets
        return targets if targets == EVERY_LINEAR else sorted({name.strip() for name in targets.split(",")})

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
        told = {"lora_alpha": self.alpha, "lora_targets": targets if isinstance(targets, str) else ",".join(targets)}
        return {name: told.get(name, getattr(self, name)) for name in ADAPTERS}

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else 2e-4 if self.lora else 2e-5 if self.model else 1e-3

    @property
    def reports(self) -> list[str]:
        return [name.strip() for name in self.report.split(",")] if self.report else []

    @property
    def kernel_flags(self) -> dict[str, Any]:
        """The kernels that are switched on or off by name; the model family decides about the
        others."""
        fields = [field.name for field in dataclasses.fields(self) if field.metadata["group"] == "kernels"]
        flags = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        del flags["kernels"]
        if self.fp8_filter:
            flags["fp8_filter"] = [name.strip() for name in self.fp8_filter.split(",")]
        return flags | ({"tiled_mlp": True} if self.tiled_mlp == 0 else {})

    def shown(self) -> dict[str, Any]:
        """Names and values without credentials, which may be written or reported."""
        return {
            name: redacted(value) if isinstance(value, str) else value
            for name, value in dataclasses.asdict(self).items()
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
        values = self.shown()
        as_yaml = lambda: _yaml().safe_dump(values, sort_keys=False)
        write(path, as_yaml() if _is_yaml(path) else json.dumps(values, indent=2) + "\n")

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
        raise UserError(f"cannot read {path}: {error.strerror}{'' if path.exists() else similar_file(path)}") from error
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
            f"{name} must be a name in UTF-8, as packages that write there need (with a locale that has only ASCII, "
            f"set PYTHONUTF8=1); got {value!r:.80}"
        )


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UserError("YAML configs need pyyaml: pip install pyyaml, or use JSON") from error
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


_METAVAR = {int: "N", float: "X", str: "NAME"}


def add_flags(parser: argparse.ArgumentParser, defaults: TrainConfig, fixed: tuple[str, ...]) -> None:
    """One flag per field, by group. A flag that is not given leaves no trace, so that config
    files and defaults show through."""
    groups: dict[str, Any] = {}
    for field in sorted(dataclasses.fields(TrainConfig), key=lambda f: GROUPS.index(f.metadata["group"])):
        if field.name in fixed:
            continue
        name, kind, choices = field.metadata["group"], _kinds(TrainConfig)[field.name][0], field.metadata["choices"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        options: dict[str, Any] = {"type": kind, "choices": choices, "metavar": None if choices else _METAVAR.get(kind)}
        groups[name].add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field, getattr(defaults, field.name)),
            **({"action": argparse.BooleanOptionalAction} if kind is bool else options),
        )


def _help(field: dataclasses.Field, default: Any) -> str:
    text = field.metadata["help"].replace("%", "%%")
    if default is None or isinstance(default, bool):
        return text
    return f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"


def from_flags(
    argv: list[str],
    prog: str = "liger train",
    description: str = "Train or fine-tune a causal language model.",
    defaults: TrainConfig | None = None,
    fixed: tuple[str, ...] = (),
) -> TrainConfig:
    """The configuration of a command line: flags override ``--config FILE``, which overrides the
    defaults. ``fixed`` names have no flag."""
    defaults = defaults or TrainConfig()
    return configured(read_flags(argv, prog, description, defaults, fixed), defaults)


def read_flags(
    argv: list[str], prog: str, description: str, defaults: TrainConfig, fixed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The flags that are given, without those of ``fixed`` names; ``--help`` shows ``defaults``."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--name value ...]",
        description=description,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with any of the names below; flags win over it"
    )
    add_flags(parser, defaults, fixed)
    return vars(parser.parse_args(argv))


def configured(flags: dict[str, Any], defaults: TrainConfig) -> TrainConfig:
    """The config that ``read_flags`` and the file that they name ask for."""
    path = flags.get("config")
    given = {name: value for name, value in flags.items() if name != "config"}
    return TrainConfig(**{**dataclasses.asdict(defaults), **(read_values(path) if path else {}), **given})


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(130, shutil.get_terminal_size().columns))
