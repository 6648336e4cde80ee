"""``Trainer(use_liger_kernel=True)``: every number that it logs, and every weight it ends with,
as without the flag."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import DEVICE, make, tokens
from quick import further
from torch import nn

from liger_kernel.transformers.patching.patches import is_patched
from liger_kernel.transformers.recognise.tiny import VOCAB

FLAGS = dict(rope=False, swiglu=None, geglu=True, cross_entropy=True, fused_linear_cross_entropy=False, unheard_of=1)
LOGGED = "loss", "eval_loss", "grad_norm", "eval_accuracy"


class Rows(torch.utils.data.Dataset):
    """Sequences of different numbers of labels, so that it matters what a loss is divided by."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = {k: v[0].cpu() for k, v in tokens(1, 12, seed=i, ignored=1 + i).items()}
        return row | {"attention_mask": torch.ones(12, dtype=torch.long)}


class Run:
    def __init__(
        self, folder: Path, use_liger_kernel: bool, model: nn.Module | None = None, times: int = 1, resume: Any = False,
        **more: Any,
    ):  # fmt: skip
        self.model = make("llama") if model is None else model
        own = {k: more.pop(k) for k in ("compute_metrics", "compute_loss_func", "callbacks") if k in more}
        how = dict(max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=2, logging_steps=1)
        how |= dict(per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=1, save_strategy="no")
        how |= dict(report_to=[], disable_tqdm=True, learning_rate=0.1, optim="sgd", use_cpu=DEVICE == "cpu")
        args = transformers.TrainingArguments(str(folder), use_liger_kernel=use_liger_kernel, **(how | more))
        self.trainer = transformers.Trainer(self.model, args, train_dataset=Rows(), eval_dataset=Rows(), **own)
        for _ in range(times):
            self.trainer.train(resume_from_checkpoint=resume)
        self.logs = [{k: e[k] for k in LOGGED if k in e} for e in self.trainer.state.log_history]
        self.weights = {n: p.detach().float() for n, p in self.model.state_dict().items()}

    @property
    def patched(self) -> bool:
        return any(is_patched(m) for m in self.model.modules())


def assert_same(ours: Run, stock: Run, rough: bool = False) -> None:
    assert ours.patched and not stock.patched
    assert len(ours.logs) == len(stock.logs) > 2
    tolerances = dict(rtol=3e-2, atol=3e-3) if rough else dict(rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(ours.logs, stock.logs, **tolerances)
    if not rough:
        torch.testing.assert_close(ours.weights, stock.weights, rtol=1e-4, atol=1e-5)


def accuracy(prediction: Any) -> dict[str, float]:
    assert prediction.predictions.shape == (8, 12, VOCAB), "predictions are the logits alone"
    return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}


def halved(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / 2 / (num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prediction_loss_only": True},
        {"compute_metrics": accuracy, "label_smoothing_factor": 0.1},
        {"compute_loss_func": halved},
        {"bf16": True},
        {"liger_kernel_config": FLAGS},
        *further(
            {"gradient_accumulation_steps": 1, "max_steps": 3, "weight_decay": 0.1},
            {"compute_metrics": accuracy},
            {"label_smoothing_factor": 0.1, "prediction_loss_only": True},
            {"gradient_checkpointing": True},
            {"times": 2},
            {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 1},
        ),
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_as_without_the_flag(tmp_path, more):
    config = {k: more[k] for k in ("liger_kernel_config",) if k in more}
    plain = {k: v for k, v in more.items() if k not in config}
    model = lambda: make("llama", num_hidden_layers=1 if "torch_compile" in more else 2)
    ours, stock = Run(tmp_path, True, model(), **plain, **config), Run(tmp_path, False, model(), **plain)
    assert_same(ours, stock, rough="bf16" in more)


def test_columns_and_what_is_left_out(tmp_path):
    """No logits in training, nor in evaluation without metrics; ``forward`` stays a method."""
    run = Run(tmp_path, True, max_steps=1, eval_strategy="no")
    model = run.model
    assert model.forward.__self__ is model
    assert {"labels", "input_ids", "kwargs"} <= inspect.signature(model.forward).parameters.keys()
    assert model.train()(**tokens()).logits is None
    assert model.eval()(**tokens()).logits is not None
    assert model.eval()(**tokens(), skip_logits=True).logits is None
    assert run.trainer.evaluate()["eval_loss"] > 0


def test_state_dict_and_resume(tmp_path):
    """Checkpoints are those of the stock model; a training goes on as if uninterrupted."""
    schedule = dict(max_steps=4, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
    whole = Run(tmp_path / "whole", True, **schedule)
    stock = Run(tmp_path / "stock", False, **schedule)
    assert_same(whole, stock)
    assert whole.model.state_dict().keys() == make("llama").state_dict().keys()
    loaded = type(whole.model).from_pretrained(tmp_path / "whole" / "checkpoint-4")
    assert all(torch.equal(p.detach().float().cpu(), whole.weights[n].cpu()) for n, p in loaded.state_dict().items())
    resumed = Run(tmp_path / "whole", True, resume=str(tmp_path / "whole" / "checkpoint-2"), **schedule)
    torch.testing.assert_close(resumed.weights, whole.weights)
    torch.testing.assert_close(resumed.logs[-3:], whole.logs[-3:])


@pytest.mark.parametrize("model_type", ["gpt2", "bert-generation"])
def test_models_with_little_to_swap(tmp_path, model_type):
    ours, stock = (Run(tmp_path, use, make(model_type), max_steps=1, eval_strategy="no") for use in (True, False))
    torch.testing.assert_close(ours.logs, stock.logs, rtol=2e-5, atol=1e-5)
