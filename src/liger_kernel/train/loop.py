"""``train(config)``: one device, plain PyTorch, and no wait for the GPU between two log lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.data import Data, learnt_tokens, load
from liger_kernel.train.measure import PeakMemory, device_name
from liger_kernel.train.model import build, device_and_precision, save

UNTIMED = 2  # first steps, in which memory is reserved and kernels are compiled: no part of tokens/s


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, write ``config.out``/metrics.json and return what it holds: losses per step, tokens/s, peak memory and more."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    out = Path(config.out)
    config.save_to(out / "config.json")
    device, precision = device_and_precision(config)
    data = load(config)
    model = build(config, data.tokenizer, device, precision)
    if int(data.rows.ids.max()) >= model.config.get_text_config().vocab_size:
        raise UserError(f"the tokenizer has ids beyond the model's vocabulary of {model.config.get_text_config().vocab_size}")
    metrics = _Run(config, data, model, device, precision).train()
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    if config.save:
        save(model, data.tokenizer, config.save)
    return metrics


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to ``min_lr`` of the peak at the last step."""
    if step < config.warmup:
        return config.peak_lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    high = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[config.schedule]
    return config.peak_lr * (config.min_lr + (1 - config.min_lr) * high)


class _Run:
    def __init__(self, config: TrainConfig, data: Data, model: Any, device: torch.device, precision: str):
        self.config, self.data, self.model, self.device = config, data, model, device
        self.precision = precision
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = ([p for p in self.parameters if (p.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, config.beta2), fused=True)
        self.memory = PeakMemory(device)

    def train(self) -> dict[str, Any]:
        config = self.config
        losses: list[float] = []
        norms: list[float] = []
        evaluations: list[dict[str, float]] = []
        pending: list[Tensor] = []  # (loss, gradient norm) of the steps since the last log line, still on the device
        rates: list[float] = []
        tokens, seconds = 0, 0.0
        with _Progress(config.steps) as progress:
            started = self._clock()
            for step in range(config.steps):
                outcome, read = self._step(step)
                pending.append(outcome)
                tokens += read
                last = step + 1 == config.steps
                if step + 1 == UNTIMED or (step + 1) % config.log_every == 0 or last:
                    now = self._clock()
                    for loss, norm in torch.stack(pending).tolist():
                        losses.append(loss)
                        norms.append(norm)
                    pending.clear()
                    seconds += now - started
                    if step >= UNTIMED or config.steps <= UNTIMED:
                        rates.append(tokens / (now - started))
                    if not math.isfinite(losses[-1]):
                        raise UserError(f"the loss is {losses[-1]} at step {len(losses)}: lower the learning rate, or look at the data")
                    self.memory.pause()
                    if (step + 1) % config.log_every == 0 or last:
                        progress.show(step + 1, losses[-1], tokens / (now - started), self.memory.read())
                    tokens = 0
                    started = self._clock()
                if self.data.eval and (last or (config.eval_every and (step + 1) % config.eval_every == 0)):
                    before = self._clock()
                    evaluations.append({"step": step + 1, "loss": self._evaluate()})
                    progress.say(f"step {step + 1}: evaluation loss {evaluations[-1]['loss']:.4f}")
                    started += self._clock() - before
        return {
            "model": self.model.config.model_type,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "kernels": config.kernels,
            "device": device_name(self.device),
            "precision": self.precision,
            "tokens_per_second": statistics.median(rates),  # of the stretches between log lines: other programs disturb it less than the mean
            "seconds": seconds,
            "memory_kind": self.memory.kind,
            "peak_memory": self.memory.read(),
            "memory_before_training": self.memory.before,
            "losses": losses,
            "gradient_norms": norms,
            "learning_rates": [learning_rate(config, step) for step in range(config.steps)],
            "evaluations": evaluations,
        }

    def _step(self, step: int) -> tuple[Tensor, int]:
        """One optimizer step; (loss, gradient norm) on the device, and how many tokens were read."""
        config = self.config
        first = step * config.accumulate
        batches = [self.data.train_batch(index, config.batch, config.seed) for index in range(first, first + config.accumulate)]
        learnt = max(1, sum(map(learnt_tokens, batches)))
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            with self._autocast():
                part = self.model(**self._to_device(batch), use_cache=False, num_items_in_batch=learnt).loss
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        read = sum(int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel() for batch in batches)
        return torch.stack((loss, norm.float())), read

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss per learnt token of the rows kept back. It may store logits, hence is no part of the measured memory."""
        self.memory.pause()
        self.model.eval()
        total, learnt = torch.zeros((), device=self.device), 0
        for batch in self.data.eval_batches(self.config.batch):
            count = learnt_tokens(batch)
            with self._autocast():
                total += self.model(**self._to_device(batch), use_cache=False).loss * count
            learnt += count
        self.model.train()
        loss = float(total) / learnt
        self.memory.start()
        return loss

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type != "cuda":
            return {name: value.to(self.device) for name, value in batch.items()}
        return {name: value.pin_memory().to(self.device, non_blocking=True) for name, value in batch.items()}

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16-mixed" else contextlib.nullcontext()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Progress:
    """A bar on a terminal (with tqdm), lines elsewhere."""

    def __init__(self, steps: int):
        self.steps, self.bar = steps, None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                import tqdm

                self.bar = tqdm.tqdm(total=steps, dynamic_ncols=True, bar_format="{n}/{total} {bar:24} {elapsed}<{remaining}{postfix}")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, step: int, loss: float, rate: float, memory: int) -> None:
        text = f"loss {loss:.4f}  {rate:,.0f} tokens/s  {memory / 1e9:.2f} GB"
        if self.bar is None:
            print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)
        else:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)

    def say(self, text: str) -> None:
        print(text, flush=True) if self.bar is None else self.bar.write(text)
