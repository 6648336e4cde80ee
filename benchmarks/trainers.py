"""Tokens/s, peak memory and losses of transformers' Trainer and TRL's SFT, DPO and GRPO trainers on
one GPU, with `use_liger_kernel` and without.

    python benchmarks/trainers.py off rows.jsonl
    python benchmarks/trainers.py on rows.jsonl        # whichever liger_kernel Python finds

A Llama-3.2-1B from random weights in bf16, SGD, random words, the same in every run. Needs
datasets, accelerate and trl. Adds a line a trainer to the file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

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


def tokenizer() -> PreTrainedTokenizerFast:
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **(BIG if GPU else SMALL),
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("cuda" if GPU else "cpu"):
        return LlamaForCausalLM(config).to(torch.bfloat16 if GPU else torch.float32)


class Clock(TrainerCallback):
    """When each step was over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Median of a step, the first two left out."""
        return statistics.median(b - a for a, b in zip(self.ends[1:], self.ends[2:]))


def trainers(common: dict[str, Any], length: int) -> dict[str, tuple[Any, int]]:
    """Name -> (how the trainer is made, tokens a step)."""
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    draw, words = random.Random(0), tokenizer()
    text = lambda n: " ".join(draw.choice(WORDS) for _ in range(n))
    ids = torch.randint(4, 1000, (4 * STEPS, length), generator=torch.Generator().manual_seed(0)).tolist()
    part = length // 8
    pairs = [
        dict(prompt=text(part), chosen=" " + text(3 * part), rejected=" " + text(3 * part)) for _ in range(2 * STEPS)
    ]
    prompts = [dict(prompt=text(PROMPT)) for _ in range(4 * STEPS)]
    variety = lambda completions, **_: [float(len(set(c))) for c in completions]

    def plain() -> Trainer:
        rows = Dataset.from_dict(dict(input_ids=ids, labels=ids))
        return Trainer(
            model=model(), args=TrainingArguments(per_device_train_batch_size=4, **common), train_dataset=rows
        )

    def sft() -> Trainer:
        args = SFTConfig(per_device_train_batch_size=4, max_length=length, **common)
        return SFTTrainer(
            model=model(), args=args, train_dataset=Dataset.from_dict(dict(input_ids=ids)), processing_class=words
        )

    def dpo() -> Trainer:
        args = DPOConfig(per_device_train_batch_size=2, max_length=length, **common)
        return DPOTrainer(
            model=model(), ref_model=model(), args=args, train_dataset=Dataset.from_list(pairs), processing_class=words
        )

    def grpo() -> Trainer:  # one generation, in the first step, that lasts for all
        more = dict(
            max_completion_length=COMPLETION, temperature=1.0, beta=0.0, num_generations=8, steps_per_generation=5
        )
        args = GRPOConfig(per_device_train_batch_size=8, **more, **{**common, "max_steps": 5})
        return GRPOTrainer(
            model=model(),
            reward_funcs=variety,
            args=args,
            train_dataset=Dataset.from_list(prompts),
            processing_class=words,
        )

    return {
        "Trainer": (plain, 4 * length),
        "SFT": (sft, 4 * length),
        "DPO": (dpo, 4 * 4 * part),
        "GRPO": (grpo, 8 * (PROMPT + COMPLETION)),
    }


def measured(make: Any, tokens: int) -> dict[str, Any]:
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    trainer = make()
    trainer.add_callback(clock)
    trainer.train()
    losses = [round(line["loss"], 4) for line in trainer.state.log_history if "loss" in line]
    peak = round(torch.cuda.max_memory_allocated() / 1e9, 2) if GPU else None
    return dict(tokens_per_s=round(tokens / clock.seconds()), peak_gb=peak, losses=losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flag", choices=("on", "off"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--trainers", default="Trainer,SFT,DPO,GRPO", help="comma-separated (default: %(default)s)")
    a = parser.parse_args()
    common = dict(
        output_dir="runs/trainers",
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=GPU,
        use_liger_kernel=a.flag == "on",
        optim="sgd",
        learning_rate=1e-3,
        seed=0,
        use_cpu=not GPU,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    spec = importlib.util.find_spec("liger_kernel")
    package = spec.origin if spec and a.flag == "on" else None
    made = trainers(common, 4096 if GPU else 32)
    for name in a.trainers.split(","):
        try:
            row = measured(*made[name])
        except Exception as error:
            traceback.print_exc()
            row = dict(failed=repr(error)[:200])
        line = json.dumps(dict(trainer=name, flag=a.flag, package=package, **row))
        print(line, flush=True)
        with a.file.open("a") as file:
            file.write(line + "\n")
        gc.collect()


if __name__ == "__main__":
    main()
