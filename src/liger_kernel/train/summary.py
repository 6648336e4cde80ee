"""What ``liger train`` says before its first step: model, kernels, data, device, and the memory that it expects to need."""

from __future__ import annotations

from typing import Any

import torch

from liger_kernel import memory
from liger_kernel.ops.projections.tiled_mlp import count_of
from liger_kernel.train import adapters
from liger_kernel.train.adamw import KINDS
from liger_kernel.train.config import ULYSSES, TrainConfig
from liger_kernel.train.expected import Form, expected, gb
from liger_kernel.train.measure import PeakMemory, device_name
from liger_kernel.train.rows import Data
from liger_kernel.train.stream import Stream


def summary(config: TrainConfig, data: Data, model: Any, attention: str, device: torch.device, precision: str, world: int) -> str:
    """The lines, on rank 0, of a model that is on its device and patched, and not sharded yet."""
    outside = "; FP8 is not part of the estimate" if config.fp8 else ""
    lines = [
        f"model: {_model(config, model)}",
        *([f"adapters: {adapters.described(config, model)}"] if config.lora else []),
        *kernels(config, model),
        f"attention: {attention}",
        f"data: {_data(config, data, world)}",
        f"device: {device_name(device)}, {precision}{f', {world} ranks ({config.parallel})' if world > 1 else ''}, trainer {config.trainer}",
        f"memory: {_memory(config, model, device, precision, world)}{outside}",
    ]
    return "\n".join(lines)


def parameters(model: Any) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; values of 4 bits count one by one."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def _model(config: TrainConfig, model: Any) -> str:
    trained, total = parameters(model)
    part = "all of them trained" if trained == total else f"{trained:,} of them trained ({trained / max(1, total):.2%})"
    return f"{config.model or 'random weights'} ({model.config.model_type}), {total:,} parameters, {part}"


def kernels(config: TrainConfig, model: Any) -> list[str]:
    """What is patched and what is not, each with the reason."""
    if config.kernels == "off":
        return ["patched: nothing (--kernels off): the model is as Hugging Face ships it"]
    from liger_kernel.transformers.patching.report import patches_report, projections_report

    lines = str(patches_report(model, config.kernel_flags)).splitlines()
    return [*lines, *([f"projections: {projections_report(model)}"] if config.lora or config.fp8 else [])]


def _data(config: TrainConfig, data: Data, world: int) -> str:
    rows = config.global_batch or config.batch * config.accumulate * (world // config.sharing(world))
    wanted = f"{config.steps:,} steps of {rows:,} rows"
    if isinstance(data, Stream):
        return f"{config.data}, read in parts of {config.stream:g} million characters, rows of at most {config.length:,} tokens; {wanted}"
    passes = config.steps * rows / max(1, len(data.train))
    held = f", {len(data.eval):,} more for evaluation" if data.eval else ""
    return f"{config.data}, {len(data.train):,} rows of at most {config.length:,} tokens to train on{held}; {wanted}: {passes:.2f} passes over the data"


def form_of(config: TrainConfig, model: Any, device: torch.device, precision: str, world: int) -> Form:
    """How a run trains, as the estimate of its memory takes it."""
    from liger_kernel.transformers.recognise.rows import family

    row = family(model.config.model_type) if config.kernels == "on" else None
    flags = config.kernel_flags
    own = flags.get("fused_linear_cross_entropy", not flags.get("cross_entropy"))
    sharded = config.fully_sharded or config.parallel in ("tp", "deepspeed-z2", "deepspeed-z3")
    autocast = precision == "bf16-mixed" and not config.fully_sharded
    tokens = config.batch * config.length // (config.sharing(world) if config.parallel in ULYSSES else 1)
    full = autocast and not config.lora  # the hidden state has the dtype of the embedding
    return Form(
        tokens=tokens,
        activation=4 if precision == "fp32" else 2,
        residual=4 if precision == "fp32" or full else 2,
        patched=row is not None and device.type != "cpu",  # where PyTorch references run, whose layers keep what stock ones keep
        fused_head=bool(row and not row.fused and own),
        level=memory.level_of(flags.get("rematerialise", True)),
        tiles=count_of(flags.get("tiled_mlp", False), tokens),
        checkpointing=config.gradient_checkpointing,
        keeps_attention=bool(flags.get("keep_attention")),
        offloading=bool(flags.get("activation_offloading")) and device.type != "cpu",
        states=2.0 if KINDS[config.optimizer].moments is None else 0.5 if precision != "bf16" else 1.0,
        in_backward=config.optimizer_in_backward,
        on_cpu=config.optimizer_on_cpu and device.type != "cpu",
        shards=world if sharded else 1,
        split_weights=config.parallel != "deepspeed-z2",
        buckets=config.parallel in ("ddp", "ulysses"),
        casts=full,
        gpu=device.type == "cuda",
    )


def _memory(config: TrainConfig, model: Any, device: torch.device, precision: str, world: int) -> str:
    found = expected(model, form_of(config, model, device, precision, world))
    if found.peak is None:
        return f"expected: {found}; activations come on top, which are not estimated, as the layers of this model have a form that the estimate does not know"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        beyond = ". That is more than the GPU has: expect to run out of memory" if found.peak > total else ""
        return f"expected: about {gb(found.peak)} of the GPU's {gb(total)} at the peak, estimated from shapes ({found}; not all at one moment){beyond}"
    now = PeakMemory(device).before  # weights are a part of it
    peak = gb(now + found.peak - found.weights)
    return f"expected: about {peak} resident at the peak, estimated from shapes: {gb(now)} that the process has now, and what training adds ({found.added})"
