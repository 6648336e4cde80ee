"""``liger fit``: what will fit into the memory of a GPU, with which switches, before a run and
without a GPU; and what a run says that ran out of memory.

Estimates     peaks of a model, each simulated once
expected      the peak of a run, also in a process that is one of its ranks
switches      what each switch that is off saves
recommended   the first of some combinations that fits, the ones that cost least time first
largest       the most rows, or tokens of a row, that fit
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from liger_kernel.compile.architectures import OF_GPU, TARGETS
from liger_kernel.model_sizes import MODELS
from liger_kernel.train.config import Formatter, TrainConfig, UserError, add_flags, by_group, read_values
from liger_kernel.train.hub import configuration
from liger_kernel.train.mistakes import Parser, aligned, mistaken, one_of
from liger_kernel.train.redact import in_a_line

# torch and transformers are imported by what uses them: help and mistakes in flags answer before


# Memory in MiB, as the driver's own tools (nvidia-smi, rocm-smi) report it: more than the data
# sheet's number, which is in GiB or rounded
GPUS = {
    "a100-40": 40960,
    "a100-80": 81920,
    "b200": 183359,
    "h100": 81559,
    "h200": 143771,
    "l40s": 46068,
    "mi300x": 196592,
    "rtx4090": 24564,
}
# bytes of the GPU's memory that no program gets: those of CUDA and the driver
OWN = 10**9


class Switch(NamedTuple):
    """Fields of a run with which it needs less memory, and what that costs."""

    changes: dict[str, Any]
    costs: str


KERNELS = Switch({"kernels": "on"}, "nothing")
MLP = Switch({"rematerialise": "mlp"}, "time: two of the nine matrix products of each MLP are repeated")
CHECKPOINTING = Switch({"gradient_checkpointing": "full"}, "time: the forward of each layer is repeated")
OFFLOADING = Switch(
    {"activation_offloading": True}, "memory of the CPU, and time for copies; with checkpointing it copies a tenth"
)
TILED = Switch({"tiled_mlp": 0}, "time, if the weights of the MLPs are trained")
EIGHT_BITS = Switch({"optimizer": "adamw-8bit"}, "moments are rounded to 8 bits")
FSDP2 = Switch({"parallel": "fsdp2"}, "time: every rank gathers the weights of each layer, twice in a step")
ON_CPU = Switch(
    {"parallel": "fsdp2", "optimizer_on_cpu": True},
    "memory of the CPU, and time: weights are copied, and the CPU makes the optimizer's step",
)
IN_BACKWARD = Switch({"optimizer_in_backward": True, "grad_clip": 0}, "gradients are not clipped")
HALF = Switch({"precision": "bf16"}, "weights are rounded to 16 bits after each step")
LORA = Switch({"lora": 16}, "only adapters are trained")
QLORA = Switch(
    {"lora": 16, "quantize": "nf4"}, "the frozen weights are rounded to 4 bits, and only adapters are trained"
)
SWITCHES = (KERNELS, FSDP2, MLP, CHECKPOINTING, OFFLOADING, TILED, EIGHT_BITS, IN_BACKWARD, ON_CPU, HALF, LORA, QLORA)
# of the switches with which the same model is trained, up to rounding; those that cost least time
# first
COMBINATIONS = (
    (),
    (KERNELS,),
    (KERNELS, FSDP2),
    (KERNELS, FSDP2, MLP),
    (KERNELS, FSDP2, CHECKPOINTING),
    (KERNELS, FSDP2, CHECKPOINTING, OFFLOADING),
    (KERNELS, FSDP2, CHECKPOINTING, OFFLOADING, TILED),
    (KERNELS, FSDP2, CHECKPOINTING, OFFLOADING, TILED, ON_CPU),
)


def flags(changes: dict[str, Any]) -> str:
    """Fields of a run as flags of ``liger train``."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in changes.items()
    )


class Estimates:
    """Peaks of runs with one model on ``world`` GPUs of one kind. ``cpu_memory``: bytes of the
    CPU's memory that each may use."""

    def __init__(self, form: Any, arch: str, world: int = 1, cpu_memory: float = math.inf):
        self.form, self.arch, self.world, self.cpu_memory = form, arch, world, cpu_memory
        self._known: dict[tuple[Any, ...], Any] = {}

    def peak(self, config: TrainConfig) -> Any:
        """The ``simulated.Peak`` of a run. Raises ``UserError`` for one that cannot be trained,
        or simulated."""
        from liger_kernel.train.model import precision_of
        from liger_kernel.train.simulated import simulated

        key = dataclasses.astuple(config)
        if key not in self._known:
            # a model's own code may need values where there are only shapes
            with mistaken(f"a step of {self.form.model_type} cannot be simulated: "):
                precision = precision_of(config, gpu=True)
                self._known[key] = simulated(
                    self.form, config, precision, world=self.world, arch=self.arch, cpu_memory=self.cpu_memory
                )
        return self._known[key]

    def total(self, config: TrainConfig) -> int:
        """Bytes at the peak; more than any GPU has if what must be in the CPU's memory finds no
        place there."""
        peak = self.peak(config)
        return peak.total if sum(peak.cpu.values()) <= self.cpu_memory else sys.maxsize


def turned_on(config: TrainConfig, switch: Switch, world: int = 1) -> TrainConfig:
    """The run with a switch, which chooses neither a rank nor a trainer if one was chosen.
    Raises ``UserError`` if the run cannot have it."""
    stay = {name for name in ("lora", "trainer") if getattr(config, name) != getattr(TrainConfig, name)}
    # where weights are sharded already, or on one GPU, there is nothing to share
    if config.fully_sharded or (switch is FSDP2 and world == 1):
        stay.add("parallel")
    return dataclasses.replace(config, **{name: value for name, value in switch.changes.items() if name not in stay})


def switches(of: Estimates, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Each switch that is off and saves memory: what changes, what it costs, the peak with it in
    bytes, and what that saves. A switch that the run cannot have is left out."""
    given = of.peak(config).total
    halved = Switch({"batch": config.batch // 2, "accumulate": 2 * config.accumulate}, "time: products of fewer tokens")
    for switch in (*SWITCHES, *([halved] if config.batch % 2 == 0 else [])):
        with contextlib.suppress(UserError):
            other = turned_on(config, switch, of.world)
            if other != config and (peak := of.total(other)) < given:
                before, after = vars(config), vars(other)
                changes = {name: value for name, value in switch.changes.items() if before[name] != after[name]}
                yield dict(flags=flags(changes), changes=changes, costs=switch.costs, peak=peak, saves=given - peak)


def recommended(of: Estimates, config: TrainConfig, available: float) -> TrainConfig | None:
    """The first run that fits into so many bytes of those that train the same model: as given,
    with switches, and with fewer rows at a time."""
    for parts in range(1, config.batch + 1):
        if config.batch % parts == 0:
            fewer = dataclasses.replace(config, batch=config.batch // parts, accumulate=config.accumulate * parts)
            for combination in COMBINATIONS:
                with contextlib.suppress(UserError):
                    run = fewer
                    for switch in combination:
                        run = turned_on(run, switch, of.world)
                    if of.total(run) <= available:
                        return run
    return None


def largest(peak: Callable[[int], int], available: float, start: int = 1, unit: int = 1) -> int:
    """The largest multiple of ``unit`` whose ``peak`` is at most ``available``, to within 1/64; 0 if
    none is. Peaks are nearly linear in what is searched."""
    known: dict[int, int] = {}
    low, high, n = 0, None, max(1, start // unit)
    while high is None or high - low > max(1, low // 64):
        known[n] = peak(n * unit)
        low, high = (n, high) if known[n] <= available else (low, n)
        a, b = (sorted(known) * 2)[-2:] if high is None else (max(known.keys() - {high}, default=high), high)
        slope = (known[b] - known[a]) / (b - a) if a != b else 0.0
        meets = int(a + (available - known[a]) / slope) if slope > 0 else 2 * n if high is None else n // 2
        least, most = (
            (low + 1, 16 * (low + 1))
            if high is None
            else (low + max(1, (high - low) // 8), high - max(1, (high - low) // 8))
        )
        n = max(least, min(meets, most))
    return low * unit


def _parser() -> Parser:
    parser = Parser(
        prog="liger fit",
        description="Estimate what fits into a GPU's memory, and what each switch saves. Needs no GPU.",
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: the GPU of this machine)")
    add("--memory-gb", type=float, metavar="X", help="memory of the GPU in 10^9 bytes (default: that of --gpu)")
    add(
        "--cpu-memory-gb",
        type=float,
        metavar="X",
        help="free memory of the CPU for each GPU in 10^9 bytes (default: as much as a run can use)",
    )
    add("--config", metavar="FILE", help="YAML or JSON file of `liger train`; flags win over it")
    add(
        "--checkpointing",
        action="store_const",
        const="full",
        dest="gradient_checkpointing",
        default=argparse.SUPPRESS,
        help="--gradient-checkpointing full",
    )
    add("--json", action="store_true", help="print JSON")
    others = tuple(field.name for field in by_group() if not field.metadata["fit"])
    add_flags(parser, TrainConfig(batch=1, length=2048), others)
    return parser


def main(argv: list[str]) -> int:
    parser = _parser()
    a = vars(parser.parse_args(parser.as_ours(argv)))
    path, gpu, as_json = a.pop("config"), a.pop("gpu"), a.pop("json")
    gigabytes, of_cpu = a.pop("memory_gb"), a.pop("cpu_memory_gb")
    if gpu is not None:
        one_of("GPU", gpu, GPUS)
    for flag, given in (("memory-gb", gigabytes), ("cpu-memory-gb", of_cpu)):
        if given is not None and not 0 < given < math.inf:
            raise UserError(f"--{flag} must be positive and finite, got {given:g}")
    a = {"batch": 1, "length": 2048, **(read_values(path) if path else {}), **a}
    if not a.get("model"):
        raise UserError(
            f"give --model, a config.json, a folder with one, a model on the hub, or one of {', '.join(MODELS)}"
        )
    config = TrainConfig(**a)
    available, arch, name = _gpu(gpu, gigabytes)
    form = configuration(config.model or "", config.trust_remote_code)
    text = form.get_text_config()
    if getattr(text, "max_position_embeddings", config.length) < config.length:
        # a longer row needs no other memory
        text.max_position_embeddings = config.length
    from liger_kernel.memory.offload import RESERVE  # which copies leave free

    world, cpu_memory = world_of(config), math.inf if of_cpu is None else max(0.0, of_cpu * 1e9 - RESERVE)
    found = _found(Estimates(form, arch, world, cpu_memory), config, available)
    print(
        json.dumps(found | {"gpu": name, "gpus": world, "memory": int(available)}, indent=1)
        if as_json
        else _shown(found, config, available, name if world == 1 else f"each of {world} GPUs: {name}")
    )
    return 0


def world_of(config: TrainConfig) -> int:
    """The ranks of a run; of a range of machines, the fewest. Raises ``UserError`` if it cannot
    have so many."""
    from liger_kernel.train.ranks import check_ranks

    if config.nproc == 0:
        raise UserError("--nproc must be the number of GPUs of a machine, got 0")
    check_ranks(config, world := (config.nproc or 1) * config.machines[0])
    return world


def _gpu(name: str | None, gigabytes: float | None) -> tuple[float, str, str]:
    """Bytes, architecture and name of the GPU that is meant."""
    import torch

    if name is None and gigabytes is None and not torch.cuda.is_available():
        raise UserError(f"this machine has no GPU: give --gpu, one of {', '.join(GPUS)}, or --memory-gb")
    if name is None and gigabytes is None:
        return torch.cuda.get_device_properties(0).total_memory, _arch(), torch.cuda.get_device_name(0)
    meant = name or "h100"
    available = GPUS[meant] * 2**20 - OWN if gigabytes is None else gigabytes * 1e9
    return available, OF_GPU[meant.partition("-")[0]], f"{name or 'a GPU'} with {_gb(available)} GB"


def _arch() -> str:
    """The architecture of this machine's GPU, or of an H100."""
    from liger_kernel.ops._core.launch_config import arch

    return arch() if arch() in TARGETS else "sm90"


def _found(of: Estimates, config: TrainConfig, available: float) -> dict[str, Any]:
    given = of.peak(config)
    chosen = recommended(of, config, available)
    best = chosen or config
    rows = largest(lambda n: of.total(dataclasses.replace(best, batch=n)), available)
    tokens = largest(lambda n: of.total(dataclasses.replace(best, length=n)), available, config.length, 256)
    return {
        "model": config.model,
        "peak": given.total,
        "parts": given.parts,
        "phase": given.phase,
        "cpu": given.cpu,
        "fits": of.total(config) <= available,
        "switches": [each | {"fits": each["peak"] <= available} for each in switches(of, config)],
        "recommended": None
        if chosen is None
        else dict(
            peak=of.total(chosen),
            cpu=of.peak(chosen).cpu,
            command=command(chosen),
            batch=chosen.batch,
            largest_batch=rows,
            longest_row=tokens,
        ),
    }


def command(config: TrainConfig) -> str:
    """The run as a command line, without what has its default."""
    shown = {
        field.name: value
        for field in by_group()
        if (value := getattr(config, field.name)) != field.default or field.name in ("length", "batch")
    }
    return f"liger train {flags(shown | ({'model': 'FOLDER'} if config.model in MODELS else {}))}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _shown(found: dict[str, Any], config: TrainConfig, available: float, gpu: str) -> str:
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in found["parts"].items() if size >= 5e6)
    fits = {True: "yes", False: "no"}
    lines = [
        ["", "peak GB", "saves GB", "fits", "costs"],
        ["as given", _gb(found["peak"]), "", fits[found["fits"]], ""],
        *([s["flags"], _gb(s["peak"]), _gb(s["saves"]), fits[s["fits"]], s["costs"]] for s in found["switches"]),
    ]
    text = [f"{config.model}, {config.batch} x {config.length} tokens, on {gpu}", "", aligned(lines, {0, 4})]
    text += ["", f"as given, the peak is in '{found['phase']}': {parts} GB{_of_cpu(found['cpu'])}"]
    best = found["recommended"]
    if best is None:
        text += [
            "No combination of switches that trains the same model fits: choose fewer tokens a row, adapters "
            "(--lora), or several GPUs"
        ]
    else:
        text += [
            f"fits, with {_gb(best['peak'])} GB{_of_cpu(best['cpu'])}: {best['command']}",
            f"with these flags, up to {best['largest_batch']:,} x {config.length:,} tokens fit, or {best['batch']:,} "
            f"x {best['longest_row']:,}",
        ]
    return "\n".join(text)


def _of_cpu(needs: dict[str, int]) -> str:
    return "".join(f", and {_gb(size)} GB of the CPU's memory for {what}" for what, size in needs.items())


def expected(model: Any, config: TrainConfig, world: int, with_switches: bool = False) -> dict[str, Any]:
    """The "peak" of a run in bytes, its "parts" and its "phase"; ``with_switches``, also what
    ``switches`` has. Raises ``UserError`` where it is not known.

    ``model``: a name, or the configuration of a model that is there. A process of its own simulates
    several ranks, as this process may be one of them.
    """
    from liger_kernel.train.stored import method_of

    form = configuration(model) if isinstance(model, str) else copy.deepcopy(model)
    # else it describes how the weights were loaded, not the model
    if hasattr(form, "quantization_config") and (config.quantize or not method_of(form)):
        del form.quantization_config
    from liger_kernel.parallel import MODES

    question = form, config, world, _arch(), with_switches
    # one rank can be simulated here; for DeepSpeed this raises that it is not known
    if config.parallel not in MODES[1:]:
        return _expected(*question)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", f"from {__name__} import _answer; _answer()"]
    try:
        done = subprocess.run(command, input=pickle.dumps(question), env=environment, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"no other process could simulate it: {in_a_line(error)}") from error
    if done.returncode:
        raise UserError((done.stderr.decode().strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return pickle.loads(done.stdout)


def _expected(form: Any, config: TrainConfig, world: int, arch: str, with_switches: bool) -> dict[str, Any]:
    of = Estimates(form, arch, world)
    found = of.peak(config)
    more = {"switches": list(switches(of, config))} if with_switches else {}
    return {"peak": found.total, "parts": found.parts, "phase": found.phase} | more


def _answer() -> None:
    """Of the question on standard input, in a process that ``expected`` started."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = pickle.dumps(_expected(*pickle.load(sys.stdin.buffer)))
    except UserError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(answer)


def explained(model: Any, config: TrainConfig, available: float | None, world: int = 1) -> str:
    """What a run says that ran out of memory: the switches that it could turn on, and about how
    much each saves. It never raises. Arguments: ``expected``'s.

    ``available``: the bytes that the GPU has.
    """
    try:
        found = expected(model, config, world, with_switches=True)
        lines = [
            f"  {switch['flags']:<38} saves about {_gb(switch['saves'])} GB; costs {switch['costs']}"
            for switch in found["switches"]
        ]
    # the error that is explained counts, not this one
    except Exception as error:
        return f"out of memory; what each switch would save is not known: {in_a_line(error)}"
    have = f" of the GPU's {_gb(available)}" if available else ""
    ranks = f" on each of {world} ranks" if world > 1 else ""
    need = (
        f"out of memory: from its shapes, a step with {config.batch} x {config.length} tokens needs about "
        f"{_gb(found['peak'])}{have} GB{ranks}"
    )
    return "\n".join([f"{need}. Turn on:" if lines else f"{need}, and no switch of liger train reduces that", *lines])
