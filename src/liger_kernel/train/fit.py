"""``liger fit``: what will fit into a GPU's memory, with which switches, before a run and without a GPU; and what a run says that ran out of memory.

    Estimates     peaks of a model, each simulated once
    switches      what each switch that is off saves
    recommended   the first of some combinations that fits, the ones that cost least time first
    largest       the most rows, or tokens of a row, that fit
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from liger_kernel.model_sizes import MODELS
from liger_kernel.train.config import Formatter, TrainConfig, UserError, add_flags
from liger_kernel.train.mistakes import Parser, at_least, one_of

# torch and transformers are imported by what uses them: help and mistakes in flags answer before


class Gpu(NamedTuple):
    gigabytes: float
    arch: str


# Memory by the makers' data sheets, in 10^9 bytes
GPUS = {
    "a100-40": Gpu(40, "sm80"),
    "a100-80": Gpu(80, "sm80"),
    "b200": Gpu(180, "sm100"),
    "h100": Gpu(80, "sm90"),
    "h200": Gpu(141, "sm90"),
    "l40s": Gpu(48, "sm89"),
    "mi300x": Gpu(192, "gfx942"),
    "rtx4090": Gpu(24, "sm89"),
}
# fields of a run that its memory depends on, which are flags of the command under the same names
FIELDS = (
    *("model", "batch", "length", "accumulate", "lora", "lora_dropout", "lora_targets", "dora", "quantize", "optimizer", "precision", "kernels", "rematerialise"),
    *("fp8", "fp8_filter", "activation_offloading", "keep_attention", "tiled_mlp", "gradient_checkpointing", "fused_linear_cross_entropy", "cross_entropy", "trainer"),
)


class Switch(NamedTuple):
    """Fields of a run that need less memory, and what that costs. ``same``: the model that is trained is the same up to rounding."""

    changes: dict[str, Any]
    costs: str
    same: bool = True


KERNELS = Switch({"kernels": "on"}, "nothing")
MLP = Switch({"rematerialise": "mlp"}, "time: two of the nine matrix products of each MLP are repeated")
CHECKPOINTING = Switch({"gradient_checkpointing": "full"}, "time: the forward of each layer is repeated")
OFFLOADING = Switch({"activation_offloading": True}, "memory of the CPU, and copies")
TILED = Switch({"tiled_mlp": 0}, "time, if the weights of the MLPs are trained")
EIGHT_BITS = Switch({"optimizer": "adamw-8bit", "trainer": "hf"}, "moments are rounded to 8 bits")
HALF = Switch({"precision": "bf16"}, "weights are rounded to 16 bits after each step", same=False)
LORA = Switch({"lora": 16}, "only adapters are trained", same=False)
QLORA = Switch({"lora": 16, "quantize": "nf4"}, "only adapters are trained, beside weights in 4 bits", same=False)
SWITCHES = (KERNELS, MLP, CHECKPOINTING, OFFLOADING, TILED, EIGHT_BITS, HALF, LORA, QLORA)
COMBINATIONS = ((), (MLP,), (CHECKPOINTING,), (CHECKPOINTING, OFFLOADING), (CHECKPOINTING, OFFLOADING, TILED))


def flags(changes: dict[str, Any]) -> str:
    """Fields of a run as flags of ``liger train``."""
    return " ".join(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}") for name, value in changes.items())


class Estimates:
    """Peaks of runs with one model on one kind of GPU."""

    def __init__(self, form: Any, arch: str):
        self.form, self.arch = form, arch
        self._known: dict[tuple[Any, ...], Any] = {}

    def peak(self, config: TrainConfig) -> Any:
        """The ``simulated.Peak`` of a run. Raises ``UserError`` for one that cannot be trained, or simulated."""
        from liger_kernel.train.model import precision_of
        from liger_kernel.train.simulated import simulated

        key = dataclasses.astuple(config)
        if key not in self._known:
            self._known[key] = simulated(self.form, config, precision_of(config, gpu=True), arch=self.arch)
        return self._known[key]

    def total(self, config: TrainConfig) -> int:
        return self.peak(config).total


def with_changes(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig | None:
    """The run with other values; None if it has them already, or cannot have them."""
    now = {name: value for name, value in changes.items() if getattr(config, name) != value}
    if not now or (config.lora and "lora" in now and "quantize" not in now):
        return None
    try:
        return dataclasses.replace(config, **now)
    except UserError:
        return None


def switches(of: Estimates, config: TrainConfig, among: tuple[Switch, ...] = SWITCHES) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Each switch that is off and saves memory: what changes, what it costs, and the peak with it in bytes. A switch that the model lacks is left out."""
    from liger_kernel.train.model import precision_of

    given = of.total(config)
    halved = {"batch": config.batch // 2, "accumulate": 2 * config.accumulate}
    for switch in (*among, *([Switch(halved, "time: products of fewer tokens")] if config.batch % 2 == 0 else [])):
        if "lora" in switch.changes and (config.fp8 or (config.lora and config.quantize)):
            continue
        changes = {name: value for name, value in switch.changes.items() if not (name == "lora" and config.lora)}
        other = with_changes(config, changes)
        if other is None or (changes.keys() == {"precision"} and precision_of(config, gpu=True) == precision_of(other, gpu=True)):
            continue
        try:
            peak = of.total(other)
        except UserError:
            continue
        if peak < given:
            yield changes, switch.costs, peak


def recommended(of: Estimates, config: TrainConfig, room: float) -> TrainConfig | None:
    """The first run that fits into ``room`` bytes of those that train the same model: as given, with switches, and with fewer rows at a time."""
    rows = config.batch
    while rows:
        if config.batch % rows == 0:
            fewer = dataclasses.replace(config, batch=rows, accumulate=config.accumulate * (config.batch // rows))
            for combination in COMBINATIONS:
                changed: TrainConfig | None = fewer
                for switch in combination:
                    changed = with_changes(changed, switch.changes) or changed if changed else None
                try:
                    if changed and of.total(changed) <= room:
                        return changed
                except UserError:
                    continue
        rows //= 2
    return None


def largest(peak: Callable[[int], int], room: float, start: int = 1, unit: int = 1) -> int:
    """The largest multiple of ``unit`` whose ``peak`` is at most ``room``, to within 1/64; 0 if none is. The next one to try is where a line meets ``room``."""
    low, high = 0, None
    known: dict[int, int] = {}
    n = max(1, start // unit)
    while True:
        known[n] = peak(n * unit)
        if known[n] <= room:
            low = max(low, n)
        else:
            high = n if high is None else min(high, n)
        if high is not None and high - low <= max(1, low // 64):
            return low * unit
        last = sorted(known)[-2:] if high is None else [max((k for k in known if k < high), default=high), high]
        slope = (known[last[-1]] - known[last[0]]) / (last[-1] - last[0]) if len(set(last)) > 1 else 0.0
        n = int(last[0] + (room - known[last[0]]) / slope) if slope > 0 else 2 * n if high is None else (low + high) // 2
        n = max(low + 1, min(n, 16 * max(low, 1) if high is None else high - 1))


def _parser() -> Parser:
    parser = Parser(prog="liger fit", description="Estimate what fits into a GPU's memory, and what each switch saves. Needs no GPU.", formatter_class=Formatter)
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: the GPU of this machine)")
    add("--memory-gb", type=float, metavar="X", help="memory of the GPU in 10^9 bytes (default: that of --gpu)")
    add("--seq", type=int, dest="length", default=argparse.SUPPRESS, metavar="N", help="the same as --length")
    add("--checkpointing", action="store_const", const="full", dest="gradient_checkpointing", default=argparse.SUPPRESS, help="--gradient-checkpointing full")
    add("--json", action="store_true", help="print JSON")
    defaults = TrainConfig(batch=1, length=2048)
    add_flags(parser, defaults, tuple(field.name for field in dataclasses.fields(TrainConfig) if field.name not in FIELDS))
    return parser


def main(argv: list[str]) -> int:
    a = vars(_parser().parse_args(argv))
    gpu, gigabytes, as_json = a.pop("gpu"), a.pop("memory_gb"), a.pop("json")
    if gpu is not None:
        one_of("GPU", gpu, GPUS)
    if gigabytes is not None and not gigabytes > 0:
        raise UserError(f"--memory-gb must be positive, got {gigabytes:g}")
    at_least(1, batch=a.get("batch"))
    if not a.get("model"):
        raise UserError(f"give --model, a config.json, a folder with one, a model on the hub, or one of {', '.join(MODELS)}")
    if a.get("optimizer") == "adamw-8bit" and "trainer" not in a:
        a["trainer"] = "hf"
    config = TrainConfig(**{"batch": 1, "length": 2048, **a})
    room, arch, name = _gpu(gpu, gigabytes)
    from liger_kernel.train.hub import configuration

    form = configuration(config.model or "")
    text = form.get_text_config()
    if getattr(text, "max_position_embeddings", config.length) < config.length:
        text.max_position_embeddings = config.length  # a longer row needs no other memory
    found = _found(Estimates(form, arch), config, room)
    print(json.dumps(found | {"gpu": name, "memory": int(room)}, indent=1) if as_json else _shown(found, config, room, name))
    return 0


def _gpu(name: str | None, gigabytes: float | None) -> tuple[float, str, str]:
    """Bytes, architecture and name of the GPU that is meant."""
    import torch

    if name is None and gigabytes is None and not torch.cuda.is_available():
        raise UserError(f"this machine has no GPU: give --gpu, one of {', '.join(GPUS)}, or --memory-gb")
    if name is None and gigabytes is None:
        from liger_kernel.ops._core.config import arch

        return torch.cuda.get_device_properties(0).total_memory, arch(), torch.cuda.get_device_name(0)
    meant = GPUS[name or "h100"]
    size = gigabytes or meant.gigabytes
    return size * 1e9, meant.arch, f"{name or 'a GPU'} with {size:g} GB"


def _found(of: Estimates, config: TrainConfig, room: float) -> dict[str, Any]:
    given = of.peak(config)
    chosen = recommended(of, config, room)
    best = chosen or config
    rows = largest(lambda n: of.total(dataclasses.replace(best, batch=n)), room)
    tokens = largest(lambda n: of.total(dataclasses.replace(best, length=n)), room, config.length, 256)
    return {
        "model": config.model,
        "peak": given.total,
        "parts": given.parts,
        "phase": given.phase,
        "fits": given.total <= room,
        "switches": [
            {"flags": flags(changes), "changes": changes, "costs": costs, "peak": peak, "saves": given.total - peak, "fits": peak <= room}
            for changes, costs, peak in switches(of, config)
        ],
        "recommended": None if chosen is None else {"peak": of.total(chosen), "command": command(chosen), "largest_batch": rows, "longest_row": tokens},
    }


def command(config: TrainConfig) -> str:
    """The run as a command line, without what has its default."""
    defaults = TrainConfig()
    told = {name: getattr(config, name) for name in FIELDS if getattr(config, name) != getattr(defaults, name)}
    if config.model in MODELS:
        told["model"] = "FOLDER"
    return f"liger train {flags(told | {'length': config.length, 'batch': config.batch})}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _shown(found: dict[str, Any], config: TrainConfig, room: float, gpu: str) -> str:
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in found["parts"].items() if size >= 5e6)
    lines = [("", "peak GB", "saves GB", "fits", "costs"), ("as given", _gb(found["peak"]), "", _yes(found["fits"]), "")]
    lines += [(s["flags"], _gb(s["peak"]), _gb(s["saves"]), _yes(s["fits"]), s["costs"]) for s in found["switches"]]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [f"{config.model}, {config.batch} x {config.length} tokens, on {gpu}", ""]
    text += ["  ".join((f"{a:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line, widths[1:])), last)).rstrip() for a, *line, last in lines]
    text += ["", f"as given, the peak is in '{found['phase']}': {parts} GB"]
    best = found["recommended"]
    if best is None:
        text += ["No combination of switches that trains the same model fits: choose fewer tokens a row, adapters (--lora), or several GPUs"]
    else:
        text += [f"fits, with {_gb(best['peak'])} GB: {best['command']}"]
        text += [f"with these switches, up to {best['largest_batch']:,} rows of {config.length:,} tokens fit, or rows of up to {best['longest_row']:,} tokens"]
    return "\n".join(text)


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def explained(form: Any, config: TrainConfig, room: float, arch: str) -> str:
    """What a run that ran out of memory says: the switches that it could turn on, and about how much each saves on one GPU."""
    of = Estimates(form, arch)
    given = of.total(config)
    found = [f"  {flags(changes):<40} saves about {_gb(given - peak)} GB; costs {costs}" for changes, costs, peak in switches(of, config)]
    need = f"out of memory: from its shapes, a step with {config.batch} x {config.length} tokens needs about {_gb(given)} of the GPU's {_gb(room)} GB"
    return "\n".join([f"{need}. Turn on:" if found else f"{need}, and no switch of liger train reduces that", *found])
