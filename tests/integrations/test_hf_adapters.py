"""``Trainer(use_liger_kernel=True)`` with PEFT's adapters: the projection engine runs, and logs,
gradients and adapters are as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed: make setup")

import adapters
from adapters import EVERY, Gradients
from hf_models import DEVICE, assert_same_learning, forget_training, make
from quick import further
from test_hf_trainer import Run, assert_same

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


def checkpoints(reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


@pytest.mark.parametrize(
    ("more", "lora", "flags", "forwards"),
    [
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 8}, {}, {}, 6),
        (checkpoints(False), {"lora_dropout": 0.5}, {}, 8),
        ({}, {}, {"projections": False, "swiglu": False, "rms_norm": True}, 0),
        # the forward of a reentrant checkpoint has no gradients; its masks must be those of the
        # recomputation
        *further((checkpoints(True), {"lora_dropout": 0.5}, {}, 8)),
    ],
    ids=["evaluation", "checkpoints", "projections=False", "reentrant"],
)
def test_as_without_the_flag(tmp_path, monkeypatch, more, lora, flags, forwards):
    """Two steps of two batches each, an evaluation after each."""
    ran, runs, gradients = adapters.nodes_run(monkeypatch), [], []
    for use in (True, False):
        forget_training()
        model, seen = make("llama", num_hidden_layers=1), Gradients()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=EVERY, task_type="CAUSAL_LM", **lora)
        model = adapters.drawn(peft.get_peft_model(model, config)).to(DEVICE)
        model.enable_input_require_grads()  # for reentrant checkpoints; newer transformers do that themselves
        how = {"eval_strategy": "no", "callbacks": [seen], "liger_kernel_config": LAYERS_ALONE | flags} | more
        runs.append(Run(tmp_path, use, model, **how))
        gradients.append(seen.found)
        assert ran == FORWARD * forwards
    assert_same(*runs)
    assert len(gradients[1]) == 2 * 2 * len(EVERY)
    assert_same_learning(*gradients, 2e-5)
