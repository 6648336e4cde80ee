"""``liger warmup``: compile the kernels that training a model needs, before training, with or
without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import time

from liger_kernel.compile.architectures import OF_GPU, TARGETS
from liger_kernel.model_sizes import MODELS
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.hub import configuration
from liger_kernel.train.mistakes import Parser, UserError, at_least

# torch, Triton and transformers are imported by what uses them: help and mistakes in flags answer
# before

DTYPES = ("bfloat16", "float16", "float32")


def read_flags(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="liger warmup",
        description="Compile the kernels that training a model needs into Triton's cache (TRITON_CACHE_DIR).",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a config of liger train")
    add(
        "--model",
        metavar="NAME",
        help=f"a config.json, a folder with one, a model on the hub, or one of {', '.join(MODELS)}",
    )
    add("--batch", default=1, help="rows of a step")
    add("--seq", default=2048, help="tokens a row")
    arch = "the GPU to compile for, or its name, such as h100 (default: the GPU of this machine)"
    add("--arch", choices=TARGETS, type=lambda name: OF_GPU.get(name, name), help=arch)
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    add("--autocast", choices=DTYPES[:2], help="dtype of mixed precision; then --dtype float32 is usual")
    a = parser.parse_args(argv)
    at_least(1, batch=a.batch, seq=a.seq)
    if (a.config is None) == (a.model is None):
        raise UserError(
            "give --model NAME or --config FILE" if a.model is None else "give --model or --config, not both"
        )
    return a


def main(argv: list[str]) -> int:
    a = read_flags(argv)
    train = TrainConfig.load(a.config) if a.config else None
    if train and train.model is None:
        raise UserError(
            f"{a.config} names no model: the vocabulary of a new model is not known before its data is read"
        )
    import torch
    from triton import knobs

    from liger_kernel.compile.ahead import compile_launches, model_launches
    from liger_kernel.compile.targets import compiling_for
    from liger_kernel.ops._core import launch_config, operator
    from liger_kernel.train import kernels

    model_config = configuration(train.model if train and train.model else a.model)
    if a.arch is None and not torch.cuda.is_available():
        raise UserError(
            f"this machine has no GPU: choose the GPU to compile for with --arch, one of {', '.join(TARGETS)}"
        )
    if operator.INTERPRET:
        raise UserError("TRITON_INTERPRET=1 is set, so Triton interprets kernels and compiles none: unset it")
    start = time.perf_counter()
    kernels.use_cache()
    dtype, autocast = getattr(torch, a.dtype), getattr(torch, a.autocast) if a.autocast else None
    with compiling_for(a.arch) if a.arch else contextlib.nullcontext():
        if train:
            found = kernels.training_launches(
                train, model_config, "bf16-mixed" if train.precision == "auto" else train.precision
            )
        else:
            found = model_launches(model_config, batch=a.batch, seq=a.seq, dtype=dtype, autocast=autocast)
        compiled, needed = compile_launches(found)
        arch = launch_config.arch()
    print(
        f"{needed} kernels for {arch}: {compiled} compiled, {needed - compiled} found in {knobs.cache.dir}; "
        f"{time.perf_counter() - start:.1f} s"
    )
    return 0
