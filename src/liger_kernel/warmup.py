"""``liger warmup``: compile the kernels that training a model needs, before training, with or without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from liger_kernel.compile.ahead import compile_launches, model_launches
from liger_kernel.compile.targets import TARGETS, compiling_for
from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.ops._core import config, operator
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.kernels import training_launches, use_cache


def configuration(name: str) -> Any:
    """The transformers configuration of a ``config.json``, a folder that holds one, a model that `liger bench step` knows, or a model on the hub."""
    import transformers

    if name in MODELS:
        return config_of(MODELS[name])
    path = Path(name)
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        if "model_type" not in values:
            raise UserError(f"{name} has no model_type")
        return transformers.AutoConfig.for_model(**values)
    return transformers.AutoConfig.from_pretrained(name)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: list[str]) -> int:
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
