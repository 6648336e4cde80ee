"""Compile kernels in advance into Triton's cache on disk (``TRITON_CACHE_DIR``).

One training step runs on fake tensors, which have shapes and no data. Each kernel that it would
launch is compiled for the target. A training process with that cache compiles nothing, because
kernels depend on the model's sizes and dtypes, not on the batch size or the length of a sequence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime import build, driver

from liger_kernel.compile.launches import Launch, distinct, launches


def model_launches(
    config: Any,
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    flags: dict[str, bool] | None = None,
) -> list[Launch]:
    """The launches of training and evaluation of a causal language model patched with ``flags``.
    Its loss is a mean, or a sum over a given number of tokens."""
    import transformers

    from liger_kernel._private import FakeTensorMode
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).train()

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


def compile_launches(found: list[Launch]) -> tuple[int, int]:
    """Compile the kernels that the cache lacks. Returns how many were compiled, and how many are
    needed."""
    compiled = 0

    def listen(*, cache_hit: bool, **_: Any) -> None:
        nonlocal compiled
        compiled += not cache_hit

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        needed = {
            kernel.hash: kernel
            for kernel in (kernel.warmup(*args, grid=(1,), **meta) for kernel, args, meta in distinct(found))
        }
    finally:
        knobs.compilation.listener = before
    if driver.active.get_current_target().backend == "cuda":
        build_launchers(needed.values())
    return compiled, len(needed)


def build_launchers(kernels: Iterable[Any]) -> None:
    """Build the C code with which Triton starts CUDA kernels into its cache: one library for Triton
    and, before Triton 3.7, one for each kernel.

    Otherwise the first launch of each kernel would run a C compiler for 0.25 s. They are built but
    not loaded. Without NVIDIA's driver, they are linked to a library that has only the names of its
    functions. From Triton 3.8 on, the cache key has the driver's folder, so they are built only if
    it exists.
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
                options = ["-shared", "-w", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
                stubs = "".join(f"void {name}(void) {{}}\n" for name in names)
                subprocess.run([compiler, *options], input=stubs, text=True, check=True)
                knobs.nvidia.libcuda_path = folder
            to = dict(library_dirs=nvidia.library_dirs(), include_dirs=nvidia.include_dirs, libraries=nvidia.libraries)
            if by_folder:
                build.compile_so_from_file(str(source), "cuda_utils", **to)
            else:
                build.compile_module_from_src(source.read_text(), "cuda_utils", **to)
            for kernel in kernels if hasattr(nvidia, "make_launcher") else ():
                nvidia.CudaLauncher(kernel.src, kernel.metadata)
    # no C compiler, or a Triton that does this differently: the kernels are compiled nevertheless
    except Exception as error:
        print(
            "what starts kernels is built at the first launches, not ahead of them: "
            f"{' '.join(str(error).split())[:300]}",
            flush=True,
        )
    finally:
        build._load_module_from_path = load
        for cached in (nvidia.libcuda_dirs, nvidia.library_dirs):
            cached.cache_clear()


class Unloaded(types.ModuleType):
    """A module that was built but not loaded."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *args: None
