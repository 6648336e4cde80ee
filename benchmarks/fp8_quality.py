"""Whether training in FP8 learns what training in bf16 learns:  python benchmarks/fp8_quality.py
DIR [--steps N] [--seeds N] [--recipes NAMES]

Trains models of 135 million parameters from scratch on the Python sources of the standard library,
PyTorch, Transformers and NumPy, by a BPE trained on them: AdamW over fp32 weights under autocast to
bf16, cosine schedule, gradients clipped to a norm of 1, 4096 tokens a step. "tensorwise+head" also
computes the output head and its loss in FP8. Every recipe and seed runs in a process of its own, on
the GPUs in turn, and sees the same rows of its seed. Then each recipe tunes the bf16 model of the
first seed. On a GPU, a step is recorded as a CUDA graph, so that processes that share a GPU do not
wait for their hosts. ``DIR/losses.csv`` and ``DIR/losses.png`` have the losses, the output the
losses of held-out text.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY, HELD_OUT = 8, 512, 16384, 64
MEAN = 25  # steps of which the table has one mean
UNRECORDED = 5  # steps before the one that is recorded


def prepare(folder: Path) -> None:
    """Write the tokens of all texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    packages = Path(torch.__file__).parents[1]
    roots = [Path(sysconfig.get_paths()["stdlib"]), *(packages / name for name in ("torch", "transformers", "numpy"))]
    files = sorted({f for root in roots for f in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    texts = [t for f in files if 500 < len(t := f.read_text(encoding="utf-8", errors="ignore")) < 200_000][:6000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts[:1500], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    np.save(
        folder / "tokens.npy",
        np.concatenate([np.asarray([*e.ids, 0], dtype=np.uint16) for e in tokenizer.encode_batch(texts)]),
    )


def train(folder: Path, recipe: str, seed: int, steps: int, layers: int, tuned: bool, record: bool) -> None:
    """One run; its losses and gradient norms go to a file of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_kernel.transformers import apply_liger_kernel_to_llama

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    rows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    learnt, held_out = rows[:-HELD_OUT], torch.from_numpy(rows[-HELD_OUT:].astype(np.int64))
    heads = dict(
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=LENGTH
    )
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            use_cache=False,
            **heads,
        )
    )
    model.to(device)
    if tuned:
        model.load_state_dict(torch.load(folder / "bf16-0.pt", map_location=device))
    kind, _, head = recipe.partition("+")
    fp8 = (
        {}
        if recipe == "bf16"
        else dict(fp8=kind, fp8_filter=lambda layer, name: "lm_head" not in name, fp8_head=bool(head))
    )
    apply_liger_kernel_to_llama(model=model, **fp8)
    peak, warmup = (1e-4, 20) if tuned else (6e-4, 100)
    gpu = device == "cuda"
    rate, x = torch.tensor(peak, device=device), torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=gpu, capturable=gpu
    )

    def step() -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm.detach()

    drawn, run = torch.Generator().manual_seed(1000 + seed), step
    losses, norms, times = [], [], []
    with (
        torch.cuda.stream(torch.cuda.Stream()) if gpu else contextlib.nullcontext()
    ):  # that of the recording, which PyTorch asks for
        for number in range(steps):
            rate.fill_(peak * min((number + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * number / steps))))
            chosen = torch.randint(0, len(learnt), (ROWS,), generator=drawn).numpy()
            x.copy_(torch.from_numpy(learnt[chosen].astype(np.int64)))
            if gpu and record and number == UNRECORDED:
                run = recorded(step)
            loss, norm = run()
            losses.append(loss.clone())
            norms.append(norm.clone())
            if number in (steps // 2, steps - 1):
                losses[-1].item()  # waits for the GPU
                times.append(time.perf_counter())
        milliseconds = 1e3 * (times[-1] - times[0]) / max(1, steps - 1 - steps // 2)
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        last = [model(input_ids=x.to(device), labels=x.to(device)).loss.item() for x in held_out.split(ROWS)]
    if (recipe, seed, tuned) == ("bf16", 0, False):
        torch.save(model.state_dict(), folder / "bf16-0.pt")
    found = dict(
        milliseconds=milliseconds,
        losses=torch.stack(losses).tolist(),
        norms=torch.stack(norms).tolist(),
        held_out=sum(last) / len(last),
    )
    (folder / f"{recipe}-{seed}{'-tuned' * tuned}.json").write_text(json.dumps(found))


def recorded(step: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """The step as a CUDA graph. What a call returns is valid until the next one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = step()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return found

    return replay


def run(folder: Path, runs: list[tuple[str, int]], steps: int, layers: int, tuned: bool, record: bool) -> None:
    """All runs at once, on the GPUs in turn."""
    gpus = itertools.cycle(range(max(1, torch.cuda.device_count())))
    command = [
        sys.executable,
        __file__,
        str(folder),
        "--steps",
        str(steps),
        "--layers",
        str(layers),
        *["--tuned"] * tuned,
        *["--eager"] * (not record),
        "--one",
    ]
    begun = [
        subprocess.Popen(
            [*command, recipe, str(seed)], env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
        )
        for (recipe, seed), gpu in zip(runs, gpus)
    ]
    if any([process.wait() for process in begun]):
        raise SystemExit("a run failed")


def means(folder: Path, runs: list[tuple[str, int]]) -> Iterator[tuple[str, int, int, float, float]]:
    """Recipe, seed, step, and the mean loss and largest gradient norm of the steps before it."""
    for recipe, seed in runs:
        found = json.loads((folder / f"{recipe}-{seed}.json").read_text())
        for end in range(MEAN, len(found["losses"]) + 1, MEAN):
            yield (
                recipe,
                seed,
                end,
                sum(found["losses"][end - MEAN : end]) / MEAN,
                max(found["norms"][end - MEAN : end]),
            )


def report(folder: Path, recipes: list[str], seeds: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(means(folder, list(itertools.product(recipes, range(seeds)))))
    with open(folder / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("recipe", "seed", "step", "loss", "largest_norm"),
                *((*row[:3], f"{row[3]:.4f}", f"{row[4]:.3f}") for row in rows),
            ]
        )
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, recipe in enumerate(recipes):
        for seed in range(seeds):
            line = [(step, loss) for name, of, step, loss, _ in rows if (name, of) == (recipe, seed)]
            axes.plot(*zip(*line), color=f"C{number}", linewidth=1, alpha=0.7, label=None if seed else recipe)
    axes.set(
        xlabel="step of 4096 tokens",
        ylabel=f"loss, mean of {MEAN} steps",
        title=f"135 M parameters from scratch, {seeds} seeds each",
    )
    axes.legend()
    figure.savefig(folder / "losses.png", dpi=120)
    for recipe in recipes:
        of = [round(json.loads((folder / f"{recipe}-{seed}.json").read_text())["held_out"], 4) for seed in range(seeds)]
        of_tuned = [
            round(json.loads(file.read_text())["held_out"], 4)
            for file in [folder / f"{recipe}-0-tuned.json"]
            if file.exists()
        ]
        took = json.loads((folder / f"{recipe}-0.json").read_text())["milliseconds"]
        print(f"{recipe}: held-out {of}, tuned {of_tuned}, {took:.1f} ms a step beside the other runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default="bf16,tensorwise,rowwise,tensorwise+head")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--one", nargs=2, metavar=("RECIPE", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--tuned", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        return train(a.folder, a.one[0], int(a.one[1]), a.steps, a.layers, a.tuned, not a.eager)
    a.folder.mkdir(parents=True, exist_ok=True)
    if not (a.folder / "tokens.npy").exists():
        prepare(a.folder)
    recipes = a.recipes.split(",")
    run(a.folder, list(itertools.product(recipes, range(a.seeds))), a.steps, a.layers, False, not a.eager)
    if "bf16" in recipes:
        run(a.folder, [(recipe, 0) for recipe in recipes], max(1, a.steps // 5), a.layers, True, not a.eager)
    report(a.folder, recipes, a.seeds)


if __name__ == "__main__":
    main()
