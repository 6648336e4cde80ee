"""The model of a run: a checkpoint by path or id, or a small Llama from random weights; with our kernels or as Hugging Face ships it."""

from __future__ import annotations

from typing import Any

import torch

from liger_kernel.train.config import TrainConfig, UserError


def device_and_precision(config: TrainConfig) -> tuple[torch.device, str]:
    """``auto`` settled: the GPU if there is one, with fp32 weights and bf16 arithmetic; else the CPU in fp32."""
    name = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but PyTorch sees no GPU here")
    precision = config.precision if config.precision != "auto" else "bf16-mixed" if device.type == "cuda" else "fp32"
    return device, precision


def build(config: TrainConfig, tokenizer: Any, device: torch.device, precision: str) -> Any:
    """The model on its device, in training mode, patched if ``config.kernels`` says so; the same weights either way."""
    import transformers

    torch.manual_seed(config.seed)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    options = {"dtype": dtype, "attn_implementation": config.attention}
    model: Any
    try:
        if config.model:
            model = transformers.AutoModelForCausalLM.from_pretrained(config.model, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_config(small_llama(config, tokenizer), **options)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot build the model {config.model or ''}: {str(error).strip().splitlines()[0]}") from error
    model = model.to(device).train()
    if config.kernels == "on":
        patch(model, config.kernel_flags)
    return model


def small_llama(config: TrainConfig, tokenizer: Any) -> Any:
    """A LlamaConfig of the config's sizes, for the tokenizer's vocabulary."""
    import transformers

    kv_heads = config.kv_heads or max(1, config.heads // 2)
    if config.hidden % config.heads or config.heads % kv_heads:
        raise UserError(f"heads must divide hidden, and kv_heads must divide heads; got {config.hidden}, {config.heads}, {kv_heads}")
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate or -(-8 * config.hidden // (3 * 64)) * 64,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(2048, config.length),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def patch(model: Any, flags: dict[str, bool]) -> None:
    """Put our kernels into this one instance. ``UserError`` if its family does not know a flag; a family that we do not know stays as it is."""
    from liger_kernel.transformers import patch as kernels

    model_type = model.config.model_type
    if kernels.family(model_type) is None:
        print(f"no kernels for {model_type}: training it as Hugging Face ships it")
        return
    known = kernels.flags_of(model_type)
    unknown = [name for name in flags if name not in known]
    if unknown:
        raise UserError(f"{model_type} has no {' and no '.join(unknown)} to switch; it has {', '.join(known)}")
    kernels._apply_liger_kernel_to_instance(model, **flags)


def save(model: Any, tokenizer: Any, folder: str) -> None:
    """Weights as safetensors, config and tokenizer, as ``from_pretrained`` reads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
