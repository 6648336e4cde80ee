"""The right name that is nearest to a wrong one, by meaning or by spelling: what error messages
suggest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 60  # names that a message lists at most: all operators, and not all families

# Our flag -> what transformers, TRL, axolotl, LLaMA-Factory and others call it. A comma: the second
# name is that of other commands.
SYNONYMS = {
    "model": "model-name model-name-or-path base-model model-id",
    "hidden": "hidden-size",
    "intermediate": "intermediate-size",
    "layers": "num-layers num-hidden-layers",
    "heads": "num-heads num-attention-heads",
    "kv-heads": "num-key-value-heads",
    "vocab": "vocab-size",
    "attention": "attn-implementation flash-attn flash-attention sdp-attention",
    "lora": "lora-r lora-rank rank use-peft use-lora adapter finetuning-type",
    "lora-targets": "lora-target lora-target-modules target-modules lora-target-linear",
    "dora": "use-dora peft-use-dora",
    "rslora": "use-rslora peft-use-rslora",
    "quantize nf4": "load-in-4bit qlora",
    "quantize int8": "load-in-8bit",
    "quantize": "quantization quantization-bit",
    "data": "dataset datasets dataset-name dataset-dir data-path data-files train-file",
    "split": "dataset-split dataset-train-split",
    "limit": "max-samples max-train-samples",
    "tokenizer": "tokenizer-name tokenizer-name-or-path",
    "length,seq": "seq-len seq-length seqlen sequence-len sequence-length max-length max-len max-seq-len max-seq-length"
    " model-max-length block-size cutoff-len context-length",
    "packing documents": "sample-packing",
    "stream": "streaming dataset-streaming",
    "eval-fraction": "val-set-size val-size test-size",
    "steps": "max-steps train-steps num-steps epochs num-epochs num-train-epochs max-epochs",
    "batch": "batch-size train-batch-size micro-batch-size per-device-train-batch-size per-device-eval-batch-size",
    "accumulate": "gradient-accumulation-steps gradient-accumulation grad-accum accumulate-grad-batches",
    "global-batch": "global-batch-size",
    "optimizer": "optim",
    "lr": "learning-rate",
    "beta2": "adam-beta2 betas",
    "grad-clip": "max-grad-norm gradient-clipping gradient-clip-val",
    "schedule": "lr-scheduler lr-scheduler-type scheduler",
    "warmup": "warmup-steps warmup-ratio num-warmup-steps",
    "min-lr": "min-lr-rate cosine-min-lr-ratio",
    "kernels": "use-liger use-liger-kernel enable-liger-kernel",
    "rope": "liger-rope",
    "rms-norm": "liger-rms-norm",
    "swiglu": "liger-glu-activation liger-swiglu",
    "cross-entropy": "liger-cross-entropy",
    "fused-linear-cross-entropy": "liger-fused-linear-cross-entropy",
    "parallel": "fsdp deepspeed ddp strategy tensor-parallel-size",
    "sequence-parallel-size": "sequence-parallel-degree context-parallel-size",
    "nproc": "nproc-per-node num-processes num-gpus gpus devices",
    "nnodes": "num-machines num-nodes",
    "timeout": "ddp-timeout",
    "checkpoint-every": "save-steps save-strategy saves-per-epoch",
    "checkpoint-keep": "save-total-limit",
    "resume": "resume-from-checkpoint auto-resume-from-checkpoints",
    "compile": "torch-compile",
    "report": "report-to log-with",
    "out": "output output-dir out-dir save-dir",
    "cache": "cache-dir dataset-prepared-path",
    "precision bf16-mixed": "bf16",
    "precision": "dtype torch-dtype mixed-precision fp16",
    "deterministic": "full-determinism",
    "log-every": "logging-steps log-interval",
    "eval-every": "eval-steps eval-strategy evals-per-epoch",
}


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most like ``name``, whatever its case; None if none is like
    it (``difflib``'s ratio is below ``cutoff``)."""
    plain = {each.casefold(): each for each in names}
    found = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant(name: str, names: Iterable[str]) -> str | None:
    """What others' flag ``name`` is called among ``names``, with a value if it implies one; ""
    if none of these does it, None if it is no such flag."""
    form = lambda flag: flag.lstrip("-").replace("_", "-").casefold()
    ours, name = {form(each): each for each in names}, form(name)
    for flags, theirs in SYNONYMS.items():
        if name in theirs.split() or name in flags.split(",")[1:]:
            split = map(str.split, flags.split(","))
            return next((" ".join([ours[flag], *value]) for flag, *value in split if flag in ours), "")
    return None


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean rms_norm?``, or nothing."""
    names = list(names)
    near = meant(name, names) or nearest(name, names, cutoff)
    return f"; did you mean {near}?" if near else ""


def no_such(kind: str, name: str, names: Iterable[str]) -> str:
    """``no operator 'rms_nrm'; did you mean rms_norm?``, or, where no name is near, all of them."""
    names = list(names)
    listed = f"; there are {', '.join(names)}" if len(names) <= MANY else ""
    return f"no {kind} {name!r:.80}{did_you_mean(name, names) or listed}"
