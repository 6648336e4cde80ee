"""Adapters over a frozen base: LoRA and DoRA from PEFT, with the base quantised by bitsandbytes.

    check       what is wrong with the adapters of a configuration, before anything is loaded
    adapted     a model with the adapters of a configuration, in which only these are trained
    restored    a model with adapters that a run has saved
    identity    what a checkpoint of adapters must share with the run that resumes from it: their form, and their base

Both packages are imported only if a configuration needs them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.config import EVERY_LINEAR, TrainConfig, UserError
from liger_kernel.train.hub import skeleton
from liger_kernel.train.mistakes import mistaken, needs
from liger_kernel.train.redact import in_a_line

# the file that makes a folder one of adapters
SAVED = "adapter_config.json"
BITSANDBYTES = ("nf4", "int8")


def check(config: TrainConfig, device: torch.device) -> None:
    """Raise ``UserError`` for adapters that this machine or the model cannot have. Reads the
    configuration of the model, but no weights."""
    if not config.lora:
        return
    _peft()
    if config.quantize in BITSANDBYTES:
        _check_bitsandbytes(config.quantize, device)
    if config.model and holds_adapters(config.model):
        raise UserError(
            f"{config.model} holds adapters, not a model: give --model their base model, "
            f"{base_of(config.model) or 'whose name they do not have'}"
        )
    model = skeleton(config.model, config.trust_remote_code)
    if config.quantize and getattr(model.config, "quantization_config", None):
        raise UserError(f"{config.model} is quantised already: leave out --quantize")
    if config.target_modules != EVERY_LINEAR:
        _check_targets(config.target_modules, model)


def _peft() -> Any:
    with needs("lora", "peft"):
        import peft
    return peft


def _check_bitsandbytes(kind: str, device: torch.device) -> None:
    try:
        import accelerate  # noqa: F401
        import bitsandbytes
    # OSError and RuntimeError: bitsandbytes does not find a library of CUDA
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"quantize {kind} needs bitsandbytes and accelerate: pip install accelerate bitsandbytes "
            f"({in_a_line(error)})"
        ) from error
    # bitsandbytes before 0.46 has no such list, and kernels for CUDA alone
    devices = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in devices:
        raise UserError(
            f"quantize {kind} needs a device that bitsandbytes has kernels for ({', '.join(sorted(devices))}); this "
            f"run uses {device.type}"
        )


def _check_targets(targets: str | list[str], model: Any) -> None:
    """``UserError`` for a name that no layer has, or another module than one that takes
    adapters."""
    from transformers.pytorch_utils import Conv1D

    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding, Conv1D))]
    names = {name for name, _ in model.named_modules() if name}
    for target in targets:
        same = [name for name in names if name == target or name.endswith("." + target)]
        if not same or not all(name in layers for name in same):
            there = sorted({name.rpartition(".")[2] for name in layers})
            near = did_you_mean(target, there) or f"; it has {', '.join(there)}"
            raise UserError(f"lora_targets: {model.config.model_type} has no layer {target!r} for adapters{near}")


def quantization(config: TrainConfig, precision: str) -> Any:
    """Return Transformers' configuration of a base in 4 or 8 bits; None if the base is loaded as
    it is."""
    if config.quantize not in BITSANDBYTES:
        return None
    import transformers

    if config.quantize == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
    )


def unchanging(model: Any) -> Any:
    """``model``, whose base evaluation leaves as it is: on CPUs with bf16 units bitsandbytes
    packs 4-bit weights for it, in place, and rounds their scales."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def adapted(model: Any, config: TrainConfig) -> Any:
    """Return ``model`` with adapters in fp32, in which only these are trained. The same seed
    gives the same adapters, however the model was made."""
    from liger_kernel.transformers.recognise.storages import in_blocks

    peft = _peft()
    _keep_packed(model)
    for layer in filter(in_blocks, model.modules()):
        layer.compute_dtype = model.dtype  # PEFT draws in the dtype of the weight, FP8, where a layer names no other
    torch.manual_seed(config.seed)
    form = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora,
        lora_alpha=config.alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        use_dora=config.dora,
        use_rslora=config.rslora,
    )
    with mistaken("lora: ", ValueError):
        return peft.get_peft_model(model, form)


def restored(model: Any, folder: str) -> Any:
    """Return ``model`` with the adapters that a run has saved in ``folder``."""
    _keep_packed(model)
    return _peft().PeftModel.from_pretrained(model, folder)


def _keep_packed(model: Any) -> None:
    """Let PEFT wrap layers of compressed-tensors, which have no weight that it finds."""
    from liger_kernel.transformers.recognise.storages import keep_packed

    if reason := keep_packed(model):
        raise UserError(f"lora: PEFT cannot adapt this model as it is stored: {reason}")


def without_adapters(model: Any) -> Any:
    """``model`` without the adapters that transformers has found beside it, as a run leaves them
    that saves to the folder of its model."""
    if getattr(model, "_hf_peft_config_loaded", False):
        from peft.tuners.tuners_utils import BaseTunerLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                model.set_submodule(name, module.get_base_layer())
        model._hf_peft_config_loaded = False
        del model.peft_config
    return model


def holds_adapters(model: str) -> bool:
    """Whether a folder has adapters and no model."""
    return (Path(model) / SAVED).is_file() and not (Path(model) / "config.json").is_file()


def base_of(folder: str) -> str | None:
    """Return the base model of saved adapters; None for a base with random weights."""
    return json.loads((Path(folder) / SAVED).read_text(encoding="utf-8")).get("base_model_name_or_path") or None


def described(config: TrainConfig) -> str:
    """The adapters in one line."""
    kind = ("rank-stabilised " if config.rslora else "") + ("DoRA" if config.dora else "LoRA")
    base = f", base in {config.quantize}" if config.quantize else ""
    return f"{kind}, rank {config.lora}, alpha {config.alpha:g}, on {config.lora_targets}{base}"


def identity(config: TrainConfig, model: Any) -> dict[str, Any]:
    """Return what must be equal for a checkpoint to be of this model and its adapters.

    The model must be on its device, not yet trained or sharded.
    """
    if config.lora:
        return config.adapters | {"digest of base": digest(model)}
    return config.adapters | ({"digest of weights": digest(model, trained=True)} if config.model else {})


def digest(model: nn.Module, trained: bool = False) -> str:
    """SHA-256 of some values of every frozen or ``trained`` parameter.

    It differs for other weights, and is equal for the same weights in fp32 and bf16.
    """
    sha = hashlib.sha256()
    some: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, p in sorted(model.named_parameters(), key=lambda named: named[0]):
        if p.requires_grad == trained:
            flat, dtype = p.data.reshape(-1), torch.bfloat16 if p.is_floating_point() else p.dtype
            some.setdefault(dtype, []).append(flat[:: max(1, flat.numel() // 64)].to(dtype))
            sha.update(f"{name} {flat.numel()} ".encode())
    for dtype in sorted(some, key=str):
        sha.update(torch.cat(some[dtype]).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:32]
