"""What ``liger train`` says before its first step: model, kernels, data, device, and the memory
that it expects to need."""

from __future__ import annotations

from typing import Any

import torch

from liger_kernel.train import adapters
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.measure import device_name
from liger_kernel.train.model import flags_for
from liger_kernel.train.ranks import restarts
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.stream import Stream
from liger_kernel.train.token_rows import Data


def summary(
    config: TrainConfig, data: Data, model: Any, attention: str, device: torch.device, precision: str, world: int
) -> str:
    """The lines, on rank 0, of a model that is on its device and patched, and not sharded yet."""
    ends = data.tokenizer.eos_token_id is not None
    no_end = (
        ""
        if ends
        else "; the tokenizer has no end token: texts are joined without one, and an answer does not learn to end"
    )
    trained, total = parameters(model)
    part = "all of them trained" if trained == total else f"{trained:,} of them trained ({trained / max(1, total):.2%})"
    counted = f"{trained:,} of {total:,} parameters"
    lines = [
        f"model: {config.model or 'random weights'} ({model.config.model_type}), {total:,} parameters, {part}",
        *([f"adapters: {adapters.described(config)}; {counted} are trained"] if config.lora else []),
        *kernels(config, model),
        f"attention: {attention}",
        f"data: {_data(config, data, world)}{no_end}",
        f"device: {device_name(device)}, {precision}{f', {world} ranks ({config.parallel})' if world > 1 else ''}, "
        f"trainer {config.trainer}",
        f"memory: {_memory(config, model, device, world)}",
    ]
    return "\n".join(lines)


def parameters(model: Any) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; values of 4 bits count one by
    one."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def kernels(config: TrainConfig, model: Any) -> list[str]:
    """What is patched and what is not, each with the reason."""
    if config.kernels == "off":
        return ["patched: nothing (--kernels off): the model is as Hugging Face ships it"]
    from liger_kernel.transformers.patching.report import patches_report, projections_report

    report = patches_report(model, flags_for(config, model.config.model_type))
    lines = [report.line.replace("liger_kernel", "kernels"), *str(report).splitlines()]
    return [*lines, *([f"projections: {projections_report(model)}"] if config.lora or config.fp8 else [])]


def rows_of(config: TrainConfig, world: int) -> int:
    """The rows of a step of a run that begins."""
    return config.global_batch or config.batch * config.accumulate * (world // config.sharing(world))


def _data(config: TrainConfig, data: Data, world: int) -> str:
    rows = rows_of(config, world)
    config = config.in_steps(rows, len(data.train))
    wanted = f"{config.steps:,} steps of {rows:,} rows"
    if isinstance(data, Stream):
        return (
            f"{config.data}, read in parts of {config.stream:g} million characters, rows of at most "
            f"{config.length:,} tokens; {wanted}"
        )
    passes = config.steps * rows / max(1, len(data.train))
    source = f" of {config.eval_data}" if config.eval_data else ""
    held = f", {len(data.eval):,} more{source} for evaluation" if data.eval else ""
    return (
        f"{config.data}, {len(data.train):,} rows of at most {config.length:,} tokens to train on{held}; "
        f"{wanted}: {passes:.2f} passes over the data"
    )


def _memory(config: TrainConfig, model: Any, device: torch.device, world: int) -> str:
    if device.type != "cuda":
        return "not estimated on a CPU"
    if restarts():
        return "as it was estimated when the run began"
    try:
        # needs Triton
        from liger_kernel.train.fit import expected

        found = expected(model.config, config, world)
    # an estimate that only informs must not end a run
    except Exception as error:
        return f"not estimated: {in_a_line(error)}"
    total = torch.cuda.get_device_properties(device).total_memory
    beyond = ". That is more than the GPU has: expect to run out of memory" if found["peak"] > total else ""
    parts = ", ".join(f"{name} {gb(size)}" for name, size in found["parts"].items() if size)
    return (
        f"expected: about {gb(found['peak'])} of the GPU's {gb(total)} at the peak, in '{found['phase']}', "
        f"estimated from shapes: {parts}{beyond}"
    )


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB" if size else "0"
