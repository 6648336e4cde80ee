"""What ``liger fit`` says of a row of ``liger bench step``: the peak of memory from shapes
alone, beside the one that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from liger_kernel.bench.results import Row
from liger_kernel.bench.step import LINEARS, SWITCHED
from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.train import simulated
from liger_kernel.train.config import TrainConfig

FP8_BASE = {"ours:fp8": "fp8"}
# Rows without an estimate, and why; the first reason counts
NOT_ESTIMATED: dict[str, Callable[[Row], object]] = {
    "other packages": lambda row: row["variant"].startswith(("upstream", "unsloth", "torchao")),
    "weights that FSDP2 gathers in FP8": lambda row: row["variant"] == "ours:gathered",
    "experts that are spread over ranks": lambda row: row.get("parallel") == "ep",
    "an attention of Transformers that the command names": lambda row: row.get("attention"),
    "what torch.compile keeps": lambda row: "compile" in row["variant"] or "layers" in row["variant"],
    "kernels of bitsandbytes in int8": lambda row: row.get("quantize") == "int8",
    "kernels of bitsandbytes in a stock model": lambda row: row["variant"] == "stock" and row.get("quantize"),
    "a storage that liger train does not have": lambda row: (
        "fp8_rowwise" in (row["variant"].removeprefix("ours:"), row.get("quantize"))
        or (row.get("quantize") == "nf4" and any(name.endswith("_experts") for name in MODELS[row["model"]]))
    ),
}


@dataclass(frozen=True)
class Measured:
    """A step of ``liger bench step``, and its peak in GB."""

    model: str
    layers: int | None
    variant: str
    optimizer: str
    precision: str
    ignored: float
    gpus: int
    gb: float
    run: tuple[tuple[str, Any], ...]

    def estimate(self) -> simulated.Peak:
        values = MODELS[self.model] | ({"num_hidden_layers": self.layers} if self.layers else {})
        run = TrainConfig(model=self.model, **dict(self.run))
        values["max_position_embeddings"] = max(run.length, values["max_position_embeddings"])
        return simulated.simulated(
            config_of(values),
            run,
            self.precision,
            world=self.gpus,
            optimizer=self.optimizer,
            ignored=self.ignored,
            reduce_dtype=None,
        )

    def __str__(self) -> str:
        changed = {
            name: value
            for name, value in self.run
            if getattr(TrainConfig, name) != value and name not in ("batch", "length", "lora_targets", "kernels")
        }
        size = (
            f"{self.model}{f' with {self.layers} layers' if self.layers else ''}, {dict(self.run)['batch']} x "
            f"{dict(self.run)['length']}"
        )
        given = [f"`--{name.replace('_', '-')} {value}`".replace(" True`", "`") for name, value in changed.items()]
        return ", ".join(
            [
                size,
                *([f"{self.gpus} GPUs"] if self.gpus > 1 else []),
                *([] if self.optimizer == "sgd" else ["AdamW"]),
                *(["autocast"] if self.precision == "bf16-mixed" else []),
                *given,
            ]
        )


def measured(row: Row) -> Measured:
    """The step of a row, with the flags of ``liger train`` that make the same one."""
    variant, lora = row["variant"], row.get("lora") or 0
    run: Row = dict(batch=row["batch"], length=row["seq"], kernels="off" if variant == "stock" else "on")
    run |= dict(gradient_checkpointing="full") if row.get("checkpointing") else {}
    run |= dict(fp8=row["fp8"]) if row.get("fp8") and variant in ("ours", "ours:head") else {}
    run |= SWITCHED.get(variant, {})
    run |= dict(tiled_mlp=row.get("tiled_mlp") or 0) if "tiled_mlp" in run else {}
    run |= dict(lora=lora, lora_targets=",".join(LINEARS)) if lora else {}
    run |= dict(dora=True) if row.get("dora") else {}
    run |= dict(lora_dropout=row["lora_dropout"]) if row.get("lora_dropout") else {}
    run |= dict(quantize=FP8_BASE.get(variant) or row["quantize"]) if variant in FP8_BASE or row.get("quantize") else {}
    run |= dict(parallel=row["parallel"]) if row.get("parallel") else {}
    run |= dict(optimizer_on_cpu=True) if row.get("optimizer_on_cpu") else {}
    how = row["optimizer"], "bf16-mixed" if row.get("autocast") else "bf16", row.get("masked") or 0.0, row["gpus"] or 1
    return Measured(
        row["model"], row.get("layers") or None, variant, *how, row["peak_allocated_gb"], tuple(run.items())
    )
