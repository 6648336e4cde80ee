"""The right name that is nearest to a wrong one, by meaning or by spelling: what error messages
suggest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 60  # names that a message lists at most: all operators, and not all families

# Our flag -> what transformers, TRL, axolotl, LLaMA-Factory and others call it, with the same values in
# the same sense: `liger train` and `liger fit` take these names. A comma: the second name is that of
# other commands.
ALIASES = {
    "model": "model-name model-name-or-path pretrained-model-name-or-path base-model model-id",
    "hidden": "hidden-size",
    "intermediate": "intermediate-size",
    "layers": "num-layers num-hidden-layers",
    "heads": "num-heads num-attention-heads",
    "kv-heads": "num-key-value-heads",
    "vocab": "vocab-size",
    "attention": "attn-implementation",
    "lora": "lora-r lora-rank",
    "data": "dataset dataset-name dataset-name-or-path dataset-path data-path train-file train-data",
    "split": "dataset-split dataset-train-split",
    "eval-data": "eval-dataset eval-file validation-file validation-data val-file",
    "eval-split": "dataset-test-split",
    "limit": "max-samples max-train-samples",
    "tokenizer": "tokenizer-name tokenizer-name-or-path",
    "length,seq": "seq seq-len seq-length seqlen sequence-len sequence-length max-length max-len max-seq-len"
    " max-seq-length model-max-length block-size cutoff-len context-length",
    "eval-fraction": "val-set-size val-size test-size",
    "steps": "max-steps train-steps num-steps",
    "epochs": "num-epochs num-train-epochs max-epochs",
    "batch": "micro-batch-size per-device-train-batch-size",
    "accumulate": "gradient-accumulation-steps grad-accum accumulate-grad-batches",
    "global-batch": "global-batch-size",
    "lr": "learning-rate",
    "beta2": "adam-beta2",
    "grad-clip": "max-grad-norm gradient-clip-val",
    "warmup": "warmup-steps num-warmup-steps",
    "nproc": "nproc-per-node",
    "nnodes": "num-machines num-nodes",
    "checkpoint-every": "save-steps",
    "checkpoint-keep": "save-total-limit",
    "report": "report-to log-with",
    "cache": "dataset-prepared-path",
    "log-every": "logging-steps log-interval",
    "eval-every": "eval-steps",
}
# Our flag, or one with a value -> names that have other values, or nearly the same sense, which are
# answered with ours.
SYNONYMS = {
    "attention": "flash-attn flash-attention sdp-attention",
    "lora": "rank use-peft use-lora adapter finetuning-type",
    "lora-targets": "lora-target lora-target-modules target-modules lora-target-linear",
    "dora": "use-dora peft-use-dora",
    "rslora": "use-rslora peft-use-rslora",
    "quantize nf4": "load-in-4bit qlora",
    "quantize int8": "load-in-8bit",
    "quantize": "quantization quantization-bit",
    "data": "datasets dataset-dir data-files",
    "packing documents": "sample-packing",
    "stream": "streaming dataset-streaming",
    "batch": "batch-size train-batch-size per-device-eval-batch-size eval-batch-size",
    "accumulate": "gradient-accumulation",
    "optimizer": "optim",
    "beta2": "betas",
    "grad-clip": "gradient-clipping",
    "schedule": "lr-scheduler lr-scheduler-type scheduler",
    "warmup": "warmup-ratio",
    "min-lr": "min-lr-rate cosine-min-lr-ratio",
    "kernels": "use-liger use-liger-kernel enable-liger-kernel",
    "rope": "liger-rope",
    "rms-norm": "liger-rms-norm",
    "swiglu": "liger-glu-activation liger-swiglu",
    "cross-entropy": "liger-cross-entropy",
    "fused-linear-cross-entropy": "liger-fused-linear-cross-entropy",
    "parallel": "fsdp deepspeed ddp strategy tensor-parallel-size",
    "sequence-parallel-size": "sequence-parallel-degree context-parallel-size",
    "nproc": "num-processes num-gpus gpus devices",
    "timeout": "ddp-timeout",
    "checkpoint-every": "save-strategy saves-per-epoch",
    "resume": "resume-from-checkpoint auto-resume-from-checkpoints",
    "compile": "torch-compile",
    "out": "output output-dir out-dir save-dir",
    "cache": "cache-dir",
    "precision bf16-mixed": "bf16",
    "precision": "dtype torch-dtype mixed-precision fp16",
    "deterministic": "full-determinism",
    "eval-every": "eval-strategy evals-per-epoch evaluation-strategy",
    "samples": "num-samples",
    "columns": "dataset-text-field column-mapping dataset-field",
}


def flag_form(name: str) -> str:
    """``learning_rate``, ``--Learning-Rate`` -> ``learning-rate``."""
    return name.lstrip("-").replace("_", "-").casefold()


ALIAS = {name: ours.split(",")[0] for ours, theirs in ALIASES.items() for name in theirs.split()}


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most like ``name``, whatever its case; None if none is like
    it (``difflib``'s ratio is below ``cutoff``)."""
    plain = {each.casefold(): each for each in names}
    found = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant(name: str, names: Iterable[str]) -> str | None:
    """What others' flag ``name`` is called among ``names``, with a value if it implies one; ""
    if none of these does it, None if it is no such flag."""
    ours, name = {flag_form(each): each for each in names}, flag_form(name)
    for flags, theirs in (*ALIASES.items(), *SYNONYMS.items()):
        if name in theirs.split() or name in flags.split(",")[1:]:
            split = map(str.split, flags.split(","))
            return next((" ".join([ours[flag], *value]) for flag, *value in split if flag in ours), "")
    return None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean rms_norm?``, or nothing."""
    names = list(names)
    near = meant(name, names) or nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def no_such(kind: str, name: str, names: Iterable[str]) -> str:
    """``no operator 'rms_nrm'; did you mean rms_norm?``, or, where no name is near, all of them."""
    names = list(names)
    listed = f"; there are {', '.join(names)}" if len(names) <= MANY else ""
    return f"no {kind} {name!r:.80}{did_you_mean(name, names) or listed}"
