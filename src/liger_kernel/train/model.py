"""The model of a run: a checkpoint by path or id, or a small Llama with random weights; patched
or stock."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from liger_kernel.memory import attention_operators
from liger_kernel.nearest import did_you_mean
from liger_kernel.parallel import Parallel, layers_of, parallelize
from liger_kernel.train import adapters
from liger_kernel.train.config import ULYSSES, TrainConfig, UserError
from liger_kernel.train.data import packs
from liger_kernel.train.hub import on_hub, skeleton
from liger_kernel.train.mistakes import mistaken, note, why
from liger_kernel.train.ranks import local_rank
from liger_kernel.train.token_rows import TokenRows
from liger_kernel.utils import varlen_lacks


def device_and_precision(config: TrainConfig) -> tuple[torch.device, str]:
    """Resolve ``auto``: the GPU if there is one, with fp32 weights and bf16 arithmetic;
    otherwise the CPU in fp32."""
    name = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)
    # there is no such device, or this PyTorch is not built for it
    except (RuntimeError, AssertionError) as error:
        wrong = str(error).partition(". ")[0][:200]
        wrong = "it must be cpu, cuda or cuda:N" if "device type at start" in wrong else wrong
        raise UserError(f"cannot use device {name!r}: {wrong}{did_you_mean(name, ('cpu', 'cuda'))}") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"device is {name}, but PyTorch sees {gpus or 'no'} GPU{'s' * (gpus > 1)} here")
    if config.fp8:
        from liger_kernel.ops.projections.float8 import lacking
        from liger_kernel.ops.projections.float8_training import RECIPES

        if missing := lacking(device, RECIPES[config.fp8].capability):
            raise UserError(f"fp8 {config.fp8}: {missing}")
    return device, precision_of(config, gpu=device.type == "cuda")


def precision_of(config: TrainConfig, gpu: bool) -> str:
    """Resolve precision ``auto``."""
    precision = config.precision if config.precision != "auto" else "bf16-mixed" if gpu else "fp32"
    # with LoRA the two are the same: the base is in bf16, and PEFT keeps adapters in fp32
    return "bf16-mixed" if config.lora and precision == "bf16" else precision


def mixed(device: torch.device, precision: str) -> torch.autocast:
    """Arithmetic in bf16, if weights are in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed")


def build(config: TrainConfig, tokenizer: Any, device: torch.device, precision: str) -> Any:
    """The model on its device, in training mode, patched if ``config.kernels`` says so; the weights
    are the same in both cases.

    With ``config.lora`` it has new adapters, or those of ``config.model`` if that is a folder of
    saved adapters.
    """
    saved = config.model if config.lora and config.model and adapters.holds_adapters(config.model) else None
    name = adapters.base_of(saved) if saved else config.model
    torch.manual_seed(config.seed)
    model = _base(config, name, tokenizer, device, precision).train()
    if config.kernels == "on":
        patch(model, flags_for(config, model.config.model_type))
    # PEFT finds the parameters of experts while they are dense
    late = config.quantize == "fp8" and has_experts(model)
    if config.quantize == "fp8" and not late:
        quantize_fp8(model)
    if config.lora:
        model = adapters.restored(model, saved) if saved else adapters.adapted(model, config)
    if late:
        quantize_fp8(model)
    if config.merge_aware:
        from liger_kernel.transformers import merge_aware

        with mistaken("", ValueError):
            merge_aware(model)
    if config.gradient_checkpointing != "none":
        recompute(model, config.gradient_checkpointing)
    if config.compile:
        for layer in layers_of(model):
            layer.compile()
    return model


def dtype_of(config: TrainConfig, precision: str) -> torch.dtype:
    """Of the weights: what is trained is kept in fp32, but with precision bf16; a frozen base is
    only computed with."""
    return torch.float32 if precision == "fp32" or (precision == "bf16-mixed" and not config.lora) else torch.bfloat16


def options_of(config: TrainConfig, precision: str) -> dict[str, Any]:
    """How transformers makes the model. With attention ``auto`` it takes sdpa, or what it has for
    models without it."""
    attention = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    return attention | {"dtype": dtype_of(config, precision), "trust_remote_code": config.trust_remote_code}


def _base(config: TrainConfig, name: str | None, tokenizer: Any, device: torch.device, precision: str) -> Any:
    """The model ``name``, or one from random weights, on its device as transformers makes it;
    quantised if ``config`` says so."""
    import transformers

    options = options_of(config, precision)
    quantization = adapters.quantization(config, precision)
    # where quantised weights are loaded is where they stay
    quantized: dict[str, Any] = {"device_map": {"": device}} | (
        {"quantization_config": quantization} if quantization else {}
    )
    model: Any
    if name:
        on_hub(name)
    try:
        if name:
            if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
                raise UserError(f"{name} holds no model: it has no config.json")
            there = transformers.AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            already = config.lora and hasattr(there, "quantization_config")
            load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
            if already and there.model_type == "gpt_oss":
                from liger_kernel.transformers.load_mxfp4 import in_mxfp4, load_in_mxfp4

                # Transformers' own cannot be trained, or is dequantised
                load = load_in_mxfp4 if in_mxfp4(there) else load
            model = load(name, **options, **(quantized if quantization or already else {}))
        else:
            model = transformers.AutoModelForCausalLM.from_config(small_llama(config, tokenizer), **options)
            if quantization:
                model = type(model).from_pretrained(
                    None, config=model.config, state_dict=model.state_dict(), **options, **quantized
                )
    except (torch.OutOfMemoryError, UserError):
        raise
    # transformers, safetensors and a model's own code raise errors of many kinds
    except Exception as error:
        raise UserError(f"cannot build the model{f' {name}' if name else ''}: {why(error)}") from error
    if getattr(model, "is_quantized", False):
        if not config.lora:
            raise UserError(f"{name} is quantised, so it cannot be trained as a whole: give --lora RANK")
        return adapters.unchanging(adapters.without_adapters(model))
    return (adapters.without_adapters(model) if config.lora else model).to(device)


def has_experts(model: Any) -> bool:
    """Whether a model has the weights of all experts of a layer in one parameter."""
    from liger_kernel.transformers.quantize import packed_experts

    return any(packed_experts(m) for m in model.modules())


def quantize_fp8(model: Any) -> None:
    """Store the frozen weights of linear layers and experts in FP8, permanently. Raises
    ``UserError`` if the GPU has no FP8 arithmetic."""
    from liger_kernel.transformers import quantize_base

    with mistaken("", ValueError):
        quantize_base(model, "fp8")


def attend(config: TrainConfig, rows: TokenRows, model: Any, device: torch.device, precision: str) -> str:
    """Resolve attention ``auto`` for these rows; returns the result in words. A model with a loss of
    its routers gets masks of padding from here on."""
    inner = getattr(model, "get_base_model", lambda: model)()
    # the head computes that loss and leaves padding out by the mask
    if rows.positions is not None and getattr(inner.config, "output_router_logits", False):
        rows.masked = True
        inner.base_model.register_forward_pre_hook(without_mask, with_kwargs=True)
    if config.batch_invariant:
        return "liger_invariant, each document by itself"
    if config.attention != "auto":
        return config.attention
    from liger_kernel.transformers import attention

    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    # an earlier call may have put varlen_attn in its place
    plain = "sdpa" if chosen == attention.NAME else chosen
    if rows.positions is None:
        return plain
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if config.trainer == "hf" and config.parallel == "none" and torch.cuda.device_count() > 1:
        lacking: str | None = "transformers' Trainer cuts batches for the GPUs that it sees"
    elif config.deterministic:
        lacking = "varlen_attn's gradients are not the same bits in every run"
    else:
        lacking = varlen_lacks(device, dtype)
    if lacking is None:
        lacking = attention.use(model)
    rows.bounded = lacking is None
    return f"{plain} with a mask, as {lacking}" if lacking else "varlen_attn, each document by itself"


def without_mask(body: Any, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """With a mask of padding, Transformers' layers would not look for documents in positions."""
    return args, given | {"attention_mask": None}


def check_packing(config: TrainConfig) -> None:
    """Raise ``UserError`` if rows will have several documents and the model has a layer that
    carries its state from one to
    the next. Of attention that cannot tell documents apart, say so. No weights are loaded."""
    name = config.model
    if name and config.lora and adapters.holds_adapters(name):
        name = adapters.base_of(name)
    if not name or not packs(config):
        return
    import transformers

    from liger_kernel.transformers.documents import joining
    from liger_kernel.transformers.patching.select import instance_patches

    try:
        model = skeleton(name, config.trust_remote_code)
    # loading the model, later, says what is wrong
    except UserError:
        return
    verbosity = transformers.logging.get_verbosity()
    # warnings about kernels that the model on the meta device lacks are of no interest
    transformers.logging.set_verbosity_error()
    if config.kernels == "on":
        recurrent = config.kernel_flags.get("recurrent", True)
        instance_patches(model, model.config.model_type, {"recurrent": recurrent}, None).apply()
    found = joining(model)
    transformers.logging.set_verbosity(verbosity)
    if found is not None and not found.attention:
        raise UserError(
            f"packing documents: {found}, so {model.config.model_type} cannot be trained with several in a row"
        )
    if found is not None and "flash" not in config.attention and local_rank() == 0:
        note(f"warning: packing documents: {found}")


def recompute(model: Any, what: str) -> None:
    """Gradient checkpointing of each layer: ``full``, or ``selective``, which stores the results
    of matrix products and attention."""
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if hasattr(model, "enable_input_require_grads") and not any(
        p.requires_grad for p in model.get_input_embeddings().parameters()
    ):
        model.enable_input_require_grads()
    with mistaken("gradient_checkpointing: ", ValueError):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


_MULTIPLIES = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten._scaled_dot_product_attention_math,
)
THIN = 128
_COSTLY = {packet.default for packet in _MULTIPLIES} | attention_operators()


def mesh_of(config: TrainConfig, device: torch.device, world: int) -> DeviceMesh | None:
    """The mesh of the ``world`` ranks of a run, None for one process. Ranks of the last dim
    share rows, if any do."""
    if config.parallel == "none":
        return None
    if config.parallel not in ULYSSES:
        return init_device_mesh(device.type, (world,))
    size = config.sharing(world)
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "sequence"))


def split(model: Any, config: TrainConfig, precision: str, mesh: DeviceMesh | None, **options: Any) -> Parallel:
    """The model over the ranks of a run. ``options`` go to ``parallelize``."""
    half = torch.bfloat16 if precision == "bf16-mixed" else None
    with mistaken("", ValueError):
        return parallelize(
            model, config.parallel, mesh=mesh, param_dtype=half, cpu_offload=config.optimizer_on_cpu, **options
        )


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # the products of an adapter are as large as the layer's result and quick to compute again
    thin = op is torch.ops.aten.mm.default and args[1].shape[0] <= THIN
    return CheckpointPolicy.MUST_SAVE if op in _COSTLY and not thin else CheckpointPolicy.PREFER_RECOMPUTE


def small_llama(config: TrainConfig, tokenizer: Any) -> Any:
    """A LlamaConfig with the configured sizes and the tokenizer's vocabulary."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate or -(-8 * config.hidden // (3 * 64)) * 64,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or max(1, config.heads // 2),
        max_position_embeddings=max(2048, config.length),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def flags_for(config: TrainConfig, model_type: str) -> dict[str, Any]:
    """The kernel flags of a run with models of this type. Eager attention that a run names is
    Transformers', also where a family's is replaced by default."""
    from liger_kernel.transformers.recognise.families import flags_of

    stock = config.attention == "eager" and "attention" in flags_of(model_type)
    return config.kernel_flags | ({"attention": False} if stock else {})


def patch(model: Any, flags: dict[str, Any]) -> None:
    """Patch this one model. Raises ``UserError`` if its family does not have a flag; an unknown
    family stays stock, or trains in FP8 without our kernels."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, train_in_fp8
    from liger_kernel.transformers.recognise.families import family, flags_of

    model_type = model.config.model_type
    with mistaken("", ValueError):
        if family(model_type) is None:
            print(
                f"no kernels for {model_type}: training it as Hugging Face ships "
                f"it{', but in FP8' if 'fp8' in flags else ''}"
            )
            if "fp8" in flags:
                train_in_fp8(model, flags["fp8"], filter=flags.get("fp8_filter"))
            return
        known = flags_of(model_type)
        unknown = [name for name in flags if name not in known]
        if unknown:
            raise UserError(
                f"{model_type} has no kernel flag {unknown[0]}{did_you_mean(unknown[0], known)}; its flags are "
                f"{', '.join(known)}"
            )
        _apply_liger_kernel_to_instance(model, **flags)


def flops_per_token(model: Any, length: int) -> float | None:
    """FLOPs of training per token, without recomputation; None if linear layers are not
    everything that counts (mixtures of experts, LoRA)."""
    # short convolutions, with one channel each, count little
    if any((p.ndim > 2 and p.shape[1] > 1) or not p.requires_grad for p in model.parameters()):
        return None
    from liger_kernel.model_sizes import token_flops

    return token_flops(model, length)


WEIGHTS = (
    "adapter_config.json",
    "adapter_model.*",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin*",
)


def save(model: Any, tokenizer: Any, folder: str, first: bool = True) -> None:
    """Save weights as safetensors, configuration and tokenizer for ``from_pretrained``.

    Sharded weights are gathered: every rank calls, the ``first`` writes.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    # the base under adapters is neither gathered nor written
    adapted = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    weights = get_model_state_dict(model, options=options) if sharded else None
    if first:
        with replacing(folder) as aside:
            model.save_pretrained(aside, state_dict=weights, **({"save_embedding_layers": False} if adapted else {}))
            tokenizer.save_pretrained(aside)


@contextlib.contextmanager
def replacing(folder: str) -> Iterator[str]:
    """Give a folder for the files of a model, which at the end replace those in ``folder`` one by
    one.

    A full disk leaves the content of ``folder`` intact.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".saving-") as aside:
        yield aside
        new = sorted(path.name for path in Path(aside).iterdir())
        for name in new:
            os.replace(Path(aside) / name, target / name)
    # adapters may lie beside the model that they are of
    whole = "adapter_config.json" not in new
    # weights of a model that was saved there before: from_pretrained might prefer them
    for pattern in WEIGHTS if whole else ():
        for path in target.glob(pattern):
            if path.name not in new:
                path.unlink()
