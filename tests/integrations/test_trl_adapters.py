"""TRL's trainers with ``use_liger_kernel`` and PEFT's adapters: the projection engine runs, and
metrics, gradients and adapters are as without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
peft = pytest.importorskip("peft", reason="peft is not installed: make setup")

import adapters
from adapters import EVERY, Gradients, assert_rounds_as
from hf_models import DEVICE, assert_same_learning, forget_training, make
from test_trl import FUSED, MEANS, assert_same, reward, taught
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import restore

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
FORWARD = [3, 1, 3]  # q, k, v; o; gate, up, down
# bitsandbytes' kernel for CPUs is wrong where a block of 64 values goes on in the next row
SIZES = dict(vocab_size=64, num_hidden_layers=1, hidden_size=64, intermediate_size=64)
ENGINE = {"projections": True, "swiglu": True, "rope": False, "rms_norm": False}  # what else is ours: test_trl.py


@pytest.fixture(autouse=True)
def _served():
    """Kernels serve here, interpreted where there is no GPU: references have no engine."""
    yield
    restore()


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    return adapters.nodes_run(monkeypatch)


def lora(**more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=EVERY, task_type="CAUSAL_LM", init_lora_weights=False, **more)


def trained(
    folder: Path, trainer: str, kind: str, ours: bool, model: nn.Module | None = None, config: Any = None,
    **options: Any,
):  # fmt: skip
    """As ``taught``, and the gradients of all steps."""
    seen, extra = Gradients(), options.pop("trainer_kwargs", {})
    handed = lambda: {"callbacks": [seen], **extra, **({} if config is None else {"peft_config": config})}
    if ours:
        options["liger_kernel_config"] = ENGINE
    model = make("llama", **SIZES) if model is None else model
    forget_training()
    return taught(folder, trainer, kind, ours, model, handed, **options), seen.found


def compared(
    folder: Path, ran: list[int], trainer: str, kind: str, differ: tuple[str, ...] = (), model: Any = lambda: None,
    **options: Any,
) -> int:  # fmt: skip
    """Train with the flag and without, and compare; returns how many forwards the engine ran."""
    ours = trained(folder / "ours", trainer, kind, True, model(), **options)
    forwards = len(ran) // len(FORWARD)
    assert ran == FORWARD * forwards
    stock = trained(folder / "stock", trainer, kind, False, model(), **options)
    assert_same(ours[0], stock[0], differ, listed=False)
    assert len(stock[1]) >= 2 * 2 * len(EVERY)
    assert_same_learning(ours[1], stock[1], 5e-5)
    assert len(ran) == len(FORWARD) * forwards
    return forwards


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(make("llama", **SIZES), lora())


# -- QLoRA ---------------------------------------------------------------------------------


def four_bits(folder: Path, compute: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model in NF4 with adapters of 16 bits, the rest in fp32, and the same model in fp32."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make setup")
    make("llama", **SIZES).save_pretrained(folder)
    double = dict(bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **double)
    where = dict(dtype=torch.bfloat16, device_map={"": DEVICE})
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=how, **where)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert {p.dtype for n, p in model.named_parameters() if "norm" in n or "embed" in n} == {torch.float32}
    twin = make("llama", **SIZES)
    for p, stored in zip(twin.parameters(), model.parameters()):
        dense = stored.data
        if hasattr(stored, "quant_state"):
            dense = bnb.functional.dequantize_4bit(stored.data, stored.quant_state)
        p.data = dense.float()
    pair = []
    for each in (model, twin):
        torch.manual_seed(0)
        each = peft.get_peft_model(each, lora())
        for n, p in each.named_parameters():
            if "lora_" in n:
                p.data = p.data.bfloat16().to(torch.bfloat16 if each.get_base_model() is model else torch.float32)
        pair.append(each)
    return pair[0], pair[1]


@pytest.mark.parametrize(
    ("trainer", "bf16", "options"),
    [
        ("SFTTrainer", True, {}),
        ("SFTTrainer", True, {"gradient_checkpointing": True}),
        ("SFTTrainer", False, {}),
        ("DPOTrainer", True, {}),
    ],
    ids=["sft", "sft, checkpoints", "sft, fp32", "dpo"],
)
@pytest.mark.filterwarnings("ignore")
def test_four_bits(tmp_path, ran, trainer, bf16, options):
    """As near as stock to the model in fp32."""
    model, twin = four_bits(tmp_path / "model", torch.bfloat16 if bf16 else torch.float32)
    kind = "text" if trainer == "SFTTrainer" else "pairs"
    ours, stock = (
        trained(tmp_path / str(use), trainer, kind, use, copy.deepcopy(model), bf16=bf16, **options)[1]
        for use in (True, False)
    )
    # with the flag, TRL before 1.13 calls parts of the model, outside autocast: inputs in fp32 go
    # to bases that compute in bf16, which run by themselves
    forward = [3, 1, 2, 1] if FUSED and trainer == "DPOTrainer" else FORWARD
    assert ran == forward * (len(ran) // len(forward)) and len(ran) >= 4 * len(forward)
    assert_rounds_as(ours, stock, trained(tmp_path / "twin", trainer, kind, False, twin, **options)[1])


# -- preferences and reinforcement learning ------------------------------------------------


@pytest.mark.smoke
def test_dpo_with_the_adapters_off(tmp_path, ran):
    """The reference is the base alone, by ``disable_adapter``: the engine runs the policy."""
    assert compared(tmp_path, ran, "DPOTrainer", "pairs", MEANS, config=lora()) == 4


def test_dpo_with_an_adapter_of_the_reference(tmp_path, ran):
    """Of adapters that are trained already, the reference is a copy, to which TRL switches."""
    assert compared(tmp_path, ran, "DPOTrainer", "pairs", MEANS, model=adapted) == 8


@pytest.mark.parametrize("model", [None, adapted], ids=["off", "copy"])
def test_grpo(tmp_path, ran, model):
    """Log-probabilities of old policies and of the reference are computed without gradients."""
    options = dict(num_generations=4, max_completion_length=6, num_iterations=2, max_steps=3, temperature=0.9)
    options |= dict(beta=0.04, trainer_kwargs={"reward_funcs": reward})
    more = {"config": lora()} if model is None else {"model": model}
    assert compared(tmp_path, ran, "GRPOTrainer", "prompts", **options, **more) >= 6
