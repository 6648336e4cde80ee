"""``liger warmup``: compile the kernels that training a model will need, before it trains, with or without a GPU.

One training step runs on fake tensors, which have shapes and no data; each launch on its way becomes a compilation for the target, into Triton's cache
on disk (``TRITON_CACHE_DIR``). A training process with that cache compiles nothing: kernels depend on the model's sizes and dtypes, and neither on the
batch nor on the length of a sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import build, driver
from triton.runtime.jit import MockTensor

from liger_kernel.ops._core import config, operator
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.kernels import use_cache


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: Triton's backend and architecture, threads a warp, processors."""

    backend: str
    arch: int | str
    warp: int
    processors: int


# As ops/config.py names architectures (A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090, MI300X, MI355X)
TARGETS = {
    "sm80": Target("cuda", 80, 32, 108),
    "sm86": Target("cuda", 86, 32, 82),
    "sm89": Target("cuda", 89, 32, 128),
    "sm90": Target("cuda", 90, 32, 132),
    "sm100": Target("cuda", 100, 32, 148),
    "sm120": Target("cuda", 120, 32, 170),
    "gfx942": Target("hip", "gfx942", 64, 304),
    "gfx950": Target("hip", "gfx950", 64, 256),
}


class CompileOnly(DriverBase):
    """A device that can only be compiled for."""

    def __init__(self, target: Target):
        self.target = GPUTarget(target.backend, target.arch, target.warp)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable:
        raise RuntimeError("nothing runs here")


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Compile for ``arch``, a key of ``TARGETS``, instead of the GPU that is there, if one is."""
    before = driver._active
    driver.set_active(CompileOnly(TARGETS[arch]))
    try:
        with config.target(arch, TARGETS[arch].processors):
            yield
    finally:
        driver._active = before


class Mock(MockTensor):
    """A tensor as the compiler sees one: a dtype, and a pointer that is aligned or not."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype)
        self.offset = int(x.storage_offset()) * x.itemsize

    def data_ptr(self) -> int:  # type: ignore[override]
        return self.offset


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(step: Callable[[], Any], device: str) -> list[Launch]:
    """(kernel, arguments without data, constexprs and options) of the launches of ``step``, in which tensors on ``device`` have no data."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        found.append((kernel, tuple(Mock(a) if isinstance(a, Tensor) else a for a in args), meta))

    with operator.intercept_launches(record, device):
        step()
    return found


def distinct(found: list[Launch]) -> list[Launch]:
    """One launch of each kernel that has to be compiled."""
    key = lambda a: (a.dtype, a.data_ptr() % 16) if isinstance(a, Mock) else a
    return list({(kernel.fn, tuple(map(key, args)), tuple(meta.items())): (kernel, args, meta) for kernel, args, meta in found}.values())


# -- a model -------------------------------------------------------------------------------


def model_launches(
    config: Any, *, batch: int, seq: int, dtype: torch.dtype, autocast: torch.dtype | None, flags: dict[str, bool] | None = None
) -> list[Launch]:
    """The launches of training and evaluating a causal language model patched with ``flags``, its loss a mean, or a sum over a given number of tokens."""
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()

    def step() -> None:
        with FakeTensorMode():
            model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
            model.tie_weights()
            _apply_liger_kernel_to_instance(model, **(flags or {}))
            tokens = torch.zeros(batch, seq, dtype=torch.int64)
            arithmetic = torch.autocast("cpu", autocast, enabled=autocast is not None)
            for number in ({}, {"num_items_in_batch": torch.tensor(batch * seq)}):
                with arithmetic:
                    loss = model(input_ids=tokens, labels=tokens, **number).loss
                loss.backward()
            with arithmetic, torch.no_grad():
                model.eval()(input_ids=tokens, labels=tokens)

    return launches(step, "cpu")


def training_launches(config: TrainConfig, model_config: Any, precision: str) -> list[Launch]:
    """The launches of a run of ``config`` in ``precision``."""
    # FSDP2 casts weights, autocast arithmetic
    half = precision == "bf16" or (precision == "bf16-mixed" and config.parallel == "fsdp2")
    return model_launches(
        model_config,
        batch=config.batch,
        seq=config.length,
        dtype=torch.bfloat16 if half else torch.float32,
        autocast=torch.bfloat16 if precision == "bf16-mixed" and not half else None,
        flags=config.kernel_flags,
    )


def configuration(name: str) -> Any:
    """The transformers configuration of a ``config.json``, a folder that holds one, a model that `liger bench step` knows, or a model on the hub."""
    import transformers

    from liger_kernel.bench.models import MODELS, config_of

    if name in MODELS:
        return config_of(MODELS[name])
    path = Path(name)
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        if "model_type" not in values:
            raise UserError(f"{name} has no model_type")
        return transformers.AutoConfig.for_model(**values)
    return transformers.AutoConfig.from_pretrained(name)


def compile_launches(found: list[Launch]) -> tuple[int, int]:
    """Compile what is not in the cache; returns how many kernels were, and how many are needed."""
    compiled = 0

    def listen(*, cache_hit: bool, **_: Any) -> None:
        nonlocal compiled
        compiled += not cache_hit

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        needed = {kernel.hash: kernel for kernel in (kernel.warmup(*args, grid=(1,), **meta) for kernel, args, meta in distinct(found))}
    finally:
        knobs.compilation.listener = before
    if driver.active.get_current_target().backend == "cuda":
        build_launchers(needed.values())
    return compiled, len(needed)


def build_launchers(kernels: Iterable[Any]) -> None:
    """The C code by which Triton starts CUDA kernels, into its cache: one library of its own and, before Triton 3.7, one a kernel.

    At the first launch that would take a C compiler a quarter of a second each. They are built, not loaded; where NVIDIA's driver is not there, they are
    linked to one that has its functions' names. From Triton 3.8 on the cache has them by the folder of the driver, so that they are built where that is.
    """
    from triton.backends.nvidia import driver as nvidia

    load = build._load_module_from_path
    try:
        build._load_module_from_path = lambda name, path: Unloaded(name)
        with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
            source = Path(nvidia.dirname, "driver.c")
            by_folder = hasattr(build, "compile_so_from_file")
            if not torch.cuda.is_available():
                if by_folder:
                    raise RuntimeError("Triton's cache has it by the folder of NVIDIA's driver, which is not here")
                names = sorted(set(re.findall(r"\bcu[A-Z]\w*", source.read_text() + Path(nvidia.__file__).read_text())))
                compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
                command = [compiler, "-shared", "-w", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
                subprocess.run(command, input="".join(f"void {name}(void) {{}}\n" for name in names), text=True, check=True)
                knobs.nvidia.libcuda_path = folder
            to = dict(library_dirs=nvidia.library_dirs(), include_dirs=nvidia.include_dirs, libraries=nvidia.libraries)
            if by_folder:
                build.compile_so_from_file(str(source), "cuda_utils", **to)
            else:
                build.compile_module_from_src(source.read_text(), "cuda_utils", **to)
            for kernel in kernels if hasattr(nvidia, "make_launcher") else ():
                nvidia.CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:  # no C compiler, or a Triton that does this in another way: the kernels are there all the same
        print(f"what starts kernels is built at the first launches, not ahead of them: {' '.join(str(error).split())[:300]}", flush=True)
    finally:
        build._load_module_from_path = load
        for cached in (nvidia.libcuda_dirs, nvidia.library_dirs):
            cached.cache_clear()


class Unloaded(types.ModuleType):
    """A module that was built only."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *args: None


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: list[str]) -> int:
    from liger_kernel.bench.models import MODELS

    parser = argparse.ArgumentParser(prog="liger warmup", description="Compile the kernels that training a model needs into Triton's cache (TRITON_CACHE_DIR).")
    add = parser.add_argument
    add("--config", metavar="FILE", help="a config of liger train, of which model, batch, length, precision, parallel and kernels are taken")
    add("--model", metavar="NAME", help=f"a config.json, a folder with one, a model on the hub, or one of {', '.join(MODELS)}")
    add("--batch", type=int, default=1, help="rows of a step (default: 1)")
    add("--seq", type=int, default=2048, help="tokens a row (default: 2048)")
    add("--arch", choices=TARGETS, help="the GPU to compile for (default: the one that is there)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: bfloat16)")
    add("--autocast", choices=("bfloat16", "float16"), help="dtype of mixed precision; then --dtype float32 is usual")
    a = parser.parse_args(argv)
    if a.arch is None and not torch.cuda.is_available():
        raise UserError(f"no GPU here: say for which with --arch, one of {', '.join(TARGETS)}")
    if a.batch < 1 or a.seq < 1:
        raise UserError(f"--batch and --seq must be at least 1, got {a.batch} and {a.seq}")
    if operator.INTERPRET:
        raise UserError("TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled")
    if (a.config is None) == (a.model is None):
        raise UserError("give --model or --config")
    start = time.perf_counter()
    use_cache()
    with compiling_for(a.arch) if a.arch else contextlib.nullcontext():
        if a.config:
            train = TrainConfig.load(a.config)
            if train.model is None:
                raise UserError(f"{a.config} names no model: the vocabulary of a new one is not known before its data is read")
            found = training_launches(train, configuration(train.model), "bf16-mixed" if train.precision == "auto" else train.precision)
        else:
            autocast = DTYPES[a.autocast] if a.autocast else None
            found = model_launches(configuration(a.model), batch=a.batch, seq=a.seq, dtype=DTYPES[a.dtype], autocast=autocast)
        compiled, needed = compile_launches(found)
        arch = config.arch()
    print(f"{needed} kernels for {arch}: {compiled} compiled, {needed - compiled} were in {knobs.cache.dir}; {time.perf_counter() - start:.1f} s")
    return 0
