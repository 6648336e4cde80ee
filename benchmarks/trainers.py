"""Step time, peak memory and losses of transformers' Trainer and TRL's trainers on one GPU: without
`use_liger_kernel`, with it, and with it but TRL's own head (`fused_logprobs=False`).

    python benchmarks/trainers.py rows.jsonl
    python benchmarks/trainers.py rows.jsonl --trainers SFT,DPO --adapters lora --repeats 2
    python benchmarks/trainers.py rows.jsonl --variants off,on --package liger-kernel-0.8.5/src
    python benchmarks/trainers.py rows.jsonl --fp32          # how far losses are from those of `off`

A Llama-3.2-1B from random weights in bf16, all of it or LoRA of rank 16 on every linear layer, SGD,
random words, the same in every run. A step's time is that of the trainer's `training_step`s and
optimizer, without generation where a trainer generates once for several steps. Needs datasets,
accelerate, peft and trl. Adds a line for each run to the file, and prints a table at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

GPU = torch.cuda.is_available()
WORDS = [f"w{i}" for i in range(1000)]
BIG = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=500000.0,
)
SMALL = dict(
    vocab_size=1100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEPS, PROMPT, COMPLETION = 8, 64, 256
LORA = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
DTYPE = torch.bfloat16
draw = random.Random(0)


def tokenizer() -> PreTrainedTokenizerFast:
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **(BIG if GPU else SMALL),
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("cuda" if GPU else "cpu"):
        return LlamaForCausalLM(config).to(DTYPE)


class Clock(TrainerCallback):
    """When each step was over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each step but the first two, which compile kernels."""
        return [b - a for a, b in zip(self.ends[1:], self.ends[2:])]


@dataclasses.dataclass
class Kind:
    """A trainer of TRL: its class, tokens a step, and what it gets beside the model."""

    trainer: str
    rows: int
    tokens: int
    data: Callable[[], list[dict[str, Any]]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    more: Callable[[], dict[str, Any]] = dict


def kinds(length: int) -> dict[str, Kind]:
    text = lambda n: " ".join(draw.choice(WORDS) for _ in range(n))
    ids = lambda: [draw.randrange(4, 1000) for _ in range(length)]
    part, answer = length // 8, 3 * length // 8
    prompt, completion = (PROMPT, COMPLETION) if GPU else (4, 8)
    variety = lambda completions, **_: [float(len(set(c))) for c in completions]
    pair = lambda: dict(prompt=text(part), chosen=" " + text(answer), rejected=" " + text(answer))
    one = lambda i: dict(prompt=text(part), completion=" " + text(answer), label=bool(i % 2))
    asked = lambda: [dict(prompt=text(prompt)) for _ in range(4 * STEPS)]
    generated = dict(max_completion_length=completion, temperature=1.0)
    group = dict(beta=0.0, num_generations=8, steps_per_generation=STEPS, **generated)
    most = dict(max_length=length)
    return {
        "Trainer": Kind(
            "Trainer", 4, 4 * length, lambda: [dict(input_ids=x, labels=x) for x in (ids() for _ in range(4 * STEPS))]
        ),
        "SFT": Kind("SFTTrainer", 4, 4 * length, lambda: [dict(input_ids=ids()) for _ in range(4 * STEPS)], most),
        "DPO": Kind("DPOTrainer", 2, 4 * (part + answer), lambda: [pair() for _ in range(2 * STEPS)], most),
        "KTO": Kind("KTOTrainer", 4, 4 * (part + answer), lambda: [one(i) for i in range(4 * STEPS)], most),
        "ORPO": Kind("ORPOTrainer", 2, 4 * (part + answer), lambda: [pair() for _ in range(2 * STEPS)], most),
        # one generation, in the first step, that lasts for all
        "GRPO": Kind("GRPOTrainer", 8, 8 * (prompt + completion), asked, group, lambda: {"reward_funcs": variety}),
        "Distillation": Kind(
            "DistillationTrainer", 8, 8 * (prompt + completion), asked, generated, lambda: {"teacher_model": model(1)}
        ),
    }


def made(kind: Kind, lora: bool, **common: Any) -> Trainer:
    """The trainer, whose step has as many tokens as ``kind`` says."""
    draw.seed(0)  # the same rows in every run
    data = Dataset.from_list(kind.data())
    if kind.trainer == "Trainer":
        args = TrainingArguments(per_device_train_batch_size=kind.rows, **common)
        return Trainer(model=peft.get_peft_model(model(), LORA) if lora else model(), args=args, train_dataset=data)
    import trl

    module = trl
    if not hasattr(trl, kind.trainer):
        module = importlib.import_module(f"trl.experimental.{kind.trainer.removesuffix('Trainer').lower()}")
    cls, config = getattr(module, kind.trainer), getattr(module, kind.trainer.replace("Trainer", "Config"))
    more = kind.more() | ({"peft_config": LORA} if lora else {})
    if kind.trainer in ("DPOTrainer", "KTOTrainer") and not lora:
        more["ref_model"] = model()
    args = config(per_device_train_batch_size=kind.rows, **common, **kind.options)
    return cls(model=model(), args=args, train_dataset=data, processing_class=tokenizer(), **more)


def measured(kind: Kind, lora: bool, **common: Any) -> dict[str, Any]:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    torch.manual_seed(0)
    trainer = made(kind, lora, **common)
    trainer.add_callback(clock)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    peak = round(torch.cuda.max_memory_allocated() / 1e9, 2) if GPU else None
    seconds = clock.seconds()
    median = statistics.median(seconds)
    ms = dict(step_ms=round(median * 1e3, 2), least_ms=round(min(seconds) * 1e3, 2))
    return dict(tokens_per_s=round(kind.tokens / median), **ms, peak_gb=peak, losses=losses)


def table(rows: list[dict[str, Any]]) -> str:
    """For each trainer a line for each variant: median of the runs, and beside ``off``."""
    lines = [
        f"{'trainer':18} {'':5} {'variant':7} {'step ms':>9} {'least':>9} {'tokens/s':>9} {'peak GB':>8}  loss - off"
    ]
    for key in dict.fromkeys((row["trainer"], row["adapters"], row["variant"]) for row in rows):
        runs = [row for row in rows if (row["trainer"], row["adapters"], row["variant"]) == key]
        good = [row for row in runs if "failed" not in row]
        if not good:
            lines.append(f"{key[0]:18} {key[1]:5} {key[2]:7} {runs[0]['failed']}")
            continue
        off = [r for r in rows if (r["trainer"], r["adapters"], r["variant"]) == (*key[:2], "off") and "losses" in r]
        apart = [max(map(lambda a, b: abs(a - b), row["losses"], off[0]["losses"])) for row in good if off]
        median = statistics.median(row["step_ms"] for row in good)
        tokens = statistics.median(row["tokens_per_s"] for row in good)
        least, peak = min(row["least_ms"] for row in good), max(row["peak_gb"] or 0 for row in good)
        farthest = f"{max(apart):.1e}" if apart else ""
        lines.append(
            f"{key[0]:18} {key[1]:5} {key[2]:7} {median:9.1f} {least:9.1f} {tokens:9.0f} {peak:8.2f}  {farthest}"
        )
    return "\n".join(lines)


def main() -> None:
    global DTYPE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--trainers", default="Trainer,SFT,DPO,KTO,GRPO,Distillation,ORPO", help="(default: %(default)s)"
    )
    parser.add_argument("--adapters", default="full,lora", help="comma-separated (default: %(default)s)")
    parser.add_argument("--variants", default="off,layers,on", help="comma-separated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, in turns (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096 if GPU else 32, help="tokens a row (default: %(default)s)")
    parser.add_argument("--package", help="folder with another liger_kernel, which `on` then uses")
    parser.add_argument("--fp32", action="store_true", help="fp32 weights, without autocast")
    a = parser.parse_args()
    if a.package:
        sys.path.insert(0, a.package)
    DTYPE = torch.float32 if a.fp32 or not GPU else torch.bfloat16
    common = dict(
        output_dir="runs/trainers",
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=torch.bfloat16 == DTYPE,
        optim="sgd",
        learning_rate=1e-3,
        seed=0,
        use_cpu=not GPU,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    kinds_of, rows = kinds(a.length), []
    choices = itertools.product(a.trainers.split(","), a.adapters.split(","), range(a.repeats), a.variants.split(","))
    for name, adapters, _, variant in choices:
        flag: dict[str, Any] = {"use_liger_kernel": variant != "off"}
        if variant == "layers" and name != "Trainer":
            flag["liger_kernel_config"] = {"fused_logprobs": False}
        try:
            row = measured(kinds_of[name], adapters == "lora", **common, **flag)
        except Exception as error:
            traceback.print_exc()
            row = dict(failed=repr(error)[:200])
        rows.append(dict(trainer=name, adapters=adapters, variant=variant, package=a.package, **row))
        print(json.dumps(rows[-1]), flush=True)
        with a.file.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        if not a.package and variant != "off":
            importlib.import_module("liger_kernel.transformers").restore()
    print(table(rows))


if __name__ == "__main__":
    main()
