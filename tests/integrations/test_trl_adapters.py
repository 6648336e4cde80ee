"""TRL's trainers with ``use_liger_kernel`` and PEFT's adapters: the projection engine runs, and
metrics, gradients and adapters are as without it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
peft = pytest.importorskip("peft", reason="peft is not installed: make setup")

import adapters
from adapters import EVERY, Gradients
from hf_models import assert_same_learning, forget_training, make
from test_trl import MEANS, assert_same, reward, taught

from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import restore

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
FORWARD = [3, 1, 3]  # q, k, v; o; gate, up, down
SIZES = dict(vocab_size=64, num_hidden_layers=1, hidden_size=64, intermediate_size=64)
ENGINE = {"projections": True, "swiglu": True, "rope": False, "rms_norm": False}  # what else is ours: test_trl.py


@pytest.fixture(autouse=True)
def _served():
    """Kernels serve here, interpreted where there is no GPU: references have no engine."""
    yield
    restore()


GRPO = dict(num_generations=4, max_completion_length=6, num_iterations=2, max_steps=3, temperature=0.9, beta=0.04)
# trainer, rows, whether the model has adapters already, and how many forwards the engine runs
CASES = [
    # the reference is the base alone, by ``disable_adapter``: the engine runs the policy
    pytest.param("DPOTrainer", "pairs", False, {4}, marks=pytest.mark.smoke),
    # of adapters that are trained already, the reference is a copy, to which TRL switches
    ("DPOTrainer", "pairs", True, {8}),
    # log-probabilities of old policies and of the reference are computed without gradients
    ("GRPOTrainer", "prompts", False, range(6, 100)),
    ("GRPOTrainer", "prompts", True, range(6, 100)),
]


@pytest.mark.parametrize("trainer, kind, adapted, forwards", CASES)
def test_as_without_the_engine(tmp_path, monkeypatch, trainer, kind, adapted, forwards):
    ran = adapters.nodes_run(monkeypatch)
    lora = peft.LoraConfig(r=4, target_modules=EVERY, task_type="CAUSAL_LM", init_lora_weights=False)
    options, more = (GRPO, {"reward_funcs": reward}) if trainer == "GRPOTrainer" else ({}, {})
    runs, gradients, counts = [], [], []
    for use in (True, False):
        forget_training()
        model, seen = make("llama", **SIZES), Gradients()
        given = more | {"callbacks": [seen]} | ({} if adapted else {"peft_config": lora})
        if adapted:
            torch.manual_seed(0)
            model = peft.get_peft_model(model, lora)
        flags = {"liger_kernel_config": ENGINE} if use else {}
        runs.append(taught(tmp_path / str(use), trainer, kind, use, model, lambda g=given: g, **options, **flags))
        gradients.append(seen.found)
        counts.append(len(ran) // len(FORWARD))
    assert counts[0] == counts[1] and counts[0] in forwards and ran == FORWARD * counts[0]  # none without the flag
    assert_same(*runs, MEANS if trainer == "DPOTrainer" else (), listed=False)
    assert len(gradients[1]) >= 2 * 2 * len(EVERY)
    assert_same_learning(*gradients, 5e-5)
