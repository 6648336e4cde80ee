"""``Trainer(use_liger_kernel=True)`` with PEFT's adapters: the projection engine runs, and logs,
gradients and adapters are as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed: make setup")

import adapters
from adapters import EVERY, Gradients, assert_rounds_as
from hf_models import DEVICE, assert_same_learning, forget_training, make
from quick import further
from test_hf_trainer import Run, assert_same
from torch import nn

from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import restore

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
FORWARD = [3, 1, 3]  # q, k, v; o; gate, up, down
# what else is ours: test_hf_trainer.py
LAYERS_ALONE = dict(rope=False, rms_norm=False, fused_linear_cross_entropy=False)


@pytest.fixture(autouse=True)
def _served():
    """Kernels serve here, interpreted where there is no GPU: references have no engine."""
    yield
    restore()


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    return adapters.nodes_run(monkeypatch)


def adapted(dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    model = make("llama", dtype, num_hidden_layers=1)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=EVERY, task_type="CAUSAL_LM", **more)
    model = adapters.drawn(peft.get_peft_model(model, config)).to(DEVICE)
    model.enable_input_require_grads()  # for reentrant checkpoints; newer transformers do that themselves
    return model


class Adapted(Run):
    """A training, and the ``gradients`` of its steps."""

    def __init__(self, folder: Path, ours: bool, model: nn.Module | None = None, **more: Any):
        forget_training()
        seen = Gradients()
        flags = {"liger_kernel_config": LAYERS_ALONE | more.pop("flags", {})}
        model, evaluates = adapted() if model is None else model, more.pop("eval_strategy", "no")
        super().__init__(folder, ours, model, callbacks=[seen], eval_strategy=evaluates, **flags, **more)
        self.gradients = seen.found


def assert_learns_the_same(ours: Adapted, stock: Adapted) -> None:
    assert_same(ours, stock)
    assert len(stock.gradients) == 2 * 2 * len(EVERY)
    assert_same_learning(ours.gradients, stock.gradients, 2e-5)


def checkpoints(reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


@pytest.mark.parametrize(
    ("more", "lora", "forwards"),
    [
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 8}, {}, 6),
        (checkpoints(False), {"lora_dropout": 0.5}, 8),
        ({"flags": {"projections": False, "swiglu": False, "rms_norm": True}}, {}, 0),
        # the forward of a reentrant checkpoint has no gradients; its masks must be those of the
        # recomputation
        *further((checkpoints(True), {"lora_dropout": 0.5}, 8)),
    ],
    ids=["evaluation", "checkpoints", "projections=False", "reentrant"],
)
def test_as_without_the_flag(tmp_path, ran, more, lora, forwards):
    """Two steps of two batches each, an evaluation after each."""
    ours = Adapted(tmp_path, True, adapted(**lora), **more)
    assert ran == FORWARD * forwards
    stock = Adapted(tmp_path, False, adapted(**lora), **more)
    assert ran == FORWARD * forwards
    assert_learns_the_same(ours, stock)


@pytest.mark.parametrize("dtype", [torch.float32, *further(torch.bfloat16)])
def test_under_autocast(tmp_path, ran, dtype):
    """``bf16=True``: as near to fp32 as stock."""
    ours, stock = (
        Adapted(tmp_path, use, adapted(dtype), bf16=True, eval_strategy="steps", per_device_eval_batch_size=8)
        for use in (True, False)
    )
    assert ran == FORWARD * 6
    truth = Adapted(tmp_path, False, adapted(dtype).float()).gradients
    assert_same(ours, stock, rough=True)
    assert_rounds_as(ours.gradients, stock.gradients, truth)
