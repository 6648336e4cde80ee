"""The models of ``step_child.py``: with random weights, patched, quantised, with adapters. This
file is loaded by its path. The only package of ours that it may import is the one that is called
`liger_kernel` in that process.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn

BITSANDBYTES = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}


def build(spec: dict[str, Any], device: torch.device) -> Any:
    """The model of the spec on the device, patched if the variant is. The weights are the same in
    every variant and on every rank."""
    model = stock(spec, device)
    if spec["quantize"] in BITSANDBYTES:
        _quantize(model, spec["quantize"])
    elif spec["quantize"]:
        from liger_kernel.transformers import quantize_base

        quantize_base(model, spec["quantize"])
        gc.collect()
        torch.cuda.empty_cache()
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec["package"]:
        _patch(model, spec)
    if spec["lora"]:
        import peft

        if spec["checkpointing"]:
            model.enable_input_require_grads()
        config = peft.LoraConfig(task_type="CAUSAL_LM", **_on_experts(model, adapters(spec)))
        model = peft.get_peft_model(model, config)
        start(model)
    return model


def _patch(model: Any, spec: dict[str, Any]) -> None:
    import liger_kernel
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    found = Path(liger_kernel.__file__ or "").resolve().parents[1]
    if found != Path(spec["package"]).resolve():
        raise ImportError(f"liger_kernel was found in {found}, not in {spec['package']}")
    flags = spec["flags"] | ({"fp8": spec["fp8"]} if spec["fp8"] else {})
    if flags:  # only for ours, which ignores an unknown flag with a warning
        from liger_kernel.transformers.recognise.families import flags_of

        kind = model.config.model_type
        if unknown := flags.keys() - flags_of(kind):
            raise NotImplementedError(f"liger_kernel has no flag {', '.join(sorted(unknown))} for {kind}")
    _apply_liger_kernel_to_instance(model=model, **flags)


def stock(spec: dict[str, Any], device: torch.device) -> Any:
    import transformers

    values = dict(spec["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    attention = spec["attention"] or ("sdpa" if kind._supports_sdpa else "eager")  # eager has sinks, as of gpt-oss
    how = dict(dtype=getattr(torch, spec["dtype"]), attn_implementation=attention)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, **how).train()
    model.config.use_cache = False
    return model


def adapters(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of PEFT's ``LoraConfig``."""
    chosen = dict(r=spec["lora"], lora_alpha=2 * spec["lora"], lora_dropout=spec["lora_dropout"])
    return chosen | {"target_modules": spec["lora_targets"]} | ({"use_dora": True} if spec["dora"] else {})


def _on_experts(model: nn.Module, chosen: dict[str, Any]) -> dict[str, Any]:
    """``chosen`` for PEFT. In a mixture, the names of an MLP's layers mean the parameters of the
    experts, with the same rank.

    PEFT itself translates these names for some families, and then doubles the rank of gate and up,
    which are one parameter. It finds parameters in 4 bits only by their whole names.
    """
    of = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    if not (experts := _experts_of(model)):
        return chosen
    names = chosen["target_modules"]
    parameters = sorted({f"{path}.{of[name]}" for path in experts for name in names if name in of})
    return chosen | {"target_modules": [name for name in names if name not in of], "target_parameters": parameters}


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in two parameters, gate_up_proj and
    down_proj."""
    return {name: m for name, m in model.named_modules() if name.endswith(".experts") and hasattr(m, "gate_up_proj")}


def start(model: Any) -> None:
    """Set the same adapters in every variant. PEFT starts with B = 0, so the first losses would
    not show whether A and B are used correctly."""
    adapters = sorted((name, p) for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name)
    for i, (name, p) in enumerate(adapters):
        generator = torch.Generator(p.device).manual_seed(i)
        with torch.no_grad():
            if ".lora_A." in name:
                p.uniform_(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5, generator=generator)
            else:
                p.normal_(0, 0.02, generator=generator)


def _quantize(model: Any, how: str) -> None:
    """Replace linear layers except the head by those of bitsandbytes, as transformers does while
    it loads a checkpoint, and experts by parameters in NF4."""
    from bitsandbytes import nn as bnb
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    layer: Any
    quantized: Any
    head = model.get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or linear is head:
            continue
        weight, sizes = linear.weight.data, (linear.in_features, linear.out_features, linear.bias is not None)
        if how == "nf4":
            double = dict(compress_statistics=True, quant_type="nf4")
            layer = bnb.Linear4bit(*sizes, compute_dtype=weight.dtype, device="meta", **double)
            quantized = bnb.Params4bit(weight, requires_grad=False, module=layer, **double)
        else:
            layer = bnb.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
            # bitsandbytes quantises only when a weight leaves the CPU
            quantized = bnb.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        layer.weight, layer.bias = quantized.to(weight.device), linear.bias
        model.set_submodule(name, layer.requires_grad_(False).train())
    for experts in _experts_of(model).values() if how == "nf4" else ():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")
    del weight, linear, quantized  # free the weight in 16 bits
    setattr(model, BITSANDBYTES[how], True)  # PEFT reads this attribute
    gc.collect()
    torch.cuda.empty_cache()


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers of a model with or without adapters."""
    return getattr(model, "get_base_model", lambda: model)().base_model.layers
