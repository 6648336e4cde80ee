"""The models of ``step_child.py``: with random weights, patched, quantised, with adapters, or built
by Unsloth. This file is loaded by its path. The only package of ours that it may import is the one
that is called `liger_kernel` in that process.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

BITSANDBYTES = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}
UNSLOTH_OFFLINE = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}


def build(spec: dict[str, Any], device: torch.device) -> Any:
    """The model of the spec on the device, patched if the variant is. The weights are the same
    in every variant and on every rank."""
    model = _by_unsloth(spec) if spec["unsloth"] else _by_transformers(spec, device)
    if spec["lora"]:
        _start(model)
    return model


def _by_transformers(spec: dict[str, Any], device: torch.device) -> Any:
    model = _stock(spec, device)
    if spec["quantize"] in BITSANDBYTES:
        _quantize(model, spec["quantize"])
    elif spec["quantize"]:
        from liger_kernel.transformers import quantize_base

        quantize_base(model, spec["quantize"])
        gc.collect()
        torch.cuda.empty_cache()
    if spec["torchao"]:
        _convert_by_torchao(model, spec["fp8"], spec["gathered"])
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec["package"]:
        import liger_kernel
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        found = Path(liger_kernel.__file__ or "").resolve().parents[1]
        if found != Path(spec["package"]).resolve():
            raise ImportError(f"liger_kernel was found in {found}, not in {spec['package']}")
        flags = spec["flags"] | ({"fp8": spec["fp8"]} if spec["fp8"] and not spec["torchao"] else {})
        if flags:  # only for ours, which ignores an unknown flag with a warning
            from liger_kernel.transformers.patching.flags import flags_of

            if unknown := flags.keys() - flags_of(model.config.model_type):
                raise NotImplementedError(
                    f"liger_kernel has no flag {', '.join(sorted(unknown))} for {model.config.model_type}"
                )
        _apply_liger_kernel_to_instance(model=model, **flags)
    if spec["lora"]:
        import peft

        if spec["checkpointing"]:
            model.enable_input_require_grads()
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", **_on_experts(model, _adapters(spec)))
        )
    return model


def _stock(spec: dict[str, Any], device: torch.device) -> Any:
    import transformers

    values = dict(spec["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, spec["dtype"]),
            attn_implementation=spec["attention"]
            or ("sdpa" if kind._supports_sdpa else "eager"),  # sinks, as of gpt-oss
        ).train()
    model.config.use_cache = False
    return model


def _adapters(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of PEFT's ``LoraConfig`` and of Unsloth's ``get_peft_model``."""
    chosen = {
        "r": spec["lora"],
        "lora_alpha": 2 * spec["lora"],
        "target_modules": spec["lora_targets"],
        "lora_dropout": spec["lora_dropout"],
    }
    return chosen | ({"use_dora": True} if spec["dora"] else {})


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


def _start(model: Any) -> None:
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

    taken: Any
    quantized: Any
    head = model.get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or linear is head:
            continue
        weight, sizes = linear.weight.data, (linear.in_features, linear.out_features, linear.bias is not None)
        if how == "nf4":
            taken = bnb.Linear4bit(
                *sizes, compute_dtype=weight.dtype, compress_statistics=True, quant_type="nf4", device="meta"
            )
            quantized = bnb.Params4bit(
                weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=taken
            )
        else:
            taken = bnb.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
            quantized = bnb.Int8Params(
                weight.cpu(), requires_grad=False, has_fp16_weights=False
            )  # bitsandbytes quantises only when a weight leaves the CPU
        taken.weight, taken.bias = quantized.to(weight.device), linear.bias
        model.set_submodule(name, taken.requires_grad_(False).train())
    for experts in _experts_of(model).values() if how == "nf4" else ():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")
    del weight, linear, quantized  # free the weight in 16 bits
    setattr(model, BITSANDBYTES[how], True)  # PEFT reads this attribute
    gc.collect()
    torch.cuda.empty_cache()


def _convert_by_torchao(model: Any, recipe: str, gathered: bool) -> None:
    """Linear layers but the head. ``gathered``: FSDP2 is to gather their weights in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gathered)
    if not torch.cuda.is_available():
        config = dataclasses.replace(config, emulate=True)
    head = model.get_output_embeddings()
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda m, name: m is not head and m.in_features % 16 == m.out_features % 16 == 0,
    )


def _by_unsloth(spec: dict[str, Any]) -> Any:
    """Build the model with Unsloth's own functions from the checkpoint that ``save`` wrote."""
    os.environ |= UNSLOTH_OFFLINE | {"UNSLOTH_COMPILE_LOCATION": f"{spec['unsloth']}-compiled"}
    from unsloth import FastLanguageModel

    recomputed = {
        "use_gradient_checkpointing": ("unsloth" if spec["offload"] else True) if spec["checkpointing"] else False
    }
    loaded = {
        "load_in_4bit": spec["quantize"] == "nf4",
        "load_in_8bit": spec["quantize"] == "int8",
        "dtype": getattr(torch, spec["dtype"]),
    }
    longest = spec["config"]["max_position_embeddings"] if "seq" in spec["largest"] else spec["seq"]
    model, _ = FastLanguageModel.from_pretrained(
        spec["unsloth"],
        max_seq_length=longest,
        local_files_only=True,
        use_exact_model_name=True,
        **loaded,
        **recomputed,
    )
    if spec["quantize"] and not getattr(model, BITSANDBYTES[spec["quantize"]], False):
        raise RuntimeError("Unsloth left the weights in 16 bits: can it load bitsandbytes here?")
    model = FastLanguageModel.get_peft_model(model, **_adapters(spec), **recomputed)
    FastLanguageModel.for_training(
        model
    )  # weights are loaded for inference, in which Unsloth neither compiles its layers nor checkpoints them
    if not all(layer.training for layer in layers_of(model)):
        raise RuntimeError("Unsloth's layers are not set to training")
    return model


def save(spec: dict[str, Any], device: torch.device) -> None:
    """Save the stock model, and a tokenizer with a word for every row of its embedding, for
    ``from_pretrained``."""
    import tokenizers
    import transformers

    model = _stock(spec, device)
    model.save_pretrained(spec["save"])
    words = {f"<{i}>": i for i in range(model.config.vocab_size)}
    special = {f"{name}_token": f"<{i}>" for i, name in enumerate(("pad", "bos", "eos", "unk"))}
    model = tokenizers.models.WordLevel(words, unk_token=special["unk_token"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), **special).save_pretrained(
        spec["save"]
    )


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers of a model with or without adapters."""
    return getattr(model, "get_base_model", lambda: model)().base_model.layers
